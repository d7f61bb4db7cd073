"""What a subscriber hands out, in order."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvevents.events import KVEvent
from kvevents.wire import Rejected


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One batch, delivered exactly once in its incarnation and in the order of its number."""

    source: str
    rank: int
    incarnation: int
    """Lives of the publisher that this subscriber has seen before; 0 for the first."""
    seq: int
    ts: float
    """The publisher's clock, seconds since the epoch."""
    events: list[KVEvent]
    replayed: bool
    """Whether it came by replay rather than live."""
    payload: bytes = b""
    """The bytes as the engine sent them."""
    topic: bytes = b""
    """The topic it came with; for replayed ones of engines that do not repeat it, the newest one seen or the source's."""
    rejected: tuple[Rejected, ...] = ()
    """Events of this batch that could not be read."""


class Reset(msgspec.Struct, frozen=True, gc=False):
    """Forget everything this stream told you: the publisher began a new life, or its identity cannot be proven."""

    source: str
    rank: int
    incarnation: int
    """The life that begins now; everything of earlier ones is void."""
    reason: str


class Gap(msgspec.Struct, frozen=True, gc=False):
    """Batches `first` to `last`, both included, are lost for good; what follows continues after them."""

    source: str
    rank: int
    first: int
    last: int
    incarnation: int = 0


Delivery: TypeAlias = Batch | Reset | Gap
