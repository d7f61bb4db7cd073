"""Names that stand for several engines: every address, or every SRV target, is one instance."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

from kvevents.backoff import REAL_PACE, Backoff, Pace, jittered
from kvevents.endpoints import MAX_PORT
from kvevents.errors import ConfigError
from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.fetch import DEFAULT_HTTP, HttpClient
from kvevents.service.discovery.names import DnsResolver, Resolved, ResolveError, Resolver
from kvevents.service.discovery.places import bracketed
from kvevents.service.discovery.provider import Fault, Finding
from kvevents.service.discovery.tables import ANY, Template

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
    template: Template = ANY
    resolver: Resolver = field(default_factory=DnsResolver)
    min_seconds: float = MIN_SECONDS
    max_seconds: float = MAX_SECONDS
    max_stale: float = MAX_STALE_SECONDS
    http: HttpClient = DEFAULT_HTTP
    pace: Pace = field(default=REAL_PACE, compare=False, repr=False)

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
        backoff = Backoff(self.pace.random)
        told, last = None, Finding()
        good = self.pace.now()
        while True:
            try:
                resolved = await self._resolve()
            except ResolveError as error:
                pause = backoff.pause()
                # Looked at before the pause: what would be too old in the middle of it goes at its beginning.
                if self.pace.now() + pause - good > self.max_stale:
                    last = Finding()
                found = replace(last, faults=(self._fault(error, last),))
            else:
                backoff.reset()
                pause = jittered(min(max(resolved.ttl, self.min_seconds), self.max_seconds), self.pace.random)
                good = self.pace.now()
                found = last = self._finding(resolved)
            if found != told:
                yield found
            told = found
            await self.pace.sleep(pause)

    async def _resolve(self) -> Resolved:
        _, host, port = Target.parse(self.target)
        return await (self.resolver.services(host) if port is None else self.resolver.addresses(host))

    def _fault(self, error: ResolveError, kept: Finding) -> Fault:
        known = len(kept.registrations) + len(kept.providers)
        stay = f"; the {known} that it named stay for at most {self.max_stale:g} s" if known else ""
        return Fault(Target.parse(self.target).host, f"{error}{stay}")

    def _finding(self, resolved: Resolved) -> Finding:
        scheme, name, port = Target.parse(self.target)
        addresses = [f"{bracketed(host)}:{own or port}" for host, own in resolved.hosts]
        if scheme == "tcp":
            found = [self.template.registrations(address, f"tcp://{address}") for address in addresses]
            return Finding(registrations=tuple(each for ranks in found for each in ranks))
        # A certificate names the host, not its addresses.
        http = replace(self.http, server_name=self.http.server_name or name.strip("[]")) if port is not None else self.http
        return Finding(
            providers=tuple(
                EngineProvider(f"{scheme}://{address}", self.template, http=http, pace=self.pace) for address in addresses
            )
        )
