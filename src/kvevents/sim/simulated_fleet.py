"""A fleet of engines with routers and requests, in virtual time or in real time.

One thread runs the engines and the routers, action by action on a `Timeline`. In virtual time, events are encoded, and applied
to an index `event_delay` seconds later. In real time, events pass through sockets. A router has the information that a real
router has: the index, its own decisions, and the answers to its own requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final, NamedTuple, Protocol

import msgspec

from kvevents.events import KVEvent, KVEventBatch
from kvevents.index import Namespace, PrefixIndex
from kvevents.routing import Decision, Policy, Router, Worker
from kvevents.sim.audit import Audit, EngineLookup, LookupPosition
from kvevents.sim.requests import Request
from kvevents.sim.results import Distribution, PolicyResult, RequestMetrics, SimulatedWorker
from kvevents.sim.routers import make_routers
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_engine import Job, Lookup
from kvevents.stream import RawBatch, Reset
from kvevents.wire import Dialect
from kvevents.wire.dialects import NEWEST_VLLM
from kvevents.wire.encode import batch_encoder


class Timeline:
    """Runs actions in the order of their times, and actions with equal times in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds from the beginning."""
        self._planned: Final[list[tuple[float, int, Callable[[], object]]]] = []
        self._count = 0

    def schedule_at(self, time: float, action: Callable[[], object]) -> None:
        """Plan an action for a time. If the time has passed, the action counts as due now."""
        self._count += 1
        heapq.heappush(self._planned, (max(time, self.now), self._count, action))

    def schedule_after(self, seconds: float, action: Callable[[], object]) -> None:
        """Plan an action `seconds` seconds from now."""
        self.schedule_at(self.now + seconds, action)

    @property
    def next(self) -> float | None:
        """Time of the next action, or None if no action is planned."""
        return self._planned[0][0] if self._planned else None

    def step(self) -> None:
        """Advance to the time of the next action, and run it. At least one action must be planned."""
        self.now, _, action = heapq.heappop(self._planned)
        action()


class EventSink(Protocol):
    """Publishes batches for all workers of a fleet."""

    def open(self, worker: Worker) -> None:
        """Begin an incarnation of a worker."""

    def publish(self, worker: Worker, batch: KVEventBatch) -> None:
        """Publish the events of a step. Batches are numbered from 0 in each incarnation of a worker."""

    def close(self, worker: Worker) -> None:
        """End an incarnation of a worker; its replay buffer is lost."""


class DelayedDelivery:
    """Encodes each batch and delivers it after `delay` seconds of virtual time. No batch is lost."""

    def __init__(
        self, timeline: Timeline, delay: float, dialect: Dialect, deliver: Callable[[RawBatch | Reset, int], object]
    ) -> None:
        self._timeline: Final = timeline
        self._delay: Final = delay
        # The newest vLLM has a field for everything in these events, so the plain encoding, which is faster, gives its bytes.
        self._encode: Final = msgspec.msgpack.Encoder().encode if dialect is NEWEST_VLLM else batch_encoder(dialect)
        self._deliver: Final = deliver
        self._incarnations: Final[dict[Worker, int]] = {}
        self._sent: Final[dict[Worker, int]] = {}

    def open(self, worker: Worker) -> None:
        """Begin an incarnation. Deliver a reset, except for the worker's first incarnation."""
        incarnation = self._incarnations[worker] = self._incarnations.get(worker, -1) + 1
        self._sent[worker] = 0
        if incarnation:
            self._deliver_later(Reset(*worker, incarnation, "the engine was restarted"), incarnation)

    def publish(self, worker: Worker, batch: KVEventBatch) -> None:
        """Encode a batch and plan its delivery."""
        incarnation, number = self._incarnations[worker], self._sent[worker]
        self._sent[worker] = number + 1
        self._deliver_later(RawBatch(*worker, incarnation, number, False, self._encode(batch)), incarnation)

    def close(self, worker: Worker) -> None:
        """Do nothing: batches that were published before arrive after the delay."""

    def _deliver_later(self, delivery: RawBatch | Reset, incarnation: int) -> None:
        self._timeline.schedule_after(self._delay, partial(self._deliver, delivery, incarnation))


@dataclass(slots=True)
class InFlightRequest:
    """A request from its arrival to the end of its answer."""

    number: int
    request: Request
    router: Router
    arrived: float
    decision: Decision | None = None
    first_at: float | None = None


class Progress(NamedTuple):
    """Progress of a run."""

    now: float
    """Seconds from the beginning, in the fleet's time."""
    arrived: int
    finished: int


class SimulatedFleet:
    """Workers, routers, and the requests between them. Each request goes to a router that is selected at random."""

    def __init__(
        self,
        settings: FleetSettings,
        routers: Sequence[Router],
        audit: Audit,
        sink: EventSink,
        timeline: Timeline,
        *,
        clock: Callable[[], float] | None = None,
        before_choice: Callable[[], object] | None = None,
    ) -> None:
        """`clock` gives the timestamps of batches (default: the timeline's time); `before_choice` runs before each choice."""
        self.settings: Final = settings
        self.routers: Final = routers
        self.audit: Final = audit
        self.timeline: Final = timeline
        self.workers: Final = {worker: SimulatedWorker(worker, settings) for worker in settings.workers}
        self.metrics: Final = RequestMetrics()
        self._random: Final = Random(f"routers {settings.seed}")  # noqa: S311 - random numbers that need not be secret
        self._sink: Final = sink
        self._clock: Final = clock or (lambda: timeline.now)
        self._before_choice: Final = before_choice
        self._in_flight: Final[dict[Job, InFlightRequest]] = {}
        self._arrivals: Iterator[Request] = iter(())
        self._has_arrivals = False
        self._unrouted: list[InFlightRequest] = []
        """Requests that wait for a router's choice because no worker is up."""
        for worker in self.workers:
            audit.add(worker)
            self._start(worker)

    @property
    def done(self) -> bool:
        """Whether every request has arrived and was answered."""
        return not (self._has_arrivals or self._in_flight or self._unrouted)

    @property
    def progress(self) -> Progress:
        """The time and the numbers of requests that have arrived and finished."""
        return Progress(self.timeline.now, self.metrics.requests, len(self.metrics.latency))

    def feed(self, requests: Iterable[Request]) -> None:
        """Plan the arrival of requests, which must be in the order of their times."""
        self._arrivals = iter(requests)
        self._plan_arrival()

    def result(self, name: str) -> PolicyResult:
        """Return the result of a run that has ended."""
        self.audit.finish()
        metrics, now = self.metrics, max(self.metrics.last, 0.0)
        computed = [worker.computed for worker in self.workers.values()]
        mean = sum(computed) / len(computed)
        workers = [worker.result(now) for worker in self.workers.values()]
        return PolicyResult(
            policy=name,
            seed=self.settings.seed,
            requests=metrics.requests,
            finished=len(metrics.latency),
            refused=metrics.refused,
            retried=metrics.retried,
            seconds=now,
            prompt_tokens=metrics.prompt_tokens,
            cached_tokens=metrics.cached_tokens,
            hit_rate=metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0,
            ttft=Distribution.from_values(metrics.ttft),
            latency=Distribution.from_values(metrics.latency),
            tpot=Distribution.from_values(metrics.tpot),
            output_tokens_per_second=metrics.output_tokens / now if now else 0.0,
            imbalance=max(computed) / mean if mean else 1.0,
            preemptions=sum(worker.preemptions for worker in workers),
            predicted_tokens=metrics.predicted_tokens,
            overpredictions=metrics.overpredictions,
            batches=metrics.batches,
            events=metrics.events,
            workers=workers,
            **msgspec.structs.asdict(self.audit.counts),
        )

    # --- requests

    def _plan_arrival(self) -> None:
        request = next(self._arrivals, None)
        self._has_arrivals = request is not None
        if request is not None:
            self.timeline.schedule_at(request.at, lambda: self._arrive(request))

    def _arrive(self, request: Request) -> None:
        self.settings.check(request)
        self.metrics.requests += 1
        router = self._random.choice(self.routers)
        self._send(InFlightRequest(self.metrics.requests, request, router, self.timeline.now))
        self._plan_arrival()

    def _send(self, in_flight: InFlightRequest) -> None:
        if not in_flight.router.workers:
            self._unrouted.append(in_flight)
            return
        if self._before_choice is not None:
            self._before_choice()
        request = in_flight.request
        namespace = Namespace(lora=request.lora, salt=request.salt)
        tokens = request.prompt.tokens()
        decision = in_flight.router.route(in_flight.number, tokens, namespace=namespace, session=request.session)
        in_flight.decision = decision
        worker = self.workers[decision.worker]
        self._in_flight[worker.engine.submit(request)] = in_flight
        self._begin_step(worker)

    # --- steps

    def _begin_step(self, worker: SimulatedWorker) -> None:
        if worker.is_busy or not worker.is_up or worker.engine.idle:
            return
        seconds = worker.engine.begin()
        worker.is_busy = True
        worker.seconds += seconds
        incarnation = worker.incarnation
        self.timeline.schedule_after(seconds, lambda: self._end_step(worker, incarnation))

    def _end_step(self, worker: SimulatedWorker, incarnation: int) -> None:
        if worker.incarnation != incarnation or not worker.is_up:
            return  # the engine was restarted during the step
        worker.is_busy = False
        step = worker.engine.end()
        for lookup in step.lookups:
            self._on_lookup(worker, lookup)
        if step.events:
            self._publish(worker, step.events)
        for job in step.first_token_jobs:
            in_flight = self._in_flight[job]
            in_flight.router.record_first_token(in_flight.number)
            if in_flight.first_at is None:
                in_flight.first_at = self.timeline.now
                self.metrics.ttft.append(in_flight.first_at - in_flight.arrived)
        for job in step.finished:
            self._finish(self._in_flight.pop(job))
        for job in step.refused:
            refused = self._in_flight.pop(job)
            refused.router.finish(refused.number)
            self.metrics.refused += 1
        self._begin_step(worker)

    def publish_empty(self, worker: Worker) -> None:
        """Publish a batch without events. This live batch confirms earlier replayed batches to consumers."""
        self._publish(self.workers[worker], [])

    def _publish(self, worker: SimulatedWorker, events: list[KVEvent]) -> None:
        worker.batches += 1
        self.metrics.batches += 1
        self.metrics.events += len(events)
        self._sink.publish(worker.worker, KVEventBatch(self._clock(), events, worker.worker[1]))

    def _on_lookup(self, worker: SimulatedWorker, lookup: Lookup) -> None:
        job = lookup.job
        position = LookupPosition(worker.incarnation, worker.batches, lookup.position)
        self.audit.expect(worker.worker, EngineLookup(position, job.sequence, lookup.tokens, lookup.cached))
        if lookup.is_first:
            worker.record_lookup(lookup.tokens, lookup.cached)
            decision = self._in_flight[job].decision
            assert decision is not None  # noqa: S101 - a request with a lookup was routed
            self.metrics.record_lookup(lookup, decision.tokens, self.settings.block_size)

    # --- answers

    def _finish(self, in_flight: InFlightRequest) -> None:
        in_flight.router.finish(in_flight.number)
        assert in_flight.first_at is not None  # noqa: S101 - each answer has a first token
        self.metrics.record_answer(self.timeline.now, in_flight.arrived, in_flight.first_at, len(in_flight.request.output))

    # --- restarts

    def _start(self, worker: Worker) -> None:
        self.workers[worker].start()
        self._sink.open(worker)
        for router in self.routers:
            router.add(worker)
        waiting, self._unrouted = self._unrouted, []
        for in_flight in waiting:
            self._send(in_flight)

    def restart(self, worker: Worker, *, down: float = 0.0) -> None:
        """End an engine at once, and begin its next incarnation after `down` seconds.

        The engine's requests are routed again. If no worker is up, the requests wait until a worker starts.
        """
        restarted = self.workers[worker]
        if not restarted.is_up:
            return
        lost = [self._in_flight.pop(job) for job in restarted.engine.jobs()]
        restarted.stop()
        self._sink.close(worker)
        for router in self.routers:
            router.remove(worker)
        self.metrics.retried += len(lost)
        self.timeline.schedule_after(down, lambda: self._start(worker))
        for in_flight in lost:
            self._send(in_flight)


def simulate(
    settings: FleetSettings,
    name: str,
    requests: Iterable[Request],
    *,
    chosen: Callable[..., Policy] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> PolicyResult:
    """Run a fleet in virtual time under the policy `name`.

    `chosen`, if not None, is a function that creates a policy from a seed, and replaces the policy `name`. `progress` is called
    after every `REQUESTS_PER_PROGRESS` requests. Equal arguments give equal results.
    """
    timeline = Timeline()
    audit = Audit(PrefixIndex(clock=lambda: timeline.now))
    routers = make_routers(settings, name, audit, chosen=chosen, clock=lambda: timeline.now)
    sink = DelayedDelivery(timeline, settings.event_delay, settings.wire, audit.apply)
    fleet = SimulatedFleet(settings, routers, audit, sink, timeline)
    fleet.feed(requests)
    reported = 0
    while timeline.next is not None:
        timeline.step()
        if progress is not None and fleet.metrics.requests >= reported + REQUESTS_PER_PROGRESS:
            reported = fleet.metrics.requests
            progress(fleet.progress)
    return fleet.result(name)


REQUESTS_PER_PROGRESS: Final = 50
"""Number of requests between two calls of `progress`."""
