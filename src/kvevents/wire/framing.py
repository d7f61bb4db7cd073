"""ZeroMQ frames of live batches, replay requests and replay replies.

Each builder has a parser. Parsers accept any input and never raise; they return invalid frames as `Malformed`. The rules are
from vLLM (`distributed/kv_events.py`, 0.9.0 to 0.33.0) and SGLang (`disaggregation/kv_events.py`, 0.4.6 to 0.5.23).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from kvevents.wire.checked_msgpack import MAX_SEQ

SEQ_BYTES: Final = 8
END_SEQ: Final = b"\xff" * SEQ_BYTES
"""Sequence number of the end marker: -1 as a signed big-endian integer."""


class Live(NamedTuple):
    """A live batch, as a PUB socket sends it."""

    topic: bytes
    seq: int
    payload: bytes


class ReplayBatch(NamedTuple):
    """One batch of a replay reply. `topic` is None from releases before vLLM 0.26 and SGLang 0.5.22, which do not send it."""

    topic: bytes | None
    seq: int
    payload: bytes


class ReplayEnd(NamedTuple):
    """The end marker of a replay reply. The reply can still be incomplete: batches before the marker may have been dropped."""


class ReplayRequest(NamedTuple):
    """A request for every batch in the replay buffer from `start` on. `identity` is the ROUTER's name for the consumer."""

    identity: bytes
    start: int


class Malformed(NamedTuple):
    """Invalid frames; `reason` is one of a few fixed words, for counting."""

    reason: str


ReplayReply: TypeAlias = ReplayBatch | ReplayEnd | Malformed


def encode_seq(seq: int) -> bytes:
    """Return a sequence number as 8 bytes, big-endian."""
    return seq.to_bytes(SEQ_BYTES, "big")


def _seq_fault(frame: bytes) -> str | None:
    if len(frame) != SEQ_BYTES:
        return "sequence number is not 8 bytes"
    return "sequence number out of range" if int.from_bytes(frame, "big") >= MAX_SEQ else None


def live_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames of a live batch: `[topic, seq, payload]`, the same in every release."""
    return [topic, encode_seq(seq), payload]


def parse_live(frames: Sequence[bytes]) -> Live | Malformed:
    """Parse frames that a SUB socket received."""
    if len(frames) != 3:
        return Malformed("not 3 frames")
    fault = _seq_fault(frames[1])
    return Live(frames[0], int.from_bytes(frames[1], "big"), frames[2]) if fault is None else Malformed(fault)


def replay_request_frames(start: int) -> list[bytes]:
    """Return the frames with which a DEALER requests replay from `start` on. The empty frame is the delimiter of a REQ."""
    return [b"", encode_seq(start)]


def parse_replay_request(frames: Sequence[bytes]) -> ReplayRequest | Malformed:
    """Parse frames that a ROUTER received: exactly `[identity, "", seq]`, as the engines require."""
    if len(frames) != 3 or frames[1] != b"":
        return Malformed("not [identity, empty, start]")
    if len(frames[2]) != SEQ_BYTES:
        return Malformed("sequence number is not 8 bytes")
    return ReplayRequest(frames[0], int.from_bytes(frames[2], "big"))


def replay_batch_frames(topic: bytes | None, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames of one replayed batch, without the identity.

    With a `topic` of None, the frames have the form of releases before vLLM 0.26 and SGLang 0.5.22.
    """
    return [b"", encode_seq(seq), payload] if topic is None else [b"", topic, encode_seq(seq), payload]


def replay_end_frames(has_topic: bool) -> list[bytes]:
    """Return the frames of the end marker, without the identity. `has_topic`: whether to use the form from vLLM 0.26 on."""
    return [b"", b"", END_SEQ, b""] if has_topic else [b"", END_SEQ, b""]


def parse_replay_reply(frames: Sequence[bytes]) -> ReplayReply:
    """Parse frames that a DEALER received, in any of the three forms.

    The forms are `["", topic, seq, payload]`, `["", seq, payload]`, and the end marker `["", ""]` of the first version. A
    message with an empty payload ends the reply if its sequence number is invalid, as in the engines' example subscriber. If
    the number is valid, the message is a batch that was sent empty, and more batches may follow.
    """
    if not frames or frames[0] != b"" or not 2 <= len(frames) <= 4:
        return Malformed("not a replay reply")
    if len(frames) == 2:
        return ReplayEnd() if frames[-1] == b"" else Malformed("not a replay reply")
    fault = _seq_fault(frames[-2])
    if fault is not None:
        return ReplayEnd() if frames[-1] == b"" else Malformed(fault)
    topic = frames[1] if len(frames) == 4 else None
    return ReplayBatch(topic, int.from_bytes(frames[-2], "big"), frames[-1])
