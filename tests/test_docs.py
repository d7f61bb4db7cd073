"""Documents say what the code says."""

from __future__ import annotations

from pathlib import Path

from kvevents.stream import TRANSITIONS

DOCS = Path(__file__).parent.parent / "docs"


def test_the_picture_of_the_phases_is_the_table() -> None:
    """docs/stream.md shows exactly the transitions that the machine allows."""
    text = (DOCS / "stream.md").read_text()
    picture = text.split("```")[1].strip()
    table = "\n".join(
        f"{phase.name:<12} -> {after.name:<12} {why}" for phase, ways in TRANSITIONS.items() for after, why in ways.items()
    )
    assert picture == table
