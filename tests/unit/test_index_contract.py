"""Tests of guarantees about threads, locks and the cost of removals, which the results of the index do not show."""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from index_cases import Feed, store, tokens_of
from kvevents.events import KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.wire import encode_batch

TOKENS = array("I", range(200_000))
DEADLINE = 60.0
"""Seconds after which a thread that has not run counts as blocked."""


def payload_of(blocks: int, first: int = 1, tokens: int = 0) -> bytes:
    """Return the payload of one store of a chain with two tokens in each block."""
    event = store(range(first, first + blocks), range(tokens, tokens + 2 * blocks), 2)
    return encode_batch(KVEventBatch(1.0, [event]))


# --- the interpreter lock ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_forced_thread_switches() -> Iterator[None]:
    """Python forces no thread to release the interpreter lock. Another thread runs only when this one releases it or waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000.0)
    yield
    sys.setswitchinterval(before)


class Bystander:
    """A thread that records that it has run."""

    def __init__(self) -> None:
        self.has_run = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._wake.wait()
        self.has_run = True

    def runs_during(self, steps: Iterable[object], seconds: float) -> bool:
        """Return whether the bystander runs while this thread takes `steps` and does nothing else."""
        self._wake.set()
        end = time.monotonic() + seconds
        for _ in steps:
            if self.has_run or time.monotonic() >= end:
                break
        found = self.has_run
        self._thread.join(DEADLINE)
        return found


def long_calls() -> dict[str, Callable[[], object]]:
    """Return the methods of the index that can take long, called on an index with many blocks."""
    index, payload, others = PrefixIndex(), payload_of(10_000), PrefixIndex()
    index.apply_payload("a", 0, 0, payload_of(len(TOKENS) // 2))
    seqs = iter(range(1_000_000))
    short = payload_of(1)

    def store_and_remove_worker() -> None:
        others.apply_payload("b", next(seqs), 0, short)
        others.remove_worker("b")

    return {
        "match": lambda: index.match(TOKENS),
        "match_many": lambda: index.match_many([TOKENS]),
        "apply_payload": lambda: others.apply_payload("a", 0, next(seqs), payload),
        "apply_payloads": lambda: others.apply_payloads("a", 1, next(seqs), [payload]),
        "remove_worker": store_and_remove_worker,
        "digest": lambda: index.digest("a"),
    }


@pytest.mark.parametrize("name", long_calls())
def test_other_threads_run_during_a_call(name: str, no_forced_thread_switches: None) -> None:
    """The native code releases the interpreter lock. Nothing else lets the bystander run before the deadline."""
    call = long_calls()[name]
    assert Bystander().runs_during((call() for _ in count()), DEADLINE)


def test_other_threads_run_between_the_pieces_of_a_block_listing(no_forced_thread_switches: None) -> None:
    """A listing of a large worker is created in pieces, and other threads run between them.

    On a busy machine the bystander can need several listings.
    """
    index = PrefixIndex()
    index.apply_payload("a", 0, 0, payload_of(len(TOKENS) // 2))

    def has_run() -> bool:
        listing = index.blocks("a")
        blocks = [next(listing)]
        found = Bystander().runs_during(map(blocks.append, listing), DEADLINE)
        assert len({*blocks, *listing}) == len(TOKENS) // 2
        return found

    end = time.monotonic() + DEADLINE
    while not has_run():
        assert time.monotonic() < end, "each listing was created at once"


def test_no_other_thread_runs_during_pure_python(no_forced_thread_switches: None) -> None:
    """The tests above rely on this: without native code the bystander does not run."""
    assert not Bystander().runs_during((sum(range(100)) for _ in count()), 0.2)


# --- the locks of the index --------------------------------------------------------------------------------------------------


def use_index(index: PrefixIndex, feed: Feed) -> None:
    """Write, read and remove. These calls would wait if another thread held a lock of the index."""
    feed(store([feed.seq + 1], [1, 2], 2))
    assert index.match([1, 2])
    assert index.remove_worker(feed.source) > 0
    index.readmit(feed.source)


def result_in_thread(work: Callable[[], object]) -> Any:
    """Run `work` in a thread that must end before the deadline, and return its result."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert found, "the thread waits for a lock that it holds itself, or it has failed"
    return found[0]


def test_no_lock_is_held_while_the_clock_is_called() -> None:
    """The clock of the overlay is Python code that might use the index."""
    clock_calls: list[float] = []

    def clock() -> float:
        clock_calls.append(1.0)
        if len(clock_calls) < 3:
            use_index(index, Feed(index, f"visitor-{len(clock_calls)}"))
        return 1.0

    index = PrefixIndex(clock=clock)
    Feed(index, "a")(store([1], [1, 2], 2))
    index.speculate(("a", 0), [1, 2, 3, 4], None, 10.0)
    clock_calls.clear()
    assert result_in_thread(lambda: index.match([1, 2, 3, 4], overlay=True)).best is not None
    assert clock_calls


def test_no_lock_is_held_while_batches_are_read() -> None:
    """The attributes of a raw batch can run Python code that uses the index."""

    class BatchThatUsesIndex(SimpleNamespace):
        @property
        def payload(self) -> bytes:
            use_index(index, Feed(index, "visitor", incarnation=self.seq))
            return payload_of(1, first=self.seq + 1)

    index = PrefixIndex()
    batches = [BatchThatUsesIndex(source="a", rank=0, incarnation=0, seq=seq) for seq in range(3)]
    found = result_in_thread(lambda: index.apply_many(batches))  # type: ignore[arg-type]
    assert [applied.status for applied in found] == ["applied"] * 3


# --- removal -----------------------------------------------------------------------------------------------------------------


def removal_seconds(blocks: int, others: int) -> float:
    """Return the CPU time in which this thread removes a worker with `blocks` blocks, the least of five runs.

    The index has `others` more workers of 10,000 blocks each.
    """
    index = PrefixIndex()
    for other in range(others):
        index.apply_payload(f"other-{other}", 0, 0, payload_of(10_000, tokens=30_000 * (other + 10)))
    taken = []
    for run in range(5):
        index.apply_payload(f"worker-{run}", 0, 0, payload_of(blocks))
        began = time.thread_time()
        removed = index.remove_worker(f"worker-{run}")
        taken.append(time.thread_time() - began)
        assert removed == blocks
    assert tokens_of(index, [0, 1]) == 0
    return min(taken)


def test_removing_a_worker_costs_its_own_blocks() -> None:
    """A removal does not visit the blocks of other workers, which are 500 times as many here.

    Sixteen times as many blocks of its own are about sixteen times the work. The margins allow for processor caches and a
    busy machine.
    """
    alone = removal_seconds(1_000, 0)
    assert removal_seconds(1_000, 50) < 20 * alone
    assert removal_seconds(16_000, 0) < 16 * 8 * alone
