"""Tiers below the GPU: which keys their blocks have, and when the index cannot know what they hold."""

from __future__ import annotations

import io
from typing import Any

import pytest

from index_cases import Feed, cleared, removal, store
from kvevents.events import BlockStored, KVEvent, KVEventBatch
from kvevents.index import Namespace, PrefixIndex
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.stream import Gap
from kvevents.wire import encode_batch

TOKENS = list(range(100, 106))
SALTED: dict[str, Any] = {"extra_keys": [("tenant",), None, None]}
ADAPTED: dict[str, Any] = {"lora_name": "adapter", "extra_keys": [("adapter",)] * 3}
CASES = [(SALTED, Namespace(salt="tenant")), (ADAPTED, Namespace(lora="adapter"))]


def chain(medium: str, hashes: tuple[int, ...] = (1, 2, 3), **fields: Any) -> BlockStored:
    return store(hashes, TOKENS[: 2 * len(hashes)], 2, medium=medium, **fields)


def chunks(medium: str = "CPU", **fields: Any) -> list[KVEvent]:
    """Return blocks as vLLM's `OffloadingConnector` announces them: one by one, and without extra keys."""
    parents = [None, 1, 2]
    return [store([n + 1], TOKENS[2 * n : 2 * n + 2], 2, parents[n], medium=medium, **fields) for n in range(3)]


def held(index: PrefixIndex, namespace: Namespace | None = None) -> tuple[int, int]:
    """Return the tokens on the GPU, and on the CPU as well."""
    match = index.match(TOKENS, namespace).best
    return (0, 0) if match is None else (match.tiers["gpu"], match.tiers["cpu"])


def late(*payloads: bytes) -> PrefixIndex:
    """Return the index of a consumer that gets the compacted history of these payloads."""
    compactor = Compactor.create()
    assert compactor is not None
    for payload in payloads:
        compactor.append(payload)
    pieces = compactor.snapshot_pieces(1 << 20)
    assert pieces is not None
    found = encode_snapshot(pieces, 1.0, 0, encode_batch, 1 << 20)
    assert found is not None
    index = PrefixIndex()
    for seq, payload in enumerate(found):
        index.apply_payload("a", 0, seq, payload)
    return index


def payload(*events: KVEvent) -> bytes:
    return encode_batch(KVEventBatch(1.0, list(events)))


@pytest.mark.parametrize(("fields", "namespace"), CASES)
@pytest.mark.parametrize("medium", ["CPU", "DISK"])
def test_a_block_of_known_hash_has_the_known_key(fields: dict[str, Any], namespace: Namespace, medium: str) -> None:
    """Also after its copy on the GPU is gone, and for a late consumer."""
    feed = Feed(PrefixIndex())
    batches: list[list[KVEvent]] = [[chain("GPU", **fields)], chunks(medium), [removal(1, 2, 3)]]
    for events in batches:
        feed(*events)
    for index in (feed.index, late(*(payload(*events) for events in batches))):
        match = index.match(TOKENS, namespace).best
        assert match is not None
        assert (match.tokens, match.tiers["gpu"]) == (6, 0)
        assert not len(index.match(TOKENS)), "nothing in the other namespace"
        assert index.worker("a").estimate is None
        index.apply_payload("a", 0, 100, payload(removal(1, 2, 3, medium=medium)))
        assert index.worker("a").blocks == 0


def test_only_some_hashes_are_known() -> None:
    """The other blocks follow the known ones in their namespace."""
    feed = Feed(PrefixIndex())
    feed(chain("GPU", (1, 2), extra_keys=[("tenant",), None]))
    feed(chain("CPU"))
    assert held(feed.index, Namespace(salt="tenant")) == (4, 6)
    assert held(feed.index) == (0, 0)


def test_a_chunk_of_another_size_keeps_its_own_key() -> None:
    """A hash of a connector can be that of a block by chance; its chunks are divided in another way."""
    feed = Feed(PrefixIndex())
    feed(chain("GPU", **SALTED), store([1], TOKENS, 6, medium="CPU"))
    assert held(feed.index) == (0, 6)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("fields", [SALTED, ADAPTED, {"lora_name": "adapter"}, {"lora_id": 3}])
def test_unknown_first_blocks_without_keys_make_the_tier_inexact(fields: dict[str, Any], order: int) -> None:
    """If other blocks of the stream have salts or adapters, these may have them too."""
    feed = Feed(PrefixIndex())
    batches: list[list[KVEvent]] = [[chain("GPU", (11, 12, 13), **fields)], chunks()]
    batches = batches if order else batches[::-1]
    for batch in batches:
        feed(*batch)
    history = [payload(*batch) for batch in batches]
    assert feed.index.worker("a").estimate == "inexact-tiers"
    assert late(*history).worker("a").estimate == "inexact-tiers"
    feed(removal(11, 12, 13), removal(1, 2, 3, medium="CPU"))
    history.append(payload(removal(11, 12, 13), removal(1, 2, 3, medium="CPU")))
    assert late(*history).worker("a").estimate == "inexact-tiers", "what follows is no better"


@pytest.mark.parametrize(
    "events",
    [
        [chain("GPU"), *chunks()],
        [chain("GPU", **SALTED), store([11], [1, 1], 2, medium="CPU", extra_keys=[("tenant",)])],
        [chain("GPU", cache_salt="tenant"), store([11], [1, 1], 2, medium="CPU_PINNED")],
        [chain("GPU", **SALTED), store([12], [1, 1], 2, 11, medium="CPU")],
        [chain("GPU", lora_name="adapter"), store([11], [1, 1], 2, medium="CPU_PINNED")],
    ],
)
def test_a_tier_with_keys_or_without_need_of_them_is_exact(events: list[KVEvent]) -> None:
    """SGLang has fields for the salt and the adapter of each event, on all tiers."""
    feed = Feed(PrefixIndex())
    feed(*events)
    assert feed.index.worker("a").estimate is None


def certain(index: PrefixIndex) -> tuple[int, int]:
    """Return the tokens that the worker holds, and how many of them it certainly holds."""
    match = index.match(TOKENS).best
    return (0, 0) if match is None else (match.tokens, match.certain)


class Consumers:
    """Three consumers of a stream: one received all batches, one restored a snapshot, and one received the compacted
    history."""

    def __init__(self, *batches: list[KVEvent]) -> None:
        feed = Feed(PrefixIndex())
        for batch in batches:
            feed(*batch)
        file = io.BytesIO()
        feed.index.snapshot(file)
        file.seek(0)
        restored = PrefixIndex()
        restored.restore(file)
        self.all = (feed.index, restored, late(*(payload(*batch) for batch in batches)))
        assert len({index.digest("a") for index in self.all}) == 1
        self._seq = 100

    def take(self, *events: KVEvent) -> None:
        self._seq += 1
        for index in self.all:
            index.apply_payload("a", 0, self._seq, payload(*events))

    def certain(self) -> tuple[int, int]:
        """Return what all of them say (`certain`), none of which is an estimate."""
        (answer,) = {certain(index) for index in self.all}
        assert {index.worker("a").estimate for index in self.all} == {None}
        assert len({index.digest("a") for index in self.all}) == 1
        return answer


LOWER: dict[str, dict[str, Any]] = {"logical": {}, "physical": {"group_idx": 0}}


@pytest.mark.parametrize("fields", LOWER.values(), ids=LOWER)
@pytest.mark.parametrize("medium", ["CPU", "DISK", "HBM3"])
def test_after_a_clear_without_a_tier_lower_blocks_might_be_gone(medium: str, fields: dict[str, Any]) -> None:
    """vLLM announces the clear of the GPU. Whether its connector was emptied depends on the request, and is not announced."""
    stored = [chain("GPU", **fields), *chunks(medium, **fields)]
    consumers = Consumers(stored, [cleared()])
    assert consumers.certain() == (6, 0)
    consumers.take(chain("GPU", (1, 2), **fields))
    assert consumers.certain() == (6, 4), "the blocks on the GPU are certain, as always"
    consumers.take(*chunks(medium, **fields))
    assert consumers.certain() == (6, 6), "they are there again"
    consumers.take(removal(1, 2))
    assert consumers.certain() == (6, 6)


@pytest.mark.parametrize("fields", LOWER.values(), ids=LOWER)
def test_a_removal_ends_the_doubt(fields: dict[str, Any]) -> None:
    consumers = Consumers([chain("GPU", **fields), *chunks(**fields)], [cleared(), chain("GPU", (1, 2), **fields)])
    consumers.take(removal(3, medium="CPU"))
    assert consumers.certain() == (4, 4)
    consumers.take(removal(1, 2, medium="CPU"))
    assert consumers.certain() == (4, 4)
    assert [index.worker("a").uncertain for index in consumers.all] == [0, 0, 0]


@pytest.mark.parametrize(
    ("media", "clears", "expected"),
    [
        (["GPU"], [], (0, 0)),
        (["CPU_PINNED"], [], (0, 0)),
        (["CPU_PINNED", "DISK"], [], (6, 0)),
        (["CPU", "DISK"], ["CPU"], (6, 0)),
        (["CPU", "DISK"], ["CPU", "DISK"], (0, 0)),
        (["CPU", "DISK"], ["*"], (0, 0)),
        (["HBM3"], ["*"], (0, 0)),
    ],
)
def test_a_tier_is_known_again_by_its_own_clear(media: list[str], clears: list[str], expected: tuple[int, int]) -> None:
    """SGLang empties host memory with the GPU; storage stays. Our senders clear all tiers (`*`) where they know that."""
    stored: list[KVEvent] = [chain("GPU"), *(chain(medium) for medium in media)]
    consumers = Consumers(stored, [cleared()], [cleared(medium=name) for name in clears])
    assert consumers.certain() == expected


def test_a_clear_of_an_unknown_tier_without_blocks_clears_everything_and_is_an_estimate() -> None:
    """The stream can have named the cleared tier otherwise (`VRAM`, `ALL`), so no block may stay certain."""
    stored: list[KVEvent] = [chain("GPU"), *chunks(), chain("tape", (1,))]
    cases: list[tuple[list[list[KVEvent]], tuple[int, int]]] = [
        ([stored, [cleared(medium="ALL")]], (6, 0)),
        ([[chain("GPU")], [cleared(medium="VRAM", group_idx=0)]], (0, 0)),
        ([[chain("GPU")], [cleared(medium="npu:0")]], (0, 0)),
        ([stored, [cleared(medium="tape")]], (6, 6)),
        ([stored, [cleared(medium="tape")], [cleared(medium="tape")]], (6, 0)),
    ]
    for batches, expected in cases:
        consumers = Consumers(*batches)
        assert {certain(index) for index in consumers.all} == {expected}
        estimates = {index.worker("a").estimate for index in consumers.all}
        assert estimates == ({None} if expected == (6, 6) or "npu" in str(batches) else {"set-aside"})


LOCAL: dict[str, Any] = {"locality": "LOCAL"}
OWNED: dict[str, Any] = {"ownership": "engine"}
GROUPED: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}


@pytest.mark.parametrize(
    ("stored", "removed", "is_gone"),
    [
        (LOCAL, {}, True),
        ({}, LOCAL, True),
        (OWNED, LOCAL, True),
        (LOCAL | OWNED, OWNED, True),
        (GROUPED, {}, True),
        (OWNED, {"ownership": "other"}, False),
        (GROUPED, {"group_idx": 2}, False),
        ({}, {"medium": "CPU"}, False),
    ],
)
def test_a_removal_means_blocks_of_what_only_one_of_both_states(
    stored: dict[str, Any], removed: dict[str, Any], is_gone: bool
) -> None:
    """A block on the stated place is removed first. What both state must be equal."""
    consumers = Consumers([chain("GPU", **stored)], [removal(2, 3, **removed)])
    assert {certain(index) for index in consumers.all} == {(2, 2) if is_gone else (6, 6)}
    assert {index.worker("a").unknown_removals for index in consumers.all[:1]} == {0 if is_gone else 2}
    if stored is not GROUPED:
        consumers = Consumers([chain("GPU", **stored), chain(**{"medium": "GPU"} | removed)], [removal(2, 3, **removed)])
        assert consumers.certain() == (6, 6)


def test_what_follows_a_clear_is_exported_behind_it() -> None:
    """Blocks that might be gone are parents of others, and have certain copies elsewhere, and were announced by hash alone."""
    consumers = Consumers(
        [chain("GPU"), *chunks()],
        [cleared()],
        [store([4], [9, 9], 2, 3, medium="CPU"), store([5], [8, 8], 2, 2)],
        [BlockStored([1], None, [], 0, medium="GPU"), removal(2, medium="CPU")],
    )
    assert consumers.certain() == (2, 2)
    for index in consumers.all:
        match = index.match([*TOKENS, 9, 9]).best
        assert match is not None
        assert (match.tiers["gpu"], match.certain) == (2, 2)
    consumers.take(chain("CPU"))
    assert consumers.certain() == (6, 6)


def test_what_was_lost_below_the_gpu_stays_lost_after_a_clear() -> None:
    """A consumer that misses batches does not know what the CPU holds, before a clear and after it."""
    feed = Feed(PrefixIndex())
    feed(chain("GPU"))
    feed.index.apply(Gap("a", 0, 5, 6, 0))
    feed.seq = 7
    feed(cleared(), chain("GPU"))
    assert feed.index.worker("a").estimate is None, "an engine without other tiers"
    feed(*chunks())
    assert feed.index.worker("a").estimate == "inexact-tiers"
    feed(cleared(medium="CPU"))
    assert feed.index.worker("a").estimate is None


def test_a_pending_block_below_the_gpu_is_unknown_after_a_clear_also_behind_a_snapshot() -> None:
    """The clear ends all that is known of the tier, but the engine has the tier."""
    feed = Feed(PrefixIndex())
    events: list[KVEvent] = [store([5], TOKENS[:2], 2, 4, medium="CPU"), cleared()]
    feed(*events)
    file = io.BytesIO()
    feed.index.snapshot(file)
    restored = PrefixIndex()
    restored.restore(io.BytesIO(file.getvalue()))
    for index in (feed.index, restored, late(payload(*events))):
        assert index.worker("a").estimate == "inexact-tiers"
        index.apply_payload("a", 0, 100, payload(cleared(medium="CPU")))
        assert index.worker("a").estimate is None


@pytest.mark.parametrize("before", [[], [cleared()]])
def test_clears_of_tiers_end_what_first_blocks_without_keys_left_unknown(before: list[KVEvent]) -> None:
    """A block on another tier can be a copy, with the same wrong key."""
    feed = Feed(PrefixIndex())
    events = [chain("GPU", (11, 12, 13), **SALTED), *chunks(), chain("DISK")]
    feed(*events)
    for index in (feed.index, late(payload(*events))):
        for seq, (medium, expected) in enumerate({"CPU": "inexact-tiers", "DISK": None}.items(), 100):
            index.apply_payload("a", 0, seq, payload(*before, cleared(medium=medium)))
            assert index.worker("a").estimate == expected


def test_a_late_consumer_counts_copies_only_where_the_engine_names_groups() -> None:
    """Sent in place of a removed first block without keys, a sign must not name the group of blocks on the GPU."""
    group: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    events = [chain("GPU", (11, 12, 13), **SALTED, **group), *chunks(), removal(1, 2, 3, medium="CPU")]
    feed = Feed(PrefixIndex())
    feed(*events)
    for index in (feed.index, late(payload(*events))):
        index.apply_payload("a", 0, 100, payload(*chunks(), *chunks(), removal(1, 2, 3, medium="CPU")))
        assert held(index) == (0, 0)


def test_adapters_of_some_first_blocks_are_no_doubt_of_others_for_a_late_consumer() -> None:
    """The hash of a block on the CPU was known, so its lack of an adapter was too."""
    lora: dict[str, Any] = {"lora_name": "adapter"}
    batches: list[list[KVEvent]] = [
        [chain("GPU"), *chunks(), removal(1, 2, 3)],
        [chain("GPU", (11, 12), **lora), chain("CPU", (14, 15), **lora)],
    ]
    feed = Feed(PrefixIndex())
    for events in batches:
        feed(*events)
    for index in (feed.index, late(*(payload(*events) for events in batches))):
        assert index.worker("a").estimate is None


def test_a_hash_that_waits_in_two_forms_waits_once_for_a_late_consumer_too() -> None:
    events = [BlockStored([1], None, [], size, medium="CPU") for size in (0, 2)]
    feed = Feed(PrefixIndex())
    feed(*events, removal(1, medium="CPU"))
    for index in (feed.index, late(payload(*events, removal(1, medium="CPU")))):
        assert index.worker("a").orphans == 0


def test_a_late_consumer_knows_that_clears_empty_host_memory() -> None:
    """No block shows this any more. SGLang announces the adapter of each block on all tiers."""
    consumers = Consumers([chain("CPU_PINNED"), removal(1, 2, 3, medium="CPU_PINNED")])
    consumers.take(chain("GPU", (11, 12, 13), lora_name="adapter"), chain("CPU"))
    assert consumers.certain() == (6, 6)
    consumers.take(cleared())
    assert consumers.certain() == (0, 0)


@pytest.mark.parametrize("medium", ["CPU", "CPU_PINNED", "DISK", "HBM3"])
def test_a_late_consumer_knows_the_tiers_of_an_engine_without_blocks_there(medium: str) -> None:
    """A store that cannot be used hides what a tier holds, if the engine has the tier."""
    consumers = Consumers([chain("GPU"), chain(medium)], [removal(1, 2, 3, medium=medium)])
    consumers.take(store([7], [1], 2, medium="DISK"), cleared())
    assert {index.worker("a").estimate for index in consumers.all} == {"inexact-tiers"}


@pytest.mark.parametrize("medium", ["CPU", "DISK", "HBM3"])
def test_what_one_clear_left_unknown_stays_unknown_after_more_clears(medium: str) -> None:
    """The clear drops a pending block on the CPU, so only the CPU is unknown until its own clear."""
    consumers = Consumers([store([5], TOKENS[:2], 2, 4, medium="CPU"), chain(medium), cleared()])
    consumers.take(removal(1, 2, 3, medium=medium), cleared())
    assert {index.worker("a").estimate for index in consumers.all} == {"inexact-tiers"}
    consumers.take(cleared(medium="CPU"))
    assert consumers.certain() == (0, 0)


@pytest.mark.parametrize("medium", ["CPU", "DISK", "HBM3"])
def test_tiers_that_no_event_has_named_can_be_unknown(medium: str) -> None:
    """The missed store can have been one on a tier that the engine names only later."""
    consumers = Consumers([store([7], [1], 2), cleared()])
    assert consumers.certain() == (0, 0)
    consumers.take(chain(medium))
    assert {index.worker("a").estimate for index in consumers.all} == {"inexact-tiers"}


def test_host_memory_that_a_clear_has_emptied_is_known() -> None:
    """Storage is not."""
    consumers = Consumers([chain("CPU_PINNED"), removal(1, 2, 3, medium="CPU_PINNED"), store([7], [1], 2), cleared()])
    consumers.take(chain("CPU_PINNED"))
    assert consumers.certain() == (6, 6)
    consumers.take(chain("DISK"))
    assert {index.worker("a").estimate for index in consumers.all} == {"inexact-tiers"}


def test_a_store_that_cannot_be_used_names_its_tier() -> None:
    """The first store on the CPU has too few tokens. After the clear, the index does not know what the CPU holds."""
    consumers = Consumers([chain("GPU"), store([7], [1], 2, medium="CPU"), cleared()])
    assert {index.worker("a").estimate for index in consumers.all} == {"inexact-tiers"}


def test_a_snapshot_replaces_what_a_consumer_knows_of_all_tiers() -> None:
    """A late consumer that holds blocks on the CPU gets the compacted history of the same stream."""
    feed = Feed(PrefixIndex())
    history: list[list[KVEvent]] = [[chain("GPU"), *chunks()], [removal(2, 3, medium="CPU")]]
    compactor = Compactor.create()
    assert compactor is not None
    for batch in history:
        compactor.append(payload(*batch))
    feed(*history[0])
    pieces = compactor.snapshot_pieces(1 << 20)
    assert pieces is not None
    for part in encode_snapshot(pieces, 1.0, 0, encode_batch, 1 << 20) or []:
        feed.index.apply_payload("a", 0, 10, part)
    expected = PrefixIndex()
    for seq, batch in enumerate(history):
        expected.apply_payload("a", 0, seq, payload(*batch))
    assert feed.index.digest("a") == expected.digest("a")
    assert feed.index.worker("a").estimate is None
