"""Writes the service's metrics in Prometheus' text format.

Every label has a bounded set of values, and none of them comes from a peer:

- `engine`, `rank`, `model`, `tenant`, `group`: from registrations, of which there are at most `limits.max_sources`. A
  registration calls the engine an instance; Prometheus reserves that label for the address that it scrapes
- `state` of a source: the trust states
- `reason` of a source: `Reason`; of rejected events and stores: the fixed words of `Rejected` and of the index
- `outcome`: lost, recovered; complete, truncated, unanswered, contradicted
- `dialect`: the rows of `kvevents.wire.dialects`, and unknown
- `tier`: gpu, cpu and disk; all other media count as other
- `path`, `status`: from the table of endpoints; requests for other paths are not counted
- `provider`: discovery providers of the configuration
- `partition`: the partitions of a plane, at most 256
- `state` and `reason` of connections and rejected requests: fixed words of the data plane
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, get_args

from prometheus_client import generate_latest

from kvevents.client.schemas import StatsAnswer
from kvevents.events import TIERS
from kvevents.plane.log_subscriber import PartitionProgress
from kvevents.plane.partition_state import PartitionState
from kvevents.service.data_plane import Counts
from kvevents.service.fleet.member import Member
from kvevents.service.metrics import Histogram, MetricsPage, Samples, labels
from kvevents.service.replica.replica import Replica
from kvevents.service.service import Service
from kvevents.stream import StreamCounters, TrustState

STATES: Final[tuple[TrustState, ...]] = get_args(TrustState)
CLOSE_REASONS: Final = (
    "full",
    "evicted",
    "silent",
    "idle",
    "unread",
    "unread-bytes",
    "not-closed",
    "left",
    "handshake",
    "draining",
)
"""Reasons why the data plane closes connections."""
REJECT_REASONS: Final = (
    "too-slow",
    "headers-too-large",
    "malformed-request",
    "too-much-at-once",
    "too-many-clients",
    "not-a-proxy",
)
"""Reasons why the data plane rejects requests before it knows their path."""


def exposition(service: Service) -> bytes:
    """Return the metrics of a service in Prometheus' text format."""
    page = MetricsPage()
    _write_sources(page, service)
    _write_index(page, service)
    if service.replica is not None:
        _write_replica(page, service.replica, time.time())
    _write_requests(page, service)
    return page.text() + generate_latest(service.metrics.process)


def _write_requests(page: MetricsPage, service: Service) -> None:
    counts = service.data_plane.counts()
    native, own = counts.answers, service.metrics
    page.counter("kvevents_lookups_total", "Prefix lookups.", {"": own.lookups + native.lookups})
    hits = {"": own.hits + native.hits}
    page.counter("kvevents_lookup_hits_total", "Prefix lookups that matched at least one block.", hits)
    depth = {"": own.match_ratio.merged_with(native.depth)}
    page.histogram("kvevents_lookup_match_ratio", "Fraction of a prompt's tokens that the best worker holds.", depth)
    ignored = {labels(path=path): count for path, count in dict(own.ignored_fields).items()}
    page.counter("kvevents_http_ignored_fields_total", "Unknown fields in request bodies that the service ignored.", ignored)
    requests = Counter(dict(own.requests))
    seconds = dict(own.durations)
    for path, answered in native.requests.items():
        requests.update({(path, status): count for status, count in answered.by_status.items()})
        seconds[path] = seconds.get(path, Histogram(own.DURATION_BOUNDS)).merged_with(answered.seconds)
    answers = {labels(path=path, status=status): count for (path, status), count in requests.items()}
    page.counter("kvevents_http_requests_total", "HTTP and gRPC requests by path and status.", answers)
    histograms = {labels(path=path): tally for path, tally in seconds.items()}
    page.histogram(
        "kvevents_http_request_duration_seconds", "Time from the request's headers to the end of the response.", histograms
    )
    _write_connections(page, counts, service.settings.limits.max_clients)


def _write_connections(page: MetricsPage, counts: Counts, max_clients: int) -> None:
    open_ = {labels(state=state): count for state, count in counts.connections.items()}
    page.gauge("kvevents_http_connections", "Open connections by state: new, reading, answering, idle or closing.", open_)
    page.gauge(
        "kvevents_http_connections_limit",
        "Connections above which the service answers probes only (limits.max_clients).",
        {"": max_clients},
    )
    page.counter("kvevents_http_connections_opened_total", "Connections that clients opened.", {"": counts.opened})
    closed = _by_reason(dict.fromkeys(CLOSE_REASONS, 0) | counts.closed)
    refused = _by_reason(dict.fromkeys(REJECT_REASONS, 0) | counts.refusals)
    page.counter(
        "kvevents_http_connections_closed_total",
        "Connections that the service closed, by reason; full and evicted mean too many.",
        closed,
    )
    page.counter("kvevents_http_rejected_requests_total", "Requests rejected before their path was known, by reason.", refused)
    page.gauge(
        "kvevents_http_request_buffer_bytes", "Memory of received request bodies beyond 64 KiB each.", {"": counts.received}
    )
    page.gauge(
        "kvevents_http_response_buffer_bytes", "Memory of responses that clients have not read yet.", {"": counts.unread}
    )


def _by_reason(counts: Mapping[str, int]) -> Samples:
    return {labels(reason=reason): count for reason, count in counts.items()}


# --- sources -----------------------------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    """A gauge of each source."""

    name: str
    text: str
    read: Callable[[Member], float | None]


class _Count(NamedTuple):
    """A counter of each source whose stream status is known."""

    name: str
    text: str
    read: Callable[[StreamCounters], int]


_GAUGES: Final = (
    _Column("blocks", "Distinct blocks that the index holds for the source.", lambda member: member.blocks),
    _Column(
        "orphan_blocks",
        "Blocks that wait for their parent.",
        lambda member: member.info.orphans if member.info else 0,
    ),
    _Column(
        "uncertain_blocks",
        "Blocks that might be gone: they were announced several times and removed less often.",
        lambda member: member.info.uncertain if member.info else 0,
    ),
    _Column(
        "waiting_batches",
        "Received batches that wait for an earlier batch.",
        lambda member: member.status.waiting if member.status else 0,
    ),
    _Column(
        "lag_seconds",
        "Delay of the newest live batch: receive time minus the publisher's timestamp.",
        lambda member: member.lag,
    ),
    _Column(
        "last_batch_timestamp_seconds",
        "Unix time at which the newest batch arrived; absent before the first.",
        lambda member: member.last_event,
    ),
    _Column(
        "last_seq",
        "Sequence number of the newest batch of the current incarnation; absent before the first.",
        lambda member: member.status.last_seq if member.status and member.status.last_seq >= 0 else None,
    ),
    _Column(
        "engine_requests",
        "Requests that the engine reports, running and waiting; absent without a recent report.",
        lambda member: load.requests if (load := member.engine_load) else None,
    ),
    _Column(
        "engine_load_known",
        "1 if the engine has reported its load recently, else 0; absent if it is not read.",
        lambda member: None if (reading := member.load()) is None else float(reading.load is not None),
    ),
    _Column(
        "engine_waiting_tokens",
        "Prompt tokens that waiting requests of the engine must compute; absent without a recent report.",
        lambda member: load.waiting_uncached_tokens if (load := member.engine_load) else None,
    ),
)
_COUNTS: Final = (
    _Count("batches", "Batches delivered to the index.", lambda counters: counters.delivered),
    _Count("replayed_batches", "Delivered batches that arrived by replay.", lambda counters: counters.replayed),
    _Count("lost_batches", "Batches that were never received and can no longer be replayed.", lambda counters: counters.lost),
    _Count("compacted_batches", "Batches that a snapshot of the publisher replaced.", lambda counters: counters.compacted),
    _Count(
        "resets",
        "Resets of the stream: incarnations after the first, including those that might be the same.",
        lambda counters: counters.resets,
    ),
    _Count("reconnects", "Connections after the first.", lambda counters: counters.reconnects),
    _Count("duplicate_messages", "Messages that contained nothing new.", lambda counters: counters.duplicates),
    _Count(
        "overflowed_batches",
        "Live batches dropped because the waiting buffer was full; they are replayed later.",
        lambda counters: counters.overflowed,
    ),
    _Count("malformed_messages", "Messages that are not a batch.", lambda counters: sum(counters.malformed.values())),
    _Count("rejected_events", "Events that could not be decoded.", lambda counters: sum(counters.rejected.values())),
    _Count("replay_requests", "Replay requests sent.", lambda counters: counters.requests),
    _Count("heartbeats", "Heartbeats received with the publisher's digest.", lambda counters: counters.heartbeats),
    _Count("digest_matches", "Heartbeats whose digest matched the index.", lambda counters: counters.digests_matched),
    _Count(
        "divergences",
        "Heartbeats whose digest differed from the index without a known cause; stays at 0.",
        lambda counters: counters.digests_mismatched,
    ),
    _Count(
        "attestation_matches",
        "Heartbeats whose attestation of the engine's own cache matched the index.",
        lambda counters: counters.attestations_matched,
    ),
    _Count(
        "attestation_mismatches",
        "Heartbeats whose attestation of the engine's own cache differed from the index; stays at 0.",
        lambda counters: counters.attestations_mismatched,
    ),
)
_OUTCOMES: Final[tuple[tuple[str, str, dict[str, Callable[[StreamCounters], int]]], ...]] = (
    (
        "gaps",
        "Runs of missing batches by outcome; a run that was recovered in part counts for both outcomes.",
        {"lost": lambda counters: counters.gaps, "recovered": lambda counters: counters.gaps_repaired},
    ),
    (
        "replays",
        "Replay requests by outcome: complete, truncated, unanswered, or contradicted by the live stream.",
        {
            "complete": lambda counters: counters.complete,
            "truncated": lambda counters: counters.truncated,
            "unanswered": lambda counters: counters.unanswered,
            "contradicted": lambda counters: counters.conflicts,
        },
    ),
)


def _write_sources(page: MetricsPage, service: Service) -> None:
    sources = {_worker_labels(member): member for member in list(service.fleet.members.values())}
    statuses = {label_text: member.status.counters for label_text, member in sources.items() if member.status is not None}
    states = Counter(member.trust_status.state for member in sources.values())
    page.gauge("kvevents_sources", "Sources by trust state.", {labels(state=state): states[state] for state in STATES})
    page.gauge("kvevents_source_state", "1 for the current trust state of the source, 0 for the others.", _states(sources))
    page.gauge("kvevents_source_reason", "1 for each reason why the source is not EXACT.", _reasons(sources))
    # A stream is one source, whose blocks can be those of several ranks.
    workers = {_worker_labels(member): member for member in list(service.fleet.workers.values())}
    for name, text, read in _GAUGES:
        page.gauge(f"kvevents_source_{name}", text, {label_text: read(member) for label_text, member in workers.items()})
    evicted = {label_text: member.info.evicted for label_text, member in workers.items() if member.info is not None}
    page.counter(
        "kvevents_source_evicted_blocks_total", "Blocks of the source that the index refused at its memory limit.", evicted
    )
    inexact = {_worker_labels(member, tier=tier): 1 for member in sources.values() for tier in member.registration.stores_only}
    page.gauge("kvevents_source_inexact_tier", "1 for each tier whose removals the source does not announce.", inexact)
    for name, text, count in _COUNTS:
        page.counter(
            f"kvevents_source_{name}_total", text, {label_text: count(counters) for label_text, counters in statuses.items()}
        )
    for name, text, outcomes in _OUTCOMES:
        samples = {
            f'{label_text},outcome="{outcome}"': read_one(counters)
            for label_text, counters in statuses.items()
            for outcome, read_one in outcomes.items()
        }
        page.counter(f"kvevents_source_{name}_total", text, samples)


def _worker_labels(member: Member, **more: str) -> str:
    registered = member.registration
    return labels(
        engine=registered.instance,
        rank=registered.rank,
        model=registered.model,
        tenant=registered.tenant,
        group=registered.group,
        **more,
    )


def _states(sources: dict[str, Member]) -> Samples:
    return {
        f'{label_text},state="{state}"': int(state == now)
        for label_text, member in sources.items()
        for now in (member.trust_status.state,)
        for state in STATES
    }


def _reasons(sources: dict[str, Member]) -> Samples:
    return {
        f'{label_text},state="{member.trust_status.state}",reason="{reason}"': 1
        for label_text, member in sources.items()
        for reason in member.trust_status.reason_codes
    }


# --- the service -------------------------------------------------------------------------------------------------------------


def _write_index(page: MetricsPage, service: Service) -> None:
    stats = service.stats()
    build = labels(version=stats.version, python=platform.python_version())
    page.gauge("kvevents_build_info", "Build information; the value is always 1.", {build: 1})
    for name, text, value in _gauges_of_index(service, stats):
        page.gauge(name, text, {"": value})
    page.gauge(
        "kvevents_index_tier_blocks", "Blocks by tier; a block counts once for each worker that holds it.", _tiers(stats.tiers)
    )
    page.gauge("kvevents_discovery_faults", "Current discovery faults by provider.", _faults(service.faults()))
    page.counter("kvevents_index_batches_total", "Batches applied to the index.", {"": stats.batches})
    page.counter(
        "kvevents_index_evicted_blocks_total", "Blocks that the index refused at its memory limit.", {"": stats.evicted}
    )
    index = service.index.stats()
    page.counter(
        "kvevents_index_displaced_decisions_total",
        "Expected prompts that ended before their time, since too many were expected at once.",
        {"": index.displaced},
    )
    stores = _by_reason_alone(index.rejected)
    page.counter("kvevents_index_rejected_stores_total", "Decoded stores that the index could not use, by reason.", stores)
    page.counter(
        "kvevents_rejected_events_total",
        "Events that could not be decoded, by dialect and reason.",
        _rejection_samples(service.fleet.counts),
    )


def _gauges_of_index(service: Service, stats: StatsAnswer) -> Iterable[tuple[str, str, float | None]]:
    yield "kvevents_ready", "1 while /readyz returns 200.", int(service.readiness().ready)
    yield (
        "kvevents_ingest_failed",
        "1 after the ingest thread failed; restart the service.",
        int(service.fleet.failure is not None),
    )
    yield "kvevents_event_stream_clients", "Clients connected to /v1/events.", len(service.fleet.event_bus)
    yield "kvevents_index_bytes", "Memory that the index uses.", stats.index_bytes
    yield "kvevents_index_limit_bytes", "Memory limit of the index; absent without a limit.", stats.memory_limit
    yield (
        "kvevents_index_blocks",
        "Distinct blocks in the index; a block that several workers hold counts once.",
        stats.unique_blocks,
    )
    if service.state_store is not None:
        yield (
            "kvevents_snapshot_timestamp_seconds",
            "Unix time at which this process last wrote a snapshot; absent before the first.",
            stats.snapshot_at,
        )
        yield "kvevents_snapshot_interval_seconds", "Configured interval between snapshots.", service.settings.snapshot_seconds
        yield (
            "kvevents_snapshot_failed",
            "1 while the last write to state_dir failed.",
            int(stats.snapshot_fault is not None),
        )


def _tiers(tiers: dict[str, int]) -> Samples:
    known = {tier: tiers.get(tier, 0) for tier in TIERS}
    known["other"] = sum(tiers.values()) - sum(known.values())
    return {labels(tier=tier): blocks for tier, blocks in known.items()}


def _faults(faults: dict[str, list[str]]) -> Samples:
    return {labels(provider=provider): len(sentences) for provider, sentences in faults.items()}


def _by_reason_alone(rejected: dict[tuple[str, str], int]) -> Samples:
    """Sum over kinds of groups, since engines name these."""
    found = Counter[str]()
    for (_, reason), count in rejected.items():
        found[reason] += count
    return {labels(reason=reason): count for reason, count in found.items()}


def _rejection_samples(counts: dict[tuple[str, str], int]) -> Samples:
    return {labels(dialect=dialect, reason=reason): count for (dialect, reason), count in list(counts.items())}


# --- a plane's replica -------------------------------------------------------------------------------------------------------

_LEDGER_COUNTS: Final[tuple[tuple[str, str, Callable[[PartitionState], int]], ...]] = (
    (
        "kvevents_plane_invalid_records_total",
        "Records and messages in the log that no bridge writes; stays at 0.",
        lambda state: state.invalid_records + state.foreign_messages,
    ),
    (
        "kvevents_plane_duplicate_records_total",
        "Records that repeat the log or belong to an incarnation that has ended; stays at 0.",
        lambda state: state.duplicate_records,
    ),
    (
        "kvevents_plane_discarded_pages_total",
        "Pages without effect because their writer expected other pages before them; the bridge writes them again.",
        lambda state: state.void_pages + state.stale_epoch_pages,
    ),
)


def _write_replica(page: MetricsPage, replica: Replica, now: float) -> None:
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
    if (build := replica.build) is None:
        return
    subscriber = build.subscriber
    partitions = dict(subscriber.partitions)
    states = list(subscriber.states.values())
    for name, text, count in _LEDGER_COUNTS:
        page.counter(name, text, {"": sum(map(count, states))})
    page.gauge("kvevents_plane_bridges", "Bridges whose heartbeats arrive.", {"": subscriber.bridges()})
    page.gauge(
        "kvevents_plane_partition_position",
        "Number of the newest page in the index.",
        _by_partition(partitions, lambda partition: partition.position),
    )
    page.gauge(
        "kvevents_plane_partition_lag_pages",
        "Pages in the log that are not in the index yet; absent while unknown.",
        _by_partition(partitions, lambda partition: partition.lag),
    )
    page.gauge(
        "kvevents_plane_partition_last_page_timestamp_seconds",
        "Unix time at which the newest page in the index was written, by the bridge's clock.",
        _by_partition(partitions, lambda partition: partition.written_at),
    )
    page.gauge(
        "kvevents_plane_partition_snapshot_timestamp_seconds",
        "Unix time at which this replica found the newest snapshot; absent before the first.",
        {f'partition="{partition}"': now - age for partition, age in build.snapshot_ages().items()},
    )


def _by_partition(
    partitions: Mapping[int, PartitionProgress], value: Callable[[PartitionProgress], float | None]
) -> dict[str, float | None]:
    return {f'partition="{number}"': value(partition) for number, partition in partitions.items()}
