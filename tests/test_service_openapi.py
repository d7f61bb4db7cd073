"""The OpenAPI document is true: schemathesis asks a real server whatever it allows, and everything it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS

from kvevents.service.http.routing import ENDPOINTS
from service_cases import Service, engine, prompt, serving

EXAMPLES = 40


@pytest.fixture(scope="module", name="service")
def one_service() -> Iterator[Service]:
    with engine(seed=1) as made, serving() as service:
        assert service.register("e", made.publisher).status == 201
        made.store(prompt(1))
        service.exact("e", blocks=4)
        yield service
        assert not service.told("ERROR")


@pytest.fixture(name="api")
def described(service: Service) -> Any:
    """Without the stream that has no end, which tests/test_service_v1.py reads."""
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json").exclude(path="/v1/events")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
def test_answers_are_as_described(case: Any) -> None:
    """No 5xx, only documented statuses and types, bodies of the described shape, and nothing undescribed is taken."""
    case.call_and_validate(timeout=20)


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
