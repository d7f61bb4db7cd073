"""`python -m tests.system.faults`: every fault, done to both sides; writes the results to `docs/reference/faults.md`."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tests.system.faults import report
from tests.system.faults.scenarios import SCENARIOS, Scenario
from tests.system.faults.sides import Dynamo, Ours, Side
from tests.system.faults.stage import Outcome, Stage
from tools.dynamo import interpreter
from tools.released import CHECKOUT

DOCUMENT: Final = CHECKOUT / "docs" / "reference" / "faults.md"
AT_ONCE: Final = 4
"""Scenarios that play at one time: nearly all of their time is waiting."""


def main() -> int:
    """Returns 0 when ours came to what it should, each time."""
    options = _options()
    chosen = [each for each in SCENARIOS if options.only is None or any(word in each.name for word in options.only)]
    if not chosen:
        sys.exit(f"no scenario has such a name; there are {', '.join(each.name for each in SCENARIOS)}")
    sides: list[type[Side]] = [Ours] if options.without_rival else [Dynamo, Ours]
    if Dynamo in sides:
        interpreter()
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        plays = [[pool.submit(play, scenario, side) for side in sides] for scenario in chosen]
        rows = [report.Row(scenario, [each.result() for each in row]) for scenario, row in zip(chosen, plays, strict=True)]
    print(report.table(rows, sides))
    if len(chosen) == len(SCENARIOS) and Dynamo in sides:
        DOCUMENT.write_text(report.document(rows, sides), encoding="utf-8")
        print(f"\nwritten to {DOCUMENT.relative_to(CHECKOUT)}")
    failed = [row.scenario for row in rows if row.outcomes[-1].verdict is not row.scenario.wanted]
    for scenario in failed:
        print(f"{scenario.name}: ours should have been {scenario.wanted.value}", file=sys.stderr)
    print(f"\n{len(rows)} faults in {time.monotonic() - began:.0f} s, {len(failed) or 'none'} not as it should be")
    return int(bool(failed))


def play(scenario: Scenario, kind: type[Side]) -> Outcome:
    """One scenario on a service of its own."""
    try:
        with kind() as side, Stage(side) as stage:
            scenario.play(stage)
            return stage.watch(scenario.patience)
    except Exception as error:
        error.add_note(f"while {scenario.name} was done to {kind.title}")
        raise


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system.faults", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="scenarios whose name contains NAME; may be repeated")
    parser.add_argument("--without-rival", action="store_true", help="our service alone; the document stays as it is")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
