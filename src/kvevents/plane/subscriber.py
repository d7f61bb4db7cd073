"""A subscriber whose streams come out of a plane's log: what `kvevents.Subscriber` is to engines, this is to partitions.

Whoever reads partitions puts messages in; the thread that asks for deliveries makes something of them, so all that is known
here is known to that thread alone. Trust in a stream is the best that any living bridge says of it, but never more than what
can be seen here: gaps, breaches, heartbeats of engines that disagree, partitions that cannot be read.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvevents.errors import ClosedError, UnknownSourceError
from kvevents.plane.ledger import Arrival, Breach, Departure, Event, Ledger, Standing, Told
from kvevents.plane.opinions import Place
from kvevents.plane.reading import Pushed
from kvevents.plane.records import Key, name_of
from kvevents.stream import (
    BatchReport,
    Checkpoint,
    DegradedReason,
    Gap,
    RawBatch,
    RawDelivery,
    Reset,
    Source,
    StreamCounters,
    Trust,
    TrustLedger,
)
from kvevents.subscriber import Sink, StreamStatus

log = logging.getLogger(__name__)

MOST_BEHIND: Final = 64
"""Pages that a partition may be behind at any moment, as it always is while much is written, before its streams are
REPLAYING."""
PAGES_PER_TURN: Final = 16
"""That are read before their deliveries are handed out."""
CENSUS_PAGES: Final = (64, 1_024, 16_384)
"""Every replica digests its streams behind each page whose number is a multiple of the first, and tells the newest digest for
each of them: replicas that are apart by many pages still tell of one place. All choose the same, whatever any clock says."""
_BEST_FIRST: Final = ("EXACT", "DEGRADED", "REPLAYING", "STALE", "CONNECTING")
_FOLLOWED: Final = frozenset({"EXACT", "DEGRADED"})
"""What is said of streams that are followed to their ends."""
_SEEN_HERE: Final[Mapping[DegradedReason, str]] = {
    DegradedReason.LOST: "batches are missing in the log",
    DegradedReason.REJECTED: "the log has a record that no bridge writes, or the engine sent events that could not be read",
    DegradedReason.DIVERGED: "the engine holds something else than the log says",
    DegradedReason.SENDER: "the engine does not trust what it sends, or sends a snapshot of which batches are still to come",
}


class Message(NamedTuple):
    """One message of a partition, on its way to the thread that makes something of it."""

    partition: int
    ledger: Ledger | None
    """Which it is for: a partition that was let go and is read again has another one."""
    pushed: Pushed


class Partition(NamedTuple):
    """How one partition stands."""

    position: int
    behind: int | None
    """Pages that the servers have and that are not in the index; None where that is not known."""
    fault: str
    """Why it cannot be read at the moment."""
    at: float | None
    """When the newest page was written, by its writer's clock."""
    complete: bool = False
    """Whether it was read to its end once."""
    is_broken: bool = False
    """Whether what was read of it may be wrong: `fault` stays then, whatever else comes of it."""


@dataclass(slots=True, eq=False)
class _Seen:
    """What was seen here of one incarnation of a stream."""

    incarnation: int
    begun: bool = False
    """Whether there was a batch of it."""
    doubts: TrustLedger = field(default_factory=TrustLedger)
    represented: int = -1
    """Last number that a snapshot represents which is not in the index, or not all of it; -1 where there is no such one."""
    heartbeat_seq: int = -1
    """Number of the batch with the newest heartbeat."""

    def find(self, seq: int, report: BatchReport) -> bool:
        """Take what applying batch `seq` has shown. Return whether the engine holds something else for no known reason.

        As in `kvevents.stream`, a clear or an agreement ends older doubts only, whenever it is reported.
        """
        doubts = self.doubts
        if report.cleared:
            doubts.clear(seq)
        if any(each.loses_events for each in report.rejected):
            doubts.reject(seq)
        heartbeat = report.heartbeat
        if heartbeat is not None and seq > self.heartbeat_seq:
            self.heartbeat_seq = seq
            doubts.discard(DegradedReason.SENDER)
            if heartbeat.trust != Trust.EXACT.name:
                doubts.add(DegradedReason.SENDER, seq)
        is_all = report.cleared if heartbeat is None else heartbeat.trust == Trust.EXACT.name
        if is_all and seq > self.represented:
            # Of a snapshot in several batches each has a heartbeat, and only that of the last one is EXACT.
            self.represented = -1
        if report.digest_matches:
            doubts.match_digest(seq)
        if report.digest_matches is not False:
            return False
        explained = doubts.explains(seq)
        return doubts.mismatch_digest(seq) and not explained


class LogSubscriber:
    """The streams of some partitions.

    `put`, `tell`, `break_partition`, `partitions`, `ledgers`, `cards` and `census` are for any thread, everything else for one.
    `digest` is asked for a stream's digest in the index that deliveries are applied to, when all handed out before were.
    """

    def __init__(self, clock: Callable[[], float], digest: Callable[[Key], str | None], sink: Sink | None = None) -> None:
        self._sink = sink
        """Applies deliveries before they are returned; the outcomes are reported."""
        self.ledgers: Mapping[int, Ledger] = {}
        """Of the partitions that are read; replaced as a whole."""
        self.cards: Mapping[Key, bytes] = {}
        """The streams that there are, with what bridges say of their engines; replaced as a whole."""
        self.diverged = 0
        """Heartbeats of engines that hold something else."""
        self.census: dict[int, tuple[Place, ...]] = {}
        """By partition the newest ones, one for each of `CENSUS_PAGES`, each once."""
        self._places: dict[int, dict[int, Place]] = {}
        """By partition and number of pages."""
        self._digest: Final = digest
        self._due: list[int] = []
        """Partitions whose census is to be taken before anything else is handed out."""
        self._clock: Final = clock
        self._queue: deque[Message] = deque()
        self._put_bytes = self._taken_bytes = 0
        """Each changed by one thread alone."""
        self._bell = threading.Event()
        self._closed = self._joined_or_left = False
        self._partitions: dict[int, Partition] = {}
        self._partitions_lock: Final = threading.Lock()
        """Held where a partition is changed: the thread that reads deliveries and the one of the readers both do."""
        self._of: dict[Key, int] = {}
        self._seen: dict[Key, _Seen] = {}
        """Of the present incarnation of each stream of which anything has come."""
        self._counters: dict[Key, StreamCounters] = {}
        self._heard: dict[tuple[int, str], tuple[int, float]] = {}
        """By partition and bridge the page of its last beat, and when that was seen."""

    # --- from any thread

    def put(self, partition: int, came: list[Pushed]) -> None:
        """Messages of a partition, in order."""
        self._put_bytes += sum(len(pushed.data) for pushed in came)
        ledger = self.ledgers.get(partition)
        self._queue.extend(Message(partition, ledger, pushed) for pushed in came)
        self._bell.set()

    def tell(self, partition: int, behind: int | None, fault: str) -> None:
        """How reading a partition goes, where no message says it."""
        with self._partitions_lock:
            known = self._partitions.get(partition)
            if known is None or known.is_broken:  # it is read no more
                return
            if behind == 0 and not fault and not self._queue:
                known = known._replace(behind=0, complete=True)
            elif behind is None:
                known = known._replace(behind=None)
            self._partitions[partition] = known._replace(fault=fault)

    def break_partition(self, partition: int, why: str) -> None:
        """What was read of a partition may be wrong: until it is let go its streams are STALE, pages that wait included."""
        with self._partitions_lock:
            if (known := self._partitions.get(partition)) is not None:
                self._partitions[partition] = known._replace(behind=None, fault=why, is_broken=True)

    @property
    def queued_bytes(self) -> int:
        """Of messages of which nothing was made yet."""
        return self._put_bytes - self._taken_bytes

    @property
    def partitions(self) -> Mapping[int, Partition]:
        """How each partition stands."""
        return self._partitions

    def bridges(self) -> int:
        """How many bridges are heard."""
        return len({bridge for partition, bridge in list(self._heard) if self._is_alive(partition, bridge)})

    def is_complete(self, partition: int) -> bool:
        """Whether a partition was read to its end once. By order of the follower: then all of that is in the index."""
        known = self._partitions.get(partition)
        return known is not None and known.complete

    # --- partitions

    def add_partition(self, partition: int, ledger: Ledger, doubts: Mapping[Key, frozenset[DegradedReason]]) -> None:
        """Go on with a partition from where a ledger ends; the index holds what belongs to it."""
        with self._partitions_lock:
            self._partitions = {**self._partitions, partition: Partition(ledger.position, None, "", None)}
        self.ledgers = {**self.ledgers, partition: ledger}
        self._of.update(dict.fromkeys(ledger.streams, partition))
        for key, standing in ledger.streams.items():
            seen = self._seen[key] = _Seen(standing.incarnation, begun=standing.last_seq >= 0)
            for doubt in doubts.get(key, ()):
                seen.doubts.add(doubt, standing.last_seq)
        self.cards = _cards(self.ledgers.values())

    def drop_partition(self, partition: int) -> list[Key]:
        """Know nothing of a partition any more, not even what has come of it; its streams, which are to leave the index."""
        ledger = self.ledgers[partition]
        self.ledgers = {number: each for number, each in self.ledgers.items() if number != partition}
        with self._partitions_lock:
            self._partitions = {number: each for number, each in self._partitions.items() if number != partition}
        self.census = {number: each for number, each in self.census.items() if number != partition}
        self._places.pop(partition, None)
        self._due = [number for number in self._due if number != partition]
        self._heard = {key: each for key, each in self._heard.items() if key[0] != partition}
        for key in ledger.streams:
            self._of.pop(key, None)
            self._seen.pop(key, None)
            self._counters.pop(key, None)
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
        if found and self._sink is not None:
            for delivery, outcome in zip(found, self._sink.apply_many(found), strict=True):
                self.report(delivery, outcome.report)
        return found

    def _take_census(self) -> None:
        """Of partitions whose place has come: everything up to it has been applied, and nothing after it."""
        while self._due:
            partition = self._due.pop()
            ledger = self.ledgers[partition]
            digests = {key: digest for key in ledger.joined() if (digest := self._digest(key)) is not None}
            place = Place.of(ledger.position, digests)
            places = self._places.setdefault(partition, {})
            places.update({pages: place for pages in CENSUS_PAGES if place.position % pages == 0})
            self.census[partition] = tuple(dict.fromkeys(places.values()))

    def _read(self, message: Message) -> list[RawDelivery]:
        partition, ledger, pushed = message
        if ledger is None or self.ledgers.get(partition) is not ledger:
            return []
        page = pushed.page()
        events: list[Event] = []
        at = self._partitions[partition].at
        if page is None:
            if not ledger.foreign:
                log.error("message %d of partition %d is no page; somebody else writes there", pushed.position, partition)
            ledger.skip(pushed.position, pushed.name, is_first=pushed.begins_history)
        else:
            events, at = ledger.feed(pushed.position, page), page.at
        if pushed.position % CENSUS_PAGES[0] == 0 and not ledger.hole:
            self._due.append(partition)
        self._advance(partition, pushed, at)
        now = self._clock()
        self._heard.update(
            {
                (partition, bridge): (beaten.page, now)
                for bridge, beaten in ledger.beats.items()
                if self._heard.get((partition, bridge), (-1, 0.0))[0] != beaten.page
            }
        )
        return [delivery for event in events if (delivery := self._note(partition, event)) is not None]

    def _advance(self, partition: int, pushed: Pushed, at: float | None) -> None:
        with self._partitions_lock:
            known = self._partitions[partition]._replace(position=pushed.position, at=at)
            if not known.is_broken:
                complete = known.complete or pushed.pending == 0
                known = known._replace(behind=pushed.pending, fault="", complete=complete)
            self._partitions[partition] = known

    def _note(self, partition: int, event: Event) -> RawDelivery | None:
        """What an event means to trust, and to the index."""
        if isinstance(event, RawBatch | Reset | Gap):
            self._count(event)
            return event
        if isinstance(event, Arrival | Departure):
            self._of[event.key] = partition
            self._joined_or_left = True
        if isinstance(event, Departure):
            # In order with what comes of it, which may be at once: it joins again, and nobody has seen that it was away.
            self._seen.pop(event.key, None)
            return Reset(*event.key, event.incarnation, f"it has left: {event.reason}")
        if isinstance(event, Breach):
            log.error("partition %d, %s rank %d: %s; no bridge writes that", partition, *event.key, event.what)
            standing = self.ledgers[partition].streams[event.key]
            # Nothing that is reported of the batches before it ends this.
            self._life(event.key, standing.incarnation).doubts.add(DegradedReason.REJECTED, standing.last_seq + 1)
        return None

    def _life(self, key: Key, incarnation: int) -> _Seen:
        """What was seen of an incarnation, which is the present one."""
        seen = self._seen.get(key)
        if seen is None or seen.incarnation != incarnation:
            seen = self._seen[key] = _Seen(incarnation)
        return seen

    def _count(self, event: RawDelivery) -> None:
        key = (event.source, event.rank)
        counters = self._counters.setdefault(key, StreamCounters())
        seen = self._life(key, event.incarnation)
        if isinstance(event, RawBatch):
            if not seen.begun:
                seen.begun = True
                if event.seq > 0:
                    seen.doubts.add(DegradedReason.LOST, event.seq - 1)
            counters.delivered += 1
            counters.replayed += event.replayed
        elif isinstance(event, Gap) and event.compacted:
            seen.begun, seen.represented = True, event.last
            counters.compacted += event.last - event.first + 1
        elif isinstance(event, Gap):
            counters.gaps += 1
            counters.lost += event.last - event.first + 1
            seen.doubts.add(DegradedReason.LOST, event.last)
        else:
            counters.resets += 1

    def report(self, delivery: RawDelivery, report: BatchReport | None) -> None:
        """What applying a batch has shown; of a life that has ended that no longer matters."""
        if report is None or not isinstance(delivery, RawBatch):
            return
        key = (delivery.source, delivery.rank)
        if report.heartbeat is not None:
            self._counters.setdefault(key, StreamCounters()).heartbeats += 1
        seen = self._seen.get(key)
        if seen is not None and seen.incarnation == delivery.incarnation:
            # Where it is known why, another index of the same log would not agree either.
            self.diverged += seen.find(delivery.seq, report)

    # --- what is known

    def trust(self, name: str | None = None, rank: int = 0) -> Trust:
        """How far a stream can be trusted."""
        return self._trust((name or "", rank))

    def _trust(self, key: Key) -> Trust:
        partition_number, standing = self._find(key)
        partition = self._partitions[partition_number]
        if partition.fault:
            return Trust.STALE.with_reason(f"the log cannot be read: {partition.fault}")
        if not partition.complete or partition.behind is None or partition.behind > MOST_BEHIND:
            return Trust.REPLAYING.with_reason("the log is being read")
        said = self._said(partition_number, standing)
        seen = self._seen.get(key)
        if said != Trust.EXACT or seen is None:
            return said
        if seen.represented >= 0:
            return Trust.REPLAYING.with_reason("a snapshot of the engine is being read")
        if seen.doubts:
            return Trust.DEGRADED.with_reason("; ".join(sorted(_SEEN_HERE[doubt] for doubt in seen.doubts)))
        return said

    def _said(self, partition: int, standing: Standing) -> Trust:
        """The best that a living bridge says."""
        if (best := self._best(partition, standing)) is not None:
            return Trust(best.trust, best.reason)
        if standing.told:
            return Trust.STALE.with_reason("no bridge is heard that follows it")
        return Trust.REPLAYING.with_reason("no bridge has said yet how far it is to be trusted")

    def _best(self, partition: int, standing: Standing) -> Told | None:
        """What the living bridge says that trusts a stream most; None if no bridge lives."""
        alive = [
            self._of_now(partition, bridge, told) for bridge, told in standing.told.items() if self._is_alive(partition, bridge)
        ]
        rank = {state: place for place, state in enumerate(_BEST_FIRST)}
        return min(alive, key=lambda told: rank.get(told.trust, len(rank)), default=None)

    def _of_now(self, partition: int, bridge: str, told: Told) -> Told:
        """What a bridge says, unless it is behind: it said that of what it had heard by then."""
        lag = self.ledgers[partition].beats[bridge].beat.lag
        if not lag or told.trust not in _FOLLOWED:
            return told
        reason = f"bridge {name_of(bridge)} is {lag:.0f} s behind: what engines say is not in the log yet"
        return Told("REPLAYING", reason, told.doubts)

    def _is_alive(self, partition: int, bridge: str) -> bool:
        ledger, heard = self.ledgers.get(partition), self._heard.get((partition, bridge))
        beaten = None if ledger is None else ledger.beats.get(bridge)
        if beaten is None:
            return False
        since = self._clock() - heard[1] if heard is not None else float("inf")
        return since < beaten.beat.alive_seconds

    def _find(self, key: Key) -> tuple[int, Standing]:
        partition = self._of.get(key)
        standing = None if partition is None else self.ledgers[partition].streams.get(key)
        if partition is None or standing is None or standing.card is None:
            raise UnknownSourceError(f"the log has no source {key[0]!r} with rank {key[1]}")
        return partition, standing

    def status(self, name: str | None = None, rank: int = 0) -> StreamStatus:
        """Trust, numbers and counters of one stream."""
        key = (name or "", rank)
        partition, standing = self._find(key)
        counters = self._counters.setdefault(key, StreamCounters())
        best, seen = self._best(partition, standing), self._seen.get(key)
        said = () if best is None else (DegradedReason[name] for name in best.doubts if name in DegradedReason.__members__)
        return StreamStatus(
            key[0],
            key[1],
            f"partition {partition}",
            self._trust(key),
            frozenset((*(() if seen is None else seen.doubts), *said)),
            standing.incarnation,
            standing.last_seq,
            0,
            counters.copy(),
        )

    def statuses(self) -> list[StreamStatus]:
        """The same of every stream."""
        return [self.status(*key) for key in self.cards]

    def doubts(self) -> dict[Key, frozenset[DegradedReason]]:
        """What was seen here against each stream; for a snapshot."""
        found = {
            key: frozenset((*seen.doubts, *((DegradedReason.LOST,) * (seen.represented >= 0))))
            for key, seen in self._seen.items()
        }
        return {key: doubts for key, doubts in found.items() if doubts}

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
