"""schemathesis compares the OpenAPI document with a real server, with valid and invalid requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from kvevents.service.http.routes import ENDPOINTS, openapi_document
from service_cases import Service, engine, prompt, serving

RAW = "application/octet-stream"
SEMANTIC = {"POST /register", "POST /v1/select"}
"""Values of the right shape that can still be refused: an endpoint that is invalid or not allowed, candidates named twice."""
EXAMPLES = {GenerationMode.POSITIVE: 25, GenerationMode.NEGATIVE: 25}
OPERATIONS: dict[str, Any] = {
    found.label: found
    for result in schemathesis.openapi.from_dict(openapi_document()).get_all_operations()
    if (found := cast("Any", result).ok())
}
ASKED = sorted(set(OPERATIONS) - {"GET /v1/events"})
"""Without the stream that has no end, which tests/integration/test_service_v1.py reads."""


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
        for label in ASKED
        for mode in EXAMPLES
        if mode is GenerationMode.POSITIVE or OPERATIONS[label].query or OPERATIONS[label].body
    ],
)
def test_answers_are_as_described(service: Service, label: str, mode: GenerationMode) -> None:
    """Responses have documented statuses, types and bodies, invalid requests are rejected, and nothing fails with 5xx."""
    operation = OPERATIONS[label]
    excluded = [positive_data_acceptance] if label in SEMANTIC else []

    @settings(
        max_examples=EXAMPLES[mode],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = _integral(case.body)
            if case.media_type == RAW:  # numbers of 32 bits each, which no schema can say, and a model beside them
                case.body = b"\1\0\0\0\2\0\0\0"
                case.query = {**(case.query or {}), "model": "m"}
            elif case.media_type:  # parameters are of raw bodies alone, which no schema can say either
                case.query = {}
        case.call_and_validate(base_url=service.url, timeout=20, excluded_checks=excluded)

    ask()


def _integral(value: Any) -> Any:
    """Numbers such as 1.0, which are integers for JSON Schema alone, as such."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integral(each) for each in value]
    return {name: _integral(each) for name, each in value.items()} if isinstance(value, dict) else value


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
