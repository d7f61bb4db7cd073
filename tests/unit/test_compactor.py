"""`Compactor`: a consumer that applies its snapshot knows the same as one that saw every batch."""

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
    answer,
    blocks_of,
    cleared,
    encode_in_dialect,
    namespace,
    removal,
    store,
    waiting_of,
)
from index_keys import Scope
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import Compactor, encode_snapshot
from kvevents.recording import live_batches, recorded_endpoints
from kvevents.stream import Batch
from kvevents.wire import Dialect, decode_batch, dialects, encode_batch
from wire_cases import CAPTURES, GOLDENS, Golden

WORKER = ("a", 0)
SLACK = 4096
"""Bytes that a history may keep when nothing is live: rules of groups, names of tiers."""
CHUNKS = 2 * 24 * 1024
"""Memory that is kept for the next blocks, and their tokens, while there are any."""
histories = st.binary(min_size=300, max_size=2500)


def history() -> Compactor:
    found = Compactor.create()
    assert found is not None
    return found


def index_of(payloads: Sequence[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    for seq, payload in enumerate(payloads):
        assert index.apply_payload(WORKER, 0, seq, payload).status == "applied"
    return index


def compactor_of(payloads: Sequence[bytes]) -> Compactor:
    found = history()
    for payload in payloads:
        found.append(payload)
    return found


def snapshot_of(kept: Compactor, ts: float, rank: int | None = None) -> KVEventBatch | None:
    """Return the snapshot as one batch."""
    events, batches = kept.events(), []

    def keep(batch: KVEventBatch) -> bytes:
        batches.append(batch)
        return b""

    if events is not None:
        encode_snapshot(events, ts, rank, keep, 1 << 62)
    return batches[0] if batches else None


def collapsed(kept: Compactor, dialect: Dialect | None = None) -> bytes | None:
    batch = snapshot_of(kept, 1.0)
    return None if batch is None else encode_batch(batch, dialect)


Prompt = tuple[list[int], Scope]


def has_digests(event: KVEvent) -> bool:
    return any(getattr(event, name, None) for name in ("block_digests", "parent_block_digest"))


def same(one: PrefixIndex, other: PrefixIndex, prompts: Sequence[Prompt]) -> None:
    assert blocks_of(one, WORKER) == blocks_of(other, WORKER)
    assert one.digest(WORKER) == other.digest(WORKER)
    assert waiting_of(one) == waiting_of(other)
    for tokens, scope in prompts:
        assert answer(one.match(tokens, namespace(scope))) == answer(other.match(tokens, namespace(scope)))


def check_cuts(
    payloads: Sequence[bytes], cuts: Sequence[int], prompts: Sequence[Prompt], dialect: Dialect | None = None
) -> int:
    """Return how many of the cuts had a snapshot; all of these are exact, at once and after every later batch."""
    kept, exact = history(), 0
    for at, payload in enumerate(payloads):
        if at in cuts:
            first = collapsed(kept, dialect)
            if first is not None:
                exact += 1
                same(index_of([*payloads[:at], *([b"\x92\x01\x90"] if not at else [])]), index_of([first]), prompts)
                same(index_of(payloads), index_of([first, *payloads[at:]]), prompts)
        kept.append(payload)
    return exact


def describe(batches: Sequence[Batch]) -> str:
    """Return events without fields that have no meaning."""
    lines = []
    for at, batch in enumerate(batches):
        for event in batch.events:
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            lines.append(
                f"{at} {type(event).__name__} { {name: value for name, value in fields.items() if value is not None} }"
            )
    return "\n".join(lines)


# --- histories with everything ------------------------------------------------------------------------------------------------


def batches_of(choices: Choices, hashing: str | None = None) -> tuple[Stream, Adversary, list[Batch]]:
    adversary = Adversary(choices)
    stream = adversary.streams[0]
    adversary.streams = [stream]
    stream.hashing = hashing or stream.hashing
    batches = []
    while not choices.over:
        batches.append(adversary._batch(stream, [adversary._event(stream) for _ in range(1 + choices.byte() % 3)]))
    return stream, adversary, batches


def prompts_of(adversary: Adversary, stream: Stream) -> list[Prompt]:
    prompts: list[Prompt] = [adversary.prompt() for _ in range(4)]
    for path in stream.paths[-12:]:
        tokens = [token for page in path.pages for token in page.tokens]
        prompts.append((tokens, Scope(None, path.scope.lora, path.scope.salt)))
    return prompts


@settings(max_examples=60)
@given(histories, st.data())
def test_a_snapshot_is_exact_wherever_history_is_cut(data: bytes, drawn: st.DataObject) -> None:
    """Histories have equal hashes, removed and restored middle blocks, orphans, tiers, groups, sparse groups, LoRA, salts,
    scoped clears, EAGLE and keys, in any dialect. Every snapshot is exact, and with distinct hashes there always is one."""
    choices = Choices(data)
    hashing = drawn.draw(st.sampled_from(["opaque", "opaque", "page", "chaos"]))
    stream, adversary, batches = batches_of(choices, hashing)
    payloads = [encode_in_dialect(batch, data[at % len(data)]) for at, batch in enumerate(batches)]
    note(describe(batches))
    cuts = drawn.draw(st.lists(st.integers(0, max(len(payloads) - 1, 0)), min_size=1, max_size=4, unique=True))
    exact = check_cuts(payloads, cuts, prompts_of(adversary, stream))
    # A hash that came with tokens once and with a key another time stands for two blocks.
    if hashing == "opaque" and not stream.keyed and not any(has_digests(event) for batch in batches for event in batch.events):
        assert exact == len(cuts)


@settings(max_examples=60)
@given(histories, st.data())
def test_native_payloads_have_the_same_state(data: bytes, drawn: st.DataObject) -> None:
    """Payloads within their limit lead an empty compactor, and an index, to the same state. If no two blocks share a hash, the
    events are equal too."""
    hashing = drawn.draw(st.sampled_from(["opaque", "opaque", "page", "chaos"]))
    stream, _, batches = batches_of(Choices(data), hashing)
    payloads = [encode_in_dialect(batch, data[at % len(data)]) for at, batch in enumerate(batches)]
    cut = drawn.draw(st.integers(0, len(payloads)))
    kept, limit = compactor_of(payloads[:cut]), drawn.draw(st.sampled_from([1, 150, 700, 1 << 20]))
    written = native(kept).payloads(limit, 2.0)
    assert (written is None) == (kept.events() is None)
    if written is None:
        return
    again = history()
    for payload in written:
        assert len(payload) <= limit or alone(payload)
        native(again).apply(payload, own=True)
    assert (again.live, again.unavailable_reason) == (kept.live, kept.unavailable_reason)
    if hashing == "opaque" and not stream.keyed:
        assert again.events() == kept.events()
    same(index_of([*payloads, b"\x92\x01\x90"]), index_of([*written, *payloads[cut:]]), [])


def native(kept: Compactor) -> Any:
    return kept._native


def alone(payload: bytes) -> bool:
    (event,) = decode_batch(payload).batch.events
    return isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= 1


def test_payloads_begin_with_a_clear_and_have_the_given_time() -> None:
    kept = compactor_of([payload_of(store(range(1, 9), range(16), 2))])
    one = decode_batch(native(kept).payloads(1 << 20, 7.5)[0]).batch
    assert (one.ts, one.events) == (7.5, [AllBlocksCleared(), store(range(1, 9), range(16), 2)])
    several = [decode_batch(payload).batch.events for payload in native(kept).payloads(120, 7.5)]
    assert [type(event) for events in several for event in events] == [AllBlocksCleared] + [BlockStored] * (len(several) - 1)
    assert len(several) > 2


@pytest.mark.parametrize(("limit", "ts"), [(0, 1.0), (10, -1.0), (10, 1e12), (10, float("nan"))])
def test_limit_and_time_of_payloads_are_checked(limit: int, ts: float) -> None:
    with pytest.raises(ValueError, match="limit" if not limit else "ts"):
        native(history()).payloads(limit, ts)


def test_a_gap_is_noted_until_everything_is_cleared() -> None:
    """The known state is still returned; a clear of one tier, or an invalid history, does not end the note."""
    kept = compactor_of([payload_of(store([1], [1, 2], 2))])
    assert not native(kept).partial
    native(kept).mark_partial()
    kept.append(payload_of(store([2], [3, 4], 2, 1), cleared(medium="CPU")))
    assert (native(kept).partial, kept.live, len(native(kept).events())) == (True, 2, 1)
    kept.invalidate("payloads")
    assert native(kept).partial
    kept.append(payload_of(AllBlocksCleared(), store([3], [3, 4], 2)))
    assert (native(kept).partial, kept.live) == (False, 1)
    native(kept).mark_partial()
    kept.clear()
    assert not native(kept).partial


@settings(max_examples=40)
@given(histories)
def test_extend_is_append_for_each(data: bytes) -> None:
    """Some payloads can be decoded by Python only, and some by neither."""
    choices = Choices(data)
    _, _, batches = batches_of(choices)
    payloads = [encode_in_dialect(batch, data[at % len(data)]) for at, batch in enumerate(batches)]
    for at in range(0, len(payloads), 5):
        payloads[at] = (b"\xc1", payloads[at][:-1], with_unknown_fields(batches[at]))[data[at % len(data)] % 3]
    each, many = compactor_of(payloads), history()
    cut = data[0] % (len(payloads) + 1)
    numbered = list(enumerate(payloads))
    many.extend(numbered[:cut])
    many.extend(numbered[cut:])
    assert (each.live, each.unavailable_reason, snapshot_of(each, 1.0)) == (
        many.live,
        many.unavailable_reason,
        snapshot_of(many, 1.0),
    )


def with_unknown_fields(batch: Batch) -> bytes:
    """Return the batch with an unknown field in each event, which only Python can decode."""
    events = [
        msgspec.structs.replace(event, unknown_fields={**(event.unknown_fields or {}), "tomorrow": 1}) for event in batch.events
    ]
    return encode_batch(KVEventBatch(batch.ts, events, batch.rank), dialects()[12])


@settings(max_examples=30)
@given(histories)
def test_memory_returns_to_the_baseline(data: bytes) -> None:
    """It does after scoped clears of every tier, and after a clear of everything."""
    choices = Choices(data)
    _, _, batches = batches_of(choices)
    kept = compactor_of([encode_in_dialect(batch, 0) for batch in batches])
    for medium in ("gpu", "cpu", "disk", "TAPE"):
        kept.append(encode_batch(KVEventBatch(1.0, [cleared(medium=medium)])))
    compactor: Any = kept._native
    assert (compactor.live, compactor.nodes) == (0, 0)
    assert kept.unavailable_reason in {None, "digests"}
    assert compactor.bytes <= 4 * SLACK
    kept.append(encode_batch(KVEventBatch(1.0, [AllBlocksCleared()])))
    assert compactor.bytes <= 2 * SLACK
    kept.clear()
    assert compactor.bytes <= SLACK
    assert snapshot_of(kept, 1.0) == KVEventBatch(1.0, [AllBlocksCleared()])


def test_memory_is_that_of_what_is_live() -> None:
    """10,000 blocks come and go a hundred at a time, in another order, with copies on two tiers; in the end one is left."""
    kept, chooser = history(), random.Random(3)
    kept.append(payload_of(store([1], [1, 2], 2)))
    one = kept.bytes
    live: list[int] = []
    for first in range(100, 10_100, 100):
        hashes = list(range(first, first + 100))
        tokens = [token for value in hashes for token in (value, value + 1)]
        kept.append(payload_of(store(hashes, tokens, 2), store(hashes, [], 0, medium="CPU")))
        live += hashes
        gone = chooser.sample(live, 90)
        kept.append(payload_of(removal(*gone), removal(*gone, medium="CPU")))
        live = sorted(set(live) - set(gone))
    assert kept.live == len(live) + 1
    kept.append(payload_of(removal(*live), removal(*live, medium="CPU")))
    assert kept.live == 1
    assert kept.bytes <= one + CHUNKS + SLACK


def payload_of(*events: KVEvent) -> bytes:
    return encode_batch(KVEventBatch(1.0, list(events)))


# --- engines ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (None, 9), (None, 6, 17)], ids=repr)
@pytest.mark.parametrize("dialect", dialects()[10:13], ids=str)
def test_an_engines_history_is_exact_wherever_it_is_cut(windows: tuple[int | None, ...], dialect: Dialect) -> None:
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
    kept = history()
    whole = index_of(payloads)
    for at, payload in enumerate(payloads):
        kept.append(payload)
        if at % 5:
            continue
        first = collapsed(kept, dialect)
        assert first is not None
        same(index_of(payloads[: at + 1]), index_of([first]), prompts[-8:])
        same(whole, index_of([first, *payloads[at + 1 :]]), prompts[-20:])


@pytest.mark.parametrize("stream", recorded_endpoints(CAPTURES), ids=lambda stream: stream.run)
def test_a_real_run_is_exact_wherever_it_is_cut(stream: Any) -> None:
    """In two runs of vLLM 0.32 in its own dialect, the state is compared at every 60th batch and after all later ones. The
    snapshot is hardly larger than the batches that it contains."""
    payloads = [live.payload for live in live_batches(CAPTURES, stream.run, stream.endpoint)]
    dialect = next(row for row in dialects() if row.name == "vllm-0.30.0")
    kept, whole, before = history(), index_of(payloads), 0
    for at, payload in enumerate(payloads):
        kept.append(payload)
        before += len(payload)
        if at % 60 == 0:
            first = collapsed(kept, dialect)
            assert first is not None
            assert len(first) <= before + 200
            same(index_of(payloads[: at + 1]), index_of([first]), [])
            same(whole, index_of([first, *payloads[at + 1 :]]), [])
    assert kept.unavailable_reason is None


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_a_golden_payload_survives_compaction(golden: Golden) -> None:
    kept = compactor_of([golden.payload])
    first = collapsed(kept)
    if first is None:
        assert (kept.unavailable_reason, "bytes_hashes" in golden.case) == ("digests", True)
        return
    same(index_of([golden.payload]), index_of([first]), [(list(range(100, 112)), Scope())])


# --- long stores --------------------------------------------------------------------------------------------------------------


class Chains:
    """A cache with stores of 1 to 600 blocks: conversations grow, share beginnings, lose tails, middles and beginnings, and
    return, some of their blocks a second time."""

    def __init__(self, choices: random.Random) -> None:
        self._random = choices
        self._paths: list[list[int]] = []
        self._live: set[int] = set()
        self._next = 0

    def batch(self) -> bytes:
        return payload_of(*[self._event() for _ in range(self._random.choice((1, 1, 4)))])

    def _event(self) -> KVEvent:
        return self._random.choice((self._grow, self._grow, self._again, self._tail, self._some, self._oldest))()

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

    def _again(self) -> KVEvent:
        """Store the removed blocks of a chain again after its remaining ones."""
        path = self._random.choice(self._paths or [[1]])
        first = next((at for at, value in enumerate(path) if value not in self._live), len(path) - 1)
        return self._store(path[first:], path[first - 1] if first else None)

    def _store(self, hashes: list[int], parent: int | None) -> KVEvent:
        self._live.update(hashes)
        return store(hashes, [value % 5_000 + at for value in hashes for at in (0, 1)], 2, parent)

    def _remove(self, hashes: list[int]) -> KVEvent:
        gone = [value for value in hashes if value in self._live]
        self._live.difference_update(gone)
        return removal(*gone)

    def _tail(self) -> KVEvent:
        path = self._random.choice(self._paths or [[1]])
        return self._remove(path[-self._random.randint(1, len(path)) :][::-1])

    def _some(self) -> KVEvent:
        path = self._random.choice(self._paths or [[1]])
        return self._remove(self._random.sample(path, self._random.randint(0, len(path))))

    def _oldest(self) -> KVEvent:
        return self._remove(self._paths.pop(0) if len(self._paths) > 4 else [])


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), st.integers(20, 100), st.integers(2, 30))
def test_a_history_of_long_stores_is_exact_wherever_it_is_cut(seed: int, count: int, every: int) -> None:
    """Snapshots of snapshots, and a snapshot of everything, lead an index to the state of a consumer that saw every batch."""
    chains, often, once, whole = Chains(random.Random(seed)), history(), history(), PrefixIndex()
    for seq in range(count):
        payload = chains.batch()
        often.append(payload)
        once.append(payload)
        whole.apply_payload(WORKER, 0, seq, payload)
        if seq % every == every - 1:
            first = collapsed(often)
            assert first is not None
            assert index_of([first]).digest(WORKER) == whole.digest(WORKER)
        assert (often.live, native(often).nodes) == (once.live, native(once).nodes)
    first = collapsed(once)
    assert first is not None
    assert once.live == whole.stats().blocks
    assert index_of([first]).digest(WORKER) == whole.digest(WORKER)
    for kept in (often, once):
        kept.append(payload_of(cleared(medium="GPU")))
        assert (kept.live, native(kept).nodes) == (0, 0)
        assert kept.bytes <= 4 * SLACK


# --- events of a snapshot -----------------------------------------------------------------------------------------------------


def test_a_chain_is_one_store_however_it_came() -> None:
    """It arrives block by block, with a copy on another tier. The snapshot has one store per tier, hardly larger than the
    tokens."""
    kept = history()
    for value in range(1, 200):
        event = store([value], [value % 100, 2], 2, value - 1 or None)
        kept.append(payload_of(event))
        kept.append(payload_of(store([value], [value % 100, 2], 2, value - 1 or None, medium="CPU")))
    batch = snapshot_of(kept, 5.0, 3)
    assert batch is not None
    assert (batch.ts, batch.data_parallel_rank) == (5.0, 3)
    assert [type(event) for event in batch.events] == [AllBlocksCleared, BlockStored, BlockStored]
    assert [event.medium for event in batch.events[1:]] == ["GPU", "CPU"]  # type: ignore[union-attr]
    assert len(encode_batch(batch)) < 2 * (199 * (3 + 2)) + 500


def test_dead_ancestors_are_stored_and_removed() -> None:
    kept = compactor_of([payload_of(store([1, 2, 3], [1, 2, 3, 4, 5, 6], 2), removal(1), removal(2))])
    batch = snapshot_of(kept, 1.0)
    assert batch is not None
    assert batch.events[1:] == [
        store([1, 2], [1, 2, 3, 4], 2),
        store([3], [5, 6], 2, 2),
        removal(2, 1),
    ]
    assert kept.live == 1


def test_an_unknown_parent_is_kept() -> None:
    orphan = store([5, 6], [1, 2, 3, 4], 2, 4, lora_name="x", extra_keys=[["x"], ["x", ["image", 0]]])
    batch = snapshot_of(compactor_of([payload_of(orphan)]), 1.0)
    assert batch is not None
    assert batch.events == [AllBlocksCleared(), orphan]


def test_groups_without_blocks_are_kept() -> None:
    """A group whose blocks are all removed still counts in later matches."""
    window: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
    first = [
        payload_of(store([1], [1, 2], 2, group_idx=0), store([1], [1, 2], 2, **window)),
        payload_of(removal(1, group_idx=1), removal(1, group_idx=0)),
    ]
    later = payload_of(store([1], [1, 2], 2, group_idx=0))
    snapshot = collapsed(compactor_of(first))
    assert snapshot is not None
    whole, joined = index_of([*first, later]), index_of([snapshot, later])
    assert answer(whole.match([1, 2, 3])) == answer(joined.match([1, 2, 3])) == {}
    same(whole, joined, [([1, 2, 3], Scope())])


def test_too_many_orphans_make_the_history_unavailable() -> None:
    """There is no snapshot and hardly any memory; after a clear everything works again."""
    kept = history()
    kept.append(payload_of(store(range(10, 65_600), [1] * 65_590, 1, 5)))
    assert (kept.unavailable_reason, snapshot_of(kept, 1.0), kept.live) == ("orphans", None, 0)
    assert repr(kept).startswith("<Compactor unavailable: orphans, ")
    kept.append(payload_of(store([1], [1], 1)))
    kept.append(payload_of(AllBlocksCleared(), store([2], [2], 1)))
    assert kept.unavailable_reason is None
    batch = snapshot_of(kept, 1.0)
    assert batch is not None
    assert batch.events == [AllBlocksCleared(), store([2], [2], 1)]
    assert repr(kept).startswith("<Compactor 1 blocks, ")


def test_a_heartbeat_changes_nothing() -> None:
    """It is ignored; the rest of its batch is applied."""
    beat = BlockRemoved([], heartbeat=Heartbeat("0" * 32, 5.0))
    payload = payload_of(store([1], [1, 2], 2), beat)
    kept = history()
    kept.append(payload)
    batch = snapshot_of(kept, 1.0)
    assert batch is not None
    assert batch.events == [AllBlocksCleared(), store([1], [1, 2], 2)]


def test_keyed_blocks_keep_their_keys() -> None:
    """They have no tokens and parents; those of one placement share an event, and a child with tokens follows."""
    keyed = [store([at, at + 1], [], 16, at - 1, block_keys=[9 * at, 2**64 - at]) for at in (1, 3, 5)]
    child = store([9], [1, 2], 2, 4)
    batch = snapshot_of(compactor_of([payload_of(*keyed, child, removal(2))]), 1.0)
    assert batch is not None
    keys = [9, 27, 2**64 - 3, 45, 2**64 - 5]
    assert batch.events == [AllBlocksCleared(), store([1, 3, 4, 5, 6], [], 16, block_keys=keys), child]


@pytest.mark.parametrize("reason", ["batches", "payloads", "digests"])
def test_an_invalid_history_is_unavailable_until_a_clear(reason: Any) -> None:
    kept = compactor_of([payload_of(store([1], [1], 1))])
    kept.invalidate(reason)
    kept.append(payload_of(store([2], [2], 1)))
    assert (kept.unavailable_reason, snapshot_of(kept, 1.0)) == (reason, None)
    kept.append(payload_of(AllBlocksCleared(), store([3], [3], 1)))
    assert snapshot_of(kept, 1.0) == KVEventBatch(1.0, [AllBlocksCleared(), store([3], [3], 1)])


def test_without_the_native_module_there_is_no_compactor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvevents_native._native", None)
    assert Compactor.create() is None
