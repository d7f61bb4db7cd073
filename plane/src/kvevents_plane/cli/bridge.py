"""The command `kvevents bridge`, which writes the streams of engines to a log in NATS JetStream, and its metrics."""

from __future__ import annotations

import asyncio
import logging
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from prometheus_client.metrics_core import Metric

from kvevents.cli.command import CommandLineError, ExitCode
from kvevents.cli.console import Console, Span
from kvevents.cli.settings_parser import (
    LOGIN_SETTINGS,
    SHARED_FLAGS,
    SettingsParser,
    SettingsValues,
    add_check,
    add_sources,
    read_sources,
)
from kvevents.cli.signals import StateLogger, StopSignal, add_log_options, configure_logging, configure_threads, trimming_memory
from kvevents.prometheus import MetricTable, Probes, Samples, families, samples_by_label, serve
from kvevents.prometheus import check_address as check_metrics
from kvevents.service.discovery.runner import EngineDiscovery, check_engines
from kvevents.service.errors import ConflictError
from kvevents.service.fleet.registration import Registration, Scope, StreamKey, check_same_engine
from kvevents.service.settings import EngineSources
from kvevents.settings import Host, Port
from kvevents.stream import Checkpoint, DegradedReason
from kvevents.zeromq.keys import Curve
from kvevents_plane.bridge import Bridge, Watch
from kvevents_plane.connection import client_options
from kvevents_plane.nats_errors import first_error
from kvevents_plane.partition_writer import PartitionWriter
from kvevents_plane.settings import BridgeSettings, PlaneSettings

DESCRIPTION: Final = (
    "Subscribe to engines as `kvevents serve` does, and write their events to a log in NATS JetStream. The log has each batch "
    "once and in order, however many bridges subscribe to an engine, and also if one of them is killed. Any number of services "
    "build their index from the log. The bridge creates the plane if it does not exist."
)
EXAMPLES: Final = """\
  kvevents bridge --nats nats://10.0.0.3:4222 --model llama --worker engine-0=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558
  kvevents bridge --nats nats://10.0.0.3:4222 --nats nats://10.0.0.4:4222 --copies 3 --config fleet.toml --metrics-port 9464
  kvevents bridge --nats tls://10.0.0.3:4222 --creds bridge.creds --bridge-name b2 --config fleet.toml
"""

POLL_SECONDS: Final = 0.5
"""Seconds between two checks for changes of state to log."""
SHUTDOWN_SECONDS: Final = 12.0
"""Maximum number of seconds from a signal to the end of the process. Queued records are written in this time."""
SCRAPE_SECONDS: Final = 5.0
"""Maximum number of seconds for which a scrape waits for the event loop."""
_NORMAL_TRUST: Final = frozenset({"CONNECTING", "REPLAYING", "EXACT"})

log = logging.getLogger("kvevents.bridge")
T = TypeVar("T")


class BridgeTable(BridgeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one bridge and of the process in which it runs."""

    metrics_port: Port | None = None
    """Port at which Prometheus scrapes metrics (default: none)."""
    metrics_host: Host = "127.0.0.1"
    """Address at which `metrics_port` is bound."""


class BridgeCommandSettings(EngineSources, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the command: of its plane, its bridge and its discovery."""

    plane: PlaneSettings
    bridge: BridgeTable = msgspec.field(default_factory=BridgeTable)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    settings = SettingsParser(
        BridgeCommandSettings, "bridge", flags=SHARED_FLAGS | {"bridge.name": "--bridge-name"}, tables={"bridge": ""}
    )
    plane = parser.add_argument_group("the plane that the bridge writes to")
    settings.add(plane, "plane.servers", "plane.name", "plane.partitions", "plane.copies", "plane.partition_bytes")
    settings.add(plane, *LOGIN_SETTINGS)
    add_sources(parser.add_argument_group("engines that the bridge subscribes to"), settings)
    settings.add(parser.add_argument_group("this bridge"), "bridge.name", "bridge.dead_seconds")
    operators = parser.add_argument_group("metrics and logs")
    settings.add(operators, "bridge.metrics_port", "bridge.metrics_host")
    add_log_options(operators)
    settings.add_other_settings(parser, "TOML file; its [[sources]] are read again whenever it changes")
    add_check(parser)


def run(args: Namespace) -> int:
    """Run a bridge until SIGTERM or SIGINT, or check its settings.

    Raises `PlaneError` if the servers cannot be used, `EndpointError` if the metrics port is in use, and `ConfigError`.
    """
    given: SettingsValues[BridgeCommandSettings] = args.settings.read(args)
    if "plane.servers" not in given:
        raise CommandLineError("no NATS server is given; use --nats nats://HOST:4222, or servers in [plane] of --config")
    config = read_sources(given, args)
    if args.config is None and not config.names_engines:
        raise CommandLineError(
            "no engine is given; use --worker, --engine, --dns, --kubernetes-selector, --sources or --config"
        )
    if "bridge.metrics_host" in given and config.bridge.metrics_port is None:
        raise CommandLineError("--metrics-host needs --metrics-port: without a port nothing listens for Prometheus")
    check_engines(config, args.config)
    if args.check:
        if config.bridge.metrics_port is not None:
            check_metrics(config.bridge.metrics_port, config.bridge.metrics_host)
        client_options(config.plane)
        Console().note(Span("these settings can be used", "good"))
        return ExitCode.OK
    configure_logging(args)
    if given.origin("plane.servers") == "--nats" and any("@" in server for server in config.plane.servers):
        log.warning("all users of this machine can read a login in --nats; use --creds, --nkey, or [plane] of --config")
    configure_threads()
    with StopSignal() as stop, trimming_memory():
        asyncio.run(_run_bridge(config, args.config, stop))
    return ExitCode.OK


async def _run_bridge(config: BridgeCommandSettings, watched_file: Path | None, stop: StopSignal) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    stop.on_signal(lambda: loop.call_soon_threadsafe(stopped.set))
    process, operators = BridgeProcess(config, watched_file), config.bridge
    with ExitStack() as closing:
        if operators.metrics_port is not None:

            def ask(question: Callable[[], T]) -> T:
                """Call a function in the event loop, and return its result."""

                async def answer() -> T:
                    return question()

                return asyncio.run_coroutine_threadsafe(answer(), loop).result(SCRAPE_SECONDS)

            def probe(question: Callable[[], str]) -> str:
                try:
                    return ask(question)
                except TimeoutError:
                    return f"the event loop has not answered within {SCRAPE_SECONDS:.0f} s"

            probes = Probes(live=lambda: probe(str), ready=lambda: probe(process.why_not_ready))
            closing.callback(serve(lambda: ask(process.metrics), operators.metrics_port, operators.metrics_host, probes))
        await process.run(stopped)


class BridgeProcess:
    """A bridge, the discovery of its engines, and the log of its state."""

    def __init__(self, config: BridgeCommandSettings, watched_file: Path | None) -> None:
        self.bridge = Bridge(config.plane, config.bridge)
        self._config: Final = config
        self._subscriptions = BridgeSubscriptions(self.bridge, config.curve)
        self._discovery = EngineDiscovery(config, watched_file, self._subscriptions, lambda _: None)

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, and then for `SHUTDOWN_SECONDS` at most."""
        work = asyncio.create_task(self._run_tasks(stop))
        waiting = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if self.bridge.ready.is_set():
                await asyncio.wait({work}, timeout=SHUTDOWN_SECONDS)
        finally:
            waiting.cancel()
            work.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await work
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    def metrics(self) -> list[Metric]:
        """Return the metric families. Call it in the event loop."""
        return list(families("kvevents_bridge_", _METRICS, self))

    def count_trusts(self) -> Counter[str]:
        """Map the name of each trust state to the number of followed streams in that state."""
        return Counter("CONNECTING" if trust is None else trust.trust for trust in self.bridge.trusts().values())

    def faults(self) -> list[str]:
        """Return a sentence for each provider that fails and for each engine that cannot be followed."""
        return [sentence for sentences in self._discovery.faults().values() for sentence in sentences]

    def why_not_ready(self) -> str:
        """Return why the bridge cannot write, as a sentence; empty if it can. Call it in the event loop."""
        if not self.bridge.is_connected:
            return "no NATS server is connected"
        partitions = self.bridge.partitions
        faults = [f"partition {partition.partition}: {partition.fault}" for partition in partitions if partition.fault]
        if faults:
            return "; ".join(faults)
        return "" if self.bridge.ready.is_set() else "the log is being read"

    async def _run_tasks(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in (self._discover(), self._log_state())]
            await self.bridge.run(stop)
            for task in running:
                task.cancel()
        unwritten = sum(partition.builder.queued_records for partition in self.bridge.partitions)
        if unwritten:
            log.warning("ended with %d unwritten records; engines or other bridges still have them", unwritten)
        else:
            log.info("ended; %d batches written", self.bridge.written)

    async def _discover(self) -> None:
        await self.bridge.ready.wait()
        settings, partitions = self._config.bridge, len(self.bridge.partitions)
        log.info("bridge %r writes to the %d partitions of plane %r", settings.name, partitions, self._config.plane.name)
        await self._discovery.run()

    async def _log_state(self) -> None:
        logger = StateLogger(log)
        while True:
            await asyncio.sleep(POLL_SECONDS)
            logger.log_changes(self._states())

    def _states(self) -> Iterator[tuple[str, str, int]]:
        """Yield the arguments of `StateLogger.log_changes`."""
        labels = self._subscriptions.labels
        for key, trust in self.bridge.trusts().items():
            if trust is not None and key in labels:
                state = f"{trust.trust} ({trust.reason})" if trust.reason else trust.trust
                # After a start of the bridge, an idle engine is DEGRADED for the reason REPLAY_UNPROVEN, which is normal.
                is_normal = trust.trust in _NORMAL_TRUST or trust.reason == DegradedReason.REPLAY_UNPROVEN.value
                yield labels[key], state, logging.INFO if is_normal else logging.WARNING
        partitions, settings, process = self.bridge.partitions, self._config.bridge, self.bridge.name_conflict
        held_up = sum(1 for partition in partitions if partition.fault)
        yield "partitions", f"{held_up} of {len(partitions)} are held up" if held_up else "", logging.WARNING
        duplicate = f"{process} has the same name; give each bridge another --bridge-name" if process else ""
        yield f"name {settings.name!r}", duplicate, logging.WARNING
        yield "engines", self.bridge.engine_conflict, logging.ERROR
        is_full = sum(partition.builder.queued_bytes for partition in partitions) >= settings.max_queued_bytes
        queue = "full; the bridge stops reading until the servers accept queued records" if is_full else ""
        yield "queue", queue, logging.WARNING


class BridgeSubscriptions:
    """Makes a bridge subscribe to the engines that discovery has found."""

    def __init__(self, bridge: Bridge, curve: Curve | None) -> None:
        self.labels: dict[StreamKey, str] = {}
        """Maps the key of each followed stream to the name of its engine."""
        self.follow_errors: dict[StreamKey, str] = {}
        """Empty, because a bridge refuses no engine; `RegistrationTarget` requires this member."""
        self.adapters: frozenset[Scope] = frozenset()
        self.unready_sources: Mapping[str, str] = {}
        self.is_discovery_complete = False
        """A bridge reads none of these three members; `RegistrationTarget` requires them for queries."""
        self._bridge: Final = bridge
        self._curve: Final = curve

    def replace_registrations(
        self, _origin: str, registrations: Iterable[Registration], _resume: Callable[[StreamKey], Checkpoint | None], /
    ) -> list[str]:
        """Subscribe to exactly these engines. Return a sentence for each registration that contradicts another one."""
        firsts: dict[str, Registration] = {}
        registrations_by_key: dict[StreamKey, Registration] = {}
        faults: list[str] = []
        for registration in registrations:
            try:
                check_same_engine(registration, firsts.setdefault(registration.key[0], registration))
            except ConflictError as error:
                faults.append(f"{error}; {error.hint}")
            else:
                registrations_by_key[registration.key] = registration
        for key in self.labels.keys() - registrations_by_key.keys():
            log.info("%s: no longer followed", self.labels[key])
        for key in registrations_by_key.keys() - self.labels.keys():
            log.info("%s: following %s", registrations_by_key[key].label, registrations_by_key[key].endpoint)
        self.labels = {key: registration.label for key, registration in registrations_by_key.items()}
        watches = []
        for registration in registrations_by_key.values():
            source = registration.source()
            source = msgspec.structs.replace(source, curve=source.curve or self._curve)
            watches.append(Watch(source, encode_registration(registration)))
        self._bridge.watch(watches)
        return faults

    def replace_adapter(self, _source: str, _lora: str, /) -> None:
        """Do nothing, because only an index needs adapters."""


def encode_registration(registration: Registration) -> bytes:
    """Return a registration for the log, without its CURVE keys, which replicas do not need."""
    return msgspec.json.encode(msgspec.structs.replace(registration, curve=None))


# --- metrics

_TRUST_STATES: Final = ("CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE")


def _samples_by_partition(read: Callable[[PartitionWriter], float]) -> Callable[[BridgeProcess], Samples]:
    return lambda process: [({"partition": str(each.partition)}, read(each)) for each in process.bridge.partitions]


_METRICS: Final[MetricTable[BridgeProcess]] = {
    "connected": ("1 while the bridge is connected to a NATS server.", lambda p: p.bridge.is_connected),
    "name_shared": ("1 while another process uses the bridge's name.", lambda p: bool(p.bridge.name_conflict)),
    "network_failure_suspected": (
        "1 while more than half of the engines are unreachable, so that none is removed from the log.",
        lambda p: bool(p.bridge.liveness.suspicion),
    ),
    "unclaimed_engines": ("Engines in the log that no bridge claims.", lambda p: p.bridge.unclaimed.engines),
    "queue_limit_bytes": (
        "Limit of the queued bytes of all partitions; above it the bridge stops reading.",
        lambda p: p.bridge.settings.max_queued_bytes,
    ),
    "discovery_faults": ("Current faults of discovery.", lambda p: len(p.faults())),
    "written_batches_total": ("Batches that the bridge wrote to the log.", lambda p: p.bridge.written),
    "write_conflicts_total": (
        "Pages that the log refused because another bridge wrote first.",
        lambda p: sum(each.conflicts for each in p.bridge.partitions),
    ),
    "resyncs_total": ("Times that a stream started over because it no longer matched the log.", lambda p: p.bridge.resyncs),
    "invalid_records_total": ("Records in the log that no bridge writes; stays at 0.", lambda p: p.bridge.invalid_records),
    "partition_position": (
        "Number of the newest page that the bridge read.",
        _samples_by_partition(lambda p: p.builder.state.position),
    ),
    "partition_queued_records": (
        "Records that the log has not acknowledged yet.",
        _samples_by_partition(lambda p: p.builder.queued_records),
    ),
    "partition_queued_bytes": (
        "Bytes of records that the log has not acknowledged yet.",
        _samples_by_partition(lambda p: p.builder.queued_bytes),
    ),
    "partition_blocked": (
        "1 while the bridge cannot read or write the partition.",
        _samples_by_partition(lambda p: bool(p.fault)),
    ),
    "streams": (
        "Followed streams by trust state.",
        lambda p: samples_by_label("state", dict.fromkeys(_TRUST_STATES, 0) | p.count_trusts()),
    ),
}
