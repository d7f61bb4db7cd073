"""What both sides index. Standard library only: it also runs in the rival's interpreter, which has nothing else of ours."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

BLOCK_SIZE: Final = 16
VOCABULARY: Final = 128_256
CHAIN: Final = 2_048
"""Blocks of a long chain: a prompt of 32,768 tokens."""


@dataclass(frozen=True)
class Chain:
    """The blocks of one prompt, with hashes as random as an engine's."""

    tokens: array[int]
    hashes: array[int]

    @property
    def block_size(self) -> int:
        return len(self.tokens) // len(self.hashes)

    def prefix(self, blocks: int) -> Chain:
        """Its first blocks."""
        return Chain(self.tokens[: blocks * self.block_size], self.hashes[:blocks])

    def suffix(self, blocks: int) -> Chain:
        """All but its first blocks."""
        return Chain(self.tokens[blocks * self.block_size :], self.hashes[blocks:])


class Removal(NamedTuple):
    """What one event removes."""

    hashes: list[int]


class Piece(NamedTuple):
    """What one event stores."""

    parent: int | None
    hashes: list[int]
    tokens: list[int]
    block_size: int


Event: TypeAlias = Piece | Removal


def _uniform(draw: random.Random, count: int) -> array[int]:
    return array("I", [number % VOCABULARY for number in array("I", draw.randbytes(4 * count))])


def chain(draw: random.Random, length: int = CHAIN, block_size: int = BLOCK_SIZE) -> Chain:
    """One of `length` blocks."""
    return Chain(_uniform(draw, length * block_size), array("Q", draw.randbytes(8 * length)))


def chains(blocks: int, length: int = CHAIN, *, seed: int = 1) -> Iterator[Chain]:
    """Chains of `length` blocks, `blocks` in all, the same for the same seed."""
    draw = random.Random(seed)  # noqa: S311 - test data
    for done in range(0, blocks, length):
        yield chain(draw, min(length, blocks - done))


def pieces(whole: Chain, per_event: int, parent: int | None = None) -> Iterator[Piece]:
    """A chain, cut into events of `per_event` blocks."""
    size = whole.block_size
    for at in range(0, len(whole.hashes), per_event):
        hashes = whole.hashes[at : at + per_event].tolist()
        yield Piece(parent, hashes, whole.tokens[at * size : (at + len(hashes)) * size].tolist(), size)
        parent = hashes[-1]


def rounds(draw: random.Random) -> Callable[[int], Iterator[Event]]:
    """Rounds of requests that come and go: about so many blocks are stored, then removed, a request's last one first.

    All requests have the same system prompt of 16 blocks, which stays. Each has 48 of its own that come in one event, and 16
    that are decoded one by one; every fourth branches off in the middle with 8 more.
    """
    prompt = chain(draw, 16)
    first = [*pieces(prompt, 16)]

    def once(blocks: int) -> Iterator[Event]:
        removals = []
        while first:
            yield first.pop()
        for number in range(blocks // 64):
            own = chain(draw, 64)
            yield from pieces(own.prefix(48), 48, parent=prompt.hashes[-1])
            yield from pieces(own.suffix(48), 1, parent=own.hashes[47])
            removals.append(Removal(own.hashes.tolist()[::-1]))
            if number % 4 == 3:
                branch = chain(draw, 8)
                yield from pieces(branch, 8, parent=own.hashes[31])
                removals.append(Removal(branch.hashes.tolist()[::-1]))
        yield from reversed(removals)

    return once


def percentile(values: list[int], per_cent: float) -> float:
    """In microseconds, of nanoseconds in any order."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * per_cent / 100))] / 1e3
