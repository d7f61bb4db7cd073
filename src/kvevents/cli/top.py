"""`kvevents top`: a live view of the fleet of a service."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Final

import msgspec

from kvevents.cli.command import CommandLineError, ExitCode
from kvevents.cli.console import Console, is_terminal, open_screen, terminal_size
from kvevents.cli.output import DATA_FORMATS, add_output, write_record
from kvevents.cli.service_options import add_service, make_client
from kvevents.cli.top_view import UNLIMITED_WIDTH, TopView
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

_STDIN: Final = 0


@contextmanager
def keyboard() -> Iterator[Callable[[float], bool]]:
    """Return a context that reads single keys from a terminal, without Enter and without echo.

    The yielded function waits for a number of seconds. The function returns True at once if q or Ctrl-D is pressed, else False.
    """
    has_keys = sys.stdin is not None and sys.stdin.isatty()
    previous = termios.tcgetattr(_STDIN) if has_keys else None

    def wait(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while select.select([_STDIN] if has_keys else [], [], [], max(until - time.monotonic(), 0.0))[0]:
            pressed = os.read(_STDIN, 64)
            if not pressed or set(b"qQ\x04") & set(pressed):  # `pressed` is empty if the terminal was closed; 4 is Ctrl-D.
                return True
        return False

    if has_keys:
        tty.setcbreak(_STDIN)
    try:
        yield wait
    finally:
        if previous is not None:
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, previous)


def run(args: Namespace) -> int:
    """Poll the service and show each result, until q, Ctrl-D or a signal; with `--once` only one time."""
    poller, console, view = Poller(make_client(args), args.sort), Console(), TopView(args.limit)
    if args.once:
        frame = poller.poll()
        if not write_record(_limit_sources(frame, args.limit), args.output, console):
            columns = terminal_size(sys.stdout)[0] if is_terminal(sys.stdout) else UNLIMITED_WIDTH
            console.lines(view.draw(frame, columns, None))
        return ExitCode.OK
    is_data = args.output in DATA_FORMATS
    if not is_data and not is_terminal(sys.stdout):
        raise CommandLineError("a live view needs a terminal; use --once or --output json")
    # A signal is the normal end of a live view.
    with suppress(KeyboardInterrupt), nullcontext() if is_data else open_screen(sys.stdout) as show, keyboard() as wait:
        while True:
            frame = poller.poll_or_error()
            if show is None:
                write_record(_limit_sources(frame, args.limit), args.output, console)
            else:
                columns, rows = terminal_size(sys.stdout)
                show(view.draw(frame, columns, rows - 1))
            if wait(args.interval):
                break
    return ExitCode.OK


def _limit_sources(frame: PollResult, limit: int | None) -> PollResult:
    return frame if limit is None else msgspec.structs.replace(frame, sources=frame.sources[:limit])


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add_service(parser)
    parser.add_argument("--sort", choices=SOURCE_ORDERS, default="trust", help="what comes first: the worst, or the most")
    parser.add_argument("--limit", type=positive_int, help="show at most N sources (default: all, or as many as fit)")
    parser.add_argument("--interval", type=positive_seconds, default=1.0, help="seconds between polls")
    parser.add_argument("--once", action="store_true", help="poll once and exit; works without a terminal")
    add_output(parser, "one object for each poll")
