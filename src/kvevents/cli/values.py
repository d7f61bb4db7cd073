"""Parsers for the values of options. Each parser returns the value that a text stands for, or raises `ConfigError`."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvevents.endpoints import HTTP_SCHEMES, MAX_PORT, complete_replay, split_tcp, split_url, tcp_of, validate_source
from kvevents.errors import ConfigError

URL_SCHEMES: Final = ("http://", "https://")
MAX_RANKS: Final = 1024
"""Maximum number of ranks of an engine. Without this limit a typing error would open thousands of sockets."""
_SIZE_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def endpoint(text: str) -> str:
    """Return a ZeroMQ endpoint. `HOST:PORT` means `tcp://HOST:PORT`."""
    if "://" not in text and split_tcp(f"tcp://{text}") is not None:
        text = f"tcp://{text}"
    transport, separator, address = tcp_of(text).partition("://")
    if not separator or not address or transport not in {"tcp", "ipc"}:
        reason = "inproc:// cannot connect two processes; " if transport == "inproc" else ""
        raise ConfigError(f"invalid endpoint {text!r}: {reason}expected tcp://HOST:PORT, HOST:PORT or ipc:///PATH")
    validate_source(text)
    return text


def endpoints(text: str) -> str:
    """Return `ENDPOINT[,REPLAY]` with complete ZeroMQ endpoints; in `text`, REPLAY can be a port alone."""
    live, comma, replay = text.partition(",")
    live = endpoint(live)
    return f"{live},{endpoint(complete_replay(live, replay))}" if comma else live


def endpoints_or_url(text: str) -> str:
    """Return the ZeroMQ endpoints that `endpoints` returns, or the URL of an engine's HTTP server."""
    if text.startswith(URL_SCHEMES):
        return engine_url(text)
    try:
        return endpoints(text)
    except ConfigError as error:
        raise ConfigError(f"{error}, or the engine's URL http://HOST:PORT") from None


def number(text: str, expected: str, minimum: float = math.ulp(0.0)) -> float:
    """Return a number from `minimum` to 1e9, a limit of timers. Errors contain `expected`, such as `a factor above 0`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not minimum <= value <= 1e9:
        raise ConfigError(f"invalid value {text!r}: expected {expected}{', at most 1e9' if value > 1e9 else ''}")
    return value


positive_seconds: Final = partial(number, expected="a number of seconds above 0")
seconds: Final = partial(number, expected="a number of seconds, 0 or more", minimum=0.0)
rate: Final = partial(number, expected="a number of batches per second above 0")
factor: Final = partial(number, expected="a factor above 0")


def size(text: str) -> int:
    """Return a number of bytes; the text can have a unit: `8GiB`."""
    match = _SIZE_PATTERN.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"invalid size {text!r}: expected bytes, or a number with a unit such as 512MiB or 8GiB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def _parse_integer(text: str, expected: str, minimum: int = 0, maximum: int = 2**63 - 1, noun: str = "value") -> int:
    """Return a whole number from `minimum` to `maximum`. Errors contain `expected`, and call the value `noun`."""
    value = int(text[:20]) if text.isascii() and text.isdecimal() else -1  # `int` rejects thousands of digits
    if not minimum <= value <= maximum:
        raise ConfigError(f"invalid {noun} {text!r}: expected {f'at most {maximum}' if value >= 2**63 else expected}")
    return value


port: Final = partial(_parse_integer, expected=f"a number from 0 to {MAX_PORT}", maximum=MAX_PORT, noun="port")
positive_int: Final = partial(_parse_integer, expected="a whole number above 0", minimum=1)
whole_number: Final = partial(_parse_integer, expected="a whole number, 0 or more")
ranks: Final = partial(_parse_integer, expected=f"from 1 to {MAX_RANKS} ranks", minimum=1, maximum=MAX_RANKS)


def _parse_url(text: str, owner: str) -> str:
    """Return the URL of an HTTP server. `HOST:PORT` means `http://HOST:PORT`."""
    url = text if "://" in text else f"http://{text}"
    parts = split_url(url, HTTP_SCHEMES)
    if parts is None or parts.query or parts.fragment or not url.isascii() or not url.isprintable():
        raise ConfigError(f"invalid {owner} URL {text!r}: expected http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


service_url: Final = partial(_parse_url, owner="service")
engine_url: Final = partial(_parse_url, owner="engine")
PLACEHOLDERS: Final[dict[Any, str]] = {
    **dict.fromkeys((positive_int, whole_number, ranks), "N"),
    **dict.fromkeys((positive_seconds, seconds), "S"),
    **dict.fromkeys((rate, factor), "X"),
    **dict.fromkeys((service_url, engine_url), "URL"),
    endpoint: "ENDPOINT",
    Path: "FILE",
}
"""Placeholders for options' values in help texts, by the parser of the value."""
