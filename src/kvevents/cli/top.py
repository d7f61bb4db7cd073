"""`kvevents top`: a live view of the fleet of a service."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from kvevents.cli.command import OK, CommandLineError
from kvevents.cli.console import Console, is_terminal, terminal_size, whole_screen
from kvevents.cli.options import add_service, make_client
from kvevents.cli.output import DATA, add_output, write_record
from kvevents.cli.top_view import UNLIMITED, TopView
from kvevents.cli.values import positive_int, positive_seconds
from kvevents.client.polling import SOURCE_ORDERS, Poller, PollResult

DESCRIPTION: Final = (
    "Watch the fleet of a service: trust, blocks, rates and losses of each source, the least trusted first.\n"
    "While the service cannot be reached, the view shows its last state and the time of the failure. q or Ctrl-C ends it."
)
EXAMPLES: Final = """\
  kvevents top
  kvevents top --service http://10.0.0.9:8090 --sort lag --interval 5
  kvevents top --once --limit 20
  kvevents top -o json --interval 10 | jq -c .stats
"""


_QUIT_KEYS: Final = frozenset(b"qQ\x04")
"""q and Ctrl-D."""
_STDIN: Final = 0


class Keyboard:
    """Reads single keys without Enter and without echo while it is open. Without a terminal it returns no keys."""

    def __init__(self) -> None:
        self._previous: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin is not None and sys.stdin.isatty():
            self._previous = termios.tcgetattr(_STDIN)
            tty.setcbreak(_STDIN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous is not None:
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, self._previous)

    def wait(self, seconds: float) -> bool:
        """Wait for `seconds`. Return True at once if q or Ctrl-D is pressed."""
        if self._previous is None:
            time.sleep(seconds)
            return False
        until = time.monotonic() + seconds
        while select.select([_STDIN], [], [], max(until - time.monotonic(), 0.0))[0]:
            pressed = os.read(_STDIN, 64)
            if not pressed or _QUIT_KEYS & set(pressed):  # no input: the terminal has closed
                return True
        return False


DEFAULT_INTERVAL: Final = 1.0


def run(args: Namespace) -> int:
    """Poll until q, Ctrl-D or a signal."""
    poller = Poller(make_client(args), args.sort)
    if args.once:
        _print_once(poller, args)
        return OK
    with suppress(KeyboardInterrupt):  # the normal end of a live view
        (_print_records if args.output in DATA else _show_live)(poller, args)
    return OK


def _print_once(poller: Poller, args: Namespace) -> None:
    frame, console = poller.poll(), Console()
    if not write_record(_limit_sources(frame, args.limit), args.output, console):
        columns = terminal_size(sys.stdout)[0] if is_terminal(sys.stdout) else UNLIMITED
        console.lines(TopView(args.limit).draw(frame, columns, None))


def _print_records(poller: Poller, args: Namespace) -> None:
    console = Console()
    with Keyboard() as keyboard:
        while True:
            write_record(_limit_sources(poller.poll_or_error(), args.limit), args.output, console)
            if keyboard.wait(args.interval):
                return


def _show_live(poller: Poller, args: Namespace) -> None:
    if not is_terminal(sys.stdout):
        raise CommandLineError("a live view needs a terminal; use --once or --output json")
    view = TopView(args.limit)
    with whole_screen(sys.stdout) as show, Keyboard() as keyboard:
        while True:
            columns, rows = terminal_size(sys.stdout)
            show(view.draw(poller.poll_or_error(), columns, rows - 1))
            if keyboard.wait(args.interval):
                return


def _limit_sources(frame: PollResult, limit: int | None) -> PollResult:
    return frame if limit is None else msgspec.structs.replace(frame, sources=frame.sources[:limit])


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add_service(parser)
    parser.add_argument("--sort", choices=SOURCE_ORDERS, default="trust", help="what comes first: the worst, or the most")
    parser.add_argument(
        "--limit", type=positive_int, help="show at most N sources (default: all, or in a live view as many as fit)"
    )
    parser.add_argument("--interval", type=positive_seconds, default=DEFAULT_INTERVAL, help="seconds between polls")
    parser.add_argument("--once", action="store_true", help="poll once and exit; works without a terminal")
    add_output(parser, "one object for each poll")
