"""Host names and addresses in settings and in HTTP headers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final, TypeAlias

from kvevents.errors import ConfigError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_PATTERN: Final = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


def address_of(host: str) -> Address | None:
    """Return `host` as an address; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens at `host`."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


def host_of(place: str) -> str:
    """Return HOST of `HOST`, `HOST:PORT`, `[HOST]` or `[HOST]:PORT`, in lower case and without a final dot."""
    if place.startswith("["):
        return place[1:].partition("]")[0].lower()
    return place.partition(":")[0].lower().removesuffix(".")


class HostPatterns:
    """A set of hosts: names, addresses, networks such as `10.0.0.0/8`, and `*.SUFFIX` for all names with it. Ignores case.

    Raises `ConfigError`, which names the `setting`, for anything else.
    """

    def __init__(self, patterns: Sequence[str], setting: str) -> None:
        networks = {pattern: _network_of(pattern) for pattern in patterns}
        for pattern, network in networks.items():
            if network is None and _PATTERN.fullmatch(pattern) is None:
                raise ConfigError(
                    f"invalid {setting} entry {pattern!r}: expected HOST, NETWORK/BITS or *.SUFFIX, without a port"
                )
        self._networks: Final = [network for network in networks.values() if network is not None]
        self._names: Final = {each.lower() for each in patterns if not each.startswith("*.")}
        self._suffixes: Final = tuple(each[1:].lower() for each in patterns if each.startswith("*."))

    def __contains__(self, host: str) -> bool:
        if host in self._names or (bool(self._suffixes) and host.endswith(self._suffixes)):
            return True
        address = address_of(host) if self._networks else None
        return address is not None and any(address in network for network in self._networks)


def _network_of(pattern: str) -> Network | None:
    try:
        return ipaddress.ip_network(pattern)
    except ValueError:
        return None
