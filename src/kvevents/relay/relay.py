"""The relay: republishes batches of its upstreams, with its own numbers and with history.

Theory of operation. One thread takes deliveries from the subscriber, in order and without repetition. A batch gets the next
number, is applied to an index of the blocks that consumers hold (whose digest is sent in heartbeats), is written into the
journal, and is then sent. So the journal has every batch that a consumer has received, and a relay that was killed continues
with the same bytes under the same numbers. Batches that leave the replay buffer are compacted into the live blocks, which a
consumer that starts late receives first.

- A *reset* of an upstream removes the blocks that the upstream stored: by a clear in the relay's stream, or, if several
  upstreams share the stream, by removals in batches of the upstream's ranks. Numbers continue.
- A *rank* stays in the payloads, and consumers separate the blocks of different ranks. The relay's own heartbeats and clears
  have no rank, which means all ranks.
- A *gap* of an upstream skips a number, so that every consumer notices that batches are missing, even a consumer that does not
  know relays. For several gaps that are received together, the relay skips only one number, because each skipped number makes
  every consumer request the whole replay buffer twice. If a clear is sent in between, a later gap skips another number.
- An *attestation* of an engine's own cache is compared with the blocks that the relay has sent. The relay forwards the
  attestation in a heartbeat after the attested batches, so that consumers can compare it with their blocks. A stream of several
  upstreams has no attestation. If an attestation differs, the relay follows the upstream from its start: consumers receive
  DEGRADED with the reason, and then the reset.
- A *heartbeat* states the relay's trust. The replay buffer always has a heartbeat. So a consumer that starts late receives the
  trust in the reply to its first replay request, although the snapshot of older batches has no trust.
- The journal records how far each upstream was followed. After a restart the subscriber verifies by replay that the upstream is
  the same incarnation, and receives the missed batches. If the upstream has another incarnation, a reset follows.

A relay can be killed between any two steps, and the next process knows only what was written. So each step is written before
the steps that depend on the step. A reset is written before its removals, so that a restarted relay does not continue with the
upstream's old incarnation. A gap's degraded reason is written before the batches that follow the gap. In the other order, a
killed relay would count these batches as forwarded, and forget the loss.

A *turn* receives deliveries, sends them, and does periodic work. If an exception interrupts a turn, some received deliveries
might not have been sent. The relay then refuses further turns, and a new relay continues from the journal.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import groupby
from typing import Final, cast

from kvevents.closeable import Closeable
from kvevents.endpoints import should_bind
from kvevents.errors import ClosedError
from kvevents.events import BlockRemoved, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.publisher.compaction import Compactor
from kvevents.publisher.event_server import EventServer
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.relay.checkpoints import CheckpointWriter, restore
from kvevents.relay.journal import Journal
from kvevents.relay.journal_disk import Disk
from kvevents.relay.output_sequencer import RETRACTION_OFFSET, DialectEncoder, HeartbeatSchedule, IndexedStream, OutputSequencer
from kvevents.relay.settings import RelayLimits, RelaySettings
from kvevents.relay.status import RelayStatus
from kvevents.relay.transform import PassThrough, Transform, clear_of_all_tiers
from kvevents.relay.upstreams import Upstreams, lowest_trust
from kvevents.stream import BatchReport, Gap, RawBatch, RawDelivery, Reset, Trust
from kvevents.subscriber.multiplexer import Transport

log = logging.getLogger(__name__)

_INCOMPLETE_TRUST: Final = Trust("DEGRADED", "an upstream restarted or sends a snapshot, which is not completely forwarded yet")


class Relay(Closeable):
    """Relays one upstream, or several upstreams as one stream, to any number of consumers; a context manager.

    Call `run`, or `turn` repeatedly from one thread. `status` and `trust` are thread-safe, and describe the last turn.
    `transport` replaces the sockets towards upstreams, and `disk` the journal's files.

    Raises `ConfigError` for settings that cannot work, `EndpointError` for endpoints that cannot be bound, `JournalError` for a
    journal folder that an operator must change.
    """

    def __init__(
        self,
        settings: RelaySettings,
        *,
        limits: RelayLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        transport: Transport | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.settings: Final = settings
        self.limits: Final = limits or RelayLimits()
        self._clock: Final = clock
        self._is_shared: Final = len(settings.upstreams) > 1
        self._run_limit: Final = max(1, settings.buffer_steps // 2)
        """Maximum number of batches between two heartbeats, so that the replay buffer always holds a heartbeat."""
        self._closed = False
        self._is_interrupted = False
        """Whether some received deliveries might not have been sent, because a turn has not ended."""
        self._has_skipped = False
        """Whether a number was skipped in this turn and no clear was sent after it."""
        self._resets_ahead = 0
        """Number of resets that were received and not yet forwarded."""
        self._forwarded = self._divergences = 0
        self._is_maintenance_due = True
        """Whether a change in this turn must be sent to consumers or written into the journal at once."""
        self._maintain_at = -math.inf
        with ExitStack() as cleanup:
            self._journal = self._open_journal(disk)
            if self._journal is not None:
                cleanup.callback(self._journal.close)
            self._open(cleanup, transport)
            cleanup.pop_all()

    def _open(self, cleanup: ExitStack, transport: Transport | None) -> None:
        settings, limits, index = self.settings, self.limits, PrefixIndex()
        self._state = IndexedStream(index, "relay")
        self._encoder = encoder = DialectEncoder(
            settings.resolved_dialect, is_fixed=settings.changes_payloads, max_payload=limits.max_payload_bytes
        )
        # If block keys replace tokens, the received streams provide the keys, and show whether upstreams' digests match.
        ordinals = range(len(settings.upstreams))
        received = {at: IndexedStream(index, f"upstream {at}") for at in ordinals if settings.tokens == "hash"}
        self._buffer = ReplayBuffer(settings.buffer_steps, Compactor.create(), encoder.encode)
        self._restored = restored = restore(settings, self._journal, self._buffer, self._state, received, encoder)
        # The server opens after the buffer was restored, because consumers can request replay at once.
        self._event_server = self._open_event_server(self._buffer, restored.incarnation)
        cleanup.callback(self._event_server.close, 0.0)
        self._sequencer = OutputSequencer(
            self._event_server, self._state, self._journal, encoder, restored.next_number, settings.heartbeat
        )
        self._transforms: list[PassThrough | Transform] = [PassThrough(self._sequencer, self._report)]
        if settings.changes_payloads:
            self._transforms = [
                Transform(
                    at,
                    settings,
                    limits,
                    self._sequencer,
                    received.get(at),
                    {rank: own for (ordinal, rank), own in restored.blocks.items() if ordinal == at},
                    self._report,
                    lambda: self._checkpoints.write(),  # noqa: PLW0108 - `_checkpoints` is assigned later
                    was_resumed=restored.was_resumed,
                )
                for at in ordinals
            ]
        self._subscribe(cleanup, transport)

    def _subscribe(self, cleanup: ExitStack, transport: Transport | None) -> None:
        """Subscribe to the upstreams from their restored checkpoints on; then send a heartbeat or store a checkpoint."""
        settings, limits, restored = self.settings, self.limits, self._restored
        self._upstreams = Upstreams(
            settings.upstreams,
            restored.checkpoints,
            restored.forwarded,
            limits=limits.stream,
            clock=self._clock,
            transport=transport,
        )
        cleanup.callback(self._upstreams.subscriber.close)
        self._has_begun = self._has_gaps = restored.was_resumed
        self._heartbeats = HeartbeatSchedule(
            self._sequencer, self._buffer, self._clock, heartbeat=settings.heartbeat, trust_interval=limits.trust_interval
        )
        self._checkpoints = CheckpointWriter(
            self._journal,
            settings.fingerprint(),
            self._upstreams,
            self._transforms,
            self._sequencer,
            self._buffer,
            restored.checkpoints,
            limits,
        )
        self._update_last_turn()
        if restored.was_resumed:
            # Consumers that were connected before the restart must not consider their state complete.
            self._heartbeats.send_if_due(self.trust())
        else:
            self._checkpoints.store_checkpoints(self._statuses)
        log.info("relaying to %s: %s", self.endpoint, restored.reason)

    def _open_journal(self, disk: Disk | None) -> Journal | None:
        return None if self.settings.journal is None else Journal(self.settings.journal, self.limits.journal, disk=disk)

    def _open_event_server(self, buffer: ReplayBuffer, incarnation: int) -> EventServer:
        settings = self.settings
        dialect = settings.resolved_dialect
        return EventServer(
            settings.endpoint,
            settings.replay_endpoint,
            buffer=buffer,
            hwm=settings.hwm,
            topic=settings.upstreams[0].topic if settings.topic is None else settings.topic,
            bind=should_bind(settings.endpoint) or settings.endpoint.startswith("tcp://"),
            replay_topic=dialect is None or dialect.has_replay_topic,
            curve=settings.curve,
            incarnation=incarnation,
        )

    # --- status of the relay

    @property
    def endpoint(self) -> str:
        """The endpoint to which consumers on this host subscribe."""
        return self._event_server.endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """The endpoint at which consumers on this host request replay; None without replay."""
        return self._event_server.replay_endpoint

    def trust(self) -> Trust:
        """Return the lowest trust of the upstreams."""
        return lowest_trust(self._statuses)

    def status(self) -> RelayStatus:
        """Return the status at the end of the newest turn."""
        batches, size = self._buffer.size()
        statuses = self._statuses
        return RelayStatus(
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            trust=lowest_trust(statuses),
            incarnation=self._restored.incarnation,
            last_seq=self._sequencer.next_number - 1,
            forwarded_batches=self._forwarded,
            skipped_seqs=self._sequencer.skipped_numbers,
            heartbeats=self._sequencer.heartbeats,
            was_resumed=self._restored.was_resumed,
            start_reason=self._restored.reason,
            recovery_seconds=self._restored.seconds,
            blocks=self._state.blocks,
            digest=self._state.digest(),
            divergences=self._divergences,
            subscribers=self._event_server.events.subscriptions,
            buffered_batches=batches,
            buffered_bytes=size,
            history=self._buffer.history_stats(),
            replay=self._event_server.replay_stats(),
            journal=self._journal_stats,
            upstreams=statuses,
        )

    # --- turns of the relay's loop

    def run(self, stop: Callable[[], bool]) -> None:
        """Relay until `stop` returns True; `stop` is called several times a second."""
        while not stop():
            self.turn()

    def turn(self, timeout: float | None = None) -> int:
        """Wait for deliveries (at most `timeout` seconds, by default `turn_timeout`), forward them, and return their number.

        Raises `ClosedError` after `close`, and if an earlier turn raised any other exception.
        """
        if self._closed:
            raise ClosedError("cannot forward deliveries: the relay is closed; open another")
        if self._is_interrupted:
            sentence = "an exception interrupted a turn, whose deliveries may be lost"
            raise ClosedError(f"{sentence}: close the relay, and open another")
        self._is_interrupted = True
        deliveries = self._upstreams.receive(self.limits.turn_timeout if timeout is None else timeout)
        if deliveries:
            self._begin_incarnation(deliveries)
            self._send_lower_trust(deliveries)
            self._forward(deliveries)
        now = self._clock()
        if self._is_maintenance_due or not deliveries or now >= self._maintain_at:
            self._maintain(now)
        self._is_interrupted = False
        return len(deliveries)

    def _maintain(self, now: float) -> None:
        """Do the periodic work: update the status, and send or write what is due."""
        self._is_maintenance_due = False
        self._maintain_at = now + self.limits.maintenance_interval
        self._update_last_turn()
        self._event_server.events.poll()
        self._clear_if_empty()
        self._heartbeats.send_if_due(self.trust())
        self._sequencer.flush_skipped()
        self._checkpoints.run_due(self._statuses, now)

    def _update_last_turn(self) -> None:
        """Copy state that belongs to the relay's thread, so that other threads can read it."""
        self._statuses = tuple(self._upstreams.statuses())
        self._journal_stats = None if self._journal is None else self._journal.stats()

    def _begin_incarnation(self, deliveries: list[RawDelivery]) -> None:
        """Begin a new incarnation with a clear, before any gap, so that consumers drop the blocks of an earlier incarnation."""
        if self._has_begun:
            return
        self._has_begun = True
        payloads = [delivery.payload for delivery in deliveries if isinstance(delivery, RawBatch)]
        if payloads:
            self._encoder.observe(payloads)
        self._sequencer.send_events(clear_of_all_tiers())
        ranks = {source.rank for source in self.settings.upstreams}
        if len(ranks) > 1:
            # The empty batches make consumers distinguish the ranks from the first batch on.
            for rank in sorted(ranks):
                self._sequencer.send_events([BlockRemoved([])], rank)

    def _send_lower_trust(self, deliveries: list[RawDelivery]) -> None:
        """Send a heartbeat before batches that lower the trust, because without this heartbeat consumers would stay EXACT."""
        # After a reset or a gap, consumers hold less than the upstream until they have the whole snapshot that follows.
        is_incomplete = any(isinstance(delivery, Reset | Gap) for delivery in deliveries)
        self._heartbeats.send_if_lower(_INCOMPLETE_TRUST if is_incomplete else self._upstreams.trust())

    def _forward(self, deliveries: list[RawDelivery]) -> None:
        """Forward deliveries in order; consecutive batches of one upstream are forwarded in one call."""
        self._has_skipped = False
        if not self._is_shared and set(map(type, deliveries)) == {RawBatch}:
            self._forward_batches(0, cast("list[RawBatch]", deliveries))
            return
        self._resets_ahead = sum(isinstance(delivery, Reset) for delivery in deliveries)
        for (ordinal, kind), run in groupby(deliveries, lambda delivery: (self._upstreams.ordinal(delivery), type(delivery))):
            if kind is RawBatch:
                self._forward_batches(ordinal, cast("list[RawBatch]", list(run)))
                continue
            for delivery in run:
                if isinstance(delivery, Reset):
                    self._forward_reset(ordinal, delivery)
                elif isinstance(delivery, Gap):
                    self._forward_gap(ordinal, delivery)

    def _forward_batches(self, ordinal: int, batches: list[RawBatch]) -> None:
        self._forwarded += len(batches)
        if not self._checkpoints.checkpoints[ordinal].fingerprints:
            self._checkpoints.request()  # only a checkpoint with a fingerprint can identify the upstream
            self._is_maintenance_due = True
        for start in range(0, len(batches), self._run_limit):
            self._transforms[ordinal].forward(batches[start : start + self._run_limit])
            if self._heartbeats.is_repeat_due:
                self._heartbeats.send(self._current_trust())

    def _current_trust(self) -> Trust:
        """Return the trust for a heartbeat that is sent before some of the received batches.

        Losses and findings of those batches already lower this trust, so that the heartbeat does not make consumers EXACT too
        early. A received reset ends older degraded reasons, so trust is `_INCOMPLETE_TRUST` until the reset is forwarded.
        """
        return _INCOMPLETE_TRUST if self._resets_ahead else self._upstreams.trust()

    def _forward_reset(self, ordinal: int, reset: Reset) -> None:
        self._is_maintenance_due = True
        self._resets_ahead -= 1
        log.warning("%s rank %d: %s; removing the blocks that it stored", reset.source, reset.rank, reset.reason)
        if self._journal is not None:
            self._journal.reset(ordinal, reset.incarnation)
        self._has_skipped = False
        for rank, events in self._transforms[ordinal].retract().items():
            if self._is_shared:
                payloads = self._encoder.encode_payloads(KVEventBatch(time.time(), events, rank))
                self._sequencer.send_payloads(payloads, RETRACTION_OFFSET + ordinal)
            else:
                self._sequencer.send_events(events, rank)
        self._encoder.restart_detection()
        self._checkpoints.request()  # the checkpoint is written after all deliveries that came with the reset were sent

    def _forward_gap(self, ordinal: int, gap: Gap) -> None:
        self._is_maintenance_due = True
        fields = (gap.source, gap.rank, gap.first, gap.last)
        if gap.compacted:
            log.info("%s rank %d: a snapshot replaces numbers %d to %d", *fields)
            return
        log.warning("%s rank %d: numbers %d to %d are lost; skipping a number so that consumers notice", *fields)
        if not self._has_skipped:
            self._sequencer.skip_number()
        self._has_skipped = self._has_gaps = True
        self._checkpoints.record_gap(ordinal, gap)

    def _report(self, batch: RawBatch, report: BatchReport) -> None:
        """Process the report about a decoded batch; called by the transform."""
        self._is_maintenance_due = True
        self._divergences += report.digest_matches is False
        self._has_gaps |= bool(report.rejected)
        self._upstreams.subscriber.report(batch, report)
        # If the attestation does not match, the upstream starts over, with a reset. A shared stream forwards no attestation,
        # because an engine attests only its own blocks, and consumers hold the blocks of several engines.
        if report.attestation_matches and not self._is_shared and report.heartbeat is not None:
            self._heartbeats.send(self._current_trust(), report.heartbeat.attestation)
        if report.cleared:
            self._has_skipped = False
            self._clear_if_empty()

    def _clear_if_empty(self) -> None:
        """Clear a shared stream after gaps if no upstream holds a block. Only a clear ends the reason `LOST` at consumers."""
        if not (self._is_shared and self._has_gaps):
            return
        is_empty = not any(own for transform in self._transforms for own in transform.blocks.values())
        if is_empty and self._upstreams.trust() == Trust.EXACT:
            self._has_gaps = False
            self._sequencer.send_events(clear_of_all_tiers())

    # --- closing the relay

    def close(self) -> None:
        """Write a final checkpoint, and close sockets, journal and upstreams; idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._is_interrupted:
            self._checkpoints.store_checkpoints(self._statuses)
        self._upstreams.subscriber.close()
        self._event_server.close(self.limits.close_timeout)
        if self._journal is not None:
            self._journal.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else str(self.trust())
        return f"<Relay at {self.endpoint}: {state}, next number {self._sequencer.next_number}, {self._forwarded} forwarded>"
