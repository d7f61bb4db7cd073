"""A model of a publisher, its incarnations, and the network between it and one stream, small enough to verify by reading.

It has only the faults of released engines and real networks. PUB drops whole messages. A replay reply loses messages after its
first ones, and perhaps its end marker. The replay buffer is bounded. Numbers are skipped. A restart ends every connection. An
event may be unreadable. The publisher may be kvevents, whose heartbeats have a digest of what it holds, correct or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from hashlib import md5
from typing import Literal, TypeAlias

import msgspec

from decoding_stream import DecodingStream
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEventBatch
from kvevents.stream import (
    Batch,
    BatchReport,
    Checkpoint,
    DegradedReason,
    FetchRequest,
    Gap,
    RawBatch,
    Reset,
    Source,
    Stream,
    StreamCounters,
    StreamLimits,
    StreamPosition,
    Trust,
    inspect_events,
)
from kvevents.wire import encode_batch, live_frames, replay_batch_frames, replay_end_frames
from kvevents.wire.framing import encode_seq

TOPIC = b"kv"
RESIDENT = 12
"""Number of batches whose blocks a publisher holds; each batch implies that the blocks of all older ones are removed."""
EVERY = 10_000.0
Claim: TypeAlias = Literal["EXACT", "lie", "DEGRADED", "STALE"]
"""The trust state in a heartbeat, whose digest is correct. A "lie" has the state EXACT and a wrong digest."""
Held: TypeAlias = frozenset[tuple[int, int]]
"""Incarnation and number of each batch whose blocks are held."""


def payload_of(true_incarnation: int, seq: int, *, clear: bool, unreadable: bool = False) -> bytes:
    ts = float(true_incarnation * 1_000_000 + seq)
    if unreadable:
        return msgspec.msgpack.encode([ts, [["Unknown", seq], *([["AllBlocksCleared"]] if clear else [])]])
    event = AllBlocksCleared() if clear else BlockStored([true_incarnation * 1_000_000 + seq], None, [seq], 1)
    return encode_batch(KVEventBatch(ts, [event]))


def keep_resident(held: Held, newest: int) -> Held:
    """Return what is held after batch number `newest`."""
    return frozenset(each for each in held if each[1] > newest - RESIDENT)


def digest_of(held: Held) -> str:
    return md5(repr(sorted(held)).encode(), usedforsecurity=False).hexdigest()


@dataclass
class Incarnation:
    number: int
    buffer: deque[tuple[int, bytes]]
    next_seq: int = 0
    payloads: dict[int, bytes] = field(default_factory=dict)
    clears: set[int] = field(default_factory=set)

    def holds(self, last: int) -> Held:
        """Return what the publisher holds after number `last`."""
        sent = [seq for seq in self.payloads if seq <= last]
        first = max((seq for seq in self.clears if seq <= last), default=0)
        return keep_resident(frozenset((self.number, seq) for seq in sent if seq >= first), max(sent, default=-1))


class Publisher:
    def __init__(self, buffer_steps: int) -> None:
        self.buffer_steps = buffer_steps
        self.true_incarnations: list[Incarnation] = []
        self.restart()

    @property
    def true_incarnation(self) -> Incarnation:
        return self.true_incarnations[-1]

    def restart(self) -> None:
        self.true_incarnations.append(Incarnation(len(self.true_incarnations), deque(maxlen=self.buffer_steps)))

    def publish(
        self, *, skipped: bool = False, clear: bool = False, unreadable: bool = False, claim: Claim | None = None
    ) -> tuple[int, bytes] | None:
        true_incarnation = self.true_incarnation
        seq = true_incarnation.next_seq
        true_incarnation.next_seq += 1
        if skipped:
            return None
        payload = payload_of(true_incarnation.number, seq, clear=clear, unreadable=unreadable)
        true_incarnation.payloads[seq] = payload
        if clear:
            true_incarnation.clears.add(seq)
        if claim is not None:
            payload = true_incarnation.payloads[seq] = self._heartbeat(true_incarnation, seq, claim)
        true_incarnation.buffer.append((seq, payload))
        return seq, payload

    def _heartbeat(self, true_incarnation: Incarnation, seq: int, claim: Claim) -> bytes:
        digest = "f" * 32 if claim == "lie" else digest_of(true_incarnation.holds(seq))
        heartbeat = Heartbeat(digest, EVERY, "EXACT" if claim == "lie" else claim, incarnation=true_incarnation.number)
        return encode_batch(
            KVEventBatch(float(true_incarnation.number * 1_000_000 + seq), [BlockRemoved([], heartbeat=heartbeat)])
        )

    def reply(self, start: int) -> list[list[bytes]]:
        return [replay_batch_frames(TOPIC, seq, payload) for seq, payload in self.true_incarnation.buffer if seq >= start]


class Observer:
    """An application that compares deliveries with what was published, and applies each number once.

    `next_seq` is the position of its stream, `applied` that of its state. They differ while a stream that was restored from an
    older checkpoint delivers batches again that the state already contains.
    """

    def __init__(self, publisher: Publisher, *, knows_incarnations: bool) -> None:
        self.publisher = publisher
        self.knows_incarnations = knows_incarnations
        self.incarnation = 0
        self.true_incarnation = 0
        self.next_seq = 0
        self.known = False
        self.batches = 0
        self._clear_state()

    def _clear_state(self) -> None:
        self.applied = -1
        self.held: Held = frozenset()
        self.unread: Held = frozenset()
        """The held batches that no consumer could decode."""
        self.gap_since_clear = False
        """Whether there was a gap since the last clear or the last equal digest."""
        self.unreadable_since_clear = False
        self.spoilt = False
        """Whether the state is wrong in a way that the stream cannot know of yet."""
        self.reported_trust: str | None = None
        """The trust state in the newest heartbeat of the publisher."""

    def resume(self, incarnation: int, next_seq: int) -> None:
        """Continue the stream from a checkpoint, with the same state."""
        self.incarnation, self.next_seq = incarnation, next_seq

    def take(self, deliveries: Sequence[Batch | Gap | Reset]) -> list[tuple[Batch, BatchReport]]:
        """Apply deliveries and return the reports about them."""
        found: list[tuple[Batch, BatchReport]] = []
        for delivery in deliveries:
            if isinstance(delivery, Reset):
                self._reset(delivery)
            elif isinstance(delivery, Gap):
                assert delivery.first == self.next_seq, f"{delivery} does not continue at {self.next_seq}"
                assert delivery.last >= delivery.first
                assert delivery.incarnation == self.incarnation
                self.next_seq = delivery.last + 1
                if delivery.last > self.applied:
                    self.applied = delivery.last
                    self.gap_since_clear = True
            else:
                report = self._batch(delivery)
                if report is not None:
                    found.append((delivery, report))
        return found

    def spoil(self) -> None:
        """Add blocks that no event announced, as a bug or a flipped bit would."""
        self.held |= {(-1, self.applied + 1)}
        self.spoilt = True

    def _reset(self, reset: Reset) -> None:
        assert reset.incarnation == self.incarnation + 1
        self.resume(reset.incarnation, 0)
        self.known = False
        self._clear_state()

    def _batch(self, batch: Batch) -> BatchReport | None:
        assert batch.seq == self.next_seq, f"{batch.seq} was delivered, but {self.next_seq} is next"
        assert batch.incarnation == self.incarnation
        true_incarnation, seq = divmod(int(batch.ts), 1_000_000)
        assert seq == batch.seq
        if self.known and self.knows_incarnations:
            assert true_incarnation == self.true_incarnation, (
                f"a batch of incarnation {true_incarnation} was delivered in {self.true_incarnation}"
            )
        assert true_incarnation >= self.true_incarnation, "a batch of an older incarnation was delivered"
        self.true_incarnation, self.known = true_incarnation, True
        assert batch.payload == self.publisher.true_incarnations[true_incarnation].payloads[seq]
        self.next_seq = seq + 1
        found = inspect_events(batch.events, batch.rejected)
        if seq <= self.applied:
            return found
        self._apply(true_incarnation, batch)
        return found if found is None or found.heartbeat is None else self._compare(found.heartbeat, found)

    def _apply(self, true_incarnation: int, batch: Batch) -> None:
        self.applied = batch.seq
        self.batches += 1
        if batch.seq in self.publisher.true_incarnations[true_incarnation].clears:
            self._confirm_all()
            self.held = self.unread = frozenset()
        self.held = keep_resident(self.held | {(true_incarnation, batch.seq)}, batch.seq)
        if batch.rejected:
            self.unreadable_since_clear = True
            self.unread |= {(true_incarnation, batch.seq)}

    def _compare(self, heartbeat: Heartbeat, found: BatchReport) -> BatchReport:
        self.reported_trust = heartbeat.trust
        agrees = digest_of(self.held - self.unread) == heartbeat.digest
        if agrees:
            self._confirm_all()
        return msgspec.structs.replace(found, digest_matches=agrees)

    def _confirm_all(self) -> None:
        self.gap_since_clear = self.unreadable_since_clear = self.spoilt = False

    def holds_everything(self) -> bool:
        """Return whether the state equals that of an application that has followed from the start to its newest batch."""
        return self.held == self.publisher.true_incarnations[self.true_incarnation].holds(max(self.applied, self.next_seq - 1))


def clears(batch: Batch) -> bool:
    return any(isinstance(event, AllBlocksCleared) for event in batch.events)


class StreamPair:
    """Two streams with the same input: one delivers raw batches, one decodes them. Tests decide when reports about raw batches
    are passed to the first one.

    It has the interface of a stream. Both streams must deliver and request the same, and have the same degraded reasons after
    all reports.
    """

    def __init__(self, source: Source, limits: StreamLimits) -> None:
        self.source = source
        self.raw = Stream(source, limits)
        self.decoding = DecodingStream(source, limits)
        self.unreported: list[tuple[RawBatch, Batch]] = []

    def position(self) -> StreamPosition:
        return self.raw.position()

    def restore(self, checkpoint: Checkpoint) -> None:
        self.raw.restore(checkpoint)
        self.decoding.restore(checkpoint)

    @property
    def trust(self) -> Trust:
        return self.raw.trust

    @property
    def waiting(self) -> int:
        return self.raw.waiting

    @property
    def last_seq(self) -> int:
        return self.raw.last_seq

    @property
    def is_fetching(self) -> bool:
        return self.raw.is_fetching

    @property
    def counters(self) -> StreamCounters:
        return self.raw.counters

    def begin_connection(self, now: float) -> None:
        self.raw.begin_connection(now)
        self.decoding.begin_connection(now)

    def end_connection(self) -> None:
        self.raw.end_connection()
        self.decoding.end_connection()

    def receive_live(self, frames: Sequence[bytes], now: float) -> None:
        self.decoding.receive_live(frames, now)
        if frames[1] in map(encode_seq, self.raw.expected_run(1)) and frames[0] == self.raw.topic:
            self.raw.receive_run([frames[2]], now)
        else:
            self.raw.receive_live(frames, now)

    def receive_replay(self, frames: Sequence[bytes], now: float) -> None:
        self.raw.receive_replay(frames, now)
        self.decoding.receive_replay(frames, now)

    def tick(self, now: float) -> None:
        self.raw.tick(now)
        self.decoding.tick(now)

    def request_to_send(self, now: float) -> FetchRequest | None:
        request = self.raw.request_to_send(now)
        assert request == self.decoding.request_to_send(now)
        return request

    def deliveries(self) -> list[Batch | Gap | Reset]:
        deliveries: list[Batch | Gap | Reset] = []
        for delivery in self.raw.deliveries():
            if isinstance(delivery, RawBatch):
                batch = delivery.decode()
                deliveries.append(batch)
                self._read(delivery, batch)
            else:
                deliveries.append(delivery)
        # The report about a heartbeat may end the current incarnation, which the decoding stream has noticed already.
        deliveries += [delivery for delivery in self.raw.deliveries() if not isinstance(delivery, RawBatch)]
        assert deliveries == self.decoding.deliveries()
        assert self.decoding.degraded_reasons - {DegradedReason.REJECTED} <= self.raw.degraded_reasons, (
            "repaired by an older clear"
        )
        return deliveries

    def _read(self, raw: RawBatch, batch: Batch) -> None:
        report = inspect_events(batch.events, batch.rejected)
        if report is not None and report.heartbeat is not None:
            self.raw.report(raw, report)
        elif report is not None:
            self.unreported.append((raw, batch))

    def report(self, batch: Batch, report: BatchReport) -> None:
        """Report to both streams whether the state equals the publisher's, after all older reports, which may explain it."""
        while self.unreported:
            self.report_one(-1)
        raw = RawBatch(batch.source, batch.rank, batch.incarnation, batch.seq, batch.replayed, batch.payload, batch.topic)
        self.raw.report(raw, BatchReport(digest_matches=report.digest_matches))
        self.decoding.report(batch, report)

    def report_one(self, which: int) -> None:
        """Pass one of the pending reports to the raw stream."""
        raw, batch = self.unreported.pop(which % len(self.unreported))
        self.raw.report(raw, BatchReport(batch.rejected, clears(batch)))

    def report_all(self) -> None:
        while self.unreported:
            self.report_one(-1)
        assert self.raw.degraded_reasons == self.decoding.degraded_reasons
        assert self.raw.counters == self.decoding.counters
        assert self.raw.trust == self.decoding.trust


@dataclass(frozen=True)
class Saved:
    """What an application has stored on disk: a checkpoint and the state of the same moment."""

    checkpoint: Checkpoint
    state: Observer


class Network:
    """Passes frames between one publisher and one stream. The test controls every fault."""

    def __init__(self, publisher: Publisher, stream: DecodingStream | StreamPair) -> None:
        self.publisher = publisher
        self.stream = stream
        # Without replay, a new incarnation that has already passed the old number cannot be distinguished from the old one.
        self.observer = Observer(publisher, knows_incarnations=stream.source.replay_endpoint is not None)
        self.now = 0.0
        self.is_up = False
        self.was_up = False
        self.announce = False
        self.live: deque[list[bytes]] = deque()
        self.replies: deque[list[bytes]] = deque()
        self.reply_limit: int | None = None
        self.lose_marker = False
        self.is_silent = False
        self.requested_starts: list[int] = []
        self.saved: list[Saved] = []
        self._current_checkpoints = stream.position()
        self._before = (self._current_checkpoints, copy(self.observer))
        self._delivered: list[Batch | Gap | Reset] = []
        self.unreported: list[tuple[Batch, BatchReport]] = []
        self.reports_at_once = True
        self.has_delivered = False
        """Whether anything was delivered since the last call of `quiesce`."""
        self.is_consistent = True
        """Whether all digests were correct, and the application's state equals what was delivered."""

    # --- the publisher's side

    def publish(
        self,
        *,
        drop: bool = False,
        skipped: bool = False,
        clear: bool = False,
        unreadable: bool = False,
        claim: Claim | None = None,
    ) -> None:
        self.is_consistent = self.is_consistent and claim != "lie"
        published = self.publisher.publish(skipped=skipped, clear=clear, unreadable=unreadable, claim=claim)
        if published is not None and self.is_up and not drop:
            self.live.append(live_frames(TOPIC, *published))

    def cut(self) -> None:
        """End the connection.

        Frames that were sent before are still read, and the subscriber notices the end before anything newer.
        """
        if self.is_up:
            self.is_up = False
            self.announce = False
            self.replies.clear()
            self.stream.end_connection()
            self._settle()

    def restart(self) -> None:
        self.cut()
        self.publisher.restart()

    def connect(self) -> None:
        if not self.is_up:
            self.is_up = True
            if self.was_up:
                self.announce = True
            else:
                self.was_up = True
                self.stream.begin_connection(self.now)
                self._settle()

    # --- the subscriber's side

    def read_live(self, count: int = 1_000_000) -> None:
        for _ in range(min(count, len(self.live))):
            self.stream.receive_live(self.live.popleft(), self.now)
            self._settle()
        if not self.live and self.announce:
            self.announce = False
            self.stream.begin_connection(self.now)
            self._settle()

    def read_replies(self, count: int = 1_000_000) -> None:
        for _ in range(min(count, len(self.replies))):
            if not self.replies:
                break
            self.stream.receive_replay(self.replies.popleft(), self.now)
            self._settle()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.stream.tick(self.now)
        self._settle()

    # --- a subscriber that restarts

    def save(self, waiting: int = 0) -> None:
        """Store a checkpoint and the state before the last `waiting` of the newest deliveries."""
        now, state = self.stream.position(), copy(self.observer)
        if waiting := min(waiting, len(self._delivered)):
            before, state = self._before[0], copy(self._before[1])
            handed_out = self._delivered[:-waiting]
            state.take(handed_out)
            now = before.after_deliveries(handed_out, now)
        checkpoint = now.checkpoint(self.stream.source.label, self.stream.source.rank)
        assert Checkpoint.decode(checkpoint.encode()) == checkpoint
        assert (checkpoint.incarnation, checkpoint.last_seq + 1) == (state.incarnation, state.next_seq)
        newest = self.saved[-1].checkpoint if self.saved else checkpoint
        if (newest.incarnation, newest.last_seq) <= (checkpoint.incarnation, checkpoint.last_seq):
            self.saved.append(Saved(checkpoint, state))

    def resubscribe(self, stream: DecodingStream | StreamPair, which: int, newer: int) -> None:
        """Restart the subscriber's process with an older checkpoint, and the state that was saved `newer` checkpoints later."""
        self.cut()
        older = which % len(self.saved)
        kept = self.saved[min(older + newer, len(self.saved) - 1)]
        checkpoint = self.saved[older].checkpoint
        if newer:
            checkpoint = checkpoint.merge_later(kept.checkpoint)
        del self.saved[older:]
        stream.restore(checkpoint)
        assert stream.trust == Trust.STALE
        self.stream, self.observer = stream, copy(kept.state)
        self.observer.resume(checkpoint.incarnation, checkpoint.last_seq + 1)
        self.was_up = False
        self.live.clear()
        self.unreported.clear()
        self._delivered, self._current_checkpoints = [], stream.position()
        self.saved.append(Saved(checkpoint, copy(self.observer)))

    def spoil(self) -> None:
        """Make the application's state wrong."""
        self.observer.spoil()
        self.is_consistent = False

    def report(self, which: int = 0) -> None:
        """Have the application pass one of its pending reports about heartbeats to the stream."""
        batch, report = self.unreported.pop(which % len(self.unreported))
        self.stream.report(batch, report)
        if report.digest_matches is False and batch.incarnation == self.observer.incarnation:
            self.observer.spoilt = False
        self._settle()

    def report_all(self) -> None:
        while self.unreported:
            self.report()

    def _settle(self) -> None:
        before = copy(self.observer)
        deliveries = self.stream.deliveries()
        if deliveries:
            self.has_delivered = True
            self._before = (self._current_checkpoints, before)
            self._delivered = deliveries
        self.unreported += [each for each in self.observer.take(deliveries) if each[1].heartbeat is not None]
        self._current_checkpoints = self.stream.position()
        if self.reports_at_once:
            self.report_all()
        while (request := self.stream.request_to_send(self.now)) is not None:
            self._answer(request)
        if not self.stream.is_fetching:
            self.replies.clear()
        self.check_exact()

    def _answer(self, request: FetchRequest) -> None:
        self.requested_starts.append(request.start)
        if request.needs_new_connection:
            self.replies.clear()
        if not self.is_up or self.is_silent:
            return
        reply = self.publisher.reply(request.start)
        if self.reply_limit is not None:
            reply = reply[: self.reply_limit]
        self.replies.extend(reply)
        if not self.lose_marker:
            self.replies.append(replay_end_frames(has_topic=True))

    def check_exact(self) -> None:
        """Check that a stream in state EXACT has no gap, and that no batch before the newest delivered one is missing."""
        if self.stream.trust == Trust.EXACT and not self.observer.spoilt:
            assert not self.observer.gap_since_clear, "EXACT after a gap"
            assert self.observer.reported_trust in {None, "EXACT"}, "EXACT although its publisher is not"
            assert isinstance(self.stream, StreamPair) or not self.observer.unreadable_since_clear, (
                "EXACT after an unreadable event"
            )
            assert self.stream.waiting == 0, "EXACT while batches are waiting"
            assert self.stream.last_seq + 1 == self.observer.next_seq
            assert self.observer.holds_everything(), "EXACT with a state that differs from the publisher's"

    def quiesce(self) -> None:
        """End all faults, and run until nothing changes any more."""
        self.reply_limit, self.lose_marker, self.is_silent = None, False, False
        self.connect()
        self._settle()
        for _ in range(60):
            self.read_live()
            self.read_replies()
            self.advance(1.0)
        self.has_delivered = False
