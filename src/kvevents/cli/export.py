"""`kvevents export`: recordings as tables, and questions to ask of them."""

from __future__ import annotations

import gc
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvevents.cli import options
from kvevents.cli.command import OK, Command, CommandLineError
from kvevents.cli.console import Console, Span
from kvevents.cli.lines import plural

if TYPE_CHECKING:
    from kvevents.export import ExportProgress, ExportSummary, QueryResult

_SAID: Final = {
    "lost": "{} missing, as their numbers tell; blocks that were resident meanwhile are marked `across_gap`",
    "compacted": "{} represented by a snapshot: nothing of them is lost",
    "rejected": "{} that could not be read ({reasons})",
    "late": "{} replayed too late for their place",
    "conflicting": "{} replayed from another incarnation",
    "unplaced": "{} replayed for nobody knows which of several endpoints",
    "malformed": "{} that are no batches",
    "unknown_removals": "{} of blocks that were not there",
    "dropped": "{} taken for gone: more were resident than are kept in memory",
    "forgotten": "{} without a reuse distance: more blocks than are remembered",
}
"""What is told of counts that are not 0. The nouns are in `_NOUNS`."""
_NOUNS: Final = {
    "rejected": "event",
    "malformed": "message",
    "unknown_removals": "removal",
    "dropped": "block",
    "forgotten": "block",
}
_NOT_GRAVE: Final = frozenset({"compacted", "unknown_removals"})
"""A recording that began late has them, and nothing is wrong."""


def run(args: Namespace) -> int:
    """Export, or ask."""
    console = Console()
    if args.list_queries:
        return _list(args, console)
    if args.query is not None:
        return _ask(args, console)
    return _export(args, console)


def _export(args: Namespace, console: Console) -> int:
    from kvevents.export import export  # noqa: PLC0415 - late: it needs an extra

    if len(args.paths) < 2:
        raise CommandLineError("name recordings, and at the end the folder for the tables: kvevents export run.jsonl.gz out")
    *recordings, folder = args.paths

    def progress(now: ExportProgress) -> None:
        console.progress(
            f"{now.recording}: {plural(now.batches, 'batch')}, {plural(now.rows, 'row')} of events; Ctrl-C ends it"
        )

    with _without_collector():
        done = export(recordings, folder, tokens=args.token_ids, force=args.force, progress=progress)
    _tell(done, console)
    if args.token_ids:
        console.note(f"{folder} holds the prompts' token ids: keep it as you would keep the prompts")
    return OK


@contextmanager
def _without_collector() -> Iterator[None]:
    """Rows make no cycles, and there are so many that looking for some takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tell(done: ExportSummary, console: Console) -> None:
    for message in done.truncated:
        console.note(Span(message, "warn"))
    reasons = ", ".join(f"{count} {reason}" for reason, count in done.reject_reasons.items())
    for name, text in _SAID.items():
        count = done.counts.get(name, 0)
        if count:
            said = text.format(plural(count, _NOUNS.get(name, "batch")), reasons=reasons)
            console.note(Span(said, "dim" if name in _NOT_GRAVE else "warn"))
    rows = ", ".join(f"{name} {count:,}" for name, count in done.rows.items())
    console.note(f"wrote {done.folder} in {done.seconds:.1f} s, {done.bytes:,} bytes; rows: {rows}")
    console.note(
        f"`kvevents export --list-queries` says what can be asked of it, `kvevents export --query NAME {done.folder}` asks"
    )


# --- questions


def _list(args: Namespace, console: Console) -> int:
    from kvevents.export import queries  # noqa: PLC0415 - late: it needs an extra

    width = max(map(len, queries()))
    if args.output == "json":
        for query in queries().values():
            console.data(msgspec.json.encode({"name": query.name, "question": query.question}))
        return OK
    for query in queries().values():
        console.line(Span(f"{query.name:<{width}}", "name"), f"  {query.question}")
    return OK


def _ask(args: Namespace, console: Console) -> int:
    from kvevents.export import find_query, run_query  # noqa: PLC0415 - late: it needs an extra

    query = find_query(args.query)
    if args.sql:
        for line in query.sql.splitlines():
            console.line(line)
        return OK
    if len(args.paths) != 1:
        raise CommandLineError(f"name one folder to ask: kvevents export --query {args.query} out")
    answer = run_query(args.paths[0], query)
    if args.output == "json":
        for row in answer.rows:
            console.data(msgspec.json.encode(dict(zip(answer.columns, row, strict=True))))
    else:
        _table(answer, console)
    return OK


def _table(answer: QueryResult, console: Console) -> None:
    """Columns below each other, numbers to the right."""
    if not answer.rows:
        console.note("nothing: no row of the tables is of that kind")
    cells = [answer.columns, *([_cell(value) for value in row] for row in answer.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts = [all(isinstance(value, str | None) for value in column) for column in zip(*answer.rows, strict=True)]
    for number, row in enumerate(cells):
        line = _aligned(row, widths, texts or [True] * len(row))
        console.line(Span(line, "dim") if number == 0 else line)


def _aligned(row: Sequence[str], widths: Sequence[int], texts: Sequence[bool]) -> str:
    aligned = (f"{cell:<{width}}" if text else f"{cell:>{width}}" for cell, width, text in zip(row, widths, texts, strict=True))
    return "  ".join(aligned).rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        type=Path,
        help="recordings, then the folder for their tables; to ask, that folder alone",
    )
    parser.add_argument("--token-ids", action="store_true", help="export token ids, which are the users' words, as well")
    parser.add_argument("-f", "--force", action="store_true", help="replace the tables in the folder if there are any")
    parser.add_argument("--query", metavar="NAME", help="ask the tables a question that is shipped, or one in a file NAME.sql")
    parser.add_argument("--list-queries", action="store_true", help="say which questions are shipped")
    parser.add_argument("--sql", action="store_true", help="with --query: print its SQL, to read or to change, instead")
    options.add_output(parser, "one JSON object per row or query")


COMMAND: Final = Command(
    "export",
    "turn recordings into tables, and ask them questions",
    "Turn recordings into tables of what happened to every block, as Parquet files, and ask them questions with DuckDB.\n"
    "Several recordings become one data set. Token ids are left out unless --token-ids asks for them.",
    """\
  kvevents export run.jsonl.gz out
  kvevents export pod-*.jsonl.gz out --force
  kvevents export --list-queries
  kvevents export --query larger-cache out
  kvevents export --query larger-cache --sql         print it, to be changed and saved as mine.sql
  kvevents export --query mine.sql out -o json
""",
    add_arguments,
    run,
)
