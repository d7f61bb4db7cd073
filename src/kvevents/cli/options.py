"""Options that several commands have, each defined once."""

from __future__ import annotations

import argparse
import math
import os
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Final, NoReturn, TypeAlias
from urllib.parse import urlsplit

from kvevents.cli.command import CommandLineError
from kvevents.endpoints import MAX_PORT, split_tcp, validate_endpoint
from kvevents.errors import ConfigError
from kvevents.security import Curve
from kvevents.security.keys import read_public_keys, z85_decode
from kvevents.stream import Source

WAIT_FOR_SUBSCRIBER_SECONDS: Final = 60.0
"""How long `--wait-for-subscriber` waits unless told otherwise."""
MAX_RANKS: Final = 1024
"""More ranks than any engine has; without a bound a slip of the finger opens thousands of sockets."""
FOREVER: Final = float("inf")
SMALLEST: Final = math.ulp(0.0)
SERVICE_VARIABLE: Final = "KVEVENTS_SERVICE"
DEFAULT_SERVICE: Final = "http://127.0.0.1:8090"
ANSWER_SECONDS: Final = 5.0
"""How long a service has for an answer unless told otherwise; it takes milliseconds."""

Group: TypeAlias = argparse._ArgumentGroup  # noqa: SLF001 - what add_argument_group returns has no public name
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_TRANSPORTS: Final = ("tcp", "ipc", "inproc")


def endpoint(text: str) -> str:
    """A ZeroMQ endpoint; `host:port` alone means tcp."""
    if "://" not in text and split_tcp(f"tcp://{text}") is not None:
        text = f"tcp://{text}"
    transport, separator, address = text.partition("://")
    if not separator or not address or transport not in _TRANSPORTS:
        raise argparse.ArgumentTypeError(f"invalid endpoint {text!r}: expected tcp://HOST:PORT, HOST:PORT or ipc:///PATH")
    try:
        validate_endpoint(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def engine(text: str) -> Source:
    """`[NAME[:RANK]=]ENDPOINT[,REPLAY_ENDPOINT]`; an engine without a name is called by its address."""
    head, separator, places = text.rpartition("=")
    name, colon, rank = head.rpartition(":")
    first, _, replay = places.partition(",")
    if not colon:
        name, rank = head, "0"
    if (separator and not name) or not rank.isdecimal():
        raise argparse.ArgumentTypeError(
            f"invalid engine {text!r}: expected NAME=tcp://HOST:PORT or NAME:RANK=tcp://HOST:PORT,tcp://HOST:REPLAY_PORT"
        )
    name = name or first.removeprefix("tcp://")
    return Source(endpoint(first), endpoint(replay) if replay else None, name=name, rank=int(rank))


def seconds(text: str) -> float:
    """A duration above 0."""
    return number(text, "a number of seconds above 0")


def duration(text: str) -> float:
    """A duration of 0 or more."""
    return number(text, "a number of seconds, 0 or more", least=0.0)


def size(text: str) -> int:
    """Bytes, perhaps with a unit: `8GiB`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or 512MiB, or 8GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def port(text: str) -> int:
    """A TCP port; 0 takes any free one."""
    if not text.isascii() or not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; it is a number from 0 to {MAX_PORT}")
    return int(text)


def rate(text: str) -> float:
    """Batches per second, above 0."""
    return number(text, "a number of batches per second above 0")


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """A whole number of 0 or more."""
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def service_url(text: str) -> str:
    """Where a service answers; `host:port` alone means http."""
    return _url(text, "service")


def engine_url(text: str) -> str:
    """Where an engine's HTTP server answers; `host:port` alone means http."""
    return _url(text, "engine")


def _url(text: str, what: str) -> str:
    url = text if "://" in text else f"http://{text}"
    wrong = argparse.ArgumentTypeError(f"invalid URL of the {what} {text!r}: expected http://HOST:PORT or https://HOST:PORT")
    try:
        parts = urlsplit(url)
        place = parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:  # a port that is none, brackets that do not close
        raise wrong from None
    usable = parts.scheme in {"http", "https"} and place and not parts.query and not parts.fragment
    if not usable or not url.isascii() or not url.isprintable():
        raise wrong
    return url.rstrip("/")


def _no_token(_text: str) -> NoReturn:
    raise argparse.ArgumentTypeError("everybody on this machine sees arguments; set KVEVENTS_TOKEN, or use --token-file")


def _ranks(text: str) -> int:
    if count(text) > MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text} ranks are more than {MAX_RANKS}")
    return count(text)


def number(text: str, what: str, least: float = SMALLEST) -> float:
    """A number that is to be `what`, such as `a factor above 0`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < FOREVER:
        raise argparse.ArgumentTypeError(f"{text!r} must be {what}")
    return value


def add_engine(parser: ArgumentParser) -> None:
    """Where an engine is and how to ask it for replay."""
    parser.add_argument("endpoint", metavar="ENDPOINT", type=endpoint, help="where the engine publishes: tcp://HOST:PORT")
    add_engine_details(parser)


def add_engine_details(parser: ArgumentParser | Group) -> None:
    """How to ask an engine for replay, and what to receive of it."""
    replay = parser.add_mutually_exclusive_group()
    replay.add_argument(
        "--replay", metavar="ENDPOINT", type=endpoint, help="where it answers replay requests (its replay_endpoint)"
    )
    replay.add_argument("--no-replay", action="store_true", help="do without replay: losses are reported, not repaired")
    parser.add_argument("--topic-prefix", default="", metavar="PREFIX", help="receive topics that begin with this only")
    parser.add_argument(
        "--bind", action="store_true", help="listen at ENDPOINT, for an engine whose own endpoint makes it connect"
    )
    add_keys(parser)


def add_keys(parser: ArgumentParser | Group) -> None:
    """CURVE keys, which `curve_of` reads. Secrets are in files: everybody on this machine sees arguments."""
    parser.add_argument("--curve-key", metavar="FILE", type=Path, help="own CURVE keys: a NAME.key_secret of `kvevents keys`")
    parser.add_argument(
        "--curve-server-key",
        metavar="FILE|KEY",
        help="public key of the other end, if that is the CURVE server, as engines are",
    )
    parser.add_argument(
        "--curve-allow", metavar="DIR|FILE", type=Path, help="public keys that may connect, if this end is the CURVE server"
    )


def curve_of(args: argparse.Namespace) -> Curve | None:
    """The keys that `add_keys` has asked for; None without.

    Raises `CommandLineError`, and `ConfigError` for files that cannot be used.
    """
    key: Path | None = args.curve_key
    if key is None:
        if args.curve_server_key is not None or args.curve_allow is not None:
            raise CommandLineError(
                "--curve-server-key and --curve-allow need --curve-key: your own keys, a file made by `kvevents keys NAME`"
            )
        return None
    if args.curve_server_key is None and getattr(args, "bind", True) is False:
        raise CommandLineError(
            "--curve-key needs --curve-server-key as well: the engine's public key, or a file of it (NAME.key)"
        )
    return Curve(
        key_file=str(key),
        server_key=None if args.curve_server_key is None else _server_key(args.curve_server_key),
        allowed=None if args.curve_allow is None else str(args.curve_allow),
    )


def _server_key(text: str) -> str:
    if z85_decode(text) is not None:
        return text
    found = read_public_keys(Path(text))
    if len(found) > 1:
        raise ConfigError(f"--curve-server-key: {text} holds {len(found)} keys; the other end has one")
    return found[0]


def add_output(parser: ArgumentParser, json: str) -> None:
    """Declare the format of the results; `json` says what the JSON form is."""
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help=f"text for people, or json: {json} (default: text)"
    )


def add_stream(parser: ArgumentParser) -> None:
    """An engine as a subscriber follows it."""
    add_engine(parser)
    parser.add_argument("--source-name", metavar="NAME", help="what to call the engine; its address when not given")
    parser.add_argument(
        "--ranks",
        type=_ranks,
        default=1,
        metavar="N",
        help="data-parallel ranks 0 to N-1, on ports counted up from both endpoints",
    )


def add_end(parser: ArgumentParser) -> None:
    """When to stop by itself."""
    parser.add_argument("-n", "--count", type=count, metavar="N", help="stop after N batches")
    parser.add_argument("--duration", type=seconds, metavar="S", help="stop after S seconds")
    parser.add_argument(
        "--idle-timeout",
        type=seconds,
        metavar="S",
        help="stop when nothing arrived for S seconds; exit code 3 if nothing ever did",
    )


def add_publisher(parser: ArgumentParser) -> None:
    """Where to publish, and how long to be there."""
    parser.add_argument("--endpoint", default="tcp://*:5557", type=endpoint, help="where to publish (default: %(default)s)")
    parser.add_argument(
        "--replay-endpoint",
        default="tcp://*:5558",
        type=endpoint,
        metavar="ENDPOINT",
        help="where to answer replay requests (default: %(default)s)",
    )
    add_wait_for_subscriber(parser)
    parser.add_argument(
        "--linger",
        nargs="?",
        type=seconds,
        const=FOREVER,
        metavar="S",
        help="go on answering replay requests for S seconds after the last batch, or until Ctrl-C",
    )


def add_wait_for_subscriber(parser: ArgumentParser) -> None:
    """Whether to begin with nobody there."""
    parser.add_argument(
        "--wait-for-subscriber",
        nargs="?",
        type=seconds,
        const=WAIT_FOR_SUBSCRIBER_SECONDS,
        metavar="S",
        help=f"begin when somebody has subscribed, within S seconds (default: {WAIT_FOR_SUBSCRIBER_SECONDS:.0f})",
    )


def add_service(parser: ArgumentParser) -> None:
    """Which service to ask."""
    parser.add_argument(
        "--service",
        metavar="URL",
        type=service_url,
        default=os.environ.get(SERVICE_VARIABLE) or DEFAULT_SERVICE,
        help=f"where the service answers (default: {SERVICE_VARIABLE}, or {DEFAULT_SERVICE})",
    )
    add_access(parser)


def add_access(parser: ArgumentParser | Group) -> None:
    """How to be let in by a service."""
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="file of the bearer token (default: the variable KVEVENTS_TOKEN)"
    )
    # Without this, `--token SECRET` would be short for --token-file, and the error would tell the secret.
    parser.add_argument("--token", type=_no_token, help=argparse.SUPPRESS)
    parser.add_argument("--tls-ca", metavar="FILE", type=Path, help="PEM file of the authority that signed its certificate")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=ANSWER_SECONDS,
        metavar="S",
        help="how long it has for an answer (default: %(default)g)",
    )
