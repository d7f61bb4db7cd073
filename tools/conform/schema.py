"""`python -m tools.conform.schema`: writes `schema.json` of the scenarios from their types, with one line for each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from kvevents.conform.scenario import VERSION, AnyScenario
from tools.released import CHECKOUT

SCHEMA: Final[Path] = CHECKOUT / "src" / "kvevents" / "conform" / "schema.json"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a scenario."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:kvevents:conform:scenario:{VERSION}",
        "title": f"kvevents conformance scenario, version {VERSION}",
        **msgspec.json.schema(AnyScenario),
    }


def text() -> str:
    """The content of the file."""
    schema = json_schema()
    types = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in schema.pop("$defs").items())
    head = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in schema.items())
    return f'{{\n{head} "$defs": {{\n{types}\n }}\n}}\n'


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
