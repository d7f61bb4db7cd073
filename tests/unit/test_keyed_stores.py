"""Stores with block keys instead of tokens lead to the same digest, the same blocks and the same matches."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any, TypeGuard

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest as xxh3

from index_cases import (
    Adversary,
    Choices,
    Engine,
    Feed,
    Traffic,
    blocks_of,
    cleared,
    count_orphans,
    count_rejected,
    namespace,
    removal,
    scanned,
    store,
    tokens_by_level,
    tokens_of,
)
from index_keys import DENSE, Scope
from kvevents.events import AllBlocksCleared, BlockStored, KVEvent, KVEventBatch
from kvevents.index import MultiModal, Namespace, PrefixIndex, block_keys
from kvevents.wire import encode_batch

SIZE = 2
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9, 9, 9], [9, 9, 1, 2], [1, 2]]
SCOPES = [Scope(), Scope(lora="adapter"), Scope(salt="tenant"), Scope(lora=7, salt="tenant"), Scope(mm=(("image", 1, 3),))]
KEY = 0x1234_5678_9ABC_DEF0


def keyed(
    hashes: Sequence[int], keys: Sequence[int], size: int = SIZE, *, parent: int | None = None, **fields: Any
) -> BlockStored:
    return store(hashes, [], size, parent, block_keys=list(keys), **fields)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


@pytest.fixture
def feed(index: PrefixIndex) -> Feed:
    return Feed(index)


# --- equal to tokens --------------------------------------------------------------------------------------------------------


def hashes_of(tokens: Sequence[int], scope: Scope) -> list[int]:
    """Return the hashes of an engine, each of the whole prefix."""
    return [xxh3(repr((scope, tokens[: end + SIZE])).encode()) for end in range(0, len(tokens) - SIZE + 1, SIZE)]


class TokenAndKeyIndexes:
    """Three indexes: one receives tokens, one keys, and one receives tokens from engine `a` and keys from engine `b`."""

    def __init__(self) -> None:
        self.plain, self.redacted, self.mixed = PrefixIndex(), PrefixIndex(), PrefixIndex()
        self.feeds = {name: (Feed(self.plain, name), Feed(self.redacted, name)) for name in ("a", "b")}
        self.mixed_feeds = {name: Feed(self.mixed, name) for name in self.feeds}
        for feed in (feed for feeds in self.feeds.values() for feed in feeds):
            feed()

    def send(self, name: str, plain: KVEvent, redacted: KVEvent | None = None) -> None:
        redacted = redacted or plain
        for feed, event in zip(
            (*self.feeds[name], self.mixed_feeds[name]), (plain, redacted, (plain, redacted)[name == "b"]), strict=True
        ):
            assert feed(event).status == "applied"

    def check(self, name: str) -> None:
        assert self.plain.digest(name) == self.redacted.digest(name)
        assert blocks_of(self.plain, (name, 0)) == blocks_of(self.redacted, (name, 0))


steps = st.tuples(
    st.sampled_from(["a", "b"]),
    st.sampled_from(["store", "store", "store", "move", "window", "remove", "clear"]),
    st.sampled_from(PROMPTS),
    st.sampled_from(SCOPES),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from(["GPU", "GPU", "CPU"]),
)


@settings(max_examples=150)
@given(st.lists(steps, max_size=25))
def test_stores_of_true_keys_lead_to_the_same_state_as_stores_of_tokens(history: list[Any]) -> None:
    """After each event both indexes have the same digest and the same blocks, and in the end the same match for every prompt.

    So does an index where one engine sends tokens and another engine sends keys of the same blocks. Histories have chains cut
    anywhere, copies, moves between tiers, windows, removals and clears, in every namespace.
    """
    indexes = TokenAndKeyIndexes()
    for name, what, prompt, scope, first, count, medium in history:
        hashes, keys = hashes_of(prompt, scope), block_keys(prompt, SIZE, namespace(scope))
        part = slice(first, first + count)
        if not hashes[part]:
            continue
        if what == "store" and (first == 0 or indexes.plain._key_of(name, 0, None, hashes[first - 1]) is not None):
            whole = vllm_store(hashes, prompt, scope, part, medium)
            redacted = keyed(hashes[part], keys[part], parent=whole.parent_block_hash, medium=medium)
            indexes.send(name, whole, redacted)
            assert [indexes.redacted._key_of(name, 0, None, value) for value in hashes[part]] == keys[part]
        elif what == "move":
            indexes.send(name, store(hashes[part], [], 0, medium=medium))
        elif what == "window":
            kind: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3, "group_idx": 1}
            whole = store(hashes[part], prompt, SIZE, **kind)
            indexes.send(name, whole, keyed(hashes[part], keys[part], **kind))
        elif what == "remove":
            indexes.send(name, removal(*hashes[part], medium=medium, group_idx=count % 2))
        elif what == "clear":
            indexes.send(name, cleared() if first else cleared(medium=medium))
        indexes.check(name)
    for prompt in PROMPTS:
        for scope in SCOPES:
            expected = tokens_by_level(indexes.plain.match(prompt, namespace(scope)))
            assert tokens_by_level(indexes.redacted.match(prompt, namespace(scope))) == expected
            assert tokens_by_level(indexes.mixed.match(prompt, namespace(scope))) == expected
            keys = block_keys(prompt, SIZE, namespace(scope))
            assert tokens_by_level(indexes.redacted.match_keys(keys, SIZE)) == tokens_by_level(
                indexes.plain.match_keys(keys, SIZE)
            )


def test_keys_from_the_middle_of_a_prompt_match_the_chain_that_was_sent_as_tokens(index: PrefixIndex, feed: Feed) -> None:
    """The blocks before them are unknown when the keys arrive. The chain can grow and lose its first block meanwhile."""
    tokens = list(range(40))
    keys, hashes = block_keys(tokens, SIZE), range(1, 21)
    feed(store(hashes[:10], tokens[:20], SIZE))
    other = Feed(index, "keys")
    other(keyed(range(105, 115), keys[5:15]))
    feed(store(hashes[10:], tokens[20:], SIZE, 10))
    assert tokens_by_level(index.match(tokens)) == {("a", 0): (40,) * 4}
    other(keyed(range(115, 120), keys[15:]), keyed(range(100, 105), keys[:5]))
    assert tokens_by_level(index.match(tokens)) == {("a", 0): (40,) * 4, ("keys", 0): (40,) * 4}
    feed(removal(1))
    assert tokens_by_level(index.match(tokens)) == {("keys", 0): (40,) * 4}
    feed(store([1], tokens[:2], SIZE))
    other(removal(*range(100, 120)))
    assert tokens_by_level(index.match(tokens)) == {("a", 0): (40,) * 4}


def vllm_store(hashes: list[int], prompt: list[int], scope: Scope, part: slice, medium: str) -> BlockStored:
    """Return a store as vLLM sends it: the salt at the root, and multimodal items with offsets from the block."""
    first, end = part.start, min(part.stop, len(hashes))
    lora = scope.lora if isinstance(scope.lora, str) else None
    extra: list[list[Any]] = [[lora] if lora else [] for _ in range(first, end)]
    for item, start, length in scope.mm:
        for at in range(first, end):
            if start < (at + 1) * SIZE and start + length > at * SIZE:
                extra[at - first].append([item, start - at * SIZE])
    if first == 0 and scope.salt is not None:
        extra[0].append(scope.salt)
    fields: dict[str, Any] = {"lora_name": lora, "lora_id": scope.lora if isinstance(scope.lora, int) else None}
    if any(extra):
        fields["extra_keys"] = [tuple(keys) or None for keys in extra]
    parent = hashes[first - 1] if first else None
    return store(hashes[part], prompt[first * SIZE : end * SIZE], SIZE, parent, medium=medium, **fields)


@settings(max_examples=40)
@given(st.binary(min_size=400, max_size=2500))
def test_a_stream_whose_tokens_a_relay_replaced_by_keys_has_the_same_digest(data: bytes) -> None:
    """The engines follow no rule except that hashes are distinct. The keys come from the index that knows the tokens."""
    adversary, indexes = Adversary(Choices(data)), TokenAndKeyIndexes()
    stream = adversary.streams[0]
    stream.hashing, stream.digests, stream.keyed = "opaque", False, False
    while not adversary.choices.is_used_up:
        event = adversary._event(stream)
        if not is_dense(event):
            indexes.send("a", event, without_tokens(event))
        elif event.parent_block_hash is None or indexes.plain._key_of("a", 0, None, event.parent_block_hash) is not None:
            indexes.feeds["a"][0](event)
            keys = [indexes.plain._key_of("a", 0, None, value) for value in event.block_hashes]
            assert None not in keys
            bare = msgspec.structs.replace(event, token_ids=[], extra_keys=None, lora_name=None, lora_id=None, cache_salt=None)
            indexes.feeds["a"][1](msgspec.structs.replace(bare, block_keys=keys))
        else:
            continue
        indexes.check("a")
    if not stream.eagle:
        for _ in range(6):
            tokens, scope = adversary.prompt()
            expected = tokens_by_level(indexes.plain.match(tokens, namespace(scope)))
            assert tokens_by_level(indexes.redacted.match(tokens, namespace(scope))) == expected


def is_dense(event: KVEvent) -> TypeGuard[BlockStored]:
    if not isinstance(event, BlockStored) or event.kv_cache_spec_kind not in DENSE:
        return False
    return 0 < len(event.token_ids) == event.block_size * len(event.block_hashes)


def without_tokens(event: KVEvent) -> KVEvent:
    window = isinstance(event, BlockStored) and event.kv_cache_spec_kind == "sliding_window"
    return msgspec.structs.replace(event, token_ids=[]) if window else event


@pytest.mark.parametrize("windows", [(None,), (None, 9), (None, 6, 17)], ids=repr)
def test_an_engine_behind_a_relay_that_sends_keys_is_predicted(windows: tuple[int | None, ...]) -> None:
    """A model of vLLM's cache runs under load, with salts, evictions, resets and windows. The relay sends only keys."""
    engine = Engine(7, 4, 40 * len(windows), windows)
    traffic = Traffic(engine, Choices(random.Random(5).randbytes(4000)), salts=(None, None, "t"), longest=56)
    indexes = TokenAndKeyIndexes()
    for number in range(60):
        if number % 25 == 24:
            traffic.drain()
            engine.reset()
        tokens, salt = traffic.arrive()
        traffic.admit(tokens, salt)
        for event in engine.take_events():
            if isinstance(event, BlockStored) and event.token_ids:
                indexes.feeds["a"][0](event)
                keys = [indexes.plain._key_of("a", 0, None, value) or 0 for value in event.block_hashes]
                indexes.feeds["a"][1](msgspec.structs.replace(event, token_ids=[], extra_keys=None, block_keys=keys))
            else:
                indexes.send("a", event)
        indexes.check("a")
        found = tokens_of(indexes.redacted, tokens[:-1], Scope(salt=salt))
        assert found == engine.cached(tokens, salt) * engine.size


# --- beside other events ------------------------------------------------------------------------------------------------------


def test_a_block_with_a_key_needs_no_parent_but_only_a_contiguous_prefix_matches(index: PrefixIndex, feed: Feed) -> None:
    keys = block_keys(PROMPTS[0], SIZE)
    feed(keyed([3, 4], keys[2:], parent=2))
    assert (count_orphans(index), index.stats().blocks, tokens_of(index, PROMPTS[0])) == (0, 2, 0)
    feed(keyed([1], keys[:1]))
    assert tokens_of(index, PROMPTS[0]) == SIZE
    feed(keyed([2], keys[1:2]))
    assert tokens_of(index, PROMPTS[0]) == len(PROMPTS[0])
    assert [index._key_of("a", 0, None, value) for value in (1, 2, 3, 4, 5)] == [*keys, None]
    assert index._key_of("absent", 0, None, 1) is None


def test_keys_of_bigrams_match(index: PrefixIndex, feed: Feed) -> None:
    """A relay sends keys of EAGLE's blocks, which also cover the next token; the store does not say so."""
    prompt = list(range(1, 10))
    keys = block_keys(prompt, 4, eagle=True)
    feed(keyed([1, 2], keys, 4))
    file = io.BytesIO()
    index.snapshot(file)
    file.seek(0)
    restored = PrefixIndex()
    restored.restore(file)
    for some in (index, restored):
        assert [tokens_of(some, tokens) for tokens in (prompt, prompt[:8], [*prompt[:8], 1], prompt[:4])] == [8, 4, 4, 0]
        assert [worker.tokens for worker in some.match_keys(keys)] == [8]
        assert some.worker("a").estimate is None


def test_a_child_with_tokens_can_have_a_parent_with_a_key(index: PrefixIndex, feed: Feed) -> None:
    """The child can arrive after its parent or wait for it."""
    keys = block_keys(PROMPTS[0], SIZE, Namespace(lora="adapter"))
    feed(store([3], PROMPTS[0][4:6], SIZE, 2, lora_name="adapter"))
    assert count_orphans(index) == 1
    feed(keyed([1, 2], keys[:2]), store([4], PROMPTS[0][6:], SIZE, 3, lora_name="adapter"))
    assert count_orphans(index) == 0
    assert tokens_of(index, PROMPTS[0], Scope(lora="adapter")) == len(PROMPTS[0])
    assert tokens_of(index, PROMPTS[0]) == 0


def test_stores_without_tokens_and_removals_find_blocks_that_were_stored_by_key(index: PrefixIndex, feed: Feed) -> None:
    keys = block_keys(PROMPTS[0], SIZE)
    feed(store([1, 2], [], 0, medium="CPU"), keyed([1, 2], keys[:2]))
    assert tokens_by_level(index.match(PROMPTS[0])) == {("a", 0): (4, 4, 4, 4)}
    feed(removal(1, 2))
    assert tokens_by_level(index.match(PROMPTS[0])) == {("a", 0): (0, 4, 4, 4)}
    feed(removal(1, 2, medium="CPU"))
    assert (index.stats().blocks, index.stats().unknown_removals) == (0, 0)


@pytest.mark.parametrize(
    "event",
    [
        keyed([1, 2], [KEY]),
        keyed([1], [KEY, KEY]),
        keyed([1], []),
        keyed([1], [KEY], 0),
        keyed([1], [KEY], 2**32),
        store([1], [1, 2], SIZE, block_keys=[KEY]),
    ],
    ids=repr,
)
def test_invalid_keys_are_rejected_and_counted(index: PrefixIndex, feed: Feed, event: BlockStored) -> None:
    feed(event)
    assert (index.stats().blocks, count_orphans(index), count_rejected(index)) == (0, 0, 1)
    assert index.stats().rejected == {("none", "length-mismatch"): 1}


def test_keys_in_a_group_of_an_unknown_kind_are_rejected(index: PrefixIndex, feed: Feed) -> None:
    feed(keyed([1], [KEY], kv_cache_spec_kind="chunked_local_attention", group_idx=2))
    assert (index.stats().blocks, index.stats().rejected) == (0, {("chunked_local_attention", "unknown-kind"): 1})


def test_random_keys_match_nothing_but_their_blocks_are_counted(index: PrefixIndex, feed: Feed) -> None:
    """A relay that also hides keys sends random numbers."""
    feed(keyed([1, 2], [7, 8]))
    assert (tokens_of(index, PROMPTS[0]), index.stats().blocks) == (0, 2)
    feed(removal(2), AllBlocksCleared())
    assert index.stats().blocks == 0


# --- beside other workers ---------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.integers(0, 4)), max_size=12), st.sampled_from(SCOPES))
def test_workers_that_sent_keys_and_workers_that_sent_tokens_are_matched_together(
    stores: list[tuple[str, bool, int]], scope: Scope
) -> None:
    """Some workers sent both keys and tokens, in any namespace. In any order of changes, no block hides a block with an equal
    key."""
    prompt = PROMPTS[0]
    index, keys, hashes = PrefixIndex(), block_keys(prompt, SIZE, namespace(scope)), hashes_of(prompt, scope)
    feeds = {name: Feed(index, name) for name in "abcd"}
    expected: dict[str, list[int]] = {name: [0, 0] for name in "abcd"}
    for name, by_key, count in stores:
        before = expected[name][by_key]
        part = slice(0, count)
        shift = 1 << 40 if by_key else 0
        own = [(value + shift) % 2**64 for value in hashes]
        if before:
            feeds[name](removal(*own[:before]))
        if count:
            feeds[name](keyed(own[part], keys[part]) if by_key else vllm_store(own, prompt, scope, part, "GPU"))
        expected[name][by_key] = count
    depths = {(name, 0): (max(counts) * SIZE,) * 4 for name, counts in expected.items() if max(counts)}
    assert tokens_by_level(index.match(prompt, namespace(scope))) == depths
    assert tokens_by_level(index.match_keys(keys, SIZE)) == depths


def test_a_snapshot_contains_blocks_that_were_stored_by_key(tmp_path: Any) -> None:
    index, other = PrefixIndex(), PrefixIndex()
    scope = Namespace(lora="adapter", mm=[MultiModal("image", 1, 3)])
    keys = block_keys(PROMPTS[0], SIZE, scope)
    Feed(index, "a")(keyed([1, 2, 3, 4], keys), keyed([1], keys[:1]))
    Feed(index, "b")(keyed([1, 2], keys[:2]), store([7], PROMPTS[2][:2], SIZE))
    index.snapshot(tmp_path / "snapshot")
    other.restore(tmp_path / "snapshot")
    assert (
        tokens_by_level(other.match(PROMPTS[0], scope))
        == tokens_by_level(index.match(PROMPTS[0], scope))
        == {
            ("a", 0): (8,) * 4,
            ("b", 0): (4,) * 4,
        }
    )
    assert [other.digest(name) for name in "ab"] == [index.digest(name) for name in "ab"]


def test_memory_returns_to_the_baseline_after_all_keys_are_removed() -> None:
    index = PrefixIndex()
    feed = Feed(index)
    feed(keyed([1], [1]), removal(1))
    baseline = index.stats().bytes
    for first in range(10, 5010, 100):
        hashes = range(first, first + 100)
        feed(keyed(hashes, [7 * value for value in hashes], 1 + first % 7))
    assert index.stats().bytes > baseline + 5000 * 16
    feed(*(removal(*range(first, first + 100)) for first in range(4910, -90, -100)))
    assert index.stats().blocks == 0
    assert index.stats().bytes <= baseline + 4096


def test_the_native_scanner_reads_stores_of_keys(index: PrefixIndex) -> None:
    keys = block_keys(PROMPTS[0], SIZE)
    payload = encode_batch(KVEventBatch(1.0, [keyed([1, 2], keys[:2])]))
    assert scanned(payload) is not None
    index.apply_payload("a", 0, 0, payload)
    assert tokens_of(index, PROMPTS[0]) == 2 * SIZE
