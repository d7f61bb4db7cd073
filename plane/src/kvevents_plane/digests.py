"""Digests of the partitions of an index. The replicas of a plane compare them to verify that equal pages gave equal indexes.

Replicas publish their digests in a separate bucket, each under its name. One digest covers all streams of a partition.
The size of a digest does not depend on the number of streams, so it fits into a message and can be sent every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Final

import msgspec
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError
from nats.js.kv import KeyValue

from kvevents.errors import PlaneError
from kvevents.settings import build_decoder_now
from kvevents_plane.layout import Layout
from kvevents_plane.nats_client import PlaneClient
from kvevents_plane.nats_errors import map_errors
from kvevents_plane.records import StreamKey

log = logging.getLogger(__name__)

LIST_SECONDS: Final = 5.0
"""Timeout in seconds for reading the digests of all replicas."""


class PartitionDigest(msgspec.Struct, frozen=True, array_like=True):
    """Digest of one partition in a replica's index, after the page at `position`."""

    position: int
    """Position of the last page that the digest covers."""
    streams: int
    digest: str
    """Digest of all streams in hexadecimal digits."""

    @classmethod
    def combine(cls, position: int, digests: Mapping[StreamKey, str]) -> PartitionDigest:
        """Combine the digests of the partition's streams. The 16 bytes protect against errors, not against attacks."""
        rows = sorted((source, rank, digest) for (source, rank), digest in digests.items())
        return cls(position, len(rows), sha256(msgspec.msgpack.encode(rows)).digest()[:16].hex())


@build_decoder_now
class ReplicaDigests(msgspec.Struct, frozen=True):
    """The digests that one replica publishes for each partition."""

    partitions: dict[int, list[PartitionDigest]]
    """The digests of each partition that was read to its end. A list is empty before the first digest is due."""
    missing: dict[int, int] = {}
    """For each partition that the replica cannot read, the first page after the missing pages. No readable snapshot contains
    the missing pages. Another replica writes a snapshot that contains them, or a bridge starts the partition over."""
    positions: dict[int, int] = {}
    """Maps each partition to the position of its newest page in the index."""

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
        """Return whether both replicas have equal digests at all common positions, or None if they have no common position."""
        comparisons = [
            one == two
            for partition, digests in self.partitions.items()
            for one in digests
            for two in other.partitions.get(partition, ())
            if one.position == two.position
        ]
        return all(comparisons) if comparisons else None


def missing_pages(replicas: Iterable[ReplicaDigests]) -> dict[int, int]:
    """Return the partitions that any replica cannot read, each with the first page after all missing pages."""
    first_pages: dict[int, int] = {}
    for replica in replicas:
        for partition, first in replica.missing.items():
            first_pages[partition] = max(first, first_pages.get(partition, 0))
    return first_pages


async def read_digests(js: JetStreamContext, layout: Layout) -> dict[str, ReplicaDigests]:
    """Return the digests of each replica under its name. Invalid entries are left out. Raises `PlaneError`.

    The function lists the bucket's subjects and requests each entry, because nats-py's `KeyValue.keys` waits forever if the
    last entry of its list is rewritten during the call.
    """
    begin = f"$KV.{layout.digests}."
    digests_by_name: dict[str, ReplicaDigests] = {}
    with map_errors("reading the digests of the replicas"):
        async with asyncio.timeout(LIST_SECONDS):
            bucket = await js.key_value(layout.digests)
            info = await js.stream_info(f"KV_{layout.digests}", subjects_filter=f"{begin}>")
            for subject in info.state.subjects or {}:
                name = subject.removeprefix(begin)
                with suppress(KeyNotFoundError):  # the entry was deleted or has expired
                    digests = ReplicaDigests.decode((await bucket.get(name)).value or b"")
                    if digests is not None:
                        digests_by_name[name] = digests
    return digests_by_name


class ConsistencyCheck:
    """Compares the digests of one replica with those of the other replicas."""

    def __init__(self, name: str, turn_seconds: float) -> None:
        self._turn_seconds: Final = turn_seconds
        self.disagreements = 0
        """Number of times that another replica's index differed from this replica's index at the same position."""
        self.write_fault = ""
        """Why this replica cannot publish its digests, for example because it has no permission; empty if it can publish."""
        self.name_fault = ""
        """Sentence about another replica that has the same name as this one; empty if no other replica has this name."""
        self._revision = 0
        """Revision of the entry that this replica has published last; 0 if it is unknown."""
        self.others: tuple[str, ...] = ()
        """The other replicas whose published digests have not expired."""
        self.complete_replicas: tuple[str, ...] = ()
        """Names of the replicas in `others` that miss no pages."""
        self.missing: dict[int, int] = {}
        """Partitions that another replica cannot read, each with the first page after its missing pages."""
        self._name: Final = name
        self.differs_since: float | None = None
        """Time since which another replica's index has differed from this one; None if all are equal. Any of the indexes can be
        wrong."""

    async def compare(self, client: PlaneClient, layout: Layout, own_digests: ReplicaDigests, built_at: float) -> str:
        """Compare digests with the other replicas. Return why the index must be rebuilt; empty if no rebuild is needed."""
        try:
            others = await self._exchange(client, layout, own_digests)
        except PlaneError as error:
            log.debug("cannot query the other replicas: %s", error)
            return ""
        now = time.monotonic()
        against = Counter(own_digests.agrees(replica_digests) for replica_digests in others.values())
        if not against[False]:
            if against[True] or not others:
                self.differs_since = None
            return ""
        if self.differs_since is None:
            self.differs_since = now
            self.disagreements += 1
            log.error("%d of %d replicas have other contents at the same position", against[False], len(others))
        turn = sorted([self._name, *others]).index(self._name)
        outvoted = against[False] > against[True] + 1
        in_turn = against[False] == against[True] + 1 and now - self.differs_since > (turn + 1) * self._turn_seconds
        is_due = (outvoted or in_turn) and now - built_at > self._turn_seconds
        return "the other replicas have other contents" if is_due else ""

    async def _exchange(self, client: PlaneClient, layout: Layout, own_digests: ReplicaDigests) -> dict[str, ReplicaDigests]:
        """Publish the digests of this replica, and return the digests of the other replicas.

        A replica without permission to write continues without publishing.
        """
        js = client.jetstream()
        try:
            with map_errors("publishing the digests of this replica"):
                bucket = await js.key_value(layout.digests)
                await self._check_name(bucket)
                self._revision = await bucket.put(self._name, own_digests.encode())
        except PlaneError as error:
            if error.fault != "denied":
                raise
            if not self.write_fault:
                log.warning("this replica publishes no digests: %s", error)
            self.write_fault = str(error)
        else:
            self.write_fault = ""
        others = await read_digests(js, layout)
        others.pop(self._name, None)
        self.others, self.missing = tuple(others), missing_pages(others.values())
        self.complete_replicas = tuple(name for name, digests in others.items() if not digests.missing)
        return others

    async def _check_name(self, bucket: KeyValue) -> None:
        """Report another replica that has published under the name of this replica since this replica has."""
        before, self._revision = self._revision, 0
        fault = ""
        with suppress(KeyNotFoundError):  # the entry has expired
            if before and (await bucket.get(self._name)).revision != before:
                fault = f"another replica has the name {self._name!r}; give each its own with --replica-name"
        if fault and not self.name_fault:
            log.warning("%s", fault)
        self.name_fault = fault
