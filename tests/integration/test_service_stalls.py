"""No request occupies the event loop for long: large requests are refused, or processed in threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from kvevents.service.http.routes import ROUTES
from service_cases import engines, prompt, serving, write

LIMITS = "limits = { max_json_bytes = 60_000, max_hashes = 100, max_candidates = 20, max_rows = 7 }\n"


def test_queries_and_responses_that_grow_with_the_fleet_are_made_in_threads() -> None:
    queries = ("/query", "/query_by_hash", "/v1/match", "/v1/match_many", "/v1/select")
    listings = ("/workers", "/services", "/global_view", "/v1/sources", "/v1/stats", "/v1/blocks", "/metrics")
    routes = [ROUTES[path]["POST"] for path in queries] + [ROUTES[path]["GET"] for path in listings]
    assert [route.path for route in routes if not route.pool] == []


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


def test_answers_about_many_prompts_are_bounded(tmp_path: Path) -> None:
    """A prompt of a few bytes can be held by every worker."""
    with (
        engines(2) as made,
        serving("--config", write(tmp_path / "service.toml", LIMITS)) as service,
    ):
        for number, each in enumerate(made):
            service.register(f"e{number}", each.publisher)
            each.store(prompt(1))
            service.exact(f"e{number}", blocks=4)
        answer = service.post("/v1/match_many", model="m", prompts=[prompt(1)] * 3)
        assert [len(match["holders"]) for match in answer.json["matches"]] == [2, 2, 2]
        refused = service.post("/v1/match_many", model="m", prompts=[prompt(1)] * 4)
        assert (refused.status, refused.reason) == (413, "too-many-matches")
        assert "limits.max_rows" in refused.json["hint"]
