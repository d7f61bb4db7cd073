"""What ZeroMQ still holds of answers, in bytes.

Theory of operation. ZeroMQ bounds a consumer's pipe by messages, whatever their size, and says of none whether it has left. But
of a frame that lies in our memory, not in a copy of its own, it says when it is done with it: written to the connection, or
dropped with it. So large frames are sent that way, and counted until then; small ones are copied, which costs less than keeping
books, and the number of messages bounds them.

A consumer with nothing large on its way is let in with one message, however large, and whatever others have left unread: what
one does not read is nobody else's loss. pyzmq tells from a thread of its own, `zmq.utils.garbage`, which begins with the first
large frame in the process.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from time import monotonic, sleep
from typing import Final, cast

import zmq

LARGE: Final = 16 * 1024
"""Bytes from which on a frame is counted. 256 smaller ones (`REPLAY_SEND_LIMIT`), the most that a pipe holds, are 4 MiB."""
UNSENT_BYTES: Final = 4 * 1024 * 1024
"""Large frames that one consumer may leave unread, in bytes, where they are more than one."""
UNSENT_BYTES_IN_ALL: Final = 64 * 1024 * 1024
"""The same of all consumers of one server together. Beyond it each has one large frame at a time."""
LOOK_EVERY: Final = 0.002
"""Seconds between two looks of one who waits until all has left."""

_lock = threading.Lock()
"""pyzmq makes its thread and the socket to it with the first such frame, and two threads at once might make two."""


def _forget_lock() -> None:
    global _lock  # noqa: PLW0603 - of a forked child, in which whoever held it does not exist
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


class Unsent:
    """Large frames on their way to consumers, by identity. One thread uses it; any may ask for `size`."""

    def __init__(self) -> None:
        self._sent: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        self._of: dict[bytes, int] = {}
        self.size = 0
        """Bytes, as of the last `look`."""

    def has_room(self, identity: bytes, size: int) -> bool:
        """Whether a large frame may be sent to this consumer now. Of others it counts what had not left at the last `look`."""
        self._look_at(identity)
        own = self._of.get(identity, 0)
        return not own or (own + size <= UNSENT_BYTES and self.size + size <= UNSENT_BYTES_IN_ALL)

    def counted(self, identity: bytes, frame: bytes) -> zmq.Frame | bytes:
        """The same frame in the form in which it is to be sent."""
        try:
            with _lock:
                shared = zmq.Frame(frame, track=True, copy=False)
        except RuntimeError:
            # The interpreter ends, and lets no thread begin any more: the last few of all are copied.
            return frame
        self._sent.setdefault(identity, deque()).append((cast("zmq.MessageTracker", shared.tracker), len(frame)))
        self._of[identity] = self._of.get(identity, 0) + len(frame)
        self.size += len(frame)
        return shared

    def of(self, identity: bytes) -> int:
        """Bytes on their way to one consumer, as of the last `look`."""
        return self._of.get(identity, 0)

    def wait(self, until: float) -> None:
        """Until all has left, or until then (monotonic seconds): memory that is read must not go before the reader."""
        self.look()
        while self.size and monotonic() < until:
            sleep(LOOK_EVERY)
            self.look()

    def look(self) -> None:
        """Count no more what has left."""
        for identity in list(self._sent):
            self._look_at(identity)

    def _look_at(self, identity: bytes) -> None:
        sent = self._sent.get(identity)
        if sent is None:
            return
        # In order: frames of one pipe leave one after another.
        while sent and sent[0][0].done:
            size = sent.popleft()[1]
            self.size -= size
            self._of[identity] -= size
        if not sent:
            del self._sent[identity], self._of[identity]
