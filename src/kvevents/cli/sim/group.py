"""The commands of `kvevents sim`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

from kvevents.cli.command import Command
from kvevents.cli.parser import CommandParser
from kvevents.cli.sim import compare, convert, fit
from kvevents.cli.sim import run as live

COMMANDS: Final[tuple[Command, ...]] = (compare.COMMAND, live.COMMAND, convert.COMMAND, fit.COMMAND)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the commands."""
    assert isinstance(parser, CommandParser)  # noqa: S101 - as all of the program
    parser.add_commands(COMMANDS, "sim_command")


def run(args: Namespace) -> int:
    """Run the command that was chosen."""
    command: Command = args.sim_command
    return command.run(args)


COMMAND: Final = Command(
    "sim",
    "simulate a fleet of engines, without a GPU",
    "Simulate a fleet of engines, with caches, schedulers and the events that they announce; no GPU is needed.",
    "".join(line for command in COMMANDS for line in command.examples.splitlines(keepends=True) if "kvevents sim" in line),
    add_arguments,
    run,
)
