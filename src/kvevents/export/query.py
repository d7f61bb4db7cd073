"""Queries of an export: SQL files beside this module, or the user's own, which DuckDB runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any, Final

import duckdb

from kvevents.errors import ConfigError, RecordingError
from kvevents.export.tables import TABLES
from kvevents.recording import StrPath

_FOLDER: Final = Path(__file__).parent / "queries"
_SUFFIX: Final = ".sql"
MAX_SQL_BYTES: Final = 1 << 20
"""Largest size of the user's own query: a longer file is not a query."""
_SETTINGS: Final[dict[str, str | bool | int | float | list[str]]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}
"""DuckDB must not download extensions."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query. Its SQL can read the tables `workers`, `batches`, `events` and `lifetimes`."""

    name: str
    sql: str

    @property
    def question(self) -> str:
        """The question that it answers: the first line of its comment."""
        return self.sql.partition("\n")[0].removeprefix("--").strip()


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


@cache
def queries() -> dict[str, Query]:
    """Return the built-in queries by name."""
    return {file.stem: Query(file.stem, file.read_text()) for file in sorted(_FOLDER.glob(f"*{_SUFFIX}"))}


def find_query(name: str) -> Query:
    """Return a built-in query, or read the file `name` if it ends in `.sql`. Raises `ConfigError`."""
    if name.endswith(_SUFFIX):
        return Query(name, _read(Path(name)))
    found = queries().get(name)
    if found is None:
        raise ConfigError(f"invalid query {name!r}: expected one of {', '.join(queries())}, or a file that ends in {_SUFFIX}")
    return found


def run_query(folder: StrPath, query: Query) -> QueryResult:
    """Run a query on an export.

    Raises `ConfigError` for a folder without an export and for invalid SQL, and `RecordingError` for damaged tables.
    """
    folder = Path(folder)
    missing = [table.file for table in TABLES if not (folder / table.file).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} does not contain an export: {', '.join(missing)} missing; write one with `kvevents export`"
        )
    with duckdb.connect(":memory:", config=_SETTINGS) as database:
        try:
            for table in TABLES:
                database.read_parquet(escape(str(folder / table.file))).create_view(table.name)
        except duckdb.Error as error:
            raise RecordingError(f"cannot read {folder}: {error}; export again with --force") from error
        try:
            found = database.execute(query.sql)
            described = getattr(found, "description", None) or ()  # a text without a statement has no result
            columns = tuple(column[0] for column in described)
            return QueryResult(columns, found.fetchall() if columns else [])
        except duckdb.Error as error:
            raise ConfigError(f"the query {query.name} failed: {error}") from error


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_SQL_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"invalid query {file}: not UTF-8, {error.reason} at byte {error.start}") from error
    if len(content) > MAX_SQL_BYTES:
        raise ConfigError(f"invalid query {file}: more than {MAX_SQL_BYTES >> 10} KiB")
    return text
