"""From what ways of discovery find to what the fleet follows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from kvevents.errors import ConfigError
from kvevents.service.config import DnsTable, EngineSources, Limits
from kvevents.service.discovery.dns import DnsProvider
from kvevents.service.discovery.files import FileProvider
from kvevents.service.discovery.merge import Discovered, Discovery
from kvevents.service.discovery.provider import Provider
from kvevents.service.discovery.static import StaticProvider
from kvevents.service.discovery.tables import Template
from kvevents.service.registration import Key, Registration, Wall
from kvevents.stream import Checkpoint

log = logging.getLogger(__name__)

DISCOVERED = "discovery"
"""Origin of what was found."""
FLEET = "fleet"
"""Under which name it is told what the fleet cannot follow of it."""


class Followers(Protocol):
    """Who follows what is found: the service's fleet, or a bridge."""

    @property
    def refused(self) -> dict[Key, str]:
        """Why some of it cannot be followed, as sentences."""
        ...

    def replace(
        self, origin: str, registrations: Iterable[Registration], resume: Callable[[Key], Checkpoint | None], /
    ) -> list[str]:
        """Make what one origin has registered be just this. Returns sentences about what could not be."""
        ...


class Finder:
    """Runs what the configuration names, and keeps the fleet to it."""

    def __init__(
        self,
        config: EngineSources,
        watched: Path | None,
        fleet: Followers,
        resume: Callable[[Key], Checkpoint | None],
        max_sources: int = Limits().max_sources,
    ) -> None:
        self._max_sources = max_sources
        self._fleet = fleet
        self._resume = resume
        self._providers = providers_of(config, watched)
        self._found = Discovered(waiting=tuple(provider.name for provider in self._providers))
        self._refused: list[str] = []
        self._told: set[str] = set()
        """What the log was told is wrong with what was found."""

    async def run(self) -> None:
        """Until cancelled."""
        if self._providers:
            await Discovery(self._providers, self._tell, max_sources=self._max_sources).run()
        else:
            await asyncio.Event().wait()

    def _tell(self, found: Discovered) -> None:
        self._found = found
        self._refused = self._fleet.replace(DISCOVERED, found.registrations.values(), self._resume)
        faults = {fault.sentence for each in found.faults.values() for fault in each}
        for sentence in sorted(faults - self._told):
            log.warning("%s", sentence)
        for sentence in sorted(self._told - faults):
            log.info("no more: %s", sentence)
        self._told = faults

    @property
    def has_looked(self) -> bool:
        """Whether every provider has said something."""
        return not self._found.waiting

    @property
    def adapters(self) -> frozenset[Wall]:
        """LoRA adapters that requests name as their model, as engines list them."""
        return self._found.adapters

    def faults(self) -> dict[str, list[str]]:
        """Sentences by provider."""
        found = {name: [fault.sentence for fault in faults] for name, faults in self._found.faults.items()}
        if refused := [*self._refused, *list(self._fleet.refused.values())]:
            found[FLEET] = refused
        return found


def providers_of(config: EngineSources, watched: Path | None) -> list[Provider]:
    """Those of a configuration, the most important first; `watched` is a file with other settings beside its sources."""
    found: list[Provider] = []
    if watched is not None:
        found.append(FileProvider(watched, alone=False))
    if config.sources:
        found.append(StaticProvider(tuple(config.sources)))
    found += [FileProvider(Path(path)) for path in config.source_files]
    found += [_dns(table) for table in config.dns]
    return found


def _dns(table: DnsTable) -> DnsProvider:
    fields = {name: getattr(table, name) for name in Template.__struct_fields__}
    try:
        return DnsProvider(table.target, Template(**fields))
    except ConfigError as error:
        raise ConfigError(f"dns {table.target}: {error}") from error
