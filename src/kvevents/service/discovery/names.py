"""Names to addresses: the hosts file first, then DNS, as a container's `nsswitch.conf` has it.

dnspython and not `getaddrinfo`: that one knows no SRV records and no TTL, and blocks a thread, which cannot be cancelled, for
as long as a nameserver is silent. What only other NSS modules know (mDNS, LDAP) is not found.
"""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvevents.errors import MissingDependencyError, PeerError

if TYPE_CHECKING:
    import dns.resolver

LOOKUP_SECONDS: Final = 5.0
"""For one question, all nameservers and repetitions together."""
HOSTS: Final = Path("/etc/hosts")


class ResolveError(PeerError):
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
