"""Deliveries: what a subscriber returns, in order; and the source that a subscriber follows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from kvevents.endpoints import offset_endpoint_port, validate_endpoint
from kvevents.errors import ConfigError
from kvevents.events import KVEvent
from kvevents.security import Curve
from kvevents.wire import DEFAULT_WIRE_LIMITS, Rejected, WireLimits, decode_batch

MAX_TIER_CHARACTERS: Final = 64
"""Longest name of a tier."""


@dataclass(frozen=True, slots=True)
class Source:
    """One stream to subscribe to: one data-parallel rank of one engine."""

    endpoint: str
    """Where the engine publishes, such as `tcp://10.0.0.7:5557`."""
    replay_endpoint: str | None = None
    """Where it answers replay requests. Without it, losses are noticed but not repaired."""
    topic: str = ""
    """Prefix of the topics to receive. Batches with another topic are not received."""
    name: str | None = None
    """Name of the engine in deliveries; its endpoint if None. Ranks of one engine share a name."""
    rank: int = 0
    bind: bool = False
    """Bind `endpoint` and let the engine connect, instead of connecting to it."""
    curve: Curve | None = field(default=None, repr=False)
    """CURVE keys; `server_key` is the engine's public key."""
    stores_only: tuple[str, ...] = ()
    """Tiers, such as `cpu`, from which the engine announces no removals, as LMCache does for host memory
    (https://github.com/LMCache/LMCache/pull/5076). They become `Trust.inexact_tiers`."""

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.replay_endpoint):
            if endpoint is not None:
                validate_endpoint(endpoint)
        if self.rank < 0:
            raise ConfigError(f"invalid rank {self.rank} of {self.label}: expected a number from 0")
        check_stores_only(self.stores_only)

    def ranks(self, count: int) -> list[Source]:
        """Return the source of each of `count` data-parallel ranks. Ports count up from this one's, as in the engines.

        Raises `ConfigError` if a port would be above 65535.
        """
        return [
            replace(
                self,
                endpoint=offset_endpoint_port(self.endpoint, rank) or self.endpoint,
                replay_endpoint=offset_endpoint_port(self.replay_endpoint, rank),
                name=self.label,
                rank=self.rank + rank,
            )
            for rank in range(count)
        ]

    @property
    def label(self) -> str:
        """The name of this source in deliveries and in `trust()`."""
        return self.name or self.endpoint


def check_stores_only(tiers: Iterable[str]) -> None:
    """Raise `ConfigError` unless these are tiers, as the index names them, that an engine can announce without removals."""
    for tier in tiers:
        is_other_medium = tier.isprintable() and tier == tier.upper() and tier.lower() not in {"", "gpu", "cpu", "disk"}
        if tier not in {"cpu", "disk"} and not (is_other_medium and len(tier) <= MAX_TIER_CHARACTERS):
            raise ConfigError(f"invalid stores_only {tier!r}: expected cpu, disk, or another medium in upper case; not gpu")


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One batch, delivered exactly once in its incarnation and in the order of numbers."""

    source: str
    rank: int
    incarnation: int
    """The incarnation of the publisher, as this subscriber counts them; 0 for the first."""
    seq: int
    ts: float
    """The publisher's clock, seconds since the epoch."""
    events: list[KVEvent]
    replayed: bool
    """Whether the batch came by replay rather than live."""
    payload: bytes = b""
    """The bytes as the engine sent them."""
    topic: bytes = b""
    """The topic of the message. If a replay does not repeat it, the newest topic seen, or the source's."""
    rejected: tuple[Rejected, ...] = ()
    """Events of this batch that could not be decoded."""


class RawBatch(msgspec.Struct, frozen=True, gc=False):
    """A `Batch` whose payload is not decoded: what a subscriber with `decode=False` delivers."""

    source: str
    rank: int
    incarnation: int
    seq: int
    replayed: bool
    payload: bytes
    topic: bytes = b""

    def decode(self, limits: WireLimits = DEFAULT_WIRE_LIMITS) -> Batch:
        """Return the decoded batch. Events that could not be decoded are in its `rejected`."""
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
    """Drop everything that came from this stream. What its publisher holds is delivered again.

    The publisher has begun a new incarnation, or its identity cannot be verified, or it does not hold what was delivered.
    """

    source: str
    rank: int
    incarnation: int
    """The incarnation that begins now. Everything of earlier incarnations is void."""
    reason: str


class Gap(msgspec.Struct, frozen=True, gc=False):
    """Batches `first` to `last`, both included, are not delivered. The next delivery continues after them."""

    source: str
    rank: int
    first: int
    last: int
    incarnation: int = 0
    compacted: bool = False
    """Whether the snapshot that follows represents the missing numbers, so that nothing is lost. If False, they are lost."""


Delivery: TypeAlias = Batch | Reset | Gap
"""What a subscriber delivers by default."""
RawDelivery: TypeAlias = RawBatch | Reset | Gap
"""What a subscriber delivers with `decode=False`."""

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    BatchT = TypeVar("BatchT", bound=Batch | RawBatch, default=Batch)
else:
    from typing import TypeVar

    # Type variables have defaults since Python 3.13. For type checkers, `Subscriber` alone means `Subscriber[Batch]`.
    BatchT = TypeVar("BatchT")
