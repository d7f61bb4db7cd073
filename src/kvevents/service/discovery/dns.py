"""Discovery of the engines behind a DNS name: every address, or every SRV target, is one instance.

A name is looked up in the hosts file first and then in DNS. Containers usually configure this order in `nsswitch.conf`.
dnspython sends the queries, because `getaddrinfo` knows neither SRV records nor TTLs. If a nameserver is silent, `getaddrinfo`
blocks its thread and cannot be cancelled. Names that only other NSS modules know (mDNS, LDAP) are not found.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self

from msgspec.structs import replace

from kvevents.backoff import SYSTEM_CLOCK, Backoff, Clock, apply_jitter
from kvevents.endpoints import MAX_PORT
from kvevents.errors import ConfigError, ExternalError, MissingDependencyError
from kvevents.service.discovery.engines import DEFAULT_HTTP_CLIENT, EngineHttpClient, EngineProvider
from kvevents.service.discovery.provider import DEFAULT_TEMPLATE, Finding, Template, bracket_host

MIN_PAUSE_SECONDS: Final = 5.0
"""Minimum pause in seconds between two lookups, even if the TTL is shorter. CoreDNS sends a TTL of 5 for a headless service;
some servers send 0."""
MAX_PAUSE_SECONDS: Final = 60.0
"""Maximum pause in seconds between two lookups, even if the TTL is longer, so that new engines are found in time."""
_SCHEMES: Final = ("tcp", "http", "https")


class ResolveError(ExternalError):
    """Raised if a name does not resolve. The message says why."""


class Resolution(NamedTuple):
    """The result of a lookup."""

    hosts: tuple[tuple[str, int | None], ...]
    """Distinct hosts in sorted order, each with a port if the DNS record has one."""
    ttl: float = 0.0
    """Seconds for which the result is valid."""


@dataclass(frozen=True, slots=True)
class DnsResolver:
    """Looks up names at `nameservers`, by default those in `/etc/resolv.conf`.

    Raises `MissingDependencyError` if dnspython is not installed. The methods raise `ResolveError` if no nameserver answers or
    the name does not exist.
    """

    nameservers: tuple[str, ...] = ()
    port: int = 53
    """Port of the nameservers in `nameservers`."""
    seconds: float = 5.0
    """Maximum number of seconds for one lookup, including all nameservers and repeated queries."""
    hosts: Path = Path("/etc/hosts")

    def __post_init__(self) -> None:
        if importlib.util.find_spec("dns") is None:
            raise MissingDependencyError("discovery by DNS needs dnspython", "service")

    async def addresses(self, name: str) -> Resolution:
        """Return the IPv4 addresses of a name, or else its IPv6 addresses, so that a host with both kinds is one engine."""
        listed = await asyncio.to_thread(_addresses_in, self.hosts, name)
        if listed:
            return Resolution(listed)
        for kind in ("A", "AAAA"):
            resolved = await self._look_up(name, kind)
            if resolved.hosts:
                return resolved
        raise ResolveError(f"{name} has no addresses")

    async def services(self, name: str) -> Resolution:
        """Return the targets of the SRV records (without the final dot) and their ports."""
        resolved = await self._look_up(name, "SRV")
        if not resolved.hosts:
            raise ResolveError(f"{name} has no SRV records")
        return resolved

    async def _look_up(self, name: str, kind: str) -> Resolution:
        """Return the records of one type. The result is empty if DNS reports that the name has no such records."""
        from dns.asyncbackend import get_backend  # noqa: PLC0415
        from dns.asyncresolver import Resolver as AsyncResolver  # noqa: PLC0415
        from dns.exception import DNSException, Timeout  # noqa: PLC0415
        from dns.resolver import NXDOMAIN  # noqa: PLC0415

        try:
            # Create a resolver for each lookup, because a resolver reads resolv.conf only when it is created.
            resolver = AsyncResolver(configure=not self.nameservers)
            if self.nameservers:
                resolver.nameservers, resolver.port = list(self.nameservers), self.port
            backend = get_backend("asyncio")
            answer = await resolver.resolve(
                name, kind, raise_on_no_answer=False, lifetime=self.seconds, search=True, backend=backend
            )
        except NXDOMAIN:
            return Resolution(())
        except Timeout as error:
            raise ResolveError(f"{name} cannot be resolved: no nameserver answers in time") from error
        except (DNSException, OSError) as error:
            raise ResolveError(f"{name} cannot be resolved: {error}") from error
        records = answer.rrset or ()
        if kind == "SRV":
            hosts = {(str(record.target).rstrip("."), record.port) for record in records} - {("", 0)}
        else:
            hosts = {(record.address, None) for record in records}
        # Sort the hosts, because nameservers rotate the order of records.
        return Resolution(tuple(sorted(hosts)), float(answer.chaining_result.minimum_ttl))


def _addresses_in(hosts: Path, name: str) -> tuple[tuple[str, int | None], ...]:
    """Return the addresses of a name in a hosts file. If the name is an address, return this address."""
    address = name.removeprefix("[").removesuffix("]")
    if ":" in address or address.replace(".", "").isdecimal():
        return ((address, None),)
    try:
        lines = hosts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    words = [line.partition("#")[0].split() for line in lines]
    found = [entry[0] for entry in words if name.lower().rstrip(".") in (word.lower() for word in entry[1:])]
    addresses = list(dict.fromkeys(found))
    ipv4 = [address for address in addresses if ":" not in address]
    return tuple((address, None) for address in ipv4 or addresses)


class DnsTarget(NamedTuple):
    """A name to look up, and the kind of server that listens at each address of the name."""

    scheme: str
    """`tcp` for the events of an engine, `http` or `https` for a server that describes an engine."""
    host: str
    port: int | None
    """Port of the server; None if the SRV record contains the port."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `HOST:PORT` or `_service._tcp.NAME`, optionally after `tcp://`, `http://` or `https://`.

        Raises `ConfigError`.
        """
        scheme, separator, address = text.rpartition("://")
        host, colon, port = address.rpartition(":")
        if scheme not in _SCHEMES and separator:
            raise ConfigError(f"invalid DNS target {text!r}: expected tcp://, or http:// for engines that describe themselves")
        if address.startswith("_") and not colon:
            return cls(scheme or "tcp", address, None)
        if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
            raise ConfigError(f"invalid DNS target {text!r}: expected HOST:PORT, or _service._tcp.NAME for SRV records")
        return cls(scheme or "tcp", host, int(port))


@dataclass(frozen=True, slots=True)
class DnsProvider:
    """Finds the engines behind a DNS name. If the target begins with `http://`, each engine is queried for its endpoints.

    Raises `ConfigError` for an invalid target, and for a template without a model if the engines are not queried.
    """

    target: str
    template: Template = DEFAULT_TEMPLATE
    resolver: DnsResolver = field(default_factory=DnsResolver)
    max_stale: float = 300.0
    """Seconds for which engines stay after their name stops resolving, so that a dead nameserver does not empty the index."""
    http: EngineHttpClient = DEFAULT_HTTP_CLIENT
    clock: Clock = field(default=SYSTEM_CLOCK, compare=False, repr=False)

    def __post_init__(self) -> None:
        scheme, host, port = DnsTarget.parse(self.target)
        if scheme == "tcp":
            self.template.registrations(host, f"tcp://{host}:{port or 1}")

    @property
    def name(self) -> str:
        """The name in logs, such as `dns engines.default.svc:5557`."""
        return f"dns {self.target}"

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """Yield the engines behind the name. If a lookup fails, yield a fault, and the former engines for `max_stale` s."""
        _, host, port = DnsTarget.parse(self.target)
        backoff = Backoff(self.clock.random)
        yielded, last = None, Finding()
        resolved_at = self.clock.now()
        while True:
            try:
                resolved = await (self.resolver.services(host) if port is None else self.resolver.addresses(host))
            except ResolveError as error:
                pause = backoff.next_delay()
                # If the age of the engines would exceed `max_stale` during the pause, drop them before the pause.
                if self.clock.now() + pause - resolved_at > self.max_stale:
                    last = Finding()
                known = len(last.registrations) + len(last.providers)
                stay = f"; the engines found before ({known}) stay for at most {self.max_stale:g} s" if known else ""
                finding = replace(last, faults=(f"{error}{stay}",))
            else:
                backoff.reset()
                pause = apply_jitter(min(max(resolved.ttl, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS), self.clock.random)
                resolved_at = self.clock.now()
                finding = last = self._make_finding(resolved)
            if finding != yielded:
                yield finding
            yielded = finding
            await self.clock.sleep(pause)

    def _make_finding(self, resolved: Resolution) -> Finding:
        scheme, name, port = DnsTarget.parse(self.target)
        addresses = [f"{bracket_host(host)}:{own or port}" for host, own in resolved.hosts]
        if scheme == "tcp":
            ranks_by_address = [self.template.registrations(address, f"tcp://{address}") for address in addresses]
            return Finding(registrations=tuple(registration for ranks in ranks_by_address for registration in ranks))
        # Expect the DNS name in certificates, because certificates do not contain the addresses.
        http = replace(self.http, server_name=self.http.server_name or name.strip("[]")) if port is not None else self.http
        urls = [f"{scheme}://{address}" for address in addresses]
        return Finding(providers=tuple(EngineProvider(url, self.template, http=http, clock=self.clock) for url in urls))
