"""Documents say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


def test_the_examples_of_the_testing_guide_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/testing.md does what it says, one after the other."""
    monkeypatch.chdir(DOCS.parent)
    names: dict[str, object] = {}
    for block in python_blocks(DOCS / "testing.md"):
        exec(block, names)  # noqa: S102 - our own document


def test_the_examples_of_the_readme_are_python() -> None:
    """They compile, and import only names that exist."""
    for block in python_blocks(DOCS.parent / "README.md"):
        compile(block, "README.md", "exec")
        imports = [line for line in block.splitlines() if line.startswith(("from ", "import "))]
        exec("\n".join(imports), {})  # noqa: S102 - our own document


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
