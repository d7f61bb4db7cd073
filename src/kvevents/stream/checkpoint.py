"""What is kept of a stream, so that another process can go on with it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Final, NamedTuple, Self

import msgspec

from kvevents.errors import SnapshotError
from kvevents.stream.deliveries import Batch, Gap, RawBatch, Reset
from kvevents.stream.identity import MAX_ANCHORS, Proof
from kvevents.stream.state import Anchor
from kvevents.stream.trust import KEPT_BY_CHECKPOINT, Doubt
from kvevents.structs import prepared
from kvevents.wire import MAX_SEQ

_Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SEQ)]
_Through = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_SEQ)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_KEPT_NAMES: Final = frozenset(doubt.name for doubt in KEPT_BY_CHECKPOINT)


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A delivered batch by which a life is recognised, without its bytes: those may be megabytes, and are prompts."""

    seq: _Count
    digest: _Digest
    """SHA-256 of the payload."""
    live: bool
    """Whether it came live rather than by replay."""

    @classmethod
    def of(cls, anchor: Anchor) -> Self:
        """What is kept of it."""
        return cls(anchor.seq, anchor.digest, anchor.live)

    def anchor(self) -> Anchor:
        """What is known of it in another process."""
        return Anchor(self.seq, None, self.live, digest=self.digest)


@prepared
class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a stream was handed out, for `Subscriber.add(source, resume=...)` in a later process.

    Keep it with the state that was made of these deliveries, both of one moment; see `spanning` where they are not. It takes a
    few hundred bytes, whatever the batches hold. Write it with `encode`, or inside of something larger with msgspec.
    """

    source: str
    rank: _Count
    incarnation: _Count
    last_seq: _Through
    """Number of the newest batch handed out, or inside of a gap handed out, in this incarnation; -1 before the first."""
    anchors: Annotated[tuple[Fingerprint, ...], msgspec.Meta(max_length=MAX_ANCHORS)] = ()
    """What the publisher must still hold to be the same, by their numbers; without any the stream begins with a `Reset`.

    It is one batch, or two for each connection since the publisher was last known to be the same.
    """
    replay_seen: bool = False
    """Whether the replay endpoint ever held a batch: one that did and holds none now is of another life."""
    doubts: dict[str, _Through] = {}
    """Names of the doubts that stood and that outlive a process, each with the last number in doubt."""
    proof_lost: bool = False
    """Whether there were more anchors than are kept: a doubt about the publisher's identity stays, whatever it holds."""

    def __post_init__(self) -> None:
        if self.anchors and self.anchors[0].seq > self.last_seq:
            raise ValueError(f"its anchor is number {self.anchors[0].seq}, but it ends with {self.last_seq}")
        if any(other.seq <= one.seq for one, other in pairwise(self.anchors)):
            raise ValueError("its anchors are not in order")
        for unknown in self.doubts.keys() - _KEPT_NAMES:
            raise ValueError(f"no doubt {unknown!r} is known")

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

    def spanning(self, later: Checkpoint) -> Checkpoint:
        """The one to keep with a state that was saved at some moment between this and `later`, while the stream went on.

        What followed this one is delivered again, so the state must pass over numbers that it knows already. Doubts are those
        of both. Where a new incarnation began in between, everything is delivered again, after a `Reset`.
        """
        if later.incarnation != self.incarnation:
            return Checkpoint(self.source, self.rank, max(self.incarnation, later.incarnation), -1)
        doubts = {**self.doubts, **{name: max(last, self.doubts.get(name, -1)) for name, last in later.doubts.items()}}
        proof = self.proof().joined(later.proof()) if self.anchors else Proof()
        return msgspec.structs.replace(self, anchors=_kept(proof), doubts=doubts, proof_lost=proof.is_lost)

    def requiring(self, seq: int, payload: bytes) -> Checkpoint:
        """The same for a consumer that has batch `seq`, handed out later, as well: the publisher must hold that one, too."""
        if not self.anchors or seq <= self.anchors[-1].seq:
            return self
        proof = self.proof()
        proof.needs(Anchor(seq, payload, live=False))
        return msgspec.structs.replace(self, anchors=_kept(proof), proof_lost=proof.is_lost)

    def proof(self) -> Proof:
        """What shows that the publisher is the same."""
        return Proof([each.anchor() for each in self.anchors], is_lost=self.proof_lost)


class Standing(NamedTuple):
    """How a stream stands, as a checkpoint before anything was digested."""

    incarnation: int
    last_seq: int
    proof: Proof
    replay_seen: bool
    doubts: dict[Doubt, int]

    def after(self, handed_out: Iterable[Batch | RawBatch | Reset | Gap], now: Standing) -> Standing:
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
                incarnation, last_seq, proof, doubts, newest = delivery.incarnation, -1, Proof(), {}, None
            elif isinstance(delivery, Gap):
                last_seq = delivery.last
                if not delivery.compacted:
                    doubts[Doubt.LOST] = last_seq
            else:
                last_seq = delivery.seq
                newest = delivery
                if isinstance(delivery, Batch) and any(each.loses_events for each in delivery.rejected):
                    doubts[Doubt.REJECTED] = last_seq
        if incarnation == now.incarnation:
            # What ended a doubt was handed out, or waits and will be delivered again. Reports arrive without a delivery.
            told = {Doubt.REJECTED, Doubt.REPLAY_UNCONFIRMED, Doubt.DIVERGED, Doubt.SENDER}
            doubts = {doubt: doubts.get(doubt, last) for doubt, last in now.doubts.items() if doubt in doubts or doubt in told}
            proof = proof.joined(now.proof.until(last_seq))
        if newest is not None:
            proof.needs(Anchor(newest.seq, newest.payload, not newest.replayed))
        return Standing(incarnation, last_seq, proof, now.replay_seen, doubts)

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


def _kept(proof: Proof) -> tuple[Fingerprint, ...]:
    return tuple(map(Fingerprint.of, proof.anchors))
