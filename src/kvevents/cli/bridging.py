"""A bridge as a process: its settings, its name, what it follows, what it tells, and its end."""

from __future__ import annotations

import asyncio
import logging
import socket
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from kvevents import scraping
from kvevents.cli.allocator import giving_back
from kvevents.cli.command import CommandLineError
from kvevents.cli.responsive import be_responsive
from kvevents.cli.serve import with_sources
from kvevents.cli.stopping import Stop
from kvevents.config import Curve
from kvevents.errors import ConfigError, KVEventsError, PlaneError
from kvevents.plane.bridge import PASSING, Bridge, BridgeSettings, Watch
from kvevents.plane.connection import opened, require_jetstream
from kvevents.plane.layout import LEASE_SECONDS, Layout, make
from kvevents.plane.leases import Holder, Lease, lease_key
from kvevents.plane.metrics import BridgeCollector, Scraped
from kvevents.plane.settings import PlaneSettings
from kvevents.service.checking import check_engines
from kvevents.service.config import ServiceConfig, read_config, to_config
from kvevents.service.errors import ConflictError
from kvevents.service.finding import Finder
from kvevents.service.fleet import check_alike
from kvevents.service.registration import Key, Registration
from kvevents.stream import Checkpoint, Doubt

if TYPE_CHECKING:
    from nats.js import JetStreamContext

log = logging.getLogger("kvevents.bridge")
T = TypeVar("T", bound=msgspec.Struct)

NAME_SECONDS: Final = LEASE_SECONDS + 3.0
"""For somebody else to give up the name of a bridge: who was killed has it for as long as a lease lasts."""
LOOK_SECONDS: Final = 0.5
"""Between two looks at whether something has changed that is to be told."""
END_SECONDS: Final = 12.0
"""From a signal to the end at most: for what is queued, and for the connections."""
SCRAPE_SECONDS: Final = 5.0
"""For the event loop to answer who scrapes."""
_FLEET: Final = ("curve", "dns", "source_files", "sources")
"""Of the service's settings, those that a bridge has too."""
_LOGINS: Final = ("credentials", "nkey", "token")


# --- settings ----------------------------------------------------------------------------------------------------------------


class Seen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What operators see; in the table of the bridge."""

    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    status_seconds: float | None = None
    """Between two lines of figures; None for none."""


class Settings(NamedTuple):
    """Everything that `kvevents bridge` can be told."""

    bridge: BridgeSettings
    seen: Seen
    fleet: ServiceConfig
    watched: Path | None
    """File whose sources are read again whenever it changes."""


def read_settings(args: Namespace, flags: dict[str, dict[str, Any]]) -> Settings:
    """The file's settings under the flags', which are given by table. Raises `ConfigError`."""
    tables = {} if args.config is None else read_config(args.config)
    known = (*flags, *_FLEET)
    for name in tables:
        if name not in known:
            raise ConfigError(f"{args.config}: unknown key {name!r}; the file of a bridge has {', '.join(sorted(known))}")
    origin = "" if args.config is None else f"{args.config}: "
    given = {name: _table(tables.pop(name, {}), f"{origin}[{name}]") for name in flags}
    # Those are watched, so that a wrong one that is written later is a fault that shows; a wrong one now is an error.
    to_config(tables, str(args.config))
    tables.pop("sources", None)
    fleet = to_config(with_sources(tables, args), "flags")
    if args.config is None and not (fleet.sources or fleet.source_files or fleet.dns):
        raise CommandLineError("there is nothing to follow; name engines by --worker, --engine, --dns, --sources or --config")
    plane = _plane(given["plane"], flags["plane"], origin)
    bridge = given["bridge"] | flags["bridge"]
    seen = {name: bridge.pop(name) for name in Seen.__struct_fields__ if name in bridge}
    bridge = {"name": socket.gethostname()} | bridge | {"plane": plane}
    where = f"{origin}[bridge]: "
    check_engines(fleet, args.config)
    return Settings(_checked(bridge, BridgeSettings, where), _checked(seen, Seen, where), fleet, args.config)


def _table(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is no table")
    return found


def _plane(table: dict[str, Any], flags: dict[str, Any], origin: str) -> PlaneSettings:
    if flags.keys() & set(_LOGINS):
        table = {name: value for name, value in table.items() if name not in _LOGINS}
    table = table | flags
    if not table.get("servers"):
        raise CommandLineError("no server is named; write --to nats://HOST:4222, or servers in [plane] of --config")
    return _checked(table, PlaneSettings, f"{origin}[plane]: ")


def _checked(table: dict[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        known = f"; known fields: {', '.join(kind.__struct_fields__)}" if "unknown field" in str(error) else ""
        raise ConfigError(f"{where}{str(error).removesuffix(' - at `$`')}{known}") from error


# --- what is followed --------------------------------------------------------------------------------------------------------


def card_of(registration: Registration) -> bytes:
    """What replicas are to know of an engine: its registration without keys, which are none of theirs."""
    return msgspec.json.encode(msgspec.structs.replace(registration, curve=None))


class Following:
    """Has a bridge follow what was found."""

    def __init__(self, bridge: Bridge, curve: Curve | None) -> None:
        self.labels: dict[Key, str] = {}
        """What people call each stream."""
        self.refused: dict[Key, str] = {}
        self._bridge: Final = bridge
        self._curve: Final = curve

    def replace(
        self, _origin: str, registrations: Iterable[Registration], _resume: Callable[[Key], Checkpoint | None], /
    ) -> list[str]:
        """Follow just these from now on. Returns sentences about what cannot be."""
        firsts: dict[str, Registration] = {}
        found: dict[Key, Registration] = {}
        faults: list[str] = []
        for registration in registrations:
            try:
                check_alike(registration, firsts.setdefault(registration.key[0], registration))
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


def run(settings: Settings) -> None:
    """Write until SIGTERM or Ctrl-C.

    Raises `PlaneError` where the servers cannot be used or somebody else has the name, `EndpointError` for a port that is
    taken, and `ConfigError`.
    """
    be_responsive()
    with Stop() as stop, giving_back():
        asyncio.run(_main(settings, stop))


async def _main(settings: Settings, stop: Stop) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    stop.tell(lambda: loop.call_soon_threadsafe(stopped.set))
    process = Process(settings)
    with ExitStack() as closing:
        if settings.seen.metrics_port is not None:
            collector = BridgeCollector(lambda: asyncio.run_coroutine_threadsafe(process.look(), loop).result(SCRAPE_SECONDS))
            closing.callback(scraping.serve(collector, settings.seen.metrics_port, settings.seen.metrics_host))
        await process.run(stopped)


class Process:
    """One bridge with its name and its engines."""

    def __init__(self, settings: Settings) -> None:
        self.bridge = Bridge(settings.bridge)
        self._settings: Final = settings
        self._following = Following(self.bridge, settings.fleet.curve)
        self._finder = Finder(settings.fleet, settings.watched, self._following, lambda _: None)
        self._lease: Lease | None = None

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
        faults = sum(len(sentences) for sentences in self._finder.faults().values())
        has_name = self._lease is not None and self._lease.is_held
        return Scraped(self.bridge.status(), trusts, self._settings.bridge.max_queued_bytes, has_name, faults)

    async def _work(self, stop: asyncio.Event) -> None:
        settings = self._settings.bridge
        async with opened(settings.plane, name=f"kvevents bridge {settings.name} (its name)") as client:
            await require_jetstream(client)
            js = client.jetstream()
            layout = await _made(js, settings.plane)
            self._lease = lease = Lease(js, layout, lease_key("bridge", settings.name), Holder.here())
            try:
                await self._take_name(lease)
                async with asyncio.TaskGroup() as tasks:
                    helping = [self._keep_name(lease, js), self._follow(layout.lanes), self._tell()]
                    running = [tasks.create_task(each) for each in helping]
                    await self.bridge.run(stop)
                    for task in running:
                        task.cancel()
            finally:
                if client.is_connected:
                    await lease.release()
        self._tell_end()

    # --- its name

    async def _take_name(self, lease: Lease) -> None:
        name = self._settings.bridge.name
        try:
            if await lease.acquire():
                return
            log.warning("%s is bridge %r; waiting for at most %g s for it to end", lease.rival, name, NAME_SECONDS)
        except PlaneError as error:
            if error.fault not in PASSING:
                raise
            log.warning("%s", error)  # a bucket that is new may have no leader yet
        if not await lease.acquire(within=NAME_SECONDS):
            raise self._is_taken(lease)

    def _is_taken(self, lease: Lease) -> PlaneError:
        name = self._settings.bridge.name
        return PlaneError(
            f"{lease.rival or 'somebody else'} is bridge {name!r} of plane {self._settings.bridge.plane.name!r}; each bridge "
            "needs a name of its own: give this one another with --name, or end the other",
            fault="conflict",
        )

    async def _keep_name(self, lease: Lease, js: JetStreamContext) -> None:
        """Until somebody else has it. While the servers are away nobody gets it, and nobody writes either."""
        while True:
            log.warning("the name of this bridge is not sure: %s", await lease.keep())
            while not lease.is_held:
                try:
                    if not await lease.acquire():
                        raise self._is_taken(lease)
                    log.info("the name of this bridge is sure again")
                except PlaneError as error:
                    if error.fault == "conflict":
                        raise
                    await asyncio.sleep(LOOK_SECONDS)
                    with suppress(PlaneError):  # told by who writes
                        await make(js, self._settings.bridge.plane)  # somebody may have deleted the bucket

    # --- what it follows and tells

    async def _follow(self, lanes: int) -> None:
        await self.bridge.ready.wait()
        settings = self._settings.bridge
        kind = f" in reserve, by {settings.hold_back:g} s" if settings.hold_back else ""
        log.info("bridge %r writes to the %d lanes of plane %r%s", settings.name, lanes, settings.plane.name, kind)
        await self._finder.run()

    async def _tell(self) -> None:
        teller, every = Teller(), self._settings.seen.status_seconds
        loop = asyncio.get_running_loop()
        figures_at = loop.time() + (every or 0.0)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            teller.tell(self._words())
            teller.tell_faults(sentence for sentences in self._finder.faults().values() for sentence in sentences)
            if every is not None and loop.time() >= figures_at:
                figures_at = loop.time() + every
                log.info("%s", _figures(await self.look()))

    def _words(self) -> Iterator[tuple[str, str, int]]:
        labels = self._following.labels
        for key, said in self.bridge.trusts().items():
            if said is not None and key in labels:
                words = f"{said.trust} ({said.reason})" if said.reason else said.trust
                is_calm = said.trust in _CALM or said.reason == Doubt.REPLAY_UNPROVEN.value  # as of idle engines after a start
                yield labels[key], words, logging.INFO if is_calm else logging.WARNING
        status = self.bridge.status()
        late = sum(1 for lane in status.lanes if lane.fault)
        yield "lanes", f"{late} of {len(status.lanes)} are held up" if late else "", logging.WARNING
        full = sum(lane.queued_bytes for lane in status.lanes) >= self._settings.bridge.max_queued_bytes
        yield "queue", "full; nothing more is heard until the servers take what waits" if full else "", logging.WARNING

    def _tell_end(self) -> None:
        status = self.bridge.status()
        waiting = sum(lane.waiting for lane in status.lanes)
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


async def _made(js: JetStreamContext, plane: PlaneSettings) -> Layout:
    try:
        return await make(js, plane)
    except PlaneError as error:
        if error.fault != "full":
            raise
        room = plane.lanes * plane.lane_bytes >> 20
        raise PlaneError(
            f"{error}. {plane.lanes} lanes reserve {room} MiB in all on {plane.copies} of the servers: see --lanes and "
            "--lane-size",
            fault=error.fault,
        ) from error


def _figures(seen: Scraped) -> str:
    status = seen.bridge
    waiting, queued = sum(lane.waiting for lane in status.lanes), sum(lane.queued_bytes for lane in status.lanes)
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
