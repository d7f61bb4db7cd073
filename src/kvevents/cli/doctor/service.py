"""Checks of a service: access, readiness, fleet, lookups, memory and snapshots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from kvevents.cli.console import duration, percentage, plural, size
from kvevents.cli.doctor import fleet
from kvevents.cli.doctor.findings import Finding, fail, ok, warn
from kvevents.cli.service_client import UNAVAILABLE, ServiceClient, ServiceError
from kvevents.service.schemas import HealthAnswer, ReadyAnswer, SourcesAnswer, StatsAnswer
from kvevents.subscriber.handshake import perform_handshake
from kvevents.version import version

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

    def findings(self) -> Iterator[Finding]:
        """Run all checks until a request fails, and yield the findings."""
        try:
            yield from self._findings()
        except ServiceError as error:
            check = "access" if error.status in {401, 403} else "service"
            other = self._other_port() if error.reason in _NOT_HTTP else None
            yield other or fail(check, error.sentence, error.hint or _LOGS)

    def _other_port(self) -> Finding | None:
        """Return a finding if the port is that of an engine."""
        parts = urlsplit(self._client.url)
        place = f"{parts.hostname}:{parts.port}"
        if parts.port is None or perform_handshake(f"tcp://{place}").outcome not in {"socket", "curve"}:
            return None
        text = f"{self._client.url} uses ZeroMQ instead of HTTP: it is the port of an engine"
        return fail("service", text, f"use the service's port, 8090 by default; kvevents doctor {place} checks the engine")

    def _findings(self) -> Iterator[Finding]:
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


def check_fleet(answer: SourcesAnswer, now: float) -> Iterator[Finding]:
    """Check the sources of the service."""
    yield from fleet.check_discovery(answer)
    sources = answer.sources
    yield from fleet.check_trust(sources, now)
    yield from fleet.check_traffic(sources, now)
    checks = (
        fleet.check_ranks(sources),
        fleet.check_block_sizes(sources),
        fleet.check_lag(sources),
        *fleet.check_losses(sources, now),
        fleet.check_rejected(sources),
    )
    yield from (finding for finding in checks if finding is not None)


def check_version(url: str, stats: StatsAnswer) -> Finding:
    """Check the release of the service."""
    text = f"kvevents {stats.version} answers at {url}, up {duration(stats.uptime_seconds)}"
    if stats.version == version():
        return ok("service", text)
    return ok("service", f"{text}; this command has {version()}")


def check_health(health: HealthAnswer, stats: StatsAnswer) -> Iterator[Finding]:
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


def check_ready(ready: ReadyAnswer) -> Iterator[Finding]:
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


def check_lookups(stats: StatsAnswer) -> Finding:
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


def check_memory(stats: StatsAnswer) -> Finding:
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


def check_snapshot(stats: StatsAnswer, now: float) -> Finding:
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
