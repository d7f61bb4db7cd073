"""Tests which modules the hot paths pass: a published batch, a live batch, and a query."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvevents
from kvevents.events import BlockStored, KVEventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.service.fleet.registration import Registration
from kvevents.service.http.app import App
from kvevents.service.process import data_plane_settings
from kvevents.service.service import Service
from kvevents.service.settings import ServiceSettings
from kvevents.stream import Batch, Source, StreamLimits, Trust
from kvevents.subscriber import Subscriber

ROOT = f"{Path(kvevents.__file__).parent}/"
LIMITS = StreamLimits(idle_before_probe=1_000.0)
"""No probe of an idle stream is due during a test."""
SECONDS = 30.0
JSON = {"Content-Type": "application/json"}


class PassedModules:
    """Records the modules of the package whose functions are called in the recording threads, in order, while
    `is_recording`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.is_recording = False
        self.thread = ""
        """Name of the only thread that is recorded; empty to record all threads."""

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        file = frame.f_code.co_filename
        counts = self.is_recording and self.thread in {"", threading.current_thread().name}
        if counts and event == "call" and file.startswith(ROOT):
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
def in_threads() -> Iterator[PassedModules]:
    """Record the modules that the threads started by the test pass."""
    passed = PassedModules()
    threading.setprofile(passed)
    yield passed
    threading.setprofile(None)


@pytest.fixture
def in_test() -> Iterator[PassedModules]:
    """Record the modules that the test's own thread passes."""
    passed, former = PassedModules(), sys.getprofile()
    sys.setprofile(passed)
    yield passed
    sys.setprofile(former)


def has_all_answers(subscriber: Subscriber) -> bool:
    """Return whether no replay is under way, whose replies pass other modules."""
    counters = subscriber.status().counters
    return counters.requests == counters.complete + counters.truncated + counters.unanswered


def batch(number: int) -> KVEventBatch:
    return KVEventBatch(1.0, [BlockStored([number], None, [number] * 16, 16)])


def test_a_batch_passes_few_modules_between_a_socket_and_an_application(
    in_threads: PassedModules, in_test: PassedModules
) -> None:
    """A developer who follows one batch through the code reads these modules."""
    publisher = ZmqEventPublisher(0, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    source = Source(publisher.endpoint, publisher.replay_endpoint)
    try:
        with Subscriber(source, limits=LIMITS) as subscriber:
            while subscriber.trust() != Trust.EXACT:
                publisher.publish(batch(0))
                subscriber.receive_many(timeout=SECONDS)
            while subscriber.receive(timeout=0.0) is not None or not has_all_answers(subscriber):
                pass
            in_threads.thread = "zmq-publisher"
            with in_threads.record():
                publisher.publish(batch(1))
                with in_test.record():
                    delivery = subscriber.receive(timeout=SECONDS)
    finally:
        publisher.shutdown()
    assert isinstance(delivery, Batch)
    assert in_test.names == [
        "subscriber/sync.py",
        "subscriber/front_end.py",
        "subscriber/multiplexer.py",
        "subscriber/zmq_transport.py",
        "subscriber/socket_owner.py",
        "stream/stream.py",
        "stream/deliverer.py",
        "stream/deliveries.py",
        "wire/decode.py",
    ]
    assert set(in_threads.names) - {"publisher/stats.py"} == {
        "publisher/base.py",
        "publisher/zmq_publisher.py",
        "wire/encode.py",
        "publisher/replay_buffer.py",
        "publisher/event_server.py",
    }, "stats are logged a few times per second"


def test_few_python_modules_prepare_queries_and_none_answers_them(in_threads: PassedModules, in_test: PassedModules) -> None:
    """The native server answers queries from a table of the fleet. These modules write the table when the fleet changes."""

    def query(port: int) -> int:
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
            connection.request("POST", "/v1/match", json.dumps({"model": "m", "tokens": list(range(48))}), JSON)
            return connection.getresponse().status

    async def serve() -> int:
        service = Service(ServiceSettings())
        registration = Registration(instance="engine-0", endpoint="tcp://127.0.0.1:1", model="m", block_size=16)
        service.fleet.register(registration).result()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            service.data_plane.start(listening, App(service), data_plane_settings(service, answers_queries=True))
            service.fleet.members[registration.key].set_trust(Trust.EXACT, (), 0.0)
            with in_test.record():
                service.data_plane.publish()
            with in_threads.record():
                status = await asyncio.to_thread(query, listening.getsockname()[1])
        await service.data_plane.close()
        service.fleet.follower.subscriber.close()
        return status

    assert asyncio.run(serve()) == 200
    assert in_test.names == [
        "service/data_plane.py",
        "service/fleet/registration.py",
        "service/fleet/member.py",
        "routing/weights.py",
    ]
    assert in_threads.names == []
