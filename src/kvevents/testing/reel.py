"""The reel: which batch a tape plays next, and under which number."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Final, NamedTuple, TypeAlias

from kvevents.errors import ConfigError
from kvevents.recording import LiveBatch, live_batches, recorded_streams

Tape: TypeAlias = str | PathLike[str] | Iterable[tuple[bytes, int, bytes] | LiveBatch]
"""A recording file, or the batches themselves."""

_FLOAT64: Final = 0xCB
_ARRAYS: Final = range(0x91, 0xA0)


class Turn(NamedTuple):
    """The next batch; `gap` is the recorded time in seconds between it and the one before; `new_life` marks a restart."""

    batch: LiveBatch
    gap: float
    new_life: bool


def as_batch(item: tuple[bytes, int, bytes] | LiveBatch) -> LiveBatch:
    """A batch, of which the time may be unknown."""
    return item if isinstance(item, LiveBatch) else LiveBatch(*item)


def load_tape(tape: Tape, run: str | None = None) -> list[LiveBatch]:
    """The batches of a tape. Of a recording: those of one stream, the first of `run`, or the first at all.

    Raises `RecordingError` for a file that cannot be read, `ConfigError` for one without such a stream.
    """
    if not isinstance(tape, str | PathLike):
        return [as_batch(batch) for batch in tape]
    streams = [stream for stream in recorded_streams(tape) if run in (None, stream.run)]
    if not streams:
        named = f"no run {run!r} with live batches" if run else "no live batches"
        raise ConfigError(f"{tape} holds {named}")
    return list(live_batches(tape, streams[0].run, streams[0].endpoint))


class Reel:
    """Batches in their order, as an endless loop.

    The first round has the recorded numbers and bytes. Further rounds go on counting, a new life counts from 0; both move the
    payload's timestamp on, as no engine ever sends the same bytes twice under one number: that is how a restart is recognised.
    """

    def __init__(self, batches: Sequence[LiveBatch]) -> None:
        self._position = 0
        self._shift = 0
        self._last = -1
        self._mount(batches)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def remaining(self) -> int:
        """Batches up to the end of this round; a finished round counts as a full one to come."""
        return len(self._batches) - self._position % max(1, len(self._batches))

    def restart(self, batches: Sequence[LiveBatch] | None = None) -> None:
        """Begin a new life at number 0, with other batches or from the start of the same."""
        if batches is not None:
            self._mount(batches)
        else:
            self._rounds += self._position > 0
        self._position = 0
        self._last = -1
        self._shift = -self._batches[0].seq if self._batches else 0

    def peek_gap(self) -> float:
        """Recorded seconds between the batch played last and the next one; 0 at either end of the tape."""
        if not 0 < self._position < len(self._batches):
            return 0.0
        before, after = self._batches[self._position - 1].t, self._batches[self._position].t
        return max(0.0, after - before) if before is not None and after is not None else 0.0

    def take(self) -> Turn:
        """The next batch. Raises `ConfigError` when the tape is empty."""
        if not self._batches:
            raise ConfigError("the tape is empty: there is nothing to play")
        gap = self.peek_gap()
        if self._position == len(self._batches):
            self._begin_round()
        recorded = self._batches[self._position]
        new_life = recorded.seq + self._shift <= self._last
        if new_life:  # the engine was restarted while it was recorded
            self._shift = 0
        self._position += 1
        self._last = recorded.seq + self._shift
        payload = restamp(recorded.payload, self._rounds * self._span) if self._rounds else recorded.payload
        return Turn(LiveBatch(recorded.topic, self._last, payload, recorded.t), gap, new_life)

    def _begin_round(self) -> None:
        self._position = 0
        self._rounds += 1
        self._shift = self._last + 1 - self._batches[0].seq

    def _mount(self, batches: Sequence[LiveBatch]) -> None:
        self._batches = batches
        self._rounds = 0
        times = [batch.t for batch in batches if batch.t is not None]
        self._span = 1.0 + (max(times) - min(times) if times else 0.0)


def restamp(payload: bytes, seconds: float) -> bytes:
    """The payload with its timestamp moved on; unchanged where it does not begin with an array and a 64-bit float."""
    if len(payload) < 10 or payload[0] not in _ARRAYS or payload[1] != _FLOAT64:
        return payload
    (ts,) = struct.unpack_from(">d", payload, 2)
    return payload[:2] + struct.pack(">d", ts + seconds) + payload[10:]
