"""The simulation against vLLM's own modules: `python -m tests.system.vllm_oracle`.

Our cache and vLLM's `KVCacheManager`, then our engine and vLLM's `Scheduler`, execute the same random histories
(`histories.py`). After every step these must be equal: cached tokens; requests admitted, refused, preempted and finished;
free blocks; and the events with all their fields. Hashes must be equal up to a one-to-one renaming that holds for a whole
history. The first difference of each case is printed with its seed and step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Final

from tests.system.vllm_oracle.comparing import Counts, DifferenceError
from tests.system.vllm_oracle.histories import CASES, CacheHistory, Case, EngineHistory

KINDS: Final[dict[str, type[CacheHistory | EngineHistory]]] = {"cache": CacheHistory, "engine": EngineHistory}


def run(kind: str, case: Case, seed: int, steps: int, counts: Counts) -> None:
    """Run one history. Raises `DifferenceError`, which says how to repeat the history."""
    history = KINDS[kind](case, seed, counts)
    for step in range(steps):
        try:
            history.step()
        except DifferenceError as error:
            raise DifferenceError(f"{kind}, {case.name}, seed {seed}, step {step} ({history.generator}): {error}") from None
    counts.histories += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare. Returns 0 when the two agree in every case, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.vllm_oracle", description=__doc__)
    parser.add_argument("--histories", type=int, default=200, help="histories of each kind and case")
    parser.add_argument("--steps", type=int, default=400, help="steps of each history")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first history; the next has the next number")
    parser.add_argument("--kind", choices=KINDS, help="only this kind")
    parser.add_argument("--only", help="cases with this word in their name")
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if options.only is None or options.only in case.name]
    if not chosen:
        parser.error(f"no case has this word in its name; the cases are {', '.join(case.name for case in CASES)}")
    differences = 0
    for kind in [options.kind] if options.kind else KINDS:
        for case in chosen:
            differences += _has_difference(kind, case, range(options.seed, options.seed + options.histories), options.steps)
    print(f"differences: {differences}" if differences else "no difference")
    return 1 if differences else 0


def _has_difference(kind: str, case: Case, seeds: range, steps: int) -> bool:
    """Return whether one of these histories had a difference; print the difference and what was compared."""
    counts, began, difference = Counts(), time.monotonic(), False
    for seed in seeds:
        try:
            run(kind, case, seed, steps, counts)
        except DifferenceError as error:
            print(error)
            difference = True
            break
    print(f"{kind}, {case.name}: {counts}; {time.monotonic() - began:.1f} s")
    return difference


if __name__ == "__main__":
    sys.exit(main())
