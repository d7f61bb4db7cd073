"""The field's listings: what is registered, and who shares a cache, as Dynamo and Mooncake tell them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvevents.service.http.messages import Request, Response, answer
from kvevents.service.member import Member
from kvevents.service.service import Service

_SCOPE: Final = ("model", "tenant", "group")
_STATUS: Final = {"CONNECTING": "pending", "REPLAYING": "pending", "EXACT": "active", "DEGRADED": "active", "STALE": "failed"}
"""Trust in the words that Dynamo's `/workers` has."""


def workers(service: Service, request: Request) -> Response:
    """Every instance with its ranks, by model and routing group."""
    found: dict[tuple[str, str, str], list[Member]] = {}
    for member in _members(service, request):
        registration = member.registration
        found.setdefault((registration.key[0], registration.model, registration.group), []).append(member)
    return answer([_instance(members) for members in found.values()], request)


def _members(service: Service, request: Request) -> Iterator[Member]:
    """Those of the model, tenant and group that a request names, in order."""
    for _, member in sorted(service.members().items()):
        own = member.registration.wall[:3]
        if all(request.wanted.get(part, value) == value for part, value in zip(_SCOPE, own, strict=True)):
            yield member


def _instance(members: list[Member]) -> dict[str, Any]:
    first = members[0].registration
    states = [_STATUS[member.trusted.state] for member in members]
    return {
        "instance_id": id_of(first.instance),
        "source": "zmq",
        "status": next(state for state in ("failed", "pending", "active") if state in states),
        "model_name": first.model,
        "routing_group": first.group,
        "tenant_id": first.tenant,
        "block_size": first.block_size,
        "endpoints": {str(member.registration.rank): member.registration.endpoint for member in members},
        "listeners": {str(member.registration.rank): _listener(member) for member in members},
    }


def _listener(member: Member) -> dict[str, Any]:
    told = {
        "endpoint": member.registration.endpoint,
        "replay_endpoint": member.registration.replay_endpoint,
        "status": _STATUS[member.trusted.state],
        "trust": member.trusted,
        "blocks": member.blocks,
    }
    if member.trusted.reason:
        told["last_error"] = member.trusted.reason
    return told


def id_of(instance: str) -> int | str:
    """Ids that Dynamo's clients gave as numbers are numbers again."""
    return int(instance) if instance.isascii() and instance.isdecimal() and str(int(instance)) == instance else instance


def services(service: Service, request: Request) -> Response:
    """Mooncake's list of what is registered."""
    found = [_service(member) for member in _members(service, request)]
    return answer({"services": found, "count": len(found)}, request)


def _service(member: Member) -> dict[str, Any]:
    registration = member.registration
    return {
        "endpoint": registration.endpoint,
        "replay_endpoint": registration.replay_endpoint or "",
        "modelname": registration.model,
        "lora_name": registration.lora_name or "",
        "tenant_id": registration.tenant,
        "routing_group": registration.group,
        "instance_id": registration.instance,
        "block_size": registration.block_size,
        "dp_rank": registration.rank,
        "status": _STATUS[member.trusted.state],
        "trust": member.trusted,
    }


def global_view(service: Service, request: Request) -> Response:
    """Mooncake's view: who shares a cache, by everything that keeps prompts apart."""
    groups: dict[tuple[Any, ...], list[Member]] = {}
    for member in _members(service, request):
        registration = member.registration
        groups.setdefault((*registration.wall[:4], registration.block_size), []).append(member)
    found = [
        {
            "modelname": model,
            "tenant_id": tenant,
            "routing_group": group,
            "lora_name": lora or "",
            "block_size": size,
            "blocks": sum(member.blocks for member in members),
            "instances": _ranks(members),
        }
        for (model, tenant, group, lora, size), members in groups.items()
    ]
    return answer({"groups": found}, request)


def _ranks(members: list[Member]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for member in members:
        ranks = found.setdefault(member.registration.instance, {})
        ranks[str(member.registration.rank)] = {
            "endpoint": member.registration.endpoint,
            "blocks": member.blocks,
            "trust": member.trusted,
        }
    return found
