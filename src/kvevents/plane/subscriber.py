"""A subscriber whose streams come out of a plane's log: what `kvevents.Subscriber` is to engines, this is to lanes.

Whoever reads lanes puts messages in; the thread that asks for deliveries makes something of them, so all that is known here is
known to that thread alone. Trust in a stream is the best that any living bridge says of it, but never more than what can be
seen here: gaps, breaches, heartbeats of engines that disagree, lanes that cannot be read.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from kvevents.errors import ClosedError, UnknownSourceError
from kvevents.plane.ledger import Arrival, Breach, Departure, Event, Ledger, Standing, Told
from kvevents.plane.opinions import Place
from kvevents.plane.reading import Pushed
from kvevents.plane.records import Key
from kvevents.stream import Checkpoint, Doubt, Findings, Gap, RawBatch, Reset, Source, StreamCounters, Trust
from kvevents.stream.deliveries import RawDelivery
from kvevents.subscriber import StreamStatus

log = logging.getLogger(__name__)

MISSED_BEATS: Final = 3
"""After so many that did not come a bridge is taken for dead."""
MOST_BEHIND: Final = 64
"""Pages that a lane may be behind at any moment, as it always is while much is written, before its streams are REPLAYING."""
PAGES_PER_TURN: Final = 16
"""That are read before their deliveries are handed out."""
CENSUS_PAGES: Final = (64, 1_024, 16_384)
"""Every replica digests its streams behind each page whose number is a multiple of the first, and tells the newest digest for
each of them: replicas that are apart by many pages still tell of one place. All choose the same, whatever any clock says."""
_BEST_FIRST: Final = ("EXACT", "DEGRADED", "REPLAYING", "STALE", "CONNECTING")
_FOLLOWED: Final = frozenset({"EXACT", "DEGRADED"})
"""What is said of streams that are followed to their ends."""
_SEEN_HERE: Final[Mapping[Doubt, str]] = {
    Doubt.LOST: "batches are missing in the log",
    Doubt.REJECTED: "the log has a record that no bridge writes, or the engine sent events that could not be read",
    Doubt.DIVERGED: "the engine holds something else than the log says",
}


class Message(NamedTuple):
    """One message of a lane, on its way to the thread that makes something of it."""

    lane: int
    ledger: Ledger | None
    """Which it is for: a lane that was let go and is read again has another one."""
    pushed: Pushed


class Lane(NamedTuple):
    """How one lane stands."""

    position: int
    behind: int | None
    """Pages that the servers have and that are not in the index; None where that is not known."""
    fault: str
    """Why it cannot be read at the moment."""
    at: float | None
    """When the newest page was written, by its writer's clock."""
    complete: bool = False
    """Whether it was read to its end once."""


class LogSubscriber:
    """The streams of some lanes.

    `put`, `tell`, `lanes`, `ledgers`, `cards` and `census` are for any thread, everything else for one. `digest` is asked for a
    stream's digest in the index that deliveries are applied to, when all handed out before were.
    """

    def __init__(self, clock: Callable[[], float], digest: Callable[[Key], str | None]) -> None:
        self.ledgers: Mapping[int, Ledger] = {}
        """Of the lanes that are read; replaced as a whole."""
        self.cards: Mapping[Key, bytes] = {}
        """The streams that there are, with what bridges say of their engines; replaced as a whole."""
        self.diverged = 0
        """Heartbeats of engines that hold something else."""
        self.census: dict[int, tuple[Place, ...]] = {}
        """By lane the newest ones, one for each of `CENSUS_PAGES`, each once."""
        self._places: dict[int, dict[int, Place]] = {}
        """By lane and number of pages."""
        self._digest: Final = digest
        self._due: list[int] = []
        """Lanes whose census is to be taken before anything else is handed out."""
        self._clock: Final = clock
        self._queue: deque[Message] = deque()
        self._put_bytes = self._taken_bytes = 0
        """Each changed by one thread alone."""
        self._bell = threading.Event()
        self._closed = self._joined_or_left = False
        self._lanes: dict[int, Lane] = {}
        self._of: dict[Key, int] = {}
        self._doubts: dict[Key, set[Doubt]] = {}
        self._counters: dict[Key, StreamCounters] = {}
        self._begun: set[Key] = set()
        """Streams of whose present incarnation there was a batch."""
        self._heard: dict[tuple[int, str], tuple[int, float]] = {}
        """By lane and bridge the page of its last beat, and when that was seen."""

    # --- from any thread

    def put(self, lane: int, came: list[Pushed]) -> None:
        """Messages of a lane, in order."""
        self._put_bytes += sum(len(pushed.data) for pushed in came)
        ledger = self.ledgers.get(lane)
        self._queue.extend(Message(lane, ledger, pushed) for pushed in came)
        self._bell.set()

    def tell(self, lane: int, behind: int | None, fault: str) -> None:
        """How reading a lane goes, where no message says it."""
        known = self._lanes.get(lane)
        if known is None:  # it is read no more
            return
        if behind == 0 and not fault and not self._queue:
            known = known._replace(behind=0, complete=True)
        elif behind is None:
            known = known._replace(behind=None)
        self._lanes[lane] = known._replace(fault=fault)

    @property
    def queued_bytes(self) -> int:
        """Of messages of which nothing was made yet."""
        return self._put_bytes - self._taken_bytes

    @property
    def lanes(self) -> Mapping[int, Lane]:
        """How each lane stands."""
        return self._lanes

    def bridges(self) -> int:
        """How many bridges are heard."""
        return len({bridge for lane, bridge in list(self._heard) if self._is_alive(lane, bridge)})

    def is_complete(self, lane: int) -> bool:
        """Whether a lane was read to its end once. By order of the follower: then all of that is in the index."""
        known = self._lanes.get(lane)
        return known is not None and known.complete

    # --- lanes

    def add_lane(self, lane: int, ledger: Ledger, doubts: Mapping[Key, frozenset[Doubt]]) -> None:
        """Go on with a lane from where a ledger ends; the index holds what belongs to it."""
        self._lanes = {**self._lanes, lane: Lane(ledger.position, None, "", None)}
        self.ledgers = {**self.ledgers, lane: ledger}
        self._of.update(dict.fromkeys(ledger.streams, lane))
        self._doubts.update({key: set(found) for key, found in doubts.items()})
        self._begun.update(key for key, standing in ledger.streams.items() if standing.last_seq >= 0)
        self.cards = _cards(self.ledgers.values())

    def drop_lane(self, lane: int) -> list[Key]:
        """Know nothing of a lane any more, not even what has come of it; its streams, which are to leave the index."""
        ledger = self.ledgers[lane]
        self.ledgers = {number: each for number, each in self.ledgers.items() if number != lane}
        self._lanes = {number: each for number, each in self._lanes.items() if number != lane}
        self.census = {number: each for number, each in self.census.items() if number != lane}
        self._places.pop(lane, None)
        self._due = [number for number in self._due if number != lane]
        self._heard = {key: each for key, each in self._heard.items() if key[0] != lane}
        for key in ledger.streams:
            self._of.pop(key, None)
            self._doubts.pop(key, None)
            self._counters.pop(key, None)
            self._begun.discard(key)
        self.cards = _cards(self.ledgers.values())
        return list(ledger.streams)

    # --- deliveries

    def receive_many(self, timeout: float | None = None, limit: int | None = None) -> list[RawDelivery]:  # noqa: ARG002 - a subscriber's
        """What is new, in order; empty after `timeout` seconds."""
        if self._closed:
            raise ClosedError("LogSubscriber is closed")
        self._take_census()
        if not self._queue:
            self._bell.wait(timeout)
        self._bell.clear()
        found: list[RawDelivery] = []
        for _ in range(min(PAGES_PER_TURN, len(self._queue))):
            message = self._queue.popleft()
            self._taken_bytes += len(message.pushed.data)
            found += self._read(message)
            if self._due:
                break
        if self._joined_or_left:
            self._joined_or_left = False
            self.cards = _cards(self.ledgers.values())
        if self._queue:
            self._bell.set()
        return found

    def _take_census(self) -> None:
        """Of lanes whose place has come: everything up to it has been applied, and nothing after it."""
        while self._due:
            lane = self._due.pop()
            ledger = self.ledgers[lane]
            digests = {key: digest for key in ledger.joined() if (digest := self._digest(key)) is not None}
            place = Place.of(ledger.position, digests)
            places = self._places.setdefault(lane, {})
            places.update({pages: place for pages in CENSUS_PAGES if place.position % pages == 0})
            self.census[lane] = tuple(dict.fromkeys(places.values()))

    def _read(self, message: Message) -> list[RawDelivery]:
        lane, ledger, pushed = message
        if ledger is None or self.ledgers.get(lane) is not ledger:
            return []
        page = pushed.page()
        events: list[Event] = []
        known = self._lanes[lane]
        at = known.at
        if page is None:
            if not ledger.foreign:
                log.error("message %d of lane %d is no page; somebody else writes there", pushed.position, lane)
            ledger.skip(pushed.position, pushed.name, is_first=pushed.begins_history)
        else:
            events, at = ledger.feed(pushed.position, page), page.at
        if pushed.position % CENSUS_PAGES[0] == 0 and not ledger.hole:
            self._due.append(lane)
        self._lanes[lane] = Lane(pushed.position, pushed.pending, "", at, known.complete or pushed.pending == 0)
        now = self._clock()
        self._heard.update(
            {
                (lane, bridge): (beaten.page, now)
                for bridge, beaten in ledger.beats.items()
                if self._heard.get((lane, bridge), (-1, 0.0))[0] != beaten.page
            }
        )
        return [delivery for event in events if (delivery := self._note(lane, event)) is not None]

    def _note(self, lane: int, event: Event) -> RawDelivery | None:
        """What an event means to trust, and to the index."""
        if isinstance(event, RawBatch | Reset | Gap):
            self._count(event)
            return event
        if isinstance(event, Arrival | Departure):
            self._of[event.key] = lane
            self._joined_or_left = True
        if isinstance(event, Departure):
            # In order with what comes of it, which may be at once: it joins again, and nobody has seen that it was away.
            self._begun.discard(event.key)
            self._doubts.pop(event.key, None)
            return Reset(*event.key, event.incarnation, f"it has left: {event.reason}")
        if isinstance(event, Breach):
            log.error("lane %d, %s rank %d: %s; no bridge writes that", lane, *event.key, event.what)
            self._doubt(event.key, Doubt.REJECTED)
        return None

    def _count(self, event: RawDelivery) -> None:
        key = (event.source, event.rank)
        counters = self._counters.setdefault(key, StreamCounters())
        if isinstance(event, RawBatch):
            if key not in self._begun:
                self._begun.add(key)
                if event.seq > 0:
                    self._doubt(key, Doubt.LOST)
            counters.delivered += 1
            counters.replayed += event.replayed
        elif isinstance(event, Gap) and event.compacted:
            self._begun.add(key)
            counters.compacted += event.last - event.first + 1
        elif isinstance(event, Gap):
            counters.gaps += 1
            counters.lost += event.last - event.first + 1
            self._doubt(key, Doubt.LOST)
        else:
            counters.resets += 1
            self._doubts.pop(key, None)
            self._begun.discard(key)

    def _doubt(self, key: Key, doubt: Doubt) -> None:
        self._doubts.setdefault(key, set()).add(doubt)

    def report(self, delivery: RawDelivery, findings: Findings | None) -> None:
        """What applying a batch has shown."""
        if findings is None:
            return
        key = (delivery.source, delivery.rank)
        if findings.cleared or findings.agrees:
            self._doubts.pop(key, None)
        if not findings.agrees and any(each.costs_events for each in findings.rejected):
            self._doubt(key, Doubt.REJECTED)
        if findings.agrees is False:
            # Where it is known why, another index of the same log would not agree either.
            self.diverged += not self._doubts.get(key)
            self._doubt(key, Doubt.DIVERGED)
        if findings.heartbeat is not None:
            self._counters.setdefault(key, StreamCounters()).heartbeats += 1

    # --- what is known

    def trust(self, name: str | None = None, rank: int = 0) -> Trust:
        """How far a stream can be trusted."""
        return self._trust((name or "", rank))

    def _trust(self, key: Key) -> Trust:
        lane_number, standing = self._find(key)
        lane = self._lanes[lane_number]
        if lane.fault:
            return Trust.STALE.because(f"the log cannot be read: {lane.fault}")
        if not lane.complete or lane.behind is None or lane.behind > MOST_BEHIND:
            return Trust.REPLAYING.because("the log is being read")
        said = self._said(lane_number, standing)
        seen = self._doubts.get(key)
        if said == Trust.EXACT and seen:
            return Trust.DEGRADED.because("; ".join(sorted(_SEEN_HERE[doubt] for doubt in seen)))
        return said

    def _said(self, lane: int, standing: Standing) -> Trust:
        """The best that a living bridge says."""
        if (best := self._best(lane, standing)) is not None:
            return Trust(best.trust, best.reason)
        if standing.told:
            return Trust.STALE.because("no bridge is heard that follows it")
        return Trust.REPLAYING.because("no bridge has said yet how far it is to be trusted")

    def _best(self, lane: int, standing: Standing) -> Told | None:
        """What the living bridge says that trusts a stream most; None if no bridge lives."""
        alive = [self._of_now(lane, bridge, told) for bridge, told in standing.told.items() if self._is_alive(lane, bridge)]
        rank = {state: place for place, state in enumerate(_BEST_FIRST)}
        return min(alive, key=lambda told: rank.get(told.trust, len(rank)), default=None)

    def _of_now(self, lane: int, bridge: str, told: Told) -> Told:
        """What a bridge says, unless it is behind: it said that of what it had heard by then."""
        lag = self.ledgers[lane].beats[bridge].beat.lag
        if not lag or told.trust not in _FOLLOWED:
            return told
        return Told("REPLAYING", f"bridge {bridge} is {lag:.0f} s behind: what engines say is not in the log yet", told.doubts)

    def _is_alive(self, lane: int, bridge: str) -> bool:
        ledger, heard = self.ledgers.get(lane), self._heard.get((lane, bridge))
        beaten = None if ledger is None else ledger.beats.get(bridge)
        if beaten is None:
            return False
        since = self._clock() - heard[1] if heard is not None else float("inf")
        return since < MISSED_BEATS * beaten.beat.every

    def _find(self, key: Key) -> tuple[int, Standing]:
        lane = self._of.get(key)
        standing = None if lane is None else self.ledgers[lane].streams.get(key)
        if lane is None or standing is None or standing.card is None:
            raise UnknownSourceError(f"the log has no source {key[0]!r} with rank {key[1]}")
        return lane, standing

    def status(self, name: str | None = None, rank: int = 0) -> StreamStatus:
        """Trust, numbers and counters of one stream."""
        key = (name or "", rank)
        lane, standing = self._find(key)
        counters = self._counters.setdefault(key, StreamCounters())
        best = self._best(lane, standing)
        said = () if best is None else (Doubt[name] for name in best.doubts if name in Doubt.__members__)
        return StreamStatus(
            key[0],
            key[1],
            f"lane {lane}",
            self._trust(key),
            frozenset((*self._doubts.get(key, ()), *said)),
            standing.incarnation,
            standing.last_seq,
            0,
            counters.copy(),
        )

    def statuses(self) -> list[StreamStatus]:
        """The same of every stream."""
        return [self.status(*key) for key in self.cards]

    def doubts(self) -> dict[Key, frozenset[Doubt]]:
        """What was seen here against each stream; for a snapshot."""
        return {key: frozenset(found) for key, found in self._doubts.items() if found}

    # --- what a subscriber can besides

    def add(self, source: Source, resume: Checkpoint | None = None) -> None:
        """Nothing: bridges decide what is followed."""

    def remove(self, name: str, rank: int = 0) -> None:
        """Nothing, as `add`."""

    def checkpoints(self) -> list[Checkpoint]:
        """None: a log is read again from its snapshot."""
        return []

    def close(self) -> None:
        """Hand out nothing any more."""
        self._closed = True
        self._bell.set()


def _cards(ledgers: Iterable[Ledger]) -> dict[Key, bytes]:
    return {key: card for ledger in ledgers for key, card in ledger.joined().items()}
