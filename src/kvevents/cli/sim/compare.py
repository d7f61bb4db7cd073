"""`kvevents sim compare`: routing policies with the same requests, in virtual time."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

from kvevents.cli import options
from kvevents.cli.command import Command
from kvevents.cli.console import Console


def run(args: Namespace) -> int:
    """Run a fleet under each policy and tell what came out."""
    from kvevents.cli.sim.comparing import compare  # noqa: PLC0415 - late: it needs the index

    return compare(args, Console())


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    from kvevents.cli.sim.options import add_fleet, add_traffic  # noqa: PLC0415 - late: it needs the index
    from kvevents.routing import POLICIES  # noqa: PLC0415 - as above

    parser.add_argument("--policy", action="append", choices=list(POLICIES), help="this one only; may be given again")
    parser.add_argument(
        "--jobs", type=options.count, metavar="N", help="policies that run side by side (default: one for each CPU)"
    )
    options.add_output(parser, "one JSON object with all results")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with figures as well; replaces FILE")
    add_traffic(parser)
    add_fleet(parser)


COMMAND: Final = Command(
    "compare",
    "routing policies with the same requests, side by side",
    "Run a fleet under each routing policy with the same requests, in virtual time, and compare: time to the first token, hit\n"
    "rate, balance. Every prompt's cached tokens are also compared with what an index made of the events says; exit code 1 if\n"
    "they ever differ. The same options give the same output.",
    """\
  kvevents sim compare
  kvevents sim compare --policy prefix-aware --policy round-robin --workload agents --rate 8
  kvevents sim compare --trace conversation_trace.jsonl.gz --trace-speed 2 --engines 16 --html report.html
  kvevents sim compare --requests 200 -o json | jq -c .policies[0].hit_rate
""",
    add_arguments,
    run,
)
