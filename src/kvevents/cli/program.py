"""The program: its table of commands, and what they have in common when they end."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import Final

from kvevents.cli import bridge, doctor, export, keypair, plane, play, publish, query, record, relay, serve, tail, top
from kvevents.cli.command import FAILED, INTERRUPTED, OK, WRONG_USAGE, Command, CommandLineError
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
  kvevents tail 127.0.0.1:5557 --replay 127.0.0.1:5558  every event of an engine, in order, as it happens
  kvevents doctor tcp://127.0.0.1:5557                  what works, what does not, and what to do about it
  kvevents record tcp://127.0.0.1:5557 run.jsonl.gz     keep it
  kvevents play run.jsonl.gz --wait-for-subscriber      be that engine again, without a GPU
  kvevents relay 127.0.0.1:5557,127.0.0.1:5558          the same stream, with a memory
  kvevents bridge --nats nats://n1 --config fleet.toml  the streams of a fleet as a log, for any number of services
  kvevents serve                                        know a fleet's caches, and answer for them over HTTP
  kvevents top                                          how that fleet fares, live
  kvevents export run.jsonl.gz out                      a recording as tables, to be asked
  kvevents sim compare                                  how routing policies fare with a fleet, without a GPU

`kvevents COMMAND --help` explains a command. Exit codes: 0 done, 1 an error or a failed check, 2 wrong usage, 3 nothing
arrived, 4 a check could not be made.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _tolerate_odd_terminals()
    on_error = FAILED
    try:
        with interrupting():
            arguments = _parser().parse_args(argv)
            command: Command = arguments.command
            on_error = command.on_error
            return command.run(arguments)
    except CommandLineError as error:
        _complain(str(error))
        return WRONG_USAGE
    except KVEventsError as error:
        _complain(error.strerror if isinstance(error, OSError) and error.strerror else str(error))
        return on_error
    except BrokenPipeError:
        # The reader of our output has seen enough, as `head` does.
        return OK
    except OSError as error:
        # The path says more than the operation: a folder that must not be entered, a name that is too long.
        _complain(f"cannot use {error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
        return on_error
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _let_go_of_output()


def _parser() -> ArgumentParser:
    parser = CommandParser("kvevents", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("-V", "--version", action="version", version=f"kvevents {version()}")
    parser.set_defaults(command=None)
    parser.add_commands(COMMANDS, "command")
    return parser


def _complain(text: str) -> None:
    with suppress(OSError):  # stderr may be what cannot be written
        Console().note(Span("kvevents: ", "bad"), " ".join(text.split()))


def _tolerate_odd_terminals() -> None:
    """A character that the terminal's encoding lacks is no reason to stop."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _let_go_of_output() -> None:
    """Leave nothing to the interpreter's own last flush, which would complain with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
