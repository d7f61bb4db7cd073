"""`Compactor`: a consumer that applies its snapshot has the same state as one that received every batch."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from index_cases import (
    Adversary,
    Choices,
    Engine,
    Stream,
    Traffic,
    blocks_of,
    cleared,
    count_orphans,
    encode_in_dialect,
    namespace,
    removal,
    store,
    tokens_by_level,
)
from index_keys import Scope
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.recording import live_batches, recorded_endpoints
from kvevents.stream import Batch
from kvevents.wire import Dialect, decode_batch, dialects, encode_batch
from wire_cases import CAPTURES, GOLDENS, Golden

BEGIN: list[KVEvent] = [AllBlocksCleared(), AllBlocksCleared({"medium": "*"})]
"""The first events of a snapshot, after which nothing is held on any tier."""

LOST: list[KVEvent] = [store([1], [0, 0], 1), AllBlocksCleared()]
"""The next events after a clear that followed an incomplete history. Consumers conclude that tiers can have unknown blocks."""

WORKER = ("a", 0)
SLACK = 4096
"""Bytes that a history may use when no block is live: rules of groups, names of tiers."""
CHUNKS = 2 * 24 * 1024
"""Memory that is reserved for the next blocks and their tokens while there are any."""
histories = st.binary(min_size=300, max_size=2500)


def make_compactor() -> Compactor:
    found = Compactor.create()
    assert found is not None
    return found


def make_index(payloads: Sequence[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    for seq, payload in enumerate(payloads):
        assert index.apply_payload(WORKER, 0, seq, payload).status == "applied"
    return index


def compact(payloads: Sequence[bytes]) -> Compactor:
    found = make_compactor()
    for payload in payloads:
        found.append(payload)
    return found


def take_snapshot(compactor: Compactor, ts: float, rank: int | None = None) -> KVEventBatch | None:
    """Return the snapshot as one batch."""
    pieces, batches = compactor.snapshot_pieces(1 << 62), []

    def collect(batch: KVEventBatch) -> bytes:
        batches.append(batch)
        return b""

    if pieces is not None:
        encode_snapshot(pieces, ts, rank, collect, 1 << 62)
    return batches[0] if batches else None


def encode_collapsed(compactor: Compactor, dialect: Dialect | None = None) -> bytes | None:
    batch = take_snapshot(compactor, 1.0)
    return None if batch is None else encode_batch(batch, dialect)


Prompt = tuple[list[int], Scope]


def has_digests(event: KVEvent) -> bool:
    return any(getattr(event, name, None) for name in ("block_digests", "parent_block_digest"))


def check_equal(one: PrefixIndex, other: PrefixIndex, prompts: Sequence[Prompt]) -> None:
    assert blocks_of(one, WORKER) == blocks_of(other, WORKER)
    assert one.digest(WORKER) == other.digest(WORKER)
    assert count_orphans(one) == count_orphans(other)
    for tokens, scope in prompts:
        first, second = (index.match(tokens, namespace(scope)) for index in (one, other))
        assert tokens_by_level(first) == tokens_by_level(second)
        if one.worker(WORKER).estimate == other.worker(WORKER).estimate:
            assert all(late.certain <= early.certain for early, late in zip(first, second, strict=True)), "not more certain"


def check_cuts(
    payloads: Sequence[bytes], cuts: Sequence[int], prompts: Sequence[Prompt], dialect: Dialect | None = None
) -> int:
    """Return how many of the cuts had a snapshot; all of these are exact, at once and after every later batch."""
    compactor, exact_cuts = make_compactor(), 0
    for at, payload in enumerate(payloads):
        if at in cuts:
            first = encode_collapsed(compactor, dialect)
            if first is not None:
                exact_cuts += 1
                check_equal(make_index([*payloads[:at], *([b"\x92\x01\x90"] if not at else [])]), make_index([first]), prompts)
                check_equal(make_index(payloads), make_index([first, *payloads[at:]]), prompts)
        compactor.append(payload)
    return exact_cuts


def describe_batches(batches: Sequence[Batch]) -> str:
    """Return the events without fields that are None."""
    lines = []
    for at, batch in enumerate(batches):
        for event in batch.events:
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            lines.append(
                f"{at} {type(event).__name__} { {name: value for name, value in fields.items() if value is not None} }"
            )
    return "\n".join(lines)


# --- histories with all features ----------------------------------------------------------------------------------------------


def draw_batches(choices: Choices, hashing: str | None = None) -> tuple[Stream, Adversary, list[Batch]]:
    adversary = Adversary(choices)
    stream = adversary.streams[0]
    adversary.streams = [stream]
    stream.hashing = hashing or stream.hashing
    batches = []
    while not choices.is_used_up:
        batches.append(adversary._batch(stream, [adversary._event(stream) for _ in range(1 + choices.byte() % 3)]))
    return stream, adversary, batches


def make_prompts(adversary: Adversary, stream: Stream) -> list[Prompt]:
    prompts: list[Prompt] = [adversary.prompt() for _ in range(4)]
    for path in stream.paths[-12:]:
        tokens = [token for page in path.pages for token in page.tokens]
        prompts.append((tokens, Scope(None, path.scope.lora, path.scope.salt)))
    return prompts


@settings(max_examples=60)
@given(histories, st.data())
def test_a_snapshot_is_exact_at_every_cut_of_a_history(data: bytes, drawn: st.DataObject) -> None:
    """Histories have equal hashes, removed and restored middle blocks, orphans, tiers, groups, sparse groups, LoRA, salts,
    scoped clears, EAGLE and keys, in any dialect. Every snapshot is exact, and with distinct hashes there always is one."""
    choices = Choices(data)
    hashing = drawn.draw(st.sampled_from(["opaque", "opaque", "page", "chaos"]))
    stream, adversary, batches = draw_batches(choices, hashing)
    payloads = [encode_in_dialect(batch, data[at % len(data)]) for at, batch in enumerate(batches)]
    note(describe_batches(batches))
    cuts = drawn.draw(st.lists(st.integers(0, max(len(payloads) - 1, 0)), min_size=1, max_size=4, unique=True))
    exact_cuts = check_cuts(payloads, cuts, make_prompts(adversary, stream))
    # A hash with tokens in one store and a key in another identifies two blocks.
    if hashing == "opaque" and not stream.keyed and not any(has_digests(event) for batch in batches for event in batch.events):
        assert exact_cuts == len(cuts)


@settings(max_examples=60)
@given(histories, st.data())
def test_native_payloads_have_the_same_state(data: bytes, drawn: st.DataObject) -> None:
    """Payloads within their limit lead an empty compactor, and an index, to the same state. If no two blocks share a hash, the
    events are equal too."""
    hashing = drawn.draw(st.sampled_from(["opaque", "opaque", "page", "chaos"]))
    stream, _, batches = draw_batches(Choices(data), hashing)
    payloads = [encode_in_dialect(batch, data[at % len(data)]) for at, batch in enumerate(batches)]
    cut = drawn.draw(st.integers(0, len(payloads)))
    compactor, limit = compact(payloads[:cut]), drawn.draw(st.sampled_from([1, 150, 700, 1 << 20]))
    written = native_of(compactor).payloads(limit, 2.0)
    if written is None:
        return
    again = make_compactor()
    for payload in written:
        assert len(payload) <= limit or is_single(payload)
        native_of(again).apply(payload, own=True)
    assert (again.live, again.unavailable_reason) == (compactor.live, compactor.unavailable_reason)
    if hashing == "opaque" and not stream.keyed:
        assert native_of(again).payloads(limit, 2.0) == written
    check_equal(make_index([*payloads, b"\x92\x01\x90"]), make_index([*written, *payloads[cut:]]), [])


def native_of(compactor: Compactor) -> Any:
    return compactor._native


def is_single(payload: bytes) -> bool:
    counts = [
        len(event.block_hashes) for event in decode_batch(payload).batch.events if not isinstance(event, AllBlocksCleared)
    ]
    return counts in ([], [0], [1])


def test_payloads_begin_with_a_clear_and_have_the_given_time() -> None:
    compactor = compact([encode_events(store(range(1, 9), range(16), 2))])
    clear, one = (decode_batch(payload).batch for payload in native_of(compactor).payloads(1 << 20, 7.5))
    assert (clear.ts, clear.events) == (7.5, BEGIN)
    assert (one.ts, one.events) == (7.5, [store(range(1, 9), range(16), 2)])
    several = [decode_batch(payload).batch.events for payload in native_of(compactor).payloads(120, 7.5)]
    assert [type(event) for events in several for event in events] == [AllBlocksCleared] * 2 + [BlockStored] * (
        len(several) - 1
    )
    assert len(several) > 2


@pytest.mark.parametrize(("limit", "ts"), [(0, 1.0), (10, -1.0), (10, 1e12), (10, float("nan"))])
def test_limit_and_time_of_payloads_are_checked(limit: int, ts: float) -> None:
    with pytest.raises(ValueError, match="limit" if not limit else "ts"):
        native_of(make_compactor()).payloads(limit, ts)


def test_a_partial_history_stays_partial_until_everything_is_cleared() -> None:
    """The known state is still returned. Neither the clear of a tier nor an invalid history resets `partial`."""
    compactor = compact([encode_events(store([1], [1, 2], 2))])
    assert not native_of(compactor).partial
    native_of(compactor).mark_partial()
    compactor.append(encode_events(store([2], [3, 4], 2, 1), cleared(medium="CPU")))
    assert (native_of(compactor).partial, compactor.live, native_of(compactor).nodes) == (True, 2, 2)
    compactor.append(b"\xc1")
    assert (native_of(compactor).partial, compactor.unavailable_reason) == (True, "payloads")
    compactor.append(encode_events(AllBlocksCleared(), store([3], [3, 4], 2)))
    assert (native_of(compactor).partial, compactor.live) == (False, 1)


@settings(max_examples=40)
@given(histories)
def test_extend_equals_append_of_each_payload(data: bytes) -> None:
    """Some payloads can be decoded only by Python, and some by neither decoder."""
    choices = Choices(data)
    _, _, batches = draw_batches(choices)
    payloads = [encode_in_dialect(batch, data[at % len(data)]) for at, batch in enumerate(batches)]
    for at in range(0, len(payloads), 5):
        payloads[at] = (b"\xc1", payloads[at][:-1], add_unknown_fields(batches[at]))[data[at % len(data)] % 3]
    each, many = compact(payloads), make_compactor()
    cut = data[0] % (len(payloads) + 1)
    numbered = list(enumerate(payloads))
    many.extend(numbered[:cut])
    many.extend(numbered[cut:])
    assert (each.live, each.unavailable_reason, take_snapshot(each, 1.0)) == (
        many.live,
        many.unavailable_reason,
        take_snapshot(many, 1.0),
    )


def add_unknown_fields(batch: Batch) -> bytes:
    """Return the batch with an unknown field in each event, which only Python can decode."""
    events = [
        msgspec.structs.replace(event, unknown_fields={**(event.unknown_fields or {}), "tomorrow": 1}) for event in batch.events
    ]
    return encode_batch(KVEventBatch(batch.ts, events, batch.rank), dialects()[12])


@settings(max_examples=30)
@given(histories)
def test_memory_returns_to_the_baseline(data: bytes) -> None:
    """This holds after scoped clears of every tier, and after a clear of everything."""
    choices = Choices(data)
    _, _, batches = draw_batches(choices)
    compactor = compact([encode_in_dialect(batch, 0) for batch in batches])
    for medium in ("gpu", "cpu", "disk", "TAPE"):
        compactor.append(encode_batch(KVEventBatch(1.0, [cleared(medium=medium)])))
    native_compactor: Any = compactor._native
    assert (native_compactor.live, native_compactor.nodes) == (0, 0)
    assert compactor.unavailable_reason in {None, "digests"}
    assert native_compactor.bytes <= 4 * SLACK
    compactor.append(encode_batch(KVEventBatch(1.0, [AllBlocksCleared()])))
    assert native_compactor.bytes <= 2 * SLACK


def test_memory_of_removed_blocks_is_released() -> None:
    """10,000 blocks are stored and removed in another order, by the hundred, with copies on two tiers; one block remains."""
    compactor, rng = make_compactor(), random.Random(3)
    compactor.append(encode_events(store([1], [1, 2], 2)))
    one = compactor.bytes
    live: list[int] = []
    for first in range(100, 10_100, 100):
        hashes = list(range(first, first + 100))
        tokens = [token for value in hashes for token in (value, value + 1)]
        compactor.append(encode_events(store(hashes, tokens, 2), store(hashes, [], 0, medium="CPU")))
        live += hashes
        removed = rng.sample(live, 90)
        compactor.append(encode_events(removal(*removed), removal(*removed, medium="CPU")))
        live = sorted(set(live) - set(removed))
    assert compactor.live == len(live) + 1
    compactor.append(encode_events(removal(*live), removal(*live, medium="CPU")))
    assert compactor.live == 1
    assert compactor.bytes <= one + CHUNKS + SLACK


def encode_events(*events: KVEvent) -> bytes:
    return encode_batch(KVEventBatch(1.0, list(events)))


# --- engines ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (None, 9), (None, 6, 17)], ids=repr)
@pytest.mark.parametrize("dialect", dialects()[10:13], ids=str)
def test_a_snapshot_of_an_engines_history_is_exact_at_every_cut(windows: tuple[int | None, ...], dialect: Dialect) -> None:
    """vLLM's cache runs under load, with salts, evictions, resets and windows, in its own dialect. Every fifth batch is a cut,
    compared at once and after all later batches."""
    engine = Engine(7, 4, 40 * len(windows), windows)
    traffic = Traffic(engine, Choices(random.Random(11).randbytes(4000)), salts=(None, None, "t"), longest=56)
    payloads, prompts = [], []
    for number in range(60):
        if number % 25 == 24:
            traffic.drain()
            engine.reset()
        tokens, salt = traffic.arrive()
        prompts.append((tokens, Scope(salt=salt)))
        traffic.admit(tokens, salt)
        payloads.append(encode_batch(KVEventBatch(1.0, engine.take_events(), 0), dialect))
    compactor = make_compactor()
    complete_index = make_index(payloads)
    for at, payload in enumerate(payloads):
        compactor.append(payload)
        if at % 5:
            continue
        first = encode_collapsed(compactor, dialect)
        assert first is not None
        check_equal(make_index(payloads[: at + 1]), make_index([first]), prompts[-8:])
        check_equal(complete_index, make_index([first, *payloads[at + 1 :]]), prompts[-20:])


@pytest.mark.parametrize("stream", recorded_endpoints(CAPTURES), ids=lambda stream: stream.run)
def test_a_snapshot_of_a_recorded_run_is_exact_at_every_cut(stream: Any) -> None:
    """In two runs of vLLM 0.32 in its own dialect, the state is compared at every 60th batch and after all later ones. The
    snapshot is hardly larger than the batches that it contains."""
    payloads = [live.payload for live in live_batches(CAPTURES, stream.run, stream.endpoint)]
    dialect = next(row for row in dialects() if row.name == "vllm-0.30.0")
    compactor, complete_index, before = make_compactor(), make_index(payloads), 0
    for at, payload in enumerate(payloads):
        compactor.append(payload)
        before += len(payload)
        if at % 60 == 0:
            first = encode_collapsed(compactor, dialect)
            assert first is not None
            assert len(first) <= before + 200
            check_equal(make_index(payloads[: at + 1]), make_index([first]), [])
            check_equal(complete_index, make_index([first, *payloads[at + 1 :]]), [])
    assert compactor.unavailable_reason is None


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_a_golden_payload_survives_compaction(golden: Golden) -> None:
    compactor = compact([golden.payload])
    first = encode_collapsed(compactor)
    if first is None:
        assert (compactor.unavailable_reason, "bytes_hashes" in golden.case) == ("digests", True)
        return
    check_equal(make_index([golden.payload]), make_index([first]), [(list(range(100, 112)), Scope())])


# --- long stores --------------------------------------------------------------------------------------------------------------


class Chains:
    """A cache with stores of 1 to 600 blocks: chains grow, share beginnings, lose blocks anywhere, and are stored again."""

    def __init__(self, choices: random.Random) -> None:
        self._random = choices
        self._paths: list[list[int]] = []
        self._live: set[int] = set()
        self._next = 0

    def batch(self) -> bytes:
        return encode_events(*[self._event() for _ in range(self._random.choice((1, 1, 4)))])

    def _event(self) -> KVEvent:
        return self._random.choice(
            (self._grow, self._grow, self._store_again, self._remove_tail, self._remove_some, self._remove_oldest)
        )()

    def _grow(self) -> KVEvent:
        """Add a chain, or a branch of another one."""
        base = self._random.choice([*self._paths[-8:], []])
        base = base[: self._random.choice((len(base), len(base), len(base) // 2))]
        count = self._random.choice((1, 1, 3, 40, 64, 65, 600))
        fresh = list(range(self._next + 1, self._next + 1 + count))
        self._next += count
        if base and base[-1] not in self._live:
            base = []
        self._paths.append(base + fresh)
        return self._store(fresh, base[-1] if base else None)

    def _store_again(self) -> KVEvent:
        """Store the removed blocks of a chain again after its remaining ones."""
        path = self._random.choice(self._paths or [[1]])
        first = next((at for at, value in enumerate(path) if value not in self._live), len(path) - 1)
        return self._store(path[first:], path[first - 1] if first else None)

    def _store(self, hashes: list[int], parent: int | None) -> KVEvent:
        self._live.update(hashes)
        return store(hashes, [value % 5_000 + at for value in hashes for at in (0, 1)], 2, parent)

    def _remove(self, hashes: list[int]) -> KVEvent:
        removed = [value for value in hashes if value in self._live]
        self._live.difference_update(removed)
        return removal(*removed)

    def _remove_tail(self) -> KVEvent:
        path = self._random.choice(self._paths or [[1]])
        return self._remove(path[-self._random.randint(1, len(path)) :][::-1])

    def _remove_some(self) -> KVEvent:
        path = self._random.choice(self._paths or [[1]])
        return self._remove(self._random.sample(path, self._random.randint(0, len(path))))

    def _remove_oldest(self) -> KVEvent:
        return self._remove(self._paths.pop(0) if len(self._paths) > 4 else [])


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), st.integers(20, 100), st.integers(2, 30))
def test_a_snapshot_of_long_stores_is_exact_at_every_cut(seed: int, count: int, every: int) -> None:
    """Snapshots of snapshots, and a snapshot of everything, lead an index to the state of a consumer that saw every batch."""
    chains, collapsed_often, collapsed_once, complete_index = (
        Chains(random.Random(seed)),
        make_compactor(),
        make_compactor(),
        PrefixIndex(),
    )
    for seq in range(count):
        payload = chains.batch()
        collapsed_often.append(payload)
        collapsed_once.append(payload)
        complete_index.apply_payload(WORKER, 0, seq, payload)
        if seq % every == every - 1:
            first = encode_collapsed(collapsed_often)
            assert first is not None
            assert make_index([first]).digest(WORKER) == complete_index.digest(WORKER)
        assert (collapsed_often.live, native_of(collapsed_often).nodes) == (
            collapsed_once.live,
            native_of(collapsed_once).nodes,
        )
    first = encode_collapsed(collapsed_once)
    assert first is not None
    assert collapsed_once.live == complete_index.stats().blocks
    assert make_index([first]).digest(WORKER) == complete_index.digest(WORKER)
    for compactor in (collapsed_often, collapsed_once):
        compactor.append(encode_events(cleared(medium="GPU")))
        assert (compactor.live, native_of(compactor).nodes) == (0, 0)
        assert compactor.bytes <= 4 * SLACK


# --- events of a snapshot -----------------------------------------------------------------------------------------------------


def test_a_chain_is_one_store_even_if_it_was_stored_block_by_block() -> None:
    """The chain is stored block by block, with a copy on another tier. The snapshot has one store for each tier."""
    compactor = make_compactor()
    for value in range(1, 200):
        event = store([value], [value % 100, 2], 2, value - 1 or None)
        compactor.append(encode_events(event))
        compactor.append(encode_events(store([value], [value % 100, 2], 2, value - 1 or None, medium="CPU")))
    batch = take_snapshot(compactor, 5.0, 3)
    assert batch is not None
    assert (batch.ts, batch.data_parallel_rank) == (5.0, 3)
    assert [type(event) for event in batch.events] == [AllBlocksCleared, AllBlocksCleared, BlockStored, BlockStored]
    assert [event.medium for event in batch.events[2:]] == ["GPU", "CPU"]  # type: ignore[union-attr]
    assert len(encode_batch(batch)) < 2 * (199 * (3 + 2)) + 500


def test_removed_ancestors_are_stored_and_removed_in_the_snapshot() -> None:
    compactor = compact([encode_events(store([1, 2, 3], [1, 2, 3, 4, 5, 6], 2), removal(1), removal(2))])
    batch = take_snapshot(compactor, 1.0)
    assert batch is not None
    assert batch.events[2:] == [
        store([1, 2], [1, 2, 3, 4], 2),
        store([3], [5, 6], 2, 2),
        removal(2, 1),
    ]
    assert compactor.live == 1


def test_an_orphan_keeps_its_unknown_parent_in_the_snapshot() -> None:
    orphan = store([5, 6], [1, 2, 3, 4], 2, 4, lora_name="x", extra_keys=[["x"], ["x", ["image", 0]]])
    batch = take_snapshot(compact([encode_events(orphan)]), 1.0)
    assert batch is not None
    assert batch.events == [*BEGIN, orphan]


def test_lookahead_tokens_stay_in_the_snapshot() -> None:
    """A consumer knows by them that the hash of a block covers tokens of the next one."""
    event = store([1, 2], [1, 2, 3, 4], 2, lookahead_token_ids=[[3], []])
    batch = take_snapshot(compact([encode_events(event)]), 1.0)
    assert batch is not None
    assert batch.events == [*BEGIN, event]


def test_groups_without_blocks_stay_in_the_snapshot() -> None:
    """A group whose blocks are all removed still counts in later matches."""
    window: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
    first = [
        encode_events(store([1], [1, 2], 2, group_idx=0), store([1], [1, 2], 2, **window)),
        encode_events(removal(1, group_idx=1), removal(1, group_idx=0)),
    ]
    later = encode_events(store([1], [1, 2], 2, group_idx=0))
    snapshot = encode_collapsed(compact(first))
    assert snapshot is not None
    complete_index, joined = make_index([*first, later]), make_index([snapshot, later])
    assert tokens_by_level(complete_index.match([1, 2, 3])) == tokens_by_level(joined.match([1, 2, 3])) == {}
    check_equal(complete_index, joined, [([1, 2, 3], Scope())])


def test_the_largest_block_size_of_a_group_stays_in_the_snapshot() -> None:
    """A store of a part of a block (`cache_partial_block`) states the size of the part."""
    window: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
    first = [
        encode_events(store([1], [1, 2], 2, group_idx=0), store([1], [], 2, **window)),
        encode_events(store([2], [], 1, **window), removal(1, group_idx=1)),
    ]
    snapshot = encode_collapsed(compact(first))
    assert snapshot is not None
    complete_index, joined = make_index(first), make_index([snapshot])
    check_equal(complete_index, joined, [([1, 2, 3], Scope())])
    assert joined.workers()[0].estimate == complete_index.workers()[0].estimate


def test_too_many_orphans_make_the_history_unavailable() -> None:
    """There is no snapshot and hardly any memory in use; after a clear the compactor works again."""
    compactor = make_compactor()
    compactor.append(encode_events(store(range(10, 65_600), [1] * 65_590, 1, 5)))
    assert (compactor.unavailable_reason, take_snapshot(compactor, 1.0), compactor.live) == ("orphans", None, 0)
    compactor.append(encode_events(store([1], [1], 1)))
    compactor.append(encode_events(AllBlocksCleared(), store([2], [2], 1)))
    assert compactor.unavailable_reason is None
    batch = take_snapshot(compactor, 1.0)
    assert batch is not None
    assert batch.events == [*BEGIN, *LOST, store([2], [2], 1)]


def test_a_heartbeat_does_not_change_the_snapshot() -> None:
    """The heartbeat is ignored; the rest of its batch is applied."""
    heartbeat_event = BlockRemoved([], heartbeat=Heartbeat("0" * 32, 5.0))
    payload = encode_events(store([1], [1, 2], 2), heartbeat_event)
    compactor = make_compactor()
    compactor.append(payload)
    batch = take_snapshot(compactor, 1.0)
    assert batch is not None
    assert batch.events == [*BEGIN, store([1], [1, 2], 2)]


def test_blocks_with_announced_keys_keep_their_keys() -> None:
    """These blocks have no tokens and parents; blocks of one placement share an event, and a child with tokens follows."""
    keyed = [store([at, at + 1], [], 16, at - 1, block_keys=[9 * at, 2**64 - at]) for at in (1, 3, 5)]
    child = store([9], [1, 2], 2, 4)
    batch = take_snapshot(compact([encode_events(*keyed, child, removal(2))]), 1.0)
    assert batch is not None
    keys = [9, 27, 2**64 - 3, 45, 2**64 - 5]
    assert batch.events == [*BEGIN, store([1, 3, 4, 5, 6], [], 16, block_keys=keys), child]


@pytest.mark.parametrize("reason", ["payloads", "digests"])
def test_an_invalid_history_is_unavailable_until_a_clear(reason: str) -> None:
    compactor = compact([encode_events(store([1], [1], 1))])
    digest: Any = b"d" * 32
    compactor.append(b"\xc1" if reason == "payloads" else encode_events(store([digest], [1], 1)))
    compactor.append(encode_events(store([2], [2], 1)))
    assert (compactor.unavailable_reason, take_snapshot(compactor, 1.0)) == (reason, None)
    compactor.append(encode_events(AllBlocksCleared(), store([3], [3], 1)))
    assert take_snapshot(compactor, 1.0) == KVEventBatch(1.0, [*BEGIN, *LOST, store([3], [3], 1)])


def test_without_the_native_module_there_is_no_compactor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvevents_native._native", None)
    assert Compactor.create() is None
