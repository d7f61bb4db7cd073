"""SGLang's configuration of KV events: a pydantic model there, the same face without pydantic here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

import msgspec

from kvevents.compat.lax import Field, one_of, read_bool, read_fields, read_int, read_str
from kvevents.errors import ConfigError

_FIELDS: Final[Mapping[str, Field]] = {
    "publisher": Field(read_str),
    "endpoint": Field(read_str),
    "bind": Field(read_bool, optional=True),
    "replay_endpoint": Field(read_str, optional=True),
    "buffer_steps": Field(read_int),
    "hwm": Field(read_int),
    "max_queue_size": Field(read_int),
    "topic": Field(read_str),
    "format": Field(one_of("default", "dynamo")),
}


class KVEventsConfig:  # noqa: PLW1641 - as in pydantic: equal by value, mutable, not hashable
    """What SGLang 0.5.23 reads from `--kv-events-config`. Fields are given by name; unknown ones are ignored, as there.

    Raises `ConfigError`, a ValueError, which names the fields that cannot be read.
    """

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    """Bind or connect; None goes by the endpoint."""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    format: str = "default"
    """`dynamo` makes the engine publish namespaced hashes; the publisher does not care."""

    def __init__(self, **data: Any) -> None:
        found = read_fields(type(self).__name__, _FIELDS, data)
        self.model_fields_set = set(found)
        for name in _FIELDS:
            setattr(self, name, found.get(name, getattr(type(self), name)))

    @classmethod
    def from_cli(cls, cli_value: str) -> Self:
        """Read the value of `--kv-events-config`."""
        return cls.model_validate_json(cli_value)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes) -> Self:
        """Read a JSON object."""
        try:
            found = msgspec.json.decode(json_data)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{cls.__name__}: not JSON: {error}") from error
        return cls.model_validate(found)

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Read a mapping; an instance is returned as it is."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ConfigError(f"{cls.__name__}: an object is expected, not {obj!r}")
        return cls(**obj)

    def model_dump(self) -> dict[str, Any]:
        """All fields, in their order."""
        return {name: getattr(self, name) for name in _FIELDS}

    def model_dump_json(self) -> str:
        """All fields, as JSON without spaces."""
        return msgspec.json.encode(self.model_dump()).decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """A copy, with some fields replaced, unchecked."""
        made = type(self)(**self.model_dump())
        made.model_fields_set = self.model_fields_set | set(update or ())
        for name, value in (update or {}).items():
            setattr(made, name, value)
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVEventsConfig):
            return NotImplemented
        return self.model_dump() == other.model_dump()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.model_dump().items())
        return f"{type(self).__name__}({fields})"


def uses_dynamo_format(kv_events_config: str | None) -> bool:
    """Whether that JSON asks for `"format": "dynamo"`."""
    return bool(kv_events_config) and KVEventsConfig.from_cli(kv_events_config or "").format == "dynamo"
