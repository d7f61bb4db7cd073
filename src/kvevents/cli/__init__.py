# PYTHON_ARGCOMPLETE_OK
"""The command `kvevents`."""

import gc
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["main", "run_program"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the arguments of this process), and return its exit code."""
    from kvevents.cli.program import main as run  # noqa: PLC0415 - `run_program` must set signals before this import

    return run(argv)


def run_program() -> int:
    """Run the command line of this process, which is the program `kvevents`, and return its exit code.

    Raise the soft limit of open files, because a fleet needs several files for each engine. Importing the commands takes some
    tenths of a second. During this time, Ctrl-C ends the process at once and without a traceback, as in programs written in C.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # `nohup`, for example, ignores signals.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # The command enables the collector. Imports create no garbage, so a collection would only take time.
    from kvevents.zeromq.sockets import raise_descriptor_limit  # noqa: PLC0415 - signals must be set before this import

    raise_descriptor_limit()
    code = main(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            # The command has ended. From here on, a signal ends the process at once, so that it cannot disturb the shutdown.
            signal.signal(number, lambda *_: os._exit(code))
    return code
