"""Engines, a router and their requests, in virtual time or along the clock.

One thread does everything that engines and router do, action by action along a `Timeline`. In virtual time the events go
through their wire format into an index, `event_delay` later; along the clock they go over sockets. The router sees what a real
one sees: the index, and the answers to what it sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from kvevents.events import KVEvent, KVEventBatch
from kvevents.index import Namespace, PrefixIndex
from kvevents.routing import Decision, Policy, Router, Worker, policy
from kvevents.sim.audit import Audit, Expected, Mark
from kvevents.sim.engine import Job, Lookup, Step
from kvevents.sim.outlet import Outlet, Postbox
from kvevents.sim.requests import Request
from kvevents.sim.results import Distribution, PolicyResult
from kvevents.sim.sampling import Samples
from kvevents.sim.settings import FleetSettings
from kvevents.sim.station import Station
from kvevents.sim.tally import Tally
from kvevents.sim.timeline import Timeline


class Ticket:
    """A request on its way."""

    __slots__ = ("arrived", "decision", "first_at", "number", "request")

    def __init__(self, number: int, request: Request, arrived: float) -> None:
        self.number: Final = number
        self.request: Final = request
        self.arrived: Final = arrived
        self.decision: Decision | None = None
        self.first_at: float | None = None


class Progress(NamedTuple):
    """How far a run has come."""

    now: float
    """Seconds from the beginning, in the fleet's time."""
    arrived: int
    finished: int


class Fleet:
    """Stations, a router, and the requests between them."""

    def __init__(
        self,
        settings: FleetSettings,
        router: Router,
        audit: Audit,
        outlet: Outlet,
        timeline: Timeline,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.settings: Final = settings
        self.router: Final = router
        self.audit: Final = audit
        self.timeline: Final = timeline
        self.stations: Final = {worker: Station(worker, settings) for worker in settings.workers}
        self.tally: Final = Tally()
        self.samples: Final = Samples(audit.index, self.stations.values())
        self._outlet: Final = outlet
        self._clock: Final = clock or (lambda: timeline.now)
        self._tickets: Final[dict[Job, Ticket]] = {}
        self._coming: Iterator[Request] = iter(())
        self._more = False
        self._held: list[Ticket] = []
        """Requests that came while no worker was up."""
        for worker in self.stations:
            audit.add(worker)
            self._start(worker)

    @property
    def done(self) -> bool:
        """Whether every request has come and was answered."""
        return not (self._more or self._tickets or self._held)

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return Progress(self.timeline.now, self.tally.requests, len(self.tally.latency))

    def feed(self, requests: Iterable[Request]) -> None:
        """These come, each at its time; they must be in the order of their times."""
        self._coming = iter(requests)
        self._more = True
        self._plan_arrival()
        self._sample()

    def result(self, name: str) -> PolicyResult:
        """What the run came to, when it is over."""
        self.audit.finish()
        tally, counts, now = self.tally, self.audit.counts, max(self.tally.last, 0.0)
        computed = [station.computed for station in self.stations.values()]
        mean = sum(computed) / len(computed)
        workers = [station.result(now) for station in self.stations.values()]
        return PolicyResult(
            policy=name,
            requests=tally.requests,
            finished=len(tally.latency),
            refused=tally.refused,
            retried=tally.retried,
            seconds=now,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            hit_rate=tally.cached_tokens / tally.prompt_tokens if tally.prompt_tokens else 0.0,
            ttft=Distribution.of(tally.ttft),
            latency=Distribution.of(tally.latency),
            tpot=Distribution.of(tally.tpot),
            output_tokens_per_second=tally.output_tokens / now if now else 0.0,
            imbalance=max(computed) / mean if mean else 1.0,
            preemptions=sum(worker.preemptions for worker in workers),
            checked=counts.checked,
            disagreements=counts.disagreements,
            unproven=counts.unproven,
            promised_tokens=tally.promised_tokens,
            broken_promises=tally.broken_promises,
            batches=tally.batches,
            events=tally.events,
            workers=workers,
            series=self.samples.taken,
            examples=counts.examples,
        )

    # --- requests

    def _plan_arrival(self) -> None:
        request = next(self._coming, None)
        if request is None:
            self._more = False
        else:
            self.timeline.at(request.at, lambda: self._arrive(request))

    def _arrive(self, request: Request) -> None:
        self.settings.check(request)
        self.tally.requests += 1
        self._send(Ticket(self.tally.requests, request, self.timeline.now))
        self._plan_arrival()

    def _send(self, ticket: Ticket) -> None:
        if not self.router.workers:
            self._held.append(ticket)
            return
        request = ticket.request
        namespace = Namespace(lora=request.lora, salt=request.salt)
        tokens = request.prompt.tokens()
        decision = self.router.route(ticket.number, tokens, namespace=namespace, session=request.session)
        ticket.decision = decision
        station = self.stations[decision.worker]
        self._tickets[station.engine.submit(request)] = ticket
        self._begin(station)

    # --- steps

    def _begin(self, station: Station) -> None:
        if station.busy or not station.up or station.engine.idle:
            return
        seconds = station.engine.begin()
        station.busy = True
        station.seconds += seconds
        life = station.life
        self.timeline.after(seconds, lambda: self._end(station, life))

    def _end(self, station: Station, life: int) -> None:
        if station.life != life or not station.up:
            return  # the engine was restarted in the middle of the step
        station.busy = False
        step = station.engine.end()
        self._announce(station, step)
        for job in step.first:
            self._first_token(self._tickets[job])
        for job in step.finished:
            self._finish(self._tickets.pop(job))
        for job in step.refused:
            self.router.finish(self._tickets.pop(job).number)
            self.tally.refused += 1
        self._begin(station)

    def _announce(self, station: Station, step: Step) -> None:
        for lookup in step.lookups:
            self._looked_up(station, lookup)
        if step.events:
            self._publish(station, step.events)

    def publish_empty(self, worker: Worker) -> None:
        """Publish a batch without events: a live batch confirms to consumers what replay has brought."""
        self._publish(self.stations[worker], [])

    def _publish(self, station: Station, events: list[KVEvent]) -> None:
        station.batches += 1
        self.tally.batches += 1
        self.tally.events += len(events)
        self._outlet.publish(station.worker, KVEventBatch(self._clock(), events, station.worker[1]))

    def _looked_up(self, station: Station, lookup: Lookup) -> None:
        job = lookup.job
        assert job.sequence is not None  # noqa: S101 - it was looked up
        mark = Mark(station.life, station.batches, lookup.position)
        self.audit.expect(station.worker, Expected(mark, job.sequence, lookup.tokens, lookup.cached))
        if lookup.first:
            station.admitted(lookup.tokens, lookup.cached)
            decision = self._tickets[job].decision
            assert decision is not None  # noqa: S101 - it was routed
            self.tally.looked_up(lookup, decision.tokens, self.settings.block_size)

    # --- answers

    def _first_token(self, ticket: Ticket) -> None:
        self.router.record_first_token(ticket.number)
        if ticket.first_at is None:
            ticket.first_at = self.timeline.now
            self.tally.ttft.append(ticket.first_at - ticket.arrived)

    def _finish(self, ticket: Ticket) -> None:
        self.router.finish(ticket.number)
        assert ticket.first_at is not None  # noqa: S101 - an answer has a first token
        self.tally.finished(self.timeline.now, ticket.arrived, ticket.first_at, len(ticket.request.output))

    # --- lives

    def _start(self, worker: Worker) -> None:
        self.stations[worker].start()
        self._outlet.open(worker)
        self.router.add(worker)
        held, self._held = self._held, []
        for ticket in held:
            self._send(ticket)

    def restart(self, worker: Worker, *, down: float = 0.0) -> None:
        """End an engine at once, and begin its next life after `down` seconds; what it had to do goes to the others.

        Where none is left requests wait for the first one that comes back.
        """
        station = self.stations[worker]
        if not station.up:
            return
        lost = [self._tickets.pop(job) for job in station.engine.jobs()]
        station.stop()
        self._outlet.close(worker)
        self.router.remove(worker)
        self.tally.retried += len(lost)
        self.timeline.after(down, lambda: self._start(worker))
        for ticket in lost:
            self._send(ticket)

    def _sample(self) -> None:
        self.samples.take(self.timeline.now, self.tally)
        if not self.done:
            self.timeline.after(self.samples.interval, self._sample)


def simulate(
    settings: FleetSettings,
    name: str,
    requests: Iterable[Request],
    *,
    chosen: Policy | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> PolicyResult:
    """Run a fleet in virtual time under the policy `name`, or under `chosen`.

    `progress` is called now and then. The same arguments give the same result.
    """
    timeline = Timeline()
    index = PrefixIndex(clock=lambda: timeline.now)
    audit = Audit(index)
    chosen = chosen or policy(name, settings.seed)
    router = Router(chosen, index, overlay_seconds=settings.overlay)
    postbox = Postbox(timeline, settings.event_delay, settings.wire, audit.apply)
    fleet = Fleet(settings, router, audit, postbox, timeline)
    fleet.feed(requests)
    told = 0
    while timeline.next is not None:
        timeline.step()
        if progress is not None and fleet.tally.requests >= told + PROGRESS_EVERY:
            told = fleet.tally.requests
            progress(fleet.progress)
    return fleet.result(name)


PROGRESS_EVERY: Final = 50
"""Requests between two calls of `progress`."""
