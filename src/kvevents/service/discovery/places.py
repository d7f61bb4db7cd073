"""Where ranks publish, and the names of hosts in endpoints and URLs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvevents.endpoints import MAX_PORT, split_tcp
from kvevents.errors import ConfigError

WILDCARDS: Final = frozenset({"*", "0.0.0.0", "[::]", "::"})  # noqa: S104 - names to recognise in what engines say
"""Hosts that say "every interface of mine": nothing connects to them."""
_TRANSPORTS: Final = ("tcp", "ipc")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank publishes, and what is known of it there."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    block_size: int | None = None


def bracketed(host: str) -> str:
    """A host as it stands in front of `:port`: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def at_host(endpoint: str, host: str) -> str:
    """The endpoint as seen from elsewhere: a wildcard host becomes `host`; any other endpoint stays."""
    found = split_tcp(endpoint)
    if found is None or found[0] not in WILDCARDS:
        return endpoint
    return f"tcp://{bracketed(host)}:{found[1]}"


def check_endpoint(field: str, endpoint: str, *, bind: bool = False) -> None:
    """Raises `ConfigError`, which names the field, for what cannot be connected to, or with `bind` be listened at."""
    transport, separator, address = endpoint.partition("://")
    if not separator or not address or transport not in _TRANSPORTS:
        raise ConfigError(f"{field} is {endpoint!r}; write tcp://HOST:PORT or ipc://PATH")
    if transport != "tcp":
        return
    found = split_tcp(endpoint)
    if found is None or not 0 < found[1] <= MAX_PORT:
        raise ConfigError(f"{field} is {endpoint!r}; it needs a port from 1 to {MAX_PORT}")
    if found[0] in WILDCARDS and not bind:
        raise ConfigError(f"{field} is {endpoint!r}, which names no host to connect to; write the engine's, or bind = true")
