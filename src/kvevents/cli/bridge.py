"""`kvevents bridge`: what engines say, in a log on NATS JetStream that any number of services read."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.cli import logs, nats, options
from kvevents.cli.command import OK, Command
from kvevents.cli.console import Console, Span
from kvevents.cli.serve import add_check, add_config, add_sources, port, size
from kvevents.errors import MissingDependencyError
from kvevents.plane.settings import PlaneSettings

log = logging.getLogger("kvevents.bridge")


class _Option(NamedTuple):
    """A flag that is a setting."""

    flag: str
    table: str
    field: str
    help: str
    type: Callable[[str], Any] = str
    metavar: str | None = None

    @property
    def place(self) -> str:
        """Where argparse leaves it."""
        return f"{self.table}_{self.field}"


def _reserve(text: str) -> float:
    return 0.0 if text.strip() == "0" else options.seconds(text)


_PLANE: Final = (
    _Option("--lanes", "plane", "lanes", "streams of JetStream to spread engines over, of a new plane", options.count, "N"),
    _Option("--copies", "plane", "copies", "servers that keep each lane of a new plane: 1, 3 or 5", options.count, "N"),
    _Option("--lane-size", "plane", "lane_bytes", "room of each lane of a new plane, such as 8GiB", size, "SIZE"),
)
_SELF: Final = (
    _Option("--name", "bridge", "name", "of this bridge, which no other may have (default: the host's)", metavar="BRIDGE"),
    _Option(
        *("--reserve", "bridge", "hold_back", "write only what no other bridge has written after S seconds (default: 0)"),
        *(_reserve, "S"),
    ),
    _Option(
        *("--dead-seconds", "bridge", "dead_seconds"),
        *("an engine that no bridge reaches for S seconds leaves the log (default: 30)", options.seconds, "S"),
    ),
)
_SEEN: Final = (
    _Option("--metrics-port", "bridge", "metrics_port", "where Prometheus may scrape (default: nowhere)", port, "PORT"),
    _Option("--metrics-host", "bridge", "metrics_host", "at which address (default: 127.0.0.1)", metavar="ADDRESS"),
    _Option("--status-seconds", "bridge", "status_seconds", "tell figures every S seconds", options.seconds, "S"),
)
_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(PlaneSettings)}
_UNITS: Final[dict[str, Callable[[Any], str]]] = {"lane_bytes": lambda value: f"{value >> 30}GiB"}


def _add(group: options.Group, found: _Option) -> None:
    default = _DEFAULTS.get(found.field) if found.table == "plane" else None
    told = "" if default is None else f" (default: {_UNITS.get(found.field, str)(default)})"
    group.add_argument(found.flag, dest=found.place, type=found.type, metavar=found.metavar, help=found.help + told)


def _given(args: Namespace) -> dict[str, dict[str, Any]]:
    """The flags by the table of the setting that each is."""
    found: dict[str, dict[str, Any]] = {"plane": {}, "bridge": {}}
    found["plane"] |= nats.table_of(args)
    for each in (*_PLANE, *_SELF, *_SEEN):
        if (value := getattr(args, each.place)) is not None:
            found[each.table][each.field] = value
    return found


def run(args: Namespace) -> int:
    """Write until SIGTERM or Ctrl-C."""
    try:
        from kvevents.cli import bridging  # noqa: PLC0415 - late, for what else this program does
    except ImportError as error:
        name = error.name or str(error)
        raise MissingDependencyError(f"a bridge needs {name}: pip install 'kvevents[plane,service]'") from error
    settings = bridging.read_settings(args, _given(args))
    if args.check:
        Console().note(Span("these settings can be used", "good"))
        return OK
    logs.to_stderr(args)
    if any("@" in server for server in args.plane_servers or ()):
        log.warning("everybody on this machine sees a login in --to; use --creds, --nkey, or [plane] of --config")
    bridging.run(settings)
    return OK


def add_arguments(parser: ArgumentParser) -> None:
    """Flags go before the file, setting by setting; sources of both count."""
    add_config(parser)
    plane = parser.add_argument_group("where to")
    nats.add_servers(plane, "--to", "NATS server")
    nats.add_name(plane)
    for each in _PLANE:
        _add(plane, each)
    nats.add_login(plane)
    add_sources(parser.add_argument_group("what"))
    how = parser.add_argument_group("how")
    for each in _SELF:
        _add(how, each)
    seen = parser.add_argument_group("what operators see")
    for each in _SEEN:
        _add(seen, each)
    logs.add_arguments(parser)
    add_check(parser)


COMMAND: Final = Command(
    "bridge",
    "put the streams of engines into a log on NATS JetStream",
    "Follow engines as `kvevents serve` does, and write what they say to NATS JetStream: each batch once and in order, however "
    "many bridges watch an engine and whichever of them is killed. Services in any number read it from there. Makes the plane "
    "where it is not there yet.",
    """\
  kvevents bridge --to nats://10.0.0.3:4222 --model llama --worker engine-0=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558
  kvevents bridge --to nats://10.0.0.3:4222 --to nats://10.0.0.4:4222 --copies 3 --config fleet.toml --metrics-port 9464
  kvevents bridge --to tls://10.0.0.3:4222 --creds bridge.creds --name spare --reserve 2 --config fleet.toml   in reserve
""",
    add_arguments,
    run,
)
