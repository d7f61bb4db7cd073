"""`kvevents relay`: republish an engine's stream with its full history."""

from __future__ import annotations

import logging
import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Final

from msgspec.structs import replace

from kvevents.cli.command import CommandLineError, ExitCode
from kvevents.cli.options import CURVE_FLAGS, engine, make_curve
from kvevents.cli.settings_parser import SettingsParser, SettingsValues
from kvevents.cli.signals import StateLogger, StopSignal, add_log_options, configure_logging, trimming_memory
from kvevents.cli.values import positive_seconds
from kvevents.diagnosis.address import BIND_HINT, CONNECT_HINT
from kvevents.prometheus import require_prometheus
from kvevents.relay import Relay, RelayStatus
from kvevents.relay.settings import RelayOptions, RelaySettings
from kvevents.relay.status import serve_metrics
from kvevents.settings import FilePath, Host, Port, Positive, PublicKey
from kvevents.stream import Trust

DESCRIPTION: Final = (
    "Subscribe to an engine, and publish its stream again with full history: a consumer that connects late, or reconnects, "
    "first receives all live blocks and is then exact. With --journal the relay continues after a restart with the same "
    "sequence numbers, unless the engine has restarted too. Several upstreams become one stream: the tiers of a worker, or the "
    "ranks of an engine. Any consumer of the engine can consume the relay instead; subscribers of kvevents also verify digests."
)
EXAMPLES: Final = """\
  kvevents relay tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 --journal /var/lib/kvevents/relay
  kvevents relay 10.0.0.7:5557,10.0.0.7:5558 --endpoint tcp://*:6557 --replay tcp://*:6558 --token-policy hash
  kvevents relay gpu=127.0.0.1:5557,127.0.0.1:5558 cpu=127.0.0.1:5657,127.0.0.1:5658   two tiers of one worker
  kvevents relay engine=127.0.0.1:5557,127.0.0.1:5567 --ranks 4 --dialect vllm-0.22     four ranks, for an older router
"""

HINT_DELAY_SECONDS: Final = 5.0
"""Seconds after which the relay logs a hint with a common reason if an upstream has never connected."""

log = logging.getLogger("kvevents.relay")


class RelayCommandSettings(RelayOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the process `kvevents relay`."""

    upstreams: tuple[str, ...]
    """Endpoint of an engine's events, and the engine's replay endpoint. The relay merges several upstreams into one stream."""
    ranks: Positive = 1
    """Number of data-parallel ranks of each engine; rank R has the ports of rank 0 plus R."""
    topic_prefix: str = ""
    """Receive only topics with this prefix (default: all)."""
    upstream_curve_key: FilePath | None = None
    """File with the relay's own CURVE keys for its connections to engines: NAME.key_secret from `kvevents keys`."""
    upstream_curve_server_key: PublicKey | None = None
    """CURVE public key of the engines, or a file with that key (NAME.key)."""
    metrics_port: Port | None = None
    """Port at which Prometheus scrapes metrics (default: no port)."""
    metrics_host: Host = "127.0.0.1"
    """Address at which the relay listens for Prometheus."""

    def relay(self) -> RelaySettings:
        """Return the settings of the relay. Raises `ConfigError` and `CommandLineError`."""
        if (self.upstream_curve_key is None) is not (self.upstream_curve_server_key is None):
            raise CommandLineError("--upstream-curve-key and --upstream-curve-server-key need each other: give both or none")
        curve = make_curve(self.upstream_curve_key, self.upstream_curve_server_key)
        engines = [replace(engine(each), topic=self.topic_prefix, curve=curve) for each in self.upstreams]
        options = {name: getattr(self, name) for name in RelayOptions.__struct_fields__}
        return RelaySettings(upstreams=tuple(source for each in engines for source in each.ranks(self.ranks)), **options)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    flags = CURVE_FLAGS | {"tokens": "--token-policy", "replay_endpoint": "--replay"}
    settings = SettingsParser(RelayCommandSettings, "relay", flags=flags)
    settings.add_positional(parser, "upstreams", "[NAME[:RANK]=]ENDPOINT[,REPLAY]")
    settings.add(parser, "ranks", "topic_prefix", "upstream_curve_key", "upstream_curve_server_key", "journal")
    output = parser.add_argument_group("the stream that the relay publishes")
    settings.add(output, "endpoint", "replay_endpoint", "topic", "dialect", "tokens", "heartbeat")
    settings.add(output, "buffer_steps", "hwm", "curve.key_file", "curve.server_key", "curve.allowed")
    operators = parser.add_argument_group("metrics and logs")
    settings.add(operators, "metrics_port", "metrics_host")
    add_log_options(operators)
    parser.add_argument("--duration", type=positive_seconds, help="stop after S seconds (default: never)")
    settings.add_other_settings(parser)


def run(args: Namespace) -> int:
    """Run a relay until SIGTERM or SIGINT."""
    given: SettingsValues[RelayCommandSettings] = args.settings.read(args)
    if "upstreams" not in given:
        raise CommandLineError("no engine is given: name an engine as ENDPOINT[,REPLAY], or set upstreams in --config")
    config = given.settings()
    if "metrics_host" in given and config.metrics_port is None:
        raise CommandLineError("--metrics-host needs --metrics-port: without a port nothing listens for Prometheus")
    settings = config.relay()
    configure_logging(args)
    if config.metrics_port is not None:
        require_prometheus()  # Raise an error about a missing package before the relay binds endpoints.
    with StopSignal() as stop, trimming_memory(), ExitStack() as closing:
        relay = closing.enter_context(Relay(settings))
        turned_at = time.monotonic()

        def live() -> str:
            silence = time.monotonic() - turned_at  # A turn of the relay takes milliseconds, or with a snapshot some seconds.
            return f"the relay has done nothing for {silence:.0f} s" if silence > 30.0 else ""

        if config.metrics_port is not None:
            closing.callback(serve_metrics(relay.status, config.metrics_port, config.metrics_host, live))
        until = math.inf if args.duration is None else turned_at + args.duration
        logger = RelayStatusLogger(relay.status)

        def is_over() -> bool:
            nonlocal turned_at
            turned_at = time.monotonic()
            logger.poll()
            return stop.requested or turned_at > until

        relay.run(is_over)
    return ExitCode.OK


class RelayStatusLogger:
    """Logs one line for each change of a relay's state."""

    def __init__(self, status: Callable[[], RelayStatus], clock: Callable[[], float] = time.monotonic) -> None:
        self._status: Final = status
        self._clock: Final = clock
        self._poll_at = 0.0
        self._logger: Final = StateLogger(log)
        self._waiting: dict[tuple[str, int], float] = {}
        """Time at which each upstream began to connect; infinity after the upstream has connected or the hint was logged."""

    def poll(self) -> None:
        """Log changes of state, at most every half second, however often this method is called."""
        now = self._clock()
        if now < self._poll_at:
            return
        self._poll_at = now + 0.5
        status = self._status()
        self._log_hints(status, now)
        self._logger.log_changes(_list_states(status))

    def _log_hints(self, status: RelayStatus, now: float) -> None:
        """Log a hint for each upstream that has not connected for `HINT_DELAY_SECONDS`, one time per upstream."""
        for each in status.upstreams:
            since = self._waiting.setdefault((each.source, each.rank), now)
            if each.trust != Trust.CONNECTING:
                self._waiting[each.source, each.rank] = math.inf
            elif now - since >= HINT_DELAY_SECONDS:
                self._waiting[each.source, each.rank] = math.inf
                hint = f"{CONNECT_HINT}: {BIND_HINT}"
                log.warning("%s rank %d: no connection to %s yet; %s", each.source, each.rank, each.endpoint, hint)


def _list_states(status: RelayStatus) -> Iterator[tuple[str, str, int]]:
    """Yield the states of a relay's parts for `StateLogger.log_changes`."""
    for each in status.upstreams:
        yield f"{each.source} rank {each.rank}", str(each.trust), logging.INFO
    if (journal := status.journal) is not None:
        state = f"{journal.state} ({journal.reason})" if journal.reason else journal.state
        yield "journal", state, logging.WARNING if "memory" in state else logging.INFO
    if status.history is not None and status.history.unavailable_reason:
        yield "history", f"lost: {status.history.unavailable_reason}", logging.INFO
