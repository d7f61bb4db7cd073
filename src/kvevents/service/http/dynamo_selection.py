"""The API of Dynamo's selection service (crate `dynamo-kv-router` 1.6.1, `services/selection/server.rs`) for its front ends.

This module translates requests to selections and reservations of `/v1`. Dynamo identifies workers by numbers. The number of an
instance is its name if the name is a number, else a hash of the name. In answers, `endpoint` is the registered `url`, or empty.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import uuid4

import msgspec

from kvevents.client import schemas
from kvevents.routing.policies import max_requests
from kvevents.routing.weights import TRUST_WEIGHTS
from kvevents.service.errors import ConflictError, NotFoundError, RefusedError, ServiceError, UnavailableError
from kvevents.service.fleet.member import Member
from kvevents.service.fleet.registration import Scope
from kvevents.service.http import dynamo_messages as messages
from kvevents.service.http import reservations
from kvevents.service.http.indexer_api import read_hashes
from kvevents.service.http.indexer_listings import id_of, list_members
from kvevents.service.http.messages import HttpRequest, Response, answer
from kvevents.service.http.queries import ask, check_tokens
from kvevents.service.selection_cache import PendingSelection
from kvevents.service.service import Service

Worker: TypeAlias = tuple[str, int]
"""Instance and rank."""

_decode_selection = msgspec.json.Decoder(schemas.Selection).decode  # Built at import, see `build_decoder_now`.
_decode_match = msgspec.json.Decoder(schemas.MatchAnswer).decode
_decode_reservation = msgspec.json.Decoder(schemas.Reservation).decode
_decode_reservations = msgspec.json.Decoder(schemas.ReservationsAnswer).decode


@lru_cache(65_536)
def worker_id(instance: str) -> int:
    """Return the number of a worker: its name if the name is a number, else a hash. A signed number can hold its 63 bits."""
    number = id_of(instance)
    if isinstance(number, int) and number < 1 << 64:
        return number
    return int.from_bytes(blake2b(instance.encode(), digest_size=8).digest(), "big") >> 1


class _HeldTokens(NamedTuple):
    """How many tokens of a prompt a worker holds: on the device, on device and host, and on all tiers."""

    device: int = 0
    host: int = 0
    all: int = 0


_NO_TOKENS: Final = _HeldTokens()


class _Prompt(NamedTuple):
    """A prompt: its length in tokens, and either its token ids or the hashes of its blocks."""

    length: int
    tokens: Any
    hashes: list[int] | None


def _dummy_tokens(count: int) -> memoryview:
    """Return `count` arbitrary token ids, for a selection that only counts token ids (`ignores_cache`)."""
    return memoryview(bytes(4 * count)).cast("I")


def _read_prompt(service: Service, body: messages.PromptRequest, tokens: Any) -> _Prompt:
    if body.mm_routing_info is not None and body.mm_routing_info.routing_token_ids:
        tokens = body.mm_routing_info.routing_token_ids
    if tokens is not None:
        check_tokens(service, len(tokens))
        return _Prompt(len(tokens), array("I", tokens) if isinstance(tokens, list) else tokens, None)
    if body.isl_tokens is None:
        raise RefusedError("token_ids or isl_tokens is missing", "bad-prompt", "send token_ids, or block_hashes and isl_tokens")
    check_tokens(service, body.isl_tokens)
    return _Prompt(body.isl_tokens, None, read_hashes(service, body.block_hashes or []))


def _members_of(service: Service, scope: Scope) -> dict[Worker, Member]:
    return {member.worker: member for member in service.members().values() if member.registration.scope[:3] == scope[:3]}


def _block_size(member: Member | None, default: int = 1) -> int:
    """Return the number of tokens in a worker's block; `default` if `member` is None, 1 if the size is unknown."""
    return default if member is None else next(iter(member.expected_block_sizes), 1)


class _Fleet:
    """The workers of one model, and queries about them."""

    def __init__(self, service: Service, scope: Scope) -> None:
        self.service = service
        self.scope = scope
        self.members = _members_of(service, scope)
        if not self.members:
            raise service.fleet.why_unanswered(scope)
        sizes = {size for member in self.members.values() for size in member.expected_block_sizes}
        self.block_size: int = min(sizes, default=1)

    def workers(self, number: int, rank: int | None = None) -> list[Worker]:
        """Return all ranks of the worker `number`, or only `rank`; empty if the worker is unknown."""
        return [worker for worker in self.members if worker_id(worker[0]) == number and rank in {None, worker[1]}]

    def fields(self, **others: Any) -> dict[str, Any]:
        """Return the fields of a query to `/v1`: the scope, and the values in `others` that are not None."""
        scope_fields = {name: value for name, value in self.scope._asdict().items() if value is not None}
        return scope_fields | {name: value for name, value in others.items() if value is not None}

    def select(self, tokens: Any, workers: Sequence[Worker] | None, **fields: Any) -> schemas.Selection:
        """Return the answer of `/v1/select`. Raises `UnavailableError` if no worker can take the prompt."""
        candidates = None if workers is None else [{"instance": name, "rank": rank} for name, rank in workers]
        try:
            response = ask(self.service, self.scope, "/v1/select", self.fields(candidates=candidates, **fields), tokens)
        except ServiceError as error:
            if error.reason == "no-candidates":
                raise UnavailableError(error.sentence, error.reason, error.hint) from error
            raise
        return _decode_selection(response.body)

    def match(self, prompt: _Prompt) -> dict[Worker, _HeldTokens]:
        """Return how many tokens of a prompt each worker holds."""
        if prompt.hashes is not None:
            return self._match_hashes(prompt.hashes)
        body = ask(self.service, self.scope, "/v1/match", self.fields(), prompt.tokens).body
        workers = _decode_match(body).workers
        return {(worker.instance, worker.rank): _tokens_by_tier(worker.tiers, worker.tokens) for worker in workers}

    def _match_hashes(self, hashes: list[int]) -> dict[Worker, _HeldTokens]:
        """Match hashes of blocks. Per rank, Dynamo's query counts blocks on the device, and Mooncake's query on all tiers."""
        if not hashes:
            return {}
        model, tenant, group = self.scope[:3]
        body = {"tenant": tenant, "group": group, "block_hashes": hashes}

        def query(name: str) -> Any:
            return msgspec.json.decode(ask(self.service, self.scope, "/query_by_hash", {name: model, **body}).body)

        instances, totals = query("model_name")["instances"], query("model")[tenant]
        matches: dict[Worker, _HeldTokens] = {}
        for instance, tiers in instances.items():
            for rank, device in tiers["dp"].items():
                total = max(device, totals.get(instance, {"DP": {}})["DP"].get(rank, 0))
                matches[instance, int(rank)] = _HeldTokens(device, max(device, min(total, tiers["cpu"])), total)
        return matches

    def names_of(self, worker: Worker) -> dict[str, Any]:
        """Return the fields with which answers name a worker, including the URL at which it takes requests."""
        member = self.members.get(worker)
        return {
            "model_name": self.scope.model,
            "routing_group": self.scope.group,
            "worker_id": worker_id(worker[0]),
            "dp_rank": worker[1],
            "endpoint": "" if member is None else member.registration.url or "",
        }

    def block_size_of(self, worker: Worker) -> int:
        """Return the number of tokens in a worker's block."""
        return _block_size(self.members.get(worker), self.block_size)


def _count_blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _tokens_by_tier(tiers: Mapping[str, int], tokens: int) -> _HeldTokens:
    device = tiers.get("gpu", 0)
    host = max(device, tiers.get("cpu", 0))
    return _HeldTokens(device, host, max(host, tokens))


def _fleet_of(service: Service, body: Any) -> _Fleet:
    lora, salt = getattr(body, "lora_name", None), getattr(body, "cache_salt", None)
    return _Fleet(service, Scope(body.model_name, body.tenant_id, body.routing_group, lora or None, salt or None))


# --- selections


_Choice: TypeAlias = tuple[PendingSelection, Mapping[Worker, _HeldTokens]]
"""A selected worker, and how many tokens of the prompt each rank of its instance holds."""


class _Chooser:
    def __init__(self, fleet: _Fleet, body: messages.SelectWorkerRequest, prompt: _Prompt) -> None:
        self._fleet = fleet
        self._body = body
        self._prompt = prompt
        credit = None if body.router_config_override is None else body.router_config_override.overlap_score_credit
        self._ignores_cache = credit == 0
        parts = (taint.partition("=") for taint in body.routing_constraints.required_taints)
        taints = {(name, value or "true") for name, _, value in parts}
        labels = dict(taints)
        if len(labels) < len(taints):
            raise UnavailableError("required_taints has two values of one label", "no-candidates", "a worker has one value")
        self._terms: dict[str, Any] = {
            "labels": labels,
            "session": body.session,
            "explain": True,
        }

    def choose(self, name: str | None = None) -> _Choice:
        """Select a worker that can be reached. If `name` is given, reserve the worker under it. Raises `ServiceError`."""
        target = self._body.affinity_target
        if target is not None:
            targets = self._fleet.workers(target.worker_id, target.dp_rank)
            try:
                return self._choose_from(targets, name)
            except UnavailableError as error:
                if error.reason != "no-candidates":
                    raise
        return self._choose_from(self._candidates(), name)

    def _candidates(self) -> list[Worker] | None:
        allowed_ids, pinned = self._body.allowed_worker_ids, self._body.pinned_worker
        if pinned is not None:
            if allowed_ids is not None and pinned.worker_id not in allowed_ids:
                sentence = f"the pinned worker {pinned.worker_id} is not in allowed_worker_ids"
                raise RefusedError(sentence, "bad-candidates", "omit one of the two")
            return self._fleet.workers(pinned.worker_id, pinned.dp_rank or 0)
        if allowed_ids is None:
            return None
        numbers = set(allowed_ids)
        return [worker for worker in self._fleet.members if worker_id(worker[0]) in numbers]

    def _choose_from(self, workers: list[Worker] | None, name: str | None) -> _Choice:
        if workers is not None and not workers:
            raise UnavailableError("none of the named workers serves the model", "no-candidates", "see GET /ready")
        if self._prompt.tokens is None:
            return self._choose_by_hash(workers, name)
        tokens = self._prompt.tokens
        selection = self._select(tokens, workers, name, ignores_cache=self._ignores_cache)
        matches = {
            (candidate.instance, candidate.rank): _tokens_by_tier(candidate.tiers, candidate.tokens)
            for candidate in selection.considered or ()
            if candidate.instance == selection.instance
        }
        return self._pending(selection.instance, selection.rank, tokens, self._ignores_cache), matches

    def _pending(self, instance: str, rank: int, tokens: Any, ignores_cache: bool) -> PendingSelection:
        body = self._body
        return PendingSelection(instance, rank, self._fleet.scope, tokens, ignores_cache, _is_waiting(body), body.session)

    def _select(self, tokens: Any, workers: list[Worker] | None, name: str | None, *, ignores_cache: bool) -> schemas.Selection:
        reserve = None if name is None else {"id": name}
        selection = self._fleet.select(tokens, workers, ignores_cache=ignores_cache, reserve=reserve, **self._terms)
        if not selection.usable:
            raise UnavailableError("no worker can be reached", "no-candidates", selection.why)
        return selection

    def _choose_by_hash(self, workers: list[Worker] | None, name: str | None) -> _Choice:
        """Choose by the scores of a selection that ignores caches, minus the fraction of the prompt that the hashes match."""
        matches = self._fleet.match(self._prompt)
        length = self._prompt.length
        draft = f"draft-{uuid4()}"  # Reserve, then end: this selection must not count as load.
        first = self._select(_dummy_tokens(length), workers, draft, ignores_cache=True)
        reservations.ask(self._fleet.service, "DELETE", draft)

        considered = first.considered or ()

        def credit(candidate: schemas.ScoredCandidate) -> float:
            cached_tokens = 0 if self._ignores_cache else matches.get((candidate.instance, candidate.rank), _NO_TOKENS).all
            return min(cached_tokens, length) / length * TRUST_WEIGHTS[candidate.trust.state]

        requests = [candidate.requests or 0.0 for candidate in considered]
        limit = max_requests(requests, list(map(credit, considered)))

        def cost(candidate: schemas.ScoredCandidate) -> tuple[float, bool]:
            is_hot = (candidate.requests or 0.0) > limit
            is_other = (candidate.instance, candidate.rank) != (first.instance, first.rank)
            return candidate.score - (0.0 if is_hot else credit(candidate)), is_other

        best = min(considered, key=cost)
        worker = best.instance, best.rank
        tokens = _dummy_tokens(max(1, length - matches.get(worker, _NO_TOKENS).all))
        self._select(tokens, [worker], name, ignores_cache=True)
        of_instance = {candidate: tier for candidate, tier in matches.items() if candidate[0] == best.instance}
        return self._pending(*worker, tokens, ignores_cache=True), of_instance


def _is_waiting(body: messages.PromptRequest, tracks_prefill: bool | None = None) -> bool:
    """Return whether the worker must still compute the first token of a request."""
    override = body.router_config_override
    if tracks_prefill is None and override is not None:
        tracks_prefill = override.track_prefill_tokens
    return tracks_prefill is not False


def _read_prompt_request(service: Service, request: HttpRequest) -> tuple[Any, _Fleet, _Prompt]:
    """Return the body of a request about a prompt, the workers of the requested model, and the prompt."""
    body, tokens = request.read_tokens("token_ids")
    fleet = _fleet_of(service, body)
    prompt = _read_prompt(service, body, tokens)
    request.span_attributes = {"kvevents.model": fleet.scope.model}
    if prompt.tokens is not None:
        request.span_attributes["kvevents.prompt_tokens"] = prompt.length
    return body, fleet, prompt


def select(service: Service, request: HttpRequest) -> Response:
    """Select a worker as Dynamo's selection service does. `/reservations` can reserve the selection by its `selection_id`."""
    body, fleet, prompt = _read_prompt_request(service, request)
    selection, matches = _Chooser(fleet, body, prompt).choose()
    if body.selection_id is None:
        return answer(_describe_selection(fleet, prompt, selection, matches), request)
    service.selections.add(body.selection_id, selection)
    return answer(_describe_selection(fleet, prompt, selection, matches, selection_id=body.selection_id), request)


def select_and_reserve(service: Service, request: HttpRequest) -> Response:
    """Select a worker, and reserve it under `selection_id` or under a new name."""
    body, fleet, prompt = _read_prompt_request(service, request)
    name = str(uuid4()) if body.selection_id is None else body.selection_id
    with service.selections.booking_lock:
        _check_unused_name(service, name)
        selection, matches = _Chooser(fleet, body, prompt).choose(name)
    if not selection.is_waiting:
        reservations.ask(service, "POST", name, schemas.ReservationUpdate(first_token=True))
    fields = {"selection_id": name, "isl_tokens": prompt.length, "track_prefill_tokens": selection.is_waiting}
    return answer(_describe_selection(fleet, prompt, selection, matches, **fields), request)


def _describe_selection(
    fleet: _Fleet, prompt: _Prompt, selection: PendingSelection, matches: Mapping[Worker, _HeldTokens], **fields: Any
) -> messages.SelectedWorker:
    worker, size = selection.worker, fleet.block_size_of(selection.worker)
    longest_match = _HeldTokens(*map(max, zip(*matches.values(), strict=True))) if matches else _NO_TOKENS
    ignores_cache = selection.ignores_cache and prompt.tokens is not None
    cached_tokens = 0 if ignores_cache else matches.get(worker, _NO_TOKENS).all
    return messages.SelectedWorker(
        block_size=size,
        overlap=messages.Overlap(
            longest_matched=longest_match.all,
            gpu=longest_match.device,
            dp={str(rank): match.device for (_, rank), match in matches.items()},
            cpu=longest_match.host,
            disk=longest_match.all,
        ),
        effective_prefill_tokens=max(0, prompt.length - cached_tokens),
        potential_decode_blocks=_count_blocks(prompt.length, size),
        **fleet.names_of(worker),
        **fields,
    )


# --- reservations


def _check_unused_name(service: Service, name: str) -> None:
    try:
        reservations.ask(service, "GET", name)
    except ServiceError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
        return
    raise ConflictError(f"selection {name} is already reserved", "reserved", "end the reservation, or use another selection_id")


def reserve_worker(service: Service, request: HttpRequest) -> Response:
    """Reserve the worker `worker_id`, or the worker that `/select` returned for `selection_id`."""
    body, tokens = request.read_tokens("token_ids")
    fleet = _fleet_of(service, body)
    name = body.selection_id
    if body.worker_id is None:
        pending = service.selections.get(fleet.scope, name)
        if pending is None:
            sentence = f"no pending selection {name} for {fleet.scope.model} (expired, already used, or never selected)"
            raise NotFoundError(sentence, "no-such-selection", "select first, or send worker_id and the prompt")
    else:
        service.selections.discard(fleet.scope, name)
        pending = _select_named_worker(service, fleet, body, tokens)
    with service.selections.booking_lock:
        _check_unused_name(service, name)
        refusal = _unknown_worker_error(worker_id(pending.instance), pending.rank, pending.scope)
        if pending.worker not in fleet.members:
            raise refusal
        fleet = _Fleet(service, pending.scope)  # Unlike the request, `pending` has the LoRA and the salt.
        terms = {"reserve": {"id": name}, "ignores_cache": pending.ignores_cache, "session": pending.session}
        if not fleet.select(pending.tokens, [pending.worker], **terms).usable:
            raise refusal
    service.selections.discard(fleet.scope, name)
    if not pending.is_waiting:
        reservations.ask(service, "POST", name, schemas.ReservationUpdate(first_token=True))
    return answer(messages.Booked(selection_id=name, **fleet.names_of(pending.worker)), request, status=201)


def _select_named_worker(service: Service, fleet: _Fleet, body: messages.BookRequest, tokens: Any) -> PendingSelection:
    """Return the selection for a request that names its worker."""
    prompt = _read_prompt(service, body, tokens)
    number = body.worker_id or 0
    workers = fleet.workers(number, body.dp_rank or 0)
    if not workers:
        raise _unknown_worker_error(number, body.dp_rank or 0, fleet.scope)
    instance, rank = workers[0]
    uncached_tokens = body.effective_prefill_tokens
    if uncached_tokens is None and prompt.tokens is None:
        uncached_tokens = prompt.length - fleet.match(prompt).get(workers[0], _NO_TOKENS).all
    if uncached_tokens is not None:
        check_tokens(service, uncached_tokens)
    counted_tokens = prompt.tokens if uncached_tokens is None else _dummy_tokens(max(1, min(uncached_tokens, prompt.length)))
    is_waiting = _is_waiting(body, body.track_prefill_tokens)
    return PendingSelection(instance, rank, fleet.scope, counted_tokens, uncached_tokens is not None, is_waiting, None)


def _unknown_worker_error(number: int, rank: int, scope: Scope) -> NotFoundError:
    sentence = f"schedulable worker {number} (dp_rank {rank}) not found for {scope.model}:{scope.group}"
    return NotFoundError(sentence, "unknown-worker", "see GET /ready")


def prefill_complete(service: Service, request: HttpRequest) -> Response:
    """Record that a request has its first token."""
    reservations.ask(service, "POST", request.item, schemas.ReservationUpdate(first_token=True))
    return answer(messages.Done(), request)


def output_block(service: Service, request: HttpRequest) -> Response:
    """Record that a request has one more block of output."""
    request.read()
    with service.selections.booking_lock:  # Without the lock, concurrent requests could add only one block.
        now = _decode_reservation(reservations.ask(service, "GET", request.item))
        member = _members_of(service, Scope(now.model, now.tenant, now.group)).get((now.instance, now.rank))
        changes = schemas.ReservationUpdate(output_tokens=now.output_tokens + _block_size(member))
        reservations.ask(service, "POST", request.item, changes)
    return answer(messages.Done(), request)


def end_reservation(service: Service, request: HttpRequest) -> Response:
    """End a reservation."""
    reservations.ask(service, "DELETE", request.item)
    return answer(messages.Done(), request)


# --- loads and overlaps


def _collect_loads(service: Service, scope: Scope, members: Mapping[Worker, Member]) -> list[messages.PotentialLoad]:
    """Return the load of each member, according to the open reservations of the model."""
    body = service.data_plane.reservations(service.settings.limits.max_reservations)
    zeros = {"potential_prefill_tokens": 0, "potential_decode_blocks": 0, "active_requests": 0}
    sums = {key: messages.PotentialLoad(worker_id=worker_id(key[0]), dp_rank=key[1], **zeros) for key in members}
    for reservation in _decode_reservations(body).reservations:
        worker = reservation.instance, reservation.rank
        load = sums.get(worker)
        if load is None or (reservation.model, reservation.tenant, reservation.group) != scope[:3]:
            continue
        load.potential_prefill_tokens += reservation.uncached_tokens if reservation.progress == "waiting" else 0
        tokens = reservation.prompt_tokens + reservation.output_tokens
        load.potential_decode_blocks += _count_blocks(tokens, _block_size(members[worker]))
        load.active_requests += 1
    return list(sums.values())


def loads(service: Service, request: HttpRequest) -> Response:
    """List, for each model, the load of each rank, according to the open reservations."""
    scopes: dict[Scope, dict[Worker, Member]] = {}
    for member in list_members(service, {"tenant": schemas.DEFAULT_GROUP, **request.arguments}):
        scopes.setdefault(Scope(*member.registration.scope[:3]), {})[member.worker] = member
    models = [
        messages.ModelLoad(model_name=scope.model, routing_group=scope.group, loads=_collect_loads(service, scope, workers))
        for scope, workers in sorted(scopes.items(), key=lambda item: item[0][:3])
    ]
    return answer(models, request)


def potential_loads(service: Service, request: HttpRequest) -> Response:
    """List the load that each rank would have if it also got the prompt of this request."""
    body, fleet, prompt = _read_prompt_request(service, request)
    matches = fleet.match(prompt)
    potential = _collect_loads(service, fleet.scope, fleet.members)
    for worker, load in zip(fleet.members, potential, strict=True):
        if _is_waiting(body):
            load.potential_prefill_tokens += max(0, prompt.length - matches.get(worker, _NO_TOKENS).all)
        load.potential_decode_blocks += _count_blocks(prompt.length, fleet.block_size_of(worker))
    return answer(potential, request)


def overlap_scores(service: Service, request: HttpRequest) -> Response:
    """Return how many blocks of a prompt each rank holds on each tier."""
    _, fleet, prompt = _read_prompt_request(service, request)
    matches = fleet.match(prompt)
    workers = [_overlap_of(fleet, worker, matches.get(worker, _NO_TOKENS)) for worker in {**fleet.members, **matches}]
    scores = messages.OverlapScores(
        block_size=fleet.block_size,
        num_blocks=prompt.length // fleet.block_size if prompt.hashes is None else len(prompt.hashes),
        workers=sorted(workers, key=lambda overlap: (overlap.worker_id, overlap.dp_rank)),
    )
    return answer(scores, request)


def _overlap_of(fleet: _Fleet, worker: Worker, held: _HeldTokens) -> messages.WorkerOverlap:
    size = fleet.block_size_of(worker)
    device, host, disk = (tokens // size for tokens in held)
    return messages.WorkerOverlap(
        worker_id=worker_id(worker[0]),
        dp_rank=worker[1],
        device_blocks=device,
        host_pinned_blocks=host,
        disk_blocks=disk,
        host_pinned_extension_blocks=host - device,
        disk_extension_blocks=disk - host,
    )


def query_tiered_by_hash(service: Service, request: HttpRequest) -> Response:
    """Return how many blocks of a prompt each rank holds, in the form that Dynamo's routers expect from a remote index."""
    body: messages.TieredQueryRequest = request.read()
    fleet = _fleet_of(service, body)
    matches = fleet.match(_Prompt(0, None, read_hashes(service, body.block_hashes)))
    overlaps = [_overlap_of(fleet, worker, held) for worker, held in matches.items()]

    def list_hits(field: str) -> list[tuple[messages.WorkerRank, int]]:
        counts = [(messages.WorkerRank(item.worker_id, item.dp_rank), getattr(item, field)) for item in overlaps]
        return [(worker, blocks) for worker, blocks in counts if blocks]

    lower_tiers = {"host_pinned": list_hits("host_pinned_extension_blocks"), "disk": list_hits("disk_extension_blocks")}
    scores = messages.TieredMatch(
        device=messages.DeviceScores(scores=list_hits("device_blocks")),
        lower_tier=[(tier, messages.TierHits(hits=hits)) for tier, hits in lower_tiers.items() if hits],
    )
    return answer(messages.TieredAnswer(block_size=fleet.block_size, tiered=scores), request)


# --- readiness of the service


def ready(service: Service, request: HttpRequest) -> Response:
    """List the workers, and say whether any worker can be selected; 503 if no worker can be selected."""
    instances: dict[tuple[Any, ...], list[Member]] = {}
    for member in service.members().values():
        instances.setdefault((*member.registration.scope[:3], member.registration.instance), []).append(member)
    workers = [_describe_worker(members) for members in instances.values()]
    schedulable = sum(worker.lifecycle == "schedulable" for worker in workers)
    is_ready = schedulable > 0 and service.readiness().ready
    response = messages.ReadyWorkers(ready=is_ready, schedulable_workers=schedulable, workers=workers)
    return answer(response, request, status=200 if is_ready else 503)


def _describe_worker(members: list[Member]) -> messages.CatalogWorker:
    first = members[0].registration
    ranks = sorted(member.registration.rank for member in members)
    is_schedulable = any(member.distance == 0 for member in members)
    return messages.CatalogWorker(
        worker_id=worker_id(first.instance),
        model_name=first.model,
        routing_group=first.group,
        tenant_id=first.tenant,
        lifecycle="schedulable" if is_schedulable else "unschedulable",
        endpoint=first.url,
        kv_events_endpoints={str(member.registration.rank): member.registration.endpoint for member in members},
        block_size=first.block_size,
        data_parallel_start_rank=ranks[0],
        data_parallel_size=len(ranks),
        not_schedulable_reasons=[] if is_schedulable else [member.trust_status.reason for member in members],
    )
