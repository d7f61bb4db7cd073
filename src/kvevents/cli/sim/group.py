"""The commands of `kvevents sim`, whose options come from a fleet's settings, which are imported when they are asked for."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvevents.cli.command import Command
from kvevents.cli.parser import CommandParser
from kvevents.cli.sim import compare, convert, fit
from kvevents.cli.sim import run as live
from kvevents.errors import KVEventsError

COMMANDS: Final[tuple[Command, ...]] = (compare.COMMAND, live.COMMAND, convert.COMMAND, fit.COMMAND)


class LateParser(CommandParser):
    """A parser that gets its options when it is first used: other commands, and platforms without the index, do without."""

    fill: Callable[[ArgumentParser], None] | None = None

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override] # overloads
        """As of any parser."""
        fill, self.fill = self.fill, None
        if fill is not None:
            try:
                fill(self)
            except KVEventsError as error:
                self.error(str(error))
        return super().parse_known_args(args, namespace)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the commands."""
    table = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=LateParser)
    for command in COMMANDS:
        sub = table.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            epilog=f"examples:\n{command.examples}",
        )
        sub.fill = command.add_arguments
        sub.set_defaults(sim_command=command)


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
