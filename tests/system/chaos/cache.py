"""A KV cache that does as it likes within the rules: random, valid, fast, and the same for the same seed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any, Final, Literal, NamedTuple, Self

from kvevents.events import (
    MEDIUM_CPU,
    MEDIUM_CPU_PINNED,
    MEDIUM_DISK,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
)
from kvevents.wire import Dialect

VOCABULARY: Final = 128_000
MAX_GHOSTS: Final = 256
"""Blocks that left and may come back under the same hash, as a prompt that is sent again."""
MAX_DEPTH: Final = 64
"""Blocks of a chain, about: a block keeps those before it in memory, held or not."""
WINDOW: Final = 128
"""Tokens of the second group's sliding window."""


class Plane(NamedTuple):
    """Where a copy of a block is."""

    medium: str | None
    group: int | None


@dataclass(frozen=True, slots=True)
class Speech:
    """What a publisher can say, and so what its cache may do."""

    media: tuple[str | None, ...]
    """Device memory first."""
    groups: bool
    """Whether there is a second group, with a sliding window."""
    salt: Literal["field", "key"] | None
    lora: Literal["name", "number"]
    signed: bool
    """Whether hashes are handed over as signed numbers."""

    @classmethod
    def of(cls, dialect: Dialect) -> Self:
        """All that a dialect can encode."""
        below = (MEDIUM_CPU_PINNED, MEDIUM_DISK) if dialect.engine == "sglang" else (MEDIUM_CPU, MEDIUM_STORAGE)
        said = dialect.stored_fields
        return cls(
            media=(MEDIUM_GPU, *below) if "medium" in said else (None,),
            groups="kv_cache_spec_kind" in said,
            salt="field" if "cache_salt" in said else "key" if "extra_keys" in said else None,
            lora="name" if "lora_name" in said else "number",
            signed=False,
        )


@dataclass(frozen=True, slots=True)
class Habits:
    """How a cache is used."""

    blocks: int
    """About how many are held."""
    block_size: int
    ragged: bool
    """Whether blocks also leave from the middle of a chain."""
    clears: float
    """Share of batches that clear everything."""
    events: int
    """Events of a batch, at most."""


class _Root(NamedTuple):
    lora: int | None
    salt: str | None


class _Node:
    """A block: what it is, and where it is held."""

    __slots__ = ("copies", "depth", "held_at", "kids", "name", "parent", "root", "tokens")

    def __init__(self, name: int, parent: _Node | None, root: _Root, tokens: list[int]) -> None:
        self.name = name
        self.parent = parent
        self.root = root
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.tokens = tokens
        self.copies: Counter[Plane] = Counter()
        self.kids: dict[_Node, None] = {}
        self.held_at = -1


class Cache:
    """`step` does something and publishes its events; `held` is what is true then."""

    def __init__(self, draw: Random, speech: Speech, habits: Habits) -> None:
        self._draw: Final = draw
        self._speech: Final = speech
        self._habits: Final = habits
        self._held: list[_Node] = []
        self._ghosts: deque[_Node] = deque(maxlen=MAX_GHOSTS)
        self._device: Final = Plane(speech.media[0], 0 if speech.groups else None)
        self._below: Final = [Plane(medium, self._device.group) for medium in speech.media[1:]]
        self._window: Final = Plane(speech.media[0], 1)
        self._deeds, self._weights = self._repertoire()

    def _repertoire(self) -> tuple[list[Callable[[], KVEvent | None]], list[int]]:
        """What it can do, with cumulative weights."""
        deeds: list[tuple[Callable[[], KVEvent | None], int]] = [(self._grow, 50), (self._return, 14), (self._again, 3)]
        if self._below:
            deeds.append((self._offload, 12))
        if self._speech.groups:
            deeds.append((self._slide, 8))
        return [deed for deed, _ in deeds], list(accumulate(weight for _, weight in deeds))

    def step(self) -> list[KVEvent]:
        """The events of one batch, which may be none."""
        draw, habits = self._draw, self._habits
        if draw.random() < habits.clears:
            return [self._clear()]
        fullness = len(self._held) / habits.blocks
        events = []
        for _ in range(1 + int(draw.random() * habits.events)):
            removes = draw.random() < fullness * 0.6
            event = self._remove() if removes else draw.choices(self._deeds, cum_weights=self._weights)[0]()
            if event is not None:
                events.append(event)
        return events

    def held(self) -> dict[tuple[int, Plane], int]:
        """Copies by hash and plane."""
        return {(node.name, plane): count for node in self._held for plane, count in node.copies.items()}

    # --- what it does

    def _grow(self) -> BlockStored:
        """A new chain of a few blocks, at a root or behind a block that is held."""
        draw = self._draw
        parent = draw.choice(self._held) if self._held and draw.random() < 0.8 else None
        if parent is not None and parent.depth > MAX_DEPTH:
            parent = None
        root = parent.root if parent is not None else self._root()
        size, chain, before = self._habits.block_size, [], parent
        for _ in range(1 + int(draw.random() ** 2 * 4)):
            first = int(draw.random() * VOCABULARY)
            node = _Node(draw.getrandbits(64), before, root, [first, *(int(draw.random() * 64) for _ in range(size - 1))])
            chain.append(node)
            before = node
        return self._store(chain, self._device)

    def _root(self) -> _Root:
        draw = self._draw
        lora = draw.randrange(1, 4) if draw.random() < 0.15 else None
        salt = draw.choice(("s1", "s2")) if self._speech.salt and draw.random() < 0.2 else None
        return _Root(lora, salt)

    def _return(self) -> BlockStored | None:
        """A block that was removed is computed again."""
        if not self._ghosts:
            return None
        node = self._ghosts.popleft()
        rooted = node.parent is None or node.parent.held_at >= 0
        return self._store([node], self._device) if rooted and node.held_at < 0 else None

    def _again(self) -> BlockStored | None:
        """A second copy of a block: of an equal one, computed at the same time."""
        if not self._held:
            return None
        node = self._draw.choice(self._held)
        rooted = node.parent is None or node.parent.held_at >= 0
        return self._store([node], self._device) if rooted else None

    def _offload(self) -> BlockStored | None:
        """A copy of a block on a slower tier, with its tokens or without."""
        if not self._held:
            return None
        draw = self._draw
        node, plane = draw.choice(self._held), draw.choice(self._below)
        if (node.parent is None or node.parent.held_at >= 0) and draw.random() < 0.5:
            return self._store([node], plane)
        self._place(node, plane)
        return self._stored([node], plane, [], 0, None, None)

    def _slide(self) -> BlockStored | None:
        """The block is held by the sliding window's group as well."""
        if not self._held:
            return None
        node = self._draw.choice(self._held)
        self._place(node, self._window)
        return self._stored([node], self._window, node.tokens, self._habits.block_size, "sliding_window", WINDOW)

    def _remove(self) -> BlockRemoved | None:
        """A copy of a block: as a rule of one that none goes on from."""
        if not self._held:
            return None
        draw = self._draw
        node = draw.choice(self._held)
        if not (self._habits.ragged and draw.random() < 0.1):
            while node.kids:
                node = next(reversed(node.kids))
        plane = next(iter(node.copies))
        self._take(node, plane)
        return BlockRemoved([self._name(node)], plane.medium, plane.group)

    def _clear(self) -> AllBlocksCleared:
        for node in self._held:
            node.copies.clear()
            node.held_at = -1
            if node.parent is not None:
                node.parent.kids.pop(node, None)
        self._ghosts.extend(self._held[:MAX_GHOSTS])
        self._held.clear()
        return AllBlocksCleared()

    # --- books

    def _store(self, chain: Sequence[_Node], plane: Plane) -> BlockStored:
        for node in chain:
            self._place(node, plane)
        tokens = [token for node in chain for token in node.tokens]
        kind = "full_attention" if self._speech.groups else None
        return self._stored(chain, plane, tokens, self._habits.block_size, kind, None)

    def _place(self, node: _Node, plane: Plane) -> None:
        node.copies[plane] += 1
        if node.held_at < 0:
            node.held_at = len(self._held)
            self._held.append(node)
            if node.parent is not None:
                node.parent.kids[node] = None

    def _take(self, node: _Node, plane: Plane) -> None:
        node.copies[plane] -= 1
        if node.copies[plane]:
            return
        del node.copies[plane]
        if node.copies:
            return
        last = self._held.pop()
        if last is not node:
            self._held[node.held_at] = last
            last.held_at = node.held_at
        node.held_at = -1
        if node.parent is not None:
            node.parent.kids.pop(node, None)
        self._ghosts.append(node)

    # --- words

    def _stored(
        self, chain: Sequence[_Node], plane: Plane, tokens: list[int], size: int, kind: str | None, window: int | None
    ) -> BlockStored:
        speech, first = self._speech, chain[0]
        root, parent = first.root, first.parent
        named = speech.lora == "name" and root.lora is not None
        return BlockStored(
            [self._name(node) for node in chain],
            None if parent is None else self._name(parent),
            tokens,
            size,
            root.lora,
            plane.medium,
            f"adapter-{root.lora}" if named else None,
            self._extra_keys(chain) if speech.salt == "key" else None,
            plane.group,
            kind,
            window,
            cache_salt=root.salt if speech.salt == "field" and parent is None else None,
        )

    def _extra_keys(self, chain: Sequence[_Node]) -> list[tuple[Any, ...] | None] | None:
        """vLLM's: the LoRA's name of every block, the salt of the first one."""
        root = chain[0].root
        names = () if root.lora is None or self._speech.lora == "number" else (f"adapter-{root.lora}",)
        keys = [(*names, root.salt) if root.salt and node.parent is None else names for node in chain]
        return [key or None for key in keys] if any(keys) else None

    def _name(self, node: _Node) -> int:
        return node.name - (1 << 64) if self._speech.signed and node.name >> 63 else node.name
