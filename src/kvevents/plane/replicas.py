"""What replicas of a plane announce in its lease bucket: which partitions they hold, and digests of their indexes.

Partitions are assigned to replicas if one index would be too large for one machine. Rendezvous hashing (Thaler and Ravishankar,
1996) ranks the replicas for each partition, and the first `holders` of them hold it. A replica that joins takes over partitions
from each of the others; the partitions of one that leaves move to each of the others; no other partition moves. All ranks of an
engine are in one partition. So the answers of replicas that together hold all partitions form a complete answer, in which no
engine occurs twice.

No replica decides for all. Each one announces every few seconds its URL and the partitions that it can answer for, and computes
from the other announcements which partitions it must hold. For a moment two replicas can see different announcements. That
costs work, but no answer is wrong: a caller uses the partitions that each replica *announces*, and each answer names its
partitions. A replica releases a partition only after all assigned replicas have announced it for a while.

With digests replicas compare their indexes: of each partition, after some of its pages. One digest covers all streams of a
partition. Its size does not depend on the number of streams, so it fits into a message and can be published every few seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from typing import Final
from urllib.parse import urlsplit

import msgspec

from kvevents.plane.records import StreamKey
from kvevents.settings import Seconds, Settings, build_decoder_now

SHARD_PREFIX: Final = "shard."
"""Prefix of the keys of announcements in the lease bucket; the replica's name follows."""
MAX_HOLDERS: Final = 8
"""Replicas that hold a partition, at most."""


@build_decoder_now
class ShardTimers(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timers of replicas that hold a shard; they must be the same in all replicas of a plane."""

    announce_seconds: Seconds = 2.0
    """Seconds between two announcements."""
    settle_seconds: Seconds = 5.0
    """Seconds from the first announcement until a replica holds anything, so that no replica takes all when several start."""
    present_seconds: Seconds = 6.0
    """Seconds after its newest announcement for which a replica is queried. One listing can miss an announcement that is being
    rewritten, and the announcement of a dead replica stays in the bucket for longer."""
    dead_seconds: Seconds = 30.0
    """Seconds without an announcement after which others take over a replica's partitions; a restart must be shorter."""
    release_seconds: Seconds = 10.0
    """Seconds for which all assigned replicas must have held a partition before another one releases it."""
    refresh_seconds: Seconds = 2.0
    """Seconds between two queries for the engines of other replicas."""
    avoid_seconds: Seconds = 2.0
    """Seconds after a failure for which a replica is queried only if no other one holds the partition."""


@build_decoder_now
class ShardAnnouncement(msgspec.Struct, frozen=True):
    """What a replica that holds a shard announces."""

    url: str
    """URL for the other replicas."""
    holders: int
    """The replica's setting for the number of replicas that hold each partition."""
    held: list[int]
    """Partitions that it can answer for."""
    counter: int = 0
    """Changes with each announcement."""

    def encode(self) -> bytes:
        """Encode the announcement for the bucket."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, value: bytes) -> ShardAnnouncement | None:
        """Decode an entry of the bucket; return None for an invalid one, also if its URL is unusable."""
        with suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(value, type=cls)
            if is_url(found.url) and 1 <= found.holders <= MAX_HOLDERS:
                return found
        return None


def is_url(text: str) -> bool:
    """Return whether the text is `http://HOST:PORT` or `https://HOST:PORT` without a path."""
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - raises for an invalid port
    except ValueError:
        return False
    plain = text.isascii() and text.isprintable() and parts.username is None
    return plain and parts.scheme in {"http", "https"} and bool(parts.hostname) and not (parts.path.strip("/") + parts.query)


@lru_cache(maxsize=1 << 16)
def _rank(name: str, partition: int) -> int:
    text = f"{partition}/{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def assigned_replicas(partition: int, names: Iterable[str], holders: int) -> list[str]:
    """Return the replicas that must hold a partition, the highest-ranked first."""
    return sorted(names, key=lambda name: (_rank(name, partition), name), reverse=True)[:holders]


def plan_queries(
    own: str, partitions: Iterable[int], holding: Mapping[str, Collection[int]]
) -> tuple[dict[str, list[int]], list[int]]:
    """Return which replicas to query for which partitions, with few replicas, and the partitions that no replica holds.

    Of replicas that hold equally many, different callers (`own`) choose different ones.
    """
    left = set(partitions)
    found: dict[str, list[int]] = {}
    while left:
        held_by = {name: left.intersection(held) for name, held in holding.items() if name not in found}
        best = max(held_by, key=lambda name: (len(held_by[name]), _rank(f"{own}/{name}", 0)), default=None)
        if best is None or not held_by[best]:
            break
        found[best] = sorted(held_by[best])
        left -= held_by[best]
    return found, sorted(left)


class ShardAssignment:
    """The replicas of a plane as one of them sees them, and the partitions that this one must hold or can release.

    `now` is the time of a monotonic clock.
    """

    def __init__(self, own: str, partitions: int, holders: int, timers: ShardTimers | None = None) -> None:
        self.present: Mapping[str, ShardAnnouncement] = {}
        """The announcements of the other replicas that are present."""
        self._own: Final = own
        self._partitions: Final = partitions
        self._holders: Final = holders
        self._timers: Final = timers or ShardTimers()
        self._known: dict[str, tuple[ShardAnnouncement, float]] = {}
        """The last announcement of each replica that is not dead, and when it was new."""
        self._releasable_since: dict[int, float] = {}
        self._updated_at: float | None = None

    def update(self, others: Mapping[str, ShardAnnouncement], held: Collection[int], now: float) -> None:
        """Update the announcements of the other replicas, and the partitions that this replica answers for."""
        if self._updated_at is not None and now - self._updated_at > self._timers.present_seconds:
            # No announcement could be read meanwhile, so that time does not count.
            away = now - self._updated_at
            self._known = {name: (each, at + away) for name, (each, at) in self._known.items()}
            self._releasable_since.clear()
        self._updated_at = now
        for name, each in others.items():
            if name not in self._known or self._known[name][0] != each:
                self._known[name] = (each, now)
        self._known = {name: (each, at) for name, (each, at) in self._known.items() if now - at <= self._timers.dead_seconds}
        self.present = {name: each for name, (each, at) in self._known.items() if now - at <= self._timers.present_seconds}
        releasable = [partition for partition in held if self._is_releasable(partition, others)]
        self._releasable_since = {partition: self._releasable_since.get(partition, now) for partition in releasable}

    def _is_releasable(self, partition: int, others: Mapping[str, ShardAnnouncement]) -> bool:
        names = self._assigned(partition)
        present = [name for name in names if name in others and name in self.present and partition in others[name].held]
        return self._own not in names and present == names

    def _assigned(self, partition: int) -> list[str]:
        return assigned_replicas(partition, [self._own, *self._known], self.holders)

    @property
    def holders(self) -> int:
        """Number of replicas that must hold each partition: the highest setting of any replica."""
        return max([self._holders, *(each.holders for each, _ in self._known.values())])

    @property
    def assigned(self) -> frozenset[int]:
        """The partitions that this replica must hold; none before the first update."""
        if self._updated_at is None:
            return frozenset()
        return frozenset(partition for partition in range(self._partitions) if self._own in self._assigned(partition))

    def releasable(self, now: float) -> frozenset[int]:
        """Return the partitions that this replica can release; none while no announcements can be read."""
        if self._updated_at is None or now - self._updated_at > self._timers.present_seconds:
            return frozenset()
        return frozenset(
            partition for partition, since in self._releasable_since.items() if now - since >= self._timers.release_seconds
        )


# --- digests of indexes

DIGEST_PREFIX: Final = "digest."
"""Prefix of the keys of `ReplicaDigests` in the lease bucket; the replica's name follows."""
DIGEST_BYTES: Final = 16
"""Size of a partition's digest, which protects against errors and not against attacks."""


class PartitionDigest(msgspec.Struct, frozen=True, array_like=True):
    """Digest of a replica's index of one partition after one page."""

    position: int
    """Position of the page."""
    streams: int
    digest: str
    """Digest of all streams in hexadecimal digits."""

    @classmethod
    def of(cls, position: int, digests: Mapping[StreamKey, str]) -> PartitionDigest:
        """Combine the digests of the partition's streams."""
        rows = sorted((source, rank, digest) for (source, rank), digest in digests.items())
        return cls(position, len(rows), sha256(msgspec.msgpack.encode(rows)).digest()[:DIGEST_BYTES].hex())


@build_decoder_now
class ReplicaDigests(msgspec.Struct, frozen=True):
    """The digests that one replica publishes, by partition."""

    partitions: dict[str, list[PartitionDigest]]

    @classmethod
    def of(cls, digests: Mapping[int, Iterable[PartitionDigest]]) -> ReplicaDigests:
        """Return the digests for publication."""
        return cls({str(partition): list(each) for partition, each in digests.items()})

    def encode(self) -> bytes:
        """Encode the digests for the bucket."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, value: bytes) -> ReplicaDigests | None:
        """Decode an entry of the bucket; return None for an invalid one."""
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(value, type=cls)
        return None

    def agrees(self, other: ReplicaDigests) -> bool | None:
        """Return whether both replicas have equal digests at all common positions; None without a common position."""
        comparisons = [
            one == two
            for partition, digests in self.partitions.items()
            for one in digests
            for two in other.partitions.get(partition, ())
            if one.position == two.position
        ]
        return all(comparisons) if comparisons else None
