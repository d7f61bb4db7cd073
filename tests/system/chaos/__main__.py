"""`make chaos`: rounds of faults, compared with the truth. A consumer that is EXACT and wrong ends the run."""

from __future__ import annotations

import argparse
import itertools
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tests.system.chaos import report
from tests.system.chaos.engine import RELEASES, Make
from tests.system.chaos.jobs import Run, play_rounds
from tests.system.chaos.judging import Outcome
from tests.system.chaos.parts import Disk
from tests.system.chaos.plan import known_names
from tools import released

SECONDS: Final = 150.0
BATCHES: Final = 10_000
JOBS: Final = 4
"""Concurrent rounds: much of each is waiting."""
PRINT_SECONDS: Final = 20.0


def main() -> int:
    """Return 0 if no consumer was wrong, 1 if one was, 2 if a round could not be played."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are ended, as after Ctrl-C
    run = Run(options.seed, options.batches, _list_makes(), tuple(options.only), tuple(options.without), _can_mount())
    began = time.monotonic()
    end = began + (options.hours * 3600 or options.seconds or (float("inf") if options.rounds else SECONDS))
    numbers: Iterable[int] = range(options.rounds) if options.rounds else itertools.count()
    if options.round is not None:
        numbers = [options.round] * (options.rounds or 1)
        print(run.plan(options.round).schedule(), flush=True)
    print(f"seed {run.seed}; `--seed {run.seed} --round N` plays one round again", flush=True)
    found: list[Outcome] = []
    failed: list[Outcome] = []
    printed_at = began
    for outcome in play_rounds(run, iter(numbers), options.jobs, lambda: time.monotonic() < end and not _has_wrong(failed)):
        found.append(outcome)
        if outcome.wrong or outcome.error:
            failed.append(outcome)
            _print_failure(run, outcome)
        if options.verbose or outcome.counted.get("divergences"):
            print(_format_outcome(outcome), flush=True)
        if time.monotonic() - printed_at > PRINT_SECONDS:
            printed_at = time.monotonic()
            print(f"{printed_at - began:.0f} s: {report.totals(found)}", flush=True)
    played_outcomes = [outcome for outcome in found if not outcome.error]
    print(
        "\n".join(
            [
                "",
                report.by_fault(played_outcomes),
                "",
                report.by_make(played_outcomes),
                "",
                report.losses(played_outcomes),
                "",
                report.totals(played_outcomes),
            ]
        )
    )
    if options.write:
        before = report.DOCUMENT.read_text(encoding="utf-8") if report.DOCUMENT.exists() else ""
        chosen = "".join(
            f", {preposition} {', '.join(names)}"
            for preposition, names in (("only", run.only), ("without", run.without))
            if names
        )
        played = f"Seed `{run.seed}`{chosen}, {(time.monotonic() - began) / 60:.0f} minutes"
        report.DOCUMENT.write_text(report.document(played_outcomes, played, before), encoding="utf-8")
    print(f"seed {run.seed}, {time.monotonic() - began:.0f} s, {len(found) - len(played_outcomes)} rounds could not be played")
    return 1 if any(outcome.wrong for outcome in failed) else 2 if failed else 0


def _has_wrong(failed: Sequence[Outcome]) -> bool:
    return any(outcome.wrong for outcome in failed)


def _print_failure(run: Run, outcome: Outcome) -> None:
    print(f"\n{'WRONG' if outcome.wrong else 'NOT PLAYED'}: {outcome.error}", file=sys.stderr)
    for result in outcome.results:
        if result.kind == "wrong":
            print(f"{result.consumer}: {result.detail}", file=sys.stderr)
    print(run.plan(outcome.number).schedule(), file=sys.stderr, flush=True)


def _format_outcome(outcome: Outcome) -> str:
    results = ", ".join(f"{each.consumer} {each.kind} {'+'.join(each.reasons)}".strip() for each in outcome.results)
    faults = ", ".join(outcome.faults)
    if outcome.counted.get("divergences"):
        faults += f"; {outcome.counted['divergences']} divergences"
    detail = "".join(f"\n    {each.consumer}: {each.detail}" for each in outcome.results if each.kind != "right")
    return f"{outcome.number}: {outcome.make} {outcome.batches} batches {outcome.seconds:.1f} s: {results} [{faults}]{detail}"


def _list_makes() -> list[Make]:
    """Return the makes of engines. Released classes without a wheel are left out, with a message."""
    makes: list[Make] = ["ours", "tape"]
    for name in ("vllm", "sglang"):
        release = RELEASES[name]
        if released.at_hand(release) is None:
            print(f"without {release.title}: `make bench` downloads its wheel, or KVEVENTS_WHEELS names a folder with it")
        else:
            makes.append("vllm" if name == "vllm" else "sglang")
    return makes


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        can_mount_disk = Disk.is_available(Path(folder) / "disk")
    if not can_mount_disk:
        print("without full disks: only root can mount a small file system")
    return can_mount_disk


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos", description=__doc__)
    parser.add_argument("--seed", default=secrets.token_hex(4), help="seed of the rounds (default: a new one)")
    parser.add_argument("--round", type=int, metavar="N", help="play this round alone, --rounds times, and print it")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="number of rounds")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help=f"time in which rounds begin (default: {SECONDS:g}; no limit with --rounds)",
    )
    parser.add_argument("--hours", type=float, default=0.0, help="the same time in hours")
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"batches of a round, about ({BATCHES})")
    parser.add_argument(
        "--only", action="append", default=[], metavar="FAULT", help="rounds that have this fault; may be repeated"
    )
    parser.add_argument("--without", action="append", default=[], metavar="FAULT", help="rounds that do not; may be repeated")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"concurrent rounds ({JOBS})")
    parser.add_argument("--write", action="store_true", help="write the results to docs/developers/chaos.md")
    parser.add_argument("--verbose", action="store_true", help="print a line for each round")
    options = parser.parse_args()
    unknown = [name for name in (*options.only, *options.without) if name not in known_names()]
    if unknown:
        sys.exit(f"unknown fault {unknown[0]!r}: expected one of {', '.join(known_names())}")
    return options


if __name__ == "__main__":
    sys.exit(main())
