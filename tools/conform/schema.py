"""`python -m tools.conform.schema`: writes `schema.json` of the scenarios from their types, with one line for each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from kvevents.conform.scenario import json_schema
from tools.released import CHECKOUT

SCHEMA: Final[Path] = CHECKOUT / "src" / "kvevents" / "conform" / "schema.json"


def text() -> str:
    """The content of the file."""
    schema = json_schema()
    types = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in schema.pop("$defs").items())
    head = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in schema.items())
    return f'{{\n{head} "$defs": {{\n{types}\n }}\n}}\n'


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
