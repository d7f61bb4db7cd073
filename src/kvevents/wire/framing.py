"""ZeroMQ frames of the three conversations: live batches, replay requests, replay replies.

Builders and parsers come in pairs. Parsers take whatever a peer sent and never raise; what has no meaning becomes `Malformed`.
Rules and releases: vLLM `distributed/kv_events.py` (0.9.0 to 0.33.0), SGLang `disaggregation/kv_events.py` (0.4.6 to 0.5.23).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from kvevents.wire.limits import MAX_SEQ

SEQ_BYTES: Final = 8
END_SEQ: Final = b"\xff" * SEQ_BYTES
"""Number of the end marker: -1 as a signed big-endian integer."""


class Live(NamedTuple):
    """One frame set from the PUB socket."""

    topic: bytes
    seq: int
    payload: bytes


class ReplayBatch(NamedTuple):
    """One batch of a replay reply. `topic` is None before vLLM 0.26 and SGLang 0.5.22, which did not send it."""

    topic: bytes | None
    seq: int
    payload: bytes


class ReplayEnd(NamedTuple):
    """End marker of a replay reply. It proves nothing: batches before it may have been dropped."""


class ReplayRequest(NamedTuple):
    """A consumer asks for every kept batch from `start` on. `identity` is the ROUTER's name for it."""

    identity: bytes
    start: int


class Malformed(NamedTuple):
    """Frames without a meaning; `reason` is one of a few fixed words, for counting."""

    reason: str


ReplayReply: TypeAlias = ReplayBatch | ReplayEnd | Malformed


def encode_seq(seq: int) -> bytes:
    """Eight bytes, big-endian."""
    return seq.to_bytes(SEQ_BYTES, "big")


def _seq_fault(frame: bytes) -> str | None:
    if len(frame) != SEQ_BYTES:
        return "sequence number is not 8 bytes"
    if int.from_bytes(frame, "big") >= MAX_SEQ:
        return "sequence number out of range"
    return None


def live_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Frames of a live batch: `[topic, seq, payload]`, the same in every release."""
    return [topic, encode_seq(seq), payload]


def parse_live(frames: Sequence[bytes]) -> Live | Malformed:
    """Read what a SUB socket received."""
    if len(frames) != 3:
        return Malformed("not 3 frames")
    fault = _seq_fault(frames[1])
    if fault is not None:
        return Malformed(fault)
    return Live(frames[0], int.from_bytes(frames[1], "big"), frames[2])


def replay_request_frames(start: int) -> list[bytes]:
    """Frames that a DEALER sends to ask for everything from `start` on; the empty one stands in for REQ's delimiter."""
    return [b"", encode_seq(start)]


def parse_replay_request(frames: Sequence[bytes]) -> ReplayRequest | Malformed:
    """Read what a ROUTER received: exactly `[identity, "", seq]`, as the engines demand."""
    if len(frames) != 3 or frames[1] != b"":
        return Malformed("not [identity, empty, start]")
    if len(frames[2]) != SEQ_BYTES:
        return Malformed("sequence number is not 8 bytes")
    return ReplayRequest(frames[0], int.from_bytes(frames[2], "big"))


def replay_batch_frames(topic: bytes | None, seq: int, payload: bytes) -> list[bytes]:
    """Frames of one replayed batch after the identity; a `topic` of None gives the shape before vLLM 0.26, SGLang 0.5.22."""
    if topic is None:
        return [b"", encode_seq(seq), payload]
    return [b"", topic, encode_seq(seq), payload]


def replay_end_frames(with_topic: bool) -> list[bytes]:
    """Frames of the end marker after the identity, in the shape of `replay_batch_frames`."""
    return [b"", b"", END_SEQ, b""] if with_topic else [b"", END_SEQ, b""]


def parse_replay_reply(frames: Sequence[bytes]) -> ReplayReply:
    """Read what a DEALER received, in any of the three shapes.

    `["", topic, seq, payload]`, `["", seq, payload]`, or the very first version's bare end `["", ""]`. An empty payload ends a
    reply, as in the engines' example subscriber, but not under the number of a batch: one that was sent empty is no end, and
    who took it for one would believe that nothing is behind it.
    """
    if not frames or frames[0] != b"" or not 2 <= len(frames) <= 4:
        return Malformed("not a replay reply")
    if len(frames) == 2:
        return ReplayEnd() if frames[-1] == b"" else Malformed("not a replay reply")
    fault = _seq_fault(frames[-2])
    if fault is not None and frames[-1] == b"":
        return ReplayEnd()
    if fault is not None:
        return Malformed(fault)
    topic = frames[1] if len(frames) == 4 else None
    return ReplayBatch(topic, int.from_bytes(frames[-2], "big"), frames[-1])
