"""Queries that the data plane has forwarded. This module checks a query, and then the data plane answers it.

The data plane answers a query itself if it understands the whole request and no spans are recorded. It forwards queries with
errors, queries from browsers, and queries with a content type or fields that only the control plane reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import UNSET, Struct

from kvevents.service.data_plane import QueryAnswer
from kvevents.service.errors import ServiceError, TooMuchError
from kvevents.service.fleet.registration import Scope
from kvevents.service.http.messages import MSGPACK_TYPE, HttpRequest, Response, answer_json
from kvevents.service.scope_fields import scope_of
from kvevents.service.service import Service

_PROMPT_FIELDS: Final = frozenset({"tokens", "token_ids"})
"""Fields with the token ids of one prompt. `DataPlane.answer` takes these token ids as a separate argument."""


def check_tokens(service: Service, count: int) -> None:
    """Raise `TooMuchError` if a request has more tokens than `limits.max_tokens`."""
    if count > (limit := service.settings.limits.max_tokens):
        raise TooMuchError(f"the request has {count} tokens", "too-many-tokens", f"limits.max_tokens allows {limit}")


def answer_query(service: Service, request: HttpRequest, query: Struct, tokens: Any = (), **changes: Any) -> Response:
    """Answer a query. `query` is its decoded body, and `tokens` are the token ids of its prompt, if it has one prompt.

    `changes` are values that replace fields of the body. Raises `ServiceError`.
    """
    scope = scope_of(query)
    values = {name: getattr(query, name) for name in query.__struct_fields__ if name not in _PROMPT_FIELDS} | changes
    fields = {name: value for name, value in values.items() if value is not None and value is not UNSET}
    wants_msgpack = request.path.startswith("/v1/") and request.headers.wants_msgpack
    response = ask(service, scope, request.path, fields, tokens, wants_msgpack=wants_msgpack)
    request.span_attributes = {"kvevents.model": scope.model, "kvevents.longest_matched": response.longest_match}
    if count := sum(map(len, fields["prompts"])) if "prompts" in fields else len(tokens):  # A query by hash has no tokens.
        request.span_attributes["kvevents.prompt_tokens"] = count
    return Response(response.body, kind=MSGPACK_TYPE) if wants_msgpack else answer_json(response.body, request)


def ask(
    service: Service, scope: Scope, path: str, fields: Mapping[str, Any], tokens: Any = (), *, wants_msgpack: bool = False
) -> QueryAnswer:
    """Return the data plane's answer to a `POST` request with these fields. Raises `ServiceError`."""
    check_tokens(service, len(tokens))
    try:
        response = service.data_plane.answer("POST", path, fields, tokens, wants_msgpack=wants_msgpack)
    except OverflowError as error:
        raise ServiceError("a number has more than 64 bits", "bad-shape", "see /openapi.json", status=422) from error
    if response is None:
        raise service.fleet.why_unanswered(scope)
    return response
