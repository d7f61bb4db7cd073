"""`kvevents export`: convert recordings to Parquet tables, and query them."""

from __future__ import annotations

import gc
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Final

from kvevents.cli.command import CommandLineError, ExitCode
from kvevents.cli.console import Console, Span, format_table
from kvevents.cli.output import DATA_FORMATS, add_output, write_record
from kvevents.diagnosis.text_format import plural
from kvevents.export import ExportProgress, export, find_query, queries, run_query

DESCRIPTION: Final = (
    "Convert recordings to Parquet tables with the history of every block, and query them with DuckDB.\n"
    "Several recordings become one data set. Token ids are exported with --token-ids only."
)
EXAMPLES: Final = """\
  kvevents export run.jsonl.gz out
  kvevents export pod-*.jsonl.gz out --force
  kvevents export --list-queries
  kvevents export --query hit-depth out
  kvevents export --query hit-depth --sql            print its SQL, to edit it as mine.sql
  kvevents export --query mine.sql out -o json
"""

_COUNT_NOTES: Final = {
    "lost": ("batch", "{} missing by their sequence numbers; blocks that were resident meanwhile are marked `across_gap`"),
    "compacted": ("batch", "{} represented by a snapshot, so nothing is lost"),
    "rejected": ("event", "{} not decoded ({reasons})"),
    "unplaced": ("batch", "{} replayed without a known endpoint"),
    "malformed": ("message", "{} that are not batches"),
    "unknown_removals": ("removal", "{} of blocks that were not resident"),
    "dropped": ("block", "{} counted as removed: more were resident than fit into memory"),
}
"""Maps the name of each count to the noun that it counts, and to the note that is printed unless the count is 0."""
_NORMAL_COUNTS: Final = frozenset({"compacted", "unknown_removals"})
"""Names of counts for which a value above 0 is no fault if the recording began later than the engine."""


def run(args: Namespace) -> int:
    """Export recordings, list queries, or run a query."""
    console = Console()
    if args.list_queries:
        width = max(map(len, queries()))
        for query in queries().values():
            if not write_record({"name": query.name, "question": query.question}, args.output, console):
                console.line(Span(f"{query.name:<{width}}", "name"), f"  {query.question}")
        return ExitCode.OK
    if args.sql and args.query is None:
        raise CommandLineError("--sql needs --query: it prints the SQL of the query NAME; --list-queries lists the queries")
    if args.query is not None and (args.token_ids or args.force):
        raise CommandLineError("--token-ids and --force are for the export of recordings; --query writes no files")
    return _export(args, console) if args.query is None else _run_query(args, console)


def _export(args: Namespace, console: Console) -> int:
    if len(args.paths) < 2:
        raise CommandLineError("name recordings, followed by the directory for the tables: kvevents export a.jsonl.gz out")
    *recordings, directory = args.paths

    def show_progress(now: ExportProgress) -> None:
        rows = f"{plural(now.rows, 'row')} of events"
        console.progress(f"{now.recording}: {plural(now.batches, 'batch')}, {rows}; Ctrl-C ends the command")

    gc.disable()  # Rows have no reference cycles, so garbage collection would take a third of the time in vain.
    try:
        done = export(recordings, directory, tokens=args.token_ids, force=args.force, progress=show_progress)
    finally:
        gc.enable()
    for message in done.truncated:
        console.note(Span(message, "warn"))
    reasons = ", ".join(f"{count} {reason}" for reason, count in done.reject_reasons.items())
    for name, (noun, text) in _COUNT_NOTES.items():
        if count := done.counts.get(name, 0):
            note = text.format(plural(count, noun), reasons=reasons)
            console.note(Span(note, "dim" if name in _NORMAL_COUNTS else "warn"))
    rows = ", ".join(f"{name} {count:,}" for name, count in done.rows.items())
    console.note(f"wrote {done.folder} in {done.seconds:.1f} s, {done.bytes:,} bytes; rows: {rows}")
    console.note(f"`kvevents export --list-queries` lists queries, `kvevents export --query NAME {done.folder}` runs one")
    if args.token_ids:
        console.note(f"prompts can be read from the token ids in {directory}: protect it like the prompts")
    return ExitCode.OK


# --- queries


def _run_query(args: Namespace, console: Console) -> int:
    query = find_query(args.query)
    if args.sql:
        console.lines([text] for text in query.sql.splitlines())
        return ExitCode.OK
    if len(args.paths) != 1:
        raise CommandLineError(f"--query needs one directory with tables: kvevents export --query {args.query} out")
    answer = run_query(args.paths[0], query)
    if args.output in DATA_FORMATS:
        for row in answer.rows:
            write_record(dict(zip(answer.columns, row, strict=True)), args.output, console)
    else:
        if not answer.rows:
            console.note("the query returned no rows")
        columns = enumerate(answer.columns)
        left = {title for at, title in columns if all(isinstance(row[at], str | None) for row in answer.rows)}
        console.lines(format_table(answer.columns, [[_format_cell(value) for value in row] for row in answer.rows], left))
    return ExitCode.OK


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    text = "recordings, followed by the directory for their tables; with --query that directory only"
    parser.add_argument("paths", nargs="*", metavar="PATH", type=Path, help=text)
    parser.add_argument("--token-ids", action="store_true", help="export token ids as well, from which prompts can be read")
    parser.add_argument("-f", "--force", action="store_true", help="replace the tables in the directory if there are any")
    parser.add_argument("--query", metavar="NAME", help="run a shipped query, or the one in the file NAME.sql")
    parser.add_argument("--list-queries", action="store_true", help="list the shipped queries")
    parser.add_argument("--sql", action="store_true", help="with --query: print its SQL instead of running it")
    add_output(parser, "one object per row or query")
