"""The table of HTTP endpoints, and the OpenAPI document that is generated from it.

Dispatch, roles, metrics and `/openapi.json` all read the table. This module has the handlers of probes, of metrics and of the
page. The handlers of other endpoints are in the modules of their APIs.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, partial
from typing import Any, Final, TypeAlias, get_args

import msgspec
from msgspec import Struct

from kvevents.client import schemas
from kvevents.client.schemas import MAX_NAME_BYTES, Problem, ScopedRequest
from kvevents.package_metadata import VERSION
from kvevents.routing.weights import Tier
from kvevents.service.access import Role
from kvevents.service.http import dynamo_messages as dynamo
from kvevents.service.http import dynamo_selection as selection
from kvevents.service.http import indexer_api, indexer_listings, pages, reservations, v1
from kvevents.service.http.messages import PROBLEM_TYPE, AnyResponse, Decoders, HttpRequest, Response, answer
from kvevents.service.http.thread_pools import PoolName
from kvevents.service.service import Service
from kvevents.stream import TrustState

Handler: TypeAlias = "Callable[[Service, HttpRequest], AnyResponse | Awaitable[AnyResponse]]"
"""Function that handles a request. The thread pool of the route runs it; without a pool, the event loop does."""


class Route(Struct, frozen=True):
    """One row of the table of endpoints."""

    method: str
    path: str
    handler: Handler
    role: Role | None
    """Role that a caller needs; None if the endpoint is public."""
    tag: str
    body: Any = None
    """Type of the request body; None for a request without a body."""
    answer: Any = None
    """Type of the body of a successful response."""
    status: int = 200
    statuses: Mapping[int, str] = {}
    """Maps each other status that can have the body `answer` to its condition."""
    accepts_raw: bool = False
    """Whether the body may be raw token ids instead: 32-bit unsigned little-endian numbers."""
    is_probe: bool = False
    """Whether orchestrators send these requests. The service accepts them with any host name, and even at `max_clients`."""
    pool: PoolName | None = None
    """The thread pool for a handler that may take longer than a match; None if the event loop runs the handler."""
    parameters: tuple[Mapping[str, Any], ...] = ()
    """Parameters of the query string, and headers that change the response, in the form of OpenAPI documents.

    An endpoint with a body accepts a query string only with raw bodies. Unknown parameters are rejected, except at public
    endpoints.
    """
    media: str = "application/json"
    """Media type of the response."""
    decoders: Decoders = Decoders()
    """Decoders of the body."""

    @property
    def known_fields(self) -> frozenset[str] | None:
        """Fields of the body, if unknown fields are ignored, as Dynamo and Mooncake do; None if unknown fields are rejected."""
        return None if self.body is None or self.tag == "v1" else frozenset(self.body.__struct_fields__)

    def __post_init__(self) -> None:
        decoders = Decoders(msgspec.json.Decoder(self.body), msgspec.msgpack.Decoder(self.body), self.known_fields)
        msgspec.structs.force_setattr(self, "decoders", decoders)  # Built at import, see `build_decoder_now`.


def _make_param(name: str, description: str, place: str = "query", *, required: bool = False, **schema: Any) -> dict[str, Any]:
    """Return a parameter in the form of OpenAPI documents. Without `schema`, its value can be any text."""
    fields = {"name": name, "in": place, "required": required, "description": description}
    return fields | {"schema": schema or {"type": "string"}}


def _limit_parameter(default: str = "") -> dict[str, Any]:
    return _make_param("limit", f"maximum number of items{default}", type="integer", minimum=1, maximum=pages.MAX_LISTED_ITEMS)


def _filter_parameters(**names: str) -> tuple[dict[str, Any], ...]:
    return tuple(_make_param(name, f"only this {what}") for name, what in names.items())


_NAME_SCHEMA: Final[dict[str, Any]] = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_BYTES}
_FILTERS: Final = _filter_parameters(instance="engine", model="model", tenant="tenant", group="routing group")
_SCOPE_FILTERS: Final = _filter_parameters(model_name="model", tenant_id="tenant", routing_group="routing group")
_RAW_QUERY: Final = (
    _make_param("model", "for a raw body: name of the model", **_NAME_SCHEMA),
    *(
        _make_param(name, f"for a raw body: as `{name}` of `MatchRequest`", **schema)
        for name, schema in {
            **dict.fromkeys(("tenant", "group", "lora", "salt"), _NAME_SCHEMA),
            "lora_id": {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
            "expected": {"type": "boolean"},
            "whole_prompt": {"type": "boolean"},
        }.items()
    ),
)
_TAG_PARAMETER: Final = _make_param("If-None-Match", "entity tag (`ETag`) of the answer that the client has", "header")
"""The header parameter of endpoints whose responses have an entity tag."""
_PAGE_QUERY: Final = (
    _limit_parameter(f"; default {pages.MAX_LISTED_ITEMS}"),
    _make_param("cursor", "where the page begins", type="string", pattern=pages.CURSOR_PATTERN.pattern),
    _TAG_PARAMETER,
)
_BLOCK_QUERY: Final = (
    _make_param("instance", "name of the engine instance", required=True),
    _make_param("rank", "data-parallel rank; default 0", type="integer", minimum=0, maximum=(1 << 32) - 1),
    _make_param("tenant", "tenant; default: `default`"),
    _make_param("group", "routing group; default: `default`"),
    _limit_parameter(),
    _make_param("cursor", "`next` of the previous page", type="string", pattern=v1.CURSOR_PATTERN.pattern),
)
_EVENT_QUERY: Final = (
    *_FILTERS,
    _make_param("Last-Event-ID", "id of the newest event that the client has; the events after it follow", "header"),
)
METRICS_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_FAILED_STATUS: Final = {503: "the process failed and must be restarted"}
_REGISTERED_STATUS: Final = {200: "an equal registration existed before, or the request has the form of Mooncake's API"}


def health(service: Service, request: HttpRequest) -> Response:
    """Return whether the service receives events; 503 if the process must be restarted."""
    status = service.health()
    return answer(status, request, status=503 if status.status == "failed" else 200)


def ready(service: Service, request: HttpRequest) -> Response:
    """Return whether the service can be queried: if enough sources are EXACT, or the deadline has passed; else 503."""
    readiness = service.readiness()
    return answer(readiness, request, status=200 if readiness.ready else 503)


def metrics(service: Service, _request: HttpRequest) -> Response:
    """Return the metrics in Prometheus' text format."""
    from kvevents.service.exposition import format_metrics  # noqa: PLC0415 - a slow import, only for scrapes

    return Response(format_metrics(service), kind=METRICS_TYPE)


@cache
def _read_page() -> bytes:
    from importlib.resources import files  # noqa: PLC0415 - needed only if a browser requests the page

    folder = files("kvevents.service")
    text = (folder / "page.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        text = text.replace(f"{{{{{name}}}}}", (folder / name).read_text(encoding="utf-8"))
    return text.encode()


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
    return Response(_read_page().replace(b"{{nonce}}", nonce.encode()), kind=b"text/html; charset=utf-8", headers=headers)


def openapi(_service: Service, _request: HttpRequest) -> Response:
    """Return the OpenAPI 3.1 document of this API."""
    return Response(_encode_openapi())


@cache
def _encode_openapi() -> bytes:
    return msgspec.json.encode(openapi_document())


_Object: TypeAlias = dict[str, Any]
_indexer: Final = partial(Route, role="read", tag="indexer")
_matching: Final = partial(_indexer, "POST", answer=dict[str, _Object | list[int]], pool="queries")
_listing: Final = partial(_indexer, "GET", pool="fleet")
_registering: Final = partial(Route, "POST", role="register", tag="indexer")
_changing: Final = partial(_registering, answer=schemas.RegistrationAnswer)
_selection: Final = partial(Route, role="read", tag="selection")
_selecting: Final = partial(_selection, "POST", pool="queries")
_v1: Final = partial(Route, role="read", tag="v1")
_querying: Final = partial(_v1, "POST", pool="queries")
_public: Final = partial(Route, "GET", role=None, tag="probes")
_probe: Final = partial(_public, is_probe=True)

ENDPOINTS: Final[tuple[Route, ...]] = (
    # The indexer API of Dynamo and Mooncake
    _changing("/register", indexer_api.register, body=schemas.RegisterRequest, status=201, statuses=_REGISTERED_STATUS),
    _changing("/unregister", indexer_api.unregister, body=schemas.UnregisterRequest),
    _matching("/query", indexer_api.query, body=indexer_api.QueryRequest),
    _matching("/query_by_hash", indexer_api.query_by_hash, body=indexer_api.HashQueryRequest),
    _listing("/workers", indexer_listings.workers, answer=list[_Object], parameters=(*_SCOPE_FILTERS, *_PAGE_QUERY)),
    _listing("/services", indexer_listings.services, answer=dict[str, list[_Object] | int], parameters=_SCOPE_FILTERS),
    _listing("/global_view", indexer_listings.global_view, answer=dict[str, list[_Object]], parameters=_SCOPE_FILTERS),
    _indexer("GET", "/dump", indexer_listings.dump, answer=dict[str, _Object]),
    _selecting(
        "/query_tiered_by_hash",
        selection.query_tiered_by_hash,
        tag="indexer",
        body=dynamo.TieredQueryRequest,
        answer=dynamo.TieredAnswer,
    ),
    # The API of Dynamo's selection service
    _selecting("/select", selection.select, body=dynamo.SelectWorkerRequest, answer=dynamo.SelectedWorker),
    _selecting(
        "/select_and_reserve", selection.select_and_reserve, body=dynamo.SelectWorkerRequest, answer=dynamo.SelectedWorker
    ),
    _selecting("/reservations", selection.reserve_worker, body=dynamo.BookRequest, answer=dynamo.Booked, status=201),
    _selecting("/potential_loads", selection.potential_loads, body=dynamo.PromptRequest, answer=list[dynamo.PotentialLoad]),
    _selecting("/overlap_scores", selection.overlap_scores, body=dynamo.PromptRequest, answer=dynamo.OverlapScores),
    _selecting("/reservations/{id}/output_block", selection.output_block, body=dynamo.OutputBlockRequest, answer=dynamo.Done),
    _selection("POST", "/reservations/{id}/prefill_complete", selection.prefill_complete, answer=dynamo.Done),
    _selection("DELETE", "/reservations/{id}", selection.end_reservation, answer=dynamo.Done),
    _selection("GET", "/loads", selection.loads, answer=list[dynamo.ModelLoad], pool="fleet", parameters=_SCOPE_FILTERS),
    _selection(
        "GET", "/ready", selection.ready, answer=dynamo.ReadyWorkers, statuses={503: "no worker can be selected"}, pool="fleet"
    ),
    # The API of kvevents
    _querying(
        "/v1/match", v1.match, body=schemas.MatchRequest, answer=schemas.MatchAnswer, accepts_raw=True, parameters=_RAW_QUERY
    ),
    _querying("/v1/match_many", v1.match_many, body=schemas.MatchManyRequest, answer=schemas.MatchManyAnswer),
    _querying("/v1/select", v1.select, body=schemas.SelectRequest, answer=schemas.Selection),
    _v1("GET", "/v1/select/explain", reservations.explain, answer=schemas.DecisionsAnswer),
    _v1("GET", "/v1/reservations", reservations.list_open, answer=schemas.ReservationsAnswer, parameters=(_limit_parameter(),)),
    _v1("GET", "/v1/reservations/{id}", reservations.show, answer=schemas.Reservation),
    _v1("POST", "/v1/reservations/{id}", reservations.update, body=schemas.ReservationUpdate, answer=schemas.Reservation),
    _v1("DELETE", "/v1/reservations/{id}", reservations.finish, answer=schemas.Reservation),
    _v1("GET", "/v1/sources", v1.sources, answer=schemas.SourcesAnswer, pool="fleet", parameters=(*_FILTERS, *_PAGE_QUERY)),
    _registering("/v1/drain", v1.drain, tag="v1", body=schemas.DrainRequest, answer=schemas.DrainAnswer),
    _v1("GET", "/v1/stats", v1.stats, answer=schemas.StatsAnswer, pool="fleet"),
    _v1("GET", "/v1/blocks", v1.blocks, answer=schemas.BlocksAnswer, pool="listing", parameters=_BLOCK_QUERY),
    _v1("GET", "/v1/events", v1.events, answer=str, parameters=_EVENT_QUERY, media="text/event-stream"),
    # Probes, metrics, documentation and the page
    _probe("/health", health, answer=schemas.HealthAnswer, statuses=_FAILED_STATUS),
    _probe("/livez", health, answer=schemas.HealthAnswer, statuses=_FAILED_STATUS),
    _probe("/readyz", ready, answer=schemas.ReadyAnswer, statuses={503: "the service is not ready"}),
    _public("/metrics", metrics, answer=str, role="read", media="text/plain", pool="metrics"),
    _public("/openapi.json", openapi, answer=_Object),
    _public("/", page, answer=str, media="text/html"),
)

ROUTES: Final[dict[str, dict[str, Route]]] = {}
"""Maps each path to its methods, and each method to its endpoint."""
for _endpoint in ENDPOINTS:
    ROUTES.setdefault(_endpoint.path, {})[_endpoint.method] = _endpoint

ITEM_PLACEHOLDER: Final = "{id}"
"""Placeholder in the path of a route, in place of the name of a reservation."""


def item_of(path: str, path_of_request: str) -> str:
    """Return the text that a request's path has in place of `{id}` in the route's path; empty if the route has no `{id}`."""
    prefix, _, suffix = path.partition(ITEM_PLACEHOLDER)
    return path_of_request.removeprefix(prefix).removesuffix(suffix)


# --- OpenAPI -----------------------------------------------------------------------------------------------------------------

_ERROR_TEXTS: Final = {
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
    kinds = [kind for endpoint in ENDPOINTS for kind in (endpoint.body, endpoint.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components([*kinds, Problem], ref_template="#/components/schemas/{name}")
    for kind, rules in (indexer_api.SCHEMA_RULES | dynamo.SCHEMA_RULES).items():
        components[kind.__name__] |= rules
    for endpoint in ENDPOINTS:
        if endpoint.known_fields is not None:
            components[endpoint.body.__name__]["additionalProperties"] = True
    for kind in kinds:
        for alias in getattr(kind, "ALIASES", ()):
            components[kind.__name__]["properties"].pop(alias, None)
        if isinstance(kind, type) and issubclass(kind, ScopedRequest):
            components[kind.__name__]["required"] = ["model", *components[kind.__name__].get("required", ())]
    for name, keys in (("tiers", Tier), ("trust", TrustState)):
        components["SelectRequest"]["properties"][name]["propertyNames"] = {"enum": get_args(keys)}
    by_kind = {id(kind): schema for kind, schema in zip([*kinds, Problem], schemas, strict=True)}
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _describe_operation(endpoint, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvevents",
            "version": VERSION,
            "description": "Which worker holds how much of a prompt, on which tier, and how far the answer can be trusted.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


_ID_RULES: Final = {"type": "string", "pattern": schemas.RESERVATION_ID_PATTERN, "maxLength": schemas.MAX_RESERVATION_ID_LENGTH}
_ITEM_PARAMETER: Final = _make_param("id", "name of the reservation", "path", required=True, **_ID_RULES)


def _describe_operation(endpoint: Route, by_kind: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": (endpoint.method.lower() + endpoint.path.replace("/", "_").replace(".", "_")).rstrip("_"),
        "summary": (endpoint.handler.__doc__ or "").partition("\n")[0],
        "tags": [endpoint.tag],
        "parameters": [*([_ITEM_PARAMETER] if ITEM_PLACEHOLDER in endpoint.path else []), *endpoint.parameters],
        "responses": _describe_responses(endpoint, by_kind),
        "security": [] if endpoint.role is None else [{}, {"bearer": []}],
    }
    if endpoint.body is not None:
        content: dict[str, Any] = {"application/json": {"schema": by_kind[id(endpoint.body)]}}
        if endpoint.accepts_raw:
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _describe_responses(endpoint: Route, by_kind: dict[int, Any]) -> dict[str, Any]:
    content = {endpoint.media: {"schema": by_kind[id(endpoint.answer)]}}
    responses: dict[str, Any] = {
        str(status): {"description": description, "content": content}
        for status, description in {endpoint.status: "success", **endpoint.statuses}.items()
    }
    if _TAG_PARAMETER in endpoint.parameters:
        responses["304"] = {"description": "the client has this version already (`If-None-Match`)"}
    problem = {PROBLEM_TYPE.decode(): {"schema": by_kind[id(Problem)]}}
    for status, description in _ERROR_TEXTS.items():
        responses.setdefault(str(status), {"description": description, "content": problem})
    return responses
