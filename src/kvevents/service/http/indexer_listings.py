"""The field's listings: what is registered, and who shares a cache, as Dynamo and Mooncake tell them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from kvevents.index import Block
from kvevents.service.errors import ConflictError, TooMuchError
from kvevents.service.http.messages import JSON, Request, Response, StreamingResponse, answer
from kvevents.service.member import Member
from kvevents.service.registration import Key
from kvevents.service.schemas import TrustStatus
from kvevents.service.service import Service
from kvevents.stream import trust_order

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
        own = member.registration.scope[:3]
        if all(request.wanted.get(part, value) == value for part, value in zip(_SCOPE, own, strict=True)):
            yield member


def _instance(members: list[Member]) -> dict[str, Any]:
    first = members[0].registration
    states = [_STATUS[member.trust_status.state] for member in members]
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
        "status": _STATUS[member.trust_status.state],
        "trust": member.trust_status,
        "blocks": member.blocks,
    }
    if member.trust_status.reason:
        told["last_error"] = member.trust_status.reason
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
        "status": _STATUS[member.trust_status.state],
        "trust": member.trust_status,
    }


def global_view(service: Service, request: Request) -> Response:
    """Mooncake's view: who shares a cache, by everything that keeps prompts apart."""
    groups: dict[tuple[Any, ...], list[Member]] = {}
    for member in _members(service, request):
        registration = member.registration
        groups.setdefault((*registration.scope[:4], registration.block_size), []).append(member)
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
            "trust": member.trust_status,
        }
    return found


PIECE_BLOCKS: Final = 1_024
"""Blocks of one piece, which are less than a MiB."""
_DOMAINS: Final = {"gpu": "device", "cpu": "host_pinned", "disk": "disk"}


async def dump(service: Service, request: Request) -> StreamingResponse:
    """Events that rebuild the index, as Dynamo's replicas ask for them from each other.

    Blocks are told one by one and in no order: the index keeps no parents, so `parent_hash` is null, and `tokens_hash` is the
    rolling key, which at a root is the hash of the block's tokens. Others wait while one client reads its dump.
    A replica that holds a share tells its own blocks alone, and only who says `own=true`.
    """
    if service.shards is not None and request.wanted.get("own") != "true":
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
    await service.pools.dump.acquire(service.config.limits.request_seconds)
    return StreamingResponse(_pieces(service), JSON, service.pools.dump.release)


async def _pieces(service: Service) -> AsyncIterator[bytes]:
    groups: dict[str, list[tuple[Key, Member]]] = {}
    for key, member in sorted(service.fleet.members.items()):
        registration = member.registration
        groups.setdefault(f"{registration.model}:{registration.group}", []).append((key, member))
    before = b"{"
    for name, members in groups.items():
        head = msgspec.json.encode(name), msgspec.json.encode(members[0][1].registration.block_size)
        yield before + b'%b:{"block_size":%b,"events":[' % head
        comma = b""
        for key, member in members:
            blocks = await service.pools.dumping.run(_blocks, service, key)
            while piece := await service.pools.dumping.run(_encode, member, blocks):
                yield comma + piece
                comma = b","
        yield b'],"trust":%b}' % msgspec.json.encode(_trusts(member for _, member in members))
        before = b","
    yield b"}" if groups else b"{}"


def _blocks(service: Service, key: Key) -> Iterator[tuple[int, Block]]:
    try:
        return enumerate(service.fleet.index.blocks(key))
    except LookupError:  # nothing has come yet
        return enumerate(())


def _trusts(members: Iterable[Member]) -> dict[str, dict[str, TrustStatus]]:
    """How far each worker can be trusted, behind its blocks: also of one that has none.

    Of workers that have one name in several tenants, the one that can be trusted least counts.
    """
    found: dict[str, dict[str, TrustStatus]] = {}
    for member in sorted(members, key=lambda each: trust_order(each.trust_status.state), reverse=True):
        found.setdefault(member.instance, {})[str(member.registration.rank)] = member.trust_status
    return found


def _encode(member: Member, blocks: Iterator[tuple[int, Block]]) -> bytes:
    """The next events without the brackets around them; empty behind the last one."""
    events = [_event(member, number, block) for number, block in islice(blocks, PIECE_BLOCKS)]
    return msgspec.json.encode(events)[1:-1]


def _event(member: Member, number: int, block: Block) -> dict[str, Any]:
    return {
        "worker_id": id_of(member.registration.instance),
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
