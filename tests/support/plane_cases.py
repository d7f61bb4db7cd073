"""Parts of the plane tests: bridges in threads, engines, and a reader of the log."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import nats
from nats.js import api

from kvevents.index import PrefixIndex
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Gap, RawBatch, Reset, Source
from kvevents_plane.bridge import Bridge, BridgeSettings, Watch
from kvevents_plane.layout import Layout
from kvevents_plane.partition_state import PartitionEvent, PartitionState, StreamJoined, StreamLeft
from kvevents_plane.records import Page, decode_page
from kvevents_plane.settings import PlaneSettings
from service_cases import wait_for

SECONDS = 60.0


def plane_at(*urls: str, partitions: int = 2, **more: Any) -> PlaneSettings:
    return PlaneSettings(servers=urls, partitions=partitions, partition_bytes=64 << 20, **more)


class ThreadRunner:
    """An object whose `run(stop)` runs in a thread with an event loop."""

    def __init__(self, what: Any) -> None:
        self.what = what
        self.error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - raised by `end`
            self.error = error
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self.what.run(self._stop)

    def call(self, work: Any) -> None:
        """Call a function on the event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(work)

    def end(self) -> None:
        """Set `stop`, as SIGTERM does, and wait for the thread. Raise the exception that `run` has raised."""
        if self._thread.is_alive() and self._stop is not None:
            self.call(self._stop.set)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@contextmanager
def run_bridge(plane: PlaneSettings, *watches: Watch, name: str = "bridge", **more: Any) -> Iterator[Bridge]:
    bridge = Bridge(plane, BridgeSettings(name=name, **{"heartbeat_seconds": 0.2, **more}), watches)
    running = ThreadRunner(bridge)
    try:
        wait_for("the bridge", lambda: bridge.ready.is_set() or running.error is not None, SECONDS)
        yield bridge
    finally:
        running.end()


def watch(publisher: ZmqEventPublisher, name: str = "engine", card: bytes = b"card") -> Watch:
    return Watch(Source(publisher.endpoint, publisher.replay_endpoint, name=name), card)


class Log:
    """The partitions of a plane, as read by a consumer that knows nothing about bridges."""

    def __init__(self, plane: PlaneSettings) -> None:
        self.layout = Layout(plane.name, plane.partitions)
        self.states = {partition: PartitionState() for partition in range(plane.partitions)}
        self.events: list[PartitionEvent] = []
        self.pages: list[Page] = []
        self.index = PrefixIndex()
        self._plane = plane

    def read(self) -> Self:
        """Read all pages that are in the log now."""
        asyncio.run(self._read())
        return self

    async def _read(self) -> None:
        client = await nats.connect(list(self._plane.servers))
        try:
            js = client.jetstream()
            for partition, state in self.states.items():
                bounds = (await js.stream_info(self.layout.stream(partition))).state
                state.position = max(state.position, bounds.first_seq - 1)
                if state.position >= bounds.last_seq:
                    continue
                config = api.ConsumerConfig(
                    deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=state.position + 1
                )
                reading = await js.subscribe(self.layout.subject(partition), ordered_consumer=True, config=config)
                while state.position < bounds.last_seq:
                    message = await reading.next_msg(SECONDS)
                    self._feed(state, message.metadata.sequence.stream, message.data)
                await reading.unsubscribe()
        finally:
            await client.close()

    def _feed(self, state: PartitionState, position: int, data: bytes) -> None:
        page = decode_page(data)
        if page is None:
            state._advance(position, "")  # `receive` logs it
            return
        self.pages.append(page)
        for event in state.apply(position, page):
            self._apply(event)

    def _apply(self, event: PartitionEvent) -> None:
        self.events.append(event)
        if isinstance(event, RawBatch | Reset | Gap):
            self.index.apply_many([event])
        elif isinstance(event, StreamLeft):
            self.index.remove_worker(event.key)
        elif isinstance(event, StreamJoined):
            self.index.readmit(event.key)

    def numbers(self, source: str = "engine", rank: int = 0) -> list[int]:
        return [each.seq for each in self.events if isinstance(each, RawBatch) and (each.source, each.rank) == (source, rank)]

    @property
    def flaws(self) -> tuple[int, int]:
        """Numbers of duplicate and of invalid records."""
        return sum(state.duplicate_records for state in self.states.values()), sum(
            state.invalid_records for state in self.states.values()
        )

    def wait_for(self, what: str, found: Any) -> Self:
        wait_for(what, lambda: found(self.read()), SECONDS)
        return self
