"""`kvevents serve`: one process that knows the fleet."""

from __future__ import annotations

import logging
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any, Final

from kvevents.cli import logs, nats
from kvevents.cli.allocator import giving_back
from kvevents.cli.command import OK, Command, CommandLineError
from kvevents.cli.console import Console, Span
from kvevents.cli.options import Group, count, endpoint, engine_url, seconds
from kvevents.cli.responsive import be_responsive
from kvevents.endpoints import MAX_PORT
from kvevents.errors import MissingDependencyError

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def size(text: str) -> int:
    """Bytes, perhaps with a unit: `8GiB`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ArgumentTypeError(f"{text!r} is no size; write bytes, or 512MiB, or 8GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def port(text: str) -> int:
    """A TCP port; 0 takes any free one."""
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise ArgumentTypeError(f"{text!r} is no port; it is a number from 0 to 65535")
    return int(text)


def worker(text: str) -> dict[str, Any]:
    """`INSTANCE[:RANK]=ENDPOINT[,REPLAY_ENDPOINT]`."""
    name, separator, places = text.partition("=")
    instance, _, rank = name.rpartition(":") if ":" in name else (name, "", "0")
    first, _, replay = places.partition(",")
    if not separator or not instance or not rank.isdecimal():
        raise ArgumentTypeError(
            f"{text!r} is no worker; write INSTANCE=tcp://HOST:PORT or INSTANCE:RANK=tcp://HOST:PORT,REPLAY"
        )
    found: dict[str, Any] = {"instance": instance, "rank": int(rank), "endpoint": endpoint(first)}
    if replay:
        found["replay_endpoint"] = endpoint(replay)
    return found


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
    """Flags go before the file, setting by setting; sources of both count."""
    add_config(parser)
    http = parser.add_argument_group("HTTP server (TLS and tokens are set in --config)")
    http.add_argument("--host", help="address to listen at (default: 127.0.0.1)")
    http.add_argument("--port", type=port, help="port to listen at; 0 takes a free one (default: 8090)")
    http.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="listen at an address that other machines reach although requests need no token",
    )
    http.add_argument(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        metavar="NAME",
        help="host name that clients reach the service by, beside its addresses: HOST or *.SUFFIX; may be given many times",
    )
    http.add_argument(
        "--grace-seconds",
        type=seconds,
        metavar="S",
        help="after SIGTERM, how long /readyz says no while everything else is answered (default: 0)",
    )
    add_sources(parser.add_argument_group("engines to follow"))
    index = parser.add_argument_group("index")
    index.add_argument("--state-dir", metavar="FOLDER", help="where snapshots and registrations outlive the process")
    index.add_argument("--snapshot-seconds", type=seconds, metavar="S", help="between two snapshots (default: 60)")
    index.add_argument(
        "--memory-limit", type=size, metavar="SIZE", help="of the index, such as 8GiB; at the limit new blocks are refused"
    )
    plane = parser.add_argument_group("replica of a plane: NATS servers, and how to log in there")
    nats.add_servers(plane, "--from", "build the index from a plane's log at this NATS server, rather than follow engines")
    nats.add_name(plane)
    plane.add_argument(
        "--replica", metavar="NAME", help="of this one among the plane's replicas (default: made of the host's name)"
    )
    nats.add_login(plane)
    add_shard(plane)
    logs.add_arguments(parser)
    add_check(parser)


def add_shard(parser: ArgumentParser | Group) -> None:
    """A share of a plane."""
    parser.add_argument(
        "--shard-url",
        metavar="URL",
        help="hold a share of the plane's lanes, and have the other replicas ask this one for it at http://HOST:PORT",
    )
    parser.add_argument(
        "--holders", type=count, metavar="N", help="replicas that hold each lane, with --shard-url (default: 2)"
    )
    parser.add_argument(
        "--shard-allow",
        action="append",
        metavar="HOST",
        help="host, *.SUFFIX or NETWORK/BITS of other replicas, which alone are asked (default: the domain of --shard-url)",
    )


def add_config(parser: ArgumentParser) -> None:
    """The file, which goes after the flags."""
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="TOML file; its [[sources]] are read again whenever it changes"
    )


def add_check(parser: ArgumentParser) -> None:
    """Whether to end before anything begins."""
    parser.add_argument("--check", action="store_true", help="check the settings, and end")


def add_sources(parser: ArgumentParser | Group) -> None:
    """Which engines to follow; `with_sources` reads them."""
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
        action="append",
        default=[],
        type=dns,
        metavar="NAME[,REPLAY_PORT]",
        help="follow the engines behind a name: HOST:PORT, or _service._tcp.NAME; without their replay port, such as "
        "HOST:5557,5558, none of them can be EXACT",
    )
    parser.add_argument("--sources", action="append", default=[], metavar="FILE", help="TOML file of [[sources]], watched")
    parser.add_argument("--model", help="model of --worker, --engine and --dns")
    parser.add_argument("--block-size", type=count, metavar="TOKENS", help="tokens per block that --worker and --dns promise")


_SETTINGS: Final = ("host", "port", "insecure", "allowed_hosts", "state_dir", "snapshot_seconds", "memory_limit")
"""Flags that are settings of the same name."""


def run(args: Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        from kvevents.service import checking, config, server  # noqa: PLC0415 - late, for what else this program does
    except ImportError as error:
        name = error.name or str(error)
        raise MissingDependencyError(f"the service needs {name}: pip install 'kvevents[service]'") from error
    tables = config.read_config(args.config) if args.config is not None else {}
    if args.config is not None:
        # Its sources are watched, so that a wrong one that is written later is a fault that shows; a wrong one now is an error.
        config.to_config(_with_settings(tables, args) | _about_plane(tables, args), str(args.config))
        tables.pop("sources", None)
    settings = config.to_config(_with_flags(tables, args), "flags")
    console = Console()
    if args.check:
        checking.check_settings(settings, args.config)
        console.note(Span("these settings can be used", "good"))
        return OK
    logs.to_stderr(args)
    # The service names engines that cannot be reached, and says more about each.
    for name in ("direct", "live"):
        logging.getLogger(f"kvevents.subscriber.{name}").setLevel(logging.ERROR)
    be_responsive()
    with giving_back(keep=server.KEPT_BYTES):
        server.serve(settings, args.config, lambda url: logging.getLogger("kvevents").info("listening at %s", url))
    return OK


def _with_flags(tables: dict[str, Any], args: Namespace) -> dict[str, Any]:
    return with_sources(_with_settings(tables, args) | _about_plane(tables, args), args)


def _with_settings(tables: dict[str, Any], args: Namespace) -> dict[str, Any]:
    found = tables | {name: given for name in _SETTINGS if (given := getattr(args, name)) is not None}
    ready = tables.get("ready", {})
    if args.grace_seconds is not None and isinstance(ready, dict):  # else the error says what it is
        found["ready"] = ready | {"grace_seconds": args.grace_seconds}
    return found


def _about_plane(tables: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """What makes a replica: a file may say a part of it, and flags the rest."""
    found = {} if args.replica is None else {"replica": args.replica}
    flags = {"url": args.shard_url, "holders": args.holders, "allow": args.shard_allow}
    shard = {name: value for name, value in flags.items() if value is not None}
    if shard and "url" not in shard and "shard" not in tables:
        flag = "--holders" if "holders" in shard else "--shard-allow"
        raise CommandLineError(f"{flag} needs --shard-url: where the other replicas reach this one")
    for name, given in (("plane", _plane(args, tables)), ("shard", shard)):
        table = tables.get(name, {})
        if given and isinstance(table, dict):  # else what it is shall be told
            found[name] = table | given
    return found


def with_sources(tables: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """The tables of a file, without its own sources, and what `add_sources` has asked for. Raises `ConfigError`."""
    found = dict(tables)
    model = {} if args.model is None else {"model": args.model}
    block_size = {} if args.block_size is None else {"block_size": args.block_size}
    if args.workers and not model:
        raise CommandLineError("--worker needs --model: routers ask for a model's workers")
    sources = [{**each, **model, **block_size} for each in args.workers]
    sources += [{"base_url": each, **model} for each in args.engines]
    found["sources"] = sources
    found["dns"] = [*found.get("dns", []), *({**each, **model, **block_size} for each in args.dns)]
    found["source_files"] = [*found.get("source_files", []), *args.sources]
    return found


def _plane(args: Namespace, tables: dict[str, Any]) -> dict[str, Any]:
    given = nats.table_of(args)
    if given and "servers" not in given and "plane" not in tables:
        options = ", ".join(nats.flags_of(given))
        tls = "; for HTTPS, name certificate and key in [tls] of --config" if "--tls" in options else ""
        raise CommandLineError(f"{options} needs --from, the URL of a NATS server{tls}")
    return given


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
  kvevents serve --from nats://10.0.0.9:4222           a replica, from what bridges have written
  kvevents serve --from nats://10.0.0.9:4222 --replica kv-0 --host 10.0.0.5 --shard-url http://10.0.0.5:8090
""",
    add_arguments=add_arguments,
    run=run,
)
