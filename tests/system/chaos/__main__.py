"""`make chaos`: rounds of faults against the truth. A consumer that says EXACT and is wrong ends the run."""

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
from tests.system.chaos.jobs import Run, outcomes
from tests.system.chaos.judging import Outcome
from tests.system.chaos.parts import Disk
from tests.system.chaos.plan import known
from tools import released

SECONDS: Final = 150.0
BATCHES: Final = 10_000
JOBS: Final = 4
"""Rounds side by side: much of each is waiting."""
PRINT_SECONDS: Final = 20.0


def main() -> int:
    """Returns 0 if no consumer was wrong, 1 if one was, 2 if a stage failed."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: stages are taken down
    run = Run(options.seed, options.batches, _makes(), tuple(options.only), tuple(options.without), _can_mount())
    began = time.monotonic()
    end = began + (options.hours * 3600 or options.seconds or (float("inf") if options.rounds else SECONDS))
    numbers: Iterable[int] = range(options.rounds) if options.rounds else itertools.count()
    if options.round is not None:
        numbers = [options.round] * (options.rounds or 1)
        print(run.plan(options.round).schedule(), flush=True)
    print(f"seed {run.seed}; `--seed {run.seed} --round N` plays one round again", flush=True)
    found: list[Outcome] = []
    bad: list[Outcome] = []
    printed_at = began
    for outcome in outcomes(run, iter(numbers), options.jobs, lambda: time.monotonic() < end and not _is_over(bad)):
        found.append(outcome)
        if outcome.wrong or outcome.error:
            bad.append(outcome)
            _accuse(run, outcome)
        if options.verbose or outcome.counted.get("divergences"):
            print(_line(outcome), flush=True)
        if time.monotonic() - printed_at > PRINT_SECONDS:
            printed_at = time.monotonic()
            print(f"{printed_at - began:.0f} s: {report.totals(found)}", flush=True)
    sound = [outcome for outcome in found if not outcome.error]
    print(
        "\n".join(["", report.by_fault(sound), "", report.by_make(sound), "", report.losses(sound), "", report.totals(sound)])
    )
    if options.write:
        before = report.DOCUMENT.read_text(encoding="utf-8") if report.DOCUMENT.exists() else ""
        chosen = "".join(
            f", {word} {', '.join(names)}" for word, names in (("only", run.only), ("without", run.without)) if names
        )
        played = f"Seed `{run.seed}`{chosen}, {(time.monotonic() - began) / 60:.0f} minutes"
        report.DOCUMENT.write_text(report.document(sound, played, before), encoding="utf-8")
    print(f"seed {run.seed}, {time.monotonic() - began:.0f} s, {len(found) - len(sound)} rounds fell over")
    return 1 if any(outcome.wrong for outcome in bad) else 2 if bad else 0


def _is_over(bad: Sequence[Outcome]) -> bool:
    return any(outcome.wrong for outcome in bad)


def _accuse(run: Run, outcome: Outcome) -> None:
    print(f"\n{'WRONG' if outcome.wrong else 'FELL OVER'}: {outcome.error}", file=sys.stderr)
    for verdict in outcome.verdicts:
        if verdict.kind == "wrong":
            print(f"{verdict.consumer}: {verdict.detail}", file=sys.stderr)
    print(run.plan(outcome.number).schedule(), file=sys.stderr, flush=True)


def _line(outcome: Outcome) -> str:
    verdicts = ", ".join(f"{each.consumer} {each.kind} {'+'.join(each.reasons)}".strip() for each in outcome.verdicts)
    faults = ", ".join(outcome.faults)
    if outcome.counted.get("divergences"):
        faults += f"; {outcome.counted['divergences']} divergences"
    detail = "".join(f"\n    {each.consumer}: {each.detail}" for each in outcome.verdicts if each.kind != "right")
    return f"{outcome.number}: {outcome.make} {outcome.batches} batches {outcome.seconds:.1f} s: {verdicts} [{faults}]{detail}"


def _makes() -> list[Make]:
    """Released classes are left out, with a word, where their wheels are not at hand."""
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
        can = Disk.can_be_had(Path(folder) / "disk")
    if not can:
        print("without full disks: they take root's right to mount a small file system")
    return can


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos", description=__doc__)
    parser.add_argument("--seed", default=secrets.token_hex(4), help="what rounds are drawn from (default: a new one)")
    parser.add_argument("--round", type=int, metavar="N", help="play this round alone, --rounds times, and print it")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="play so many rounds")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help=f"begin rounds for so long (default: {SECONDS:g}; no limit with --rounds)",
    )
    parser.add_argument("--hours", type=float, default=0.0, help="the same in hours")
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"batches of a round, about ({BATCHES})")
    parser.add_argument(
        "--only", action="append", default=[], metavar="FAULT", help="rounds that have this fault; may be repeated"
    )
    parser.add_argument("--without", action="append", default=[], metavar="FAULT", help="rounds that do not; may be repeated")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"rounds side by side ({JOBS})")
    parser.add_argument("--write", action="store_true", help="write docs/developers/chaos.md from what was seen")
    parser.add_argument("--verbose", action="store_true", help="a line for each round")
    options = parser.parse_args()
    unknown = [name for name in (*options.only, *options.without) if name not in known()]
    if unknown:
        sys.exit(f"nothing is called {unknown[0]!r}; there are {', '.join(known())}")
    return options


if __name__ == "__main__":
    sys.exit(main())
