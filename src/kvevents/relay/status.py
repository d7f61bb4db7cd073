"""The status of a relay, for operators, and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvevents.publisher.stats import HistoryStats, ReplayStats
from kvevents.relay import prometheus
from kvevents.relay.journal import JournalStats
from kvevents.stream import Trust
from kvevents.subscriber import StreamStatus

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatus:
    """Endpoints, counters and trust of a relay, as of its last turn."""

    endpoint: str
    replay_endpoint: str | None
    trust: Trust
    """The lowest of its upstreams'."""
    incarnation: int
    last_seq: int
    """The relay's number of the newest batch; -1 before the first."""
    forwarded_batches: int
    """Batches of upstreams that this process sent."""
    skipped_seqs: int
    """Numbers skipped by this process because events are missing."""
    heartbeats: int
    """Heartbeats that this process sent."""
    was_resumed: bool
    """Whether this process continues the incarnation of an earlier one."""
    start_reason: str
    """Why it continues, or why it began a new incarnation."""
    recovery_seconds: float
    """Time that reading the journal took."""
    blocks: int
    """Blocks that consumers hold."""
    digest: str
    """Digest of what consumers hold."""
    divergences: int
    """Heartbeats of upstreams whose digest differed from the relay's; 0 unless the sender or the relay has a defect."""
    subscribers: int
    buffered_batches: int
    """Batches in the replay buffer."""
    buffered_bytes: int
    """Bytes in the replay buffer."""
    history: HistoryStats | None
    """What batches older than the replay buffer are compacted into."""
    replay: ReplayStats
    journal: JournalStats | None
    """None if the relay has no journal."""
    upstreams: tuple[StreamStatus, ...]


# --- metrics

_TRUSTS: Final = ("CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE")
_JOURNALS: Final = ("none", "new", "disk", "memory", "closed")

_GAUGES: Final[dict[str, tuple[str, Callable[[RelayStatus], float | None]]]] = {
    "last_seq": (
        "Sequence number of the newest batch sent; absent before the first.",
        lambda status: status.last_seq if status.last_seq >= 0 else None,
    ),
    "incarnation": (
        "Incarnation of the relay; it changes when sequence numbers start over.",
        lambda status: status.incarnation,
    ),
    "blocks": ("Blocks that consumers hold after the newest batch.", lambda status: status.blocks),
    "subscribers": ("Subscribed consumers.", lambda status: status.subscribers),
    "buffered_batches": ("Batches in the replay buffer.", lambda status: status.buffered_batches),
    "buffered_bytes": ("Bytes in the replay buffer.", lambda status: status.buffered_bytes),
    "replay_unsent_bytes": ("Bytes of replay replies that consumers have not read yet.", lambda s: s.replay.unsent_bytes),
    "history_bytes": (
        "Memory of the history that is older than the replay buffer.",
        lambda status: status.history.bytes if status.history else 0,
    ),
    "history_lost": (
        "1 while the relay cannot send a snapshot of its history.",
        lambda status: float(status.history is None or status.history.unavailable_reason is not None),
    ),
    "journal_bytes": (
        "Bytes of the journal's snapshot and logs.",
        lambda status: status.journal.bytes if status.journal else 0,
    ),
    "journal_recovery_seconds": ("Time that reading the journal took at the start.", lambda status: status.recovery_seconds),
}
_COUNTERS: Final[dict[str, tuple[str, Callable[[RelayStatus], float]]]] = {
    "forwarded_batches": ("Batches of upstreams that the relay sent on.", lambda status: status.forwarded_batches),
    "skipped_seqs": ("Sequence numbers left out because upstream batches were lost.", lambda status: status.skipped_seqs),
    "heartbeats": ("Heartbeats sent.", lambda status: status.heartbeats),
    "divergences": (
        "Upstream heartbeats whose digest differed from the relay's blocks; stays at 0.",
        lambda status: status.divergences,
    ),
    "replayed_batches": ("Batches sent by replay.", lambda status: status.replay.batches),
    "journal_dropped_batches": (
        "Batches that were not written to the journal.",
        lambda status: status.journal.dropped if status.journal else 0,
    ),
    "journal_write_failures": (
        "Failed writes to the journal.",
        lambda status: status.journal.failures if status.journal else 0,
    ),
}


class RelayCollector:
    """Reads a relay's status at each scrape."""

    def __init__(self, status: Callable[[], RelayStatus]) -> None:
        self._status: Final = status

    def collect(self) -> Iterable[Metric]:
        """Yield every metric family."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - an extra

        status = self._status()
        for name, (text, gauge) in _GAUGES.items():
            yield GaugeMetricFamily(f"kvevents_relay_{name}", text, value=gauge(status))
        for name, (text, counter) in _COUNTERS.items():
            yield CounterMetricFamily(f"kvevents_relay_{name}", text, value=counter(status))
        states = GaugeMetricFamily(
            "kvevents_relay_upstream_state", "1 for the lowest trust state of the relay's upstreams.", labels=["state"]
        )
        for name in _TRUSTS:
            states.add_metric([name], float(status.trust.name == name))
        yield states
        journal = GaugeMetricFamily(
            "kvevents_relay_journal_state",
            "1 for the state of the journal: none, new, disk, memory or closed.",
            labels=["state"],
        )
        for name in _JOURNALS:
            journal.add_metric([name], float(name == (status.journal.state if status.journal else "none")))
        yield journal


def serve_metrics(status: Callable[[], RelayStatus], port: int, host: str = "127.0.0.1") -> Callable[[], None]:
    """Serve metrics at a port until the returned function is called. Raises `EndpointError` if the port cannot be bound."""
    return prometheus.serve(RelayCollector(status), port, host)
