"""schemathesis compares the OpenAPI document with a real server by valid and invalid requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from kvevents.service.errors import RefusedError
from kvevents.service.http.routes import ENDPOINTS, openapi_document
from kvevents.service.scope_fields import check_unknown_fields
from service_cases import Service, engine, prompt, serving

RAW = "application/octet-stream"
SEMANTIC = {"POST /register", "POST /v1/select"}
"""Operations that can refuse requests of the right shape: an endpoint is invalid or not allowed, or a candidate is named
twice."""
EXAMPLES = 12
"""Examples of each operation and mode. The profile `explore` has new ones in each run."""
DOCUMENT = openapi_document()
OPERATIONS: dict[str, Any] = {
    found.label: found
    for result in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
    if (found := cast("Any", result).ok())
}
TESTED = sorted(set(OPERATIONS) - {"GET /v1/events"})
"""All operations except the endless stream, which tests/integration/test_service_v1.py reads."""

BODIES = {f"{endpoint.method} {endpoint.path}": endpoint.body for endpoint in ENDPOINTS if endpoint.body}


def can_have_any_value(label: str, name: str) -> bool:
    """Return whether the document describes the values of a field, or the service ignores the field.

    Hypothesis also generates names from our modules, such as the aliases of fields, which the document leaves out.
    """
    body = BODIES[label]
    if name in DOCUMENT["components"]["schemas"][body.__name__]["properties"]:
        return True
    return name not in body.__struct_fields__ and not is_similar(name)


def is_similar(name: str) -> bool:
    """Return whether an unknown name is refused because it is similar to that of a field."""
    try:
        check_unknown_fields([name], [])
    except RefusedError:
        return True
    return False


@pytest.fixture(scope="module", name="service")
def one_service() -> Iterator[Service]:
    with engine(seed=1) as made, serving() as service:
        assert service.register("e", made.publisher).status == 201
        made.store(prompt(1))
        service.exact("e", blocks=4)
        yield service
        assert not service.log_lines("ERROR")


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        pytest.param(label, mode, id=f"{label} {mode.value}")
        for label in TESTED
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or OPERATIONS[label].query or OPERATIONS[label].body
    ],
)
def test_responses_match_the_document(service: Service, label: str, mode: GenerationMode) -> None:
    """Responses have documented statuses, types and bodies, invalid requests are rejected, and nothing fails with 5xx."""
    operation = OPERATIONS[label]
    excluded = [positive_data_acceptance] if label in SEMANTIC else []

    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            if case.media_type == RAW:  # a schema cannot describe 32-bit numbers
                case.body = b"\1\0\0\0\2\0\0\0"
                case.query = {**(case.query or {}), "model": "m"}
            elif case.media_type:  # a schema cannot say that only raw bodies have parameters
                case.query = {}
            if isinstance(case.body, dict):  # a schema cannot say that unknown names similar to known ones are refused
                case.body = {name: value for name, value in case.body.items() if can_have_any_value(label, name)}
        case.call_and_validate(base_url=service.url, timeout=20, excluded_checks=excluded)

    ask()


@pytest.mark.parametrize(("number", "status"), [(b"2.0", 200), (b"2e0", 200), (b"2.5", 422), (b"1e30", 422), (b"NaN", 400)])
@pytest.mark.parametrize("more", [b"", b', "unknown": 1.0'])
def test_a_number_without_a_fraction_is_an_integer(service: Service, number: bytes, status: int, more: bytes) -> None:
    """JSON Schema says so, and programs in JavaScript and Lua do not know the difference."""
    body = b'{"model": "m", "token_ids": [1, %b]%b}' % (number, more)
    assert service.ask("POST", "/query", body, content_type="application/json").status == status


def test_every_endpoint_is_described(service: Service) -> None:
    document = service.get("/openapi.json").json
    assert document["openapi"].startswith("3.1")
    assert {(method.upper(), path) for path, methods in document["paths"].items() for method in methods} == {
        (endpoint.method, endpoint.path) for endpoint in ENDPOINTS
    }
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"].endswith(".")
            assert set(operation["responses"]) >= {"200"} or "201" in operation["responses"]
            for response in operation["responses"].values():
                assert all(content["schema"] for content in response.get("content", {}).values())
