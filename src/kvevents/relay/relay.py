"""The relay: what upstreams say goes in, and comes out under numbers of its own.

Theory of operation. One thread takes deliveries from the subscriber, in order and each exactly once. A batch gets the next
number, is applied to the mirror (an index of what consumers have, whose digest goes into heartbeats), written into the journal,
and then sent: so whatever a consumer saw, the journal has, and a killed relay goes on with the same bytes under the same
numbers. What leaves the replay buffer is collapsed into what is live, which is what a consumer that comes late is told first.

- An upstream's *reset* takes back what it told: a clear in the relay's stream, or removals where several share it. The numbers
  go on.
- An upstream's *gap* leaves a number out, so that every consumer sees that something is missing, whatever it knows of relays.
  One number for several gaps that come together: each costs every consumer two answers of all that is kept, and the first one
  has said it until the stream is cleared.
- A *heartbeat* says how far the relay itself is to be trusted. There is always one in what is kept as it was sent, so that who
  comes late, and gets a snapshot of what is older, hears of it in the same answer.
- The journal says how far each upstream was followed. After a restart the subscriber proves by replay that the upstream is the
  same, and brings what was missed; otherwise there is a reset.

A relay may be killed between any two steps, and what it has not written down it does not know afterwards. So each step is
written down before what it leads to: a reset before what it takes back, or the upstream could go on where it was; the doubt of
a gap before the batches behind it, or these would be known, what was lost passed over, and nothing said of it.

A turn that is broken off by an exception may have taken deliveries that were not sent. There is no other turn then; a relay
that begins anew goes on with what was written down.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Final, NamedTuple, Self, cast

from kvevents.endpoints import should_bind
from kvevents.errors import ClosedError
from kvevents.events import AllBlocksCleared, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher.broadcast import Broadcast
from kvevents.publisher.buffer import ReplayBuffer
from kvevents.publisher.history import History
from kvevents.relay.beats import Beats
from kvevents.relay.beginning import begin
from kvevents.relay.forwarding import Forwarding, Passing, Rewriting, plain_mirrors
from kvevents.relay.journal import Disk, Journal, JournalStats
from kvevents.relay.keeping import Keeping
from kvevents.relay.mirror import Mirror
from kvevents.relay.output import BACK, Output
from kvevents.relay.settings import RelaySettings
from kvevents.relay.spelling import Spelling, payloads_of
from kvevents.relay.status import RelayStatus
from kvevents.relay.upstreams import Upstreams, least
from kvevents.stream import Findings, Gap, RawBatch, Reset, Trust
from kvevents.stream.deliveries import RawDelivery
from kvevents.subscriber import StreamStatus
from kvevents.subscriber.transport import Transport

log = logging.getLogger(__name__)

TURN_SECONDS: Final = 0.25
"""How long a turn waits for something to do; also how late a heartbeat can be."""
TEND_SECONDS: Final = 0.05
"""Between two looks at everything but batches while they come, and at most until trust that fell is told."""
CLOSE_SECONDS: Final = 2.0
"""For consumers to get what was sent, when a relay ends."""

_AMID: Final = Trust("DEGRADED", "an upstream began anew, or sends a snapshot, and not all of that has been sent on")


class _Seen(NamedTuple):
    """What only the relay's own thread may look at, as of its last turn."""

    upstreams: tuple[StreamStatus, ...]
    journal: JournalStats | None


class Relay:
    """Repeats one upstream, or several as one, to any number of consumers; a context manager.

    Call `run`, or `turn` again and again from one thread; `status` and `trust` may be asked from any, and are as of the last
    turn. `transport` and `disk` take the place of sockets towards upstreams, and of the journal's files.

    Raises `ConfigError` for settings that cannot work, `EndpointError` for endpoints that cannot be bound, `JournalError` for a
    folder that an operator must mend.
    """

    def __init__(
        self,
        settings: RelaySettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        transport: Transport | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.settings: Final = settings
        self._clock: Final = clock
        self._rank: Final = settings.upstreams[0].rank
        self._shared: Final = len(settings.upstreams) > 1
        self._stride: Final = max(1, settings.buffer_steps // 2)
        """Batches that are sent in a row: no heartbeat leaves the buffer before the next one is in it."""
        self._closed = False
        self._broken_off = False
        """Whether something that was received may not have been sent, or sent by half."""
        self._gap_told = False
        """Whether a number was left out in this turn, and nothing was cleared since."""
        self._resets_ahead = 0
        """Of what was received and not sent on yet."""
        self._carried = self._diverged = 0
        self._news = True
        """Whether something happened of which consumers or the journal should hear at once."""
        self._tend_at = -math.inf
        with ExitStack() as undo:
            self._journal = _journal(settings, disk)
            if self._journal is not None:
                undo.callback(self._journal.close)
            self._open(undo, transport)
            undo.pop_all()

    def _open(self, undo: ExitStack, transport: Transport | None) -> None:
        settings, index = self.settings, PrefixIndex()
        self._mirror = Mirror(index, "relay")
        self._spelling = spelling = Spelling(settings.spelling, known=settings.rewrites)
        plain = plain_mirrors(settings, index)
        self._buffer = ReplayBuffer(settings.buffer_steps, History.create(), spelling.encode)
        self._beginning = began = begin(settings, self._journal, self._buffer, self._mirror, plain, spelling)
        # Not before the buffer has its history: consumers may ask at once.
        self._broadcast = _broadcast(settings, self._buffer, began.incarnation)
        undo.callback(self._broadcast.close, 0.0)
        self._output = Output(self._broadcast, self._mirror, self._journal, spelling, began.number, settings.heartbeat)
        if settings.rewrites:
            self._forwarding: Forwarding = Rewriting(
                settings,
                self._output,
                plain,
                began.residents,
                self._report,
                lambda: self._keeping.write(),  # noqa: PLW0108 - it is made below
            )
        else:
            self._forwarding = Passing(self._output, self._report)
        self._upstreams = Upstreams(settings.upstreams, began.checkpoints, began.known, self._clock, transport)
        undo.callback(self._upstreams.close)
        self._begun = self._holed = began.resumed
        self._beats = Beats(self._output, self._buffer, self._rank, settings.heartbeat)
        self._keeping = Keeping(
            self._journal,
            settings.fingerprint(),
            self._upstreams,
            self._forwarding,
            spelling,
            self._output,
            self._buffer,
            began.checkpoints,
        )
        self._look()
        if began.resumed:
            # Consumers that were there before must not take what they have for the newest.
            self._beats.beat(self.trust(), self._clock())
        else:
            self._keeping.mark(self._seen.upstreams)
        log.info("relaying to %s: %s", self.endpoint, began.told)

    # --- what is known about it

    @property
    def endpoint(self) -> str:
        """Where consumers on this host subscribe."""
        return self._broadcast.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """Where they ask for replay."""
        return self._broadcast.replay_endpoint

    def trust(self) -> Trust:
        """The least of its upstreams'."""
        return least(self._seen.upstreams)

    def status(self) -> RelayStatus:
        """Everything at once."""
        batches, size = self._buffer.size()
        seen = self._seen
        return RelayStatus(
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            trust=least(seen.upstreams),
            incarnation=self._beginning.incarnation,
            last_number=self._output.number - 1,
            carried=self._carried,
            holes=self._output.holes,
            heartbeats=self._output.heartbeats,
            resumed=self._beginning.resumed,
            began=self._beginning.told,
            recovery_seconds=self._beginning.seconds,
            blocks=self._mirror.blocks,
            digest=self._mirror.digest(),
            diverged=self._diverged,
            subscribers=self._broadcast.subscribers,
            buffered_batches=batches,
            buffered_bytes=size,
            history=self._buffer.history_stats(),
            replay=self._broadcast.replay_stats(),
            journal=seen.journal,
            upstreams=seen.upstreams,
        )

    # --- what it does

    def run(self, stop: Callable[[], bool]) -> None:
        """Relay until `stop` says so, at which it looks a few times a second."""
        while not stop():
            self.turn()

    def turn(self, timeout: float = TURN_SECONDS) -> int:
        """Wait for deliveries, at most `timeout` seconds, and send them on; how many there were.

        Raises `ClosedError`, also after a turn that has raised anything else.
        """
        if self._closed:
            raise ClosedError("the relay is closed")
        if self._broken_off:
            raise ClosedError("a turn was broken off, and what it had received may be lost: close the relay, and begin another")
        self._broken_off = True
        deliveries = self._upstreams.receive(timeout)
        if deliveries:
            self._begin(deliveries)
            self._warn(deliveries)
            self._forward(deliveries)
        now = self._clock()
        if self._news or not deliveries or now >= self._tend_at:
            self._tend(now)
        self._broken_off = False
        return len(deliveries)

    def _tend(self, now: float) -> None:
        """What need not be done for each batch that goes through."""
        self._news = False
        self._tend_at = now + TEND_SECONDS
        self._look()
        self._broadcast.look_around()
        if self._broadcast.wants_cut:
            self._output.cut(self._rank)
        self._heal()
        self._beats.beat(self.trust(), now)
        self._output.show(self._rank)
        self._keeping.tend(self._seen.upstreams, now)

    def _begin(self, deliveries: list[RawDelivery]) -> None:
        """A new life begins with a clear: whoever has something of another one forgets it, and no hole comes first."""
        if self._begun:
            return
        self._begun = True
        payloads = [delivery.payload for delivery in deliveries if isinstance(delivery, RawBatch)]
        if payloads:
            self._spelling.note(payloads)
        self._output.say([AllBlocksCleared()], self._rank)

    def _warn(self, deliveries: list[RawDelivery]) -> None:
        """Say that trust is less before what is in doubt is sent: a consumer is EXACT until it hears of the doubt."""
        # Between a reset or a gap and the last part of the snapshot behind it, a consumer has less than the upstream holds.
        is_amid = any(isinstance(delivery, Reset | Gap) for delivery in deliveries)
        self._beats.warn(_AMID if is_amid else self._upstreams.trust(), self._clock())

    def _forward(self, deliveries: list[RawDelivery]) -> None:
        """Batches in a row of one upstream together: most often that is all."""
        self._gap_told = False
        if not self._shared and set(map(type, deliveries)) == {RawBatch}:
            self._carry(0, cast("list[RawBatch]", deliveries))
            return
        self._resets_ahead = sum(isinstance(delivery, Reset) for delivery in deliveries)
        run: list[RawBatch] = []
        ordinal = 0
        for delivery in deliveries:
            place = self._upstreams.ordinal(delivery)
            if run and (place != ordinal or not isinstance(delivery, RawBatch)):
                self._carry(ordinal, run)
                run = []
            ordinal = place
            if isinstance(delivery, RawBatch):
                run.append(delivery)
            elif isinstance(delivery, Reset):
                self._reset(ordinal, delivery)
            else:
                self._gap(ordinal, delivery)
        if run:
            self._carry(ordinal, run)

    def _carry(self, ordinal: int, batches: list[RawBatch]) -> None:
        self._carried += len(batches)
        if not self._keeping.checkpoints[ordinal].anchors:
            self._keeping.soon()  # there is something by which the upstream can be recognised
            self._news = True
        for start in range(0, len(batches), self._stride):
            self._forwarding.carry(ordinal, batches[start : start + self._stride])
            if self._beats.wants_repeat:
                self._beats.repeat(self._trust_amid())

    def _trust_amid(self) -> Trust:
        """How far what was sent so far is to be trusted, while there is more to send.

        What was found in it, and what is missing, counts already: a heartbeat that passed over it would heal what consumers
        doubt. What was doubted before a reset, though, is known to nobody any more once that was received.
        """
        return _AMID if self._resets_ahead else self._upstreams.trust()

    def _reset(self, ordinal: int, reset: Reset) -> None:
        self._news = True
        self._resets_ahead -= 1
        log.warning("%s rank %d: %s; what it told is taken back", reset.source, reset.rank, reset.reason)
        self._keeping.reset(ordinal, reset)
        events = self._forwarding.forget(ordinal)
        self._gap_told = False
        if events:
            self._take_back(ordinal, reset.rank, events)
        self._spelling.renew()
        self._keeping.soon()  # but not before what was received with it has been sent

    def _take_back(self, ordinal: int, rank: int, events: list[KVEvent]) -> None:
        if self._shared:
            batch = KVEventBatch(time.time(), events, rank)
            self._output.tell(payloads_of(batch, self.settings.spelling), BACK + ordinal)
        else:
            self._output.say(events, rank)

    def _gap(self, ordinal: int, gap: Gap) -> None:
        self._news = True
        if gap.compacted:
            log.info("%s rank %d: a snapshot represents numbers %d to %d", gap.source, gap.rank, gap.first, gap.last)
            return
        log.warning("%s rank %d: numbers %d to %d are lost; consumers are told", gap.source, gap.rank, gap.first, gap.last)
        if not self._gap_told:
            self._output.lose()
        self._gap_told = self._holed = True
        self._keeping.lost(ordinal, gap)

    def _report(self, batch: RawBatch, findings: Findings) -> None:
        self._news = True
        self._diverged += findings.agrees is False
        self._holed |= bool(findings.rejected)
        self._upstreams.subscriber.report(batch, findings)
        if findings.cleared:
            self._gap_told = False
            self._heal()

    # --- now and then

    def _look(self) -> None:
        """Take note of what other threads may ask for."""
        journal = None if self._journal is None else self._journal.stats()
        self._seen = _Seen(tuple(self._upstreams.statuses()), journal)

    def _heal(self) -> None:
        """In a shared stream no upstream's clear ends what consumers doubt; it is over when nobody holds anything."""
        if not (self._shared and self._holed):
            return
        if not any(map(len, self._forwarding.residents().values())) and self._upstreams.trust() == Trust.EXACT:
            self._holed = False
            self._output.say([AllBlocksCleared()], self._rank)

    # --- the end

    def close(self) -> None:
        """Write down how far the upstreams were followed, and end; idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._broken_off:
            self._keeping.mark(self._seen.upstreams)
        self._upstreams.close()
        self._broadcast.close(CLOSE_SECONDS)
        if self._journal is not None:
            self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else str(self.trust())
        return f"<Relay at {self.endpoint}: {state}, number {self._output.number - 1}, {self._carried} carried>"


def _journal(settings: RelaySettings, disk: Disk | None) -> Journal | None:
    return None if settings.journal is None else Journal(settings.journal, disk=disk)


def _broadcast(settings: RelaySettings, buffer: ReplayBuffer, incarnation: int) -> Broadcast:
    topic = settings.upstreams[0].topic if settings.topic is None else settings.topic
    dialect = settings.spelling
    return Broadcast(
        settings.endpoint,
        settings.replay_endpoint,
        buffer=buffer,
        hwm=settings.hwm,
        topic=topic,
        bind=should_bind(settings.endpoint) or settings.endpoint.startswith("tcp://"),
        replay_topic=dialect is None or dialect.replay_topic,
        curve=settings.curve,
        snapshot_endpoint=settings.snapshot_endpoint,
        rank=settings.upstreams[0].rank,
        incarnation=incarnation,
    )
