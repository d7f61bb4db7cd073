"""The middle layer of a stream: read the answers of replay, and request more."""

from __future__ import annotations

from collections.abc import Sequence

from kvevents.stream.delivery_layer import DeliveryLayer
from kvevents.stream.identity import Fingerprint, FingerprintChain, NewestBatch
from kvevents.stream.replay_fetch import Purpose, ReplayFetch, Stage
from kvevents.stream.sequencer import GapEnd
from kvevents.stream.transitions import Input
from kvevents.stream.trust import DegradedReason
from kvevents.wire import Malformed, ReplayBatch, ReplayEnd, parse_replay_reply
from kvevents.wire.decode import begins_with_clear, ends_with_digest


class ReplayLayer(DeliveryLayer):
    """Match each answer with fingerprints, put its batches in order, and decide at its end what to request next."""

    def receive_replay(self, frames: Sequence[bytes], now: float) -> None:
        """Take the frames of one message from the replay connection, valid or not."""
        self._now = now
        reply = parse_replay_reply(frames)
        fetch = self._fetch
        if isinstance(reply, Malformed):
            self._count(self.counters.malformed, f"replay: {reply.reason}")
        elif fetch is None or not fetch.sent:
            self.counters.duplicates += 1
        elif isinstance(reply, ReplayEnd):
            self._progress(fetch)
            self._end_answer(fetch)
        elif reply.topic and not reply.topic.startswith(self.source.topic.encode()):
            self._end_snapshot()
            self._distrust()
            self._apply(Input.FETCH_FAILED)
        else:
            self._has_replayed = True
            if reply.topic is not None:
                self.topic = reply.topic
            self._read_answer(fetch, reply)
            if self._fetch is fetch and fetch.duplicates > self._limits.max_duplicate_replies:
                self._fail_request(fetch)

    def defer_replay_timeout(self, now: float) -> None:
        """An answer has arrived and is fed later. Until then it is not late."""
        if self._fetch is not None:
            self._fetch.active_at = now

    def _read_answer(self, fetch: ReplayFetch, reply: ReplayBatch) -> None:
        is_first = fetch.begin_message(reply.seq)
        if is_first:
            self._end_snapshot()
            self._early.drop_replayed()
        fingerprint = fetch.fingerprint
        if fetch.stage is Stage.CONFIRMING:
            self._read_to_live(fetch, reply)
        elif fingerprint is None:
            if is_first:
                self._accept_first(fetch, reply)
            else:
                self._accept(fetch, reply)
        elif is_first and fetch.purpose is Purpose.FILL and reply.seq > fingerprint.seq:
            self._begin_after_fingerprint(fetch, fingerprint, reply)
        else:
            self._match(fetch, fingerprint, reply)

    def _read_to_live(self, fetch: ReplayFetch, reply: ReplayBatch) -> None:
        """Nothing is missing. Read the rest of the answer up to the live batch that confirms it."""
        live = fetch.live_batch
        if live is not None and reply.seq == live.seq:
            self._compare_live(live, reply)
        if self._fetch is fetch and (live is None or reply.seq >= live.seq):
            self._apply(Input.COMPLETE)

    def _compare_live(self, live: Fingerprint | NewestBatch, reply: ReplayBatch) -> None:
        if live.matches(reply.payload):
            self._confirm(live.seq)
        elif not begins_with_clear(reply.payload):
            self._contradict(f"publisher restarted: number {live.seq} came live with another content than replayed")

    def _begin_after_fingerprint(self, fetch: ReplayFetch, fingerprint: Fingerprint, reply: ReplayBatch) -> None:
        """Replay no longer holds a batch that it brought and that no live batch has confirmed: it may be another publisher."""
        if reply.seq >= self._order.next_seq and begins_with_clear(reply.payload):
            # The snapshot replaces everything before it.
            self._cross_check.forget_unconfirmed()
            fetch.collect(self._order.next_seq)
            self._accept_first(fetch, reply)
        else:
            forgotten = f"replay has evicted number {fingerprint.seq}, which it brought and no live batch has confirmed"
            self._apply(Input.NEW_INCARNATION, forgotten)

    def _match(self, fetch: ReplayFetch, fingerprint: Fingerprint, reply: ReplayBatch) -> None:
        """Compare a batch with the fingerprint that the answer must repeat next."""
        if (
            fetch.verifies_reconnect
            and reply.seq > fingerprint.seq
            and (self._newest is None or fingerprint.seq > self._newest.seq)
        ):
            # The quarantined batch was lost or evicted. The next one in quarantine identifies the incarnation as well.
            waiting = self._quarantine.old_after(reply.seq - 1)
            if waiting is not None and waiting.seq == reply.seq:
                fetch.fingerprint = fingerprint = waiting
        if reply.seq > fingerprint.seq:
            fetch.has_more = True
        elif reply.seq == fingerprint.seq:
            if fingerprint.matches(reply.payload):
                self._repeat_fingerprint(fetch, fingerprint)
            else:
                self._differ_from_fingerprint(fetch, fingerprint, reply)

    def _repeat_fingerprint(self, fetch: ReplayFetch, fingerprint: Fingerprint) -> None:
        self._repeat(fetch)
        is_fill = fetch.purpose is Purpose.FILL
        if fingerprint.live:
            self._confirm(fingerprint.seq)
            fetch.began_with_live = True
        if not is_fill and fingerprint.seq < self._order.next_seq:
            self._cross_check.repeat(fingerprint)
        fetch.verifies_reconnect |= fingerprint == self._chain.first
        if fetch.verifies_reconnect:
            following = self._chain.after(fingerprint.seq) or self._quarantine.old_after(fingerprint.seq)
            if following is not None:
                fetch.fingerprint = following
                return
            if not self._chain.is_incomplete:
                self._ledger.discard(DegradedReason.IDENTITY)
            self._chain = FingerprintChain(is_incomplete=DegradedReason.IDENTITY in self._ledger)
        following = None if is_fill else self._cross_check.unconfirmed_after(fingerprint.seq)
        if following is not None:
            fetch.fingerprint = following
            return
        fetch.collect(self._order.next_seq)
        is_compared = fetch.purpose is Purpose.COMPARE and self._order.is_complete and not self._cross_check.is_incomplete
        self._apply(Input.COMPARED if is_compared else Input.VERIFIED)

    def _differ_from_fingerprint(self, fetch: ReplayFetch, fingerprint: Fingerprint, reply: ReplayBatch) -> None:
        reason = f"publisher restarted: number {fingerprint.seq} now has another content"
        if not begins_with_clear(reply.payload):
            self._contradict(reason)
        elif fetch.purpose is Purpose.FILL or fetch.verifies_reconnect or fingerprint == self._chain.first:
            self._apply(Input.NEW_INCARNATION, reason)
        else:
            # Replay has compacted the batch, or never had it: that shows nothing.
            self._repeat(fetch)
            if self._cross_check.all_unconfirmed:
                self._cannot_confirm(reason)
            else:
                self._apply(Input.NOT_COMPARABLE, reason)

    def _accept_first(self, fetch: ReplayFetch, reply: ReplayBatch) -> None:
        if begins_with_clear(reply.payload) and ends_with_digest(reply.payload):
            fetch.snapshot_part = reply.seq
        if reply.seq > self._order.next_seq:
            self._begin_after_missing(fetch, reply)
        self._accept(fetch, reply)

    def _begin_after_missing(self, fetch: ReplayFetch, reply: ReplayBatch) -> None:
        """The answer does not begin with the missing batch. If it begins with a snapshot, nothing before that will ever come.

        Each retry for an earlier gap would bring another snapshot of several MiB.
        """
        waiting = self._early.get(reply.seq)
        is_live_batch = waiting is not None and waiting.payload == reply.payload
        if begins_with_clear(reply.payload) and not is_live_batch:
            self._progress(fetch)
            # The snapshot contains the batches that wait before it too. Without those that are missing between them, the state
            # that they lead to would be wrong, and heartbeats in them would say so.
            self._early.drop_up_to(reply.seq)
            self._declare_gap(GapEnd(reply.seq - 1, compacted=True))
        elif fetch.incomplete:
            # A retry, and the batch is missing again.
            self._progress(fetch)
            fetch.incomplete = 0
            self._declare_gap(self._order.gap_before(reply.seq))

    def _accept(self, fetch: ReplayFetch, reply: ReplayBatch) -> None:
        """Take a batch of an answer whose publisher is known."""
        seq, payload = reply.seq, reply.payload
        fetch.has_more |= seq >= fetch.start
        is_part = self._follow_snapshot(fetch, reply)
        if seq < self._order.next_seq:
            self.counters.duplicates += 1
            if fetch.live_batch is not None and seq == fetch.live_batch.seq:
                self._compare_live(fetch.live_batch, reply)
            return
        self._order.see(seq)
        waiting = self._early.get(seq)
        if waiting is not None and waiting.payload != payload and (is_part or begins_with_clear(payload)):
            # The snapshot also contains what is missing before it, so the batch with its number need not wait any more.
            self._early.pop(seq)
            waiting = None
        elif waiting is not None and not self._check_equal(seq, waiting.payload, payload, live=not waiting.replayed):
            return
        if seq == self._order.next_seq:
            self._progress(fetch)
            if waiting is None:
                self._deliver(seq, payload, replayed=True)
                self._order.parts.last = seq if is_part else -1
            self._drain()
            self._settle()
            return
        if waiting is None and self._early.add(seq, payload, replayed=True):
            fetch.active_at = self._now
            if seq > fetch.highest_early:
                fetch.highest_early = seq
                self._progress(fetch)
        self._apply(Input.REPLAY_AHEAD)

    def _follow_snapshot(self, fetch: ReplayFetch, reply: ReplayBatch) -> bool:
        """Whether the batch may be a part of a snapshot in several batches.

        An answer begins with the parts, in a row, each with a digest at its end. Live batches may have the same numbers. What
        is between two parts must be neither lost nor mixed up with those.
        """
        seq = reply.seq
        if seq in (fetch.snapshot_part, fetch.snapshot_part + 1) and ends_with_digest(reply.payload):
            fetch.snapshot_part = seq
            return True
        if seq == self._order.parts.last + 1:
            # A batch that is not a part follows the last part.
            self._order.parts.last = -1
        else:
            self._end_snapshot()
        fetch.snapshot_part = -2
        return False

    def _check_equal(self, seq: int, known: bytes, received: bytes, *, live: bool) -> bool:
        """Return whether two messages with one number are equal. If not, reset. `live` says that one of them came live."""
        if known == received:
            self.counters.duplicates += 1
            if live:
                self._confirm(seq)
            return True
        self._apply(Input.CONFLICT, f"publisher restarted: number {seq} has two contents")
        return False

    def _settle(self) -> None:
        """Close the fetch early if live frames have reached the replayed batches."""
        order, fetch = self._order, self._fetch
        is_matching = fetch is not None and fetch.fingerprint is not None
        if not order.is_complete or order.highest_seen != order.last_live or is_matching or order.parts.is_open:
            return
        if fetch is not None and fetch.sent:
            self.counters.complete += 1
            # The request has led to a live batch. It is not one of many in vain.
            self._pacer.reset()
            if self._cross_check.is_incomplete and fetch.live_batch is not None:
                self._apply(Input.REACHED_LIVE)
                return
        self._apply(Input.COMPLETE)

    def _end_answer(self, fetch: ReplayFetch) -> None:
        self._end_snapshot()
        order = self._order
        if fetch.fingerprint is not None:
            self.counters.truncated += 1
            self._miss_fingerprint(fetch, fetch.fingerprint)
            return
        if fetch.stage is Stage.CONFIRMING:
            self._apply(Input.COMPLETE)
            return
        if order.is_complete:
            self.counters.complete += 1
        else:
            self.counters.truncated += 1
            if not fetch.end_incomplete(order.next_seq, self._limits):
                self._retry(fetch)
                return
            fetch.incomplete = 0
            self._declare_gap_before_early()
        if not order.is_complete or (fetch.has_more and order.highest_seen > order.last_live):
            # Batches are missing, or nothing says that the answer was complete: request until an answer brings nothing.
            self._retry(fetch)
            return
        if fetch.purpose is Purpose.COMPARE and self._cross_check.is_incomplete:
            # An answer that a socket has truncated holds more than its first batch.
            self._answers_behind_live += fetch.start == fetch.highest < fetch.live_before
            if self._answers_behind_live >= self._limits.max_incomplete_answers:
                # Replay repeats what it has brought, and nothing that came live since: another stream, or another incarnation.
                ends = f"replay ends at number {fetch.highest}, before live number {fetch.live_before}"
                self._contradict(f"publisher restarted: {ends}")
                return
            self._checks.fail_comparison(self._now)
        self._apply(Input.COMPLETE)

    def _miss_fingerprint(self, fetch: ReplayFetch, fingerprint: Fingerprint) -> None:
        """Handle an answer that ended without the batch that would identify the publisher."""
        forgotten = "replay starts after it" if fetch.has_more else "replay ends before it"
        reason = f"publisher restarted, or forgot number {fingerprint.seq}: {forgotten}"
        is_of_chain = fingerprint == self._chain.first
        if not fetch.end_without_fingerprint(self._limits):
            self._retry(fetch)
        elif not self._has_replayed and fetch.start > 0:
            # Does replay hold anything at all? If so, it has evicted the batch, or never had it.
            again = ReplayFetch(fetch.purpose, 0, fingerprint, fetch.live_batch, new_connection=False)
            again.incomplete = fetch.incomplete
            self._fetch = again
        elif not self._has_replayed:
            # A replay endpoint that never held anything (`buffer_steps=0`) shows nothing.
            self._apply(Input.NOTHING_HELD_OF_INCARNATION if is_of_chain else Input.NOTHING_HELD)
        elif not fetch.has_more or self._retries_distrusted:
            # Replay holds nothing as new as the live batch: another incarnation, or another stream.
            self._contradict(reason)
        elif fetch.purpose is not Purpose.COMPARE and self._newest is not None and self._newest.seq == fingerprint.seq:
            self._apply(Input.NEW_INCARNATION, reason)
        elif self._cross_check.all_unconfirmed:
            self._cannot_confirm(reason)
        else:
            # A busy stream has evicted the batch from a small buffer. The next check uses a newer one. The fingerprints from
            # before a reconnect cannot be verified any more; IDENTITY is a degraded reason since the verification failed.
            if fetch.verifies_reconnect or is_of_chain:
                self._chain = FingerprintChain(is_incomplete=DegradedReason.IDENTITY in self._ledger)
            self._apply(Input.FINGERPRINT_EVICTED, reason)

    def _cannot_confirm(self, reason: str) -> None:
        """Handle that replay no longer holds a batch that it brought.

        Fetch everything again, unless its buffer has proved too small.
        """
        may_resync = self._resyncs < self._limits.max_consecutive_resyncs
        self._apply(Input.UNCONFIRMABLE if may_resync else Input.UNCONFIRMABLE_AGAIN, reason)

    def _contradict(self, reason: str) -> None:
        self._apply(Input.CONFLICT_AGAIN if self._retries_distrusted else Input.CONFLICT, reason)

    def _fail_request(self, fetch: ReplayFetch) -> None:
        """Handle a request whose time is up, since nothing new arrived."""
        self._end_snapshot()
        self.counters.unanswered += 1
        if not fetch.end_unanswered(self._order.next_seq, self._limits):
            self._retry(fetch, new_connection=True)
            return
        self._degrade(DegradedReason.REPLAY_SILENT)
        self._checks.probe(self._now)
        self._apply(Input.FETCH_FAILED)

    def _distrust(self) -> None:
        self._degrade(DegradedReason.REPLAY_FOREIGN)
        self._can_replay = False
        self._distrusted_at = self._now
        self._retries_distrusted = False

    def _end_distrust(self) -> None:
        self._ledger.discard(DegradedReason.REPLAY_FOREIGN)
        self._can_replay = bool(self.source.replay_endpoint)

    def _fetch_from_missing(self) -> ReplayFetch:
        unconfirmed = self._cross_check.unconfirmed
        start = self._order.next_seq if unconfirmed is None else unconfirmed.seq
        return ReplayFetch(Purpose.FILL, start, unconfirmed, self._cross_check.last_live)

    def _fetch_from_fingerprints(self, purpose: Purpose) -> ReplayFetch:
        """Request from the first batch that has to be matched, or from what is missing if nothing was delivered yet."""
        live = self._cross_check.last_live
        unconfirmed: Fingerprint | NewestBatch | None = next(iter(self._cross_check.all_unconfirmed), None)
        if unconfirmed is not None and live is not None and live.seq < unconfirmed.seq:
            # The live batch cannot confirm that one, but it shows whether the answer is of this publisher at all.
            unconfirmed = live
        first = self._chain.first or unconfirmed or live or self._newest
        start = self._order.next_seq if first is None else first.seq
        live_before = -1 if live is None else live.seq
        fingerprint = None if first is None else first.fingerprint()
        return ReplayFetch(purpose, start, fingerprint, live, live_before=live_before)

    def _retry(self, fetch: ReplayFetch, *, new_connection: bool = False) -> None:
        """Request again from the beginning: the next answer may be of another process."""
        if fetch.purpose is Purpose.FILL or fetch.fingerprint is None:
            if fetch.incomplete and fetch.fingerprint is None:
                # An answer may lose any of its messages except the first, so the next one must begin with what is missing.
                self._cross_check.separate_next_answer()
            again = self._fetch_from_missing()
        else:
            again = self._fetch_from_fingerprints(fetch.purpose)
            again.has_more = fetch.has_more
        self._fetch = fetch.retry(again, new_connection=new_connection)

    def _progress(self, fetch: ReplayFetch) -> None:
        fetch.progress(self._now)
        self._ledger.discard(DegradedReason.REPLAY_SILENT)

    def _repeat(self, fetch: ReplayFetch) -> None:
        fetch.repeat(self._now)
        self._ledger.discard(DegradedReason.REPLAY_SILENT)
