"""One sentence that says what was seen, and how figures are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvevents.routing import POLICIES
from kvevents.sim.results import Comparison, Distribution, PolicyResult

_SUBJECT = "prefix-aware"
"""What the sentence is about, if it ran."""
_OTHER = "round-robin"
"""What it is compared with, if it ran."""
NOISE: Final = 0.05
"""Shares by which times differ without a meaning: played one or two per cent faster or slower, the packaged sample has a TTFT
p90 that differs by 3.5 %."""
_TIMES: Final[tuple[tuple[str, Callable[[Distribution], float]], ...]] = (
    ("p90", lambda ttft: ttft.p90),
    ("mean", lambda ttft: ttft.mean),
)
"""What a policy that asks the index must make shorter to be worth its events: TTFT of most requests, or on average."""


def visible(text: str) -> str:
    """The text, with what would not be seen spelled out."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def percent(share: float) -> str:
    """`41.0%`, of a share from 0 to 1."""
    return f"{100 * share:.1f}%"


def span(seconds: float) -> str:
    """`4 ms`, `0.80 s`, `12.3 s`."""
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


def seen(comparison: Comparison) -> str:
    """What was seen, in one sentence without a full stop; right for one policy, for no answers and for disagreements."""
    results = comparison.policies
    answered = [result for result in results if result.ttft is not None and result.finished]
    if not answered:
        said = [_unanswered(results)]
    else:
        subject = _named(_SUBJECT, answered) or max(answered, key=_hits)
        rest = [result for result in answered if result is not subject]
        other = _named(_OTHER, rest) or min(rest, key=_hits, default=None)
        said = [_found(subject, other, rest), _waited(subject, other, rest), _worth(subject, rest), _refused(results)]
    return "; ".join(part for part in (*said, _audited(results)) if part)


def _hits(result: PolicyResult) -> float:
    return result.hit_rate


def _p90(result: PolicyResult) -> float:
    return _ttft(result, lambda ttft: ttft.p90)


def _named(name: str, results: Sequence[PolicyResult]) -> PolicyResult | None:
    return next((result for result in results if result.policy == name), None)


def _unanswered(results: Sequence[PolicyResult]) -> str:
    if not any(result.requests for result in results):
        return "nothing was asked"
    return "; ".join(part for part in ("no request was answered", _refused(results)) if part)


def _found(subject: PolicyResult, other: PolicyResult | None, rest: Sequence[PolicyResult]) -> str:
    said = f"{subject.policy} found {percent(subject.hit_rate)} of prompt tokens in caches"
    if other is not None:
        said += f", {other.policy} {percent(other.hit_rate)}"
    best = max(rest, key=_hits, default=subject)
    if best is not other and percent(best.hit_rate) != percent(subject.hit_rate) and best.hit_rate > subject.hit_rate:
        said += f" ({best.policy} the most, {percent(best.hit_rate)})"
    return said


def _waited(subject: PolicyResult, other: PolicyResult | None, rest: Sequence[PolicyResult]) -> str:
    mine = span(_p90(subject))
    said = f"its TTFT p90 was {mine}"
    if other is not None:
        said += f" against {span(_p90(other))}"
    best = min(rest, key=_p90, default=subject)
    if best is not other and span(_p90(best)) != mine and _p90(best) < _p90(subject):
        said += f" ({best.policy} the least, {span(_p90(best))})"
    return said


def _worth(subject: PolicyResult, rest: Sequence[PolicyResult]) -> str:
    """What the index is worth: the TTFT of a policy that asks it beside the shortest of those that need no events."""
    rivals = [result for result in rest if not _uses_index(result)]
    if not rivals or not _uses_index(subject):
        return ""
    shares = []
    for name, figure in _TIMES:
        rival = min(rivals, key=lambda result: _ttft(result, figure))
        shortest = _ttft(rival, figure)
        shares.append((1 - _ttft(subject, figure) / shortest if shortest else 0.0, name, rival.policy))
    share, name, policy = max(shares)
    if share >= NOISE:
        return f"routing by cache made the TTFT {name} {share:.0%} shorter than {policy}, the best policy without events"
    best = shares[0][2]
    if share > -NOISE:
        return (
            f"routing by cache is worth nothing here: with {best}, which needs no events, TTFT is within {NOISE:.0%} or shorter"
        )
    return f"routing by cache is worth nothing here: with {best}, which needs no events, TTFT is shorter"


def _uses_index(result: PolicyResult) -> bool:
    return result.policy in POLICIES and POLICIES[result.policy]().uses_index


def _ttft(result: PolicyResult, figure: Callable[[Distribution], float]) -> float:
    assert result.ttft is not None  # noqa: S101 - it has answers
    return figure(result.ttft)


def _refused(results: Sequence[PolicyResult]) -> str:
    most = max((result.refused for result in results), default=0)
    return f"{most:,} request{' was' if most == 1 else 's were'} refused, longer than a whole cache" if most else ""


def _audited(results: Sequence[PolicyResult]) -> str:
    checked, wrong, unproven = (
        sum(getattr(result, name) for result in results) for name in ("checked", "disagreements", "unproven")
    )
    lookups = "lookup" if checked == 1 else "lookups"
    rest = f", {unproven:,} could not be compared" if unproven else ""
    if wrong:
        return f"index and engines DISAGREED on {wrong:,} of {checked:,} {lookups}, which is a fault of the chain{rest}"
    if checked:
        return f"index and engines agreed on {'its only' if checked == 1 else f'all {checked:,}'} {lookups}{rest}"
    return "no lookup was compared with the index" if any(result.requests for result in results) else ""
