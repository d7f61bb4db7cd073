"""Reads the deliveries of one recording: assigns frames to streams, and feeds the frames of each to `kvevents.stream.Stream`.

In recordings of `kvevents record`, notes name the stream of each run, its restarts, and the gaps that a snapshot replaces. In
other recordings each PUB endpoint of a run is a stream. Replies to replay requests belong to the only stream of their run.
A stream waits for missing batches until recorded replies bring them, its run ends, or too many batches wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace

from kvevents.recording.files import RecordedFrame
from kvevents.stream import BatchReport, Gap, RawBatch, RawDelivery, Reset, Source, Stream
from kvevents.wire import Live, Malformed, ReplayBatch, parse_live, parse_replay_reply, replay_batch_frames
from kvevents.wire.decode import begins_with_clear

MAX_WAITING_BATCHES: Final = 4096
"""Maximum number of batches in one stream that wait for a missing batch. If more wait, the missing batches count as lost."""
MAX_WAITING_BYTES: Final = 16 << 20
"""Maximum number of payload bytes of the waiting batches in one stream."""
_RECEIVE_TIME: Final = math.inf
"""The time at which all frames count as received. An infinite time makes all timers of a stream due when `tick` is called."""
_ENDPOINT: Final = "inproc://recording"
_CONFIRMING_REPORT: Final = BatchReport(digest_matches=True)
"""The report about each live batch. A report confirms earlier replies: within one run, replies come from the same publisher."""


class RecordedStream:
    """One stream of a recording."""

    def __init__(self, run: str, endpoint: str | None, *, waits: bool) -> None:
        self.run = self.source = run
        """`run` is the run of the newest frames. `source` is the engine's name in a note; without a note, the first run."""
        self.endpoint = endpoint
        self.rank: int | None = None
        """The rank of the stream, or None if no note states the rank."""
        self.is_followed = False
        """Whether the recorder followed the stream until the end of the recording, so that silence means no events."""
        self.compacted_gap: Any = None
        """First and last number of the newest gap that a snapshot replaces, from a note."""
        self.duplicates = 0
        """Number of batches that were recorded again, or were replayed after they counted as lost."""
        self.recorded_at: float | None = None
        """Time at which the newest delivery was recorded, in seconds since the epoch."""
        self._stream = Stream(Source(_ENDPOINT, _ENDPOINT if waits else None))
        self._stream.begin_connection(_RECEIVE_TIME)
        self._last_live = -1
        self._newest: RawBatch | None = None
        self._pending: dict[int, tuple[bytes, float | None]] = {}
        """Payload and time of each batch that was not delivered yet, by sequence number."""
        self._pending_bytes = 0

    def receive(self, batch: Live | ReplayBatch, frames: Sequence[bytes], t: float | None) -> Iterator[RawDelivery]:
        """Feed the next recorded batch."""
        stream, seq, size = self._stream, batch.seq, len(batch.payload)
        payload, _ = self._pending.get(seq, (batch.payload, t))
        differs = payload != batch.payload and not (begins_with_clear(payload) or begins_with_clear(batch.payload))
        is_live = isinstance(batch, Live)
        is_restart = differs or (is_live and seq <= self._last_live)
        # The stream drops waiting batches when an incarnation ends.
        if is_restart or stream.waiting >= MAX_WAITING_BATCHES or self._pending_bytes + size > MAX_WAITING_BYTES:
            yield from self.finish()
        self.duplicates += 1
        is_new = seq > stream.last_seq
        if is_new or is_live:
            self._pending.setdefault(seq, (batch.payload, t))
            self._pending_bytes += size
        if is_live:
            self._last_live = seq
            stream.receive_live(frames, _RECEIVE_TIME)
        elif is_new:
            self._begin_answer()
            stream.receive_replay(frames, _RECEIVE_TIME)
        yield from self._take_deliveries(t)

    def _begin_answer(self) -> None:
        """Let the stream request missing batches; without missing batches, let it request those that identify the publisher."""
        stream, newest = self._stream, self._newest
        if not stream.waiting:
            self._end_request()
            stream.tick(_RECEIVE_TIME)
        request = stream.request_to_send(_RECEIVE_TIME)
        if request is not None and newest is not None and newest.seq >= request.start:
            stream.receive_replay(replay_batch_frames(None, newest.seq, newest.payload), _RECEIVE_TIME)

    def _end_request(self) -> None:
        while self._stream.is_fetching:
            self._stream.request_to_send(_RECEIVE_TIME)
            self._stream.tick(_RECEIVE_TIME)

    def begin_run(self, run: str) -> Iterator[RawDelivery]:
        """Begin the next run, which is another incarnation. Yield the deliveries of the batches that were waiting."""
        yield from self.finish()
        self.run = run
        incarnation = self._stream.incarnation + (self._stream.last_seq >= 0)
        self._stream = Stream(self._stream.source, first_incarnation=incarnation)
        self._stream.begin_connection(_RECEIVE_TIME)

    def finish(self) -> Iterator[RawDelivery]:
        """Count missing batches as lost. Return the deliveries that waited for missing batches."""
        self._end_request()
        return self._take_deliveries(None)

    def _take_deliveries(self, recorded_at: float | None) -> Iterator[RawDelivery]:
        for delivery in self._stream.deliveries():
            is_compacted = isinstance(delivery, Gap) and [delivery.first, delivery.last] == self.compacted_gap
            if isinstance(delivery, Reset):
                self._newest = None
            elif isinstance(delivery, RawBatch):
                self._newest = delivery
                self.duplicates -= 1
                _, self.recorded_at = self._pending.pop(delivery.seq, (b"", recorded_at))
                if not delivery.replayed:
                    self._stream.report(delivery, _CONFIRMING_REPORT)
            yield replace(delivery, compacted=True) if is_compacted else delivery
        if not self._stream.waiting:
            self._pending.clear()
            self._pending_bytes = 0


class RecordingDeliveries:
    """Reads the frames of one recording. If `waits` is true, streams that no note names wait for missing batches."""

    def __init__(self, *, waits: bool) -> None:
        self.malformed = 0
        """Number of messages that are neither batches nor replies."""
        self.unplaced = 0
        """Number of replayed batches that cannot be assigned to a stream, because their runs have several PUB endpoints."""
        self._waits = waits
        self._runs: dict[str, dict[str | None, RecordedStream]] = {}
        self._streams_by_note: dict[tuple[str, int], RecordedStream] = {}
        """Streams by source and rank, as notes state them."""

    def read(self, frames: Iterable[RecordedFrame]) -> Iterator[tuple[RecordedStream, RawDelivery]]:
        """Yield the deliveries of all streams, in the order of the recording. Exceptions of `frames` are raised."""
        for frame in frames:
            if frame.socket == "meta":
                yield from self._read_note(frame.run, frame.meta or {})
            elif frame.socket != "replay-request":
                batch = (parse_live if frame.socket == "pub" else parse_replay_reply)(frame.frames)
                self.malformed += isinstance(batch, Malformed)
                if isinstance(batch, Live | ReplayBatch):
                    yield from self._read_batch(frame, batch)
        for stream in {stream: None for streams in self._runs.values() for stream in streams.values()}:
            yield from ((stream, delivery) for delivery in stream.finish())

    def _read_batch(self, frame: RecordedFrame, batch: Live | ReplayBatch) -> Iterator[tuple[RecordedStream, RawDelivery]]:
        streams = self._runs.setdefault(frame.run, {})
        if isinstance(batch, Live):
            endpoint = frame.endpoint
            if None in streams:  # the replies were recorded before the first live batch
                streams[endpoint] = streams.pop(None)
                streams[endpoint].endpoint = endpoint
        else:
            endpoint = next(iter(streams), None)
            if len(streams) > 1:
                self.unplaced += 1
                return
        if endpoint not in streams:
            streams[endpoint] = RecordedStream(frame.run, endpoint, waits=self._waits)
        stream = streams[endpoint]
        yield from ((stream, delivery) for delivery in stream.receive(batch, frame.frames, frame.t))

    def _read_note(self, run: str, note: dict[str, Any]) -> Iterator[tuple[RecordedStream, RawDelivery]]:
        source, rank, endpoint = note.get("source"), note.get("rank"), note.get("endpoint")
        if not isinstance(source, str) or not isinstance(rank, int):
            return
        stream = self._streams_by_note.get((source, rank))
        if stream is None:
            endpoint = endpoint if isinstance(endpoint, str) else None
            stream = self._streams_by_note[source, rank] = RecordedStream(run, endpoint, waits=False)
            stream.source, stream.rank, stream.is_followed = source, rank, True
        elif stream.run != run:
            yield from ((stream, delivery) for delivery in stream.begin_run(run))
        self._runs.setdefault(run, {})[stream.endpoint] = stream
        if note.get("compacted") is True:
            stream.compacted_gap = note.get("gap")
