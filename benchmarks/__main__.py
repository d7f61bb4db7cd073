"""`python -m benchmarks`: every figure in one run, as a table of ratios."""

from __future__ import annotations

import argparse
import json
import sys
import time

from benchmarks import report
from benchmarks.figures import FIGURES, TRIALS
from benchmarks.service import wrk
from benchmarks.trials import Results, measure, rows
from tools import released


def main() -> int:
    """Run the chosen trials. Return 0 if every judged figure was reached, else 1."""
    options = _options()
    trials = [trial for trial in TRIALS if options.only is None or any(word in trial.name for word in options.only)]
    if not trials:
        sys.exit(f"no trial has such a name; there are {', '.join(trial.name for trial in TRIALS)}")
    _fetch_rivals({name for trial in trials for name in trial.contenders})
    began, runs = time.monotonic(), options.runs or (3 if options.quick else 5)
    results: Results = {}
    for trial in trials:
        print(f"{trial.name} ...", file=sys.stderr, flush=True)
        results[trial.name] = measure(trial, runs, options.quick)
    table = rows(FIGURES, results)
    if options.json:
        print(json.dumps({"machine": report.machine(), "rows": [row.plain() for row in table], "runs": results}))
    else:
        print(report.machine())
        print(f"medians of {runs} interleaved runs or fewer (least to most); benchmarks/README.md says how each is taken\n")
        print(report.table(table))
        missed_rows = sum(row.met is False for row in table)
        judged = sum(row.met is not None for row in table)
        print(f"\n{missed_rows or 'none'} missed of {judged}; {time.monotonic() - began:.0f} s")
    return int(any(row.met is False for row in table))


def _fetch_rivals(contenders: set[str]) -> None:
    """Download the rivals of the chosen trials before anything is measured, and verify that wrk is installed."""
    if contenders & {"vllm", "bare"}:
        released.extracted(released.VLLM_NEWEST, released.VLLM_NEWEST.module)
    if "sglang" in contenders:
        released.extracted(released.SGLANG, released.SGLANG.module)
    if "dynamo" in contenders:
        wrk.program()
        released.dynamo()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="trials whose name contains NAME; may be repeated")
    parser.add_argument("--quick", action="store_true", help="3 short runs: whether it works, not how fast it is")
    parser.add_argument("--runs", type=int, help="runs of each trial and contender (5)")
    parser.add_argument("--json", action="store_true", help="the same for a program, with what every run returned")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
