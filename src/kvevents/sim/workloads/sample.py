"""The packaged sample trace, and traces as workloads."""

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
"""Ten minutes of generated conversations in Mooncake's format, half as long as those of Mooncake's trace."""
SAMPLE_REQUESTS: Final = 1_000
SAMPLE_SEED: Final = 8


def make_sample() -> Iterator[MooncakeRow]:
    """Generate the rows of `SAMPLE`."""
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
    """The workload of a trace file with its own times. It ends with the file. Raises `ConfigError`."""

    path: StrPath = SAMPLE
    rate: float | None = None
    """Requests per second. All times are scaled by one factor, so bursts remain. None keeps the trace's times."""

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"invalid rate {self.rate}: expected a finite number above 0, or None for the times of the trace")

    def requests(self, seed: int = 0) -> Iterator[Request]:  # noqa: ARG002 - part of `Workload`; a trace has no random part
        """Yield the requests; the seed has no effect. With a `rate` the file is read twice. Raises `WorkloadError`."""
        requests = read_trace(self.path)
        return requests if self.rate is None else rescaled(requests, self.rate / self._own_rate(self.rate))

    def _own_rate(self, alone: float) -> float:
        count, first, last = 0, 0.0, 0.0
        for count, request in enumerate(read_trace(self.path), 1):
            first = first if count > 1 else request.at
            last = request.at
        return (count - 1) / (last - first) if last > first else alone
