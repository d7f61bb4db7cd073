"""No input of one engine costs other engines blocks, correct answers or much time."""

from __future__ import annotations

import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import count
from typing import Any

import pytest
from msgspec.structs import astuple

from index_cases import Feed, cleared, count_orphans, removal, store, tokens_by_level, tokens_of
from kvevents.errors import DamagedIndexError
from kvevents.events import AllBlocksCleared, KVEvent, KVEventBatch
from kvevents.index import IndexLimits, Namespace, PrefixIndex, block_keys
from kvevents.stream import RawBatch, Reset
from kvevents.wire import DEFAULT_WIRE_LIMITS, encode_batch
from kvevents_native._native import Compactor, turns

CPU_SECONDS = 1.0
"""CPU seconds that suffice for the payloads below on a slow machine. Without limits these payloads take seconds to hours."""
DEADLINE = 60.0
"""Seconds after which a thread that has not run counts as blocked."""


def payload_of(events: list[KVEvent]) -> bytes:
    payload = encode_batch(KVEventBatch(1.0, events))
    assert len(payload) <= 1 << 20
    return payload


@contextmanager
def assert_quick() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < CPU_SECONDS


def chain(first: int, count: int, parent: int | None = None, *, seed: int = 0) -> KVEvent:
    """Return a store of a chain of blocks of one token each."""
    return store(range(first, first + count), [(seed * 13 + at * 7) % 50_000 for at in range(count)], 1, parent)


# --- the memory limit -------------------------------------------------------------------------------------------------------

SYSTEM = list(range(32))
"""A prefix that all conversations share."""


def test_a_prefix_that_many_chains_share_stays_when_the_index_is_full() -> None:
    """Two engines share one prefix and have far more conversations than fit.

    At every step both hold the prefix and the limit holds. In the end the index holds nearly as many blocks as fit.
    """
    limit = 3_000_000
    index = PrefixIndex(memory_limit=limit)
    feeds = [Feed(index, name) for name in "ab"]
    for feed in feeds:
        feed(store(range(1, 33), SYSTEM, 1))
    full = False
    for turn in range(1, 400):
        for feed in feeds:
            feed(chain(1_000 * turn, 256, 32, seed=turn))
            stats = index.stats()
            assert stats.bytes <= limit
            full = full or stats.evicted > 0
        assert {hit.source: hit.tokens for hit in index.match(SYSTEM)} == {"a": 32, "b": 32}
    assert full
    free = PrefixIndex()
    others = [Feed(free, name) for name in "ab"]
    turn = 0
    while free.stats().bytes < limit:
        turn += 1
        for feed in others:
            feed(store(range(1, 33), SYSTEM, 1) if turn == 1 else chain(1_000 * turn, 256, 32, seed=turn))
    assert index.stats().blocks >= 0.8 * free.stats().blocks


def test_removals_make_room_for_new_blocks() -> None:
    index = PrefixIndex(memory_limit=1_000_000)
    feed = Feed(index)
    turn = 0
    while index.stats().evicted == 0:
        turn += 1
        feed(chain(1_000 * turn, 256, seed=turn))
    for gone in range(1, turn // 2):
        feed(removal(*range(1_000 * gone, 1_000 * gone + 256)))
    evicted = index.stats().evicted
    feed(chain(1_000_000_000, 256, seed=7_777))
    assert index.stats().evicted == evicted
    assert tokens_of(index, [(7_777 * 13 + at * 7) % 50_000 for at in range(256)]) == 256


def test_refused_blocks_are_accepted_when_they_are_stored_again() -> None:
    """The index does not remember which blocks it has refused. Room alone brings none of them back."""
    index = PrefixIndex(memory_limit=1_000_000)
    feed = Feed(index)
    turn = 0
    while index.stats().evicted == 0:
        turn += 1
        feed(chain(1_000 * turn, 256, seed=turn))
    refused = [(turn * 13 + at * 7) % 50_000 for at in range(256)]
    feed(store([9_000_001], [7], 1, parent=1_000 * turn + 255))
    assert tokens_of(index, [*refused, 7]) < 256
    for gone in range(1, turn // 2):
        feed(removal(*range(1_000 * gone, 1_000 * gone + 256)))
    assert tokens_of(index, [*refused, 7]) < 256
    feed(chain(1_000 * turn, 256, seed=turn), store([9_000_001], [7], 1, parent=1_000 * turn + 255))
    assert tokens_of(index, [*refused, 7]) == 257
    assert index.worker("a").lacks_refused, "other refused blocks may be missing"


def test_a_late_engine_can_store_blocks_in_an_index_that_another_engine_has_filled() -> None:
    """The index accepts blocks of the engine that holds fewer, when it accepts no more of the engine that holds most."""
    index = PrefixIndex(memory_limit=2_000_000)
    old, new = Feed(index, "old"), Feed(index, "new")
    turn = 0
    while index.stats().evicted == 0:
        turn += 1
        old(chain(1_000 * turn, 256, seed=turn))
    new(chain(1, 256, seed=9_999))
    assert index.worker("new").blocks == 256
    assert index.worker("old").blocks > 10_000


def test_orphans_of_one_engine_evict_no_block_of_another_engine() -> None:
    """Each orphan has as many tokens as fit in a payload. Orphans count for their own stream, and their bytes are limited."""
    index = PrefixIndex()
    good = Feed(index, "good")
    for at in range(20):
        good(chain(10_000 * at + 1, 2_000, 10_000 * (at - 1) + 2_000 if at else None, seed=at))
    held = index.worker("good").blocks
    limit = index.stats().bytes + 4_000_000
    limited = PrefixIndex(memory_limit=limit)
    good, bad = Feed(limited, "good"), Feed(limited, "bad")
    for at in range(20):
        good(chain(10_000 * at + 1, 2_000, 10_000 * (at - 1) + 2_000 if at else None, seed=at))
    for at in range(40):
        bad(store([5_000_000 + at], [7] * 200_000, 200_000, 4_000_000))
        assert limited.stats().bytes <= limit
    assert limited.worker("good").blocks == held
    assert limited.worker("good").evicted == 0


def test_orphans_are_bounded_in_bytes() -> None:
    index = PrefixIndex(limits=IndexLimits(max_orphan_bytes=10_000))
    feed = Feed(index)
    feed(*(store([100 + at], [at] * 500, 500, 99) for at in range(20)))
    assert 3 <= count_orphans(index) <= 5
    assert index.stats().orphans_dropped == 20 - count_orphans(index)
    feed(store([200], [1] * 5_000, 5_000, 99))
    assert 3 <= count_orphans(index) <= 5, "an orphan that is too large for the queue does not change it"


# --- names and numbers ------------------------------------------------------------------------------------------------------


def test_the_block_sizes_of_one_incarnation_are_limited() -> None:
    """Each block size adds a search to every lookup, so stores beyond the limit are rejected until the next incarnation."""
    index = PrefixIndex()
    good, bad = Feed(index, "good"), Feed(index, "bad")
    prompt = list(range(4_096))
    good(store(range(1, 257), prompt, 16))
    for size in range(100, 140):
        bad(store([size], [7] * size, size))
    assert index.worker("bad").block_sizes == list(range(100, 116))
    assert index.worker("bad").rejected == {("none", "too-many-block-sizes"): 24}
    assert tokens_of(index, prompt, worker=("good", 0)) == 4_096
    index.set_model("bad", "other")
    assert tokens_by_level(index.match_keys(block_keys(prompt, 16))) == {("good", 0): (4_096,) * 4}, (
        "the keys are matched with the block size of the model"
    )
    index.apply(Reset("bad", 0, 1, "restart"))
    Feed(index, "bad", incarnation=1)(store([1], [7] * 200, 200))
    assert index.worker("bad").block_sizes == [200]


def test_the_limit_of_block_sizes_applies_to_orphans_whose_parent_comes_later() -> None:
    index = PrefixIndex(limits=IndexLimits(max_block_sizes=2))
    feed = Feed(index)
    feed(*(store([10 + size], [size] * size, size, 1) for size in range(1, 6)), store([1], [9], 1))
    assert index.worker("a").block_sizes == [1, 2]
    assert index.worker("a").rejected == {("none", "too-many-block-sizes"): 3}


def test_the_groups_of_one_incarnation_are_limited() -> None:
    index = PrefixIndex()
    feed = Feed(index)
    with assert_quick():
        index.apply_payload(
            "a", 0, 0, payload_of([store([1], [1], 1, group_idx=at, kv_cache_spec_kind="other") for at in range(6_000)])
        )
    assert index.stats().rejected == {("other", "unknown-kind"): 64, ("other", "too-many-groups"): 5_936}
    feed.seq = 1
    feed(store([1], [1, 2], 2), store([2], [3, 4], 2, group_idx=63), store([3], [5, 6], 2, group_idx=64))
    assert index.stats().blocks == 2, "known groups stay known"


def test_the_media_of_an_ended_incarnation_do_not_count_against_later_ones() -> None:
    """One engine restarts often, each time with other media. The index still accepts a new medium of another engine."""
    index = PrefixIndex()
    for restart in range(80):
        bad = Feed(index, "bad", incarnation=restart)
        bad(*(store([at], [1, at], 2, medium=f"M{restart}-{at}") for at in range(64)))
        assert index.worker("bad").blocks == 64
    good = Feed(index, "good")
    good(store([1], [1, 2], 2, medium="tape"))
    assert index.worker("good").tiers == {"TAPE": 1}
    assert tokens_by_level(index.match([1, 2])) == {("good", 0): (0, 0, 0, 2), ("bad", 0): (0, 0, 0, 2)}
    index.remove_worker("bad")
    assert tokens_by_level(index.match([1, 2])) == {("good", 0): (0, 0, 0, 2)}


def test_the_number_of_blocks_with_one_hash_is_limited() -> None:
    index = PrefixIndex(limits=IndexLimits(max_blocks_per_hash=4))
    feed = Feed(index)
    feed(*(store([at + 1], [at], 1) for at in range(6)), *(store([99], [7], 1, at + 1) for at in range(6)))
    assert index.stats().rejected == {("none", "too-many-alike"): 2}
    assert [tokens_of(index, [at, 7]) for at in range(6)] == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("name", IndexLimits.__struct_fields__)
def test_the_native_index_accepts_every_limit(name: str) -> None:
    PrefixIndex(limits=IndexLimits(**{name: 3}))
    with pytest.raises(ValueError, match=name):
        IndexLimits(**{name: -1})


# --- time -------------------------------------------------------------------------------------------------------------------

HOSTILE: dict[str, tuple[list[KVEvent], Callable[[], list[KVEvent]]]] = {
    "orphans of one parent, removed newest first": (
        [store([100 + at], [1], 1, 99) for at in range(9_000)],
        lambda: [removal(100 + at) for at in reversed(range(9_000))],
    ),
    "copies of one orphan, removed elsewhere": (
        [store([7], [1], 1, 99) for _ in range(9_000)],
        lambda: [removal(7, medium="CPU", group_idx=at % 2) for at in range(7_000)],
    ),
    "clears of a tier with few blocks": (
        [chain(1, 50_000)],
        lambda: [event for _ in range(3_000) for event in (store([1], [], 0, medium="CPU"), cleared(medium="CPU"))],
    ),
    "clears of an empty tier": ([chain(1, 50_000)], lambda: [cleared(medium="CPU") for _ in range(20_000)]),
    "many blocks of one hash": ([], lambda: [store([7], [at], 1) for at in range(7_000)]),
    "many sizes of one key": ([], lambda: [store([at], [], 1 + at, block_keys=[5]) for at in range(6_000)]),
    "one hash stored again and again": ([], lambda: [store([at], [1], 1) for at in range(7_000)]),
    "block keys stored and removed beside a chain": (
        [chain(1, 50_000)],
        lambda: [event for _ in range(2_000) for event in (store([9 << 40], [], 1, block_keys=[5]), removal(9 << 40))],
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_payload_of_up_to_a_megabyte_takes_long(kind: str) -> None:
    before, then = HOSTILE[kind]
    index = PrefixIndex()
    Feed(index, "good")(store([1], [1, 2], 2))
    index.apply_payload("bad", 0, 0, payload_of(before))
    payload = payload_of(then())
    with assert_quick():
        assert index.apply_payload("bad", 0, 1, payload).status == "applied"
    assert tokens_of(index, [1, 2], worker=("good", 0)) == 2
    with assert_quick():
        index.remove_worker("bad")
    assert index.stats().blocks == 1


def test_clearing_a_small_stream_is_fast_in_a_large_index() -> None:
    """A clear visits only blocks of its own stream, however many blocks other streams hold."""
    index = PrefixIndex()
    big = Feed(index, "big")
    for at in range(40):
        big(chain(100_000 * at + 1, 25_000, seed=at))
    small = payload_of([event for at in range(6_000) for event in (store([1], [at, 2], 2), AllBlocksCleared())])
    with assert_quick():
        index.apply_payload("small", 0, 0, small)
    assert index.worker("small").blocks == 0


def test_too_many_expensive_clears_drop_the_blocks_of_their_own_stream() -> None:
    index = PrefixIndex()
    bad, good = Feed(index, "bad"), Feed(index, "good")
    bad(chain(1, 50_000))
    good(chain(1, 10))
    bad(*(event for _ in range(200) for event in (store([1], [], 0, medium="CPU"), cleared(medium="CPU"))))
    assert index.worker("bad").rejected == {("none", "too-many-clears"): 1}
    assert index.worker("good").blocks == 10


def test_repeated_stores_of_block_keys_take_no_memory_beside_stored_chains() -> None:
    index = PrefixIndex()
    feed, other = Feed(index), Feed(index, "keys")
    feed(chain(1, 20_000))
    other(store([1], [], 1, block_keys=[5]), removal(1))
    before = index.stats().bytes
    other(*(event for _ in range(50) for event in (store([1], [], 1, block_keys=[5]), removal(1))))
    assert index.stats().bytes == before


# --- the interpreter lock ---------------------------------------------------------------------------------------------------


@contextmanager
def count_voluntary_thread_switches() -> Iterator[list[int]]:
    """Count how often another thread runs, while threads switch only if one gives up the interpreter lock by itself.

    Yield a list with the count.
    """
    switches, stop = [0], threading.Event()

    def count_switches() -> None:
        while not stop.is_set():
            switches[0] += 1
            time.sleep(0)

    thread, interval = threading.Thread(target=count_switches), sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    thread.start()
    try:
        yield switches
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()


def test_other_threads_run_while_a_small_payload_clears_many_blocks() -> None:
    """34 bytes clear 200,000 blocks, in milliseconds. On a busy machine the other thread can need many attempts."""
    index = PrefixIndex()
    payloads = [payload_of([chain(10_000 * at + 1, 4_000, 10_000 * (at - 1) + 4_000 if at else None)]) for at in range(50)]
    payload = payload_of([cleared()])

    def has_run(attempt: int) -> bool:
        first = 51 * attempt
        for at, stored in enumerate(payloads):
            index.apply_payload("a", 0, first + at, stored)
        with count_voluntary_thread_switches() as switches:
            before = switches[0]
            index.apply_payload("a", 0, first + 50, payload)
            return switches[0] > before

    end = time.monotonic() + DEADLINE
    attempts = count()
    while not has_run(next(attempts)):
        assert time.monotonic() < end
    assert index.stats().blocks == 0


HISTORY_BLOCKS = 200_000


def compactor_of_many_blocks() -> Compactor:
    compactor = Compactor(astuple(DEFAULT_WIRE_LIMITS)[:6])
    for at in range(HISTORY_BLOCKS // 4_000):
        compactor.apply(payload_of([chain(10_000 * at + 1, 4_000)]))
    return compactor


CALLS_WITH_MANY_NUMBERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], int]] = {
    "match a list": (PrefixIndex, lambda index: index.match([7] * 1_000_000), 1_000_000),
    "match a tuple": (PrefixIndex, lambda index: index.match((7,) * 1_000_000), 1_000_000),
    "match 64-bit numbers": (PrefixIndex, lambda index: index.match(array("q", bytes(80_000_000))), 10_000_000 // 16),
    "match 32-bit numbers": (PrefixIndex, lambda index: index.match(array("I", bytes(40_000_000))), 10_000_000 // 16),
    "match_many": (PrefixIndex, lambda index: index.match_many([[7] * 1_000] * 1_000), 1_000_000),
    "match_keys": (PrefixIndex, lambda index: index.match_keys([7] * 1_000_000), 1_000_000),
    "speculate": (PrefixIndex, lambda index: index.speculate("a", [7] * 1_000_000), 1_000_000),
    "block_keys": (lambda: [7] * 500_000, lambda tokens: block_keys(tokens, 1), 1_000_000),
    "payloads of a compactor": (
        compactor_of_many_blocks,
        lambda compactor: compactor.payloads(100_000, 1.0),
        HISTORY_BLOCKS // 64,
    ),
}
"""By name: what creates the object, the call that converts many Python objects, and how many numbers it reads or returns."""


@pytest.mark.parametrize("name", CALLS_WITH_MANY_NUMBERS)
def test_a_call_that_reads_or_returns_many_numbers_lets_threads_and_signals_run(name: str) -> None:
    """The call gives other threads a turn every 65,536 numbers, which take about two milliseconds."""
    create, call, numbers = CALLS_WITH_MANY_NUMBERS[name]
    subject = create()
    before = turns()
    call(subject)
    assert turns() - before >= numbers // 65_536 - 1


def test_listing_many_workers_lets_other_threads_run() -> None:
    index = PrefixIndex()
    for rank in range(1_500):
        index.apply(Reset("a", rank, 0, "restart"))
    before = turns()
    assert len(index.workers()) == 1_500
    assert turns() - before >= 2


@pytest.mark.parametrize(
    "call",
    [
        lambda compactor: compactor.live,
        lambda compactor: compactor.mark_partial(),
        lambda compactor: compactor.apply(payload_of([chain(1, 2)])),
        lambda compactor: compactor.apply_many([(0, payload_of([chain(1, 2)]))]),
    ],
)
def test_no_call_of_a_compactor_holds_the_interpreter_lock_while_it_waits_for_another_call(
    call: Callable[[Compactor], Any],
) -> None:
    compactor = Compactor(astuple(DEFAULT_WIRE_LIMITS)[:6])
    has_begun = threading.Event()

    def begin() -> None:
        has_begun.set()
        call(compactor)

    thread = threading.Thread(target=begin)

    def start_call_and_wait() -> None:
        thread.start()
        has_begun.wait()  # returns when the other thread, which waits for the compactor, releases the interpreter lock

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    try:
        compactor._locked(start_call_and_wait)
    finally:
        sys.setswitchinterval(interval)
    thread.join()


# --- panics and signals -----------------------------------------------------------------------------------------------------


def test_after_a_panic_an_index_raises_an_error_until_it_is_restored() -> None:
    index = PrefixIndex()
    feed = Feed(index)
    feed(store([1, 2], [1, 2], 1))
    saved = BytesIO()
    index.snapshot(saved)
    saved.seek(0)
    with pytest.raises(DamagedIndexError):
        index._break()
    calls: list[Callable[[], object]] = [
        lambda: feed(removal(1)),
        lambda: index.apply_payload("a", 0, 9, payload_of([removal(1)])),
        lambda: index.apply_payloads("a", 0, 9, [payload_of([removal(1)])]),
        lambda: index.match([1]),
        lambda: index.match_many([[1]]),
        lambda: index.match_keys([1]),
        lambda: index.blocks("a"),
        lambda: index.digest("a"),
        lambda: index.snapshot(BytesIO()),
        lambda: index.merge(BytesIO()),
    ]
    for call in calls:
        with pytest.raises(DamagedIndexError, match="restore a snapshot"):
            call()
    index.restore(saved)
    assert tokens_of(index, [1, 2]) == 2


def test_after_a_panic_every_call_of_a_compactor_fails() -> None:
    compactor = Compactor(astuple(DEFAULT_WIRE_LIMITS)[:6])
    compactor.apply(payload_of([chain(1, 2)]))
    with pytest.raises(BaseException, match="as a test"):
        compactor._break()
    for call in (lambda: compactor.payloads(1, 1.0), lambda: compactor.apply(b""), lambda: compactor.live):
        with pytest.raises(RuntimeError, match="has left this history inconsistent"):
            call()


class SignalError(Exception):
    pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers")
def test_a_long_call_can_be_interrupted() -> None:
    index = PrefixIndex()
    prompt = array("I", range(32_768))
    Feed(index)(store(range(1, 2_049), prompt, 16))

    def interrupt(*_: Any) -> None:
        raise SignalError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(SignalError):
            index.match_many([prompt] * 400_000, Namespace())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_creating_the_reports_of_many_rejected_events_lets_other_threads_run() -> None:
    index, payload = PrefixIndex(), b"\x92\x01\xdd\x00\x00\x03\xe8" + b"\x05" * 1_000
    batches = [RawBatch("a", 0, 0, seq, False, payload) for seq in range(50)]
    before = turns()
    found = index.apply_many(batches)
    assert all(applied.report is not None and len(applied.report.rejected) == 1_000 for applied in found)
    assert turns() - before >= 15
