"""The option `--output` of all commands that print tables or records.

JSON is printed as one object per line, and YAML as one document per object, so that results can be printed one by one.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kvevents.cli.console import Console

FORMATS: Final = ("table", "wide", "json", "yaml")
DATA_FORMATS: Final = frozenset({"json", "yaml"})
"""Formats for programs: the command prints records only, without tables and notes."""
_ENCODER: Final = msgspec.json.Encoder(enc_hook=repr)
"""JSON encoder. A value that JSON cannot express, for example in an unknown field of a peer, becomes its `repr`."""
_PLAIN_KEY: Final = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null)$)[a-z_]+")
"""Matches keys that YAML reads as text even without quotation marks."""


def add_output(parser: ArgumentParser, record: str, *further: str) -> None:
    """Declare the format of the results. `further`: more formats of this command; `record`: what one JSON object contains."""
    text = f"table, wide (more columns, if there are any), json or yaml: {record}{''.join(f'; or {each}' for each in further)}"
    formats = (*FORMATS, *further)
    parser.add_argument("-o", "--output", choices=formats, default="table", metavar="FORMAT", help=f"{text} (default: table)")


def write_record(value: object, output: str, console: Console) -> bool:
    """If `output` is JSON or YAML, write a value and return True, else return False. Raises the errors of `Console.data`."""
    if output == "json":
        console.data(_ENCODER.encode(value))
    elif output == "yaml":
        console.data("\n".join(("---", *_yaml_lines(msgspec.json.decode(_ENCODER.encode(value))))).encode())
    return output in DATA_FORMATS


def _yaml_lines(value: Any) -> Iterator[str]:
    """Yield the lines of a value as YAML. Texts, numbers and empty values have the form of JSON, which is valid YAML."""
    if not isinstance(value, dict | list) or not value:
        yield msgspec.json.encode(value).decode()
    elif isinstance(value, list):
        for first, *rest in (list(_yaml_lines(each)) for each in value):
            yield from (f"- {first}", *(f"  {line}" for line in rest))
    else:
        for key, each in value.items():
            name = key if _PLAIN_KEY.fullmatch(key) else msgspec.json.encode(key).decode()
            first, *rest = _yaml_lines(each)
            is_nested = isinstance(each, dict | list) and each
            yield from (f"{name}:", f"  {first}", *(f"  {line}" for line in rest)) if is_nested else (f"{name}: {first}",)
