"""Checkpoints and snapshots that a relay writes into its journal, and how a relay continues from a journal.

A *relay checkpoint* states how far each upstream was followed. A snapshot of the journal contains the history of the replay
buffer and, if upstreams share the stream, which upstream owns which blocks. Without a journal, nothing is written, and the
checkpoints stay in memory.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, repeat
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from kvevents.events import AllBlocksCleared, KVEventBatch
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.relay.journal import Journal
from kvevents.relay.journal_format import ForwardedBatch
from kvevents.relay.journal_recovery import RecoveredJournal
from kvevents.relay.output_sequencer import (
    OWN_UPSTREAM,
    RETRACTION_OFFSET,
    DialectEncoder,
    IndexedStream,
    OutputSequencer,
    encode_payloads,
)
from kvevents.relay.settings import RelayLimits, RelaySettings
from kvevents.relay.transform import PassThrough, Transform, expressible_placement
from kvevents.relay.upstreams import Position, UpstreamBlocks, Upstreams, resume_point
from kvevents.settings import build_decoder_now
from kvevents.stream import Checkpoint, DegradedReason, Fingerprint, Gap
from kvevents.subscriber import StreamStatus
from kvevents.wire import decode_batch

BlocksKey: TypeAlias = tuple[int, int]
"""The ordinal of an upstream, and a rank in the upstream's batches."""
_OWNERSHIP_PREFIX: Final = b"\xc1aside"
"""First bytes of a snapshot part that holds an `Ownership`. No payload of a batch starts with these bytes."""


@build_decoder_now
class RelayCheckpoint(msgspec.Struct, frozen=True):
    """Positions of the upstreams, and the state that a later process needs to continue."""

    fingerprint: str
    """`RelaySettings.fingerprint`; a relay with a different fingerprint sends a different stream."""
    checkpoints: list[Checkpoint]
    """The checkpoint of each upstream, by ordinal."""
    form: str = ""
    """The form of the stream, as in `DialectEncoder.form`; empty if it was not detected."""
    has_salted_prompts: bool = False
    """Whether block keys of a prompt with a salt were forwarded. The journal has no salts, so a later process cannot compute
    the keys of the prompt's next blocks."""


@build_decoder_now
class Ownership(msgspec.Struct, frozen=True):
    """The owners of the blocks of a shared stream, or of some of these blocks."""

    number: int = -1
    """The number of the last batch that the ownership covers."""
    blocks: list[tuple[BlocksKey, Any]] = []
    """Pieces of `UpstreamBlocks.dump`, each with its upstream and rank. Several `Ownership` records can share the pieces."""


# --- writing checkpoints and snapshots


class CheckpointWriter:
    """Writes checkpoints and snapshots of one relay into its journal."""

    def __init__(
        self,
        journal: Journal | None,
        fingerprint: str,
        upstreams: Upstreams,
        transforms: Sequence[PassThrough | Transform],
        sequencer: OutputSequencer,
        buffer: ReplayBuffer,
        checkpoints: Sequence[Checkpoint],
        limits: RelayLimits,
    ) -> None:
        self._journal: Final = journal
        self._fingerprint: Final = fingerprint
        self._upstreams: Final = upstreams
        self._transforms: Final = transforms
        self._sequencer: Final = sequencer
        self._buffer: Final = buffer
        self._limits: Final = limits
        self.checkpoints = list(checkpoints)
        """The checkpoints that were written most recently, by ordinal of the upstream."""
        self._written_number = -1
        """Value of `next_number` at the newest call of `store_checkpoints`."""
        self._written_at = self._snapshot_tried_at = -math.inf
        self._degraded_reasons: list[frozenset[DegradedReason]] = []
        """Degraded reasons of the upstreams at the newest checkpoint."""

    def request(self) -> None:
        """Make the next `run_due` write a checkpoint, even if none is due."""
        self._written_at = -math.inf

    def record_gap(self, ordinal: int, gap: Gap) -> None:
        """Record that batches of an upstream are lost. Call this before sending batches that follow the gap."""
        checkpoint = self.checkpoints[ordinal]
        if checkpoint.incarnation == gap.incarnation:
            reasons = {**checkpoint.degraded_reasons, DegradedReason.LOST.name: gap.last}
            self.checkpoints[ordinal] = msgspec.structs.replace(checkpoint, degraded_reasons=reasons)
            self.write()

    def run_due(self, statuses: Sequence[StreamStatus], now: float) -> None:
        """Write a checkpoint or a snapshot if it is due. Call it when all received batches have been sent.

        `statuses` has the status of each upstream, by ordinal.
        """
        journal = self._journal
        if journal is None:
            return
        has_news = self._sequencer.next_number != self._written_number
        is_due = has_news and now >= self._written_at + self._limits.checkpoint_interval
        if is_due or [status.degraded_reasons for status in statuses] != self._degraded_reasons:
            self._written_at = now
            self.store_checkpoints(statuses)
        journal.tick(now)
        if journal.wants_snapshot and now >= self._snapshot_tried_at + self._limits.snapshot_retry_interval:
            self._snapshot_tried_at = now
            self._write_snapshot(journal, statuses)

    def store_checkpoints(self, statuses: Sequence[StreamStatus]) -> None:
        """Store the upstreams' checkpoints and write them. Call this when all received batches have been sent."""
        self._written_number = self._sequencer.next_number
        self._degraded_reasons = [status.degraded_reasons for status in statuses]
        self.checkpoints = self._upstreams.checkpoints()
        self.write()

    def write(self) -> None:
        """Write `checkpoints` again, with the form of the stream that is detected now."""
        if self._journal is not None:
            has_salted_prompts = any(transform.has_salted_prompts for transform in self._transforms)
            form = self._sequencer.encoder.form
            checkpoint = RelayCheckpoint(self._fingerprint, self.checkpoints, form, has_salted_prompts)
            self._journal.set_checkpoint(msgspec.msgpack.encode(checkpoint))

    def _write_snapshot(self, journal: Journal, statuses: Sequence[StreamStatus]) -> None:
        """Replace the files of the journal by a snapshot.

        The snapshot has the buffer's compacted history, the buffered batches, and the owner of each block that is live now.
        """
        last = self._sequencer.next_number - 1
        history_and_tail = self._buffer.history_up_to(last)
        if history_and_tail is None:
            return
        history, tail = history_and_tail
        if history is None:
            evicted = self._buffer.history_stats()
            if journal.state == "disk" or evicted is None or evicted.batches > 0:
                return
        number = -1 if history is None else history.last_seq
        transforms = enumerate(self._transforms)
        blocks = {(at, rank): own for at, transform in transforms for rank, own in transform.blocks.items()}
        ownership = [Ownership(last), *(Ownership(last, [(key, piece)]) for key, own in blocks.items() for piece in own.dump())]
        parts = [] if history is None else list(history.payloads)
        parts += [_OWNERSHIP_PREFIX + msgspec.msgpack.encode(owned) for owned in ownership]
        self.store_checkpoints(statuses)  # the checkpoints must cover the batches in `tail`, which do not name their upstreams
        journal.snapshot(number, parts, tail, OWN_UPSTREAM, is_partial=history is not None and history.is_partial)


# --- restoring a relay from its journal


class RestoredState(NamedTuple):
    """The state with which a relay starts."""

    incarnation: int
    next_number: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints of the upstreams by ordinal; empty for a new incarnation."""
    forwarded: Mapping[int, Position] = {}
    """Maps the ordinal of an upstream to the position of its newest batch that an earlier process has sent."""
    blocks: Mapping[BlocksKey, UpstreamBlocks] = {}
    was_resumed: bool = False
    """Whether the relay continues the incarnation of an earlier process."""
    reason: str = "new incarnation: there is no journal"
    """Why the relay continues the old incarnation or starts a new one, for operators."""
    seconds: float = 0.0
    """Seconds that the restoration took."""


def restore(
    settings: RelaySettings,
    journal: Journal | None,
    buffer: ReplayBuffer,
    state: IndexedStream,
    received: Mapping[int, IndexedStream],
    encoder: DialectEncoder,
) -> RestoredState:
    """Restore the relay from the journal, or start a new incarnation. Afterwards, records can be appended to the journal.

    Fills `buffer`, `state` (what consumers hold) and `received` (the upstreams' streams as received, by ordinal). Raises
    `JournalError` if a file of the journal cannot be read again.
    """
    if journal is None:
        return RestoredState(_incarnation_after(None))
    start = time.monotonic()
    recovered = journal.recover()
    usable = _decode_journal(settings, recovered)
    if isinstance(usable, str):
        incarnation = _incarnation_after(recovered.incarnation)
        journal.begin(incarnation)
        return RestoredState(incarnation, reason=f"new incarnation: {usable}", seconds=time.monotonic() - start)
    encoder.restore(usable.checkpoint.form)
    newest: dict[int, ForwardedBatch] = {}
    blocks = _apply_journal(settings, usable, buffer, state, received, newest)
    journal.resume(recovered)
    forwarded = {at: position for at, position in recovered.positions.items() if at < len(settings.upstreams)}
    checkpoints: list[Checkpoint] = []
    for at, checkpoint in enumerate(usable.checkpoint.checkpoints):
        # A restarted relay skips forwarded batches, so it first verifies that the upstream has sent the newest of them.
        required, batch, origin = checkpoint, newest.get(at), recovered.origins.get(at)
        if not settings.changes_payloads and batch is not None:
            required = checkpoint.with_fingerprint(Fingerprint.of_batch(batch.seq, batch.payload, live=False))
        elif settings.changes_payloads and origin is not None and origin.incarnation == checkpoint.incarnation:
            required = checkpoint.with_fingerprint(Fingerprint(origin.seq, origin.digest, live=False))
        checkpoints.append(resume_point(required, forwarded.get(at)))
    return RestoredState(
        recovered.incarnation or 0,
        recovered.next_number,
        tuple(checkpoints),
        forwarded,
        blocks,
        was_resumed=True,
        reason=f"resumed at number {recovered.next_number} of incarnation {recovered.incarnation}",
        seconds=time.monotonic() - start,
    )


def _incarnation_after(previous: int | None) -> int:
    """Return an incarnation above `previous`: milliseconds since the epoch, or `previous + 1` if the clock was set back."""
    return max(int(time.time() * 1000), 0 if previous is None else previous + 1)


class _DecodedJournal(NamedTuple):
    """A journal from which the relay can continue."""

    recovered: RecoveredJournal
    checkpoint: RelayCheckpoint
    parts: list[bytes]
    """Payloads of the snapshot that recreate the live blocks."""
    ownership: list[Ownership]


def _decode_journal(settings: RelaySettings, recovered: RecoveredJournal) -> _DecodedJournal | str:
    if recovered.incomplete_reason or recovered.incarnation is None:
        return recovered.incomplete_reason or "the journal is new"
    try:
        checkpoint = msgspec.msgpack.decode(recovered.checkpoint or b"", type=RelayCheckpoint)
    except msgspec.MsgspecError:
        return "the journal has no checkpoint of its upstreams"
    if checkpoint.fingerprint != settings.fingerprint():
        return "the journal belongs to other upstreams, or to another dialect or treatment of tokens"
    if checkpoint.has_salted_prompts and settings.tokens == "hash":
        return "prompts had salts, which the journal does not hold, so blocks that continue them could not get keys"
    usable = _DecodedJournal(recovered, checkpoint, [], [])
    try:
        for part in recovered.parts():
            if part.startswith(_OWNERSHIP_PREFIX):
                usable.ownership.append(msgspec.msgpack.decode(part.removeprefix(_OWNERSHIP_PREFIX), type=Ownership))
            else:
                usable.parts.append(part)
    except msgspec.MsgspecError as error:
        return f"the journal's snapshot is of another release: {error}"
    return usable


def _update(newest: dict[int, ForwardedBatch], batches: Iterable[ForwardedBatch], checkpoints: Sequence[Checkpoint]) -> None:
    """Store in `newest` the newest batch of each upstream that was forwarded after the upstream's checkpoint.

    A batch of heartbeats is not stored: the journal omits them, so the batch cannot be compared with the upstream's replay. If
    the newest batch is part of an upstream's snapshot, the upstream cannot replay it, and is followed from its start.
    """
    for batch in batches:
        if batch.upstream < len(checkpoints):
            checkpoint = checkpoints[batch.upstream]
            is_newer = batch.incarnation == checkpoint.incarnation and batch.seq > checkpoint.last_seq
            events = decode_batch(batch.payload).batch.events if is_newer else []
            if any(isinstance(event, AllBlocksCleared) or event.block_hashes for event in events):
                newest[batch.upstream] = batch


def _apply_journal(
    settings: RelaySettings,
    usable: _DecodedJournal,
    buffer: ReplayBuffer,
    state: IndexedStream,
    received: Mapping[int, IndexedStream],
    newest: dict[int, ForwardedBatch],
) -> dict[BlocksKey, UpstreamBlocks]:
    """Apply the journal to the buffer and to all streams, in parallel, because native code releases the interpreter lock."""
    recovered, parts = usable.recovered, usable.parts
    streams = [state, *received.values()]
    with ThreadPoolExecutor(max(1, len(streams))) as pool:
        applying = pool.map(IndexedStream.apply, streams, repeat(parts))
        buffer.restore(recovered.snapshot_number, parts, recovered.is_partial)
        batches = recovered.batches()
        while chunk := list(islice(batches, 1_000)):
            list(applying)  # wait until every stream has applied the previous chunk
            applying = pool.map(IndexedStream.apply, streams, repeat([batch.payload for batch in chunk]))
            buffer.extend([(batch.number, batch.payload) for batch in chunk])
            _update(newest, chunk, usable.checkpoint.checkpoints)
        list(applying)
    if len(settings.upstreams) == 1:
        return {}
    blocks = _restore_ownership(settings, usable)
    # Each stream now has the blocks of all upstreams; keep only the blocks of its own upstream.
    for at, stream in received.items():
        for (other, rank), own in blocks.items():
            if other != at:
                stream.apply(encode_payloads(KVEventBatch(0.0, own.removals(), rank), None))
    return blocks


def _restore_ownership(settings: RelaySettings, usable: _DecodedJournal) -> dict[BlocksKey, UpstreamBlocks]:
    """Restore which upstream owns which blocks, from stores and from the relay's own removals (`RETRACTION_OFFSET`)."""
    fields = expressible_placement(settings.resolved_dialect)
    blocks: defaultdict[BlocksKey, UpstreamBlocks] = defaultdict(lambda: UpstreamBlocks(fields))
    number = -1
    for ownership in usable.ownership:
        number = ownership.number
        for key, piece in ownership.blocks:
            blocks[key].load(piece)
    for batch in usable.recovered.batches():
        if batch.number > number and batch.upstream != OWN_UPSTREAM:
            sent = decode_batch(batch.payload).batch
            blocks[batch.upstream % RETRACTION_OFFSET, sent.data_parallel_rank or 0].apply(sent.events)
    return dict(blocks)
