"""The deliveries that a subscriber returns in order, the source that it follows, and checkpoints for a later process."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from kvevents.endpoints import GRPC, offset_endpoint_port, port_collision, tcp_of, validate_remote, validate_source
from kvevents.errors import ConfigError, SnapshotError
from kvevents.events import KVEvent
from kvevents.settings import build_decoder_now
from kvevents.stream.identity import MAX_FINGERPRINTS, Fingerprint, FingerprintChain, NewestBatch
from kvevents.stream.trust import PERSISTENT_REASONS, DegradedReason
from kvevents.wire import DEFAULT_WIRE_LIMITS, MAX_SEQ, Rejected, WireLimits, decode_batch
from kvevents.zeromq.keys import Curve

MAX_TIER_CHARACTERS: Final = 64
"""Maximum number of characters of a tier's name."""
RESTARTED: Final = "publisher restarted: "
"""Start of the reason of a `Reset` if the publisher is another process than before."""
_Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SEQ)]
_LastSeq = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_SEQ)]
_PERSISTENT_NAMES: Final = frozenset(reason.name for reason in PERSISTENT_REASONS)
_REPORTED_REASONS: Final = frozenset(
    {
        DegradedReason.REJECTED,
        DegradedReason.REPLAY_UNCONFIRMED,
        DegradedReason.DIVERGED,
        DegradedReason.SENDER,
        DegradedReason.ESTIMATED_MATCHES,
    }
)
"""Degraded reasons whose cause is a consumer's report or a replay answer, and not a delivery."""


class Source(Struct, frozen=True):
    """One stream to subscribe to: one data-parallel rank of one engine."""

    endpoint: str
    """Where the engine publishes, such as `tcp://10.0.0.7:5557`; for a worker of SMG, `grpc://HOST:PORT`."""
    replay_endpoint: str | None = None
    """Where the engine answers replay requests. If None, losses are noticed but not repaired."""
    topic: str = ""
    """Prefix of the topics to receive. Batches with another topic are not received."""
    name: str | None = None
    """Name of the engine in deliveries; its endpoint if None. Ranks of one engine share a name."""
    rank: int = 0
    bind: bool = False
    """Whether to bind `endpoint` and let the engine connect, instead of connecting to the engine. Several sources can share a
    bound endpoint, each with the `topic` of its engine."""
    by_topic: bool = False
    """Whether to follow each topic that arrives at a bound endpoint and begins with `topic` as a separate source. The topic
    (`kv@POD@MODEL` in llm-d) is the name of that source, which is added when its first message arrives."""
    curve: Curve | None = None
    """CURVE keys; `server_key` is the engine's public key."""
    replay_is_proven: bool = False
    """Whether the engine itself has named both endpoints, as vLLM's `/kv_event_sources` does. Replay from a named endpoint is
    trusted until a live batch contradicts it, so an idle engine is EXACT although no live batch confirms replay."""
    stores_only: tuple[str, ...] = ()
    """Tiers, such as `cpu`, from which the engine announces no removals. LMCache before 0.5.7 announces none from host memory
    (https://github.com/LMCache/LMCache/pull/5076); 0.5.7 announces none after its stream has failed. These tiers become
    `Trust.inexact_tiers`."""

    def __post_init__(self) -> None:
        texts = {"endpoint": self.endpoint, "topic": self.topic, "replay_endpoint": self.replay_endpoint, "name": self.name}
        for name, text in texts.items():
            if not isinstance(text, str) and (text is not None or name in {"endpoint", "topic"}):
                raise ConfigError(f"invalid {name} {text!r} of a source: expected a string")
        if not isinstance(self.rank, int) or self.rank < 0:
            raise ConfigError(f"invalid rank {self.rank!r} of {printable(self.label)}: expected a number from 0")
        for name, endpoint in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint)):
            if endpoint is not None:
                validate_source(endpoint)
                if not self.bind:
                    validate_remote(tcp_of(endpoint), name)
        if self.endpoint.startswith(GRPC):  # a gRPC call brings all events from the first on, so the endpoint also replays
            force_setattr(self, "replay_endpoint", self.endpoint)
        if self.by_topic and (not self.bind or self.replay_endpoint is not None or self.name is not None):
            raise ConfigError("by_topic needs bind=True, and no replay_endpoint or name: each topic becomes a source")
        check_stores_only(self.stores_only)

    def ranks(self, count: int) -> list[Source]:
        """Return the source of each of `count` data-parallel ranks. Ports are consecutive, as in the engines.

        Raises `ConfigError` if a port would be above 65535, or be needed for events and for replay.
        """
        collision = None if self.bind or count == 1 else port_collision(self.endpoint, self.replay_endpoint, count - 1)
        if collision is not None:
            raise ConfigError(collision)
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


def printable(text: str) -> str:
    """Return a text for logs, messages and terminals.

    Parts of a name that a service separates by U+001F are joined by `/`, and other control characters are escaped.
    """
    joined = "/".join(text.split("\x1f"))
    return joined if joined.isprintable() else ascii(joined)[1:-1]


def check_stores_only(tiers: Iterable[str]) -> None:
    """Raise `ConfigError` if one of `tiers` is not a tier of the index, or is `gpu`, whose removals all engines announce."""
    if isinstance(tiers, str):
        raise ConfigError(f"invalid stores_only {tiers!r}: expected a tuple, such as {(tiers,)}")
    for tier in tiers:
        is_other_medium = tier.isprintable() and tier == tier.upper() and tier.lower() not in {"", "gpu", "cpu", "disk"}
        if tier not in {"cpu", "disk"} and not (is_other_medium and len(tier) <= MAX_TIER_CHARACTERS):
            raise ConfigError(f"invalid stores_only {tier!r}: expected cpu, disk, or another medium in upper case; not gpu")


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One batch. Each batch is delivered exactly once in its incarnation, in the order of numbers."""

    source: str
    rank: int
    incarnation: int
    """The publisher's incarnation: 0 for the first one that the subscriber receives, then 1, and so on."""
    seq: int
    ts: float
    """The publisher's clock in seconds since the epoch."""
    events: list[KVEvent]
    replayed: bool
    """Whether the batch came by replay rather than live."""
    payload: bytes = b""
    """The bytes as the engine sent them."""
    topic: bytes = b""
    """The topic of the message; if replay sends no topics, the newest topic of the stream, or the source's topic."""
    rejected: tuple[Rejected, ...] = ()
    """Events of this batch that could not be decoded."""
    data_parallel_rank: int | None = None
    """The rank that the payload states; `rank` is the rank that the application has given to the source."""


class RawBatch(msgspec.Struct, frozen=True, gc=False):
    """A `Batch` whose payload is not decoded; a subscriber with `decode=False` delivers such batches."""

    source: str
    rank: int
    incarnation: int
    seq: int
    replayed: bool
    payload: bytes
    topic: bytes = b""

    def decode(self, limits: WireLimits = DEFAULT_WIRE_LIMITS) -> Batch:
        """Return the decoded batch. `Batch.rejected` has the events that could not be decoded."""
        decoding = decode_batch(self.payload, limits)
        return Batch(
            self.source,
            self.rank,
            self.incarnation,
            self.seq,
            decoding.batch.ts,
            decoding.batch.events,
            self.replayed,
            self.payload,
            self.topic,
            decoding.rejected,
            decoding.batch.data_parallel_rank,
        )


class Reset(msgspec.Struct, frozen=True, gc=False):
    """The consumer must drop all state from this stream. The batches that the publisher still holds are delivered again.

    Causes: a new incarnation, an identity that cannot be verified, or a state that differs from the publisher's.
    """

    source: str
    rank: int
    incarnation: int
    """The incarnation that begins now. Deliveries of earlier incarnations no longer apply."""
    reason: str

    @property
    def is_restart(self) -> bool:
        """Whether the publisher is another process than before."""
        return self.reason.startswith(RESTARTED)


class Gap(msgspec.Struct, frozen=True, gc=False):
    """Batches `first` to `last`, both included, are not delivered. The next delivery continues after batch `last`."""

    source: str
    rank: int
    first: int
    last: int
    incarnation: int = 0
    compacted: bool = False
    """Whether the snapshot that follows represents the missing batches; if False, the batches are lost."""


Delivery: TypeAlias = Batch | Reset | Gap
"""The deliveries of a subscriber with `decode=True`, the default."""
RawDelivery: TypeAlias = RawBatch | Reset | Gap
"""The deliveries of a subscriber with `decode=False`."""

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    BatchT = TypeVar("BatchT", bound=Batch | RawBatch, default=Batch)
else:
    from typing import TypeVar

    # Type variables have defaults since Python 3.13. For type checkers, `Subscriber` alone means `Subscriber[Batch]`.
    BatchT = TypeVar("BatchT")


# --- checkpoints -----------------------------------------------------------------------------------------------------------


@build_decoder_now
class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of an application in a stream, for `Subscriber.add(source, resume=...)` in a later process.

    The application stores a checkpoint together with its state after the same deliveries; if the state can be newer, use
    `merge_later`. A checkpoint has a few hundred bytes. It can be stored with `encode`, or with msgspec as a part of other
    data.
    """

    source: str
    rank: _Count
    incarnation: _Count
    last_seq: _LastSeq
    """Number of the newest batch, or last number of the newest gap, that the application has taken in this incarnation; -1
    before the first."""
    fingerprints: Annotated[tuple[Fingerprint, ...], msgspec.Meta(max_length=MAX_FINGERPRINTS)] = ()
    """Fingerprints that replay must repeat before the publisher is known to be the same, in ascending order of numbers.

    If the publisher is verified, there is one fingerprint; if not, there are two for each connection since the last
    verification. If there is no fingerprint, the stream begins with a `Reset`.
    """
    replay_seen: bool = False
    """Whether the replay endpoint has ever sent a batch. If its buffer is empty later, the endpoint serves another
    incarnation."""
    degraded_reasons: dict[str, _LastSeq] = {}
    """Names of the degraded reasons that outlive a process, each with the last batch number that it affects."""
    fingerprints_dropped: bool = False
    """Whether there were more fingerprints than are stored. If fingerprints are dropped, IDENTITY remains a degraded reason."""

    def __post_init__(self) -> None:
        if self.fingerprints and self.fingerprints[0].seq > self.last_seq:
            raise ValueError(f"fingerprint of batch {self.fingerprints[0].seq} is after last_seq {self.last_seq}")
        if any(successor.seq <= fingerprint.seq for fingerprint, successor in pairwise(self.fingerprints)):
            raise ValueError("fingerprints are not in rising order of seq")
        for unknown in self.degraded_reasons.keys() - _PERSISTENT_NAMES:
            raise ValueError(f"unknown degraded reason {unknown!r}")

    def encode(self) -> bytes:
        """Return the checkpoint as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Checkpoint:
        """Decode a checkpoint that `encode` has returned. Raises `SnapshotError` if `data` is not a checkpoint."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SnapshotError(f"invalid checkpoint of a stream: {error}; add its source without a checkpoint") from error

    def merge_later(self, later: Checkpoint) -> Checkpoint:
        """Return the checkpoint for a state that was saved at an unknown time between this checkpoint and `later`.

        All batches after this checkpoint are delivered again; the state must skip the batches that it contains. The result has
        the degraded reasons of both checkpoints. If the two incarnations differ, all batches are delivered again after a
        `Reset`.
        """
        if later.incarnation != self.incarnation:
            return Checkpoint(self.source, self.rank, max(self.incarnation, later.incarnation), -1)
        reasons = dict(self.degraded_reasons)
        for name, last in later.degraded_reasons.items():
            reasons[name] = max(last, reasons.get(name, -1))
        chain = self.fingerprint_chain().merge(later.fingerprint_chain()) if self.fingerprints else FingerprintChain()
        return msgspec.structs.replace(self._with_chain(chain), degraded_reasons=reasons)

    def with_fingerprint(self, fingerprint: Fingerprint) -> Checkpoint:
        """Return a checkpoint that requires the publisher to hold one more batch, which was taken after this checkpoint.

        Return the checkpoint itself if it has no fingerprints, or a fingerprint at least as new as `fingerprint`.
        """
        if not self.fingerprints or fingerprint.seq <= self.fingerprints[-1].seq:
            return self
        chain = self.fingerprint_chain()
        chain.add(fingerprint)
        return self._with_chain(chain)

    def _with_chain(self, chain: FingerprintChain) -> Checkpoint:
        return msgspec.structs.replace(self, fingerprints=tuple(chain.fingerprints), fingerprints_dropped=chain.is_incomplete)

    def fingerprint_chain(self) -> FingerprintChain:
        """Return the fingerprints that replay must repeat to verify that the publisher is the same."""
        return FingerprintChain(self.fingerprints, is_incomplete=self.fingerprints_dropped)


class StreamPosition(NamedTuple):
    """The position of a stream.

    A position has an incarnation and the last number delivered in it; a checkpoint adds the fingerprint of that batch.
    """

    incarnation: int
    last_seq: int
    chain: FingerprintChain
    newest: Fingerprint | NewestBatch | None
    """The newest delivered batch, whose fingerprint `chain` does not include yet."""
    replay_seen: bool
    degraded_reasons: dict[DegradedReason, int]

    def after_deliveries(self, deliveries: Iterable[Delivery | RawBatch], current: StreamPosition) -> StreamPosition:
        """Return the position after the application has taken `deliveries` but not all deliveries.

        `current` is the position after all deliveries. If `current` has another incarnation, its fingerprints are not used,
        because they belong to batches of that incarnation.
        """
        incarnation, last_seq, reasons = self.incarnation, self.last_seq, dict(self.degraded_reasons)
        chain = self._whole_chain().up_to(self.last_seq)
        newest: Batch | RawBatch | None = None
        for delivery in deliveries:
            if isinstance(delivery, Reset):
                incarnation, last_seq, chain, reasons, newest = delivery.incarnation, -1, FingerprintChain(), {}, None
            elif isinstance(delivery, Gap):
                last_seq = delivery.last
                if not delivery.compacted:
                    reasons[DegradedReason.LOST] = last_seq
            else:
                last_seq = delivery.seq
                newest = delivery
        if incarnation == current.incarnation:
            # If a reason is no longer in `current`, a delivery that was taken, or will be delivered again, has ended it. A
            # reason that is new in `current` began with a delivery that was not taken, or with a report.
            reasons = {
                reason: reasons.get(reason, last)
                for reason, last in current.degraded_reasons.items()
                if reason in reasons or reason in _REPORTED_REASONS
            }
            chain = chain.merge(current._whole_chain().up_to(last_seq))
        batch = None if newest is None else NewestBatch(newest.seq, newest.payload, not newest.replayed)
        return StreamPosition(incarnation, last_seq, chain, batch, current.replay_seen, reasons)

    def _whole_chain(self) -> FingerprintChain:
        chain = FingerprintChain(self.chain.fingerprints, is_incomplete=self.chain.is_incomplete)
        chain.add(self.newest)
        return chain

    def checkpoint(self, source: str, rank: int) -> Checkpoint:
        """Return the checkpoint of this position."""
        chain = self._whole_chain()
        return Checkpoint(
            source,
            rank,
            self.incarnation,
            self.last_seq,
            tuple(chain.fingerprints),
            self.replay_seen,
            {reason.name: last for reason, last in self.degraded_reasons.items()},
            chain.is_incomplete,
        )
