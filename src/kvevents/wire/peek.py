"""What the first and the last bytes of a payload show, whatever its size: no batch is decoded for it."""

from __future__ import annotations

import re
from typing import Final

from kvevents.events import AllBlocksCleared
from kvevents.wire.decode import decode_batch
from kvevents.wire.raw import declared, end_of, is_array, is_map

_HEAD_BYTES: Final = 512
"""A clear without unknown fields takes less than 100 bytes in every dialect."""
_TAIL_BYTES: Final = 512
"""A heartbeat of a snapshot's part is the last event and takes less than 200 bytes."""
_TAG: Final = b"AllBlocksCleared"
_EVENTS: Final = b"\xa6events"
_DIGEST: Final = re.compile(rb"\xd9\x20[0-9a-f]{32}")


def begins_with_clear(payload: bytes) -> bool:
    """Whether the first event clears everything, as the first event of a snapshot does."""
    head = payload[:_HEAD_BYTES]
    if _TAG not in head:
        return False
    try:
        events = _events_at(head)
        if events is None or not is_array(head[events]):
            return False
        first = events + 1 + _length_bytes(head[events])
        end = end_of(head, first)
    except IndexError:
        return False
    if end > len(head):
        return False
    event = head[first:end]
    # A batch of this event alone: the decoder knows how each dialect writes it.
    found = decode_batch(b"\x92\xcb" + bytes(8) + b"\x91" + event).batch.events
    return len(found) == 1 and type(found[0]) is AllBlocksCleared and found[0].unrecognised is None


def ends_with_digest(payload: bytes) -> bool:
    """Whether the end may hold a heartbeat's digest, as the end of each part of a snapshot in several batches does."""
    return _DIGEST.search(payload, max(0, len(payload) - _TAIL_BYTES)) is not None


def _events_at(head: bytes) -> int | None:
    """Where the events of a batch begin, which is an array or a map. IndexError past the end of `head`."""
    if is_array(head[0]):
        return end_of(head, 1 + _length_bytes(head[0]))
    if not is_map(head[0]):
        return None
    at = 1 + _length_bytes(head[0])
    for _ in range(declared(memoryview(head))):
        value = end_of(head, at)
        if head[at:value] == _EVENTS:
            return value
        at = end_of(head, value)
    return None


def _length_bytes(head: int) -> int:
    return {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}.get(head, 0)
