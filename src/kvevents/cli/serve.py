"""`kvevents serve`: one process that knows the fleet."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kvevents.cli import logs
from kvevents.cli.allocator import giving_back
from kvevents.cli.command import OK, Command, CommandLineError
from kvevents.cli.console import Console, Span
from kvevents.cli.options import Group, count, engine, engine_url
from kvevents.cli.responsive import be_responsive
from kvevents.cli.settings import Form, Given, Value
from kvevents.endpoints import MAX_PORT
from kvevents.errors import MissingDependencyError

if TYPE_CHECKING:
    from kvevents.service.config import EngineSources

T = TypeVar("T", bound="EngineSources")


LOGIN: Final = [f"plane.{name}" for name in ("credentials", "nkey", "tls_ca", "tls_certificate", "tls_key", "inbox_prefix")]
"""Settings by which one logs in at the servers of a plane."""


SHARED_FLAGS: Final = {
    "plane.servers": "--nats",
    "curve.key_file": "--curve-key",
    "curve.server_key": "--curve-server-key",
    "curve.allowed": "--curve-allow",
}
"""Options that are called alike in all commands, wherever the setting is."""


def worker(text: str) -> dict[str, Any]:
    """`INSTANCE[:RANK]=ENDPOINT[,REPLAY_ENDPOINT]`."""
    if "=" not in text:
        raise ArgumentTypeError(f"invalid worker {text!r}: expected NAME=tcp://HOST:PORT")
    source = engine(text)
    found = {"instance": source.name, "rank": source.rank, "endpoint": source.endpoint}
    return found if source.replay_endpoint is None else {**found, "replay_endpoint": source.replay_endpoint}


def dns(text: str) -> dict[str, Any]:
    """`TARGET[,REPLAY_PORT]`; each engine replays at its own host."""
    target, comma, replay = text.partition(",")
    found: dict[str, Any] = {"target": target}
    if comma:
        if not replay.isascii() or not replay.isdecimal() or not 0 < int(replay) <= MAX_PORT:
            raise ArgumentTypeError(f"{text!r}: {replay!r} is no port; write HOST:PORT,REPLAY_PORT")
        found["replay_endpoint"] = f"tcp://*:{int(replay)}"
    return found


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    from kvevents.service.config import ServiceConfig  # noqa: PLC0415 - late, for what else this program does

    form = Form(
        ServiceConfig,
        "serve",
        flags=SHARED_FLAGS
        | {"replica": "--replica-name", "tls.certificate": "--https-cert", "shard.tls_certificate": "--shard-tls-cert"},
        tables={"tls": "https"},
        needs={
            "plane.servers": ", the URL of a NATS server; for HTTPS, name certificate and key by --https-cert and --https-key"
        },
    )
    http = parser.add_argument_group("HTTP server (tokens are set in --config, TLS there or by --https-cert)")
    form.add(http, "host", "port", "insecure", "allowed_hosts", "ready.grace_seconds")
    add_sources(parser.add_argument_group("engines to follow"), form)
    form.add(parser.add_argument_group("index"), "state_dir", "snapshot_seconds", "memory_limit")
    plane = parser.add_argument_group("replica of a plane, whose log the index is built from rather than from engines")
    form.add(plane, "plane.servers", "plane.name", "replica", *LOGIN, "shard.url", "shard.holders", "shard.allow")
    logs.add_arguments(parser)
    form.add_rest(parser, "TOML file; its [[sources]] are read again whenever it changes")
    add_check(parser)


def add_check(parser: ArgumentParser) -> None:
    """Whether to end before anything begins."""
    parser.add_argument("--check", action="store_true", help="check the settings, and end")


def add_sources(parser: ArgumentParser | Group, form: Form[Any]) -> None:
    """Which engines to follow; `following` reads them."""
    parser.add_argument(
        "--worker",
        dest="workers",
        action="append",
        default=[],
        type=worker,
        metavar="NAME[:RANK]=ENDPOINT[,REPLAY]",
        help="follow this engine; may be given many times, and takes --model and --block-size",
    )
    parser.add_argument(
        "--engine",
        dest="engines",
        action="append",
        default=[],
        type=engine_url,
        metavar="URL",
        help="ask this engine for its endpoints: http://HOST:PORT, or HOST:PORT",
    )
    parser.add_argument(
        "--dns",
        dest="names",
        action="append",
        default=[],
        type=dns,
        metavar="NAME[,REPLAY_PORT]",
        help="follow the engines behind a name: HOST:PORT, or _service._tcp.NAME; without their replay port, such as "
        "HOST:5557,5558, none of them can be EXACT",
    )
    form.add(parser, "source_files")
    parser.add_argument("--model", help="model of --worker, --engine and --dns")
    parser.add_argument("--block-size", type=count, metavar="TOKENS", help="tokens per block that --worker and --dns promise")


def run(args: Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        from kvevents.service import server  # noqa: PLC0415 - late, for what else this program does
    except ImportError as error:
        name = error.name or str(error)
        raise MissingDependencyError(f"the service needs {name}: pip install 'kvevents[service]'") from error
    settings = following(args.form.read(args), args)
    console = Console()
    if args.check:
        server.check(settings, args.config)
        console.note(Span("these settings can be used", "good"))
        return OK
    logs.to_stderr(args)
    # The service itself logs which engines cannot be reached, with more details.
    logging.getLogger("kvevents.subscriber.zmq_transport").setLevel(logging.ERROR)
    be_responsive()
    with giving_back(keep=server.KEPT_BYTES):
        server.serve(settings, args.config, lambda url: logging.getLogger("kvevents").info("listening at %s", url))
    return OK


def following(given: Given[T], args: Namespace) -> T:
    """Settings with the engines of `add_sources`, and without the sources of the file, which are read when it is watched.

    Those are checked all the same: a wrong one that is written later is a fault that shows, a wrong one now is an error.
    """
    model = {} if args.model is None else {"model": args.model}
    common = model | ({} if args.block_size is None else {"block_size": args.block_size})
    if args.workers and not model:
        raise CommandLineError("--worker needs --model: routers ask for a model's workers")
    sources = [{**each, **common} for each in args.workers] + [{"base_url": each, **model} for each in args.engines]
    options = "--worker" if args.workers else "--engine"
    named = {"sources": Value(sources, options), "dns": Value([{**each, **common} for each in args.names], "--dns")}
    given.put({path: value for path, value in named.items() if value.value})
    settings = given.settings()
    return msgspec.structs.replace(settings, sources=settings.sources[len(given.in_file.get("sources", ())) :])


COMMAND: Final = Command(
    name="serve",
    summary="know a fleet's prefix caches, and answer for them over HTTP",
    description=(
        "Follow engines, keep the index of their prefix caches, and answer who holds how much of a prompt, and how far that "
        "can be trusted: with the HTTP API of Dynamo's standalone indexer and Mooncake Conductor, with /v1, with metrics for "
        "Prometheus and a page for people. Works without any setting: engines are then registered over HTTP."
    ),
    examples="""\
  kvevents serve                                       at http://127.0.0.1:8090, engines registered later
  kvevents serve --model llama --worker engine-0=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558
  kvevents serve --engine http://10.0.0.7:8000         ask the engine for its endpoints
  kvevents serve --config fleet.toml --state-dir /var/lib/kvevents
  kvevents serve --nats nats://10.0.0.9:4222           a replica, from what bridges have written
  kvevents serve --nats nats://10.0.0.9:4222 --replica-name kv-0 --host 10.0.0.5 --shard-url http://10.0.0.5:8090
""",
    add_arguments=add_arguments,
    run=run,
)
