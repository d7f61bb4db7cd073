"""The index's lookups by KV cache groups, against the small model of vLLM's rules in `engine_cache.py`."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import NamedTuple

from hypothesis import event, given
from hypothesis import strategies as st

from kvevents.events import BlockRemoved, BlockStored, KVEvent
from kvevents.index import MultiModal, Namespace, PrefixIndex
from kvevents.stream import Batch
from tests.system.vllm_oracle.engine_cache import FULL, STATE, WINDOWS, EngineCache, engine_hashes

UNITS = 12
"""Hash units of the longest prompt."""
PROMPTS = 3


class Group(NamedTuple):
    kind: str
    size: int
    window: int


class Cache(NamedTuple):
    """The KV cache groups of a model, and those of its draft model."""

    groups: list[Group]
    unit: int
    lookahead: int
    drafts: list[int] | None


@st.composite
def caches(draw: st.DrawFn) -> Cache:
    unit = draw(st.sampled_from([1, 2, 4]))
    kinds = st.sampled_from([*FULL[:2], *WINDOWS[:1], STATE])
    groups = [
        Group(kind, unit * draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 5 * unit)) if kind in WINDOWS else 0)
        for kind in draw(st.lists(kinds, min_size=1, max_size=4))
    ]
    drafts = draw(st.none() | st.lists(st.integers(0, len(groups) - 1), max_size=2, unique=True))
    return Cache(groups, unit, draw(st.sampled_from([0, 0, 0, 1, 2])), drafts)


class Engine:
    """Stores and removes single blocks in random order, which no real engine does, and announces them as vLLM does."""

    def __init__(self, cache: Cache, random: Random) -> None:
        self._cache, self._random = cache, random
        length = UNITS * cache.unit + cache.lookahead
        stem = [random.randrange(50) for _ in range(length)]
        cuts = [random.randrange(length) for _ in range(PROMPTS)]
        self.prompts = [(stem[:cut] + [random.randrange(50) for _ in range(length - cut)]) for cut in cuts]
        self.salts = [None, None, "tenant"]
        self._copies: Counter[tuple[int, int]] = Counter()

    def first_stores(self) -> list[KVEvent]:
        """Return stores of the first block of every group, from which the index learns everything that lookups need."""
        return [self._store(group, 0, 1) for group in range(len(self._cache.groups))]

    def _store(self, group: int, prompt: int, blocks: int) -> BlockStored:
        kind, size, window = self._cache.groups[group]
        unit, lookahead = self._cache.unit, self._cache.lookahead
        tokens, salt = self.prompts[prompt], self.salts[prompt]
        end = blocks * size
        hashes = engine_hashes(tokens, unit, lookahead, salt)
        self._copies[group, hashes[end // unit - 1]] += 1
        return BlockStored(
            block_hashes=[hashes[end // unit - 1]],
            parent_block_hash=hashes[(end - size) // unit - 1] if blocks > 1 else None,
            token_ids=tokens[end - size : end],
            block_size=size,
            medium="GPU",
            extra_keys=[(salt,)] if salt and blocks == 1 else None,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window or None,
            lookahead_token_ids=[tokens[end : end + lookahead]] if lookahead else None,
        )

    def step(self) -> KVEvent:
        resident = [block for block, count in self._copies.items() if count > 0]
        if resident and self._random.random() < 0.3:
            group, block = self._random.choice(resident)
            self._copies[group, block] -= 1
            return BlockRemoved(block_hashes=[block], medium="GPU", group_idx=group)
        group = self._random.randrange(len(self._cache.groups))
        blocks = UNITS * self._cache.unit // self._cache.groups[group].size
        return self._store(group, self._random.randrange(PROMPTS), self._random.randint(1, blocks))


@given(cache=caches(), seed=st.integers(0, 1 << 32))
def test_the_index_matches_the_same_tokens_as_the_model_of_the_rules(cache: Cache, seed: int) -> None:
    """For any groups, blocks and prompts, with or without an image, the index and the model find the same tokens."""
    random = Random(seed)
    engine, model, index = Engine(cache, random), EngineCache(cache.drafts), PrefixIndex()
    index.set_drafts("engine", cache.drafts)
    batches = [engine.first_stores(), *([engine.step() for _ in range(random.randint(1, 6))] for _ in range(8))]
    for number, events in enumerate(batches):
        index.apply(Batch("engine", 0, 0, number, float(number), events, replayed=False))
        for each in events:
            model.apply(each)
        for prompt, salt in zip(engine.prompts, engine.salts, strict=True):
            whole = prompt[: random.randint(1, len(prompt))]
            longest = random.randint(0, len(whole))
            text = random.choice([len(whole), random.randrange(len(whole))])
            images = [MultiModal("image", text, 1)] if text < len(whole) else []
            # The engine has announced no image, so it holds only blocks that end before the image.
            held = whole[: text // cache.unit * cache.unit + cache.lookahead] if images else whole
            found = index.match(whole, Namespace(salt=salt, mm=images), max_tokens=longest)
            expected = model.tokens(held, longest, salt)
            event("a hit" if expected else "no hit")
            if any(worker.tokens == 0 for worker in found):
                # Windows need not announce the first blocks of a prompt, which contain its salt, nor blocks with its images.
                assert salt is not None or images
                assert all(group.kind not in FULL for group in cache.groups)
                assert not any(worker.is_certain for worker in found)
                continue
            assert sum(worker.tokens for worker in found) == expected, (cache, number, salt, len(whole), longest, text)
    assert index.worker("engine").estimate in {None, "unknown-parents"}, "the engine evicts parents before their children"
