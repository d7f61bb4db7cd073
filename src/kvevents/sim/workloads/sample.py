"""The trace that the package brings along, and traces as workloads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from kvevents.errors import ConfigError
from kvevents.recording import StrPath
from kvevents.sim.requests import Request
from kvevents.sim.workloads.arrivals import rescaled
from kvevents.sim.workloads.chat import Chat
from kvevents.sim.workloads.mooncake import MooncakeRow, mooncake_rows
from kvevents.sim.workloads.traces import read_trace
from kvevents.sim.workloads.traffic import Lengths

SAMPLE: Final = Path(__file__).with_name("sample.jsonl.gz")
"""Ten minutes of made-up conversations in Mooncake's format, half as long as those of Mooncake's own trace."""
SAMPLE_REQUESTS: Final = 1_000
SAMPLE_SEED: Final = 8


def make_sample() -> Iterator[MooncakeRow]:
    """The rows of `SAMPLE`, made anew."""
    chat = Chat(
        rate=SAMPLE_REQUESTS / 600,
        apps=12,
        preamble=600,
        system=Lengths(300, 0.5, 50, 2_000),
        user=Lengths(1_300, 1.4, 10, 60_000),
        answer=Lengths(300, 0.5, 1, 2_000),
        turns=1.8,
        think=Lengths(40, 1.0, 3, 300),
        context=64_000,
    )
    return mooncake_rows(islice(chat.requests(SAMPLE_SEED), SAMPLE_REQUESTS))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace in a file, with its own times. It ends when the file does. Raises `ConfigError`."""

    path: StrPath = SAMPLE
    rate: float | None = None
    """Requests a second that its times are rescaled to, by one factor, so that its bursts stay; None leaves them."""

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate is {self.rate}; it is a finite number above 0, or None for the trace's own times")

    def requests(self, seed: int = 0) -> Iterator[Request]:  # noqa: ARG002 - every workload has a seed; nothing is drawn here
        """Its requests, whatever the seed. With a `rate` the file is read twice. Raises `WorkloadError`."""
        requests = read_trace(self.path)
        return requests if self.rate is None else rescaled(requests, self.rate / self._own_rate(self.rate))

    def _own_rate(self, alone: float) -> float:
        count, first, last = 0, 0.0, 0.0
        for count, request in enumerate(read_trace(self.path), 1):
            first = first if count > 1 else request.at
            last = request.at
        return (count - 1) / (last - first) if last > first else alone
