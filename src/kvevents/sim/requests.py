"""Requests to a fleet. The prompts and answers have a compact form from which token ids are generated.

A production trace has 145 million tokens, and describes its prompts as sequences of pieces. So a simulated prompt is a sequence
of pieces, too. A piece is either a number, from which token ids are generated when they are needed, or an array of token ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Final, NamedTuple, Self, TypeAlias

from kvevents.errors import ConfigError
from kvevents.index import Namespace, block_keys


class Sequence:
    """A prompt and its answer. The answer is known in advance, because the simulation does not compute it."""

    def __init__(
        self, tokens: array[int], prompt: int, block_size: int, seed: str, lora: str | None = None, salt: str | None = None
    ) -> None:
        self.tokens: Final = tokens
        """Token ids of the prompt, then of the answer."""
        self.prompt: Final = prompt
        self.lora: Final = lora
        self.salt: Final = salt
        # A different seed gives each engine different hashes, as Python's hash seed does in vLLM.
        self.hashes: Final = block_keys(tokens, block_size, Namespace(lora=lora, salt=f"{seed}/{salt or ''}"))
        """Hashes of all complete blocks, chained from the root, unsigned 64-bit integers."""
        self.known = prompt
        """Number of tokens that can be computed: the prompt, and the part of the answer that was produced."""
        self.computed = 0
        """Number of tokens whose keys and values are in the cache, or will be there at the end of the current step."""
        self.boundary = 0
        """Number of tokens that full attention found in the cache, if the sliding window found fewer; else 0."""
        self.tables: tuple[list[int], ...] = ()
        """Blocks of each group; `NULL` for blocks that a window does not need."""
        self.placed: list[int] = []
        """For each group, the number of leading blocks that were announced as stored."""

    @property
    def remaining(self) -> int:
        """Number of known tokens that were not computed yet."""
        return self.known - self.computed

    @property
    def complete(self) -> bool:
        """Whether all tokens of the answer were produced."""
        return self.known == len(self.tokens)


VOCABULARY_SIZE: Final = 1 << 16
"""Exclusive upper bound of token ids. Real vocabularies have 32,000 to 260,000 token ids."""
_SOURCE_BITS: Final = 20
_SPREAD_FACTOR: Final = 0x9E3779B97F4A7C15
"""An odd factor that places consecutive numbers far apart in the token source (Knuth's multiplicative hashing)."""
_NAME_TOKENS: Final = 4
"""Number of leading tokens of a piece that encode the piece's number, 16 bits each. So pieces with different numbers have
different tokens."""


class Drawn(NamedTuple):
    """A piece of text generated from a number. Equal numbers give equal token ids; of two pieces, the shorter is a prefix."""

    number: int
    """A number from 0 to 2**64 - 1."""
    length: int
    """Length in tokens."""


Piece: TypeAlias = "Drawn | tuple[int, int] | array[int]"


class Text:
    """The token ids of a prompt or an answer, as pieces. Immutable; equal if the pieces are equal."""

    __slots__ = ("_length", "pieces")

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces: Final[tuple[Drawn | array[int], ...]] = tuple(
            piece if isinstance(piece, (Drawn, array)) else Drawn(*piece) for piece in pieces
        )
        self._length = sum(_tokens_of(piece) for piece in self.pieces)

    @classmethod
    def from_tokens(cls, tokens: Iterable[int]) -> Self:
        """Return a text of unsigned 32-bit token ids. Raises `OverflowError` or `TypeError` for other values."""
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
        """Return all token ids, unsigned 32-bit integers."""
        tokens = array("I")
        for piece in self.pieces:
            tokens += draw(*piece) if isinstance(piece, Drawn) else piece
        return tokens


def draw(number: int, length: int) -> array[int]:
    """Return the token ids of the piece with this number and this length."""
    name = array("I", array("H", number.to_bytes(2 * _NAME_TOKENS, "little")))
    start = (number * _SPREAD_FACTOR % (1 << 64)) >> (64 - _SOURCE_BITS)
    tokens = name + _token_source()[start : start + length]
    while len(tokens) < length:
        tokens += _token_source()[: length - len(tokens)]
    del tokens[length:]
    return tokens


@cache
def _token_source() -> array[int]:
    """Return pseudo-random token ids, which are equal in all processes."""
    return array("I", array("H", Random(0).randbytes(2 * 2**_SOURCE_BITS)))  # noqa: S311 - numbers that need not be secret


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a fleet."""

    at: float
    """Arrival time in seconds from the beginning of the run."""
    prompt: Text
    output: Text
    """The answer, at least one token. A later prompt that repeats prompt and answer finds both in the cache."""
    session: str | None = None
    """Id of a conversation or user, for policies with session affinity. A real router reads it from a header or cookie."""
    lora: str | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt) or not len(self.output):
            raise ConfigError("invalid request: expected at least one token in the prompt and one in the answer")


def shared_prefix(requests: Iterable[Request]) -> float:
    """Return the share of all prompt tokens, 0 to 1, that an unlimited cache of the whole fleet would find.

    When a prompt arrives, the unlimited cache contains all earlier prompts and answers.
    """
    paths: set[object] = set()
    held = total = 0
    for request in requests:
        path: object = (request.lora, request.salt)
        is_known = True
        for piece in request.prompt.pieces:
            path = _extend_path(path, piece)
            is_known = is_known and path in paths
            paths.add(path)
            held += _tokens_of(piece) if is_known else 0
        total += len(request.prompt)
        for piece in request.output.pieces:
            paths.add(path := _extend_path(path, piece))
    return held / total if total else 0.0


def _extend_path(path: object, piece: Drawn | array[int]) -> object:
    return hash(path), piece if isinstance(piece, Drawn) else piece.tobytes()


def _tokens_of(piece: Drawn | array[int]) -> int:
    return piece.length if isinstance(piece, Drawn) else len(piece)
