"""What a command is, and what its exit codes mean."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvevents.errors import UsageError

OK: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2
"""As argparse has it, and for options that do not go together."""
NOTHING_ARRIVED: Final = 3
"""Nothing arrived before `--idle-timeout` ended the wait."""
COULD_NOT_LOOK: Final = 4
"""A command that checks something could not check it: what it would have found is unknown."""
INTERRUPTED: Final = 130
"""Ctrl-C or SIGTERM before the work was done, as shells have it."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the program: a row of the table in `kvevents.cli.program`."""

    name: str
    summary: str
    """One line for the list of commands."""
    description: str
    examples: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    """Does the work and returns the exit code."""
    on_error: int = FAILED
    """The exit code when an error ends it."""


class CommandLineError(UsageError):
    """Arguments that do not go together; the message names them."""
