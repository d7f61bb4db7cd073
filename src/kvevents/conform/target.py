"""The interface of a target, and of the driver that creates one for each scenario.

A target turns the referee's questions into its own protocol. An indexer answers with tokens per worker, a router with the
worker that it chose. Endpoint Pickers of the Gateway API are the next kind: a target whose `differences` sends a request by the
`ext_proc` protocol and reads `x-gateway-destination-endpoint` of the answer, with workers as those of a router.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvevents.conform.scenario import Ability, CheckQuery, Scenario
from kvevents.conform.scripted_engine import EngineAddress
from kvevents.conform.verdict import WrongAnswer
from kvevents.errors import ExternalError


class TargetError(ExternalError):
    """The target ended, or did not answer in time. The message says which, and where."""


class RejectedError(ExternalError):
    """The target rejected a registration. The message is its answer."""


class EngineRegistration(NamedTuple):
    """An engine to follow."""

    address: EngineAddress
    block_size: int
    tenant: str | None


class Target(ABC):
    """A program under test, for one scenario. Every method returns within a bounded time, or raises `TargetError`."""

    @abstractmethod
    def register(self, registration: EngineRegistration) -> None:
        """Follow an engine. Raise `RejectedError`."""

    @abstractmethod
    def differences(self, queries: Sequence[CheckQuery]) -> list[WrongAnswer]:
        """Ask, and return what differs from the truth."""

    @abstractmethod
    def reports(self) -> dict[str, str | None]:
        """Return for each registered worker what the target says against it; None if it says that all is well, or nothing."""

    def engine_stopped(self, worker: str) -> None:  # noqa: B027  most targets have nothing to end
        """Handle the end of a worker's engine: end everything else that the referee plays for this worker."""

    def unregister(self, registration: EngineRegistration) -> None:
        """Stop following an engine."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the process with SIGKILL, after it has stored its state."""
        raise NotImplementedError

    def start(self, registrations: Sequence[EngineRegistration]) -> None:
        """Start the process again, and register again what it does not remember."""
        raise NotImplementedError


class Driver(ABC):
    """Starts a program under test, with its defaults, once per scenario."""

    title: str
    """Name and version."""

    @abstractmethod
    def target(self, scenario: Scenario, registrations: Sequence[EngineRegistration]) -> AbstractContextManager[Target]:
        """Return a context in which the target runs. `registrations` are those that the scenario makes later.

        Raise `TargetError` if it does not start.
        """

    @property
    @abstractmethod
    def abilities(self) -> frozenset[Ability]:
        """What its targets can do beyond following engines that are known when they start, and answering queries."""
