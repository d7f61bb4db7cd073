"""`kvevents serve`: index the prefix caches of a fleet, and answer queries over HTTP and gRPC."""

from __future__ import annotations

import logging
from argparse import Action, ArgumentParser, Namespace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, NoReturn

from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console, Span
from kvevents.cli.settings_parser import LOGIN_SETTINGS, SHARED_FLAGS, SettingsParser, add_check, add_sources, read_sources
from kvevents.cli.signals import add_log_options, configure_logging, configure_threads, trimming_memory
from kvevents.errors import MissingDependencyError
from kvevents.service import process as server
from kvevents.service.settings import ServiceSettings

DESCRIPTION: Final = (
    "Subscribe to engines, keep an index of their prefix caches, and answer which workers hold how much of a prompt, and "
    "whether that can be trusted. The HTTP API is that of Dynamo's standalone indexer and Mooncake Conductor, and /v1. There "
    "are metrics for Prometheus and a page for people. No setting is required: engines can be registered over HTTP."
)
EXAMPLES: Final = """\
  kvevents serve                                       at http://127.0.0.1:8090; engines are registered later
  kvevents serve --model llama --worker engine-0=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558
  kvevents serve --engine http://10.0.0.7:8000         ask the engine for its endpoints
  kvevents serve --config fleet.toml --state-dir /var/lib/kvevents
  kvevents serve --nats nats://10.0.0.9:4222           a replica, from the log that bridges write
"""


class MissingPlaneOption(Action):
    """The action of `--nats` if kvevents-plane is not installed: raises `MissingDependencyError`."""

    def __call__(self, *_: Any) -> NoReturn:
        raise MissingDependencyError("--nats starts a replica of a plane, which needs kvevents-plane", "plane")


def find_plane() -> Any:
    """Return the module with the settings of a replica; None if the distribution kvevents-plane is not installed."""
    return import_module("kvevents_plane.replica.settings") if find_spec("kvevents_plane") else None


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    replica = find_plane()
    settings = SettingsParser(
        ServiceSettings if replica is None else replica.ReplicaSettings,
        "serve",
        flags=SHARED_FLAGS | {"replica": "--replica-name", "tls.certificate": "--https-cert"},
        tables={"tls": "https"},
        hints={"plane.servers": ", the URL of a NATS server; for HTTPS use --https-cert and --https-key"},
    )
    http = parser.add_argument_group("HTTP server (tokens are set in --config, TLS there or with --https-cert and --https-key)")
    settings.add(http, "host", "port", "insecure", "allowed_hosts", "ready.grace_seconds")
    engines = parser.add_argument_group("engines to subscribe to")
    add_sources(engines, settings)
    settings.add(engines, "topics.endpoint")
    settings.add(parser.add_argument_group("index"), "state_dir", "snapshot_seconds", "memory_limit")
    plane = parser.add_argument_group("replica of a plane (builds the index from the plane's log instead of from engines)")
    if replica is None:
        plane.add_argument("--nats", action=MissingPlaneOption, metavar="URL", help="needs kvevents[plane]")
    else:
        settings.add(plane, "plane.servers", "plane.name", "replica", *LOGIN_SETTINGS)
    add_log_options(parser)
    settings.add_other_settings(parser, "TOML file; its [[sources]] are read again whenever it changes")
    add_check(parser)


def run(args: Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    given = args.settings.read(args)
    settings = read_sources(given, args)
    replica = find_plane()
    open_source = None if replica is None else replica.index_source(settings)
    server.check(settings, args.config, given.origin)
    if args.check:
        Console().note(Span("these settings can be used", "good"))
        return ExitCode.OK
    configure_logging(args)
    # Hide the transport's warnings about engines that cannot be reached: the service logs such engines with more details.
    logging.getLogger("kvevents.subscriber.zmq_transport").setLevel(logging.ERROR)
    configure_threads()
    with trimming_memory(keep=server.HEAP_RESERVE_BYTES):
        announce = logging.getLogger("kvevents").info
        server.serve(settings, args.config, lambda url: announce("listening at %s", url), open_source)
    return ExitCode.OK
