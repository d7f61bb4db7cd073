"""The tables of an export, the writer of a table, and SQL queries of an export by DuckDB."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]  # it has no types
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above

from kvevents.errors import ConfigError, RecordingError
from kvevents.recording.files import StrPath
from kvevents.settings import Positive, Settings, suggestion

_QUERY_FOLDER: Final = Path(__file__).parent / "queries"
_SUFFIX: Final = ".sql"
_DUCKDB_SETTINGS: Final[dict[str, str | bool | int | float | list[str]]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}
"""Settings of DuckDB that prevent DuckDB from downloading extensions."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query whose SQL can read the tables `workers`, `batches`, `events` and `lifetimes`."""

    name: str
    sql: str

    @property
    def question(self) -> str:
        """The question that the query answers: the first line of its comment."""
        return self.sql.partition("\n")[0].removeprefix("--").strip()


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


@cache
def queries() -> dict[str, Query]:
    """Return the built-in queries, each under its name."""
    return {file.stem: Query(file.stem, file.read_text()) for file in sorted(_QUERY_FOLDER.glob(f"*{_SUFFIX}"))}


def find_query(name: str) -> Query:
    """Return the built-in query `name` or, if `name` ends in `.sql`, the query in the file `name`. Raises `ConfigError`."""
    if name.endswith(_SUFFIX):
        try:
            return Query(name, Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"invalid query {name}: not UTF-8, {error.reason} at byte {error.start}") from error
    known = queries()
    if name not in known:
        names = ", ".join(known)
        raise ConfigError(f"unknown query {name!r}{suggestion(name, known)} expected {names}, or a file that ends in {_SUFFIX}")
    return known[name]


def run_query(folder: StrPath, query: Query) -> QueryResult:
    """Run a query on an export.

    Raises `ConfigError` for a folder without an export and for invalid SQL, and `RecordingError` for damaged tables.
    """
    folder = Path(folder)
    missing_files = [table.file for table in TABLES if not (folder / table.file).is_file()]
    if missing_files:
        missing = f"{', '.join(missing_files)} missing"
        raise ConfigError(f"{folder} does not contain an export: {missing}; write one with `kvevents export`")
    with duckdb.connect(":memory:", config=_DUCKDB_SETTINGS) as database:
        try:
            for table in TABLES:
                database.read_parquet(escape(str(folder / table.file))).create_view(table.name)
        except duckdb.Error as error:
            raise RecordingError(f"cannot read the export in {folder}: {error}; export again with --force") from error
        try:
            result = database.execute(query.sql)
            description = getattr(result, "description", None) or ()  # SQL that contains no statement has no result
            columns = tuple(column[0] for column in description)
            return QueryResult(columns, result.fetchall() if columns else [])
        except duckdb.Error as error:
            raise ConfigError(f"the query {query.name} failed: {error}") from error


Row: TypeAlias = tuple[Any, ...]


class ExportLimits(Settings, frozen=True, kw_only=True):
    """Limits of an export. Raises `ConfigError`."""

    rows: Positive = 1 << 16
    """Maximum number of rows in a row group. A row group of this size takes about 50 MB in Python until it is written."""
    tokens: Positive = 1 << 20
    """Number of token ids in a row group above which the row group is written early, because token ids make rows long."""
    resident_blocks: Positive = 4_000_000
    """Maximum number of current residencies in one export, about 700 bytes each. At this limit, a worker that stores a block
    drops its oldest blocks, and counts them as `dropped`. The device memory of 100 engines holds fewer blocks than this."""


DEFAULT_EXPORT_LIMITS: Final = ExportLimits()


class Column(NamedTuple):
    """A column of a table."""

    name: str
    type: str
    meaning: str
    is_nullable: bool = False
    """Whether the column can contain null."""


class Table(NamedTuple):
    """A table, which is stored in the file `NAME.parquet`."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @property
    def file(self) -> str:
        """Name of the table's file."""
        return f"{self.name}.parquet"

    def schema(self, *, tokens: bool = False) -> Any:
        """Return the table's `pyarrow.Schema`. If `tokens` is true, the schema of `events` has a column of token ids."""
        fields = [pa.field(column.name, column.type, column.is_nullable) for column in self.columns]
        # The token ids of the block, the first of each pair under EAGLE.
        token_ids = [pa.field("token_ids", pa.list_(pa.int64()))] if tokens and self.name == "events" else []
        return pa.schema([*fields, *token_ids])


_WORKER_COLUMN: Final = Column("worker", "int32", "number of the worker, in the table `workers`")
_INCARNATION_COLUMN: Final = Column("incarnation", "int32", "incarnation of the worker, from 0; a restart begins the next")
_BLOCK_COLUMNS: Final = (
    Column("block_hash", "uint64", "the engine's hash, opaque, of this worker and incarnation only", True),
    Column("parent_hash", "uint64", "hash of its parent; null for a root", True),
    Column("block_key", "uint64", "key of the block with its whole prefix, equal across workers; null if unknown", True),
    Column("depth", "int32", "blocks from the root, including this one; null if unknown", True),
    Column("tokens", "int64", "tokens of the block; null if unknown", True),
)
_PLACEMENT_COLUMNS: Final = (
    Column("tier", "string", "`gpu`, `cpu`, `disk`, or an unknown medium in upper case", True),
    Column("medium", "string", "the medium as the engine sends it; null if it sends none", True),
    Column("kv_group", "int64", "KV cache group of a hybrid model; 0 if the engine sends none", True),
    Column("locality", "string", "LOCAL or REMOTE, relative to the worker", True),
    Column("ownership", "string", "name of a secondary offloading tier", True),
)
_NAMESPACE_COLUMNS: Final = (
    Column("lora", "string", "name of the LoRA adapter, or its number", True),
    Column("salt", "string", "digest of the cache salt, comparable within one export only", True),
)

WORKERS: Final = Table(
    "workers",
    "one row per worker: one data-parallel rank of one engine in one recording",
    (
        _WORKER_COLUMN,
        Column("recording", "string", "name of the recording's file"),
        Column("source", "string", "name of the engine, or of the run if the recording has none"),
        Column("rank", "int64", "data-parallel rank"),
        Column("endpoint", "string", "where it publishes", True),
        Column("incarnations", "int32", "incarnations in the recording"),
        Column("batches", "int64", "batches in the table `batches`"),
        Column("lost", "int64", "batches missing in the recording, by their sequence numbers"),
        Column("compacted", "int64", "batches that a snapshot replaces: they are not lost"),
        Column("duplicates", "int64", "batches left out: recorded before, or replayed after they counted as lost"),
        Column("rejected", "int64", "events, or entire batches, that could not be decoded, and are left out"),
        Column("unkeyed", "int64", "stored blocks without a key"),
        Column("unknown_removals", "int64", "removals of blocks that were not held"),
        Column("dropped", "int64", "residencies that ended because of the limit `resident_blocks`"),
        Column("first_at", "double", "time of the first batch, seconds since the epoch", True),
        Column("last_at", "double", "time of the last batch, seconds since the epoch", True),
    ),
)

BATCHES: Final = Table(
    "batches",
    "one row per batch, in the order of sequence numbers",
    (
        _WORKER_COLUMN,
        _INCARNATION_COLUMN,
        Column("seq", "int64", "sequence number of the batch"),
        Column("run", "string", "run in the recording"),
        Column("topic", "string", "topic; a replayed batch can have that of the newest live one"),
        Column("ts", "double", "the publisher's clock, seconds since the epoch; null if it sent none", True),
        Column("recorded_at", "double", "the recorder's clock, seconds since the epoch", True),
        Column("replayed", "bool", "whether it was received by replay"),
        Column("events", "int32", "events that could be decoded"),
        Column("rejected", "int32", "events that could not be decoded; 1 for an entire batch, too"),
        Column("reject_reasons", "string", "reasons for these, separated by commas", True),
        Column("bytes", "int64", "size of the payload"),
        Column("gap_before", "int64", "batches missing directly before it"),
    ),
)

EVENTS: Final = Table(
    "events",
    "one row per event and block, in order; an event without a block has one row",
    (
        _WORKER_COLUMN,
        _INCARNATION_COLUMN,
        Column("seq", "int64", "sequence number of the batch"),
        Column("position", "int32", "position of the event in the batch, from 0"),
        Column("block", "int32", "position of the block in the event, from 0"),
        Column("step", "int64", "number of this row among those of the worker, across incarnations: a time without a clock"),
        Column("happened_at", "double", "`ts` of the batch, or `recorded_at` if it has none", True),
        Column("kind", "string", "`stored`, `removed` or `cleared`"),
        *_BLOCK_COLUMNS,
        *_PLACEMENT_COLUMNS,
        *_NAMESPACE_COLUMNS,
        Column("held", "bool", "whether the worker held the block in this placement before the event"),
        Column("unkeyed", "string", "why a stored block has no key", True),
    ),
)

LIFETIMES: Final = Table(
    "lifetimes",
    "one row per residency of a block in one placement (tier, group, locality, ownership), in the order of their ends",
    (
        _WORKER_COLUMN,
        _INCARNATION_COLUMN,
        *_BLOCK_COLUMNS,
        *_PLACEMENT_COLUMNS,
        *_NAMESPACE_COLUMNS,
        Column("copies", "int64", "largest number of copies; each occupies its own memory"),
        Column("stored_step", "int64", "`step` of the row in `events` that stored it"),
        Column("stored_at", "double", "time of its batch, seconds since the epoch", True),
        Column("ended", "string", "`removed`, `cleared`, `restart`, `end` (of the recording), or `dropped` (see `workers`)"),
        Column("ended_step", "int64", "`step` of the row that ended it, or the next one's"),
        Column("ended_at", "double", "time of the batch that ended it; for `restart` and `end` the last known time", True),
        Column("across_gap", "bool", "whether batches were lost meanwhile: it can have been removed and stored again"),
    ),
)

TABLES: Final = (WORKERS, BATCHES, EVENTS, LIFETIMES)


class TableWriter:
    """Writes one table in row groups, to a temporary file. `close` completes the file, and `discard` removes it."""

    def __init__(self, folder: Path, table: Table, limits: ExportLimits, *, tokens: bool = False) -> None:
        self.table: Final = table
        self.partial_path: Final = folder / f"{table.file}.partial"
        self.rows = 0
        """Number of rows that were added."""
        self._limits = limits
        self._schema = table.schema(tokens=tokens)
        self._pending_rows: list[Row] = []
        self._tokens = 0
        try:
            self._file = self.partial_path.open("wb")
            self._parquet = pq.ParquetWriter(self._file, self._schema, compression="zstd")
        except OSError as error:
            raise _write_error(self.partial_path, error) from error

    def add(self, rows: Sequence[Row], tokens: int = 0) -> None:
        """Add rows that contain `tokens` token ids. Raises `RecordingError` if they cannot be written."""
        self.rows += len(rows)
        self._tokens += tokens
        self._pending_rows += rows
        if len(self._pending_rows) >= self._limits.rows or self._tokens >= self._limits.tokens:
            self._write()

    def close(self) -> None:
        """Complete the file. Raises `RecordingError`."""
        self._write()
        try:
            self._parquet.close()
            self._file.close()
        except OSError as error:
            raise _write_error(self.partial_path, error) from error

    def discard(self) -> None:
        """Remove the temporary file, whether it is complete or not."""
        with suppress(OSError):  # `add` or `close` has already reported the full disk
            self._parquet.close()
        with suppress(OSError):
            self._file.close()
        self.partial_path.unlink(missing_ok=True)

    def _write(self) -> None:
        rows, self._pending_rows, self._tokens = self._pending_rows, [], 0
        for start in range(0, len(rows), self._limits.rows):
            group = rows[start : start + self._limits.rows]
            columns = zip(*group, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
            try:
                self._parquet.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
            except OSError as error:
                raise _write_error(self.partial_path, error) from error


def _write_error(path: Path, error: OSError) -> RecordingError:
    return RecordingError(f"cannot write {path}: {error.strerror or error}; free some space, or choose another folder")
