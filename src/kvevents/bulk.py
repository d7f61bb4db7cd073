"""Many messages of a socket in one native call, where the native module and pyzmq's libzmq are both there.

A message of ours has three frames, and a call of pyzmq for each of them costs several times what libzmq itself does. So the
native module calls the functions of the very library that pyzmq has loaded, on pyzmq's own sockets. It does only what always
works: what is out of the ordinary in any way is left to pyzmq, where it becomes the exception that it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Protocol

FRAMES: Final = 3
"""Of a message: topic, number, payload."""


class Bulk(Protocol):
    """`_native.Libzmq`. Sockets are told by pyzmq's `Socket.underlying`, and must be open and used by no other thread."""

    def send(self, socket: int, topic: bytes, batches: Sequence[tuple[int, bytes]]) -> int:
        """Send messages of a topic, a number and a payload up to the first frame that is refused; how many frames were not."""
        ...

    def receive(self, socket: int, topic: bytes, first: int, limit: int) -> tuple[list[bytes], list[bytes], bool]:
        """Payloads of what is there under this topic and the numbers from `first` on, at most `limit` of them and about 1 MiB.

        Then the frames of what came in the place of the next one, if anything did, and whether nothing was left.
        """
        ...


@cache
def bulk() -> Bulk | None:
    """The way to do it; None where there is none, as with a pyzmq that has a backend or a libzmq of another kind."""
    try:
        native: Any = importlib.import_module("kvevents._native")
        backend = importlib.import_module("zmq.backend.cython._zmq")
        found: Bulk = native.Libzmq(backend.__file__)
    except (ImportError, AttributeError, OSError):
        return None
    return found
