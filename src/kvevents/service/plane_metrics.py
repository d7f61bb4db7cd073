"""Prometheus metrics of a plane's replica; docs/plane-runbook.md explains each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from kvevents.plane.ledger import Ledger
from kvevents.plane.subscriber import Partition
from kvevents.service.replica.replica import Replica
from kvevents.service.shards.scatter_gather import ScatterGather


class Page(Protocol):
    """Receives metric families; samples map label text to values, and None stands for an unknown value."""

    def gauge(self, name: str, text: str, samples: Mapping[str, float | None]) -> None:
        """Add a family of values that rise and fall."""

    def counter(self, name: str, text: str, samples: Mapping[str, float | None]) -> None:
        """Add a family of values that only rise."""


_LEDGER_COUNTS: Final[tuple[tuple[str, str, Callable[[Ledger], int]], ...]] = (
    (
        "kvevents_plane_invalid_records_total",
        "Records and messages in the log that no bridge writes; stays at 0.",
        lambda ledger: ledger.breaches + ledger.foreign,
    ),
    (
        "kvevents_plane_duplicate_records_total",
        "Records that repeat the log or belong to an incarnation that has ended; stays at 0.",
        lambda ledger: ledger.doubled,
    ),
    (
        "kvevents_plane_discarded_pages_total",
        "Pages without effect because their writer expected other pages before them; the bridge writes them again.",
        lambda ledger: ledger.overtaken + ledger.strays,
    ),
)


def write_plane(page: Page, replica: Replica, now: float) -> None:
    """Write what a replica knows about the plane; `now` is a Unix time in seconds."""
    for name, text, value in (
        ("kvevents_plane_synced", "1 once the replica has read the log to its end since it started.", replica.is_complete),
        ("kvevents_plane_readable", "1 while the replica can read the log.", not replica.fault),
        (
            "kvevents_plane_snapshot_failed",
            "1 while the replica's last attempt to take a snapshot failed.",
            bool(replica.snapshot_fault),
        ),
    ):
        page.gauge(name, text, {"": int(value)})
    page.counter(
        "kvevents_plane_index_builds_total", "Times that the replica built its index from the log.", {"": replica.builds}
    )
    page.counter(
        "kvevents_plane_divergences_total",
        "Times that another replica's digest differed at the same position of the log; stays at 0.",
        {"": replica.disagreements},
    )
    if (generation := replica.generation) is None:
        return
    subscriber = generation.subscriber
    partitions = dict(subscriber.partitions)
    ledgers = list(subscriber.ledgers.values())
    for name, text, count in _LEDGER_COUNTS:
        page.counter(name, text, {"": sum(map(count, ledgers))})
    page.gauge("kvevents_plane_bridges", "Bridges whose heartbeats arrive.", {"": subscriber.bridges()})
    page.gauge(
        "kvevents_plane_partition_position",
        "Number of the newest page in the index.",
        _by_partition(partitions, lambda partition: partition.position),
    )
    page.gauge(
        "kvevents_plane_partition_lag_pages",
        "Pages in the log that are not in the index yet; absent while unknown.",
        _by_partition(partitions, lambda partition: partition.behind),
    )
    page.gauge(
        "kvevents_plane_partition_last_page_timestamp_seconds",
        "Unix time at which the newest page in the index was written, by the bridge's clock.",
        _by_partition(partitions, lambda partition: partition.at),
    )
    page.gauge(
        "kvevents_plane_partition_snapshot_timestamp_seconds",
        "Unix time at which this replica found the newest snapshot; absent before the first.",
        {f'partition="{partition}"': now - age for partition, age in generation.snapshot_ages().items()},
    )


def _by_partition(partitions: Mapping[int, Partition], value: Callable[[Partition], float | None]) -> dict[str, float | None]:
    return {f'partition="{number}"': value(partition) for number, partition in partitions.items()}


def write_shards(page: Page, replica: Replica, shards: ScatterGather) -> None:
    """Write what a replica that holds a shard knows about it and about the other replicas."""
    partitions = {
        'state="serving"': len(replica.shown),
        'state="assigned"': len(replica.wanted),
        'state="uncovered"': len(shards.uncovered),
    }
    page.gauge(
        "kvevents_shard_partitions",
        "Partitions that this replica answers for, that are assigned to it, and that no replica holds.",
        dict(partitions),
    )
    page.gauge("kvevents_shard_replicas", "Other replicas that announce themselves.", {"": shards.replicas})
    page.gauge(
        "kvevents_shard_denied_replicas",
        "Other replicas that are not queried because shard.allow does not list their hosts.",
        {"": len(replica.refused)},
    )
    page.counter(
        "kvevents_shard_request_failures_total", "Requests that another replica did not answer.", {"": shards.peers.failures}
    )
    page.counter(
        "kvevents_shard_incomplete_answers_total", "Answers that lacked the engines of a partition.", {"": shards.incomplete}
    )
