"""`/dump`: all blocks of the index, encoded piece by piece, for one client at a time.

Memory: the blocks of one worker, about 200 bytes for each, and one piece of the answer. The next piece is encoded when the
client has read the one before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from kvevents.index import Block
from kvevents.service.errors import ConflictError, TooMuchError
from kvevents.service.http.listings import id_of
from kvevents.service.http.messages import JSON, Request, Streamed
from kvevents.service.member import Member
from kvevents.service.registration import Key
from kvevents.service.service import Service
from kvevents.service.shapes import Trusted
from kvevents.stream.trust import rank_of

PIECE_BLOCKS: Final = 1_024
"""Blocks of one piece, which are less than a MiB."""
_DOMAINS: Final = {"gpu": "device", "cpu": "host_pinned", "disk": "disk"}


async def dump(service: Service, request: Request) -> Streamed:
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
    await service.workers.dump.take(service.config.limits.request_seconds)
    return Streamed(_pieces(service), JSON, service.workers.dump.give_back)


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
            blocks = await service.workers.dumping.run(_blocks, service, key)
            while piece := await service.workers.dumping.run(_encode, member, blocks):
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


def _trusts(members: Iterable[Member]) -> dict[str, dict[str, Trusted]]:
    """How far each worker can be trusted, behind its blocks: also of one that has none.

    Of workers that have one name in several tenants, the one that can be trusted least counts.
    """
    found: dict[str, dict[str, Trusted]] = {}
    for member in sorted(members, key=lambda each: rank_of(each.trusted.state), reverse=True):
        found.setdefault(member.instance, {})[str(member.registration.rank)] = member.trusted
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
