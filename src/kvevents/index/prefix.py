"""The prefix index."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, Final, Self, TypeAlias

from kvevents import _native
from kvevents.errors import ConfigError, UnknownSourceError, UsageError
from kvevents.events import Heartbeat
from kvevents.index.namespace import Namespace
from kvevents.index.reports import Applied, Block, IndexLimits, IndexStats, WorkerInfo
from kvevents.index.saving import absorb, restore, snapshot
from kvevents.stream import Batch, BatchReport, Gap, RawBatch, Reset, inspect_events
from kvevents.wire import DEFAULT_WIRE_LIMITS, Rejected
from kvevents.wire.canonical import encode_canonical

Worker: TypeAlias = tuple[str, int] | str
"""A stream: source and rank, or the source alone for rank 0."""

MAX_PAYLOAD_EXPANSION: Final = 100
"""Bytes of memory that one payload can cost for each of its own, at most: while it is read, or as blocks, orphans and names
that stay. Blocks of one token in arrays of one-byte integers come to about 30, many small events in rare forms to about 80."""

_APPLIED: Final = Applied("applied")
_CLEARED: Final = Applied("applied", BatchReport(cleared=True))
_DUPLICATE: Final = Applied("duplicate")
_VOID: Final = Applied("void")
_LISTED_AT_ONCE: Final = 1_000
"""Blocks that are made into Python's objects before other threads may run: about 0.2 ms."""


class PrefixIndex(_native.NativeIndex):
    """Which worker holds how long a prefix of a prompt, on which tier: exactly what the streams said.

    Any number of threads may ask while others apply; deliveries of one stream must be applied in order, as a subscriber hands
    them out. `memory_limit` is in bytes: at the limit, new blocks are refused and counted as `evicted`, first those of workers
    with at least the average number of blocks; what is held stays. `clock` is for the overlay.
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
            raise ConfigError(f"memory_limit is {memory_limit}; it is a number of bytes above 0, or None for no limit")
        wire = DEFAULT_WIRE_LIMITS
        bounds = (
            wire.max_payload_bytes,
            wire.max_events,
            wire.max_hashes,
            wire.max_fields,
            wire.max_free_bytes,
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

    def apply(self, delivery: Batch | RawBatch | Reset | Gap) -> Applied:
        """Apply what a subscriber delivered. A batch leads where its events lead, a raw one where its payload does.

        A gap forgets nothing: what it lost may have been removals, so its stream is no longer exact. A compacted one changes
        nothing: the snapshot that follows has all that it left out. What a peer sent never raises; `UsageError` where events
        are not as `kvevents.events` declares them.

        After a batch with a heartbeat, its digest is compared with this index's of the stream: they are of the same moment.
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

    def apply_many(self, deliveries: Iterable[Batch | RawBatch | Reset | Gap]) -> list[Applied]:
        """As `apply` for each. Raw batches in a row are applied without Python's lock, so that other threads run meanwhile."""
        found: list[Applied] = []
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

    def apply_payloads(self, stream: Worker, incarnation: int, first: int, payloads: Sequence[bytes]) -> dict[int, Applied]:
        """As `apply` for a raw batch with each of them, numbered from `first` on: by their place those not simply applied.

        Other threads run meanwhile.
        """
        return self._apply_run(*_parts(stream), incarnation, first, payloads)

    def _apply_events(self, batch: Batch) -> Applied:
        try:
            payload = encode_canonical(batch.events)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"events are not as kvevents.events declares them: {error}") from error
        applied = self._apply(batch.source, batch.rank, batch.incarnation, batch.seq, payload)
        if applied is None:
            raise UsageError("events are not as kvevents.events declares them: a field has a value of another type")
        found = inspect_events(batch.events, batch.rejected)
        if found is None:
            return applied
        heartbeat, agrees = found.heartbeat, None
        if heartbeat is not None and applied.status == "applied":
            agrees = self._agrees(batch.source, batch.rank, heartbeat.digest)
        return self._told(applied, found.rejected, heartbeat, agrees)

    def _found(
        self,
        applied: Applied,
        rejected: list[tuple[str, str, int | None, bytes, int]],
        heartbeat: tuple[str, float, str, str, int] | None,
        agrees: bool | None,
    ) -> Applied:
        """With what the native decoder has found in a payload, in the order of the fields of `Rejected` and `Heartbeat`."""
        beat = None if heartbeat is None else Heartbeat(*heartbeat)
        return self._told(applied, tuple(Rejected(*one) for one in rejected), beat, agrees)

    def _told(
        self, applied: Applied, rejected: tuple[Rejected, ...], heartbeat: Heartbeat | None, agrees: bool | None
    ) -> Applied:
        """With report. Of a batch that is not applied the heartbeat still says something of the sender."""
        if applied.status != "applied":
            return applied if heartbeat is None else Applied(applied.status, BatchReport(heartbeat=heartbeat))
        with self._counting:
            for one in rejected:
                self._wire_rejected[one.reason] += one.count
        return Applied(applied.status, BatchReport(rejected, applied is _CLEARED, heartbeat, agrees))

    # --- workers

    def label(self, source: str, model: str | None) -> None:
        """Name the model that all ranks of `source` serve, now and later. Prompts find it with `Namespace(model=...)` only."""
        self._label(source, model)

    def remove_worker(self, source: Worker, rank: int | None = None) -> int:
        """Forget a worker, or all ranks of a source when no rank is given. Returns how many blocks it held.

        What is still delivered of its present life is void; a new life, or `admit`, lets it in again.
        """
        if isinstance(source, tuple):
            source, rank = source
        return self._remove(source, rank)

    def admit(self, source: Worker, rank: int = 0) -> None:
        """Let a removed worker in again, though its life be the same."""
        self._admit(*((source, rank) if isinstance(source, str) else source))

    def workers(self) -> list[WorkerInfo]:
        """Every worker, by source and rank."""
        return [WorkerInfo(**info) for info in self._workers()]

    def worker(self, worker: Worker) -> WorkerInfo:
        """One of them. Raises `UnknownSourceError`."""
        source, rank = _parts(worker)
        info = self._worker(source, rank)
        if info is None:
            raise UnknownSourceError(f"the index has no worker {source!r} with rank {rank}")
        return WorkerInfo(**info)

    def stats(self) -> IndexStats:
        """The index in numbers. Asks every stream in turn, so it waits for those that are being written to."""
        totals = self._totals()
        rejected: Counter[tuple[str, str]] = Counter(totals.pop("rejected"))
        sums: Counter[str] = Counter()
        infos = self._workers()
        for info in infos:
            rejected.update(info["rejected"])
            sums.update({name: info[name] for name in ("blocks", "orphans", "copies", *_ADDED)})
        sums.update({name: totals.pop(name) for name in _ADDED})
        counted = {name: sums[name] for name in ("blocks", "orphans", "copies", *_ADDED)}
        return IndexStats(
            **counted, rejected=dict(rejected), workers=len(infos), wire_rejected=dict(self._wire_rejected), **totals
        )

    def blocks(self, worker: Worker) -> Iterator[Block]:
        """Every block that a worker holds now, once for each tier and group, in no order. Raises `UnknownSourceError`."""
        source, rank = _parts(worker)
        found = self._blocks(source, rank)
        if found is None:
            raise UnknownSourceError(f"the index has no worker {source!r} with rank {rank}")
        return (Block(*block) for page in iter(lambda: found.take(_LISTED_AT_ONCE), []) for block in page)

    def digest(self, stream: Worker) -> str:
        """32 hex digits that are equal where the same blocks are held, with the same hashes, tiers, groups and copies.

        Order and numbers do not count, nor does what waits. Raises `UnknownSourceError`.
        """
        source, rank = _parts(stream)
        found = self._digest(source, rank)
        if found is None:
            raise UnknownSourceError(f"the index has no stream {source!r} with rank {rank}")
        return f"{found:032x}"

    # --- snapshots

    def snapshot(self, file: str | os.PathLike[str] | BinaryIO, workers: Iterable[tuple[str, int]] | None = None) -> None:
        """Write everything but the overlay. A path is replaced when all is written. Raises `SnapshotError`.

        Of `workers`, each a source and a rank, only their streams are written, their fences, and the labels of their sources;
        those that the index does not know are passed over.
        """
        snapshot(self, file, None if workers is None else list(workers))

    def restore(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Replace everything with what `snapshot` wrote; on `SnapshotError` nothing has changed."""
        restore(self, file)

    def absorb(self, file: str | os.PathLike[str] | BinaryIO) -> list[tuple[str, int]]:
        """Add what `snapshot` wrote, of an index or some of its workers. Returns the workers that came, by source and rank.

        Others may ask and apply meanwhile; they find each of these workers with all of its blocks, or not at all. Their streams
        go on behind the numbers that the snapshot has: deliver nothing of them before. Fences against them are lifted, and
        labels are taken for sources that have none here. What a memory limit has no room for is refused (`evicted`).

        On `SnapshotError` nothing of it has come, as when the index holds one of the workers: remove that one first.
        """
        return absorb(self, file)

    # --- the overlay

    def speculate(self, worker: Worker, tokens: Any, namespace: Namespace | None = None, ttl: float = 2.0) -> None:
        """Expect a worker to hold a prompt soon, because it was sent there; for `ttl` seconds.

        Counts in `match(..., overlay=True)` only, as the longer of what is held and what is expected.
        """
        if not ttl > 0:
            raise ConfigError(f"ttl is {ttl}; it is a number of seconds above 0")
        self._speculate(*_parts(worker), tokens, namespace, self._now(), ttl)

    def _now(self) -> float:
        return self._clock()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<PrefixIndex {stats.workers} workers, {stats.blocks} blocks, {stats.bytes} bytes>"


_ADDED: Final = ("unknown_removals", "orphans_dropped", "evicted", "duplicates", "void", "gaps")


def _parts(worker: Worker) -> tuple[str, int]:
    return (worker, 0) if isinstance(worker, str) else worker
