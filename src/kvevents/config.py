"""What a publisher is told: one frozen definition for code, JSON and either engine's command line.

Fields, names and defaults are those of vLLM 0.33 (`vllm/config/kv_events.py`) and SGLang 0.5.23
(`sglang/srt/disaggregation/kv_events.py`); what follows `topic` is ours. This module imports no zmq.
"""

from __future__ import annotations

from typing import Any, Final, Self

import msgspec

from kvevents.endpoints import MAX_PORT, split_tcp
from kvevents.errors import ConfigError, UnknownDialectError
from kvevents.security import Curve
from kvevents.settings import convert
from kvevents.structs import prepared
from kvevents.wire.dialects import Dialect, dialect_for

_TRANSPORTS: Final = ("tcp", "ipc", "inproc")
_SGLANG_FORMATS: Final = ("default", "dynamo")
MAX_HEARTBEAT: Final = 86_400
"""Seconds between two heartbeats, at most: what `kvevents.events.Heartbeat` can say."""


def resolve_dialect(value: Dialect | str | None) -> Dialect | None:
    """A dialect as people write it: a row, `vllm-0.24`, `sglang-latest`, or None for "as declared".

    Raises `UnknownDialectError` for an engine or release that no row covers.
    """
    if value is None or isinstance(value, Dialect):
        return value
    engine, _, release = value.partition("-")
    return dialect_for(engine, release or "latest")


def check_heartbeat(every: float | None) -> None:
    """Raise `ConfigError` for what is no number of seconds between heartbeats."""
    if every is not None and not 0 < every <= MAX_HEARTBEAT:
        raise ConfigError(f"heartbeat is {every}; it is a number of seconds above 0, at most {MAX_HEARTBEAT}, or None for none")


@prepared
class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Whether, where and how KV cache events are published.

    Raises `ConfigError`, which names the field, for a value out of range.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """Name in `EventPublisherFactory`; left out, it becomes `zmq` when events are enabled and `null` when not."""
    endpoint: str = "tcp://*:5557"
    """Where live batches are published. Port 0 lets the OS choose; a rank is added to other ports."""
    replay_endpoint: str | None = None
    """Where replay requests are answered; None for no replay."""
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Batches that may wait for one slow subscriber before it loses some; 0 for no limit."""
    max_queue_size: int = 100_000
    """Batches that may wait for the publisher thread before new ones are dropped, as a visible gap; 0 for no limit."""
    topic: str = ""
    bind: bool | None = None
    """Bind or connect the event socket; None goes by the endpoint, as the engines do."""
    dialect: str | None = None
    """Engine and release to be understood by, such as `sglang-0.5.17` or `vllm-latest`; None sends events as declared."""
    replay_topic: bool | None = None
    """Whether replay replies repeat the topic (vLLM from 0.26, SGLang from 0.5.22); None goes by the dialect."""
    compact: bool | None = None
    """Whether history older than the replay buffer is collapsed into a snapshot instead of forgotten; None goes by whether the
    native module is installed."""
    curve: Curve | None = None
    heartbeat: float | None = None
    """Seconds between batches that say what is resident, by which consumers check what they know; None for none. Needs the
    native module."""
    snapshot_endpoint: str | None = None
    """Where placement snapshots are answered, as in SGLang's draft `snapshot-v1`; a rank is added to its port. Needs the native
    module."""

    def __post_init__(self) -> None:
        check_heartbeat(self.heartbeat)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it counts batches and cannot be negative")
        _check_endpoint("endpoint", self.endpoint)
        for name in ("replay_endpoint", "snapshot_endpoint"):
            if (endpoint := getattr(self, name)) is not None:
                _check_endpoint(name, endpoint)
        try:
            resolve_dialect(self.dialect)
        except UnknownDialectError as error:
            raise ConfigError(f"dialect: {error}") from error
        if self.publisher is None:
            msgspec.structs.force_setattr(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read vLLM's `--kv-events-config` or SGLang's, which are the same JSON but for two keys.

        SGLang has no `enable_kv_cache_events`: naming a publisher other than `null` enables it. Its `format` concerns the
        hashes that the engine computes and is checked, not kept.

        Raises `ConfigError` for anything that is not such an object; an unknown key is named beside the known ones.
        """
        try:
            found = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the KV events configuration is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError("the KV events configuration must be a JSON object")
        return cls.from_mapping(found)

    @classmethod
    def from_mapping(cls, found: dict[str, Any]) -> Self:
        """As `from_json`, from an object already parsed."""
        given = dict(found)
        shape = given.pop("format", "default")
        if shape not in _SGLANG_FORMATS:
            raise ConfigError(f"format is {shape!r}; SGLang knows {' and '.join(_SGLANG_FORMATS)}")
        if given.get("publisher") not in {None, "null"}:
            given.setdefault("enable_kv_cache_events", True)
        return convert(given, cls, "the KV events configuration")

    @classmethod
    def from_cli(cls, text: str) -> Self:
        """`from_json`, under the name that SGLang gives it."""
        return cls.from_json(text)


def _check_endpoint(name: str, endpoint: str) -> None:
    transport, separator, address = endpoint.partition("://")
    if not separator or not address or transport not in _TRANSPORTS:
        raise ConfigError(f"{name} is {endpoint!r}; it must look like tcp://*:5557, ipc:///path or inproc://name")
    if transport != "tcp":
        return
    found = split_tcp(endpoint)
    if found is None or found[1] > MAX_PORT:
        raise ConfigError(f"{name} is {endpoint!r}; it needs a port from 0 to {MAX_PORT}")
