"""Our own lines, for everybody's own requests.

`{"at": 1.5, "tokens": [791, 6864], "output_tokens": 120, "session": "u7", "lora": "adapter-a", "salt": "tenant-1"}`. Instead
of `tokens` and `output_tokens` there can be `prompt` and `output`, lists of pieces: each is `[number, length]`, which stands
for that many token ids that the number always gives, or `{"tokens": [...]}`.
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
    """A piece of which the token ids are told."""

    tokens: _TokenIds


_Pieces = Annotated[list[tuple[Annotated[int, msgspec.Meta(ge=0)], _Length] | Given], msgspec.Meta(min_length=1)]


class PlainRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """One line. `prompt` or `tokens`, and `output` or `output_tokens`, must be there; not both."""

    at: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds from the beginning."""
    prompt: _Pieces | None = None
    tokens: _TokenIds | None = None
    output: _Pieces | None = None
    output_tokens: _Length | None = None
    """Length of an answer that is text of its own."""
    session: _Name | None = None
    lora: _Name | None = None
    salt: _Name | None = None

    def __post_init__(self) -> None:
        for one, other in (("prompt", "tokens"), ("output", "output_tokens")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise ValueError(f"a line has either `{one}` or `{other}`")


DECODER: Final = msgspec.json.Decoder(PlainRow)


class PlainReader:
    """Makes requests of rows."""

    def request(self, line: bytes, number: int) -> Request:
        """The request of one line, the `number`-th. Raises `ValueError`."""
        row = DECODER.decode(line)
        prompt = Text.of(row.tokens) if row.tokens is not None else _text(row.prompt or ())
        output = _text(row.output or ()) if row.output_tokens is None else Text((Drawn(ANSWERS + number, row.output_tokens),))
        return Request(row.at, prompt, output, row.session, row.lora, row.salt)


def plain_row(request: Request) -> PlainRow:
    """The line of a request."""
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
        raise ValueError(f"the number of a piece is {number}; it is at most 2**64 - 1")
    return Drawn(number, length)


def _pieces(text: Text) -> list[tuple[int, int] | Given]:
    return [(piece.number, piece.length) if isinstance(piece, Drawn) else Given(piece.tolist()) for piece in text.pieces]
