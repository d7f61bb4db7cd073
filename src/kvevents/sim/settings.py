"""Settings of a fleet and of the requests to it, for code and for the options of `kvevents sim`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

from kvevents.errors import ConfigError
from kvevents.routing import Worker
from kvevents.settings import FilePath, Name, Positive, Range, Settings, Unit
from kvevents.sim.cache import EVENT_STYLES, CacheSize, EventStyle
from kvevents.sim.costs import CostModel, cost_model
from kvevents.sim.requests import Request
from kvevents.sim.simulated_engine import StepLimits
from kvevents.sim.workload_generators import AboveZero
from kvevents.sim.workloads import WorkloadName, rescaled, workload
from kvevents.wire import Dialect, resolve_dialect

DEFAULT_PRESET: Final = "qwen3-32b-2xh100"
MAX_WORKERS: Final = 4_096
"""Maximum number of workers, which is engines times ranks. With sockets, each worker needs file descriptors and a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTimers:
    """Timers of a fleet in real time, in seconds."""

    connect: float = 10.0
    """Maximum time for the subscriber to connect to all engines before the traffic begins."""
    settle: float = 10.0
    """Maximum time for the last events to arrive after the traffic has ended."""
    down: float = 1.0
    """Time for which an engine is down after a `restart` fault."""
    stall: float = 3.0
    """Time for which a network drops everything after a `stall` fault."""


class FleetSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet of equal engines. Raises `ConfigError`, which names the field, for invalid values."""

    engines: Positive = 8
    """Number of equal engines."""
    ranks: Positive = 1
    """Data-parallel ranks of each engine, each with a cache, a scheduler and a stream of its own."""
    routers: Positive = 1
    """Number of routers between which requests are distributed at random. Each router knows only its own decisions and its own
    requests in flight; events reach all routers."""
    preset: Name = DEFAULT_PRESET
    """Speed and cache size of the engines: qwen3-32b-2xh100, llama-3.1-8b-h100, llama-3.1-8b-a100,
    llama-3.1-70b-4xh100, or a JSON file of your own."""
    block_size: Positive = 16
    """Number of tokens in a block."""
    blocks: Positive | None = None
    """GPU blocks of each rank (default: as many as the preset has memory for)."""
    host_blocks: int = 0
    """Number of blocks of each rank in host memory."""
    window: Positive | None = None
    """Number of tokens in the sliding window of a hybrid model (default: a model with full attention only)."""
    max_num_seqs: Positive = 256
    """Maximum number of concurrent sequences on a rank."""
    max_num_batched_tokens: Positive = 8192
    """Maximum number of tokens that a step computes."""
    dialect: Name = "vllm-latest"
    """Engine and release whose bytes are sent, such as vllm-0.24 or sglang-0.5.22."""
    event_delay: Annotated[float, Unit.SECONDS, Range()] = 0.001
    """Seconds from the end of a step until its events are in the index, in virtual time."""
    overlay: Annotated[float, Unit.SECONDS, Range()] = 2.0
    """Seconds for which a router counts a prompt as cached by the worker that received it; with 0, only events count."""
    seed: int = 0
    """Seed of all random numbers. A seed other than 0 also makes a trace up to 2 % faster or slower."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.engines * self.ranks > MAX_WORKERS:
            raise ConfigError(
                f"{self.engines} engines with {self.ranks} ranks each are more than {MAX_WORKERS} workers: "
                "set fewer engines or ranks"
            )
        room = self.costs.cache_tokens
        if self.blocks is None and self.block_size > room:
            raise ConfigError(f"block_size {self.block_size} is too large: the cache of {self.preset} holds {room} tokens")
        _ = self.size, self.step_limits  # these properties raise `ConfigError` for invalid settings
        wire = self.wire
        if self.window is not None and "kv_cache_spec_kind" not in wire.stored_fields:
            raise ConfigError(f"{wire} has no field for groups of a hybrid model: leave out window, or use vllm-0.22 or later")
        if self.host_blocks and "medium" not in wire.stored_fields:
            raise ConfigError(f"{wire} has no field for tiers: leave out host_blocks, or use vllm-0.10.2 or later")

    @property
    def wire(self) -> Dialect:
        """The dialect that `dialect` names. Raises `UnknownDialectError`."""
        dialect = resolve_dialect(self.dialect)
        assert dialect is not None  # noqa: S101 - only the name None has no dialect
        return dialect

    @property
    def costs(self) -> CostModel:
        """The cost model. Raises `ConfigError`."""
        return cost_model(self.preset)

    @property
    def step_limits(self) -> StepLimits:
        """Limits of a step. Raises `ConfigError`."""
        return StepLimits(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def size(self) -> CacheSize:
        """Size of each rank's cache."""
        blocks = self.costs.cache_tokens // self.block_size if self.blocks is None else self.blocks
        return CacheSize(blocks, self.block_size, self.host_blocks, self.window)

    @property
    def event_style(self) -> EventStyle:
        """The style of the engines' events."""
        return EVENT_STYLES[self.wire.engine]

    @property
    def workers(self) -> list[Worker]:
        """Source and rank of each worker."""
        return [(f"engine-{number}", rank) for number in range(self.engines) for rank in range(self.ranks)]

    def check(self, request: Request) -> None:
        """Raise `ConfigError` if a request has a salt or a LoRA that the dialect cannot announce."""
        wire = self.wire
        if request.salt is not None and not {"extra_keys", "cache_salt"} & set(wire.stored_fields):
            raise ConfigError(f"{wire} has no field for salts: leave salts out, or use vllm-0.17 or sglang-0.5.20 or later")
        if request.lora is not None and "lora_name" not in wire.stored_fields:
            raise ConfigError(f"{wire} has no field for LoRA names: leave them out, or use vllm-0.14 or sglang-0.5.22 or later")


DEFAULT_REQUESTS: Final = 1_000
"""Default number of requests for a generated workload, which is endless."""


class SimulationSettings(FleetSettings, frozen=True, kw_only=True):
    """A fleet and the requests that are sent to it. Raises `ConfigError` also for settings that contradict each other."""

    trace: FilePath | None = None
    """Trace with one JSON object per line, in Mooncake's or our own format; compressed if its name ends in .gz."""
    workload: WorkloadName = "trace"
    """Kind of requests; trace reads the file of --trace or, without it, the packaged sample."""
    requests: Positive | None = None
    """Number of requests (default: all of a trace, or 1,000 generated requests)."""
    rate: AboveZero | None = None
    """Mean requests per second; a trace keeps its bursts (default: the rate of the workload)."""
    trace_speed: AboveZero | None = None
    """Factor by which the times of a trace are divided, so that 2 is twice as fast (default: 1)."""

    def __post_init__(self) -> None:
        FleetSettings.__post_init__(self)
        if self.trace_speed is not None and self.workload != "trace":
            raise ConfigError(
                f"trace_speed applies only to a trace; for {self.workload} use rate (--rate), requests per second"
            )
        if self.trace is not None and self.workload != "trace":
            raise ConfigError(f"{self.trace} is a trace, and {self.workload} generates requests; use one of them")

    def generate(self) -> Iterator[Request]:
        """Return the requests. Every call returns the same requests. Raises `ConfigError`; iterating raises `WorkloadError`."""
        limit = self.requests or (sys.maxsize if self.workload == "trace" else DEFAULT_REQUESTS)
        file = {} if self.trace is None else {"path": self.trace}
        requests = workload(self.workload, requests=limit, seed=self.seed, rate=self.rate, **file)
        return requests if self.trace_speed is None else rescaled(requests, self.trace_speed)

    def count(self) -> int:
        """Return the number of requests. A trace is read and verified completely. Raises `ConfigError` and `WorkloadError`."""
        requests = self.generate()
        if self.workload != "trace":
            return self.requests or DEFAULT_REQUESTS
        count = sum(1 for _ in requests)
        if not count:
            raise ConfigError(f"{self.trace} has no requests; expected one JSON object per line, in Mooncake's format")
        return count
