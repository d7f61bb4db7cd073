"""Which worker should take a prompt.

Theory of operation. A candidate's score is the share of the prompt that it must compute, 0 to 1, plus `load_weight` times its
load over the mean load. Both are pure numbers, so that neither the length of a prompt nor the unit of load matters, and in a
fleet without load caches alone decide. Of equal scores the one that computes less is taken, since work that is not done helps
everybody. Those that are equal in that too take turns; each process begins at a random place, so that many routers do not send
to one worker at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from random import Random
from typing import Final, TypeAlias

from kvevents.service.errors import ServiceError
from kvevents.service.shapes import Candidate, Considered, Held, Selected, SelectRequest, Trusted

Worker: TypeAlias = tuple[str, int]
"""Instance and rank."""

EQUAL: Final = 1e-9
"""Scores and shares that are no further apart are equal: sums of floats of the same worth differ by less."""
MAX_TURNS: Final = 16_384
"""Workers whose last turn is remembered, 200 bytes each at most: four times as many as a service follows by default."""
_STRANGE: Final = Trusted("STALE", "this service does not follow it")
_NOTHING: Final = Held(instance="", rank=0, tokens=0, tiers={}, trust=_STRANGE)
_DEFAULT: Final = SelectRequest(model="any", tokens=[])


class SelectError(ServiceError):
    """The candidates of a request cannot be chosen from."""


class Turns:
    """Who comes next of equal workers. One for each process; of one thread."""

    def __init__(self, random: Random | None = None, max_workers: int = MAX_TURNS) -> None:
        self._random = random or Random()  # noqa: S311 - spreads load, keeps no secret
        self._start = self._random.random()
        self._max_workers = max_workers
        self._number = 0
        self._last: dict[int, int] = {}

    def pick(self, how: str, scope: Hashable, equal: Sequence[Worker]) -> int:
        """Place of the one to take; `how` as `SelectRequest.tie` has it. `scope` is what keeps workers of one name apart."""
        return _TIES[how](self, scope, equal) if len(equal) > 1 else 0

    def took(self, scope: Hashable, worker: Worker) -> None:
        """A worker was chosen, whatever for: of equal ones it is the last to come next."""
        key = hash((scope, worker))  # the names themselves are as long as a client likes
        self._number += 1
        self._last.pop(key, None)
        self._last[key] = self._number
        if len(self._last) > self._max_workers:
            del self._last[next(iter(self._last))]

    def _rotate(self, scope: Hashable, equal: Sequence[Worker]) -> int:
        """The one chosen longest ago; of those that never were, the next from a random place on."""
        start = int(self._start * len(equal))

        def waited(place: int) -> tuple[int, int]:
            return self._last.get(hash((scope, equal[place])), 0), (place - start) % len(equal)

        return min(range(len(equal)), key=waited)

    def _draw(self, _: Hashable, equal: Sequence[Worker]) -> int:
        return self._random.randrange(len(equal))

    def _first(self, _: Hashable, __: Sequence[Worker]) -> int:
        return 0


_TIES: Final[dict[str, Callable[[Turns, Hashable, Sequence[Worker]], int]]] = {
    "rotate": Turns._rotate,  # noqa: SLF001 - a table of its own methods
    "random": Turns._draw,  # noqa: SLF001
    "first": Turns._first,  # noqa: SLF001
}


def select(
    request: SelectRequest,
    candidates: Sequence[Candidate],
    held: Mapping[Worker, Held],
    trust: Mapping[Worker, Trusted],
    turns: Turns,
) -> Selected:
    """The candidate with the smallest score, and why.

    `candidates` are those of the request, or all workers of its model. `held` is what the index found for the prompt. `trust`
    tells of every worker that is followed; others are believed nothing. Tiers and states that the request does not weigh have
    the weights that they have by default, and unknown tiers the lowest of all. Raises `SelectError` without candidates, for one
    that is named twice, and for a load that is not finite.
    """
    _check(request, candidates)
    considered = _consider(request, candidates, held, trust)
    equal = _best(considered)
    scope = (request.tenant, request.group, request.model)
    chosen = equal[turns.pick(request.tie, scope, [(one.instance, one.rank) for one in equal])]
    turns.took(scope, (chosen.instance, chosen.rank))
    return Selected(
        instance=chosen.instance,
        rank=chosen.rank,
        score=chosen.score,
        why=_why(request, chosen, len(candidates), len(equal)),
        considered=_ordered(considered, chosen) if request.explain else None,
    )


def _check(request: SelectRequest, candidates: Sequence[Candidate]) -> None:
    if not candidates:
        hint = "name some in `candidates`, or register engines that serve it"
        raise SelectError(f"there is no candidate for model {request.model!r}", "no-candidates", hint)
    seen: set[Worker] = set()
    for one in candidates:
        label = f"{one.instance!r} rank {one.rank}"
        if (one.instance, one.rank) in seen:
            raise SelectError(f"{label} is named twice", "duplicate-candidate", "name each worker once")
        if not math.isfinite(one.load):
            raise SelectError(f"the load of {label} is {one.load}", "bad-load", "send a finite number")
        seen.add((one.instance, one.rank))


def _consider(
    request: SelectRequest, candidates: Sequence[Candidate], held: Mapping[Worker, Held], trust: Mapping[Worker, Trusted]
) -> list[Considered]:
    tiers, belief = _DEFAULT.tiers | request.tiers, _DEFAULT.trust | request.trust
    lowest, whole = min(tiers.values()), len(request.tokens)
    found: list[Considered] = []
    for one, load in zip(candidates, _relative_loads(candidates), strict=True):
        worker = (one.instance, one.rank)
        hit, trusted = held.get(worker, _NOTHING), trust.get(worker, _STRANGE)
        uncached = 1.0 - belief[trusted.state] * (_saved(hit, tiers, lowest, whole) if hit.tokens else 0.0)
        weighted = request.load_weight * load
        found.append(
            Considered(
                instance=one.instance,
                rank=one.rank,
                score=uncached + weighted,
                uncached=uncached,
                load=weighted,
                tokens=hit.tokens,
                tiers=hit.tiers,
                trust=trusted,
            )
        )
    return found


def _relative_loads(candidates: Sequence[Candidate]) -> list[float]:
    """Loads over their mean; all 0 without any load. The largest is taken out first, so that no sum overflows."""
    most = max(one.load for one in candidates)
    if most == 0:
        return [0.0] * len(candidates)
    shares = [one.load / most for one in candidates]
    mean = math.fsum(shares) / len(shares)
    return [share / mean for share in shares]


def _saved(hit: Held, weights: Mapping[str, float], lowest: float, whole: int) -> float:
    """The share of a prompt that its cached tokens are worth, 0 to 1; an empty prompt saves nothing.

    Lengths are cumulative, so that `cpu` reaches as far as `gpu` or further: each token counts for the best tier that reaches
    it.
    """
    reach = [(min(tokens, whole), weights.get(tier, lowest)) for tier, tokens in hit.tiers.items()]
    reach.append((min(hit.tokens, whole), lowest))
    saved, best, end = 0.0, 0.0, whole
    for tokens, weight in sorted(reach, reverse=True):
        saved += best * (end - tokens)
        best, end = max(best, weight), tokens
    return (saved + best * end) / max(whole, 1)


def _best(considered: Sequence[Considered]) -> list[Considered]:
    """Those with the smallest score, and of them those that compute least, in the order given."""
    score = min(one.score for one in considered) + EQUAL
    equal = [one for one in considered if one.score <= score]
    uncached = min(one.uncached for one in equal) + EQUAL
    return [one for one in equal if one.uncached <= uncached]


def _ordered(considered: Sequence[Considered], chosen: Considered) -> list[Considered]:
    return sorted(considered, key=lambda one: (one is not chosen, one.score, one.uncached, one.instance, one.rank))


def _why(request: SelectRequest, chosen: Considered, candidates: int, equal: int) -> str:
    tiers = ", ".join(f"{tokens:,} down to {tier}" for tier, tokens in chosen.tiers.items() if tokens)
    reason = f" ({chosen.trust.reason})" if chosen.trust.reason else ""
    among = f"the best of {candidates}" if equal == 1 else f"of {equal} equally good ones taken {_WAYS[request.tie]}"
    return (
        f"{chosen.instance} rank {chosen.rank} is {chosen.trust.state}{reason}, holds {chosen.tokens:,} of "
        f"{len(request.tokens):,} tokens{f' ({tiers})' if tiers else ''}, must compute {chosen.uncached:.0%}, "
        f"and its load counts {chosen.load:.2f}: score {chosen.score:.3f}, {among}."
    )


_WAYS: Final = {"rotate": "in turn", "random": "by chance", "first": "as the first"}
