"""Identifies the incarnation that batches belong to: fingerprints, the cross-check of replay with live batches, and quarantine.

A number and its payload together identify an incarnation of a publisher. Two incarnations can have equal batches up to some
number, or between two numbers. So after a reconnect, replay must repeat the fingerprints of the first and the newest batch of
each connection since the publisher was last verified (`FingerprintChain`), and of each batch in quarantine (`Quarantine`).

Requests to a replay endpoint can reach another engine, sometimes or always. The next incarnation can answer a request before
the subscriber has read the final frames of its predecessor. `CrossCheck` records matches of replayed and live batches.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Final, Self

import msgspec

from kvevents.stream.sequencer import PendingBytes
from kvevents.stream.settings import StreamLimits
from kvevents.wire import MAX_SEQ, Live

MAX_FINGERPRINTS: Final = 16
"""Maximum number of fingerprints in a chain. If a chain needs more fingerprints, it is incomplete, and IDENTITY remains a
degraded reason. An unverified connection adds two fingerprints."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SEQ)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


def payload_digest(payload: bytes) -> bytes:
    """Return the SHA-256 of a payload."""
    return hashlib.sha256(payload).digest()


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number and digest of a batch, which identify an incarnation without the payload."""

    seq: _Count
    digest: _Digest
    """SHA-256 of the payload."""
    live: bool
    """Whether the batch came live. A replay endpoint that repeats a live batch belongs to the same stream as the batch."""

    @classmethod
    def of_batch(cls, seq: int, payload: bytes, *, live: bool) -> Self:
        """Return the fingerprint of a batch."""
        return cls(seq, payload_digest(payload), live)

    def matches(self, payload: bytes) -> bool:
        """Whether `payload` is the payload of the batch."""
        return self.digest == payload_digest(payload)

    def fingerprint(self) -> Fingerprint:
        """Return this fingerprint, so that `NewestBatch` has the same interface."""
        return self


class NewestBatch(msgspec.Struct, frozen=True, gc=False):
    """The newest batch, whose digest is computed only when it is needed: on a busy stream, few batches need a digest."""

    seq: int
    payload: bytes
    live: bool

    def matches(self, payload: bytes) -> bool:
        """Whether `payload` is the payload of the batch."""
        return self.payload == payload

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the batch."""
        return Fingerprint.of_batch(self.seq, self.payload, live=self.live)


class FingerprintChain:
    """The fingerprints that replay must repeat before all delivered batches are known to belong to one incarnation."""

    __slots__ = ("fingerprints", "is_incomplete", "wants_first_of_connection")

    def __init__(self, fingerprints: Sequence[Fingerprint] = (), *, is_incomplete: bool = False) -> None:
        self.fingerprints = list(fingerprints)
        """Fingerprints in ascending order of their numbers."""
        self.is_incomplete = is_incomplete
        """Whether there were more than `MAX_FINGERPRINTS`. Without the dropped fingerprints, not all batches are verified."""
        self.wants_first_of_connection = False
        """Whether the next batch is the first one of a connection whose publisher was not verified."""

    def add(self, *batches: Fingerprint | NewestBatch | None) -> None:
        """Add the batches that are newer than all fingerprints. If there are `MAX_FINGERPRINTS`, replace the newest one."""
        for batch in batches:
            if batch is None or (self.fingerprints and batch.seq <= self.fingerprints[-1].seq):
                continue
            if len(self.fingerprints) >= MAX_FINGERPRINTS:
                self.is_incomplete = True
                self.fingerprints.pop()
            self.fingerprints.append(batch.fingerprint())

    def add_first_of_connection(self, first: Fingerprint | NewestBatch) -> None:
        """Add the first batch of a connection if that batch is newer than the whole chain."""
        if not self.fingerprints or first.seq > self.fingerprints[-1].seq:
            self.wants_first_of_connection = False
            self.add(first)

    @property
    def first(self) -> Fingerprint | None:
        """The oldest fingerprint. An answer that repeats this fingerprint can belong to the chain's incarnation."""
        return self.fingerprints[0] if self.fingerprints else None

    @property
    def last(self) -> Fingerprint | None:
        """The newest fingerprint."""
        return self.fingerprints[-1] if self.fingerprints else None

    def first_after(self, seq: int) -> Fingerprint | None:
        """Return the first fingerprint with a number above `seq`."""
        return next((fingerprint for fingerprint in self.fingerprints if fingerprint.seq > seq), None)

    def merge(self, other: FingerprintChain) -> FingerprintChain:
        """Return a chain with all fingerprints of two chains of one stream."""
        by_seq = {fingerprint.seq: fingerprint for fingerprint in (*other.fingerprints, *self.fingerprints)}
        fingerprints = [by_seq[seq] for seq in sorted(by_seq)]
        chain = FingerprintChain(fingerprints[:MAX_FINGERPRINTS], is_incomplete=self.is_incomplete or other.is_incomplete)
        chain.add(*fingerprints[MAX_FINGERPRINTS:])
        return chain

    def up_to(self, seq: int) -> FingerprintChain:
        """Return the part of the chain with numbers up to `seq`."""
        return FingerprintChain([batch for batch in self.fingerprints if batch.seq <= seq], is_incomplete=self.is_incomplete)


class CrossCheck:
    """Verifies that replayed and live batches come from one publisher and one incarnation.

    An answer comes from a single process. So an answer is confirmed if it repeats a live batch of this connection and has no
    newer batches. If a confirmed answer begins with the newest batch of an earlier answer, the earlier answer is confirmed too.
    The newest batch of an answer that is not confirmed is *unconfirmed*; later requests begin with it.
    """

    def __init__(self) -> None:
        self.is_incomplete = True
        """Whether a delivered batch may come from a publisher or incarnation other than that of the live batches."""
        self.first_live_seq: int | None = None
        """Number of the first live batch of this connection."""
        self.has_matched = False
        """Whether any live batch of this connection was equal to the replayed batch with its number."""
        self.unconfirmed: Fingerprint | None = None
        """The newest batch in the newest answer, until that batch is confirmed."""
        self._earlier_unconfirmed: list[Fingerprint] = []
        """Unconfirmed fingerprints of earlier answers that the newest answer did not repeat, in ascending order."""
        self.live_before_replay: Fingerprint | None = None
        """The newest live batch before the first unconfirmed answer; None if the open answer began with a live batch."""
        self.last_live: NewestBatch | None = None
        """The newest live batch that has to be compared with replay."""
        self.begin_answer(None)

    def begin_answer(self, live: NewestBatch | None) -> None:
        """Begin an answer, which is confirmed if it repeats the batch `live`, or the next live batch if `live` is None."""
        self.answer_live: NewestBatch | None = live
        self.answer_began_with_live = False
        """Whether the answer began with a batch that had arrived live."""

    def reconnect(self) -> None:
        """Begin a new connection; matches on earlier connections do not verify its publisher."""
        self.first_live_seq = None
        self.has_matched = False
        self.is_incomplete = True

    @property
    def all_unconfirmed(self) -> list[Fingerprint]:
        """Fingerprints that one answer must repeat, in ascending order, before it repeats a live batch."""
        return self._earlier_unconfirmed if self.unconfirmed is None else [*self._earlier_unconfirmed, self.unconfirmed]

    def add_live(self, live: NewestBatch) -> None:
        """Record a live batch that has to be compared with replay.

        The open answer is compared with the first recorded batch; a later answer is compared with the newest recorded batch.
        """
        self.last_live = live
        if self.answer_live is None or (self.unconfirmed is not None and self.answer_live.seq < self.unconfirmed.seq):
            self.answer_live = live

    def add_replayed(self, fingerprint: Fingerprint, live_before: Fingerprint | NewestBatch | None) -> None:
        """Record a replayed batch, before which `live_before` was the newest live batch."""
        if live_before is not None and not self.answer_began_with_live and not self.all_unconfirmed:
            self.live_before_replay = live_before.fingerprint()
        self.unconfirmed = fingerprint
        self.is_incomplete = True

    def record_repeated(self, fingerprint: Fingerprint) -> None:
        """Record that an answer has repeated the batch of `fingerprint` and all earlier unconfirmed batches."""
        if self.is_incomplete and all(candidate.seq <= fingerprint.seq for candidate in self.all_unconfirmed):
            self._earlier_unconfirmed.clear()
            self.unconfirmed = fingerprint

    def separate_next_answer(self) -> None:
        """Allow the next answer to begin without the unconfirmed batch, unless too many batches are unconfirmed."""
        if self.unconfirmed is not None and len(self._earlier_unconfirmed) < MAX_FINGERPRINTS:
            self._earlier_unconfirmed.append(self.unconfirmed)
            self.unconfirmed = None

    def confirm(self, seq: int) -> None:
        """Record that the replayed batch `seq` equals the live batch `seq`."""
        if self.first_live_seq is None or seq < self.first_live_seq:
            return
        self.has_matched = True
        if self.unconfirmed is not None and self.unconfirmed.seq <= seq:
            self.unconfirmed = None
        if not self.all_unconfirmed:
            self.live_before_replay = None
        if not self.all_unconfirmed or (self.last_live is not None and self.last_live.seq <= seq):
            self.last_live = None
        self._update()

    def forget_unconfirmed(self) -> None:
        """Forget unconfirmed batches, because a snapshot replaces them."""
        self.unconfirmed = None
        self._earlier_unconfirmed.clear()
        self._update()

    def clear(self) -> None:
        """Record that a live batch clears everything, so that earlier replayed batches no longer matter."""
        self.live_before_replay = None
        self.forget_unconfirmed()

    def match_digest(self, seq: int) -> None:
        """Record that the state after live batch `seq` has the publisher's digest, which confirms all earlier answers."""
        if self.first_live_seq is not None and seq >= self.first_live_seq:
            self._earlier_unconfirmed.clear()
            self.confirm(seq)

    def _update(self) -> None:
        self.is_incomplete = not self.has_matched or self.unconfirmed is not None or bool(self._earlier_unconfirmed)


class Quarantine:
    """Live frames, in order of arrival, that wait until the publisher is verified to be the same."""

    def __init__(self, limits: StreamLimits, pending: PendingBytes) -> None:
        self._limits = limits
        self._pending = pending
        self._frames: list[Live] = []
        self._bytes = 0
        self._connection_starts = [0]
        """Index of the first frame of each connection that has frames. The first entry is always 0."""

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def newest(self) -> Live | None:
        """The frame that arrived last."""
        return self._frames[-1] if self._frames else None

    def add(self, live: Live) -> bool:
        """Add a frame. Return False if a limit is reached."""
        size = self._bytes + len(live.payload)
        is_full = len(self._frames) >= self._limits.max_pending_batches or size > self._limits.max_pending_bytes
        if is_full or not self._pending.has_room(len(live.payload)):
            return False
        self._frames.append(live)
        self._bytes = size
        self._pending.bytes_used += len(live.payload)
        return True

    def reconnect(self) -> None:
        """Begin a new connection. All frames that were added before this call belong to earlier connections."""
        if self._connection_starts[-1] < len(self._frames):
            self._connection_starts.append(len(self._frames))

    @property
    def has_current_frames(self) -> bool:
        """Whether any frame belongs to the current connection."""
        return len(self._frames) > self._connection_starts[-1]

    def around_reconnects(self) -> list[NewestBatch]:
        """Return the last frame of each connection and the first frame of the next one, in order."""
        frames = [live for start in self._connection_starts for live in self._frames[max(0, start - 1) : start + 1]]
        return [NewestBatch(live.seq, live.payload, True) for live in frames]

    def old_fingerprint_after(self, seq: int) -> Fingerprint | None:
        """Return the fingerprint of the first frame with a number above `seq`, among the frames of earlier connections."""
        end = self._connection_starts[-1]
        index = bisect_right(self._frames, seq, hi=end, key=lambda live: live.seq)
        return Fingerprint.of_batch(self._frames[index].seq, self._frames[index].payload, live=True) if index < end else None

    def remove_frames(self) -> list[Live]:
        """Remove all waiting frames from the quarantine and return them."""
        frames, self._frames = self._frames, []
        self._pending.bytes_used -= self._bytes
        self._bytes = 0
        self._connection_starts = [0]
        return frames

    def remove_and_split_frames(self) -> tuple[int, list[Live]]:
        """Remove all frames. Return the number of frames of earlier connections, and the frames of the current connection."""
        count = self._connection_starts[-1]
        return count, self.remove_frames()[count:]
