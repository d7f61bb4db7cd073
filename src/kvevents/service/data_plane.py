"""The control plane's view of the data plane: the native HTTP server that clients connect to.

The data plane answers queries and probes without the Python interpreter, from the index and a *routing table*.
Whenever the fleet changes, `DataPlane.publish` writes the changed rows of this table. The data plane forwards all other
requests to `kvevents.service.http.app`. Queries that the data plane does not fully understand are also forwarded, so that one
module writes the errors. If spans are recorded, all queries are forwarded. For a valid query, the app calls `DataPlane.answer`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.client.schemas import HealthAnswer, ReadyAnswer
from kvevents.service.errors import ServiceError
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.member import Member
from kvevents.service.fleet.registration import Scope
from kvevents_native import _native

CLOSE_SECONDS: Final = 1.0
"""Number of seconds for clients to read the final responses after the control plane has stopped."""
REFRESH_PAUSE_FACTOR: Final = 20
"""Minimum pause before `publish` refreshes probe responses again, as a multiple of the duration of the newest refresh."""
DURATION_BOUNDS: Final = (0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128, 0.0256, 0.1, 0.5, 2.0)
"""Bucket bounds of the histogram of response times, in seconds between a request's headers and its response."""
MATCH_RATIO_BOUNDS: Final = (0.0, 0.01, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Bucket bounds of the histogram of match ratios: the fraction of a prompt's tokens that the best worker holds."""


class HistogramCounts(msgspec.Struct):
    """Counts of a histogram by bucket, and the sum of its values."""

    counts: list[int]
    sum: float


class PathCounts(msgspec.Struct):
    """Numbers of responses for one path, and their response times."""

    by_status: dict[int, int]
    seconds: HistogramCounts


class AnswerCounts(msgspec.Struct):
    """Counters of the responses that the data plane computed itself."""

    lookups: int = 0
    hits: int = 0
    depth: HistogramCounts | None = None
    requests: dict[str, PathCounts] = {}


class DataPlaneCounts(msgspec.Struct):
    """Counters of the data plane."""

    answers: AnswerCounts = msgspec.field(default_factory=AnswerCounts)
    connections: dict[str, int] = {}
    opened: int = 0
    closed: dict[str, int] = {}
    refusals: dict[str, int] = {}
    received: int = 0
    unread: int = 0
    reservations: dict[str, int] = {}
    """Number of open reservations, and number of ended reservations for each outcome."""


_decode_counts = msgspec.json.Decoder(DataPlaneCounts).decode
_encode = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode


class QueryAnswer(NamedTuple):
    """The response to a forwarded query."""

    body: bytes
    longest_match: int
    """Number of tokens of the prompt that the best worker holds."""


class DataPlane:
    """The native server of one service. Any thread may call the methods; before `start` and after `close`, they do nothing."""

    def __init__(self, fleet: Fleet, health: Callable[[], HealthAnswer], readiness: Callable[[], ReadyAnswer]) -> None:
        """`health` and `readiness` return the answers to probes."""
        self._fleet: Final = fleet
        self._health: Final = health
        self._readiness: Final = readiness
        self._native: _native.DataPlane | None = None
        self._wakes: socket.socket | None = None
        self._lock: Final = threading.Lock()
        self._published_version: tuple[Any, ...] | None = None
        self._published_adapters: frozenset[Scope] = frozenset()
        self._rows: dict[Member, int] = {}
        """Number of each worker's row in the routing table, so that only the rows of changed workers are written."""
        self._free_rows: list[int] = []
        self._next_refresh = 0.0
        """Time from which `publish` refreshes the responses to probes; until then, only the service's timer refreshes them."""

    def start(
        self, listening: socket.socket, handle: Callable[[_native.Request | int], None], settings: Mapping[str, Any]
    ) -> None:
        """Serve at a listening socket. Call this method in the event loop.

        `handle` is called with each forwarded request. `handle` is also called with the number of a response in pieces when the
        response has room for another piece, or when the client has left. `native/server/src/settings.rs` defines `settings`.
        """
        wakes, waker = socket.socketpair()
        wakes.setblocking(False)
        with waker:
            native = _native.DataPlane(_encode(settings), listening.fileno(), waker.fileno(), self._fleet.loads.requests)
        self._native = native
        self._wakes = wakes
        asyncio.get_running_loop().add_reader(wakes, _take_requests, native, wakes, handle)
        self._fleet.on_change = self.publish
        self.publish()
        self.refresh()

    # --- calls from the control plane to the data plane

    def publish(self) -> None:
        """Write the changes of the fleet to the routing table."""
        native = self._native
        if native is None:
            return
        with self._lock:
            fleet = self._fleet
            # Read the version before the fleet: if the fleet changes during this call, the next call publishes the change.
            version = (fleet.revision.number, fleet.adapters, fleet.failure, fleet.index)
            if version == self._published_version:
                return
            self._published_version = version
            native.change_table(fleet.index, _encode(self._take_change(fleet)))
        if time.monotonic() >= self._next_refresh:
            self.refresh()

    def _take_change(self, fleet: Fleet) -> Mapping[str, Any]:
        """Return the changes of the table since the previous call, in the form that `native/server/src/fleet.rs` reads."""
        former_adapters, self._published_adapters = self._published_adapters, fleet.adapters
        changes, members = fleet.revision.changed_members, list[Member]()
        while changes:
            members.append(changes.popitem()[0])
        workers: dict[int, Mapping[str, Any]] = {}
        removed: list[int] = []
        for member in reversed(members):
            row = self._rows.pop(member, None)
            if fleet.workers.get(member.registration.key) is member:
                if row is None:
                    row = self._free_rows.pop() if self._free_rows else len(self._rows)
                self._rows[member] = row
                workers[row] = _describe_worker(member)
            elif row is not None:
                removed.append(row)
                self._free_rows.append(row)  # Removals precede additions, because one change can free a row and use it again.
        return {
            "has_failed": fleet.failure is not None,
            "removed": removed,
            "workers": workers,
            "adapters": None if self._published_adapters == former_adapters else list(self._published_adapters),
        }

    def refresh(self) -> None:
        """Replace the stored responses to probes by new responses."""
        native = self._native  # `close` can set `_native` to None in another thread at any moment
        if native is None:
            return
        begin = time.monotonic()
        health, ready = self._health(), self._readiness()
        status, ready_status = 503 if health.status == "failed" else 200, 200 if ready.ready else 503
        native.replace_probes((status, _encode(health)), (ready_status, _encode(ready)))
        end = time.monotonic()
        self._next_refresh = end + REFRESH_PAUSE_FACTOR * (end - begin)

    def reload_tls(self) -> None:
        """Read the TLS files again, for new connections. Raises `ValueError` for files that cannot be used."""
        if self._native is not None:
            self._native.reload_tls()

    # --- calls from the data plane to the control plane

    def answer(
        self, method: str, path: str, fields: Mapping[str, Any], tokens: Any, *, wants_msgpack: bool = False
    ) -> QueryAnswer | None:
        """Answer a query with `fields` in its body, and the token ids `tokens` as its prompt.

        Return None if no worker serves the model, or if the fleet has failed. Raises `ServiceError` if the query cannot be
        answered for the current fleet, and `OverflowError` for a number of more than 64 bits.
        """
        native = self._native
        if native is None:
            return None
        match native.answer(method, path, _encode_msgpack(fields), tokens, wants_msgpack):
            case None:
                return None
            case body, longest_match:
                return QueryAnswer(body, longest_match)
            case status, reason, sentence, hint:
                raise ServiceError(sentence, reason, hint, status=status)

    def decisions(self) -> bytes:
        """Return, as JSON of a `DecisionsAnswer`, a sample of the newest selections."""
        native = self._native
        return b'{"decisions":[]}' if native is None else native.decisions()

    def reservations(self, limit: int) -> bytes:
        """Return, as JSON of a `ReservationsAnswer`, the `limit` open reservations that expire first."""
        native = self._native
        return b'{"open":0,"reservations":[]}' if native is None else native.reservations(limit)

    def counts(self) -> DataPlaneCounts:
        """Return the counters of the data plane."""
        native = self._native
        return DataPlaneCounts() if native is None else _decode_counts(native.metrics())

    # --- shutdown

    async def drain(self, seconds: float) -> None:
        """Stop accepting connections, and wait at most `seconds` until open requests have their responses."""
        if self._native is not None:
            await asyncio.to_thread(self._native.drain, seconds)

    async def close(self) -> None:
        """Close all connections, after a short time in which clients can read their responses."""
        self._fleet.on_change = lambda: None
        native, self._native = self._native, None
        wakes, self._wakes = self._wakes, None
        if native is not None:
            await asyncio.to_thread(native.drain, CLOSE_SECONDS)
            await asyncio.to_thread(native.close)
        if wakes is not None:
            asyncio.get_running_loop().remove_reader(wakes)
            wakes.close()

    def abort(self) -> None:
        """Close all connections at once."""
        if self._native is not None:
            self._native.close()


def _take_requests(native: _native.DataPlane, wakes: socket.socket, handle: Callable[[_native.Request | int], None]) -> None:
    wakes.recv(64)  # The native server sends a byte whenever it adds a request to an empty queue.
    for item in native.take():
        handle(item)


def _describe_worker(member: Member) -> Mapping[str, Any]:
    registration = member.registration
    source, rank = registration.key
    scope = registration.scope
    return {
        "source": source,
        "rank": rank,
        "instance": registration.instance,
        "url": registration.url,
        "labels": registration.labels,
        "scope": scope._asdict(),
        "label": scope.name,
        "trust": member.trust_status,
        "is_hidden": member.is_hidden,
        "distance": member.distance,
        "obstacle": member.obstacle,
        "block_size": registration.block_size,
        "block_sizes": member.expected_block_sizes,
        "stores_only": registration.stores_only,
    }
