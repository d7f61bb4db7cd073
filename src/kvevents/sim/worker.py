"""A worker of a fleet: its engine, and its counters over all incarnations."""

from __future__ import annotations

from typing import Final

from kvevents.routing import Worker
from kvevents.sim.engine import Engine
from kvevents.sim.results import WorkerResult
from kvevents.sim.settings import FleetSettings


class SimulatedWorker:
    """A worker through all of its incarnations."""

    def __init__(self, worker: Worker, settings: FleetSettings) -> None:
        self.worker: Final = worker
        self.incarnation = -1
        self.batches = 0
        """Number of the next batch of this incarnation."""
        self.is_busy = False
        """Whether a step is being computed."""
        self.is_up = False
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.seconds = 0.0
        """Computation time of all incarnations."""
        self._settings: Final = settings
        self._engine: Engine | None = None
        self._computed = 0
        self._preemptions = 0

    @property
    def engine(self) -> Engine:
        """The engine of the current incarnation, or of the last one."""
        assert self._engine is not None  # noqa: S101 - a fleet starts all its workers
        return self._engine

    @property
    def computed(self) -> int:
        """Prompt tokens computed in all incarnations."""
        return self._computed + self.engine.computed

    def start(self) -> None:
        """Begin an incarnation, with an empty cache and its own block hashes."""
        if self._engine is not None:
            self._computed, self._preemptions = self.computed, self._preemptions + self._engine.preemptions
        self.incarnation += 1
        self.batches = 0
        self.is_up = True
        settings = self._settings
        source, rank = self.worker
        self._engine = Engine(
            settings.size,
            settings.costs,
            settings.batching,
            seed=f"{settings.seed}/{source}/{rank}/{self.incarnation}",
            event_style=settings.event_style,
        )

    def stop(self) -> None:
        """End the incarnation and the current step."""
        self.is_up = self.is_busy = False

    def record_lookup(self, prompt: int, cached: int) -> None:
        """Record the first lookup of a request, in tokens."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached

    def result(self, seconds: float) -> WorkerResult:
        """Return its counters, for a run of `seconds` seconds."""
        return WorkerResult(
            source=self.worker[0],
            rank=self.worker[1],
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            busy=min(1.0, self.seconds / seconds) if seconds else 0.0,
            preemptions=self._preemptions + self.engine.preemptions,
            restarts=self.incarnation,
        )
