"""The streams of one recording: whose frames these are, and the batches of each in the order of their numbers, each once.

Whose: recordings of `kvevents record` say in notes which worker each run is a life of, and what was lost. In others a run is a
worker, or, with several PUB endpoints, several; replies to replay requests come from an endpoint of their own and are of the
run's only stream.

In which order: live frames come in order, with holes; replayed ones come later, with what the recorder asked for. A batch that
is ahead waits for those before it until they come, until a note in the recording says that they never will, or until too many
wait: then there is a gap. A live number that is not above the last one, and not the same batch again, begins a new life of the
publisher, and so does a live batch that contradicts what a replay said of its number.

`kvevents.stream.Stream` orders a stream that can still be asked for what is missing; a recording cannot, so nothing here asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvevents.recording import RecordedFrame
from kvevents.wire import MAX_SEQ, Live, ReplayBatch, ReplayEnd, parse_live, parse_replay_reply

REMEMBERED: Final = 16_384
"""Batches by which repetitions are recognised; engines keep 10,000 for replay."""


@dataclass(frozen=True, slots=True)
class OrderingLimits:
    """Of the batches of one stream that wait for a missing one, which a replay further down may bring."""

    held_batches: int = 4096
    """It is where a recorder began to listen late, or lost something, that there are any. With 0 none waits: what is missing
    when a batch comes is a gap, and batches of several streams stay in the order in which they were recorded."""
    held_bytes: int = 16 << 20
    """Bytes of those batches."""


DEFAULT_ORDERING_LIMITS: Final = OrderingLimits()


class Arrived(NamedTuple):
    """A batch as it stands in a recording."""

    topic: bytes
    seq: int
    payload: bytes
    t: float | None
    """When it was recorded, in seconds since the epoch."""
    replayed: bool


class Placed(NamedTuple):
    """A batch in its place."""

    life: int
    gap_before: int
    """Batches that are missing right before it."""
    batch: Arrived


class Ordering:
    """Feed it `receive`, `give_up` and `restart`, in the recording's order; each returns what is next. `finish` ends it."""

    def __init__(self, limits: OrderingLimits = DEFAULT_ORDERING_LIMITS) -> None:
        self.life = 0
        self.duplicates = 0
        """Batches that came again, live or replayed."""
        self.compacted = 0
        """Batches that a snapshot represents."""
        self.late = 0
        """Replayed batches that came when their place was given up."""
        self.conflicting = 0
        """Replayed batches that differ from what was there under their number: they are of another life."""
        self._limits = limits
        self._begin()

    def _begin(self) -> None:
        self._expected = 0
        self._newest_live = -1
        self._gap = 0
        self._held: dict[int, Arrived] = {}
        self._held_bytes = 0
        self._seen: dict[int, int] = {}

    def receive(self, batch: Arrived) -> list[Placed]:
        """Take one batch."""
        same = self._same(batch)
        if not batch.replayed:
            if same is False or (same is None and batch.seq <= self._newest_live):
                return [*self.restart(), *self._admit(batch)]
            self._newest_live = max(self._newest_live, batch.seq)
        if same is not None:
            self.duplicates += same
            self.conflicting += not same
            return []
        return self._admit(batch)

    def give_up(self, first: int, last: int) -> list[Placed]:
        """Batches `first` to `last` will never come: whoever recorded has said so."""
        if not first <= self._expected <= last:
            return []
        self._skip_to(last + 1)
        return self._drain()

    def skip_compacted(self, first: int, last: int) -> list[Placed]:
        """Batches `first` to `last` are not in the recording because the snapshot that follows represents them."""
        if not first <= self._expected <= last:
            return []
        self.compacted += last + 1 - self._expected
        self._expected = last + 1
        return self._drain()

    def restart(self) -> list[Placed]:
        """What comes next is of a new life. Returns what was still waiting."""
        out = self.finish()
        self.life += self._expected > 0
        self._begin()
        return out

    def finish(self) -> list[Placed]:
        """Nothing comes any more. Returns what was still waiting."""
        out: list[Placed] = []
        while self._held:
            out += self._give_up_before_held()
        return out

    def _same(self, batch: Arrived) -> bool | None:
        """Whether it is what came under its number; None where nothing has, or nobody remembers."""
        held = self._held.get(batch.seq)
        if held is not None:
            return held.payload == batch.payload
        seen = self._seen.get(batch.seq)
        return None if seen is None else seen == hash(batch.payload)

    def _admit(self, batch: Arrived) -> list[Placed]:
        if not batch.replayed:
            self._newest_live = max(self._newest_live, batch.seq)
        if batch.seq < self._expected:
            self.late += 1
            return []
        if batch.seq == self._expected:
            return [self._place(batch), *self._drain()]
        self._held[batch.seq] = batch
        self._held_bytes += len(batch.payload)
        if len(self._held) > self._limits.held_batches or self._held_bytes > self._limits.held_bytes:
            return self._give_up_before_held()
        return []

    def _give_up_before_held(self) -> list[Placed]:
        self._skip_to(min(self._held))
        return self._drain()

    def _skip_to(self, seq: int) -> None:
        self._gap += seq - self._expected
        self._expected = seq

    def _drain(self) -> list[Placed]:
        out: list[Placed] = []
        while (batch := self._held.pop(self._expected, None)) is not None:
            self._held_bytes -= len(batch.payload)
            out.append(self._place(batch))
        return out

    def _place(self, batch: Arrived) -> Placed:
        self._expected = batch.seq + 1
        self._seen[batch.seq] = hash(batch.payload)
        if len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]
        gap, self._gap = self._gap, 0
        return Placed(self.life, gap, batch)


class RecordedStream:
    """One worker as a recording tells of it."""

    def __init__(self, run: str, endpoint: str | None, limits: OrderingLimits) -> None:
        self.run = run
        """The run that its frames are of at present."""
        self.endpoint = endpoint
        self.source = run
        self.rank: int | None = None
        """None where only its batches can tell."""
        self.followed = False
        """Whether the recorder followed it to the end of the recording: then silence means that nothing happened."""
        self.ordering: Final = Ordering(limits)
        self.topic = b""


class Streams:
    """Feed it the frames of one recording; take batches in order."""

    def __init__(self, limits: OrderingLimits = DEFAULT_ORDERING_LIMITS) -> None:
        self.malformed = 0
        """Messages that are no batches and no replies."""
        self.unplaced = 0
        """Replayed batches of runs with several PUB endpoints: nothing says which one they are of."""
        self._limits = limits
        self._runs: dict[str, dict[str | None, RecordedStream]] = {}
        self._noted: dict[tuple[str, int], RecordedStream] = {}
        self._frames: dict[str, Callable[[RecordedFrame], Iterator[tuple[RecordedStream, Placed]]]] = {
            "pub": self._live,
            "replay": self._replayed,
            "meta": self._note,
        }

    def read(self, frames: Iterable[RecordedFrame]) -> Iterator[tuple[RecordedStream, Placed]]:
        """Yield every batch of a recording, in order for each stream. Raises what reading `frames` raises."""
        for frame in frames:
            take = self._frames.get(frame.socket)
            if take is not None:
                yield from take(frame)
        for stream in self.all():
            yield from self._of(stream, stream.ordering.finish())

    def all(self) -> list[RecordedStream]:
        """Every stream, in order of appearance."""
        return list(dict.fromkeys(stream for streams in self._runs.values() for stream in streams.values()))

    def _live(self, frame: RecordedFrame) -> Iterator[tuple[RecordedStream, Placed]]:
        live = parse_live(frame.frames)
        if not isinstance(live, Live):
            self.malformed += 1
            return
        stream = self._stream(frame.run, frame.endpoint)
        stream.topic = live.topic
        yield from self._of(stream, stream.ordering.receive(Arrived(*live, frame.t, replayed=False)))

    def _replayed(self, frame: RecordedFrame) -> Iterator[tuple[RecordedStream, Placed]]:
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
        # A replay that comes before anything live: the first PUB endpoint of the run takes the stream over.
        stream = next(iter(streams.values()), None) or self._add(frame.run, None)
        topic = stream.topic if reply.topic is None else reply.topic
        yield from self._of(stream, stream.ordering.receive(Arrived(topic, reply.seq, reply.payload, frame.t, replayed=True)))

    def _note(self, frame: RecordedFrame) -> Iterator[tuple[RecordedStream, Placed]]:
        said = frame.meta or {}
        source, rank = said.get("source"), said.get("rank")
        if not isinstance(source, str) or not isinstance(rank, int):
            return
        stream = self._noted.get((source, rank))
        if stream is None:
            stream = self._noted[source, rank] = self._add(frame.run, _text(said.get("endpoint")))
            stream.source, stream.rank, stream.followed = source, rank, True
        elif stream.run != frame.run:
            yield from self._of(stream, stream.ordering.restart())
            stream.run = frame.run
            self._runs.setdefault(frame.run, {})[stream.endpoint] = stream
        gap = _gap(said.get("gap"))
        if gap is not None:
            skip = stream.ordering.skip_compacted if said.get("compacted") is True else stream.ordering.give_up
            yield from self._of(stream, skip(*gap))

    def _stream(self, run: str, endpoint: str | None) -> RecordedStream:
        streams = self._runs.setdefault(run, {})
        found = streams.get(endpoint)
        if found is None and None in streams:
            found = streams[endpoint] = streams.pop(None)
            found.endpoint = endpoint
        return found or self._add(run, endpoint)

    def _add(self, run: str, endpoint: str | None) -> RecordedStream:
        streams = self._runs.setdefault(run, {})
        stream = streams[endpoint] = RecordedStream(run, endpoint, self._limits)
        return stream

    @staticmethod
    def _of(stream: RecordedStream, batches: list[Placed]) -> Iterator[tuple[RecordedStream, Placed]]:
        return ((stream, placed) for placed in batches)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _gap(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2 or not all(type(each) is int for each in value):
        return None
    first, last = value
    return (first, last) if 0 <= first <= last < MAX_SEQ else None
