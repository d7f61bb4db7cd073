"""`kvevents sim compare`: compares routing policies on the same requests, in virtual time, each in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from kvevents.cli.command import FAILED, INTERRUPTED, OK
from kvevents.cli.console import Console, Part, Span
from kvevents.cli.options import add_output, number, positive_int
from kvevents.cli.settings_parser import SettingsParser, SettingsValues
from kvevents.errors import ConfigError, ExternalError, KVEventsError
from kvevents.routing import POLICIES
from kvevents.sim.report import check_matplotlib, page
from kvevents.sim.report_text import Cell, report_settings, rows, summary, traffic_text
from kvevents.sim.requests import Request
from kvevents.sim.results import Comparison, PolicyResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import Progress, simulate
from kvevents.sim.workloads import WORKLOADS, rescaled, workload
from kvevents.text_format import duration, plural

# --- options of the fleet and of its requests, which `kvevents sim run` has too

TRACE: Final = "trace"
"""The workload that is read from a file."""
DEFAULT_REQUESTS: Final = 1_000
"""Requests of a generated workload, which has no end."""


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A workload, and how much of it to use. It can be sent to another process. Raises `ConfigError` for a contradiction."""

    trace: str | None = None
    """File of the trace, instead of the packaged one."""
    workload: str = TRACE
    requests: int | None = None
    """Number of requests; None for the whole trace, or `DEFAULT_REQUESTS` generated ones."""
    rate: float | None = None
    """Requests per second; None for that of the workload."""
    trace_speed: float | None = None
    """Factor by which the times of a trace are divided."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trace_speed is not None and self.workload != TRACE:
            raise ConfigError(f"trace_speed needs a trace; use a rate for the requests per second of {self.workload}")
        if self.trace is not None and self.workload != TRACE:
            raise ConfigError(f"{self.trace} is a trace, and {self.workload} generates requests; use one of them")

    def generate(self) -> Iterator[Request]:
        """Return the requests, which are the same at each call. Raises `ConfigError`; iterating raises `WorkloadError`."""
        file = {} if self.trace is None else {"path": self.trace}
        found = workload(self.workload, requests=self._limit, seed=self.seed, rate=self.rate, **file)
        return found if self.trace_speed is None else rescaled(found, self.trace_speed)

    def count(self) -> int:
        """Return the number of requests, which reads and checks a trace. Raises `ConfigError` and `WorkloadError`."""
        if self.workload != TRACE:
            self.generate()  # checks the settings
            return self._limit
        found = sum(1 for _ in self.generate())
        if not found:
            raise ConfigError(f"{self.trace} has no requests; expected one JSON object per line, in Mooncake's format")
        return found

    @property
    def _limit(self) -> int:
        return self.requests or (sys.maxsize if self.workload == TRACE else DEFAULT_REQUESTS)


def positive(description: str) -> Callable[[str], float]:
    """Return a function that reads a number above 0; `description` is what it is, such as `a factor`."""
    return lambda text: number(text, f"{description} above 0")


def add_fleet(parser: ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Declare the settings of the fleet, except those that the command does not use."""
    settings = SettingsParser(FleetSettings, "sim", without=without)
    settings.add(parser.add_argument_group("fleet"), *settings.settings)
    settings.add_rest(parser, "TOML file with settings of the fleet")


def read_fleet(args: Namespace) -> FleetSettings:
    """Return the settings of the fleet. Raises `ConfigError`."""
    given: SettingsValues[FleetSettings] = args.settings.read(args)
    return given.settings()


def add_workload(parser: ArgumentParser) -> None:
    """Declare the requests that are sent to the fleet."""
    group = parser.add_argument_group("requests")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--trace",
        metavar="FILE",
        help="trace with one JSON object per line, in Mooncake's or our own format; compressed if its name ends in .gz",
    )
    source.add_argument(
        "--workload",
        choices=list(WORKLOADS),
        default=TRACE,
        help=f"kind of requests (default: %(default)s, which is the packaged sample unless --{TRACE} is given)",
    )
    group.add_argument(
        "--requests",
        type=positive_int,
        metavar="N",
        help=f"number of requests (default: all of a trace, or {DEFAULT_REQUESTS:,} generated ones)",
    )
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate",
        type=positive("a number of requests per second"),
        metavar="R",
        help="mean requests per second; a trace keeps its bursts (default: that of the workload)",
    )
    pace.add_argument(
        "--trace-speed",
        type=positive("a factor"),
        metavar="F",
        help="divide the times of a trace by F, so that 2 is twice as fast (default: 1)",
    )


def read_workload(args: Namespace) -> WorkloadOptions:
    """Return the workload of the options, with the seed of the fleet. Raises `ConfigError`."""
    named = {name: getattr(args, name) for name in WorkloadOptions.__struct_fields__ if name != "seed"}
    return WorkloadOptions(seed=read_fleet(args).seed, **named)


OnProgress: TypeAlias = Callable[[str, Progress], None]

_SPAWNED: Final = get_context("spawn")
"""A new process does not inherit the threads and locks of this one."""
_JOIN_SECONDS: Final = 5.0
"""Time of a process to end after its result; then it is killed."""


class WorkerError(ExternalError):
    """A process ended before its simulation did."""


class _Run(NamedTuple):
    policy: str
    process: Any
    pipe: Connection


def run_policies(
    policies: Sequence[str], settings: FleetSettings, workload: WorkloadOptions, *, jobs: int, on_progress: OnProgress
) -> list[PolicyResult]:
    """Return the results in the order of `policies`. At most `jobs` simulations run at a time.

    Raises the errors of `simulate`, and `WorkerError`. No process is left behind after an error.
    """
    if min(jobs, len(policies)) == 1:
        found = [_run_in_process(policy, settings, workload, on_progress) for policy in policies]
    else:
        results = _run_in_processes(policies, settings, workload, jobs, on_progress)
        found = [results[policy] for policy in policies]
    return found


def _run_in_process(policy: str, settings: FleetSettings, workload: WorkloadOptions, on_progress: OnProgress) -> PolicyResult:
    result = simulate(settings, policy, workload.generate(), progress=partial(on_progress, policy))
    on_progress(policy, _final_progress(result))
    return result


def _run_in_processes(
    policies: Sequence[str], settings: FleetSettings, workload: WorkloadOptions, jobs: int, on_progress: OnProgress
) -> dict[str, PolicyResult]:
    resource_tracker.ensure_running()  # before Python 3.12 its start unblocks signals that `_block_interrupts` blocks
    waiting, running, results = deque(policies), dict[Connection, _Run](), dict[str, PolicyResult]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = _start(waiting.popleft(), settings, workload)
                running[run.pipe] = run
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)  # noqa: S101 - nothing else was waited for
                run = running[pipe]
                message = _receive(run)
                if isinstance(message, PolicyResult):
                    results[run.policy] = message
                    _close(running.pop(pipe))
                on_progress(run.policy, _final_progress(message) if isinstance(message, PolicyResult) else message)
    finally:
        for run in running.values():
            run.process.kill()
        for run in running.values():
            _close(run)
    return results


def _start(policy: str, settings: FleetSettings, workload: WorkloadOptions) -> _Run:
    ours, theirs = _SPAWNED.Pipe(duplex=False)
    process = _SPAWNED.Process(target=_run_in_child, args=(theirs, policy, settings, workload), daemon=True)
    with theirs, _block_interrupts():
        process.start()
    return _Run(policy, process, ours)


def _receive(run: _Run) -> Progress | PolicyResult:
    """Return the next message of a process. Raises its error, and `WorkerError` if it has ended."""
    try:
        message = run.pipe.recv()
    except (EOFError, OSError) as error:
        run.process.join(_JOIN_SECONDS)
        code = run.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        raise WorkerError(
            f"the process for {run.policy} {how} before the simulation was done; if memory is short, use fewer --jobs"
        ) from error
    if isinstance(message, KVEventsError):
        raise message
    assert isinstance(message, (Progress, PolicyResult))  # noqa: S101 - the types that `_run_in_child` sends
    return message


def _close(run: _Run) -> None:
    run.process.join(_JOIN_SECONDS)
    if run.process.is_alive():
        run.process.kill()
        run.process.join()
    run.process.close()
    run.pipe.close()


def _run_in_child(pipe: Connection, policy: str, settings: FleetSettings, workload: WorkloadOptions) -> None:
    """Run a simulation in its process."""
    with suppress(BrokenPipeError):  # the parent process has ended
        try:
            answer: PolicyResult | KVEventsError = simulate(settings, policy, workload.generate(), progress=pipe.send)
        except KVEventsError as error:
            answer = error
        pipe.send(answer)


def _final_progress(result: PolicyResult) -> Progress:
    return Progress(result.seconds, result.requests, result.finished + result.refused)


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block SIGINT in a process that is started here. A terminal sends it to all, and this process ends the others."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- the command

DESCRIPTION: Final = (
    "Simulate a fleet under each routing policy, with the same requests and in virtual time, and compare the time to the first "
    "token, the hit rate and the balance. The cached tokens of every prompt are also compared with an index that is built from "
    "the events; exit code 1 means that they differed. The same options give the same output."
)
EXAMPLES: Final = """\
  kvevents sim compare
  kvevents sim compare --policy prefix-aware --policy round-robin --workload agents --rate 8
  kvevents sim compare --trace conversation_trace.jsonl.gz --trace-speed 2 --engines 16 --html report.html
  kvevents sim compare --requests 200 -o json | jq -c .policies[0].hit_rate
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "--policy", action="append", choices=list(POLICIES), help="simulate this policy; can be repeated (default: all)"
    )
    parser.add_argument(
        "-j", "--jobs", type=positive_int, metavar="N", help="simulations at the same time (default: the number of CPUs)"
    )
    add_output(parser, "one JSON object with all results")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with figures to FILE, which is replaced")
    add_workload(parser)
    add_fleet(parser)


def run(args: Namespace) -> int:
    """Simulate the fleet under each policy, and print the comparison. Raises `ConfigError` and other errors of ours."""
    console = Console()
    settings, workload = read_fleet(args), read_workload(args)
    policies = list(dict.fromkeys(args.policy or POLICIES))
    if args.html is not None:
        check_matplotlib()
        _check_writable(args.html)
    total, done = workload.count(), set[str]()
    try:
        with progress_bars(policies, total) as show:

            def on_progress(policy: str, progress: Progress) -> None:
                show(policy, progress)
                if progress.finished >= total:
                    done.add(policy)

            jobs = args.jobs or len(os.sched_getaffinity(0))
            results = run_policies(policies, settings, workload, jobs=jobs, on_progress=on_progress)
    except KeyboardInterrupt:
        console.note(f"interrupted after {len(done)} of {plural(len(policies), 'simulation')}; their results are discarded")
        return INTERRUPTED
    comparison = Comparison(
        settings=report_settings(settings, msgspec.structs.asdict(workload) | {"requests": total}), policies=results
    )
    print_comparison(comparison, console, json=args.output == "json")
    if args.html is not None:
        _write(args.html, page(comparison))
        console.note(f"wrote {args.html}")
    return FAILED if report_disagreements(results, console) else OK


def print_comparison(comparison: Comparison, console: Console, *, json: bool) -> None:
    """Print the table and a conclusion, or one JSON object."""
    if json:
        console.data(msgspec.json.encode(comparison))
        return
    console.note(Span(f"{traffic_text(comparison.settings)}; times in seconds, * is the best", "dim"))
    head, *lines = rows(comparison)
    console.line(Span("  ".join(cell.text for cell in head).rstrip(), "dim"))
    for line in lines:
        console.line(*_style_row(line))
    console.line(summary(comparison))


def _style_row(line: list[Cell]) -> list[Part]:
    name, *figures = line
    parts: list[Part] = [Span(name.text, "name")]
    for cell in figures:
        parts += ["  ", Span(cell.text, "good" if cell.best else "plain")]
    return parts


def report_disagreements(results: list[PolicyResult], console: Console) -> int:
    """Print examples of lookups for which index and engine disagree, which is a defect of kvevents. Return their number."""
    for result in results:
        for one in result.examples:
            console.note(
                Span(f"{result.policy}: {one.source}/{one.rank} ", "bad"),
                f"found {one.cached:,} of {one.prompt:,} tokens where the index says {one.indexed:,}"
                f" (incarnation {one.incarnation}, batch {one.seq}, after {plural(one.position, 'event')} of it)",
            )
    wrong = sum(result.disagreements for result in results)
    if wrong:
        console.note(
            Span("kvevents: ", "bad"),
            f"index and engines disagree on {plural(wrong, 'lookup')}; this is a defect of kvevents, please report it",
        )
    return wrong


def _check_writable(file: Path) -> None:
    """Raise `ConfigError` before the simulation if the report cannot be written after it."""
    if file.is_dir():
        raise ConfigError(f"cannot write {file}: it is a directory; use the name of a file")
    if not file.parent.is_dir():
        raise ConfigError(f"cannot write {file}: the directory {file.parent} does not exist")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


# --- progress


@contextmanager
def progress_bars(policies: Sequence[str], total: int) -> Iterator[Callable[[str, Progress], None]]:
    """Show a bar for each policy on stderr. The yielded function updates one. Needs a terminal and the package rich."""
    try:
        from rich import progress as rich  # noqa: PLC0415 - optional package
        from rich.console import Console  # noqa: PLC0415 - as above
    except ImportError:
        yield _ignore
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _ignore
        return
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TextColumn("{task.completed:,} / {task.total:,}"),
        rich.TextColumn("{task.fields[now]}"),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks = {policy: shown.add_task(policy, total=total, now="") for policy in policies}

        def update(policy: str, now: Progress) -> None:
            shown.update(tasks[policy], completed=now.finished, now=f"{duration(now.now)} of the fleet's time")

        yield update


def _ignore(_policy: str, _now: Progress) -> None:
    """Show nothing."""
