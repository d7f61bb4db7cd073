"""Settings as structs: the units and ranges of fields, and the conversion of TOML tables to a struct.

A settings struct is the only definition of its settings: names, types, units, defaults and help texts (the docstrings below the
fields). `kvevents.cli.settings_parser` derives options and environment variables from the struct.

`build_decoder_now` decorates every struct that is decoded, not only settings: it makes decoding safe in several threads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct

from kvevents.errors import ConfigError, reason_of
from kvevents.events import MAX_HEARTBEAT_SECONDS

StructType = TypeVar("StructType", bound=type[msgspec.Struct])


def build_decoder_now(kind: StructType) -> StructType:
    """Build msgspec's type information of a struct when its module is imported, not at its first use.

    Each struct that is passed to `decode` or `convert` needs this decorator. msgspec (up to 0.22) makes type information
    visible to other threads before the information is complete: two threads that decode a struct for the first time can crash
    the process.
    """
    msgspec.json.Decoder(kind)
    return kind


T = TypeVar("T", bound=Struct)


class Unit(Enum):
    """The unit of a number, or the kind of a text. The value of a member is its name in help texts."""

    SECONDS = "S"
    BYTES = "SIZE"
    PORT = "PORT"
    ENDPOINT = "ENDPOINT"
    URL = "URL"
    HOST = "HOST"
    FILE = "FILE"
    KEY = "FILE|KEY"
    FOLDER = "DIR"
    NAME = "NAME"
    SUBJECT = "SUBJECT"
    SECRET = "SECRET"  # noqa: S105 - a name in help texts, not a secret
    """A secret has no option, since all users of a machine can read arguments."""


class Range(NamedTuple):
    """The finite numbers that a field accepts."""

    least: float = 0.0
    most: float = math.inf
    is_open: bool = False
    """Whether `least` itself is excluded."""

    def holds(self, value: float) -> bool:
        """Whether a number is in the range."""
        return math.isfinite(value) and self.least <= value <= self.most and not (self.is_open and value == self.least)

    def __str__(self) -> str:
        first = f"{'above' if self.is_open else 'at least'} {self.least:.15g}"
        if self.most == math.inf:
            return first
        return f"{first} and at most {self.most:.15g}" if self.is_open else f"from {self.least:.15g} to {self.most:.15g}"


Positive: TypeAlias = Annotated[int, Range(1)]
Count: TypeAlias = Annotated[int, Range()]
Pause: TypeAlias = Annotated[float, Unit.SECONDS, Range()]
Seconds: TypeAlias = Annotated[float, Unit.SECONDS, Range(is_open=True)]
Bytes: TypeAlias = Annotated[int, Unit.BYTES, Range(1)]
Port: TypeAlias = Annotated[int, Unit.PORT, Range(0, 65535)]
Endpoint: TypeAlias = Annotated[str, Unit.ENDPOINT]
Url: TypeAlias = Annotated[str, Unit.URL]
Host: TypeAlias = Annotated[str, Unit.HOST]
FilePath: TypeAlias = Annotated[str, Unit.FILE]
PublicKey: TypeAlias = Annotated[str, Unit.KEY]
FolderPath: TypeAlias = Annotated[str, Unit.FOLDER]
Name: TypeAlias = Annotated[str, Unit.NAME]
Subject: TypeAlias = Annotated[str, Unit.SUBJECT]
Secret: TypeAlias = Annotated[str, Unit.SECRET]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of settings. Raises `ConfigError`, which names the field, for a number outside the range of its type."""

    def __post_init__(self) -> None:
        for name, limits, types in _ranges(type(self)):
            value = getattr(self, name)
            if type(value) not in types:
                raise ConfigError(f"{name} is {value!r}, not a number; it must be {limits}")
            if value is not None and not limits.holds(value):
                raise ConfigError(f"{name} is {value}; it must be {limits}")


class _RangedField(NamedTuple):
    name: str
    limits: Range
    types: frozenset[type]
    """Types of the field's values. An integer is a valid value of a float field."""


@cache
def _ranges(kind: type[Struct]) -> list[_RangedField]:
    return [
        _RangedField(field.name, part, frozenset({*types_in(field.type), *([int] if float in types_in(field.type) else [])}))
        for field in msgspec.structs.fields(kind)
        for part in parts_of(field.type)
        if isinstance(part, Range)
    ]


class SettingFault(NamedTuple):
    """An error in the tables of a file."""

    place: str
    """Path of the table or field, such as `sources[0].curve`; empty for the outermost table."""
    sentence: str
    missing: str | None = None
    """Name of a required field that is missing."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raise `ConfigError` if the file cannot be read."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document. Raise `ValueError` with the line of the error."""
    import tomllib  # noqa: PLC0415 - needed only by programs with a settings file

    return tomllib.loads(text.removeprefix("\ufeff"))  # Editors of Windows write a byte order mark.


def convert(data: Any, kind: type[T], origin: str) -> T:
    """Return checked settings. Raise `ConfigError`, which names `origin`, the field and the expected type."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {with_path(fault_of(error, kind), kind)}") from error


def with_path(fault: SettingFault, kind: type[Struct]) -> str:
    """Return the sentence with the path of the table. If the sentence begins with a field, the path is joined to the field."""
    if not fault.place:
        return fault.sentence
    table = _table_at(fault.place, kind)
    begins_with_field = table is not None and fault.sentence.partition(" ")[0] in table.__struct_fields__
    return f"{fault.place}{'.' if begins_with_field else ': '}{fault.sentence}"


def fault_of(error: msgspec.ValidationError, kind: type[Struct]) -> SettingFault:
    """Return the error that msgspec found, with a suggestion for an unknown field, and the choices for an invalid one."""
    sentence, _, place = str(error).replace(" - at `key` in `$", " - at `$").partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    if sentence.startswith("Invalid enum value") and (choices := _choices_at(place, kind)):
        return SettingFault(place, f"{sentence}; expected {', '.join(choices)}")
    missing_field = re.fullmatch(r"Object missing required field `(.*)`", sentence)
    if missing_field is not None:
        return SettingFault(place, f"missing field {missing_field[1]!r}", missing_field[1])
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", sentence)
    table = _table_at(place, kind) if unknown is not None else None
    if unknown is None or table is None:
        return SettingFault(place, sentence)
    names = table.__struct_fields__
    return SettingFault(place, f"unknown field {unknown[1]!r}{suggestion(unknown[1], names)} known fields: {', '.join(names)}")


def suggestion(word: str, known_words: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or `;` if no known word is similar."""
    import difflib  # noqa: PLC0415 - needed only for error messages

    matches = difflib.get_close_matches(word, known_words, 1)
    return f"; did you mean {matches[0]!r}?" if matches else ";"


def _table_at(place: str, kind: type[Struct]) -> type[Struct] | None:
    """Return the type of the table at a path such as `sources[0].curve`; None if there is no table at the path."""
    table = kind
    for name in filter(None, re.sub(r"\[[^]]*\]", "", place).split(".")):
        field = next((item for item in msgspec.structs.fields(table) if item.name == name), None)
        inner = [item for item in types_in(field.type) if issubclass(item, Struct)] if field is not None else []
        if not inner:
            return None
        table = inner[0]
    return table


def _choices_at(place: str, kind: type[Struct]) -> list[str]:
    """Return the values of the `Literal` at a path such as `access.tokens[0].role`, or of the keys or items there."""
    parent, _, name = re.sub(r"\[[^]]*\]", "", place).rpartition(".")
    table = _table_at(parent, kind)
    types = [field.type for field in msgspec.structs.fields(table) if field.name == name] if table is not None else []
    parts = (part for kind in types for part in parts_of(kind) if get_origin(part) is Literal)
    return [str(value) for part in parts for value in get_args(part)]


def types_in(kind: Any) -> Iterator[type]:
    """Yield the plain types within a type, such as `X` and `NoneType` of `list[X] | None`."""
    return (part for part in parts_of(kind) if isinstance(part, type) and not get_args(part))


def parts_of(kind: Any) -> Iterator[Any]:
    """Yield a type, its parts at any depth, and their annotations."""
    yield kind
    for argument in get_args(kind):
        yield from parts_of(argument)


def check_texts(**texts: str) -> None:
    """Raise `ConfigError` for a value that is not a string."""
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ConfigError(f"{name} is {value!r}; it must be a string")


def check_finite(seconds: float) -> float:
    """Return a number of seconds. Raises `ConfigError` for an infinite number, and for nan."""
    if not math.isfinite(seconds):
        raise ConfigError(f"invalid duration {seconds}: expected a finite number of seconds")
    return seconds


def check_counts(**counts: int) -> None:
    """Raise `ConfigError`, which names the setting, for a value that is not an integer of at least 0."""
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            raise ConfigError(f"{name} is {value!r}; it must be at least 0")


def check_heartbeat(every: float | None) -> None:
    """Raise `ConfigError` unless this is a valid interval of heartbeats in seconds, or None."""
    if every is not None and not (type(every) in {int, float} and 0 < every <= MAX_HEARTBEAT_SECONDS):
        raise ConfigError(f"heartbeat is {every!r}; expected seconds above 0 and at most {MAX_HEARTBEAT_SECONDS}, or None")
