"""Resolves the host names of endpoints in threads, so that a slow name costs only its own source.

libzmq has one thread for the sockets of all sources, and waits in it for the name server, at each attempt to connect. So its
sockets get addresses. A name is resolved again when its socket is opened again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from kvevents.endpoints import split_tcp
from kvevents.subscriber.multiplexer import Connection

CACHE_SECONDS: Final = 3.0
"""Seconds for which an address is used again without another lookup: live and replay sockets open at the same time."""


class Lookup:
    """The addresses of an endpoint."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.endpoints: list[str] = []
        """The endpoint with each address of its host in place of the name. IPv4 goes first, as in libzmq."""
        self.error = ""
        """Why there is no address; empty before the end of the lookup too."""
        self.ended_at = float("-inf")

    @property
    def is_done(self) -> bool:
        """Whether the lookup has ended."""
        return bool(self.endpoints or self.error)

    def run(self, host: str, port: int) -> None:
        """Resolve the name, however long that takes."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.ended_at = time.monotonic()
            self.error = f"its name cannot be resolved: {error}"
            return
        own = {str(address[0]): family for family, _, _, _, address in found}
        addresses = sorted(own, key=lambda address: own[address] != socket.AF_INET)
        self.ended_at = time.monotonic()
        self.endpoints = [f"tcp://[{each}]:{port}" if ":" in each else f"tcp://{each}:{port}" for each in addresses]


class NameResolver:
    """The lookups of one transport. Only its thread calls the methods."""

    def __init__(self, watch: Callable[[socket.socket, Callable[[], Collection[Connection]]], None]) -> None:
        """`watch` lets a selector report the connections that the function returns when the socket is readable."""
        self._watch = watch
        self._lookups: dict[str, Lookup] = {}
        self._waiting: dict[Lookup, set[Connection]] = {}
        self._ended: deque[Lookup] = deque()
        self._ends: tuple[socket.socket, socket.socket] | None = None
        """Both ends of what wakes the selector; opened with the first name."""

    def resolve(self, endpoint: str, connection: Connection) -> Lookup:
        """Return the lookup of an endpoint. Unless it is done, the selector reports `connection` when it is."""
        target = split_tcp(endpoint)
        if target is None or _is_address(target[0]):
            done = Lookup(endpoint)
            done.endpoints = [endpoint]
            return done
        lookup = self._lookups.get(endpoint)
        if lookup is None or lookup.error or (lookup.is_done and time.monotonic() - lookup.ended_at > CACHE_SECONDS):
            lookup = self._lookups[endpoint] = Lookup(endpoint)
            self._start(lookup, *target)
        if not lookup.is_done:
            self._waiting.setdefault(lookup, set()).add(connection)
        return lookup

    def _start(self, lookup: Lookup, host: str, port: int) -> None:
        if self._ends is None:
            self._ends = socket.socketpair()
            for end in self._ends:
                end.setblocking(False)
            self._watch(self._ends[0], self._take_ended)
        waking, ended = self._ends[1], self._ended

        def run() -> None:
            lookup.run(host, port)
            ended.append(lookup)
            with contextlib.suppress(OSError):  # it is full, so the selector wakes; or the transport is closed
                waking.send(b"\0")

        threading.Thread(target=run, name="kvevents-name", daemon=True).start()

    def _take_ended(self) -> set[Connection]:
        """Return the connections whose lookups have ended."""
        found: set[Connection] = set()
        if self._ends is not None:
            with contextlib.suppress(OSError):
                while self._ends[0].recv(4_096):
                    pass
        while self._ended:
            found |= self._waiting.pop(self._ended.popleft(), set())
        return found

    def forget(self, connection: Connection) -> None:
        """Report a connection no more, since it is closed."""
        for waiting in self._waiting.values():
            waiting.discard(connection)

    def close(self) -> None:
        """Close what wakes the selector. Lookups that have not ended are left to their threads. Idempotent."""
        for end in self._ends or ():
            end.close()


def _is_address(host: str) -> bool:
    """Whether a host is an address, an interface or a wildcard rather than a name."""
    bare = host.removeprefix("[").removesuffix("]").partition("%")[0]
    if ";" in host or ":" in bare:
        return True
    with contextlib.suppress(OSError):
        return bool(socket.inet_aton(bare))
    return host == "*"
