"""Recognises snapshots by the first and the last bytes of a payload, without decoding the batch."""

from __future__ import annotations

import re
from typing import Final

from kvevents.events import AllBlocksCleared
from kvevents.wire.decode import decode_batch
from kvevents.wire.raw_msgpack import declared_length, is_array, is_map, length_bytes, skip_value

_HEAD_BYTES: Final = 512
"""A clear without unknown fields takes less than 100 bytes in every dialect."""
_TAIL_BYTES: Final = 512
"""The heartbeat of a part of a snapshot is its last event and takes less than 200 bytes."""
_TAG: Final = b"AllBlocksCleared"
_EVENTS: Final = b"\xa6events"
_DIGEST: Final = re.compile(rb"\xd9\x20[0-9a-f]{32}")


def begins_with_clear(payload: bytes) -> bool:
    """Return whether the first event clears all blocks, as the first event of a snapshot does."""
    head = payload[:_HEAD_BYTES]
    if _TAG not in head:
        return False
    try:
        events = _events_at(head)
        if events is None or not is_array(head[events]):
            return False
        first = events + 1 + length_bytes(head[events])
        end = skip_value(head, first)
    except IndexError:
        return False
    if end > len(head):
        return False
    event = head[first:end]
    # Decode a batch of this event alone, because the decoder knows how each dialect writes it.
    decoded = decode_batch(b"\x92\xcb" + bytes(8) + b"\x91" + event).batch.events
    return len(decoded) == 1 and type(decoded[0]) is AllBlocksCleared and decoded[0].unrecognised is None


def ends_with_digest(payload: bytes) -> bool:
    """Return whether the payload may end with the digest of a heartbeat, as each part of a snapshot of several batches does."""
    return _DIGEST.search(payload, max(0, len(payload) - _TAIL_BYTES)) is not None


def _events_at(head: bytes) -> int | None:
    """Return where the events of a batch begin; None if it is neither an array nor a map. Raise `IndexError` behind `head`."""
    if is_array(head[0]):
        return skip_value(head, 1 + length_bytes(head[0]))
    if not is_map(head[0]):
        return None
    at = 1 + length_bytes(head[0])
    for _ in range(declared_length(memoryview(head))):
        value = skip_value(head, at)
        if head[at:value] == _EVENTS:
            return value
        at = skip_value(head, value)
    return None
