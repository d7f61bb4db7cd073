"""A service under examination: whether it answers, is ready, knows its fleet, and is of use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from kvevents.cli.amounts import duration, share, size
from kvevents.cli.checkup import fleet
from kvevents.cli.checkup.findings import Finding, fail, ok, warn
from kvevents.cli.client import UNAVAILABLE, AskError, ServiceClient
from kvevents.cli.lines import plural
from kvevents.service.schemas import HealthAnswer, ReadyAnswer, SourcesAnswer, StatsAnswer
from kvevents.subscriber.handshake import perform_handshake
from kvevents.version import version

ENOUGH_LOOKUPS: Final = 20
"""So many lookups without a single hit are no chance."""
FULL: Final = 0.9
"""Share of the memory limit above which it is near."""
LATE_SNAPSHOTS: Final = 3
"""Times that a snapshot should have been written since the last one, from which on something is wrong."""

_LOGS: Final = "see the service's log"
_MUTE: Final = frozenset({"timeout", "closed", "not-http"})
"""Reasons that something else than HTTP may be there."""


class ServiceExamination:
    """`findings` yields what is found, as it is found."""

    def __init__(self, client: ServiceClient) -> None:
        self.version: str | None = None
        """Of the service, once it has told."""
        self._client = client

    def findings(self) -> Iterator[Finding]:
        """Every check, as far as the service lets itself be asked."""
        try:
            yield from self._findings()
        except AskError as problem:
            check = "access" if problem.status in {401, 403} else "service"
            other = self._other_port() if problem.reason in _MUTE else None
            yield other or fail(check, problem.sentence, problem.hint or _LOGS)

    def _other_port(self) -> Finding | None:
        """What to say where an engine stands instead."""
        parts = urlsplit(self._client.url)
        place = f"{parts.hostname}:{parts.port}"
        if parts.port is None or perform_handshake(f"tcp://{place}").outcome not in {"socket", "curve"}:
            return None
        text = f"{self._client.url} speaks ZeroMQ, not HTTP: an engine's port, not a service's"
        return fail("service", text, f"name the service's port, 8090 by default; kvevents doctor {place} examines the engine")

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
    """All that is known of the sources."""
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
    """Who answers."""
    text = f"kvevents {stats.version} answers at {url}, up {duration(stats.uptime_seconds)}"
    if stats.version == version():
        return ok("service", text)
    return ok("service", f"{text}; this is {version()}")


def check_health(health: HealthAnswer, stats: StatsAnswer) -> Iterator[Finding]:
    """What the service says against itself."""
    for warning in health.warnings:
        if warning == stats.snapshot_fault:  # told below
            continue
        if health.status == "failed":
            yield fail("health", warning, "restart it; its log says what happened")
        else:
            yield warn("health", warning, "change its settings, and start it again")
    if health.status == "failed" and not health.warnings:
        yield fail("health", "it says that it has failed", _LOGS)
    if health.status == "ok" and not health.warnings:
        yield ok("health", "it has nothing to say against itself")


def check_ready(ready: ReadyAnswer) -> Iterator[Finding]:
    """Whether routers are let in, and why."""
    if not ready.ready:
        advice = f"it will be {ready.deadline_seconds:g} s after its start at the latest; what is in its way is told below"
        if not ready.sources:
            advice = "it stays so until an engine is there: register one, or see below what discovery has not found"
        yield warn("ready", f"not yet: {ready.why}, and a share of {ready.quorum:g} is wanted", advice)
    elif ready.exact < ready.quorum * ready.sources:
        yield warn("ready", f"yes, though {ready.why}", "what is not EXACT is told below")
    else:
        yield ok("ready", ready.why)


def check_lookups(stats: StatsAnswer) -> Finding:
    """Whether those who ask find anything."""
    if not stats.lookups:
        return ok("lookups", "nobody has asked yet")
    asked = plural(stats.lookups, "lookup")
    if stats.hits or not stats.blocks:
        return ok("lookups", f"{asked}, {share(stats.hits, stats.lookups)} of them found something")
    text = f"{asked}, and none found anything, though {plural(stats.blocks, 'block')} are held"
    advice = (
        "who asks must send what the engine computes on: compare model name, block size, tokenizer (chat template and special "
        "tokens too), LoRA and salt. `kvevents tail ENDPOINT --token-ids` shows the engine's tokens, `kvevents query` looks up "
        "one prompt"
    )
    return (fail if stats.lookups >= ENOUGH_LOOKUPS else warn)("lookups", text, advice)


def check_memory(stats: StatsAnswer) -> Finding:
    """Whether the index has room."""
    used = f"{plural(stats.blocks, 'block')} in {size(stats.index_bytes)}"
    if stats.evicted:
        text = f"{used}; {plural(stats.evicted, 'block')} were refused for the limit"
        return warn("memory", text, "raise --memory-limit: answers are shorter than the truth, and those workers DEGRADED")
    if stats.memory_limit is None:
        return ok("memory", f"{used}, without a limit")
    text = f"{used}, {share(stats.index_bytes, stats.memory_limit)} of the limit of {size(stats.memory_limit)}"
    if stats.index_bytes > FULL * stats.memory_limit:
        return warn("memory", text, "raise --memory-limit before blocks are refused")
    return ok("memory", text)


def check_snapshot(stats: StatsAnswer, now: float) -> Finding:
    """Whether a restart would lose what is known."""
    if stats.snapshot_fault is not None:
        advice = "is there room on the disk, and may the service write there? It goes on without; a restart begins with less"
        return fail("snapshot", stats.snapshot_fault, advice)
    if stats.snapshot_seconds is None:
        advice = "name a folder with --state-dir to have them"
        return ok("snapshot", "none are written: a restart would learn everything from the engines again", advice)
    if stats.snapshot_at is None:
        return ok("snapshot", f"none was written so far; they are {duration(stats.snapshot_seconds)} apart")
    age = max(now - stats.snapshot_at, 0.0)
    text = f"the last one is {duration(age)} old"
    if age > LATE_SNAPSHOTS * stats.snapshot_seconds:
        return warn("snapshot", text, "does it still write them? See its log and --snapshot-seconds")
    return ok("snapshot", text)
