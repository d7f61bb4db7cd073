"""What Prometheus scrapes of a relay; docs/relay.md says what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from kvevents import scraping
from kvevents.relay.status import RelayStatus

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_TRUSTS: Final = ("CONNECTING", "REPLAYING", "EXACT", "DEGRADED", "STALE")
_JOURNALS: Final = ("none", "new", "disk", "memory", "closed")

_GAUGES: Final[dict[str, tuple[str, Callable[[RelayStatus], float]]]] = {
    "number": ("Number of the newest batch sent.", lambda status: status.last_number),
    "blocks": ("Blocks that consumers have resident.", lambda status: status.blocks),
    "subscribers": ("Consumers that are subscribed.", lambda status: status.subscribers),
    "buffered_batches": ("Batches kept as they were sent.", lambda status: status.buffered_batches),
    "buffered_bytes": ("Bytes of those.", lambda status: status.buffered_bytes),
    "unsent_bytes": ("Bytes of large replies that ZeroMQ holds for their readers.", lambda s: s.replay.unsent_bytes),
    "history_bytes": ("Memory of what older ones are collapsed into.", lambda s: s.history.bytes if s.history else 0),
    "history_lost": (
        "1 while no snapshot of history can be given.",
        lambda s: float(s.history is None or s.history.lost is not None),
    ),
    "incarnation": ("The relay's life; it changes when numbers begin anew.", lambda status: status.incarnation),
    "recovery_seconds": ("How long reading the journal took.", lambda status: status.recovery_seconds),
    "journal_bytes": ("Of the journal's snapshot and logs.", lambda status: status.journal.bytes if status.journal else 0),
}
_COUNTERS: Final[dict[str, tuple[str, Callable[[RelayStatus], float]]]] = {
    "carried": ("Batches of upstreams that were sent on.", lambda status: status.carried),
    "holes": ("Numbers left out because something is missing.", lambda status: status.holes),
    "heartbeats": ("Heartbeats sent.", lambda status: status.heartbeats),
    "diverged": ("Heartbeats of upstreams that told of other blocks than the relay has; stays at 0.", lambda s: s.diverged),
    "replayed": ("Batches sent by replay.", lambda status: status.replay.batches),
    "journal_dropped": (
        "Batches that the journal could not write.",
        lambda status: status.journal.dropped if status.journal else 0,
    ),
    "journal_failures": ("Times that the disk refused.", lambda status: status.journal.failures if status.journal else 0),
}


class RelayCollector:
    """Asks a relay whenever it is scraped."""

    def __init__(self, status: Callable[[], RelayStatus]) -> None:
        self._status: Final = status

    def collect(self) -> Iterable[Metric]:
        """Every family."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 - an extra

        status = self._status()
        for name, (told, value) in _GAUGES.items():
            yield GaugeMetricFamily(f"kvevents_relay_{name}", told, value=value(status))
        for name, (told, value) in _COUNTERS.items():
            yield CounterMetricFamily(f"kvevents_relay_{name}", told, value=value(status))
        states = GaugeMetricFamily(
            "kvevents_relay_state", "1 for the state of the relay's upstreams, the least of all.", labels=["state"]
        )
        for name in _TRUSTS:
            states.add_metric([name], float(status.trust.name == name))
        yield states
        journal = GaugeMetricFamily("kvevents_relay_journal_state", "1 for where the journal is.", labels=["state"])
        for name in _JOURNALS:
            journal.add_metric([name], float(name == (status.journal.state if status.journal else "none")))
        yield journal


def serve(status: Callable[[], RelayStatus], port: int, host: str = "127.0.0.1") -> Callable[[], None]:
    """Answer scrapes at a port until the function that is returned is called. Raises `EndpointError`."""
    return scraping.serve(RelayCollector(status), port, host)
