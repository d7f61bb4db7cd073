"""Rules of the index that its answers do not show: which threads wait for each other, and the cost of removals."""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from index_cases import Feed, store, tokens_of
from kvevents.events import KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.wire import encode_batch

TOKENS = array("I", range(200_000))
DEADLINE = 60.0
"""Seconds after which a thread that has not run never will."""


def payload_of(blocks: int, first: int = 1, tokens: int = 0) -> bytes:
    """One store of a chain, two tokens to a block."""
    event = store(range(first, first + blocks), range(tokens, tokens + 2 * blocks), 2)
    return encode_batch(KVEventBatch(1.0, [event]))


# --- the interpreter lock ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sticky_interpreter() -> Iterator[None]:
    """Python takes the interpreter lock from no thread: another one runs when this one gives it up, or waits."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000.0)
    yield
    sys.setswitchinterval(before)


class Bystander:
    """A thread that notes when it first ran after `wake`."""

    def __init__(self) -> None:
        self.has_run = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._wake.wait()
        self.has_run = True

    def runs_beside(self, work: Callable[[], object], seconds: float) -> bool:
        """Whether it runs while this thread does nothing but `work`, over and over."""
        self._wake.set()
        end = time.monotonic() + seconds
        while not self.has_run and time.monotonic() < end:
            work()
        found = self.has_run
        self._thread.join(DEADLINE)
        return found


def calls() -> dict[str, Callable[[], object]]:
    """Everything of the index that takes long, on an index that has something to do."""
    index, payload, others = PrefixIndex(), payload_of(10_000), PrefixIndex()
    index.apply_payload("a", 0, 0, payload_of(len(TOKENS) // 2))
    seqs = iter(range(1_000_000))
    short = payload_of(1)

    def come_and_go() -> None:
        others.apply_payload("b", next(seqs), 0, short)
        others.remove_worker("b")

    return {
        "match": lambda: index.match(TOKENS),
        "match_many": lambda: index.match_many([TOKENS]),
        "apply_payload": lambda: others.apply_payload("a", 0, next(seqs), payload),
        "apply_payloads": lambda: others.apply_payloads("a", 1, next(seqs), [payload]),
        "remove_worker": come_and_go,
        "digest": lambda: index.digest("a"),
    }


@pytest.mark.parametrize("name", calls())
def test_other_threads_run_during_a_call(name: str, sticky_interpreter: None) -> None:
    """The native code gives the interpreter lock up: nothing else lets the bystander run before the deadline."""
    assert Bystander().runs_beside(calls()[name], DEADLINE)


def test_other_threads_run_while_blocks_are_listed(sticky_interpreter: None) -> None:
    """Not only before the first of them: a listing of a large worker is made in pieces."""
    index = PrefixIndex()
    index.apply_payload("a", 0, 0, payload_of(len(TOKENS) // 2))
    held = index.blocks("a")
    first = next(held)
    rest: list[Any] = []
    assert Bystander().runs_beside(lambda: rest.append(next(held)), DEADLINE), "the whole listing was made at once"
    assert len({first, *rest, *held}) == len(TOKENS) // 2


def test_no_other_thread_runs_during_python(sticky_interpreter: None) -> None:
    """What the test above proves: without native code the bystander does not run."""
    assert not Bystander().runs_beside(lambda: sum(range(100)), 0.2)


# --- the locks of the index --------------------------------------------------------------------------------------------------


def used(index: PrefixIndex, feed: Feed) -> None:
    """What would wait for any lock of the index: a write, a read, a removal."""
    feed(store([feed.seq + 1], [1, 2], 2))
    assert index.match([1, 2])
    assert index.remove_worker(feed.source) > 0
    index.readmit(feed.source)


def ends(work: Callable[[], object]) -> Any:
    """What `work` returns in a thread that must come to an end."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert found, "it waits for a lock that it holds itself, or it has failed"
    return found[0]


def test_no_lock_is_held_while_the_clock_runs() -> None:
    """The clock of the overlay is Python, and may use the index."""
    asked: list[float] = []

    def clock() -> float:
        asked.append(1.0)
        if len(asked) < 3:
            used(index, Feed(index, f"visitor-{len(asked)}"))
        return 1.0

    index = PrefixIndex(clock=clock)
    Feed(index, "a")(store([1], [1, 2], 2))
    index.speculate(("a", 0), [1, 2, 3, 4], None, 10.0)
    asked.clear()
    assert ends(lambda: index.match([1, 2, 3, 4], overlay=True)).best is not None
    assert asked


def test_no_lock_is_held_while_batches_are_read() -> None:
    """The attributes of a raw batch are Python, and may use the index."""

    class Reading(SimpleNamespace):
        @property
        def payload(self) -> bytes:
            used(index, Feed(index, "visitor", incarnation=self.seq))
            return payload_of(1, first=self.seq + 1)

    index = PrefixIndex()
    batches = [Reading(source="a", rank=0, incarnation=0, seq=seq) for seq in range(3)]
    found = ends(lambda: index.apply_many(batches))  # type: ignore[arg-type]
    assert [applied.status for applied in found] == ["applied"] * 3


# --- removal -----------------------------------------------------------------------------------------------------------------


def removal_seconds(blocks: int, others: int) -> float:
    """CPU time of this thread for removing a worker of so many blocks, beside workers of 10,000 each; the least of five."""
    index = PrefixIndex()
    for other in range(others):
        index.apply_payload(f"other-{other}", 0, 0, payload_of(10_000, tokens=30_000 * (other + 10)))
    taken = []
    for life in range(5):
        index.apply_payload(f"worker-{life}", 0, 0, payload_of(blocks))
        began = time.thread_time()
        removed = index.remove_worker(f"worker-{life}")
        taken.append(time.thread_time() - began)
        assert removed == blocks
    assert tokens_of(index, [0, 1]) == 0
    return min(taken)


def test_removing_a_worker_costs_its_own_blocks() -> None:
    """Half a million blocks of others are 500 times its own; a removal that looked at them would cost as much more. Sixteen
    times its own blocks are some sixteen times the work. The margins are for processor caches and a busy machine.
    """
    alone = removal_seconds(1_000, 0)
    assert removal_seconds(1_000, 50) < 20 * alone
    assert removal_seconds(16_000, 0) < 16 * 8 * alone
