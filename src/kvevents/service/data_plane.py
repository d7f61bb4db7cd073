"""The control plane's view of the data plane: the native HTTP server that clients connect to.

The data plane answers queries and probes without the Python interpreter, from the index and a *routing table*.
`DataPlane.publish` writes what has changed of it whenever the fleet changes. The data plane forwards all other requests to
`kvevents.service.http.app`, also queries that it does not fully understand, so that one place writes their errors. With spans
it forwards all queries; the start decides that once.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from kvevents.client.schemas import HealthAnswer, ReadyAnswer, TrustStatus
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.member import Member
from kvevents.service.fleet.registration import Scope
from kvevents_native import _native

CLOSE_SECONDS: Final = 1.0
"""Time for clients to read the last responses after the control plane stopped."""


class HistogramCounts(msgspec.Struct):
    """Counts of a histogram by bucket, and the sum of its values."""

    counts: list[int]
    sum: float


class PathCounts(msgspec.Struct):
    """Responses of one path."""

    by_status: dict[int, int]
    seconds: HistogramCounts


class Answers(msgspec.Struct):
    """Responses that the data plane computed itself."""

    lookups: int = 0
    hits: int = 0
    depth: HistogramCounts | None = None
    requests: dict[str, PathCounts] = {}


class Counts(msgspec.Struct):
    """Counters of the data plane."""

    answers: Answers = msgspec.field(default_factory=Answers)
    connections: dict[str, int] = {}
    opened: int = 0
    closed: dict[str, int] = {}
    refusals: dict[str, int] = {}
    received: int = 0
    unread: int = 0


_decode_counts = msgspec.json.Decoder(Counts).decode
_encode = msgspec.json.Encoder().encode
_numbers = count()
"""Numbers of workers in routing tables."""


class ControlPlane(Protocol):
    """The part of the service that the data plane reads."""

    @property
    def fleet(self) -> Fleet:
        """The workers."""
        ...

    def health(self) -> HealthAnswer:
        """Return the response of the liveness probes."""
        ...

    def readiness(self) -> ReadyAnswer:
        """Return the response of the readiness probe."""
        ...


class DataPlane:
    """The native server of one service. Any thread may call it. Methods do nothing before `start` and after `close`."""

    def __init__(self, service: ControlPlane) -> None:
        self._service: Final = service
        self._native: _native.DataPlane | None = None
        self._upstream: socket.socket | None = None
        self._lock: Final = threading.Lock()
        self._published: tuple[Any, ...] | None = None
        self._rows: dict[Member, _Row] = {}
        """What the newest table has of each worker, so that the change of one is not written with all others."""
        self._answers_queries = False

    def start(self, listening: socket.socket, accept: Callable[[socket.socket], None], settings: Mapping[str, Any]) -> None:
        """Serve at a listening socket. Only the event loop may call this.

        `accept` is called with each connection over which the data plane forwards requests. `settings` are the fields of
        `native/server/src/settings.rs`.
        """
        self._answers_queries = settings["answers_queries"]
        upstream, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        upstream.setblocking(False)
        with sender:
            native = _native.DataPlane(
                _encode(settings), listening.fileno(), sender.fileno(), self._service.fleet.loads.requests
            )
        self._native = native
        self._upstream = upstream
        asyncio.get_running_loop().add_reader(upstream, _accept_all, upstream, accept)
        self._service.fleet.on_change = self.publish
        self.publish()
        self.refresh()

    # --- from the control plane

    def publish(self) -> None:
        """Replace the routing table if the fleet has changed."""
        native = self._native
        if native is None:
            return
        with self._lock:
            fleet = self._service.fleet
            # Read the version before the fleet, so that a concurrent change is published by the next call.
            version = (fleet.revision.number, fleet.adapters, fleet.failure, fleet.index)
            if version == self._published:
                return
            self._published = version
            if self._answers_queries:
                rows = {member: _row(member, self._rows.get(member)) for member in list(fleet.workers.values())}
                native.replace_table(fleet.index, _encode(_changes(fleet, rows, self._rows)))
                self._rows = rows
        self.refresh()

    def refresh(self) -> None:
        """Replace the responses to probes."""
        if self._native is None:
            return
        health, ready = self._service.health(), self._service.readiness()
        self._native.replace_probes(
            (503 if health.status == "failed" else 200, _encode(health)),
            (200 if ready.ready else 503, _encode(ready)),
        )

    def reload_tls(self) -> None:
        """Read the TLS files again, for new connections. Raises `ValueError` if they cannot be used."""
        if self._native is not None:
            self._native.reload_tls()

    # --- from the data plane

    def counts(self) -> Counts:
        """Return the counters of the data plane."""
        return Counts() if self._native is None else _decode_counts(self._native.metrics())

    # --- shutdown

    async def drain(self, seconds: float) -> None:
        """Stop accepting connections, and wait until open requests have their responses."""
        if self._native is not None:
            await asyncio.to_thread(self._native.drain, seconds)

    async def close(self) -> None:
        """Close all connections, after a short time to read their responses."""
        native, self._native = self._native, None
        upstream, self._upstream = self._upstream, None
        if native is not None:
            await asyncio.to_thread(native.drain, CLOSE_SECONDS)
            await asyncio.to_thread(native.close)
        if upstream is not None:
            asyncio.get_running_loop().remove_reader(upstream)
            _accept_all(upstream, socket.socket.close)
            upstream.close()

    def abort(self) -> None:
        """Close all connections at once."""
        if self._native is not None:
            self._native.close()


def _accept_all(upstream: socket.socket, accept: Callable[[socket.socket], None]) -> None:
    """Accept the connections whose file descriptors the data plane sent."""
    with suppress(BlockingIOError, ConnectionResetError):
        while number := upstream.recv(ctypes.sizeof(ctypes.c_int)):
            accept(socket.socket(fileno=int.from_bytes(number, sys.byteorder)))


# --- the routing table


class _Row(NamedTuple):
    """What the newest table has of a worker."""

    number: int
    state: tuple[TrustStatus, bool, int]
    """What may change of it."""
    scope: Scope


def _row(member: Member, known: _Row | None) -> _Row:
    """Return the row of a worker: the known one if the worker is as it was."""
    state = (member.trust_status, member.is_hidden, member.distance)
    if known is not None and known.state == state:
        return known
    return _Row(next(_numbers) if known is None else known.number, state, member.registration.scope)


def _changes(fleet: Fleet, rows: Mapping[Member, _Row], before: Mapping[Member, _Row]) -> Mapping[str, Any]:
    """Return the order of all workers, what is new of them, and what the fleet has beside them."""
    scopes = {row.scope for row in rows.values()}
    models = {scope[:3] for scope in scopes}
    bases: dict[tuple[str, str, str], set[str]] = {}
    for scope in scopes | fleet.adapters:
        if isinstance(scope.lora, str) and scope[:3] in models:
            bases.setdefault((scope.lora, scope.tenant, scope.group), set()).add(scope.model)
    return {
        "has_failed": fleet.failure is not None,
        "order": [row.number for row in rows.values()],
        "workers": {row.number: _worker(member) for member, row in rows.items() if before.get(member) is not row},
        "block_sizes": [(*scope, sizes) for scope, sizes in fleet.all_block_sizes.items()],
        "bases": [(*adapter, sorted(found)) for adapter, found in bases.items()],
    }


def _worker(member: Member) -> Mapping[str, Any]:
    registration = member.registration
    source, rank = registration.key
    scope = registration.scope
    return {
        "source": source,
        "rank": rank,
        "instance": registration.instance,
        "scope": scope._asdict(),
        "label": scope.name,
        "trust": member.trust_status,
        "is_hidden": member.is_hidden,
        "distance": member.distance,
        "block_size": registration.block_size,
        "stores_only": registration.stores_only,
    }
