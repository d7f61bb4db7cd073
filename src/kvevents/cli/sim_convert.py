"""`kvevents sim convert`: convert a recording to a trace of requests."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from itertools import chain
from pathlib import Path
from typing import Final

from kvevents.cli.command import CommandLineError, ExitCode
from kvevents.cli.console import Console, Span
from kvevents.cli.options import check_writable
from kvevents.diagnosis.text_format import plural
from kvevents.sim.workloads import from_recording, write_trace

DESCRIPTION: Final = (
    "Derive the requests that caused the events of a recording, and write them as a trace for --trace.\n"
    "Prompts that were cached completely cause no events, so they are not in the trace."
)
EXAMPLES: Final = """\
  kvevents sim convert run.jsonl.gz mine.jsonl.gz
  kvevents sim compare --trace mine.jsonl.gz
"""


def run(args: Namespace) -> int:
    """Derive the requests from a recording, and write them as a trace."""
    console = Console()
    check_writable(args.trace, force=args.force)
    conversion = from_recording(args.recording, args.run, args.endpoint)
    if args.trace.exists() and args.recording.exists() and args.trace.samefile(args.recording):
        raise CommandLineError(f"the trace {args.trace} would replace the recording; name another file for the trace")
    requests = iter(conversion)
    # Read the first request before writing, so that an empty or unreadable recording does not replace an existing trace.
    first = next(requests, None)
    count = 0 if first is None else write_trace(args.trace, chain([first], requests))
    if conversion.truncation is not None:
        console.note(Span(conversion.truncation, "warn"))
    if conversion.skipped:
        console.note(f"{plural(conversion.skipped, 'event')} left out: their parent blocks were stored before the recording")
    if not count:
        console.note(f"no request can be derived from {args.recording}; prompts that were already cached cause no events")
        return ExitCode.FAILED
    console.note(f"wrote {args.trace}: {plural(count, 'request')}")
    return ExitCode.OK


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("recording", type=Path, metavar="RECORDING", help="recording of `kvevents record`")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="trace to write; compressed if its name ends in .gz")
    parser.add_argument("-f", "--force", action="store_true", help="replace TRACE if it exists")
    parser.add_argument("--run", metavar="NAME", help="convert this run only (default: all)")
    parser.add_argument("--endpoint", help="convert the engine with this endpoint only (default: all)")
