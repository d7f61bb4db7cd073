"""The table of HTTP endpoints, and the OpenAPI document that is generated from it.

Dispatch, roles, metrics and `/openapi.json` all read the table. The handlers of probes, of metrics and of the page are here
too; those of other endpoints are in the modules of their APIs.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, TypeAlias

import msgspec

from kvevents.client import schemas
from kvevents.client.schemas import MAX_NAME_BYTES, Problem, ScopedRequest
from kvevents.package_metadata import version
from kvevents.service.access import Role
from kvevents.service.exposition import exposition
from kvevents.service.http import indexer_api, indexer_listings, v1
from kvevents.service.http.messages import PROBLEM, HttpRequest, Response, StreamingResponse, answer
from kvevents.service.http.thread_pools import FLEET, LISTING, MATCHING, METRICS
from kvevents.service.service import Service

Handler: TypeAlias = "Callable[[Service, HttpRequest], Response | StreamingResponse]"
"""Handles a request; `HttpRequest.run` calls it."""
AsyncHandler: TypeAlias = "Callable[[Service, HttpRequest], Awaitable[Response | StreamingResponse]]"
"""Handles a request, and passes its slow steps to `HttpRequest.run`."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the query string."""

    name: str
    description: str
    required: bool = False
    schema: dict[str, Any] = field(default_factory=lambda: {"type": "string"})
    """JSON Schema of the value."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table."""

    method: str
    path: str
    handler: Handler | AsyncHandler
    role: Role | None
    """Role that a caller needs; None if the endpoint is public."""
    tag: str
    takes: Any = None
    """Type of the request body."""
    gives: Any = None
    """Type of the response body; None if it is not JSON of one type."""
    status: int = 200
    also: tuple[tuple[int, str], ...] = ()
    """Other statuses of responses with this type, and when they are sent."""
    raw: bool = False
    """Whether the body may also be raw token ids: 32-bit unsigned little-endian numbers."""
    inline_bytes: int | None = None
    """Size of the largest body that is handled in the event loop; larger ones go to the thread pool `MATCHING`.

    The limit keeps one request from delaying all others. Token ids are read by native code, so prompts may be larger.
    """
    probe: bool = False
    """Whether orchestrators send it: with any host name, and also when the service accepts no other clients."""
    pool: str = ""
    """Name of the thread pool that runs the handler, if it may take longer than a match; empty for the event loop."""
    parameters: tuple[Parameter, ...] = field(default=())
    """Parameters of the query string; an endpoint with a body accepts them with raw bodies only.

    Others are rejected, except at public endpoints.
    """
    media: str = "application/json"
    """Media type of the response."""

    @property
    def summary(self) -> str:
        """First line of the handler's docstring."""
        return (self.handler.__doc__ or "").partition("\n")[0]


_NAME: Final[dict[str, Any]] = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_BYTES}
_MODEL: Final = Parameter("model", "name of the model", required=True)
_TENANT: Final = Parameter("tenant", "tenant; default: `default`")
_GROUP: Final = Parameter("group", "routing group; default: `default`")
_FILTERS: Final = (
    Parameter("instance", "only this engine"),
    Parameter("model", "only this model"),
    Parameter("tenant", "only this tenant"),
    Parameter("group", "only this routing group"),
)
_INDEXER_FILTERS: Final = (
    Parameter("model_name", "only this model"),
    Parameter("tenant_id", "only this tenant"),
    Parameter("routing_group", "only this routing group"),
)
_RAW: Final = (
    Parameter("model", "for a raw body: name of the model", schema=_NAME),
    *(
        Parameter(name, f"for a raw body: as `{name}` of `MatchRequest`", schema=_NAME)
        for name in ("tenant", "group", "lora", "salt")
    ),
    Parameter(
        "lora_id",
        "for a raw body: as `lora_id` of `MatchRequest`",
        schema={"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    ),
    *(
        Parameter(name, f"for a raw body: as `{name}` of `MatchRequest`", schema={"type": "boolean"})
        for name in ("expected", "whole_prompt")
    ),
)
_INLINE_PROMPT_BYTES: Final = 1 << 20
_INLINE_OBJECT_BYTES: Final = 1 << 16
"""Two thousand candidates or three thousand hashes, which Python reads."""
METRICS_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_FAILED: Final = ((503, "the process failed and must be restarted"),)


def _limit(most: int) -> Parameter:
    return Parameter("limit", "maximum number of items", schema={"type": "integer", "minimum": 1, "maximum": most})


def health(service: Service, request: HttpRequest) -> Response:
    """Return whether the service receives events; 503 if the process must be restarted."""
    found = service.health()
    return answer(found, request, status=503 if found.status == "failed" else 200)


def live(service: Service, request: HttpRequest) -> Response:
    """Return the same as `/health`, under the path that Kubernetes uses."""
    return health(service, request)


def ready(service: Service, request: HttpRequest) -> Response:
    """Return whether the service can be queried: enough sources are EXACT or the deadline has passed; 503 before."""
    readiness = service.readiness()
    return answer(readiness, request, status=200 if readiness.ready else 503)


def metrics(service: Service, _request: HttpRequest) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(exposition(service), kind=METRICS_TYPE)


@cache
def _page() -> bytes:
    return (files("kvevents.service") / "page.html").read_bytes()


def page(_service: Service, _request: HttpRequest) -> Response:
    """Return the page that shows the fleet in a browser."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),
    )
    return Response(_page().replace(b"{{nonce}}", nonce.encode()), kind=b"text/html; charset=utf-8", headers=headers)


def openapi(_service: Service, _request: HttpRequest) -> Response:
    """Return the OpenAPI 3.1 document of this API."""
    return Response(_encoded_openapi())


@cache
def _encoded_openapi() -> bytes:
    return msgspec.json.encode(openapi_document())


ENDPOINTS: Final[tuple[Route, ...]] = (
    # The indexer API of Dynamo and Mooncake
    Route(
        "POST",
        "/register",
        indexer_api.register,
        Role.REGISTER,
        "indexer",
        indexer_api.RegisterRequest,
        status=201,
        also=((200, "the response of Mooncake's API"),),
    ),
    Route("POST", "/unregister", indexer_api.unregister, Role.REGISTER, "indexer", indexer_api.UnregisterRequest),
    Route(
        "POST", "/query", indexer_api.query, Role.READ, "indexer", indexer_api.QueryRequest, inline_bytes=_INLINE_PROMPT_BYTES
    ),
    Route(
        "POST",
        "/query_by_hash",
        indexer_api.query_by_hash,
        Role.READ,
        "indexer",
        indexer_api.HashQueryRequest,
        inline_bytes=_INLINE_OBJECT_BYTES,
    ),
    Route(
        "GET",
        "/workers",
        indexer_listings.workers,
        Role.READ,
        "indexer",
        pool=FLEET,
        parameters=_INDEXER_FILTERS,
    ),
    Route("GET", "/services", indexer_listings.services, Role.READ, "indexer", pool=FLEET, parameters=_INDEXER_FILTERS),
    Route("GET", "/global_view", indexer_listings.global_view, Role.READ, "indexer", pool=FLEET, parameters=_INDEXER_FILTERS),
    Route(
        "GET",
        "/dump",
        indexer_listings.dump,
        Role.READ,
        "indexer",
    ),
    # The API of kvevents
    Route(
        "POST",
        "/v1/match",
        v1.match,
        Role.READ,
        "v1",
        schemas.MatchRequest,
        schemas.MatchAnswer,
        raw=True,
        parameters=_RAW,
        inline_bytes=_INLINE_PROMPT_BYTES,
    ),
    Route(
        "POST",
        "/v1/match_many",
        v1.match_many,
        Role.READ,
        "v1",
        schemas.MatchManyRequest,
        schemas.MatchManyAnswer,
        pool=MATCHING,
    ),
    Route(
        "POST",
        "/v1/select",
        v1.select,
        Role.READ,
        "v1",
        schemas.SelectRequest,
        schemas.Selection,
        inline_bytes=_INLINE_OBJECT_BYTES,
    ),
    Route(
        "GET",
        "/v1/sources",
        v1.sources,
        Role.READ,
        "v1",
        gives=schemas.SourcesAnswer,
        pool=FLEET,
        parameters=_FILTERS,
    ),
    Route("GET", "/v1/stats", v1.stats, Role.READ, "v1", gives=schemas.StatsAnswer, pool=FLEET),
    Route(
        "GET",
        "/v1/blocks",
        v1.blocks,
        Role.READ,
        "v1",
        gives=schemas.BlocksAnswer,
        pool=LISTING,
        parameters=(
            Parameter("instance", "name of the engine instance", required=True),
            Parameter(
                "rank", "data-parallel rank; default 0", schema={"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1}
            ),
            _TENANT,
            _GROUP,
            _limit(v1.MAX_PAGE),
            Parameter("cursor", "`next` of the previous page", schema={"type": "string", "pattern": v1.CURSOR.pattern}),
        ),
    ),
    Route("GET", "/v1/events", v1.events, Role.READ, "v1", parameters=_FILTERS, media="text/event-stream"),
    # Probes, metrics, documentation and the page
    Route("GET", "/health", health, None, "probes", gives=schemas.HealthAnswer, also=_FAILED, probe=True),
    Route("GET", "/livez", live, None, "probes", gives=schemas.HealthAnswer, also=_FAILED, probe=True),
    Route(
        "GET",
        "/readyz",
        ready,
        None,
        "probes",
        gives=schemas.ReadyAnswer,
        also=((503, "the service is not ready"),),
        probe=True,
    ),
    Route("GET", "/metrics", metrics, Role.READ, "probes", media="text/plain", pool=METRICS),
    Route("GET", "/openapi.json", openapi, None, "probes"),
    Route("GET", "/", page, None, "probes", media="text/html"),
)

ROUTES: Final[dict[str, dict[str, Route]]] = {}
"""Endpoints by path and method."""
for _endpoint in ENDPOINTS:
    ROUTES.setdefault(_endpoint.path, {})[_endpoint.method] = _endpoint


# --- OpenAPI -----------------------------------------------------------------------------------------------------------------

_REF: Final = "#/components/schemas/{name}"
_ERRORS: Final = {
    400: "the request cannot be used",
    401: "a token is required",
    403: "the token does not have the required role",
    404: "not found",
    408: "the request was not complete in time",
    409: "the request conflicts with the current state",
    413: "the request exceeds a limit",
    415: "unsupported content type",
    421: "the service does not know this host name",
    422: "the body does not match the schema",
    431: "the headers are too large",
    500: "internal error",
    503: "the service is unavailable; retry later",
}


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the table."""
    kinds = [kind for endpoint in ENDPOINTS for kind in (endpoint.takes, endpoint.gives) if kind is not None]
    found, components = msgspec.json.schema_components([*kinds, Problem], ref_template=_REF)
    for kind, rules in indexer_api.SCHEMA_RULES.items():
        components[kind.__name__] |= rules
    for kind in kinds:
        for alias in getattr(kind, "ALIASES", ()):
            components[kind.__name__]["properties"].pop(alias, None)
        if issubclass(kind, ScopedRequest):
            components[kind.__name__]["required"] = ["model", *components[kind.__name__].get("required", ())]
    by_kind = {id(kind): schema for kind, schema in zip([*kinds, Problem], found, strict=True)}
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvevents",
            "version": version(),
            "description": "Which worker holds how much of a prompt, on which tier, and how far the answer can be trusted.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Route, by_kind: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": (endpoint.method.lower() + endpoint.path.replace("/", "_").replace(".", "_")).rstrip("_"),
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": [
            {
                "name": parameter.name,
                "in": "query",
                "required": parameter.required,
                "description": parameter.description,
                "schema": parameter.schema,
            }
            for parameter in endpoint.parameters
        ],
        "responses": _responses(endpoint, by_kind),
        "security": [] if endpoint.role is None else [{}, {"bearer": []}],
    }
    if endpoint.takes is not None:
        content: dict[str, Any] = {"application/json": {"schema": by_kind[id(endpoint.takes)]}}
        if endpoint.raw:
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(endpoint: Route, by_kind: dict[int, Any]) -> dict[str, Any]:
    schema = by_kind[id(endpoint.gives)] if endpoint.gives is not None else {}
    content = {endpoint.media: {"schema": schema}}
    found: dict[str, Any] = {
        str(status): {"description": description, "content": content}
        for status, description in ((endpoint.status, "success"), *endpoint.also)
    }
    problem = {PROBLEM.decode(): {"schema": by_kind[id(Problem)]}}
    for status, description in _ERRORS.items():
        found.setdefault(str(status), {"description": description, "content": problem})
    return found
