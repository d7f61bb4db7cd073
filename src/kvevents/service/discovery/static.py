"""Engines that are simply named, by flags or in the configuration."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.provider import Finding
from kvevents.service.discovery.tables import SourceTable


@dataclass(frozen=True, slots=True)
class StaticProvider:
    """Tables that do not change while the service runs."""

    tables: tuple[SourceTable, ...]
    name: str = "config"

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """One finding, and the end."""
        yield finding_of(self.tables)


def finding_of(tables: Iterable[SourceTable]) -> Finding:
    """What tables name: registrations, and providers for those engines that are to be asked."""
    told = tuple(tables)
    return Finding(
        registrations=tuple(each for table in told for each in table.listed()),
        providers=tuple(EngineProvider(table.base_url, table, table.instance) for table in told if table.base_url is not None),
    )
