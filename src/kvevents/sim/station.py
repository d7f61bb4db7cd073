"""One worker of a fleet: its engine, and what a fleet keeps about it."""

from __future__ import annotations

from typing import Final

from kvevents.routing import Worker
from kvevents.sim.engine import Engine
from kvevents.sim.results import WorkerResult
from kvevents.sim.settings import FleetSettings


class Station:
    """A worker through all of its lives."""

    def __init__(self, worker: Worker, settings: FleetSettings) -> None:
        self.worker: Final = worker
        self.life = -1
        self.batches = 0
        """Of this life: number of its next batch."""
        self.busy = False
        """Whether a step is under way."""
        self.up = False
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.seconds = 0.0
        """Computed in all lives."""
        self._settings: Final = settings
        self._engine: Engine | None = None
        self._computed = 0
        self._preemptions = 0

    @property
    def engine(self) -> Engine:
        """The engine of the present life, or of the last one."""
        assert self._engine is not None  # noqa: S101 - a fleet starts all its stations
        return self._engine

    @property
    def computed(self) -> int:
        """Prompt tokens computed in all lives."""
        return self._computed + self.engine.computed

    def start(self) -> None:
        """Begin a life, with an empty cache and hashes that no other life has."""
        if self._engine is not None:
            self._computed, self._preemptions = self.computed, self._preemptions + self._engine.preemptions
        self.life += 1
        self.batches = 0
        self.up = True
        settings = self._settings
        source, rank = self.worker
        self._engine = Engine(
            settings.size,
            settings.costs,
            settings.batching,
            seed=f"{settings.seed}/{source}/{rank}/{self.life}",
            spelling=settings.spelling,
        )

    def stop(self) -> None:
        """End the life, and the step under way with it."""
        self.up = self.busy = False

    def admitted(self, prompt: int, cached: int) -> None:
        """A request was looked up for the first time here."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached

    def result(self, seconds: float) -> WorkerResult:
        """What it did, in a run of so many seconds."""
        return WorkerResult(
            source=self.worker[0],
            rank=self.worker[1],
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            busy=min(1.0, self.seconds / seconds) if seconds else 0.0,
            preemptions=self._preemptions + self.engine.preemptions,
            restarts=self.life,
        )
