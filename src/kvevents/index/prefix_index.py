"""The prefix index."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, Final, Self, TypeAlias

from kvevents.errors import ConfigError, UnknownSourceError, UsageError
from kvevents.events import Heartbeat
from kvevents.index.data_types import ApplyResult, Block, IndexLimits, IndexStats, WorkerInfo
from kvevents.index.namespace import Namespace
from kvevents.index.snapshot_file import merge_snapshot, read_snapshot, write_snapshot
from kvevents.stream import Batch, BatchReport, Gap, RawBatch, Reset, inspect_events
from kvevents.wire import DEFAULT_WIRE_LIMITS, Rejected
from kvevents.wire.canonical import encode_canonical
from kvevents_native import _native

Worker: TypeAlias = tuple[str, int] | str
"""Source and rank, or the source alone for rank 0."""

MAX_PAYLOAD_EXPANSION: Final = 100
"""Most bytes of memory that one byte of a payload can need, while it is decoded or as blocks, orphans and names that stay.
Blocks of one token in arrays of one-byte integers need about 30, many small events in rare forms about 80."""

_APPLIED: Final = ApplyResult("applied")
_CLEARED: Final = ApplyResult("applied", BatchReport(cleared=True))
_DUPLICATE: Final = ApplyResult("duplicate")
_VOID: Final = ApplyResult("void")
_BLOCKS_PER_PAGE: Final = 1_000
"""Blocks converted to Python objects before other threads can run: about 0.2 ms."""


class PrefixIndex(_native.NativeIndex):
    """Finds which worker holds how long a prefix of a prompt, on which tier: exactly what the streams announced.

    Thread-safe. Deliveries of one stream must be applied in the order in which a subscriber returns them. `memory_limit` is in
    bytes. At the limit new blocks are rejected and counted as `evicted`, first those of workers with at least the average
    number of blocks; blocks that are held stay. `clock` times the overlay.
    """

    def __new__(
        cls,
        *,
        memory_limit: int | None = None,
        limits: IndexLimits = IndexLimits(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """See the class. Raises `ConfigError`."""
        if memory_limit is not None and memory_limit < 1:
            raise ConfigError(f"invalid memory_limit {memory_limit}: expected a number of bytes above 0, or None for no limit")
        wire = DEFAULT_WIRE_LIMITS
        bounds = (
            wire.max_payload_bytes,
            wire.max_events,
            wire.max_hashes,
            wire.max_fields,
            wire.max_free_form_bytes,
            wire.max_nesting,
        )
        self = super().__new__(
            cls,
            bounds,
            memory_limit,
            asdict(limits),
            (_APPLIED, _CLEARED, _DUPLICATE, _VOID),
        )
        self._clock = clock
        self._wire_rejected = Counter()
        self._counting = threading.Lock()
        return self

    _clock: Callable[[], float]
    _wire_rejected: Counter[str]
    _counting: threading.Lock

    # --- deliveries

    def apply(self, delivery: Batch | RawBatch | Reset | Gap) -> ApplyResult:
        """Apply a delivery of a subscriber.

        A gap removes nothing: the lost batches can have been removals, so its stream is not exact any more. A compacted gap
        changes nothing: the snapshot that follows it contains all that was skipped. Content that a peer sent never raises.
        Raises `UsageError` for events whose fields do not have the types that `kvevents.events` declares.

        After a batch with a heartbeat the heartbeat's digest and its attestation are compared with the stream in this index.
        """
        if isinstance(delivery, RawBatch):
            stream = (delivery.source, delivery.rank)
            return self.apply_payload(stream, delivery.incarnation, delivery.seq, delivery.payload)
        if isinstance(delivery, Batch):
            return self._apply_events(delivery)
        if isinstance(delivery, Gap):
            if delivery.compacted:
                return _APPLIED
            return self._gap(delivery.source, delivery.rank, delivery.incarnation, delivery.last)
        return self._reset(delivery.source, delivery.rank, delivery.incarnation)

    def apply_many(self, deliveries: Iterable[Batch | RawBatch | Reset | Gap]) -> list[ApplyResult]:
        """Apply several deliveries in order. Consecutive raw batches are applied without the interpreter lock."""
        found: list[ApplyResult] = []
        raw: list[RawBatch] = []
        for delivery in deliveries:
            if isinstance(delivery, RawBatch):
                raw.append(delivery)
                continue
            found += self._apply_many(raw)
            raw.clear()
            found.append(self.apply(delivery))
        found += self._apply_many(raw)
        return found

    def apply_payloads(self, stream: Worker, incarnation: int, first: int, payloads: Sequence[bytes]) -> dict[int, ApplyResult]:
        """Apply payloads as raw batches numbered from `first` on, without the interpreter lock.

        Returns the outcome of each that was not simply applied, by its position.
        """
        return self._apply_run(*_parts(stream), incarnation, first, payloads)

    def _apply_events(self, batch: Batch) -> ApplyResult:
        try:
            payload = encode_canonical(batch.events)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"events do not have the types that kvevents.events declares: {error}") from error
        applied = self._apply(batch.source, batch.rank, batch.incarnation, batch.seq, payload)
        if applied is None:
            raise UsageError("events do not have the types that kvevents.events declares: a field has a value of another type")
        found = inspect_events(batch.events, batch.rejected)
        if found is None:
            return applied
        heartbeat, agrees, attested = found.heartbeat, None, None
        if heartbeat is not None and applied.status == "applied":
            agrees, attested = self._compare(batch.source, batch.rank, heartbeat.digest, heartbeat.attestation)
        return self._with_report(applied, found.rejected, heartbeat, agrees, attested)

    def _found(
        self,
        applied: ApplyResult,
        rejected: list[tuple[str, str, int | None, bytes, int]],
        heartbeat: tuple[str | None, float, str, str, int, int | None] | None,
        agrees: bool | None,
        attested: bool | None,
    ) -> ApplyResult:
        """Called by the native decoder, with findings in the order of the fields of `Rejected` and `Heartbeat`."""
        sent = None if heartbeat is None else Heartbeat(*heartbeat)
        return self._with_report(applied, tuple(Rejected(*one) for one in rejected), sent, agrees, attested)

    def _with_report(
        self,
        applied: ApplyResult,
        rejected: tuple[Rejected, ...],
        heartbeat: Heartbeat | None,
        agrees: bool | None,
        attested: bool | None,
    ) -> ApplyResult:
        """Add a report. The heartbeat of a batch that is not applied is reported too, since it describes the sender."""
        if applied.status != "applied":
            return applied if heartbeat is None else ApplyResult(applied.status, BatchReport(heartbeat=heartbeat))
        with self._counting:
            for one in rejected:
                self._wire_rejected[one.reason] += one.count
        return ApplyResult(applied.status, BatchReport(rejected, applied is _CLEARED, heartbeat, agrees, attested))

    # --- workers

    def set_model(self, source: str, model: str | None) -> None:
        """Set the model of all present and future ranks of `source`. Prompts match them with `Namespace(model=...)` only."""
        self._label(source, model)

    def set_drafts(self, source: str, groups: Iterable[int] | None) -> None:
        """Set the KV cache groups of the draft model (EAGLE, MTP) of all present and future ranks of `source`.

        An empty iterable means all groups, None no draft model, which is the default. vLLM computes the last block of a hit in
        such groups again, and no event says so. Snapshots do not contain this setting.
        """
        self._set_drafts(source, None if groups is None else list(groups))

    def remove_worker(self, source: Worker, rank: int | None = None) -> int:
        """Remove a worker, or all ranks of a source if no rank is given. Returns the number of blocks that it held.

        Further deliveries of its current incarnation are void. A new incarnation is accepted again, or any after `readmit`.
        """
        if isinstance(source, tuple):
            source, rank = source
        return self._remove(source, rank)

    def readmit(self, source: Worker, rank: int = 0) -> None:
        """Accept deliveries of a removed worker again, even those of the same incarnation."""
        self._admit(*((source, rank) if isinstance(source, str) else source))

    def workers(self) -> list[WorkerInfo]:
        """Return all workers, sorted by source and rank."""
        return [WorkerInfo(**info) for info in self._workers()]

    def worker(self, worker: Worker) -> WorkerInfo:
        """Return one worker. Raises `UnknownSourceError`."""
        source, rank = _parts(worker)
        info = self._worker(source, rank)
        if info is None:
            raise UnknownSourceError(f"the index has no worker {source!r} with rank {rank}")
        return WorkerInfo(**info)

    def stats(self) -> IndexStats:
        """Return statistics. Reads one stream after the other, and waits for those that are being written to."""
        totals = self._totals()
        rejected: Counter[tuple[str, str]] = Counter(totals.pop("rejected"))
        sums: Counter[str] = Counter()
        infos = self._workers()
        for info in infos:
            rejected.update(info["rejected"])
            sums.update({name: info[name] for name in (*_HELD, *_SUMMED)})
        sums.update({name: totals.pop(name) for name in _SUMMED})
        counted = {name: sums[name] for name in (*_HELD, *_SUMMED)}
        return IndexStats(
            **counted, rejected=dict(rejected), workers=len(infos), wire_rejected=dict(self._wire_rejected), **totals
        )

    def blocks(self, worker: Worker) -> Iterator[Block]:
        """Return the blocks that a worker holds now, once for each tier and group, unordered. Raises `UnknownSourceError`."""
        source, rank = _parts(worker)
        found = self._blocks(source, rank)
        if found is None:
            raise UnknownSourceError(f"the index has no worker {source!r} with rank {rank}")
        return (Block(*block) for page in iter(lambda: found.take(_BLOCKS_PER_PAGE), []) for block in page)

    def digest(self, stream: Worker) -> str:
        """Return 32 hex digits that are equal for equal blocks, with the same hashes, tiers, groups and copies.

        The order of events, sequence numbers and orphans do not count. Raises `UnknownSourceError`.
        """
        source, rank = _parts(stream)
        found = self._digest(source, rank)
        if found is None:
            raise UnknownSourceError(f"the index has no stream {source!r} with rank {rank}")
        return f"{found:032x}"

    # --- snapshots

    def snapshot(self, file: str | os.PathLike[str] | BinaryIO, workers: Iterable[tuple[str, int]] | None = None) -> None:
        """Write everything except the overlay. A path is replaced when everything is written. Raises `SnapshotError`.

        With `workers` (sources and ranks) only their streams are written, with the models of their sources and records of
        their removal. Unknown workers are skipped.
        """
        write_snapshot(self, file, None if workers is None else list(workers))

    def restore(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Replace everything with a snapshot. Raises `SnapshotError`, and has changed nothing then."""
        read_snapshot(self, file)

    def merge(self, file: str | os.PathLike[str] | BinaryIO) -> list[tuple[str, int]]:
        """Add the workers of a snapshot of an index. Returns them, sorted by source and rank.

        Other threads can query and apply meanwhile; they find each of these workers with all of its blocks or not at all. Their
        streams continue after the sequence numbers in the snapshot: deliver nothing of them before. They are accepted even if
        they were removed here. Models are set for sources that have none here. Blocks above a memory limit are rejected
        (`evicted`).

        Raises `SnapshotError`, and has added nothing then, for example if the index already has one of the workers: remove that
        one first.
        """
        return merge_snapshot(self, file)

    # --- the overlay

    def speculate(self, worker: Worker, tokens: Any, namespace: Namespace | None = None, ttl: float = 2.0) -> None:
        """Add a speculative entry: a worker is expected to hold a prompt for `ttl` seconds, because it was sent there.

        It counts in `match(..., overlay=True)` only, if it is longer than what the worker holds.
        """
        if not ttl > 0:
            raise ConfigError(f"invalid ttl {ttl}: expected a number of seconds above 0")
        self._speculate(*_parts(worker), tokens, namespace, self._now(), ttl)

    def _now(self) -> float:
        return self._clock()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<PrefixIndex {stats.workers} workers, {stats.blocks} blocks, {stats.bytes} bytes>"


_HELD: Final = ("blocks", "orphans", "copies", "uncertain")
_SUMMED: Final = ("unknown_removals", "orphans_dropped", "evicted", "duplicates", "void", "gaps", "neutral_events")


def _parts(worker: Worker) -> tuple[str, int]:
    return (worker, 0) if isinstance(worker, str) else worker
