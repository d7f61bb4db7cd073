"""Engines behind a DNS name: every address, or every SRV target, is one instance.

A name is looked up in the hosts file first, then in DNS, as a container's `nsswitch.conf` has it. dnspython sends the queries
instead of `getaddrinfo`, which knows no SRV records and no TTL. `getaddrinfo` also blocks a thread, which cannot be cancelled,
for as long as a nameserver is silent. Names that only other NSS modules know (mDNS, LDAP) are not found.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from kvevents.backoff import SYSTEM_CLOCK, Backoff, Clock, jittered
from kvevents.endpoints import MAX_PORT
from kvevents.errors import ConfigError, ExternalError, MissingDependencyError
from kvevents.service.discovery.engines import DEFAULT_HTTP_CLIENT, EngineHttpClient, EngineProvider
from kvevents.service.discovery.provider import DiscoveryFault, Finding
from kvevents.service.discovery.source_config import DEFAULT_TEMPLATE, Template, bracket_host

if TYPE_CHECKING:
    import dns.resolver


LOOKUP_SECONDS: Final = 5.0
"""For one question, all nameservers and repetitions together."""
HOSTS: Final = Path("/etc/hosts")


class ResolveError(ExternalError):
    """A name does not resolve; the message says why."""


class Resolved(NamedTuple):
    """Hosts, each once and in order, with the port where the name gives one, and for how many seconds this is true."""

    hosts: tuple[tuple[str, int | None], ...]
    ttl: float = 0.0


class Resolver(Protocol):
    """Who resolves names. Both raise `ResolveError` when nobody could be asked or there is nothing of that name."""

    async def addresses(self, name: str) -> Resolved:
        """Its IP addresses."""
        ...

    async def services(self, name: str) -> Resolved:
        """Targets and ports of its SRV records."""
        ...


@dataclass(frozen=True, slots=True)
class DnsResolver:
    """Asks the nameservers of `/etc/resolv.conf`, or those given.

    Raises `MissingDependencyError` where dnspython is not installed.
    """

    nameservers: tuple[str, ...] = ()
    port: int = 53
    """Of the given nameservers."""
    seconds: float = LOOKUP_SECONDS
    hosts: Path = HOSTS

    def __post_init__(self) -> None:
        if importlib.util.find_spec("dns") is None:
            raise MissingDependencyError("finding engines by DNS needs dnspython: pip install 'kvevents[service]'")

    async def addresses(self, name: str) -> Resolved:
        """IPv4 addresses, or IPv6 ones when it has none of those: a host with both is one engine, not two."""
        listed = await asyncio.to_thread(_listed, self.hosts, name)
        if listed:
            return Resolved(listed)
        for kind in ("A", "AAAA"):
            found = await self._ask(name, kind)
            if found.hosts:
                return found
        raise ResolveError(f"{name} has no addresses")

    async def services(self, name: str) -> Resolved:
        """Targets without the dot at their end."""
        found = await self._ask(name, "SRV")
        if not found.hosts:
            raise ResolveError(f"{name} has no SRV records")
        return found

    async def _ask(self, name: str, kind: str) -> Resolved:
        """No hosts where DNS says that there are none."""
        from dns.asyncbackend import get_backend  # noqa: PLC0415
        from dns.asyncresolver import Resolver as Asker  # noqa: PLC0415
        from dns.exception import DNSException, Timeout  # noqa: PLC0415
        from dns.resolver import NXDOMAIN, NoNameservers  # noqa: PLC0415

        try:
            # Made for each question, so that a changed resolv.conf counts.
            asker = Asker(configure=not self.nameservers)
            if self.nameservers:
                asker.nameservers, asker.port = list(self.nameservers), self.port
            backend = get_backend("asyncio")
            answer = await asker.resolve(
                name, kind, raise_on_no_answer=False, lifetime=self.seconds, search=True, backend=backend
            )
        except NXDOMAIN:
            return Resolved(())
        except Timeout as error:
            raise ResolveError(f"{name} cannot be resolved: no nameserver answers in time") from error
        except NoNameservers as error:
            raise ResolveError(f"{name} cannot be resolved: no nameserver answers with more than an error") from error
        except (DNSException, OSError) as error:
            raise ResolveError(f"{name} cannot be resolved: {error}") from error
        return _resolved(answer)


def _resolved(answer: dns.resolver.Answer) -> Resolved:
    if answer.rrset is None:
        return Resolved(())
    hosts = [_host(record) for record in answer.rrset]
    # Sorted: nameservers turn the order of records with every answer.
    return Resolved(tuple(sorted({host for host in hosts if host[0]})), float(answer.chaining_result.minimum_ttl))


def _host(record: object) -> tuple[str, int | None]:
    target: object = getattr(record, "target", None)
    if target is None:
        return str(getattr(record, "address", "")), None
    return str(target).rstrip("."), int(getattr(record, "port", 0))


def _listed(hosts: Path, name: str) -> tuple[tuple[str, int | None], ...]:
    """Addresses of a name in a hosts file; of an address, itself."""
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


MIN_SECONDS: Final = 5.0
"""Between two resolutions, however short the TTL: CoreDNS gives 5 for a headless service, some servers 0."""
MAX_SECONDS: Final = 60.0
"""However long it is: how late an engine that was added is found."""
MAX_STALE_SECONDS: Final = 300.0
"""How long engines stay whose name does not resolve any more: a nameserver that is away does not empty the index."""
_SCHEMES: Final = ("tcp", "http", "https")


class Target(NamedTuple):
    """What is to be resolved, and what there is at each address of it."""

    scheme: str
    host: str
    port: int | None
    """None where an SRV record gives it."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `HOST:PORT`, `_service._tcp.NAME`, or either after `tcp://`, `http://` or `https://`. Raises `ConfigError`."""
        scheme, separator, address = text.rpartition("://")
        host, colon, port = address.rpartition(":")
        if scheme not in _SCHEMES and separator:
            raise ConfigError(f"{text!r} cannot be followed; write tcp://, or http:// for engines that describe themselves")
        if address.startswith("_") and not colon:
            return cls(scheme or "tcp", address, None)
        if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
            raise ConfigError(f"{text!r} is no name to resolve; write HOST:PORT, or _service._tcp.NAME for SRV records")
        return cls(scheme or "tcp", host, int(port))


@dataclass(frozen=True, slots=True)
class DnsProvider:
    """The engines behind a name; `http://` in front of it asks each of them for its endpoints.

    Raises `ConfigError` for a target that cannot be resolved, or a template without a model where engines are not asked.
    """

    target: str
    template: Template = DEFAULT_TEMPLATE
    resolver: Resolver = field(default_factory=DnsResolver)
    min_seconds: float = MIN_SECONDS
    max_seconds: float = MAX_SECONDS
    max_stale: float = MAX_STALE_SECONDS
    http: EngineHttpClient = DEFAULT_HTTP_CLIENT
    clock: Clock = field(default=SYSTEM_CLOCK, compare=False, repr=False)

    def __post_init__(self) -> None:
        scheme, host, port = Target.parse(self.target)
        if scheme == "tcp":
            self.template.registrations(host, f"tcp://{host}:{port or 1}")

    @property
    def name(self) -> str:
        """As `dns engines.default.svc:5557`."""
        return f"dns {self.target}"

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """Who is there; while the name does not resolve, who was, for as long as `max_stale`, and why."""
        backoff = Backoff(self.clock.random)
        told, last = None, Finding()
        good = self.clock.now()
        while True:
            try:
                resolved = await self._resolve()
            except ResolveError as error:
                pause = backoff.next_delay()
                # Looked at before the pause: what would be too old in the middle of it goes at its beginning.
                if self.clock.now() + pause - good > self.max_stale:
                    last = Finding()
                found = replace(last, faults=(self._fault(error, last),))
            else:
                backoff.reset()
                pause = jittered(min(max(resolved.ttl, self.min_seconds), self.max_seconds), self.clock.random)
                good = self.clock.now()
                found = last = self._finding(resolved)
            if found != told:
                yield found
            told = found
            await self.clock.sleep(pause)

    async def _resolve(self) -> Resolved:
        _, host, port = Target.parse(self.target)
        return await (self.resolver.services(host) if port is None else self.resolver.addresses(host))

    def _fault(self, error: ResolveError, kept: Finding) -> DiscoveryFault:
        known = len(kept.registrations) + len(kept.providers)
        stay = f"; the {known} that it named stay for at most {self.max_stale:g} s" if known else ""
        return DiscoveryFault(Target.parse(self.target).host, f"{error}{stay}")

    def _finding(self, resolved: Resolved) -> Finding:
        scheme, name, port = Target.parse(self.target)
        addresses = [f"{bracket_host(host)}:{own or port}" for host, own in resolved.hosts]
        if scheme == "tcp":
            found = [self.template.registrations(address, f"tcp://{address}") for address in addresses]
            return Finding(registrations=tuple(each for ranks in found for each in ranks))
        # A certificate names the host, not its addresses.
        http = replace(self.http, server_name=self.http.server_name or name.strip("[]")) if port is not None else self.http
        return Finding(
            providers=tuple(
                EngineProvider(f"{scheme}://{address}", self.template, http=http, clock=self.clock) for address in addresses
            )
        )
