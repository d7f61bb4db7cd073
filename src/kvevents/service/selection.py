"""Candidate workers of a prompt, and the choice among them for requests that the data plane does not answer itself.

`native/routing/src/choice.rs` chooses, there and here, and describes the score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.client.reasons import Reason
from kvevents.client.schemas import MAX_NAME_BYTES, Candidate, Selection, SelectRequest, TrustStatus, WorkerMatch
from kvevents.events import TIERS
from kvevents.routing import Ties, Worker
from kvevents.routing.weights import distance_of
from kvevents.service.errors import ConflictError, ServiceError
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.member import Member
from kvevents.service.fleet.registration import Scope
from kvevents_native import _native

MAX_REMEMBERED: Final = 256
"""Maximum number of scopes in the cache, whose names have at most `MAX_NAME_BYTES` characters: clients can send any
LoRA and salt."""


class Candidates(NamedTuple):
    """The members that can hold blocks of a prompt."""

    members: tuple[Member, ...]
    inexact: tuple[Member, ...]
    """The candidates that are not EXACT. The index can miss blocks that they hold."""


class CandidateCache:
    """Finds the candidates of a scope, and caches them until a member is added, removed, or changes its state.

    Any thread may call every method.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet: Final = fleet
        self._view = _View((), (), frozenset())

    def of(self, scope: Scope) -> Candidates:
        """Return the candidates of prompts in a scope."""
        view = self._current()
        found = view.known.get(scope)
        if found is None:
            if len(view.known) >= MAX_REMEMBERED:
                view.known.clear()
            members = tuple(member for member in view.members if member.admits(scope))
            found = Candidates(members, tuple(member for member in members if member.trust_status.state != "EXACT"))
            if all(len(name) <= MAX_NAME_BYTES for name in scope if isinstance(name, str)):
                view.known[scope] = found
        return found

    def resolve(self, scope: Scope) -> Scope:
        """Return the scope of the base model with the LoRA if the model of `scope` is the name of an adapter; else `scope`.

        A model takes precedence over an adapter of the same name. Raises `ConflictError` for an adapter of several models.
        """
        view = self._current()
        if scope[:3] in view.models or scope.lora not in {None, scope.model}:
            return scope
        bases = view.bases.get(scope[:3])
        if not bases:
            return scope
        if len(bases) > 1:
            raise ConflictError(
                f"{scope.model!r} is an adapter of {len(bases)} models: {', '.join(sorted(bases)[:8])}",
                "ambiguous-adapter",
                "name one of them as the model, and the adapter as lora_name",
            )
        return scope._replace(model=next(iter(bases)), lora=scope.model)

    def _current(self) -> _View:
        """Return the current view; build another one after a change."""
        adapters = self._fleet.adapters
        # Read before the members, so that older members are never cached under a newer version.
        version = (self._fleet.version, self._fleet.state_version, adapters)
        view = self._view
        if view.version != version:
            self._view = view = _View(version, list(self._fleet.workers.values()), adapters)
        return view


class _View:
    """The members at one time, and the candidates that were found among them."""

    def __init__(self, version: tuple[Any, ...], members: Iterable[Member], adapters: frozenset[Scope]) -> None:
        self.version: Final = version
        self.members: Final = tuple(members)
        self.known: Final[dict[Scope, Candidates]] = {}
        scopes = {member.registration.scope for member in self.members}
        self.models: Final = {scope[:3] for scope in scopes}
        """Served models, with tenant and group."""
        self.bases: Final[dict[tuple[str, str, str], set[str]]] = {}
        """The base models of adapters, by the adapter's name, tenant and group."""
        for scope in {*scopes, *adapters}:
            if isinstance(scope.lora, str) and scope[:3] in self.models:
                self.bases.setdefault((scope.lora, scope.tenant, scope.group), set()).add(scope.model)


class Standing(NamedTuple):
    """The state of a worker that the choice considers beside its blocks."""

    trust: TrustStatus
    """The trust in its stream."""
    distance: int
    """How unlikely it is to accept a request, as `kvevents.routing.weights` defines it."""
    source: str | None = None
    """Name of its stream, by which the load of its engine is known; None if it is not followed."""
    stores_only: tuple[str, ...] = ()
    """Tiers from which its engine announces no removals."""
    match_trust: TrustStatus | None = None
    """The trust in what it holds of the prompt; None if that is `trust`."""

    @classmethod
    def of_member(cls, member: Member) -> Standing:
        """Build the state for a followed worker."""
        registration = member.registration
        return cls(member.trust_status, member.distance, registration.key[0], registration.stores_only)

    @classmethod
    def of(cls, trust: TrustStatus) -> Standing:
        """Build the state for a worker of which only the trust is known."""
        return cls(trust, distance_of(trust.state))


_UNFOLLOWED: Final = Standing(
    TrustStatus("STALE", "this service does not follow it", (Reason.NOT_FOLLOWED,)), distance_of("CONNECTING")
)
"""The state of a worker that is not followed. Followed workers are preferred."""
_DEFAULT: Final = SelectRequest(model="any", tokens=[])
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Selection).decode


class SelectError(ServiceError):
    """The candidates of a request are missing or invalid."""


def select(
    request: SelectRequest,
    candidates: Sequence[Candidate],
    held: Mapping[Worker, WorkerMatch],
    standings: Mapping[Worker, Standing],
    ties: Ties,
    loads: _native.EngineLoads,
) -> Selection:
    """Return the candidate with the smallest score, and the terms of the score.

    `candidates` are those of the request, or all workers of its model. `held` is the result of the index for the prompt.
    `standings` has every followed worker; the matches of other workers do not count. Tiers and states that the request does not
    weigh have the weights that they have by default, and unknown tiers the lowest of all. `loads` count if the request gives
    none. Raises `SelectError` without
    candidates, for one that is named twice, and for a load that is not finite.
    """
    _check(request, candidates)
    question = {
        "scope": [name or "" for name in (request.tenant, request.group, request.model)],
        "prompt_tokens": len(request.tokens),
        "tie": request.tie,
        "explain": request.explain,
        "ignores_cache": request.ignores_cache,
        "terms": terms_of(request),
        "candidates": [_candidate(one, held, standings) for one in candidates],
    }
    return _decode(_native.select(_encode(question), ties, loads))


def terms_of(request: SelectRequest = _DEFAULT) -> Mapping[str, Any]:
    """Return the weights of tiers, trust and loads for a request; without one the defaults."""
    return {
        "tiers": _DEFAULT.tiers | request.tiers,
        "trust": _DEFAULT.trust | request.trust,
        "wait_weight": request.wait_weight,
        "load_weight": request.load_weight,
    }


def _candidate(one: Candidate, held: Mapping[Worker, WorkerMatch], standings: Mapping[Worker, Standing]) -> Mapping[str, Any]:
    worker = (one.instance, one.rank)
    hit, standing = held.get(worker), standings.get(worker, _UNFOLLOWED)
    return {
        "instance": one.instance,
        "rank": one.rank,
        "source": standing.source,
        "load": one.load,
        "stores_only": standing.stores_only,
        "trust": standing.match_trust or standing.trust,
        "state": standing.trust.state,
        "distance": standing.distance,
        "tokens": 0 if hit is None else hit.tokens,
        "certain": 0 if hit is None else hit.certain,
        "tiers": None if hit is None else [hit.tiers.get(tier, 0) for tier in TIERS],
    }


def _check(request: SelectRequest, candidates: Sequence[Candidate]) -> None:
    if not candidates:
        hint = "name some in `candidates`, or register engines that serve it"
        raise SelectError(f"no candidate for model {request.model!r}", "no-candidates", hint)
    seen: set[Worker] = set()
    for one in candidates:
        if (one.instance, one.rank) in seen:
            raise SelectError(f"{_label(one)} is named twice", "duplicate-candidate", "name each worker once")
        if one.load is not None and not math.isfinite(one.load):
            raise SelectError(f"the load of {_label(one)} is {one.load}", "bad-load", "send a finite number")
        seen.add((one.instance, one.rank))


def _label(candidate: Candidate) -> str:
    return f"{candidate.instance!r} rank {candidate.rank}"
