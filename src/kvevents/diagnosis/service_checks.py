"""Checks of a service: access, readiness, fleet, lookups, memory and snapshots."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import urlsplit

from kvevents.client import Client, ServiceRequestError
from kvevents.client.protocol import UNAVAILABLE
from kvevents.client.reasons import Reason
from kvevents.client.schemas import HealthAnswer, ReadyAnswer, SourcesAnswer, SourceView, StatsAnswer, worker_name
from kvevents.diagnosis.findings import CheckResult, Severity, fail, ok, warn
from kvevents.diagnosis.handshake import perform_handshake
from kvevents.diagnosis.text_format import duration, first_names, percentage, plural, size

MIN_LOOKUPS: Final = 20
"""Number of lookups without any match that counts as a fault; a smaller number counts as a warning."""
_LOG_ADVICE: Final = "see the service's log"
_NOT_HTTP_ERRORS: Final = frozenset({"timeout", "closed", "not-http"})
"""Errors that a port without an HTTP server can cause."""


class ServiceChecks:
    """The checks of one service."""

    def __init__(self, client: Client) -> None:
        self.version: str | None = None
        """Release of the service; None before the answer that contains it."""
        self._client = client

    def findings(self) -> Iterator[CheckResult]:
        """Run all checks until a request fails, and yield the findings."""
        try:
            yield from self._run_checks()
        except ServiceRequestError as error:
            check = "access" if error.status in {401, 403} else "service"
            finding = self._check_port() if error.reason in _NOT_HTTP_ERRORS else None
            yield finding or fail(check, error.sentence, error.hint or _LOG_ADVICE)

    def _check_port(self) -> CheckResult | None:
        """Return a finding if the port belongs to an engine instead of a service."""
        parts = urlsplit(self._client.url)
        place = f"{parts.hostname}:{parts.port}"
        if parts.port is None or perform_handshake(f"tcp://{place}").outcome not in {"socket", "curve"}:
            return None
        text = f"{self._client.url} uses ZeroMQ instead of HTTP: it is the port of an engine"
        return fail("service", text, f"use the service's port, 8090 by default; kvevents doctor {place} checks the engine")

    def _run_checks(self) -> Iterator[CheckResult]:
        health = self._client.get("/health", HealthAnswer, accepted_status=UNAVAILABLE)
        yield from check_ready(self._client.ready())
        stats = self._client.get("/v1/stats", StatsAnswer)
        self.version = stats.version
        yield ok("service", f"kvevents {stats.version} answers at {self._client.url}, up {duration(stats.uptime_seconds)}")
        yield from check_health(health, stats)
        answer = self._client.sources()
        sources, now = answer.sources, time.time()
        yield from check_discovery(answer)
        yield from check_trust(sources, now)
        yield from check_traffic(sources, now)
        checks = (check_ranks, check_block_sizes, check_lag, check_load, check_requests, check_rejected)
        yield from filter(None, (*(check(sources) for check in checks), check_losses(sources, now)))
        yield from (check_lookups(stats), check_memory(stats), check_snapshot(stats, now))


def check_health(health: HealthAnswer, stats: StatsAnswer) -> Iterator[CheckResult]:
    """Check the faults that the service reports."""
    has_failed = health.status == "failed"
    for warning in health.warnings:
        if has_failed:
            yield fail("health", warning, "restart the service; its log has the cause")
        elif warning != stats.snapshot_fault:  # `check_snapshot` reports this fault.
            yield warn("health", warning, "repair what it names; if that is a setting, change it and restart the service")
    if not health.warnings:
        yield fail("health", "the service reports that it has failed", _LOG_ADVICE) if has_failed else ok("health", "no faults")


def check_ready(ready: ReadyAnswer) -> Iterator[CheckResult]:
    """Check whether the service is ready for routers."""
    if not ready.ready:
        advice = f"the service will be ready at most {ready.deadline_seconds:g} s after its start; the reasons are below"
        if not ready.sources:
            advice = "the service becomes ready when an engine is registered: register one, or see the faults below"
        yield warn("ready", f"not yet: {ready.why}, and the quorum is {ready.quorum:g}", advice)
    elif ready.exact < ready.quorum * ready.sources:
        yield warn("ready", f"yes, though {ready.why}", "the sources that are not EXACT are below")
    else:
        yield ok("ready", ready.why)


def check_lookups(stats: StatsAnswer) -> CheckResult:
    """Check whether lookups find cached blocks."""
    if not stats.lookups:
        return ok("lookups", "none yet")
    lookups = plural(stats.lookups, "lookup")
    if stats.hits or not stats.blocks:
        return ok("lookups", f"{lookups}, {percentage(stats.hits, stats.lookups)} of them found something")
    text = f"{lookups}, and none found anything, though the index has {plural(stats.blocks, 'block')}"
    advice = (
        "clients must send the tokens that the engine computes (`kvevents tail ENDPOINT --token-ids` shows them): compare "
        "model name, block size, tokenizer, chat template, special tokens, LoRA and salt"
    )
    return (fail if stats.lookups >= MIN_LOOKUPS else warn)("lookups", text, advice)


def check_memory(stats: StatsAnswer) -> CheckResult:
    """Check the memory use of the index. Warn if the index uses at least 90% of the limit."""
    usage = f"{plural(stats.blocks, 'block')} in {size(stats.index_bytes)}"
    if stats.evicted:
        text = f"{usage}; {plural(stats.evicted, 'block')} were refused at the limit"
        return warn("memory", text, "raise --memory-limit: matches are too short, and the workers DEGRADED")
    if stats.memory_limit is None:
        return ok("memory", f"{usage}, without a limit")
    text = f"{usage}, {percentage(stats.index_bytes, stats.memory_limit)} of the limit of {size(stats.memory_limit)}"
    if stats.index_bytes > 0.9 * stats.memory_limit:
        return warn("memory", text, "raise --memory-limit before blocks are refused")
    return ok("memory", text)


def check_snapshot(stats: StatsAnswer, now: float) -> CheckResult:
    """Check whether the index survives a restart."""
    if stats.snapshot_fault is not None:
        advice = "check the space and the permissions of the directory; without snapshots a restart begins with less"
        return fail("snapshot", stats.snapshot_fault, advice)
    if stats.snapshot_seconds is None:
        advice = "set a directory with --state-dir to enable snapshots"
        return ok("snapshot", "disabled: after a restart the index is built from the engines again", advice)
    if stats.snapshot_at is None:
        return ok("snapshot", f"none yet; the interval is {duration(stats.snapshot_seconds)}")
    age = max(now - stats.snapshot_at, 0.0)
    text = f"the newest snapshot is {duration(age)} old"
    if age > 3 * stats.snapshot_seconds:
        return warn("snapshot", text, "see the service's log and its setting --snapshot-seconds")
    return ok("snapshot", text)


# --- checks of the fleet

MAX_LISTED_WORKERS: Final = 10
"""Maximum number of findings that one check lists, the worst first; further findings are counted, but not listed."""
GRACE_SECONDS: Final = 10.0
"""Seconds for which a source may connect or catch up before this counts as a fault."""
MAX_LAG_SECONDS: Final = 1.0
"""Lag in seconds above which the check warns: a router with older events selects workers for blocks that are gone."""
_START_REASONS: Final = frozenset({Reason.CONNECTING, Reason.REPLAYING, Reason.REPLAY_UNPROVEN})
"""Reasons that are normal for `GRACE_SECONDS`, and faults after this time."""


def check_discovery(answer: SourcesAnswer) -> Iterator[CheckResult]:
    """Check the faults of discovery, and whether any engine is registered."""
    advice = "its engines may be missing from answers; repair what the fault names, or correct the service's settings"
    faults = [fail("discovery", f"{name}: {text}", advice) for name, texts in answer.faults.items() for text in texts]
    yield from _select_worst(faults, "discovery", "fault")
    if not answer.sources:
        advice = "use `kvevents register`, or --worker, --engine, --dns or [[sources]] of the service; a replica needs a bridge"
        yield warn("discovery", "no engine is registered", advice)
    elif not faults:
        instances = {(source.tenant, source.group, source.instance) for source in answer.sources}
        yield ok("discovery", f"{plural(len(answer.sources), 'source')} of {plural(len(instances), 'engine')}")


def check_ranks(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check whether a rank below an engine's highest registered rank is missing; None if all engines have only rank 0."""
    ranks: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for source in sources:
        ranks[source.tenant, source.group, source.instance].add(source.rank)
    if not any(any(numbers) for numbers in ranks.values()):
        return None
    names = [
        worker_name(instance, rank, tenant, group)
        for (tenant, group, instance), numbers in sorted(ranks.items())
        for rank in sorted(set(range(min(max(numbers), len(numbers) + MAX_LISTED_WORKERS))) - numbers)
    ]
    if names:
        text = f"{first_names(names)}: not registered, though higher ranks are"
        return warn("ranks", text, "its blocks are not found: register every rank, or use --engine, which finds them")
    return ok("ranks", "no rank is missing")


def check_trust(sources: Sequence[SourceView], now: float) -> Iterator[CheckResult]:
    """Report which sources are not EXACT, why, and for how long."""
    exact = sum(source.trust.state == "EXACT" for source in sources)
    findings = [_check_source_trust(source, now) for source in sources if source.trust.state != "EXACT"]
    yield from _select_worst(findings, "trust", "source")
    if exact:
        count = sum(source.trust.attested for source in sources)
        note = f", {count:,} of them attested by the engine" if count else ""
        yield ok("trust", f"{exact:,} of {plural(len(sources), 'source')} EXACT{note}")


def _check_source_trust(source: SourceView, now: float) -> CheckResult:
    state = source.trust.state
    seconds = max(now - source.since, 0.0)
    reason = source.issues
    text = f"{source.name} is {state} for {duration(seconds)}{f': {reason}' if reason else ''}"
    codes = set(source.trust.reason_codes)
    if state in {"CONNECTING", "REPLAYING"} and seconds <= GRACE_SECONDS and source.fault is None and codes <= _START_REASONS:
        return warn("trust", text, "wait a moment, and run doctor again")
    if state == "DEGRADED" and codes == {Reason.REPLAY_UNPROVEN} and source.batches == source.replayed:
        return ok("trust", text, source.advice)
    return (fail if state in {"CONNECTING", "STALE"} else warn)("trust", text, source.advice)


def _select_worst(findings: Sequence[CheckResult], check: str, noun: str) -> Iterator[CheckResult]:
    """Yield the worst findings, then one finding with the number of omitted findings."""
    worst_first = sorted(findings, key=lambda finding: list(Severity).index(finding.verdict), reverse=True)
    yield from worst_first[:MAX_LISTED_WORKERS]
    if others := worst_first[MAX_LISTED_WORKERS:]:
        yield CheckResult(check, others[0].verdict, f"and {plural(len(others), noun)} more", "see `kvevents sources`")


def check_block_sizes(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check whether blocks have the registered number of tokens; None if no block has arrived."""
    sizes = sorted({size for source in sources for size in source.block_sizes})
    if not sizes:
        return None
    with_size = [source for source in sources if source.block_sizes and source.declared_block_size is not None]
    mismatches = [source for source in with_size if source.declared_block_size not in source.block_sizes]
    if not mismatches:
        text = "as registered" if with_size else "none is registered"
        return ok("blocks", f"blocks of {' and '.join(map(str, sizes))} tokens, {text}")
    names = [f"{source.name} is registered with {source.declared_block_size}" for source in mismatches]
    lists = [", ".join(map(str, source.block_sizes)) for source in mismatches]
    text = first_names([f"{name} and sends {sizes_sent}" for name, sizes_sent in zip(names, lists, strict=True)])
    return fail("blocks", f"tokens per block: {text}", "register them with their block size, by which routers divide prompts")


def check_lag(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check the lag of the newest batches; None if no live batch has arrived."""
    lags = {source.name: source.lag_seconds for source in sources if source.lag_seconds is not None}
    if not lags:
        return None
    ahead = {name: -lag for name, lag in lags.items() if lag < -MAX_LAG_SECONDS}
    delays = {name: lag for name, lag in lags.items() if lag > MAX_LAG_SECONDS}
    if ahead:
        text = f"clocks are ahead of the service's: {_list_lags(ahead)}"
        return warn("lag", text, "synchronise the clocks (chrony, ntpd), without which lag cannot be measured")
    if delays:
        advice = "check the service's CPU, the network and the clock; `kvevents top --sort lag` shows whether the lag grows"
        return warn("lag", f"the newest batch was late: {_list_lags(delays)}", advice)
    return ok("lag", f"the newest batches came within {1000 * max(0.0, *lags.values()):,.0f} ms")


def check_load(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check the load that engines report; None if no engine reports its load."""
    loads = [source.load for source in sources if source.load is not None]
    faults = [f"{source.name}: {source.load_fault}" for source in sources if source.load_fault is not None]
    if faults:
        advice = "until the load is known, selections assume the mean load of the other engines; check the setting `load`"
        return warn("load", f"unknown of {first_names(faults)}", advice)
    if not loads:
        return None
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    summary = f"{len(loads):,} of {plural(len(sources), 'source')} report it"
    return ok("load", f"{plural(running, 'request')} running and {waiting:,} waiting; {summary}")


def check_requests(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check whether selections exclude EXACT sources; None if they exclude no EXACT source."""
    faults = {source.name: source.fault for source in sources if source.fault and source.trust.state == "EXACT"}
    if not faults:
        return None
    drained = [source.name for source in sources if source.draining]
    advice = f"`kvevents drain NAME --end` ends it for {first_names(drained)}" if drained else "check the server of each engine"
    return warn("requests", f"none for {first_names([f'{name}: {fault}' for name, fault in faults.items()])}", advice)


def _list_lags(seconds: dict[str, float]) -> str:
    return first_names([f"{name} by {duration(seconds[name])}" for name in sorted(seconds, key=lambda name: -seconds[name])])


def check_traffic(sources: Sequence[SourceView], now: float) -> Iterator[CheckResult]:
    """Check for sources that have never sent an event, or that have not sent one for ten minutes."""
    following = [source for source in sources if source.trust.state in {"EXACT", "DEGRADED"}]
    ages = {source.name: now - source.last_event for source in following if source.last_event is not None}
    without_events = [name for source in following if (name := source.name) not in ages and not source.blocks]
    pauses = [f"{name} for {duration(age)}" for name, age in ages.items() if age > 600.0]
    if without_events:
        advice = "idle engines publish nothing: send them requests, and check that KV events and prefix caching are enabled"
        yield warn("traffic", f"nothing ever arrived from {first_names(without_events)}", advice)
    if pauses:
        yield warn("traffic", f"silent: {first_names(pauses)}", "an idle engine publishes nothing; check that it gets requests")
    if following and not without_events and not pauses:
        newest = f"; the newest batch arrived {duration(max(min(ages.values()), 0.0))} ago" if ages else ""
        yield ok("traffic", f"all sources send events{newest}")


def check_losses(sources: Sequence[SourceView], now: float) -> CheckResult | None:
    """Check for permanent losses in the last hour; None if there was no loss."""
    with_losses = [source for source in sources if source.lost]
    recent = [source for source in with_losses if any(now - gap.at < 3_600.0 for gap in source.gaps)]
    if not recent:
        text = f"batches were lost, but none within the last hour: {_list_losses(with_losses)}"
        return ok("losses", text) if with_losses else None
    advice = "use a replay endpoint with a large `buffer_steps` to repair losses; check whether service or network pauses"
    return warn("losses", f"batches were lost, some within the last hour: {_list_losses(recent)}", advice)


def _list_losses(sources: Sequence[SourceView]) -> str:
    return first_names([f"{plural(source.lost, 'batch')} of {source.name}" for source in sources])


def check_rejected(sources: Sequence[SourceView]) -> CheckResult | None:
    """Check for events that could not be decoded or applied; None without rejected events."""
    affected = [source for source in sources if source.rejected]
    if not affected:
        return None
    reasons = [", ".join(f"{reason} ({count:,})" for reason, count in source.rejected.items()) for source in affected]
    counts = first_names([f"{source.name}: {text}" for source, text in zip(affected, reasons, strict=True)])
    advice = f"kvevents doctor {affected[0].endpoint} shows which release wrote the events: it may be newer than kvevents"
    return warn("decoding", f"events could not be used: {counts}", advice)
