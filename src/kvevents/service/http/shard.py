"""What the replicas of a sharded plane ask each other; bodies and answers are msgpack there, and may be JSON."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import msgspec

from kvevents.service.errors import ConflictError, ServiceError
from kvevents.service.http.messages import MSGPACK, Body, Request, Response, answer
from kvevents.service.service import Service
from kvevents.service.shards.shard_server import Expectation, PartitionQuery, ShardQuery, ShardServer

QUESTION: Final = Body.of(ShardQuery)
PARTITIONS: Final = Body.of(PartitionQuery)
EXPECTATION: Final = Body.of(Expectation)


class _Prompts(msgspec.Struct):
    """Where the prompts of a body are, whose other fields are passed over."""

    prompts: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_PROMPTS: Final[dict[bytes, Any]] = {
    b"application/json": msgspec.json.Decoder(_Prompts),
    MSGPACK: msgspec.msgpack.Decoder(_Prompts),
}


def match(service: Service, request: Request) -> Response:
    """Who in some partitions holds how much of some prompts, as far as this replica shows them."""
    answering = _answering(service)
    asked: ShardQuery = _read(QUESTION, service, request)
    service.check_tokens(sum(len(prompt) // 4 for prompt in asked.prompts) + sum(map(len, asked.keys)))
    if any(max(keys, default=0) >> 64 for keys in asked.keys):
        raise ServiceError("a key has more than 64 bits", "bad-hash", "send rolling keys or hashes of blocks", status=422)
    return answer(answering.part(asked), request)


def members(service: Service, request: Request) -> Response:
    """The engines of some partitions, as far as this replica shows them."""
    answering = _answering(service)
    asked: PartitionQuery = PARTITIONS.read(request, service.config.limits)
    return answer(answering.members(asked), request)


def expect(service: Service, request: Request) -> Response:
    """Believe for a while that an engine will hold a prompt."""
    answering = _answering(service)
    asked: Expectation = _read(EXPECTATION, service, request)
    service.check_tokens(len(asked.prompt) // 4)
    return answer(answering.expect(asked), request)


def _read(body: Body, service: Service, request: Request) -> Any:
    """The body; its prompts are bytes, which cost nothing to read, and have a limit of their own."""
    limits = service.config.limits
    apart = 0
    if len(request.body) > limits.max_json_bytes and (decoder := _PROMPTS.get(request.kind)) is not None:
        with suppress(ValueError, RecursionError):  # what cannot be read is refused for its size
            found = decoder.decode(request.body)
            apart = len(found.prompts) + len(found.prompt)
    return body.read(request, limits, apart=apart)


def _answering(service: Service) -> ShardServer:
    if service.shards is None:
        raise ConflictError("this service holds no share of a plane", "no-shard", "ask it /v1/match, for all it knows")
    return service.shards.answering
