"""One stream as a state machine: mangled frames in, ordered deliveries out. No I/O, no clock, no threads.

Theory of operation
===================

A publisher numbers its batches from 0 in each life. Live frames of one connection arrive in order, with holes. Replay replies
arrive in order too, with holes, from whatever the publisher still keeps, and nothing in either tells one life from another. So
three things are kept apart:

- **Order.** `_expected` is the only number that may be delivered next. Whatever comes early waits in `_pending`.
- **Identity.** A number and its payload together identify a life: the newest batch delivered is the *anchor* that a
  replay must repeat byte for byte. A different payload under a known number means another life.
  A life may be like the one before up to some number, though. So after a reconnect replay must also repeat what is newer than
  the anchor and came before: of each connection of which nothing was proven its first and its newest batch (`Proof` in
  `identity.py`), and each frame that waits.
- **Evidence.** The replay endpoint may belong to another engine, for each answer to another one, and replay may be answered by
  the next life while the last frames of the one before still wait here. So the stream is exact only if each answer has repeated
  a live batch of this connection whose number is not below anything that it has brought, the *joint*, or another answer has
  that begins with the newest batch of the first one (`identity.py`). A live batch below what was replayed is compared with the
  digest that is kept of that number, or else replay is asked for the number again. One that contradicts is a conflict.
- **Completeness.** An end marker proves nothing, since engines drop silently inside a reply. Complete is only what live frames
  confirm, or an answer that holds nothing beyond what is known: an answer of one message cannot have lost any.

One request for replay at a time is open (`OpenAsk`). It either *catches up* (history at the start, a gap later) or
*verifies* (from the anchor: after a reconnect, while live frames wait; or as a probe of a quiet stream, while they do not).
What an answer brings too early waits, and is dropped when the next answer begins: two answers may be of two publishers.

A stream that an earlier process followed is one whose connection is gone: `restore` brings back its number, its anchor and its
doubts, and connecting is then a reconnect. Live frames are all of the new connection: a number not above its last is a restart.

A publisher that collapses its history answers with a *snapshot*: a clear, and all that was live, under the number of the last
batch that it stands for. So one number may have two payloads in one life, if the replayed one begins with a clear. Either
serves; where something before is missing, only the snapshot does. An answer that begins with one ends the wait for all before
it: the first message of an answer is never lost, so nothing before it is kept any more, and nothing is needed.

A sender of ours says of itself, in heartbeats, what it holds after this very batch, how far it trusts that, in which life it is
and how soon it speaks again. Whether the state here is the same only a consumer can say (`report`); an agreement ends all doubt
about what came before. If it is another, or the life is, the stream starts over, which is a restart: a sender of ours answers a
request from 0 with all that it holds. Heartbeats are read in the midst of other things: what is `_due` because of them is done
when deliveries are taken.

The phases, and what leads from one to the next, are a table: `kvevents.stream.state.TRANSITIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Final, Generic, overload

from kvevents.errors import ConfigError
from kvevents.events import Heartbeat
from kvevents.stream.checkpoint import Checkpoint, StreamPosition
from kvevents.stream.deliveries import Batch, BatchT, Gap, RawBatch, Reset
from kvevents.stream.heartbeat import HeartbeatMonitor
from kvevents.stream.identity import CrossCheck, FingerprintChain, Quarantine
from kvevents.stream.limits import DEFAULT_STREAM_LIMITS, StreamLimits
from kvevents.stream.pending import ReorderBuffer, ReplayedDigests
from kvevents.stream.report import BatchReport, inspect_events
from kvevents.stream.source import Source
from kvevents.stream.state import TRANSITIONS, Anchor, FetchRequest, OpenAsk, Phase, StreamCounters, payload_digest
from kvevents.stream.trust import DegradedReason, Trust, TrustLedger
from kvevents.wire import (
    MAX_SEQ,
    Decoded,
    Live,
    Malformed,
    ReplayBatch,
    ReplayEnd,
    decode_batch,
    parse_live,
    parse_replay_reply,
)
from kvevents.wire.peek import begins_with_clear, ends_with_digest

_APART: Final = (Phase.CONNECTING, Phase.DISCONNECTED, Phase.RESTORED)
"""Phases without a connection."""


class Stream(Generic[BatchT]):
    """Feed it (`connected`, `disconnected`, `receive_live`, `receive_replay`, `tick`), then take `deliveries()` and `ask()`.

    `now` is any monotone clock in seconds. After each feeding call take the deliveries; send what `ask()` returns; call `tick`
    at `deadline()`. While `asking` is false no replay connection is needed.

    Incarnations begin at `first_incarnation`; those that follow a restored one are not below it either.

    With `decode=None` it delivers `RawBatch`, and what decoding would have told it, whoever decodes must `report`. Whether
    what was delivered is what the sender holds has to be reported in either case.
    """

    @overload
    def __init__(
        self: Stream[Batch],
        source: Source,
        limits: StreamLimits = ...,
        decode: Callable[[bytes], Decoded] = ...,
        first_incarnation: int = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: Stream[RawBatch], source: Source, limits: StreamLimits = ..., *, decode: None, first_incarnation: int = ...
    ) -> None: ...
    @overload
    def __init__(
        self: Stream[Batch | RawBatch],
        source: Source,
        limits: StreamLimits = ...,
        *,
        decode: Callable[[bytes], Decoded] | None,
        first_incarnation: int = ...,
    ) -> None: ...
    def __init__(
        self,
        source: Source,
        limits: StreamLimits = DEFAULT_STREAM_LIMITS,
        decode: Callable[[bytes], Decoded] | None = decode_batch,
        first_incarnation: int = 0,
    ) -> None:
        self.source = source
        self.counters = StreamCounters()
        self.phase = Phase.CONNECTING
        self.incarnation = self._first_incarnation = first_incarnation
        self._limits = limits
        self._decode = decode
        self._name = source.label
        self._rank = source.rank
        self.topic = source.topic.encode()
        """The topic of the newest message."""
        self._out: list[Any] = []
        self._pending = ReorderBuffer(limits)
        self._suspects = Quarantine(limits)
        self._ask: OpenAsk | None = None
        self._doubts = TrustLedger()
        self._sender = HeartbeatMonitor(limits)
        self._now = 0.0
        self._heard_at = 0.0
        self._probed_at = 0.0
        self._probes = 0
        self._conflicts = 0
        self._distrusted_at = 0.0
        self._asks_the_foreign = False
        self._replay_seen = False
        self._is_paced = False
        self._paid_until = _AT_ONCE
        """No replay request is sent before: requests are paced, whatever the answers are."""
        self._failed_comparisons = 0
        self._voided = 0
        """Restarts in a row because replay had forgotten what it had brought, before a live batch proved it."""
        self._compare_at = _AT_ONCE
        """When replay may be asked again for a live batch; see `_confirm_soon`."""
        self._begin_life()
        if not source.replay_endpoint:
            self._doubt(DegradedReason.NO_REPLAY)

    def _begin_life(self) -> None:
        self._expected = 0
        self._newest = -1
        self._last_live = -1
        self._last: Anchor | None = None
        """The newest batch delivered in this life."""
        self._proof = FingerprintChain()
        self._evidence = CrossCheck()
        self._recent = ReplayedDigests(self._limits)
        self._part = self._cut_part = self._unfinished_part = -1
        """Numbers of parts of a snapshot: the newest one delivered, if the answer may hold the next; the newest one behind
        which an answer stopped; and the newest one that says of itself that it is not the last."""
        self._emitted = False
        self._early_ends = 0
        """Answers in a row that end with the batch that was asked for, although the live batch they should confirm is newer."""
        self._silent = False
        self._due: str | None = None
        self._sender.begin_life()
        self._doubts.begin_life()

    # --- what can be observed --------------------------------------------------------------------------------------------

    @property
    def trust(self) -> Trust:
        """How far the deliveries so far can be trusted."""
        if self.phase is Phase.CONNECTING:
            return Trust.CONNECTING
        if self.phase in _APART:
            return Trust.STALE.with_reason(self.phase.value)
        if self.phase is not Phase.FOLLOWING:
            return Trust.REPLAYING.with_reason(_PACED if self._is_paced else self.phase.value)
        return self._trust_of_what_is_followed()

    def _trust_of_what_is_followed(self) -> Trust:
        if self._doubts:
            stale = self._silent or (DegradedReason.SENDER in self._doubts and self._sender.trust == Trust.STALE)
            doubts = [doubt for doubt in DegradedReason if doubt in self.degraded_reasons]
            return (Trust.STALE if stale else Trust.DEGRADED).with_reason("; ".join(map(self._sentence, doubts)))
        if not self._is_unproven:
            return Trust.EXACT
        if self._evidence.joint is not None and not self._failed_comparisons:
            return Trust.REPLAYING.with_reason(_JOINED)
        return Trust.DEGRADED.with_reason(DegradedReason.REPLAY_UNPROVEN.value)

    @property
    def _is_unproven(self) -> bool:
        return self.phase not in _APART and self._can_replay and self._evidence.is_missing

    def _sentence(self, doubt: DegradedReason) -> str:
        if doubt is DegradedReason.SENDER:
            return self._sender.trust.reason or doubt.value
        return self._sender.silence if doubt is DegradedReason.SILENT else doubt.value

    @property
    def degraded_reasons(self) -> frozenset[DegradedReason]:
        """Why the stream is, or would be, DEGRADED. `REPLAY_UNPROVEN` is among them while a comparison is on its way."""
        found = frozenset(self._doubts)
        return found | _UNPROVEN if self._is_unproven else found

    @property
    def last_seq(self) -> int:
        """Number of the newest batch delivered or given up in this life; -1 before the first."""
        return self._expected - 1

    @property
    def waiting(self) -> int:
        """Batches held back because an earlier one is missing."""
        return len(self._pending) + len(self._suspects)

    def position(self) -> StreamPosition:
        """What a checkpoint keeps, once the deliveries so far were taken."""
        proof = self._proof.until(self._expected - 1)
        proof.needs(self._evidence.before, *self._evidence.anchors, self._last)
        return StreamPosition(self.incarnation, self._expected - 1, proof, self._replay_seen, self._doubts.kept())

    # --- take ------------------------------------------------------------------------------------------------------------

    def deliveries(self) -> list[BatchT | Reset | Gap]:
        """What became deliverable since the last call, in order."""
        if self._due is not None and self.phase not in _APART:
            self._start_over(self._due)
        out, self._out = self._out, []
        return out

    @property
    def is_fetching(self) -> bool:
        """Whether a replay request is open, sent or not."""
        return self._ask is not None

    def request_to_send(self, now: float) -> FetchRequest | None:
        """The replay request to send now, once; its clock starts here. None while requests are paced: see `deadline`."""
        ask = self._ask
        if ask is None or ask.sent:
            return None
        self._is_paced = now < self._paid_until
        if self._is_paced:
            return None
        # Each request uses up one interval. Unused intervals are kept for later, as many as requests may come at once.
        interval = self._limits.request_interval
        self._paid_until = max(self._paid_until, now - (self._limits.max_request_burst - 1) * interval) + interval
        ask.sent = True
        ask.heard_at = now
        ask.expected_before = self._expected
        self.counters.requests += 1
        return FetchRequest(ask.start, ask.fresh)

    def deadline(self) -> float | None:
        """When `tick` is due, unless something arrives before."""
        silent, due = self._silent_at(), self._replay_due()
        return due if silent is None else silent if due is None else min(due, silent)

    def _replay_due(self) -> float | None:
        if self._ask is not None:
            if self._ask.sent:
                return self._patience_ends(self._ask)
            return self._paid_until if self._is_paced else None
        if self.phase is not Phase.FOLLOWING or DegradedReason.NO_REPLAY in self._doubts:
            return None
        return self._probe_due() if self._can_replay else self._distrusted_at + self._limits.distrust_cooldown

    # --- feed ------------------------------------------------------------------------------------------------------------

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where an earlier process has ended; before anything is fed. `ConfigError` for another stream's checkpoint."""
        if (checkpoint.source, checkpoint.rank) != (self._name, self._rank):
            raise ConfigError(
                f"{self._name} rank {self._rank} cannot go on with the checkpoint of {checkpoint.source} rank {checkpoint.rank}"
            )
        self.phase = Phase.RESTORED
        self.incarnation = checkpoint.incarnation
        self._newest = self._last_live = checkpoint.last_seq
        self._expected = checkpoint.last_seq + 1
        # Somebody may hold more than the checkpoint tells of: another life is always a reset.
        self._emitted = True
        self._replay_seen = checkpoint.replay_seen
        self._proof = checkpoint.fingerprint_chain()
        self._last = self._proof.until(checkpoint.last_seq).last
        if self._last is not None and not self._last.live:
            self._evidence.unproven = self._last
        for name, through in checkpoint.degraded_reasons.items():
            self._doubts.add(DegradedReason[name], through)

    def connected(self, now: float) -> None:
        """The subscription is up. Every frame of an earlier connection must have been fed before."""
        self._now = self._heard_at = now
        self._doubts.discard(DegradedReason.REPLAY_FOREIGN)
        if self.phase is Phase.CONNECTING:
            self._start_life()
            self._admit_suspects()
            return
        self._evidence.connected()
        self._failed_comparisons, self._compare_at, self._early_ends = 0, _AT_ONCE, 0
        restored = self.phase is Phase.RESTORED
        if not restored:
            self.disconnected()
            self.counters.reconnects += 1
            self._suspects.reconnected()
        self._proof.needs(self._evidence.before, *self._evidence.anchors, self._last)
        self._proof.drop_payloads()
        anchor = self._proof.first
        if restored and anchor is None:
            self._restart_with_suspects("restored with nothing by which to recognise the publisher")
        elif not self._can_replay:
            if self._emitted:
                self._doubt(DegradedReason.IDENTITY)
            self._go_on_unproven()
        elif anchor is None:
            # Nothing was delivered by which a life could be told: what waits from before the reconnect may be another's.
            self._restart_with_suspects("reconnected before the first batch")
        else:
            self._enter(Phase.VERIFYING)
            self._ask = OpenAsk(anchor.seq, anchor)

    def disconnected(self) -> None:
        """The subscription is down. Frames fed from now until `connected` may be from before or after."""
        if self.phase in _APART:
            return
        self._end_snapshot()
        self._ask = None
        self._sender.disconnected()
        self._heard()
        self._enter(Phase.DISCONNECTED)

    def receive_live(self, frames: Sequence[bytes], now: float) -> None:
        """Take the frames of one message from the SUB socket, whatever they are."""
        live = parse_live(frames)
        if isinstance(live, Malformed):
            self._count(self.counters.malformed, live.reason)
        else:
            self._receive(live, now)

    def expected_run(self, limit: int) -> range:
        """Numbers of the next live batches, at most `limit`, for whoever reads ahead for `receive_run`.

        Empty while anything is unsettled: then each message must go to `receive_live`.
        """
        if self.phase is Phase.FOLLOWING and self._expected > self._newest:
            return range(self._expected, min(self._expected + limit, MAX_SEQ))
        return range(0)

    def receive_run(self, payloads: Sequence[bytes], now: float) -> None:
        """Take live messages with the topic `topic` and the numbers that `coming` said.

        Nearly every message of a healthy stream comes this way.
        """
        count = len(payloads)
        first, topic = self._expected, self.topic
        if self.phase is not Phase.FOLLOWING:
            # The connection was lost after they had been read.
            for seq, payload in enumerate(payloads, first):
                self._receive(Live(topic, seq, payload), now)
        elif count:
            self.counters.live += count
            self._now = self._heard_at = now
            self._probes = 0
            if self._silent:
                self._heard()
            if self._evidence.first_live is None:
                self._evidence.first_live = first
            self._deliver_run(first, payloads)
            self._last_live = first + count - 1
            self._confirm_soon()

    def _receive(self, live: Live, now: float) -> None:
        self.counters.live += 1
        self._now = self._heard_at = now
        self._probes = 0
        if self._silent:
            self._heard()
        self.topic = live.topic
        self._note_connection_of(live)
        if self.phase is Phase.FOLLOWING or self.phase is Phase.CATCHING_UP:
            self._follow(live)
        else:
            self._suspect(live)
        # It may have begun another life, of which it is the first.
        self._note_connection_of(live)

    def _note_connection_of(self, live: Live) -> None:
        """While the connection is gone, a frame may still be of the one before."""
        if self._evidence.first_live is None and self.phase not in (Phase.DISCONNECTED, Phase.RESTORED):
            self._evidence.first_live = live.seq

    def receive_replay(self, frames: Sequence[bytes], now: float) -> None:
        """Take the frames of one message from the replay connection, whatever they are."""
        self._now = now
        reply = parse_replay_reply(frames)
        ask = self._ask
        if isinstance(reply, Malformed):
            self._count(self.counters.malformed, f"replay: {reply.reason}")
        elif ask is None or not ask.sent:
            self.counters.duplicates += 1
        elif isinstance(reply, ReplayEnd):
            self._brought(ask)
            self._end_of_reply(ask)
        elif reply.topic and not reply.topic.startswith(self.source.topic.encode()):
            self._distrust_replay()
        else:
            self._replay_seen = True
            if reply.topic is not None:
                self.topic = reply.topic
            self._replayed(ask, reply)
            if self._ask is ask and ask.useless > self._limits.max_duplicate_replies:
                self._unanswered(ask)

    def defer_replay_timeout(self, now: float) -> None:
        """An answer has arrived, and is fed later: until then it is not late."""
        if self._ask is not None:
            self._ask.heard_at = now

    def tick(self, now: float) -> None:
        """Let time pass: requests that went unanswered, checks that are due, a sender that is silent."""
        self._now = now
        silent = self._silent_at()
        if silent is not None and now >= silent:
            self._silent = True
            self._doubt(DegradedReason.SILENT)
        ask = self._ask
        if ask is not None:
            if ask.sent and now >= self._patience_ends(ask):
                self._unanswered(ask)
        elif (due := self._replay_due()) is not None and now >= due:
            self._believe_again()
            self._probe()

    def report(self, delivery: Batch | RawBatch, report: BatchReport) -> None:
        """What reading and applying a delivered batch has shown; of a decoded one only whether the state agrees is news.

        It may come late and in any order: a clear or an agreement heals the doubts that are older than its batch, and no newer
        ones. Take the deliveries afterwards: they may begin with a `Reset`.
        """
        incarnation, seq = delivery.incarnation, delivery.seq
        if (incarnation, seq) >= (self.incarnation, self._expected):
            return
        if isinstance(delivery, RawBatch):
            self._found(delivery, report)
        if report.digest_matches is not None and incarnation == self.incarnation:
            self._compared(seq, matches=report.digest_matches, live=not delivery.replayed)
            first_live = self._evidence.first_live
            if report.digest_matches and not delivery.replayed and first_live is not None and seq >= first_live:
                # The state is that of the sender which is heard on this connection, wherever it came from.
                self._evidence.vouched_for(seq)

    def _found(self, delivery: Batch | RawBatch, report: BatchReport) -> None:
        seq, heartbeat = delivery.seq, report.heartbeat
        for each in report.rejected:
            self._count(self.counters.rejected, each.reason, each.count)
        self.counters.heartbeats += heartbeat is not None
        if delivery.incarnation != self.incarnation:
            return
        if report.cleared:
            self._doubts.clear(seq)
        if any(each.loses_events for each in report.rejected):
            self._doubts.reject(seq)
        if heartbeat is not None and delivery.replayed and heartbeat.trust != Trust.EXACT.name:
            self._unfinished_part = seq
            self._doubt_cut_snapshot()
        if heartbeat is not None:
            self._take_heartbeat(seq, heartbeat, live=not delivery.replayed and self.phase not in _APART)

    # --- the sender's heartbeats -----------------------------------------------------------------------------------------

    def _take_heartbeat(self, seq: int, heartbeat: Heartbeat, *, live: bool) -> None:
        sender = self._sender
        if sender.is_another(heartbeat, live=live):
            self._doubts.add(DegradedReason.IDENTITY, seq - 1)
            if sender.may_be_reborn():
                self._due = f"publisher restarted: it is of another life at number {seq} than before"
        if sender.says(seq, heartbeat, live=live):
            self._doubts.discard(DegradedReason.SENDER)
            if sender.trust != Trust.EXACT:
                self._doubts.add(DegradedReason.SENDER, seq)

    def _compared(self, seq: int, *, matches: bool, live: bool) -> None:
        """A consumer's state after batch `seq` is what the sender held then, or something else."""
        if matches:
            self.counters.digests_matched += 1
            self._sender.agreed(seq, live=live)
            self._doubts.agree(seq)
            return
        explained = self._doubts.explains(seq)
        if self._doubts.diverge(seq):
            self.counters.digests_mismatched += not explained
            if self._sender.may_send_again(seq) and self._can_replay:
                self._due = f"what was delivered up to number {seq} is not what its sender holds"

    def _start_over(self, reason: str) -> None:
        """Begin from nothing, as a heartbeat has shown that it is needed."""
        doubted = DegradedReason.SENDER in self._doubts
        if self.phase is Phase.VERIFYING:
            self._restart_with_suspects(reason)
        else:
            self._restart(reason)
        if doubted:
            # What it said of itself it has not taken back.
            self._doubts.add(DegradedReason.SENDER, -1)

    def _silent_at(self) -> float | None:
        """When a sender that promised to speak counts as silent; None where it did not, or does already."""
        return None if self._silent else self._sender.silent_at(self._heard_at)

    def _heard(self) -> None:
        self._silent = False
        self._doubts.discard(DegradedReason.SILENT)

    # --- life and identity -----------------------------------------------------------------------------------------------

    @property
    def _can_replay(self) -> bool:
        return not (DegradedReason.NO_REPLAY in self._doubts or DegradedReason.REPLAY_FOREIGN in self._doubts)

    def _start_life(self) -> None:
        if self._can_replay:
            self._catch_up()
        else:
            self._enter(Phase.FOLLOWING)

    def _restart(self, reason: str) -> None:
        """Another life began (or may have): everything delivered before is void."""
        self._ask = None
        self.counters.discarded += self._pending.clear()
        if self._emitted:
            self.incarnation = max(self.incarnation + 1, self._first_incarnation)
            self.counters.resets += 1
            self._out.append(Reset(self._name, self._rank, self.incarnation, reason))
        self._begin_life()
        self._start_life()

    def _conflict(self, reason: str) -> None:
        """Replay and live stream contradict each other: an unseen restart, or a replay endpoint of somebody else."""
        self.counters.conflicts += 1
        self._conflicts += 1
        if self._conflicts >= self._limits.max_conflicts:
            self._distrust()
            self._doubts.discard(DegradedReason.REPLAY_UNCONFIRMED)
        else:
            self._doubt(DegradedReason.REPLAY_UNCONFIRMED)
        self._restart(reason)

    def _contradicted(self, reason: str) -> None:
        """The newest batch is not what replay has: of one that was not believed before, that is no news."""
        if self._asks_the_foreign:
            self._ask = None
            self._doubts.discard(DegradedReason.REPLAY_UNCONFIRMED)
            self._distrust()
        else:
            self._conflict(reason)

    def _distrust(self) -> None:
        self._doubt(DegradedReason.REPLAY_FOREIGN)
        self._distrusted_at = self._now
        self._asks_the_foreign = False

    def _believe_again(self) -> None:
        """What contradicted the live stream may have been many restarts in a row; whether it agrees now is worth a question."""
        if DegradedReason.REPLAY_FOREIGN in self._doubts:
            self._doubts.discard(DegradedReason.REPLAY_FOREIGN)
            self._doubt(DegradedReason.REPLAY_UNCONFIRMED)
            self._asks_the_foreign = True

    def _distrust_replay(self) -> None:
        """The reply itself names another topic: nothing of it can be used."""
        self._end_snapshot()
        self._distrust()
        if self.phase is Phase.VERIFYING:
            self._unproven()
        else:
            self._give_up()

    def _confirmed(self, seq: int) -> None:
        """Replay and live stream agree on batch `seq`."""
        self._evidence.agreed(seq)
        self._failed_comparisons, self._compare_at, self._paid_until = 0, _AT_ONCE, _AT_ONCE
        self._early_ends = 0
        self._conflicts = self._voided = 0
        self._asks_the_foreign = False
        self._doubts.discard(DegradedReason.REPLAY_UNCONFIRMED)

    # --- live frames -----------------------------------------------------------------------------------------------------

    def _follow(self, live: Live) -> None:
        """A live frame of the connection at hand."""
        seq = live.seq
        if seq <= self._last_live:
            self._went_back(live)
        elif seq == self._expected and self._part < 0:
            self._follow_in_order(seq, live.payload)
        elif seq < self._expected:
            self._last_live = seq
            self._overlap(live)
        else:
            self._last_live = seq
            self._early(live)

    def _follow_in_order(self, seq: int, payload: bytes) -> None:
        self._last_live = seq
        self._deliver(seq, payload, replayed=False)
        if self._newest > seq:
            self._drain()
        if self.phase is not Phase.FOLLOWING:
            self._settle_if_complete()
        self._confirm_soon()

    def _went_back(self, live: Live) -> None:
        if self._last is not None and live.seq == self._last.seq and self._last.is_of(live.payload):
            self.counters.duplicates += 1
            return
        before = self._last_live
        self._restart(f"publisher restarted: number {live.seq} came after {before}")
        self._follow(live)

    def _overlap(self, live: Live) -> None:
        """Replay was faster than the live stream: the same batch must come again."""
        known = self._recent.take(live.seq)
        if known is not None and known != payload_digest(live.payload):
            self._conflict(f"publisher restarted: number {live.seq} came live with another content than replayed")
            self._follow(live)
            return
        self.counters.duplicates += 1
        if known is not None:
            self._confirmed(live.seq)
        else:
            self._has_joint(Anchor(live.seq, live.payload, live=True))
            self._confirm_soon()

    def _early(self, live: Live) -> None:
        """A number beyond the next one: something is missing before it."""
        self._newest = max(self._newest, live.seq)
        waiting = self._pending.get(live.seq)
        if waiting is not None and waiting != live.payload and begins_with_clear(waiting):
            self.counters.duplicates += 1
            return
        if waiting is not None:
            if not self._agree(live.seq, waiting, live.payload, live=True):
                self._follow(live)
            return
        if not self._pending.add(live.seq, live.payload, replayed=False):
            self.counters.overflowed += 1
        if self.phase is Phase.FOLLOWING:
            self._fill()

    def _agree(self, seq: int, known: bytes, found: bytes, *, live: bool) -> bool:
        """Whether two messages show the same batch, of which one came `live` or none did; if not, a new life has begun."""
        if known == found:
            self.counters.duplicates += 1
            if live:
                self._confirmed(seq)
            return True
        self._conflict(f"publisher restarted: number {seq} has two contents")
        return False

    def _suspect(self, live: Live) -> None:
        """A frame whose life is not certain yet; a number that went back makes it certain."""
        waiting = self._suspects.newest
        newest = self._last_live if waiting is None else waiting.seq
        if live.seq <= newest:
            if waiting == live:
                self.counters.duplicates += 1
                return
            self.counters.discarded += len(self._suspects.take())
            if self.phase is Phase.VERIFYING:
                self._restart(f"publisher restarted: number {live.seq} came after {newest}")
                self._follow(live)
                return
        self.counters.overflowed += not self._suspects.add(live)

    def _admit_suspects(self) -> None:
        for live in self._suspects.take():
            self._follow(live)

    def _restart_with_suspects(self, reason: str) -> None:
        """Another life: frames from before the reconnect are the old one's, those after it the new one's."""
        old, suspects = self._suspects.take_new()
        self.counters.discarded += old
        self._restart(reason)
        for live in suspects:
            self._note_connection_of(live)
            self._follow(live)

    # --- replay ----------------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        self._enter(Phase.CATCHING_UP)
        self._ask = self._ask_for_missing()

    def _ask_for_missing(self) -> OpenAsk:
        """From what came by replay and is not proven, so that the answer shows whether it is of the same publisher."""
        evidence = self._evidence
        start = self._expected if evidence.unproven is None else evidence.unproven.seq
        return OpenAsk(start, evidence.unproven, fills=True, joint=evidence.joint)

    def _ask_for_proof(self, *, confirms: bool = False) -> OpenAsk:
        """From the first of what has to be proven; from what is missing, if nothing was delivered yet."""
        joint = self._evidence.joint
        unproven = next(iter(self._evidence.anchors), None)
        if unproven is not None and joint is not None and joint.seq < unproven.seq:
            # It cannot prove that one, yet shows whether the answer is of this publisher at all.
            unproven = joint
        anchor = self._proof.first or unproven or joint or self._last
        start = self._expected if anchor is None else anchor.seq
        joint_before = -1 if joint is None else joint.seq
        return OpenAsk(start, anchor, confirms=confirms, joint=joint, joint_before=joint_before)

    def _fill(self) -> None:
        """Something is missing: ask for it, or say that it is lost where nobody can be asked."""
        if self._can_replay:
            self._catch_up()
        else:
            self._give_up()

    def _brought(self, ask: OpenAsk) -> None:
        """The answer brought something new: its patience starts anew, and that with the answers behind it."""
        self._repeated(ask)
        ask.unanswered = 0

    def _repeated(self, ask: OpenAsk) -> None:
        """The answer goes on. That alone must not begin the count of vain answers anew: each of them repeats its anchors."""
        ask.heard_at = self._now
        ask.useless = 0
        self._doubts.discard(DegradedReason.REPLAY_SILENT)

    def _replayed(self, ask: OpenAsk, reply: ReplayBatch) -> None:
        first, ask.first = ask.first, False
        ask.newest = max(ask.newest, reply.seq)
        ask.useless += 1
        if first:
            self._end_snapshot()
            self._pending.drop_replayed()
        if ask.reads_on:
            self._read_on(ask, reply)
            return
        if ask.anchor is not None:
            if first and ask.fills and reply.seq > ask.anchor.seq:
                self._forgotten(ask, ask.anchor, reply)
                return
            # Until the anchor has come, nothing says whose batches these are.
            if ask.reunites and reply.seq > ask.anchor.seq and (self._last is None or ask.anchor.seq > self._last.seq):
                # This one was lost, or is gone: the next one that waits will do.
                waiting = self._suspects.old_behind(reply.seq - 1)
                if waiting is not None and waiting.seq == reply.seq:
                    ask.anchor = Anchor(waiting.seq, waiting.payload, live=True)
            if reply.seq == ask.anchor.seq:
                self._compare_anchor(ask, ask.anchor, reply)
            elif reply.seq > ask.anchor.seq:
                ask.beyond = True
            return
        if first:
            self._accept_first(ask, reply)
        else:
            self._accept_replayed(ask, reply)

    def _accept_first(self, ask: OpenAsk, reply: ReplayBatch) -> None:
        if begins_with_clear(reply.payload) and ends_with_digest(reply.payload):
            ask.part = reply.seq
        if reply.seq > self._expected:
            self._begins_later(ask, reply)
        self._accept_replayed(ask, reply)

    def _forgotten(self, ask: OpenAsk, anchor: Anchor, reply: ReplayBatch) -> None:
        """What replay has brought, and no live batch has proven, is not there any more: this may be another publisher."""
        if reply.seq >= self._expected and begins_with_clear(reply.payload):
            # It ends all that was before.
            self._evidence.unproven = None
            self._evidence.apart.clear()
            self._pass_anchor(ask)
            self._accept_first(ask, reply)
        else:
            self._restart(f"replay brought number {anchor.seq}, has forgotten it, and no live batch has proven it")

    def _read_on(self, ask: OpenAsk, reply: ReplayBatch) -> None:
        """Nothing is missing; the rest of the answer shows whose it is."""
        joint = ask.joint
        if joint is not None and reply.seq == joint.seq:
            self._compare_joint(joint, reply)
        if self._ask is ask and (joint is None or reply.seq >= joint.seq):
            self._settle()

    def _compare_joint(self, joint: Anchor, reply: ReplayBatch) -> None:
        if joint.is_of(reply.payload):
            self._confirmed(joint.seq)
        elif not begins_with_clear(reply.payload):
            self._contradicted(f"publisher restarted: number {joint.seq} came live with another content than replayed")

    def _begins_later(self, ask: OpenAsk, reply: ReplayBatch) -> None:
        """The answer does not begin with what was asked for. Of a snapshot, nothing before it is needed or will ever come.

        To ask once more for each hole before it would bring, each time, another snapshot that waits here, of some MiB.
        """
        if self._pending.get(reply.seq) != reply.payload and begins_with_clear(reply.payload):
            self._brought(ask)
            self._pending.take(reply.seq)
            while self._expected < reply.seq:
                self._declare_gap_before(reply.seq, compacted=True)
        elif ask.fruitless:
            # Asked again, and again it is not there.
            self._brought(ask)
            ask.fruitless = 0
            came_live = self._pending.peek(reply.seq) == (reply.payload, False)
            self._declare_gap_before(reply.seq, compacted=not came_live and begins_with_clear(reply.payload))

    def _compare_anchor(self, ask: OpenAsk, anchor: Anchor, reply: ReplayBatch) -> None:
        if not anchor.is_of(reply.payload):
            self._anchor_differs(ask, anchor, reply)
            return
        self._repeated(ask)
        if anchor.live:
            self._confirmed(anchor.seq)
            ask.proven = True
        if not ask.fills and anchor.seq < self._expected:
            self._evidence.repeated(anchor)
        ask.reunites |= anchor == self._proof.first
        if ask.reunites and (following := self._to_be_proven(anchor)) is not None:
            ask.anchor = following
            return
        if ask.reunites:
            # Any other one says nothing of the life before a reconnect.
            if not self._proof.is_lost:
                self._doubts.discard(DegradedReason.IDENTITY)
            self._proof = FingerprintChain(is_lost=DegradedReason.IDENTITY in self._doubts)
        following = None if ask.fills else self._evidence.behind(anchor.seq)
        if following is not None:
            ask.anchor = following
            return
        self._pass_anchor(ask)
        if self.phase is Phase.VERIFYING:
            self._enter(Phase.CATCHING_UP)
            self._admit_suspects()
        elif ask.confirms and self._expected > self._newest and not self._evidence.is_missing:
            # It was asked for that batch alone. What is newer comes live; taken from here, it would count as a hole.
            self.counters.complete += 1
            self._settle()

    def _anchor_differs(self, ask: OpenAsk, anchor: Anchor, reply: ReplayBatch) -> None:
        reason = f"publisher restarted: number {anchor.seq} now has another content"
        if self.phase is Phase.VERIFYING:
            self._restart_with_suspects(reason)
        elif not begins_with_clear(reply.payload):
            self._contradicted(reason)
        elif ask.fills or ask.reunites or anchor == self._proof.first:
            self._restart(reason)
        else:
            # It has collapsed the batch meanwhile, or never had it: nothing is shown, one way or the other.
            self._repeated(ask)
            if self._evidence.anchors:
                self._cannot_be_proven(reason)
            else:
                self._comparison_failed()
                self._pass_anchor(ask)

    def _pass_anchor(self, ask: OpenAsk) -> None:
        """What follows in the answer is history."""
        ask.anchor = None
        ask.expected_before = self._expected
        ask.beyond = False
        if not ask.fills:
            ask.fruitless = 0

    def _to_be_proven(self, anchor: Anchor) -> Anchor | None:
        """What else of before a reconnect the answer must repeat, behind an anchor that it has repeated.

        A life may be like another one up to some number only: a relay that was killed, and has no journal, tells the same
        batches again, and heartbeats elsewhere. So the anchors behind it count, and each batch that waits.
        """
        following = self._proof.behind(anchor.seq)
        if following is not None:
            return following
        waiting = self._suspects.old_behind(anchor.seq) if self.phase is Phase.VERIFYING else None
        return None if waiting is None else Anchor(waiting.seq, waiting.payload, live=True)

    def _accept_replayed(self, ask: OpenAsk, reply: ReplayBatch) -> None:
        seq, payload = reply.seq, reply.payload
        ask.beyond |= seq >= ask.start
        is_part = self._follow_snapshot(ask, reply)
        if seq < self._expected:
            self.counters.duplicates += 1
            if ask.joint is not None and seq == ask.joint.seq:
                self._compare_joint(ask.joint, reply)
            return
        self._newest = max(self._newest, seq)
        waiting, was_replayed = self._pending.peek(seq) or (None, False)
        if waiting is not None and waiting != payload and (is_part or begins_with_clear(payload)):
            # It says what is missing before as well; the batch of its number needs to wait no longer.
            self._pending.take(seq)
            waiting = None
        elif waiting is not None and not self._agree(seq, waiting, payload, live=not was_replayed):
            return
        if seq == self._expected:
            self._brought(ask)
            if waiting is None:
                self._deliver(seq, payload, replayed=True)
                self._part = seq if is_part else -1
            self._drain()
            self._settle_if_complete()
            return
        if waiting is None and self._pending.add(seq, payload, replayed=True):
            ask.heard_at = self._now
            if seq > ask.reached:
                ask.reached = seq
                self._brought(ask)
        if self.phase is Phase.FOLLOWING:
            self._enter(Phase.CATCHING_UP)

    def _follow_snapshot(self, ask: OpenAsk, reply: ReplayBatch) -> bool:
        """Whether this may be a part of a snapshot that is several batches.

        An answer begins with them, in a row, with a digest at the end of each. Their numbers are those of batches that a live
        stream has, too; what is between two parts must be neither lost nor another's.
        """
        seq = reply.seq
        if seq in (ask.part, ask.part + 1) and ends_with_digest(reply.payload):
            ask.part = seq
            return True
        if seq == self._part + 1:
            # What is no part follows the last one of them.
            self._part = -1
        else:
            self._end_snapshot()
        ask.part = -2
        return False

    def _end_snapshot(self) -> None:
        """No part of a snapshot comes any more, whether or not all have come."""
        if self._part >= 0:
            self._cut_part, self._part = self._part, -1
            self._doubt_cut_snapshot()
            self._drain()

    def _doubt_cut_snapshot(self) -> None:
        if self._cut_part >= 0 and self._cut_part == self._unfinished_part:
            self._doubts.add(DegradedReason.LOST, self._cut_part)

    def _end_of_reply(self, ask: OpenAsk) -> None:
        self._end_snapshot()
        if ask.anchor is not None:
            self.counters.truncated += 1
            self._anchor_missing(ask, ask.anchor)
            return
        if ask.reads_on:
            self._settle()
            return
        if self._expected > self._newest:
            self.counters.complete += 1
        else:
            self.counters.truncated += 1
            ask.fruitless = 0 if self._expected > ask.expected_before else ask.fruitless + 1
            if ask.fruitless < self._limits.max_incomplete_answers:
                self._ask_again(ask)
                return
            ask.fruitless = 0
            self._declare_gap_before_pending()
        if self._expected <= self._newest or (ask.beyond and self._newest > self._last_live):
            # Missing still; or nothing says that this was all: ask until an answer brings nothing.
            self._ask_again(ask)
        else:
            if ask.confirms and self._evidence.is_missing:
                # An answer that a socket has cut holds more than its first batch.
                self._early_ends += ask.start == ask.newest < ask.joint_before
                if self._early_ends >= self._limits.max_incomplete_answers:
                    # It repeats what replay has brought, and nothing that came live since: another stream, or another life.
                    ends = f"replay ends at number {ask.newest}, before live number {ask.joint_before}"
                    self._contradicted(f"publisher restarted: {ends}")
                    return
                self._comparison_failed()
            self._settle()

    def _ask_again(self, ask: OpenAsk, *, fresh: bool = False) -> None:
        """The same from its beginning: this answer may be of another process than the one before."""
        if ask.fills or ask.anchor is None:
            if ask.fruitless and ask.anchor is None:
                # An answer may lose any of its messages but the first one: that has to be what is missing.
                self._evidence.begin_apart()
            again = self._ask_for_missing()
        else:
            again = self._ask_for_proof(confirms=ask.confirms)
            again.beyond = ask.beyond
        again.fresh, again.unanswered, again.fruitless, again.reached = fresh, ask.unanswered, ask.fruitless, ask.reached
        self._ask = again

    def _anchor_missing(self, ask: OpenAsk, anchor: Anchor) -> None:
        """The answer ended without the batch that would prove who is speaking."""
        ask.fruitless += 1
        forgotten = "replay starts after it" if ask.beyond else "replay ends before it"
        reason = f"publisher restarted, or forgot number {anchor.seq}: {forgotten}"
        if ask.fruitless < self._limits.max_incomplete_answers:
            self._ask_again(ask)
        elif not self._replay_seen and ask.start > 0:
            # Does it hold anything at all? Then it has forgotten, or never known, the anchor.
            self._ask = OpenAsk(
                0, anchor, fresh=False, fruitless=ask.fruitless, confirms=ask.confirms, fills=ask.fills, joint=ask.joint
            )
        elif not self._replay_seen and self.phase is Phase.FOLLOWING and anchor is not self._proof.first:
            # A replay endpoint that never held anything (buffer_steps=0) proves nothing either way.
            self._comparison_failed()
            self._ask = None
        elif not self._replay_seen:
            self._unproven()
        elif self.phase is Phase.VERIFYING:
            self._restart_with_suspects(reason)
        elif not ask.beyond or self._asks_the_foreign:
            # It holds nothing as new as what came live: another life, or another stream.
            self._contradicted(reason)
        elif self._last is not None and self._last.seq == anchor.seq and not ask.confirms:
            self._restart(reason)
        elif self._evidence.anchors:
            self._cannot_be_proven(reason)
        else:
            # A busy stream has pushed the anchor out of a small buffer; the next probe tries with a newer one. What one from
            # before a reconnect would prove, nobody can any more: that was doubted when it was not proven at once.
            self._comparison_failed()
            self._ask = None
            if ask.reunites or anchor == self._proof.first:
                self._proof = FingerprintChain(is_lost=DegradedReason.IDENTITY in self._doubts)

    def _cannot_be_proven(self, reason: str) -> None:
        """Replay has brought something that it holds no more: no answer can show any longer whose that was.

        All is asked for once more, unless that was in vain before: then the buffer is too small, and only a clear helps.
        """
        self._comparison_failed()
        self._ask = None
        if self._voided < self._limits.max_consecutive_resyncs:
            self._voided += 1
            self._restart(reason)

    def _unproven(self) -> None:
        self._comparison_failed()
        self._ask = None
        self._doubt(DegradedReason.IDENTITY)
        if self.phase is Phase.VERIFYING:
            self._go_on_unproven()
        if self._expected <= self._newest and self._ask is None:
            self._fill()

    def _go_on_unproven(self) -> None:
        self._proof.needs(*self._suspects.around_seams())
        self._proof.wants_next = not self._suspects.has_new
        self._enter(Phase.FOLLOWING)
        self._admit_suspects()

    def _patience_ends(self, ask: OpenAsk) -> float:
        return ask.heard_at + (self._limits.replay_timeout if ask.first else self._limits.reply_idle_timeout)

    def _unanswered(self, ask: OpenAsk) -> None:
        """Time is up: nothing came, or nothing new."""
        self._end_snapshot()
        self.counters.unanswered += 1
        ask.unanswered = 0 if self._expected > ask.expected_before else ask.unanswered + 1
        if ask.unanswered < self._limits.max_unanswered_requests:
            self._ask_again(ask, fresh=True)
            return
        self._doubt(DegradedReason.REPLAY_SILENT)
        self._probed_at = self._now
        self._probes += 1
        if self.phase is Phase.VERIFYING:
            self._unproven()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Nobody will bring what is missing: say so and go on."""
        self._comparison_failed()
        self._ask = None
        while self._expected <= self._newest:
            self._declare_gap_before_pending()
        if self.phase is not Phase.FOLLOWING:
            self._enter(Phase.FOLLOWING)

    # --- checks of a quiet stream ----------------------------------------------------------------------------------------

    def _probe_due(self) -> float:
        quiet = self._limits.idle_before_probe
        if self._probes == 0:
            return self._heard_at + quiet
        return self._probed_at + min(quiet * (1 << min(self._probes, 16)), self._limits.max_probe_interval)

    def _probe(self) -> None:
        """Ask from the newest batch: it comes back if the life is the same, and after it whatever was lost at the tail."""
        self._probed_at = self._now
        self._probes += 1
        self._ask = self._ask_for_proof()

    def _confirm_soon(self) -> None:
        """Ask for a live batch that has to be compared: that shows whether the replay endpoint is the same stream's.

        At once, and later and later where that was in vain: the endpoint does not answer, or no longer holds the batch.
        """
        joint = self._evidence.joint
        if joint is not None and self._ask is None and self._can_replay and self._now >= self._compare_at:
            self._ask = self._ask_for_proof(confirms=True)

    def _comparison_failed(self) -> None:
        """Replay did not say what it has under the number of a live batch."""
        pause = self._limits.idle_before_probe * (1 << min(self._failed_comparisons, 16))
        self._failed_comparisons += 1
        self._compare_at = self._now + min(pause, self._limits.max_probe_interval)

    # --- deliveries ------------------------------------------------------------------------------------------------------

    def _deliver(self, seq: int, payload: bytes, *, replayed: bool) -> None:
        self._expected = seq + 1
        self._newest = max(self._newest, seq)
        if replayed:
            self.counters.gaps_repaired += self._last is not None and self._last.live
            self._remember(seq, payload)
        before, self._last = self._last, Anchor(seq, payload, not replayed)
        if self._proof.wants_next:
            self._proof.goes_on(self._last)
        if replayed:
            is_needed = before is not None and before.live and not (self._ask is not None and self._ask.proven)
            self._evidence.brought(self._last, before if is_needed else None)
        elif self._evidence.is_missing:
            self._has_joint(self._last, payload)
        self._emitted = True
        self.counters.delivered += 1
        if self._decode is None:
            self._out.append(RawBatch(self._name, self._rank, self.incarnation, seq, replayed, payload, self.topic))
        else:
            self._read(self._decode(payload), seq, payload, replayed)

    def _deliver_run(self, first: int, payloads: Sequence[bytes]) -> None:
        """The same for live payloads with nothing waiting behind them."""
        if self._decode is not None:
            for seq, payload in enumerate(payloads, first):
                self._deliver(seq, payload, replayed=False)
            return
        if self._proof.wants_next:
            self._proof.goes_on(Anchor(first, payloads[0], live=True))
        if self._evidence.is_missing:
            self._has_joint(Anchor(first, payloads[0], live=True))
            if self._evidence.anchors and any(map(begins_with_clear, payloads)):
                self._evidence.cleared()
        count = len(payloads)
        name, rank, life, topic = repeat(self._name), repeat(self._rank), repeat(self.incarnation), repeat(self.topic)
        self._out.extend(map(RawBatch, name, rank, life, range(first, first + count), repeat(False), payloads, topic))
        self._expected = first + count
        self._newest = first + count - 1
        self._last = Anchor(self._newest, payloads[-1], live=True)
        if self._evidence.is_missing:
            self._has_joint(self._last)
        self._emitted = True
        self.counters.delivered += count

    def _has_joint(self, joint: Anchor, payload: bytes = b"") -> None:
        """A live batch has to be compared, and has this payload if it is delivered.

        The open answer may repeat the first one of them; the newest one is asked for later.
        """
        evidence, ask = self._evidence, self._ask
        if evidence.anchors and begins_with_clear(payload):
            evidence.cleared()
        evidence.joint = joint
        if ask is not None:
            known, unproven = ask.joint, evidence.unproven
            if known is None or (unproven is not None and known.seq < unproven.seq):
                ask.joint = joint

    def _read(self, decoded: Decoded, seq: int, payload: bytes, replayed: bool) -> None:
        """Hand out what was decoded, and note what it says about the stream."""
        batch, rejected = decoded.batch, decoded.rejected
        delivery = Batch(
            self._name,
            self._rank,
            self.incarnation,
            seq,
            batch.ts,
            batch.events,
            replayed,
            payload,
            self.topic,
            rejected,
        )
        self._out.append(delivery)
        report = inspect_events(batch.events, rejected)
        if report is not None:
            self._found(delivery, report)

    def _remember(self, seq: int, payload: bytes) -> None:
        self.counters.replayed += 1
        self._sender.replayed(self._now)
        if self._silent:
            self._heard()
        if not begins_with_clear(payload):
            # A snapshot has another content than the batch of its number.
            self._recent.add(seq, payload)

    def _drain(self) -> None:
        """Deliver what waited for the batch before it, unless the next part of a snapshot may take its place."""
        while self._part < 0 and (found := self._pending.take(self._expected)) is not None:
            self._deliver(self._expected, found[0], replayed=found[1])

    def _declare_gap_before_pending(self) -> None:
        first = self._pending.first()
        if first is None or (waiting := self._pending.peek(first)) is None:
            self._declare_gap(self._newest, compacted=False)
            return
        payload, replayed = waiting
        # A live batch that begins with a clear is the engine's own, and not a snapshot.
        self._declare_gap(first - 1, compacted=replayed and begins_with_clear(payload))

    def _declare_gap_before(self, seq: int, *, compacted: bool) -> None:
        """Give up what is missing before the next batch that waits or `seq`, the number of an answer's first batch.

        A gap before a batch that waits is a loss, though a snapshot with a higher number follows: until the snapshot is
        applied, the state lacks what was in the gap.
        """
        last = min(seq, self._pending.first() or seq) - 1
        self._declare_gap(last, compacted=compacted and last == seq - 1)

    def _declare_gap(self, last: int, *, compacted: bool) -> None:
        count = last - self._expected + 1
        self._out.append(Gap(self._name, self._rank, self._expected, last, self.incarnation, compacted))
        self._emitted = True
        self._expected = last + 1
        if compacted:
            self.counters.compacted += count
        else:
            self.counters.gaps += 1
            self.counters.lost += count
            self._doubt(DegradedReason.LOST)
        self._drain()

    def _settle_if_complete(self) -> None:
        """Catching up ends early when live frames reach to where replay has come."""
        ask = self._ask
        verifying = ask is not None and ask.anchor is not None
        if self._expected > self._newest and self._newest == self._last_live and not verifying and self._part < 0:
            if ask is not None and ask.sent:
                self.counters.complete += 1
                # It was needed for a live batch, and is not one of many that lead nowhere.
                self._paid_until = _AT_ONCE
                if self._evidence.is_missing and ask.joint is not None:
                    ask.reads_on = True
                    if self.phase is not Phase.FOLLOWING:
                        self._enter(Phase.FOLLOWING)
                    return
            self._settle()

    def _settle(self) -> None:
        self._ask = None
        if self.phase is not Phase.FOLLOWING:
            self._enter(Phase.FOLLOWING)
        self._confirm_soon()

    def _doubt(self, doubt: DegradedReason) -> None:
        """A doubt arises about everything delivered or given up so far, not about what follows."""
        self._doubts.add(doubt, self._expected - 1)

    def _enter(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise AssertionError(f"no transition from {self.phase} to {phase}")
        self.phase = phase

    @staticmethod
    def _count(counter: dict[str, int], reason: str, count: int = 1) -> None:
        counter[reason] = counter.get(reason, 0) + count


_PACED: Final = "many replay requests in a row have not shown that nothing is missing; the next one has to wait"
_JOINED: Final = "a live batch is compared with what replay says of its number"
_AT_ONCE: Final = float("-inf")
_UNPROVEN: Final = frozenset({DegradedReason.REPLAY_UNPROVEN})
