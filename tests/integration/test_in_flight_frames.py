"""`InFlightFrames` counts the large frames that ZeroMQ still holds; `test_replay_server` tests it on real connections."""

from __future__ import annotations

import os

import pytest
import zmq

from kvevents.publisher import replay_server
from kvevents.publisher.replay_server import InFlightFrames
from kvevents.publisher.settings import ReplayServerSettings
from publisher_cases import wait_until

LARGE = 16 * 1024
FRAME = bytes(LARGE)
SETTINGS = ReplayServerSettings(in_flight_bytes=2 * LARGE, total_in_flight_bytes=3 * LARGE)
"""Limits for two frames of one consumer and for three frames of all consumers."""


class HeldFrames:
    """Frames that stay in flight until `release`, as ZeroMQ holds them until they are sent."""

    def __init__(self) -> None:
        self.frames = InFlightFrames(SETTINGS)
        self._frames: list[zmq.Frame] = []

    def send(self, identity: bytes) -> None:
        frame = self.frames.track(identity, FRAME)
        assert isinstance(frame, zmq.Frame)
        assert frame.bytes == FRAME
        self._frames.append(frame)

    def release(self, place: int) -> None:
        """Release one frame, and wait until pyzmq reports it."""
        tracker = self._frames[place].tracker
        assert isinstance(tracker, zmq.MessageTracker)
        del self._frames[place]
        wait_until(lambda: tracker.done, "a frame to be released")


@pytest.fixture(name="in_flight")
def held_frames() -> HeldFrames:
    return HeldFrames()


def test_the_bytes_of_one_consumer_are_limited(in_flight: HeldFrames) -> None:
    """The consumer has room again when some of its frames are released."""
    for _ in range(2):
        assert in_flight.frames.has_room(b"a", LARGE)
        in_flight.send(b"a")
    assert not in_flight.frames.has_room(b"a", LARGE)
    assert (in_flight.frames.bytes_of(b"a"), in_flight.frames.size) == (2 * LARGE, 2 * LARGE)
    in_flight.release(0)
    assert in_flight.frames.has_room(b"a", LARGE)
    assert not in_flight.frames.has_room(b"a", LARGE + 1)
    in_flight.release(0)
    assert in_flight.frames.has_room(b"a", 100 * LARGE)
    assert (in_flight.frames.bytes_of(b"a"), in_flight.frames.size) == (0, 0)


def test_the_bytes_of_all_consumers_are_limited(in_flight: HeldFrames) -> None:
    """A consumer without a frame in flight always has room for one."""
    for identity in (b"a", b"a", b"b"):
        assert in_flight.frames.has_room(identity, LARGE)
        in_flight.send(identity)
    assert not in_flight.frames.has_room(b"b", LARGE)
    assert in_flight.frames.has_room(b"c", 100 * LARGE)
    in_flight.release(0)
    assert not in_flight.frames.has_room(b"b", LARGE)
    in_flight.frames.poll()
    assert in_flight.frames.has_room(b"b", LARGE)


def test_waiting_is_bounded(in_flight: HeldFrames) -> None:
    """`wait` ends at the deadline with a frame in flight, and at once without one."""
    in_flight.send(b"a")
    in_flight.frames.wait(0.0)
    assert in_flight.frames.size == LARGE
    in_flight.release(0)
    in_flight.frames.wait(float("inf"))
    assert in_flight.frames.size == 0


def test_frames_are_copied_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens at the exit of the interpreter."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(zmq, "Frame", refuse)
    frames = InFlightFrames(SETTINGS)
    assert frames.track(b"a", FRAME) is FRAME
    assert frames.size == 0


def test_a_forked_child_has_its_own_lock() -> None:
    """The thread that holds the lock does not exist in the child."""
    with replay_server._frame_lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if replay_server._frame_lock.acquire(blocking=False) else 1)
        assert os.waitpid(child, 0)[1] == 0
