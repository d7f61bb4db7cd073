"""The tables of an export, and how they are written: in row groups of bounded size, under names of their own until complete."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above

from kvevents.errors import RecordingError
from kvevents.export.limits import ExportLimits

Row: TypeAlias = tuple[Any, ...]

_TYPES: Final[dict[str, Any]] = {
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "double": pa.float64(),
    "string": pa.string(),
    "int64[]": pa.list_(pa.int64()),
}


class Column(NamedTuple):
    """One column. All may hold null where `nullable`."""

    name: str
    type: str
    meaning: str
    nullable: bool = False


class Table(NamedTuple):
    """One table: a file `NAME.parquet`."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @property
    def file(self) -> str:
        """Its name in the folder."""
        return f"{self.name}.parquet"

    def schema(self, *, tokens: bool = False) -> Any:
        """Its `pyarrow.Schema`; token ids are a column of `events` only where they are wanted."""
        columns = [*self.columns, *([TOKEN_IDS] if tokens and self.name == "events" else [])]
        return pa.schema([pa.field(column.name, _TYPES[column.type], column.nullable) for column in columns])


_WORKER: Final = Column("worker", "int32", "number of the worker, in the table `workers`")
_LIFE: Final = Column("life", "int32", "lives of the worker before this one; a restart begins the next")
_BLOCK: Final = (
    Column("block_hash", "uint64", "the engine's hash, opaque, of this worker and life only", True),
    Column("parent_hash", "uint64", "hash of the block before it; null at the root", True),
    Column("block_key", "uint64", "key of the block with its whole prefix, equal across workers; null where unknown", True),
    Column("depth", "int32", "blocks from the root, itself included; null where unknown", True),
    Column("tokens", "int64", "tokens of the block; null where unknown", True),
)
_PLACE: Final = (
    Column("tier", "string", "`gpu`, `cpu`, `disk`, or an unknown medium in upper case", True),
    Column("medium", "string", "the medium as the engine names it; null where it names none", True),
    Column("kv_group", "int64", "KV cache group of a hybrid model; 0 where none is named", True),
    Column("locality", "string", "LOCAL or REMOTE, relative to the worker", True),
    Column("ownership", "string", "name of a secondary offloading tier", True),
)
_NAMESPACE: Final = (
    Column("lora", "string", "name of the LoRA, or its number", True),
    Column("salt", "string", "digest of the cache salt, comparable within one export only", True),
)
TOKEN_IDS: Final = Column("token_ids", "int64[]", "token ids of the block, the first of each pair under EAGLE", True)

WORKERS: Final = Table(
    "workers",
    "one row per worker: one data-parallel rank of one engine in one recording",
    (
        _WORKER,
        Column("recording", "string", "name of the recording's file"),
        Column("source", "string", "name of the engine; of the run where the recording has none"),
        Column("rank", "int64", "data-parallel rank"),
        Column("endpoint", "string", "where it published", True),
        Column("lives", "int32", "lives that the recording tells of"),
        Column("batches", "int64", "batches in the table `batches`"),
        Column("lost", "int64", "batches that the recording lacks, as their numbers tell"),
        Column("compacted", "int64", "batches that a snapshot represents: nothing of them is lost"),
        Column("duplicates", "int64", "batches that came again and count once"),
        Column("late", "int64", "replayed batches that came when their place was given up, and are left out"),
        Column("conflicting", "int64", "replayed batches of another life, left out"),
        Column("rejected", "int64", "events, or whole batches, that could not be read, and are left out"),
        Column("unkeyed", "int64", "stored blocks without a key"),
        Column("unknown_removals", "int64", "removals of blocks that were not held"),
        Column("dropped", "int64", "residencies that were cut short because of the limit `resident_blocks`"),
        Column("forgotten", "int64", "blocks that the limit `remembered_keys` has cost their reuse distance"),
        Column("first_at", "double", "time of the first batch, seconds since the epoch", True),
        Column("last_at", "double", "time of the last batch, seconds since the epoch", True),
    ),
)

BATCHES: Final = Table(
    "batches",
    "one row per batch, in the order of the numbers",
    (
        _WORKER,
        _LIFE,
        Column("seq", "int64", "the batch's number"),
        Column("run", "string", "run in the recording"),
        Column("topic", "string", "topic, of a replayed batch perhaps that of the newest live one"),
        Column("ts", "double", "the publisher's clock, seconds since the epoch; null where it sent none", True),
        Column("recorded_at", "double", "the recorder's clock, seconds since the epoch", True),
        Column("replayed", "bool", "whether it came by replay"),
        Column("events", "int32", "events that could be read"),
        Column("rejected", "int32", "events that could not; 1 also for a whole batch"),
        Column("reject_reasons", "string", "why not, as words with commas between", True),
        Column("bytes", "int64", "size of the payload"),
        Column("gap_before", "int64", "batches that are missing right before it"),
    ),
)

EVENTS: Final = Table(
    "events",
    "one row per event and block, in order; an event that names no block has one row",
    (
        _WORKER,
        _LIFE,
        Column("seq", "int64", "number of the batch"),
        Column("position", "int32", "place of the event in the batch, from 0"),
        Column("block", "int32", "place of the block in the event, from 0"),
        Column("step", "int64", "number of this row among those of the worker, across lives: its time without a clock"),
        Column("happened_at", "double", "`ts` of the batch, or else `recorded_at`", True),
        Column("kind", "string", "`stored`, `removed` or `cleared`"),
        *_BLOCK,
        *_PLACE,
        *_NAMESPACE,
        Column("held", "bool", "whether the block was in that place already; of a removal, whether it was there to be removed"),
        Column("unkeyed", "string", "why a stored block has no key", True),
    ),
)

LIFETIMES: Final = Table(
    "lifetimes",
    "one row per residency of a block in one place (tier, group, locality, ownership), in the order of their ends",
    (
        _WORKER,
        _LIFE,
        *_BLOCK,
        *_PLACE,
        *_NAMESPACE,
        Column("copies", "int64", "copies of the block at its most; each occupies memory of its own"),
        Column("stored_seq", "int64", "batch that stored it"),
        Column("stored_position", "int32", "place of the event in that batch"),
        Column("stored_block", "int32", "place of the block in that event"),
        Column("stored_step", "int64", "`step` of that row in `events`"),
        Column("stored_at", "double", "time of that batch, seconds since the epoch", True),
        Column("ended", "string", "`removed`, `cleared`, `restart`, `end` of what is recorded, or `dropped`, see `workers`"),
        Column("ended_step", "int64", "`step` of the row that ended it, or the next one's"),
        Column("ended_at", "double", "time of the batch that ended it; of `restart` and `end`, until when it was known", True),
        Column("across_gap", "bool", "whether batches were lost meanwhile: it may have gone and come back unseen"),
        Column("reuse_distance", "int64", "different blocks that came to this place since this one was removed from it, "
            "before it came again; null at a first time and after a clear or restart", True),
    ),
)  # fmt: skip

TABLES: Final = (WORKERS, BATCHES, EVENTS, LIFETIMES)


class TableWriter:
    """Writes one table, streaming. `close` completes the file, `discard` removes it; the name is temporary either way."""

    def __init__(self, folder: Path, table: Table, limits: ExportLimits, *, tokens: bool = False) -> None:
        self.table: Final = table
        self.partial: Final = folder / f"{table.file}.partial"
        self.rows = 0
        """Rows given to `add`."""
        self._limits = limits
        self._schema = table.schema(tokens=tokens)
        self._gathered: list[Row] = []
        self._tokens = 0
        try:
            self._file = self.partial.open("wb")
            self._parquet = pq.ParquetWriter(self._file, self._schema, compression="zstd")
        except OSError as error:
            raise _cannot_write(self.partial, error) from error

    def add(self, rows: Sequence[Row], tokens: int = 0) -> None:
        """Take rows, with how many token ids are in them. Raises `RecordingError` when the disk cannot take them."""
        self.rows += len(rows)
        self._tokens += tokens
        self._gathered += rows
        if len(self._gathered) >= self._limits.rows or self._tokens >= self._limits.tokens:
            self._write()

    def close(self) -> None:
        """Complete the file. Raises `RecordingError`."""
        self._write()
        try:
            self._parquet.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise _cannot_write(self.partial, error) from error

    def discard(self) -> None:
        """Remove the file, complete or not."""
        with suppress(OSError):  # a disk that is full is told already
            self._parquet.close()
        with suppress(OSError):
            self._file.close()
        self.partial.unlink(missing_ok=True)

    def _write(self) -> None:
        rows, self._gathered, self._tokens = self._gathered, [], 0
        for start in range(0, len(rows), self._limits.rows):
            group = rows[start : start + self._limits.rows]
            columns = zip(*group, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
            try:
                self._parquet.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
            except OSError as error:
                raise _cannot_write(self.partial, error) from error


def _cannot_write(path: Path, error: OSError) -> RecordingError:
    return RecordingError(f"cannot write {path}: {error.strerror or error}; free some space, or name another folder")
