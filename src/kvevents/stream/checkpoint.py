"""What is kept of a stream, so that another process can go on with it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Final, NamedTuple, Self

import msgspec

from kvevents.errors import SnapshotError
from kvevents.stream.deliveries import Batch, Gap, RawBatch, Reset
from kvevents.stream.identity import MAX_ANCHORS, FingerprintChain
from kvevents.stream.state import Anchor, payload_digest
from kvevents.stream.trust import PERSISTENT_REASONS, DegradedReason
from kvevents.structs import build_decoder_now
from kvevents.wire import MAX_SEQ

_Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SEQ)]
_Through = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_SEQ)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_KEPT_NAMES: Final = frozenset(doubt.name for doubt in PERSISTENT_REASONS)


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A delivered batch by which a life is recognised, without its bytes: those may be megabytes, and are prompts."""

    seq: _Count
    digest: _Digest
    """SHA-256 of the payload."""
    live: bool
    """Whether it came live rather than by replay."""

    @classmethod
    def of(cls, seq: int, payload: bytes, *, live: bool) -> Self:
        """Return the fingerprint of a batch."""
        return cls(seq, payload_digest(payload), live)

    @classmethod
    def of_anchor(cls, anchor: Anchor) -> Self:
        """What is kept of it."""
        return cls(anchor.seq, anchor.digest, anchor.live)

    def anchor(self) -> Anchor:
        """What is known of it in another process."""
        return Anchor(self.seq, None, self.live, digest=self.digest)


@build_decoder_now
class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a stream was handed out, for `Subscriber.add(source, resume=...)` in a later process.

    Store it with the state that was made of these deliveries, both of one moment; see `merge_later` if they are not. It takes
    a few hundred bytes, whatever the batches hold. Write it with `encode`, or inside of something larger with msgspec.
    """

    source: str
    rank: _Count
    incarnation: _Count
    last_seq: _Through
    """Number of the newest batch handed out, or inside of a gap handed out, in this incarnation; -1 before the first."""
    fingerprints: Annotated[tuple[Fingerprint, ...], msgspec.Meta(max_length=MAX_ANCHORS)] = ()
    """What the publisher must still hold to be the same, by their numbers; without any the stream begins with a `Reset`.

    It is one batch, or two for each connection since the publisher was last known to be the same.
    """
    replay_seen: bool = False
    """Whether the replay endpoint ever held a batch: one that did and holds none now is of another life."""
    degraded_reasons: dict[str, _Through] = {}
    """Names of the doubts that stood and that outlive a process, each with the last number in doubt."""
    fingerprints_dropped: bool = False
    """Whether there were more anchors than are kept: a doubt about the publisher's identity stays, whatever it holds."""

    def __post_init__(self) -> None:
        if self.fingerprints and self.fingerprints[0].seq > self.last_seq:
            raise ValueError(f"fingerprint of batch {self.fingerprints[0].seq} is after last_seq {self.last_seq}")
        if any(other.seq <= one.seq for one, other in pairwise(self.fingerprints)):
            raise ValueError("fingerprints are not in rising order of seq")
        for unknown in self.degraded_reasons.keys() - _KEPT_NAMES:
            raise ValueError(f"unknown degraded reason {unknown!r}")

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Checkpoint:
        """What `encode` wrote. Raises `SnapshotError` for anything else."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SnapshotError(f"this is no checkpoint of a stream: {error}; add its source without one") from error

    def merge_later(self, later: Checkpoint) -> Checkpoint:
        """The one to keep with a state that was saved at some moment between this and `later`, while the stream went on.

        What followed this one is delivered again, so the state must pass over numbers that it knows already. Doubts are those
        of both. Where a new incarnation began in between, everything is delivered again, after a `Reset`.
        """
        if later.incarnation != self.incarnation:
            return Checkpoint(self.source, self.rank, max(self.incarnation, later.incarnation), -1)
        reasons = dict(self.degraded_reasons)
        for name, last in later.degraded_reasons.items():
            reasons[name] = max(last, reasons.get(name, -1))
        proof = self.fingerprint_chain().joined(later.fingerprint_chain()) if self.fingerprints else FingerprintChain()
        return msgspec.structs.replace(
            self, fingerprints=_kept(proof), degraded_reasons=reasons, fingerprints_dropped=proof.is_lost
        )

    def with_fingerprint(self, fingerprint: Fingerprint) -> Checkpoint:
        """Return a checkpoint that requires the publisher to hold one more batch, which was handed out after this checkpoint.

        Return the checkpoint itself if it has no fingerprints, or one that is not older than this.
        """
        if not self.fingerprints or fingerprint.seq <= self.fingerprints[-1].seq:
            return self
        proof = self.fingerprint_chain()
        proof.needs(fingerprint.anchor())
        return msgspec.structs.replace(self, fingerprints=_kept(proof), fingerprints_dropped=proof.is_lost)

    def fingerprint_chain(self) -> FingerprintChain:
        """What shows that the publisher is the same."""
        return FingerprintChain([each.anchor() for each in self.fingerprints], is_lost=self.fingerprints_dropped)


class StreamPosition(NamedTuple):
    """How a stream stands, as a checkpoint before anything was digested."""

    incarnation: int
    last_seq: int
    proof: FingerprintChain
    replay_seen: bool
    doubts: dict[DegradedReason, int]

    def after_deliveries(self, handed_out: Iterable[Batch | RawBatch | Reset | Gap], now: StreamPosition) -> StreamPosition:
        """How it stood after these deliveries, where `now` is how it stands after these and others that still wait.

        Anchors stay where they were, so that a life in doubt is not proven by its own batches.
        """
        incarnation, last_seq, proof, doubts = (
            self.incarnation,
            self.last_seq,
            self.proof.until(self.last_seq),
            dict(self.doubts),
        )
        newest: Batch | RawBatch | None = None
        for delivery in handed_out:
            if isinstance(delivery, Reset):
                incarnation, last_seq, proof, doubts, newest = delivery.incarnation, -1, FingerprintChain(), {}, None
            elif isinstance(delivery, Gap):
                last_seq = delivery.last
                if not delivery.compacted:
                    doubts[DegradedReason.LOST] = last_seq
            else:
                last_seq = delivery.seq
                newest = delivery
                if isinstance(delivery, Batch) and any(each.loses_events for each in delivery.rejected):
                    doubts[DegradedReason.REJECTED] = last_seq
        if incarnation == now.incarnation:
            # What ended a doubt was handed out, or waits and will be delivered again. Reports arrive without a delivery.
            told = {DegradedReason.REJECTED, DegradedReason.REPLAY_UNCONFIRMED, DegradedReason.DIVERGED, DegradedReason.SENDER}
            doubts = {doubt: doubts.get(doubt, last) for doubt, last in now.doubts.items() if doubt in doubts or doubt in told}
            proof = proof.joined(now.proof.until(last_seq))
        if newest is not None:
            proof.needs(Anchor(newest.seq, newest.payload, not newest.replayed))
        return StreamPosition(incarnation, last_seq, proof, now.replay_seen, doubts)

    def checkpoint(self, source: str, rank: int) -> Checkpoint:
        """To be kept."""
        return Checkpoint(
            source,
            rank,
            self.incarnation,
            self.last_seq,
            _kept(self.proof),
            self.replay_seen,
            {doubt.name: last for doubt, last in self.doubts.items()},
            self.proof.is_lost,
        )


def _kept(proof: FingerprintChain) -> tuple[Fingerprint, ...]:
    return tuple(map(Fingerprint.of_anchor, proof.anchors))
