"""A fleet along the clock: simulated engines that publish over real sockets, and a router that listens to them.

Engines, router and traffic are those of `kvevents.sim.fleet`, whose time is the clock's, or runs `pace` times as fast. Their
events go through publishers, sockets, a subscriber and an index, as those of real engines would, so any other consumer can be
pointed at the same sockets.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, NamedTuple, Self

from kvevents.errors import ConfigError
from kvevents.index import PrefixIndex
from kvevents.routing import Router, Worker, policy
from kvevents.sim import faults
from kvevents.sim.faults import Fault
from kvevents.sim.fleet import Fleet
from kvevents.sim.follower import Follower
from kvevents.sim.requests import Request
from kvevents.sim.results import PolicyResult, StreamResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.sockets import Address, Sockets
from kvevents.sim.timeline import Timeline
from kvevents.stream import DegradedReason
from kvevents.subscriber import StreamStatus

CONNECT_SECONDS: Final = 10.0
"""That the subscriber has to connect to all engines before the traffic begins."""
SETTLE_SECONDS: Final = 10.0
"""That the last events have to arrive when the traffic is over."""
CONFIRM_SECONDS: Final = 0.5
"""Between two empty batches that confirm what replay has brought, when the traffic is over."""
LOOK: Final = 0.1
"""Seconds between two looks at whether the run should end, and at its consumer."""
POLL: Final = 0.01


class WorkerView(NamedTuple):
    """One worker at one moment."""

    worker: Worker
    trust: str
    running: int
    waiting: int
    blocks: int
    """In its cache, used or not."""
    batches: int
    """Of its present life."""
    hit_rate: float
    restarts: int


class LiveFleet:
    """A running fleet; a context manager. Raises `EndpointError` for ports in use, `ConfigError` for wrong settings."""

    def __init__(
        self,
        settings: FleetSettings,
        name: str,
        *,
        pace: float = 1.0,
        host: str = "127.0.0.1",
        base_port: int | None = None,
        wishes: Sequence[Fault] = (),
    ) -> None:
        if not 0 < pace < float("inf"):
            raise ConfigError(f"pace is {pace}; it is a number above 0, and 1 is the clock's own")
        self.settings = settings
        self.pace = pace
        self.behind = 0.0
        """Seconds of the clock by which the fleet was late, at most: more than a little says that this machine is too slow."""
        self.struck: Counter[str] = Counter()
        """Recurring faults so far, by kind."""
        self.stalled: set[Worker] = set()
        """Workers whose network is stalled."""
        self.name: Final = name
        """Of the policy."""
        self.wishes = list(wishes)
        """Faults that were asked for."""
        self._timeline: Final = Timeline()
        self._stop: Final = threading.Event()
        with ExitStack() as closing:
            self.sockets = closing.enter_context(
                Sockets(settings, host=host, base_port=base_port, proxied=any(wish.network for wish in wishes))
            )
            self.index: Final = PrefixIndex(clock=lambda: self._timeline.now)
            self.follower: Final = Follower(self.index, self.sockets.life)
            closing.callback(self.follower.close)
            router = Router(
                policy(name, settings.seed),
                self.index,
                trust=lambda worker: self.follower.trust.get(worker, "CONNECTING"),
                overlay_seconds=settings.overlay,
            )
            self.fleet = Fleet(settings, router, self.follower.audit, self.sockets, self._timeline, clock=time.time)
            self.follower.follow(address.source for address in self.addresses)
            self._wait_for_subscriber()
            self._closing: Final = closing.pop_all()

    @property
    def addresses(self) -> list[Address]:
        """Where consumers find the workers."""
        return list(self.sockets.addresses.values())

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something in so many seconds of the clock."""
        self._timeline.after(seconds * self.pace, action)

    def stop(self) -> None:
        """Have `run` end soon. From any thread, or a signal handler."""
        self._stop.set()

    def run(self, requests: Iterable[Request], *, look: Callable[[LiveFleet], object] = lambda _: None) -> PolicyResult:
        """Send these, until all are answered or `stop` is called; `look` is called now and then.

        Once only. Raises what ended the consumer, and `ConfigError` for a request that the dialect cannot tell.
        """
        self.fleet.feed(requests)
        faults.begin(self)
        began, looked = time.monotonic(), 0.0
        while (due := self._timeline.next) is not None and not self.fleet.done and not self._stop.is_set():
            now = time.monotonic()
            if now - looked >= LOOK:
                looked = now
                self.follower.check()
                look(self)
            wait = began + due / self.pace - now
            if wait > 0:
                self._stop.wait(min(wait, LOOK))
                if wait > LOOK:
                    continue
            self.behind = max(self.behind, -wait)
            self._timeline.step()
        self._settle()
        self.follower.close()
        self.follower.check()
        return self.fleet.result(self.name)

    def views(self) -> list[WorkerView]:
        """Every worker now."""
        trust = self.follower.trust
        return [
            WorkerView(
                worker=worker,
                trust=trust.get(worker, "CONNECTING"),
                running=simulated.engine.running if simulated.is_up else 0,
                waiting=simulated.engine.waiting if simulated.is_up else 0,
                blocks=simulated.engine.cache.pool.holding if simulated.is_up else 0,
                batches=simulated.batches,
                hit_rate=simulated.cached_tokens / simulated.prompt_tokens if simulated.prompt_tokens else 0.0,
                restarts=simulated.incarnation,
            )
            for worker, simulated in self.fleet.workers.items()
        ]

    def streams(self) -> list[StreamResult]:
        """What the subscriber saw of every stream."""
        return [
            StreamResult(
                source=status.source,
                rank=status.rank,
                endpoint=status.endpoint,
                trust=str(status.trust),
                batches=status.counters.delivered,
                replayed=status.counters.replayed,
                healed=status.counters.gaps_repaired,
                lost=status.counters.lost,
                resets=status.counters.resets,
                reconnects=status.counters.reconnects,
            )
            for status in self.follower.statuses()
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.close()

    def _wait_for_subscriber(self) -> None:
        """What is sent before a connection stands, or before the question for history is answered, is replayed.

        A run should not begin with that.
        """
        until = time.monotonic() + CONNECT_SECONDS
        while not self._is_followed() and time.monotonic() < until:
            self.follower.check()
            time.sleep(POLL)

    def _is_followed(self) -> bool:
        return self.sockets.subscribers() > 0 and {"CONNECTING", "REPLAYING"}.isdisjoint(self.follower.trust.values())

    def _settle(self) -> None:
        """End the network's faults, and wait until all that was published has arrived, or cannot be waited for.

        What has arrived by replay, with nothing live after it, is not EXACT: engines publish an empty batch then.
        """
        for proxies in self.sockets.proxies.values():
            for proxy in proxies:
                proxy.heal()
        until = time.monotonic() + SETTLE_SECONDS
        confirm_at = 0.0
        while (waiting := self._not_settled()) and (now := time.monotonic()) < until and not self._stop.is_set():
            self.follower.check()
            if now >= confirm_at and (unproven := [worker for worker, status in waiting.items() if self._is_unproven(status)]):
                confirm_at = now + CONFIRM_SECONDS
                for worker in unproven:
                    self.fleet.publish_empty(worker)
            time.sleep(POLL)

    def _not_settled(self) -> dict[Worker, StreamStatus]:
        """Streams of engines that run and have published, of which something has not arrived or is not known to be right."""
        statuses = {(status.source, status.rank): status for status in self.follower.statuses()}
        return {
            worker: statuses[worker]
            for worker, simulated in self.fleet.workers.items()
            if simulated.is_up and simulated.batches and not self._is_settled(statuses[worker])
        }

    def _is_settled(self, status: StreamStatus) -> bool:
        return self._has_arrived(status) and status.trust.name == "EXACT"

    def _is_unproven(self, status: StreamStatus) -> bool:
        return (
            self._has_arrived(status)
            and status.trust.name == "DEGRADED"
            and status.degraded_reasons == {DegradedReason.REPLAY_UNPROVEN}
        )

    def _has_arrived(self, status: StreamStatus) -> bool:
        """Whether a subscriber has all batches of a life. A life of which it saw nothing it cannot have counted."""
        simulated = self.fleet.workers[status.source, status.rank]
        return status.last_seq + 1 == simulated.batches and status.counters.resets >= min(simulated.incarnation, 1)
