"""Which endpoints a registration over HTTP may name, so that nobody makes the service open connections as they like.

Theory of operation. `AllowList.check` reads an endpoint more strictly than libzmq does and compares it with the patterns;
nothing is resolved. `AllowList.check_addresses` comes when a resolver has told what the name means, and asks the same of every
address. What libzmq 4.3.5 takes and this refuses: `SOURCE;TARGET`, IPv4 addresses in hexadecimal, in octal, as one number or in
brackets, zone ids, and ports with something behind them. An IPv4 address mapped into IPv6 counts as IPv4.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, TypeAlias

from kvevents.endpoints import MAX_PORT
from kvevents.errors import ConfigError
from kvevents.service.errors import ServiceError
from kvevents.service.registration import MAX_NAME_BYTES

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

DEFAULT_ALLOW: Final = (
    "tcp://127.0.0.0/8:*",
    "tcp://[::1]:*",
    "tcp://10.0.0.0/8:*",
    "tcp://172.16.0.0/12:*",
    "tcp://192.168.0.0/16:*",
    "tcp://100.64.0.0/10:*",
    "tcp://[fc00::/7]:*",
)
"""Loopback, private (RFC 1918, unique local IPv6) and carrier-grade NAT: what holds where no pattern is given."""

_NEVER: Final = tuple(
    (ipaddress.ip_network(text), what)
    for what, texts in {
        "the address of no machine": ("0.0.0.0/8", "::/128"),
        "link-local, where clouds keep their metadata": ("169.254.0.0/16", "fe80::/10"),
        "multicast": ("224.0.0.0/4", "ff00::/8"),
        "broadcast": ("255.255.255.255/32",),
        # Alibaba, Azure, Oracle; AWS, Google, Oracle, Scaleway: in ranges that are private otherwise, or public.
        "a cloud's metadata service": (
            *("100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
            *("fd00:ec2::/32", "fd20:ce::254/128", "fd00:c1::a9fe:a9fe/128", "fd00:42::42/128"),
        ),
    }.items()
    for text in texts
)
"""Let in by a pattern for exactly that address only."""
_NAT64: Final = IPv6Network("64:ff9b::/96")
_EVERYWHERE: Final = IPv4Address(0)
"""What libzmq makes of the host `*`."""

_ENDPOINT: Final = re.compile(r"(?:\[(?P<six>[^\[\]]*)\]|(?P<host>[^:\[\]]+)):(?P<port>[1-9][0-9]{0,4})")
_PATTERN: Final = re.compile(
    r"(?:\[(?P<six>[^\[\]]*)\]|(?P<host>[^:\[\]]+)):(?P<ports>\*|[1-9][0-9]{0,4}(?:-[1-9][0-9]{0,4})?)"
)
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_MAX_NAME: Final = 253
_NUMERIC: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)\.?")
"""A host whose last part is a number is read as an IPv4 address by somebody (`inet_aton`, WHATWG's URL standard)."""
_FORMS: Final = "tcp://HOST:PORT, ipc:///PATH or inproc://NAME"


class EndpointRefusedError(ServiceError):
    """A registration over HTTP may not name this endpoint."""

    def __init__(self, endpoint: str, why: str, hint: str) -> None:
        shown = endpoint if len(endpoint) <= MAX_NAME_BYTES else f"{endpoint[:64]}..."
        super().__init__(f"endpoint {shown!r} is refused: {why}", "endpoint-refused", hint)
        self.endpoint = endpoint
        self.why = why


@dataclass(frozen=True, slots=True)
class _Target:
    """A tcp endpoint, read."""

    endpoint: str
    host: str
    """In lower case, without a dot at its end."""
    port: int
    address: Address | None
    """What the host is, unless it is a name."""

    def refused(self, why: str, hint: str) -> EndpointRefusedError:
        return EndpointRefusedError(self.endpoint, why, hint)


@dataclass(frozen=True, slots=True)
class _Place:
    """A pattern for tcp: a network or names, and ports."""

    network: Network | None
    name: str
    """Of a host, or with a dot in front of it the end of names; empty for a network."""
    first: int
    last: int

    def has_name(self, target: _Target) -> bool:
        fits = target.host.endswith(self.name) if self.name.startswith(".") else target.host == self.name
        return bool(self.name) and fits and self.has_port(target.port)

    def has_port(self, port: int) -> bool:
        return self.first <= port <= self.last

    def has(self, address: Address, port: int) -> bool:
        return self.network is not None and address in self.network and self.has_port(port)

    def is_exactly(self, address: Address, port: int) -> bool:
        return self.has(address, port) and self.network is not None and self.network.num_addresses == 1


class AllowList:
    """Endpoints that registrations over HTTP may name.

    `patterns` are `tcp://HOST:PORT`, where HOST is a name, `*.SUFFIX`, an IP address or a network such as `10.1.0.0/16` or
    `[fd00:1::/64]`, and PORT a number, a range `5000-6000` or `*`; `ipc:///run/engines/*` and `inproc://NAME`, where `*` and
    `?` stand for anything but a slash. Without any they are `DEFAULT_ALLOW`, whose place given ones take. A name is allowed by
    a pattern for it, or by where it leads. Link-local, multicast, unspecified and broadcast addresses and metadata services are
    let in by a pattern for exactly that address only. Raises `ConfigError`.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self.patterns = tuple(patterns) or DEFAULT_ALLOW
        split = [(pattern, *pattern.partition("://")[::2]) for pattern in self.patterns]
        self._places = [_place(pattern, rest) for pattern, transport, rest in split if transport == "tcp"]
        self._paths = [_path(pattern, transport, rest) for pattern, transport, rest in split if transport != "tcp"]

    def check(self, endpoint: str, *, bind: bool = False) -> None:
        """Refuse what is written wrongly or what no pattern fits; resolves nothing, so names also need `check_addresses`.

        With `bind` the service is to listen there: on loopback, or where a pattern names exactly that address or path. libzmq
        deletes whatever file it finds at an ipc path that it listens at. Raises `EndpointRefusedError`.
        """
        _check_spelling(endpoint)
        transport, _, rest = endpoint.partition("://")
        if transport != "tcp":
            self._check_path(endpoint, transport, rest, bind=bind)
            return
        target = _target(endpoint, bind=bind)
        if target.address is not None:
            self._check_address(target, target.address, bind=bind)
        elif not any(place.has_name(target) or (place.network and place.has_port(target.port)) for place in self._places):
            raise target.refused("it is on no pattern of the allow-list", _hint(target.host, target.port))

    def check_addresses(self, endpoint: str, addresses: Iterable[str | Address], *, bind: bool = False) -> None:
        """`check`, and the same for every address that the endpoint's host has. One that is not allowed refuses all.

        Raises `EndpointRefusedError`, also without any address; for endpoints that are not tcp `addresses` does not matter.
        """
        self.check(endpoint, bind=bind)
        if not endpoint.startswith("tcp://"):
            return
        target = _target(endpoint, bind=bind)
        found = [_unwrapped(ipaddress.ip_address(address)) for address in addresses]
        if not found:
            raise target.refused(f"{target.host} has no address", "check the name and the resolver")
        for address in found:
            self._check_address(target, address, bind=bind)

    def _check_address(self, target: _Target, address: Address, *, bind: bool) -> None:
        port = target.port
        if any(place.is_exactly(address, port) for place in self._places):
            return
        leads = f"{address} is" if target.address else f"it leads to {address}, which is"
        very = f"only a pattern for this very address allows it: {_spelled(address, port)}"
        if what := _never(address):
            raise target.refused(f"{leads} {what}", very)
        if bind and not address.is_loopback:
            raise target.refused(f"{leads} not loopback, where alone the service listens for engines", very)
        if not any(place.has(address, port) or place.has_name(target) for place in self._places):
            raise target.refused(f"{leads} on no pattern of the allow-list", _hint(str(address), port))

    def _check_path(self, endpoint: str, transport: str, rest: str, *, bind: bool) -> None:
        if transport not in _PATHS:
            raise EndpointRefusedError(endpoint, "it is of no transport that the service knows", f"write {_FORMS}")
        parts = rest.split("/")
        if not _PATHS[transport](parts):
            raise EndpointRefusedError(endpoint, "its path is not plain", f"write {_FORMS}, without . and .. and empty parts")
        if not any(kind == transport and _fits(parts, known, exactly=bind) for kind, known in self._paths):
            more = "very path" if bind else "path"
            raise EndpointRefusedError(
                endpoint, "it is on no pattern of the allow-list", f"a pattern for this {more} allows it: {endpoint}"
            )

    def __repr__(self) -> str:
        return f"<AllowList {', '.join(self.patterns)}>"


# --- endpoints --------------------------------------------------------------------------------------------------------------


def _check_spelling(endpoint: str) -> None:
    if len(endpoint) > MAX_NAME_BYTES:
        raise EndpointRefusedError(endpoint, f"it has more than {MAX_NAME_BYTES} characters", f"write {_FORMS}")
    if not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        raise EndpointRefusedError(endpoint, "it has characters that no endpoint has", f"write {_FORMS} in plain ASCII")


def _target(endpoint: str, *, bind: bool) -> _Target:
    read = _ENDPOINT.fullmatch(endpoint.partition("://")[2])
    if read is None or int(read["port"]) > MAX_PORT:
        raise EndpointRefusedError(
            endpoint,
            f"it is not tcp://HOST:PORT with a port from 1 to {MAX_PORT}",
            "write one host and one port, and an IPv6 address in brackets",
        )
    host = (read["host"] or "").lower().removesuffix(".")
    address = _literal(endpoint, read["six"], read["host"] or "", bind=bind)
    if address is None and not _is_name(host):
        raise EndpointRefusedError(endpoint, f"{read['host']!r} is no host name", "write a name or an address")
    if address is None and bind:
        raise EndpointRefusedError(endpoint, "only an address can be listened at", "write the address instead of the name")
    return _Target(endpoint, host, int(read["port"]), address)


def _literal(endpoint: str, six: str | None, host: str, *, bind: bool) -> Address | None:
    """The address that a host is; None for a name."""
    try:
        if six is not None:
            return _unwrapped(IPv6Address(_without_zone(six)))
        if host == "*" and bind:
            return _EVERYWHERE
        return IPv4Address(host) if _NUMERIC.fullmatch(host.lower()) else None
    except ValueError as error:
        raise EndpointRefusedError(
            endpoint, f"{host or six!r} is no plain address", "write IPv4 as four decimal numbers, IPv6 without a zone"
        ) from error


def _without_zone(text: str) -> str:
    if "%" in text:
        raise ValueError(text)
    return text


def _is_name(host: str) -> bool:
    return len(host) <= _MAX_NAME and all(_LABEL.fullmatch(label) for label in host.split("."))


def _unwrapped(address: Address) -> Address:
    """An IPv4 address that was mapped into IPv6, and IPv6 addresses without the zone that resolvers add."""
    if isinstance(address, IPv4Address):
        return address
    return address.ipv4_mapped or IPv6Address(int(address))


def _never(address: Address) -> str | None:
    """What keeps an address out, or the IPv4 address that NAT64 or 6to4 makes of it."""
    faces: list[Address] = [address]
    if isinstance(address, IPv6Address):
        faces += [address.sixtofour] if address.sixtofour else []
        faces += [IPv4Address(int(address) & 0xFFFF_FFFF)] if address in _NAT64 else []
    return next((what for network, what in _NEVER for face in faces if face in network), None)


def _is_plain_path(parts: Sequence[str]) -> bool:
    return len(parts) > 1 and not parts[0] and _is_plain_key(parts[1:])


def _is_plain_key(parts: Sequence[str]) -> bool:
    return not {"", ".", ".."} & set(parts)


_PATHS: Final[dict[str, Callable[[Sequence[str]], bool]]] = {"ipc": _is_plain_path, "inproc": _is_plain_key}
"""Transports with paths, and what makes one plain. One of ipc begins at the root, so it is none of Linux' abstract sockets."""


def _fits(parts: Sequence[str], pattern: Sequence[str], *, exactly: bool) -> bool:
    if exactly:
        return parts == pattern and not {"*", "?", "["} & set("".join(parts))
    return len(parts) == len(pattern) and all(fnmatchcase(part, known) for part, known in zip(parts, pattern, strict=True))


def _hint(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"add a pattern such as tcp://{shown}:{port} to `allow` in the service's configuration, or name the engine there"


def _spelled(address: Address, port: int) -> str:
    return f"tcp://[{address}]:{port}" if isinstance(address, IPv6Address) else f"tcp://{address}:{port}"


# --- patterns ---------------------------------------------------------------------------------------------------------------


def _place(pattern: str, rest: str) -> _Place:
    read = _PATTERN.fullmatch(rest)
    if read is None:
        raise _wrong(pattern, "it is not tcp://HOST:PORT, where PORT is a number, a range 5000-6000 or *")
    first, last = _ports(pattern, read["ports"])
    host = (read["host"] or "").lower().removesuffix(".")
    if read["six"] is not None or "/" in host or _NUMERIC.fullmatch(host):
        return _Place(_network(pattern, read["six"], host), "", first, last)
    name = host[1:] if host.startswith("*.") else host
    if not _is_name(host.removeprefix("*.")):
        raise _wrong(pattern, f"{host!r} is no name, *.SUFFIX, address or network; all addresses are 0.0.0.0/0 and [::/0]")
    return _Place(None, name, first, last)


def _ports(pattern: str, text: str) -> tuple[int, int]:
    if text == "*":
        return 1, MAX_PORT
    first, _, last = text.partition("-")
    if not int(first) <= int(last or first) <= MAX_PORT:
        raise _wrong(pattern, f"ports are from 1 to {MAX_PORT}, the smaller first")
    return int(first), int(last or first)


def _network(pattern: str, six: str | None, host: str) -> Network:
    try:
        network = IPv4Network(host) if six is None else IPv6Network(_without_zone(six))
    except ValueError as error:
        raise _wrong(pattern, f"{error}") from error
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped and network.prefixlen >= 96:
        raise _wrong(pattern, "IPv4 addresses that are mapped into IPv6 count as IPv4; write them as such")
    return network


def _path(pattern: str, transport: str, rest: str) -> tuple[str, list[str]]:
    parts = rest.split("/")
    if transport not in _PATHS or not _PATHS[transport](parts):
        raise _wrong(pattern, f"it must look like {_FORMS}")
    return transport, parts


def _wrong(pattern: str, why: str) -> ConfigError:
    return ConfigError(f"allow: pattern {pattern!r} means nothing: {why}")
