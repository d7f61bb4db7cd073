"""A small engine for the publisher tests that generates events and counts the blocks that it holds."""

from __future__ import annotations

import random

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.publisher.compaction import Compactor
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.publisher.settings import ReplayBufferSettings
from kvevents.wire.encode import batch_encoder

WORKER = ("engine", 0)
SIZE = 4
_DEFAULTS = ReplayBufferSettings()


def compacting_buffer(steps: int, *, settings: ReplayBufferSettings = _DEFAULTS) -> ReplayBuffer:
    """Return a buffer with snapshots."""
    return ReplayBuffer(steps, Compactor.create(), batch_encoder(), settings=settings)


class Engine:
    """A small cache with chains of blocks. If it is full, it evicts the oldest leaf, or sometimes the oldest block."""

    def __init__(self, seed: int = 0, room: int = 12) -> None:
        self._random = random.Random(seed)
        self._room = room
        self._chains: dict[int, int | None] = {}
        self._next = 1
        self.live: set[int] = set()

    def clear(self) -> list[KVEvent]:
        self.live.clear()
        self._chains.clear()
        return [AllBlocksCleared()]

    def events(self) -> list[KVEvent]:
        found: list[KVEvent] = self.clear() if self._random.random() < 0.02 else []
        parent = self._random.choice([None, *self._chains])
        count = self._random.randrange(1, 4)
        hashes = list(range(self._next, self._next + count))
        self._next += count
        tokens = [token for value in hashes for token in range(value, value + SIZE)]
        found.append(BlockStored(hashes, parent, tokens, SIZE, medium="GPU"))
        for place, value in enumerate(hashes):
            self._chains[value] = hashes[place - 1] if place else parent
        self.live.update(hashes)
        while len(self.live) > self._room:
            # A leaf, as engines evict the tail of a sequence first; sometimes a block in the middle.
            parents = {self._chains[value] for value in self.live}
            leaves = [value for value in self.live if value not in parents]
            gone = min(self.live if self._random.random() < 0.1 else leaves or self.live)
            self.live.remove(gone)
            self._chains.pop(gone)
            found.append(BlockRemoved([gone], "GPU"))
        return found
