"""The allow-list of endpoints that registrations over HTTP may name, so that clients cannot make the service connect anywhere.

`EndpointAllowList.check` parses an endpoint more strictly than libzmq does and compares it with the patterns. It does not
resolve names. `EndpointAllowList.check_addresses` checks every address of a name after it was resolved. The allow-list rejects
some spellings that libzmq 4.3.5 accepts: `SOURCE;TARGET`, IPv4 addresses in hexadecimal, in octal, as one number or in
brackets, zone ids, and text after the port. An IPv4-mapped IPv6 address counts as IPv4.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

from kvevents.client.schemas import MAX_NAME_BYTES
from kvevents.endpoints import MAX_PORT
from kvevents.errors import ConfigError
from kvevents.service.access import Address, Network
from kvevents.service.errors import ServiceError

DEFAULT_ALLOW: Final = (
    "tcp://127.0.0.0/8:*",
    "tcp://[::1]:*",
    "tcp://10.0.0.0/8:*",
    "tcp://172.16.0.0/12:*",
    "tcp://192.168.0.0/16:*",
    "tcp://100.64.0.0/10:*",
    "tcp://[fc00::/7]:*",
)
"""Patterns that apply if none is configured: loopback, private (RFC 1918, unique local IPv6) and carrier-grade NAT."""

_FORBIDDEN: Final = tuple(
    (ipaddress.ip_network(text), what)
    for what, texts in {
        "an unspecified address": ("0.0.0.0/8", "::/128"),
        "a link-local address, where clouds have metadata services": ("169.254.0.0/16", "fe80::/10"),
        "a multicast address": ("224.0.0.0/4", "ff00::/8"),
        "a broadcast address": ("255.255.255.255/32",),
        # IPv4: Alibaba, Azure, Oracle. IPv6: AWS, Google, Oracle, Scaleway. Other addresses of these ranges are ordinary.
        "the metadata service of a cloud": (
            *("100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
            *("fd00:ec2::/32", "fd20:ce::254/128", "fd00:c1::a9fe:a9fe/128", "fd00:42::42/128"),
        ),
    }.items()
    for text in texts
)
"""Networks whose addresses only a pattern for exactly that address allows."""
_NAT64: Final = IPv6Network("64:ff9b::/96")
_EVERYWHERE: Final = IPv4Address(0)
"""Address that libzmq binds for the host `*`."""

_ENDPOINT: Final = re.compile(r"(?:\[(?P<six>[^\[\]]*)\]|(?P<host>[^:\[\]]+)):(?P<port>[1-9][0-9]{0,4})")
_PATTERN: Final = re.compile(
    r"(?:\[(?P<six>[^\[\]]*)\]|(?P<host>[^:\[\]]+)):(?P<ports>\*|[1-9][0-9]{0,4}(?:-[1-9][0-9]{0,4})?)"
)
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_MAX_NAME: Final = 253
_NUMERIC: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?")
"""Hosts whose last label is a number: some parsers read them as IPv4 addresses (`inet_aton`, WHATWG's URL standard)."""
_FORMS: Final = "tcp://HOST:PORT, ipc:///PATH or inproc://NAME"


class EndpointRefusedError(ServiceError):
    """A registration over HTTP must not name this endpoint."""

    def __init__(self, endpoint: str, reason: str, hint: str) -> None:
        text = endpoint if len(endpoint) <= MAX_NAME_BYTES else f"{endpoint[:64]}..."
        super().__init__(f"endpoint {text!r} is refused: {reason}", "endpoint-refused", hint)
        self.endpoint = endpoint


@dataclass(frozen=True, slots=True)
class _Target:
    """A parsed tcp endpoint."""

    endpoint: str
    host: str
    """Host name in lower case, without a final dot."""
    port: int
    address: Address | None
    """The host's address; None if the host is a name."""

    def refusal(self, reason: str, hint: str) -> EndpointRefusedError:
        """Return the error that refuses this endpoint."""
        return EndpointRefusedError(self.endpoint, reason, hint)


@dataclass(frozen=True, slots=True)
class _TcpPattern:
    """A pattern for tcp: a network or names, and ports."""

    network: Network | None
    name: str
    """A host name, or a suffix of names that begins with a dot; empty for a network."""
    first: int
    last: int

    def has_name(self, target: _Target) -> bool:
        fits = target.host.endswith(self.name) if self.name.startswith(".") else target.host == self.name
        return bool(self.name) and fits and self.has_port(target.port)

    def has_port(self, port: int) -> bool:
        return self.first <= port <= self.last

    def covers(self, address: Address, port: int) -> bool:
        return self.network is not None and address in self.network and self.has_port(port)

    def is_exactly(self, address: Address, port: int) -> bool:
        return self.covers(address, port) and self.network is not None and self.network.num_addresses == 1


class EndpointAllowList:
    """Endpoints that registrations over HTTP may name.

    A pattern is `tcp://HOST:PORT`, `ipc:///PATH` or `inproc://NAME`. HOST is a name, `*.SUFFIX`, an IP address or a network
    such as `10.1.0.0/16` or `[fd00:1::/64]`; PORT is a number, a range `5000-6000` or `*`. In paths `*` and `?` match
    anything but a slash. Without patterns `DEFAULT_ALLOW` applies. A host name is allowed if a pattern names it, or if
    patterns allow all addresses that it resolves to. Only a pattern for exactly that address allows link-local, multicast,
    unspecified and broadcast addresses and metadata services. Raises `ConfigError` for an invalid pattern.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self.patterns = tuple(patterns) or DEFAULT_ALLOW
        split = [(pattern, *pattern.partition("://")[::2]) for pattern in self.patterns]
        self._tcp_patterns = [_tcp_pattern(pattern, location) for pattern, transport, location in split if transport == "tcp"]
        self._paths = [_path(pattern, transport, location) for pattern, transport, location in split if transport != "tcp"]

    def check(self, endpoint: str, *, bind: bool = False) -> bool:
        """Raise `EndpointRefusedError` for an endpoint that is invalid or that no pattern allows.

        Return whether its host is a name: its addresses need `check_addresses` too. With `bind` the service listens at the
        endpoint. That is allowed on loopback, and where a pattern names exactly that address or path, since libzmq deletes a
        file that is at the path.
        """
        _check_characters(endpoint)
        transport, _, location = endpoint.partition("://")
        if transport != "tcp":
            self._check_path(endpoint, transport, location, bind=bind)
            return False
        target = _target(endpoint, bind=bind)
        if target.address is not None:
            self._check_address(target, target.address, bind=bind)
            return False
        if not any(
            pattern.has_name(target) or (pattern.network and pattern.has_port(target.port)) for pattern in self._tcp_patterns
        ):
            raise target.refusal("no pattern of the allow-list covers it", _hint(target.host, target.port))
        return True

    def check_addresses(self, endpoint: str, addresses: Iterable[str | Address], *, bind: bool = False) -> None:
        """Check an endpoint and every address of its host.

        Raises `EndpointRefusedError` if one address is not allowed, or without any address. `addresses` is ignored unless the
        endpoint is tcp.
        """
        self.check(endpoint, bind=bind)
        if not endpoint.startswith("tcp://"):
            return
        target = _target(endpoint, bind=bind)
        resolved = [_normalize_address(ipaddress.ip_address(address)) for address in addresses]
        if not resolved:
            raise target.refusal(f"{target.host} has no address", "check the name and the resolver")
        for address in resolved:
            self._check_address(target, address, bind=bind)

    def _check_address(self, target: _Target, address: Address, *, bind: bool) -> None:
        port = target.port
        if any(pattern.is_exactly(address, port) for pattern in self._tcp_patterns):
            return
        subject = f"{address}" if target.address else f"it resolves to {address}, which"
        exact = f"add a pattern for exactly this address to `allow`: {_format(address, port)}"
        if kind := _forbidden_kind(address):
            raise target.refusal(f"{subject} is {kind}", exact)
        if bind and not address.is_loopback:
            raise target.refusal(f"{subject} is not loopback, and the service listens for engines on loopback only", exact)
        if not any(pattern.covers(address, port) or pattern.has_name(target) for pattern in self._tcp_patterns):
            reason = (
                "no pattern of the allow-list covers it" if target.address else f"{subject} no pattern of the allow-list covers"
            )
            raise target.refusal(reason, _hint(str(address), port))

    def _check_path(self, endpoint: str, transport: str, location: str, *, bind: bool) -> None:
        if transport not in _PATHS:
            raise EndpointRefusedError(endpoint, "the service does not support its transport", f"write {_FORMS}")
        parts = location.split("/")
        if not _PATHS[transport](parts):
            raise EndpointRefusedError(endpoint, "its path is not plain", f"write {_FORMS} without '.', '..' and empty parts")
        if not any(kind == transport and _matches_parts(parts, pattern, exactly=bind) for kind, pattern in self._paths):
            wording = "exactly this path" if bind else "this path"
            raise EndpointRefusedError(
                endpoint, "no pattern of the allow-list covers it", f"add a pattern for {wording} to `allow`: {endpoint}"
            )

    def __repr__(self) -> str:
        return f"<AllowList {', '.join(self.patterns)}>"


# --- endpoints --------------------------------------------------------------------------------------------------------------


def _check_characters(endpoint: str) -> None:
    if len(endpoint) > MAX_NAME_BYTES:
        raise EndpointRefusedError(endpoint, f"it has more than {MAX_NAME_BYTES} characters", f"write {_FORMS}")
    if not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        raise EndpointRefusedError(endpoint, "it has invalid characters", f"write {_FORMS} in plain ASCII")


def _target(endpoint: str, *, bind: bool) -> _Target:
    match = _ENDPOINT.fullmatch(endpoint.partition("://")[2])
    if match is None or int(match["port"]) > MAX_PORT:
        raise EndpointRefusedError(
            endpoint,
            f"it is not tcp://HOST:PORT with a port from 1 to {MAX_PORT}",
            "write one host and one port, and an IPv6 address in brackets",
        )
    host = (match["host"] or "").lower().removesuffix(".")
    address = _parse_address(endpoint, match["six"], match["host"] or "", bind=bind)
    if address is None and not _is_name(host):
        raise EndpointRefusedError(endpoint, f"invalid host name {match['host']!r}", "write a name or an address")
    if address is None and bind:
        raise EndpointRefusedError(endpoint, "the service can listen only at an address", "replace the name by an address")
    return _Target(endpoint, host, int(match["port"]), address)


def _parse_address(endpoint: str, ipv6: str | None, host: str, *, bind: bool) -> Address | None:
    """Return the address that the text of a host means; None for a name."""
    try:
        if ipv6 is not None:
            return _normalize_address(IPv6Address(_without_zone(ipv6)))
        if host == "*" and bind:
            return _EVERYWHERE
        return IPv4Address(host) if _NUMERIC.fullmatch(host.lower()) else None
    except ValueError as error:
        raise EndpointRefusedError(
            endpoint, f"invalid address {host or ipv6!r}", "write IPv4 as four decimal numbers, IPv6 without a zone"
        ) from error


def _without_zone(text: str) -> str:
    if "%" in text:
        raise ValueError(text)
    return text


def _is_name(host: str) -> bool:
    return len(host) <= _MAX_NAME and all(_LABEL.fullmatch(label) for label in host.split("."))


def _normalize_address(address: Address) -> Address:
    """Return an IPv4-mapped address as IPv4, and an IPv6 address without the zone that resolvers add."""
    if isinstance(address, IPv4Address):
        return address
    return address.ipv4_mapped or IPv6Address(int(address))


def _forbidden_kind(address: Address) -> str | None:
    """Return what an address is if it is forbidden; also for the IPv4 address that NAT64 or 6to4 translates it to."""
    aliases: list[Address] = [address]
    if isinstance(address, IPv6Address):
        aliases += [address.sixtofour] if address.sixtofour else []
        aliases += [IPv4Address(int(address) & 0xFFFF_FFFF)] if address in _NAT64 else []
    return next((kind for network, kind in _FORBIDDEN for alias in aliases if alias in network), None)


def _is_plain_path(parts: Sequence[str]) -> bool:
    return len(parts) > 1 and not parts[0] and _is_plain_key(parts[1:])


def _is_plain_key(parts: Sequence[str]) -> bool:
    return not {"", ".", ".."} & set(parts)


_PATHS: Final[dict[str, Callable[[Sequence[str]], bool]]] = {"ipc": _is_plain_path, "inproc": _is_plain_key}
"""Transports with paths, and a check that a path is plain. An ipc path is absolute, so it is not an abstract socket."""


def _matches_parts(parts: Sequence[str], pattern: Sequence[str], *, exactly: bool) -> bool:
    if exactly:
        return parts == pattern and not {"*", "?", "["} & set("".join(parts))
    return len(parts) == len(pattern) and all(fnmatchcase(part, glob) for part, glob in zip(parts, pattern, strict=True))


def _hint(host: str, port: int) -> str:
    address = f"[{host}]" if ":" in host else host
    return f"add a pattern such as tcp://{address}:{port} to `allow` in the service's configuration, or name the engine there"


def _format(address: Address, port: int) -> str:
    return f"tcp://[{address}]:{port}" if isinstance(address, IPv6Address) else f"tcp://{address}:{port}"


# --- patterns ---------------------------------------------------------------------------------------------------------------


def _tcp_pattern(pattern: str, location: str) -> _TcpPattern:
    match = _PATTERN.fullmatch(location)
    if match is None:
        raise _pattern_error(pattern, "expected tcp://HOST:PORT, where PORT is a number, a range such as 5000-6000, or *")
    first, last = _ports(pattern, match["ports"])
    host = (match["host"] or "").lower().removesuffix(".")
    if match["six"] is not None or "/" in host or _NUMERIC.fullmatch(host):
        return _TcpPattern(_network(pattern, match["six"], host), "", first, last)
    name = host[1:] if host.startswith("*.") else host
    if not _is_name(host.removeprefix("*.")):
        raise _pattern_error(
            pattern,
            f"expected a name, *.SUFFIX, address or network instead of {host!r}; all addresses are 0.0.0.0/0 and [::/0]",
        )
    return _TcpPattern(None, name, first, last)


def _ports(pattern: str, text: str) -> tuple[int, int]:
    if text == "*":
        return 1, MAX_PORT
    first, _, last = text.partition("-")
    if not int(first) <= int(last or first) <= MAX_PORT:
        raise _pattern_error(pattern, f"expected ports from 1 to {MAX_PORT}, the smaller first")
    return int(first), int(last or first)


def _network(pattern: str, ipv6: str | None, host: str) -> Network:
    try:
        network = IPv4Network(host) if ipv6 is None else IPv6Network(_without_zone(ipv6))
    except ValueError as error:
        raise _pattern_error(pattern, f"{error}") from error
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped and network.prefixlen >= 96:
        raise _pattern_error(pattern, "IPv4-mapped IPv6 addresses count as IPv4; write the IPv4 address")
    return network


def _path(pattern: str, transport: str, location: str) -> tuple[str, list[str]]:
    parts = location.split("/")
    if transport not in _PATHS or not _PATHS[transport](parts):
        raise _pattern_error(pattern, f"expected {_FORMS}")
    return transport, parts


def _pattern_error(pattern: str, reason: str) -> ConfigError:
    return ConfigError(f"allow: invalid pattern {pattern!r}: {reason}")
