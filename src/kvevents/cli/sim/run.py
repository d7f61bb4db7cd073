"""`kvevents sim run`: a fleet along the clock, over sockets."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final

from kvevents.cli import options
from kvevents.cli.command import Command
from kvevents.cli.console import Console

DEFAULT_POLICY: Final = "prefix-aware"


def run(args: Namespace) -> int:
    """Run a fleet until its requests are answered or somebody ends it."""
    from kvevents.cli.sim.running import run_live  # noqa: PLC0415 - late: it needs the index

    return run_live(args, Console())


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    from kvevents.cli.sim.options import above, add_fleet, add_traffic  # noqa: PLC0415 - late: it needs the index
    from kvevents.routing import POLICIES  # noqa: PLC0415 - as above
    from kvevents.sim.faults import KINDS  # noqa: PLC0415 - as above

    parser.add_argument(
        "--policy", choices=list(POLICIES), default=DEFAULT_POLICY, help="who gets which request (default: %(default)s)"
    )
    parser.add_argument(
        "--faults",
        default="",
        metavar="LIST",
        help="what goes wrong, such as restart:60s,drop:1%%: "
        + "; ".join(f"{name}: {kind.does}" for name, kind in KINDS.items()).replace("%", "%%"),
    )
    parser.add_argument(
        "--time-scale",
        type=above("a factor"),
        default=1.0,
        metavar="F",
        help="how many seconds of the fleet pass in one (default: %(default)g)",
    )
    parser.add_argument("--duration", type=options.seconds, metavar="S", help="end after so many seconds of the clock")
    parser.add_argument("--host", default="127.0.0.1", help="where to publish (default: %(default)s; 0.0.0.0 is everywhere)")
    parser.add_argument(
        "--base-port",
        type=options.count,
        metavar="PORT",
        help="the first worker publishes here and replays at the port after it, the second at the two after those, and so on; "
        "the system chooses when not given",
    )
    parser.add_argument(
        "--sources",
        type=Path,
        metavar="FILE",
        help="write where they are, as `kvevents serve --sources` reads it; replaces FILE",
    )
    parser.add_argument("--model", default="sim", help="what the file calls their model (default: %(default)s)")
    options.add_wait_for_subscriber(parser)
    options.add_output(parser, "one JSON object at the end")
    add_traffic(parser)
    add_fleet(parser, without=("event_delay",))  # sockets have a delay of their own


COMMAND: Final = Command(
    "run",
    "a fleet over real sockets, for any consumer",
    "Run a fleet of simulated engines that publish real events over real sockets, with requests that a router sends to them,\n"
    "and faults if you wish. Any consumer can be pointed at it: the endpoints are told in the beginning, and in a file that\n"
    "`kvevents serve` reads. It goes on until Ctrl-C, unless --requests, --trace or --duration says how long.",
    """\
  kvevents sim run
  kvevents sim run --engines 8 --dialect vllm-0.24 --faults restart:60s,drop:1% --sources fleet.toml
  kvevents serve --sources fleet.toml                in another terminal, and then: kvevents top
  kvevents sim run --requests 500 --time-scale 10 -o json | jq .policies[0].ttft
""",
    add_arguments,
    run,
)
