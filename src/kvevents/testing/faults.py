"""What a tape does wrong, as released engines do it, and how it answers a replay request."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Final, Literal, NamedTuple, TypeAlias

from kvevents.errors import ConfigError
from kvevents.recording import LiveBatch
from kvevents.testing.reel import as_batch
from kvevents.wire import replay_batch_frames, replay_end_frames

ENGINE_BUFFER_STEPS: Final = 10_000
"""Batches that vLLM and SGLang keep for replay by default (`buffer_steps`)."""

Loss: TypeAlias = Collection[int] | float | Callable[[int], bool]
"""What is lost: these sequence numbers, a share of all from 0.0 to 1.0, or every number for which a function is true."""

ReplyShape: TypeAlias = Literal["topic", "no-topic", "bare-end"]
"""`topic`: vLLM from 0.26, SGLang from 0.5.22, TensorRT-LLM. `no-topic`: before. `bare-end`: the very first version, whose
end marker has no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a tape; none by default. Numbers are those of each life, from 0.

    A share draws for each number from `seed`, so a run can be repeated exactly; replies draw anew each time, so that asking
    again helps. Raises `ConfigError` for a share outside 0.0 to 1.0 or a negative limit.
    """

    drop: Loss = ()
    """Kept for replay, but not sent live: what a slow or late subscriber misses."""
    burnt: Collection[int] = ()
    """Neither sent nor kept: the engine could not encode the batch after it had taken a number."""
    seed: int = 0
    buffer_steps: int = ENGINE_BUFFER_STEPS
    """Batches kept; a request for an older start is answered from the oldest kept, with nothing to say so."""
    reply_shape: ReplyShape = "topic"
    replay_send_limit: int | None = None
    """Batches of one reply that get through; the rest is dropped silently, as the engines' ROUTER does at 1,000 queued."""
    replay_sndhwm: int | None = None
    """Send limit of the real ROUTER socket, 1,000 in the engines before vLLM 0.33: drops what the consumer is too slow for.
    Read when the sockets open, by the constructor and `restart`. None: a reply waits for its consumer and loses nothing."""
    replay_holes: Loss = ()
    """Missing inside replies, behind their first batch, for which a socket always has room; a set is missing from every one."""
    lose_end_marker: bool = False
    replay_mute: bool = False
    """Requests are read and never answered."""
    replay_endless: bool = False
    """A reply repeats its batches and never ends."""
    replay_foreign: Sequence[tuple[bytes, int, bytes] | LiveBatch] | None = None
    """Replies come from these batches of another stream."""
    replay_junk: Sequence[Sequence[bytes]] = ()
    """Messages sent before each reply, as they are, after the identity."""
    faulty_replies: int | None = None
    """The replay faults hold for the first so many requests of a tape; after that it answers honestly. None: for all."""

    def __post_init__(self) -> None:
        for name in ("drop", "replay_holes"):
            loss = getattr(self, name)
            if isinstance(loss, int | float) and not 0.0 <= loss <= 1.0:
                raise ConfigError(f"{name} is a share from 0.0 to 1.0, a set of numbers or a function, not {loss}")
        for name in ("buffer_steps", "replay_send_limit", "replay_sndhwm", "faulty_replies"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise ConfigError(f"{name} is 0 or more, not {limit}")

    def drops(self, seq: int) -> bool:
        """Whether the live message of this number is lost."""
        return _strikes(self.drop, seq, f"{self.seed}/live/{seq}")

    def reply(self, kept: Iterable[LiveBatch], start: int, nth: int) -> Reply:
        """What is sent for the `nth` request (from 0) of a tape: everything kept from number `start` on, with the faults."""
        if self.faulty_replies is not None and nth >= self.faulty_replies:
            return _honest(self).reply(kept, start, 0)
        wanted = [batch for batch in kept if batch.seq >= start]
        if self.replay_mute:
            return Reply(iter(()), len(wanted))
        chosen = wanted if self.replay_foreign is None else [as_batch(batch) for batch in self.replay_foreign]
        holes = self.replay_holes
        inside = (batch for batch in chosen[1:] if not _strikes(holes, batch.seq, f"{self.seed}/{nth}/{batch.seq}"))
        sent = [*chosen[:1], *inside][: self.replay_send_limit]
        withheld = len(wanted) if self.replay_foreign is not None else len(wanted) - len(sent)
        return Reply(self._frames(sent), withheld)

    def _frames(self, sent: list[LiveBatch]) -> Iterator[list[bytes]]:
        with_topic = self.reply_shape == "topic"
        batches = (replay_batch_frames(batch.topic if with_topic else None, batch.seq, batch.payload) for batch in sent)
        junk = ([bytes(frame) for frame in frames] for frames in self.replay_junk)
        if self.replay_endless and sent:
            return chain(junk, cycle(batches))
        end = [b"", b""] if self.reply_shape == "bare-end" else replay_end_frames(with_topic)
        return chain(junk, batches, () if self.lose_end_marker else (end,))


class Reply(NamedTuple):
    """Messages without the identity frame, and how many batches that were asked for are not among them."""

    messages: Iterator[list[bytes]]
    withheld: int


def _honest(faults: Faults) -> Faults:
    return replace(
        faults,
        replay_send_limit=None,
        replay_holes=(),
        lose_end_marker=False,
        replay_mute=False,
        replay_endless=False,
        replay_foreign=None,
        replay_junk=(),
        faulty_replies=None,
    )


def _strikes(loss: Loss, seq: int, draw: str) -> bool:
    if callable(loss):
        return loss(seq)
    if isinstance(loss, int | float):
        return random.Random(draw).random() < loss  # noqa: S311  a fault, not a secret
    return seq in loss
