"""The source of the service's index: the engines that the service follows itself, or another source, such as a log."""

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
    """Fills the index of a fleet and registers its engines. All but `run` may be called at any time."""

    @property
    def registration_advice(self) -> str:
        """What clients that register an engine should do instead; empty if the service follows the engines itself."""
        ...

    @property
    def why_incomplete(self) -> str:
        """Why engines, and so their models, may be unknown at present; empty without a reason."""
        ...

    @property
    def is_partial(self) -> bool:
        """Whether queries are answered, without a time limit, even if engines are missing."""
        ...

    @property
    def has_found_engines(self) -> bool:
        """Whether every way in which engines are found has answered once."""
        ...

    async def run(self) -> None:
        """Run until cancelled."""

    def warnings(self) -> Iterable[str]:
        """Return sentences about problems that an operator should know."""
        ...

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of this source."""
        ...


OpenIndexSource = Callable[[Fleet], IndexSource]
"""Returns the source of the index of a fleet."""


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
        """Whether each provider of engines has answered once."""
        return self._discovery.has_completed

    async def run(self) -> None:
        """Run until cancelled."""
        await asyncio.gather(self._prober.run(), self._discovery.run(), self._registrations.end_leases())

    def warnings(self) -> Iterable[str]:
        """Return the faults of the providers. The faults of an engine are shown with that engine."""
        return self._discovery.provider_faults()

    def collect(self) -> Iterator[Metric]:
        """Return nothing: the fleet has the metrics of the engines."""
        return iter(())
