"""`kvevents.publisher.unsent`: which large frames ZeroMQ still holds. `test_replay_server` has it on real connections."""

from __future__ import annotations

import os

import pytest
import zmq

from kvevents.publisher import unsent
from kvevents.publisher.unsent import LARGE, Unsent
from publisher_cases import wait_until

FRAME = bytes(LARGE)


class Held:
    """Frames that somebody holds, as ZeroMQ does until they have left."""

    def __init__(self) -> None:
        self.books = Unsent()
        self._frames: list[zmq.Frame] = []

    def send(self, identity: bytes) -> None:
        frame = self.books.counted(identity, FRAME)
        assert isinstance(frame, zmq.Frame)
        assert frame.bytes == FRAME
        self._frames.append(frame)

    def leave(self, place: int) -> None:
        """Have one leave, and pyzmq tell so."""
        tracker = self._frames[place].tracker
        assert isinstance(tracker, zmq.MessageTracker)
        del self._frames[place]
        wait_until(lambda: tracker.done, "a frame to be let go")


@pytest.fixture(name="held")
def frames_held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """With room for two of one consumer, and three of all."""
    monkeypatch.setattr("kvevents.publisher.unsent.UNSENT_BYTES", 2 * LARGE)
    monkeypatch.setattr("kvevents.publisher.unsent.UNSENT_BYTES_IN_ALL", 3 * LARGE)
    return Held()


def test_a_consumer_has_room_for_so_many_bytes(held: Held) -> None:
    """Until some of them have left."""
    for _ in range(2):
        assert held.books.has_room(b"a", LARGE)
        held.send(b"a")
    assert not held.books.has_room(b"a", LARGE)
    assert (held.books.of(b"a"), held.books.size) == (2 * LARGE, 2 * LARGE)
    held.leave(0)
    assert held.books.has_room(b"a", LARGE)
    assert not held.books.has_room(b"a", LARGE + 1)
    held.leave(0)
    assert held.books.has_room(b"a", 100 * LARGE)
    assert (held.books.of(b"a"), held.books.size) == (0, 0)


def test_all_have_room_for_so_many_bytes_and_each_for_one_frame(held: Held) -> None:
    """Whatever others have left unread, who has nothing on its way may be sent one."""
    for identity in (b"a", b"a", b"b"):
        assert held.books.has_room(identity, LARGE)
        held.send(identity)
    assert not held.books.has_room(b"b", LARGE)
    assert held.books.has_room(b"c", 100 * LARGE)
    held.leave(0)
    assert not held.books.has_room(b"b", LARGE)
    held.books.look()
    assert held.books.has_room(b"b", LARGE)


def test_to_wait_has_an_end(held: Held) -> None:
    """With a frame that nobody lets go, and with none."""
    held.send(b"a")
    held.books.wait(0.0)
    assert held.books.size == LARGE
    held.leave(0)
    held.books.wait(float("inf"))
    assert held.books.size == 0


def test_where_no_thread_can_begin_frames_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter, when what is left goes out."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(zmq, "Frame", refuse)
    books = Unsent()
    assert books.counted(b"a", FRAME) is FRAME
    assert books.size == 0


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    """Whoever made a frame at that moment."""
    with unsent._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if unsent._lock.acquire(blocking=False) else 1)
        assert os.waitpid(child, 0)[1] == 0
