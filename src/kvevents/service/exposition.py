"""What Prometheus scrapes; docs/runbook.md says what to do about it.

Labels, and what bounds them. None is a peer's word:

- `engine`, `rank`, `model`, `tenant`, `group`: what registrations have named, `limits.max_sources` of them at one time. They
  call an engine instance, but that label is Prometheus' own, for the address that it scrapes
- `state`: the five of `STATES`
- `reason` of a source: those of `Reason`; of what was set aside: the fixed words of `Rejected` and of the index
- `outcome`: lost, recovered; complete, truncated, unanswered, contradicted
- `dialect`: a row of `kvevents.wire.dialects`, or unknown
- `tier`: gpu, cpu, disk; every other medium that engines name is other
- `path`, `status`: of the table of endpoints; requests for anything else are not counted
- `provider`: a way of discovery, as the configuration names it
- `partition`: of a plane, 256 at most
- `state` and `reason` of connections and refusals: fixed words of `kvevents.service.http`
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias, get_args

from prometheus_client import generate_latest

from kvevents.service.data_plane import Counts
from kvevents.service.member import Member
from kvevents.service.metrics import Tally
from kvevents.service.plane_metrics import write_plane, write_shards
from kvevents.service.schemas import StatsAnswer
from kvevents.service.service import Service
from kvevents.stream import StreamCounters
from kvevents.weights import TIERS, State

Samples: TypeAlias = Mapping[str, float | None]
"""Values by labels, as `labels` writes them; None of what is not known."""

STATES: Final[tuple[State, ...]] = get_args(State)
CLOSED: Final = ("full", "evicted", "silent", "idle", "unread", "unread-bytes", "not-closed", "left", "handshake", "draining")
"""Why the data plane closes connections."""
REFUSED: Final = ("too-slow", "headers-too-large", "malformed-request", "too-much-at-once", "too-many-clients")
"""Why it refuses requests before it knows them."""


def exposition(service: Service) -> bytes:
    """In Prometheus' text format."""
    page = _Page()
    _write_fleet(page, service)
    _write_index(page, service)
    if service.replica is not None:
        write_plane(page, service.replica, time.time())
        if service.shards is not None:
            write_shards(page, service.replica, service.shards)
    _write_requests(page, service)
    return page.text() + generate_latest(service.metrics.process)


def _write_requests(page: _Page, service: Service) -> None:
    service.lookups.count()
    counts = service.data_plane.counts()
    native, own = counts.answers, service.metrics
    page.counter("kvevents_lookups_total", "Prefix lookups.", {"": own.lookups + native.lookups})
    hits = {"": own.hits + native.hits}
    page.counter("kvevents_lookup_hits_total", "Prefix lookups that matched at least one block.", hits)
    depth = {"": own.depth.plus(native.depth)}
    page.histogram("kvevents_lookup_match_ratio", "Fraction of a prompt's tokens that the best worker holds.", depth)
    ignored = {labels(path=path): count for path, count in dict(own.ignored_fields).items()}
    page.counter("kvevents_http_ignored_fields_total", "Unknown fields in request bodies that the service ignored.", ignored)
    requests = Counter(dict(own.requests))
    seconds = dict(own.seconds)
    for path, answered in native.requests.items():
        requests.update({(path, status): count for status, count in answered.by_status.items()})
        seconds[path] = seconds.get(path, Tally(own.SECONDS)).plus(answered.seconds)
    answers = {labels(path=path, status=status): count for (path, status), count in requests.items()}
    page.counter("kvevents_http_requests_total", "HTTP and gRPC requests by path and status.", answers)
    tallies = {labels(path=path): tally for path, tally in seconds.items()}
    page.histogram(
        "kvevents_http_request_duration_seconds", "Time from the request's headers to the end of the response.", tallies
    )
    _write_connections(page, counts, service.config.limits.max_clients)


def _write_connections(page: _Page, counts: Counts, max_clients: int) -> None:
    open_ = {labels(state=state): count for state, count in counts.connections.items()}
    page.gauge("kvevents_http_connections", "Open connections by state.", open_)
    page.gauge("kvevents_http_connections_limit", "Connections above which the service answers probes only.", {"": max_clients})
    page.counter("kvevents_http_connections_opened_total", "Connections that clients opened.", {"": counts.opened})
    closed = _by_reason(dict.fromkeys(CLOSED, 0) | counts.closed)
    refused = _by_reason(dict.fromkeys(REFUSED, 0) | counts.refusals)
    page.counter("kvevents_http_connections_closed_total", "Connections that the service closed, by reason.", closed)
    page.counter("kvevents_http_rejected_requests_total", "Requests rejected before their path was known, by reason.", refused)
    page.gauge(
        "kvevents_http_request_buffer_bytes", "Memory of received request bodies beyond 64 KiB each.", {"": counts.received}
    )
    page.gauge(
        "kvevents_http_response_buffer_bytes", "Memory of responses that clients have not read yet.", {"": counts.unread}
    )


def _by_reason(counts: Mapping[str, int]) -> Samples:
    return {labels(reason=reason): count for reason, count in counts.items()}


class _Page:
    """The text format, written as one goes.

    prometheus_client's own writing of 200 sources takes 40 ms, during which queries wait, and this a tenth of that.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    def gauge(self, name: str, text: str, samples: Samples) -> None:
        """A family of what goes up and down."""
        self._family(name, "gauge", text, samples)

    def counter(self, name: str, text: str, samples: Samples) -> None:
        """The same of what only grows."""
        self._family(name, "counter", text, samples)

    def histogram(self, name: str, text: str, tallies: Mapping[str, Tally]) -> None:
        """The same of what is spread over buckets."""
        self._head(name, "histogram", text)
        for told, tally in tallies.items():
            buckets, total = tally.told()
            before = f"{told}," if told else ""
            self._lines += [f'{name}_bucket{{{before}le="{bound}"}} {count}' for bound, count in buckets]
            braced = f"{{{told}}}" if told else ""
            self._lines += [f"{name}_count{braced} {buckets[-1][1]}", f"{name}_sum{braced} {total}"]

    def _family(self, name: str, kind: str, text: str, samples: Samples) -> None:
        self._head(name, kind, text)
        for told, value in samples.items():
            if value is not None:
                self._lines.append(f"{name}{{{told}}} {value}" if told else f"{name} {value}")

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}")

    def text(self) -> bytes:
        """All of it."""
        self._lines.append("")
        return "\n".join(self._lines).encode(errors="replace")


def labels(**told: object) -> str:
    """Labels as the text format has them, without the braces."""
    return ",".join([f'{name}="{_escaped(str(value))}"' for name, value in told.items()])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


# --- sources -----------------------------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    """One number of each source."""

    name: str
    text: str
    read: Callable[[Member], float | None]


class _Count(NamedTuple):
    """One counter of each source, once it has been looked at."""

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
)
_COUNTS: Final = (
    _Count("batches", "Batches delivered to the index.", lambda counted: counted.delivered),
    _Count("replayed_batches", "Delivered batches that arrived by replay.", lambda counted: counted.replayed),
    _Count("lost_batches", "Batches that were never received and can no longer be replayed.", lambda counted: counted.lost),
    _Count("compacted_batches", "Batches that a snapshot of the publisher replaced.", lambda counted: counted.compacted),
    _Count(
        "resets",
        "Resets of the stream: incarnations after the first, including those that might be the same.",
        lambda counted: counted.resets,
    ),
    _Count("reconnects", "Connections after the first.", lambda counted: counted.reconnects),
    _Count("duplicate_messages", "Messages that contained nothing new.", lambda counted: counted.duplicates),
    _Count(
        "overflowed_batches",
        "Live batches dropped because the waiting buffer was full; they are replayed later.",
        lambda counted: counted.overflowed,
    ),
    _Count("malformed_messages", "Messages that are not a batch.", lambda counted: sum(counted.malformed.values())),
    _Count("rejected_events", "Events that could not be decoded.", lambda counted: sum(counted.rejected.values())),
    _Count("replay_requests", "Replay requests sent.", lambda counted: counted.requests),
    _Count("heartbeats", "Heartbeats received with the publisher's digest.", lambda counted: counted.heartbeats),
    _Count("digest_matches", "Heartbeats whose digest matched the index.", lambda counted: counted.digests_matched),
    _Count(
        "divergences",
        "Heartbeats whose digest differed from the index without a known cause; stays at 0.",
        lambda counted: counted.digests_mismatched,
    ),
)
_OUTCOMES: Final[tuple[tuple[str, str, dict[str, Callable[[StreamCounters], int]]], ...]] = (
    (
        "gaps",
        "Runs of missing batches by outcome; a run that was recovered in part counts for both outcomes.",
        {"lost": lambda counted: counted.gaps, "recovered": lambda counted: counted.gaps_repaired},
    ),
    (
        "replays",
        "Replay requests by outcome: complete, truncated, unanswered, or contradicted by the live stream.",
        {
            "complete": lambda counted: counted.complete,
            "truncated": lambda counted: counted.truncated,
            "unanswered": lambda counted: counted.unanswered,
            "contradicted": lambda counted: counted.conflicts,
        },
    ),
)


def _write_fleet(page: _Page, service: Service) -> None:
    sources = {_named(member): member for member in list(service.fleet.members.values())}
    counted = {told: member.status.counters for told, member in sources.items() if member.status is not None}
    states = Counter(member.trust_status.state for member in sources.values())
    page.gauge("kvevents_sources", "Sources by trust state.", {labels(state=state): states[state] for state in STATES})
    page.gauge("kvevents_source_state", "1 for the current trust state of the source, 0 for the others.", _states(sources))
    page.gauge("kvevents_source_reason", "1 for each reason why the source is not EXACT.", _reasons(sources))
    for name, text, read in _GAUGES:
        page.gauge(f"kvevents_source_{name}", text, {told: read(member) for told, member in sources.items()})
    evicted = {told: member.info.evicted for told, member in sources.items() if member.info is not None}
    page.counter(
        "kvevents_source_evicted_blocks_total", "Blocks of the source that the index refused at its memory limit.", evicted
    )
    for name, text, count in _COUNTS:
        page.counter(f"kvevents_source_{name}_total", text, {told: count(counters) for told, counters in counted.items()})
    for name, text, outcomes in _OUTCOMES:
        samples = {
            f'{told},outcome="{outcome}"': read_one(counters)
            for told, counters in counted.items()
            for outcome, read_one in outcomes.items()
        }
        page.counter(f"kvevents_source_{name}_total", text, samples)


def _named(member: Member) -> str:
    registered = member.registration
    return labels(
        engine=registered.instance,
        rank=registered.rank,
        model=registered.model,
        tenant=registered.tenant,
        group=registered.group,
    )


def _states(sources: dict[str, Member]) -> Samples:
    return {
        f'{told},state="{state}"': int(state == now)
        for told, member in sources.items()
        for now in (member.trust_status.state,)
        for state in STATES
    }


def _reasons(sources: dict[str, Member]) -> Samples:
    return {
        f'{told},state="{member.trust_status.state}",reason="{reason}"': 1
        for told, member in sources.items()
        for reason in member.trust_status.reason_codes
    }


# --- the service -------------------------------------------------------------------------------------------------------------


def _write_index(page: _Page, service: Service) -> None:
    stats = service.stats()
    build = labels(version=stats.version, python=platform.python_version())
    page.gauge("kvevents_build_info", "Build information; the value is always 1.", {build: 1})
    for name, text, value in _numbers(service, stats):
        page.gauge(name, text, {"": value})
    page.gauge(
        "kvevents_index_tier_blocks", "Blocks by tier; a block counts once for each worker that holds it.", _tiers(stats.tiers)
    )
    page.gauge("kvevents_discovery_faults", "Current discovery faults by provider.", _faults(service.faults()))
    page.counter("kvevents_index_batches_total", "Batches applied to the index.", {"": stats.batches})
    page.counter(
        "kvevents_index_evicted_blocks_total", "Blocks that the index refused at its memory limit.", {"": stats.evicted}
    )
    aside = _set_aside(service.index.stats().rejected)
    page.counter("kvevents_index_rejected_stores_total", "Decoded stores that the index could not use, by reason.", aside)
    page.counter(
        "kvevents_rejected_events_total",
        "Events that could not be decoded, by dialect and reason.",
        _rejected(service.fleet.counts),
    )


def _numbers(service: Service, stats: StatsAnswer) -> Iterable[tuple[str, str, float | None]]:
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
        yield "kvevents_snapshot_interval_seconds", "Configured interval between snapshots.", service.config.snapshot_seconds
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


def _set_aside(rejected: dict[tuple[str, str], int]) -> Samples:
    """By reason alone: the kind beside it is an engine's word."""
    found = Counter[str]()
    for (_, reason), count in rejected.items():
        found[reason] += count
    return {labels(reason=reason): count for reason, count in found.items()}


def _rejected(counts: dict[tuple[str, str], int]) -> Samples:
    return {labels(dialect=dialect, reason=reason): count for (dialect, reason), count in list(counts.items())}
