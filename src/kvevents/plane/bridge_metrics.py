"""Prometheus metrics of a bridge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from kvevents.plane.bridge import BridgeStatus, PartitionStatus


_TRUSTS: Final = ("CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE")


class BridgeSample(NamedTuple):
    """The status of a bridge process at the moment of a scrape."""

    bridge: BridgeStatus
    streams: Mapping[str, int]
    """Followed streams by the name of their trust state."""
    max_queued_bytes: int
    faults: int
    """Engines and providers that the bridge cannot discover or follow."""


_GAUGES: Final[dict[str, tuple[str, Callable[[BridgeSample], float]]]] = {
    "connected": ("1 while the bridge is connected to a NATS server.", lambda sample: sample.bridge.connected),
    "name_shared": ("1 while another process uses the bridge's name.", lambda sample: bool(sample.bridge.name_conflict)),
    "network_failure_suspected": (
        "1 while more than half of the engines are unreachable, so that none is removed from the log.",
        lambda sample: bool(sample.bridge.suspicion),
    ),
    "unclaimed_engines": ("Engines in the log that no bridge claims.", lambda sample: sample.bridge.unclaimed),
    "queue_limit_bytes": (
        "Limit of the queued bytes of all partitions; above it the bridge stops reading.",
        lambda sample: sample.max_queued_bytes,
    ),
    "discovery_faults": ("Current faults of discovery.", lambda sample: sample.faults),
}
_COUNTERS: Final[dict[str, tuple[str, Callable[[BridgeSample], float]]]] = {
    "written_batches": ("Batches that the bridge wrote to the log.", lambda sample: sample.bridge.written),
    "write_conflicts": (
        "Pages that the log refused because another bridge wrote first.",
        lambda sample: sample.bridge.conflicts,
    ),
    "resyncs": ("Times that a stream started over because it no longer matched the log.", lambda sample: sample.bridge.resyncs),
    "invalid_records": ("Records in the log that no bridge writes; stays at 0.", lambda sample: sample.bridge.invalid_records),
}
_PARTITIONS: Final[dict[str, tuple[str, Callable[[PartitionStatus], float]]]] = {
    "partition_position": ("Number of the newest page that the bridge read.", lambda partition: partition.position),
    "partition_queued_records": ("Records that the log has not acknowledged yet.", lambda partition: partition.queued_records),
    "partition_queued_bytes": (
        "Bytes of records that the log has not acknowledged yet.",
        lambda partition: partition.queued_bytes,
    ),
    "partition_blocked": (
        "1 while the bridge cannot read or write the partition.",
        lambda partition: bool(partition.fault),
    ),
}


class BridgeCollector:
    """Reads a bridge's status at each scrape."""

    def __init__(self, read: Callable[[], BridgeSample]) -> None:
        self._read: Final = read

    def collect(self) -> Iterable[Metric]:
        """Yield every metric family."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - an extra

        sample = self._read()
        for name, (text, value) in _GAUGES.items():
            yield GaugeMetricFamily(f"kvevents_bridge_{name}", text, value=value(sample))
        for name, (text, value) in _COUNTERS.items():
            yield CounterMetricFamily(f"kvevents_bridge_{name}", text, value=value(sample))
        for name, (text, field) in _PARTITIONS.items():
            family = GaugeMetricFamily(f"kvevents_bridge_{name}", text, labels=["partition"])
            for partition in sample.bridge.partitions:
                family.add_metric([str(partition.partition)], field(partition))
            yield family
        streams = GaugeMetricFamily("kvevents_bridge_streams", "Followed streams by trust state.", labels=["state"])
        for trust in _TRUSTS:
            streams.add_metric([trust], sample.streams.get(trust, 0))
        yield streams
