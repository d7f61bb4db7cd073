"""Engines that count what they hold, bridges in processes, and checks of a plane's log, for tests of bridges."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import nats
from nats.js import JetStreamContext

from cli_cases import Program
from kvevents.errors import UnknownSourceError
from kvevents.events import EventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import RawBatch, Source
from kvevents.wire.encode import batch_encoder
from kvevents_plane.bridge import Bridge, BridgeSettings, Watch
from kvevents_plane.records import TrustRecord, bridge_name
from kvevents_plane.settings import ConnectionLimits, PlaneSettings
from plane_cases import SECONDS, Log
from publisher_engine import Engine
from service_cases import suspend
from tools.ports import reserve_port

T = TypeVar("T")

PACE = 0.002
"""Seconds between two batches of an engine that publishes from a thread."""


class Truth:
    """The state of an engine, computed from what it has published in this incarnation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self._index = PrefixIndex()
        self._encode = batch_encoder(None)

    def add(self, batch: EventBatch) -> None:
        delivery = RawBatch(self.name, 0, 0, self.count, False, self._encode(batch))
        self._index.apply_many([delivery])
        self.count += 1

    @property
    def digest(self) -> str:
        return self._index.digest((self.name, 0))


class PublishingEngine:
    """An engine that stores and removes blocks; a context manager. Options are those of `ZmqEventPublisher`."""

    def __init__(self, name: str = "engine", **options: Any) -> None:
        self.name = name
        self.registration = b"card"
        # Not any ports: while the engine restarts, another process might get them.
        ports = {name: f"tcp://127.0.0.1:{reserve_port()}" for name in ("endpoint", "replay_endpoint")}
        self._options: dict[str, Any] = {**ports, "bind": True, **options}
        self._incarnations = 0
        self._lock = threading.Lock()
        self._begin()
        self._options |= {"endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}

    def _begin(self) -> None:
        self.publisher = ZmqEventPublisher(**self._options)
        self._engine = Engine(self._incarnations)
        self.truth = Truth(self.name)
        self._incarnations += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.shutdown()

    @property
    def source(self) -> Source:
        return Source(self.publisher.endpoint, self.publisher.replay_endpoint, name=self.name)

    @property
    def watch(self) -> Watch:
        return Watch(self.source, self.registration)

    def publish_next(self, count: int = 1) -> None:
        """Publish `count` batches."""
        for _ in range(count):
            self.publish(EventBatch(float(self.truth.count), self._engine.events()))

    def publish(self, batch: EventBatch) -> None:
        with self._lock:
            self.truth.add(batch)
            self.publisher.publish(batch)

    def end(self) -> None:
        """Shut the publisher down, as the end of the engine's process does."""
        self.publisher.shutdown()

    def restart(self) -> None:
        """Replace the publisher by a new incarnation at the same endpoints that holds nothing."""
        with self._lock:
            self.publisher.shutdown()
            self._begin()

    @contextmanager
    def publish_continuously(self, pace: float = PACE) -> Iterator[None]:
        """Publish a batch every `pace` seconds from a thread while the context is open."""
        over = threading.Event()

        def publish_until_over() -> None:
            while not over.wait(pace):
                self.publish_next()

        thread = threading.Thread(target=publish_until_over)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def holds(log: Log, *engines: PublishingEngine) -> bool:
    """Return whether the state in the log equals that of the engines, up to their newest batches."""
    for engine in engines:
        stream = log.states[log.layout.partition_of(engine.name)].streams.get((engine.name, 0))
        try:
            digest = log.index.digest((engine.name, 0))
        except UnknownSourceError:
            return False
        if stream is None or stream.last_seq != engine.truth.count - 1 or digest != engine.truth.digest:
            return False
    return True


def wait_until_complete(log: Log, *engines: PublishingEngine) -> Log:
    """Wait until the log equals the engines, and check that it has each batch of their last incarnations once, in order."""
    log.wait_for("the state of the engines in the log", lambda log: holds(log, *engines))
    for engine in engines:
        batch_numbers = numbers_of_last_incarnation(log, engine.name)
        assert batch_numbers == list(range(batch_numbers[0], engine.truth.count)), (
            batch_numbers[0],
            len(batch_numbers),
            engine.truth.count,
        )
    assert log.flaws == (0, 0)
    return log


def numbers_of_last_incarnation(log: Log, name: str) -> list[int]:
    batches = [each for each in log.events if isinstance(each, RawBatch) and each.source == name]
    return [each.seq for each in batches if each.incarnation == batches[-1].incarnation]


def reports_by_bridge(log: Log, name: str = "engine") -> dict[str, TrustRecord]:
    """Return the trust reports for a stream by bridge; for a restarted bridge, the report of its last process."""
    stream = log.states[log.layout.partition_of(name)].streams.get((name, 0))
    return {} if stream is None else {bridge_name(bridge): report for bridge, report in stream.trust_reports.items()}


def run_with_jetstream(plane: PlaneSettings, work: Callable[[JetStreamContext], Awaitable[T]]) -> T:
    """Return the result of `work` with JetStream on a new connection."""

    async def main() -> T:
        client = await nats.connect(list(plane.servers))
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(main())


# --- bridges in processes


class BridgeProcess(Program):
    """A bridge in a process that a test can kill or stop at any moment; a context manager.

    `command` is put before the command line, to run it on another host. `ping` is the interval of pings to the NATS server.
    """

    def __init__(
        self,
        plane: PlaneSettings,
        *engines: PublishingEngine,
        name: str = "bridge",
        command: Sequence[str] = (),
        ping: float = ConnectionLimits().ping_seconds,
        **more: Any,
    ) -> None:
        watches = [
            [each.name, each.publisher.endpoint, each.publisher.replay_endpoint, each.registration.decode()] for each in engines
        ]
        settings = {"servers": plane.servers, "name": plane.name, "partitions": plane.partitions, "copies": plane.copies}
        arguments = {
            "plane": settings | {"partition_bytes": plane.partition_bytes},
            "bridge": {"name": name, "heartbeat_seconds": 0.2, **more},
            "watches": watches,
            "ping": ping,
        }
        program = (sys.executable, "-W", "error", "-m", "bridge_cases")
        super().__init__(json.dumps(arguments), command=(*command, *program), PYTHONPATH=os.pathsep.join(sys.path))

    def wait_until_ready(self) -> Self:
        self.out.wait("ready")
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)

    def pause(self) -> None:
        """Suspend the process; it does nothing any more when this returns."""
        suspend(self.process)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


async def _main(arguments: dict[str, Any]) -> None:
    limits = ConnectionLimits(ping_seconds=arguments["ping"])
    plane = PlaneSettings(**{**arguments["plane"], "servers": tuple(arguments["plane"]["servers"])}, connection=limits)
    watches = [
        Watch(Source(endpoint, replay, name=name), card.encode()) for name, endpoint, replay, card in arguments["watches"]
    ]
    bridge = Bridge(plane, BridgeSettings(**arguments["bridge"]), watches)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    running = asyncio.create_task(bridge.run(stop))
    await asyncio.wait({running, asyncio.create_task(bridge.ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
    print("ready", flush=True)
    await running


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(message)s")
    asyncio.run(_main(json.loads(sys.argv[1])))
