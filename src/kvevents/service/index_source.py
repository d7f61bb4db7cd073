"""The source of the index's content: the engines that the service itself follows, or another source, such as a log."""

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
    """Fills the index of a fleet and registers its engines. All methods except `run` may be called at any time."""

    @property
    def registration_advice(self) -> str:
        """Advice for clients that try to register an engine; empty if the service follows the engines itself."""
        ...

    @property
    def why_incomplete(self) -> str:
        """Why engines, and so their models, may be unknown at present; empty if all are known."""
        ...

    @property
    def is_partial(self) -> bool:
        """Whether the service answers queries even if engines are missing, without waiting for a deadline."""
        ...

    @property
    def has_found_engines(self) -> bool:
        """Whether every provider of engines has answered once."""
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
        """Whether each provider of engines has answered once."""
        return self._discovery.has_completed

    async def run(self) -> None:
        """Run until cancelled."""
        await asyncio.gather(self._prober.run(), self._discovery.run(), self._registrations.end_leases())

    def warnings(self) -> Iterable[str]:
        """Return the faults of the providers. Answers show the faults of an engine with that engine."""
        return self._discovery.provider_faults()

    def collect(self) -> Iterator[Metric]:
        """Return no metrics: the fleet reports the metrics of the engines."""
        return iter(())
