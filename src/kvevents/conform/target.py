"""The interface of a target, and of the driver that creates one for each scenario; and HTTP requests to targets.

A target turns the referee's questions into its own protocol. An indexer answers with tokens per worker, a router with the
worker that it chose. Endpoint Pickers of the Gateway API are the next kind: a target whose `differences` sends a request by the
`ext_proc` protocol and reads `x-gateway-destination-endpoint` of the answer, with workers as those of a router.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvevents.conform.scenario import Ability, CheckQuery, Scenario
from kvevents.conform.scripted_engine import EngineAddress
from kvevents.conform.verdict import WrongAnswer
from kvevents.errors import ExternalError

ANSWER_SECONDS: Final = 10.0
"""Time of a target to answer one request."""
T = TypeVar("T")
MAX_BYTES: Final = 64 << 20
"""Size of one answer."""


class TargetResponse(NamedTuple):
    """Status and body."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is something else."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, RecursionError):
            return None

    def decode(self, kind: type[T]) -> T:
        """Return the body as a value of a type. Raise `TargetError` if it is something else."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TargetError(f"the answer cannot be decoded ({error}): {self.text[:200]}") from error

    @property
    def text(self) -> str:
        """The status with the error that the body names."""
        found = self.json
        error = found.get("error", "") if isinstance(found, dict) else self.body[:200].decode(errors="replace")
        return f"{self.status} {error}".strip()


def request(url: str, method: str = "GET", body: Any = None, *, seconds: float = ANSWER_SECONDS) -> TargetResponse:
    """Send a request, with `body` as JSON, and return the answer. Raise `TargetError`."""
    deadline = time.monotonic() + seconds
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds)
    try:
        data = None if body is None else msgspec.json.encode(body)
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        connection.request(method, target, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        found = bytearray()
        while chunk := response.read1(1 << 16):
            found += chunk
            _check(found, deadline)
        return TargetResponse(response.status, bytes(found))
    except TooLargeError as error:
        raise TargetError(f"{method} {url} answered more than {MAX_BYTES} bytes") from error
    except TimeoutError as error:
        raise TargetError(f"{method} {url} did not answer within {seconds:g} s") from error
    except (OSError, HTTPException) as error:
        raise TargetError(f"{method} {url} failed: {error or type(error).__name__}") from error
    finally:
        connection.close()


class TooLargeError(ExternalError):
    """An answer is longer than `MAX_BYTES`."""


def _check(found: bytearray, deadline: float) -> None:
    if len(found) > MAX_BYTES:
        raise TooLargeError
    if time.monotonic() > deadline:
        raise TimeoutError


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
