"""No request occupies the event loop for long: large requests are refused, or processed in threads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from kvevents.service import selection as selecting
from kvevents.service.config import Limits, ServiceConfig
from kvevents.service.http import v1
from kvevents.service.http.app import App
from kvevents.service.http.messages import Headers, HttpRequest, Response
from kvevents.service.http.routes import ROUTES
from kvevents.service.registration import Registration
from kvevents.service.service import Service
from service_cases import serving, write

LIMITS = "limits = { max_json_bytes = 60_000, max_hashes = 100, max_candidates = 20 }\n"


def request(path: str, body: bytes) -> HttpRequest:
    return HttpRequest("POST", path, b"", Headers([(b"content-type", b"application/json")]), body)


async def answered(app: App, path: str, body: bytes) -> Response:
    """The answer of the control plane's own handler, which answers if other replicas are asked, or requests have spans."""
    found = await app._handle(ROUTES[path]["POST"], request(path, body))
    assert isinstance(found, Response)
    return found


def test_a_choice_among_many_workers_is_made_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the request names them, or they are those that serve its model."""
    seen: list[tuple[int, bool]] = []
    choose = selecting.select

    def watched(asked: Any, candidates: Any, *rest: Any) -> Any:
        seen.append((len(candidates), threading.current_thread() is threading.main_thread()))
        return choose(asked, candidates, *rest)

    monkeypatch.setattr(v1, "select_worker", watched)

    async def scenario() -> None:
        service = Service(ServiceConfig(limits=Limits(inline_candidates=2)))
        await service.start()
        try:
            await choices(service, App(service))
        finally:
            await service.stop()

    async def choices(service: Service, app: App) -> None:
        for count in (2, 3):
            service.fleet.register(Registration(instance=f"e{count}", endpoint="tcp://127.0.0.1:1", model="m"))
            named = [{"instance": f"w{number}"} for number in range(count)]
            body = {"model": "m", "tokens": [], "candidates": named}
            answer = await answered(app, "/v1/select", msgspec.json.encode(body))
            assert answer.status == 200, answer.body
        service.fleet.register(Registration(instance="e4", endpoint="tcp://127.0.0.1:1", model="m"))
        answer = await answered(app, "/v1/select", msgspec.json.encode({"model": "m", "tokens": []}))
        assert answer.status == 200, answer.body

    asyncio.run(scenario())
    assert seen == [(2, True), (3, False), (3, False)]


@pytest.mark.parametrize("path", ["/query", "/query_by_hash", "/v1/match", "/v1/select"])
def test_an_answer_about_many_workers_is_made_by_a_thread(path: str) -> None:
    """They are looked up, and the answer is written, in one; with few workers both are done where the request is received."""
    body = {
        "/query": {"model_name": "m", "token_ids": [1]},
        "/query_by_hash": {"model_name": "m", "seq_hashes": [1]},
    }.get(path, {"model": "m", "tokens": [1]})

    async def scenario() -> None:
        service = Service(ServiceConfig(limits=Limits(inline_candidates=2)))
        await service.start()
        try:
            app, seen = App(service), list[bool]()
            looked_up = service.fleet.namespaces

            def watched(scope: Any) -> Any:
                seen.append(threading.current_thread() is threading.main_thread())
                return looked_up(scope)

            service.fleet.namespaces = watched  # type: ignore[method-assign]
            for count in range(1, 4):
                service.fleet.register(Registration(instance=f"e{count}", endpoint="tcp://127.0.0.1:1", model="m"))
                answer = await answered(app, path, msgspec.json.encode(body))
                assert answer.status == 200, answer.body
            assert seen == [True, True, False]
        finally:
            await service.stop()

    asyncio.run(scenario())


def test_answers_that_grow_with_the_fleet_are_made_by_threads() -> None:
    paths = ("/workers", "/services", "/global_view", "/v1/sources", "/v1/stats", "/v1/hot", "/v1/blocks", "/metrics")
    assert [path for path in paths if not ROUTES[path]["GET"].pool] == []
    assert ROUTES["/v1/match_many"]["POST"].pool


def test_what_takes_long_to_read_is_refused(tmp_path: Path) -> None:
    """Python reads JSON in one piece, whichever thread does it; token ids of a JSON prompt are read without it."""
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
