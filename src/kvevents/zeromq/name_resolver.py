"""Resolves the host names of endpoints in threads, so that a slow lookup delays only its own source.

libzmq has one thread for the sockets of all sources. In this thread libzmq would wait for the name server at each attempt to
connect. So libzmq's sockets get addresses instead of names. A name is resolved again when its socket is opened again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Final, Generic, TypeVar

from kvevents.endpoints import split_tcp

Waiter = TypeVar("Waiter")
"""An object that waits for an address, such as a connection."""

CACHE_SECONDS: Final = 3.0
"""Seconds for which an address is used again without another lookup, because live and replay sockets open together."""


class Lookup:
    """A lookup of the addresses of an endpoint."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.endpoints: list[str] = []
        """One endpoint per address of the host, with the address instead of the name; IPv4 comes first, as in libzmq."""
        self.error = ""
        """Why there is no address; empty if there is an address, and until the lookup ends."""
        self.ended_at = float("-inf")

    @property
    def is_done(self) -> bool:
        """Whether the lookup has ended."""
        return bool(self.endpoints or self.error)

    def run(self, host: str, port: int) -> None:
        """Resolve the name, without a time limit."""
        try:
            records = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.ended_at = time.monotonic()
            self.error = f"its name cannot be resolved: {getattr(error, 'strerror', None) or error}"
            return
        families = {str(address[0]): family for family, _, _, _, address in records}
        addresses = sorted(families, key=lambda address: families[address] != socket.AF_INET)
        self.ended_at = time.monotonic()
        self.endpoints = [f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}" for ip in addresses]


class NameResolver(Generic[Waiter]):
    """Starts lookups, and wakes a selector when a lookup ends. One thread calls all methods."""

    def __init__(self, watch: Callable[[socket.socket, Callable[[], Collection[Waiter]]], None]) -> None:
        """`watch(socket, function)` makes a selector report the waiters that `function` returns when `socket` is readable."""
        self._watch = watch
        self._lookups: dict[str, Lookup] = {}
        self._waiters: dict[Lookup, set[Waiter]] = {}
        self._ended_lookups: deque[Lookup] = deque()
        self._wake_sockets: tuple[socket.socket, socket.socket] | None = None
        """Both ends of the socket pair that wakes the selector; opened for the first name that is resolved."""

    def resolve(self, endpoint: str, waiter: Waiter) -> Lookup:
        """Return the lookup of an endpoint. If the lookup is not done, the selector reports `waiter` when the lookup ends."""
        target = split_tcp(endpoint)
        if target is None or not has_name(endpoint):
            resolved_lookup = Lookup(endpoint)
            resolved_lookup.endpoints = [endpoint]
            return resolved_lookup
        lookup = self._lookups.get(endpoint)
        if lookup is None or lookup.error or (lookup.is_done and time.monotonic() - lookup.ended_at > CACHE_SECONDS):
            lookup = self._lookups[endpoint] = Lookup(endpoint)
            self._start(lookup, *target)
        if not lookup.is_done:
            self._waiters.setdefault(lookup, set()).add(waiter)
        return lookup

    def _start(self, lookup: Lookup, host: str, port: int) -> None:
        if self._wake_sockets is None:
            self._wake_sockets = socket.socketpair()
            for wake_end in self._wake_sockets:
                wake_end.setblocking(False)
            self._watch(self._wake_sockets[0], self._take_waiters)
        wake_socket, lookups = self._wake_sockets[1], self._ended_lookups

        def run() -> None:
            lookup.run(host, port)
            lookups.append(lookup)
            with contextlib.suppress(OSError):  # the socket is full, so the selector wakes anyway; or the transport is closed
                wake_socket.send(b"\0")

        threading.Thread(target=run, name="kvevents-name", daemon=True).start()

    def _take_waiters(self) -> set[Waiter]:
        waiters: set[Waiter] = set()
        if self._wake_sockets is not None:
            with contextlib.suppress(OSError):
                while self._wake_sockets[0].recv(4_096):
                    pass
        while self._ended_lookups:
            waiters |= self._waiters.pop(self._ended_lookups.popleft(), set())
        return waiters

    def forget(self, waiter: Waiter) -> None:
        """Stop reporting a waiter, because it is closed."""
        for waiters in self._waiters.values():
            waiters.discard(waiter)

    def close(self) -> None:
        """Close the socket pair. Threads of unfinished lookups continue. Idempotent."""
        for wake_end in self._wake_sockets or ():
            wake_end.close()


def has_name(endpoint: str) -> bool:
    """Whether the host of an endpoint is a name, and not an address, an interface or a wildcard."""
    host = (split_tcp(endpoint) or ("*",))[0]
    address = host.removeprefix("[").removesuffix("]").partition("%")[0]
    if ";" in host or ":" in address or host == "*":
        return False
    with contextlib.suppress(OSError):
        return not socket.inet_aton(address)
    return True
