"""`kvevents bridge`: what engines say, in a log on NATS JetStream that any number of services read."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Final

from kvevents.cli import logs
from kvevents.cli.command import OK, Command, CommandLineError
from kvevents.cli.console import Console, Span
from kvevents.cli.serve import LOGIN, SHARED_FLAGS, add_check, add_sources, following
from kvevents.cli.settings import Form, Given
from kvevents.errors import MissingDependencyError

if TYPE_CHECKING:
    from kvevents.cli.bridge_config import BridgeConfig

log = logging.getLogger("kvevents.bridge")


def run(args: Namespace) -> int:
    """Write until SIGTERM or Ctrl-C."""
    try:
        from kvevents.cli import bridging  # noqa: PLC0415 - late, for what else this program does
        from kvevents.service.discovery.runner import check_engines  # noqa: PLC0415 - as above
    except ImportError as error:
        name = error.name or str(error)
        raise MissingDependencyError(f"a bridge needs {name}: pip install 'kvevents[plane,service]'") from error
    given: Given[BridgeConfig] = args.form.read(args)
    if "plane.servers" not in given:
        raise CommandLineError("no server is named; write --nats nats://HOST:4222, or servers in [plane] of --config")
    config = following(given, args)
    if args.config is None and not (config.sources or config.source_files or config.dns):
        raise CommandLineError("there is nothing to follow; name engines by --worker, --engine, --dns, --sources or --config")
    check_engines(config, args.config)
    if args.check:
        bridging.check(config)
        Console().note(Span("these settings can be used", "good"))
        return OK
    logs.to_stderr(args)
    if given.origin("plane.servers") == "--nats" and any("@" in server for server in config.plane.servers):
        log.warning("everybody on this machine sees a login in --nats; use --creds, --nkey, or [plane] of --config")
    bridging.run(config, args.config)
    return OK


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    from kvevents.cli.bridge_config import BridgeConfig  # noqa: PLC0415 - late, for what else this program does

    form = Form(BridgeConfig, "bridge", flags=SHARED_FLAGS | {"bridge.name": "--bridge-name"}, tables={"bridge": ""})
    where = parser.add_argument_group("where to")
    form.add(where, "plane.servers", "plane.name", "plane.partitions", "plane.copies", "plane.partition_bytes", *LOGIN)
    add_sources(parser.add_argument_group("what"), form)
    form.add(parser.add_argument_group("how"), "bridge.name", "bridge.hold_back", "bridge.dead_seconds")
    seen = ("bridge.metrics_port", "bridge.metrics_host", "bridge.status_seconds")
    form.add(parser.add_argument_group("what operators see"), *seen)
    logs.add_arguments(parser)
    form.add_rest(parser, "TOML file; its [[sources]] are read again whenever it changes")
    add_check(parser)


COMMAND: Final = Command(
    "bridge",
    "put the streams of engines into a log on NATS JetStream",
    "Follow engines as `kvevents serve` does, and write what they say to NATS JetStream: each batch once and in order, however "
    "many bridges watch an engine and whichever of them is killed. Services in any number read it from there. Makes the plane "
    "where it is not there yet.",
    """\
  kvevents bridge --nats nats://10.0.0.3:4222 --model llama --worker engine-0=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558
  kvevents bridge --nats nats://10.0.0.3:4222 --nats nats://10.0.0.4:4222 --copies 3 --config fleet.toml --metrics-port 9464
  kvevents bridge --nats tls://10.0.0.3:4222 --creds bridge.creds --bridge-name b2 --standby-delay 2 --config fleet.toml
""",
    add_arguments,
    run,
)
