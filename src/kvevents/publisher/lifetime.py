"""What the process does to its publishers: exit, and fork."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from typing import Protocol
from weakref import WeakSet

import zmq.utils.garbage  # noqa: F401 - its end of the process, which takes back what is being sent, must come after ours


class Living(Protocol):
    """A publisher with a thread and sockets."""

    def shutdown(self) -> object:
        """Stop; called when the interpreter exits."""

    def _after_fork(self) -> None: ...


_living: WeakSet[Living] = WeakSet()


def enrol(publisher: Living) -> None:
    """Have `publisher` shut down at interpreter exit and disabled in forked children, for as long as it lives."""
    _living.add(publisher)


def discharge(publisher: Living) -> None:
    """Undo `enrol`."""
    _living.discard(publisher)


def _shut_down_all() -> None:
    with ExitStack() as all_of_them:  # each one, whatever another one raises, as by Ctrl-C
        for publisher in list(_living):
            all_of_them.callback(publisher.shutdown)


def _disable_all() -> None:
    for publisher in list(_living):
        publisher._after_fork()  # noqa: SLF001 - the protocol's own method; not for users


atexit.register(_shut_down_all)
os.register_at_fork(after_in_child=_disable_all)
