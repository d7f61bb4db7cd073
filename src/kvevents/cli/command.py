"""What a command is, and what its exit codes mean."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

OK: Final = 0
FAILED: Final = 1
NOTHING_ARRIVED: Final = 3
"""Nothing arrived before `--idle` ended the wait. 2 is argparse's, for wrong usage."""
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
