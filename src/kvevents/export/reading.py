"""The streams of one recording: whose frames these are.

Recordings of `kvevents record` say in notes which worker each run is a life of, and what was lost. In others a run is a worker,
or, with several PUB endpoints, several; replies to replay requests come from an endpoint of their own and are of the run's only
stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from kvevents.export.limits import ExportLimits
from kvevents.export.ordering import Arrived, Ordering, Placed
from kvevents.recording import RecordedFrame, RecordingReader
from kvevents.wire import MAX_SEQ, Live, ReplayBatch, ReplayEnd, parse_live, parse_replay_reply


class RecordedStream:
    """One worker as a recording tells of it."""

    def __init__(self, run: str, endpoint: str | None, limits: ExportLimits) -> None:
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

    def __init__(self, limits: ExportLimits) -> None:
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

    def read(self, reader: RecordingReader) -> Iterator[tuple[RecordedStream, Placed]]:
        """Yield every batch of a recording, in order for each stream. Raises `RecordingError`."""
        for frame in reader:
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
