"""Options that several commands share, and the functions that read their values."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from kvevents.cli.command import CommandLineError, Group
from kvevents.cli.console import Console, Span
from kvevents.cli.values import URL_SCHEMES, endpoint, endpoints, endpoints_or_url, positive_int, positive_seconds, ranks
from kvevents.errors import ConfigError, ExternalError, UsageError
from kvevents.stream import Source
from kvevents.zeromq.keys import Curve

CURVE_FLAGS: Final = {
    "curve.key_file": "--curve-key",
    "curve.server_key": "--curve-server-key",
    "curve.allowed": "--curve-allow",
}
"""Maps each CURVE setting to the name of its option, for commands with a settings file; `add_curve` uses the same names."""


def check_writable(file: Path, *, force: bool = True) -> None:
    """Raise `UsageError` if a file cannot be written, or has content and `force` is false. Long computations begin after it."""
    directory = file.absolute().parent
    if not directory.is_dir():
        raise UsageError(f"cannot write {file}: the directory {directory} does not exist")
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a directory; name a file")
    if not os.access(file if file.exists() else directory, os.W_OK):
        raise UsageError(f"cannot write {file}: no permission; name a file that this process can write")
    if not force and file.is_file() and file.stat().st_size > 0:
        raise UsageError(f"{file} exists; name another file, or use --force to replace it")


# --- the engine that a command subscribes to


def engine(text: str) -> Source:
    """Return the source that `[NAME[:RANK]=]ENDPOINT[,REPLAY_ENDPOINT]` describes. By default, NAME is the address."""
    head, separator, address = text.rpartition("=")
    name, colon, rank = head.rpartition(":")
    if not colon:
        name, rank = head, "0"
    if (separator and not name) or not rank.isdecimal():
        raise ConfigError(f"invalid engine {text!r}: expected NAME=tcp://HOST:PORT or NAME:RANK=tcp://HOST:PORT,REPLAY_PORT")
    live, _, replay = endpoints(address).partition(",")
    return Source(live, replay or None, name=name or address.partition(",")[0].removeprefix("tcp://"), rank=int(rank))


def add_engine(parser: ArgumentParser, default: str | None = None) -> None:
    """Declare the argument for an engine, which is required if `default` is None; `default` says what happens without it."""
    more, count = ("", None) if default is None else (f" (default: {default})", "?")
    text = f"endpoint of the engine's events, tcp://HOST:PORT[,REPLAY_PORT], or the URL of its HTTP server{more}"
    parser.add_argument("endpoint", metavar="ENDPOINT|URL", nargs=count, type=endpoints_or_url, help=text)


def add_engine_details(parser: ArgumentParser | Group) -> None:
    """Declare the options for an engine's replay endpoint, topics and CURVE keys."""
    replay = parser.add_mutually_exclusive_group()
    replay.add_argument("--replay", type=endpoint, help="replay endpoint of the engine, which repairs losses (default: none)")
    replay.add_argument("--no-replay", action="store_true", help="run without replay: losses are reported, not repaired")
    parser.add_argument("--topic-prefix", default="", metavar="PREFIX", help="receive only topics with PREFIX (default: all)")
    parser.add_argument("--bind", action="store_true", help="listen at ENDPOINT, for an engine that connects")
    add_curve(parser)


def add_curve(parser: ArgumentParser | Group) -> None:
    """Declare the options for CURVE keys. Secret keys are in files, because all users of the machine can read arguments."""
    parser.add_argument("--curve-key", metavar="FILE", help="own CURVE keys: a file NAME.key_secret of `kvevents keys`")
    text = "public key of the peer, or a file with it (NAME.key), if the peer is the CURVE server, as engines are"
    parser.add_argument("--curve-server-key", metavar="FILE|KEY", help=text)
    text = "file or folder of the public keys that are accepted, if this end is the CURVE server (default: all keys)"
    parser.add_argument("--curve-allow", metavar="FILE", help=text)


def read_curve(args: Namespace) -> Curve | None:
    """Return the CURVE keys that the options name; None if no option is given. Raises the errors of `make_curve`."""
    if args.curve_key is not None and args.curve_server_key is None and getattr(args, "bind", True) is False:
        raise CommandLineError("--curve-key needs --curve-server-key: the engine's public key, or a file with it (NAME.key)")
    return make_curve(args.curve_key, args.curve_server_key, args.curve_allow)


def make_curve(key: str | None, server_key: str | None, allowed: str | None = None) -> Curve | None:
    """Return CURVE keys; None if all arguments are None.

    Raises `CommandLineError` if only `key` is None, and `ConfigError` for a file that cannot be used.
    """
    if key is None:
        if server_key is not None or allowed is not None:
            raise CommandLineError("--curve-server-key and --curve-allow need --curve-key: a file of `kvevents keys NAME`")
        return None
    return Curve(key_file=key, server_key=server_key, allowed=allowed)


def add_source(parser: ArgumentParser) -> None:
    """Declare the arguments for the engine to which `tail` and `record` subscribe; `read_sources` reads them."""
    add_engine(parser)
    add_engine_details(parser)
    parser.add_argument("--source-name", metavar="NAME", help="name of the engine in the output (default: its address)")
    text = "data-parallel ranks of the engine; rank R has the ports of rank 0 plus R"
    parser.add_argument("--ranks", type=ranks, default=1, help=text)


def read_sources(args: Namespace) -> list[Source]:
    """Return the source of each rank. Raises `ConfigError` if a port would be above 65535.

    This function does not guess the replay endpoint: a port that answers can belong to another engine. If `args.endpoint` is a
    URL, query the engine for the endpoints of all ranks, and store those of rank 0 in `args.endpoint` and `args.replay`. Raises
    `ExternalError` if the queried engine does not answer or publishes no events.
    """
    args.endpoint, _, replay = args.endpoint.partition(",")
    args.replay = None if args.no_replay else replay or args.replay
    name, curve = args.source_name or args.endpoint.partition("://")[2], read_curve(args)
    if not args.endpoint.startswith(URL_SCHEMES):
        source = Source(args.endpoint, args.replay, topic=args.topic_prefix, name=name, bind=args.bind, curve=curve)
        return source.ranks(args.ranks)
    # Import the service's packages here, because other commands do not need these packages.
    from kvevents.service.discovery.engines import EngineProvider  # noqa: PLC0415
    from kvevents.service.discovery.provider import Template  # noqa: PLC0415

    # A registration needs a model. A subscriber ignores the model, so any text is enough.
    finding = asyncio.run(EngineProvider(args.endpoint, Template(model=args.endpoint, other_hosts=True)).query())
    if not finding.registrations:
        raise ExternalError("; ".join(finding.faults))
    sources: list[Source] = []
    for found in finding.registrations:
        replay = None if args.no_replay else args.replay or found.replay_endpoint
        source = Source(found.endpoint, replay, topic=args.topic_prefix or found.topic, name=name, rank=found.rank, curve=curve)
        sources.append(replace(source, replay_is_proven=found.replay_is_proven and args.replay is None))
    args.endpoint, args.replay = sources[0].endpoint, sources[0].replay_endpoint
    return sources


def note_missing_endpoints(args: Namespace, console: Console) -> None:
    """Print a note if no replay endpoint is given, or if the replay endpoint equals the endpoint of the events."""
    if args.replay == args.endpoint:
        console.note(Span(f"{args.replay} is given for events and replay: each needs its own port", "warn"))
    if args.replay is None and not args.no_replay:
        text = "no replay endpoint given: lost batches stay lost; add --replay tcp://HOST:PORT"
        search = "" if args.bind else f" (`kvevents doctor {args.endpoint}` looks for it)"
        console.note(Span(f"{text}{search}, or --no-replay", "warn"))


def add_limits(parser: ArgumentParser) -> None:
    """Declare the options that limit the batches or the time of a command."""
    parser.add_argument("-n", "--count", type=positive_int, help="stop after N batches (default: never)")
    parser.add_argument("--duration", type=positive_seconds, help="stop after S seconds (default: never)")
    text = "stop after S seconds without a batch, with exit code 3 if none ever arrived (default: never)"
    parser.add_argument("--idle-timeout", type=positive_seconds, help=text)


# --- the endpoints at which a command publishes batches


def add_publisher(parser: ArgumentParser) -> None:
    """Declare the options for a publisher's endpoints, and for its begin and end."""
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:5557", type=endpoint, help="where to publish live events")
    text = "where to answer replay requests"
    parser.add_argument("--replay", dest="replay_endpoint", default="tcp://127.0.0.1:5558", type=endpoint, help=text)
    add_wait_for_subscriber(parser)
    text = "answer replay requests for S seconds after the last batch, or until Ctrl-C without S (default: end at once)"
    parser.add_argument("--linger", nargs="?", type=positive_seconds, const=threading.TIMEOUT_MAX, help=text)


def add_wait_for_subscriber(parser: ArgumentParser) -> None:
    """Declare the option with which a publisher waits for a subscriber before it begins."""
    text = "begin after a subscriber has connected; fail after S seconds without one (60 without S; default: begin at once)"
    parser.add_argument("--wait-for-subscriber", nargs="?", type=positive_seconds, const=60.0, help=text)


def wait_for_subscriber(args: Namespace, endpoint: str, has_subscriber: Callable[[], bool]) -> None:
    """Wait for a subscriber if `--wait-for-subscriber` is given. Raises `ExternalError` if no subscriber connects in time."""
    seconds: float | None = args.wait_for_subscriber
    until = time.monotonic() + (seconds or 0.0)
    while seconds is not None and not has_subscriber():
        if time.monotonic() > until:
            text = f"no subscriber connected to {endpoint} within {seconds:g} s"
            raise ExternalError(f"{text}; start one, such as kvevents tail {endpoint}")
        time.sleep(0.02)


def linger(args: Namespace, console: Console) -> None:
    """Wait for the time of `--linger`, in which other threads answer replay requests. A signal must raise an exception."""
    if args.linger is None:
        return
    console.note("all batches are published; answering replay requests until Ctrl-C or the end of --linger")
    threading.Event().wait(min(args.linger, threading.TIMEOUT_MAX))
