"""The transport distinguishes a stalled application from a quiet source."""

from __future__ import annotations

import time

import pytest

from connection_cases import OPTIONS, Reader, RealEngine, RealRig, Recorder
from kvevents.stream import Source
from kvevents.subscriber import Subscriber, ZmqTransport
from kvevents.subscriber.socket_owner import StallDetector
from kvevents.testing.fake_transport import VirtualClock


def detects_stall(detector: StallDetector, clock: VirtualClock, seconds: float) -> bool:
    """Wait `seconds` for messages and return whether the detector reports that the wait began too late."""
    detector.begin_wait()
    clock.advance(seconds)
    detector.end_wait()
    return detector.is_stalled


def test_only_the_time_between_waits_counts() -> None:
    """The first wait counts as a stall. A long wait is no stall; a wait that begins long after the last one is."""
    clock = VirtualClock()
    detector = StallDetector(15.0, clock)
    assert detects_stall(detector, clock, 0.0)
    assert not detects_stall(detector, clock, 100.0)
    clock.advance(7.0)
    assert not detects_stall(detector, clock, 0.0)
    clock.advance(8.0)
    assert detects_stall(detector, clock, 0.0)
    assert not detects_stall(detector, clock, 0.0)


def test_a_wait_by_other_means_within_max_wait_is_not_a_stall() -> None:
    """asyncio waits by itself and calls `wait` after `max_wait`."""
    clock = VirtualClock()
    detector = StallDetector(15.0, clock)
    detects_stall(detector, clock, 0.0)
    assert detector.max_wait is not None
    for _ in range(100):
        clock.advance(detector.max_wait)
        assert not detects_stall(detector, clock, 0.0)


def test_without_heartbeats_every_pause_is_a_stall() -> None:
    """Without heartbeats no silence of a connection is known to be harmless. `max_wait` is None."""
    clock = VirtualClock()
    detector = StallDetector(0.0, clock)
    detects_stall(detector, clock, 0.0)
    clock.advance(0.001)
    assert detects_stall(detector, clock, 0.0)
    assert detector.max_wait is None


@pytest.mark.parametrize("stalls", [False, True])
def test_last_messages_are_read_after_a_quiet_time_but_not_after_a_stall(stalls: bool) -> None:
    """A source that was quiet for a minute is read to its end. After a stall of a minute the transport opens a new socket.

    A full socket whose connection has timed out must not be read: libzmq 4.3.5 aborts the process.
    """
    clock = VirtualClock()
    rig = RealRig()
    rig.transport.close()
    rig.transport = ZmqTransport(options=OPTIONS, clock=clock)
    try:
        engine: RealEngine = rig.engine()
        reader = Reader(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=False), rig.clock, 32)
        rig.connect(engine, reader)
        reader.read_until(lambda: reader.recorder.log == ["up"])
        for _ in range(20):
            clock.advance(3.0)
            reader()
        engine.publish(0, 1, 2)
        engine.cut()
        rig.settle(reader.connection)
        clock.advance(60.0 if stalls else 0.0)
        reader.read_until(lambda: "down" in reader.recorder.log)
        assert reader.recorder.log == ["up", *([] if stalls else range(3)), "down"]
    finally:
        rig.close()


def test_a_subscriber_calls_its_transport_at_least_every_max_wait() -> None:
    """The limit holds without any other timer, too: asyncio would otherwise wait by itself until something arrives."""
    transport = ZmqTransport(options=OPTIONS)
    with Subscriber(Source("tcp://127.0.0.1:9"), transport=transport) as subscriber:
        assert subscriber.receive(0.05) is None
        assert transport.max_wait is not None
        pause = subscriber._multiplexer.timeout(time.monotonic())
        assert pause is not None
        assert pause <= transport.max_wait
