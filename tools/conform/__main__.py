"""`python -m tools.conform`: writes the scenarios and their JSON Schema to `src/kvevents/conform/`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

from kvevents.conform.scenario import AnyScenario, json_schema
from tools.conform.losses import losses
from tools.conform.meanings import meanings
from tools.conform.payloads import payloads
from tools.conform.publishing import publishing
from tools.conform.registrations import registrations
from tools.conform.releases import releases
from tools.conform.restarts import restarts
from tools.released import CHECKOUT

FOLDER: Final = CHECKOUT / "src" / "kvevents" / "conform"


def scenarios() -> Iterator[AnyScenario]:
    """Every scenario, recorded again."""
    for script, play in chain(releases(), losses(), restarts(), payloads(), meanings(), registrations()):
        play(script)
        yield script.scenario()
    yield from publishing()


def text_of(scenario: AnyScenario) -> str:
    """A scenario as JSON, with one line for each step."""
    fields = msgspec.to_builtins(scenario)
    lines = []
    for name, value in fields.items():
        if name in {"steps", "engines"}:
            items = value if name == "steps" else [f'"{key}": {_line(each)}' for key, each in value.items()]
            body = ",\n".join(f"    {each if isinstance(each, str) else _line(each)}" for each in items)
            ends = "[]" if name == "steps" else "{}"
            lines.append(f'  "{name}": {ends[0]}\n{body}\n  {ends[1]}')
        else:
            lines.append(f'  "{name}": {_line(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def files() -> dict[Path, str]:
    """The text of every file."""
    found = {FOLDER / "scenarios" / f"{each.name}.json": text_of(each) for each in scenarios()}
    return found | {FOLDER / "schema.json": json.dumps(json_schema(), indent=1) + "\n"}


def main() -> int:
    """Write every file, and remove those of scenarios that are gone."""
    texts = files()
    for path in (FOLDER / "scenarios").glob("*.json"):
        if path not in texts:
            path.unlink()
    (FOLDER / "scenarios").mkdir(exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(texts) - 1} scenarios written to {FOLDER.relative_to(CHECKOUT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
