"""Index sources, which fill the index of a service: the engines that the service itself follows, or for example a log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, Protocol

from kvevents.service.discovery.runner import EngineDiscovery
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.prober import Prober
from kvevents.service.registrations import Registrations

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class IndexSource(Protocol):
    """Fills the index of a fleet and registers its engines. All methods except `run` can be called before and during `run`."""

    @property
    def registration_advice(self) -> str:
        """Advice for clients that try to register or drain an engine; empty if the service follows the engines itself."""
        ...

    @property
    def why_incomplete(self) -> str:
        """Why some engines, and so some models, might be unknown now; empty if all engines are known."""
        ...

    @property
    def is_partial(self) -> bool:
        """Whether the service can become ready even if `why_incomplete` is not empty."""
        ...

    @property
    def has_found_engines(self) -> bool:
        """Whether every provider of engines has yielded a finding."""
        ...

    async def run(self) -> None:
        """Fill the index until cancelled."""

    def warnings(self) -> Iterable[str]:
        """Return sentences about problems that an operator should know."""
        ...

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of this source."""
        ...


OpenIndexSource = Callable[[Fleet], IndexSource]
"""Function that returns the index source for a fleet."""


class FollowedEngines:
    """The engines that the service follows over ZeroMQ: configured, discovered, and registered by clients."""

    registration_advice = why_incomplete = ""
    is_partial = False

    def __init__(self, discovery: EngineDiscovery, registrations: Registrations, prober: Prober) -> None:
        self._discovery: Final = discovery
        self._registrations: Final = registrations
        self._prober: Final = prober

    @property
    def has_found_engines(self) -> bool:
        """Whether every provider of engines has yielded a finding."""
        return self._discovery.has_completed

    async def run(self) -> None:
        """Run the prober, discovery and the end of leases until cancelled."""
        await asyncio.gather(self._prober.run(), self._discovery.run(), self._registrations.end_leases())

    def warnings(self) -> Iterable[str]:
        """Return the faults of the configured providers. The faults of an engine are in the answers about the engine."""
        return self._discovery.provider_faults()

    def collect(self) -> Iterator[Metric]:
        """Return no metrics: the fleet reports the metrics of the engines."""
        return iter(())
