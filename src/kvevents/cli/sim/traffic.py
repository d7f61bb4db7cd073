"""Which requests a fleet is asked, as something that a process can be given."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

import msgspec

from kvevents.errors import ConfigError
from kvevents.sim.requests import Request
from kvevents.sim.workloads import rescaled, workload

TRACE: Final = "trace"
"""The workload that is a file."""
DEFAULT_REQUESTS: Final = 1_000
"""Of generated ones, which never end."""


class TrafficChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A workload and how much of it. Raises `ConfigError` for what cannot be."""

    trace: str | None = None
    """A file instead of the packaged sample."""
    workload: str = TRACE
    requests: int | None = None
    """The first so many; None for all of a trace, `DEFAULT_REQUESTS` of others."""
    rate: float | None = None
    """Requests a second; None for the workload's own."""
    trace_speed: float | None = None
    """Divides the times of a trace."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trace_speed is not None and self.workload != TRACE:
            raise ConfigError(f"trace_speed is for traces; say with a rate how many requests a second {self.workload} makes")
        if self.trace is not None and self.workload != TRACE:
            raise ConfigError(f"{self.trace} is a trace, and {self.workload} makes requests of its own; choose one of them")

    def make(self) -> Iterator[Request]:
        """The requests, the same ones each time. Raises `ConfigError`; iterating raises `WorkloadError`."""
        of_file = {} if self.trace is None else {"path": self.trace}
        made = workload(self.workload, requests=self._most, seed=self.seed, rate=self.rate, **of_file)
        return made if self.trace_speed is None else rescaled(made, self.trace_speed)

    def count(self) -> int:
        """How many there are; a trace is read for that, and errors in it are found. Raises `ConfigError`, `WorkloadError`."""
        if self.workload != TRACE:
            self.make()  # finds wrong settings
            return self._most
        found = sum(1 for _ in self.make())
        if not found:
            raise ConfigError(f"there are no requests in {self.trace}: a trace has one JSON object a line, as Mooncake's do")
        return found

    @property
    def _most(self) -> int:
        return self.requests or (sys.maxsize if self.workload == TRACE else DEFAULT_REQUESTS)
