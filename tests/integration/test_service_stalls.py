"""No request occupies the event loop for long: large requests are refused, or processed in threads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from kvevents.service import selection as selecting
from kvevents.service.fleet.registration import Registration
from kvevents.service.http import v1
from kvevents.service.http.app import App
from kvevents.service.http.messages import Headers, HttpRequest, Response
from kvevents.service.http.routes import ROUTES
from kvevents.service.service import Service
from kvevents.service.settings import Limits, ServiceSettings
from service_cases import serving, write

LIMITS = "limits = { max_json_bytes = 60_000, max_hashes = 100, max_candidates = 20 }\n"


def request(path: str, body: bytes) -> HttpRequest:
    return HttpRequest("POST", path, b"", Headers([(b"content-type", b"application/json")]), body)


async def post_to_control_plane(app: App, path: str, body: bytes) -> Response:
    """Return the response of the handler in the control plane, which answers requests with spans."""
    found = await app._handle(ROUTES[path]["POST"], request(path, body))
    assert isinstance(found, Response)
    return found


def test_a_selection_among_many_workers_is_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds if the request names the candidates, and if they are all workers of its model."""
    seen: list[tuple[int, bool]] = []
    original_select = selecting.select

    def record_thread(requested: Any, candidates: Any, *rest: Any) -> Any:
        seen.append((len(candidates), threading.current_thread() is threading.main_thread()))
        return original_select(requested, candidates, *rest)

    monkeypatch.setattr(v1, "select_worker", record_thread)

    async def scenario() -> None:
        service = Service(ServiceSettings(limits=Limits(inline_candidates=2)))
        await service.start()
        try:
            await select_workers(service, App(service))
        finally:
            await service.stop()

    async def select_workers(service: Service, app: App) -> None:
        for count in (2, 3):
            service.fleet.register(Registration(instance=f"e{count}", endpoint="tcp://127.0.0.1:1", model="m"))
            named = [{"instance": f"w{number}"} for number in range(count)]
            body = {"model": "m", "tokens": [], "candidates": named}
            answer = await post_to_control_plane(app, "/v1/select", msgspec.json.encode(body))
            assert answer.status == 200, answer.body
        service.fleet.register(Registration(instance="e4", endpoint="tcp://127.0.0.1:1", model="m"))
        answer = await post_to_control_plane(app, "/v1/select", msgspec.json.encode({"model": "m", "tokens": []}))
        assert answer.status == 200, answer.body

    asyncio.run(scenario())
    assert seen == [(2, True), (3, False), (3, False)]


@pytest.mark.parametrize("path", ["/query", "/query_by_hash", "/v1/match", "/v1/select"])
def test_a_response_about_many_workers_is_made_in_a_thread(path: str) -> None:
    """The lookup and the response are made in one thread. With few workers, both are made on the event loop."""
    body = {
        "/query": {"model_name": "m", "token_ids": [1]},
        "/query_by_hash": {"model_name": "m", "seq_hashes": [1]},
    }.get(path, {"model": "m", "tokens": [1]})

    async def scenario() -> None:
        service = Service(ServiceSettings(limits=Limits(inline_candidates=2)))
        await service.start()
        try:
            app, seen = App(service), list[bool]()
            find_namespaces = service.fleet.namespaces

            def record_thread(scope: Any) -> Any:
                seen.append(threading.current_thread() is threading.main_thread())
                return find_namespaces(scope)

            service.fleet.namespaces = record_thread  # type: ignore[method-assign]
            for count in range(1, 4):
                service.fleet.register(Registration(instance=f"e{count}", endpoint="tcp://127.0.0.1:1", model="m"))
                answer = await post_to_control_plane(app, path, msgspec.json.encode(body))
                assert answer.status == 200, answer.body
            assert seen == [True, True, False]
        finally:
            await service.stop()

    asyncio.run(scenario())


def test_responses_that_grow_with_the_fleet_are_made_in_threads() -> None:
    paths = ("/workers", "/services", "/global_view", "/v1/sources", "/v1/stats", "/v1/blocks", "/metrics")
    assert [path for path in paths if not ROUTES[path]["GET"].pool] == []
    assert ROUTES["/v1/match_many"]["POST"].pool


def test_bodies_that_take_long_to_decode_are_refused(tmp_path: Path) -> None:
    """Python decodes JSON in one piece in any thread. Token ids of a JSON prompt are decoded natively."""
    with serving("--config", write(tmp_path / "service.toml", LIMITS)) as service:
        candidates = [{"instance": f"e{number}"} for number in range(21)]
        for path, body, reason in (
            ("/v1/select", {"model": "m", "tokens": [], "candidates": candidates}, "too-many-candidates"),
            ("/query_by_hash", {"model": "m", "seq_hashes": list(range(101))}, "too-many-hashes"),
            ("/query_by_hash", {"model": "m", "seq_hashes": [1] * 40_000}, "too-large"),
            ("/v1/match_many", {"model": "m", "prompts": [[1] * 40_000]}, "too-large"),
            ("/v1/match", {"model": "m", "tokens": [1], "mm": [{"id": "x" * 60_000, "start": 0, "length": 1}]}, "too-large"),
            ("/register", {"instance_id": "e", "endpoint": "tcp://127.0.0.1:1", "what": "x" * 60_000}, "too-large"),
        ):
            answer = service.post(path, cast("Any", body))
            assert (answer.status, answer.reason) == (413, reason), path
            assert "limits." in answer.json["hint"]
        assert service.post("/v1/match", model="m", tokens=[1] * 40_000).status == 404
        assert service.post("/query", model_name="m", token_ids=[1] * 40_000).status == 404
