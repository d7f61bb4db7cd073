"""What a service knows of its sources: reachable, trusted, complete, of the block size that they promise, in time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from kvevents.cli.amounts import duration, some, why, worker
from kvevents.cli.checkup.findings import Finding, Verdict, fail, ok, warn
from kvevents.cli.lines import plural
from kvevents.service.reasons import Reason
from kvevents.service.schemas import SourcesAnswer, SourceView

MAX_TOLD: Final = 10
"""Sources that one check tells of one by one, the worst first."""
PATIENCE_SECONDS: Final = 10.0
"""How long a source may take to connect or to catch up: seconds are usual, and no fault."""
LATE_SECONDS: Final = 1.0
"""From an engine's clock to the service's: a router that trusts older news sends prompts to blocks that are gone."""
SILENT_SECONDS: Final = 600.0
RECENT_SECONDS: Final = 3_600.0
"""Losses longer ago are history."""

_REPLAY: Final = "name the engine's replay endpoint when it is registered (replay_endpoint), and enable it in the engine"
_LOOK: Final = "look from there: kvevents doctor {endpoint}"
_UP: Final = f"is the engine up? {_LOOK}"
_AGAIN: Final = "exact again after the next AllBlocksCleared or restart of the engine"
_PORTS: Final = "register it with the engine's own endpoints: endpoint is where it publishes, replay_endpoint where it replays"
_NAME: Final = "check the name; inside Kubernetes use a headless service"
_LISTENS: Final = "is the engine up, with KV events enabled, and its endpoint a wildcard such as tcp://*:5557?"
_ROUTE: Final = "check the address, routes, and firewalls or network policies between the service's host and the engine"
_KEYS: Final = "give the service (curve) and the engine keys that fit; `kvevents keys` makes them"
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
    Reason.REPLAY_REFUSED: f"{_REPLAY}; {_LOOK}",
    Reason.REPLAY_UNANSWERED: _ROUTE,
    Reason.REPLAY_UNREACHABLE: _ROUTE,
    Reason.REPLAY_NOT_ZEROMQ: _PORTS,
    Reason.REPLAY_WRONG_SOCKET: _PORTS,
    Reason.REPLAY_KEYS: _KEYS,
    Reason.NO_REPLAY: _REPLAY,
    Reason.REPLAY_SILENT: f"is its replay endpoint right, and reachable from the service's host? {_LOOK}",
    Reason.REPLAY_FOREIGN: "register it with the replay endpoint of this very engine and rank",
    Reason.REPLAY_UNCONFIRMED: "if it stays, the replay endpoint belongs to another engine or rank",
    Reason.IDENTITY: f"{_AGAIN}; a larger buffer_steps in the engine lets it be proven",
    Reason.LOST: f"{_AGAIN}; a larger buffer_steps in the engine avoids it",
    Reason.REJECTED: f"{_AGAIN}; is the engine's release newer than this one? {_LOOK}",
    Reason.DIVERGED: f"{_AGAIN}, or once a digest agrees; see KveventsSourceDiverged in docs/runbook.md",
    Reason.SENDER: "the relay does not trust what it tells: look there",
    Reason.SILENT: f"is the relay still running? it sends no heartbeats any more; {_LOOK}",
    Reason.EVICTED: "raise --memory-limit, or follow fewer engines with one service",
    Reason.BLOCK_SIZE: "register it with the block size that it has, or without any",
    Reason.ORPHANS_DROPPED: _INDEX,
    Reason.SET_ASIDE: _INDEX,
    Reason.FAILED: "restart the service, and report the traceback in its log",
    Reason.REPLAY_UNPROVEN: "send the engine a request; if this stays, the replay endpoint belongs to another engine or rank",
    Reason.NO_REPLICA: (
        "are the other replicas of the plane up, and reachable from this one? with shard.holders = 2 one of them may end"
    ),
    Reason.NOT_FOLLOWED: "register the engine with the service (POST /register), or do not name it as a candidate",
    Reason.CONNECTING: _UP,
    Reason.REPLAYING: f"if it stays, the replay endpoint is slow or loses replies; {_LOOK}",
    Reason.DISCONNECTED: _UP,
    Reason.OTHER: f"the sentence says what is wrong; {_LOOK}",
}
"""What to do about each reason; of several reasons the first one here counts."""
_PHASES: Final = frozenset({Reason.CONNECTING, Reason.REPLAYING})
"""Reasons that are gone after a moment."""


def check_discovery(answer: SourcesAnswer) -> Iterator[Finding]:
    """What ways of discovery could not find, and whether anything is followed at all."""
    told = [(name, sentence) for name, sentences in answer.faults.items() for sentence in sentences]
    for name, sentence in told[:MAX_TOLD]:
        advice = "engines that are not found are not asked; correct it there, or in the service's settings"
        yield fail("discovery", f"{name}: {sentence}", advice)
    if len(told) > MAX_TOLD:
        yield fail("discovery", f"and {len(told) - MAX_TOLD:,} faults more", "see /v1/sources")
    if not answer.sources:
        advice = "register engines (POST /register), or start it with --worker, --engine, --dns or a file of [[sources]]"
        yield warn("discovery", "no engine is registered, so nobody holds anything", advice)
    elif not told:
        instances = {(source.tenant, source.group, source.instance) for source in answer.sources}
        yield ok("discovery", f"{plural(len(answer.sources), 'source')} of {plural(len(instances), 'engine')}")


def check_ranks(sources: Sequence[SourceView]) -> Finding | None:
    """Whether a rank is missing between those that are there; None where nobody has more than one."""
    ranks: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for source in sources:
        ranks[source.tenant, source.group, source.instance].add(source.rank)
    if not any(any(found) for found in ranks.values()):
        return None
    missing = [
        worker(instance, rank, tenant, group)
        for (tenant, group, instance), found in sorted(ranks.items())
        for rank in sorted(set(range(min(max(found), len(found) + MAX_TOLD))) - found)
    ]
    if missing:
        text = f"{some(missing)}: not registered, though later ranks are"
        return warn("ranks", text, "what is cached there is not found: register every rank, or let --engine find them")
    return ok("ranks", "no rank is missing between those that are registered")


def check_trust(sources: Sequence[SourceView], now: float) -> Iterator[Finding]:
    """Which sources are not EXACT, why, since when, and what to do."""
    exact = sum(source.trust.state == "EXACT" for source in sources)
    found = [_doubted(source, now) for source in sources if source.trust.state != "EXACT"]
    yield from _worst_of(found, "trust")
    if exact:
        yield ok("trust", f"{exact:,} of {plural(len(sources), 'source')} EXACT")


def _doubted(source: SourceView, now: float) -> Finding:
    state = source.trust.state
    since = max(now - source.since, 0.0)
    reason = why(source)
    text = f"{_name(source)} is {state} for {duration(since)}{f': {reason}' if reason else ''}"
    codes = set(source.trust.reason_codes)
    if state != "DEGRADED":
        codes.discard(Reason.REPLAY_UNPROVEN)  # it is so of every stream that still connects or catches up
    known = [advice for code, advice in _ADVICE.items() if code in codes]
    if state in {"CONNECTING", "REPLAYING"} and since <= PATIENCE_SECONDS and source.fault is None and codes <= _PHASES:
        return warn("trust", text, "give it a moment, and look again")
    if state == "DEGRADED" and codes == {Reason.REPLAY_UNPROVEN} and source.batches == source.replayed:
        return ok("trust", text, _IDLE)
    found = fail if state in {"CONNECTING", "STALE"} else warn
    advice = known[0] if known else _UP
    return found("trust", text, advice.format(endpoint=source.endpoint))


def _name(source: SourceView) -> str:
    return worker(source.instance, source.rank, source.tenant, source.group)


_WORST_FIRST: Final = (Verdict.FAIL, Verdict.WARN, Verdict.OK)


def _worst_of(found: Sequence[Finding], check: str) -> Iterator[Finding]:
    """The worst findings, and how many more there are."""
    ordered = sorted(found, key=lambda finding: _WORST_FIRST.index(finding.verdict))
    yield from ordered[:MAX_TOLD]
    if rest := ordered[MAX_TOLD:]:
        text = f"and {plural(len(rest), 'source')} more"
        yield Finding(check, rest[0].verdict, text, "see `kvevents top`")


def check_block_sizes(sources: Sequence[SourceView]) -> Finding | None:
    """Whether blocks are as large as was promised; None before the first block."""
    sizes = sorted({size for source in sources for size in source.block_sizes})
    if not sizes:
        return None
    declared = [source for source in sources if source.block_sizes and source.declared_block_size is not None]
    wrong = [source for source in declared if set(source.block_sizes) != {source.declared_block_size}]
    if not wrong:
        told = "as declared" if declared else "nobody declared any"
        return ok("blocks", f"blocks of {' and '.join(map(str, sizes))} tokens, {told}")
    pairs = [(_name(source), source.declared_block_size, ", ".join(map(str, source.block_sizes))) for source in wrong]
    text = some([f"{name} is declared with {promised} and sends {sent}" for name, promised, sent in pairs])
    return fail("blocks", f"tokens per block: {text}", "register them with the size that they have; routers cut prompts by it")


def check_lag(sources: Sequence[SourceView]) -> Finding | None:
    """How old news was when it came; None before the first live batch."""
    lags = {_name(source): source.lag_seconds for source in sources if source.lag_seconds is not None}
    if not lags:
        return None
    ahead = {name: -lag for name, lag in lags.items() if lag < -LATE_SECONDS}
    late = {name: lag for name, lag in lags.items() if lag > LATE_SECONDS}
    if ahead:
        text = f"clocks are ahead of the service's: {_largest(ahead)}"
        return warn("lag", text, "synchronise the clocks (chrony, ntpd): lag cannot be told otherwise")
    if late:
        advice = (
            "is the service short of CPU, the network slow, or that clock behind? `kvevents top --sort lag` shows if it grows"
        )
        return warn("lag", f"the newest batch was late: {_largest(late)}", advice)
    return ok("lag", f"the newest batches came within {1000 * max(0.0, *lags.values()):,.0f} ms")


def _largest(seconds: dict[str, float]) -> str:
    return some([f"{name} by {duration(seconds[name])}" for name in sorted(seconds, key=lambda name: -seconds[name])])


def check_traffic(sources: Sequence[SourceView], now: float) -> Iterator[Finding]:
    """Who says nothing: never, or for long."""
    following = [source for source in sources if source.trust.state in {"EXACT", "DEGRADED"}]
    ages = {_name(source): now - source.last_event for source in following if source.last_event is not None}
    never = [name for source in following if (name := _name(source)) not in ages and not source.blocks]
    silent = [f"{name} for {duration(age)}" for name, age in ages.items() if age > SILENT_SECONDS]
    if never:
        advice = (
            "idle engines announce nothing: send them requests; if nothing comes, are KV events and prefix caching enabled?"
        )
        yield warn("traffic", f"nothing ever came from {some(never)}", advice)
    if silent:
        yield warn("traffic", f"silent: {some(silent)}", "an idle engine announces nothing; does it still get requests?")
    if following and not never and not silent:
        newest = f"; the newest batch came {duration(max(min(ages.values()), 0.0))} ago" if ages else ""
        yield ok("traffic", f"nobody is silent{newest}")


def check_losses(sources: Sequence[SourceView], now: float) -> Iterator[Finding]:
    """What was lost for good of late, of sources without a replay endpoint apart; nothing if nothing ever was."""
    losing = [source for source in sources if source.lost]
    recent = [source for source in losing if any(now - gap.at < RECENT_SECONDS for gap in source.gaps)]
    if losing and not recent:
        yield ok("losses", f"lost for good, none of them within the last hour: {_lost(losing)}")
    mute = [source for source in recent if Reason.NO_REPLAY in source.trust.reason_codes]
    if mute:
        yield warn("losses", f"lost for good, some within the last hour, without a replay endpoint: {_lost(mute)}", _REPLAY)
    rest = [source for source in recent if Reason.NO_REPLAY not in source.trust.reason_codes]
    if rest:
        advice = "a larger buffer_steps in the engine lets replay repair more; is the service or the network stopped at times?"
        yield warn("losses", f"lost for good, some within the last hour: {_lost(rest)}", advice)


def _lost(sources: Sequence[SourceView]) -> str:
    return some([f"{plural(source.lost, 'batch')} of {_name(source)}" for source in sources])


def check_rejected(sources: Sequence[SourceView]) -> Finding | None:
    """Events that could not be read or used; None where there are none."""
    rejecting = [source for source in sources if source.rejected]
    if not rejecting:
        return None
    told = some([f"{_name(source)}: {_reasons(source)}" for source in rejecting])
    advice = f"kvevents doctor {rejecting[0].endpoint} tells who writes like that; this release may not know the engine's yet"
    return warn("decoding", f"events could not be used: {told}", advice)


def _reasons(source: SourceView) -> str:
    return some([f"{reason} ({count:,})" for reason, count in source.rejected.items()])
