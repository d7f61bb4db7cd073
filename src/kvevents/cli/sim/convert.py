"""`kvevents sim convert`: a recording, or a trace, as a trace in our own format."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

from kvevents.cli.command import FAILED, OK, Command
from kvevents.cli.console import Console, Span
from kvevents.cli.lines import plural


def run(args: Namespace) -> int:
    """Rebuild the requests behind a recording and write them."""
    from kvevents.sim.workloads import from_recording, write_trace  # noqa: PLC0415 - late, as the other commands of the group

    console = Console()
    found = from_recording(args.recording, args.run, args.endpoint)
    count = write_trace(args.trace, found)
    if found.torn is not None:
        console.note(Span(found.torn, "warn"))
    if found.skipped:
        console.note(f"{plural(found.skipped, 'event')} had no place: what they continue was announced before the recording")
    if not count:
        console.note(f"no request can be told from {args.recording}; prompts that were in a cache already leave no events")
        return FAILED
    console.note(f"wrote {args.trace}: {plural(count, 'request')}")
    return OK


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("recording", type=Path, metavar="RECORDING", help="what `kvevents record` wrote")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a file for the requests; compressed if its name ends in .gz")
    parser.add_argument("--run", metavar="NAME", help="of one run only; a recording may hold several")
    parser.add_argument("--endpoint", metavar="ENDPOINT", help="of one engine only")


COMMAND: Final = Command(
    "convert",
    "the requests behind a recording, as a trace",
    "Rebuild the requests that made an engine announce what a recording holds, and write them as a trace for --trace.\n"
    "Prompts that were cached completely announced nothing and are not among them.",
    """\
  kvevents sim convert run.jsonl.gz mine.jsonl.gz
  kvevents sim compare --trace mine.jsonl.gz
""",
    add_arguments,
    run,
)
