"""Workloads of a simulated fleet: `Request` objects from generators, traces and recordings, and the workloads by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from random import Random
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
from kvevents.sim.workload_traces import read_trace, write_trace

__all__ = [
    "ARRIVALS",
    "SAMPLE",
    "WORKLOADS",
    "Agents",
    "Chat",
    "Lengths",
    "LlmD",
    "RecordedRequests",
    "SharedPrompts",
    "Trace",
    "Traffic",
    "WorkloadName",
    "arrivals",
    "from_recording",
    "read_trace",
    "rescaled",
    "workload",
    "write_trace",
]

SAMPLE: Final = Path(__file__).with_name("sample.jsonl.gz")
"""Trace of ten minutes of generated conversations. The conversations are half as long as those of Mooncake's trace."""
JITTER: Final = 0.02
"""Maximum relative change that a seed makes to a trace's speed. A change by 2 % moves the TTFT p90 of the sample by 3.5 %."""


class Trace(Settings, frozen=True, kw_only=True):
    """The workload of a trace file, with the times in the file. The workload ends with the file. Raises `ConfigError`."""

    path: StrPath = SAMPLE
    rate: AboveZero | None = None
    """Requests per second. All times are scaled by one factor, so bursts remain. If None, the times are not scaled."""

    def requests(self, seed: int = 0) -> Iterator[Request]:
        """Yield the requests. If `rate` is set, the file is read twice. Raises `WorkloadError`.

        A trace has no random numbers. So that seeds differ, each seed except 0 changes the trace's speed by up to `JITTER`.
        """
        speed = 1.0
        times = [] if self.rate is None else [request.at for request in read_trace(self.path)]
        if self.rate is not None and times and times[-1] > times[0]:
            speed = self.rate / ((len(times) - 1) / (times[-1] - times[0]))
        if seed:
            speed *= 1 + Random(f"trace {seed}").uniform(-JITTER, JITTER)  # noqa: S311 - numbers that need not be secret
        return read_trace(self.path) if speed == 1 else rescaled(read_trace(self.path), speed)


WorkloadName: TypeAlias = Literal["trace", "chat", "agents", "shared-prompts", "llm-d"]
WORKLOADS: Final[Mapping[str, type[Trace | Traffic]]] = MappingProxyType(
    {"trace": Trace, "chat": Chat, "agents": Agents, "shared-prompts": SharedPrompts, "llm-d": LlmD}
)
"""Maps the name of each workload to its class, whose fields are the settings."""


def workload(
    name: str, *, requests: int = 1_000, seed: int = 0, rate: float | None = None, **settings: Any
) -> Iterator[Request]:
    """Yield the first `requests` requests of a workload in the order of their times, or fewer if a trace has fewer.

    `rate` is the mean number of requests per second, None for the workload's default. `settings` are fields of the workload's
    class. Raises `ConfigError` for an unknown name or setting and for an invalid value.
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
