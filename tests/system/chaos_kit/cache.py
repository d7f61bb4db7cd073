"""A simulated KV cache that makes random valid events. The same seed makes the same events."""

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
MAX_REMOVED: Final = 256
"""Removed blocks that may be stored again under the same hash, as for a prompt that is sent again."""
MAX_DEPTH: Final = 64
"""Blocks of a chain, about. The limit bounds memory: a node refers to its parents, whether they are cached or not."""
WINDOW: Final = 128
"""Tokens of the sliding window of the second group."""


class Placement(NamedTuple):
    """Where a copy of a block is."""

    medium: str | None
    group: int | None


@dataclass(frozen=True, slots=True)
class DialectFeatures:
    """The features of a dialect that a cache uses."""

    media: tuple[str | None, ...]
    """Media of the tiers, device memory first."""
    has_groups: bool
    """Whether the cache has a second group, with a sliding window, and several copies of a block. Without named groups a
    second store is the first one again (docs/adr/0027-copies.md)."""
    salt: Literal["field", "key"] | None
    lora: Literal["name", "number"]
    has_signed_hashes: bool
    """Whether block hashes are signed 64-bit integers."""

    @classmethod
    def of(cls, dialect: Dialect) -> Self:
        """Return everything that a dialect can encode."""
        lower_media = (MEDIUM_CPU_PINNED, MEDIUM_DISK) if dialect.engine == "sglang" else (MEDIUM_CPU, MEDIUM_STORAGE)
        fields = dialect.stored_fields
        return cls(
            media=(MEDIUM_GPU, *lower_media) if "medium" in fields else (None,),
            has_groups="kv_cache_spec_kind" in fields,
            salt="field" if "cache_salt" in fields else "key" if "extra_keys" in fields else None,
            lora="name" if "lora_name" in fields else "number",
            has_signed_hashes=False,
        )


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Size of a cache, and how it changes."""

    blocks: int
    """Blocks that the cache holds, about."""
    block_size: int
    removes_parents: bool
    """Whether blocks that have cached children are removed, too."""
    clear_share: float
    """Share of batches that clear the cache."""
    events: int
    """Events of a batch, at most."""


class _Root(NamedTuple):
    """LoRA and salt of a chain, which separate equal tokens."""

    lora: int | None
    salt: str | None


class _Node:
    """A block and its copies."""

    __slots__ = ("block_hash", "children", "copies", "depth", "parent", "position", "root", "tokens")

    def __init__(self, block_hash: int, parent: _Node | None, root: _Root, tokens: list[int]) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.root = root
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.tokens = tokens
        self.copies: Counter[Placement] = Counter()
        self.children: dict[_Node, None] = {}
        self.position = -1


class Cache:
    """A cache. `step` changes it and returns the events; `copies_held` returns its state."""

    def __init__(self, draw: Random, features: DialectFeatures, cache_settings: CacheSettings) -> None:
        self._draw: Final = draw
        self._features: Final = features
        self._settings: Final = cache_settings
        self._held: list[_Node] = []
        self._removed: deque[_Node] = deque(maxlen=MAX_REMOVED)
        self._device: Final = Placement(features.media[0], 0 if features.has_groups else None)
        self._lower_placements: Final = [Placement(medium, self._device.group) for medium in features.media[1:]]
        self._window: Final = Placement(features.media[0], 1)
        self._actions, self._weights = self._weigh_actions()

    def _weigh_actions(self) -> tuple[list[Callable[[], KVEvent | None]], list[int]]:
        """Return the changes that the dialect can express, with cumulative weights."""
        actions: list[tuple[Callable[[], KVEvent | None], int]] = [
            (self._store_chain, 50),
            (self._restore_block, 14),
        ]
        if self._lower_placements:
            actions.append((self._offload_block, 12))
        if self._features.has_groups:
            actions += [(self._store_second_copy, 3), (self._store_in_window_group, 8)]
        return [action for action, _ in actions], list(accumulate(weight for _, weight in actions))

    def step(self) -> list[KVEvent]:
        """Change the cache and return the events of one batch. The list may be empty."""
        draw, cache_settings = self._draw, self._settings
        if draw.random() < cache_settings.clear_share:
            return [self._clear_cache()]
        fill_ratio = len(self._held) / cache_settings.blocks
        events = []
        for _ in range(1 + int(draw.random() * cache_settings.events)):
            is_removal = draw.random() < fill_ratio * 0.6
            event = self._remove_copy() if is_removal else draw.choices(self._actions, cum_weights=self._weights)[0]()
            if event is not None:
                events.append(event)
        return events

    def copies_held(self) -> dict[tuple[int, Placement], int]:
        """Return the number of copies by hash and placement."""
        return {(node.block_hash, placement): count for node in self._held for placement, count in node.copies.items()}

    # --- changes

    def _store_chain(self) -> BlockStored:
        """Store a new chain of a few blocks, at a root or behind a cached block."""
        draw = self._draw
        parent = draw.choice(self._held) if self._held and draw.random() < 0.8 else None
        if parent is not None and parent.depth > MAX_DEPTH:
            parent = None
        root = parent.root if parent is not None else self._draw_root()
        size, chain, before = self._settings.block_size, [], parent
        for _ in range(1 + int(draw.random() ** 2 * 4)):
            first = int(draw.random() * VOCABULARY)
            node = _Node(draw.getrandbits(64), before, root, [first, *(int(draw.random() * 64) for _ in range(size - 1))])
            chain.append(node)
            before = node
        return self._store_copies(chain, self._device)

    def _draw_root(self) -> _Root:
        draw = self._draw
        lora = draw.randrange(1, 4) if draw.random() < 0.15 else None
        salt = draw.choice(("s1", "s2")) if self._features.salt and draw.random() < 0.2 else None
        return _Root(lora, salt)

    def _restore_block(self) -> BlockStored | None:
        """Store a removed block again."""
        if not self._removed:
            return None
        node = self._removed.popleft()
        has_cached_parent = node.parent is None or node.parent.position >= 0
        return self._store_copies([node], self._device) if has_cached_parent and node.position < 0 else None

    def _store_second_copy(self) -> BlockStored | None:
        """Store a second copy of a block, as when two requests compute equal blocks at the same time."""
        if not self._held:
            return None
        node = self._draw.choice(self._held)
        has_cached_parent = node.parent is None or node.parent.position >= 0
        return self._store_copies([node], self._device) if has_cached_parent else None

    def _offload_block(self) -> BlockStored | None:
        """Store a copy of a block on a slower tier. The event has its tokens or not."""
        if not self._held:
            return None
        draw = self._draw
        node, placement = draw.choice(self._held), draw.choice(self._lower_placements)
        if placement in node.copies and not self._features.has_groups:
            return None
        if (node.parent is None or node.parent.position >= 0) and draw.random() < 0.5:
            return self._store_copies([node], placement)
        self._add_copy(node, placement)
        return self._make_stored_event([node], placement, [], 0, None, None)

    def _store_in_window_group(self) -> BlockStored | None:
        """Store a copy of a block in the group with the sliding window."""
        if not self._held:
            return None
        node = self._draw.choice(self._held)
        self._add_copy(node, self._window)
        return self._make_stored_event([node], self._window, node.tokens, self._settings.block_size, "sliding_window", WINDOW)

    def _remove_copy(self) -> BlockRemoved | None:
        """Remove a copy of a block, usually of one without cached children."""
        if not self._held:
            return None
        draw = self._draw
        node = draw.choice(self._held)
        if not (self._settings.removes_parents and draw.random() < 0.1):
            while node.children:
                node = next(reversed(node.children))
        placement = next(iter(node.copies))
        self._drop_copy(node, placement)
        return BlockRemoved([self._published_hash(node)], placement.medium, placement.group)

    def _clear_cache(self) -> AllBlocksCleared:
        """Clear the device; of SGLang host memory too. What is on lower tiers stays."""
        emptied = {self._device.medium, MEDIUM_CPU_PINNED}
        for node in list(self._held):
            for placement in [placement for placement in node.copies if placement.medium in emptied]:
                node.copies[placement] = 1
                self._drop_copy(node, placement)
        return AllBlocksCleared()

    # --- copies

    def _store_copies(self, chain: Sequence[_Node], placement: Placement) -> BlockStored:
        for node in chain:
            self._add_copy(node, placement)
        tokens = [token for node in chain for token in node.tokens]
        kind = "full_attention" if self._features.has_groups else None
        return self._make_stored_event(chain, placement, tokens, self._settings.block_size, kind, None)

    def _add_copy(self, node: _Node, placement: Placement) -> None:
        node.copies[placement] += 1
        if node.position < 0:
            node.position = len(self._held)
            self._held.append(node)
            if node.parent is not None:
                node.parent.children[node] = None

    def _drop_copy(self, node: _Node, placement: Placement) -> None:
        node.copies[placement] -= 1
        if node.copies[placement]:
            return
        del node.copies[placement]
        if node.copies:
            return
        last = self._held.pop()
        if last is not node:
            self._held[node.position] = last
            last.position = node.position
        node.position = -1
        if node.parent is not None:
            node.parent.children.pop(node, None)
        self._removed.append(node)

    # --- events

    def _make_stored_event(
        self, chain: Sequence[_Node], placement: Placement, tokens: list[int], size: int, kind: str | None, window: int | None
    ) -> BlockStored:
        features, first = self._features, chain[0]
        root, parent = first.root, first.parent
        has_lora_name = features.lora == "name" and root.lora is not None
        return BlockStored(
            [self._published_hash(node) for node in chain],
            None if parent is None else self._published_hash(parent),
            tokens,
            size,
            root.lora,
            placement.medium,
            f"adapter-{root.lora}" if has_lora_name else None,
            self._extra_keys(chain) if features.salt == "key" else None,
            placement.group,
            kind,
            window,
            cache_salt=root.salt if features.salt == "field" and parent is None else None,
        )

    def _extra_keys(self, chain: Sequence[_Node]) -> list[tuple[Any, ...] | None] | None:
        """Return extra keys as vLLM makes them: the LoRA name for every block, the salt for the first one."""
        root = chain[0].root
        names = () if root.lora is None or self._features.lora == "number" else (f"adapter-{root.lora}",)
        keys = [(*names, root.salt) if root.salt and node.parent is None else names for node in chain]
        return [key or None for key in keys] if any(keys) else None

    def _published_hash(self, node: _Node) -> int:
        return node.block_hash - (1 << 64) if self._features.has_signed_hashes and node.block_hash >> 63 else node.block_hash
