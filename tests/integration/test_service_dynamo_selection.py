"""The API of Dynamo's selection service: what a front end of Dynamo or Ray sends, and what it gets back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvevents.index import local_hashes
from kvevents.service.fleet.registration import Scope
from kvevents.service.http.dynamo_selection import worker_id
from kvevents.service.selection_cache import MAX_AGE_SECONDS, MAX_SELECTIONS, PendingSelection, SelectionCache
from service_cases import BLOCK, MODEL, Client, Service, engines, prompt, serving, wait_for

HELD = 128
"""Blocks of the prompt. It is long, so that the selections of other tests, which count for some seconds, do not decide."""
TOKENS = HELD * BLOCK
PROMPT = [*prompt(1, HELD), 1]
FIRST, SECOND = 7, worker_id("decode-a")
URLS = {FIRST: "http://10.0.0.7:8000", SECOND: ""}


@pytest.fixture(scope="module", name="service")
def fleet() -> Iterator[Service]:
    """A service with worker 7, which holds a prompt, and one whose name is no number, and which has no URL."""
    with engines(2) as made, serving() as service:
        service.register(7, made[0].publisher, url=URLS[FIRST], labels={"zone": "a", "spot": "true"})
        service.register("decode-a", made[1].publisher, labels={"zone": "b"})
        made[0].store(prompt(1, HELD + 2)[TOKENS:], parent=made[0].store(PROMPT[:-1]), medium="CPU")
        made[1].store(prompt(2, HELD))
        service.exact(7, blocks=HELD + 2)
        service.exact("decode-a", blocks=HELD)
        yield service


@pytest.fixture(autouse=True)
def ended(service: Service) -> Iterator[None]:
    """End the reservations of a test."""
    yield
    for one in service.get("/v1/reservations").json["reservations"]:
        service.ask("DELETE", f"/reservations/{one['id']}")


def post(service: Client, path: str, expected: int = 200, **fields: Any) -> Any:
    answer = service.post(path, {"model_name": MODEL, **fields})
    assert answer.status == expected, answer
    if expected >= 400:
        assert answer.json["error"] == answer.json["detail"]
    return answer.json


def loads(service: Service) -> dict[int, tuple[int, int, int]]:
    """Prefill tokens, decode blocks and requests of each worker."""
    (model,) = service.get(f"/loads?model_name={MODEL}").json
    assert (model["model_name"], model["routing_group"], model["pending_count"]) == (MODEL, "default", 0)
    return by_worker(model["loads"])


def by_worker(listed: list[dict[str, Any]]) -> dict[int, tuple[int, int, int]]:
    return {
        one["worker_id"]: (one["potential_prefill_tokens"], one["potential_decode_blocks"], one["active_requests"])
        for one in listed
    }


def hashed(tokens: list[int]) -> dict[str, Any]:
    """A prompt as a front end that hashes it itself sends it."""
    hashes = [number - (1 << 64) if number >> 63 else number for number in local_hashes(tokens, BLOCK)]
    return {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": len(tokens)}


def test_a_front_end_selects_reserves_progresses_and_frees(service: Service) -> None:
    selected = post(service, "/select_and_reserve", selection_id="r1", token_ids=PROMPT)
    assert selected == {
        "selection_id": "r1",
        "isl_tokens": len(PROMPT),
        "track_prefill_tokens": True,
        "model_name": MODEL,
        "routing_group": "default",
        "worker_id": FIRST,
        "dp_rank": 0,
        "endpoint": URLS[FIRST],
        "block_size": BLOCK,
        "overlap": {"longest_matched": TOKENS, "gpu": TOKENS, "dp": {"0": TOKENS}, "cpu": TOKENS, "disk": TOKENS},
        "effective_prefill_tokens": 1,
        "potential_decode_blocks": HELD + 1,
    }
    assert loads(service) == {FIRST: (1, HELD + 1, 1), SECOND: (0, 0, 0)}
    assert service.post("/reservations/r1/prefill_complete").json == {"status": "ok"}
    assert loads(service)[FIRST] == (0, HELD + 1, 1)
    for body in ({}, {"decay_fraction": 0.5}):
        assert service.post("/reservations/r1/output_block", body).json == {"status": "ok"}
    assert loads(service)[FIRST] == (0, HELD + 3, 1)
    assert service.get("/v1/reservations/r1").json["output_tokens"] == 2 * BLOCK
    assert service.ask("DELETE", "/reservations/r1").json == {"status": "ok"}
    assert loads(service)[FIRST] == (0, 0, 0)


def test_a_selection_is_booked_later_by_its_name(service: Service) -> None:
    selected = post(service, "/select", selection_id="later", token_ids=PROMPT, advisory=True)
    assert (selected["selection_id"], selected["worker_id"], "isl_tokens" in selected) == ("later", FIRST, False)
    assert loads(service)[FIRST] == (0, 0, 0)
    booked = post(service, "/reservations", 201, selection_id="later")
    assert booked == {
        "selection_id": "later",
        "model_name": MODEL,
        "routing_group": "default",
        "worker_id": FIRST,
        "dp_rank": 0,
        "endpoint": URLS[FIRST],
    }
    assert loads(service)[FIRST] == (1, HELD + 1, 1)
    post(service, "/reservations", 404, selection_id="later")


def test_a_worker_is_booked_without_a_selection(service: Service) -> None:
    booked = post(service, "/reservations", 201, selection_id="own", worker_id=SECOND, token_ids=PROMPT)
    assert (booked["worker_id"], booked["endpoint"]) == (SECOND, "")
    assert loads(service)[SECOND] == (TOKENS + 1, HELD + 1, 1)
    post(service, "/reservations", 201, selection_id="part", worker_id=SECOND, isl_tokens=65, effective_prefill_tokens=10)
    assert loads(service)[SECOND] == (TOKENS + 11, HELD + 2, 2)
    post(service, "/reservations", 201, selection_id="decode", worker_id=SECOND, token_ids=PROMPT, track_prefill_tokens=False)
    assert loads(service)[SECOND] == (TOKENS + 11, 2 * HELD + 3, 3)
    post(service, "/reservations", 404, selection_id="x", worker_id=99, token_ids=PROMPT)
    post(service, "/reservations", 404, selection_id="x", worker_id=FIRST, dp_rank=1, token_ids=PROMPT)
    post(service, "/reservations", 400, selection_id="x", worker_id=FIRST)


def test_open_names_are_conflicts_and_others_are_unknown(service: Service) -> None:
    post(service, "/select", selection_id="twice", token_ids=PROMPT)
    post(service, "/select_and_reserve", selection_id="twice", token_ids=PROMPT)
    post(service, "/select_and_reserve", 409, selection_id="twice", token_ids=PROMPT)
    post(service, "/reservations", 409, selection_id="twice")
    post(service, "/reservations", 409, selection_id="twice", worker_id=FIRST, token_ids=PROMPT)
    assert service.ask("DELETE", "/reservations/twice").status == 200
    for answer in (
        service.ask("DELETE", "/reservations/twice"),
        service.post("/reservations/twice/prefill_complete"),
        service.post("/reservations/twice/output_block", {}),
        service.post("/reservations/a%2Fb/prefill_complete"),
    ):
        assert answer.status == 404, answer
        assert answer.json["error"]
    post(service, "/select_and_reserve", selection_id="twice", token_ids=PROMPT)


def test_names_of_clients_are_no_labels_of_metrics(service: Service) -> None:
    """Unknown fields are counted by the endpoint, since clients choose the names in paths."""
    assert service.post("/reservations/chosen-by-a-client/output_block", {"unknown": 1}).status == 404
    metrics = service.get("/metrics").body.decode()
    assert 'kvevents_http_ignored_fields_total{path="/reservations/{id}/output_block"} 1.0' in metrics
    assert "chosen-by-a-client" not in metrics


def test_ranks_of_a_worker() -> None:
    """Each rank has its own blocks, also for prompts that the front end has hashed."""
    with engines(2) as made, serving() as service:
        for rank, one in enumerate(made):
            service.register(5, one.publisher, rank)
            one.store(prompt(1, 4 + 4 * rank))
            service.exact(5, rank, blocks=4 + 4 * rank)
        whole = [*prompt(1, 8), 1]
        for sent in ({"token_ids": whole}, hashed(whole)):
            found = post(service, "/overlap_scores", **sent)["workers"]
            assert [(one["worker_id"], one["dp_rank"], one["device_blocks"], one["disk_blocks"]) for one in found] == [
                (5, 0, 4, 4),
                (5, 1, 8, 8),
            ]
            selected = post(service, "/select", **sent)
            assert (selected["worker_id"], selected["dp_rank"], selected["overlap"]["dp"]) == (5, 1, {"0": 64, "1": 128})
            assert post(service, "/select", pinned_worker={"worker_id": 5}, **sent)["dp_rank"] == 0


def test_one_of_many_bookings_of_one_name_succeeds(service: Service) -> None:
    def book(_: int) -> int:
        client = Client(service.url)
        try:
            body = {"model_name": MODEL, "selection_id": "raced", "token_ids": PROMPT}
            return client.post("/select_and_reserve", body).status
        finally:
            client.close()

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(book, range(32)))
    assert (statuses.count(200), statuses.count(409)) == (1, 31)
    assert sum(requests for _, _, requests in loads(service).values()) == 1


def test_prompts_that_are_hashed_by_the_front_end(service: Service) -> None:
    """The hashes of Dynamo find the same blocks, and the worker that holds them."""
    sent = hashed(PROMPT)
    selected = post(service, "/select", **sent)
    assert (selected["worker_id"], selected["effective_prefill_tokens"], selected["overlap"]["gpu"]) == (FIRST, 1, TOKENS)
    reserved = post(service, "/select_and_reserve", selection_id="h", **sent)
    assert (reserved["worker_id"], loads(service)[FIRST]) == (FIRST, (1, 1, 1))
    assert post(service, "/select", **hashed([*prompt(2, HELD), 1]))["worker_id"] == SECOND
    assert service.get("/v1/reservations").json["open"] == 1
    post(service, "/select", selection_id="hl", **sent)
    post(service, "/reservations", 201, selection_id="hl")
    post(service, "/reservations", 201, selection_id="hw", worker_id=FIRST, **sent)
    assert loads(service)[FIRST] == (3, 3, 3)
    post(service, "/select", 400, block_hashes=sent["block_hashes"])
    assert post(service, "/select", isl_tokens=100)["effective_prefill_tokens"] == 100


def test_a_worker_with_too_many_requests_gets_no_credit_for_its_cache(service: Service) -> None:
    """Otherwise all prompts with the same system prompt would be sent to the worker that has cached it first."""
    for number in range(12):
        post(
            service, "/select_and_reserve", selection_id=f"busy-{number}", token_ids=PROMPT, pinned_worker={"worker_id": FIRST}
        )
    for sent in ({"token_ids": PROMPT}, hashed(PROMPT)):
        selected = post(service, "/select_and_reserve", **sent)
        assert selected["worker_id"] == SECOND, list(sent)
        service.ask("DELETE", f"/reservations/{selected['selection_id']}")


def test_open_reservations_decide(service: Service) -> None:
    """A front end that reserves spreads prompts that no worker holds."""
    for sent in ({"token_ids": list(range(900_000, 900_400))}, {"isl_tokens": 400}):
        chosen = [post(service, "/select_and_reserve", **sent)["worker_id"] for _ in range(8)]
        assert min(chosen.count(FIRST), chosen.count(SECOND)) >= 3, sent


def test_workers_are_filtered_pinned_and_preferred(service: Service) -> None:
    def chosen(**fields: Any) -> int:
        number: int = post(service, "/select", token_ids=PROMPT, **fields)["worker_id"]
        return number

    assert chosen(allowed_worker_ids=[SECOND, 99]) == SECOND
    assert chosen(pinned_worker={"worker_id": SECOND, "dp_rank": 0}) == SECOND
    assert chosen(affinity_target={"worker_id": SECOND, "dp_rank": None}) == SECOND
    assert chosen(affinity_target={"worker_id": 99}) == FIRST
    assert chosen(routing_constraints={"required_taints": ["zone=b"], "preferred_taints": {"x": 1.0}}) == SECOND
    assert chosen(routing_constraints={"required_taints": ["spot"]}) == FIRST
    assert chosen(session_id="s", session_context={"session_id": "t", "input_trigger": "other"}) == FIRST
    post(service, "/select", 400, token_ids=PROMPT, allowed_worker_ids=[FIRST], pinned_worker={"worker_id": SECOND})
    post(service, "/select", 503, token_ids=PROMPT, allowed_worker_ids=[99])
    post(service, "/select", 503, token_ids=PROMPT, pinned_worker={"worker_id": FIRST, "dp_rank": 1})
    for taints in (["zone=c"], ["zone=b", "zone=a"]):
        post(service, "/select", 503, token_ids=PROMPT, routing_constraints={"required_taints": taints})
    post(service, "/select", 422, token_ids=PROMPT, routing_constraints={"required_taints": ["=b"]})
    for name in ("lora_name", "cache_salt"):
        post(service, "/select", 200, token_ids=PROMPT, **{name: "x" * 512})
        post(service, "/select", 422, token_ids=PROMPT, **{name: "x" * 513})
    post(service, "/select", 404, token_ids=PROMPT, routing_group="other")
    post(service, "/select", 422, token_ids=["a"])


def test_overrides_of_the_router(service: Service) -> None:
    blind = {"overlap_score_credit": 0}
    selected = post(service, "/select", token_ids=PROMPT, pinned_worker={"worker_id": FIRST}, router_config_override=blind)
    assert selected["effective_prefill_tokens"] == len(PROMPT)
    override = {"track_prefill_tokens": False, "router_temperature": 0.5}
    pinned = {"worker_id": FIRST}
    reserved = post(service, "/select_and_reserve", token_ids=PROMPT, router_config_override=override, pinned_worker=pinned)
    assert not reserved["track_prefill_tokens"]
    assert loads(service)[FIRST] == (0, HELD + 1, 1)


def test_tokens_of_a_prompt_with_images(service: Service) -> None:
    mm = {"routing_token_ids": PROMPT, "block_mm_infos": [None]}
    assert post(service, "/select", token_ids=[1], mm_routing_info=mm)["effective_prefill_tokens"] == 1


def test_potential_loads(service: Service) -> None:
    post(service, "/select_and_reserve", token_ids=PROMPT, pinned_worker={"worker_id": FIRST})
    for sent in ({"token_ids": PROMPT}, hashed(PROMPT)):
        assert by_worker(post(service, "/potential_loads", **sent)) == {
            FIRST: (2, 2 * HELD + 2, 1),
            SECOND: (TOKENS + 1, HELD + 1, 0),
        }
    override = {"track_prefill_tokens": False}
    found = post(service, "/potential_loads", token_ids=PROMPT, router_config_override=override)
    assert by_worker(found) == {FIRST: (1, 2 * HELD + 2, 1), SECOND: (0, HELD + 1, 0)}


def test_overlap_scores_by_tier(service: Service) -> None:
    whole = [*prompt(1, HELD + 2), 1]
    for sent in ({"token_ids": whole}, hashed(whole)):
        found = post(service, "/overlap_scores", **sent)
        assert (found["block_size"], found["num_blocks"]) == (BLOCK, HELD + 2)
        assert found["shared_cache"] == {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None}
        workers = {one["worker_id"]: one for one in found["workers"]}
        assert workers[FIRST] == {
            "worker_id": FIRST,
            "dp_rank": 0,
            "device_blocks": HELD,
            "host_pinned_blocks": HELD + 2,
            "disk_blocks": HELD + 2,
            "host_pinned_extension_blocks": 2,
            "disk_extension_blocks": 0,
            "shared_beyond_device_blocks": None,
        }
        assert workers[SECOND]["disk_blocks"] == 0


def test_tiered_matches_for_a_remote_router(service: Service) -> None:
    found = post(
        service, "/query_tiered_by_hash", block_hashes=hashed(prompt(1, HELD + 2))["block_hashes"], routing_group="default"
    )
    worker = {"worker_id": FIRST, "dp_rank": 0}
    assert found == {
        "block_size": BLOCK,
        "tiered": {
            "device": {"scores": [[worker, HELD]], "frequencies": []},
            "lower_tier": [["host_pinned", {"hits": [[worker, 2]]}]],
        },
    }
    empty = post(service, "/query_tiered_by_hash", block_hashes=[])
    assert empty["tiered"] == {"device": {"scores": [], "frequencies": []}, "lower_tier": []}


def test_ready_lists_workers() -> None:
    with serving() as service, engines(1) as (one,):
        answer = service.get("/ready")
        assert (answer.status, answer.json) == (503, {"ready": False, "schedulable_workers": 0, "workers": []})
        service.register("dead", "tcp://127.0.0.1:1")
        assert service.post("/select", {"model_name": MODEL, "token_ids": [1]}).status == 503
        service.register(3, one.publisher, url="http://10.0.0.3:8000")
        service.exact(3)
        answer = wait_for("a worker", lambda: found if (found := service.get("/ready")).status == 200 else None)
        workers = {worker["worker_id"]: worker for worker in answer.json["workers"]}
        assert answer.json["schedulable_workers"] == 1
        assert (workers[3]["lifecycle"], workers[3]["endpoint"]) == ("schedulable", "http://10.0.0.3:8000")
        assert workers[worker_id("dead")]["not_schedulable_reasons"]


def test_numbers_of_workers() -> None:
    assert worker_id("0") == 0
    assert worker_id(str((1 << 64) - 1)) == (1 << 64) - 1
    for name in ("007", "-1", "a", str(1 << 64)):
        assert worker_id(name) == worker_id(name) < 1 << 63


def test_pending_selections_are_bounded() -> None:
    now = [0.0]
    cache = SelectionCache(lambda: now[0])
    scope = Scope(MODEL)

    def pending(tokens: int = 1) -> PendingSelection:
        view = memoryview(bytes(4 * tokens)).cast("I")
        return PendingSelection("a", 0, scope, view, ignores_cache=False, is_waiting=True, session=None)

    cache.add("a", pending())
    assert cache.get(scope, "a") == pending()
    assert cache.get(Scope("other"), "a") is None
    now[0] = MAX_AGE_SECONDS + 1
    assert cache.get(scope, "a") is None
    for number in range(MAX_SELECTIONS + 10):
        cache.add(str(number), pending())
    assert len(cache) == MAX_SELECTIONS
    for number in range(20):
        cache.add(f"long-{number}", pending(1 << 20))
    assert len(cache) == 16
    cache.discard(scope, "long-19")
    assert len(cache) == 15
