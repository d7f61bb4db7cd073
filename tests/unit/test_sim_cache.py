"""`kvevents.sim.cache` compared with `sim_model`: its effects, its events, and its lookups."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.index import Namespace, PrefixIndex
from kvevents.sim.cache import EVENT_STYLES, CacheSize, PrefixCache
from kvevents.sim.requests import Sequence
from kvevents.wire.encode import batch_encoder
from sim_model import Mirror, PlainCache, PlainPool, contents, plainly, waiting

# What is done to which of the sequences that are there, and with how many tokens.
MOVES = st.lists(st.tuples(st.sampled_from("aaaeeeeer"), st.integers(0, 9), st.integers(1, 12)), min_size=10, max_size=40)
NONE = {"host_blocks": st.just(0), "window": st.none()}
SIZES = st.builds(CacheSize, st.integers(1, 14), st.integers(1, 4), **NONE)
HYBRID = st.builds(CacheSize, st.integers(2, 24), st.integers(1, 4), **NONE | {"window": st.integers(2, 12)})
TIERED = st.builds(CacheSize, st.integers(1, 12), st.integers(1, 4), **NONE | {"host_blocks": st.integers(1, 10)})
PROMPTS = st.lists(
    # Few different tokens, so that prompts share beginnings; some are of a LoRA or behind a salt.
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(0, 6), st.sampled_from([*[None] * 4, "l", "s"])
    ),
    min_size=2,
    max_size=10,
)
encode = batch_encoder()


def sequence(tokens: Items[int], size: int, answer: int = 0, within: str | None = None) -> Sequence:
    lora, salt = {None: (None, None), "l": ("adapter", None), "s": (None, "tenant")}[within]
    return Sequence(array("I", [*tokens, *[5] * answer]), len(tokens), size, "seed", lora, salt)


@dataclass
class History:
    """Sequences that come and go in a cache, each move checked by `after`."""

    cache: PrefixCache
    prompts: list[tuple[list[int], int, str | None]]

    def __post_init__(self) -> None:
        self.live: list[Sequence] = []
        self.come = 0
        self.mirror = Mirror()

    def play(self, moves: list[tuple[str, int, int]]) -> None:
        for kind, which, tokens in moves:
            {"a": self.admit, "e": self.extend, "r": self.release}[kind](which, tokens)
            self.check()
        while self.live:
            self.release(0, 0)
            self.check()
        assert self.cache.pool.free == self.cache.size.blocks
        assert self.cache.reset()
        self.check()
        assert not contents(self.cache)

    def admit(self, _: int, tokens: int) -> None:
        ids, answer, within = self.prompts[self.come % len(self.prompts)]
        self.come += 1
        fresh = sequence(ids, self.cache.size.block_size, answer, within)
        found = self.cache.find(fresh)
        assert found.tokens == self.mirror.cached(self.cache.size, fresh.hashes, fresh.known)
        assert found.tokens < fresh.known
        self.looked_up(fresh, found.tokens)
        before = self.state()
        chunk = min(tokens, fresh.known - found.tokens)
        if self.cache.admit(fresh, found, chunk):
            assert (fresh.cached, fresh.computed) == (found.tokens, found.tokens + chunk)
            self.live.append(fresh)
        else:
            assert self.state() == before

    def extend(self, which: int, tokens: int) -> None:
        if not self.live:
            return
        one = self.live[which % len(self.live)]
        if not one.remaining and not one.complete:
            one.known += 1
        chunk = min(tokens, one.remaining)
        if not chunk:
            return
        expected = one.computed + chunk
        assert self.cache.extend(one, chunk) == (one.computed == expected)

    def release(self, which: int, _: int) -> None:
        if self.live:
            assert not self.cache.reset()
            self.cache.release(self.live.pop(which % len(self.live)))

    def state(self) -> object:
        pool = self.cache.pool
        return waiting(pool), list(pool.uses), contents(self.cache)

    def looked_up(self, fresh: Sequence, cached: int) -> None:
        """For subclasses."""

    def on_events(self, events: list[KVEvent]) -> None:
        """For subclasses."""

    def check(self) -> None:
        cache = self.cache
        events = cache.take_events()
        for event in events:
            self.mirror.apply(event)
        self.on_events(events)
        assert +self.mirror.held == contents(cache)
        used = {block for one in self.live for table in one.tables for block in table if block}
        assert cache.pool.free == cache.size.blocks - len(used)
        assert cache.host_blocks <= cache.size.host_blocks
        for one in self.live:
            assert all(len(table) == -(-one.computed // cache.size.block_size) for table in one.tables)


class IndexHistory(History):
    """Asks the real index as well, at every lookup."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.index = PrefixIndex()
        self.batches = 0

    def on_events(self, events: list[KVEvent]) -> None:
        if events:
            batch = KVEventBatch(0.0, events, 0)
            self.index.apply_payload(("engine", 0), 0, self.batches, encode(batch))
            self.batches += 1

    def looked_up(self, fresh: Sequence, cached: int) -> None:
        match = self.index.match(fresh.tokens[: fresh.known - 1], Namespace(lora=fresh.lora, salt=fresh.salt)).get("engine", 0)
        assert (match.tokens if match else 0) == cached


@settings(max_examples=200)
@given(st.one_of(SIZES, HYBRID, TIERED), PROMPTS, MOVES)
def test_events_describe_exactly_the_cache_and_every_lookup_finds_what_they_say(
    size: CacheSize, prompts: list[tuple[list[int], int, str | None]], moves: list[tuple[str, int, int]]
) -> None:
    """After every move: contents are what events said, no block is used twice or lost, mirror and index know each hit."""
    IndexHistory(PrefixCache(size, max_step_tokens=12), prompts).play(moves)


@settings(max_examples=80)
@given(SIZES, PROMPTS, MOVES)
def test_full_attention_does_what_the_plain_model_does(
    size: CacheSize, prompts: list[tuple[list[int], int, str | None]], moves: list[tuple[str, int, int]]
) -> None:
    """The same blocks in the same order, the same events, the same refusals."""
    real, plain = PrefixCache(size), PlainCache(PlainPool(size.blocks), size.block_size)
    live: list[tuple[Sequence, list[int]]] = []
    come = 0
    for kind, which, tokens in moves:
        if kind == "a":
            ids, answer, within = prompts[come % len(prompts)]
            come += 1
            one = sequence(ids, size.block_size, answer, within)
            found = real.find(one)
            assert found.tables == (plain.find(one.hashes, one.known),)
            chunk = min(tokens, one.known - found.tokens)
            table = plain.admit(one.hashes, one.known, chunk)
            assert real.admit(one, found, chunk) == (table is not None)
            if table is not None:
                live.append((one, table))
        elif live and kind == "e":
            place = which % len(live)
            one, held = live[place]
            one.known += not one.remaining and not one.complete
            chunk = min(tokens, one.remaining)
            if chunk:
                table = plain.extend(one.hashes, held, one.computed, chunk)
                assert real.extend(one, chunk) == (table is not None)
                live[place] = one, table or held
        elif live:
            one, held = live.pop(which % len(live))
            real.release(one)
            plain.pool.give_back(held[::-1])
        assert all(one.tables == (held,) for one, held in live)
        assert waiting(real.pool) == plain.pool.queue
        assert plainly(real.take_events()) == plain.events
        plain.events.clear()


# --- what events say


def run(cache: PrefixCache, one: Sequence) -> list[KVEvent]:
    """Compute all that is known of a sequence, and give it back."""
    found = cache.find(one)
    assert cache.admit(one, found, one.known - found.tokens)
    cache.release(one)
    return cache.take_events()


def test_a_stored_event_has_all_fields_that_vllm_sets() -> None:
    cache = PrefixCache(CacheSize(8, 2))
    one = Sequence(array("I", range(7)), 7, 2, "seed", "adapter", "tenant")
    assert run(cache, one) == [
        BlockStored(
            one.hashes,
            None,
            [0, 1, 2, 3, 4, 5],
            2,
            1,
            "GPU",
            "adapter",
            extra_keys=[("adapter", "tenant"), ("adapter",), ("adapter",)],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
    ]
    assert run(cache, Sequence(array("I", range(9)), 9, 2, "seed", "adapter", "tenant")) == [
        BlockStored(
            cache_hashes(range(9), 2)[3:],
            one.hashes[2],
            [6, 7],
            2,
            1,
            "GPU",
            "adapter",
            extra_keys=[("adapter",)],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )
    ]


def cache_hashes(tokens: Items[int], size: int) -> list[int]:
    return Sequence(array("I", tokens), len(tokens), size, "seed", "adapter", "tenant").hashes


def test_sglang_sends_the_salt_in_a_field_of_its_own() -> None:
    cache = PrefixCache(CacheSize(8, 2, host_blocks=1), event_style=EVENT_STYLES["sglang"])
    stored, copied = run(cache, Sequence(array("I", range(3)), 3, 2, "seed", None, "tenant"))
    assert isinstance(stored, BlockStored)
    assert stored.cache_salt == "tenant"
    assert isinstance(copied, BlockStored)
    assert (copied.medium, copied.token_ids, copied.block_hashes) == ("CPU_PINNED", [], stored.block_hashes)


@pytest.mark.parametrize("within", [None, "l", "s"])
@pytest.mark.parametrize("other", [None, "l", "s"])
def test_a_prompt_is_found_only_within_its_own_lora_and_salt(within: str | None, other: str | None) -> None:
    cache = PrefixCache(CacheSize(8, 2))
    run(cache, sequence(range(5), 2, within=within))
    assert cache.find(sequence(range(5), 2, within=other)).tokens == (4 if within == other else 0)


def test_engines_do_not_share_hashes() -> None:
    """As in vLLM, where each process has a hash seed of its own."""
    one, other = (Sequence(array("I", range(8)), 8, 4, seed) for seed in ("0", "1"))
    assert not set(one.hashes) & set(other.hashes)


def test_the_last_token_is_never_cached() -> None:
    cache = PrefixCache(CacheSize(8, 4))
    run(cache, sequence(range(8), 4))
    assert [cache.find(sequence(range(length), 4)).tokens for length in (4, 5, 8, 9)] == [0, 4, 4, 8]


def test_a_reset_is_one_event_and_refused_while_blocks_are_used() -> None:
    cache = PrefixCache(CacheSize(8, 4, host_blocks=4))
    run(cache, sequence(range(8), 4))
    one = sequence(range(9), 4)
    assert cache.admit(one, cache.find(one), 1)
    assert not cache.reset()
    assert cache.take_events() == []
    cache.release(one)
    assert cache.reset()
    assert cache.take_events() == [AllBlocksCleared()]
    assert (cache.find(sequence(range(9), 4)).tokens, cache.host_blocks, cache.pool.holding) == (0, 0, 0)


# --- the window


def test_a_window_is_kept_where_a_prompt_ends_and_nowhere_before() -> None:
    """vLLM 0.32 keeps of a sliding group what reaches the prompt's end: the last two blocks that count, for 8 tokens of 4."""
    cache = PrefixCache(CacheSize(40, 4, window=8))
    one = sequence(range(21), 4)
    sliding, full = run(cache, one)
    assert isinstance(sliding, BlockStored)
    assert isinstance(full, BlockStored)
    assert (sliding.group_idx, sliding.kv_cache_spec_kind, sliding.kv_cache_spec_sliding_window) == (0, "sliding_window", 8)
    assert (full.group_idx, full.kv_cache_spec_kind, full.block_hashes) == (1, "full_attention", one.hashes)
    assert sliding.block_hashes == one.hashes[3:5]
    assert sliding.token_ids == list(range(20))
    assert cache.find(sequence(range(21), 4)).tokens == 20


def test_a_prompt_that_full_attention_knows_further_leaves_a_window_at_that_point() -> None:
    """Two prompts share 12 tokens; the second computes them again, and the third can go on from them."""
    cache = PrefixCache(CacheSize(60, 4, window=8))
    run(cache, sequence(range(33), 4))
    shared = [*range(12), *range(100, 121)]
    assert [cache.find(sequence([*shared[:12], *range(start, start + 9)], 4)).tokens for start in (100, 200)] == [0, 0]
    run(cache, sequence(shared, 4))
    assert cache.find(sequence([*range(12), *range(200, 221)], 4)).tokens == 12


def test_a_window_gives_back_what_no_later_token_reaches() -> None:
    cache = PrefixCache(CacheSize(20, 2, window=4), max_step_tokens=4)
    one = sequence(range(17), 2)
    assert cache.admit(one, cache.find(one), 4)
    most = 0
    while one.remaining:
        assert cache.extend(one, min(4, one.remaining))
        most = max(most, sum(block > 0 for block in one.tables[0]))
    assert len(one.tables[1]) == 9
    assert most <= -(-(4 - 1 + 4) // 2) + 1


# --- host memory


def test_what_the_gpu_lost_comes_back_from_the_host() -> None:
    """All of the first prompt was pushed out; it is found on the host, loaded, and announced on the GPU again."""
    cache = PrefixCache(CacheSize(3, 2, host_blocks=20))
    one = sequence([0] * 6, 2)
    run(cache, one)
    run(cache, sequence([1] * 6, 2))
    again = sequence([0] * 6, 2)
    found = cache.find(again)
    assert (found.tokens, found.loaded) == (4, 2)
    assert cache.admit(again, found, 2)
    stored = [event for event in cache.take_events() if isinstance(event, BlockStored)]
    assert [(event.medium, event.block_hashes) for event in stored] == [("GPU", one.hashes[:2]), ("GPU", one.hashes[2:])]


def test_host_memory_keeps_the_most_recently_used_and_of_a_prompt_its_beginning() -> None:
    cache = PrefixCache(CacheSize(20, 2, host_blocks=3))
    first, second = sequence([0] * 6, 2), sequence([1] * 4, 2)
    run(cache, first)
    events = run(cache, second)
    assert [event.block_hashes for event in events if isinstance(event, BlockRemoved)] == [[first.hashes[2]], [first.hashes[1]]]
    assert cache.host_blocks == 3


def test_what_is_found_again_stays_in_host_memory_and_its_beginning_longest() -> None:
    """The first prompt comes again after the second: now the second goes first, then the first's last block."""
    cache = PrefixCache(CacheSize(40, 2, host_blocks=4))
    first, second = sequence([0] * 4, 2), sequence([1] * 4, 2)
    for one in (first, second, sequence([0] * 5, 2)):
        run(cache, one)
    events = run(cache, sequence([2] * 6, 2))
    removed = [event.block_hashes[0] for event in events if isinstance(event, BlockRemoved)]
    assert removed == [*second.hashes[::-1], first.hashes[1]]


def test_a_prompt_longer_than_host_memory_leaves_its_beginning_there() -> None:
    cache = PrefixCache(CacheSize(20, 2, host_blocks=2))
    one = sequence([0] * 10, 2)
    run(cache, one)
    assert list(cache._host._held if cache._host else ()) == one.hashes[1::-1]


# --- limits


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (CacheSize(0, 1), "blocks"),
        (CacheSize(1, 0), "block_size"),
        (CacheSize(1, 1, -1), "host_blocks"),
        (CacheSize(1, 1, 0, 1), "window"),
        (CacheSize(1, 1, 1, 8), "window"),
    ],
)
def test_a_size_that_cannot_be_is_refused(size: CacheSize, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        PrefixCache(size)


@given(st.one_of(SIZES, HYBRID, TIERED), st.integers(1, 80))
def test_what_could_be_held_is_held_by_an_empty_cache_and_what_could_not_is_not(size: CacheSize, tokens: int) -> None:
    """In chunks of a step, as an engine computes them."""
    cache = PrefixCache(size, max_step_tokens=8)
    one = sequence(range(tokens), size.block_size)
    fits = cache.admit(one, cache.find(one), min(8, tokens))
    while fits and one.remaining:
        fits = cache.extend(one, min(8, one.remaining))
    assert fits == cache.could_hold(tokens)
