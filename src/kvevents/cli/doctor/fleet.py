"""Checks of the sources of a service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from kvevents.cli.console import duration, first_names, plural
from kvevents.cli.doctor.findings import Finding, Verdict, fail, ok, warn
from kvevents.cli.service_client import source_issues, worker_name
from kvevents.service.reasons import Reason
from kvevents.service.schemas import SourcesAnswer, SourceView

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
    Reason.DIVERGED: f"{_EXACT_AGAIN}, or after a matching digest; see KveventsSourceDiverged in docs/operations/runbook.md",
    Reason.UNATTESTED: "report it with a recording (`kvevents record`); it ends when the engine's digest matches again",
    Reason.UNCERTAIN_COPIES: "install kvevents in the engine: its plugin omits repeated announcements (docs/guides/engines.md)",
    Reason.STORES_ONLY: "none is needed: the configuration says that removals of a tier are not announced",
    Reason.SENDER: "check the relay: its own upstream is not exact",
    Reason.SILENT: f"check that the relay runs: its heartbeats have stopped; {_CHECK_ENGINE}",
    Reason.EVICTED: "raise --memory-limit, or distribute the engines over several services",
    Reason.BLOCK_SIZE: "register it with its block size, or without one",
    Reason.ORPHANS_DROPPED: _INDEX,
    Reason.SET_ASIDE: _INDEX,
    Reason.MIXED_BLOCK_SIZES: "none is needed: the index estimates matches of this model (docs/concepts/prefix-match.md)",
    Reason.FAILED: "restart the service, and report the traceback in its log",
    Reason.REPLAY_UNPROVEN: "send the engine a request; if this stays, the replay endpoint belongs to another engine or rank",
    Reason.NO_REPLICA: (
        "check that the other replicas of the plane run and are reachable; with replication_factor 2 one can fail"
    ),
    Reason.NOT_FOLLOWED: "register the engine with the service (POST /register), or remove it from the candidates",
    Reason.CONNECTING: _UP,
    Reason.REPLAYING: f"if this stays, the replay endpoint is slow or loses messages; {_CHECK_ENGINE}",
    Reason.DISCONNECTED: _UP,
    Reason.OTHER: f"see the reason; {_CHECK_ENGINE}",
}
"""The advice for each reason. Of several reasons, the first one in this table counts."""
_PHASES: Final = frozenset({Reason.CONNECTING, Reason.REPLAYING})
"""Reasons that are normal for a short time."""


def check_discovery(answer: SourcesAnswer) -> Iterator[Finding]:
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


def check_ranks(sources: Sequence[SourceView]) -> Finding | None:
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


def check_trust(sources: Sequence[SourceView], now: float) -> Iterator[Finding]:
    """Check which sources are not EXACT, why, and since when."""
    exact = sum(source.trust.state == "EXACT" for source in sources)
    found = [_trust_finding(source, now) for source in sources if source.trust.state != "EXACT"]
    yield from _worst_of(found, "trust")
    if exact:
        attested = sum(source.trust.attested for source in sources)
        confirmed = f", {attested:,} of them attested by the engine" if attested else ""
        yield ok("trust", f"{exact:,} of {plural(len(sources), 'source')} EXACT{confirmed}")


def _trust_finding(source: SourceView, now: float) -> Finding:
    state = source.trust.state
    since = max(now - source.since, 0.0)
    reason = source_issues(source)
    text = f"{_name(source)} is {state} for {duration(since)}{f': {reason}' if reason else ''}"
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


def _name(source: SourceView) -> str:
    return worker_name(source.instance, source.rank, source.tenant, source.group)


_WORST_FIRST: Final = (Verdict.FAIL, Verdict.WARN, Verdict.OK)


def _worst_of(found: Sequence[Finding], check: str) -> Iterator[Finding]:
    """Return the worst findings, and how many more there are."""
    ordered = sorted(found, key=lambda finding: _WORST_FIRST.index(finding.verdict))
    yield from ordered[:MAX_LISTED]
    if rest := ordered[MAX_LISTED:]:
        text = f"and {plural(len(rest), 'source')} more"
        yield Finding(check, rest[0].verdict, text, "see `kvevents top`")


def check_block_sizes(sources: Sequence[SourceView]) -> Finding | None:
    """Check whether blocks have the registered size; None before the first block."""
    sizes = sorted({size for source in sources for size in source.block_sizes})
    if not sizes:
        return None
    declared = [source for source in sources if source.block_sizes and source.declared_block_size is not None]
    wrong = [source for source in declared if set(source.block_sizes) != {source.declared_block_size}]
    if not wrong:
        text = "as registered" if declared else "none is registered"
        return ok("blocks", f"blocks of {' and '.join(map(str, sizes))} tokens, {text}")
    pairs = [(_name(source), source.declared_block_size, ", ".join(map(str, source.block_sizes))) for source in wrong]
    text = first_names([f"{name} is registered with {registered} and sends {sent}" for name, registered, sent in pairs])
    return fail("blocks", f"tokens per block: {text}", "register them with their block size, by which routers divide prompts")


def check_lag(sources: Sequence[SourceView]) -> Finding | None:
    """Check the lag of the newest batches; None before the first live batch."""
    lags = {_name(source): source.lag_seconds for source in sources if source.lag_seconds is not None}
    if not lags:
        return None
    ahead = {name: -lag for name, lag in lags.items() if lag < -LATE_SECONDS}
    late = {name: lag for name, lag in lags.items() if lag > LATE_SECONDS}
    if ahead:
        text = f"clocks are ahead of the service's: {_largest(ahead)}"
        return warn("lag", text, "synchronise the clocks (chrony, ntpd), without which lag cannot be measured")
    if late:
        advice = "check the CPU of the service, the network and that clock; `kvevents top --sort lag` shows whether it grows"
        return warn("lag", f"the newest batch was late: {_largest(late)}", advice)
    return ok("lag", f"the newest batches came within {1000 * max(0.0, *lags.values()):,.0f} ms")


def _largest(seconds: dict[str, float]) -> str:
    return first_names([f"{name} by {duration(seconds[name])}" for name in sorted(seconds, key=lambda name: -seconds[name])])


def check_traffic(sources: Sequence[SourceView], now: float) -> Iterator[Finding]:
    """Check for sources that have sent nothing, ever or for long."""
    following = [source for source in sources if source.trust.state in {"EXACT", "DEGRADED"}]
    ages = {_name(source): now - source.last_event for source in following if source.last_event is not None}
    never = [name for source in following if (name := _name(source)) not in ages and not source.blocks]
    silent = [f"{name} for {duration(age)}" for name, age in ages.items() if age > SILENT_SECONDS]
    if never:
        advice = "idle engines publish nothing: send them requests, and check that KV events and prefix caching are enabled"
        yield warn("traffic", f"nothing ever arrived from {first_names(never)}", advice)
    if silent:
        yield warn("traffic", f"silent: {first_names(silent)}", "an idle engine publishes nothing; check that it gets requests")
    if following and not never and not silent:
        newest = f"; the newest batch arrived {duration(max(min(ages.values()), 0.0))} ago" if ages else ""
        yield ok("traffic", f"all sources send events{newest}")


def check_losses(sources: Sequence[SourceView], now: float) -> Iterator[Finding]:
    """Check for recent permanent losses, separately of sources without a replay endpoint; yield nothing without a loss."""
    losing = [source for source in sources if source.lost]
    recent = [source for source in losing if any(now - gap.at < RECENT_SECONDS for gap in source.gaps)]
    if losing and not recent:
        yield ok("losses", f"permanently lost, none of them within the last hour: {_lost(losing)}")
    without_replay = [source for source in recent if Reason.NO_REPLAY in source.trust.reason_codes]
    if without_replay:
        yield warn(
            "losses",
            f"permanently lost, some within the last hour, without a replay endpoint: {_lost(without_replay)}",
            _REPLAY,
        )
    rest = [source for source in recent if Reason.NO_REPLAY not in source.trust.reason_codes]
    if rest:
        advice = "a larger buffer_steps of the engine lets replay repair more; check whether the service or the network pauses"
        yield warn("losses", f"permanently lost, some within the last hour: {_lost(rest)}", advice)


def _lost(sources: Sequence[SourceView]) -> str:
    return first_names([f"{plural(source.lost, 'batch')} of {_name(source)}" for source in sources])


def check_rejected(sources: Sequence[SourceView]) -> Finding | None:
    """Check for events that could not be decoded or applied; None if there are none."""
    rejecting = [source for source in sources if source.rejected]
    if not rejecting:
        return None
    counts = first_names([f"{_name(source)}: {_reasons(source)}" for source in rejecting])
    advice = f"kvevents doctor {rejecting[0].endpoint} shows which release has written them; it may be newer than kvevents"
    return warn("decoding", f"events could not be used: {counts}", advice)


def _reasons(source: SourceView) -> str:
    return first_names([f"{reason} ({count:,})" for reason, count in source.rejected.items()])
