"""From recordings to tables."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from kvevents.errors import ConfigError, RecordingError, UsageError
from kvevents.export.limits import DEFAULT_EXPORT_LIMITS, ExportLimits
from kvevents.export.residents import Moment, Residents, Salts
from kvevents.export.tables import BATCHES, EVENTS, LIFETIMES, TABLES, WORKERS, Row, TableWriter
from kvevents.recording import StrPath, read_recording
from kvevents.recording_streams import OrderedBatch, RecordedStream, RecordingStreams
from kvevents.wire import Rejected, decode_batch

_KEY_BYTES: Final = 32
_I63: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an export is."""

    recording: str
    batches: int
    rows: int
    """Of `events`."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export has written, and what it could not use."""

    folder: Path
    rows: dict[str, int]
    """Rows by table."""
    bytes: int
    """Of all files together."""
    seconds: float
    counts: dict[str, int]
    """Sums over workers of what the table `workers` counts, from `lost` on, and `malformed` messages and `unplaced` replays."""
    reject_reasons: dict[str, int]
    """What could not be read, by reason."""
    torn: list[str] = field(default_factory=list)
    """A sentence for each recording whose last line is incomplete."""


def export(
    recordings: Sequence[StrPath],
    folder: StrPath,
    *,
    tokens: bool = False,
    force: bool = False,
    limits: ExportLimits = DEFAULT_EXPORT_LIMITS,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Exported:
    """Write recordings as one data set: the `TABLES`, as Parquet files in a folder, which is made where its parent is there.

    With `tokens` the table `events` has the prompts' token ids, and must be kept as the prompts are. The tables get their names
    when all are complete; of an export that fails nothing remains. Raises `UsageError` for tables that are there, unless
    `force` replaces them, and `RecordingError` for a recording that cannot be read or a folder that cannot be written.
    """
    folder = Path(folder)
    if not recordings:
        raise ConfigError("no recording to export; name at least one")
    with _made(folder, force=force), _Export(folder, limits, progress, tokens=tokens) as work:
        for path, name in zip(recordings, _names(recordings), strict=True):
            work.read(path, name)
        return work.finish()


class _Worker:
    """One row of `workers` in the making."""

    def __init__(self, number: int, recording: str, stream: RecordedStream, residents: Residents) -> None:
        self.number = number
        self.recording = recording
        self.stream = stream
        self.residents = residents
        self.lives: set[int] = set()
        self.batches = 0
        self.counts: Counter[str] = Counter()
        self.first_at: float | None = None
        self.last_at: float | None = None

    def saw(self, placed: OrderedBatch, at: float | None) -> None:
        """Count a batch."""
        self.lives.add(placed.incarnation)
        self.batches += 1
        self.counts["lost"] += placed.gap_before
        self.last_at = at if at is not None else self.last_at
        self.first_at = self.last_at if self.first_at is None else self.first_at

    def close(self) -> None:
        """Nothing comes any more; count what its parts have counted."""
        ordering, residents = self.stream.ordering, self.residents
        self.counts.update(
            compacted=ordering.compacted, duplicates=ordering.duplicates, late=ordering.late, conflicting=ordering.conflicting
        )
        self.counts.update(residents.counts)
        self.counts.update(forgotten=residents.forgotten)

    def row(self) -> Row:
        stream = self.stream
        about = (self.number, self.recording, stream.source, stream.rank or 0, stream.endpoint, len(self.lives), self.batches)
        return (*about, *(self.counts[name] for name in COUNTED), self.first_at, self.last_at)


COUNTED: Final = tuple(column.name for column in WORKERS.columns[7:-2])
"""What is counted of each worker."""


class _Export:
    """One export; a context manager that leaves whole tables or none."""

    def __init__(self, folder: Path, limits: ExportLimits, progress: Callable[[Progress], None], *, tokens: bool) -> None:
        self._folder = folder
        self._limits = limits
        self._progress = progress
        self._tokens = tokens
        self._began = time.monotonic()
        self._salts = Salts(secrets.token_bytes(_KEY_BYTES))
        self._workers: list[_Worker] = []
        self._totals: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._torn: list[str] = []
        self._writers: dict[str, TableWriter] = {}

    def __enter__(self) -> Self:
        try:
            for table in TABLES:
                self._writers[table.name] = TableWriter(self._folder, table, self._limits, tokens=self._tokens)
        except BaseException:
            self.__exit__()
            raise
        self._batches = self._writers[BATCHES.name]
        self._events = self._writers[EVENTS.name]
        self._lifetimes = self._writers[LIFETIMES.name]
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.discard()

    def read(self, path: StrPath, name: str) -> None:
        """Take one recording."""
        reader = read_recording(path)
        streams = RecordingStreams(self._limits.ordering)
        workers: dict[RecordedStream, _Worker] = {}
        for stream, placed in streams.read(reader):
            worker = workers.get(stream)
            if worker is None:
                worker = workers[stream] = self._worker(name, stream)
            self._take(worker, placed)
            self._progress(Progress(name, self._batches.rows, self._events.rows))
        self._end(list(workers.values()))
        self._totals.update(malformed=streams.malformed, unplaced=streams.unplaced)
        if reader.truncation:
            self._torn.append(reader.truncation)

    def finish(self) -> Exported:
        """Complete the tables, and give them their names."""
        self._writers[WORKERS.name].add([worker.row() for worker in self._workers])
        for writer in self._writers.values():
            writer.close()
        files = [self._folder / table.file for table in TABLES]
        try:
            # Those of an older export go first: tables of two must never stand side by side.
            for file in files:
                file.unlink(missing_ok=True)
            for table, file in zip(TABLES, files, strict=True):
                self._writers[table.name].partial.replace(file)
            size = sum(file.stat().st_size for file in files)
        except OSError as error:
            raise RecordingError(f"cannot write to {self._folder}: {error.strerror or error}") from error
        for worker in self._workers:
            self._totals.update({name: worker.counts[name] for name in COUNTED})
        rows = {name: writer.rows for name, writer in self._writers.items()}
        seconds = time.monotonic() - self._began
        return Exported(self._folder, rows, size, seconds, dict(self._totals), dict(self._reasons), self._torn)

    def _worker(self, recording: str, stream: RecordedStream) -> _Worker:
        number = len(self._workers)
        residents = Residents(number, self._limits, self._salts, tokens=self._tokens)
        worker = _Worker(number, recording, stream, residents)
        self._workers.append(worker)
        return worker

    def _take(self, worker: _Worker, placed: OrderedBatch) -> None:
        batch = placed.batch
        decoded = decode_batch(batch.payload)
        events, ts = decoded.batch.events, decoded.batch.ts or None
        at = batch.t if ts is None else ts
        self._name(worker, decoded.batch.data_parallel_rank)
        worker.saw(placed, at)
        rejected = self._reject(worker, decoded.rejected)
        residents = worker.residents
        moment = Moment(placed.incarnation, batch.seq, at)
        residents.begin(moment, placed.gap_before)
        topic = batch.topic.decode(errors="backslashreplace")
        head = (worker.number, placed.incarnation, batch.seq, worker.stream.run, topic, ts, batch.t, batch.replayed)
        self._batches.add([(*head, len(events), *rejected, len(batch.payload), placed.gap_before)])
        for position, event in enumerate(events):
            rows = residents.apply(event, moment, position)
            self._events.add(rows, len(getattr(event, "token_ids", ())) if self._tokens else 0)
        self._keep_to_limit(worker)
        self._lifetimes.add(residents.ended())

    @staticmethod
    def _name(worker: _Worker, rank: int | None) -> None:
        if worker.stream.rank is None and rank is not None:
            worker.stream.rank = rank if -_I63 <= rank < _I63 else None

    def _reject(self, worker: _Worker, rejected: tuple[Rejected, ...]) -> tuple[int, str | None]:
        for each in rejected:
            self._reasons[each.reason] += each.count
        count = sum(each.count for each in rejected)
        worker.counts["rejected"] += count
        return count, ",".join(dict.fromkeys(each.reason for each in rejected)) or None

    def _keep_to_limit(self, worker: _Worker) -> None:
        held = sum(each.residents.held for each in self._workers)
        while held > self._limits.resident_blocks and worker.residents.held:
            held -= worker.residents.drop_oldest()

    def _end(self, workers: list[_Worker]) -> None:
        """A worker that was followed to the end was silent after its last batch; of others nobody knows what came then."""
        ends = [worker.last_at for worker in workers if worker.last_at is not None]
        for worker in workers:
            worker.residents.end(max(ends) if ends and worker.stream.is_followed else None)
            self._lifetimes.add(worker.residents.ended())
            worker.close()


def _names(recordings: Sequence[StrPath]) -> list[str]:
    """Names of files, numbered where several have the same."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for path in recordings:
        name = Path(path).name
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


@contextmanager
def _made(folder: Path, *, force: bool) -> Iterator[None]:
    """Have the folder inside, and, where it was made for an export that fails, not afterwards."""
    there = [table.file for table in TABLES if (folder / table.file).exists()]
    if there and not force:
        raise UsageError(f"{folder} holds {', '.join(there)} already; name another folder, or give --force to replace them")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"{folder} cannot be made: there is no folder {folder.absolute().parent}")
    fresh = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if fresh:
            with suppress(OSError):  # somebody else has put something there
                folder.rmdir()
        raise
