"""Makes the payloads of the relay's stream from upstream batches: as received, or decoded, changed and encoded again.

Payloads are changed for another dialect, to remove tokens, or because several upstreams share the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Final, TypeAlias

from msgspec.structs import replace

from kvevents.errors import EncodeError
from kvevents.events import ATTESTATION_MASK, MEDIUM_ALL, TIERS, AllBlocksCleared, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import tier_of
from kvevents.publisher.compaction import MAX_RANKS
from kvevents.relay.output_sequencer import IndexedStream, OutputSequencer, encode_payloads, loses_events, without_heartbeats
from kvevents.relay.settings import RelayLimits, RelaySettings
from kvevents.relay.upstreams import PLACEMENT_FIELDS, UpstreamBlocks
from kvevents.stream import BatchReport, RawBatch, inspect_events
from kvevents.wire import Rejected, decode_batch, encode_batch
from kvevents.wire.decode import rank_of
from kvevents.wire.dialects import Dialect
from kvevents.wire.encode import scope_of

ReportFinding: TypeAlias = Callable[[RawBatch, BatchReport], None]
_NO_FINDINGS: Final = BatchReport()


class PassThrough:
    """Forwards the payloads of a single upstream as received."""

    has_salted_prompts = False
    blocks: Final[dict[int, UpstreamBlocks]] = {}

    def __init__(self, sequencer: OutputSequencer, report: ReportFinding) -> None:
        self._sequencer: Final = sequencer
        self._report: Final = report
        self._estimate = ""

    def forward(self, batches: Sequence[RawBatch]) -> None:
        """See `Transform.forward`."""
        for run in _split_at_attestations(batches):
            applied = self._sequencer.forward(0, run, [batch.payload for batch in run])
            reports = [(run[at], outcome.report) for at, outcome in applied.items() if outcome.report is not None]
            # After a restart, the journal contains an estimate that was not reported, or lacks the cause of a reported one.
            known, self._estimate = self._estimate, self._sequencer.state.estimate
            if self._estimate != known or any(report.cleared for _, report in reports):
                reports.append((run[-1], BatchReport(estimate=self._estimate)))
            for batch, report in reports:
                self._report(batch, report)

    def retract(self) -> dict[int | None, list[KVEvent]]:
        """See `Transform.retract`."""
        self._estimate = ""
        return {None: clear_of_all_tiers()}


def clear_of_all_tiers() -> list[KVEvent]:
    """Return two clears that empty all tiers at any consumer. The second also makes consumers forget the engine's groups."""
    return [AllBlocksCleared(), AllBlocksCleared({"medium": MEDIUM_ALL})]


def _split_at_attestations(batches: Sequence[RawBatch]) -> Iterator[Sequence[RawBatch]]:
    """Split batches after each batch that might have an attestation, because it covers all batches up to its own."""
    first = 0
    for end, batch in enumerate(batches, 1):
        # The bytes contain the name of the heartbeat's field, because MessagePack stores names unchanged.
        if b"attestation" in batch.payload or end == len(batches):
            yield batches[first:end]
            first = end


class Transform:
    """Decodes the batches of one upstream, changes them and encodes them again.

    `received` is the unchanged stream of the upstream, if block keys replace tokens. `blocks` are the upstream's blocks by
    rank, restored from a journal, if several upstreams share the stream. `write_checkpoint` is called before the first batch
    with a salt is forwarded.

    An engine's attestation is compared with the blocks that were sent for the engine, unless the dialect has omitted blocks.
    Until the next clear, a resumed relay with a dialect does not know whether blocks were omitted.
    """

    def __init__(  # noqa: PLR0913 - one parameter for each part of the relay that a transform uses
        self,
        ordinal: int,
        settings: RelaySettings,
        limits: RelayLimits,
        sequencer: OutputSequencer,
        received: IndexedStream | None,
        blocks: dict[int, UpstreamBlocks],
        report: ReportFinding,
        write_checkpoint: Callable[[], None],
        *,
        was_resumed: bool = False,
    ) -> None:
        self.blocks: Final = blocks
        """Maps each rank to the upstream's blocks, if upstreams share the stream."""
        self.has_salted_prompts = False
        """Whether keys of a salted prompt were forwarded. Only the first block of a prompt has the salt."""
        self._ordinal: Final = ordinal
        self._dialect: Final = settings.resolved_dialect
        self._limits: Final = limits
        self._sequencer: Final = sequencer
        self._received: Final = received
        self._report: Final = report
        self._write_checkpoint: Final = write_checkpoint
        self._is_shared: Final = len(settings.upstreams) > 1
        self._has_tokens: Final = settings.tokens == "keep"
        self._scopes: Final = expressible_placement(self._dialect)
        self._omits_blocks = was_resumed and self._dialect is not None
        """Whether consumers might lack blocks of the upstream or have them in a wrong group or tier. The cause is an event
        after the newest clear that could not be decoded or that the dialect cannot express."""
        self._estimate = ""
        """The newest estimate that was reported."""
        self._first_rank: int | None = None
        """The first rank that a batch stated, if the dialect has no field for the rank."""

    def forward(self, batches: Sequence[RawBatch]) -> None:
        """Send batches of the upstream, and report the findings of their decoding."""
        self._sequencer.record_origin(self._ordinal, batches)
        for batch in batches:
            self._forward(batch)

    def retract(self) -> dict[int | None, list[KVEvent]]:
        """Forget the upstream's blocks, and return for each rank the events that remove these blocks at consumers."""
        if self._received is not None:
            self._received.reset()
        self._omits_blocks, self._estimate = False, ""
        if not self._is_shared:
            return {None: clear_of_all_tiers()}
        return {rank: events for rank, own in self.blocks.items() if (events := own.clear())}

    def _forward(self, batch: RawBatch) -> None:
        agrees = None
        if self._received is not None:
            applied = self._received.apply([_add_rank(batch) if self._is_shared else batch.payload]).get(0)
            # In a shared stream, `_received` was restored from sent batches, which can lack blocks of the upstream.
            agrees = None if applied is None or applied.report is None or self._is_shared else applied.report.digest_matches
        payloads, report = self._transform_batch(batch)
        if loses_events(report):
            # The number is skipped first: a relay that is killed after this step skips a second number, but hides no loss.
            self._sequencer.skip_number()
        self._sequencer.forward(self._ordinal, [batch] * len(payloads), payloads)
        # Neither block keys nor compacted history show consumers why matches are estimates.
        known, self._estimate = self._estimate, (self._received or self._sequencer.state).estimate
        estimate = self._estimate if report.cleared or self._estimate != known else None
        report = replace(report, digest_matches=agrees, estimate=estimate)
        if report != _NO_FINDINGS:
            self._report(batch, replace(report, attestation_matches=self._matches_attestation(report.heartbeat)))

    def _matches_attestation(self, heartbeat: Heartbeat | None) -> bool | None:
        """Return whether the blocks that were sent for the upstream match its attestation; None if the result is unknown."""
        if heartbeat is None or heartbeat.attestation is None or self._omits_blocks:
            return None
        if not self._is_shared:
            return self._sequencer.state.matches_attestation(heartbeat.attestation)
        return sum(own.digest for own in self.blocks.values()) & ATTESTATION_MASK == heartbeat.attestation

    def _transform_batch(self, delivery: RawBatch) -> tuple[list[bytes], BatchReport]:
        """Return the payloads to send for a batch, and the findings of decoding it.

        The list is empty if no event remains, and has several payloads if one payload would be too large for consumers. Events
        that the dialect cannot express count as rejected, because consumers must notice that they are missing.
        """
        decoding = decode_batch(delivery.payload)
        batch, rejected = self._reject_second_rank(decoding.batch, list(decoding.rejected))
        report = inspect_events(batch.events) or _NO_FINDINGS
        events = without_heartbeats(batch.events)
        self._omits_blocks = (self._omits_blocks and not report.cleared) or any(map(self._is_misplaced, events))
        events = self._widen_clears(events, rejected)
        if self._has_tokens:
            expressible = self._drop_namespaces(events)
            self._omits_blocks |= len(expressible) < len(events)
            events = expressible
        rank, payloads = batch.data_parallel_rank, list[bytes]()
        if self._is_shared:
            if rank is None:
                rank = delivery.rank
                payloads = self._clear_other_ranks(rank, batch.ts, events, rejected)
            events = self._record_blocks(rank, events, rejected)
        if not self._has_tokens:
            if not self.has_salted_prompts and any(map(_is_salted, events)):
                self.has_salted_prompts = True
                self._write_checkpoint()  # before the batch is sent, so that a resumed relay knows of the salt
            events = [redact_prompt(event, partial(self._block_key, rank)) for event in events]
        if events or (report.heartbeat is None and not payloads):
            payloads += self._encode(KVEventBatch(batch.ts, events, rank), rejected)
        self._omits_blocks |= any(rejection.loses_events for rejection in rejected)
        return payloads, replace(report, rejected=tuple(rejected))

    def _record_blocks(self, rank: int, events: list[KVEvent], rejected: list[Rejected]) -> list[KVEvent]:
        """Record the events of a rank, and return them for the shared stream; an empty list above `MAX_RANKS` ranks."""
        blocks = self.blocks
        if rank not in blocks and len(blocks) >= MAX_RANKS:
            rejected.append(Rejected("more", f"an upstream has more than {MAX_RANKS} ranks"))
            return []
        own = blocks.setdefault(rank, UpstreamBlocks(self._scopes))
        events = own.apply(events)
        if sum(map(len, blocks.values())) > self._limits.max_upstream_blocks:
            events += own.clear()
            message = f"an upstream has more than {self._limits.max_upstream_blocks} blocks: those of rank {rank} are removed"
            rejected.append(Rejected("more", message))
        return events

    def _reject_second_rank(self, batch: KVEventBatch, rejected: list[Rejected]) -> tuple[KVEventBatch, list[Rejected]]:
        """Reject the events of a second rank if the dialect has no field for the rank: consumers would mix the ranks."""
        rank = batch.data_parallel_rank
        if self._dialect is None or self._dialect.has_rank or rank in {None, self._first_rank}:
            return batch, rejected
        if self._first_rank is None:
            self._first_rank = rank
            return batch, rejected
        lost = Rejected("bad-field", f"{self._dialect} has no field for the rank, and this one is not rank {self._first_rank}")
        return replace(batch, events=[]), [*rejected, lost]

    def _clear_other_ranks(self, rank: int, ts: float, events: list[KVEvent], rejected: list[Rejected]) -> list[bytes]:
        """Return payloads that apply the clears of a batch without a rank to all ranks except `rank`."""
        clears = [event for event in events if isinstance(event, AllBlocksCleared)]
        removals = {other: own.apply(clears) for other, own in self.blocks.items() if other != rank}
        batches = (KVEventBatch(ts, removed, other) for other, removed in removals.items() if removed)
        return [payload for batch in batches for payload in self._encode(batch, rejected)]

    def _is_misplaced(self, event: KVEvent) -> bool:
        """Return whether consumers misplace an event's blocks, because the dialect has no field for their group or tier."""
        if self._dialect is None or not isinstance(event, BlockStored):
            return False
        misplaced = {
            "group_idx": bool(event.group_idx),
            "medium": tier_of(event.medium) != TIERS[0],
            "locality": event.locality == "REMOTE",
        }
        return any(misplaced[name] for name in misplaced.keys() - set(self._dialect.removed_fields))

    def _widen_clears(self, events: list[KVEvent], rejected: list[Rejected]) -> list[KVEvent]:
        """Widen each clear whose tier or group the dialect cannot express, so that consumers clear too much, not too little.

        A clear that directly follows a clear of all blocks has no effect, so it is dropped instead of widened.
        """
        expressible: list[KVEvent] = []
        is_empty = False
        for event in events:
            scope = scope_of(event) if isinstance(event, AllBlocksCleared) else None
            if scope is None or self._scopes.issuperset(scope):
                is_empty = scope is not None and (is_empty or not scope)
                expressible.append(event)
            elif not is_empty:
                rejected.append(Rejected("bad-field", f"{self._dialect} cannot express a clear of {scope}"))
                expressible.append(AllBlocksCleared())
                is_empty = True
        return expressible

    def _drop_namespaces(self, events: list[KVEvent]) -> list[KVEvent]:
        """Drop stores of namespaces that the dialect cannot express: consumers would match them in other namespaces."""
        if self._dialect is None:
            return [_with_salt_as_unknown_field(event) for event in events]
        # Only map events can hold unknown fields, such as the images of a prompt.
        fields = {*self._dialect.stored_fields, *(["mm_keys"] if self._dialect.event_form == "map" else [])}
        return [event for event in events if not isinstance(event, BlockStored) or _namespace_fields(event).issubset(fields)]

    def _block_key(self, rank: int | None, block_hash: int) -> int:
        """Return the block key that prompts match, or a placeholder if the block is an orphan or tokens are dropped."""
        known = None if self._received is None else self._received.key_of(rank, block_hash)
        return placeholder_key(block_hash) if known is None else known

    def _encode(self, batch: KVEventBatch, rejected: list[Rejected]) -> list[bytes]:
        try:
            payloads = encode_payloads(batch, self._dialect, self._limits.max_payload_bytes)
        except EncodeError:
            return self._encode(self._drop_unencodable(batch, rejected), rejected)
        fitting = [payload for payload in payloads if len(payload) <= self._limits.max_payload_bytes]
        if len(fitting) < len(payloads):
            rejected.append(Rejected("oversized", f"an event needs more than {self._limits.max_payload_bytes} bytes"))
        return fitting

    def _drop_unencodable(self, batch: KVEventBatch, rejected: list[Rejected]) -> KVEventBatch:
        encodable: list[KVEvent] = []
        for at, event in enumerate(batch.events):
            try:
                encode_payloads(KVEventBatch(batch.ts, [event]), self._dialect)
            except EncodeError as error:
                rejected.append(Rejected("bad-field", str(error), at))
            else:
                encodable.append(event)
        return KVEventBatch(batch.ts, encodable, batch.data_parallel_rank)


def _add_rank(batch: RawBatch) -> bytes:
    if rank_of(batch.payload) is not None:
        return batch.payload
    events = decode_batch(batch.payload).batch
    return encode_batch(replace(events, data_parallel_rank=batch.rank), None)


def expressible_placement(dialect: Dialect | None) -> frozenset[str]:
    """Return those fields of a placement that events of a dialect can carry."""
    return PLACEMENT_FIELDS if dialect is None else PLACEMENT_FIELDS.intersection(dialect.removed_fields)


def _namespace_fields(event: BlockStored) -> set[str]:
    """Return the fields by which a store's blocks differ from blocks with equal tokens in another namespace."""
    names = {"cache_salt"} if event.cache_salt else set()
    if event.extra_keys and any(event.extra_keys):
        names.add("extra_keys")
    items = (event.unknown_fields or {}).get("mm_keys")
    if any(items) if isinstance(items, list) else items:
        names.add("mm_keys")
    # All dialects have the number of an adapter, which identifies the adapter even if its name is missing.
    return names | ({"lora_name"} if event.lora_name and event.lora_id is None else set())


def _with_salt_as_unknown_field(event: KVEvent) -> KVEvent:
    """Move a salt into the unknown fields, because the default encoding has no field for a salt."""
    if not isinstance(event, BlockStored) or event.cache_salt is None:
        return event
    fields = {**(event.unknown_fields or {}), "cache_salt": event.cache_salt}
    return replace(event, cache_salt=None, unknown_fields=fields)


# --- redaction


_HARMLESS_FIELDS: Final = PLACEMENT_FIELDS.union(
    ("block_hashes", "parent_block_hash", "block_digests", "parent_block_digest", "block_size", "lora_id", "lora_name"),
    ("kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
"""Fields of a store that reveal nothing about a prompt. All other fields are removed, including fields of future releases."""
_PROMPT_FIELDS: Final = tuple(set(BlockStored.__struct_fields__) - _HARMLESS_FIELDS - {"token_ids", "block_keys"})


def redact_prompt(event: KVEvent, key: Callable[[int], int]) -> KVEvent:
    """Replace the tokens of a store with the keys of its hashes, and remove all other fields that reveal a prompt."""
    if isinstance(event, BlockStored):
        # A store with neither tokens nor keys announces another copy of known blocks, and must not get keys. A store with keys
        # comes from an upstream that is a relay; its keys are replaced.
        has_content = (event.token_ids or event.block_keys) and event.block_hashes
        keys = list(map(key, event.block_hashes)) if has_content else None
        return replace(event, token_ids=[], block_keys=keys, **dict.fromkeys(_PROMPT_FIELDS))
    if event.unknown_fields is None:
        return event
    # The tier and the group of a clear are unknown fields. These fields stay: without them consumers would clear more blocks.
    scope = scope_of(event) if isinstance(event, AllBlocksCleared) else {}
    return replace(event, unknown_fields=scope or None)


def placeholder_key(block_hash: int) -> int:
    """Return a key that depends only on the engine's hash, so that no prompt matches the block."""
    return int.from_bytes(blake2b(block_hash.to_bytes(8, "big"), digest_size=8, person=b"kvevents").digest(), "big")


def _is_salted(event: KVEvent) -> bool:
    if not isinstance(event, BlockStored):
        return False
    first = next(iter(event.extra_keys or ()), None) or ()
    return event.cache_salt is not None or any(isinstance(key, str) and key != event.lora_name for key in first)
