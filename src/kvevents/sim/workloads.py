"""Workloads of a simulated fleet: `Request` objects from generators, traces and recordings, and the workloads by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from kvevents.errors import ConfigError
from kvevents.recording.files import StrPath
from kvevents.settings import Settings
from kvevents.sim.requests import Request
from kvevents.sim.workload_generators import (
    ARRIVALS,
    AboveZero,
    Agents,
    Chat,
    Lengths,
    LlmD,
    SharedPrompts,
    Traffic,
    arrivals,
    rescaled,
)
from kvevents.sim.workload_recordings import RecordedRequests, from_recording
from kvevents.sim.workload_traces import MooncakeRow, mooncake_rows, read_trace, write_rows, write_trace

__all__ = [
    "ARRIVALS",
    "SAMPLE",
    "WORKLOADS",
    "Agents",
    "Chat",
    "Lengths",
    "LlmD",
    "MooncakeRow",
    "RecordedRequests",
    "SharedPrompts",
    "Trace",
    "Traffic",
    "WorkloadName",
    "arrivals",
    "from_recording",
    "make_sample",
    "mooncake_rows",
    "read_trace",
    "rescaled",
    "workload",
    "write_rows",
    "write_trace",
]

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


class Trace(Settings, frozen=True, kw_only=True):
    """The workload of a trace file with its own times. It ends with the file. Raises `ConfigError`."""

    path: StrPath = SAMPLE
    rate: AboveZero | None = None
    """Requests per second. All times are scaled by one factor, so bursts remain. None keeps the trace's times."""

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


WorkloadName: TypeAlias = Literal["trace", "chat", "agents", "shared-prompts", "llm-d"]
WORKLOADS: Final[Mapping[str, type[Trace | Traffic]]] = MappingProxyType(
    {"trace": Trace, "chat": Chat, "agents": Agents, "shared-prompts": SharedPrompts, "llm-d": LlmD}
)
"""Workload classes by name; their fields are the settings."""


def workload(
    name: str, *, requests: int = 1_000, seed: int = 0, rate: float | None = None, **settings: Any
) -> Iterator[Request]:
    """Yield the first `requests` requests of a workload in the order of their times, or fewer if a trace ends before.

    `rate` is the mean number per second, None for the workload's default; `settings` are fields of its class. Raises
    `ConfigError` for an unknown name or setting and for an invalid value.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}: expected {', '.join(WORKLOADS)}")
    if requests < 0:
        raise ConfigError(f"invalid requests {requests}: expected at least 0")
    known = WORKLOADS[name].__struct_fields__
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)} of workload {name}: expected {', '.join(known)}")
    given: dict[str, Any] = settings if rate is None else settings | {"rate": rate}
    return islice(WORKLOADS[name](**given).requests(seed), requests)
