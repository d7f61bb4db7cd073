"""The choice of `/v1/select` among described candidates: `native/routing/src/choice.rs`, without a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvevents.client.reasons import Reason
from kvevents.client.schemas import Candidate, Selection, SelectRequest, TrustStatus, WorkerMatch
from kvevents.events import TIERS
from kvevents.routing import Ties, Worker
from kvevents.routing.weights import distance_of
from kvevents_native import _native

DEFAULT = SelectRequest(model="any", tokens=[])


class Standing(NamedTuple):
    """The state of a worker that the choice considers beside its blocks."""

    trust: TrustStatus
    distance: int
    source: str | None = None
    stores_only: tuple[str, ...] = ()
    match_trust: TrustStatus | None = None
    obstacle: str = ""

    @classmethod
    def of(cls, trust: TrustStatus) -> Standing:
        """Return the state of a worker of which only the trust is known."""
        return cls(trust, distance_of(trust.state))


UNFOLLOWED = Standing(
    TrustStatus("STALE", "this service does not follow the worker", (Reason.NOT_FOLLOWED,)), distance_of("CONNECTING")
)


def select(
    request: SelectRequest,
    candidates: Sequence[Candidate],
    held: Mapping[Worker, WorkerMatch],
    standings: Mapping[Worker, Standing],
    ties: Ties,
    loads: _native.Loads,
) -> Selection:
    """Return the candidate with the smallest score, and the terms of the score. Others than `standings` are not followed."""
    question = {
        "scope": [name or "" for name in (request.tenant, request.group, request.model)],
        "prompt_tokens": len(request.tokens),
        "tie": request.tie,
        "explain": request.explain,
        "ignores_cache": request.ignores_cache,
        "terms": {
            "tiers": DEFAULT.tiers | request.tiers,
            "trust": DEFAULT.trust | request.trust,
            "wait_weight": request.wait_weight,
            "load_weight": request.load_weight,
        },
        "candidates": [_describe(one, held, standings) for one in candidates],
    }
    return msgspec.msgpack.decode(_native.select(msgspec.msgpack.encode(question), ties, loads), type=Selection)


def _describe(one: Candidate, held: Mapping[Worker, WorkerMatch], standings: Mapping[Worker, Standing]) -> Mapping[str, Any]:
    worker = (one.instance, one.rank)
    hit, standing = held.get(worker), standings.get(worker, UNFOLLOWED)
    return {
        "instance": one.instance,
        "rank": one.rank,
        "source": standing.source,
        "load": one.load,
        "stores_only": standing.stores_only,
        "trust": standing.match_trust or standing.trust,
        "state": standing.trust.state,
        "distance": standing.distance,
        "obstacle": standing.obstacle,
        "tokens": 0 if hit is None else hit.tokens,
        "certain": 0 if hit is None else hit.certain,
        "tiers": None if hit is None else [hit.tiers.get(tier, 0) for tier in TIERS],
    }
