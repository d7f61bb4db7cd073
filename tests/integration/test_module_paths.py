"""Which modules the hot paths pass: a published batch to the socket, and a live batch from the socket to the application."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvevents
from kvevents.events import BlockStored, KVEventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Batch, Source, StreamLimits, Trust
from kvevents.subscriber import Subscriber

ROOT = f"{Path(kvevents.__file__).parent}/"
LIMITS = StreamLimits(idle_before_probe=1_000.0)
"""No check is due meanwhile."""
SECONDS = 30.0


class PassedModules:
    """The modules of the package whose functions were called in the threads that record, in order, while `is_recording`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.is_recording = False

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        file = frame.f_code.co_filename
        if self.is_recording and event == "call" and file.startswith(ROOT):
            name = file.removeprefix(ROOT)
            if name not in self.names:
                self.names.append(name)

    @contextmanager
    def record(self) -> Iterator[None]:
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False


@pytest.fixture
def in_publisher() -> Iterator[PassedModules]:
    """What threads pass that the test starts."""
    passed = PassedModules()
    threading.setprofile(passed)
    yield passed
    threading.setprofile(None)


@pytest.fixture
def in_subscriber() -> Iterator[PassedModules]:
    """What the test's own thread passes."""
    passed, former = PassedModules(), sys.getprofile()
    sys.setprofile(passed)
    yield passed
    sys.setprofile(former)


def batch(number: int) -> KVEventBatch:
    return KVEventBatch(1.0, [BlockStored([number], None, [number] * 16, 16)])


def test_few_modules_are_between_a_socket_and_an_application(in_publisher: PassedModules, in_subscriber: PassedModules) -> None:
    """A developer that follows one batch through the code reads them all."""
    publisher = ZmqEventPublisher(0, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    source = Source(publisher.endpoint, publisher.replay_endpoint)
    try:
        with Subscriber(source, limits=LIMITS) as subscriber:
            while subscriber.trust() != Trust.EXACT:
                publisher.publish(batch(0))
                subscriber.receive_many(timeout=SECONDS)
            while subscriber.receive(timeout=0.0) is not None:
                pass
            with in_publisher.record():
                publisher.publish(batch(1))
                with in_subscriber.record():
                    delivery = subscriber.receive(timeout=SECONDS)
    finally:
        publisher.shutdown()
    assert isinstance(delivery, Batch)
    assert in_subscriber.names == [
        "subscriber/sync.py",
        "subscriber/front_end.py",
        "subscriber/multiplexer.py",
        "subscriber/zmq_transport.py",
        "stream/stream.py",
        "stream/delivery_layer.py",
        "wire/decode.py",
    ]
    assert set(in_publisher.names) - {"publisher/stats.py"} == {
        "publisher/base.py",
        "publisher/zmq_publisher.py",
        "wire/encode.py",
        "publisher/replay_buffer.py",
        "publisher/event_server.py",
    }, "stats are for the log, a few times per second"
