"""The summary of a comparison in one sentence, and the formats of its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvevents.routing import POLICIES
from kvevents.sim.results import Comparison, Distribution, PolicyResult

_SUBJECT = "prefix-aware"
"""Policy that the summary describes, if it ran."""
_OTHER = "round-robin"
"""Policy with which it is compared, if it ran."""
NOISE: Final = 0.05
"""Relative difference of times that is noise: if the packaged sample runs one or two per cent faster or slower, the TTFT p90
changes by 3.5 %."""
_TIMES: Final[tuple[tuple[str, Callable[[Distribution], float]], ...]] = (
    ("p90", lambda ttft: ttft.p90),
    ("mean", lambda ttft: ttft.mean),
)
"""Figures of the TTFT by which a policy that uses the index is compared with those that do not: it must improve one of them."""


def visible(text: str) -> str:
    """Return the text with unprintable characters as escape sequences."""
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def percent(share: float) -> str:
    """Return a share from 0 to 1 as text such as `41.0%`."""
    return f"{100 * share:.1f}%"


def span(seconds: float) -> str:
    """Return a duration as text such as `4 ms`, `0.80 s` or `12.3 s`."""
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


def summary(comparison: Comparison) -> str:
    """Return the results in one sentence without a full stop. It also covers one policy, no answers and disagreements."""
    results = comparison.policies
    answered = [result for result in results if result.ttft is not None and result.finished]
    if not answered:
        text = [_without_answers_text(results)]
    else:
        subject = _policy_named(_SUBJECT, answered) or max(answered, key=_hits)
        rest = [result for result in answered if result is not subject]
        other = _policy_named(_OTHER, rest) or min(rest, key=_hits, default=None)
        text = [
            _hit_rate_text(subject, other, rest),
            _ttft_text(subject, other, rest),
            _benefit(subject, rest),
            _refused_text(results),
        ]
    return "; ".join(part for part in (*text, _audit_text(results)) if part)


def _hits(result: PolicyResult) -> float:
    return result.hit_rate


def _p90(result: PolicyResult) -> float:
    return _ttft(result, lambda ttft: ttft.p90)


def _policy_named(name: str, results: Sequence[PolicyResult]) -> PolicyResult | None:
    return next((result for result in results if result.policy == name), None)


def _without_answers_text(results: Sequence[PolicyResult]) -> str:
    if not any(result.requests for result in results):
        return "no request was sent"
    return "; ".join(part for part in ("no request was answered", _refused_text(results)) if part)


def _hit_rate_text(subject: PolicyResult, other: PolicyResult | None, rest: Sequence[PolicyResult]) -> str:
    text = f"{subject.policy} found {percent(subject.hit_rate)} of prompt tokens in caches"
    if other is not None:
        text += f", {other.policy} {percent(other.hit_rate)}"
    best = max(rest, key=_hits, default=subject)
    if best is not other and percent(best.hit_rate) != percent(subject.hit_rate) and best.hit_rate > subject.hit_rate:
        text += f" ({best.policy} the most, {percent(best.hit_rate)})"
    return text


def _ttft_text(subject: PolicyResult, other: PolicyResult | None, rest: Sequence[PolicyResult]) -> str:
    mine = span(_p90(subject))
    text = f"its TTFT p90 was {mine}"
    if other is not None:
        text += f" against {span(_p90(other))}"
    best = min(rest, key=_p90, default=subject)
    if best is not other and span(_p90(best)) != mine and _p90(best) < _p90(subject):
        text += f" ({best.policy} the least, {span(_p90(best))})"
    return text


def _benefit(subject: PolicyResult, rest: Sequence[PolicyResult]) -> str:
    """Compare the TTFT of a policy that uses the index with the shortest TTFT of those that need no events."""
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


def _refused_text(results: Sequence[PolicyResult]) -> str:
    most = max((result.refused for result in results), default=0)
    return f"{most:,} request{' was' if most == 1 else 's were'} refused, longer than a whole cache" if most else ""


def _audit_text(results: Sequence[PolicyResult]) -> str:
    checked, wrong, unproven = (
        sum(getattr(result, name) for result in results) for name in ("checked", "disagreements", "unproven")
    )
    lookups = "lookup" if checked == 1 else "lookups"
    rest = f", {unproven:,} could not be compared" if unproven else ""
    if wrong:
        return f"index and engines DISAGREED on {wrong:,} of {checked:,} {lookups}, which is a defect{rest}"
    if checked:
        return f"index and engines agreed on {'its only' if checked == 1 else f'all {checked:,}'} {lookups}{rest}"
    return "no lookup was compared with the index" if any(result.requests for result in results) else ""
