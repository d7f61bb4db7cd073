"""What a subscriber hands out, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from kvevents.events import KVEvent
from kvevents.wire import DEFAULT_WIRE_LIMITS, Rejected, WireLimits, decode_batch


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


class RawBatch(msgspec.Struct, frozen=True, gc=False):
    """A `Batch` whose payload nobody has looked at yet: what a subscriber with `decode=False` delivers in its place."""

    source: str
    rank: int
    incarnation: int
    seq: int
    replayed: bool
    payload: bytes
    topic: bytes = b""

    def decode(self, limits: WireLimits = DEFAULT_WIRE_LIMITS) -> Batch:
        """The batch with its events. What could not be read is in its `rejected`."""
        decoded = decode_batch(self.payload, limits)
        return Batch(
            self.source,
            self.rank,
            self.incarnation,
            self.seq,
            decoded.batch.ts,
            decoded.batch.events,
            self.replayed,
            self.payload,
            self.topic,
            decoded.rejected,
        )


class Reset(msgspec.Struct, frozen=True, gc=False):
    """Forget everything this stream told you; what its publisher holds comes anew.

    The publisher began a new life, or its identity cannot be proven, or what it holds is not what was delivered.
    """

    source: str
    rank: int
    incarnation: int
    """The life that begins now; everything of earlier ones is void."""
    reason: str


class Gap(msgspec.Struct, frozen=True, gc=False):
    """Batches `first` to `last`, both included, are not delivered; what follows continues after them."""

    source: str
    rank: int
    first: int
    last: int
    incarnation: int = 0
    compacted: bool = False
    """Whether the missing numbers are represented by the snapshot that follows: nothing is lost. False: they are lost."""


Delivery: TypeAlias = Batch | Reset | Gap
"""What is delivered unless asked otherwise."""
RawDelivery: TypeAlias = RawBatch | Reset | Gap
"""What is delivered with `decode=False`."""

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    BatchT = TypeVar("BatchT", bound=Batch | RawBatch, default=Batch)
else:
    from typing import TypeVar

    # A default is news of Python 3.13, and for type checkers only: `Subscriber` alone means `Subscriber[Batch]`.
    BatchT = TypeVar("BatchT")
