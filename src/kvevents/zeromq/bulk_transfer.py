"""The transfer of many messages of a libzmq socket in one native call.

A message has three frames, and one pyzmq call per frame costs several times what libzmq itself does. So the native module calls
the functions of the libzmq that pyzmq has loaded, on pyzmq's own sockets. It handles only the ordinary case and leaves
everything else to pyzmq, which raises the proper exception.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Final, Protocol

from kvevents.errors import MissingDependencyError
from kvevents.native_module import require_native

FRAMES: Final = 3
"""Number of frames of a message: topic, number, payload."""


class LibzmqIO(Protocol):
    """The native `Libzmq`. A socket is given as pyzmq's `Socket.underlying`; it must be open, and used by no other thread."""

    def send(self, socket: int, topic: bytes, batches: Sequence[tuple[int, bytes]]) -> int:
        """Send messages of a topic, a number and a payload. Return the number of frames sent, up to the first refused one."""
        ...

    def receive(
        self, socket: int, topic: bytes, first: int, due: int, limit: int
    ) -> tuple[list[bytes], list[list[bytes]], bool]:
        """Receive waiting messages without blocking: about 1 MiB, and at most `limit` messages.

        Returns three values: the payloads of at most `due` messages with this topic and the numbers from `first` on, the frames
        of all later messages, and whether no message is left. If all are empty and a message is left, receive it with pyzmq,
        whose exception has the reason.
        """
        ...


@cache
def libzmq_io() -> LibzmqIO | None:
    """Return the native implementation; None without it, or if pyzmq has another backend or an unsupported libzmq."""
    try:
        native = require_native("message transfer in one call")
        backend = importlib.import_module("zmq.backend.cython._zmq")
        implementation: LibzmqIO = native.Libzmq(backend.__file__)
    except (MissingDependencyError, ImportError, AttributeError, OSError):
        return None
    return implementation
