"""Which worker should take a prompt, where the question was not answered by the data plane itself.

`native/server/src/select.rs` chooses, there and here, and says by what theory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvevents import _native
from kvevents.routing import Ties, Worker
from kvevents.service.errors import ServiceError
from kvevents.service.reasons import Reason
from kvevents.service.shapes import Candidate, Held, Selected, SelectRequest, Trusted
from kvevents.weights import TIERS, distance_of


class Standing(NamedTuple):
    """What a choice needs to know of a worker beside what it holds."""

    trust: Trusted
    distance: int
    """How far it is from taking a request, as `kvevents.weights` counts."""

    @classmethod
    def of(cls, trust: Trusted) -> Standing:
        """Of a worker of which no more than its trust is known."""
        return cls(trust, distance_of(trust.state))


_UNFOLLOWED: Final = Standing(
    Trusted("STALE", "this service does not follow it", (Reason.NOT_FOLLOWED,)), distance_of("CONNECTING")
)
"""Of a worker that is not followed: nothing speaks against its connection, but one that is followed goes first."""
_DEFAULT: Final = SelectRequest(model="any", tokens=[])
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Selected).decode


class SelectError(ServiceError):
    """The candidates of a request cannot be chosen from."""


def select(
    request: SelectRequest,
    candidates: Sequence[Candidate],
    held: Mapping[Worker, Held],
    standings: Mapping[Worker, Standing],
    ties: Ties,
) -> Selected:
    """The candidate with the smallest score, and why.

    `candidates` are those of the request, or all workers of its model. `held` is what the index found for the prompt.
    `standings` has every worker that is followed; others are believed nothing. Tiers and states that the request does not
    weigh have the weights that they have by default, and unknown tiers the lowest of all. Raises `SelectError` without
    candidates, for one that is named twice, and for a load that is not finite.
    """
    _check(request, candidates)
    question = {
        "scope": [name or "" for name in (request.tenant, request.group, request.model)],
        "prompt_tokens": len(request.tokens),
        "tie": request.tie,
        "explain": request.explain,
        "terms": terms_of(request),
        "candidates": [_candidate(one, held, standings) for one in candidates],
    }
    return _decode(_native.select(_encode(question), ties))


def terms_of(request: SelectRequest = _DEFAULT) -> Mapping[str, Any]:
    """What tiers, trust and loads are worth for a request, or by default."""
    return {
        "tiers": _DEFAULT.tiers | request.tiers,
        "trust": _DEFAULT.trust | request.trust,
        "load_weight": request.load_weight,
    }


def _candidate(one: Candidate, held: Mapping[Worker, Held], standings: Mapping[Worker, Standing]) -> Mapping[str, Any]:
    worker = (one.instance, one.rank)
    hit, standing = held.get(worker), standings.get(worker, _UNFOLLOWED)
    return {
        "instance": one.instance,
        "rank": one.rank,
        "load": one.load,
        "trust": standing.trust,
        "distance": standing.distance,
        "tokens": 0 if hit is None else hit.tokens,
        "tiers": None if hit is None else [hit.tiers.get(tier, 0) for tier in TIERS],
    }


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
