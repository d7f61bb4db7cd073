"""The field's listings: what is registered, who shares a cache, and all blocks, as Dynamo and Mooncake tell them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvevents.service.errors import ConflictError, TooMuchError
from kvevents.service.http.messages import Request, Response, answer
from kvevents.service.member import Member

if TYPE_CHECKING:
    from kvevents.service.service import Service

_STATUS: Final = {"CONNECTING": "pending", "REPLAYING": "pending", "EXACT": "active", "DEGRADED": "active", "STALE": "failed"}
"""Trust in the words that Dynamo's `/workers` has."""


def workers(service: Service, request: Request) -> Response:
    """Every instance with its ranks, by model and routing group."""
    wanted = request.parameters
    found: dict[tuple[str, str, str], list[Member]] = {}
    for (name, _), member in sorted(service.members().items()):
        registration = member.registration
        if wanted.get("model_name", registration.model) != registration.model:
            continue
        if wanted.get("routing_group", registration.group) == registration.group:
            found.setdefault((name, registration.model, registration.group), []).append(member)
    return answer([_instance(members) for members in found.values()], request)


def _instance(members: list[Member]) -> dict[str, Any]:
    first = members[0].registration
    states = [_STATUS[member.trusted.state] for member in members]
    return {
        "instance_id": _id(first.instance),
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


def _id(instance: str) -> int | str:
    """Ids that Dynamo's clients gave as numbers are numbers again."""
    return int(instance) if instance.isascii() and instance.isdecimal() and str(int(instance)) == instance else instance


def services(service: Service, request: Request) -> Response:
    """Mooncake's list of what is registered."""
    found = [_service(member) for _, member in sorted(service.members().items())]
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
    for _, member in sorted(service.members().items()):
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
        ranks[str(member.registration.rank)] = {"endpoint": member.registration.endpoint, "blocks": member.blocks}
    return found


# --- the whole index


def dump(service: Service, request: Request) -> Response:
    """Events that rebuild the index, as Dynamo's replicas ask for them from each other.

    Blocks are told one by one and in no order: the index keeps no parents, so `parent_hash` is null, and `tokens_hash` is the
    rolling key, which at a root is the hash of the block's tokens.
    A replica that holds a share tells its own blocks alone, and only who says `own=true`.
    """
    if service.shards is not None and request.parameters.get("own") != "true":
        raise ConflictError(
            "this replica holds a share of the fleet",
            "share",
            f"ask each replica for its own with ?own=true: {', '.join(service.shards.urls)}",
        )
    total = sum(member.blocks for member in list(service.fleet.members.values()))
    limit = service.config.limits.max_dump_blocks
    if total > limit:
        raise TooMuchError(
            f"the index has {total} blocks, and /dump tells {limit} at most",
            "too-many-blocks",
            "read /v1/blocks page by page, or raise limits.max_dump_blocks",
        )
    groups: dict[str, dict[str, Any]] = {}
    for key, member in sorted(service.fleet.members.items()):
        registration = member.registration
        group = groups.setdefault(
            f"{registration.model}:{registration.group}", {"block_size": registration.block_size, "events": []}
        )
        group["events"] += _events(service, key, member)
    return Response(msgspec.json.encode(groups))


_DOMAINS: Final = {"gpu": "device", "cpu": "host_pinned", "disk": "disk"}


def _events(service: Service, key: tuple[str, int], member: Member) -> list[dict[str, Any]]:
    try:
        blocks = service.fleet.index.blocks(key)
    except LookupError:  # nothing has come yet
        return []
    return [
        {
            "worker_id": _id(member.registration.instance),
            "storage_tier": _DOMAINS.get(block.tier, block.tier),
            "residency_domain": "worker",
            "event": {
                "event_id": number,
                "data": {
                    "stored": {
                        "parent_hash": None,
                        "start_position": None,
                        "blocks": [{"block_hash": block.hash, "tokens_hash": block.key, "mm_extra_info": None}],
                    }
                },
                "dp_rank": member.registration.rank,
            },
        }
        for number, block in enumerate(blocks)
    ]
