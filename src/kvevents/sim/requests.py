"""Requests to a fleet: prompts and answers, in a compact form from which token ids are generated.

A production trace has 145 million tokens, and describes its prompts as sequences of pieces. So a prompt is a sequence of pieces
here, too. A piece is either a number, from which its token ids are generated when they are needed, or the token ids
themselves.
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
    """A prompt and its answer, which is known in advance: the simulation does not compute it."""

    def __init__(
        self, tokens: array[int], prompt: int, block_size: int, seed: str, lora: str | None = None, salt: str | None = None
    ) -> None:
        self.tokens: Final = tokens
        """Token ids of the prompt, then of the answer."""
        self.prompt: Final = prompt
        self.lora: Final = lora
        self.salt: Final = salt
        # The seed makes hashes differ between engines, as Python's hash seed does in vLLM.
        self.hashes: Final = block_keys(tokens, block_size, Namespace(lora=lora, salt=f"{seed}/{salt or ''}"))
        """Hashes of all complete blocks, chained from the root, unsigned 64-bit integers."""
        self.known = prompt
        """Tokens that can be computed: the prompt, and the answer so far."""
        self.computed = 0
        """Tokens whose keys and values are in the cache, or will be when the step ends."""
        self.boundary = 0
        """Tokens that a hybrid model's full attention found in the cache, but its sliding window did not."""
        self.tables: tuple[list[int], ...] = ()
        """Blocks by group; `NULL` for blocks that a window does not need."""
        self.placed: list[int] = []
        """By group, the number of leading blocks that were announced as stored."""

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet."""
        return self.known - self.computed

    @property
    def complete(self) -> bool:
        """Whether the answer is complete."""
        return self.known == len(self.tokens)


VOCABULARY: Final = 1 << 16
"""Upper bound of token ids, exclusive; real vocabularies have 32,000 to 260,000."""
_SOURCE_BITS: Final = 20
_SPREAD: Final = 0x9E3779B97F4A7C15
"""An odd factor that places consecutive numbers far apart in the token source (Knuth's multiplicative hashing)."""
_NAME_TOKENS: Final = 4
"""Number of tokens at the beginning of a piece that encode its number, 16 bits each, so that different pieces differ there."""


class Drawn(NamedTuple):
    """A piece of text generated from a number. The same number gives the same token ids; a shorter piece is a prefix."""

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
    def of(cls, tokens: Iterable[int]) -> Self:
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
    """Return the token ids of the piece with this number."""
    name = array("I", array("H", number.to_bytes(2 * _NAME_TOKENS, "little")))
    start = (number * _SPREAD % (1 << 64)) >> (64 - _SOURCE_BITS)
    tokens = name + _token_source()[start : start + length]
    while len(tokens) < length:
        tokens += _token_source()[: length - len(tokens)]
    del tokens[length:]
    return tokens


@cache
def _token_source() -> array[int]:
    """Return pseudo-random token ids, the same in every process."""
    raw = array("H", Random(0).randbytes(2 * 2**_SOURCE_BITS))  # noqa: S311 - text, not a secret
    return array("I", raw)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a fleet."""

    at: float
    """Seconds from the beginning."""
    prompt: Text
    output: Text
    """The answer, at least one token. A later prompt that repeats prompt and answer finds both in the cache."""
    session: str | None = None
    """Conversation or user, for policies with session affinity. A real router reads it from a header or a cookie."""
    lora: str | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt) or not len(self.output):
            raise ConfigError("invalid request: expected at least one token of prompt and one of answer")


def shared_prefix(requests: Iterable[Request]) -> float:
    """Return the share of all prompt tokens, 0 to 1, that an unlimited cache of pieces would hold when their prompts arrive.

    The cache would contain all earlier prompts and answers, whichever worker served them.
    """
    paths: set[object] = set()
    held = total = 0
    for request in requests:
        path: object = (request.lora, request.salt)
        is_known = True
        for piece in request.prompt.pieces:
            path = _extend(path, piece)
            is_known = is_known and path in paths
            paths.add(path)
            held += _tokens_of(piece) if is_known else 0
        total += len(request.prompt)
        for piece in request.output.pieces:
            paths.add(path := _extend(path, piece))
    return held / total if total else 0.0


def _extend(path: object, piece: Drawn | array[int]) -> object:
    return hash(path), piece if isinstance(piece, Drawn) else piece.tobytes()


def _tokens_of(piece: Drawn | array[int]) -> int:
    return piece.length if isinstance(piece, Drawn) else len(piece)
