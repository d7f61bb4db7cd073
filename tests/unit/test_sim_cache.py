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
from sim_model import EventState, PlainCache, PlainPool, contents, list_free_blocks, simplify_events

# Operation (admit, extend, release), the sequence that it is about, and a number of tokens.
MOVES = st.lists(st.tuples(st.sampled_from("aaaeeeeer"), st.integers(0, 9), st.integers(1, 12)), min_size=10, max_size=40)
NONE = {"host_blocks": st.just(0), "window": st.none()}
SIZES = st.builds(CacheSize, st.integers(1, 14), st.integers(1, 4), **NONE)
HYBRID = st.builds(CacheSize, st.integers(2, 24), st.integers(1, 4), **NONE | {"window": st.integers(2, 12)})
TIERED = st.builds(CacheSize, st.integers(1, 12), st.integers(1, 4), **NONE | {"host_blocks": st.integers(1, 10)})
PROMPTS = st.lists(
    # Few different tokens, so that prompts share beginnings; some have a LoRA or a salt.
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
    """A cache into which sequences are admitted, extended and released; `check` verifies it after each move."""

    cache: PrefixCache
    prompts: list[tuple[list[int], int, str | None]]

    def __post_init__(self) -> None:
        self.live: list[Sequence] = []
        self.admitted = 0
        self.mirror = EventState()

    def play(self, moves: list[tuple[str, int, int]]) -> None:
        for kind, which, tokens in moves:
            {"a": self.admit, "e": self.extend, "r": self.release}[kind](which, tokens)
            self.check()
        while self.live:
            self.release(0, 0)
            self.check()
        assert self.cache.pool.free_blocks == self.cache.size.blocks
        assert self.cache.reset()
        self.check()
        assert not contents(self.cache)

    def admit(self, _: int, tokens: int) -> None:
        ids, answer, within = self.prompts[self.admitted % len(self.prompts)]
        self.admitted += 1
        fresh = sequence(ids, self.cache.size.block_size, answer, within)
        found = self.cache.find(fresh)
        assert found.tokens == self.mirror.cached(self.cache.size, fresh.hashes, fresh.known)
        assert found.tokens < fresh.known
        self.on_lookup(fresh, found.tokens)
        before = self.state()
        chunk = min(tokens, fresh.known - found.tokens)
        if self.cache.admit(fresh, found, chunk):
            assert fresh.computed == found.tokens + chunk
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
        return list_free_blocks(pool), list(pool.uses), contents(self.cache)

    def on_lookup(self, fresh: Sequence, cached: int) -> None:
        """Do nothing; subclasses override this."""

    def on_events(self, events: list[KVEvent]) -> None:
        """Do nothing; subclasses override this."""

    def check(self) -> None:
        cache = self.cache
        events = cache.take_events()
        for event in events:
            self.mirror.apply(event)
        self.on_events(events)
        assert +self.mirror.held == contents(cache)
        used = {block for one in self.live for table in one.tables for block in table if block}
        assert cache.pool.free_blocks == cache.size.blocks - len(used)
        assert cache._host is None or len(cache._host._blocks) <= cache.size.host_blocks
        for one in self.live:
            assert all(len(table) == -(-one.computed // cache.size.block_size) for table in one.tables)


class IndexHistory(History):
    """A history that also queries the real index at every lookup."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.index = PrefixIndex()
        self.batches = 0

    def on_events(self, events: list[KVEvent]) -> None:
        if events:
            batch = KVEventBatch(0.0, events, 0)
            self.index.apply_payload(("engine", 0), 0, self.batches, encode(batch))
            self.batches += 1

    def on_lookup(self, fresh: Sequence, cached: int) -> None:
        match = self.index.match(fresh.tokens[: fresh.known - 1], Namespace(lora=fresh.lora, salt=fresh.salt)).get("engine", 0)
        assert (match.tokens if match else 0) == cached


@settings(max_examples=200)
@given(st.one_of(SIZES, HYBRID, TIERED), PROMPTS, MOVES)
def test_events_describe_the_cache_exactly_and_every_lookup_agrees_with_them(
    size: CacheSize, prompts: list[tuple[list[int], int, str | None]], moves: list[tuple[str, int, int]]
) -> None:
    """After every move the contents equal those of the events, no block is used twice or lost, and mirror and index know
    each hit."""
    IndexHistory(PrefixCache(size, max_step_tokens=12), prompts).play(moves)


@settings(max_examples=80)
@given(SIZES, PROMPTS, MOVES)
def test_full_attention_behaves_like_the_plain_model(
    size: CacheSize, prompts: list[tuple[list[int], int, str | None]], moves: list[tuple[str, int, int]]
) -> None:
    """Both use the same blocks in the same order, and have the same events and refusals."""
    real, model = PrefixCache(size), PlainCache(PlainPool(size.blocks), size.block_size)
    live: list[tuple[Sequence, list[int]]] = []
    admitted = 0
    for kind, which, tokens in moves:
        if kind == "a":
            ids, answer, within = prompts[admitted % len(prompts)]
            admitted += 1
            one = sequence(ids, size.block_size, answer, within)
            found = real.find(one)
            assert found.tables == (model.find(one.hashes, one.known),)
            chunk = min(tokens, one.known - found.tokens)
            table = model.admit(one.hashes, one.known, chunk)
            assert real.admit(one, found, chunk) == (table is not None)
            if table is not None:
                live.append((one, table))
        elif live and kind == "e":
            place = which % len(live)
            one, held = live[place]
            one.known += not one.remaining and not one.complete
            chunk = min(tokens, one.remaining)
            if chunk:
                table = model.extend(one.hashes, held, one.computed, chunk)
                assert real.extend(one, chunk) == (table is not None)
                live[place] = one, table or held
        elif live:
            one, held = live.pop(which % len(live))
            real.release(one)
            model.pool.give_back(held[::-1])
        assert all(one.tables == (held,) for one, held in live)
        assert list_free_blocks(real.pool) == model.pool.queue
        assert simplify_events(real.take_events()) == model.events
        model.events.clear()


# --- fields of events


def compute_and_release(cache: PrefixCache, one: Sequence) -> list[KVEvent]:
    """Compute all known tokens of a sequence, release it, and return the events."""
    found = cache.find(one)
    assert cache.admit(one, found, one.known - found.tokens)
    cache.release(one)
    return cache.take_events()


def test_a_stored_event_has_all_fields_that_vllm_sets() -> None:
    cache = PrefixCache(CacheSize(8, 2))
    one = Sequence(array("I", range(7)), 7, 2, "seed", "adapter", "tenant")
    assert compute_and_release(cache, one) == [
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
    assert compute_and_release(cache, Sequence(array("I", range(9)), 9, 2, "seed", "adapter", "tenant")) == [
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


def test_sglang_sends_the_salt_in_a_separate_field() -> None:
    cache = PrefixCache(CacheSize(8, 2, host_blocks=1), event_style=EVENT_STYLES["sglang"])
    stored, copied = compute_and_release(cache, Sequence(array("I", range(3)), 3, 2, "seed", None, "tenant"))
    assert isinstance(stored, BlockStored)
    assert stored.cache_salt == "tenant"
    assert isinstance(copied, BlockStored)
    assert (copied.medium, copied.token_ids, copied.block_hashes) == ("CPU_PINNED", [], stored.block_hashes)


@pytest.mark.parametrize("within", [None, "l", "s"])
@pytest.mark.parametrize("other", [None, "l", "s"])
def test_a_prompt_is_found_only_within_its_own_lora_and_salt(within: str | None, other: str | None) -> None:
    cache = PrefixCache(CacheSize(8, 2))
    compute_and_release(cache, sequence(range(5), 2, within=within))
    assert cache.find(sequence(range(5), 2, within=other)).tokens == (4 if within == other else 0)


def test_engines_do_not_share_hashes() -> None:
    """In vLLM too, each process has its own hash seed."""
    one, other = (Sequence(array("I", range(8)), 8, 4, seed) for seed in ("0", "1"))
    assert not set(one.hashes) & set(other.hashes)


def test_the_last_token_is_never_cached() -> None:
    cache = PrefixCache(CacheSize(8, 4))
    compute_and_release(cache, sequence(range(8), 4))
    assert [cache.find(sequence(range(length), 4)).tokens for length in (4, 5, 8, 9)] == [0, 4, 4, 8]


def test_a_reset_is_one_event_and_is_refused_while_blocks_are_used() -> None:
    cache = PrefixCache(CacheSize(8, 4, host_blocks=4))
    compute_and_release(cache, sequence(range(8), 4))
    one = sequence(range(9), 4)
    assert cache.admit(one, cache.find(one), 1)
    assert not cache.reset()
    assert cache.take_events() == []
    cache.release(one)
    assert cache.reset()
    assert cache.take_events() == [AllBlocksCleared()]
    assert (cache.find(sequence(range(9), 4)).tokens, contents(cache).total()) == (0, 0)


# --- sliding windows


def test_a_sliding_group_caches_only_the_window_at_the_end_of_a_prompt() -> None:
    """vLLM 0.32 caches the blocks of a sliding group that reach the prompt's end: for a window of 8 tokens, the last two
    full blocks."""
    cache = PrefixCache(CacheSize(40, 4, window=8))
    one = sequence(range(21), 4)
    sliding, full = compute_and_release(cache, one)
    assert isinstance(sliding, BlockStored)
    assert isinstance(full, BlockStored)
    assert (sliding.group_idx, sliding.kv_cache_spec_kind, sliding.kv_cache_spec_sliding_window) == (0, "sliding_window", 8)
    assert (full.group_idx, full.kv_cache_spec_kind, full.block_hashes) == (1, "full_attention", one.hashes)
    assert sliding.block_hashes == one.hashes[3:5]
    assert sliding.token_ids == list(range(20))
    assert cache.find(sequence(range(21), 4)).tokens == 20


def test_a_prompt_that_shares_a_longer_prefix_with_full_attention_caches_a_window_there() -> None:
    """Two prompts share 12 tokens; the second computes them again, and the third finds them."""
    cache = PrefixCache(CacheSize(60, 4, window=8))
    compute_and_release(cache, sequence(range(33), 4))
    shared = [*range(12), *range(100, 121)]
    assert [cache.find(sequence([*shared[:12], *range(start, start + 9)], 4)).tokens for start in (100, 200)] == [0, 0]
    compute_and_release(cache, sequence(shared, 4))
    assert cache.find(sequence([*range(12), *range(200, 221)], 4)).tokens == 12


def test_a_sliding_group_releases_blocks_outside_its_window() -> None:
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


def test_blocks_that_the_gpu_evicted_are_loaded_from_the_host() -> None:
    """All of the first prompt is evicted; it is found on the host, loaded, and announced on the GPU again."""
    cache = PrefixCache(CacheSize(3, 2, host_blocks=20))
    one = sequence([0] * 6, 2)
    compute_and_release(cache, one)
    compute_and_release(cache, sequence([1] * 6, 2))
    again = sequence([0] * 6, 2)
    found = cache.find(again)
    assert (found.tokens, found.loaded) == (4, 2)
    assert cache.admit(again, found, 2)
    stored = [event for event in cache.take_events() if isinstance(event, BlockStored)]
    assert [(event.medium, event.block_hashes) for event in stored] == [("GPU", one.hashes[:2]), ("GPU", one.hashes[2:])]


def test_host_memory_evicts_the_least_recently_used_prompt_from_its_end() -> None:
    cache = PrefixCache(CacheSize(20, 2, host_blocks=3))
    first, second = sequence([0] * 6, 2), sequence([1] * 4, 2)
    compute_and_release(cache, first)
    events = compute_and_release(cache, second)
    assert [event.block_hashes for event in events if isinstance(event, BlockRemoved)] == [[first.hashes[2]], [first.hashes[1]]]
    assert cache._host is not None
    assert len(cache._host._blocks) == 3


def test_a_hit_in_host_memory_makes_a_prompt_the_most_recently_used() -> None:
    """The first prompt comes again after the second, so the second is evicted first, and then the first prompt's last block."""
    cache = PrefixCache(CacheSize(40, 2, host_blocks=4))
    first, second = sequence([0] * 4, 2), sequence([1] * 4, 2)
    for one in (first, second, sequence([0] * 5, 2)):
        compute_and_release(cache, one)
    events = compute_and_release(cache, sequence([2] * 6, 2))
    removed = [event.block_hashes[0] for event in events if isinstance(event, BlockRemoved)]
    assert removed == [*second.hashes[::-1], first.hashes[1]]


def test_host_memory_holds_the_beginning_of_a_prompt_that_is_too_long_for_it() -> None:
    cache = PrefixCache(CacheSize(20, 2, host_blocks=2))
    one = sequence([0] * 10, 2)
    compute_and_release(cache, one)
    assert list(cache._host._blocks if cache._host else ()) == one.hashes[1::-1]


# --- limits


@pytest.mark.parametrize(
    ("size", "names"),
    [
        ((0, 1), "blocks"),
        ((1, 0), "block_size"),
        ((1, 1, -1), "host_blocks"),
        ((1, 1, 0, 1), "window"),
        ((1, 1, 1, 8), "window"),
    ],
)
def test_an_invalid_size_is_refused(size: tuple[int, ...], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        CacheSize(*size)


@given(st.one_of(SIZES, HYBRID, TIERED), st.integers(1, 80))
def test_an_empty_cache_holds_a_prompt_exactly_if_it_could_hold_it(size: CacheSize, tokens: int) -> None:
    """The prompt is computed in chunks of a step, as in an engine."""
    cache = PrefixCache(size, max_step_tokens=8)
    one = sequence(range(tokens), size.block_size)
    fits = cache.admit(one, cache.find(one), min(8, tokens))
    while fits and one.remaining:
        fits = cache.extend(one, min(8, one.remaining))
    assert fits == cache.could_hold(tokens)
