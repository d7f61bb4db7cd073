"""Parses configuration values as the engines' pydantic models do in lax mode.

Strings must be strings. Numbers and flags may be written in several ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvevents.errors import ConfigError

_FLAGS: Final = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}


class Field(NamedTuple):
    """A field of a configuration. `parse` returns its value, or raises ValueError or TypeError with the expected value."""

    parse: Callable[[Any], Any]
    is_optional: bool = False
    """Whether None is allowed."""


def parse_str(value: Any) -> str:
    """Return the value if it is a string."""
    if not isinstance(value, str):
        raise TypeError("expected a string")
    return value


def parse_int(value: Any) -> int:
    """Return an integer for an integer, a whole float, a bool, or a string of digits."""
    if isinstance(value, str):
        try:
            value = float(value) if "." in value else int(value)
        except ValueError:
            raise ValueError("expected an integer") from None
    if not isinstance(value, int | float) or value != value // 1:
        raise ValueError("expected an integer")
    return int(value)


def parse_bool(value: Any) -> bool:
    """Return a bool for a bool, for 0 and 1, and for words such as `yes` and `off`."""
    flag = (
        value if isinstance(value, bool) else _FLAGS.get(str(value).lower()) if isinstance(value, str | int | float) else None
    )
    if flag is None and isinstance(value, float) and value in {0.0, 1.0}:
        flag = bool(value)
    if flag is None:
        raise ValueError("expected a boolean")
    return flag


def choice_parser(*choices: str) -> Callable[[Any], str]:
    """Return a parser that accepts only these strings."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"expected {' or '.join(map(repr, choices))}")
        choice: str = value
        return choice

    return parse


def parse_fields(owner: str, fields: Mapping[str, Field], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed values of all given fields that are known.

    Raises `ConfigError` with one line for each invalid value. `owner` is the name of the configuration.
    """
    result: dict[str, Any] = {}
    errors: list[str] = []
    for name, field in fields.items():
        if name not in values:
            continue
        value = values[name]
        try:
            result[name] = None if value is None and field.is_optional else field.parse(value)
        except (TypeError, ValueError, OverflowError) as error:
            errors.append(f"{name}: {error}, not {value!r}")
    if errors:
        raise ConfigError(f"{len(errors)} validation error(s) for {owner}\n" + "\n".join(errors))
    return result
