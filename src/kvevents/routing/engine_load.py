"""The load that an engine reports of itself, as SGLang from 0.5.23 publishes it.

`--load-publish-endpoint` opens a second PUB socket per rank. Each message is `[topic "load", sequence number, payload]`. The
payload is one `LoadStat` (`sglang/srt/managers/scheduler_components/load_publisher.py`). It is sent when it changes, and
otherwise about once a second. It is a reading, not an event: the next one makes up for a lost one.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kvevents.wire.checked_msgpack import MSGPACK_ERRORS

LOAD_TOPIC: Final = "load"
MAX_LOAD_BYTES: Final = 4_096
"""Largest payload that is read. SGLang's has about 60 bytes."""

_Count = Annotated[int, msgspec.Meta(ge=0)]


class EngineLoad(msgspec.Struct, array_like=True, tag="LoadStat", frozen=True, gc=False):
    """One reading of an engine's scheduler, with the fields of SGLang's `LoadStat` in wire order. Later fields are ignored."""

    running: _Count
    """Requests in the running batch."""
    waiting: _Count
    """Requests in the queue."""
    used_tokens: _Count
    """Tokens of KV cache in use; 0 if the engine reports neither them nor a share of a known capacity."""
    max_tokens: _Count
    """Capacity of the KV cache in tokens; 0 if the engine does not know it."""
    rank: int | None = None
    """Data-parallel rank, as the engine counts it; for people."""
    waiting_uncached_tokens: _Count | None = None
    """Prompt tokens of waiting requests that must be computed; None if the engine, such as vLLM, does not report them."""
    total_tokens: _Count = 0
    """Tokens in use plus tokens of waiting requests."""
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
    """Return the reading in a payload; None for anything else. It never raises for the input of a peer."""
    if len(payload) > MAX_LOAD_BYTES:
        return None
    try:
        return _decode(payload)
    except MSGPACK_ERRORS:
        return None
