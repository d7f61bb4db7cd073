"""The relay's own stream: encodes and numbers each batch, writes it into the journal, and then sends it to consumers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final

import msgspec

from kvevents.errors import UnknownSourceError
from kvevents.events import AllBlocksCleared, BlockRemoved, EventBatch, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import ApplyResult, PrefixIndex
from kvevents.publisher.compaction import SequencedPayload
from kvevents.publisher.event_server import EventServer
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.relay.journal import Journal
from kvevents.relay.journal_format import Batches, Origin
from kvevents.stream import BatchReport, RawBatch, Reset, Trust, trust_order
from kvevents.wire import DEFAULT_WIRE_LIMITS, decode_batch, encode_batch
from kvevents.wire.dialects import DECLARED_DIALECT, Dialect, detect_dialect, dialect_for

# --- encoding: the dialect of the stream, and payloads that consumers accept

UNKNOWN_FORM: Final = ""
MAX_SAMPLED_PAYLOADS: Final = 64
"""Number of payloads from which the form is detected. These suffice: half of all unsigned hashes exceed the signed range."""

_DIALECTS_BY_FORM: Final[dict[str, Dialect | None]] = {
    UNKNOWN_FORM: None,
    "map": DECLARED_DIALECT,
    "map signed": dialect_for("sglang"),
    "map batch": dialect_for("vllm", "main@0181ea3173e5"),
    "array": dialect_for("vllm", "0.22"),
    "array signed": dialect_for("sglang", "0.5.9"),
}
"""Forms of a stream (how events are encoded, and whether hashes are signed), each with a dialect that has the fields of all
dialects of that form. Consumers of older releases skip fields that they do not know; in arrays these fields are at the end."""


class DialectEncoder:
    """Encodes the relay's own batches for one stream. `encode` is thread-safe.

    If `is_fixed`, the encoder uses `dialect`, or the default encoding if `dialect` is None. Otherwise the relay forwards
    payloads as received, and the encoder detects the form of the stream (`_DIALECTS_BY_FORM`) from the payloads.
    """

    def __init__(
        self, dialect: Dialect | None, *, is_fixed: bool, max_payload: int = DEFAULT_WIRE_LIMITS.max_payload_bytes
    ) -> None:
        self.form = UNKNOWN_FORM
        """The detected form of the stream, a key of `_DIALECTS_BY_FORM`. A checkpoint stores the form for the next process."""
        self.max_payload: Final = max_payload
        """Maximum number of bytes of a payload that consumers accept."""
        self._is_fixed: Final = is_fixed
        self._dialect = dialect
        self._examined = 0
        self._newest = b""

    def restore(self, form: str) -> None:
        """Use the form that an earlier process detected, unless the dialect is fixed."""
        if not self._is_fixed and form in _DIALECTS_BY_FORM:
            self._set_form(form)

    def observe(self, payloads: Sequence[bytes]) -> None:
        """Detect the form from the first `MAX_SAMPLED_PAYLOADS` payloads, before they are sent."""
        if self._is_fixed:
            return
        self._newest = payloads[-1]
        for payload in payloads[: MAX_SAMPLED_PAYLOADS - self._examined]:
            self._examined += 1
            self._examine_payload(payload)

    def observe_newest(self) -> None:
        """Examine the newest observed payload, even if `MAX_SAMPLED_PAYLOADS` earlier payloads have been examined."""
        newest, self._newest = self._newest, b""
        if newest:
            self._examine_payload(newest)

    def restart_detection(self) -> None:
        """Examine payloads again, because the next incarnation of the upstream can be another release of the engine."""
        self._examined = 0

    def encode(self, batch: EventBatch) -> bytes:
        """Encode a batch as one payload. Raises `EncodeError`."""
        return encode_batch(batch, self._dialect)

    def encode_payloads(self, batch: EventBatch) -> list[bytes]:
        """Encode a batch as several payloads if one would exceed `max_payload`. Raises `EncodeError`."""
        return encode_payloads(batch, self._dialect, self.max_payload)

    def _examine_payload(self, payload: bytes) -> None:
        events = decode_batch(payload).batch.events
        dialect = detect_dialect(payload)
        if not events or dialect is None:
            return
        if dialect.batch_form == "map":
            self._set_form("map batch")
            return
        has_hashes = any(not isinstance(event, AllBlocksCleared) and event.block_hashes for event in events)
        # Hashes below 2**63 do not show whether hashes are signed, so the earlier result remains.
        was_signed = self.form.startswith(dialect.event_form) and self.form.endswith("signed")
        is_signed = was_signed or (dialect.has_signed_hashes and has_hashes)
        self._set_form(f"{dialect.event_form} signed" if is_signed else dialect.event_form)

    def _set_form(self, form: str) -> None:
        self.form, self._dialect = form, _DIALECTS_BY_FORM[form]


def encode_payloads(
    batch: EventBatch, dialect: Dialect | None, max_payload: int = DEFAULT_WIRE_LIMITS.max_payload_bytes
) -> list[bytes]:
    """Encode a batch as one or several payloads that consumers accept. A single event can still exceed `max_payload`.

    Raises `EncodeError`.
    """
    payload = encode_batch(batch, dialect)
    events: list[Any] = batch.events
    if len(events) < 2 or (len(payload) <= max_payload and len(events) <= DEFAULT_WIRE_LIMITS.max_events):
        return [payload]
    middle = len(events) // 2
    halves = (KVEventBatch(batch.ts, part, batch.data_parallel_rank) for part in (events[:middle], events[middle:]))
    return [payload for half in halves for payload in encode_payloads(half, dialect, max_payload)]


def without_heartbeats(events: list[KVEvent]) -> list[KVEvent]:
    """Remove heartbeats from events. A heartbeat describes its sender's stream, so the relay must not forward it."""
    remaining = list[KVEvent]()
    for event in events:
        if not isinstance(event, BlockRemoved) or event.heartbeat is None:
            remaining.append(event)
        elif event.block_hashes:
            remaining.append(msgspec.structs.replace(event, heartbeat=None))
    return remaining


def loses_events(report: BatchReport) -> bool:
    """Return whether events of a batch could not be decoded."""
    return any(rejection.loses_events for rejection in report.rejected)


# --- numbers and heartbeats

OWN_UPSTREAM: Final = 65_535
"""The upstream that the journal records for batches that the relay itself creates: heartbeats, clears and empty batches."""
RETRACTION_OFFSET: Final = 32_768
"""Added to the ordinal of an upstream, this number marks batches in which the relay itself removes the upstream's blocks."""
_MAX_REASON_CHARACTERS: Final = 1_000
"""Maximum number of characters of a heartbeat's reason."""
_EMPTY_DIGEST: Final = "0" * 32


class IndexedStream:
    """One stream of an index. `apply` numbers the payloads."""

    def __init__(self, index: PrefixIndex, name: str) -> None:
        self._index: Final = index
        self._name: Final = name
        self._incarnation = self._seq = 0
        self.estimate = ""
        """Why matches of the stream are estimates, as in `BatchReport`."""

    def apply(self, payloads: Sequence[bytes]) -> dict[int, ApplyResult]:
        """Apply the next payloads. Return the results of those that had findings or were not applied, by position."""
        first = self._seq
        self._seq += len(payloads)
        applied = self._index.apply_payloads(self._name, self._incarnation, first, payloads)
        estimates = [outcome.report.estimate for outcome in applied.values() if outcome.report is not None]
        self.estimate = next((estimate for estimate in reversed(estimates) if estimate is not None), self.estimate)
        return applied

    def reset(self) -> None:
        """Remove all blocks of the stream."""
        self._incarnation += 1
        self._seq, self.estimate = 0, ""
        self._index.apply(Reset(self._name, 0, self._incarnation, "reset"))

    def digest(self) -> str:
        """Return `PrefixIndex.digest` of the stream."""
        with suppress(UnknownSourceError):
            return self._index.digest(self._name)
        return _EMPTY_DIGEST

    def matches_attestation(self, attestation: int) -> bool | None:
        """Return whether the stream's blocks match an attestation (`Heartbeat.attestation`); None if that is unknown."""
        if not any(worker.source == self._name for worker in self._index.workers()):
            return attestation == 0
        return self._index._compare(self._name, 0, None, None, attestation)[1]  # noqa: SLF001 - only the relay needs it

    def key_of(self, rank: int | None, block_hash: int) -> int | None:
        """Return the block key of a resident block of a rank; None if the block is not resident or is an orphan."""
        return self._index._key_of(self._name, 0, rank, block_hash)  # noqa: SLF001 - only the relay needs keys of blocks

    @property
    def blocks(self) -> int:
        """Number of resident blocks on all tiers."""
        return sum(worker.blocks for worker in self._index.workers() if worker.source == self._name)


class OutputSequencer:
    """For each batch: assigns its number, applies it to `state`, appends it to the journal and sends it, in this order.

    `state` has the blocks that consumers hold. `journal` is None for a relay without a journal. `next_number` is the first
    number to assign; if it is above 0, consumers might not know that the previous number was assigned.
    """

    def __init__(
        self,
        event_server: EventServer,
        state: IndexedStream,
        journal: Journal | None,
        encoder: DialectEncoder,
        next_number: int,
        heartbeat: float,
    ) -> None:
        self.next_number = next_number
        self.skipped_numbers = 0
        """Number of sequence numbers that this process has skipped."""
        self.heartbeats = 0
        """Number of heartbeats that were sent."""
        self.batches_since_heartbeat = 0
        self._event_server: Final = event_server
        self.state: Final = state
        self._journal: Final = journal
        self.encoder: Final = encoder
        self._heartbeat: Final = heartbeat
        self._is_newest_unseen = next_number > 0
        """Whether consumers might not know that the newest number was assigned."""

    def forward(self, ordinal: int, origins: Sequence[RawBatch], payloads: Sequence[bytes]) -> dict[int, ApplyResult]:
        """Send `payloads`, which were made from batches of one upstream. Return the outcomes as `IndexedStream.apply` does.

        If some events of a payload cannot be decoded, a number is skipped before that payload. A payload of which nothing can
        be decoded is not sent.
        """
        self.encoder.observe(payloads)
        applied = self.state.apply(payloads)
        first = 0
        for at, outcome in applied.items():
            report = outcome.report
            if report is None or not (report.heartbeat or loses_events(report)):
                continue
            self._send(ordinal, payloads[first:at], origins[first:at])
            self._send_changed(ordinal, origins[at], payloads[at], report)
            first = at + 1
        self._send(ordinal, payloads[first:], origins[first:])
        return applied

    def record_origin(self, ordinal: int, batches: Sequence[RawBatch]) -> None:
        """Record the newest of the batches from which the next payloads are made.

        The journal has only the changed payloads. After a kill, the upstream's replay must contain this batch.
        """
        newest = batches[-1]
        if self._journal is not None:
            digest = sha256(newest.payload).digest()
            self._journal.set_origin(ordinal, Origin(newest.incarnation, newest.seq, digest))

    def send_events(self, events: Iterable[KVEvent], rank: int | None = None) -> None:
        """Send a batch that the relay itself creates, for one rank or for all ranks."""
        self.encoder.observe_newest()
        self.send_payloads([self.encoder.encode(KVEventBatch(time.time(), list(events), rank))])

    def send_payloads(self, payloads: Sequence[bytes], upstream: int = OWN_UPSTREAM) -> None:
        """Send payloads that the relay itself creates. If the relay is killed, the journal has all of them or none."""
        self.state.apply(payloads)
        self._send(upstream, payloads)

    def send_heartbeat(self, trust: Trust, attestation: int | None = None) -> None:
        """Send a heartbeat with the digest of the blocks that consumers hold, and with `attestation` if it is not None."""
        self.heartbeats += 1
        reason = trust.reason[:_MAX_REASON_CHARACTERS]
        incarnation = self._event_server.incarnation
        heartbeat = Heartbeat(self.state.digest(), self._heartbeat, trust.name, reason, incarnation, attestation)
        self.send_events([BlockRemoved([], heartbeat=heartbeat)])
        self.batches_since_heartbeat = 0

    def skip_number(self) -> None:
        """Skip a number. Consumers notice the gap when the next number arrives."""
        if self._journal is not None:
            self._journal.skip(self.next_number)
        self.next_number += 1
        self.skipped_numbers += 1
        self._is_newest_unseen = True

    def flush_skipped(self) -> None:
        """Send an empty batch if the newest number was skipped, so that consumers notice the gap."""
        if self._is_newest_unseen:
            self.send_events([])

    def _send_changed(self, ordinal: int, origin: RawBatch, payload: bytes, report: BatchReport) -> None:
        """Remove the heartbeat from a payload and send the payload; skip a number before it if events are missing."""
        if loses_events(report):
            # The number is skipped first: a relay that is killed after this step skips a second number, but hides no loss.
            self.skip_number()
        parts = [payload]
        if report.heartbeat is not None:
            batch = decode_batch(payload).batch
            remaining = KVEventBatch(batch.ts, without_heartbeats(batch.events), batch.data_parallel_rank)
            parts = self.encoder.encode_payloads(remaining)
        for part in parts:
            if len(part) <= self.encoder.max_payload:
                self._send(ordinal, [part], [origin])
            elif part is not payload:
                self.skip_number()

    def _send(self, upstream: int, payloads: Sequence[bytes], origins: Sequence[RawBatch] = ()) -> None:
        """Append payloads to the journal and send them. `origins` are the upstream batches of the payloads."""
        if not payloads:
            return
        if self._journal is not None:
            zeros = [0] * len(payloads)
            incarnations, seqs = [origin.incarnation for origin in origins], [origin.seq for origin in origins]
            upstreams = [upstream] * len(payloads)
            self._journal.append(Batches(self.next_number, upstreams, incarnations or zeros, seqs or zeros, list(payloads)))
        numbered: list[SequencedPayload] = list(enumerate(payloads, self.next_number))
        self._event_server.send(numbered)
        self.next_number += len(payloads)
        self.batches_since_heartbeat += len(payloads)
        self._is_newest_unseen = False


class HeartbeatSchedule:
    """Sends heartbeats periodically, when trust changes, and before the newest heartbeat leaves the replay buffer.

    `heartbeat` is the period that each heartbeat announces. `trust_interval` is the minimum time between two heartbeats if
    trust has risen or its reason has changed. Both arguments are in seconds.
    """

    def __init__(
        self,
        sequencer: OutputSequencer,
        buffer: ReplayBuffer,
        clock: Callable[[], float],
        *,
        heartbeat: float,
        trust_interval: float,
    ) -> None:
        self._sequencer: Final = sequencer
        self._buffer: Final = buffer
        self._clock: Final = clock
        self._heartbeat: Final = heartbeat
        self._trust_interval: Final = min(heartbeat, trust_interval)
        self._sent_at = -math.inf
        self._sent_trust: Trust | None = None
        """Trust in the previous heartbeat."""

    def send_if_due(self, trust: Trust) -> None:
        """Send a heartbeat if it is due, or if trust has changed; send a drop of trust at once."""
        sent = self._sent_trust
        is_same = sent is not None and (trust.name, trust.reason) == (sent.name, sent.reason)
        if self._clock() >= self._sent_at + (self._heartbeat if is_same else self._trust_interval):
            self.send(trust)
        else:
            self.send_if_lower(trust)

    def send_if_lower(self, trust: Trust) -> None:
        """Send a heartbeat if trust is lower than in the previous heartbeat or, before the first heartbeat, than EXACT."""
        if trust_order(trust.name) < trust_order("EXACT" if self._sent_trust is None else self._sent_trust.name):
            self.send(trust)

    def send(self, trust: Trust, attestation: int | None = None) -> None:
        """Send a heartbeat, even if none is due; `attestation` is about all batches that were sent before it."""
        self._sent_trust, self._sent_at = trust, self._clock()
        self._sequencer.send_heartbeat(trust, attestation)

    @property
    def is_repeat_due(self) -> bool:
        """Whether half of the replay buffer is newer than the newest heartbeat, and batches have already left the buffer.

        A consumer that starts late gets a snapshot, which has no trust, and then the buffered batches. If a heartbeat is among
        these batches, the consumer learns the trust.
        """
        half = max(1, len(self._buffer) // 2)
        return bool(self._sent_trust and self._buffer.has_evicted and self._sequencer.batches_since_heartbeat >= half)
