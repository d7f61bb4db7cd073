"""The other replicas of a plane: requests to them, within a bound of time and size, which partitions each holds, and digests.

Theory of operation. Replicas announce their URLs in a bucket of the plane, and every user with permission to write there can
announce any URL. Prompts and the token of this replica are sent to announced URLs. So the host of an announced URL must match
the patterns of `shard.allow`. If this replica is reached by `https`, the others must be too: then TLS verifies that the host
is the named one.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvevents.errors import ConfigError, ExternalError, PlaneError
from kvevents.http_client import HttpConnections, HttpError, RequestLimits
from kvevents.plane.layout import Layout, list_entries
from kvevents.plane.leases import Lease, LeaseHolder, lease_key
from kvevents.plane.nats_errors import map_errors
from kvevents.plane.replicas import DIGEST_PREFIX, SHARD_PREFIX, ReplicaDigests, ShardAnnouncement, ShardAssignment
from kvevents.service.access import HostPatterns, address_of, is_loopback, token_of_file
from kvevents.service.settings import ShardSettings

if TYPE_CHECKING:
    from nats.js.kv import KeyValue

    from kvevents.plane.nats_client import PlaneClient


_LOOPBACK: Final = ("127.0.0.0/8", "::1", "localhost")


class PeerPolicy:
    """Decides which URLs of other replicas are used."""

    def __init__(self, settings: ShardSettings) -> None:
        own = urlsplit(settings.url)
        self.patterns: Final = tuple(settings.allow) or _default_patterns(own.hostname or "")
        self._hosts: Final = HostPatterns(self.patterns, "shard.allow")
        self._is_secure: Final = own.scheme == "https"

    def refusal(self, url: str) -> str:
        """Return why a URL must not be used; empty if it is allowed."""
        parts = urlsplit(url)
        if self._is_secure and parts.scheme != "https":
            return f"{url} is not encrypted, and this replica is reached by https"
        if (parts.hostname or "") not in self._hosts:
            return f"{url} is not among shard.allow ({', '.join(self.patterns)})"
        return ""


def _default_patterns(host: str) -> tuple[str, ...]:
    """Return the default patterns for the hosts of the other replicas."""
    if is_loopback(host):
        return _LOOPBACK
    domain = host.partition(".")[2]
    if address_of(host) is None and "." in domain:
        return (f"*.{domain}",)
    return (host,)


log = logging.getLogger(__name__)
T = TypeVar("T")

MSGPACK: Final = "application/msgpack"
MAX_CONNECTIONS: Final = 64
"""Most connections to one replica. Further requests wait for one of them, within their time limit."""
IDLE_SECONDS: Final = 60.0
"""Time after which an idle connection is not used again. It is shorter than the server's, which rarely closes it first then."""
MAX_ANSWER_BYTES: Final = 64 << 20
"""Largest answer: a hundred thousand ranks with their descriptions."""
MAX_SHOWN: Final = 200
"""Bytes of an error answer that a log message shows."""


class PeerUnavailableError(ExternalError):
    """Another replica did not answer, or its answer cannot be used."""


class Peers:
    """Sends requests to the other replicas. Use it in one event loop, and `close` it."""

    def __init__(self, settings: ShardSettings) -> None:
        """Raises `ConfigError` for a token or authorities that cannot be read."""
        self.failures = 0
        """Number of requests without a usable answer."""
        self.settings: Final = settings
        self._headers: Final = {
            "content-type": MSGPACK,
            "accept": MSGPACK,
            "accept-encoding": "identity",
            **_authorization(settings),
        }
        self._tls: Final = _tls(settings)
        self._failed: dict[str, float] = {}
        self._bounds: Final = RequestLimits(settings.ask_seconds, MAX_ANSWER_BYTES)
        self._connections: HttpConnections | None = None

    def has_failed(self, name: str) -> bool:
        """Return whether a replica failed within the last `shard.pace.avoid_seconds`."""
        return time.monotonic() - self._failed.get(name, float("-inf")) < self.settings.pace.avoid_seconds

    async def ask(self, name: str, url: str, path: str, question: msgspec.Struct, kind: type[T]) -> T:
        """Return the answer of replica `name` at `url`. Raises `PeerUnavailableError`."""
        if self._connections is None:
            self._connections = HttpConnections(
                self._bounds, tls=self._tls, idle_seconds=IDLE_SECONDS, max_connections=MAX_CONNECTIONS
            )
        try:
            status, body, _ = await self._connections.post(url + path, self._headers, msgspec.msgpack.encode(question))
        except HttpError as error:
            late = error.kind == "timeout"
            raise self._record_failure(
                name, f"no answer within {self.settings.ask_seconds:g} s" if late else str(error)
            ) from error
        if status != HTTPStatus.OK:
            raise self._record_failure(name, f"it answers {status}: {body[:MAX_SHOWN].decode(errors='replace')}")
        try:
            found = msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise self._record_failure(name, f"its answer cannot be read: {error}") from error
        if self._failed.pop(name, None) is not None:
            log.info("replica %s answers again", name)
        return found

    def _record_failure(self, name: str, why: str) -> PeerUnavailableError:
        error = PeerUnavailableError(f"replica {name}: {why}")
        if name not in self._failed:
            log.warning("%s; other replicas with the same partitions are queried instead, if there are any", error)
        self.failures += 1
        self._failed[name] = time.monotonic()
        return error

    async def close(self) -> None:
        """Close all connections."""
        if self._connections is not None:
            await self._connections.close()
            self._connections = None


def _authorization(settings: ShardSettings) -> dict[str, str]:
    if settings.token_file is None:
        return {}
    return {"authorization": f"Bearer {token_of_file(settings.token_file, 'shard')}"}


def _tls(settings: ShardSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca)
    except (OSError, ValueError) as error:  # ssl's errors are both
        raise ConfigError(f"shard.tls_ca: {settings.tls_ca} cannot be used: {error}; expected a PEM file") from error
    if settings.tls_certificate is not None:
        try:
            context.load_cert_chain(settings.tls_certificate, settings.tls_key)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"shard.tls_certificate: {settings.tls_certificate} and {settings.tls_key} cannot be used: {error}; expected "
                "PEM files, the key without password"
            ) from error
    return context


# --- shares and digests

LEASE_RETRY_SECONDS: Final = 0.5
"""Pause between two attempts to acquire the lease of the replica's name."""
_EXCHANGE_SECONDS: Final = 5.0


class Assignment:
    """The partitions that one replica is to hold. `served` returns those that it serves now."""

    def __init__(self, name: str, settings: ShardSettings | None, served: Callable[[], frozenset[int]]) -> None:
        self.fault = ""
        """Why this replica cannot take part in the plane at the moment; empty if it can."""
        self._name: Final = name
        self._settings: Final = settings
        self._shown: Final = served
        self.refused: dict[str, str] = {}
        """Why other replicas must not be queried, by name."""
        self._partitions = frozenset[int]()
        self._since: float | None = None
        self.assignment: ShardAssignment | None = None
        """The other replicas; None if this one holds all partitions, and before the plane is found."""

    @property
    def is_shared(self) -> bool:
        """Whether other replicas hold the other partitions."""
        return self._settings is not None

    @property
    def is_settled(self) -> bool:
        """Whether the partitions to hold are known."""
        if (settings := self._settings) is None:
            return True
        return self._since is not None and time.monotonic() - self._since >= settings.pace.settle_seconds

    @property
    def wanted(self) -> frozenset[int]:
        """Partitions to hold."""
        if not self.is_shared:
            return self._partitions
        return self.assignment.assigned if self.assignment is not None and self.is_settled else frozenset()

    @property
    def spare(self) -> frozenset[int]:
        """Partitions that may be released."""
        return self.assignment.releasable(time.monotonic()) if self.assignment is not None else frozenset()

    def begin(self, layout: Layout) -> None:
        """Set the layout of the plane."""
        self._partitions = frozenset(range(layout.partitions))
        if self._settings is not None and self.assignment is None:
            self.assignment = ShardAssignment(
                self._name, layout.partitions, self._settings.replication_factor, self._settings.pace
            )

    async def run(self, client: PlaneClient, layout: Layout) -> None:
        """Announce this replica and read the announcements of the others, as long as it has the lease of its name."""
        self.begin(layout)
        if (settings := self._settings) is None or (assignment := self.assignment) is None:
            return
        part = _ShareAnnouncements(self._name, settings, assignment, self._shown, self.refused)
        while True:
            lease = Lease(client.jetstream(), layout, lease_key("replica", self._name), LeaseHolder.current())
            try:
                await self._acquire_name(lease)
                keeping = asyncio.create_task(lease.renew_until_lost())
                try:
                    await self._announce(part, client, layout, keeping, settings.pace.announce_seconds)
                finally:
                    keeping.cancel()
            finally:
                await lease.release()

    async def _acquire_name(self, lease: Lease) -> None:
        while True:
            try:
                if await lease.acquire():
                    self.fault = ""
                    return
                owner = lease.rival or "another process"
                fault = f"{owner} is replica {self._name!r} too: give each process its own --replica-name"
            except PlaneError as error:
                fault = str(error)
            self._set_fault(fault)
            await asyncio.sleep(LEASE_RETRY_SECONDS)

    def _set_fault(self, fault: str) -> None:
        if fault != self.fault:
            log.warning("%s", fault)
        self.fault = fault

    async def _announce(
        self, part: _ShareAnnouncements, client: PlaneClient, layout: Layout, keeping: asyncio.Task[str], pause: float
    ) -> None:
        try:
            while not keeping.done():
                try:
                    async with asyncio.timeout(_EXCHANGE_SECONDS):
                        await part.exchange(client, layout)
                    self._since = time.monotonic() if self._since is None else self._since
                except (PlaneError, TimeoutError) as error:
                    self._set_fault(f"cannot query the other replicas: {error or 'no answer in time'}")
                else:
                    self.fault = ""
                await asyncio.sleep(pause)
            self._set_fault(f"the lease of the name {self._name!r} was lost: {keeping.result()}")
        finally:
            with suppress(PlaneError, TimeoutError):
                async with asyncio.timeout(_EXCHANGE_SECONDS):
                    await part.leave(client, layout)


class _ShareAnnouncements:
    """The announcements of a replica that holds a share, and of the others."""

    def __init__(
        self,
        name: str,
        settings: ShardSettings,
        assignment: ShardAssignment,
        served: Callable[[], frozenset[int]],
        refused: dict[str, str],
    ) -> None:
        self._refused: Final = refused
        self._policy: Final = PeerPolicy(settings)
        self._name: Final = name
        self._settings: Final = settings
        self._assignment: Final = assignment
        self._shown: Final = served
        self._number = time.time_ns()
        """Number of the announcement. It begins at another value in each process."""

    async def exchange(self, client: PlaneClient, layout: Layout) -> None:
        """Write the announcement of this replica, and read those of the others. Raises `PlaneError`."""
        served = self._shown()
        self._number += 1
        own = ShardAnnouncement(self._settings.url.rstrip("/"), self._settings.replication_factor, sorted(served), self._number)
        with map_errors("announcing the partitions of this replica"):
            bucket = await client.jetstream().key_value(layout.leases)
            await bucket.put(SHARD_PREFIX + self._name, own.encode())
        found = await list_entries(client.jetstream(), layout, "reading the partitions of the other replicas", SHARD_PREFIX)
        said = {name: ShardAnnouncement.decode(value) for name, value in found.items() if name != self._name}
        others = {name: announced for name, announced in said.items() if announced is not None}
        self._assignment.update(self._select_allowed(others), served, time.monotonic())

    def _select_allowed(self, others: dict[str, ShardAnnouncement]) -> dict[str, ShardAnnouncement]:
        """Return the announcements with an allowed URL. A refused one is logged once and ignored."""
        refused = {name: why for name, said in others.items() if (why := self._policy.refusal(said.url))}
        for name in sorted(refused):
            if self._refused.get(name) != refused[name]:
                log.warning("replica %s is not queried: %s; see shard.allow", name, refused[name])
        self._refused.clear()
        self._refused.update(refused)
        return {name: said for name, said in others.items() if name not in refused}

    async def leave(self, client: PlaneClient, layout: Layout) -> None:
        """Remove the announcement of this replica. Raises `PlaneError`."""
        with map_errors("withdrawing the announcement of this replica"):
            bucket = await client.jetstream().key_value(layout.leases)
            await bucket.delete(SHARD_PREFIX + self._name)


class ConsistencyCheck:
    """Compares the contents of one replica's index with those of the others, by digests."""

    def __init__(self, name: str, turn_seconds: float) -> None:
        self._turn_seconds: Final = turn_seconds
        self.disagreements = 0
        """Number of times that another replica had other contents at the same position."""
        self.write_fault = ""
        """Why this replica cannot publish its digests, such as missing permission to write; empty if it can."""
        self._name: Final = name
        self._differs_since: float | None = None

    @property
    def differs(self) -> bool:
        """Whether another replica has other contents. Either of them can be wrong."""
        return self._differs_since is not None

    def forget(self) -> None:
        """Reset the result, because the index was replaced."""
        self._differs_since = None

    async def compare(self, client: PlaneClient, layout: Layout, own: ReplicaDigests, built_at: float) -> str:
        """Compare digests with the other replicas. Return why the index must be rebuilt; empty if it need not be."""
        try:
            others = await self._exchange(client, layout, own)
        except PlaneError as error:
            log.debug("cannot query the other replicas: %s", error)
            return ""
        now = time.monotonic()
        against = Counter(own.agrees(replica_digests) for replica_digests in others.values())
        if not against[False]:
            if against[True] or not others:
                self._differs_since = None
            return ""
        if self._differs_since is None:
            self._differs_since = now
            self.disagreements += 1
            log.error("%d of %d replicas have other contents at the same position", against[False], len(others))
        turn = sorted([self._name, *others]).index(self._name)
        outvoted = against[False] > against[True] + 1
        in_turn = against[False] == against[True] + 1 and now - self._differs_since > (turn + 1) * self._turn_seconds
        is_due = (outvoted or in_turn) and now - built_at > self._turn_seconds
        return "the other replicas have other contents" if is_due else ""

    async def _exchange(self, client: PlaneClient, layout: Layout, own: ReplicaDigests) -> dict[str, ReplicaDigests]:
        """Publish the digests of this replica, and return those of the others."""
        js = client.jetstream()
        with map_errors("publishing the digests of this replica"):
            await self._publish(await js.key_value(layout.leases), own)
        found = await list_entries(js, layout, "reading the digests of the other replicas", DIGEST_PREFIX)
        said = {name: ReplicaDigests.decode(value) for name, value in found.items() if name != self._name}
        return {name: replica_digests for name, replica_digests in said.items() if replica_digests is not None}

    async def _publish(self, bucket: KeyValue, own: ReplicaDigests) -> None:
        """Publish the digests of this replica. A replica without permission to write continues without it."""
        try:
            with map_errors("publishing the digests of this replica"):
                await bucket.put(DIGEST_PREFIX + self._name, own.encode())
        except PlaneError as error:
            if error.fault != "denied":
                raise
            if not self.write_fault:
                log.warning("this replica publishes no digests: %s", error)
            self.write_fault = str(error)
        else:
            self.write_fault = ""
