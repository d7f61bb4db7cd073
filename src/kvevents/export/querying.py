"""Questions to an export: SQL files shipped beside this module, or the user's own, answered by DuckDB."""

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
"""Of a query of the user's own: what is longer is some other file."""
_SETTINGS: Final[dict[str, str | bool | int | float | list[str]]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}
"""Nothing is fetched from anywhere."""


@dataclass(frozen=True, slots=True)
class Query:
    """One question. Its SQL sees the tables as `workers`, `batches`, `events` and `lifetimes`."""

    name: str
    sql: str

    @property
    def question(self) -> str:
        """The first line of its comment: what it answers."""
        return self.sql.partition("\n")[0].removeprefix("--").strip()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a query gave."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


@cache
def queries() -> dict[str, Query]:
    """The questions that are shipped, by name."""
    return {file.stem: Query(file.stem, file.read_text()) for file in sorted(_FOLDER.glob(f"*{_SUFFIX}"))}


def query_named(name: str) -> Query:
    """A shipped question, or one in a file of that name if it ends in `.sql`. Raises `ConfigError`."""
    if name.endswith(_SUFFIX):
        return Query(name, _read(Path(name)))
    found = queries().get(name)
    if found is None:
        raise ConfigError(
            f"no query is called {name!r}; there are {', '.join(queries())}, or name a file that ends in {_SUFFIX}"
        )
    return found


def ask(folder: StrPath, query: Query) -> Answer:
    """Ask an export.

    Raises `ConfigError` for a folder that holds none and for SQL that is wrong, `RecordingError` for tables that are damaged.
    """
    folder = Path(folder)
    missing = [table.file for table in TABLES if not (folder / table.file).is_file()]
    if missing:
        raise ConfigError(f"{folder} is no export: it lacks {', '.join(missing)}; write one with `kvevents export`")
    with duckdb.connect(":memory:", config=_SETTINGS) as database:
        try:
            for table in TABLES:
                database.read_parquet(escape(str(folder / table.file))).create_view(table.name)
        except duckdb.Error as error:
            raise RecordingError(f"cannot read {folder}: {error}; export again with --force") from error
        try:
            result = database.execute(query.sql)
            described = getattr(result, "description", None) or ()  # a text without a statement has no result at all
            columns = tuple(column[0] for column in described)
            return Answer(columns, result.fetchall() if columns else [])
        except duckdb.Error as error:
            raise ConfigError(f"the query {query.name} cannot be answered: {error}") from error


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_SQL_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from error
    if len(content) > MAX_SQL_BYTES:
        raise ConfigError(f"{file} has more than {MAX_SQL_BYTES >> 10} KiB, which is no query")
    return text
