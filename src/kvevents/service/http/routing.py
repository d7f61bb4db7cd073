"""The table of endpoints: dispatch, roles, metrics and the OpenAPI document all come from it."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec

from kvevents.service import shapes
from kvevents.service.access import Role
from kvevents.service.http import dump, listings, probes, shard, v1
from kvevents.service.http import field as contract
from kvevents.service.http.endpoint import Endpoint, Parameter
from kvevents.service.http.messages import Request, Response
from kvevents.service.http.openapi import document
from kvevents.service.http.workers import FLEET, LISTING, MATCHING, METRICS
from kvevents.service.registration import MAX_NAME_BYTES
from kvevents.service.service import Service
from kvevents.service.shards import shard_server as parts

_NAME: Final[dict[str, Any]] = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_BYTES}
_MODEL: Final = Parameter("model", "name of the model", required=True)
_TENANT: Final = Parameter("tenant", "tenant; `default` when not given")
_GROUP: Final = Parameter("group", "routing group; `default` when not given")
_FILTERS: Final = (
    Parameter("instance", "only this engine"),
    Parameter("model", "only this model"),
    Parameter("tenant", "only this tenant"),
    Parameter("group", "only this routing group"),
)
_FIELD_FILTERS: Final = (
    Parameter("model_name", "only this model"),
    Parameter("tenant_id", "only this tenant"),
    Parameter("routing_group", "only this routing group"),
)
_RAW: Final = (
    Parameter("model", "of a raw body: name of the model", schema=_NAME),
    *(Parameter(name, "of a raw body", schema=_NAME) for name in ("tenant", "group", "lora", "salt")),
    Parameter("lora_id", "of a raw body", schema={"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}),
    *(Parameter(name, "of a raw body", schema={"type": "boolean"}) for name in ("expected", "whole_prompt")),
)
_PROMPT_BYTES: Final = 1 << 20
_FEW_BYTES: Final = 1 << 16
"""Two thousand candidates or three thousand hashes, which are read in Python."""
_FAILED: Final = ((503, "the process has to be restarted"),)


def _limit(most: int) -> Parameter:
    return Parameter("limit", "how many at most", schema={"type": "integer", "minimum": 1, "maximum": most})


def openapi(_service: Service, _request: Request) -> Response:
    """The API in the words of OpenAPI 3.1."""
    return Response(_openapi())


@cache
def _openapi() -> bytes:
    return msgspec.json.encode(document(ENDPOINTS))


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    # The field's contract
    Endpoint(
        "POST",
        "/register",
        contract.register,
        Role.REGISTER,
        "field",
        contract.RegisterRequest,
        status=201,
        also=((200, "the answer in Mooncake's spelling"),),
    ),
    Endpoint("POST", "/unregister", contract.unregister, Role.REGISTER, "field", contract.UnregisterRequest),
    Endpoint("POST", "/query", contract.query, Role.READ, "field", contract.QueryRequest, inline_bytes=_PROMPT_BYTES),
    Endpoint(
        "POST",
        "/query_by_hash",
        contract.query_by_hash,
        Role.READ,
        "field",
        contract.HashQueryRequest,
        inline_bytes=_FEW_BYTES,
    ),
    Endpoint(
        "GET",
        "/workers",
        listings.workers,
        Role.READ,
        "field",
        worker=FLEET,
        parameters=_FIELD_FILTERS,
    ),
    Endpoint("GET", "/services", listings.services, Role.READ, "field", worker=FLEET, parameters=_FIELD_FILTERS),
    Endpoint("GET", "/global_view", listings.global_view, Role.READ, "field", worker=FLEET, parameters=_FIELD_FILTERS),
    Endpoint(
        "GET",
        "/dump",
        dump.dump,
        Role.READ,
        "field",
        parameters=(Parameter("own", "`true` for the share of a replica that holds no more"),),
    ),
    # Our own
    Endpoint(
        "POST",
        "/v1/match",
        v1.match,
        Role.READ,
        "v1",
        shapes.MatchRequest,
        shapes.MatchAnswer,
        raw=True,
        parameters=_RAW,
        inline_bytes=_PROMPT_BYTES,
    ),
    Endpoint(
        "POST",
        "/v1/match_many",
        v1.match_many,
        Role.READ,
        "v1",
        shapes.MatchManyRequest,
        shapes.MatchManyAnswer,
        worker=MATCHING,
    ),
    Endpoint(
        "POST",
        "/v1/select",
        v1.select,
        Role.READ,
        "v1",
        shapes.SelectRequest,
        shapes.Selected,
        inline_bytes=_FEW_BYTES,
    ),
    Endpoint(
        "GET",
        "/v1/sources",
        v1.sources,
        Role.READ,
        "v1",
        gives=shapes.SourcesAnswer,
        worker=FLEET,
        parameters=_FILTERS,
    ),
    Endpoint("GET", "/v1/stats", v1.stats, Role.READ, "v1", gives=shapes.StatsAnswer, worker=FLEET),
    Endpoint(
        "GET",
        "/v1/blocks",
        v1.blocks,
        Role.READ,
        "v1",
        gives=shapes.BlocksAnswer,
        worker=LISTING,
        parameters=(
            Parameter("instance", "name of the engine", required=True),
            Parameter("rank", "0 when not given", schema={"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1}),
            _TENANT,
            _GROUP,
            _limit(v1.MAX_PAGE),
            Parameter("cursor", "`next` of the page before", schema={"type": "string", "pattern": v1.CURSOR.pattern}),
        ),
    ),
    Endpoint(
        "GET",
        "/v1/hot",
        v1.hot,
        Role.READ,
        "v1",
        gives=shapes.HotAnswer,
        worker=MATCHING,
        parameters=(
            _MODEL,
            _TENANT,
            _GROUP,
            Parameter("lora", "the base model when not given"),
            Parameter("salt", "no salt when not given"),
            _limit(v1.MAX_HOT),
        ),
    ),
    Endpoint("GET", "/v1/events", v1.events, Role.READ, "v1", parameters=_FILTERS, media="text/event-stream"),
    # Replicas that hold a part each
    Endpoint(
        "POST",
        "/v1/shard/match",
        shard.match,
        Role.READ,
        "shard",
        parts.Question,
        parts.Part,
        inline_bytes=_FEW_BYTES,
    ),
    Endpoint("POST", "/v1/shard/members", shard.members, Role.READ, "shard", parts.Partitions, parts.Members, worker=FLEET),
    Endpoint("POST", "/v1/shard/expect", shard.expect, Role.READ, "shard", parts.Expectation, parts.Noted, worker=MATCHING),
    # Probes and people
    Endpoint("GET", "/health", probes.health, None, "probes", gives=shapes.HealthAnswer, also=_FAILED, probe=True),
    Endpoint("GET", "/livez", probes.live, None, "probes", gives=shapes.HealthAnswer, also=_FAILED, probe=True),
    Endpoint("GET", "/readyz", probes.ready, None, "probes", gives=shapes.ReadyAnswer, also=((503, "not yet"),), probe=True),
    Endpoint("GET", "/metrics", probes.metrics, Role.READ, "probes", media="text/plain", worker=METRICS),
    Endpoint("GET", "/openapi.json", openapi, None, "probes"),
    Endpoint("GET", "/", probes.page, None, "probes", media="text/html"),
)

TABLE: Final[dict[str, dict[str, Endpoint]]] = {}
"""Endpoints by path and method."""
for _endpoint in ENDPOINTS:
    TABLE.setdefault(_endpoint.path, {})[_endpoint.method] = _endpoint
