"""Requests, engines and fleets for tests of the simulator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from random import Random

from kvevents.index import PrefixIndex
from kvevents.sim.audit import Audit
from kvevents.sim.cache import CacheSize
from kvevents.sim.costs import CostModel
from kvevents.sim.requests import Request, Text
from kvevents.sim.routers import make_routers
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_engine import Job, SimulatedEngine, StepLimits, StepResult
from kvevents.sim.simulated_fleet import DelayedDelivery, SimulatedFleet, Timeline
from sim_model import EventState, contents

SECONDS = CostModel(step=1.0, token=0.001, pair=0.00001, weights=0.002, context=0.00002, reload=0.0001)


def request(prompt: Iterable[int], answer: int = 1, at: float = 0.0, **within: str | None) -> Request:
    """Return a request. Its answer consists of token 9, so that later prompts can contain it."""
    return Request(at, Text.from_tokens(prompt), Text.from_tokens([9] * answer), **within)


def conversations(
    number: int,
    *,
    seed: int = 0,
    rate: float = 20.0,
    loras: Sequence[str | None] = (None,),
    salts: Sequence[str | None] = (None,),
) -> Iterator[Request]:
    """Yield turns of conversations behind three system prompts, `rate` per second. Each prompt repeats the turns before it."""
    random = Random(seed)
    systems = [Text([(number, 40)]) for number in range(3)]
    fresh = count(100)
    histories: dict[str, Text] = {}
    times = accumulate(random.expovariate(rate) for _ in range(number))
    for at in times:
        session = f"user-{random.randrange(max(2, number // 4))}"
        history = histories.pop(session, None) or systems[random.randrange(3)]
        prompt = history + Text([(next(fresh), random.randint(1, 30))])
        answer = Text([(next(fresh), random.randint(1, 20))])
        if random.random() < 0.8:
            histories[session] = prompt + answer
        place = int(session[5:])
        yield Request(at, prompt, answer, session, loras[place % len(loras)], salts[place % len(salts)])


class Recorder:
    """A cost model that records what each step computed: prefilled tokens, pairs, decoding sequences, their context."""

    def __init__(self, costs: CostModel = SECONDS) -> None:
        self.costs = costs
        self.reload = costs.reload
        self.steps: list[tuple[int, int, int, int]] = []

    def seconds(self, prefilled: int, pairs: int, decoding: int, context: int) -> float:
        self.steps.append((prefilled, pairs, decoding, context))
        return self.costs.seconds(prefilled, pairs, decoding, context)


@dataclass
class Run:
    """An engine that is checked after every step."""

    size: CacheSize
    step_limits: StepLimits
    submitted: list[Job] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.costs = Recorder()
        # Only `seconds` and `reload` of a cost model are used here.
        self.engine = SimulatedEngine(self.size, self.costs, self.step_limits, seed="a")  # type: ignore[arg-type]
        self.mirror = EventState()
        self.prefilled = 0

    def submit(self, requests: Iterable[Request]) -> list[Job]:
        jobs = [self.engine.submit(one) for one in requests]
        self.submitted += jobs
        return jobs

    def step(self) -> StepResult:
        """Run a step. Check that events describe the cache, and that each lookup found what earlier events describe."""
        engine, limits = self.engine, self.step_limits
        self.seconds.append(engine.begin())
        prefilled, _, decoding, _ = self.costs.steps[-1]
        assert prefilled + decoding <= limits.max_num_batched_tokens
        assert engine.running <= limits.max_num_seqs
        self.prefilled += prefilled
        assert engine.computed == self.prefilled
        step = engine.end()
        self.steps.append(step)
        self.look_up(step)
        assert +self.mirror.held == contents(engine.cache)
        return step

    def look_up(self, step: StepResult) -> None:
        done = 0
        for lookup in step.lookups:
            for event in step.events[done : lookup.position]:
                self.mirror.apply(event)
            done = lookup.position
            sequence = lookup.job.sequence
            assert lookup.cached == self.mirror.cached(self.size, sequence.hashes, lookup.tokens)
        for event in step.events[done:]:
            self.mirror.apply(event)

    def finish(self) -> None:
        """Run until no request is left. In every step the oldest sequence advances, so the number of steps is limited."""
        most = len(self.steps) + 2 + sum(1 + len(job.request.prompt) + len(job.request.output) for job in self.submitted)
        while not self.engine.idle:
            assert len(self.steps) < most, "the engine does not finish"
            self.step()
        assert self.engine.jobs() == []
        assert self.engine.cache.pool.free_blocks == self.size.blocks


def fleet_of(given: FleetSettings, name: str = "prefix-aware") -> SimulatedFleet:
    """Return a fleet as `simulate` creates it. The caller runs its steps."""
    timeline = Timeline()
    index = PrefixIndex(clock=lambda: timeline.now)
    audit = Audit(index)
    routers = make_routers(given, name, audit, clock=lambda: timeline.now)
    sink = DelayedDelivery(timeline, given.event_delay, given.wire, audit.apply)
    return SimulatedFleet(given, routers, audit, sink, timeline)


def play(fleet: SimulatedFleet, most: int = 100_000) -> Iterator[int]:
    """Run planned actions one after the other, and yield the number of each, until no action is left."""
    for number in count():
        if fleet.timeline.next is None:
            return
        assert number < most, "the fleet does not finish"
        fleet.timeline.step()
        yield number


def growing_conversations(file: Path, requests: int) -> Path:
    """Write a trace of six alternating conversations. Each prompt has 512 tokens more than the one before it."""
    rows = []
    for number in range(requests):
        turn, session = divmod(number, 6)
        ids = [1_000 * session + piece for piece in range(turn + 1)]
        rows.append({"timestamp": 150 * number, "input_length": 512 * len(ids), "output_length": 8, "hash_ids": ids})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
