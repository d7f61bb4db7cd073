"""Tests of native code in a forked child. The child has no other thread of its parent, and its copies of held locks are never
released."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO

import pytest
from msgspec.structs import astuple

from index_cases import Feed, removal, store, tokens_of
from kvevents.errors import ForkedError
from kvevents.index import PrefixIndex
from kvevents.wire import DEFAULT_WIRE_LIMITS
from kvevents_native import _native

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def find_faults_in_child(check: Callable[[], list[str]]) -> str:
    """Return the faults that `check` finds in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                faults = check()
            except BaseException as error:  # noqa: BLE001 - sent to the parent
                faults = [repr(error)]
            os.write(writing, "; ".join(faults).encode())
            status = len(faults)
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as read_end:
        found = read_end.read()
    os.waitpid(child, 0)
    return found


@contextmanager
def restoring(index: PrefixIndex) -> Iterator[None]:
    """Restore a snapshot in another thread, which stops in the middle of it and holds its locks."""
    saved = BytesIO()
    index.snapshot(saved)
    is_reading, may_continue = threading.Event(), threading.Event()

    class Slow(BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            is_reading.set()
            may_continue.wait()
            return super().read(size)

    thread = threading.Thread(target=index.restore, args=(Slow(saved.getvalue()),))
    thread.start()
    is_reading.wait()
    try:
        yield
    finally:
        may_continue.set()
        thread.join()


def test_an_index_raises_in_a_forked_child_and_still_works_in_the_parent() -> None:
    index = PrefixIndex()
    feed = Feed(index)
    feed(store(range(1, 3_001), range(3_000), 1))
    listing = index._blocks("a", 0)
    assert listing is not None
    calls: dict[str, Callable[[], object]] = {
        "match": lambda: index.match([1, 2]),
        "match a long prompt": lambda: index.match(list(range(100_000))),
        "match with overlay": lambda: index.match([1, 2], overlay=True),
        "match_many": lambda: index.match_many([[1]]),
        "match_keys": lambda: index.match_keys([1]),
        "apply": lambda: feed(removal(1)),
        "apply_payload": lambda: index.apply_payload("a", 0, 9, b"\x93"),
        "apply_payloads": lambda: index.apply_payloads("a", 0, 9, [b"\x93"]),
        "label": lambda: index.set_model("a", "m"),
        "remove_worker": lambda: index.remove_worker("a"),
        "admit": lambda: index.readmit("a"),
        "workers": index.workers,
        "worker": lambda: index.worker("a"),
        "stats": index.stats,
        "blocks": lambda: index.blocks("a"),
        "a listing": lambda: listing.take(1),
        "digest": lambda: index.digest("a"),
        "snapshot": lambda: index.snapshot(BytesIO()),
        "restore": lambda: index.restore(BytesIO()),
        "merge": lambda: index.merge(BytesIO()),
        "speculate": lambda: index.speculate("a", [1]),
    }

    def check() -> list[str]:
        faults = []
        for name, call in calls.items():
            with suppress(ForkedError):
                faults.append(f"{name} answered {call()!r}")
        return faults

    with restoring(index):
        assert find_faults_in_child(check) == ""
    assert tokens_of(index, [0, 1]) == 2


def test_a_forked_child_can_create_an_index_while_threads_of_the_parent_create_theirs() -> None:
    """All indexes share one memory pool, which another thread may be changing when the process forks."""
    stop = threading.Event()

    def create_indexes() -> None:
        while not stop.is_set():
            Feed(PrefixIndex())(store(range(1, 3_001), range(3_000), 1))

    def check() -> list[str]:
        for _ in range(20):
            index = PrefixIndex()
            Feed(index)(store(range(1, 3_001), range(3_000), 1))
            if tokens_of(index, list(range(3_000))) != 3_000:
                return ["the prompt does not match in full"]
        return []

    thread = threading.Thread(target=create_indexes)
    thread.start()
    try:
        for _ in range(20):
            assert find_faults_in_child(check) == ""
    finally:
        stop.set()
        thread.join()


def test_dropping_native_objects_in_a_forked_child_does_not_block() -> None:
    indexes = [PrefixIndex()]
    history = [_native.Compactor(astuple(DEFAULT_WIRE_LIMITS)[:6])]

    def check() -> list[str]:
        indexes.clear()
        history.clear()
        gc.collect()
        return []

    def check_in_child() -> None:
        with restoring(indexes[0]):
            assert find_faults_in_child(check) == ""

    history[0]._locked(check_in_child)


def test_a_compactor_raises_in_a_forked_child() -> None:
    history = _native.Compactor(astuple(DEFAULT_WIRE_LIMITS)[:6])

    def check() -> list[str]:
        try:
            return [f"it has {history.live}"]
        except ForkedError:
            return []

    history._locked(lambda: find_faults_in_child(check) == "" or pytest.fail("it was not refused"))
    assert history.live == 0
