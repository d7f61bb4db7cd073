"""Metrics of a replica.

Their only label is `partition`, which has at most 256 values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from prometheus_client.metrics_core import Metric

from kvevents.prometheus import Samples, Table, by_label, families
from kvevents_plane.log_subscriber import PartitionProgress
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.replica.build import IndexBuild


class ReplicaStatus(NamedTuple):
    """What a replica counts, with the index build that answers queries."""

    is_complete: bool
    fault: str
    snapshot_fault: str
    builds: int
    disagreements: int
    build: IndexBuild | None


def collect(status: ReplicaStatus) -> Iterator[Metric]:
    """Yield the metric families of a replica."""
    yield from families("kvevents_plane_", _REPLICA, status)
    if status.build is not None:
        yield from families("kvevents_plane_", _BUILD, status.build)


_REPLICA: Final[Table[ReplicaStatus]] = {
    "synced": ("1 while all partitions of the log were read to their ends.", lambda r: r.is_complete),
    "readable": ("1 while the replica can read the log.", lambda r: not r.fault),
    "snapshot_failed": ("1 while the replica's last attempt to take a snapshot failed.", lambda r: bool(r.snapshot_fault)),
    "index_builds_total": ("Times that the replica built its index, or read a partition of it again.", lambda r: r.builds),
    "divergences_total": (
        "Times that another replica's digest differed at the same position of the log; stays at 0.",
        lambda r: r.disagreements,
    ),
}


def _sum(count: Callable[[PartitionState], int]) -> Callable[[IndexBuild], Samples]:
    return lambda build: sum(map(count, list(build.subscriber.states.values())))


def _by_partition(read: Callable[[PartitionProgress], float | None]) -> Callable[[IndexBuild], Samples]:
    return lambda build: by_label(
        "partition", {str(number): read(partition) for number, partition in dict(build.subscriber.partitions).items()}
    )


_BUILD: Final[Table[IndexBuild]] = {
    "invalid_records_total": (
        "Records and messages in the log that no bridge writes; stays at 0.",
        _sum(lambda s: s.invalid_records + s.foreign_messages),
    ),
    "duplicate_records_total": (
        "Records that repeat the log or belong to an incarnation that has ended; stays at 0.",
        _sum(lambda s: s.duplicate_records),
    ),
    "discarded_pages_total": (
        "Pages without effect because their writer expected other pages before them; the bridge writes them again.",
        _sum(lambda s: s.void_pages),
    ),
    "bridges": ("Bridges whose heartbeats arrive.", lambda b: b.subscriber.bridges()),
    "partition_position": ("Number of the newest page in the index.", _by_partition(lambda p: p.position)),
    "partition_lag_pages": (
        "Pages in the log that are not in the index yet; absent while unknown.",
        _by_partition(lambda p: p.lag),
    ),
    "partition_last_page_timestamp_seconds": (
        "Unix time at which the servers stored the newest page in the index, by their clock.",
        _by_partition(lambda p: p.stored_at),
    ),
    "partition_snapshot_timestamp_seconds": (
        "Unix time at which this replica found the newest snapshot; absent before the first.",
        lambda b: by_label("partition", {str(number): time.time() - age for number, age in b.snapshot_ages().items()}),
    ),
}
