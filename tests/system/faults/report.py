"""What was seen, as a table and as a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from tests.system.faults.scenarios import CHAPTERS, SCENARIOS, Scenario
from tests.system.faults.sides import Side
from tests.system.faults.stage import Outcome, Sight, Verdict

SHORT: Final = 0.3
"""Seconds: less is not shown, so that two runs read the same."""

_HEAD: Final = """\
# Faults

For authors of routers: what an index service answers after something went wrong, and whether it says so.

`make faults` does each fault to `kvevents serve` and to NVIDIA Dynamo's standalone indexer, with real processes and sockets,
and writes this page: do not edit it. `tests/system/faults/scenarios.py` has the faults.

- Both services run with their defaults (ours with a state folder), each fault in fresh processes. Both receive the same
  requests: `POST /register`, `POST /query`.
- The engine is scripted: bytes of vLLM 0.33, one block of 16 tokens per batch except where stated. A *lost* batch was numbered
  and kept for replay, but not sent.
- A cell has the blocks that the service finds of those that engines hold, if they differ. What it says of a worker is the
  status in Dynamo's `/workers`, and the trust in our `/v1/sources`.
"""
_MEANINGS: Final = {
    Verdict.RIGHT: "every answer is what engines hold, and nothing is said against it",
    Verdict.DOUBTED: "the same, and the worker is not called exact, since nothing proves it",
    Verdict.REPORTED: "an answer is not what engines hold, and answers about the worker, or to its registration, say so",
    Verdict.LOGGED: "an answer is not what engines hold, and only the log, or a counter of the whole process, has something",
    Verdict.SILENT: "an answer is not what engines hold, and nothing says so",
}


class Row(NamedTuple):
    """One fault, with its outcome on each side."""

    scenario: Scenario
    outcomes: list[Outcome]


def document(rows: Sequence[Row], sides: Sequence[type[Side]]) -> str:
    """All of `docs/reference/faults.md`."""
    found = {row.scenario: row for row in rows}
    parts = [_HEAD, _summary(rows, sides)]
    for chapter, scenarios in CHAPTERS.items():
        parts += [f"\n## {chapter}\n", table([found[each] for each in scenarios], sides)]
    return "\n".join(parts) + "\n"


def table(rows: Sequence[Row], sides: Sequence[type[Side]]) -> str:
    """What became of some faults."""
    body = [[_number(row.scenario), row.scenario.fault, *map(cell, row.outcomes)] for row in rows]
    return _table(["", "fault", *(side.title for side in sides)], body)


def _number(scenario: Scenario) -> str:
    return str(SCENARIOS.index(scenario) + 1)


def _summary(rows: Sequence[Row], sides: Sequence[type[Side]]) -> str:
    counts = [Counter(row.outcomes[place].verdict for row in rows) for place in range(len(sides))]
    body = [[each.name.lower(), _MEANINGS[each], *(str(count[each]) for count in counts)] for each in Verdict]
    return _table([f"of {len(rows)} faults", "", *(side.title for side in sides)], body)


def _table(heads: list[str], body: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *body])


def cell(outcome: Outcome) -> str:
    """What became of one fault on one side."""
    sight = outcome.sight
    parts = [outcome.verdict.name.lower()]
    if sight.false or sight.found != sight.truth:
        parts.append(_blocks(sight))
    if outcome.unnoticed >= SHORT and not outcome.notes and outcome.verdict not in {Verdict.LOGGED, Verdict.SILENT}:
        parts.append(f"nothing reported for {outcome.unnoticed:.1f} s")
    return "; ".join([*parts, *outcome.notes]).replace("|", "\\|").replace("\n", " ")


def _blocks(sight: Sight) -> str:
    found = f"{sight.found} of {sight.truth} blocks" if sight.truth or not sight.false else ""
    absent = f"{sight.false} that are not there" if sight.false else ""
    return " and ".join(filter(None, [found, absent]))
