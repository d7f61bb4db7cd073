"""The report of `make engines`, as text and as JSON.

`python -m tests.system.engines.report FILE...` joins the reports of several runs and prints the tables of
the site in `docs/developers/testing.md`; `--json FILE` writes them to one file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.system.engines.concurrent_clients import ConcurrentResult
from tests.system.engines.data_parallel import RanksResult
from tests.system.engines.failures import FailureResult
from tests.system.engines.judging import Tally
from tests.system.engines.sequential import SequentialResult
from tests.system.engines.timing import TimingResult

RESULTS: Final = Path(__file__).parent / "results.json"
"""The report that the site shows in `docs/developers/testing.md`."""


class Sequential(msgspec.Struct):
    """One sequential run."""

    publisher: str
    load_average: float
    """Load of the machine over one minute when the run began."""
    result: SequentialResult


class Concurrent(msgspec.Struct):
    """One concurrent run."""

    publisher: str
    load_average: float
    result: ConcurrentResult


class Report(msgspec.Struct):
    """Results of all parts."""

    engine: str
    started: str
    sequential: list[Sequential] = []
    concurrent: list[Concurrent] = []
    timings: list[TimingResult] = []
    failures: list[FailureResult] = []
    ranks: list[RanksResult] = []


def read(path: Path) -> Report:
    """Read a report. Raises `msgspec.ValidationError` for another kind of file."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


def encode(report: Report) -> bytes:
    """Return the report as readable JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def join(reports: Iterable[Report]) -> Report:
    """Return one report with the runs of all reports. Raises `ValueError` if their engines differ."""
    first, *others = reports
    for other in others:
        if other.engine != first.engine:
            raise ValueError(f"reports of {first.engine} and of {other.engine} are not joined")
        first.sequential += other.sequential
        first.concurrent += other.concurrent
        first.timings += other.timings
        first.failures += other.failures
        first.ranks += other.ranks
    return first


def wrong(report: Report) -> int:
    """Return the number of wrong predictions, of failures that the engine did not survive, and of faults of ranks.

    Two kinds of predictions do not count: those right after a reset without the plugin, since vLLM announces the reset of an
    idle engine with its next step; and those of concurrent clients, which may precede the events of the last answer.
    """
    requests = sum(each.result.requests.wrong for each in report.sequential)
    resets = sum(each.result.after_reset.wrong for each in report.sequential if "plugin" in each.publisher)
    ranks = sum(each.wrong + len(each.faults) for each in report.ranks)
    return requests + resets + ranks + sum(not each.is_survived for each in report.failures)


def summary(tally: Tally) -> str:
    """Return a tally as one line."""
    return (
        f"{tally.requests} requests, {tally.hits} with cached tokens: {tally.exact} EXACT and right, {tally.wrong} wrong, "
        f"{tally.unclaimed} not EXACT (of those {tally.unclaimed_equal} right), {tally.attested} attested"
    )


def text(report: Report, *, timings: bool = True) -> str:
    """Return the report as Markdown tables, with or without the durations, which vary with the machine."""
    tables = [f"{report.engine}, {report.started}"]
    if report.sequential:
        tables.append("\n".join(_sequential_rows(report)))
    if report.concurrent:
        tables.append("\n".join(_concurrent_rows(report)))
    if report.timings and timings:
        tables.append("\n".join(_timing_rows(report)))
    if report.failures:
        tables.append("\n".join(_failure_rows(report)))
    if report.ranks:
        tables.append("\n".join(_rank_rows(report)))
    return "\n\n".join(tables)


def _sequential_rows(report: Report) -> list[str]:
    lines = [
        "| publisher | scenario | seed | requests | hits | right | wrong | not EXACT | attested | after a reset | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in report.sequential:
        tally, reset = each.result.requests, each.result.after_reset
        lines.append(
            f"| {each.publisher} | {each.result.scenario} | {each.result.seed} | {tally.requests} | {tally.hits} "
            f"| {tally.exact} | {tally.wrong} | {tally.unclaimed} | {tally.attested} "
            f"| {reset.exact}, {reset.wrong}, {reset.unclaimed} "
            f"| {each.load_average:.1f} |"
        )
    return lines


def _concurrent_rows(report: Report) -> list[str]:
    lines = [
        "| publisher | clients | requests | right | share | too many | too few | not EXACT | match p50 / p99 ms | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in report.concurrent:
        result, tally = each.result, each.result.requests
        lines.append(
            f"| {each.publisher} | {result.clients} | {tally.requests} | {tally.exact} | {tally.exact / tally.requests:.2%} "
            f"| {result.more} | {result.fewer} | {tally.unclaimed} | {result.match_ms_p50} / {result.match_ms_p99} "
            f"| {each.load_average:.1f} |"
        )
    return lines


def _timing_rows(report: Report) -> list[str]:
    lines = [
        "| publisher | calls | publish() us p50 / p99 | its CPU us | steps | step ms p50 / p99 | its CPU ms | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in report.timings:
        publish, step = each.publish, each.step
        lines.append(
            f"| {each.publisher} | {publish.samples} | {publish.p50:.1f} / {publish.p99:.1f} "
            f"| {publish.cpu_p50:.1f} / {publish.cpu_p99:.1f} | {step.samples} | {step.p50 / 1e3:.2f} / {step.p99 / 1e3:.2f} "
            f"| {step.cpu_p50 / 1e3:.2f} / {step.cpu_p99 / 1e3:.2f} | {each.load_average:.1f} |"
        )
    return lines


def _failure_rows(report: Report) -> list[str]:
    lines = ["| fault | engine serves | events flow | log lines |", "|---|---|---|---|"]
    lines += [
        f"| {each.fault} | {_yes_or_no(each.serves)} | {_yes_or_no(each.has_events)} | {each.log_lines} |"
        for each in report.failures
    ]
    return lines


def _rank_rows(report: Report) -> list[str]:
    lines = ["| ranks | requests | wrong | blocks | attested | load |", "|---|---|---|---|---|---|"]
    for each in report.ranks:
        blocks = ", ".join(str(rank.blocks) for rank in each.ranks)
        attested, loads = (
            all(found) for found in zip(*((rank.is_attested, rank.has_running) for rank in each.ranks), strict=True)
        )
        lines.append(
            f"| {len(each.ranks)} | {each.requests} | {each.wrong} | {blocks} | {_yes_or_no(attested)} | {_yes_or_no(loads)} |"
        )
        lines += [f"\nwrong: {fault}" for fault in each.faults]
    return lines


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def main(arguments: Sequence[str] | None = None) -> int:
    """Join and print reports. Return 0 if no prediction was wrong, 1 if one was."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.engines.report", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="reports that `--json` has written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the joined report to a file")
    options = parser.parse_args(arguments)
    joined = join(map(read, options.files))
    if options.json is not None:
        options.json.write_bytes(encode(joined))
    print(text(joined))
    return 1 if wrong(joined) else 0


if __name__ == "__main__":
    sys.exit(main())
