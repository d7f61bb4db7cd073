"""The entry point of the program `kvevents`, in a package of its own because it runs before `kvevents` is imported.

Importing `kvevents` takes some tenths of a second. Until its commands can handle signals themselves, Ctrl-C ends the process
as it ends programs in C: at once, and without a traceback.
"""

import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process and return its exit code."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as under `nohup`
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvevents.cli import main as run  # noqa: PLC0415 - late, that is the point

    return run(sys.argv[1:])
