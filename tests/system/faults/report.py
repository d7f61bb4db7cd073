"""What was seen, as a table and as a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from tests.system.faults.scenarios import CHAPTERS, SCENARIOS, Scenario
from tests.system.faults.sides import Side
from tests.system.faults.stage import Outcome, Verdict

SHORT: Final = 0.3
"""Seconds: less is not shown exactly, so that two runs read the same."""
LONGEST_LINE: Final = 160
"""Characters of a logged line that are shown."""

_HEAD: Final = """\
# Faults

What routers learn after something went wrong, from `kvevents serve` and from NVIDIA Dynamo's standalone indexer. `make faults`
does each fault to both, with real processes and sockets, and writes this file from what it saw: do not edit it. The faults are
in `tests/system/faults/scenarios.py`.

- Both services run with their defaults (ours with a state folder besides), each fault in fresh processes. They are registered
  with, and asked, in the same words: `POST /register`, `POST /query`.
- The engine is scripted and sends bytes of vLLM 0.33, one block of 16 tokens per batch except where stated. What it holds is
  the truth. A batch that is *lost* was numbered, is kept for replay, and was not sent; *replay works*: requests are answered.
- *Blocks* are those of the longest beginnings of the prompts that are asked for, of all workers. What follows is when the
  answers became right, or when they changed for the last time, and how long it was watched, from the last part of the fault on.
- In `code` stands what the service says of the worker: status and last error in Dynamo's `/workers`; trust and counts in
  `/v1/sources` of ours, whose trust is in every answer of `/v1/match` too. *Nothing reported for* is how long answers were
  wrong while all was said to be well.
- *Counted* is what Dynamo's `/metrics` counted as amiss: for the whole process, no worker is named.
"""
_MEANINGS: Final = {
    Verdict.RIGHT: "every answer is what engines hold, and nothing is said against it",
    Verdict.DOUBTED: "the same, and the worker is not called exact, since nothing proves it",
    Verdict.REPORTED: "an answer is not what engines hold, and answers about the worker, or to its registration, say so",
    Verdict.LOGGED: "the log, or a counter of the whole process, has something; the worker is `active`",
    Verdict.SILENT: "nothing anywhere",
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
    parts += ["\n## What was logged\n", "Warnings and errors since the fault, without times; numbers in them are `N`.\n"]
    parts.append(_logs(rows, sides))
    return "\n".join(parts) + "\n"


def table(rows: Sequence[Row], sides: Sequence[type[Side]]) -> str:
    """What became of some faults."""
    body = [[_number(row.scenario), row.scenario.fault, *map(cell, row.outcomes)] for row in rows]
    return _table(["", "fault", *(side.title for side in sides)], body)


def _number(scenario: Scenario) -> str:
    return str(SCENARIOS.index(scenario) + 1)


def _summary(rows: Sequence[Row], sides: Sequence[type[Side]]) -> str:
    counts = [Counter(row.outcomes[place].verdict for row in rows) for place in range(len(sides))]
    body = [[f"**{each.value}**: {_MEANINGS[each]}", *(str(count[each]) for count in counts)] for each in Verdict]
    return _table([f"of {len(rows)} faults", *(side.title for side in sides)], body)


def _table(heads: list[str], body: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *body])


def cell(outcome: Outcome) -> str:
    """What became of one fault on one side."""
    sight = outcome.sight
    parts = [f"**{outcome.verdict.value}**"]
    if sight.truth or sight.false or sight.right:
        parts.append(_blocks(outcome))
    parts.append(f"`{sight.words}`")
    if outcome.unnoticed >= SHORT and not outcome.notes and outcome.verdict not in {Verdict.LOGGED, Verdict.SILENT}:
        parts.append(f"nothing reported for {outcome.unnoticed:.1f} s")
    if alarms := outcome.alarms.total():
        parts.append(f"{alarms} {'warning' if alarms == 1 else 'warnings'} logged")
    if outcome.counted:
        parts.append("counted: " + ", ".join(f"{count} {name}" for name, count in sorted(outcome.counted.items())))
    return "; ".join([*parts, *outcome.notes]).replace("|", "\\|").replace("\n", " ")


def _blocks(outcome: Outcome) -> str:
    sight = outcome.sight
    found = f"{sight.found} of {sight.truth} blocks" if sight.truth or not sight.false else ""
    if sight.false:
        found = " and ".join(filter(None, [found, f"{sight.false} that are not there"]))
    if outcome.healed is not None:
        return f"{found} {_when(outcome.healed)}"
    return f"{found} {_when(outcome.moved)}, then nothing more in {outcome.watched:.0f} s"


def _when(seconds: float) -> str:
    return f"within {SHORT:g} s" if seconds < SHORT else f"after {seconds:.1f} s"


def _logs(rows: Sequence[Row], sides: Sequence[type[Side]]) -> str:
    """Each line once, with the faults after which it came."""
    places: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for side, outcome in zip(sides, row.outcomes, strict=True):
            for line, count in sorted(outcome.alarms.items()):
                times = f" ({count} times)" if count > 1 else ""
                places.setdefault((side.title, _short(line)), []).append(_number(row.scenario) + times)
    body = [[title, f"`{line}`", ", ".join(found)] for (title, line), found in sorted(places.items())]
    return _table(["of", "line", "after faults"], body)


def _short(line: str) -> str:
    line = line.replace("`", "'").replace("|", "\\|")
    return line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + "..."
