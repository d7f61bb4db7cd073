"""A bridge as a process: what it follows, what it logs, and its end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from kvevents import prometheus
from kvevents.cli.allocator import giving_back
from kvevents.cli.bridge_config import BridgeConfig
from kvevents.cli.responsive import be_responsive
from kvevents.cli.stopping import Stop
from kvevents.errors import KVEventsError
from kvevents.plane.bridge import Bridge, Watch
from kvevents.plane.connection import check_connection
from kvevents.plane.metrics import BridgeCollector, Scraped
from kvevents.security import Curve
from kvevents.service.discovery.runner import EngineDiscovery
from kvevents.service.errors import ConflictError
from kvevents.service.registration import Key, Registration, check_same_engine
from kvevents.stream import Checkpoint, DegradedReason

log = logging.getLogger("kvevents.bridge")

LOOK_SECONDS: Final = 0.5
"""Between two looks at whether something has changed that is to be told."""
END_SECONDS: Final = 12.0
"""From a signal to the end at most: for what is queued, and for the connections."""
SCRAPE_SECONDS: Final = 5.0
"""For the event loop to answer who scrapes."""


# --- what is followed --------------------------------------------------------------------------------------------------------


def card_of(registration: Registration) -> bytes:
    """What replicas are to know of an engine: its registration without keys, which are none of theirs."""
    return msgspec.json.encode(msgspec.structs.replace(registration, curve=None))


class Following:
    """Has a bridge follow what was found."""

    def __init__(self, bridge: Bridge, curve: Curve | None) -> None:
        self.labels: dict[Key, str] = {}
        """What people call each stream."""
        self.follow_errors: dict[Key, str] = {}
        self._bridge: Final = bridge
        self._curve: Final = curve

    def replace_registrations(
        self, _origin: str, registrations: Iterable[Registration], _resume: Callable[[Key], Checkpoint | None], /
    ) -> list[str]:
        """Follow just these from now on. Returns sentences about what cannot be."""
        firsts: dict[str, Registration] = {}
        found: dict[Key, Registration] = {}
        faults: list[str] = []
        for registration in registrations:
            try:
                check_same_engine(registration, firsts.setdefault(registration.key[0], registration))
            except ConflictError as error:
                faults.append(f"{error}; {error.hint}")
            else:
                found[registration.key] = registration
        self._tell(found)
        self._bridge.watch([self._watch(registration) for registration in found.values()])
        return faults

    def _tell(self, found: dict[Key, Registration]) -> None:
        for key in self.labels.keys() - found.keys():
            log.info("%s: no longer followed", self.labels[key])
        for key in found.keys() - self.labels.keys():
            log.info("%s: following %s", found[key].label, found[key].endpoint)
        self.labels = {key: registration.label for key, registration in found.items()}

    def _watch(self, registration: Registration) -> Watch:
        source = registration.source()
        if source.curve is None and self._curve is not None:
            source = replace(source, curve=self._curve)
        return Watch(source, card_of(registration))


# --- the process -------------------------------------------------------------------------------------------------------------


def check(config: BridgeConfig) -> None:
    """Raise what `run` raises before it asks any server: `EndpointError`, `ConfigError` and `MissingDependencyError`."""
    if config.bridge.metrics_port is not None:
        prometheus.check(config.bridge.metrics_port, config.bridge.metrics_host)
    check_connection(config.plane)


def run(config: BridgeConfig, watched: Path | None) -> None:
    """Write until SIGTERM or Ctrl-C.

    Raises `PlaneError` where the servers cannot be used, `EndpointError` for a port that is taken, and `ConfigError`.
    """
    be_responsive()
    with Stop() as stop, giving_back():
        asyncio.run(_main(config, watched, stop))


async def _main(config: BridgeConfig, watched: Path | None, stop: Stop) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    stop.tell(lambda: loop.call_soon_threadsafe(stopped.set))
    process, seen = Process(config, watched), config.bridge
    with ExitStack() as closing:
        if seen.metrics_port is not None:
            collector = BridgeCollector(lambda: asyncio.run_coroutine_threadsafe(process.look(), loop).result(SCRAPE_SECONDS))
            closing.callback(prometheus.serve(collector, seen.metrics_port, seen.metrics_host))
        await process.run(stopped)


class Process:
    """One bridge with its engines."""

    def __init__(self, config: BridgeConfig, watched: Path | None) -> None:
        self.bridge = Bridge(config.settings())
        self._config: Final = config
        self._following = Following(self.bridge, config.curve)
        self._discovery = EngineDiscovery(config, watched, self._following, lambda _: None)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set, and at most `END_SECONDS` longer."""
        work = asyncio.create_task(self._work(stop))
        waiting = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if self.bridge.ready.is_set():
                await asyncio.wait({work}, timeout=END_SECONDS)
        finally:
            waiting.cancel()
            work.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await work
        except BaseExceptionGroup as group:
            raise _first(group) from group

    async def look(self) -> Scraped:
        """As it is now; in the event loop."""
        trusts = Counter("CONNECTING" if said is None else said.trust for said in self.bridge.trusts().values())
        faults = sum(len(sentences) for sentences in self._discovery.faults().values())
        return Scraped(self.bridge.status(), trusts, self._config.bridge.max_queued_bytes, faults)

    async def _work(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in (self._follow(), self._tell())]
            await self.bridge.run(stop)
            for task in running:
                task.cancel()
        self._tell_end()

    # --- what it follows and tells

    async def _follow(self) -> None:
        await self.bridge.ready.wait()
        settings, partitions = self._config.bridge, len(self.bridge.status().partitions)
        kind = f" in reserve, by {settings.hold_back:g} s" if settings.hold_back else ""
        log.info(
            "bridge %r writes to the %d partitions of plane %r%s", settings.name, partitions, self._config.plane.name, kind
        )
        await self._discovery.run()

    async def _tell(self) -> None:
        teller, every = Teller(), self._config.bridge.status_seconds
        loop = asyncio.get_running_loop()
        figures_at = loop.time() + (every or 0.0)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            teller.tell(self._words())
            teller.tell_faults(sentence for sentences in self._discovery.faults().values() for sentence in sentences)
            if every is not None and loop.time() >= figures_at:
                figures_at = loop.time() + every
                log.info("%s", _figures(await self.look()))

    def _words(self) -> Iterator[tuple[str, str, int]]:
        labels = self._following.labels
        for key, said in self.bridge.trusts().items():
            if said is not None and key in labels:
                words = f"{said.trust} ({said.reason})" if said.reason else said.trust
                # An idle engine is REPLAY_UNPROVEN after a start.
                is_calm = said.trust in _CALM or said.reason == DegradedReason.REPLAY_UNPROVEN.value
                yield labels[key], words, logging.INFO if is_calm else logging.WARNING
        status = self.bridge.status()
        late = sum(1 for partition in status.partitions if partition.fault)
        yield "partitions", f"{late} of {len(status.partitions)} are held up" if late else "", logging.WARNING
        full = sum(partition.queued_bytes for partition in status.partitions) >= self._config.bridge.max_queued_bytes
        shared = f"{status.namesake} writes under it too; give each bridge a name of its own, with --bridge-name"
        yield f"name {status.name!r}", shared if status.namesake else "", logging.WARNING
        yield "queue", "full; nothing more is heard until the servers take what waits" if full else "", logging.WARNING

    def _tell_end(self) -> None:
        status = self.bridge.status()
        waiting = sum(partition.waiting for partition in status.partitions)
        if waiting:
            log.warning("ended with %d records that the servers did not take; engines or other bridges have them", waiting)
        else:
            log.info("ended; %d batches written", status.written)


_CALM: Final = frozenset({"CONNECTING", "REPLAYING", "EXACT"})


class Teller:
    """One line for each change of state; what is well from the beginning on is not told."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._faults: frozenset[str] = frozenset()

    def tell(self, states: Iterable[tuple[str, str, int]]) -> None:
        """What, words for how it is, empty where it is well, and the level of their line."""
        before, self._told = self._told, {}
        for what, words, level in states:
            self._told[what] = words
            if words and words != before.get(what):
                log.log(level, "%s: %s", what, words)
            elif not words and before.get(what):
                log.info("%s: well again", what)

    def tell_faults(self, sentences: Iterable[str]) -> None:
        """What cannot be found out, or not be followed."""
        before, self._faults = self._faults, frozenset(sentences)
        for sentence in sorted(self._faults - before):
            log.warning("%s", sentence)
        if before and not self._faults:
            log.info("all that is named can be followed")


def _figures(seen: Scraped) -> str:
    status = seen.bridge
    waiting, queued = (
        sum(partition.waiting for partition in status.partitions),
        sum(partition.queued_bytes for partition in status.partitions),
    )
    streams = ", ".join(f"{count} {trust}" for trust, count in sorted(seen.streams.items())) or "none"
    connected = "connected" if status.connected else "not connected"
    return f"{connected}; streams: {streams}; {status.written} batches written; {waiting} records of {queued} bytes wait"


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that has a sentence; the group itself where none has."""
    for error in group.exceptions:
        found = _first(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, KVEventsError):
            return found
    return group
