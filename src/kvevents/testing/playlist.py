"""The contents of a tape: the next batch and its sequence number, and the faults of released engines."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from os import PathLike
from typing import Final, Literal, NamedTuple, TypeAlias

from kvevents.errors import ConfigError
from kvevents.recording import LiveBatch, live_batches, recorded_endpoints
from kvevents.wire import replay_batch_frames, replay_end_frames

Tape: TypeAlias = str | PathLike[str] | Iterable[tuple[bytes, int, bytes] | LiveBatch]
"""The path of a recording, or the batches of a tape."""


class NextBatch(NamedTuple):
    """A batch to play."""

    batch: LiveBatch
    is_restart: bool
    """Whether the recorded engine was restarted before this batch."""


def to_next_batch(item: tuple[bytes, int, bytes] | LiveBatch) -> LiveBatch:
    """Return a batch from a `LiveBatch` or from a plain tuple. A tuple's batch has no time."""
    batch = item if isinstance(item, LiveBatch) else LiveBatch(*item)
    is_typed = isinstance(batch.topic, bytes) and isinstance(batch.seq, int) and isinstance(batch.payload, bytes | bytearray)
    if not is_typed or not 0 <= batch.seq < 1 << 64:
        raise ConfigError(f"invalid batch {tuple(batch)!r:.200}: expected (bytes, number from 0 to 2**64 - 1, bytes)")
    return batch


def load_tape(tape: Tape, run: str | None = None) -> list[LiveBatch]:
    """Return the batches of a tape. For a recording, these are the batches of the first stream (in `run`, unless it is None).

    Raise `RecordingError` for a file that cannot be read, `ConfigError` for a file without this stream.
    """
    if not isinstance(tape, str | PathLike):
        return [to_next_batch(batch) for batch in tape]
    streams = [stream for stream in recorded_endpoints(tape) if run in (None, stream.run)]
    if not streams:
        contents = f"run {run!r} with live batches" if run else "live batches"
        raise ConfigError(f"{tape} has no {contents}")
    return list(live_batches(tape, streams[0].run, streams[0].endpoint))


class Playlist:
    """The batches of a tape as an endless loop, in the order of the tape.

    The first round has the recorded sequence numbers and bytes. Further rounds continue the numbers; a new incarnation counts
    from 0. In both cases the timestamps in payloads are moved forward: an engine never repeats bytes, and subscribers recognise
    a restart by different bytes under an equal number.
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
        """Number of batches until the end of the current round. At the end of a round, the length of the next round."""
        return len(self._batches) - self._position % max(1, len(self._batches))

    def restart(self, batches: Sequence[LiveBatch] | None = None) -> None:
        """Begin a new incarnation at number 0, with other batches or, if `batches` is None, with the same batches."""
        if batches is not None:
            self._load(batches)
        else:
            self._rounds += self._position > 0
        self._position = 0
        self._last_seq = -1
        self._shift = -self._batches[0].seq if self._batches else 0

    def next_gap(self) -> float:
        """Return the recorded seconds between the previous batch and the next one; 0 at the beginning and end of a round."""
        if not 0 < self._position < len(self._batches):
            return 0.0
        former, following = self._batches[self._position - 1].t, self._batches[self._position].t
        return max(0.0, following - former) if former is not None and following is not None else 0.0

    def next_batch(self) -> NextBatch:
        """Return the next batch and advance. Raise `ConfigError` if the tape is empty."""
        if not self._batches:
            raise ConfigError("the tape is empty: there is nothing to play")
        if self._position == len(self._batches):
            self._position = 0
            self._rounds += 1
            self._shift = self._last_seq + 1 - self._batches[0].seq
        batch_on_tape = self._batches[self._position]
        is_restart = batch_on_tape.seq + self._shift <= self._last_seq
        if is_restart:
            self._shift = 0
        self._position += 1
        self._last_seq = batch_on_tape.seq + self._shift
        payload = delay_timestamp(batch_on_tape.payload, self._rounds * self._span) if self._rounds else batch_on_tape.payload
        return NextBatch(LiveBatch(batch_on_tape.topic, self._last_seq, payload, batch_on_tape.t), is_restart)

    def _load(self, batches: Sequence[LiveBatch]) -> None:
        self._batches = batches
        self._rounds = 0
        times = [batch.t for batch in batches if batch.t is not None]
        self._span = 1.0 + (max(times) - min(times) if times else 0.0)


def delay_timestamp(payload: bytes, seconds: float) -> bytes:
    """Return a payload with its timestamp moved forward by `seconds`. A payload without a leading 64-bit float is unchanged."""
    if len(payload) < 10 or not 0x91 <= payload[0] <= 0x9F or payload[1] != 0xCB:
        return payload
    (ts,) = struct.unpack_from(">d", payload, 2)
    return payload[:2] + struct.pack(">d", ts + seconds) + payload[10:]


# --- faults

ENGINE_BUFFER_STEPS: Final = 10_000
"""Default size of the replay buffer of vLLM and SGLang, in batches (`buffer_steps`)."""

LossRule: TypeAlias = Collection[int] | float | Callable[[int], bool]
"""Selects the batches to lose: a set of sequence numbers, a share from 0.0 to 1.0, or a function that returns True for the
numbers to lose."""

ReplyShape: TypeAlias = Literal["topic", "no-topic", "bare-end"]
"""`topic`: vLLM from 0.26, SGLang from 0.5.22, TensorRT-LLM. `no-topic`: earlier releases. `bare-end`: the first version, whose
end marker has no sequence number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a tape; by default a tape has no faults. Sequence numbers count from 0 in each incarnation.

    A share of batches is drawn by `seed` and number, so a run can be repeated exactly. Each reply draws again, so that a
    repeated request can succeed. Raise `ConfigError` for a share outside 0.0 to 1.0 or a negative limit.
    """

    drop: LossRule = ()
    """Batches that are stored for replay but not sent live, so that subscribers miss these batches."""
    skipped: Collection[int] = ()
    """Sequence numbers without a batch: the engine assigned the number, and then could not encode the batch."""
    seed: int = 0
    buffer_steps: int = ENGINE_BUFFER_STEPS
    """Number of batches in the replay buffer. A reply to a request for older batches begins with the buffer, without notice."""
    reply_shape: ReplyShape = "topic"
    replay_send_limit: int | None = None
    """Maximum number of batches in one reply. Further batches are dropped silently, as in engines, whose ROUTER sockets queue
    1,000 messages."""
    replay_sndhwm: int | None = None
    """Send limit of the ROUTER socket in messages; 1,000 in engines before vLLM 0.33. Above it, the socket drops messages to
    slow consumers. The limit takes effect when the sockets open. If None, replies wait for the consumer."""
    replay_holes: LossRule = ()
    """Batches that are missing in replies. The first batch of a reply is never missing, because a socket has room for it."""
    lose_end_marker: bool = False
    replay_silent: bool = False
    """Whether requests are read and never answered."""
    replay_endless: bool = False
    """Whether a reply repeats its batches and never ends."""
    replay_foreign: Sequence[tuple[bytes, int, bytes] | LiveBatch] | None = None
    """Batches of another stream, which replace this stream's batches in replies."""
    replay_junk: Sequence[Sequence[bytes]] = ()
    """Messages that are sent unchanged before each reply; the identity frame is added."""
    faulty_replies: int | None = None
    """Number of replay requests, from the first one on, whose replies have faults. None means all requests."""

    def __post_init__(self) -> None:
        for name in ("drop", "replay_holes"):
            loss = getattr(self, name)
            if isinstance(loss, int | float) and not 0.0 <= loss <= 1.0:
                raise ConfigError(f"invalid {name} {loss}: expected a share from 0.0 to 1.0, a set of numbers or a function")
        for name in ("buffer_steps", "replay_send_limit", "replay_sndhwm", "faulty_replies"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise ConfigError(f"invalid {name} {limit}: expected 0 or more")

    def drops(self, seq: int) -> bool:
        """Return whether the live message with this sequence number is dropped."""
        return _is_selected(self.drop, seq, f"{self.seed}/live/{seq}")

    def reply(self, replay_buffer: Iterable[LiveBatch], start: int, number: int) -> Reply:
        """Return the reply to request `number` (from 0): the stored batches from `start` on, as changed by the faults."""
        if self.faulty_replies is not None and number >= self.faulty_replies:
            return Faults(reply_shape=self.reply_shape).reply(replay_buffer, start, 0)
        stored = [batch for batch in replay_buffer if batch.seq >= start]
        if self.replay_silent:
            return Reply(iter(()), len(stored))
        batches = stored if self.replay_foreign is None else [to_next_batch(batch) for batch in self.replay_foreign]
        holes = self.replay_holes
        inside = (batch for batch in batches[1:] if not _is_selected(holes, batch.seq, f"{self.seed}/{number}/{batch.seq}"))
        reply_batches = [*batches[:1], *inside][: self.replay_send_limit]
        withheld = len(stored) if self.replay_foreign is not None else len(stored) - len(reply_batches)
        return Reply(self._frames(reply_batches), withheld)

    def _frames(self, stored: list[LiveBatch]) -> Iterator[list[bytes]]:
        has_topic = self.reply_shape == "topic"
        batches = (replay_batch_frames(batch.topic if has_topic else None, batch.seq, batch.payload) for batch in stored)
        junk_frames = ([bytes(frame) for frame in frames] for frames in self.replay_junk)
        if self.replay_endless and stored:
            return chain(junk_frames, cycle(batches))
        end = [b"", b""] if self.reply_shape == "bare-end" else replay_end_frames(has_topic)
        return chain(junk_frames, batches, () if self.lose_end_marker else (end,))


class Reply(NamedTuple):
    """A reply to a replay request."""

    messages: Iterator[list[bytes]]
    """The frames of each message, without the identity frame."""
    withheld: int
    """Number of requested batches that a fault keeps out of `messages`."""


def _is_selected(loss: LossRule, seq: int, draw: str) -> bool:
    if callable(loss):
        return loss(seq)
    if isinstance(loss, int | float):
        return random.Random(draw).random() < loss  # noqa: S311  a fault, not a secret
    return seq in loss
