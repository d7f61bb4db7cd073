"""`python -m benchmarks`: every figure in one run, as a table of ratios."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Final

from benchmarks import figures as streams
from benchmarks import report
from benchmarks.indexing import figures as indexing
from benchmarks.service import figures as service
from benchmarks.service import wrk
from benchmarks.simulation import figures as simulation
from benchmarks.trials import Results, Trial, measure, rows
from tools import released
from tools.dynamo import interpreter

TRIALS: Final = (*streams.TRIALS, *indexing.TRIALS, *service.TRIALS, *simulation.TRIALS)
FIGURES: Final = (*streams.FIGURES, *indexing.FIGURES, *service.FIGURES, *simulation.FIGURES)


def main() -> int:
    """Run the chosen trials. Returns 0 when every judged figure was met, else 1."""
    options = _options()
    chosen = [trial for trial in TRIALS if options.only is None or any(word in trial.name for word in options.only)]
    if not chosen:
        sys.exit(f"no trial has such a name; there are {', '.join(trial.name for trial in TRIALS)}")
    _fetch(chosen)
    began, runs = time.monotonic(), options.runs or (3 if options.quick else 5)
    results = _measured(chosen, runs, options.quick)
    found = rows(FIGURES, results)
    if options.json:
        print(json.dumps({"machine": report.machine(), "rows": [row.plain() for row in found], "runs": results}))
    else:
        print(report.machine())
        print(f"medians of {runs} interleaved runs or fewer (least - most); benchmarks/README.md says how each is taken\n")
        print(report.table(found))
        missed = sum(row.met is False for row in found)
        print(f"\n{missed or 'none'} missed of {sum(row.met is not None for row in found)}; {time.monotonic() - began:.0f} s")
    return int(any(row.met is False for row in found))


def _fetch(chosen: list[Trial]) -> None:
    """Have the rivals of the chosen trials here before anything is measured."""
    if any(trial in streams.TRIALS for trial in chosen):
        for engine in (released.VLLM_NEWEST, released.SGLANG):
            released.extracted(engine, engine.module)
    if any(trial in service.TRIALS for trial in chosen):
        wrk.program()
    if any(trial in indexing.TRIALS + service.TRIALS for trial in chosen):
        interpreter()


def _measured(chosen: list[Trial], runs: int, quick: bool) -> Results:
    results: Results = {}
    for trial in chosen:
        print(f"{trial.name} ...", file=sys.stderr, flush=True)
        results[trial.name] = measure(trial, runs, quick)
    return results


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="trials whose name contains NAME; may be repeated")
    parser.add_argument("--quick", action="store_true", help="3 short runs: whether it works, not how fast it is")
    parser.add_argument("--runs", type=int, help="runs of each trial and contender (5)")
    parser.add_argument("--json", action="store_true", help="the same for a program, with what every run returned")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
