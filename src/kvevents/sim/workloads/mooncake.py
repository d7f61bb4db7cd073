"""Traces in Mooncake's format: how long prompts were and which pieces they shared, without a word of them.

A line is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`, with one id for every 512
tokens of the prompt, which stands for that piece and all before it; the last covers the rest (github.com/kvcache-ai/Mooncake,
FAST'25). An answer is text of its own: which later prompt repeats it, a trace does not tell.
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
"""Numbers from here on are answers that a file tells only the length of."""

_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class MooncakeRow(msgspec.Struct, frozen=True, gc=False):
    """One line. Other fields of it are left alone."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds from the beginning."""
    input_length: _Positive
    output_length: _Positive
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]


DECODER: Final = msgspec.json.Decoder(MooncakeRow)


class MooncakeReader:
    """Makes requests of rows, in their order; it remembers what tells sessions."""

    def __init__(self) -> None:
        self._sessions = Sessions()

    def request(self, line: bytes, number: int) -> Request:
        """The request of one line, the `number`-th. Raises `ValueError`."""
        row = DECODER.decode(line)
        ids, length = row.hash_ids, row.input_length
        pieces, rest = divmod(length, PIECE_TOKENS)
        needed = pieces + (rest > 0)
        if len(ids) != needed:
            raise ValueError(
                f"input_length {length} needs {needed} hash_ids, one for every {PIECE_TOKENS} tokens; there are {len(ids)}"
            )
        drawn = [Drawn(one, PIECE_TOKENS) for one in ids[:pieces]]
        if rest:
            drawn.append(Drawn(ids[-1], rest))
        answer = Text((Drawn(ANSWERS + number, row.output_length),))
        return Request(row.timestamp / 1000, Text(drawn), answer, self._sessions.of(ids, pieces))


def mooncake_rows(requests: Iterable[Request]) -> Iterator[MooncakeRow]:
    """These requests as Mooncake would have written them: pieces of 512 tokens get numbers, and their text is gone.

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
