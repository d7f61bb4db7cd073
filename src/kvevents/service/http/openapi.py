"""The OpenAPI document, from the table of endpoints and the types that it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvevents.service.http.endpoint import Endpoint
from kvevents.service.http.field import FURTHER
from kvevents.service.http.messages import PROBLEM
from kvevents.service.shapes import Problem, Scoped
from kvevents.version import version

_REF: Final = "#/components/schemas/{name}"
_ERRORS: Final = {
    400: "what was sent cannot be used",
    401: "a token is required",
    403: "the token may not do this",
    404: "there is no such thing",
    408: "the request was not complete in time",
    409: "it contradicts what is registered",
    413: "above a named limit",
    415: "a body of another kind",
    421: "the service does not know this host name",
    422: "the body has another shape",
    431: "the headers are too large",
    500: "the service has failed here",
    503: "not now",
}


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds = [kind for endpoint in endpoints for kind in (endpoint.takes, endpoint.gives) if kind is not None]
    schemas, components = msgspec.json.schema_components([*kinds, Problem], ref_template=_REF)
    for kind, rules in FURTHER.items():
        components[kind.__name__] |= rules
    for kind in kinds:
        for alias in getattr(kind, "ALIASES", ()):
            components[kind.__name__]["properties"].pop(alias, None)
        if issubclass(kind, Scoped):
            components[kind.__name__]["required"] = ["model", *components[kind.__name__].get("required", ())]
    by_kind = {id(kind): schema for kind, schema in zip([*kinds, Problem], schemas, strict=True)}
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvevents",
            "version": version(),
            "description": "Which worker holds how much of a prompt, on which tier, and how far to trust the answer.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(endpoint: Endpoint, by_kind: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": (endpoint.method.lower() + endpoint.path.replace("/", "_").replace(".", "_")).rstrip("_"),
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": [*_parameters(endpoint)],
        "responses": _responses(endpoint, by_kind),
        "security": [] if endpoint.role is None else [{}, {"bearer": []}],
    }
    if endpoint.takes is not None:
        content = {kind: {"schema": by_kind[id(endpoint.takes)]} for kind in ("application/json",)}
        if endpoint.raw:
            content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {
            "name": parameter.name,
            "in": "query",
            "required": parameter.required,
            "description": parameter.description,
            "schema": parameter.schema,
        }
        for parameter in endpoint.parameters
    ]


def _responses(endpoint: Endpoint, by_kind: dict[int, Any]) -> dict[str, Any]:
    schema = by_kind[id(endpoint.gives)] if endpoint.gives is not None else {}
    content = {endpoint.media: {"schema": schema}}
    found: dict[str, Any] = {
        str(status): {"description": description, "content": content}
        for status, description in ((endpoint.status, "the answer"), *endpoint.also)
    }
    problem = {PROBLEM.decode(): {"schema": by_kind[id(Problem)]}}
    for status, description in _ERRORS.items():
        found.setdefault(str(status), {"description": description, "content": problem})
    return found
