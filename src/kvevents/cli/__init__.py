"""The command `kvevents`."""

from kvevents.cli.program import main

__all__ = ["main"]
