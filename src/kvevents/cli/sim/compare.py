"""`kvevents sim compare`: compare routing policies on the same requests, in virtual time."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from kvevents.cli.command import FAILED, INTERRUPTED, OK
from kvevents.cli.console import Console, Part, Span
from kvevents.cli.humanize import duration, plural
from kvevents.cli.options import add_output, positive_int
from kvevents.cli.sim.parallel import run_policies
from kvevents.cli.sim.workload_options import add_fleet, add_workload, read_fleet, read_workload
from kvevents.errors import ConfigError
from kvevents.routing import POLICIES
from kvevents.sim.fleet import Progress
from kvevents.sim.report import Cell, check_matplotlib, page, report_settings, rows, summary, traffic_text
from kvevents.sim.results import Comparison, PolicyResult

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
