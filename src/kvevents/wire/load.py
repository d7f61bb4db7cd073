"""The load that an engine reports, in the format that SGLang publishes from release 0.5.23 on.

`--load-publish-endpoint` opens a second PUB socket per rank. Each message is `[topic "load", sequence number, payload]`. The
payload is one `LoadStat` (`sglang/srt/managers/scheduler_components/load_publisher.py`). The engine sends it when the load
changes, and at least about once a second. A message is a reading, not an event: the next message makes up for a lost message.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvevents.wire.checked_msgpack import MSGPACK_ERRORS

LOAD_TOPIC: Final = "load"
MAX_LOAD_BYTES: Final = 4_096
"""Maximum size of a payload in bytes; larger payloads are rejected. SGLang's payload has about 60 bytes."""

_Count = Annotated[int, msgspec.Meta(ge=0)]


class EngineLoad(msgspec.Struct, array_like=True, tag="LoadStat", frozen=True, gc=False):
    """One report of an engine's load, with the fields of SGLang's `LoadStat` in wire order. Further fields are ignored."""

    running: _Count
    """Number of requests in the running batch."""
    waiting: _Count
    """Number of requests in the queue."""
    used_tokens: _Count
    """KV cache in use, in tokens; 0 if the engine reports neither this number nor a share of a known capacity."""
    max_tokens: _Count
    """Capacity of the KV cache in tokens; 0 if the engine does not know it."""
    rank: int | None = None
    """Data-parallel rank, as the engine numbers it; for display only."""
    waiting_uncached_tokens: _Count | None = None
    """Number of prompt tokens that waiting requests must compute; None if the engine does not report the number (vLLM)."""
    total_tokens: _Count = 0
    """Number of tokens in use plus tokens of waiting requests."""
    max_running: _Count = 0
    """Maximum number of requests in the running batch; 0 if unknown."""
    prefill_uncached_tokens: _Count = 0
    """Number of prompt tokens computed since the engine's start."""
    prefill_busy_us: _Count = 0
    """Microseconds spent on computing these prompt tokens."""

    @property
    def requests(self) -> int:
        """Number of requests that run or wait."""
        return self.running + self.waiting


_decode: Final = msgspec.msgpack.Decoder(EngineLoad).decode


def decode_load(payload: bytes) -> EngineLoad | None:
    """Return the load report in a payload; None if the payload has another form. Never raises."""
    if len(payload) > MAX_LOAD_BYTES:
        return None
    try:
        return _decode(payload)
    except MSGPACK_ERRORS:
        return None
