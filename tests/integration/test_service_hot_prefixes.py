"""Hot prefixes: counts, decay and bounded memory, compared with a list of all prompts."""

from __future__ import annotations

import sys
import tracemalloc
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvevents.errors import ConfigError
from kvevents.index import Namespace, block_keys
from kvevents.service.hot_prefixes import HALF_LIFE_SECONDS, MIN_COUNT, HotNode, HotPrefixes, _node_limit
from kvevents.testing import VirtualClock

BLOCK = 4


def prompt(blocks: Sequence[int], rest: int = 0) -> list[int]:
    """Return a prompt with one block for each number and `rest` further tokens."""
    return [block * 10 + place for block in blocks for place in range(BLOCK)] + [7] * rest


def key(*blocks: int) -> int:
    return block_keys(prompt(blocks), BLOCK)[-1]


def hot(clock: VirtualClock | None = None, **limits: int) -> HotPrefixes:
    return HotPrefixes(clock=clock or VirtualClock(1000), **{"per_second": 1_000_000, **limits})


def read_top(counted: HotPrefixes, scope: str = "m", limit: int = 1000) -> dict[int, tuple[int | None, int, int]]:
    """Return parent, tokens and lookups by key."""
    return {node.key: (node.parent, node.tokens, node.lookups) for node in counted.top(scope, limit)}


# --- examples ---------------------------------------------------------------------------------------------------------------


def test_a_node_is_where_prompts_diverge_or_one_ends() -> None:
    """A chain of blocks without a branch is one node."""
    counted = hot()
    for blocks, times in (([1, 2, 3, 4], 3), ([1, 2, 5], 2), ([9], 1)):
        for _ in range(times):
            counted.record("m", prompt(blocks), BLOCK)
    assert read_top(counted) == {
        key(1, 2): (None, 8, 5),
        key(1, 2, 3, 4): (key(1, 2), 16, 3),
        key(1, 2, 5): (key(1, 2), 12, 2),
        key(9): (None, 4, 1),
    }
    assert counted.sampled("m") == 6


def test_counts_fall_along_a_growing_chat() -> None:
    """Each prompt extends the previous one, so counts fall along the path, and every end is a node."""
    counted = hot()
    for end in (1, 2, 3):
        counted.record("m", prompt(range(end)), BLOCK)
    assert read_top(counted) == {key(0): (None, 4, 3), key(0, 1): (key(0), 8, 2), key(0, 1, 2): (key(0, 1), 12, 1)}
    assert [node.tokens for node in counted.top("m", 2)] == [4, 8]


def test_a_later_shorter_prompt_splits_an_edge() -> None:
    """Both parts of the edge keep their counts."""
    counted = hot()
    counted.record("m", prompt([1, 2, 3]), BLOCK)
    assert read_top(counted) == {key(1, 2, 3): (None, 12, 1)}
    counted.record("m", prompt([1], rest=3), BLOCK)
    assert read_top(counted) == {key(1): (None, 4, 2), key(1, 2, 3): (key(1), 12, 1)}


def test_a_node_has_the_keys_of_its_path() -> None:
    """The path is an argument of `PrefixIndex.match_keys`."""
    counted = hot()
    counted.record("m", prompt([1, 2, 3], rest=1), BLOCK)
    path = tuple(block_keys(prompt([1, 2, 3]), BLOCK))
    assert counted.top("m", 10) == [HotNode(path[-1], None, 12, 1, path, BLOCK)]


def test_prompts_shorter_than_a_block_are_sampled() -> None:
    """They have no prefix, but they are counted."""
    counted = hot()
    assert counted.record("m", [], BLOCK)
    assert counted.record("m", [1, 2, 3], BLOCK)
    assert (counted.sampled("m"), counted.top("m", 10), counted.nodes) == (2, [], 0)


def test_scopes_namespaces_and_block_sizes_are_separate() -> None:
    """The same tokens with another model, LoRA or block size are another prefix."""
    counted = hot()
    counted.record("m", prompt([1, 2]), BLOCK)
    counted.record("m", prompt([1, 2]), BLOCK, Namespace(lora="adapter"))
    counted.record("m", prompt([1, 2]), 2)
    counted.record("n", prompt([1, 2]), BLOCK)
    assert sorted((node.tokens, node.block_size, node.lookups) for node in counted.top("m", 10)) == [
        (8, 2, 1),
        (8, 4, 1),
        (8, 4, 1),
    ]
    assert read_top(counted, "n") == {key(1, 2): (None, 8, 1)}
    assert counted.top("unknown", 10) == []
    assert counted.sampled("unknown") == 0
    counted.forget("m")
    counted.forget("unknown")
    assert (counted.top("m", 10), counted.nodes) == ([], 1)


@pytest.mark.parametrize(
    "kind", [list, tuple, lambda tokens: array("I", tokens), lambda tokens: memoryview(array("I", tokens))]
)
def test_record_accepts_lists_and_buffers(kind: type[list[int]]) -> None:
    """Buffers hold 32-bit integers, as for `block_keys`."""
    counted = hot(max_depth=2)
    counted.record("m", kind(prompt([1, 2, 3])), BLOCK)
    assert read_top(counted) == {key(1, 2): (None, 8, 1)}


def test_blocks_beyond_the_maximum_depth_are_ignored() -> None:
    """Prompts that differ after the maximum depth count as the same prefix."""
    counted = hot(max_depth=3)
    for end in range(1, 40):
        counted.record("m", prompt([0, 1, 2, *range(end, 40)]), BLOCK)
    assert read_top(counted) == {key(0, 1, 2): (None, 12, 39)}


def test_prompts_per_second_are_limited() -> None:
    """The limit applies to each scope and each second."""
    clock = VirtualClock(1000)
    counted = hot(clock, per_second=3)
    assert [counted.record("m", prompt([1]), BLOCK) for _ in range(5)] == [True] * 3 + [False] * 2
    assert counted.record("n", prompt([1]), BLOCK)
    clock.advance(0.999)
    assert not counted.record("m", prompt([1]), BLOCK)
    clock.advance(0.001)
    assert counted.record("m", prompt([1]), BLOCK)
    assert counted.sampled("m") == 4


def test_counts_are_halved_every_minute_until_they_are_gone() -> None:
    """A prompt that came once is dropped after four minutes, and a frequent one stays."""
    clock = VirtualClock(1000)
    counted = hot(clock)
    for _ in range(8):
        counted.record("m", prompt([1]), BLOCK)
    counted.record("m", prompt([2]), BLOCK)
    seen = []
    for _ in range(8):
        seen.append(tuple(lookups for _, _, lookups in read_top(counted).values()))
        clock.advance(HALF_LIFE_SECONDS)
    assert seen == [(8, 1), (4, 1), (2, 1), (1, 1), (1,), (1,), (1,), ()]
    assert (counted.nodes, counted.sampled("m"), repr(counted)) == (0, 0, "<HotPrefixes 0 scopes, 0 nodes>")


def test_a_long_pause_empties_the_tree() -> None:
    """After a long sleep of the process, no counts are left."""
    clock = VirtualClock(1000)
    counted = hot(clock)
    counted.record("m", prompt([1, 2]), BLOCK)
    clock.advance(365 * 86_400)
    assert counted.top("m", 10) == []
    assert counted.record("m", prompt([3]), BLOCK)
    assert read_top(counted) == {key(3): (None, 4, 1)}


def test_record_does_not_wait_for_another_thread() -> None:
    """While another thread records a prompt, other prompts are skipped."""
    counted = hot()
    with counted._lock:
        assert not counted.record("m", prompt([1]), BLOCK)
    assert counted.record("m", prompt([1]), BLOCK)


@contextmanager
def switch_threads_often() -> Iterator[None]:
    """Switch threads after a few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def record_concurrently(counted: HotPrefixes, scopes: str, prompts: int) -> None:
    """Record and read prompts with one thread for each letter of `scopes`. All scopes share the nodes."""

    def work(scope: str) -> None:
        recorded = 0
        while recorded < prompts:
            recorded += counted.record(scope, prompt([1, recorded % 50]), BLOCK)
            counted.top(scope, 3)

    with switch_threads_often(), ThreadPoolExecutor(len(scopes)) as pool:
        list(pool.map(work, scopes))


def test_threads_can_record_and_read_at_once() -> None:
    """The counts add up for any order of threads, within one scope and across scopes."""
    counted = hot(max_nodes=32)
    record_concurrently(counted, "aabb", 2_000)
    assert [counted.sampled(scope) for scope in "ab"] == [4_000] * 2
    assert 0 < counted.nodes <= 32
    for tree in counted._trees.values():
        below = list(tree.descendants())
        assert tree.nodes == len(below)
        assert all(node.count <= node.parent.count for node in below)


# --- bounds -----------------------------------------------------------------------------------------------------------------


def test_a_hot_prefix_survives_many_other_prompts() -> None:
    """Every prompt has its own tail; the shared prefix and the newest tails stay."""
    counted = hot(max_nodes=64)
    for number in range(1_000):
        counted.record("m", prompt([1, 2, 3, 1_000 + number]), BLOCK)
        assert counted.nodes <= 64
    found = read_top(counted)
    assert found[key(1, 2, 3)] == (None, 12, 1_000)
    assert key(1, 2, 3, 1_999) in found
    assert key(1, 2, 3, 1_000) not in found
    assert counted.sampled("m") == 1_000


def test_many_prompts_of_one_scope_do_not_evict_those_of_others() -> None:
    """Nodes of the largest trees are evicted."""
    counted = hot(max_nodes=64)
    for number in range(10):
        counted.record("quiet", prompt([number]), BLOCK)
    for number in range(1_000):
        counted.record("loud", prompt([number]), BLOCK)
        counted.record("louder", prompt([number, 1]), BLOCK)
        counted.record("louder", prompt([number, 2]), BLOCK)
    assert len(counted.top("quiet", 100)) == 10
    assert min(len(counted.top(scope, 100)) for scope in ("loud", "louder")) >= 15
    assert counted.nodes <= 64


def test_scopes_are_bounded() -> None:
    """The scope with the fewest prompts is dropped."""
    counted = hot(max_scopes=3)
    for scope, times in (("a", 3), ("b", 1), ("c", 2), ("d", 1)):
        for _ in range(times):
            counted.record(scope, prompt([1]), BLOCK)
    assert [counted.sampled(scope) for scope in "abcd"] == [3, 0, 2, 1]


def test_memory_is_bounded() -> None:
    """A node needs about 1 kB with all limits reached: edges of 64 blocks in 64 scopes. The default number of nodes needs 4
    MB."""
    counted = hot(max_nodes=512)
    numbers = count()
    tracemalloc.start()
    try:
        for step in range(800):
            counted.record(f"scope {step % 64}", [next(numbers) for _ in range(64)], 1)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert counted.nodes > 450
    assert used / counted.nodes < 1_200


@pytest.mark.parametrize("name", ["max_nodes", "max_depth", "max_scopes", "per_second"])
def test_limits_are_at_least_one(name: str) -> None:
    """The error names the limit."""
    with pytest.raises(ConfigError, match=f"{name} 0: expected at least 1"):
        hot(VirtualClock(), **{name: 0})


# --- against a model --------------------------------------------------------------------------------------------------------

prompts = st.lists(st.integers(0, 2), max_size=6)
scopes = st.sampled_from("mno")


class Model(RuleBasedStateMachine):
    """The model stores all prompts with their weights. The count of a prefix is the weight of the prompts that begin with
    it."""

    @initialize(nodes=st.sampled_from([1, 2, 3, 7, 40, 4096]), scopes=st.sampled_from([1, 2, 64]), depth=st.integers(1, 6))
    def begin(self, nodes: int, scopes: int, depth: int) -> None:
        self.clock = VirtualClock(1000)
        self.depth = depth
        self.is_unlimited = nodes == 4096 and scopes == 64
        self.bounds = nodes, scopes
        self.hot = hot(self.clock, max_nodes=nodes, max_scopes=scopes, max_depth=depth)
        self.recorded_prompts: dict[str, list[tuple[tuple[int, ...], float]]] = {}
        self.has_not_waited = True

    @rule(scope=scopes, blocks=prompts, rest=st.integers(0, BLOCK - 1))
    def record_prompt(self, scope: str, blocks: list[int], rest: int) -> None:
        assert self.hot.record(scope, prompt(blocks, rest), BLOCK)
        self.recorded_prompts.setdefault(scope, []).append((tuple(blocks[: self.depth]), 1.0))

    @rule(minutes=st.integers(1, 6))
    def wait(self, minutes: int) -> None:
        self.clock.advance(minutes * HALF_LIFE_SECONDS)
        self.has_not_waited = False
        self.recorded_prompts = {
            scope: [(blocks, weight * 0.5**minutes) for blocks, weight in recorded_prompts]
            for scope, recorded_prompts in self.recorded_prompts.items()
        }

    def weight(self, scope: str, blocks: tuple[int, ...]) -> float:
        return sum(
            weight
            for recorded_prompts, weight in self.recorded_prompts.get(scope, [])
            if recorded_prompts[: len(blocks)] == blocks
        )

    @invariant()
    @precondition(lambda self: hasattr(self, "hot"))
    def counts_are_those_of_the_prompts(self) -> None:
        """Counts are never too high, exact if there was always room, and never higher for a child than for its parent."""
        for scope in "mno":
            names = {
                key(*blocks[:end]): blocks[:end]
                for blocks, _ in self.recorded_prompts.get(scope, [])
                for end in range(1, len(blocks) + 1)
            }
            seen: dict[int, HotNode] = {}
            for node in self.hot.top(scope, 10_000):
                blocks = names[node.key]
                assert (node.tokens, node.block_size, node.path) == (
                    len(blocks) * BLOCK,
                    BLOCK,
                    tuple(block_keys(prompt(blocks), BLOCK)),
                )
                weight = self.weight(scope, blocks)
                assert node.lookups <= max(1, round(weight))
                assert not self.is_unlimited or node.lookups >= max(1, round(weight - 2 * MIN_COUNT))
                if node.parent is not None:
                    parent = seen[node.parent]
                    assert parent.path == node.path[: len(parent.path)]
                    assert parent.lookups >= node.lookups
                assert node.key not in seen
                seen[node.key] = node
            if self.is_unlimited and self.has_not_waited:
                assert {names[known] for known in seen} == self.ends(scope)

    def ends(self, scope: str) -> set[tuple[int, ...]]:
        """Return the prefixes at which a prompt ended or diverged: no child of them has all of their prompts."""
        prefixes = {blocks[:end] for blocks, _ in self.recorded_prompts.get(scope, []) for end in range(1, len(blocks) + 1)}
        chained = {one[:-1] for one in prefixes if self.weight(scope, one) == self.weight(scope, one[:-1])}
        return prefixes - chained

    @invariant()
    @precondition(lambda self: hasattr(self, "hot"))
    def bounds_hold(self) -> None:
        """The number of nodes is right and within the limits."""
        trees = self.hot._trees.values()
        assert [tree.nodes for tree in trees] == [sum(1 for _ in tree.descendants()) for tree in trees]
        assert self.hot.nodes <= self.bounds[0]
        assert len(trees) <= self.bounds[1]
        assert all(1 <= len(node.keys) <= self.depth for tree in trees for node in tree.descendants())

    @rule(scope=scopes, limit=st.integers(0, 5))
    def a_limited_top_is_the_beginning_of_the_whole(self, scope: str, limit: int) -> None:
        whole = [node.lookups for node in self.hot.top(scope, 10_000)]
        assert [node.lookups for node in self.hot.top(scope, limit)] == whole[:limit] == sorted(whole, reverse=True)[:limit]


TestModel = Model.TestCase
TestModel.settings = settings(stateful_step_count=30)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 100))
def test_nodes_are_distributed_fairly(sizes: list[int], total: int) -> None:
    """Each tree keeps at most the limit. All trees together keep at most the total, and use it except for rounding."""
    shares = [min(size, _node_limit(sizes, total)) for size in sizes]
    assert sum(shares) <= max(total, 0)
    assert shares == sizes or sum(shares) > total - len(sizes)
