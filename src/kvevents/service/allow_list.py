"""The allow-list of endpoints that HTTP registrations may name, so that clients cannot make the service connect to any host.

`EndpointAllowList.check` parses an endpoint more strictly than libzmq does and compares it with the patterns. The check rejects
some spellings that libzmq 4.3.5 accepts: `SOURCE;TARGET`, IPv4 addresses in hexadecimal, in octal, as one number or in
brackets, zone ids, and text after the port. An IPv4-mapped IPv6 address counts as IPv4.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, NamedTuple

from kvevents.client.schemas import MAX_NAME_BYTES
from kvevents.endpoints import MAX_PORT
from kvevents.errors import ConfigError
from kvevents.service.access import Address, Network
from kvevents.service.discovery.provider import bracket_host
from kvevents.service.errors import ServiceError

_PRIVATE_NETS: Final = ("127.0.0.0/8", "[::1]", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "[fc00::/7]")
DEFAULT_ALLOW: Final = tuple(f"tcp://{network}:*" for network in _PRIVATE_NETS)
"""Patterns that apply by default: loopback, private (RFC 1918, unique local IPv6) and carrier-grade NAT addresses."""

_FORBIDDEN_NETWORKS: Final = tuple(
    (ipaddress.ip_network(text), what)
    for what, texts in {
        "an unspecified address": ("0.0.0.0/8", "::/128"),
        "a link-local address, where clouds have metadata services": ("169.254.0.0/16", "fe80::/10"),
        "a multicast address": ("224.0.0.0/4", "ff00::/8"),
        "a broadcast address": ("255.255.255.255/32",),
        # IPv4: Alibaba, Azure, Oracle. IPv6: AWS, Google, Oracle, Scaleway. Neighbouring addresses are allowed.
        "the metadata service of a cloud": (
            *("100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
            *("fd00:ec2::/32", "fd20:ce::254/128", "fd00:c1::a9fe:a9fe/128", "fd00:42::42/128"),
        ),
    }.items()
    for text in texts
)
"""Networks and their descriptions. An address in one of these networks needs a pattern for exactly this address."""
_NAT64: Final = IPv6Network("64:ff9b::/96")

_PORT: Final = r"[1-9][0-9]{0,4}"
_LOCATION_PATTERN: Final = re.compile(rf"(?:\[(?P<six>[^\[\]%]*)\]|(?P<host>[^:\[\]]+)):(?P<ports>\*|{_PORT}(?:-{_PORT})?)")
"""Matches a host and its port, and in patterns also a network and a range of ports."""
_LABEL_PATTERN: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC_HOST_PATTERN: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?")
"""Matches a host whose last label is a number. `inet_aton` and WHATWG's URL standard read such hosts as IPv4 addresses."""
_ENDPOINT_FORMS: Final = "tcp://HOST:PORT, ipc:///PATH or inproc://NAME"
_UNCOVERED_TEXT: Final = "no pattern of the allow-list covers"


class EndpointRefusedError(ServiceError):
    """Raised for an endpoint that registrations over HTTP must not name."""

    def __init__(self, endpoint: str, reason: str, hint: str) -> None:
        text = endpoint if len(endpoint) <= MAX_NAME_BYTES else f"{endpoint[:64]}..."
        super().__init__(f"endpoint {text!r} is refused: {reason}", "endpoint-refused", hint)


class _TcpEndpoint(NamedTuple):
    host: str
    """Host name in lower case, without a final dot."""
    port: int
    address: Address | None
    """The host's address; None if the host is a name."""


class _TcpPattern(NamedTuple):
    """A pattern for TCP endpoints: a network or one or more names, together with ports."""

    network: Network | None
    name: str
    """A host name, or a suffix of host names that begins with a dot; empty if the pattern is for a network."""
    ports: range

    def has_name(self, target: _TcpEndpoint) -> bool:
        fits = target.host.endswith(self.name) if self.name.startswith(".") else target.host == self.name
        return bool(self.name) and fits and target.port in self.ports


class EndpointAllowList:
    """Endpoints that registrations over HTTP may name.

    A pattern is `tcp://HOST:PORT`, `ipc:///PATH` or `inproc://NAME`. HOST is a name, `*.SUFFIX`, an IP address or a network
    such as `10.1.0.0/16` or `[fd00:1::/64]`; PORT is a number, a range `5000-6000` or `*`. In paths, `*` and `?` do not match a
    slash. Without patterns `DEFAULT_ALLOW` applies. A host name is allowed if a pattern names it, or if patterns allow all
    addresses that it resolves to. An unspecified, link-local, multicast or broadcast address, and the address of a cloud's
    metadata service, need a pattern for exactly this address. Raises `ConfigError` for an invalid pattern.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self.patterns = tuple(patterns) or DEFAULT_ALLOW
        split = [(pattern, *pattern.partition("://")[::2]) for pattern in self.patterns]
        self._tcp_patterns = [_parse_tcp(pattern, location) for pattern, kind, location in split if kind == "tcp"]
        self._paths = [_parse_path(pattern, kind, location) for pattern, kind, location in split if kind != "tcp"]

    def check(self, endpoint: str, addresses: Iterable[str | Address] | None = None) -> bool:
        """Raise `EndpointRefusedError` for an endpoint that is invalid or that no pattern allows.

        Return whether the endpoint's host is a name. If it is, the caller must call this method again with all `addresses` of
        the name: the name must have at least one address, and all its addresses must be allowed.
        """
        if len(endpoint) > MAX_NAME_BYTES:
            raise EndpointRefusedError(endpoint, f"it has more than {MAX_NAME_BYTES} characters", f"write {_ENDPOINT_FORMS}")
        if not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
            raise EndpointRefusedError(endpoint, "it has invalid characters", f"write {_ENDPOINT_FORMS} in plain ASCII")
        transport, _, location = endpoint.partition("://")
        if transport != "tcp":
            self._check_path(endpoint, transport, location)
            return False
        target = _parse_target(endpoint, location)
        if target.address is not None:
            self._check_address(endpoint, target, target.address)
        elif addresses is not None:
            resolved = [_normalize_address(ipaddress.ip_address(address)) for address in addresses]
            if not resolved:
                raise EndpointRefusedError(endpoint, f"{target.host} has no address", "check the name and the resolver")
            for address in resolved:
                self._check_address(endpoint, target, address)
        elif not any(
            pattern.has_name(target) or (pattern.network and target.port in pattern.ports) for pattern in self._tcp_patterns
        ):
            raise EndpointRefusedError(endpoint, f"{_UNCOVERED_TEXT} it", _make_hint(target.host, target.port))
        return target.address is None

    def _check_address(self, endpoint: str, target: _TcpEndpoint, address: Address) -> None:
        of_port = [pattern.network for pattern in self._tcp_patterns if pattern.network and target.port in pattern.ports]
        networks = [network for network in of_port if address in network]
        if any(network.num_addresses == 1 for network in networks):
            return
        subject = f"{address}" if target.address else f"it resolves to {address}, which"
        if kind := _forbidden_kind(address):
            exact = f"add a pattern for exactly this address to `allow`: {_format_pattern(str(address), target.port)}"
            raise EndpointRefusedError(endpoint, f"{subject} is {kind}", exact)
        if not networks and not any(pattern.has_name(target) for pattern in self._tcp_patterns):
            reason = f"{_UNCOVERED_TEXT} it" if target.address else f"{subject} {_UNCOVERED_TEXT}"
            raise EndpointRefusedError(endpoint, reason, _make_hint(str(address), target.port))

    def _check_path(self, endpoint: str, transport: str, location: str) -> None:
        parts = _plain_parts(transport, location)
        if not parts:
            hint = f"write {_ENDPOINT_FORMS} without '.', '..' and empty parts"
            raise EndpointRefusedError(endpoint, "its transport or its path is not supported", hint)
        patterns = [pattern for kind, pattern in self._paths if kind == transport and len(pattern) == len(parts)]
        if not any(all(map(fnmatchcase, parts, pattern)) for pattern in patterns):
            raise EndpointRefusedError(endpoint, f"{_UNCOVERED_TEXT} it", f"add a pattern for this path to `allow`: {endpoint}")


# --- endpoints --------------------------------------------------------------------------------------------------------------


def _parse_target(endpoint: str, location: str) -> _TcpEndpoint:
    match = _LOCATION_PATTERN.fullmatch(location)
    if match is None or not match["ports"].isdecimal() or int(match["ports"]) > MAX_PORT:
        hint = "write one host and one port, and an IPv6 address in brackets, without a zone"
        raise EndpointRefusedError(endpoint, f"it is not tcp://HOST:PORT with a port from 1 to {MAX_PORT}", hint)
    six, text = match["six"], match["host"] or ""
    host, address = text.lower().removesuffix("."), None
    try:
        if six is not None:
            address = _normalize_address(IPv6Address(six))
        elif _NUMERIC_HOST_PATTERN.fullmatch(text.lower()):
            address = IPv4Address(text)
    except ValueError as error:
        reason = f"invalid address {text or six!r}"
        raise EndpointRefusedError(endpoint, reason, "write IPv4 as four decimal numbers") from error
    if address is None and not _is_name(host):
        raise EndpointRefusedError(endpoint, f"invalid host name {text!r}", "write a name or an address")
    return _TcpEndpoint(host, int(match["ports"]), address)


def _is_name(host: str) -> bool:
    return len(host) <= 253 and all(_LABEL_PATTERN.fullmatch(label) for label in host.split("."))


def _normalize_address(address: Address) -> Address:
    """Return an IPv4-mapped address as IPv4, and an IPv6 address without the zone that resolvers add."""
    return address if isinstance(address, IPv4Address) else address.ipv4_mapped or IPv6Address(int(address))


def _forbidden_kind(address: Address) -> str | None:
    """Return the kind of a forbidden address; None if allowed. Of NAT64 and 6to4 addresses, the IPv4 address counts, too."""
    aliases: list[Address] = [address]
    if isinstance(address, IPv6Address):
        aliases += [address.sixtofour] if address.sixtofour else []
        aliases += [IPv4Address(int(address) & 0xFFFF_FFFF)] if address in _NAT64 else []
    return next((kind for network, kind in _FORBIDDEN_NETWORKS for alias in aliases if alias in network), None)


def _plain_parts(transport: str, location: str) -> list[str]:
    """Return the parts of an ipc path or an inproc name; empty for another transport and for a path that is not plain.

    A plain path has no part `.`, `..` or "". An ipc path must also be absolute, so an abstract socket is not plain.
    """
    path = location.removeprefix("/") if transport == "ipc" else location
    is_known = transport == "inproc" or (transport == "ipc" and path != location)
    parts = path.split("/")
    return parts if is_known and not {"", ".", ".."} & set(parts) else []


def _make_hint(host: str, port: int) -> str:
    example = _format_pattern(host, port)
    return f"add a pattern such as {example} to `allow` in the service's configuration, or name the engine there"


def _format_pattern(host: str, port: int) -> str:
    return f"tcp://{bracket_host(host)}:{port}"


# --- patterns ---------------------------------------------------------------------------------------------------------------


def _parse_tcp(pattern: str, location: str) -> _TcpPattern:
    match = _LOCATION_PATTERN.fullmatch(location)
    if match is None:
        raise _pattern_error(pattern, "expected tcp://HOST:PORT, where PORT is a number, a range such as 5000-6000, or *")
    ports = _parse_ports(pattern, match["ports"])
    host = (match["host"] or "").lower().removesuffix(".")
    if match["six"] is not None or "/" in host or _NUMERIC_HOST_PATTERN.fullmatch(host):
        return _TcpPattern(_parse_network(pattern, match["six"], host), "", ports)
    if not _is_name(host.removeprefix("*.")):
        forms = "a name, *.SUFFIX, address or network"
        raise _pattern_error(pattern, f"expected {forms} instead of {host!r}; write 0.0.0.0/0 and [::/0] for all addresses")
    return _TcpPattern(None, host.removeprefix("*"), ports)


def _parse_ports(pattern: str, text: str) -> range:
    first, _, last = ("1", "", str(MAX_PORT)) if text == "*" else text.partition("-")
    if not int(first) <= int(last or first) <= MAX_PORT:
        raise _pattern_error(pattern, f"expected ports from 1 to {MAX_PORT}, the smaller port first")
    return range(int(first), int(last or first) + 1)


def _parse_network(pattern: str, ipv6: str | None, host: str) -> Network:
    try:
        network = IPv4Network(host) if ipv6 is None else IPv6Network(ipv6)
    except ValueError as error:
        raise _pattern_error(pattern, f"{error}") from error
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped and network.prefixlen >= 96:
        raise _pattern_error(pattern, "IPv4-mapped IPv6 addresses count as IPv4; write the IPv4 address")
    return network


def _parse_path(pattern: str, transport: str, location: str) -> tuple[str, list[str]]:
    if not (parts := _plain_parts(transport, location)):
        raise _pattern_error(pattern, f"expected {_ENDPOINT_FORMS}")
    return transport, parts


def _pattern_error(pattern: str, reason: str) -> ConfigError:
    return ConfigError(f"allow: invalid pattern {pattern!r}: {reason}")
