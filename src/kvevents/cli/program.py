"""The program `kvevents`: the table of its commands, and the conversion of errors into messages and exit codes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import Final

from kvevents.cli.command import Command, CommandGroup, CommandParser, ExitCode
from kvevents.cli.console import Console, Span
from kvevents.cli.signals import handling_signals
from kvevents.errors import KVEventsError, UsageError
from kvevents.package_metadata import VERSION

COMMANDS: Final[tuple[Command | CommandGroup, ...]] = (
    Command("demo", "show what KV cache events are worth, on simulated engines", "demo"),
    Command("tail", "print the events of an engine in order, as they happen", "tail"),
    Command("record", "write the events of an engine to a recording", "record"),
    Command("play", "publish a recording as its engine did", "play"),
    Command("publish", "publish events given as JSON lines", "publish"),
    Command("doctor", "check an engine or a service, with advice for each fault", "doctor", ExitCode.CHECK_NOT_POSSIBLE),
    Command("conform", "judge an indexer, router or publisher under faults", "conform"),
    Command("relay", "republish an engine's stream with its full history", "relay"),
    Command("bridge", "write the streams of engines to a log in NATS JetStream", "kvevents_plane.cli.bridge", extra="plane"),
    Command("serve", "index the prefix caches of a fleet, and answer queries", "serve", extra="service"),
    Command("query", "ask a service which workers hold a prompt", "query"),
    Command("top", "watch the fleet of a service", "top"),
    Command("sources", "print the engines that a service follows", "fleet:SOURCES"),
    Command("register", "register an engine at a service", "fleet:REGISTER"),
    Command("drain", "exclude an engine from selections at a service", "fleet:DRAIN"),
    Command("unregister", "unregister an engine at a service", "fleet:UNREGISTER"),
    Command("reservations", "print the open reservations of a service", "fleet:RESERVATIONS"),
    CommandGroup(
        "plane",
        "inspect the log of a plane in NATS",
        "Inspect the log of a plane in NATS JetStream, the bridges that write it and the replicas that read it.",
        """\
  kvevents plane status
  kvevents plane status --nats nats://10.0.0.9:4222 --plane prod
  kvevents plane status -o json | jq .faults
""",
        (
            Command(
                "status",
                "print partitions, bridges, replicas, snapshots and faults",
                "kvevents_plane.cli.status",
                ExitCode.CHECK_NOT_POSSIBLE,
                extra="plane",
            ),
        ),
    ),
    Command("export", "convert recordings to Parquet tables, and query them", "export", extra="export"),
    Command("completion", "print what a shell needs to complete commands", "completion", extra="completion"),
    Command("keys", "create CURVE keys, which encrypt and authenticate", "keys"),
    CommandGroup(
        "sim",
        "simulate a fleet of engines without a GPU",
        "Simulate a fleet of engines: their caches, their schedulers and the events that they publish. No GPU is needed.",
        """\
  kvevents sim compare
  kvevents sim compare --policy prefix-aware --policy round-robin --workload agents --rate 8
  kvevents sim run --engines 8 --faults restart:60s,drop:1% --write-sources fleet.toml
  kvevents sim convert run.jsonl.gz requests.jsonl.gz
""",
        (
            Command("compare", "compare routing policies on the same requests", "sim_compare"),
            Command("run", "run a fleet that publishes over real sockets", "sim_run"),
            Command("convert", "convert a recording to a trace of requests", "sim_convert"),
        ),
    ),
)

_DESCRIPTION: Final = "Record, publish, check, index and query the KV cache events of inference engines."
_EPILOG: Final = """\
examples:
  kvevents doctor tcp://127.0.0.1:5557                  check an engine
  kvevents tail 127.0.0.1:5557 --replay 127.0.0.1:5558  print the events of an engine
  kvevents serve                                        index a fleet, and answer queries over HTTP
  kvevents top                                          watch that fleet

`kvevents COMMAND --help` explains a command.

exit codes:
  0    success
  1    an error, or a failed check
  2    wrong usage: an option, a variable, a setting, a file that cannot be opened, or a missing extra
  3    no batch arrived before --idle-timeout
  4    a check was not possible
  130  interrupted before the work was done
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # Characters that the terminal's encoding lacks would raise errors.
            stream.reconfigure(errors="backslashreplace")
    on_error = ExitCode.FAILED
    try:
        with handling_signals():
            words = list(sys.argv[1:] if argv is None else argv)
            if any("\udc80" <= letter <= "\udcff" for letter in "".join(words)):
                raise UsageError("an argument is not valid UTF-8; rename the file or correct the value")
            if words[:1] == ["help"]:
                words = [*words[1:], "--help"]
            elif words in [[], *([group.name] for group in COMMANDS if isinstance(group, CommandGroup))]:  # Without a command.
                words = [*words, "--help"]
            parser = make_parser([each for each in COMMANDS if each.name == words[0]] or COMMANDS)
            if "_ARGCOMPLETE" in os.environ:  # Print completions for the shell; `autocomplete` ends the process.
                from argcomplete import autocomplete  # noqa: PLC0415 - argcomplete might not be installed

                parser.declare_options(os.environ["COMP_LINE"].split())
                autocomplete(parser)
            arguments = parser.parse_args(words)
            on_error = arguments.command.on_error
            gc.enable()
            code: int = arguments.execute(arguments)
            return code
    except KVEventsError as error:
        _print_error(error.strerror if isinstance(error, OSError) and error.strerror else str(error))
        return ExitCode.WRONG_USAGE if isinstance(error, UsageError) or _names_file(error.__cause__) else on_error
    except BrokenPipeError:
        return ExitCode.OK  # The program that reads the output has ended: `head`, for example, ends after some lines.
    except OSError as error:
        # The error can name a path, for example of a directory without permission, but not the operation.
        _print_error(f"cannot use {error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
        return ExitCode.WRONG_USAGE if _names_file(error) else on_error
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    finally:
        _flush_output()


def _names_file(error: BaseException | None) -> bool:
    """Return whether an error names a file, as errors of opening or replacing a file do; errors of reads and writes do not."""
    return isinstance(error, OSError) and error.filename is not None


def make_parser(commands: Sequence[Command | CommandGroup] = COMMANDS) -> CommandParser:
    """Return the parser of the program with these commands."""
    parser = CommandParser("kvevents", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("-V", "--version", action="version", version=f"kvevents {VERSION}", help="print the version and exit")
    parser.add_commands(commands)
    return parser


def _print_error(text: str) -> None:
    with suppress(OSError):  # stderr can be closed, or a file on a full disk.
        Console().note(Span("kvevents: ", "bad"), " ".join(text.split()))


def _flush_output() -> None:
    """Flush stdout and stderr. Discard output that cannot be written; otherwise the interpreter would print a traceback."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
