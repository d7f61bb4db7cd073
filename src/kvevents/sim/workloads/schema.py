"""The trace format of kvevents, which describes any requests.

Each line is a JSON object:
`{"at": 1.5, "tokens": [791, 6864], "output_tokens": 120, "session": "u7", "lora": "adapter-a", "salt": "tenant-1"}`. Instead
of `tokens` and `output_tokens` a line can have `prompt` and `output`, lists of pieces. A piece is `{"tokens": [...]}` or
`[number, length]`: `length` token ids that are generated from the number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from kvevents.sim.requests import Drawn, Request, Text
from kvevents.sim.workloads.mooncake import ANSWERS

MAX_NUMBER: Final = (1 << 64) - 1
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_TokenIds = Annotated[list[_TokenId], msgspec.Meta(min_length=1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class Given(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A piece with its token ids."""

    tokens: _TokenIds


_Pieces = Annotated[list[tuple[Annotated[int, msgspec.Meta(ge=0)], _Length] | Given], msgspec.Meta(min_length=1)]


class PlainRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """One line of a trace. It has exactly one of `prompt` and `tokens`, and exactly one of `output` and `output_tokens`."""

    at: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds from the beginning of the trace."""
    prompt: _Pieces | None = None
    tokens: _TokenIds | None = None
    output: _Pieces | None = None
    output_tokens: _Length | None = None
    """Length of an answer that is new text."""
    session: _Name | None = None
    lora: _Name | None = None
    salt: _Name | None = None

    def __post_init__(self) -> None:
        for one, other in (("prompt", "tokens"), ("output", "output_tokens")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise ValueError(f"expected exactly one of the keys {one} and {other}")


DECODER: Final = msgspec.json.Decoder(PlainRow)


class PlainReader:
    """Converts lines to requests."""

    def request(self, line: bytes, number: int) -> Request:
        """Return the request of line `number`. Raises `ValueError`."""
        row = DECODER.decode(line)
        prompt = Text.of(row.tokens) if row.tokens is not None else _text(row.prompt or ())
        output = _text(row.output or ()) if row.output_tokens is None else Text((Drawn(ANSWERS + number, row.output_tokens),))
        return Request(row.at, prompt, output, row.session, row.lora, row.salt)


def plain_row(request: Request) -> PlainRow:
    """Return the line of a request."""
    return PlainRow(
        at=request.at,
        prompt=_pieces(request.prompt),
        output=_pieces(request.output),
        session=request.session,
        lora=request.lora,
        salt=request.salt,
    )


def _text(pieces: Sequence[tuple[int, int] | Given]) -> Text:
    return Text(array("I", piece.tokens) if isinstance(piece, Given) else _drawn(*piece) for piece in pieces)


def _drawn(number: int, length: int) -> Drawn:
    if number > MAX_NUMBER:
        raise ValueError(f"invalid number {number} of a piece: expected at most 2**64 - 1")
    return Drawn(number, length)


def _pieces(text: Text) -> list[tuple[int, int] | Given]:
    return [(piece.number, piece.length) if isinstance(piece, Drawn) else Given(piece.tolist()) for piece in text.pieces]
