"""Checks of a service: access, readiness, fleet, lookups, memory and snapshots."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

from kvevents.client.reasons import Reason
from kvevents.client.schemas import HealthAnswer, ReadyAnswer, SourcesAnswer, SourceView, StatsAnswer
from kvevents.client.service_client import UNAVAILABLE, ServiceClient, ServiceRequestError, source_issues, worker_name
from kvevents.diagnosis.findings import CheckResult, Severity, fail, ok, warn
from kvevents.diagnosis.handshake import perform_handshake
from kvevents.package_metadata import documented, version
from kvevents.text_format import duration, first_names, percentage, plural, size

ENOUGH_LOOKUPS: Final = 20
"""Lookups without a hit that are a fault."""
FULL: Final = 0.9
"""Share of the memory limit above which there is a warning."""
LATE_SNAPSHOTS: Final = 3
"""Snapshot intervals without a snapshot after which there is a warning."""

_LOGS: Final = "see the service's log"
_NOT_HTTP: Final = frozenset({"timeout", "closed", "not-http"})
"""Errors that a port without an HTTP server can cause."""


class ServiceChecks:
    """The checks of one service."""

    def __init__(self, client: ServiceClient) -> None:
        self.version: str | None = None
        """Release of the service, after the first response."""
        self._client = client

    def findings(self) -> Iterator[CheckResult]:
        """Run all checks until a request fails, and yield the findings."""
        try:
            yield from self._findings()
        except ServiceRequestError as error:
            check = "access" if error.status in {401, 403} else "service"
            other = self._other_port() if error.reason in _NOT_HTTP else None
            yield other or fail(check, error.sentence, error.hint or _LOGS)

    def _other_port(self) -> CheckResult | None:
        """Return a finding if the port is that of an engine."""
        parts = urlsplit(self._client.url)
        place = f"{parts.hostname}:{parts.port}"
        if parts.port is None or perform_handshake(f"tcp://{place}").outcome not in {"socket", "curve"}:
            return None
        text = f"{self._client.url} uses ZeroMQ instead of HTTP: it is the port of an engine"
        return fail("service", text, f"use the service's port, 8090 by default; kvevents doctor {place} checks the engine")

    def _findings(self) -> Iterator[CheckResult]:
        health = self._client.get("/health", HealthAnswer, status=UNAVAILABLE)
        ready = self._client.get("/readyz", ReadyAnswer, status=UNAVAILABLE)
        yield from check_ready(ready)
        stats = self._client.get("/v1/stats", StatsAnswer)
        self.version = stats.version
        yield check_version(self._client.url, stats)
        yield from check_health(health, stats)
        answer = self._client.get("/v1/sources", SourcesAnswer)
        yield from check_fleet(answer, time.time())
        yield check_lookups(stats)
        yield check_memory(stats)
        yield check_snapshot(stats, time.time())


def check_fleet(answer: SourcesAnswer, now: float) -> Iterator[CheckResult]:
    """Check the sources of the service."""
    yield from check_discovery(answer)
    sources = answer.sources
    yield from check_trust(sources, now)
    yield from check_traffic(sources, now)
    checks = (
        check_ranks(sources),
        check_block_sizes(sources),
        check_lag(sources),
        check_load(sources),
        *check_losses(sources, now),
        check_rejected(sources),
    )
    yield from (finding for finding in checks if finding is not None)


def check_version(url: str, stats: StatsAnswer) -> CheckResult:
    """Check the release of the service."""
    text = f"kvevents {stats.version} answers at {url}, up {duration(stats.uptime_seconds)}"
    if stats.version == version():
        return ok("service", text)
    return ok("service", f"{text}; this command has {version()}")


def check_health(health: HealthAnswer, stats: StatsAnswer) -> Iterator[CheckResult]:
    """Check the faults that the service reports."""
    for warning in health.warnings:
        if warning == stats.snapshot_fault:  # reported below
            continue
        if health.status == "failed":
            yield fail("health", warning, "restart the service; its log has the cause")
        else:
            yield warn("health", warning, "change its settings, and restart it")
    if health.status == "failed" and not health.warnings:
        yield fail("health", "the service reports that it has failed", _LOGS)
    if health.status == "ok" and not health.warnings:
        yield ok("health", "no faults")


def check_ready(ready: ReadyAnswer) -> Iterator[CheckResult]:
    """Check whether the service is ready for routers."""
    if not ready.ready:
        advice = f"it will be ready {ready.deadline_seconds:g} s after its start at the latest; the reasons are below"
        if not ready.sources:
            advice = "it becomes ready when an engine is registered: register one, or see the faults of discovery below"
        yield warn("ready", f"not yet: {ready.why}, and the quorum is {ready.quorum:g}", advice)
    elif ready.exact < ready.quorum * ready.sources:
        yield warn("ready", f"yes, though {ready.why}", "the sources that are not EXACT are below")
    else:
        yield ok("ready", ready.why)


def check_lookups(stats: StatsAnswer) -> CheckResult:
    """Check whether lookups find anything."""
    if not stats.lookups:
        return ok("lookups", "none yet")
    lookups = plural(stats.lookups, "lookup")
    if stats.hits or not stats.blocks:
        return ok("lookups", f"{lookups}, {percentage(stats.hits, stats.lookups)} of them found something")
    text = f"{lookups}, and none found anything, though the index has {plural(stats.blocks, 'block')}"
    advice = (
        "clients must send the tokens that the engine computes: compare model name, block size, tokenizer, chat template, "
        "special tokens, LoRA and salt. `kvevents tail ENDPOINT --token-ids` shows the engine's tokens, `kvevents query` looks "
        "up one prompt"
    )
    return (fail if stats.lookups >= ENOUGH_LOOKUPS else warn)("lookups", text, advice)


def check_memory(stats: StatsAnswer) -> CheckResult:
    """Check the memory of the index."""
    used = f"{plural(stats.blocks, 'block')} in {size(stats.index_bytes)}"
    if stats.evicted:
        text = f"{used}; {plural(stats.evicted, 'block')} were refused at the limit"
        return warn("memory", text, "raise --memory-limit: matches are too short, and the workers DEGRADED")
    if stats.memory_limit is None:
        return ok("memory", f"{used}, without a limit")
    text = f"{used}, {percentage(stats.index_bytes, stats.memory_limit)} of the limit of {size(stats.memory_limit)}"
    if stats.index_bytes > FULL * stats.memory_limit:
        return warn("memory", text, "raise --memory-limit before blocks are refused")
    return ok("memory", text)


def check_snapshot(stats: StatsAnswer, now: float) -> CheckResult:
    """Check whether the index survives a restart."""
    if stats.snapshot_fault is not None:
        advice = "check the space and the permissions of the directory; without snapshots a restart begins with less"
        return fail("snapshot", stats.snapshot_fault, advice)
    if stats.snapshot_seconds is None:
        advice = "set a directory with --state-dir to enable them"
        return ok("snapshot", "disabled: after a restart the index is built from the engines again", advice)
    if stats.snapshot_at is None:
        return ok("snapshot", f"none yet; the interval is {duration(stats.snapshot_seconds)}")
    age = max(now - stats.snapshot_at, 0.0)
    text = f"the last one is {duration(age)} old"
    if age > LATE_SNAPSHOTS * stats.snapshot_seconds:
        return warn("snapshot", text, "see its log and --snapshot-seconds")
    return ok("snapshot", text)


# --- checks of the fleet

MAX_LISTED: Final = 10
"""Sources that one check lists, the worst first; the rest is counted."""
PATIENCE_SECONDS: Final = 10.0
"""Time of a source to connect or to catch up before that is a fault. Seconds are normal."""
LATE_SECONDS: Final = 1.0
"""Lag that is a warning: a router with older events sends prompts to blocks that are gone."""
SILENT_SECONDS: Final = 600.0
"""Time without a batch that is a warning."""
RECENT_SECONDS: Final = 3_600.0
"""Age of a loss up to which it is a warning."""

_REPLAY: Final = "register the engine with its replay endpoint (replay_endpoint), and enable that in the engine"
_CHECK_ENGINE: Final = "run on the service's host: kvevents doctor {endpoint}"
_UP: Final = f"check that the engine runs; {_CHECK_ENGINE}"
_EXACT_AGAIN: Final = "exact again after the next AllBlocksCleared or restart of the engine"
_PORTS: Final = "register it with the engine's own endpoints: endpoint is where it publishes, replay_endpoint where it replays"
_NAME: Final = "check the name; inside Kubernetes use a headless service"
_LISTENS: Final = "check that the engine runs with KV events enabled and a wildcard endpoint such as tcp://*:5557"
_ROUTE: Final = "check the address, routes, firewalls and network policies between the service's host and the engine"
_KEYS: Final = "configure matching keys in the service (curve) and the engine; `kvevents keys` creates them"
_IDLE: Final = "send the engine a request; the next batch confirms the replay endpoint"
_INDEX: Final = "update the engine, or report it with a recording (kvevents record)"
_ADVICE: Final[dict[Reason, str]] = {
    Reason.UNRESOLVED: _NAME,
    Reason.REFUSED: _LISTENS,
    Reason.UNANSWERED: _ROUTE,
    Reason.UNREACHABLE: _ROUTE,
    Reason.NOT_ZEROMQ: _PORTS,
    Reason.WRONG_SOCKET: _PORTS,
    Reason.KEYS: _KEYS,
    Reason.NO_PEER: "is the engine up, and does it connect to this service's host and port?",
    Reason.REPLAY_UNRESOLVED: _NAME,
    Reason.REPLAY_REFUSED: f"{_REPLAY}; {_CHECK_ENGINE}",
    Reason.REPLAY_UNANSWERED: _ROUTE,
    Reason.REPLAY_UNREACHABLE: _ROUTE,
    Reason.REPLAY_NOT_ZEROMQ: _PORTS,
    Reason.REPLAY_WRONG_SOCKET: _PORTS,
    Reason.REPLAY_KEYS: _KEYS,
    Reason.NO_REPLAY: _REPLAY,
    Reason.REPLAY_SILENT: f"check that its replay endpoint is right, and reachable from the service's host; {_CHECK_ENGINE}",
    Reason.REPLAY_FOREIGN: "register it with the replay endpoint of this engine and rank",
    Reason.REPLAY_UNCONFIRMED: "if this stays, the replay endpoint belongs to another engine or rank",
    Reason.IDENTITY: f"{_EXACT_AGAIN}; a larger buffer_steps of the engine lets the service verify the stream",
    Reason.LOST: f"{_EXACT_AGAIN}; a larger buffer_steps of the engine avoids it",
    Reason.REJECTED: f"{_EXACT_AGAIN}; check whether the engine's release is newer than kvevents; {_CHECK_ENGINE}",
    Reason.DIVERGED: (
        f"{_EXACT_AGAIN}, or after a matching digest; see {documented('operations/runbook#kveventssourcediverged')}"
    ),
    Reason.UNATTESTED: "report it with a recording (`kvevents record`); it ends when the engine's digest matches again",
    Reason.UNCERTAIN_COPIES: (
        f"install kvevents in the engine: its plugin omits repeated announcements; see {documented('guides/engines')}"
    ),
    Reason.STORES_ONLY: "none is needed: the configuration says that removals of a tier are not announced",
    Reason.SENDER: "see the reason: the upstream of a relay is not exact, or the engine does not announce everything",
    Reason.RANK: "compare the registered ports with those of the engine's ranks: those of two ranks are swapped",
    Reason.SHARED: "give each publisher its own topic, or its own endpoint",
    Reason.SILENT: f"check that the relay runs: its heartbeats have stopped; {_CHECK_ENGINE}",
    Reason.EVICTED: "raise --memory-limit, or distribute the engines over several services",
    Reason.BLOCK_SIZE: "register it with its block size, or without one",
    Reason.ORPHANS_DROPPED: _INDEX,
    Reason.SET_ASIDE: _INDEX,
    Reason.UNKNOWN_PARENTS: "the engine's events contradict each other: use a newer release of it, or report this",
    Reason.ESTIMATED_MATCHES: f"see the reason, and {documented('concepts/prefix-match#estimates')}",
    Reason.FAILED: "restart the service, and report the traceback in its log",
    Reason.REPLAY_UNPROVEN: "send the engine a request; if this stays, the replay endpoint belongs to another engine or rank",
    Reason.NOT_FOLLOWED: "register the engine with the service (POST /register), or remove it from the candidates",
    Reason.CONNECTING: _UP,
    Reason.REPLAYING: f"if this stays, the replay endpoint is slow or loses messages; {_CHECK_ENGINE}",
    Reason.DISCONNECTED: _UP,
    Reason.OTHER: f"see the reason; {_CHECK_ENGINE}",
}
"""The advice for each reason. Of several reasons, the first one in this table counts."""
_PHASES: Final = frozenset({Reason.CONNECTING, Reason.REPLAYING})
"""Reasons that are normal for a short time."""


def check_discovery(answer: SourcesAnswer) -> Iterator[CheckResult]:
    """Check the faults of discovery, and whether there is any source."""
    faults = [(name, sentence) for name, sentences in answer.faults.items() for sentence in sentences]
    for name, sentence in faults[:MAX_LISTED]:
        advice = "the service does not know these engines; correct the cause, or the service's settings"
        yield fail("discovery", f"{name}: {sentence}", advice)
    if len(faults) > MAX_LISTED:
        yield fail("discovery", f"and {len(faults) - MAX_LISTED:,} faults more", "see /v1/sources")
    if not answer.sources:
        advice = (
            "register engines (POST /register), or start the service with --worker, --engine, --dns or a file of [[sources]]"
        )
        yield warn("discovery", "no engine is registered", advice)
    elif not faults:
        instances = {(source.tenant, source.group, source.instance) for source in answer.sources}
        yield ok("discovery", f"{plural(len(answer.sources), 'source')} of {plural(len(instances), 'engine')}")


def check_ranks(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check whether a rank is missing below the highest registered one; None if no engine has several ranks."""
    ranks: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for source in sources:
        ranks[source.tenant, source.group, source.instance].add(source.rank)
    if not any(any(found) for found in ranks.values()):
        return None
    missing = [
        worker_name(instance, rank, tenant, group)
        for (tenant, group, instance), found in sorted(ranks.items())
        for rank in sorted(set(range(min(max(found), len(found) + MAX_LISTED))) - found)
    ]
    if missing:
        text = f"{first_names(missing)}: not registered, though later ranks are"
        return warn("ranks", text, "its blocks are not found: register every rank, or use --engine, which finds them")
    return ok("ranks", "no rank is missing")


def check_trust(sources: Sequence[SourceView], now: float) -> Iterator[CheckResult]:
    """Check which sources are not EXACT, why, and since when."""
    exact = sum(source.trust.state == "EXACT" for source in sources)
    found = [_trust_finding(source, now) for source in sources if source.trust.state != "EXACT"]
    yield from _worst_of(found, "trust")
    if exact:
        attested = sum(source.trust.attested for source in sources)
        confirmed = f", {attested:,} of them attested by the engine" if attested else ""
        yield ok("trust", f"{exact:,} of {plural(len(sources), 'source')} EXACT{confirmed}")


def _trust_finding(source: SourceView, now: float) -> CheckResult:
    state = source.trust.state
    since = max(now - source.since, 0.0)
    reason = source_issues(source)
    text = f"{_worker_name(source)} is {state} for {duration(since)}{f': {reason}' if reason else ''}"
    codes = set(source.trust.reason_codes)
    if state != "DEGRADED":
        codes.discard(Reason.REPLAY_UNPROVEN)  # true of every stream that connects or catches up
    known = [advice for code, advice in _ADVICE.items() if code in codes]
    if state in {"CONNECTING", "REPLAYING"} and since <= PATIENCE_SECONDS and source.fault is None and codes <= _PHASES:
        return warn("trust", text, "wait a moment, and run doctor again")
    if state == "DEGRADED" and codes == {Reason.REPLAY_UNPROVEN} and source.batches == source.replayed:
        return ok("trust", text, _IDLE)
    found = fail if state in {"CONNECTING", "STALE"} else warn
    advice = known[0] if known else _UP
    return found("trust", text, advice.format(endpoint=source.endpoint))


def _worker_name(source: SourceView) -> str:
    return worker_name(source.instance, source.rank, source.tenant, source.group)


_WORST_FIRST: Final = (Severity.FAIL, Severity.WARN, Severity.OK)


def _worst_of(found: Sequence[CheckResult], check: str) -> Iterator[CheckResult]:
    """Return the worst findings, and how many more there are."""
    ordered = sorted(found, key=lambda finding: _WORST_FIRST.index(finding.verdict))
    yield from ordered[:MAX_LISTED]
    if rest := ordered[MAX_LISTED:]:
        text = f"and {plural(len(rest), 'source')} more"
        yield CheckResult(check, rest[0].verdict, text, "see `kvevents top`")


def check_block_sizes(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check whether blocks have the registered size; None before the first block."""
    sizes = sorted({size for source in sources for size in source.block_sizes})
    if not sizes:
        return None
    declared = [source for source in sources if source.block_sizes and source.declared_block_size is not None]
    wrong = [source for source in declared if source.declared_block_size not in source.block_sizes]
    if not wrong:
        text = "as registered" if declared else "none is registered"
        return ok("blocks", f"blocks of {' and '.join(map(str, sizes))} tokens, {text}")
    pairs = [(_worker_name(source), source.declared_block_size, ", ".join(map(str, source.block_sizes))) for source in wrong]
    text = first_names([f"{name} is registered with {registered} and sends {sent}" for name, registered, sent in pairs])
    return fail("blocks", f"tokens per block: {text}", "register them with their block size, by which routers divide prompts")


def check_lag(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check the lag of the newest batches; None before the first live batch."""
    lags = {_worker_name(source): source.lag_seconds for source in sources if source.lag_seconds is not None}
    if not lags:
        return None
    ahead = {name: -lag for name, lag in lags.items() if lag < -LATE_SECONDS}
    late = {name: lag for name, lag in lags.items() if lag > LATE_SECONDS}
    if ahead:
        text = f"clocks are ahead of the service's: {_list_lags(ahead)}"
        return warn("lag", text, "synchronise the clocks (chrony, ntpd), without which lag cannot be measured")
    if late:
        advice = "check the CPU of the service, the network and that clock; `kvevents top --sort lag` shows whether it grows"
        return warn("lag", f"the newest batch was late: {_list_lags(late)}", advice)
    return ok("lag", f"the newest batches came within {1000 * max(0.0, *lags.values()):,.0f} ms")


def check_load(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check the load that engines report; None if none reports it."""
    loads = [source.load for source in sources if source.load is not None]
    faults = [f"{_worker_name(source)}: {source.load_fault}" for source in sources if source.load_fault is not None]
    if faults:
        advice = "selections take the mean of the other engines for their load; check that endpoint, or remove it (load)"
        return warn("load", f"unknown of {first_names(faults)}", advice)
    if not loads:
        return None
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    reported = f"{len(loads):,} of {plural(len(sources), 'source')} report it"
    return ok("load", f"{plural(running, 'request')} running and {waiting:,} waiting; {reported}")


def _list_lags(seconds: dict[str, float]) -> str:
    return first_names([f"{name} by {duration(seconds[name])}" for name in sorted(seconds, key=lambda name: -seconds[name])])


def check_traffic(sources: Sequence[SourceView], now: float) -> Iterator[CheckResult]:
    """Check for sources that have never sent anything, or nothing recently."""
    following = [source for source in sources if source.trust.state in {"EXACT", "DEGRADED"}]
    ages = {_worker_name(source): now - source.last_event for source in following if source.last_event is not None}
    never = [name for source in following if (name := _worker_name(source)) not in ages and not source.blocks]
    silent = [f"{name} for {duration(age)}" for name, age in ages.items() if age > SILENT_SECONDS]
    if never:
        advice = "idle engines publish nothing: send them requests, and check that KV events and prefix caching are enabled"
        yield warn("traffic", f"nothing ever arrived from {first_names(never)}", advice)
    if silent:
        yield warn("traffic", f"silent: {first_names(silent)}", "an idle engine publishes nothing; check that it gets requests")
    if following and not never and not silent:
        newest = f"; the newest batch arrived {duration(max(min(ages.values()), 0.0))} ago" if ages else ""
        yield ok("traffic", f"all sources send events{newest}")


def check_losses(sources: Sequence[SourceView], now: float) -> Iterator[CheckResult]:
    """Check for recent permanent losses, separately of sources without a replay endpoint; yield nothing without a loss."""
    losing = [source for source in sources if source.lost]
    recent = [source for source in losing if any(now - gap.at < RECENT_SECONDS for gap in source.gaps)]
    if losing and not recent:
        yield ok("losses", f"permanently lost, none of them within the last hour: {_list_losses(losing)}")
    without_replay = [source for source in recent if Reason.NO_REPLAY in source.trust.reason_codes]
    if without_replay:
        yield warn(
            "losses",
            f"permanently lost, some within the last hour, without a replay endpoint: {_list_losses(without_replay)}",
            _REPLAY,
        )
    rest = [source for source in recent if Reason.NO_REPLAY not in source.trust.reason_codes]
    if rest:
        advice = "a larger buffer_steps of the engine lets replay repair more; check whether the service or the network pauses"
        yield warn("losses", f"permanently lost, some within the last hour: {_list_losses(rest)}", advice)


def _list_losses(sources: Sequence[SourceView]) -> str:
    return first_names([f"{plural(source.lost, 'batch')} of {_worker_name(source)}" for source in sources])


def check_rejected(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check for events that could not be decoded or applied; None without such events."""
    rejecting = [source for source in sources if source.rejected]
    if not rejecting:
        return None
    counts = first_names([f"{_worker_name(source)}: {_reasons(source)}" for source in rejecting])
    advice = f"kvevents doctor {rejecting[0].endpoint} shows which release has written them; it may be newer than kvevents"
    return warn("decoding", f"events could not be used: {counts}", advice)


def _reasons(source: SourceView) -> str:
    return first_names([f"{reason} ({count:,})" for reason, count in source.rejected.items()])
