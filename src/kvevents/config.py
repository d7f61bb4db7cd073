"""The settings of a publisher: one frozen definition for code, JSON and the command lines of both engines.

The names and defaults of fields are those of vLLM 0.33 (`vllm/config/kv_events.py`) and SGLang 0.5.23
(`sglang/srt/disaggregation/kv_events.py`); the fields after `topic` are additions of kvevents. This module imports no zmq.
"""

from __future__ import annotations

from typing import Any, Final, Self

import msgspec

from kvevents.endpoints import validate_endpoint
from kvevents.errors import ConfigError, UnknownDialectError
from kvevents.settings import build_decoder_now, check_counts, check_heartbeat, convert
from kvevents.wire.dialects import resolve_dialect
from kvevents.zeromq.keys import Curve

_SGLANG_FORMATS: Final = ("default", "dynamo")


def parse_object(text: str | bytes, origin: str) -> dict[str, Any]:
    """Return a JSON object. Raise `ConfigError`, which names `origin`, for other text."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{origin} is not a JSON object: {error}") from error
    return fields


@build_decoder_now
class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Whether, where and how KV cache events are published.

    Raises `ConfigError`, which names the field, for a value out of range.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """Name in `EventPublisherFactory`; the default is `zmq` if events are enabled, else `null`."""
    endpoint: str = "tcp://*:5557"
    """The endpoint of live batches. With port 0 the OS chooses the port; to any other port the rank is added."""
    replay_endpoint: str | None = None
    """The endpoint of replay requests; None disables replay."""
    buffer_steps: int = 10_000
    """Number of batches that are kept for replay."""
    hwm: int = 100_000
    """Maximum number of batches that wait for one slow subscriber, which loses further batches; 0 for no limit."""
    max_queue_size: int = 100_000
    """Maximum number of batches that wait for the publisher thread. Further batches are dropped, and subscribers see a gap;
    0 for no limit."""
    topic: str = ""
    bind: bool | None = None
    """Whether to bind the event socket rather than connect it; None lets the endpoint decide, as the engines do."""
    dialect: str | None = None
    """Engine and release whose consumers read the events, such as `sglang-0.5.17` or `vllm-latest`; None sends arrays, which
    almost all consumers read."""
    replay_topic: bool | None = None
    """Whether replay replies repeat the topic (vLLM from 0.26, SGLang from 0.5.22); None lets the dialect decide."""
    compact: bool | None = None
    """Whether history older than the replay buffer is compacted into a snapshot instead of dropped; None means yes if the
    native module is installed."""
    curve: Curve | None = None
    heartbeat: float | None = None
    """Seconds between batches with a digest of the resident blocks, by which consumers verify their state; None disables these
    batches. The digest needs the native module."""

    def __post_init__(self) -> None:
        check_heartbeat(self.heartbeat)
        check_counts(buffer_steps=self.buffer_steps, hwm=self.hwm, max_queue_size=self.max_queue_size)
        validate_endpoint(self.endpoint)
        if self.replay_endpoint is not None:
            validate_endpoint(self.replay_endpoint, "replay_endpoint")
        try:
            resolve_dialect(self.dialect)
        except UnknownDialectError as error:
            raise ConfigError(f"dialect: {error}") from error
        if self.publisher is None:
            msgspec.structs.force_setattr(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read the JSON of `--kv-events-config`, which is the same for vLLM and SGLang except for two keys.

        SGLang has no `enable_kv_cache_events`: a publisher other than `null` enables it. SGLang's `format` describes the hashes
        that the engine computes; it is checked but not stored.

        Raises `ConfigError` for any other input; the message about an unknown key lists the known keys.
        """
        values = parse_object(text, "the KV events configuration")
        shape = values.pop("format", "default")
        if shape not in _SGLANG_FORMATS:
            raise ConfigError(f"format is {shape!r}; expected {' or '.join(_SGLANG_FORMATS)}")
        if values.get("publisher") not in {None, "null"}:
            values.setdefault("enable_kv_cache_events", True)
        return convert(values, cls, "the KV events configuration")

    @classmethod
    def from_cli(cls, text: str) -> Self:
        """Call `from_json`, which is named `from_cli` in SGLang."""
        return cls.from_json(text)
