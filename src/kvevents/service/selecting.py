"""Which worker should take a prompt.

Theory of operation. Candidates without a connection are left out while another one has one: a worker that is STALE, or where
nothing listens, takes a prompt only if there is no other. The score of each of the rest is the share of the prompt that it
must compute, 0 to 1, plus `load_weight` times its load over the mean load. Both are pure numbers, so that neither the length
of a prompt nor the unit of load matters, and in a fleet without load caches alone decide. Of equal scores the one that
computes less is taken, since work that is not done helps everybody. Those that are equal in that too take turns; each process
begins at a random place, so that many routers do not send to one worker at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvevents.routing.choice import Worker, describe_tiers
from kvevents.routing.scoring import TierWeights, best_of, distance_of, nearest, relative_loads
from kvevents.routing.turns import Turns
from kvevents.service.errors import ServiceError
from kvevents.service.reasons import Reason
from kvevents.service.shapes import Candidate, Considered, Held, Selected, SelectRequest, Trusted, WorkerTrust


class Standing(NamedTuple):
    """What a choice needs to know of a worker beside what it holds."""

    trust: Trusted
    distance: int
    """How far it is from taking a request, as `kvevents.routing.scoring` counts."""

    @classmethod
    def of(cls, trust: Trusted) -> Standing:
        """Of a worker of which no more than its trust is known."""
        return cls(trust, distance_of(trust.state))


_UNFOLLOWED: Final = Standing(
    Trusted("STALE", "this service does not follow it", (Reason.NOT_FOLLOWED,)), distance_of("CONNECTING")
)
"""Of a worker that is not followed: nothing speaks against its connection, but one that is followed goes first."""
_NOTHING: Final = Held(instance="", rank=0, tokens=0, tiers={}, trust=_UNFOLLOWED.trust)
_DEFAULT: Final = SelectRequest(model="any", tokens=[])


class SelectError(ServiceError):
    """The candidates of a request cannot be chosen from."""


def select(
    request: SelectRequest,
    candidates: Sequence[Candidate],
    held: Mapping[Worker, Held],
    standings: Mapping[Worker, Standing],
    turns: Turns,
) -> Selected:
    """The candidate with the smallest score, and why.

    `candidates` are those of the request, or all workers of its model. `held` is what the index found for the prompt.
    `standings` has every worker that is followed; others are believed nothing. Tiers and states that the request does not
    weigh have the weights that they have by default, and unknown tiers the lowest of all. Raises `SelectError` without
    candidates, for one that is named twice, and for a load that is not finite.
    """
    _check(request, candidates)
    reachable = nearest(candidates, [standings.get((one.instance, one.rank), _UNFOLLOWED).distance for one in candidates])
    considered = _consider(request, reachable, held, standings)
    equal = best_of(considered)
    scope = (request.tenant, request.group, request.model)
    chosen = equal[turns.pick(request.tie, scope, [(one.instance, one.rank) for one in equal])]
    turns.took(scope, (chosen.instance, chosen.rank))
    return Selected(
        instance=chosen.instance,
        rank=chosen.rank,
        score=chosen.score,
        trust=chosen.trust,
        why=_why(request, chosen, len(reachable), len(equal), len(candidates) - len(reachable)),
        considered=_ordered(considered, chosen) if request.explain else None,
        unreachable=_left_out(candidates, reachable, standings) if request.explain else None,
    )


def _check(request: SelectRequest, candidates: Sequence[Candidate]) -> None:
    if not candidates:
        hint = "name some in `candidates`, or register engines that serve it"
        raise SelectError(f"there is no candidate for model {request.model!r}", "no-candidates", hint)
    seen: set[Worker] = set()
    for one in candidates:
        if (one.instance, one.rank) in seen:
            raise SelectError(f"{_label(one)} is named twice", "duplicate-candidate", "name each worker once")
        if not math.isfinite(one.load):
            raise SelectError(f"the load of {_label(one)} is {one.load}", "bad-load", "send a finite number")
        seen.add((one.instance, one.rank))


def _label(candidate: Candidate) -> str:
    return f"{candidate.instance!r} rank {candidate.rank}"


def _consider(
    request: SelectRequest, candidates: Sequence[Candidate], held: Mapping[Worker, Held], standings: Mapping[Worker, Standing]
) -> list[Considered]:
    tiers, belief = _DEFAULT.tiers | request.tiers, _DEFAULT.trust | request.trust
    weights, whole = TierWeights(tiers), len(request.tokens)
    found: list[Considered] = []
    for one, load in zip(candidates, relative_loads([one.load for one in candidates]), strict=True):
        worker = (one.instance, one.rank)
        hit, trusted = held.get(worker, _NOTHING), standings.get(worker, _UNFOLLOWED).trust
        uncached = 1.0 - belief[trusted.state] * (weights.saved(hit.tokens, hit.tiers, whole) if hit.tokens else 0.0)
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


def _ordered(considered: Sequence[Considered], chosen: Considered) -> list[Considered]:
    return sorted(considered, key=lambda one: (one is not chosen, one.score, one.uncached, one.instance, one.rank))


def _left_out(
    candidates: Sequence[Candidate], reachable: Sequence[Candidate], standings: Mapping[Worker, Standing]
) -> list[WorkerTrust]:
    scored = {(one.instance, one.rank) for one in reachable}
    return [
        WorkerTrust(instance=one.instance, rank=one.rank, trust=standings.get((one.instance, one.rank), _UNFOLLOWED).trust)
        for one in candidates
        if (one.instance, one.rank) not in scored
    ]


def _why(request: SelectRequest, chosen: Considered, candidates: int, equal: int, left_out: int) -> str:
    tiers = describe_tiers(chosen.tiers)
    reason = f" ({chosen.trust.reason})" if chosen.trust.reason else ""
    among = f"the best of {candidates}" if equal == 1 else f"of {equal} equally good ones taken {_WAYS[request.tie]}"
    if left_out:
        among += f"; {left_out} without a connection were left out"
    elif distance_of(chosen.trust.state):
        among += "; no candidate is connected"
    return (
        f"{chosen.instance} rank {chosen.rank} is {chosen.trust.state}{reason}, holds {chosen.tokens:,} of "
        f"{len(request.tokens):,} tokens{f' ({tiers})' if tiers else ''}, must compute {chosen.uncached:.0%}, "
        f"and its load counts {chosen.load:.2f}: score {chosen.score:.3f}, {among}."
    )


_WAYS: Final = {"rotate": "in turn", "random": "by chance", "first": "as the first"}
