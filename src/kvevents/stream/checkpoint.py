"""Checkpoints: how far a stream was delivered, for a later process."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

import msgspec

from kvevents.errors import SnapshotError
from kvevents.stream.deliveries import Batch, Gap, RawBatch, Reset
from kvevents.stream.identity import MAX_FINGERPRINTS, Fingerprint, FingerprintChain, NewestBatch
from kvevents.stream.trust import PERSISTENT_REASONS, DegradedReason
from kvevents.structs import build_decoder_now
from kvevents.wire import MAX_SEQ

_Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SEQ)]
_LastSeq = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_SEQ)]
_PERSISTENT_NAMES: Final = frozenset(reason.name for reason in PERSISTENT_REASONS)


@build_decoder_now
class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The position of an application in a stream, for `Subscriber.add(source, resume=...)` in a later process.

    Store it with the state that was made of these deliveries, both of one moment; see `merge_later` if they are not. It takes
    a few hundred bytes, whatever the batches hold. Write it with `encode`, or inside of something larger with msgspec.
    """

    source: str
    rank: _Count
    incarnation: _Count
    last_seq: _LastSeq
    """Number of the newest batch taken, or the last number of a newer gap taken, in this incarnation; -1 before the first."""
    fingerprints: Annotated[tuple[Fingerprint, ...], msgspec.Meta(max_length=MAX_FINGERPRINTS)] = ()
    """What replay must repeat before the publisher is known to be the same, in rising order of numbers.

    It is one batch, or two for each connection since the publisher was last verified. Without any, the stream begins with a
    `Reset`.
    """
    replay_seen: bool = False
    """Whether the replay endpoint has ever sent a batch. If it has, and holds none now, it is of another incarnation."""
    degraded_reasons: dict[str, _LastSeq] = {}
    """Names of the degraded reasons that outlive a process, each with the last number that it affects."""
    fingerprints_dropped: bool = False
    """Whether there were more fingerprints than are stored: then IDENTITY stays in doubt, regardless of what replay repeats."""

    def __post_init__(self) -> None:
        if self.fingerprints and self.fingerprints[0].seq > self.last_seq:
            raise ValueError(f"fingerprint of batch {self.fingerprints[0].seq} is after last_seq {self.last_seq}")
        if any(other.seq <= one.seq for one, other in pairwise(self.fingerprints)):
            raise ValueError("fingerprints are not in rising order of seq")
        for unknown in self.degraded_reasons.keys() - _PERSISTENT_NAMES:
            raise ValueError(f"unknown degraded reason {unknown!r}")

    def encode(self) -> bytes:
        """Return the checkpoint as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Checkpoint:
        """Decode what `encode` has returned. Raises `SnapshotError` for anything else."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SnapshotError(f"invalid checkpoint of a stream: {error}; add its source without one") from error

    def merge_later(self, later: Checkpoint) -> Checkpoint:
        """Return the checkpoint for a state that was saved at some moment between this checkpoint and `later`.

        Everything after this checkpoint is delivered again, so the state must skip numbers that it knows. The result has the
        degraded reasons of both. If a new incarnation began in between, everything is delivered again after a `Reset`.
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

        Return the checkpoint itself if it has no fingerprints, or one that is not older than this.
        """
        if not self.fingerprints or fingerprint.seq <= self.fingerprints[-1].seq:
            return self
        chain = self.fingerprint_chain()
        chain.add(fingerprint)
        return self._with_chain(chain)

    def _with_chain(self, chain: FingerprintChain) -> Checkpoint:
        return msgspec.structs.replace(self, fingerprints=tuple(chain.fingerprints), fingerprints_dropped=chain.is_incomplete)

    def fingerprint_chain(self) -> FingerprintChain:
        """Return what replay must repeat before the publisher is known to be the same."""
        return FingerprintChain(self.fingerprints, is_incomplete=self.fingerprints_dropped)


class StreamPosition(NamedTuple):
    """The position of a stream.

    Its incarnation and its last delivered number. A checkpoint adds the fingerprint of that batch.
    """

    incarnation: int
    last_seq: int
    chain: FingerprintChain
    newest: Fingerprint | NewestBatch | None
    """The newest batch delivered, which the chain does not include yet."""
    replay_seen: bool
    degraded_reasons: dict[DegradedReason, int]

    def after_deliveries(self, taken: Iterable[Batch | RawBatch | Reset | Gap], current: StreamPosition) -> StreamPosition:
        """Return the position after the application has taken some deliveries, of which others still wait.

        `current` is the position after all of them. Fingerprints stay as they were, so that an incarnation in doubt is not
        verified by its own batches.
        """
        incarnation, last_seq, reasons = self.incarnation, self.last_seq, dict(self.degraded_reasons)
        chain = self._whole_chain().up_to(self.last_seq)
        newest: Batch | RawBatch | None = None
        for delivery in taken:
            if isinstance(delivery, Reset):
                incarnation, last_seq, chain, reasons, newest = delivery.incarnation, -1, FingerprintChain(), {}, None
            elif isinstance(delivery, Gap):
                last_seq = delivery.last
                if not delivery.compacted:
                    reasons[DegradedReason.LOST] = last_seq
            else:
                last_seq = delivery.seq
                newest = delivery
                if isinstance(delivery, Batch) and any(each.loses_events for each in delivery.rejected):
                    reasons[DegradedReason.REJECTED] = last_seq
        if incarnation == current.incarnation:
            # What ended a reason was taken, or waits and will be delivered again. Reports arrive without a delivery.
            reasons = {
                reason: reasons.get(reason, last)
                for reason, last in current.degraded_reasons.items()
                if reason in reasons or reason in _REPORTED_REASONS
            }
            chain = chain.merge(current._whole_chain().up_to(last_seq))
        batch = None if newest is None else NewestBatch(newest.seq, newest.payload, not newest.replayed)
        return StreamPosition(incarnation, last_seq, chain, batch, current.replay_seen, reasons)

    def _whole_chain(self) -> FingerprintChain:
        whole = FingerprintChain(self.chain.fingerprints, is_incomplete=self.chain.is_incomplete)
        whole.add(self.newest)
        return whole

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


_REPORTED_REASONS: Final = frozenset(
    {DegradedReason.REJECTED, DegradedReason.REPLAY_UNCONFIRMED, DegradedReason.DIVERGED, DegradedReason.SENDER}
)
"""Reasons that begin without a delivery."""
