"""Events that benchmarks send: prompts as chains of random blocks, and engines whose caches are full."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvevents.events import BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.wire import encode_batch

BLOCK_SIZE: Final = 16
VOCABULARY: Final = 128_256
CHAIN: Final = 512
"""Number of blocks of a chain of an engine: 8,192 tokens."""
_SPREAD: Final = 0x9E3779B97F4A7C15


class Chain(NamedTuple):
    """The blocks of one prompt, with hashes as random as an engine's."""

    tokens: array[int]
    hashes: array[int]


def chain(draw: random.Random, length: int) -> Chain:
    """Return a prompt of `length` blocks."""
    tokens = [number % VOCABULARY for number in array("I", draw.randbytes(4 * length * BLOCK_SIZE))]
    return Chain(array("I", tokens), array("Q", draw.randbytes(8 * length)))


def stores(prompt: Chain, per_event: int) -> Iterator[bytes]:
    """Yield the payloads that store a prompt in events of `per_event` blocks, in the form of vLLM from 0.24 on."""
    parent = None
    for start in range(0, len(prompt.hashes), per_event):
        hashes = prompt.hashes[start : start + per_event].tolist()
        tokens = prompt.tokens[start * BLOCK_SIZE : (start + per_event) * BLOCK_SIZE].tolist()
        event = BlockStored(hashes, parent, tokens, BLOCK_SIZE, None, "GPU", None)
        yield encode_batch(KVEventBatch(1.7e9, [event], 0))
        parent = hashes[-1]


class Engine:
    """A cache of `capacity` blocks. Each batch stores `blocks` blocks and removes as many of the oldest chains."""

    def __init__(self, blocks: int, capacity: int) -> None:
        self._blocks = blocks
        self._capacity = capacity
        self._next = 1
        self._chains: deque[list[int]] = deque()
        self._size = 0

    def batches(self, count: int) -> Iterator[KVEventBatch]:
        """Yield the next batches."""
        for number in range(count):
            yield KVEventBatch(float(number), self._events())

    def fill(self) -> Engine:
        """Store blocks until the cache is full."""
        for _ in self.batches(self._capacity // self._blocks):
            pass
        return self

    def payloads(self, count: int) -> list[bytes]:
        """Return the payloads of the next batches."""
        return list(map(encode_batch, self.batches(count)))

    def _events(self) -> list[KVEvent]:
        if not self._chains or len(self._chains[-1]) >= CHAIN:
            self._chains.append([])
        newest = self._chains[-1]
        parent = newest[-1] if newest else None
        hashes = [number * _SPREAD % 2**64 for number in range(self._next, self._next + self._blocks)]
        self._next += self._blocks
        self._size += self._blocks
        newest += hashes
        events: list[KVEvent] = []
        while self._size > self._capacity:
            events.append(BlockRemoved([self._chains[0].pop()], "GPU", 0))
            self._size -= 1
            if not self._chains[0]:
                self._chains.popleft()
        tokens = [(value + place) % 60_000 for value in hashes for place in range(BLOCK_SIZE)]
        return [*events, BlockStored(hashes, parent, tokens, BLOCK_SIZE, medium="GPU", group_idx=0)]
