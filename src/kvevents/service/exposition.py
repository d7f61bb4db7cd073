"""Writes the service's metrics in Prometheus' text format.

Every label has a bounded set of values. Peers cannot add label values:

- `engine`, `rank`, `model`, `tenant`, `group`: from the first `limits.max_metric_sources` registrations. The label `engine` has
  the field `instance`: Prometheus uses the label `instance` for the address that it scrapes
- `state` of a source: the trust states
- `reason` of a source: the codes of `Reason`
- `reason` of rejected events and stores: fixed words of `Rejected` and of the index
- `outcome` of gaps: lost and recovered; of replays: complete, truncated, unanswered and contradicted
- `dialect`: the rows of `kvevents.wire.dialects`, and unknown
- `tier`: gpu, cpu and disk; all other media count as other
- `path`, `status`: from the table of endpoints; requests for other paths are not counted
- `provider`: discovery providers of the configuration
- `state` and `reason` of connections and rejected requests: fixed words of the data plane
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final, NamedTuple, TypeVar, get_args

from prometheus_client import generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from kvevents.client.schemas import StatsAnswer
from kvevents.events import TIERS
from kvevents.index import IndexStats
from kvevents.prometheus import MetricTable, families, family, label_samples, make_registry, samples_by_label, state_set
from kvevents.service.data_plane import DURATION_BOUNDS, MATCH_RATIO_BOUNDS, DataPlaneCounts, HistogramCounts
from kvevents.service.fleet.member import Member
from kvevents.service.service import Service
from kvevents.stream import StreamCounters, TrustState

T = TypeVar("T")
Labels = dict[str, str]

STATES: Final[tuple[TrustState, ...]] = get_args(TrustState)
_CLOSE_REASONS: Final = dict.fromkeys(
    ("full", "evicted", "silent", "idle", "unread", "unread-bytes", "not-closed", "left", "handshake", "draining"), 0
)
"""Maps each reason for which the data plane closes a connection to the initial count, 0."""
_REJECT_REASONS: Final = dict.fromkeys(
    ("too-slow", "headers-too-large", "malformed-request", "too-much-at-once", "too-many-clients", "not-a-proxy"), 0
)
"""Maps each reason for which the data plane rejects a request before it knows the path to the initial count, 0."""


def format_metrics(service: Service) -> bytes:
    """Return the metrics of a service in Prometheus' text format."""
    return generate_latest(make_registry(lambda: _collect(service)))


def _collect(service: Service) -> Iterator[Metric]:
    limit, members = service.settings.limits.max_metric_sources, list(service.fleet.members.values())
    sources = [(_labels_of(member), member) for member in members[:limit]]
    # The stream of a source can carry the blocks of further ranks, each of which is a worker.
    ranks = [rank for member in members for rank in (member, *member.carried_members)]
    workers = [(_labels_of(rank), rank) for rank in ranks[:limit]]
    yield from _source_families(_SOURCES, sources)
    yield from _source_families(_WORKER_METRICS, workers)
    yield from _source_families(_STREAMS, [(labels, member.status.counters) for labels, member in sources if member.status])
    scrape = _Scrape(service, service.stats(), service.index.stats(), service.data_plane.counts())
    yield from families("kvevents_", _SERVICE_METRICS, scrape)
    answers = scrape.counts.answers
    ratio_text = "Fraction of a prompt's tokens that the best worker holds."
    ratios = {} if answers.depth is None else {"": answers.depth}
    yield _histogram_family("kvevents_lookup_match_ratio", ratio_text, MATCH_RATIO_BOUNDS, ratios)
    time_text = "Time from the request's headers to the response."
    seconds = {path: answers_of_path.seconds for path, answers_of_path in answers.requests.items()}
    yield _histogram_family("kvevents_http_request_duration_seconds", time_text, DURATION_BOUNDS, seconds, "path")
    yield from service.index_source.collect()


def _labels_of(member: Member) -> Labels:
    registration = member.registration
    scope = {"model": registration.model, "tenant": registration.tenant, "group": registration.group}
    return {"engine": registration.instance, "rank": str(registration.rank), **scope}


def _source_families(table: MetricTable[T], sources: list[tuple[Labels, T]]) -> Iterator[Metric]:
    for name, (text, read_value) in table.items():
        samples = [(labels | extra, value) for labels, source in sources for extra, value in label_samples(read_value(source))]
        yield family(f"kvevents_source_{name}", text, samples)


def _histogram_family(
    name: str, text: str, bounds: tuple[float, ...], histograms: Mapping[str, HistogramCounts], *labels: str
) -> Metric:
    """Return a metric family of histograms: one for each value of the label in `labels`, or one without a label."""
    metric = HistogramMetricFamily(name, text, labels=labels)
    for value, histogram in histograms.items():
        buckets = list(zip([*map(str, bounds), "+Inf"], accumulate(histogram.counts), strict=True))
        metric.add_metric([value][: len(labels)], buckets, histogram.sum)
    return metric


# --- sources -----------------------------------------------------------------------------------------------------------------

_SOURCES: Final[MetricTable[Member]] = {
    "state": ("1 for the current trust state, 0 for the others.", lambda m: state_set("state", STATES, m.trust_status.state)),
    "reason": (
        "1 for each reason why the source is not EXACT.",
        lambda m: [({"state": m.trust_status.state, "reason": reason}, 1) for reason in m.trust_status.reason_codes],
    ),
    "inexact_tier": (
        "1 for each tier whose removals the source does not announce.",
        lambda m: samples_by_label("tier", dict.fromkeys(m.registration.stores_only, 1)),
    ),
}
_WORKER_METRICS: Final[MetricTable[Member]] = {
    "blocks": ("Distinct blocks that the index holds for the source.", lambda m: m.blocks),
    "orphan_blocks": ("Blocks that wait for their parent.", lambda m: m.info.orphans if m.info else 0),
    "uncertain_blocks": (
        "Blocks that might be gone: they were announced several times and removed less often.",
        lambda m: m.info.uncertain if m.info else 0,
    ),
    "waiting_batches": ("Received batches that wait for an earlier batch.", lambda m: m.status.waiting if m.status else 0),
    "lag_seconds": ("Delay of the newest live batch: receive time minus the publisher's timestamp.", lambda m: m.lag),
    "last_batch_timestamp_seconds": ("Unix time at which the newest batch arrived.", lambda m: m.last_event),
    "last_seq": (
        "Sequence number of the newest batch of the current incarnation; absent before the first.",
        lambda m: m.status.last_seq if m.status and m.status.last_seq >= 0 else None,
    ),
    "engine_requests": (
        "Requests that the engine reports, running and waiting; absent without a recent report.",
        lambda m: load.requests if (load := m.engine_load) else None,
    ),
    "engine_load_known": (
        "1 if the engine has reported its load recently, else 0; absent if it is not read.",
        lambda m: None if (reading := m.load()) is None else reading.load is not None,
    ),
    "engine_waiting_tokens": (
        "Prompt tokens that waiting requests of the engine must compute; absent without a recent report.",
        lambda m: load.waiting_uncached_tokens if (load := m.engine_load) else None,
    ),
    "evicted_blocks_total": ("Blocks of the source refused at the memory limit.", lambda m: m.info.evicted if m.info else None),
}
_STREAMS: Final[MetricTable[StreamCounters]] = {
    "batches_total": ("Batches delivered to the index.", lambda c: c.delivered),
    "replayed_batches_total": ("Delivered batches that arrived by replay.", lambda c: c.replayed),
    "lost_batches_total": ("Batches that were never received and can no longer be replayed.", lambda c: c.lost),
    "compacted_batches_total": ("Batches that a snapshot of the publisher replaced.", lambda c: c.compacted),
    "resets_total": ("Resets: incarnations after the first, including those that might be the same.", lambda c: c.resets),
    "reconnects_total": ("Connections after the first.", lambda c: c.reconnects),
    "duplicate_messages_total": ("Messages that contained nothing new.", lambda c: c.duplicates),
    "overflowed_batches_total": ("Live batches that a full waiting buffer dropped; they are replayed.", lambda c: c.overflowed),
    "malformed_messages_total": ("Messages that are not a batch.", lambda c: sum(c.malformed.values())),
    "rejected_events_total": ("Events that could not be decoded.", lambda c: sum(c.rejected.values())),
    "replay_requests_total": ("Replay requests sent.", lambda c: c.requests),
    "heartbeats_total": ("Heartbeats received with the publisher's digest.", lambda c: c.heartbeats),
    "digest_matches_total": ("Heartbeats whose digest matched the index.", lambda c: c.digests_matched),
    "divergences_total": ("Heartbeats whose digest differed without known cause; stays at 0.", lambda c: c.digests_mismatched),
    "attestation_matches_total": ("Attestations of the engine that matched the index.", lambda c: c.attestations_matched),
    "attestation_mismatches_total": (
        "Attestations of the engine that differed from the index; stays at 0.",
        lambda c: c.attestations_mismatched,
    ),
    "gaps_total": (
        "Runs of missing batches by outcome; a run that was recovered in part counts for both outcomes.",
        lambda c: samples_by_label("outcome", {"lost": c.gaps, "recovered": c.gaps_repaired}),
    ),
    "replays_total": (
        "Replay requests by outcome: complete, truncated, unanswered, or contradicted by the live stream.",
        lambda c: samples_by_label(
            "outcome",
            {"complete": c.complete, "truncated": c.truncated, "unanswered": c.unanswered, "contradicted": c.conflicts},
        ),
    ),
}


# --- the service -------------------------------------------------------------------------------------------------------------


class _Scrape(NamedTuple):
    """The objects from which the values of the service's metrics are read."""

    service: Service
    stats: StatsAnswer
    index_stats: IndexStats
    counts: DataPlaneCounts


_SERVICE_METRICS: Final[MetricTable[_Scrape]] = {
    "sources": (
        "Sources by trust state.",
        lambda s: samples_by_label("state", {name: s.stats.sources.get(name, 0) for name in STATES}),
    ),
    "sources_without_series": (
        "Ranks without series of their own, since more than limits.max_metric_sources are registered.",
        lambda s: max(0, len(s.service.fleet.workers) - s.service.settings.limits.max_metric_sources),
    ),
    "build_info": (
        "Build information; the value is always 1.",
        lambda s: [({"version": s.stats.version, "python": platform.python_version()}, 1)],
    ),
    "ready": ("1 while /readyz returns 200.", lambda s: s.service.readiness().ready),
    "ingest_failed": ("1 after the ingest thread failed; restart the service.", lambda s: s.service.fleet.failure is not None),
    "event_stream_clients": ("Clients connected to /v1/events.", lambda s: len(s.service.fleet.event_bus)),
    "index_bytes": ("Memory that the index uses.", lambda s: s.stats.index_bytes),
    "index_limit_bytes": ("Memory limit of the index; absent without a limit.", lambda s: s.stats.memory_limit),
    "index_blocks": ("Distinct blocks; a block that several workers hold counts once.", lambda s: s.stats.unique_blocks),
    "snapshot_timestamp_seconds": ("Unix time of the state in the last snapshot.", lambda s: s.stats.snapshot_at),
    "snapshot_interval_seconds": ("Time between snapshots; absent without a state_dir.", lambda s: s.stats.snapshot_seconds),
    "snapshot_failed": (
        "1 while the last write to state_dir failed; absent without a state_dir.",
        lambda s: None if s.service.state_store is None else s.stats.snapshot_fault is not None,
    ),
    "index_tier_blocks": (
        "Blocks by tier, counted for each worker.",
        lambda s: samples_by_label("tier", _sum_tiers(s.stats.tiers)),
    ),
    "discovery_faults": (
        "Current discovery faults by provider.",
        lambda s: samples_by_label("provider", {name: len(faults) for name, faults in s.service.faults().items()}),
    ),
    "index_batches_total": ("Batches applied to the index.", lambda s: s.stats.batches),
    "index_evicted_blocks_total": ("Blocks that the index refused at its memory limit.", lambda s: s.stats.evicted),
    "index_displaced_decisions_total": (
        "Expected prompts that ended before their time, since too many were expected at once.",
        lambda s: s.index_stats.displaced,
    ),
    "index_rejected_stores_total": (
        "Decoded stores that the index could not use, by reason.",
        lambda s: samples_by_label("reason", _sum_store_reasons(s.index_stats.rejected)),
    ),
    "rejected_events_total": (
        "Events that could not be decoded, by dialect and reason.",
        lambda s: [({"dialect": key[0], "reason": key[1]}, count) for key, count in list(s.service.fleet.counts.items())],
    ),
    "lookups_total": ("Prefix lookups.", lambda s: s.counts.answers.lookups),
    "lookup_hits_total": ("Prefix lookups that matched at least one block.", lambda s: s.counts.answers.hits),
    "ended_leases_total": ("Ranks unregistered at the end of their leases.", lambda s: s.service.registrations.ended_leases),
    "http_ignored_fields_total": (
        "Unknown fields in request bodies that the service ignored.",
        lambda s: samples_by_label("path", dict(s.service.ignored_fields)),
    ),
    "reservations_open": ("Reservations that were neither finished nor expired.", lambda s: s.counts.reservations.get("open")),
    "reservations_total": (
        "Reservations by outcome: made; then finished, expired or replaced; or refused, since too many were open.",
        lambda s: samples_by_label("outcome", {name: count for name, count in s.counts.reservations.items() if name != "open"}),
    ),
    "http_requests_total": (
        "HTTP and gRPC requests by path and status.",
        lambda s: [
            ({"path": path, "status": str(status)}, count)
            for path, answered in s.counts.answers.requests.items()
            for status, count in answered.by_status.items()
        ],
    ),
    "http_connections": (
        "Open connections by state: new, reading, answering, idle or closing.",
        lambda s: samples_by_label("state", s.counts.connections),
    ),
    "http_connections_limit": (
        "Connections above which the service answers probes and /metrics only (limits.max_clients).",
        lambda s: s.service.settings.limits.max_clients,
    ),
    "http_connections_opened_total": ("Connections that clients opened.", lambda s: s.counts.opened),
    "http_connections_closed_total": (
        "Connections that the service closed, by reason; full and evicted mean too many.",
        lambda s: samples_by_label("reason", _CLOSE_REASONS | s.counts.closed),
    ),
    "http_rejected_requests_total": (
        "Requests rejected before their path was known, by reason.",
        lambda s: samples_by_label("reason", _REJECT_REASONS | s.counts.refusals),
    ),
    "http_request_buffer_bytes": ("Memory of received request bodies beyond 64 KiB each.", lambda s: s.counts.received),
    "http_response_buffer_bytes": ("Memory of responses that clients have not read yet.", lambda s: s.counts.unread),
}


def _sum_tiers(tiers: Mapping[str, int]) -> dict[str, int]:
    counts = {tier: tiers.get(tier, 0) for tier in TIERS}
    return counts | {"other": sum(tiers.values()) - sum(counts.values())}


def _sum_store_reasons(rejections: Mapping[tuple[str, str], int]) -> Counter[str]:
    """Return sums by reason over all kinds of groups: engines choose the names of the kinds, so names must not be labels."""
    sums = Counter[str]()
    for (_, reason), count in rejections.items():
        sums[reason] += count
    return sums
