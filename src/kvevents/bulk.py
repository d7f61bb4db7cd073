"""Many messages of a socket of libzmq's in one native call.

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

    def receive(
        self, socket: int, topic: bytes, first: int, due: int, limit: int
    ) -> tuple[list[bytes], list[list[bytes]], bool]:
        """What is there, without waiting: about 1 MiB of it, and at most `limit` messages.

        Payloads of what has this topic and the numbers from `first` on, at most `due` of them; messages from the first other
        one on; whether nothing was left. All empty and something left: what only pyzmq's exception can say.
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
