"""Parses configuration values as the engines' pydantic models do in lax mode.

A text field accepts only a string. A number or a flag can be written in several ways.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from kvevents.errors import ConfigError
from kvevents.settings import types_in

_FLAG_VALUES: Final = {
    **dict.fromkeys(("1", "1.0", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "0.0", "off", "f", "false", "n", "no"), False),
}
_INTEGER: Final = re.compile(r"\s*[+-]?\d+(_\d+)*(\.0+)?\s*", re.ASCII)
_KIND_NAMES: Final = {str: "a string", int: "an integer", bool: "a boolean"}


def parse_fields(owner: str, fields: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed values of the known fields among `values`. `fields` maps each known name to its type.

    Raises `ConfigError` with one line for each invalid value. `owner` is the name of the configuration.
    """
    result: dict[str, Any] = {}
    errors: list[str] = []
    for name in [name for name in fields if name in values]:
        value = values[name]
        try:
            result[name] = _parse_value(value, fields[name])
        except msgspec.ValidationError:
            errors.append(f"{name}: expected {_describe_kind(fields[name])}, not {value!r}")
    if errors:
        raise ConfigError(f"{len(errors)} validation error(s) for {owner}\n" + "\n".join(errors))
    return result


def _parse_value(value: Any, kind: Any) -> Any:
    """Convert words such as `yes` to a bool, and whole floats, bools and texts such as ` 1_000 ` to an integer."""
    kinds = {*types_in(kind)}
    if bool in kinds:
        value = _FLAG_VALUES.get(str(value).lower(), value)
    elif int in kinds and isinstance(value, bool):
        value = int(value)
    elif int in kinds and isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value.partition(".")[0])
    return msgspec.convert(value, kind, strict=int not in kinds)


def _describe_kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return next(_KIND_NAMES[part] for part in types_in(kind) if part in _KIND_NAMES)
