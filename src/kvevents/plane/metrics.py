"""What Prometheus scrapes of a bridge; docs/plane.md says what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from kvevents.plane.bridge import BridgeStatus, LaneStatus


_TRUSTS: Final = ("CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE")


class Scraped(NamedTuple):
    """A bridge as a process, at one moment."""

    bridge: BridgeStatus
    streams: Mapping[str, int]
    """Followed ranks of engines, by the name of their trust."""
    max_queued_bytes: int
    faults: int
    """Sentences about what cannot be found out, or followed."""


_GAUGES: Final[dict[str, tuple[str, Callable[[Scraped], float]]]] = {
    "connected": ("1 while it is connected to a server of its plane.", lambda seen: seen.bridge.connected),
    "name_shared": ("1 while another process writes under its name.", lambda seen: bool(seen.bridge.namesake)),
    "network_suspected": (
        "1 while so many engines are gone at once that it is not they that are suspected.",
        lambda seen: bool(seen.bridge.suspects),
    ),
    "unnamed_engines": ("Engines of the log that no bridge names.", lambda seen: seen.bridge.unnamed),
    "queue_limit_bytes": ("Of what waits at most; above it nothing more is heard.", lambda seen: seen.max_queued_bytes),
    "discovery_faults": ("What cannot be found out about engines, or not be followed.", lambda seen: seen.faults),
}
_COUNTERS: Final[dict[str, tuple[str, Callable[[Scraped], float]]]] = {
    "written_batches": ("Batches that it has put into the log.", lambda seen: seen.bridge.written),
    "conflicts": ("Pages that others were quicker than.", lambda seen: seen.bridge.conflicts),
    "followed_anew": ("Times that a stream and the log had lost each other.", lambda seen: seen.bridge.adrift),
    "breaches": ("Records of the log that no bridge writes; stays at 0.", lambda seen: seen.bridge.breaches),
}
_LANES: Final[dict[str, tuple[str, Callable[[LaneStatus], float]]]] = {
    "lane_position": ("Number of the newest page of a lane that was read.", lambda lane: lane.position),
    "lane_waiting": ("Records that are not known to be in the lane.", lambda lane: lane.waiting),
    "lane_queued_bytes": ("Bytes of those.", lambda lane: lane.queued_bytes),
    "lane_held_up": ("1 while nothing can be read or written.", lambda lane: bool(lane.fault)),
}


class BridgeCollector:
    """Asks a bridge whenever it is scraped."""

    def __init__(self, look: Callable[[], Scraped]) -> None:
        self._look: Final = look

    def collect(self) -> Iterable[Metric]:
        """Every family."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - an extra

        seen = self._look()
        for name, (told, value) in _GAUGES.items():
            yield GaugeMetricFamily(f"kvevents_bridge_{name}", told, value=value(seen))
        for name, (told, value) in _COUNTERS.items():
            yield CounterMetricFamily(f"kvevents_bridge_{name}", told, value=value(seen))
        for name, (told, of_lane) in _LANES.items():
            lanes = GaugeMetricFamily(f"kvevents_bridge_{name}", told, labels=["lane"])
            for lane in seen.bridge.lanes:
                lanes.add_metric([str(lane.lane)], of_lane(lane))
            yield lanes
        streams = GaugeMetricFamily("kvevents_bridge_streams", "Followed ranks of engines, by trust.", labels=["state"])
        for trust in _TRUSTS:
            streams.add_metric([trust], seen.streams.get(trust, 0))
        yield streams
