"""Compares the index of this replica with those of the other replicas of a plane, by digests in a bucket of the plane."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Final

from nats.js.kv import KeyValue

from kvevents.errors import PlaneError
from kvevents_plane.digests import ReplicaDigests, missing_pages, read_digests
from kvevents_plane.layout import Layout
from kvevents_plane.nats_client import PlaneClient
from kvevents_plane.nats_errors import map_errors

log = logging.getLogger(__name__)


class ConsistencyCheck:
    """Compares the contents of one replica's index with those of the others, by digests."""

    def __init__(self, name: str, turn_seconds: float) -> None:
        self._turn_seconds: Final = turn_seconds
        self.disagreements = 0
        """Number of times that another replica had other contents at the same position."""
        self.write_fault = ""
        """Why this replica cannot publish its digests, such as missing permission to write; empty if it can."""
        self.others: tuple[str, ...] = ()
        """The other replicas that published digests recently."""
        self.whole: tuple[str, ...] = ()
        """Those of them that miss no pages."""
        self.missing: dict[int, int] = {}
        """Partitions that another replica cannot read, with the first page after those that are missing."""
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
            await self._publish(await js.key_value(layout.digests), own)
        others = await read_digests(js, layout)
        others.pop(self._name, None)
        self.others, self.missing = tuple(others), missing_pages(others.values())
        self.whole = tuple(name for name, digests in others.items() if not digests.missing)
        return others

    async def _publish(self, bucket: KeyValue, own: ReplicaDigests) -> None:
        """Publish the digests of this replica. A replica without permission to write continues without it."""
        try:
            with map_errors("publishing the digests of this replica"):
                await bucket.put(self._name, own.encode())
        except PlaneError as error:
            if error.fault != "denied":
                raise
            if not self.write_fault:
                log.warning("this replica publishes no digests: %s", error)
            self.write_fault = str(error)
        else:
            self.write_fault = ""
