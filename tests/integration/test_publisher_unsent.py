"""`InFlightFrames`: which large frames ZeroMQ still holds. `test_replay_server` tests it on real connections."""

from __future__ import annotations

import os

import pytest
import zmq

from kvevents.publisher import replay_server
from kvevents.publisher.replay_server import InFlightFrames
from kvevents.publisher.settings import RouterSettings
from publisher_cases import wait_until

LARGE = 16 * 1024
FRAME = bytes(LARGE)
SETTINGS = RouterSettings(in_flight_bytes=2 * LARGE, total_in_flight_bytes=3 * LARGE)
"""Room for two frames of one consumer, and for three of all."""


class Held:
    """Frames that somebody holds, as ZeroMQ does until they have left."""

    def __init__(self) -> None:
        self.frames = InFlightFrames(SETTINGS)
        self._frames: list[zmq.Frame] = []

    def send(self, identity: bytes) -> None:
        frame = self.frames.track(identity, FRAME)
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
def held_frames() -> Held:
    return Held()


def test_a_consumer_has_room_for_so_many_bytes(held: Held) -> None:
    """Until some of them have left."""
    for _ in range(2):
        assert held.frames.has_room(b"a", LARGE)
        held.send(b"a")
    assert not held.frames.has_room(b"a", LARGE)
    assert (held.frames.bytes_of(b"a"), held.frames.size) == (2 * LARGE, 2 * LARGE)
    held.leave(0)
    assert held.frames.has_room(b"a", LARGE)
    assert not held.frames.has_room(b"a", LARGE + 1)
    held.leave(0)
    assert held.frames.has_room(b"a", 100 * LARGE)
    assert (held.frames.bytes_of(b"a"), held.frames.size) == (0, 0)


def test_all_have_room_for_so_many_bytes_and_each_for_one_frame(held: Held) -> None:
    """Whatever others have left unread, who has nothing on its way may be sent one."""
    for identity in (b"a", b"a", b"b"):
        assert held.frames.has_room(identity, LARGE)
        held.send(identity)
    assert not held.frames.has_room(b"b", LARGE)
    assert held.frames.has_room(b"c", 100 * LARGE)
    held.leave(0)
    assert not held.frames.has_room(b"b", LARGE)
    held.frames.poll()
    assert held.frames.has_room(b"b", LARGE)


def test_to_wait_has_an_end(held: Held) -> None:
    """With a frame that nobody lets go, and with none."""
    held.send(b"a")
    held.frames.wait(0.0)
    assert held.frames.size == LARGE
    held.leave(0)
    held.frames.wait(float("inf"))
    assert held.frames.size == 0


def test_where_no_thread_can_begin_frames_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter, when what is left goes out."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(zmq, "Frame", refuse)
    frames = InFlightFrames(SETTINGS)
    assert frames.track(b"a", FRAME) is FRAME
    assert frames.size == 0


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    """Whoever made a frame at that moment."""
    with replay_server._frame_lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if replay_server._frame_lock.acquire(blocking=False) else 1)
        assert os.waitpid(child, 0)[1] == 0
