"""Converts recordings to tables."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvevents.errors import ConfigError, RecordingError, UsageError
from kvevents.export import tables
from kvevents.export.residency import I64_END, BatchPosition, WorkerCache
from kvevents.recording import read_recording
from kvevents.recording.deliveries import RecordedStream, RecordingDeliveries
from kvevents.recording.files import StrPath
from kvevents.stream import Gap, RawBatch
from kvevents.wire import decode_batch


@dataclass(frozen=True, slots=True)
class ExportProgress:
    """Progress of an export."""

    recording: str
    batches: int
    rows: int
    """Rows of `events`."""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """The result of an export, with counts of lost, rejected and ignored data."""

    folder: Path
    rows: dict[str, int]
    """Maps the name of each table to its number of rows."""
    bytes: int
    """Total size of the files in bytes."""
    seconds: float
    counts: dict[str, int]
    """Sum over all workers of each of `COUNTER_COLUMNS`, and the numbers of `malformed` messages and `unplaced` batches."""
    reject_reasons: dict[str, int]
    """Maps each reason to the number of events that could not be decoded."""
    truncated: list[str] = field(default_factory=list)
    """A message for each recording whose last line is incomplete."""


def export(
    recordings: Sequence[StrPath],
    folder: StrPath,
    *,
    tokens: bool = False,
    force: bool = False,
    limits: tables.ExportLimits = tables.DEFAULT_EXPORT_LIMITS,
    progress: Callable[[ExportProgress], None] = lambda _: None,
) -> ExportSummary:
    """Write recordings as one data set: the `TABLES`, as Parquet files in a folder. Creates the folder if its parent exists.

    If `tokens` is true, the table `events` contains the prompts' token ids, and must be protected like the prompts. The files
    get their final names when all files are complete. A failed export leaves no files. Raises `UsageError` if tables exist and
    `force` is not set, and `RecordingError` for a recording that cannot be read or a folder that cannot be written.
    """
    folder = Path(folder)
    if not recordings:
        raise ConfigError("no recording to export: name at least one")
    with _create_folder(folder, force=force), ExitStack() as stack:
        writers: dict[str, tables.TableWriter] = {}
        for table in tables.TABLES:
            writers[table.name] = tables.TableWriter(folder, table, limits, tokens=tokens)
            stack.callback(writers[table.name].discard)
        work = _Export(folder, limits, progress, writers, tokens=tokens)
        for path, name in zip(recordings, _unique_names(recordings), strict=True):
            work.read(path, name)
        return work.finish()


class _Worker:
    """A worker of a recording: its counters, its cache, and its row of `workers`."""

    def __init__(self, number: int, recording: str, stream: RecordedStream, cache: WorkerCache) -> None:
        self.number = number
        self.recording = recording
        self.stream = stream
        self.cache = cache
        self.incarnations: set[int] = set()
        self.batches = 0
        self.counts: Counter[str] = Counter()
        self.gap_before = 0
        """Number of batches that were lost since the newest counted batch."""
        self.first_at: float | None = None
        self.last_at: float | None = None

    def count_batch(self, incarnation: int, time: float | None) -> None:
        """Count a batch that has the timestamp `time`."""
        self.incarnations.add(incarnation)
        self.batches += 1
        self.gap_before = 0
        self.last_at = time if time is not None else self.last_at
        self.first_at = self.last_at if self.first_at is None else self.first_at

    def row(self) -> tables.Row:
        """Return this worker's row of the table `workers`. Call this after the last batch."""
        stream = self.stream
        self.counts["duplicates"] = stream.duplicates
        self.counts.update(self.cache.counts)
        about = (self.number, self.recording, stream.source, stream.rank or 0, stream.endpoint)
        counts = (len(self.incarnations), self.batches, *(self.counts[name] for name in COUNTER_COLUMNS))
        return (*about, *counts, self.first_at, self.last_at)


COUNTER_COLUMNS: Final = tuple(column.name for column in tables.WORKERS.columns[7:-2])
"""Names of those columns of `workers` that are counters."""


class _Export:
    """Reads recordings and writes the tables of one export."""

    def __init__(
        self,
        folder: Path,
        limits: tables.ExportLimits,
        progress: Callable[[ExportProgress], None],
        writers: dict[str, tables.TableWriter],
        *,
        tokens: bool,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._progress = progress
        self._tokens = tokens
        self._start = time.monotonic()
        self._salt_key = secrets.token_bytes(32)
        self._workers: list[_Worker] = []
        self._totals: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._truncations: list[str] = []
        self._writers = writers
        self._batches = writers[tables.BATCHES.name]
        self._events = writers[tables.EVENTS.name]
        self._lifetimes = writers[tables.LIFETIMES.name]

    def read(self, path: StrPath, name: str) -> None:
        """Add one recording."""
        reader = read_recording(path)
        streams = RecordingDeliveries(waits=True)
        workers: dict[RecordedStream, _Worker] = {}
        for stream, delivery in streams.read(reader):
            worker = workers.get(stream)
            if worker is None:
                cache = WorkerCache(len(self._workers), self._salt_key, tokens=self._tokens)
                worker = workers[stream] = _Worker(len(self._workers), name, stream, cache)
                self._workers.append(worker)
            if isinstance(delivery, Gap):
                count = delivery.last + 1 - delivery.first
                worker.counts["compacted" if delivery.compacted else "lost"] += count
                worker.gap_before += 0 if delivery.compacted else count
            elif isinstance(delivery, RawBatch):
                self._add_batch(worker, delivery)
                self._progress(ExportProgress(name, self._batches.rows, self._events.rows))
        # Residencies end at the end of the recording, or at the newest batch of a worker that had left.
        ends = [worker.last_at for worker in workers.values() if worker.last_at is not None]
        for worker in workers.values():
            worker.cache.finish(max(ends) if ends and worker.stream.is_followed else None)
            self._lifetimes.add(worker.cache.take_ended())
        self._totals.update(malformed=streams.malformed, unplaced=streams.unplaced)
        if reader.truncation:
            self._truncations.append(reader.truncation)

    def finish(self) -> ExportSummary:
        """Complete the tables, and give the files their final names."""
        self._writers[tables.WORKERS.name].add([worker.row() for worker in self._workers])
        for writer in self._writers.values():
            writer.close()
        files = [self._folder / table.file for table in tables.TABLES]
        try:
            # Files of an older export are removed first, so that the folder never holds tables of two exports.
            for file in files:
                file.unlink(missing_ok=True)
            for table, file in zip(tables.TABLES, files, strict=True):
                self._writers[table.name].partial_path.replace(file)
            size = sum(file.stat().st_size for file in files)
        except OSError as error:
            raise RecordingError(f"cannot write to {self._folder}: {error.strerror or error}") from error
        for worker in self._workers:
            self._totals.update({name: worker.counts[name] for name in COUNTER_COLUMNS})
        rows = {name: writer.rows for name, writer in self._writers.items()}
        seconds = time.monotonic() - self._start
        return ExportSummary(self._folder, rows, size, seconds, dict(self._totals), dict(self._reasons), self._truncations)

    def _add_batch(self, worker: _Worker, batch: RawBatch) -> None:
        t = worker.stream.recorded_at
        decoding = decode_batch(batch.payload)
        events, ts = decoding.batch.events, decoding.batch.ts or None
        time = t if ts is None else ts
        rank = decoding.batch.data_parallel_rank
        if worker.stream.rank is None and rank is not None and -I64_END <= rank < I64_END:
            worker.stream.rank = rank
        gap_before = worker.gap_before
        worker.count_batch(batch.incarnation, time)
        reasons = Counter[str]()
        for rejection in decoding.rejected:
            reasons[rejection.reason] += rejection.count
        self._reasons += reasons
        worker.counts["rejected"] += reasons.total()
        cache = worker.cache
        in_batch = BatchPosition(batch.incarnation, batch.seq, time)
        cache.begin_batch(in_batch, gap_before)
        topic = batch.topic.decode(errors="backslashreplace")
        head = (worker.number, batch.incarnation, batch.seq, worker.stream.run, topic, ts, t, batch.replayed)
        self._batches.add([(*head, len(events), reasons.total(), ",".join(reasons) or None, len(batch.payload), gap_before)])
        for position, event in enumerate(events):
            rows = cache.apply(event, in_batch, position)
            self._events.add(rows, len(getattr(event, "token_ids", ())) if self._tokens else 0)
        residencies = sum(other.cache.residencies for other in self._workers)
        while residencies > self._limits.resident_blocks and worker.cache.residencies:
            residencies -= worker.cache.drop_oldest()
        self._lifetimes.add(cache.take_ended())


def _unique_names(recordings: Sequence[StrPath]) -> list[str]:
    """Return the file name of each recording. A name that has occurred before gets a number, for example `run.jsonl (2)`."""
    counts: Counter[str] = Counter()
    names: list[str] = []
    for path in recordings:
        name = Path(path).name
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return names


@contextmanager
def _create_folder(folder: Path, *, force: bool) -> Iterator[None]:
    """Create the folder if it does not exist, and remove it again if the export fails."""
    existing = [table.file for table in tables.TABLES if (folder / table.file).exists()]
    if existing and not force:
        hint = "choose another folder, or pass --force to replace them"
        raise UsageError(f"{folder} already contains {', '.join(existing)}: {hint}")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"cannot create {folder}: the folder {folder.absolute().parent} does not exist")
    is_new = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {folder}: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # another process may have put a file into the folder
                folder.rmdir()
        raise
