"""Prefixes that are asked for most, from a sample of the prompts.

Theory of operation. Each scope has a tree, in which a node stands for the blocks of an edge: where a sampled prompt ended, or
two parted, an edge is cut in two. A node counts the prompts that went through it, so no child counts more than its parent.
Every `HALF_LIFE` seconds all counts are halved, and what has become faint is dropped. Above `max_nodes` the largest trees lose
their least counted leaves. Only keys of blocks are kept, never token ids.
"""

from __future__ import annotations

import heapq
import threading
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from kvevents.errors import ConfigError
from kvevents.index import Namespace, block_keys

MAX_NODES: Final = 4096
"""Of all scopes together: 4 MB if every one is an edge of `MAX_DEPTH` blocks, of 8 bytes each."""
MAX_DEPTH: Final = 64
"""Blocks of a prompt that are looked at: 1,024 tokens in blocks of 16, where what prompts share mostly ends."""
MAX_SCOPES: Final = 64
"""Trees; beyond, the one with the fewest prompts goes."""
PER_SECOND: Final = 50
"""Prompts of a scope that are sampled in a second. One costs 25 us, and where leaves must go, once in a hundred, 2 ms."""
HALF_LIFE: Final = 60.0
"""Seconds after which a prompt counts half."""
FAINT: Final = 0.1
"""Nodes that count less are dropped: what was asked for once is gone after four minutes."""


@dataclass(frozen=True, slots=True)
class HotNode:
    """A prefix that many prompts began with."""

    key: int
    """Rolling key of its last block."""
    parent: int | None
    """Key of the node before it."""
    tokens: int
    """Length from the beginning of the prompt."""
    lookups: int
    """Sampled prompts that began with it, older ones counting less."""
    path: tuple[int, ...]
    """Rolling keys of its blocks from the root on, as `PrefixIndex.match_keys` takes them."""
    block_size: int


class _Node:
    """The blocks of one edge, and what follows."""

    __slots__ = ("block_size", "children", "count", "keys", "last", "parent")

    def __init__(self, parent: _Node | None, keys: array[int], block_size: int) -> None:
        self.parent = parent or self
        """Of the root itself."""
        self.keys = keys
        self.block_size = block_size
        self.count = 0.0
        self.last = 0
        """Number of the last prompt that went through: of equal counts the oldest goes first."""
        self.children: dict[int, _Node] = {}


class _Tree:
    """The prompts of one scope."""

    def __init__(self) -> None:
        self.root = _Node(None, array("Q"), 0)
        self.nodes = 0
        self.second: int | None = None
        self.taken = 0

    def take(self, now: float, per_second: int) -> bool:
        """Whether one more may be sampled in this second."""
        if self.second != int(now):
            self.second, self.taken = int(now), 0
        self.taken += 1
        return self.taken <= per_second

    def add(self, keys: Sequence[int], block_size: int, number: int) -> None:
        """Count a prompt along its path, which is cut where it ends or leaves an edge."""
        node, rest = self.root, array("Q", keys)
        _count(node, number)
        while rest:
            child = node.children.get(rest[0]) or self._grow(node, rest, block_size)
            common = _common(child.keys, rest)
            node = child if common == len(child.keys) else self._cut(child, common)
            _count(node, number)
            rest = rest[common:]

    def _grow(self, parent: _Node, keys: array[int], block_size: int) -> _Node:
        node = parent.children[keys[0]] = _Node(parent, keys, block_size)
        self.nodes += 1
        return node

    def _cut(self, node: _Node, at: int) -> _Node:
        """Put a node before this one, for the first `at` blocks of its edge."""
        upper = _Node(node.parent, node.keys[:at], node.block_size)
        upper.count, upper.last = node.count, node.last
        upper.children[node.keys[at]] = node
        node.parent.children[node.keys[0]] = upper
        node.parent, node.keys = upper, node.keys[at:]
        self.nodes += 1
        return upper

    def fade(self, factor: float) -> None:
        """Multiply all counts, and drop what is faint; with a node everything below it, which counts no more than that."""
        todo = [self.root]
        while todo:
            node = todo.pop()
            node.count *= factor
            node.children = {key: child for key, child in node.children.items() if child.count * factor >= FAINT}
            todo += node.children.values()
        self.nodes = sum(1 for _ in self.below())

    def shrink(self, nodes: int) -> None:
        """Drop the least counted leaves until no more than that many nodes are left."""
        if self.nodes <= nodes:
            return
        order = count()
        leaves = [(node.count, node.last, next(order), node) for node in self.below() if not node.children]
        heapq.heapify(leaves)
        while self.nodes > nodes:
            *_, leaf = heapq.heappop(leaves)
            self.nodes -= 1
            parent = leaf.parent
            del parent.children[leaf.keys[0]]
            if not parent.children and parent is not self.root:
                heapq.heappush(leaves, (parent.count, parent.last, next(order), parent))

    def below(self) -> Iterator[_Node]:
        """Every node but the root."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            yield node

    def top(self, limit: int) -> list[HotNode]:
        """The most counted first; a child counts no more than its parent, so parents come before it."""
        found: list[HotNode] = []
        order = count()
        queue: list[tuple[float, int, _Node, tuple[int, ...], int | None]] = []

        def follow(node: _Node, path: tuple[int, ...], parent: int | None) -> None:
            for child in node.children.values():
                heapq.heappush(queue, (-child.count, next(order), child, path, parent))

        follow(self.root, (), None)
        while queue and len(found) < limit:
            _, _, node, path, parent = heapq.heappop(queue)
            path += tuple(node.keys)
            if not _goes_on(node):
                tokens = len(path) * node.block_size
                found.append(HotNode(path[-1], parent, tokens, _shown(node.count), path, node.block_size))
                parent = path[-1]
            follow(node, path, parent)
        return found


class HotPrefixes:
    """Counts prefixes of prompts, scope by scope, in bounded memory. Any thread may ask, and none waits to be counted.

    `clock` is in seconds and never goes back. Raises `ConfigError` for a limit below 1.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_nodes: int = MAX_NODES,
        max_depth: int = MAX_DEPTH,
        max_scopes: int = MAX_SCOPES,
        per_second: int = PER_SECOND,
    ) -> None:
        for name, value in (
            ("max_nodes", max_nodes),
            ("max_depth", max_depth),
            ("max_scopes", max_scopes),
            ("per_second", per_second),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        self.max_nodes, self.max_depth, self.max_scopes, self.per_second = max_nodes, max_depth, max_scopes, per_second
        self._clock = clock
        self._faded = clock()
        self._number = 0
        self._trees: dict[Hashable, _Tree] = {}
        self._lock = threading.Lock()

    def look(self, scope: Hashable, tokens: Any, block_size: int, namespace: Namespace | None = None) -> bool:
        """Count a prompt, unless enough were sampled this second or another thread is at it; says whether it was.

        `tokens` as for `block_keys`, of which the first `max_depth` blocks are looked at.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._look(scope, tokens, block_size, namespace)
        finally:
            self._lock.release()

    def _look(self, scope: Hashable, tokens: Any, block_size: int, namespace: Namespace | None) -> bool:
        now = self._fade()
        tree = self._trees.get(scope)
        if tree is None:
            self._make_room()
            tree = self._trees[scope] = _Tree()
        if not tree.take(now, self.per_second):
            return False
        self._number += 1
        tree.add(block_keys(tokens[: self.max_depth * block_size], block_size, namespace), block_size, self._number)
        self._shrink()
        return True

    def top(self, scope: Hashable, limit: int) -> list[HotNode]:
        """The prefixes that count most, parents before children; a chain of which all prompts went on is one node, its end."""
        with self._lock:
            self._fade()
            tree = self._trees.get(scope)
            return tree.top(limit) if tree else []

    def sampled(self, scope: Hashable) -> int:
        """Prompts that were looked at, older ones counting less: what `lookups` is a share of."""
        with self._lock:
            self._fade()
            tree = self._trees.get(scope)
            return _shown(tree.root.count) if tree else 0

    def forget(self, scope: Hashable) -> None:
        """Drop what is known of a scope."""
        with self._lock:
            self._trees.pop(scope, None)

    @property
    def nodes(self) -> int:
        """Of all scopes, at most `max_nodes`."""
        return sum(tree.nodes for tree in self._trees.values())

    def _fade(self) -> float:
        now = self._clock()
        times = int((now - self._faded) // HALF_LIFE)
        if times > 0:
            self._faded += times * HALF_LIFE
            for tree in self._trees.values():
                tree.fade(0.5**times)
            self._trees = {scope: tree for scope, tree in self._trees.items() if tree.root.count >= FAINT}
        return now

    def _make_room(self) -> None:
        if len(self._trees) >= self.max_scopes:
            del self._trees[min(self._trees, key=lambda scope: self._trees[scope].root.count)]

    def _shrink(self) -> None:
        """Some more than needed at once, so that the leaves are not sorted for each prompt."""
        if self.nodes > self.max_nodes:
            level = _level([tree.nodes for tree in self._trees.values()], self.max_nodes - self.max_nodes // 16)
            for tree in self._trees.values():
                tree.shrink(level)

    def __repr__(self) -> str:
        return f"<HotPrefixes {len(self._trees)} scopes, {self.nodes} nodes>"


def _count(node: _Node, number: int) -> None:
    node.count += 1.0
    node.last = number


def _common(one: array[int], other: array[int]) -> int:
    """How many keys agree from the beginning; since keys are rolling, the first that differs parts them for good."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _goes_on(node: _Node) -> bool:
    """Whether all prompts went on to the one child."""
    return len(node.children) == 1 and next(iter(node.children.values())).count == node.count


def _level(sizes: Sequence[int], total: int) -> int:
    """How many nodes each tree may have, for all to have `total` at most; what small ones leave is for the others."""
    for place, size in enumerate(sorted(sizes)):
        share = total // (len(sizes) - place)
        if size > share:
            return share
        total -= size
    return max(sizes)


def _shown(counted: float) -> int:
    return max(1, round(counted))
