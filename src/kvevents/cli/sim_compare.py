"""`kvevents sim compare`: compares routing policies on the same requests, in virtual time, each in a process of its own."""

from __future__ import annotations

import os
import signal
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from kvevents.cli.command import FAILED, INTERRUPTED, OK
from kvevents.cli.console import Console, Span
from kvevents.cli.options import add_output, positive_int
from kvevents.cli.settings_parser import SettingsParser, SettingsValues
from kvevents.errors import ConfigError, ExternalError, KVEventsError
from kvevents.routing import POLICIES
from kvevents.sim.report import check_matplotlib, page
from kvevents.sim.report_text import report_settings, rows, summary, traffic_text
from kvevents.sim.results import Comparison, PolicyResult
from kvevents.sim.settings import FleetSettings, SimulationSettings
from kvevents.sim.simulated_fleet import Progress, simulate
from kvevents.text_format import duration, plural


def add_simulation(parser: ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Declare the settings of a fleet and its requests, except those that the command does not use."""
    settings = SettingsParser(SimulationSettings, "sim", without=without)
    requests = parser.add_argument_group("requests")
    settings.add(requests.add_mutually_exclusive_group(), "trace", "workload")
    settings.add(requests, "requests")
    settings.add(requests.add_mutually_exclusive_group(), "rate", "trace_speed")
    settings.add(parser.add_argument_group("fleet"), *(each for each in FleetSettings.__struct_fields__ if each not in without))
    settings.add_rest(parser, "TOML file with settings of the fleet and its requests")


def read_simulation(args: Namespace) -> SimulationSettings:
    """Return the settings of `add_simulation`. Raises `ConfigError`."""
    given: SettingsValues[SimulationSettings] = args.settings.read(args)
    return given.settings()


# --- processes

OnProgress: TypeAlias = Callable[[str, Progress], None]

_SPAWNED: Final = get_context("spawn")
"""A new process does not inherit the threads and locks of this one."""


class WorkerError(ExternalError):
    """A process ended before its simulation did."""


class _Run(NamedTuple):
    policy: str
    process: SpawnProcess
    pipe: Connection

    def end(self) -> None:
        """End the process, which has nothing to do after its result."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def run_policies(
    policies: Sequence[str], settings: SimulationSettings, *, jobs: int, on_progress: OnProgress
) -> list[PolicyResult]:
    """Return the results in the order of `policies`. At most `jobs` simulations run at a time, each in a process of its own.

    Raises the errors of `simulate`, and `WorkerError`. No process is left behind after an error.
    """
    if min(jobs, len(policies)) == 1:
        return [_simulate(settings, each, partial(on_progress, each)) for each in policies]
    resource_tracker.ensure_running()  # before Python 3.12 its start unblocks signals that `_block_interrupts` blocks
    waiting, running, results = deque(policies), dict[Any, _Run](), dict[str, PolicyResult]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = _start(waiting.popleft(), settings)
                running[run.pipe] = run
            for pipe in wait(list(running)):
                run = running[pipe]
                message = _receive(run)
                if isinstance(message, PolicyResult):
                    results[run.policy] = message
                    running.pop(pipe).end()
                else:
                    on_progress(run.policy, message)
    finally:
        for run in running.values():
            run.end()
    return [results[policy] for policy in policies]


def _start(policy: str, settings: SimulationSettings) -> _Run:
    ours, theirs = _SPAWNED.Pipe(duplex=False)
    process = _SPAWNED.Process(target=_run_in_child, args=(theirs, policy, settings), daemon=True)
    with theirs, _block_interrupts():
        process.start()
    return _Run(policy, process, ours)


def _receive(run: _Run) -> Progress | PolicyResult:
    """Return the next message of a process. Raises its error, and `WorkerError` if it has ended."""
    try:
        message: Progress | PolicyResult | KVEventsError = run.pipe.recv()
    except (EOFError, OSError) as error:
        run.process.join()
        raise WorkerError(
            f"the process for {run.policy} ended with exit code {run.process.exitcode} before its simulation was done; "
            "if memory is short, use fewer --jobs"
        ) from error
    if isinstance(message, KVEventsError):
        raise message
    return message


def _run_in_child(pipe: Connection, policy: str, settings: SimulationSettings) -> None:
    with suppress(BrokenPipeError):  # the parent process has ended
        try:
            pipe.send(_simulate(settings, policy, pipe.send))
        except KVEventsError as error:
            pipe.send(error)


def _simulate(settings: SimulationSettings, policy: str, report: Callable[[Progress], None]) -> PolicyResult:
    result = simulate(settings, policy, settings.generate(), progress=report)
    report(Progress(result.seconds, result.requests, result.finished + result.refused))
    return result


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
    add_simulation(parser)


def run(args: Namespace) -> int:
    """Simulate the fleet under each policy, and print the comparison. Raises `ConfigError` and other errors of ours."""
    console = Console()
    settings = read_simulation(args)
    policies = list(dict.fromkeys(args.policy or POLICIES))
    if args.html is not None:
        check_matplotlib()
        _check_writable(args.html)
    total, done = settings.count(), set[str]()
    try:
        with progress_bars(policies, total) as show:

            def on_progress(policy: str, progress: Progress) -> None:
                show(policy, progress)
                if progress.finished >= total:
                    done.add(policy)

            jobs = args.jobs or len(os.sched_getaffinity(0))
            results = run_policies(policies, settings, jobs=jobs, on_progress=on_progress)
    except KeyboardInterrupt:
        console.note(f"interrupted after {len(done)} of {plural(len(policies), 'simulation')}; their results are discarded")
        return INTERRUPTED
    comparison = Comparison(settings=report_settings(settings, requests=total), policies=results)
    print_comparison(comparison, console, json=args.output == "json")
    if args.html is not None:
        write_text(args.html, page(comparison))
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
    for name, *figures in lines:
        console.line(Span(name.text, "name"), *(Span(f"  {cell.text}", "good" if cell.best else "plain") for cell in figures))
    console.line(summary(comparison))


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


def write_text(file: Path, text: str) -> None:
    """Write a file. Raises `ConfigError`."""
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
        yield lambda _policy, _now: None
        return
    console = Console(stderr=True)
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TextColumn("{task.completed:,} / {task.total:,}"),
        rich.TextColumn("{task.fields[now]}"),
    )
    with rich.Progress(*columns, console=console, transient=True, disable=not console.is_interactive) as shown:
        tasks = {policy: shown.add_task(policy, total=total, now="") for policy in policies}

        def update(policy: str, now: Progress) -> None:
            shown.update(tasks[policy], completed=now.finished, now=f"{duration(now.now)} of the fleet's time")

        yield update
