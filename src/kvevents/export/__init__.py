"""Recordings as data: tables of what happened to the blocks of prefix caches, in Parquet, and questions to ask of them.

::

    exported = export(["run.jsonl.gz"], "out")
    print(ask("out", query_named("block-lifetime")).rows)

Needs `pip install 'kvevents[export]'` and the compiled module that `kvevents.index` needs; `MissingDependencyError` without.
"""

try:
    import duckdb as _duckdb  # noqa: F401 - asked for here so that its absence is told once, and readably
    import pyarrow as pa  # type: ignore[import-untyped]  # noqa: F401 - as above; it has no types
except ImportError as error:
    from kvevents.errors import MissingDependencyError

    raise MissingDependencyError(
        f"exporting needs DuckDB and PyArrow, and there is {error}: pip install 'kvevents[export]'"
    ) from error

from kvevents.export.exporting import Exported, Progress, export
from kvevents.export.limits import DEFAULT_EXPORT_LIMITS, ExportLimits
from kvevents.export.querying import Answer, Query, ask, queries, query_named
from kvevents.export.tables import TABLES, Column, Table

__all__ = [
    "DEFAULT_EXPORT_LIMITS",
    "TABLES",
    "Answer",
    "Column",
    "ExportLimits",
    "Exported",
    "Progress",
    "Query",
    "Table",
    "ask",
    "export",
    "queries",
    "query_named",
]
