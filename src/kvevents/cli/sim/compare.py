"""`kvevents sim compare`: compares routing policies on the same requests, in virtual time, each in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from kvevents.cli.command import FAILED, INTERRUPTED, OK
from kvevents.cli.console import Console, Part, Span, duration, plural
from kvevents.cli.options import add_output, positive_int
from kvevents.cli.sim.workload_options import WorkloadOptions, add_fleet, add_workload, read_fleet, read_workload
from kvevents.errors import ConfigError, ExternalError, KVEventsError
from kvevents.routing import POLICIES
from kvevents.sim.fleet import Progress, simulate
from kvevents.sim.report import Cell, check_matplotlib, page, report_settings, rows, summary, traffic_text
from kvevents.sim.results import Comparison, PolicyResult
from kvevents.sim.settings import FleetSettings

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
    on_progress(policy, _end(result))
    return result


def _run_in_processes(
    policies: Sequence[str], settings: FleetSettings, workload: WorkloadOptions, jobs: int, on_progress: OnProgress
) -> dict[str, PolicyResult]:
    resource_tracker.ensure_running()  # now, since before Python 3.12 its start lets signals in that `_uninterrupted` keeps out
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
                on_progress(run.policy, _end(message) if isinstance(message, PolicyResult) else message)
    finally:
        for run in running.values():
            run.process.kill()
        for run in running.values():
            _close(run)
    return results


def _start(policy: str, settings: FleetSettings, workload: WorkloadOptions) -> _Run:
    ours, theirs = _SPAWNED.Pipe(duplex=False)
    process = _SPAWNED.Process(target=_work, args=(theirs, policy, settings, workload), daemon=True)
    with theirs, _uninterrupted():
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
    assert isinstance(message, (Progress, PolicyResult))  # noqa: S101 - the types that `_work` sends
    return message


def _close(run: _Run) -> None:
    run.process.join(_JOIN_SECONDS)
    if run.process.is_alive():
        run.process.kill()
        run.process.join()
    run.process.close()
    run.pipe.close()


def _work(pipe: Connection, policy: str, settings: FleetSettings, workload: WorkloadOptions) -> None:
    """Run a simulation in its process."""
    with suppress(BrokenPipeError):  # the parent process has ended
        try:
            answer: PolicyResult | KVEventsError = simulate(settings, policy, workload.generate(), progress=pipe.send)
        except KVEventsError as error:
            answer = error
        pipe.send(answer)


def _end(result: PolicyResult) -> Progress:
    return Progress(result.seconds, result.requests, result.finished + result.refused)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block SIGINT in a process that is started here. A terminal sends it to all, and this process ends the others."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        console.line(*_styled(line))
    console.line(summary(comparison))


def _styled(line: list[Cell]) -> list[Part]:
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
