"""`kvevents.service.alternation`: who follows and who answers let each other run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from kvevents import _native
from kvevents.index import PrefixIndex
from kvevents.service.alternation import Alternation
from kvevents.service.follower import Follower, Listener
from kvevents.subscriber import Subscriber


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """With something to read."""
    reader, writer = os.pipe()
    os.write(writer, b"x")
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def _no_switching() -> Iterator[None]:
    """A thread has the interpreter until it lets go of it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1_000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_no_switching")
@pytest.mark.parametrize("who", ["follow", "answer"])
def test_the_other_thread_reads_what_has_come(pipe: tuple[int, int], who: str) -> None:
    """Which it cannot do until the interpreter is let go of, and nothing else here does that."""
    alternation = Alternation(pipe[0])
    alternation.questions = pipe[0]
    go, read = threading.Event(), threading.Event()

    def other() -> None:
        go.wait()
        os.read(pipe[0], 1)
        read.set()

    thread = threading.Thread(target=other)
    thread.start()
    go.set()
    give_way = getattr(alternation, who)
    try:
        assert any(give_way() or read.is_set() for _ in range(100_000))
    finally:
        os.write(pipe[1], b"x")  # or it would wait for ever where nobody gave way
        thread.join()


def test_nobody_waits_where_there_is_nothing_to_read_or_nothing_is_known(pipe: tuple[int, int]) -> None:
    os.read(pipe[0], 1)
    assert not _native.give_way(pipe[0], 0.01)
    assert not _native.give_way(-1, 0.01)
    os.close(closed := os.dup(pipe[0]))
    assert not _native.give_way(closed, 0.01)


def test_of_two_only_one_gives_way(pipe: tuple[int, int]) -> None:
    """They would wait for each other. It ends, too, though nobody reads."""
    stop = threading.Event()

    def give() -> None:
        while not stop.is_set():
            _native.give_way(pipe[0], 0.01)

    other = threading.Thread(target=give)
    other.start()
    try:
        assert any(not _native.give_way(pipe[0], 0.0) for _ in range(100_000))
    finally:
        stop.set()
        other.join()


@pytest.mark.parametrize("seconds", [-1.0, 0.011, float("inf"), float("nan")])
def test_it_is_short(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"it is 0 to 0\.01"):
        _native.give_way(0, seconds)


def test_following_leaves_the_process_as_it_was() -> None:
    """How long threads may run is of the whole process: the program `kvevents serve` sets it, no thread of the library."""
    before = sys.getswitchinterval()
    follower = Follower(Subscriber(decode=False), PrefixIndex(), Listener())
    follower.start()
    assert follower.order(sys.getswitchinterval).result(20.0) == before
    follower.stop()
    assert sys.getswitchinterval() == before
