"""The streams of one recording: assigns frames to streams, and puts the batches of each stream in order, each batch once.

Assignment: in recordings of `kvevents record`, notes name the worker of each run and the batches that were lost. In other
recordings a run is one worker or, with several PUB endpoints, several. Replies to replay requests come from an endpoint of
their own and belong to the only stream of the run.

Order: live frames are recorded in order, with gaps. Replayed frames follow later, when the recorder requested them. A batch
that is ahead waits for the missing ones until they come, until a note says that they are lost, or until too many batches wait.
Then there is a gap. A new incarnation of the publisher begins with a live number that is not above the last one, unless it is
the same batch again. It also begins with a live batch that differs from the replayed batch of its number.

`kvevents.stream.Stream` orders a stream whose missing batches can still be requested, which a recording does not allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvevents.recording import RecordedFrame
from kvevents.wire import MAX_SEQ, Live, ReplayBatch, ReplayEnd, parse_live, parse_replay_reply

MAX_SEEN: Final = 16_384
"""Batches whose hash is stored to recognise repetitions. Engines keep 10,000 batches for replay."""


@dataclass(frozen=True, slots=True)
class OrderingLimits:
    """Limits on the batches of one stream that wait for a missing batch, which a later replay may contain."""

    held_batches: int = 4096
    """Number of batches. Batches wait only if the recorder began late or lost batches. With 0 no batch waits: missing batches
    are a gap at once, and batches of several streams stay in the order in which they were recorded."""
    held_bytes: int = 16 << 20
    """Size of the payloads of these batches."""


DEFAULT_ORDERING_LIMITS: Final = OrderingLimits()


class RecordedBatch(NamedTuple):
    """A batch as it was recorded."""

    topic: bytes
    seq: int
    payload: bytes
    t: float | None
    """Time of the recording, in seconds since the epoch."""
    replayed: bool


class OrderedBatch(NamedTuple):
    """A batch in its place in the stream."""

    incarnation: int
    gap_before: int
    """Number of batches that are missing right before it."""
    batch: RecordedBatch


class Ordering:
    """Puts the batches of one stream in order.

    Call `receive`, `skip_lost`, `skip_compacted` and `restart` in the order of the recording, then `finish`. Each call returns
    the batches that are next.
    """

    def __init__(self, limits: OrderingLimits = DEFAULT_ORDERING_LIMITS) -> None:
        self.incarnation = 0
        self.duplicates = 0
        """Batches that were recorded again, live or replayed."""
        self.compacted = 0
        """Batches that a snapshot represents."""
        self.late = 0
        """Replayed batches that came after their place was given up."""
        self.conflicting = 0
        """Replayed batches that differ from the batch of their number: they are of another incarnation."""
        self._limits = limits
        self._begin()

    def _begin(self) -> None:
        self._expected = 0
        self._newest_live = -1
        self._gap = 0
        self._held: dict[int, RecordedBatch] = {}
        self._held_bytes = 0
        self._seen: dict[int, int] = {}

    def receive(self, batch: RecordedBatch) -> list[OrderedBatch]:
        """Add the next recorded batch."""
        is_same = self._is_same(batch)
        if not batch.replayed:
            if is_same is False or (is_same is None and batch.seq <= self._newest_live):
                return [*self.restart(), *self._add(batch)]
            self._newest_live = max(self._newest_live, batch.seq)
        if is_same is not None:
            self.duplicates += is_same
            self.conflicting += not is_same
            return []
        return self._add(batch)

    def skip_lost(self, first: int, last: int) -> list[OrderedBatch]:
        """Stop waiting for batches `first` to `last`, because a note of the recorder says that they are lost."""
        if not first <= self._expected <= last:
            return []
        self._skip_to(last + 1)
        return self._take_ready()

    def skip_compacted(self, first: int, last: int) -> list[OrderedBatch]:
        """Stop waiting for batches `first` to `last`, because the snapshot that follows represents them."""
        if not first <= self._expected <= last:
            return []
        self.compacted += last + 1 - self._expected
        self._expected = last + 1
        return self._take_ready()

    def restart(self) -> list[OrderedBatch]:
        """Begin a new incarnation. Return the batches of the old one that were still waiting."""
        ordered = self.finish()
        self.incarnation += self._expected > 0
        self._begin()
        return ordered

    def finish(self) -> list[OrderedBatch]:
        """End the recording. Return the batches that were still waiting."""
        ordered: list[OrderedBatch] = []
        while self._held:
            ordered += self._skip_to_held()
        return ordered

    def _is_same(self, batch: RecordedBatch) -> bool | None:
        """Return whether a batch equals the one recorded before under its number; None if that is not known."""
        held = self._held.get(batch.seq)
        if held is not None:
            return held.payload == batch.payload
        seen = self._seen.get(batch.seq)
        return None if seen is None else seen == hash(batch.payload)

    def _add(self, batch: RecordedBatch) -> list[OrderedBatch]:
        if not batch.replayed:
            self._newest_live = max(self._newest_live, batch.seq)
        if batch.seq < self._expected:
            self.late += 1
            return []
        if batch.seq == self._expected:
            return [self._place(batch), *self._take_ready()]
        self._held[batch.seq] = batch
        self._held_bytes += len(batch.payload)
        if len(self._held) > self._limits.held_batches or self._held_bytes > self._limits.held_bytes:
            return self._skip_to_held()
        return []

    def _skip_to_held(self) -> list[OrderedBatch]:
        self._skip_to(min(self._held))
        return self._take_ready()

    def _skip_to(self, seq: int) -> None:
        self._gap += seq - self._expected
        self._expected = seq

    def _take_ready(self) -> list[OrderedBatch]:
        ordered: list[OrderedBatch] = []
        while (batch := self._held.pop(self._expected, None)) is not None:
            self._held_bytes -= len(batch.payload)
            ordered.append(self._place(batch))
        return ordered

    def _place(self, batch: RecordedBatch) -> OrderedBatch:
        self._expected = batch.seq + 1
        self._seen[batch.seq] = hash(batch.payload)
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        gap, self._gap = self._gap, 0
        return OrderedBatch(self.incarnation, gap, batch)


class RecordedStream:
    """One stream of a recording."""

    def __init__(self, run: str, endpoint: str | None, limits: OrderingLimits) -> None:
        self.run = run
        """The run to which its newest frames belong."""
        self.endpoint = endpoint
        self.source = run
        self.rank: int | None = None
        """None if only the batches themselves contain it."""
        self.is_followed = False
        """Whether the recorder followed it until the end of the recording, so that silence means that nothing happened."""
        self.ordering: Final = Ordering(limits)
        self.topic = b""


class RecordingStreams:
    """Reads the frames of one recording and yields batches in order."""

    def __init__(self, limits: OrderingLimits = DEFAULT_ORDERING_LIMITS) -> None:
        self.malformed = 0
        """Messages that are neither batches nor replies."""
        self.unplaced = 0
        """Replayed batches of runs with several PUB endpoints, which cannot be assigned to one of them."""
        self._limits = limits
        self._runs: dict[str, dict[str | None, RecordedStream]] = {}
        self._noted: dict[tuple[str, int], RecordedStream] = {}
        """Streams by the source and rank that notes give."""
        self._readers: dict[str, Callable[[RecordedFrame], Iterator[tuple[RecordedStream, OrderedBatch]]]] = {
            "pub": self._read_live,
            "replay": self._read_replay,
            "meta": self._read_note,
        }

    def read(self, frames: Iterable[RecordedFrame]) -> Iterator[tuple[RecordedStream, OrderedBatch]]:
        """Yield every batch of a recording, in order for each stream. Raise what reading `frames` raises."""
        for frame in frames:
            reader = self._readers.get(frame.socket)
            if reader is not None:
                yield from reader(frame)
        for stream in self.all():
            yield from self._with_stream(stream, stream.ordering.finish())

    def all(self) -> list[RecordedStream]:
        """Return every stream, in order of appearance."""
        return list(dict.fromkeys(stream for streams in self._runs.values() for stream in streams.values()))

    def _read_live(self, frame: RecordedFrame) -> Iterator[tuple[RecordedStream, OrderedBatch]]:
        live = parse_live(frame.frames)
        if not isinstance(live, Live):
            self.malformed += 1
            return
        stream = self._stream(frame.run, frame.endpoint)
        stream.topic = live.topic
        yield from self._with_stream(stream, stream.ordering.receive(RecordedBatch(*live, frame.t, replayed=False)))

    def _read_replay(self, frame: RecordedFrame) -> Iterator[tuple[RecordedStream, OrderedBatch]]:
        reply = parse_replay_reply(frame.frames)
        if isinstance(reply, ReplayEnd):
            return
        if not isinstance(reply, ReplayBatch):
            self.malformed += 1
            return
        streams = self._runs.setdefault(frame.run, {})
        if len(streams) > 1:
            self.unplaced += 1
            return
        # If a replay precedes everything live, the first PUB endpoint of the run takes over the stream.
        stream = next(iter(streams.values()), None) or self._add(frame.run, None)
        topic = stream.topic if reply.topic is None else reply.topic
        batch = RecordedBatch(topic, reply.seq, reply.payload, frame.t, replayed=True)
        yield from self._with_stream(stream, stream.ordering.receive(batch))

    def _read_note(self, frame: RecordedFrame) -> Iterator[tuple[RecordedStream, OrderedBatch]]:
        note = frame.meta or {}
        source, rank = note.get("source"), note.get("rank")
        if not isinstance(source, str) or not isinstance(rank, int):
            return
        stream = self._noted.get((source, rank))
        if stream is None:
            stream = self._noted[source, rank] = self._add(frame.run, _text(note.get("endpoint")))
            stream.source, stream.rank, stream.is_followed = source, rank, True
        elif stream.run != frame.run:
            yield from self._with_stream(stream, stream.ordering.restart())
            stream.run = frame.run
            self._runs.setdefault(frame.run, {})[stream.endpoint] = stream
        gap = _gap(note.get("gap"))
        if gap is not None:
            skip = stream.ordering.skip_compacted if note.get("compacted") is True else stream.ordering.skip_lost
            yield from self._with_stream(stream, skip(*gap))

    def _stream(self, run: str, endpoint: str | None) -> RecordedStream:
        streams = self._runs.setdefault(run, {})
        stream = streams.get(endpoint)
        if stream is None and None in streams:
            stream = streams[endpoint] = streams.pop(None)
            stream.endpoint = endpoint
        return stream or self._add(run, endpoint)

    def _add(self, run: str, endpoint: str | None) -> RecordedStream:
        streams = self._runs.setdefault(run, {})
        stream = streams[endpoint] = RecordedStream(run, endpoint, self._limits)
        return stream

    @staticmethod
    def _with_stream(stream: RecordedStream, batches: list[OrderedBatch]) -> Iterator[tuple[RecordedStream, OrderedBatch]]:
        return ((stream, batch) for batch in batches)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _gap(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2 or not all(type(each) is int for each in value):
        return None
    first, last = value
    return (first, last) if 0 <= first <= last < MAX_SEQ else None
