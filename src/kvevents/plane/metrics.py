"""Prometheus metrics of a bridge; docs/plane.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from kvevents.plane.bridge import BridgeStatus, PartitionStatus


_TRUSTS: Final = ("CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE")


class Scraped(NamedTuple):
    """The status of a bridge process at the moment of a scrape."""

    bridge: BridgeStatus
    streams: Mapping[str, int]
    """Followed streams by the name of their trust state."""
    max_queued_bytes: int
    faults: int
    """Engines and providers that the bridge cannot discover or follow."""


_GAUGES: Final[dict[str, tuple[str, Callable[[Scraped], float]]]] = {
    "connected": ("1 while the bridge is connected to a NATS server.", lambda seen: seen.bridge.connected),
    "name_shared": ("1 while another process uses the bridge's name.", lambda seen: bool(seen.bridge.namesake)),
    "network_failure_suspected": (
        "1 while more than half of the engines are unreachable, so that none is removed from the log.",
        lambda seen: bool(seen.bridge.suspects),
    ),
    "unclaimed_engines": ("Engines in the log that no bridge announces.", lambda seen: seen.bridge.unnamed),
    "queue_limit_bytes": (
        "Limit of the queued bytes of all partitions; above it the bridge stops reading.",
        lambda seen: seen.max_queued_bytes,
    ),
    "discovery_faults": ("Current faults of discovery.", lambda seen: seen.faults),
}
_COUNTERS: Final[dict[str, tuple[str, Callable[[Scraped], float]]]] = {
    "written_batches": ("Batches that the bridge wrote to the log.", lambda seen: seen.bridge.written),
    "write_conflicts": ("Pages that the log refused because another bridge wrote first.", lambda seen: seen.bridge.conflicts),
    "resyncs": ("Times that a stream started over because it no longer matched the log.", lambda seen: seen.bridge.adrift),
    "invalid_records": ("Records in the log that no bridge writes; stays at 0.", lambda seen: seen.bridge.breaches),
}
_PARTITIONS: Final[dict[str, tuple[str, Callable[[PartitionStatus], float]]]] = {
    "partition_position": ("Number of the newest page that the bridge read.", lambda partition: partition.position),
    "partition_queued_records": ("Records that the log has not acknowledged yet.", lambda partition: partition.waiting),
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

    def __init__(self, look: Callable[[], Scraped]) -> None:
        self._look: Final = look

    def collect(self) -> Iterable[Metric]:
        """Yield every metric family."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - an extra

        seen = self._look()
        for name, (text, value) in _GAUGES.items():
            yield GaugeMetricFamily(f"kvevents_bridge_{name}", text, value=value(seen))
        for name, (text, value) in _COUNTERS.items():
            yield CounterMetricFamily(f"kvevents_bridge_{name}", text, value=value(seen))
        for name, (text, read) in _PARTITIONS.items():
            family = GaugeMetricFamily(f"kvevents_bridge_{name}", text, labels=["partition"])
            for partition in seen.bridge.partitions:
                family.add_metric([str(partition.partition)], read(partition))
            yield family
        streams = GaugeMetricFamily("kvevents_bridge_streams", "Followed streams by trust state.", labels=["state"])
        for trust in _TRUSTS:
            streams.add_metric([trust], seen.streams.get(trust, 0))
        yield streams
