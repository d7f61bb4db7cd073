"""The program: its table of commands, and what they have in common when they end."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import Final

from kvevents.cli import bridge, doctor, export, keypair, plane, play, publish, query, record, relay, serve, tail, top
from kvevents.cli.command import FAILED, INTERRUPTED, OK, Command
from kvevents.cli.console import Console, Span
from kvevents.cli.parser import CommandParser
from kvevents.cli.sim import group as sim
from kvevents.cli.stopping import interrupting
from kvevents.errors import KVEventsError
from kvevents.version import version

COMMANDS: Final[tuple[Command, ...]] = (
    tail.COMMAND,
    record.COMMAND,
    play.COMMAND,
    publish.COMMAND,
    doctor.COMMAND,
    relay.COMMAND,
    bridge.COMMAND,
    serve.COMMAND,
    query.COMMAND,
    top.COMMAND,
    plane.COMMAND,
    export.COMMAND,
    keypair.COMMAND,
    sim.COMMAND,
)

_DESCRIPTION: Final = "Watch, record, play, publish, examine and serve the KV cache events of inference engines."
_EXAMPLES: Final = """\
examples:
  kvevents tail tcp://127.0.0.1:5557                 every event of an engine, in order, as it happens
  kvevents doctor tcp://127.0.0.1:5557               what works, what does not, and what to do about it
  kvevents record run.jsonl.gz tcp://127.0.0.1:5557  keep it
  kvevents play run.jsonl.gz --wait-for-subscriber   be that engine again, without a GPU
  kvevents relay 127.0.0.1:5557,127.0.0.1:5558       the same stream, with a memory
  kvevents bridge --to nats://n1 --config fleet.toml the streams of a fleet as a log, for any number of services
  kvevents serve                                     know a fleet's caches, and answer for them over HTTP
  kvevents top                                       how that fleet fares, live
  kvevents export run.jsonl.gz out                   a recording as tables, to be asked
  kvevents sim compare                               how routing policies fare with a fleet, without a GPU

`kvevents COMMAND --help` tells more. Exit codes: 0 done, 1 an error or a failed check, 2 wrong usage, 3 nothing arrived.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = _parser().parse_args(argv)
    command: Command = arguments.command
    _tolerate_odd_terminals()
    try:
        with interrupting():
            return command.run(arguments)
    except KVEventsError as error:
        Console().note(Span("kvevents: ", "bad"), _one_line(error))
        return FAILED
    except BrokenPipeError:
        # The reader of our output has seen enough, as `head` does; the interpreter's own last flush must not complain either.
        _discard_output()
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> ArgumentParser:
    parser = ArgumentParser("kvevents", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"kvevents {version()}")
    parser.set_defaults(command=None)
    table = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for command in COMMANDS:
        sub = table.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            epilog=f"examples:\n{command.examples}",
            formatter_class=RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(command=command)
    return parser


def _one_line(error: KVEventsError) -> str:
    # OSError's own str() puts the number first, which says nothing to a person.
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())


def _tolerate_odd_terminals() -> None:
    """A character that the terminal's encoding lacks is no reason to stop."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
