"""Options of `serve` and `bridge`: the engines to subscribe to, and the plane."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from kvevents.cli.command import CommandLineError
from kvevents.cli.options import CURVE_FLAGS, Group, engine, engine_url, positive_int
from kvevents.cli.settings_parser import GivenValue, SettingsParser, SettingsValues
from kvevents.endpoints import MAX_PORT

if TYPE_CHECKING:
    from kvevents.service.config import EngineSources

T = TypeVar("T", bound="EngineSources")

LOGIN_SETTINGS: Final = tuple(
    f"plane.{name}" for name in ("credentials", "nkey", "tls_ca", "tls_certificate", "tls_key", "inbox_prefix")
)
"""Settings for the login at the NATS servers of a plane."""
SHARED_FLAGS: Final = CURVE_FLAGS | {"plane.servers": "--nats"}
"""Options that have the same name in all commands, regardless of the table of their setting."""


def worker(text: str) -> dict[str, Any]:
    """Return the registration that `INSTANCE[:RANK]=ENDPOINT[,REPLAY_ENDPOINT]` describes."""
    if "=" not in text:
        raise ArgumentTypeError(f"invalid worker {text!r}: expected NAME=tcp://HOST:PORT")
    source = engine(text)
    found = {"instance": source.name, "rank": source.rank, "endpoint": source.endpoint}
    return found if source.replay_endpoint is None else {**found, "replay_endpoint": source.replay_endpoint}


def dns(text: str) -> dict[str, Any]:
    """Return the settings of `TARGET[,REPLAY_PORT]`. Each engine answers replay requests at its own host."""
    target, comma, replay = text.partition(",")
    found: dict[str, Any] = {"target": target}
    if comma:
        if not replay.isascii() or not replay.isdecimal() or not 0 < int(replay) <= MAX_PORT:
            raise ArgumentTypeError(f"invalid port {replay!r} in {text!r}: expected HOST:PORT,REPLAY_PORT")
        found["replay_endpoint"] = f"tcp://*:{int(replay)}"
    return found


def add_sources(parser: ArgumentParser | Group, settings: SettingsParser[Any]) -> None:
    """Declare the engines to subscribe to, which `read_sources` reads."""
    parser.add_argument(
        "--worker",
        dest="workers",
        action="append",
        default=[],
        type=worker,
        metavar="NAME[:RANK]=ENDPOINT[,REPLAY]",
        help="subscribe to this engine, whose model and block size are --model and --block-size; can be repeated",
    )
    parser.add_argument(
        "--engine",
        dest="engines",
        action="append",
        default=[],
        type=engine_url,
        metavar="URL",
        help="subscribe to the engine with this HTTP server, which returns the endpoints: http://HOST:PORT or HOST:PORT; "
        "can be repeated",
    )
    parser.add_argument(
        "--dns",
        dest="names",
        action="append",
        default=[],
        type=dns,
        metavar="NAME[,REPLAY_PORT]",
        help="subscribe to the engines that a DNS name resolves to: HOST:PORT or _service._tcp.NAME; without "
        "REPLAY_PORT, as in HOST:5557,5558, their streams are never EXACT; can be repeated",
    )
    settings.add(parser, "source_files")
    parser.add_argument("--model", help="model of --worker, --engine and --dns")
    parser.add_argument(
        "--block-size",
        type=positive_int,
        metavar="TOKENS",
        help="tokens per block of --worker and --dns (default: as received)",
    )


def read_sources(given: SettingsValues[T], args: Namespace) -> T:
    """Return the settings with the engines of `add_sources` and without those of the file of `--config`.

    The latter are read when the file is watched. They are checked here all the same, so that a wrong one is an error at the
    start. Raises `ConfigError` and `CommandLineError`.
    """
    model = {} if args.model is None else {"model": args.model}
    common = model | ({} if args.block_size is None else {"block_size": args.block_size})
    if args.workers and not model:
        raise CommandLineError("--worker needs --model: clients ask for the workers of a model")
    sources = [{**each, **common} for each in args.workers] + [{"base_url": each, **model} for each in args.engines]
    options = "--worker" if args.workers else "--engine"
    named = {"sources": GivenValue(sources, options), "dns": GivenValue([{**each, **common} for each in args.names], "--dns")}
    given.put({path: value for path, value in named.items() if value.value})
    settings = given.settings()
    return msgspec.structs.replace(settings, sources=settings.sources[len(given.in_file.get("sources", ())) :])


def add_check(parser: ArgumentParser) -> None:
    """Declare whether to end after the check of the settings."""
    parser.add_argument("--check", action="store_true", help="check the settings, and exit")
