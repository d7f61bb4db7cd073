"""The playlist of a tape: which batch is played next, and with which sequence number."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Final, NamedTuple, TypeAlias

from kvevents.errors import ConfigError
from kvevents.recording import LiveBatch, live_batches, recorded_endpoints

Tape: TypeAlias = str | PathLike[str] | Iterable[tuple[bytes, int, bytes] | LiveBatch]
"""A recording file, or the batches themselves."""

_FLOAT64: Final = 0xCB
_ARRAYS: Final = range(0x91, 0xA0)


class NextBatch(NamedTuple):
    """A batch to play."""

    batch: LiveBatch
    gap: float
    """Recorded seconds between the previous batch and this one."""
    is_restart: bool
    """Whether the recorded engine was restarted before this batch."""


def as_batch(item: tuple[bytes, int, bytes] | LiveBatch) -> LiveBatch:
    """Return a batch; the time of a plain tuple is unknown."""
    return item if isinstance(item, LiveBatch) else LiveBatch(*item)


def load_tape(tape: Tape, run: str | None = None) -> list[LiveBatch]:
    """Return the batches of a tape. Of a recording, return the first stream of `run`, or the first stream at all.

    Raise `RecordingError` for a file that cannot be read, `ConfigError` for a file without such a stream.
    """
    if not isinstance(tape, str | PathLike):
        return [as_batch(batch) for batch in tape]
    streams = [stream for stream in recorded_endpoints(tape) if run in (None, stream.run)]
    if not streams:
        missing = f"run {run!r} with live batches" if run else "live batches"
        raise ConfigError(f"{tape} has no {missing}")
    return list(live_batches(tape, streams[0].run, streams[0].endpoint))


class Playlist:
    """The batches of a tape in their order, as an endless loop.

    The first round has the recorded numbers and bytes. Further rounds continue the numbers; a new incarnation counts from 0.
    Both move the timestamps of payloads forward, because subscribers recognise a restart by other bytes under the same number,
    and an engine never repeats bytes.
    """

    def __init__(self, batches: Sequence[LiveBatch]) -> None:
        self._position = 0
        self._shift = 0
        self._last_seq = -1
        self._load(batches)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def remaining(self) -> int:
        """Batches until the end of this round. At the end, the whole next round."""
        return len(self._batches) - self._position % max(1, len(self._batches))

    def restart(self, batches: Sequence[LiveBatch] | None = None) -> None:
        """Begin a new incarnation at number 0, with other batches or with the same ones from the first on."""
        if batches is not None:
            self._load(batches)
        else:
            self._rounds += self._position > 0
        self._position = 0
        self._last_seq = -1
        self._shift = -self._batches[0].seq if self._batches else 0

    def next_gap(self) -> float:
        """Return the recorded seconds between the previous batch and the next one; 0 at either end of the tape."""
        if not 0 < self._position < len(self._batches):
            return 0.0
        before, after = self._batches[self._position - 1].t, self._batches[self._position].t
        return max(0.0, after - before) if before is not None and after is not None else 0.0

    def take(self) -> NextBatch:
        """Return the next batch and advance. Raise `ConfigError` if the tape is empty."""
        if not self._batches:
            raise ConfigError("the tape is empty: there is nothing to play")
        gap = self.next_gap()
        if self._position == len(self._batches):
            self._position = 0
            self._rounds += 1
            self._shift = self._last_seq + 1 - self._batches[0].seq
        recorded = self._batches[self._position]
        is_restart = recorded.seq + self._shift <= self._last_seq
        if is_restart:
            self._shift = 0
        self._position += 1
        self._last_seq = recorded.seq + self._shift
        payload = restamp(recorded.payload, self._rounds * self._span) if self._rounds else recorded.payload
        return NextBatch(LiveBatch(recorded.topic, self._last_seq, payload, recorded.t), gap, is_restart)

    def _load(self, batches: Sequence[LiveBatch]) -> None:
        self._batches = batches
        self._rounds = 0
        times = [batch.t for batch in batches if batch.t is not None]
        self._span = 1.0 + (max(times) - min(times) if times else 0.0)


def restamp(payload: bytes, seconds: float) -> bytes:
    """Return a payload with a later timestamp; unchanged if it does not begin with an array and a 64-bit float."""
    if len(payload) < 10 or payload[0] not in _ARRAYS or payload[1] != _FLOAT64:
        return payload
    (ts,) = struct.unpack_from(">d", payload, 2)
    return payload[:2] + struct.pack(">d", ts + seconds) + payload[10:]
