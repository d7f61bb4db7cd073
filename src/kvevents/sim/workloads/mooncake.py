"""Traces in Mooncake's format: the lengths of prompts and the pieces that they share, without their text.

A line is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`, with one id for every 512
tokens of the prompt. An id identifies its piece and all pieces before it; the last one covers the rest
(github.com/kvcache-ai/Mooncake, FAST'25). Answers are always new text, since a trace does not contain which later prompt
repeats one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Annotated, Final

import msgspec

from kvevents.sim.requests import Drawn, Request, Text
from kvevents.sim.workloads.sessions import Sessions

PIECE_TOKENS: Final = 512
ANSWERS: Final = 1 << 63
"""First number of the pieces that are answers, of which a trace has only the length."""

_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class MooncakeRow(msgspec.Struct, frozen=True, gc=False):
    """One line of a trace. Other fields are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds from the beginning of the trace."""
    input_length: _Positive
    output_length: _Positive
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]


DECODER: Final = msgspec.json.Decoder(MooncakeRow)


class MooncakeReader:
    """Converts lines to requests, in their order, and infers their sessions."""

    def __init__(self) -> None:
        self._sessions = Sessions()

    def request(self, line: bytes, number: int) -> Request:
        """Return the request of line `number`. Raises `ValueError`."""
        row = DECODER.decode(line)
        ids, length = row.hash_ids, row.input_length
        pieces, rest = divmod(length, PIECE_TOKENS)
        needed = pieces + (rest > 0)
        if len(ids) != needed:
            raise ValueError(
                f"input_length {length} needs {needed} hash_ids, one for every {PIECE_TOKENS} tokens, but has {len(ids)}"
            )
        drawn = [Drawn(one, PIECE_TOKENS) for one in ids[:pieces]]
        if rest:
            drawn.append(Drawn(ids[-1], rest))
        answer = Text((Drawn(ANSWERS + number, row.output_length),))
        return Request(row.timestamp / 1000, Text(drawn), answer, self._sessions.of(ids, pieces))


def mooncake_rows(requests: Iterable[Request]) -> Iterator[MooncakeRow]:
    """Yield these requests in Mooncake's format: pieces of 512 tokens become numbers, without their text.

    Sessions, LoRA and salts are not part of the format: prompts of different LoRAs or salts share no ids. Times are rounded
    down to milliseconds. Remembers every piece, about 200 bytes each.
    """
    ids: dict[tuple[object, bytes], int] = {}
    for request in requests:
        text = memoryview(request.prompt.tokens())
        parent: object = (request.lora, request.salt)
        path: list[int] = []
        for start in range(0, len(text), PIECE_TOKENS):
            parent = ids.setdefault((parent, _digest(text[start : start + PIECE_TOKENS])), len(ids))
            path.append(parent)
        yield MooncakeRow(int(request.at * 1000), len(text), len(request.output), path)


def _digest(piece: memoryview) -> bytes:
    return blake2b(piece, digest_size=16).digest()
