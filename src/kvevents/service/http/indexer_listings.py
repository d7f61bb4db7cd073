"""The indexer API's listings: registered workers as Dynamo and Mooncake list them, and a dump of the index.

`/dump` serves one client at a time. A dump keeps in memory the blocks of one worker, about 200 bytes each, and one piece of the
response. The service encodes a piece of the response when the client has read the previous piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from kvevents.client.schemas import TrustStatus
from kvevents.index import Block
from kvevents.service.errors import TooMuchError
from kvevents.service.fleet.member import Member
from kvevents.service.fleet.registration import Registration, StreamKey
from kvevents.service.http.messages import JSON_TYPE, HttpRequest, Response, StreamingResponse, answer
from kvevents.service.http.pages import add_entity_tag, cut_page, link_next, matches
from kvevents.service.service import Service
from kvevents.stream import trust_order

_STATUSES: Final = {"CONNECTING": "pending", "REPLAYING": "pending", "EXACT": "active", "DEGRADED": "active", "STALE": "failed"}
"""Maps each trust state to the status in Dynamo's `/workers`."""


def workers(service: Service, request: HttpRequest) -> Response:
    """List every instance with its ranks; the header `Link` has the address of the next page, if it exists."""
    instances: dict[StreamKey, list[Member]] = {}
    for member in list_members(service, request.arguments):  # A filter selects all ranks of an instance or none.
        instances.setdefault((member.registration.key[0], 0), []).append(member)
    page, cursor = cut_page(instances.items(), request.arguments)
    response = answer([_describe_instance(members) for members in page], request)
    response.headers = link_next(request, cursor)
    return add_entity_tag(response, request)


def list_members(service: Service, filters: Mapping[str, str]) -> Iterator[Member]:
    """Return the workers that pass `filters`, in the order of their keys; a missing filter accepts any value."""
    return (member for _, member in sorted(service.members().items()) if matches(member.registration, filters))


def _describe_instance(members: list[Member]) -> dict[str, Any]:
    first = members[0].registration
    states = [_STATUSES[member.trust_status.state] for member in members]
    return {
        "instance_id": id_of(first.instance),
        "source": "zmq",
        "status": next(state for state in ("failed", "pending", "active") if state in states),
        "model_name": first.model,
        "routing_group": first.group,
        "tenant_id": first.tenant,
        "block_size": first.block_size,
        "endpoints": {str(member.registration.rank): member.registration.endpoint for member in members},
        "listeners": {str(member.registration.rank): _describe_listener(member) for member in members},
    }


def _describe_listener(member: Member) -> dict[str, Any]:
    fields = {
        "endpoint": member.registration.endpoint,
        "replay_endpoint": member.registration.replay_endpoint,
        "status": _STATUSES[member.trust_status.state],
        "trust": member.trust_status,
        "blocks": member.blocks,
    }
    if member.trust_status.reason:
        fields["last_error"] = member.trust_status.reason
    return fields


def id_of(instance: str) -> int | str:
    """Return the name of an instance as Dynamo's clients send it: as a number if it is a decimal number."""
    return int(instance) if instance.isascii() and instance.isdecimal() and str(int(instance)) == instance else instance


def services(service: Service, request: HttpRequest) -> Response:
    """List registered ranks as Mooncake does."""
    entries = [_describe_service(member) for member in list_members(service, request.arguments)]
    return answer({"services": entries, "count": len(entries)}, request)


def _scope_fields(registration: Registration) -> dict[str, Any]:
    """Return the fields that must be equal for two workers to share blocks, under Mooncake's names."""
    return {
        "modelname": registration.model,
        "tenant_id": registration.tenant,
        "routing_group": registration.group,
        "lora_name": registration.lora_name or "",
        "block_size": registration.block_size,
    }


def _describe_service(member: Member) -> dict[str, Any]:
    registration = member.registration
    return _scope_fields(registration) | {
        "endpoint": registration.endpoint,
        "replay_endpoint": registration.replay_endpoint or "",
        "instance_id": registration.instance,
        "dp_rank": registration.rank,
        "status": _STATUSES[member.trust_status.state],
        "trust": member.trust_status,
    }


def global_view(service: Service, request: HttpRequest) -> Response:
    """List groups of workers that can share cached blocks, as Mooncake does."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for member in list_members(service, request.arguments):
        registration, fields = member.registration, _scope_fields(member.registration)
        group = groups.setdefault(tuple(fields.values()), {**fields, "blocks": 0, "instances": {}})
        group["blocks"] += member.blocks
        rank = {"endpoint": registration.endpoint, "blocks": member.blocks, "trust": member.trust_status}
        group["instances"].setdefault(registration.instance, {})[str(registration.rank)] = rank
    return answer({"groups": list(groups.values())}, request)


PIECE_BLOCKS: Final = 1_024
"""Maximum number of blocks in one piece of a dump. A piece is smaller than 1 MiB."""
_DYNAMO_TIER_NAMES: Final = {"gpu": "device", "cpu": "host_pinned", "disk": "disk"}


async def dump(service: Service, _: HttpRequest) -> StreamingResponse:
    """Return events that rebuild the index, as Dynamo's replicas request them from each other.

    Each event has one block, and the events are not sorted. The index stores no parents, so `parent_hash` is null.
    `tokens_hash` is the rolling key, which for a root block is the hash of its tokens. Only one client at a time reads a dump.
    """
    total = sum(member.blocks for member in list(service.fleet.workers.values()))
    limit = service.settings.limits.max_dump_blocks
    if total > limit:
        hint = "read /v1/blocks page by page, or raise limits.max_dump_blocks"
        raise TooMuchError(f"the index has {total} blocks, and /dump returns at most {limit}", "too-many-blocks", hint)
    await service.dump_lock.acquire(service.settings.limits.request_seconds)
    return StreamingResponse(_dump_pieces(service), JSON_TYPE, service.dump_lock.release)


async def _dump_pieces(service: Service) -> AsyncIterator[bytes]:
    groups: dict[str, list[tuple[StreamKey, Member]]] = {}
    for key, member in sorted(service.fleet.workers.items()):
        registration = member.registration
        groups.setdefault(f"{registration.model}:{registration.group}", []).append((key, member))
    separator = b"{"
    for name, members in groups.items():
        head = msgspec.json.encode(name), msgspec.json.encode(members[0][1].registration.block_size)
        yield separator + b'%b:{"block_size":%b,"events":[' % head
        comma = b""
        for key, member in members:
            blocks = enumerate(await asyncio.to_thread(service.blocks, key))
            while piece := await asyncio.to_thread(_encode, member, blocks):
                yield comma + piece
                comma = b","
        yield b'],"trust":%b}' % msgspec.json.encode(_lowest_trusts(member for _, member in members))
        separator = b","
    yield b"}" if groups else b"{}"


def _lowest_trusts(members: Iterable[Member]) -> dict[str, dict[str, TrustStatus]]:
    """Return the trust of each worker, including workers without blocks.

    If workers of several tenants have the same name, return the lowest of their trusts.
    """
    trusts: dict[str, dict[str, TrustStatus]] = {}
    for member in sorted(members, key=lambda candidate: trust_order(candidate.trust_status.state), reverse=True):
        trusts.setdefault(member.registration.instance, {})[str(member.registration.rank)] = member.trust_status
    return trusts


def _encode(member: Member, blocks: Iterator[tuple[int, Block]]) -> bytes:
    """Encode the events of the next `PIECE_BLOCKS` blocks as a JSON array without brackets; empty if no block is left."""
    events = [_make_event(member, number, block) for number, block in islice(blocks, PIECE_BLOCKS)]
    return msgspec.json.encode(events)[1:-1]


def _make_event(member: Member, number: int, block: Block) -> dict[str, Any]:
    stored_block = {"block_hash": block.hash, "tokens_hash": block.key, "mm_extra_info": None}
    data = {"stored": {"parent_hash": None, "start_position": None, "blocks": [stored_block]}}
    return {
        "worker_id": id_of(member.registration.instance),
        "storage_tier": _DYNAMO_TIER_NAMES.get(block.tier, block.tier),
        "residency_domain": "worker",
        "event": {"event_id": number, "data": data, "dp_rank": member.registration.rank},
    }
