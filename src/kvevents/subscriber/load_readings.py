"""What follows the load of engines: settings, sources, and the newest reading of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from kvevents.endpoints import validate_endpoint
from kvevents.errors import ConfigError
from kvevents.security import Curve
from kvevents.settings import Positive, Range, Seconds, Settings, Unit
from kvevents.subscriber.load_metrics import check_load_url, is_load_url
from kvevents.wire.load import LOAD_TOPIC, EngineLoad

Worker: TypeAlias = tuple[str, int]
"""Source and rank."""
MAX_AGE_SECONDS: Final = 3_600.0


class LoadSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the load of engines is read. Raises `ConfigError`."""

    max_age_seconds: Annotated[float, Unit.SECONDS, Range(0, MAX_AGE_SECONDS, is_open=True)] = 5.0
    """Seconds after which the newest load of an engine no longer counts. SGLang repeats an unchanged one every second, and a
    step of a large prompt takes a few seconds."""
    poll_seconds: Annotated[float, Unit.SECONDS, Range(0, MAX_AGE_SECONDS, is_open=True)] = 1.0
    """Seconds between two requests to a server that is polled, such as vLLM's `/metrics`. Each request costs the server some
    milliseconds."""
    request_seconds: Seconds = 2.0
    """Longest time for one answer."""
    at_once: Positive = 64
    """Most requests at one time."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.poll_seconds >= self.max_age_seconds:
            raise ConfigError(
                f"invalid poll_seconds {self.poll_seconds:g}: expected less than max_age_seconds ({self.max_age_seconds:g}), "
                "since a load would be unknown before the next one is requested"
            )


@dataclass(frozen=True, slots=True)
class LoadSource:
    """Where the load of one rank is read."""

    endpoint: str
    """Endpoint at which the rank publishes its load, such as `tcp://10.0.0.7:5559`: SGLang's `load_endpoint_port_base` plus the
    rank. Or the URL of an HTTP server to poll, such as `http://10.0.0.7:8000`, whose `/metrics` are those of vLLM or SGLang; or
    that of vLLM's `/load`. All ranks behind one server have the same URL."""
    name: str
    """Name of the engine, as in `Source.name`."""
    rank: int = 0
    topic: str = LOAD_TOPIC
    """Prefix of the topics to receive."""
    curve: Curve | None = None

    def __post_init__(self) -> None:
        if is_load_url(self.endpoint):
            check_load_url(self.endpoint)
        else:
            validate_endpoint(self.endpoint)
        if self.rank < 0:
            raise ConfigError(f"invalid rank {self.rank} of {self.name}: expected a number from 0")

    @property
    def worker(self) -> Worker:
        """Name and rank."""
        return self.name, self.rank


@dataclass(frozen=True, slots=True)
class LoadReading:
    """The newest load of one rank, and what was received of it."""

    load: EngineLoad | None
    """None if none has come, or the newest one is older than `max_age_seconds`."""
    age: float | None
    """Seconds since the newest load arrived; None before the first."""
    received: int
    """Loads so far."""
    rejected: int
    """Messages that are no load, and requests without one."""
    fault: str
    """Why the newest load is unknown; empty if it is known."""


class Readings:
    """The newest load of one rank. One thread writes it and any thread reads it: each field is replaced as a whole."""

    def __init__(self, source: LoadSource) -> None:
        self.source: Final = source
        self.received = 0
        self.rejected = 0
        self.fault = ""
        """Why the last request brought no load; empty if it did."""
        self._newest: tuple[EngineLoad, float] | None = None

    def store(self, load: EngineLoad, now: float) -> None:
        """Store a load that has just arrived."""
        self.received += 1
        self._newest = load, now
        self.fault = ""

    def reject(self, fault: str = "") -> None:
        """Count a message that is no load, or a request without one."""
        self.rejected += 1
        self.fault = fault

    def load(self, now: float, max_age: float) -> EngineLoad | None:
        """Return the newest load; None if there is none, or it is older than `max_age` seconds."""
        newest = self._newest
        return None if newest is None or now - newest[1] > max_age else newest[0]

    def reading(self, now: float, max_age: float) -> LoadReading:
        """Return the newest load with its age."""
        newest = self._newest
        age = None if newest is None else max(now - newest[1], 0.0)
        load = None if newest is None or age is None or age > max_age else newest[0]
        return LoadReading(load, age, self.received, self.rejected, "" if load is not None else self._why_unknown(age))

    def _why_unknown(self, age: float | None) -> str:
        if self.fault:
            return self.fault
        if age is None:
            return f"nothing has arrived from {self.source.endpoint} yet"
        return f"the newest load from {self.source.endpoint} is {age:.0f} s old"
