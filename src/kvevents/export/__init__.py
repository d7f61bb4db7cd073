"""Convert recordings to tables that list the changes of prefix caches, as Parquet files, and query the tables with SQL.

::

    exported = export(["run.jsonl.gz"], "out")
    print(run_query("out", find_query("block-lifetime")).rows)

Needs the extra `export` and, like `kvevents.index`, the compiled module; raises `MissingDependencyError` without them.
"""

try:
    import duckdb as _duckdb  # noqa: F401 - this import raises the error below if DuckDB is missing
    import pyarrow as pa  # type: ignore[import-untyped]  # noqa: F401 - raises the error below if PyArrow is missing
except ImportError as error:
    from kvevents.errors import MissingDependencyError

    raise MissingDependencyError(f"kvevents.export needs DuckDB and PyArrow ({error})", "export") from error

from kvevents.export.exporter import ExportProgress, ExportSummary, export
from kvevents.export.tables import (
    DEFAULT_EXPORT_LIMITS,
    TABLES,
    Column,
    ExportLimits,
    Query,
    QueryResult,
    Table,
    find_query,
    queries,
    run_query,
)

__all__ = [
    "DEFAULT_EXPORT_LIMITS",
    "TABLES",
    "Column",
    "ExportLimits",
    "ExportProgress",
    "ExportSummary",
    "Query",
    "QueryResult",
    "Table",
    "export",
    "find_query",
    "queries",
    "run_query",
]
