"""`python -m tests.system.plane_chaos`: rounds of faults in replicas, bridges, engines and NATS servers."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Final

from tests.system.chaos.jobs import play_rounds
from tests.system.plane_chaos import report
from tests.system.plane_chaos.judging import Outcome
from tests.system.plane_chaos.plan import draw_plan, known_names
from tests.system.plane_chaos.rounds import Run

ROUNDS: Final = 20
JOBS: Final = 2
"""Concurrent rounds: much of each is waiting."""


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if every round ended right, 1 if something was wrong, 2 if a round was not played or a replica not EXACT."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are ended, as after Ctrl-C
    if options.logs:
        Path(options.logs).mkdir(parents=True, exist_ok=True)
    run = Run(options.seed, tuple(options.only), tuple(options.without), options.logs)
    numbers = range(options.first, options.first + options.rounds)
    if options.round is not None:
        numbers = range(options.round, options.round + 1)
        print(draw_plan(run.seed, options.round, run.only, run.without).schedule(), flush=True)
    print(f"seed {run.seed}; `--seed {run.seed} --round N` plays one round again", flush=True)
    began = time.monotonic()
    found: list[Outcome] = []
    for outcome in play_rounds(run, iter(numbers), options.jobs, lambda: True):
        found.append(outcome)
        print(_format_outcome(outcome), flush=True)
        if not outcome.right:
            _print_failure(run, outcome)
    print("\n".join(["", report.by_fault(found), "", report.totals(found)]))
    if options.write:
        played = f"Seed `{run.seed}`, {(time.monotonic() - began) / 60:.0f} minutes"
        report.DOCUMENT.write_text(report.document(found, played), encoding="utf-8")
    return 1 if any(each.wrong for each in found) else 2 if not all(each.right for each in found) else 0


def _format_outcome(outcome: Outcome) -> str:
    kinds = [replica_result.kind for replica_result in outcome.results]
    result = f"{kinds.count('right')} of {len(kinds)} right, settled in {outcome.settled:.1f} s" if kinds else outcome.error
    return (
        f"{outcome.number}: {outcome.batches} batches, {outcome.seconds:.1f} s: {result}, {outcome.lost} lost, "
        f"[{', '.join(outcome.faults)}]"
    )


def _print_failure(run: Run, outcome: Outcome) -> None:
    print(f"\n{'WRONG' if outcome.wrong else 'NOT PLAYED' if outcome.error else 'NOT EXACT'}: {outcome.error}", file=sys.stderr)
    lines = [f"{each.replica} {each.engine} {each.kind}: {each.detail}" for each in outcome.results if each.kind != "right"]
    lines += [*outcome.flaws, f"reported: {outcome.reported}", f"counted: {dict(outcome.counted)}"]
    lines.append(draw_plan(run.seed, outcome.number, run.only, run.without).schedule())
    print("\n".join(lines), file=sys.stderr, flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system.plane_chaos", description=__doc__)
    parser.add_argument("--seed", default=secrets.token_hex(4), help="seed of the rounds (default: a new one)")
    parser.add_argument("--round", type=int, metavar="N", help="play this round alone, and print it")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"number of rounds ({ROUNDS})")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first round (0)")
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help="rounds with this fault; may be repeated")
    parser.add_argument("--without", action="append", default=[], metavar="FAULT", help="rounds without it; may be repeated")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"concurrent rounds ({JOBS})")
    parser.add_argument("--logs", default="", metavar="FOLDER", help="folder for the logs of bridges and replicas")
    parser.add_argument("--write", action="store_true", help="write the results to docs/developers/plane-chaos.md")
    options = parser.parse_args(arguments)
    unknown = [name for name in (*options.only, *options.without) if name not in known_names()]
    if unknown:
        parser.error(f"unknown fault {unknown[0]!r}: expected one of {', '.join(known_names())}")
    return options


if __name__ == "__main__":
    sys.exit(main())
