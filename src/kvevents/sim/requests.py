"""What a fleet is asked: prompts and answers, held as short recipes for their token ids.

A production trace is 145 million tokens. Its prompts are told piece by piece, so a prompt here is a sequence of pieces too,
each either a number that stands for its token ids, or the token ids themselves. Token ids are made when they are needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Final, NamedTuple, Self, TypeAlias

from kvevents.errors import ConfigError

VOCABULARY: Final = 1 << 16
"""Token ids are below this; real vocabularies have 32,000 to 260,000."""
_WELL_BITS: Final = 20
_WELL_TOKENS: Final = 1 << _WELL_BITS
_SPREAD: Final = 0x9E3779B97F4A7C15
"""Odd, so that numbers that follow one another begin far apart in the well (Knuth's multiplicative hashing)."""
_NAME_TOKENS: Final = 4
"""A piece begins with its number, 16 bits a token, so that pieces of different numbers differ in their first tokens."""


class Drawn(NamedTuple):
    """A piece of text that a number stands for: always the same token ids, of which a shorter piece has the beginning."""

    number: int
    """From 0 to 2**64 - 1."""
    length: int
    """In tokens."""


Piece: TypeAlias = "Drawn | tuple[int, int] | array[int]"


class Text:
    """Token ids of a prompt or an answer, as pieces. Immutable; equal where its pieces are."""

    __slots__ = ("_length", "pieces")

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces: Final[tuple[Drawn | array[int], ...]] = tuple(
            piece if isinstance(piece, (Drawn, array)) else Drawn(*piece) for piece in pieces
        )
        self._length = sum(_tokens_of(piece) for piece in self.pieces)

    @classmethod
    def of(cls, tokens: Iterable[int]) -> Self:
        """These token ids, unsigned 32 bits each. Raises OverflowError or TypeError for others."""
        return cls((array("I", tokens),))

    def __len__(self) -> int:
        return self._length

    def __add__(self, other: Text) -> Text:
        return Text((*self.pieces, *other.pieces))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and self.pieces == other.pieces

    def __hash__(self) -> int:
        return hash(tuple(piece if isinstance(piece, Drawn) else piece.tobytes() for piece in self.pieces))

    def __repr__(self) -> str:
        return f"<Text {self._length} tokens in {len(self.pieces)} pieces>"

    def tokens(self) -> array[int]:
        """All token ids, unsigned 32 bits each."""
        found = array("I")
        for piece in self.pieces:
            found += draw(*piece) if isinstance(piece, Drawn) else piece
        return found


def draw(number: int, length: int) -> array[int]:
    """The token ids that a number stands for."""
    name = array("I", array("H", number.to_bytes(2 * _NAME_TOKENS, "little")))
    start = (number * _SPREAD % (1 << 64)) >> (64 - _WELL_BITS)
    found = name + _well()[start : start + length]
    while len(found) < length:
        found += _well()[: length - len(found)]
    del found[length:]
    return found


@cache
def _well() -> array[int]:
    """Token ids to draw from, always the same."""
    raw = array("H", Random(0).randbytes(2 * _WELL_TOKENS))  # noqa: S311 - text, not a secret
    return array("I", raw)


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the fleet."""

    at: float
    """Seconds from the beginning."""
    prompt: Text
    output: Text
    """The answer, at least one token; a later prompt that repeats prompt and answer finds both in the cache."""
    session: str | None = None
    """Conversation or user, for policies that keep one together; a router knows it from a header or a cookie."""
    lora: str | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt) or not len(self.output):
            raise ConfigError("a request needs at least one token of prompt and one of answer")


def shared_prefix(requests: Iterable[Request]) -> float:
    """The share of all prompt tokens that an endless cache of whole pieces would hold when their prompt comes, 0 to 1.

    Prompts and answers that came before are in that cache, whoever served them.
    """
    seen: set[tuple[object, ...]] = set()
    held = total = 0
    for request in requests:
        path: tuple[object, ...] = (request.lora, request.salt)
        known = True
        for piece in request.prompt.pieces:
            path = _beyond(path, piece)
            known = known and path in seen
            seen.add(path)
            held += _tokens_of(piece) if known else 0
        total += len(request.prompt)
        for piece in request.output.pieces:
            path = _beyond(path, piece)
            seen.add(path)
    return held / total if total else 0.0


def _beyond(path: tuple[object, ...], piece: Drawn | array[int]) -> tuple[object, ...]:
    return (hash(path), piece if isinstance(piece, Drawn) else piece.tobytes())


def _tokens_of(piece: Drawn | array[int]) -> int:
    return piece.length if isinstance(piece, Drawn) else len(piece)
