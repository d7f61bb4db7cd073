"""The native HTTP server that clients are connected to, as the control plane sees it.

Theory of operation. The data plane answers queries and probes without the interpreter, from the index and from a *routing
table*: what `DataPlane.publish` writes about the fleet, all of it at once, whenever anything in it has changed. Other requests
are forwarded to `kvevents.service.http.app`, and so are those that the data plane does not understand completely: there is one
author of refusals. With shards or spans all queries are forwarded, which is decided once, at the start.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from kvevents import _native
from kvevents.service.fleet import Fleet
from kvevents.service.member import Member
from kvevents.service.registration import Scope
from kvevents.service.schemas import HealthAnswer, ReadyAnswer

CLOSE_SECONDS: Final = 1.0
"""For clients to take the last answers once the control plane has ended."""


class HistogramCounts(msgspec.Struct):
    """Values by bucket."""

    counts: list[int]
    sum: float


class PathCounts(msgspec.Struct):
    """What was answered at one path."""

    by_status: dict[int, int]
    seconds: HistogramCounts


class Answers(msgspec.Struct):
    """What was answered by the data plane itself."""

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


@dataclass(frozen=True, slots=True)
class PromptSample:
    """The beginning of a prompt that was looked up."""

    scope: Scope
    tokens: memoryview = field(repr=False)


class ControlPlane(Protocol):
    """The service, as far as the data plane reads it."""

    @property
    def fleet(self) -> Fleet:
        """The workers that queries are answered about."""
        ...

    @property
    def adapters(self) -> frozenset[Scope]:
        """LoRA adapters that requests name as their model."""
        ...

    def health(self) -> HealthAnswer:
        """The answer of the liveness probes."""
        ...

    def readiness(self) -> ReadyAnswer:
        """The answer of the readiness probe."""
        ...


class DataPlane:
    """The server of one service. Before `start` and after `close` every method does nothing; any thread may call them."""

    def __init__(self, service: ControlPlane) -> None:
        self._service: Final = service
        self._native: _native.DataPlane | None = None
        self._upstream: socket.socket | None = None
        self._lock: Final = threading.Lock()
        self._published: tuple[Any, ...] | None = None
        self._answers_queries = False

    def start(self, listening: socket.socket, accept: Callable[[socket.socket], None], settings: Mapping[str, Any]) -> None:
        """Serve at a socket that listens; in the event loop.

        `accept` is called with each connection over which requests are forwarded, for the control plane's HTTP application.
        `settings` are those of `native/server/src/settings.rs`.
        """
        self._answers_queries = settings["answers_queries"]
        upstream, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        upstream.setblocking(False)
        with sender:
            native = _native.DataPlane(_encode(settings), listening.fileno(), sender.fileno())
        self._native = native
        self._upstream = upstream
        asyncio.get_running_loop().add_reader(upstream, _accept_all, upstream, accept)
        self._service.fleet.on_change = self.publish
        self.publish()
        self.refresh()

    # --- what the control plane says

    def publish(self) -> None:
        """Answer from the fleet as it is now, if it has changed."""
        native = self._native
        if native is None:
            return
        with self._lock:
            fleet = self._service.fleet
            # Read before the fleet is, so that what changes meanwhile is published next.
            version = (fleet.revision.number, self._service.adapters, fleet.failure, fleet.index)
            if version == self._published:
                return
            self._published = version
            if self._answers_queries:
                native.replace_table(fleet.index, _encode(_table(fleet, self._service.adapters)))
        self.refresh()

    def refresh(self) -> None:
        """Answer probes by what is so now."""
        if self._native is None:
            return
        health, ready = self._service.health(), self._service.readiness()
        self._native.replace_probes(
            (503 if health.status == "failed" else 200, _encode(health)),
            (200 if ready.ready else 503, _encode(ready)),
        )

    # --- what the data plane says

    def counts(self) -> Counts:
        """What it has counted."""
        return Counts() if self._native is None else _decode_counts(self._native.metrics())

    def samples(self) -> list[PromptSample]:
        """Prompts that were looked up since the last call: as many of each scope as are of use."""
        if self._native is None:
            return []
        return [
            PromptSample(Scope(model, tenant, group, number if name is None else name, salt), memoryview(tokens).cast("I"))
            for (model, tenant, group, name, number, salt), tokens in self._native.samples()
        ]

    # --- its end

    async def drain(self, seconds: float) -> None:
        """Take no more connections, and wait until those that there are have their answers."""
        if self._native is not None:
            await asyncio.to_thread(self._native.drain, seconds)

    async def close(self) -> None:
        """End all connections."""
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
        """End all connections at once."""
        if self._native is not None:
            self._native.close()


def _accept_all(upstream: socket.socket, accept: Callable[[socket.socket], None]) -> None:
    """Take the connections whose descriptors the data plane has sent."""
    with suppress(BlockingIOError, ConnectionResetError):
        while number := upstream.recv(ctypes.sizeof(ctypes.c_int)):
            accept(socket.socket(fileno=int.from_bytes(number, sys.byteorder)))


# --- the routing table


def _table(fleet: Fleet, adapters: frozenset[Scope]) -> Mapping[str, Any]:
    members = list(fleet.members.values())
    models = {member.registration.scope[:3] for member in members}
    bases: dict[tuple[str, str, str], set[str]] = {}
    for scope in {*(member.registration.scope for member in members), *adapters}:
        if isinstance(scope.lora, str) and scope[:3] in models:
            bases.setdefault((scope.lora, scope.tenant, scope.group), set()).add(scope.model)
    return {
        "has_failed": fleet.failure is not None,
        "workers": [_worker(member) for member in members],
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
    }
