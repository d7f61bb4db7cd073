"""From batches of upstreams to payloads of the relay's stream: forwarded as received, or decoded, changed and encoded again.

Payloads are changed for another dialect, to remove tokens, or because several upstreams share the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias

import msgspec

from kvevents.errors import EncodeError
from kvevents.events import ATTESTATION_MASK, MEDIUM_ALL, TIERS, AllBlocksCleared, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex, tier_of
from kvevents.publisher.compaction import MAX_RANKS
from kvevents.relay.output_sequencer import (
    IndexedStream,
    OutputSequencer,
    encode_payloads,
    last_heartbeat,
    loses_events,
    without_heartbeats,
)
from kvevents.relay.settings import RelayLimits, RelaySettings
from kvevents.relay.upstreams import PLACEMENT_FIELDS, UpstreamBlocks
from kvevents.stream import BatchReport, RawBatch
from kvevents.wire import Rejected, decode_batch, encode_batch
from kvevents.wire.decode import rank_of
from kvevents.wire.dialects import Dialect
from kvevents.wire.encode import scope_of

ReportFinding: TypeAlias = Callable[[RawBatch, BatchReport], None]
BlocksKey: TypeAlias = tuple[int, int]
"""The ordinal of an upstream, and a rank that its batches state."""


class PassThrough:
    """Forwards the payloads of a single upstream as received."""

    has_salted_prompts = False

    def __init__(self, sequencer: OutputSequencer, report: ReportFinding) -> None:
        self._sequencer: Final = sequencer
        self._report: Final = report

    def forward(self, ordinal: int, batches: Sequence[RawBatch]) -> None:
        """See `Transform.forward`."""
        for run in _runs_to_attestations(batches):
            applied = self._sequencer.forward(ordinal, run, [batch.payload for batch in run])
            for at, outcome in applied.items():
                if outcome.report is not None:
                    self._report(run[at], outcome.report)

    def retract(self, ordinal: int) -> dict[int | None, list[KVEvent]]:  # noqa: ARG002 - there is one upstream
        """See `Transform.retract`."""
        return {None: clear_of_all_tiers()}

    def blocks(self) -> dict[BlocksKey, UpstreamBlocks]:
        """See `Transform.blocks`."""
        return {}


def clear_of_all_tiers() -> list[KVEvent]:
    """Return the clears after which all tiers are known to be empty. After one without a tier, lower ones might not be."""
    return [AllBlocksCleared(), AllBlocksCleared({"medium": MEDIUM_ALL})]


def _runs_to_attestations(batches: Sequence[RawBatch]) -> Iterator[Sequence[RawBatch]]:
    """Return consecutive batches, up to and including each that can have an attestation, which is of all before it."""
    first = 0
    for end, batch in enumerate(batches, 1):
        # MessagePack stores text unchanged.
        if _ATTESTATION in batch.payload or end == len(batches):
            yield batches[first:end]
            first = end


class Transform:
    """Decodes batches, changes them and encodes them again, with one `BatchTransform` for each upstream.

    `received` has the streams of the upstreams as received, by ordinal; see `received_streams`. `blocks` are those of
    `UpstreamBlocks` that a journal restored. `write_checkpoint` is called before the first salted prompt is forwarded.

    What an engine attests is compared with what was sent of it, unless blocks are left out. A relay that was resumed
    with a dialect does not know that before the next clear.
    """

    def __init__(
        self,
        settings: RelaySettings,
        limits: RelayLimits,
        sequencer: OutputSequencer,
        received: Mapping[int, IndexedStream],
        blocks: Mapping[BlocksKey, UpstreamBlocks],
        report: ReportFinding,
        write_checkpoint: Callable[[], None],
        *,
        was_resumed: bool = False,
    ) -> None:
        self.has_salted_prompts = False
        """Whether keys of a prompt with a salt were forwarded."""
        self._write_checkpoint: Final = write_checkpoint
        self._sequencer: Final = sequencer
        self._report: Final = report
        self._is_shared: Final = len(settings.upstreams) > 1
        self._received: Final = received
        self._transforms: Final = {
            at: BatchTransform(
                settings.resolved_dialect,
                limits,
                {rank: own for (ordinal, rank), own in blocks.items() if ordinal == at} if self._is_shared else None,
                _redactor(settings, received.get(at)),
                omits_blocks=was_resumed and settings.resolved_dialect is not None,
            )
            for at in range(len(settings.upstreams))
        }

    def forward(self, ordinal: int, batches: Sequence[RawBatch]) -> None:
        """Send batches of one upstream, and report what decoding them has shown."""
        self._sequencer.record_origin(ordinal, batches)
        for batch in batches:
            self._forward(ordinal, batch)

    def retract(self, ordinal: int) -> dict[int | None, list[KVEvent]]:
        """Forget an upstream's blocks, and return the events that remove them downstream by rank; none if it holds none."""
        if ordinal in self._received:
            self._received[ordinal].reset()
        return self._transforms[ordinal].retract()

    def blocks(self) -> dict[BlocksKey, UpstreamBlocks]:
        """Return the blocks of each upstream and rank, if upstreams share the stream."""
        transforms = self._transforms.items()
        return {(at, rank): blocks for at, transform in transforms for rank, blocks in (transform.blocks or {}).items()}

    def _forward(self, ordinal: int, batch: RawBatch) -> None:
        received = self._received.get(ordinal)
        agrees = None
        if received is not None:
            applied = received.apply([_with_rank(batch) if self._is_shared else batch.payload]).get(0)
            # In a shared stream this state was restored from what was sent, which can lack blocks of the upstream.
            agrees = None if applied is None or applied.report is None or self._is_shared else applied.report.digest_matches
        transformed = self._transforms[ordinal](batch)
        if not self.has_salted_prompts and any(transform.has_salted_prompts for transform in self._transforms.values()):
            # Before the batch is in the journal, so that a relay that is killed then knows.
            self.has_salted_prompts = True
            self._write_checkpoint()
        report = BatchReport(transformed.rejected, transformed.cleared, transformed.heartbeat, agrees)
        if loses_events(report):
            # Before the batch: a relay that is killed in between skips a number again.
            self._sequencer.skip_number()
        self._sequencer.forward(ordinal, [batch] * len(transformed.payloads), transformed.payloads)
        if report != _NO_FINDINGS:
            self._report(batch, replace(report, attestation_matches=self._matches_attestation(ordinal, transformed.heartbeat)))

    def _matches_attestation(self, ordinal: int, heartbeat: Heartbeat | None) -> bool | None:
        """Return whether what was sent of an upstream is what its heartbeat attests; None if that is unknown."""
        if heartbeat is None or heartbeat.attestation is None:
            return None
        transform = self._transforms[ordinal]
        if transform.omits_blocks:
            return None
        blocks, attestation = transform.blocks, heartbeat.attestation
        if blocks is None:
            return self._sequencer.state.attests(attestation)
        return sum(own.digest for own in blocks.values()) & ATTESTATION_MASK == attestation


def _with_rank(batch: RawBatch) -> bytes:
    """Return the payload with the rank under which it is sent if it states none."""
    if rank_of(batch.payload) is not None:
        return batch.payload
    events = decode_batch(batch.payload).batch
    return encode_batch(msgspec.structs.replace(events, data_parallel_rank=batch.rank), None)


_NO_FINDINGS: Final = BatchReport()
_ATTESTATION: Final = b"attestation"
"""The name of the field of a heartbeat."""


class TransformedBatch(NamedTuple):
    """What a batch becomes, and what decoding it has shown."""

    payloads: list[bytes]
    """Empty if no event is left; more than one if consumers would not accept a single one."""
    cleared: bool
    """Whether the batch clears all blocks."""
    heartbeat: Heartbeat | None
    rejected: tuple[Rejected, ...]
    """Events that could not be decoded, or that the dialect cannot express: consumers must notice that they are missing."""


class BatchTransform:
    """Changes the batches of one upstream. Call it with each batch, in order.

    With `blocks`, by rank, the upstream shares the stream with others. With a `redactor` tokens are removed.
    """

    def __init__(
        self,
        dialect: Dialect | None,
        limits: RelayLimits,
        blocks: dict[int, UpstreamBlocks] | None = None,
        redactor: Redactor | None = None,
        *,
        omits_blocks: bool = False,
    ) -> None:
        self.blocks: Final = blocks
        self.omits_blocks = omits_blocks
        """Whether consumers might lack blocks of the upstream, or have them elsewhere: since the last clear an event could not
        be decoded, or the dialect cannot express it."""
        self._dialect: Final = dialect
        self._limits: Final = limits
        self._redactor: Final = redactor
        self._scopes: Final = expressible_placement(dialect)
        self._first_rank: int | None = None
        """The first stated rank, if the dialect has no field for it."""

    @property
    def has_salted_prompts(self) -> bool:
        """Whether the redactor has replaced tokens of a prompt with a salt."""
        return self._redactor is not None and self._redactor.has_salted_prompts

    def __call__(self, delivery: RawBatch) -> TransformedBatch:
        """Return the batch as it is to be sent."""
        decoding = decode_batch(delivery.payload)
        batch, rejected = self._expressible_rank(decoding.batch, list(decoding.rejected))
        heartbeat = last_heartbeat(batch.events)
        events = without_heartbeats(batch.events)
        cleared = any(type(event) is AllBlocksCleared and event.unknown_fields is None for event in events)
        self.omits_blocks = (self.omits_blocks and not cleared) or any(map(self._is_misplaced, events))
        events = self._expressible_clears(events, rejected)
        if self._redactor is None:
            expressible = self._expressible_namespaces(events)
            self.omits_blocks |= len(expressible) < len(events)
            events = expressible
        rank, payloads = batch.data_parallel_rank, list[bytes]()
        if self.blocks is not None:
            if rank is None:
                rank = delivery.rank
                payloads = self._clear_other_ranks(self.blocks, rank, batch.ts, events, rejected)
            events = self._own(self.blocks, rank, events, rejected)
        if self._redactor is not None:
            events = self._redactor(rank, events)
        if events or (heartbeat is None and not payloads):
            payloads += self._encode(KVEventBatch(batch.ts, events, rank), rejected)
        self.omits_blocks |= any(rejection.loses_events for rejection in rejected)
        return TransformedBatch(payloads, cleared, heartbeat, tuple(rejected))

    def retract(self) -> dict[int | None, list[KVEvent]]:
        """See `Transform.retract`."""
        self.omits_blocks = False
        if self.blocks is None:
            return {None: clear_of_all_tiers()}
        return {rank: events for rank, own in self.blocks.items() if (events := own.clear())}

    def _own(
        self, blocks: dict[int, UpstreamBlocks], rank: int, events: list[KVEvent], rejected: list[Rejected]
    ) -> list[KVEvent]:
        """Record the events of a rank, and return them for the shared stream; none of more ranks than a stream has."""
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

    def _expressible_rank(self, batch: KVEventBatch, rejected: list[Rejected]) -> tuple[KVEventBatch, list[Rejected]]:
        """Leave out the events of a second rank if the dialect has no field for the rank: consumers would mix the ranks."""
        rank = batch.data_parallel_rank
        if self._dialect is None or self._dialect.has_rank or rank in {None, self._first_rank}:
            return batch, rejected
        if self._first_rank is None:
            self._first_rank = rank
            return batch, rejected
        lost = Rejected("bad-field", f"{self._dialect} has no field for the rank, and this one is not rank {self._first_rank}")
        return msgspec.structs.replace(batch, events=[]), [*rejected, lost]

    def _clear_other_ranks(
        self, blocks: dict[int, UpstreamBlocks], rank: int, ts: float, events: list[KVEvent], rejected: list[Rejected]
    ) -> list[bytes]:
        """Return payloads for the clears of a batch without a rank, which concern all ranks, except those for `rank`."""
        clears = [event for event in events if isinstance(event, AllBlocksCleared)]
        removals = {other: own.apply(clears) for other, own in blocks.items() if other != rank}
        batches = (KVEventBatch(ts, removed, other) for other, removed in removals.items() if removed)
        return [payload for batch in batches for payload in self._encode(batch, rejected)]

    def _is_misplaced(self, event: KVEvent) -> bool:
        """Return whether consumers have the blocks of an event in another group or tier, which the dialect cannot express."""
        if self._dialect is None or not isinstance(event, BlockStored):
            return False
        misplaced = {
            "group_idx": bool(event.group_idx),
            "medium": tier_of(event.medium) != TIERS[0],
            "locality": event.locality == "REMOTE",
        }
        return any(misplaced[name] for name in misplaced.keys() - set(self._dialect.removed_fields))

    def _expressible_clears(self, events: list[KVEvent], rejected: list[Rejected]) -> list[KVEvent]:
        """Widen each clear whose tier or group the dialect cannot express: consumers clear too much rather than too little.

        Behind a clear of everything, as at the beginning of a compacted history, such a clear says nothing new.
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

    def _expressible_namespaces(self, events: list[KVEvent]) -> list[KVEvent]:
        """Drop stores of namespaces that the dialect cannot express: consumers would match them with plain prompts."""
        if self._dialect is None:
            return [_with_salt_as_unknown_field(event) for event in events]
        fields = self._dialect.stored_fields
        return [event for event in events if not isinstance(event, BlockStored) or _namespace_fields(event).issubset(fields)]

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
        """Drop the events that the dialect cannot encode."""
        encodable: list[KVEvent] = []
        for at, event in enumerate(batch.events):
            try:
                encode_payloads(KVEventBatch(batch.ts, [event]), self._dialect)
            except EncodeError as error:
                rejected.append(Rejected("bad-field", str(error), at))
            else:
                encodable.append(event)
        return KVEventBatch(batch.ts, encodable, batch.data_parallel_rank)


def expressible_placement(dialect: Dialect | None) -> frozenset[str]:
    """Return the fields of a `Placement` that a dialect has."""
    return PLACEMENT_FIELDS if dialect is None else PLACEMENT_FIELDS.intersection(dialect.removed_fields)


def _namespace_fields(event: BlockStored) -> set[str]:
    """Return the fields that separate a store's tokens from equal tokens of another prompt."""
    names = {"cache_salt"} if event.cache_salt else set()
    if event.extra_keys and any(event.extra_keys):
        names.add("extra_keys")
    # An adapter with a number is identified by the number, in all dialects.
    return names | ({"lora_name"} if event.lora_name and event.lora_id is None else set())


def _with_salt_as_unknown_field(event: KVEvent) -> KVEvent:
    """Move a salt into the unknown fields: the layout that has room for these has no field for a salt."""
    if not isinstance(event, BlockStored) or event.cache_salt is None:
        return event
    fields = {**(event.unknown_fields or {}), "cache_salt": event.cache_salt}
    return msgspec.structs.replace(event, cache_salt=None, unknown_fields=fields)


# --- redaction


_PLACEMENT_FIELDS: Final = frozenset(
    {
        "block_hashes",
        "parent_block_hash",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "block_digests",
        "parent_block_digest",
    }
)
"""Fields of a store that reveal nothing about a prompt. The others are removed, also those of releases to come."""
_PROMPT_FIELDS: Final = tuple(set(BlockStored.__struct_fields__) - _PLACEMENT_FIELDS - {"token_ids", "block_keys"})


class Redactor:
    """Replaces the tokens of stores with keys, and removes everything else that reveals a prompt.

    `key` returns the key for a rank's block hash; see `hash_redactor` and `drop_redactor`.
    """

    def __init__(self, key: Callable[[int | None, int], int]) -> None:
        self.has_salted_prompts = False
        """Whether a prompt had a salt. Only its first block has it."""
        self._key = key

    def __call__(self, rank: int | None, events: list[KVEvent]) -> list[KVEvent]:
        """Return the same events of a rank without tokens."""
        return [self._redact(rank, event) if isinstance(event, BlockStored) else _without_details(event) for event in events]

    def _redact(self, rank: int | None, event: BlockStored) -> BlockStored:
        self.has_salted_prompts = self.has_salted_prompts or _is_salted(event)
        removed = dict.fromkeys(_PROMPT_FIELDS)
        # A store with neither tokens nor keys announces another copy of known blocks, and must stay without keys. A store with
        # keys comes from another relay, and gets keys again.
        has_content = (event.token_ids or event.block_keys) and event.block_hashes
        keys = [self._key(rank, block_hash) for block_hash in event.block_hashes] if has_content else None
        return msgspec.structs.replace(event, token_ids=[], block_keys=keys, **removed)


def hash_redactor(received: IndexedStream) -> Redactor:
    """Return a redactor whose keys prompts still match: the block keys in the index of the stream as received.

    An orphan has no block key yet, and gets a placeholder.
    """

    def key(rank: int | None, block_hash: int) -> int:
        known = received.key_of(rank, block_hash)
        return placeholder_key(block_hash) if known is None else known

    return Redactor(key)


def drop_redactor() -> Redactor:
    """Return a redactor whose keys are placeholders: no prompt matches them, and a block is found by its hash only."""
    return Redactor(lambda _, block_hash: placeholder_key(block_hash))


def placeholder_key(block_hash: int) -> int:
    """Return a key that depends on the engine's hash alone."""
    return int.from_bytes(blake2b(block_hash.to_bytes(8, "big"), digest_size=8, person=b"kvevents").digest(), "big")


def received_streams(settings: RelaySettings, index: PrefixIndex) -> dict[int, IndexedStream]:
    """Return a stream for each upstream as received, by ordinal, if block keys replace tokens.

    It provides the keys, and shows whether the upstream's digest agrees.
    """
    return {at: IndexedStream(index, f"upstream {at}") for at in range(len(settings.upstreams)) if settings.tokens == "hash"}


def _redactor(settings: RelaySettings, received: IndexedStream | None) -> Redactor | None:
    if received is not None:
        return hash_redactor(received)
    return drop_redactor() if settings.tokens == "drop" else None


def _is_salted(event: BlockStored) -> bool:
    first = next(iter(event.extra_keys or ()), None) or ()
    return event.cache_salt is not None or any(isinstance(key, str) and key != event.lora_name for key in first)


def _without_details(event: KVEvent) -> KVEvent:
    if event.unknown_fields is None:
        return event
    # The scope of a clear is among the unknown fields. Without it consumers would clear more.
    scope = scope_of(event) if isinstance(event, AllBlocksCleared) else {}
    return msgspec.structs.replace(event, unknown_fields=scope or None)
