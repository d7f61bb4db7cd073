"""Requests batches by replay, and classifies each message of an answer as an input of the stream's transition table."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TypeAlias

from kvevents.stream.deliverer import Deliverer
from kvevents.stream.deliveries import RESTARTED, Source
from kvevents.stream.identity import Fingerprint, FingerprintChain, NewestBatch, Quarantine
from kvevents.stream.replay_fetch import CheckSchedule, FetchRequest, Purpose, ReplayFetch, RequestPacer, Stage
from kvevents.stream.sequencer import GapEnd
from kvevents.stream.settings import StreamLimits
from kvevents.stream.transitions import Input
from kvevents.stream.trust import DegradedReason
from kvevents.wire import Malformed, ReplayBatch, ReplayEnd, parse_replay_reply
from kvevents.wire.decode import begins_with_clear, ends_with_digest, has_no_number_0

NextInput: TypeAlias = tuple[Input] | tuple[Input, str] | None
"""The result of a message, a timeout or a comparison: an input of the transition table, and a reason if the input needs one."""


class AnswerReader:
    """Sends replay requests, reads their answers, and decides whether to trust the replay endpoint.

    The reader matches each answer with fingerprints, passes the answer's batches to the deliverer, and decides at the end of
    the answer what to request next. The reader never changes the state of the stream, but returns a `NextInput`.
    """

    def __init__(self, source: Source, limits: StreamLimits, deliverer: Deliverer, quarantine: Quarantine) -> None:
        self.fetch: ReplayFetch | None = None
        """The open request, sent or not."""
        self.pacer = RequestPacer(limits)
        self.checks = CheckSchedule(limits)
        self.has_replayed = False
        """Whether the replay endpoint has ever sent a batch."""
        self.conflicts = 0
        """Number of conflicts since the last match."""
        self._resyncs = 0
        """Number of restarts since the last match, each because replay no longer had a batch that it had sent."""
        self.distrusted_until: float | None = None
        """Time at which a distrusted endpoint is queried again; None if the endpoint is not distrusted."""
        self._retries_distrusted = False
        """Whether the replay endpoint is queried again after it was distrusted; the next conflict distrusts it at once."""
        self._source = source
        self._limits = limits
        self._deliverer = deliverer
        self._quarantine = quarantine

    # --- requests -------------------------------------------------------------------------------------------------------

    def begin_incarnation(self) -> None:
        """Close the request, because it belongs to the incarnation that has ended.

        The next comparison is due at once, because a small replay buffer may soon evict the batch to compare.
        """
        self.close()
        self.checks.reset_comparisons()

    def _open(self, fetch: ReplayFetch | None, live: NewestBatch | None = None) -> None:
        self.fetch = fetch
        self._deliverer.cross_check.begin_answer(live)

    def close(self) -> None:
        """Close the request."""
        self._open(None)

    def abandon(self) -> None:
        """Close the request, which has no result. The pause before the next comparison grows."""
        if self.fetch is not None:
            self.checks.fail_comparison(self._deliverer.now)
            self.close()

    def verify(self) -> None:
        """Request from the first fingerprint, to verify the publisher after a reconnect."""
        self._open(self._fetch_from_fingerprints(Purpose.VERIFY))

    def fetch_missing(self) -> None:
        """Request missing batches. The request begins with the unconfirmed batch, which identifies the publisher."""
        self._open(self._fetch_from_missing(), self._deliverer.cross_check.last_live)

    def compare_soon(self) -> None:
        """Request a live batch that has to be compared with replay: first without a pause, then after growing pauses."""
        last_live = self._deliverer.cross_check.last_live
        if last_live is None or self.fetch is not None or not self._deliverer.ledger.can_replay:
            return
        if self._deliverer.now >= self.checks.compare_at:
            self._open(self._fetch_from_fingerprints(Purpose.COMPARE), last_live)

    def probe(self) -> None:
        """Check the tail of a quiet stream.

        A distrusted endpoint is queried again, because many consecutive restarts may have caused its conflicts.
        """
        deliverer = self._deliverer
        if self.distrusted_until is not None:
            self.end_distrust()
            deliverer.degrade(DegradedReason.REPLAY_UNCONFIRMED)
            self._retries_distrusted = True
        self.checks.probe(deliverer.now, deliverer.order.next_seq)
        if self.checks.only_replayed >= self._limits.max_conflicts:  # another engine's replay, or the topic matches nothing
            deliverer.degrade(DegradedReason.REPLAY_UNCONFIRMED)
        self._open(self._fetch_from_fingerprints(Purpose.PROBE), deliverer.cross_check.last_live)

    def _fetch_from_missing(self) -> ReplayFetch:
        unconfirmed = self._deliverer.cross_check.unconfirmed
        start = self._deliverer.order.next_seq if unconfirmed is None else unconfirmed.seq
        return ReplayFetch(Purpose.FILL, start, unconfirmed)

    def _fetch_from_fingerprints(self, purpose: Purpose) -> ReplayFetch:
        """Return a request from the first batch that replay must repeat; without such a batch, from the next number."""
        deliverer = self._deliverer
        live = deliverer.cross_check.last_live
        unconfirmed: Fingerprint | NewestBatch | None = next(iter(deliverer.cross_check.all_unconfirmed), None)
        if unconfirmed is not None and live is not None and live.seq < unconfirmed.seq:
            # The live batch is older than the unconfirmed batch, so it only shows whether the live publisher answers.
            unconfirmed = live
        first = deliverer.chain.first or unconfirmed or live or deliverer.newest
        live_before = -1 if live is None else live.seq
        if first is None:
            return ReplayFetch(purpose, deliverer.order.next_seq, None, live_before=live_before)
        return ReplayFetch(purpose, first.seq, first.fingerprint(), live_before=live_before)

    def request_to_send(self, now: float) -> FetchRequest | None:
        """Return each request once, when it must be sent, and begin its timeout; None if no request must be sent now."""
        if self.fetch is None or self.fetch.is_sent or not self.pacer.try_request(now):
            return None
        self._deliverer.counters.requests += 1
        return self.fetch.send(now, self._deliverer.order.next_seq)

    def deadline(self) -> float | None:
        """Return the time at which the open request must be sent or counts as unanswered; None if no request is due."""
        if self.fetch is not None and self.fetch.is_sent:
            return self.fetch.deadline(self._limits)
        return self.pacer.next_at if self.pacer.is_waiting else None

    # --- the replay endpoint --------------------------------------------------------------------------------------------

    def confirm(self, seq: int) -> None:
        """Record that the replayed batch `seq` equals the live batch `seq`."""
        self._deliverer.cross_check.confirm(seq)
        self.checks.reset_comparisons()
        self.pacer.reset()
        self.conflicts = self._resyncs = 0
        self._retries_distrusted = False
        self._deliverer.ledger.discard(DegradedReason.REPLAY_UNCONFIRMED)

    def compare_waiting(self, seq: int, first: bytes, second: bytes, *, live: bool) -> NextInput:
        """Return a conflict if two payloads of batch `seq` differ. `live` is True if one of the payloads came live."""
        if first != second:
            return Input.CONFLICT, f"{RESTARTED}number {seq} has two contents"
        self._deliverer.counters.duplicates += 1
        if live:
            self.confirm(seq)
        return None

    def count_conflict(self) -> None:
        """Count a conflict of replay with the live stream. After several consecutive conflicts, distrust the endpoint."""
        self._deliverer.counters.conflicts += 1
        self.conflicts += 1
        if self.conflicts >= self._limits.max_conflicts:
            self._distrust()
            self._deliverer.ledger.discard(DegradedReason.REPLAY_UNCONFIRMED)
        else:
            self._deliverer.degrade(DegradedReason.REPLAY_UNCONFIRMED)

    def _distrust(self) -> None:
        self._deliverer.degrade(DegradedReason.REPLAY_FOREIGN)
        self.distrusted_until = self._deliverer.now + self._limits.distrust_cooldown
        self._retries_distrusted = False

    def end_distrust(self) -> None:
        """Trust the endpoint again, if it is distrusted."""
        self.distrusted_until = None
        self._deliverer.ledger.discard(DegradedReason.REPLAY_FOREIGN)

    def _resync_or_give_up(self, fetch: ReplayFetch, reason: str) -> NextInput:
        """Start over, because replay lacks a batch that it sent before; after several restarts, give up the comparison."""
        if self._resyncs >= self._limits.max_consecutive_resyncs:
            return Input.EVICTED, reason
        self._resyncs += fetch.purpose is not Purpose.VERIFY
        return Input.NEW_INCARNATION, reason

    # --- answers --------------------------------------------------------------------------------------------------------

    def read(self, frames: Sequence[bytes]) -> NextInput:
        """Process the frames of one message, which can be invalid, from the replay connection."""
        deliverer, fetch = self._deliverer, self.fetch
        reply = parse_replay_reply(frames)
        if isinstance(reply, Malformed):
            deliverer.counters.malformed[f"replay: {reply.reason}"] += 1
        elif fetch is None or not fetch.is_sent:
            deliverer.counters.duplicates += 1
        elif isinstance(reply, ReplayEnd):
            self._progress(fetch)
            return self._end_answer(fetch)
        elif reply.topic and not reply.topic.startswith(self._source.topic.encode()):
            deliverer.end_snapshot()
            self._distrust()
            return (Input.FETCH_FAILED,)
        else:
            self.has_replayed = True
            if reply.topic is not None:
                deliverer.topic = reply.topic
            return self._read_batch(fetch, reply)
        return None

    def expire(self) -> NextInput:
        """End the request, because its timeout has passed without progress; then retry it, or give up replay."""
        deliverer, fetch = self._deliverer, self.fetch
        if fetch is None:
            return None
        deliverer.end_snapshot()
        deliverer.counters.unanswered += 1
        if not fetch.end_unanswered(self._limits):
            self._retry(fetch, needs_new_connection=True)
            return None
        deliverer.degrade(DegradedReason.REPLAY_SILENT)
        self.checks.probe(deliverer.now, deliverer.order.next_seq)
        self.checks.busy_probe_at = self.checks.probe_at + self._limits.max_probe_interval
        return (Input.FETCH_FAILED,)

    @property
    def is_endless(self) -> bool:
        """Whether the open answer has had more than `max_duplicate_replies` consecutive messages without progress."""
        return self.fetch is not None and self.fetch.duplicates > self._limits.max_duplicate_replies

    def _read_batch(self, fetch: ReplayFetch, reply: ReplayBatch) -> NextInput:
        is_first = fetch.begin_message(reply.seq)
        if is_first:
            self._deliverer.end_snapshot()
            self._deliverer.early.drop_replayed()
        fingerprint = fetch.fingerprint
        if fetch.stage is Stage.CONFIRMING:
            return self._read_to_live(fetch, reply)
        if fingerprint is None:
            return self._accept_first(fetch, reply) if is_first else self._accept(fetch, reply)
        if is_first and fetch.purpose is Purpose.FILL and reply.seq > fingerprint.seq:
            return self._begin_after_fingerprint(fetch, fingerprint, reply)
        return self._match(fetch, fingerprint, reply)

    def _read_to_live(self, fetch: ReplayFetch, reply: ReplayBatch) -> NextInput:
        """After an answer has filled all gaps, read it up to the live batch that confirms it."""
        live = self._deliverer.cross_check.answer_live
        conflict = self._compare_live(fetch, live, reply) if live is not None and reply.seq == live.seq else None
        return (Input.COMPLETE,) if conflict is None and (live is None or reply.seq >= live.seq) else conflict

    def _compare_live(self, fetch: ReplayFetch, live: NewestBatch, reply: ReplayBatch) -> NextInput:
        if live.matches(reply.payload):
            self.confirm(live.seq)
        elif not begins_with_clear(reply.payload):
            reason = f"{RESTARTED}number {live.seq} came live with another content than replayed"
            return self._handle_conflict(fetch, reason)
        return None

    def _begin_after_fingerprint(self, fetch: ReplayFetch, fingerprint: Fingerprint, reply: ReplayBatch) -> NextInput:
        """Handle an answer whose first batch follows an unconfirmed batch. The answer may come from another publisher."""
        deliverer = self._deliverer
        if reply.seq < deliverer.order.next_seq or not begins_with_clear(reply.payload):
            forgotten = f"replay has evicted number {fingerprint.seq}, which it brought and no live batch has confirmed"
            return Input.NEW_INCARNATION, forgotten
        # The snapshot replaces all earlier batches.
        deliverer.cross_check.forget_unconfirmed()
        fetch.collect(deliverer.order.next_seq)
        return self._accept_first(fetch, reply)

    def _match(self, fetch: ReplayFetch, fingerprint: Fingerprint, reply: ReplayBatch) -> NextInput:
        """Compare a batch with the fingerprint that the answer must repeat next."""
        newest = self._deliverer.newest
        if fetch.verifies_reconnect and reply.seq > fingerprint.seq and (newest is None or fingerprint.seq > newest.seq):
            # The quarantined batch was lost or evicted, but the next batch in quarantine also identifies the incarnation.
            frame = self._quarantine.old_fingerprint_after(reply.seq - 1)
            if frame is not None and frame.seq == reply.seq:
                fetch.fingerprint = fingerprint = frame
        if reply.seq > fingerprint.seq:
            fetch.has_more = True
        elif reply.seq == fingerprint.seq:
            if fingerprint.matches(reply.payload):
                return self._repeat_fingerprint(fetch, fingerprint)
            return self._handle_other_payload(fetch, fingerprint, reply)
        return None

    def _repeat_fingerprint(self, fetch: ReplayFetch, fingerprint: Fingerprint) -> NextInput:
        deliverer = self._deliverer
        chain, cross_check = deliverer.chain, deliverer.cross_check
        self._progress(fetch, is_new=False)
        is_fill = fetch.purpose is Purpose.FILL
        if fingerprint.live:
            self.confirm(fingerprint.seq)
            cross_check.answer_began_with_live = True
        if not is_fill and fingerprint.seq < deliverer.order.next_seq:
            cross_check.record_repeated(fingerprint)
        fetch.verifies_reconnect |= fingerprint == chain.first
        if fetch.verifies_reconnect:
            following = chain.first_after(fingerprint.seq) or self._quarantine.old_fingerprint_after(fingerprint.seq)
            if following is not None:
                fetch.fingerprint = following
                return None
            if not chain.is_incomplete:
                deliverer.ledger.discard(DegradedReason.IDENTITY)
            self._forget_chain()
        following = next((each for each in cross_check.all_unconfirmed if each.seq > fingerprint.seq and not is_fill), None)
        if following is not None:
            fetch.fingerprint = following
            return None
        fetch.collect(deliverer.order.next_seq)
        if fetch.purpose is Purpose.VERIFY:
            return (Input.VERIFIED,)
        if fetch.purpose is Purpose.COMPARE and deliverer.order.is_complete and not cross_check.is_incomplete:
            # The later messages of the answer are not read: newer batches come live, and would count as a gap here.
            deliverer.counters.complete += 1
            return (Input.COMPLETE,)
        return None

    def _forget_chain(self) -> None:
        """Drop the fingerprint chain, because it was verified or can no longer be verified."""
        is_incomplete = DegradedReason.IDENTITY in self._deliverer.ledger
        self._deliverer.chain = FingerprintChain(is_incomplete=is_incomplete)

    def _handle_other_payload(self, fetch: ReplayFetch, fingerprint: Fingerprint, reply: ReplayBatch) -> NextInput:
        reason = f"{RESTARTED}number {fingerprint.seq} now has another content"
        if not begins_with_clear(reply.payload):
            return self._handle_conflict(fetch, reason)
        if fetch.purpose is Purpose.FILL or fetch.verifies_reconnect or fingerprint == self._deliverer.chain.first:
            return Input.NEW_INCARNATION, reason
        # Replay has compacted the batch or never had it, so the difference does not prove another publisher.
        self._progress(fetch, is_new=False)
        if self._deliverer.cross_check.all_unconfirmed:
            return self._resync_or_give_up(fetch, reason)
        self.checks.fail_comparison(self._deliverer.now)
        fetch.collect(self._deliverer.order.next_seq)
        return None

    def _handle_conflict(self, fetch: ReplayFetch, reason: str) -> NextInput:
        """Handle a conflict of replay with the live stream. If a reconnect is unverified, begin another incarnation."""
        if fetch.purpose is Purpose.VERIFY and fetch.fingerprint is not None:
            return Input.NEW_INCARNATION, reason
        if not self._retries_distrusted:
            return Input.CONFLICT, reason
        self.close()
        self._distrust()
        self._deliverer.ledger.discard(DegradedReason.REPLAY_UNCONFIRMED)
        return (Input.FETCH_FAILED,)

    def _accept_first(self, fetch: ReplayFetch, reply: ReplayBatch) -> NextInput:
        if begins_with_clear(reply.payload) and ends_with_digest(reply.payload):
            fetch.snapshot_part = reply.seq
        if reply.seq > self._deliverer.order.next_seq:
            self._begin_after_missing(fetch, reply)
        return self._accept(fetch, reply)

    def _begin_after_missing(self, fetch: ReplayFetch, reply: ReplayBatch) -> None:
        """Handle an answer without the missing batch. If the answer begins with a snapshot, replay has no earlier batch.

        A retry for an earlier gap would only bring another snapshot of several MiB.
        """
        deliverer = self._deliverer
        if reply.seq == 1 and has_no_number_0(reply.payload):
            deliverer.order.next_seq = 1
            return
        early_batch = deliverer.early.get(reply.seq)
        is_live_batch = early_batch is not None and early_batch.payload == reply.payload
        if begins_with_clear(reply.payload) and not is_live_batch:
            self._progress(fetch)
            # The snapshot also represents the waiting earlier batches. The waiting batches are dropped, because
            # batches between them are missing: delivering them would make the state wrong, and their heartbeats would show a
            # mismatch.
            deliverer.early.drop_up_to(reply.seq)
            deliverer.declare_gap(GapEnd(reply.seq - 1, compacted=True))
        elif fetch.incomplete:
            # Replay lacks the batch again after a retry.
            self._progress(fetch)
            fetch.incomplete = 0
            deliverer.declare_gap(deliverer.order.gap_before(reply.seq))

    def _accept(self, fetch: ReplayFetch, reply: ReplayBatch) -> NextInput:
        """Process a batch of an answer whose publisher is known."""
        deliverer, order, seq, payload = self._deliverer, self._deliverer.order, reply.seq, reply.payload
        fetch.has_more |= seq >= fetch.start
        is_part = self._follow_snapshot(fetch, reply)
        if seq < order.next_seq:
            deliverer.counters.duplicates += 1
            live = deliverer.cross_check.answer_live
            return self._compare_live(fetch, live, reply) if live is not None and seq == live.seq else None
        order.highest_known = max(order.highest_known, seq)
        early_batch = deliverer.early.get(seq)
        if early_batch is not None and early_batch.payload != payload and (is_part or begins_with_clear(payload)):
            # The part of the snapshot replaces the waiting live batch with the same number, and all missing earlier batches.
            deliverer.early.pop(seq)
            early_batch = None
        elif early_batch is not None:
            conflict = self.compare_waiting(seq, early_batch.payload, payload, live=not early_batch.replayed)
            if conflict is not None:
                return conflict
        if seq == order.next_seq:
            fetch.has_delivered = True
            self._progress(fetch)
            if early_batch is None:
                deliverer.deliver(seq, payload, replayed=True)
                order.parts.last = seq if is_part else -1
            deliverer.drain()
            return self.settle()
        if early_batch is None and deliverer.early.add(seq, payload, replayed=True):
            fetch.active_at = deliverer.now
            if seq > fetch.highest_early_seq:
                fetch.highest_early_seq = seq
                self._progress(fetch)
        return (Input.REPLAY_AHEAD,)

    def _follow_snapshot(self, fetch: ReplayFetch, reply: ReplayBatch) -> bool:
        """Return whether the batch can be a part of a snapshot that has several parts.

        An answer begins with the consecutive parts, each with a digest at its end. Live batches can have the same numbers as
        later parts, and must not replace these parts.
        """
        seq, parts = reply.seq, self._deliverer.order.parts
        if seq in (fetch.snapshot_part, fetch.snapshot_part + 1) and ends_with_digest(reply.payload):
            fetch.snapshot_part = seq
            return True
        if seq == parts.last + 1:
            # The batch follows the last part, but is not a part.
            parts.last = -1
        else:
            self._deliverer.end_snapshot()
        fetch.snapshot_part = -2
        return False

    def settle(self) -> NextInput:
        """End the fetch early if live frames have reached the replayed batches."""
        order, cross_check, fetch = self._deliverer.order, self._deliverer.cross_check, self.fetch
        is_matching = fetch is not None and fetch.fingerprint is not None
        if not order.is_complete or order.highest_known != order.last_live or is_matching or order.parts.is_open:
            return None
        if fetch is not None and fetch.is_sent:
            self._deliverer.counters.complete += 1
            # The answer has reached a live batch, so the request does not count as failed.
            self.pacer.reset()
            if cross_check.is_incomplete and cross_check.answer_live is not None:
                fetch.stage = Stage.CONFIRMING
                return (Input.REACHED_LIVE,)
        return (Input.COMPLETE,)

    def _end_answer(self, fetch: ReplayFetch) -> NextInput:
        deliverer, order, counters = self._deliverer, self._deliverer.order, self._deliverer.counters
        deliverer.end_snapshot()
        if fetch.fingerprint is not None:
            counters.truncated += 1
            return self._handle_missing_fingerprint(fetch, fetch.fingerprint)
        if fetch.stage is Stage.CONFIRMING:
            return (Input.COMPLETE,)
        if order.is_complete:
            counters.complete += 1
        else:
            counters.truncated += 1
            if not fetch.end_incomplete(order.next_seq, self._limits):
                self._retry(fetch)
                return None
            fetch.incomplete = 0
            deliverer.declare_gap(order.gap_before_early_batches())
        if not order.is_complete or (fetch.has_more and order.highest_known > order.last_live):
            # Batches are missing, or the answer may have been incomplete: request again until an answer brings no new batch.
            self._retry(fetch)
            return None
        if fetch.purpose is Purpose.COMPARE and deliverer.cross_check.is_incomplete:
            # An answer that has only one batch has lost no message, so replay has no newer batch.
            self.checks.answers_behind_live += fetch.start == fetch.highest_seq < fetch.live_before
            if self.checks.answers_behind_live >= self._limits.max_incomplete_answers:
                # Replay repeats an old batch, but no newer live batch, so it serves another stream or another incarnation.
                ends = f"replay ends at number {fetch.highest_seq}, before live number {fetch.live_before}"
                return self._handle_conflict(fetch, f"{RESTARTED}{ends}")
            self.checks.fail_comparison(deliverer.now)
        return (Input.COMPLETE,)

    def _handle_missing_fingerprint(self, fetch: ReplayFetch, fingerprint: Fingerprint) -> NextInput:
        """Handle an answer that ended before it repeated a fingerprint, so that the publisher is not identified."""
        if not fetch.end_without_fingerprint(self._limits):
            self._retry(fetch)
            return None
        if self.has_replayed:
            return self._give_up_fingerprint(fetch, fingerprint)
        if fetch.start > 0:
            # Request from 0: any batch in the answer shows that replay has evicted the missing batch, or never had it.
            retry = ReplayFetch(fetch.purpose, 0, fingerprint, needs_new_connection=False)
            retry.incomplete = fetch.incomplete
            self._open(retry, self._deliverer.cross_check.answer_live)
            return None
        # A replay endpoint that never held any batch (`buffer_steps=0`) cannot identify the stream.
        if fingerprint == self._deliverer.chain.first:
            self._deliverer.degrade(DegradedReason.IDENTITY)
        return (Input.FETCH_FAILED,)

    def _give_up_fingerprint(self, fetch: ReplayFetch, fingerprint: Fingerprint) -> NextInput:
        deliverer = self._deliverer
        forgotten = f"publisher restarted, or forgot number {fingerprint.seq}: replay starts after it"
        reason = forgotten if fetch.has_more else f"{RESTARTED}replay ends before number {fingerprint.seq}"
        if not fetch.has_more or self._retries_distrusted:
            # All batches of replay are older than the live batch, so replay serves another incarnation or another stream.
            return self._handle_conflict(fetch, reason)
        if fetch.purpose is not Purpose.COMPARE and deliverer.newest is not None and deliverer.newest.seq == fingerprint.seq:
            return Input.NEW_INCARNATION, reason
        if deliverer.cross_check.all_unconfirmed:
            return self._resync_or_give_up(fetch, reason)
        # A small buffer of a busy stream has evicted the batch; the next check uses a newer batch. Fingerprints from before a
        # reconnect can no longer be verified; IDENTITY was added when their verification failed.
        if fetch.verifies_reconnect or fingerprint == deliverer.chain.first:
            self._forget_chain()
        return Input.EVICTED, reason

    def _retry(self, fetch: ReplayFetch, *, needs_new_connection: bool = False) -> None:
        """Repeat the request from its first batch, because the next answer may come from another process."""
        if fetch.purpose is Purpose.FILL or fetch.fingerprint is None:
            if fetch.incomplete and fetch.fingerprint is None:
                # An answer can lose any message except its first, so the next answer must begin with the missing batch.
                self._deliverer.cross_check.separate_next_answer()
            retry = self._fetch_from_missing()
        else:
            retry = self._fetch_from_fingerprints(fetch.purpose)
            retry.has_more = fetch.has_more
        self._open(fetch.retry(retry, needs_new_connection=needs_new_connection), self._deliverer.cross_check.last_live)

    def _progress(self, fetch: ReplayFetch, *, is_new: bool = True) -> None:
        fetch.progress(self._deliverer.now, is_new=is_new)
        self._deliverer.ledger.discard(DegradedReason.REPLAY_SILENT)
        self.checks.busy_probe_at = inf
