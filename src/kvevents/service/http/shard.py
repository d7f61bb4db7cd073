"""Handlers for requests between the replicas of a sharded plane. Replicas send msgpack; JSON works too."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import msgspec

from kvevents.service.errors import ConflictError, ServiceError
from kvevents.service.http.messages import MSGPACK, Body, HttpRequest, Response, answer
from kvevents.service.service import Service
from kvevents.service.shards.shard_server import Expectation, PartitionQuery, ShardQuery, ShardServer

QUERY: Final = Body.of(ShardQuery)
PARTITIONS: Final = Body.of(PartitionQuery)
EXPECTATION: Final = Body.of(Expectation)


class _Prompts(msgspec.Struct):
    """The prompts of a body, without its other fields."""

    prompts: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_PROMPTS: Final[dict[bytes, Any]] = {
    b"application/json": msgspec.json.Decoder(_Prompts),
    MSGPACK: msgspec.msgpack.Decoder(_Prompts),
}


def match(service: Service, request: HttpRequest) -> Response:
    """Return how much of some prompts the workers of some partitions hold, as far as this replica serves them."""
    server = _shard_server(service)
    query: ShardQuery = _read(QUERY, service, request)
    service.check_tokens(sum(len(prompt) // 4 for prompt in query.prompts) + sum(map(len, query.keys)))
    if any(max(keys, default=0) >> 64 for keys in query.keys):
        raise ServiceError("a key has more than 64 bits", "bad-hash", "send rolling keys or hashes of blocks", status=422)
    return answer(server.part(query), request)


def members(service: Service, request: HttpRequest) -> Response:
    """List the engines of some partitions, as far as this replica serves them."""
    server = _shard_server(service)
    query: PartitionQuery = PARTITIONS.read(request, service.config.limits)
    return answer(server.members(query), request)


def expect(service: Service, request: HttpRequest) -> Response:
    """Count a prompt as held by an engine for a while."""
    server = _shard_server(service)
    query: Expectation = _read(EXPECTATION, service, request)
    service.check_tokens(len(query.prompt) // 4)
    return answer(server.expect(query), request)


def _read(body: Body, service: Service, request: HttpRequest) -> Any:
    """Decode the body. Its prompts are bytes that are cheap to decode and have a limit of their own."""
    limits = service.config.limits
    apart = 0
    if len(request.body) > limits.max_json_bytes and (decoder := _PROMPTS.get(request.kind)) is not None:
        with suppress(ValueError, RecursionError):  # a malformed body is rejected for its size
            found = decoder.decode(request.body)
            apart = len(found.prompts) + len(found.prompt)
    return body.read(request, limits, apart=apart)


def _shard_server(service: Service) -> ShardServer:
    if service.shards is None:
        raise ConflictError("this service holds no shard of a plane", "no-shard", "send the request to /v1/match")
    return service.shards.answering
