"""`kvevents top`: how the fleet of a service fares, live."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from kvevents.cli import options
from kvevents.cli.client import client_of
from kvevents.cli.command import OK, Command, CommandLineError
from kvevents.cli.console import Console
from kvevents.cli.keys import Keys
from kvevents.cli.watching import ORDERS, Frame, Watch
from kvevents.errors import MissingDependencyError

if TYPE_CHECKING:
    from kvevents.cli.screen import Screen

DEFAULT_INTERVAL: Final = 1.0


def run(args: Namespace) -> int:
    """Look until told to stop."""
    watch = Watch(client_of(args), args.sort)
    if args.once:
        _once(watch, args)
        return OK
    with suppress(KeyboardInterrupt):  # the normal end of what goes on
        (_lines if args.output == "json" else _live)(watch, args)
    return OK


def _once(watch: Watch, args: Namespace) -> None:
    frame = watch.look()
    if args.output == "json":
        Console().data(msgspec.json.encode(_cut(frame, args.limit)))
    else:
        _screen(args).show(frame)


def _lines(watch: Watch, args: Namespace) -> None:
    console = Console()
    with Keys() as keys:
        while True:
            console.data(msgspec.json.encode(_cut(watch.look_anyhow(), args.limit)))
            if keys.wait(args.interval):
                return


def _live(watch: Watch, args: Namespace) -> None:
    screen = _screen(args)
    if not screen.is_terminal:
        raise CommandLineError("a live view needs a terminal; use --once or --output json")
    with screen.live() as update, Keys() as keys:
        while True:
            update(watch.look_anyhow())
            if keys.wait(args.interval):
                return


def _cut(frame: Frame, limit: int | None) -> Frame:
    return frame if limit is None else msgspec.structs.replace(frame, sources=frame.sources[:limit])


def _screen(args: Namespace) -> Screen:
    try:
        from kvevents.cli.screen import Screen  # noqa: PLC0415 - late, for -o json and the other commands
    except ImportError as error:
        raise MissingDependencyError(
            "this needs the package rich: pip install 'kvevents[service]', or use --output json"
        ) from error
    return Screen(args.limit)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    options.add_service(parser)
    parser.add_argument(
        "--sort", choices=ORDERS, default="trust", help="the worst or most of what first (default: %(default)s)"
    )
    parser.add_argument("--limit", type=options.count, metavar="N", help="show N sources at most; a live view shows what fits")
    parser.add_argument(
        "--interval",
        type=options.seconds,
        default=DEFAULT_INTERVAL,
        metavar="S",
        help="between looks (default: %(default)g)",
    )
    parser.add_argument("--once", action="store_true", help="show one look and end; needs no terminal")
    options.add_output(parser, "one JSON object per line for each poll")


COMMAND: Final = Command(
    "top",
    "see how the fleet of a service fares, live",
    "See how the fleet of a service fares, live: trust, blocks, rates and losses of each source, the least trusted first.\n"
    "It goes on when the service goes away, and says since when. Stop with q or Ctrl-C.",
    """\
  kvevents top
  kvevents top --service http://10.0.0.9:8090 --sort lag --interval 5
  kvevents top --once --limit 20
  kvevents top -o json --interval 10 | jq -c .stats
""",
    add_arguments,
    run,
)
