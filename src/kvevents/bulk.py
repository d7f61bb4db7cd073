"""Many messages in one native call: of a socket of libzmq's, and of a connection without libzmq.

A message of ours has three frames, and a call of pyzmq for each of them costs several times what libzmq itself does. So the
native module calls the functions of the very library that pyzmq has loaded, on pyzmq's own sockets. It does only what always
works: what is out of the ordinary in any way is left to pyzmq, where it becomes the exception that it is. Connections of our
own it reads and writes as ZMTP has it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

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


class Arrivals(Protocol):
    """`_native.Zmtp`: what arrives over one connection."""

    def receive(
        self, descriptor: int, topic: bytes, first: int, due: int, limit: int
    ) -> tuple[list[bytes], list[list[bytes]], list[bytes], bool, bool, str | None]:
        """What has arrived, without waiting: about 1 MiB of it, and at most `limit` messages.

        Payloads of batches that were due; messages from the first other one on; commands; whether any bytes came; whether there
        may be more; why the connection has ended, if it has.
        """
        ...


class Pour(Protocol):
    """`_native.pour`."""

    def __call__(
        self, descriptor: int, topic: bytes, batches: Sequence[tuple[int, bytes]], first: int, sent: int, /
    ) -> tuple[int, int, int]:
        """Send messages from `first` on, of which `sent` bytes are out already, as far as there is room, without waiting.

        The message to go on with, how many bytes of it are out, and the system's error, if there was one.
        """
        ...


class Connections(NamedTuple):
    """How connections are read and written without libzmq."""

    arrivals: Callable[[int], Arrivals]
    """Of one on which a message may have so many bytes."""
    pour: Pour


@cache
def connections() -> Connections | None:
    """The way to do it; None without the native module."""
    try:
        native: Any = importlib.import_module("kvevents._native")
    except ImportError:
        return None
    return Connections(native.Zmtp, native.pour)
