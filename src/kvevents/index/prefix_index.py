"""The prefix index, with its limits, outcomes and statistics."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Final, Literal, Self, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from kvevents.errors import ConfigError, UnknownSourceError, UsageError
from kvevents.events import Heartbeat
from kvevents.index.namespace import Namespace
from kvevents.index.snapshot_file import merge_snapshot, read_snapshot, write_snapshot
from kvevents.stream import Batch, BatchReport, Gap, RawBatch, Reset, inspect_events
from kvevents.wire import DEFAULT_WIRE_LIMITS, Rejected
from kvevents.wire.encode import encode_events
from kvevents_native import _native


class IndexLimits(Struct, frozen=True):
    """Limits of an index besides its memory limit. `IndexStats` counts the data that exceed a limit."""

    max_orphans: int = 65_536
    """Maximum number of orphans: blocks of one stream that wait for their parent or their tokens, each about 200 bytes."""
    max_orphan_bytes: int = 64 << 20
    """Maximum size of all orphans of a stream in bytes, because one block can fill a whole payload. The limit is at most 1/8 of
    a memory limit."""
    max_places: int = 64
    """Maximum number of placements (tier, locality, ownership, group) of the current incarnations of all ranks of a source."""
    max_groups: int = 64
    """Maximum number of KV cache groups in one incarnation of a stream. A hybrid model has a few groups."""
    max_block_sizes: int = 16
    """Maximum number of block sizes in one incarnation of a stream. Each block size costs a search per prompt."""
    max_records_per_key: int = 16
    """Maximum number of records that a lookup examines per block key. A stream has one record for each hash of the block."""
    max_blocks_per_hash: int = 1_024
    """Maximum number of blocks of one stream with the same hash. If an engine hashes pages without their prefix, several blocks
    can have the same hash."""
    max_ranks: int = 64
    """Maximum number of different ranks in the payloads of one stream. The stream of a relay can have a few ranks."""
    max_fences: int = 65_536
    """Maximum number of removed workers that are remembered, to reject their late deliveries. Above this number, the worker
    that was removed longest ago is forgotten."""
    max_speculated: int = 1_000_000
    """Maximum number of blocks in the overlay; above it, the oldest speculative entries are removed before they expire."""

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if limit < 0:
                raise ConfigError(f"invalid {name} {limit}: expected at least 0")


_DEFAULT_LIMITS: Final = IndexLimits()


class ApplyResult(Struct, frozen=True):
    """The outcome of a delivery."""

    status: Literal["applied", "duplicate", "void"]
    """`duplicate`: the delivery was applied before. `void`: its incarnation has ended, or its worker was removed."""
    report: BatchReport | None = None
    """The argument for the subscriber's `report`, or None in the usual case that there is nothing to report."""


class Block(Struct, frozen=True):
    """A block on one tier and in one group of one worker."""

    key: int
    """Rolling key of the block's tokens; see `block_keys`."""
    hash: int
    """The hash by which the engine identifies the block."""
    tier: str
    """`gpu`, `cpu`, `disk`, or an unknown medium in upper case."""
    group: int
    """KV cache group; 0 if the engine sends none."""
    copies: int
    """Maximum number of copies: how many more times the engine has stored the block than removed it."""
    certain_copies: int
    """Minimum number of copies; 0 if the block might no longer be cached. An engine can announce a resident block again, so a
    repeated store does not increase this number."""


class Counters(Struct, frozen=True):
    """Counters of an index, for one worker or for all."""

    blocks: int
    """Number of different resident blocks; a block on several tiers counts once."""
    orphans: int
    """Number of blocks that wait for their parent or their tokens."""
    copies: int
    """Maximum number of further copies: all copies except the first copy of each block on each tier."""
    uncertain: int
    """Number of blocks, per tier and group, that might be gone: they were stored several times and removed less often."""
    rejected: dict[tuple[str, str], int]
    """Number of rejected stores, by kind of KV cache group (`none` if the engine sends no kind) and reason: `unknown-kind`,
    `length-mismatch`, `bad-token`, `too-many-placements`, `too-many-alike`, `too-many-ranks`, `rank-of-another-stream`,
    `no-rank` (a stream of several ranks), `other-block-size` (of a chunk below the GPU, than that of its parent)."""
    unknown_removals: int
    """Number of removed blocks that the worker did not hold according to the index."""
    orphans_dropped: int
    """Number of orphans dropped because of `IndexLimits.max_orphans` or `max_orphan_bytes`."""
    evicted: int
    """Number of blocks rejected because of the memory limit."""
    duplicates: int
    """Number of batches that were delivered again after they had been applied."""
    void: int
    """Number of deliveries that were ignored because they belong to earlier incarnations."""
    gaps: int
    """Number of gaps that the subscriber reported."""


class WorkerInfo(Counters, frozen=True):
    """One worker: one data-parallel rank of one engine."""

    source: str
    rank: int
    carried_ranks: list[int]
    """The further ranks of the source whose batches arrive in this worker's stream. Each carried rank is also a worker."""
    model: str | None
    incarnation: int
    last_seq: int
    """Sequence number of the newest batch; -1 before the first batch."""
    block_sizes: list[int]
    """Block sizes in tokens in the current incarnation; several if KV cache groups differ in size or cache parts of blocks."""
    estimate: str | None
    """Why matches of this worker can differ from those of the engine even if the index has all of the engine's events: a key of
    `ESTIMATE_TEXTS`. None if the matches cannot differ."""
    attested: bool | None
    """Whether the worker's blocks were those of the engine's own cache at the last attestation; None before the incarnation's
    first attestation. Only a publisher inside the engine sends attestations."""
    tiers: dict[str, int]
    """Number of blocks on each tier. A block counts on each tier that holds it, and once for each group of a hybrid model."""
    lacks_refused: bool = False
    """Whether blocks are missing that were rejected because of the memory limit, also before a snapshot that was restored."""
    lacks_dropped: bool = False
    """Whether blocks are missing that were dropped as orphans. Both end with a reset, a clear or an equal digest."""


class IndexStats(Counters, frozen=True):
    """Statistics of an index. Sums include removed workers."""

    workers: int
    bytes: int
    """Heap memory of the index in bytes."""
    unique_blocks: int
    """Number of different blocks; a block that several workers hold counts once."""
    tiers: dict[str, int] = {}
    """Number of blocks on each tier, as in `WorkerInfo`, of all workers together."""
    wire_rejected: dict[str, int] = {}
    """Maps each reason to the number of events and fields in payloads that could not be decoded."""
    speculated: int = 0
    """Number of blocks in the overlay."""
    confirmed: int = 0
    """Number of speculative entries whose prompt the worker stored before the entry expired."""
    expired: int = 0
    """Number of speculative entries that expired."""
    displaced: int = 0
    """Number of speculative entries removed before they expired, because the overlay had more than `max_speculated` blocks."""


_T = TypeVar("_T")
Worker: TypeAlias = tuple[str, int] | str
"""A worker's source and rank, or only its source if the rank is 0."""

MAX_PAYLOAD_EXPANSION: Final = 100
"""Maximum number of bytes of memory for each byte of a payload: during decoding, and for the blocks, orphans and names that are
then stored. Blocks of one token in arrays of one-byte integers need about 30 bytes, many small events in rare forms about 80
bytes."""

ESTIMATE_TEXTS: Final = {
    "set-aside": "at least {count} of its stores could not be used: tokens do not fit their hashes, a limit was exceeded, or "
    "their rank is unknown or another stream's; or a clear named an unknown tier",
    "limits": "the index refused or dropped some of its blocks at memory_limit or at a limit of blocks without their parents",
    "unknown-parents": "at least {count} of its blocks have parents or tokens that were never announced",
    "page-hashes": "its hashes are of pages alone, so parents are ambiguous, and later pages can be announced as first ones",
    "inexact-tiers": "what its tiers below the GPU hold is unknown: events lack salts or tokens, or were lost before a clear",
    "unknown-kind": "it has KV cache groups of a kind whose lookup is unknown",
    "unknown-hashing": "its KV cache groups need the engine's own hashes of a prompt, which no known scheme has reproduced",
    "several-block-sizes": "its blocks differ in size, and its events state no KV cache groups",
}
"""Explanation of each value of `WorkerInfo.estimate`."""
_LOOKUP_ESTIMATES: Final = frozenset({"unknown-kind", "unknown-hashing", "several-block-sizes"})
"""Estimates whose cause is the lookup rule of a model. The engine's events are complete, so the stream can be EXACT."""


def describe_estimate(code: str, count: int) -> str:
    """Return the explanation of an estimate; an empty text if `code` is empty."""
    return f"its matches are estimates, since {ESTIMATE_TEXTS[code].format(count=count)}" if code else ""


_APPLIED_RESULT: Final = ApplyResult("applied")
_CLEARED_RESULT: Final = ApplyResult("applied", BatchReport(cleared=True))
_EMPTY_REPORT: Final = BatchReport()
_DUPLICATE_RESULT: Final = ApplyResult("duplicate")
_VOID_RESULT: Final = ApplyResult("void")
_BLOCKS_PER_PAGE: Final = 1_000
"""Number of blocks that are converted to Python objects before other threads can run. Converting them takes about 0.2 ms."""


class PrefixIndex(_native.NativeIndex):
    """Finds the prefix of a prompt that each worker holds, by tier, exactly as the streams announced the blocks.

    Thread-safe. Deliveries of one stream must be applied in the order in which a subscriber returns them. `memory_limit` is in
    bytes. At the limit, new blocks are rejected and counted as `evicted`; existing blocks stay. Blocks of workers that have at
    least the average number of blocks are rejected first. Entries of the overlay expire by `clock`.
    """

    def __new__(
        cls,
        *,
        memory_limit: int | None = None,
        limits: IndexLimits = _DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """See the class. Raises `ConfigError`."""
        if memory_limit is not None and memory_limit < 1:
            raise ConfigError(f"invalid memory_limit {memory_limit}: expected a number of bytes above 0, or None for no limit")
        wire = DEFAULT_WIRE_LIMITS
        sizes = (wire.max_payload_bytes, wire.max_events, wire.max_hashes, wire.max_fields)
        bounds = (*sizes, wire.max_free_form_bytes, wire.max_nesting)
        results = (_APPLIED_RESULT, _CLEARED_RESULT, _DUPLICATE_RESULT, _VOID_RESULT)
        self = super().__new__(cls, bounds, memory_limit, asdict(limits), results)
        self._clock = clock
        self._wire_rejected = Counter()
        self._count_lock = threading.Lock()
        return self

    _clock: Callable[[], float]
    _wire_rejected: Counter[str]
    _count_lock: threading.Lock

    # --- deliveries

    def apply(self, delivery: Batch | RawBatch | Reset | Gap) -> ApplyResult:
        """Apply a delivery of a subscriber.

        If the payloads of one stream state several ranks, each rank becomes a separate worker. A batch with a rank concerns
        only that rank; a clear, a gap or a reset without a rank concerns all ranks of the stream.

        A gap removes no blocks, but the stream is not exact any more: the lost batches might have contained removals. A
        compacted gap changes nothing: the snapshot after it replaces all skipped batches. No content from a peer raises an
        exception. Raises `UsageError` for events whose fields do not have the types that `kvevents.events` declares.

        After a batch with a heartbeat, the digest and the attestation in it are compared with the stream in this index.
        """
        if isinstance(delivery, RawBatch):
            stream = (delivery.source, delivery.rank)
            return self.apply_payload(stream, delivery.incarnation, delivery.seq, delivery.payload)
        if isinstance(delivery, Batch):
            return self._apply_events(delivery)
        if isinstance(delivery, Gap):
            if delivery.compacted:
                return _APPLIED_RESULT
            return self._gap(delivery.source, delivery.rank, delivery.incarnation, delivery.last)
        return self._reset(delivery.source, delivery.rank, delivery.incarnation)

    def apply_many(self, deliveries: Iterable[Batch | RawBatch | Reset | Gap]) -> list[ApplyResult]:
        """Apply several deliveries in order. Consecutive raw batches are applied without the interpreter lock."""
        results: list[ApplyResult] = []
        raw: list[RawBatch] = []
        for delivery in deliveries:
            if isinstance(delivery, RawBatch):
                raw.append(delivery)
                continue
            results += self._apply_many(raw)
            raw.clear()
            results.append(self.apply(delivery))
        results += self._apply_many(raw)
        return results

    def apply_payloads(self, stream: Worker, incarnation: int, first: int, payloads: Sequence[bytes]) -> dict[int, ApplyResult]:
        """Apply payloads as raw batches numbered from `first` on, without the interpreter lock.

        Maps the position in `payloads` to the outcome, for each payload that was not applied or caused a report.
        """
        return self._apply_run(*_source_and_rank(stream), incarnation, first, payloads)

    def _apply_events(self, batch: Batch) -> ApplyResult:
        try:
            payload = encode_events(batch.events, batch.data_parallel_rank)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"events do not have the types that kvevents.events declares: {error}") from error
        loses_events = any(rejection.loses_events for rejection in batch.rejected)
        result = self._apply((batch.source, batch.rank), batch.incarnation, batch.seq, payload, loses_events)
        if result is None:
            raise UsageError("events do not have the types that kvevents.events declares: a field has a value of another type")
        report = inspect_events(batch.events, batch.rejected)
        if report is None:
            return result
        estimate = None if result.report is None else result.report.estimate
        heartbeat, agrees, attestation_matches = report.heartbeat, None, None
        if heartbeat is not None and result.status == "applied":
            stream, stated_rank = (batch.source, batch.rank), batch.data_parallel_rank
            agrees, attestation_matches = self._compare(*stream, stated_rank, heartbeat.digest, heartbeat.attestation)
        return self._add_report(result, report.rejected, heartbeat, agrees, attestation_matches, estimate)

    def _found(
        self,
        result: ApplyResult,
        rejections: list[tuple[str, str, int | None, bytes, int]],
        heartbeat: tuple[str | None, float, str, str, int, int | None] | None,
        agrees: bool | None,
        attestation_matches: bool | None,
        estimate: tuple[str, int] | None,
    ) -> ApplyResult:
        """Return a result with a report. Native code passes the fields of `Rejected` and `Heartbeat` in declaration order.

        `estimate` is a new code with a count, or an empty code if matches are no longer estimates.
        """
        sender_heartbeat = None if heartbeat is None else Heartbeat(*heartbeat)
        sentence = None
        if estimate is not None:
            sentence = "" if estimate[0] in _LOOKUP_ESTIMATES else describe_estimate(*estimate)
        records = tuple(Rejected(*rejection) for rejection in rejections)
        return self._add_report(result, records, sender_heartbeat, agrees, attestation_matches, sentence)

    def _add_report(
        self,
        result: ApplyResult,
        rejections: tuple[Rejected, ...],
        heartbeat: Heartbeat | None,
        agrees: bool | None,
        attestation_matches: bool | None,
        estimate: str | None,
    ) -> ApplyResult:
        """Add a report. The heartbeat of a batch that was not applied is also reported, because it describes the sender."""
        if result.status != "applied":
            return result if heartbeat is None else ApplyResult(result.status, BatchReport(heartbeat=heartbeat))
        with self._count_lock:
            for rejection in rejections:
                self._wire_rejected[rejection.reason] += rejection.count
        is_cleared = result.report is not None and result.report.cleared
        report = BatchReport(rejections, is_cleared, heartbeat, agrees, attestation_matches, estimate)
        return ApplyResult(result.status, None if report == _EMPTY_REPORT else report)

    # --- workers

    def set_model(self, source: str, model: str | None) -> None:
        """Set the model of all present and future ranks of `source`, which match only prompts with this `Namespace.model`."""
        self._label(source, model)

    def set_drafts(self, source: str, groups: Iterable[int] | None) -> None:
        """Set the KV cache groups of the draft model (EAGLE, MTP) of all present and future ranks of `source`.

        An empty iterable means all groups. None, the default, means that there is no draft model. vLLM computes the last block
        of a hit in such groups again, which no event shows. Snapshots do not contain this setting.
        """
        self._set_drafts(source, None if groups is None else list(groups))

    def replace_lora(self, source: str, lora: str) -> None:
        """Record that an engine lists another path for a LoRA name.

        If the engine's events have not shown the change since the previous call of this method, the blocks of this LoRA on the
        ranks of `source` become uncertain. Blocks that are stored later are certain.
        """
        self._replace_lora(source, lora)

    def remove_worker(self, source: Worker, rank: int | None = None) -> int:
        """Remove a worker, or all ranks of a source if no rank is given. Returns the number of removed blocks.

        If the worker's stream carries the blocks of further ranks, these ranks are removed too.

        Until `readmit`, later deliveries of the current incarnation get the status `void`; those of a new one are accepted.
        """
        if isinstance(source, tuple):
            source, rank = source
        return self._remove(source, rank)

    def readmit(self, source: Worker, rank: int = 0) -> None:
        """Accept deliveries of a removed worker again, even deliveries of the incarnation in which it was removed."""
        self._admit(*((source, rank) if isinstance(source, str) else source))

    def workers(self) -> list[WorkerInfo]:
        """Return all workers, sorted by source and rank."""
        return [WorkerInfo(**info) for info in self._workers()]

    def worker(self, worker: Worker) -> WorkerInfo:
        """Return one worker. Raises `UnknownSourceError`."""
        return WorkerInfo(**_query_worker(worker, self._worker))

    def stats(self) -> IndexStats:
        """Return statistics. Reads the streams one after the other, and waits while another thread writes to a stream."""
        totals, infos = self._totals(), self._workers()
        rejections: Counter[tuple[str, str]] = Counter(totals.pop("rejected"))
        sums: Counter[str] = Counter({name: totals.pop(name) for name in _TOTAL_COUNTERS})
        tiers: Counter[str] = Counter()
        for info in infos:
            tiers.update(info["tiers"])
            rejections.update(info["rejected"])
            sums.update({name: info[name] for name in (*_CURRENT_COUNTERS, *_TOTAL_COUNTERS)})
        counts = {name: sums[name] for name in (*_CURRENT_COUNTERS, *_TOTAL_COUNTERS)} | totals
        wire_rejected = dict(self._wire_rejected)
        return IndexStats(
            **counts, rejected=dict(rejections), workers=len(infos), tiers=dict(tiers), wire_rejected=wire_rejected
        )

    def blocks(self, worker: Worker) -> Iterator[Block]:
        """Return a worker's blocks in any order. A block occurs once for each tier and group. Raises `UnknownSourceError`."""
        pages = _query_worker(worker, self._blocks)
        return (Block(*block) for page in iter(lambda: pages.take(_BLOCKS_PER_PAGE), []) for block in page)

    def digest(self, stream: Worker) -> str:
        """Return a digest of 32 hex digits. Streams with equal blocks, hashes, tiers, groups and copies have equal digests.

        If a stream carries several ranks, the digest covers all of them. The digest does not depend on the order of events, on
        sequence numbers or on orphans. Raises `UnknownSourceError`.
        """
        return f"{_query_worker(stream, self._digest):032x}"

    # --- snapshots

    def snapshot(self, file: str | os.PathLike[str] | BinaryIO, workers: Iterable[tuple[str, int]] | None = None) -> None:
        """Write all but the overlay. A file at a path is replaced when the new file is complete. Raises `SnapshotError`.

        If `workers` (sources and ranks) are given, only their streams with all carried ranks are written, and only the models
        and the removal records of these workers. Unknown workers are skipped.
        """
        write_snapshot(self, file, None if workers is None else list(workers))

    def restore(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Replace the whole content with a snapshot. If the call raises `SnapshotError`, the index is unchanged."""
        read_snapshot(self, file)

    def merge(self, file: str | os.PathLike[str] | BinaryIO) -> list[tuple[str, int]]:
        """Add the workers of a snapshot of an index.

        Returns the added workers, sorted by source and rank, without carried ranks. Other threads can query and apply during
        the call. Other threads find each added worker either with all blocks or not at all. The streams of added workers
        continue after the sequence numbers in the snapshot: apply none of their deliveries before the call. The snapshot's
        workers are added even if they were removed from this index before. A source without a model in this index gets its
        model from the snapshot. Blocks above a memory limit are rejected (`evicted`).

        If the call raises `SnapshotError`, it has added nothing. One cause of this error is a worker that the index already
        has: remove that worker first.
        """
        return merge_snapshot(self, file)

    # --- the overlay

    def speculate(self, worker: Worker, tokens: Any, namespace: Namespace | None = None, ttl: float = 2.0) -> None:
        """Add a speculative entry: a worker is expected to hold a prompt for `ttl` seconds, because it was routed there.

        The entry counts only in `match(..., overlay=True)`, and only if it is longer than the worker's own prefix. An
        entry has at most the first 65,536 blocks of the prompt.
        """
        if not ttl > 0:
            raise ConfigError(f"invalid ttl {ttl}: expected a number of seconds above 0")
        self._speculate(*_source_and_rank(worker), tokens, namespace, self._now(), ttl)

    def _now(self) -> float:
        return self._clock()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<PrefixIndex {stats.workers} workers, {stats.blocks} blocks, {stats.bytes} bytes>"


_CURRENT_COUNTERS: Final = ("blocks", "orphans", "copies", "uncertain")
_TOTAL_COUNTERS: Final = ("unknown_removals", "orphans_dropped", "evicted", "duplicates", "void", "gaps")


def _source_and_rank(worker: Worker) -> tuple[str, int]:
    return (worker, 0) if isinstance(worker, str) else worker


def _query_worker(worker: Worker, query: Callable[[str, int], _T | None]) -> _T:
    source, rank = _source_and_rank(worker)
    answer = query(source, rank)
    if answer is None:
        raise UnknownSourceError(f"the index has no worker {source!r} with rank {rank}; workers() lists all")
    return answer
