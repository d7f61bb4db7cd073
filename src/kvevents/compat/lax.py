"""Values as the engines' pydantic models take them: strict about strings, lenient about how a number or a flag is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvevents.errors import ConfigError

_FLAGS: Final = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}


class Field(NamedTuple):
    """How one field is read; `read` raises ValueError or TypeError with what was expected."""

    read: Callable[[Any], Any]
    optional: bool = False


def read_str(value: Any) -> str:
    """A string and nothing else."""
    if not isinstance(value, str):
        raise TypeError("a valid string is expected")
    return value


def read_int(value: Any) -> int:
    """An integer, a whole float, a bool, or a string of digits."""
    if isinstance(value, str):
        try:
            value = float(value) if "." in value else int(value)
        except ValueError:
            raise ValueError("a valid integer is expected") from None
    if not isinstance(value, int | float) or value != value // 1:
        raise ValueError("a valid integer is expected")
    return int(value)


def read_bool(value: Any) -> bool:
    """A bool, 0 or 1, or one of the usual words."""
    found = (
        value if isinstance(value, bool) else _FLAGS.get(str(value).lower()) if isinstance(value, str | int | float) else None
    )
    if found is None and isinstance(value, float) and value in {0.0, 1.0}:
        found = bool(value)
    if found is None:
        raise ValueError("a valid boolean is expected")
    return found


def one_of(*choices: str) -> Callable[[Any], str]:
    """Reads one of a few words, spelled exactly."""

    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{' or '.join(map(repr, choices))} is expected")
        found: str = value
        return found

    return read


def read_fields(owner: str, fields: Mapping[str, Field], given: Mapping[str, Any]) -> dict[str, Any]:
    """Every given field that is known, as its type. Raises `ConfigError` with one line for each that cannot be read."""
    found: dict[str, Any] = {}
    faults: list[str] = []
    for name, field in fields.items():
        if name not in given:
            continue
        value = given[name]
        try:
            found[name] = None if value is None and field.optional else field.read(value)
        except (TypeError, ValueError, OverflowError) as error:
            faults.append(f"{name}: {error}, not {value!r}")
    if faults:
        raise ConfigError(f"{len(faults)} validation error(s) for {owner}\n" + "\n".join(faults))
    return found
