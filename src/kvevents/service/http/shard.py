"""What the replicas of a sharded plane ask each other; bodies and answers are msgpack there, and may be JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvevents.service.errors import ConflictError, ServiceError
from kvevents.service.http.messages import Body, Request, Response, answer
from kvevents.service.shards.shapes import Expectation, Lanes, Question

if TYPE_CHECKING:
    from kvevents.service.service import Service
    from kvevents.service.shards.answering import Answering

QUESTION: Final = Body.of(Question)
LANES: Final = Body.of(Lanes)
EXPECTATION: Final = Body.of(Expectation)


def match(service: Service, request: Request) -> Response:
    """Who in some lanes holds how much of some prompts, as far as this replica shows them."""
    asked: Question = QUESTION.read(request)
    service.check_tokens(sum(len(prompt) // 4 for prompt in asked.prompts) + sum(map(len, asked.keys)))
    if any(max(keys, default=0) >> 64 for keys in asked.keys):
        raise ServiceError("a key has more than 64 bits", "bad-hash", "send rolling keys or hashes of blocks", status=422)
    return answer(_answering(service).part(asked), request)


def members(service: Service, request: Request) -> Response:
    """The engines of some lanes, as far as this replica shows them."""
    asked: Lanes = LANES.read(request)
    return answer(_answering(service).members(asked), request)


def expect(service: Service, request: Request) -> Response:
    """Believe for a while that an engine will hold a prompt."""
    asked: Expectation = EXPECTATION.read(request)
    service.check_tokens(len(asked.prompt) // 4)
    return answer(_answering(service).expect(asked), request)


def _answering(service: Service) -> Answering:
    if service.shards is None:
        raise ConflictError("this service holds no share of a plane", "no-shard", "ask it /v1/match, for all it knows")
    return service.shards.answering
