"""The prefixes that prompts begin with most, from a sample of the prompts.

Each scope has a radix tree. A node has the blocks of one edge; an edge is split where a sampled prompt ends or two prompts
diverge. A node counts the prompts that pass through it, so no child counts more than its parent. Every `HALF_LIFE_SECONDS` all
counts are halved and nodes below `MIN_COUNT` are dropped. Above `max_nodes` the largest trees lose their least counted leaves.
The trees contain block keys and no token ids.
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
"""Nodes of all trees: 4 MB if each has `MAX_DEPTH` blocks of 8 bytes."""
MAX_DEPTH: Final = 64
"""Blocks of a prompt that are recorded: 1,024 tokens in blocks of 16, within which most shared prefixes end."""
MAX_SCOPES: Final = 64
"""Trees; a further one replaces the tree with the fewest prompts."""
SAMPLES_PER_SECOND: Final = 50
"""Prompts of a scope that are sampled per second. One costs 25 us, and 2 ms if leaves must be dropped (one in a hundred)."""
HALF_LIFE_SECONDS: Final = 60.0
"""Time after which a prompt counts half."""
MIN_COUNT: Final = 0.1
"""Nodes that count less are dropped, so a prompt that came once is dropped after four minutes."""


@dataclass(frozen=True, slots=True)
class HotNode:
    """A prefix that many prompts begin with."""

    key: int
    """Rolling key of its last block."""
    parent: int | None
    """Key of the parent node."""
    tokens: int
    """Length of the prefix in tokens."""
    lookups: int
    """Sampled prompts that begin with it; older ones count less."""
    path: tuple[int, ...]
    """Rolling keys of its blocks from the root, as `PrefixIndex.match_keys` takes them."""
    block_size: int


class _Node:
    """The blocks of one edge, and its children."""

    __slots__ = ("block_size", "children", "count", "keys", "last", "parent")

    def __init__(self, parent: _Node | None, keys: array[int], block_size: int) -> None:
        self.parent = parent or self
        """The parent node; the root is its own parent."""
        self.keys = keys
        self.block_size = block_size
        self.count = 0.0
        self.last = 0
        """Number of the last prompt that passed through; among equal counts the oldest is dropped first."""
        self.children: dict[int, _Node] = {}


class _Tree:
    """The radix tree of one scope."""

    def __init__(self) -> None:
        self.root = _Node(None, array("Q"), 0)
        self.nodes = 0
        self.second: int | None = None
        self.taken = 0

    def take(self, now: float, per_second: int) -> bool:
        """Return whether one more prompt may be sampled in this second, and count it."""
        if self.second != int(now):
            self.second, self.taken = int(now), 0
        self.taken += 1
        return self.taken <= per_second

    def add(self, keys: Sequence[int], block_size: int, number: int) -> None:
        """Count a prompt along its path; split the edge in which the prompt ends or diverges."""
        node, rest = self.root, array("Q", keys)
        _increment(node, number)
        while rest:
            child = node.children.get(rest[0]) or self._add_node(node, rest, block_size)
            common = _common_length(child.keys, rest)
            node = child if common == len(child.keys) else self._split_edge(child, common)
            _increment(node, number)
            rest = rest[common:]

    def _add_node(self, parent: _Node, keys: array[int], block_size: int) -> _Node:
        node = parent.children[keys[0]] = _Node(parent, keys, block_size)
        self.nodes += 1
        return node

    def _split_edge(self, node: _Node, at: int) -> _Node:
        """Insert a parent with the first `at` blocks of this node's edge, and return it."""
        upper = _Node(node.parent, node.keys[:at], node.block_size)
        upper.count, upper.last = node.count, node.last
        upper.children[node.keys[at]] = node
        node.parent.children[node.keys[0]] = upper
        node.parent, node.keys = upper, node.keys[at:]
        self.nodes += 1
        return upper

    def decay(self, factor: float) -> None:
        """Multiply all counts by a factor, and drop nodes below `MIN_COUNT` with their descendants."""
        todo = [self.root]
        while todo:
            node = todo.pop()
            node.count *= factor
            node.children = {key: child for key, child in node.children.items() if child.count * factor >= MIN_COUNT}
            todo += node.children.values()
        self.nodes = sum(1 for _ in self.descendants())

    def shrink(self, nodes: int) -> None:
        """Drop the least counted leaves until at most `nodes` nodes are left."""
        if self.nodes <= nodes:
            return
        order = count()
        leaves = [(node.count, node.last, next(order), node) for node in self.descendants() if not node.children]
        heapq.heapify(leaves)
        while self.nodes > nodes:
            *_, leaf = heapq.heappop(leaves)
            self.nodes -= 1
            parent = leaf.parent
            del parent.children[leaf.keys[0]]
            if not parent.children and parent is not self.root:
                heapq.heappush(leaves, (parent.count, parent.last, next(order), parent))

    def descendants(self) -> Iterator[_Node]:
        """Yield every node except the root."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            todo += node.children.values()
            yield node

    def top(self, limit: int) -> list[HotNode]:
        """Return the nodes that count most; parents come before their children."""
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
            if not _continues(node):
                tokens = len(path) * node.block_size
                found.append(HotNode(path[-1], parent, tokens, _round_count(node.count), path, node.block_size))
                parent = path[-1]
            follow(node, path, parent)
        return found


class HotPrefixes:
    """Counts prefixes of prompts by scope, in bounded memory. Any thread may call it, and none waits in `record`.

    `clock` returns monotonic seconds. Raises `ConfigError` for a limit below 1.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_nodes: int = MAX_NODES,
        max_depth: int = MAX_DEPTH,
        max_scopes: int = MAX_SCOPES,
        per_second: int = SAMPLES_PER_SECOND,
    ) -> None:
        for name, value in (
            ("max_nodes", max_nodes),
            ("max_depth", max_depth),
            ("max_scopes", max_scopes),
            ("per_second", per_second),
        ):
            if value < 1:
                raise ConfigError(f"invalid {name} {value}: expected at least 1")
        self.max_nodes, self.max_depth, self.max_scopes, self.per_second = max_nodes, max_depth, max_scopes, per_second
        self._clock = clock
        self._decayed_at = clock()
        self._number = 0
        self._trees: dict[Hashable, _Tree] = {}
        self._lock = threading.Lock()

    def record(self, scope: Hashable, tokens: Any, block_size: int, namespace: Namespace | None = None) -> bool:
        """Count a prompt and return whether it was counted.

        A prompt is skipped if enough were sampled in this second, or if another thread is recording one. `tokens` are as for
        `block_keys`; the first `max_depth` blocks count.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._record(scope, tokens, block_size, namespace)
        finally:
            self._lock.release()

    def _record(self, scope: Hashable, tokens: Any, block_size: int, namespace: Namespace | None) -> bool:
        now = self._decay()
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
        """Return the prefixes that count most, parents first. A chain that all its prompts follow is one node, its end."""
        with self._lock:
            self._decay()
            tree = self._trees.get(scope)
            return tree.top(limit) if tree else []

    def sampled(self, scope: Hashable) -> int:
        """Return the number of sampled prompts, of which `lookups` is a part; older ones count less."""
        with self._lock:
            self._decay()
            tree = self._trees.get(scope)
            return _round_count(tree.root.count) if tree else 0

    def forget(self, scope: Hashable) -> None:
        """Drop the tree of a scope."""
        with self._lock:
            self._trees.pop(scope, None)

    @property
    def nodes(self) -> int:
        """Nodes of all trees, at most `max_nodes`."""
        return sum(tree.nodes for tree in self._trees.values())

    def _decay(self) -> float:
        now = self._clock()
        times = int((now - self._decayed_at) // HALF_LIFE_SECONDS)
        if times > 0:
            self._decayed_at += times * HALF_LIFE_SECONDS
            for tree in self._trees.values():
                tree.decay(0.5**times)
            self._trees = {scope: tree for scope, tree in self._trees.items() if tree.root.count >= MIN_COUNT}
        return now

    def _make_room(self) -> None:
        if len(self._trees) >= self.max_scopes:
            del self._trees[min(self._trees, key=lambda scope: self._trees[scope].root.count)]

    def _shrink(self) -> None:
        """Drop more nodes than necessary at once, so that leaves are not sorted for each prompt."""
        if self.nodes > self.max_nodes:
            level = _node_limit([tree.nodes for tree in self._trees.values()], self.max_nodes - self.max_nodes // 16)
            for tree in self._trees.values():
                tree.shrink(level)

    def __repr__(self) -> str:
        return f"<HotPrefixes {len(self._trees)} scopes, {self.nodes} nodes>"


def _increment(node: _Node, number: int) -> None:
    node.count += 1.0
    node.last = number


def _common_length(one: array[int], other: array[int]) -> int:
    """Return the number of equal keys at the beginning. Keys are rolling, so all keys after the first difference differ."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _continues(node: _Node) -> bool:
    """Return whether all prompts of a node continue to its only child."""
    return len(node.children) == 1 and next(iter(node.children.values())).count == node.count


def _node_limit(sizes: Sequence[int], total: int) -> int:
    """Return the node limit of each tree for at most `total` nodes in all; large trees share what small ones leave."""
    for place, size in enumerate(sorted(sizes)):
        share = total // (len(sizes) - place)
        if size > share:
            return share
        total -= size
    return max(sizes)


def _round_count(counted: float) -> int:
    return max(1, round(counted))
