"""The HTTP API of Dynamo's standalone indexer and of Mooncake Conductor, over real sockets.

Expected responses were measured with `python -m dynamo.indexer` of ai-dynamo-runtime 1.6.1. If a response differs on purpose,
the test says why. Every test has its own instance, model or tenant, so that all tests share one service.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
import pytest

from cli_cases import refuse_connections
from kvevents.index import Namespace, block_keys, local_hashes
from kvevents.service.http.routes import ENDPOINTS
from kvevents.service.scope_fields import MAX_UNKNOWN_FIELDS
from service_cases import (
    BLOCK,
    DEADLINE,
    MODEL,
    Answer,
    Client,
    Engine,
    EventStream,
    Service,
    engine,
    engines,
    is_refused,
    prompt,
    registration,
    serving,
    wait_for,
)

EMPTY: dict[str, Any] = {"scores": {}, "frequencies": [], "instances": {}}
NUMBERS = count(1000)


@pytest.fixture(scope="module", name="service")
def one_service() -> Iterator[Service]:
    with serving() as service:
        yield service


@pytest.fixture(name="fresh")
def fresh_engine(service: Service) -> Iterator[tuple[int, str, Engine]]:
    """Return a registered engine with a unique id and model, and unregister it afterwards."""
    number = next(NUMBERS)
    model = f"model-{number}"
    with engine(seed=number) as made:
        assert service.register(number, made.publisher, model_name=model).status == 201
        yield number, model, made
        service.post("/unregister", instance_id=number, model_name=model)


# --- registration, as in Dynamo


def test_well_formed_registrations_are_201_and_ok(service: Service) -> None:
    with refuse_connections() as nowhere:
        cases: tuple[dict[str, Any], ...] = (
            {},
            {"dp_rank": None},
            {"dp_rank": 3},
            {"replay_endpoint": None},
            {"replay_endpoint": ""},
            {"endpoint": "tcp://no-such-host.invalid:5557"},
            {"instance_id": 2**64 - 1},
            {"routing_group": "other"},
            {"some_field": {"absent": ["knows"]}},
            {"lora_name": None},
        )
        for number, more in enumerate(cases):
            body = registration(number, nowhere, model_name="registered") | more
            answer = service.post("/register", body)
            expected = {"warnings": ["ignored unknown field 'some_field'"]} if "some_field" in more else {}
            assert (answer.status, answer.json) == (201, {"status": "ok"} | expected), more
            assert answer.headers["content-type"] == "application/json"
            unregistered = {name: body[name] for name in ("instance_id", "model_name", "routing_group") if name in body}
            assert service.post("/unregister", unregistered).status == 200


def test_a_registration_that_contradicts_another_is_409(service: Service, fresh: tuple[int, str, Engine]) -> None:
    number, model, made = fresh
    body = registration(number, made.publisher, model_name=model)
    other = service.post("/register", body | {"endpoint": "tcp://127.0.0.1:1", "topic": "t"})
    assert other.reason == "registered"
    assert other.json["detail"] == f"{number} rank 0 is registered over HTTP already, with another endpoint and topic"
    assert service.post("/register", body | {"dp_rank": 1, "block_size": 32}).reason == "other-block-size"
    assert service.post("/register", body | {"dp_rank": 1, "model_name": "another"}).reason == "other-model"
    assert service.post("/register", body | {"dp_rank": 1, "block_size": 32}).status == 409


def test_an_equal_registration_is_200_and_changes_nothing(service: Service, fresh: tuple[int, str, Engine]) -> None:
    """An engine's start hook needs no unregister: the stream itself notices that the engine has restarted."""
    number, model, made = fresh
    made.store(prompt(1))
    service.wait_for_prefix(number, prompt(1), model_name=model)
    body = registration(number, made.publisher, model_name=model)
    again = service.post("/register", body)
    assert (again.status, again.json) == (200, {"status": "ok"})
    mooncake = {name: value for name, value in body.items() if name != "model_name"} | {"modelname": model}
    again = service.post("/register", mooncake)
    assert (again.status, again.json) == (200, {"status": "registered successfully", "instance_id": number})
    assert service.held(prompt(1), model_name=model) == {str(number): 64}


def test_one_id_in_two_routing_groups_is_two_instances(service: Service, fresh: tuple[int, str, Engine]) -> None:
    """Dynamo rejects this, because its ids are unique in the fleet. Here ids are unique in a routing group."""
    number, model, made = fresh
    body = registration(number, made.publisher, model_name=model, routing_group="second")
    assert service.post("/register", body).status == 201
    assert service.post("/unregister", instance_id=number, model_name=model, routing_group="second").status == 200


def test_engines_of_one_model_can_have_different_block_sizes(service: Service, fresh: tuple[int, str, Engine]) -> None:
    """Dynamo rejects another block size for the same model. Here each engine is looked up by its own block size, because a
    fleet changes its block size engine by engine."""
    number, model, made = fresh
    tokens = prompt(1)
    made.store(tokens)
    with engine(seed=5) as other:
        assert service.register("wide", other.publisher, model_name=model, block_size=32).status == 201
        other.store(tokens, block_size=32)
        wait_for("both", lambda: service.held(tokens, model_name=model) == {str(number): 64, "wide": 64})
        assert service.held(tokens[:48], model_name=model) == {str(number): 48, "wide": 32}
        assert service.post("/unregister", instance_id="wide").status == 200


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"endpoint": "http://127.0.0.1:5557"}, "bad-endpoint"),
        ({"endpoint": "127.0.0.1:5557"}, "bad-endpoint"),
        ({"endpoint": "tcp://127.0.0.1"}, "bad-endpoint"),
        ({"replay_endpoint": "http://x"}, "bad-endpoint"),
    ],
)
def test_invalid_endpoints_are_400(service: Service, more: dict[str, Any], reason: str) -> None:
    answer = service.post("/register", registration(1, "tcp://127.0.0.1:5557") | more)
    assert (answer.status, answer.reason) == (400, reason)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        ("127.0.0.1:8000", "bad-registration"),
        ("none", "bad-registration"),
        ("http://", "bad-registration"),
        ("http://*:8000", "bad-registration"),
        ("http://user:word@127.0.0.1:8000", "bad-registration"),
        ("http://8.8.8.8:8000", "endpoint-refused"),
        ("http://169.254.169.254/latest", "endpoint-refused"),
        ("http://169.254.169.254/metrics", "endpoint-refused"),
        ("http://127.0.0.1:8000/unregister", "endpoint-refused"),
        ("http://127.0.0.1:8000/metrics/", "endpoint-refused"),
        ("http://127.0.0.1:8000/load?x=1", "endpoint-refused"),
        ("tcp://8.8.8.8:5559", "endpoint-refused"),
    ],
)
def test_an_invalid_or_forbidden_load_url_is_refused(service: Service, load: str, reason: str) -> None:
    """A client cannot make the service request any URL."""
    answer = service.post("/register", registration(1, "tcp://127.0.0.1:5557", load=load))
    assert answer.reason == reason


@pytest.mark.parametrize("path", ["", "/", "/metrics", "/load"])
def test_a_load_is_read_where_engines_have_one(service: Service, path: str) -> None:
    assert service.register("loaded", "tcp://127.0.0.1:1", load=f"http://127.0.0.1:1{path}").status == 201
    assert service.post("/unregister", instance_id="loaded").status == 200


@pytest.mark.parametrize("drafts", [[-1], [2**31], [2**70], list(range(65))])
def test_draft_groups_that_no_engine_can_have_are_400(service: Service, drafts: list[int]) -> None:
    answer = service.post("/register", registration(1, "tcp://127.0.0.1:5557", drafts=drafts))
    assert answer.status == 400
    assert "drafts" in answer.json["detail"]


@pytest.mark.parametrize("tier", ["gpu", "CPU", "Disk", "", "cpuu"])
def test_an_invalid_tier_without_removals_is_400(service: Service, tier: str) -> None:
    answer = service.post("/register", registration(1, "tcp://127.0.0.1:5557", stores_only=[tier]))
    assert (answer.status, answer.reason) == (400, "bad-registration")
    assert answer.json["detail"] == (
        f"invalid stores_only {tier!r}: expected cpu, disk, or another medium in upper case; not gpu"
    )


@pytest.mark.parametrize(
    "more",
    [
        {"instance_id": None},
        {"instance_id": 7.5},
        {"instance_id": [1]},
        {"endpoint": None},
        {"endpoint": ""},
        {"block_size": "16"},
        {"block_size": 16.5},
        {"routing_group": None},
        {"dp_rank": "0"},
        {"model_name": ""},
    ],
)
def test_registrations_of_the_wrong_shape_are_422(service: Service, more: dict[str, Any]) -> None:
    """The status is Dynamo's. Dynamo's body is plain text; here it is problem details."""
    answer = service.post("/register", registration(1, "tcp://127.0.0.1:5557") | more)
    assert answer.status == 422
    assert answer.reason in {"bad-shape", "missing-model"}


def test_an_instance_id_can_be_a_string(service: Service) -> None:
    """Dynamo accepts numbers and Mooncake strings. The service accepts both, and a string of digits equals the number."""
    with refuse_connections() as nowhere:
        assert service.register("77", nowhere, model_name="ids").status == 201
        assert service.register(77, nowhere, model_name="ids").status == 200
        found = service.get("/workers?model_name=ids").json
        assert [each["instance_id"] for each in found] == [77]
        assert service.post("/unregister", instance_id=77, model_name="ids").status == 200


def test_unregister_removes_only_a_matching_instance(service: Service) -> None:
    with refuse_connections() as nowhere:
        assert service.register(600, nowhere, model_name="going").status == 201
        assert service.post("/unregister", instance_id=600, model_name="another").reason == "other-model"
        assert service.post("/unregister", instance_id=600, model_name="going", routing_group="g").status == 404
        unregistered = service.post("/unregister", instance_id=600, model_name="going")
        assert (unregistered.status, unregistered.body) == (200, b'{"status":"ok"}')
        again = service.post("/unregister", instance_id=600, model_name="going")
        assert (again.status, again.reason) == (404, "not-registered")
        assert "instance 600 not found" in again.json["error"]


def test_unregister_respects_the_rank(service: Service) -> None:
    """Dynamo drops all ranks although the request names one."""
    with refuse_connections() as nowhere:
        for rank in range(3):
            assert service.register(601, nowhere, rank, model_name="ranks").status == 201
        assert service.post("/unregister", instance_id=601, model_name="ranks", dp_rank=1).status == 200
        assert service.post("/unregister", instance_id=601, model_name="ranks", dp_rank=1).status == 404
        (left,) = service.get("/workers?model_name=ranks").json
        assert set(left["endpoints"]) == {"0", "2"}
        assert service.post("/unregister", instance_id=601, model_name="ranks").status == 200
        assert service.get("/workers?model_name=ranks").json == []


def test_an_engine_that_registers_again_is_restored_by_replay(service: Service, fresh: tuple[int, str, Engine]) -> None:
    number, model, made = fresh
    tokens = prompt(2)
    made.store(tokens)
    service.wait_for_prefix(number, tokens, model_name=model)
    assert service.post("/unregister", instance_id=number, model_name=model).status == 200
    assert service.post("/query", model_name=model, token_ids=tokens).status == 404
    assert service.register(number, made.publisher, model_name=model).status == 201
    service.wait_for_prefix(number, tokens, model_name=model)  # its batches are replayed


# --- listings, as in Dynamo


def test_ranks_that_several_clients_unregister_at_once_are_each_reported_once(service: Service) -> None:
    """Each client gets a response about the ranks that it unregistered, and the audit log has each rank once."""
    ranks, clients = 4, 8
    with refuse_connections() as nowhere:
        for number in range(10):
            name = f"at-once-{number}"
            for rank in range(ranks):
                assert service.register(name, nowhere, rank).status == 201
            together = threading.Barrier(clients)

            def unregister(client_number: int, name: str = name, together: threading.Barrier = together) -> Answer:
                client = Client(service.url)
                try:
                    client.get("/livez")
                    together.wait(DEADLINE)
                    # Every other client unregisters only the first rank.
                    which = {"dp_rank": 0} if client_number % 2 else {}
                    return client.post("/unregister", instance_id=name, model=MODEL, **which)
                finally:
                    client.close()

            with ThreadPoolExecutor(clients) as pool:
                answers = list(pool.map(unregister, range(clients)))
            assert {answer.status for answer in answers} <= {200, 404}
            removed = [each for answer in answers if answer.status == 200 for each in answer.json["removed_instances"]]
            expected = [f"{name}|default|{rank}" for rank in range(ranks)]
            assert sorted(removed) == expected
            line = f"unregistered {name} rank"
            wait_for("every rank in the log", lambda line=line: len(service.log_lines(line)) >= ranks)  # type: ignore[misc]
            assert len(service.log_lines(line)) == ranks


def test_workers_lists_an_instance_with_its_listeners(service: Service, fresh: tuple[int, str, Engine]) -> None:
    number, model, made = fresh
    service.exact(number)
    answer = service.get(f"/workers?model_name={model}&routing_group=default&tenant_id=default")
    (found,) = answer.json
    listener = found["listeners"]["0"]
    assert {name: found[name] for name in ("instance_id", "source", "status", "model_name", "routing_group", "block_size")} == {
        "instance_id": number,
        "source": "zmq",
        "status": "active",
        "model_name": model,
        "routing_group": "default",
        "block_size": BLOCK,
    }
    assert found["endpoints"] == {"0": made.endpoint}
    assert (listener["endpoint"], listener["status"]) == (made.endpoint, "active")
    # `last_error` is absent without an error, as in Dynamo. `trust` and `blocks` are additions.
    assert "last_error" not in listener
    assert listener["trust"] == {"state": "EXACT", "reason": "", "reason_codes": [], "attested": False}


def test_workers_reports_why_an_engine_cannot_be_reached(service: Service) -> None:
    """The status is pending, and `last_error` has the reason."""
    with refuse_connections() as nowhere:
        assert service.register(602, nowhere, model_name="unreached").status == 201

        def read_error() -> str:
            (found,) = service.get("/workers?model_name=unreached").json
            assert found["status"] == "pending"
            return str(found["listeners"]["0"].get("last_error", ""))

        try:
            wait_for("the reason", lambda: read_error().startswith(f"nothing listens at {nowhere}"))
        finally:
            service.post("/unregister", instance_id=602, model_name="unreached")


@pytest.mark.parametrize("query", ["model_name=absent", "model_name=", "routing_group=nowhere"])
def test_workers_is_empty_if_no_instance_matches_the_filter(service: Service, fresh: object, query: str) -> None:
    assert service.get(f"/workers?{query}").json == []


def test_a_parameter_that_is_given_twice_is_400(service: Service) -> None:
    assert service.get("/workers?model_name=a&model_name=b").reason == "bad-parameter"


def test_dump_has_every_block_with_its_worker_and_tier(service: Service, fresh: tuple[int, str, Engine]) -> None:
    number, model, made = fresh
    tokens = prompt(3, 2)
    service.exact(number)
    group = service.get("/dump").json[f"{model}:default"]
    exact = {"state": "EXACT", "reason": "", "reason_codes": [], "attested": False}
    assert group == {"block_size": BLOCK, "events": [], "trust": {str(number): {"0": exact}}}
    hashes = made.store(tokens[:BLOCK])
    made.store(tokens[BLOCK:], parent=hashes, medium="CPU")
    service.wait_for_prefix(number, tokens, model_name=model)
    events = service.get("/dump").json[f"{model}:default"]["events"]
    keys = block_keys(tokens, BLOCK)
    stored = {
        (each["worker_id"], each["storage_tier"], block["tokens_hash"], each["event"]["dp_rank"])
        for each in events
        for block in each["event"]["data"]["stored"]["blocks"]
    }
    assert stored == {(number, "device", keys[0], 0), (number, "host_pinned", keys[1], 0)}
    assert keys[0] == local_hashes(tokens, BLOCK)[0]  # a root's key is its local hash, as Dynamo's tokens_hash is


def test_responses_about_an_unreachable_engine_have_its_trust(service: Service) -> None:
    """Without trust, zero blocks would mean an empty cache."""
    with refuse_connections() as nowhere:
        assert service.register("unreached", nowhere, model_name="unreached").status == 201
        wait_for("the fault", lambda: is_refused(service, "unreached"))
        trust = service.source("unreached")["trust"]
        assert trust["state"] == "CONNECTING"
        assert service.get("/v1/blocks?instance=unreached").json == {"total": 0, "blocks": [], "next": None, "trust": trust}
        assert service.get("/dump").json["unreached:default"] == {
            "block_size": BLOCK,
            "events": [],
            "trust": {"unreached": {"0": trust}},
        }
        (group,) = service.get("/global_view?model=unreached").json["groups"]
        assert group["instances"] == {"unreached": {"0": {"endpoint": nowhere, "blocks": 0, "trust": trust}}}
        assert service.post("/unregister", instance_id="unreached").status == 200


# --- queries, as in Dynamo


def test_a_query_counts_tokens_of_each_tier_cumulatively(service: Service, fresh: tuple[int, str, Engine]) -> None:
    """The engine holds 64 tokens on the GPU, 32 more in host memory and 16 more on disk, with real media names."""
    number, model, made = fresh
    tokens = prompt(4, 7)
    first = made.store(tokens[:64])
    second = made.store(tokens[64:96], parent=first, medium="CPU_PINNED")
    made.store(tokens[96:], parent=second, medium="CPU_TIER2")
    with engine(seed=9) as other:
        assert service.register("short", other.publisher, model_name=model).status == 201
        other.store(tokens[:32])
        wait_for("both", lambda: service.held(tokens, model_name=model) == {str(number): 112, "short": 32})
        for name, blocks in ((number, 7), ("short", 2)):
            service.exact(name, blocks=blocks)
        found = service.query(tokens, model_name=model)
        own = found["instances"][str(number)]
        # `trust` is an addition: the trust in the counts of each rank.
        assert own == {
            "longest_matched": 112,
            "gpu": 64,
            "dp": {"0": 64},
            "cpu": 96,
            "disk": 112,
            "trust": {"0": "EXACT"},
        }
        assert found["scores"] == {str(number): {"0": 64}, "short": {"0": 32}}
        assert found["frequencies"] == []
        assert {name: found["instances"]["short"][name] for name in ("longest_matched", "gpu", "cpu", "disk")} == dict.fromkeys(
            ("longest_matched", "gpu", "cpu", "disk"), 32
        )
        service.post("/unregister", instance_id="short")


def test_blocks_that_are_only_in_host_memory_have_no_score(service: Service, fresh: tuple[int, str, Engine]) -> None:
    number, model, made = fresh
    tokens = prompt(5, 1)
    made.store(tokens, medium="CPU")
    service.wait_for_prefix(number, tokens, model_name=model)
    found = service.query(tokens, model_name=model)
    own = found["instances"][str(number)]
    assert found["scores"] == {}
    assert (own["longest_matched"], own["gpu"], own["dp"], own["cpu"], own["disk"]) == (16, 0, {"0": 0}, 16, 16)


def test_ranks_are_merged_into_their_instance(service: Service, fresh: tuple[int, str, Engine]) -> None:
    number, model, made = fresh
    tokens = prompt(6)
    with engine(seed=3) as second:
        assert service.register(number, second.publisher, 5, model_name=model).status == 201
        made.store(tokens[:32])
        second.store(tokens[:48], medium="CPU")
        second.store(tokens[:16])
        service.wait_for_prefix(number, tokens, 48, model_name=model)
        wait_for("both ranks", lambda: service.query(tokens, model_name=model)["scores"] == {str(number): {"0": 32, "5": 16}})
        own = service.query(tokens, model_name=model)["instances"][str(number)]
        assert (own["longest_matched"], own["gpu"], own["dp"], own["cpu"]) == (48, 32, {"0": 32, "5": 16}, 48)
        assert set(own["trust"]) == {"0", "5"}


@pytest.mark.parametrize("tokens", [[], [1, 2, 3], prompt(99)], ids=["none", "less than a block", "others"])
def test_a_query_without_matches_has_an_empty_response(
    service: Service, fresh: tuple[int, str, Engine], tokens: list[int]
) -> None:
    service.exact(fresh[0])
    answer = service.post("/query", model_name=fresh[1], token_ids=tokens)
    assert (answer.status, answer.body) == (200, b'{"scores":{},"frequencies":[],"instances":{}}')


def test_a_partial_last_block_does_not_count(service: Service, fresh: tuple[int, str, Engine]) -> None:
    number, model, made = fresh
    tokens = prompt(7, 2)
    made.store(tokens)
    service.wait_for_prefix(number, [*tokens, 1, 2, 3], 32, model_name=model)
    assert service.held(tokens[:-1], model_name=model) == {str(number): 16}


def test_an_unknown_model_or_group_is_404(service: Service, fresh: tuple[int, str, Engine]) -> None:
    for more in ({"model_name": "absent"}, {"model_name": fresh[1], "routing_group": "nowhere"}):
        answer = service.post("/query", {"token_ids": [], **more})
        assert (answer.status, answer.reason) == (404, "unknown-model")


def test_lora_and_salt_are_part_of_the_scope_and_empty_means_absent(service: Service, fresh: tuple[int, str, Engine]) -> None:
    number, model, made = fresh
    base, adapted, salted = prompt(8), prompt(9), prompt(10)
    made.store(base)
    made.store(adapted, lora_name="ad1")
    made.store(salted, extra_keys=[("salt-1",), None, None, None], cache_salt="salt-1")
    service.exact(number, blocks=12)

    def held(tokens: list[int], **more: Any) -> int:
        return service.held(tokens, model_name=model, **more).get(str(number), 0)

    assert held(base) == held(base, lora_name="", cache_salt="") == held(base, lora_name=None, cache_salt=None) == 64
    assert held(adapted, lora_name="ad1") == 64
    assert held(salted, cache_salt="salt-1") == 64
    assert held(base, lora_name="ad1") == held(adapted) == held(adapted, lora_name="ad2") == 0
    assert held(base, cache_salt="salt-1") == held(salted) == held(salted, cache_salt="salt-2") == 0


@pytest.mark.parametrize("wrong", [-1, 2**32, 2.5, "1", None, [1]])
def test_invalid_token_ids_are_422(service: Service, wrong: object) -> None:
    answer = service.post("/query", model_name="whichever", token_ids=[1, wrong])
    assert (answer.status, answer.reason) == (422, "bad-shape")


def test_a_million_tokens_and_unknown_fields_are_accepted(service: Service, fresh: tuple[int, str, Engine]) -> None:
    number, model, made = fresh
    tokens = prompt(11)
    made.store(tokens)
    body = {"model_name": model, "token_ids": tokens + [1] * 1_000_000, "tenant_id": "default", "block_size": 16, "what": None}
    wait_for("the prompt", lambda: service.post("/query", body).json["scores"] == {str(number): {"0": 64}})


# --- scope fields, under every name


SCOPES: dict[str, tuple[str, ...]] = {
    "model": ("model_name", "model", "modelname"),
    "tenant": ("tenant_id", "tenant"),
    "group": ("routing_group", "group"),
    "lora": ("lora_name", "lora"),
    "salt": ("cache_salt", "salt", "additionalsalt", "additional_salt"),
}


def test_scope_fields_are_accepted_under_every_name(service: Service) -> None:
    """Registration, queries and unregistration accept each scope field under every name."""
    values = {"model": "scoped", "tenant": "acme", "group": "g", "lora": "sql", "salt": "s3cret"}
    plain = {"model_name": "scoped", "tenant_id": "acme", "routing_group": "g", "lora_name": "sql", "cache_salt": "s3cret"}
    tokens = prompt(40, 1)
    with engine(seed=80) as made:
        made.store(tokens)
        for field, names in SCOPES.items():
            for name in names:
                scope = {names[0]: values[field] for field, names in SCOPES.items()}
                del scope[names[0]]
                scope[name] = values[field]
                body = registration("scoped", made.publisher)
                del body["model_name"]
                assert service.post("/register", body | scope).status in {200, 201}
                service.exact("scoped", blocks=1)
                requested = {**scope, "whole_prompt": True}
                found = service.post("/query", {**requested, "token_ids": tokens}).json
                assert "scoped" in found.get("instances", found.get("acme"))
                held = service.post("/v1/match", {**requested, "tokens": tokens}).json["workers"]
                assert [row["tokens"] for row in held] == [16], scope
                assert service.post("/v1/select", {**requested, "tokens": tokens}).json["instance"] == "scoped"
                # If one field is missing, no block of the scope is found.
                for missing in plain.keys() - {"model_name"}:
                    less = {key: value for key, value in plain.items() if key != missing}
                    answer = service.post("/v1/match", {**less, "tokens": tokens})
                    assert answer.status == 404 or answer.json["workers"] == []
                for scoped in ("tenant_id=acme&routing_group=g&model_name=scoped", "tenant=acme&group=g&model=scoped"):
                    assert len(service.get(f"/v1/sources?{scoped}").json["sources"]) == 1
                    assert len(service.get(f"/workers?{scoped}").json) == 1
                    assert len(service.get(f"/services?{scoped}").json["services"]) == 1
                    assert len(service.get(f"/global_view?{scoped}").json["groups"]) == 1
                wrong = service.post("/unregister", {**scope, "instance_id": "scoped", name: "another"})
                assert wrong.status == 404, name
                assert service.post("/unregister", {**scope, "instance_id": "scoped"}).status == 200


@pytest.mark.parametrize(
    "path", ["/register", "/unregister", "/query", "/query_by_hash", "/v1/match", "/v1/match_many", "/v1/select"]
)
def test_two_values_of_one_field_are_400(service: Service, path: str) -> None:
    """Equal values are accepted."""
    body: dict[str, Any] = {
        "/register": registration("twice", "tcp://127.0.0.1:1"),
        "/unregister": {"instance_id": "twice"},
        "/query": {"token_ids": []},
        "/query_by_hash": {"block_hashes": []},
        "/v1/match_many": {"prompts": []},
    }.get(path, {"tokens": []})
    body.pop("model_name", None)
    for names in SCOPES.values():
        for other in names[1:]:
            answer = service.post(path, {**body, "model_name": "m", names[0]: "one", other: "two"})
            assert (answer.status, answer.reason) == (400, "contradiction"), other
    if path == "/query":
        same = service.post(path, {**body, "model_name": "absent", "model": "absent", "tenant": "t", "tenant_id": "t"})
        assert (same.status, same.reason) == (404, "unknown-model")


@pytest.mark.parametrize(
    "name",
    [
        "tennant",
        "tenantId",
        "tenant-id",
        "Tenant",
        "cacheSalt",
        "slat",
        "salt_",
        "routinggroup",
        "groups",
        "grup",
        "lora_path",
        "LoRA",
    ],
)
def test_a_misspelled_scope_field_is_400(service: Service, fresh: tuple[int, str, Engine], name: str) -> None:
    """If the field were ignored, one tenant's prompt could match another tenant's blocks."""
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/register", registration("misspelled", "tcp://127.0.0.1:1", model_name=fresh[1])),
        ("/unregister", {"instance_id": fresh[0]}),
        ("/query", {"model_name": fresh[1], "token_ids": [1]}),
        ("/query_by_hash", {"model_name": fresh[1], "block_hashes": [1]}),
    ]
    for path, body in requests:
        answer = service.post(path, {**body, name: "acme"})
        assert (answer.status, answer.reason) == (400, "unknown-field"), path
        assert repr(name) in answer.json["error"]
        assert answer.json["hint"].startswith("write ")
    assert service.get(f"/v1/sources?{name}=acme").reason == "unknown-field"
    assert service.post("/v1/match", {"model": fresh[1], "tokens": [], name: "acme"}).status == 422
    assert fresh[0] in {int(instance) for instance, _ in service.sources() if instance.isdecimal()}


def test_too_many_unknown_fields_are_400(service: Service, fresh: tuple[int, str, Engine]) -> None:
    """Their number is checked before any of them is compared with known fields."""
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/register", registration("many", "tcp://127.0.0.1:1", model_name=fresh[1])),
        ("/unregister", {"instance_id": fresh[0]}),
        ("/query", {"model_name": fresh[1], "token_ids": [1]}),
        ("/query_by_hash", {"model_name": fresh[1], "block_hashes": [1]}),
    ]
    for path, body in requests:
        answer = service.post(path, {**body, **{f"x{number}": 0 for number in range(MAX_UNKNOWN_FIELDS + 1)}})
        assert (answer.status, answer.reason) == (400, "too-many-fields"), path
    most = {f"x{number}": 0 for number in range(MAX_UNKNOWN_FIELDS)}
    assert service.post("/query", {"model_name": fresh[1], "token_ids": [1], **most}).status == 200


def test_an_unknown_field_is_reported_beside_the_missing_one_that_it_resembles(
    service: Service, fresh: tuple[int, str, Engine]
) -> None:
    answer = service.post("/query", model_name=fresh[1], tokens=[1])
    assert answer.json["detail"] == "invalid body: unknown field 'tokens'; did you mean 'token_ids'?"
    assert "missing field 'token_ids'" in service.post("/query", model_name=fresh[1], other=[1]).json["detail"]


@pytest.mark.parametrize("name", ["modle", "modelName", "mode"])
def test_a_misspelled_model_is_400_without_another(service: Service, fresh: tuple[int, str, Engine], name: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/query": {"token_ids": [1]},
        "/query_by_hash": {"block_hashes": [1]},
        "/register": {"instance_id": 1, "endpoint": "tcp://127.0.0.1:1", "block_size": 16},
        "/unregister": {"instance_id": fresh[0]},
    }
    for path, body in bodies.items():
        answer = service.post(path, {**body, name: fresh[1]})
        assert (answer.status, answer.reason) == (400, "unknown-field"), path
        assert f"unknown field {name!r}; did you mean 'model" in answer.json["detail"]
    assert service.post("/query", {"token_ids": [1], "model": fresh[1], name: "m"}).status == 200


def test_errors_and_warnings_repeat_no_long_names(service: Service, fresh: tuple[int, str, Engine]) -> None:
    long = "x" * 100_000
    tolerant = service.post("/query", {"model_name": fresh[1], "token_ids": [1], long: 0})
    assert tolerant.status == 200
    misspelled = service.post("/query", {"model_name": fresh[1], "token_ids": [1], f"{long}_tenant": 0})
    assert (misspelled.status, misspelled.reason) == (400, "unknown-field")
    strict = service.post("/v1/match", {"model": fresh[1], "tokens": [], long: 0})
    assert (strict.status, strict.reason) == (422, "bad-shape")
    endpoint = service.post("/register", registration("long", f"http://{long}", model_name=fresh[1]))
    assert (endpoint.status, endpoint.reason) == (400, "bad-endpoint")
    with engine(seed=90) as made:
        warned = service.post("/register", {**registration("long", made.publisher, model_name=fresh[1]), long: 0})
        assert warned.status == 201
        service.post("/unregister", instance_id="long")
    assert max(len(answer.body) for answer in (misspelled, strict, endpoint, warned)) < 2_000


@pytest.mark.parametrize("field", ["model", "tenant", "group"])
def test_an_empty_scope_field_contradicts_another_value(service: Service, field: str) -> None:
    """An empty LoRA or salt means that there is no value. An empty model, tenant or group is a value."""
    body = registration("empty", "tcp://127.0.0.1:1")
    body.pop("model_name")
    names = SCOPES[field]
    for first, second in ((names[0], names[1]), (names[1], names[0])):
        answer = service.post("/register", {"model_name": "m", **body, first: "", second: "other"})
        assert (answer.status, answer.reason) == (400, "contradiction")


SCOPE_PARAMETERS: dict[str, set[str]] = {
    "/workers": {"model", "tenant", "group"},
    "/services": {"model", "tenant", "group"},
    "/global_view": {"model", "tenant", "group"},
    "/dump": set(),
    "/metrics": set(),
    "/v1/stats": set(),
    "/v1/sources": {"model", "tenant", "group"},
    "/v1/events": {"model", "tenant", "group"},
    "/v1/blocks": {"tenant", "group"},
}
"""Scope parameters of each GET endpoint."""


@pytest.mark.parametrize("path", SCOPE_PARAMETERS)
def test_unknown_query_parameters_are_400(service: Service, path: str) -> None:
    """This holds for every name of a scope field, because an ignored parameter would reveal blocks of other tenants."""
    needed = {"/v1/blocks": "instance=absent&"}.get(path, "")
    for field, names in SCOPES.items():
        for name in (*names, misspell(names[0])):
            if field in SCOPE_PARAMETERS[path] and name in names:
                continue
            answer = service.get(f"{path}?{needed}{name}=acme")
            assert (answer.status, answer.reason) == (400, "unknown-field"), name
    answer = service.get(f"{path}?{needed}nonsense=1")
    assert (answer.status, answer.reason) == (400, "unknown-field")
    assert answer.json["hint"].startswith("this endpoint takes ")


POST_PATHS = sorted(endpoint.path for endpoint in ENDPOINTS if endpoint.method == "POST" and endpoint.body is not None)


@pytest.mark.parametrize("path", POST_PATHS)
def test_query_strings_beside_a_body_are_refused(service: Service, path: str) -> None:
    """The scope is in the body, so a tenant in the query string is rejected. Only raw bodies have the scope in the query
    string."""
    body = {"model": "m", "tokens": [], "token_ids": [], "instance_id": "absent"}
    for query in ("tenant=acme", "tenant_id=acme", "model=m", "cache_salt=s", "nonsense=1", "mm=x"):
        answer = service.post(f"{path}?{query}", body)
        assert (answer.status, answer.reason) == (400, "unknown-field"), query
        assert answer.json["hint"] == "this endpoint takes no parameters beside a body of this type"
    answer = service.post(f"{path}?tenant=%ff", body)
    assert (answer.status, answer.reason) == (400, "bad-query-string")
    assert b"unknown-field" not in service.post(f"{path}?", body).body


def misspell(name: str) -> str:
    return name.replace("_", "") + "s"


def test_listings_contain_only_the_requested_tenant_and_group(service: Service) -> None:
    with refuse_connections() as nowhere, EventStream(service, "?tenant_id=b&routing_group=g") as stream:
        for tenant in ("a", "b"):
            more: dict[str, Any] = {"model_name": f"of-{tenant}", "tenant_id": tenant, "routing_group": "g"}
            assert service.register("listed", nowhere, **more).status == 201
        for scope in ("tenant=a&group=g", "tenant_id=a&routing_group=g"):
            assert [row["tenant_id"] for row in service.get(f"/workers?{scope}").json] == ["a"]
            assert [row["tenant_id"] for row in service.get(f"/services?{scope}").json["services"]] == ["a"]
            assert service.get(f"/services?{scope}").json["count"] == 1
            assert [row["tenant_id"] for row in service.get(f"/global_view?{scope}").json["groups"]] == ["a"]
        assert stream.next("state", lambda _: True)["tenant"] == "b"
        for tenant in ("a", "b"):
            assert service.post("/unregister", instance_id="listed", tenant_id=tenant, routing_group="g").status == 200


def test_unknown_fields_of_other_clients_are_ignored_and_counted(service: Service, fresh: tuple[int, str, Engine]) -> None:
    """This holds for JSON with and without native decoding, and for msgpack."""
    service.exact(fresh[0])

    def count_ignored_fields() -> float:
        found = re.search(rb'kvevents_http_ignored_fields_total{path="/query"} (\d+)', service.get("/metrics").body)
        return float(found[1]) if found else 0.0

    before = count_ignored_fields()
    body = {"model_name": fresh[1], "token_ids": [1, 2], "mode": "fast", "nested": {"token_ids": [9]}, "load": 1, "n": None}
    assert service.post("/query", body).json == EMPTY
    assert service.ask("POST", "/query", msgspec.msgpack.encode(body), content_type="application/msgpack").json == EMPTY
    assert count_ignored_fields() - before == 8
    wrong = service.post("/query", {**body, "token_ids": "x"})
    assert (wrong.status, wrong.reason) == (422, "bad-shape")


def test_a_lora_can_be_given_by_its_number(service: Service, fresh: tuple[int, str, Engine]) -> None:
    """vLLM before 0.14 has no LoRA name in events. A prompt with a LoRA number never matches blocks of the base model."""
    number, model, made = fresh
    base, adapted = prompt(41), prompt(42)
    made.store(base)
    made.store(adapted, lora_id=7)
    unadapted = [prompt(45), prompt(46)]
    made.store(unadapted[0], lora_id=-1)
    made.store(unadapted[1], lora_id=-1, lora_name="")
    service.exact(number, blocks=16)

    def held(tokens: list[int], **scope: Any) -> tuple[int, int]:
        found = service.held(tokens, model_name=model, **scope).get(str(number), 0)
        (row,) = service.post("/v1/match", model=model, tokens=tokens, whole_prompt=True, **scope).json["workers"]
        return found, row["tokens"]

    assert held(base) == held(adapted, lora_id=7) == (64, 64)
    assert held(base, lora_id=7) == held(adapted) == held(adapted, lora_id=8) == (0, 0)
    for tokens in (base, *unadapted):  # -1 is no LoRA: Mooncake Conductor writes it for the base model
        assert held(tokens) == held(tokens, lora_id=-1) == (64, 64)
    assert service.post("/query", model_name=model, token_ids=[], lora_id=2**63).status == 422
    refused = service.register("numbered", "tcp://127.0.0.1:1", model_name=model, lora_id=7)
    assert (refused.status, refused.reason) == (400, "lora-id")
    assert service.register(number, made.publisher, model_name=model, lora_id=-1).status == 200


def test_events_can_name_the_lora_and_the_salt_of_the_registration(service: Service) -> None:
    """Mooncake's registration has the LoRA of an engine, although events of vLLM from 0.14 on name it too."""
    named, unnamed, other = prompt(47), prompt(48), prompt(49)
    with engines(1) as made:
        own: dict[str, Any] = {"lora_name": "sql", "cache_salt": "s"}
        assert service.register("own", made[0].publisher, model_name="owned", **own).status == 201
        made[0].store(named[:32], **own)
        made[0].store(named)
        made[0].store(unnamed)
        made[0].store(unnamed[:32], **own)
        made[0].store(other, lora_name="other")
        service.exact("own")

        def held(tokens: list[int], **scope: Any) -> dict[str, int]:
            return service.held(tokens, model_name="owned", **scope)

        wait_for("all blocks", lambda: held(unnamed, **own) == {"own": 64})
        assert held(named, **own) == {"own": 64}
        assert (
            held(other, **own)
            == held(named)
            == held(named, lora_name="sql")
            == held(named, lora_name="x", cache_salt="s")
            == {}
        )
        rows = service.post("/v1/match", model="owned", lora="sql", salt="s", tokens=[*named, 1]).json["workers"]
        assert [(row["instance"], row["tokens"]) for row in rows] == [("own", 64)]
        assert service.post("/v1/select", model="owned", lora="sql", salt="s", tokens=[*named, 1]).json["instance"] == "own"
        hashes = {"block_hashes": local_hashes(named, BLOCK), **own}
        assert list(service.post("/query_by_hash", model_name="owned", **hashes).json["instances"]) == ["own"]
        service.post("/unregister", instance_id="own")


def test_a_model_can_be_the_name_of_an_adapter(service: Service) -> None:
    """OpenAI requests to vLLM name the adapter as model. It resolves to the base model with that LoRA."""
    tokens, base = prompt(43), prompt(44)
    with engines(3, replay_endpoint=None) as made, refuse_connections() as nowhere:
        for number, (instance, model, lora) in enumerate(
            (("x", "base-a", "sql"), ("y", "base-a", None), ("z", "base-b", "py"))
        ):
            assert service.register(instance, made[number].publisher, model_name=model, lora_name=lora).status == 201
        wait_for("the subscriptions", lambda: all(each.publisher.stats().subscribers for each in made))
        made[0].store(tokens)
        made[1].store(base)
        made[1].store(tokens, lora_name="sql")

        def held(model: str, requested: list[int], **scope: Any) -> dict[str, int]:
            return service.held(requested, model_name=model, **scope)

        wait_for("all", lambda: held("base-a", tokens, lora_name="sql") == {"x": 64, "y": 64})
        assert held("sql", tokens) == held("sql", tokens, lora_name="sql") == {"x": 64, "y": 64}
        assert held("sql", base) == held("base-a", tokens) == {}
        assert service.post("/query", model="sql", token_ids=[*tokens, 1]).json["default"]["y"]["longest_matched"] == 64
        rows = service.post("/v1/match", model="sql", tokens=[*tokens, 1]).json["workers"]
        assert {row["instance"]: row["tokens"] for row in rows} == {"x": 64, "y": 64}
        assert service.post("/v1/select", model="sql", tokens=tokens).json["instance"] in {"x", "y"}
        assert service.post("/v1/match_many", model="sql", prompts=[[*tokens, 1]]).json["matches"][0]["holders"]
        for scope in ({"lora_name": "py"}, {"tenant_id": "t"}, {"routing_group": "g"}):
            assert service.post("/query", {"model_name": "sql", "token_ids": tokens, **scope}).reason == "unknown-model"
        assert service.register("two", nowhere, model_name="base-b", lora_name="sql").status == 201
        answer = service.post("/query", model_name="sql", token_ids=tokens)
        assert (answer.status, answer.reason) == (409, "ambiguous-adapter")
        assert "base-a, base-b" in answer.json["error"]
        # A model takes precedence over an adapter of the same name.
        assert service.register("own", nowhere, model_name="sql").status == 201
        assert held("sql", tokens) == {}
        for unregistered in ("x", "y", "z", "two", "own"):
            assert service.post("/unregister", instance_id=unregistered).status == 200


# --- queries by hash


def to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def test_local_hashes_equal_those_of_dynamo() -> None:
    """The expected values come from `compute_block_hash_for_seq`."""
    tokens = [
        81644,
        33481,
        97227,
        46993,
        104227,
        90498,
        123528,
        110298,
        96979,
        85463,
        120890,
        69473,
        3801,
        110146,
        61030,
        101706,
    ]
    assert local_hashes(tokens, 16) == [12640489885263647566]
    assert local_hashes([4] * 16, 16) == [18402572742196698181]
    assert local_hashes([9] * 16, 16, Namespace(lora="ad1")) == [12025202042331314230]


def test_local_hashes_are_accepted_in_every_notation(service: Service, fresh: tuple[int, str, Engine]) -> None:
    """Dynamo accepts signed numbers only, and rejects half of the hashes that its own tools print."""
    number, model, made = fresh
    tokens = prompt(12)
    made.store(tokens)
    service.wait_for_prefix(number, tokens, model_name=model)
    hashes = local_hashes(tokens, BLOCK)
    for written in (list(map(to_signed, hashes)), hashes, list(map(hex, hashes)), list(map(str, hashes))):
        answer = service.post("/query_by_hash", model_name=model, block_hashes=written)
        assert answer.json["scores"] == {str(number): {"0": 64}}


def test_hashes_match_as_soon_as_an_engine_without_a_registered_block_size_is_exact(service: Service) -> None:
    for seed in range(4):
        tokens = prompt(60 + seed)
        with engine(seed=60 + seed) as made:
            assert service.register("sizeless", made.publisher, model_name="sizeless", block_size=None).status == 201
            wait_for("the subscription", lambda made=made: made.publisher.stats().subscribers)  # type: ignore[misc]
            made.store(tokens)
            wait_for("its blocks", lambda tokens=tokens: service.held(tokens, model_name="sizeless"))  # type: ignore[misc]
            wait_for("trust", lambda: service.query([1], model_name="sizeless")["instances"] == {})  # EXACT, holds nothing
            answer = service.post("/query_by_hash", model_name="sizeless", block_hashes=local_hashes(tokens, BLOCK))
            assert answer.json["scores"] == {"sizeless": {"0": 64}}
            assert service.post("/unregister", instance_id="sizeless").status == 200


def test_unknown_hashes_and_hashes_from_the_middle_match_nothing(service: Service, fresh: tuple[int, str, Engine]) -> None:
    number, model, made = fresh
    tokens = prompt(13)
    made.store(tokens)
    service.wait_for_prefix(number, tokens, model_name=model)
    service.exact(number)
    for hashes in ([], local_hashes(tokens, BLOCK)[1:], [1, 2, 3]):
        assert service.post("/query_by_hash", model_name=model, block_hashes=hashes).json == EMPTY


@pytest.mark.parametrize(
    "wrong",
    [2**64, -(2**63) - 1, 1.5, "xyz", "0x", None, "9" * 5000, "1_0", " 5 ", "0b11", "0o7", "+1", "0x1_0", "01", "\u0661", ""],
)
def test_invalid_hashes_are_422(service: Service, fresh: tuple[int, str, Engine], wrong: object) -> None:
    answer = service.post("/query_by_hash", model_name=fresh[1], block_hashes=[wrong])
    assert answer.status == 422
    assert len(answer.body) < 1000


def test_a_query_by_hash_needs_exactly_one_kind_of_hashes(service: Service, fresh: tuple[int, str, Engine]) -> None:
    for given in ({}, {"block_hashes": [1], "seq_hashes": [1]}):
        assert service.post("/query_by_hash", {"model_name": fresh[1], **given}).status == 422
    assert service.post("/query_by_hash", model_name="absent", block_hashes=[1]).status == 404


# --- HTTP, as in Dynamo


def test_head_is_get_without_its_body(service: Service) -> None:
    for path in ("/health", "/workers", "/metrics", "/v1/events", "/"):
        answer = service.ask("HEAD", path)
        assert (answer.status, answer.body) == (200, b"")


def test_other_methods_are_405_with_the_allowed_ones(service: Service) -> None:
    for method, path, allowed in (
        ("GET", "/query", "POST"),
        ("OPTIONS", "/query", "POST"),
        ("POST", "/workers", "GET, HEAD"),
        ("DELETE", "/health", "GET, HEAD"),
    ):
        answer = service.ask(method, path)
        assert (answer.status, answer.headers["allow"], answer.reason) == (405, allowed, "method-not-allowed")


def test_other_paths_are_404(service: Service) -> None:
    """Dynamo's response has no body; here it has problem details."""
    for path in ("/nope", "/health/", "//health", "/register_peer", "/peers"):
        assert (service.get(path).status, service.get(path).reason) == (404, "no-such-path")


def test_bodies_must_have_a_json_content_type(service: Service, fresh: tuple[int, str, Engine]) -> None:
    """Other content types are rejected with 415, as by Dynamo, because pages of other sites can make a browser send them."""
    service.exact(fresh[0])
    body = json.dumps({"model_name": fresh[1], "token_ids": []}).encode()
    for kind in ("application/json", "APPLICATION/JSON; charset=utf-8", "application/vnd.api+json"):
        assert service.ask("POST", "/query", body, content_type=kind).json == EMPTY
    for headers in ({}, {"content_type": "application/x-www-form-urlencoded"}, {"content_type": "text/plain"}):
        for path in ("/query", "/register", "/unregister", "/query_by_hash", "/v1/match", "/v1/match_many", "/v1/select"):
            answer = service.ask("POST", path, body, **headers)
            assert (answer.status, answer.reason) == (415, "unsupported-media-type")


@pytest.mark.parametrize(
    "body",
    [b"", b'{"token_ids":', b"{1: 2}", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"model_name":"m","token_ids":[]} x'],
    ids=["none", "cut", "key", "utf16", "bom", "more"],
)
def test_malformed_json_is_400(service: Service, body: bytes) -> None:
    """Dynamo ignores text after the object; here it is malformed."""
    answer = service.ask("POST", "/query", body, content_type="application/json")
    assert (answer.status, answer.reason) == (400, "malformed-body")


# --- small clients of both APIs


class DynamoClient:
    """A client as in Dynamo's frontend."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        request = Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310 - ours
        try:
            with urlopen(request, timeout=DEADLINE) as answer:  # noqa: S310
                return answer.status, json.load(answer)
        except HTTPError as read_error:
            with read_error:
                return read_error.code, json.load(read_error)

    def best(self, model: str, tokens: list[int]) -> tuple[int, int, int] | None:
        """Return instance, rank and tokens of the best score."""
        status, answer = self.post("/query", model_name=model, token_ids=tokens)
        assert status == 200
        scores = [(int(name), int(rank), score) for name, ranks in answer["scores"].items() for rank, score in ranks.items()]
        return max(scores, key=lambda each: each[2], default=None)


class MooncakeClient(DynamoClient):
    """A client of Mooncake's Conductor."""

    def query(self, tenant: str, **body: Any) -> dict[str, dict[str, Any]]:
        status, answer = self.post("/query", tenant_id=tenant, **body)
        assert status == 200, answer
        assert list(answer) == [tenant]
        found: dict[str, dict[str, Any]] = answer[tenant]
        return found


def test_a_client_of_dynamo_finds_the_best_instance(service: Service) -> None:
    client = DynamoClient(service.url)
    tokens = prompt(20)
    longer = [*tokens, 1]  # an engine recomputes the last token, so that the last whole block counts if one more follows
    with engine(seed=20) as first, engine(seed=21) as second:
        for number, each in ((1, first), (2, second)):
            answer = client.post(
                "/register",
                instance_id=number,
                endpoint=each.endpoint,
                replay_endpoint=each.replay_endpoint,
                model_name="dynamo",
                block_size=BLOCK,
                dp_rank=0,
            )
            assert answer == (201, {"status": "ok"})
        assert client.best("dynamo", longer) is None
        hashes = first.store(tokens)
        second.store(tokens[:32])
        wait_for("the first", lambda: client.best("dynamo", longer) == (1, 0, 64))
        first.remove(hashes[1:])
        wait_for("the second", lambda: client.best("dynamo", longer) == (2, 0, 32))
        second.clear()
        wait_for("what is left", lambda: client.best("dynamo", longer) == (1, 0, 16))
        for number in (1, 2):
            assert client.post("/unregister", instance_id=number, model_name="dynamo") == (200, {"status": "ok"})
        assert client.post("/query", model_name="dynamo", token_ids=tokens)[0] == 404


def test_a_client_of_mooncake_finds_blocks_of_its_tenant(service: Service) -> None:
    client = MooncakeClient(service.url)
    tokens = prompt(21)
    rolling = block_keys(tokens, BLOCK)
    with ExitStack() as stack:
        made = {tenant: stack.enter_context(engine(seed=30 + number)) for number, tenant in enumerate(("a", "b"))}
        for tenant, each in made.items():
            answer = client.post(
                "/register",
                endpoint=each.endpoint,
                replay_endpoint=each.replay_endpoint,
                type="vLLM",
                modelname="mooncake",
                lora_name="",
                tenant_id=tenant,
                instance_id="vllm-0",
                block_size=BLOCK,
                dp_rank=1,
                additionalsalt="",
            )
            assert answer == (200, {"status": "registered successfully", "instance_id": "vllm-0"})
        first = made["a"].store(tokens[:32])
        made["a"].store(tokens[32:], parent=first, medium="CPU")
        requested = {"model": "mooncake", "block_size": BLOCK, "token_ids": [*tokens, 1]}
        wait_for("the prompt", lambda: client.query("a", **requested).get("vllm-0", {}).get("CPU") == 64)
        (found,) = client.query("a", **requested).values()
        service.exact("vllm-0", 1)
        # Both tenants have an instance of this name, and each waits for a live batch of its own.

        def is_exact() -> bool:
            service.confirm()
            return bool(client.query("a", **requested)["vllm-0"]["trust"] == {"1": "EXACT"})

        wait_for("trust", is_exact)
        assert {name: found[name] for name in ("longest_matched", "GPU", "DP", "CPU", "DISK")} == {
            "longest_matched": 64,
            "GPU": 32,
            "DP": {"1": 64},
            "CPU": 64,
            "DISK": 64,
        }
        # Tenants are separate, although they share instance, model and tokens. Dynamo ignores the field.
        wait_for("nothing held by the other tenant's", lambda: client.query("b", **requested) == {})
        assert client.post("/query", tenant_id="c", **requested)[0] == 404
        assert client.query("a", **requested, instance_id="another") == {}
        assert client.query("a", **requested, instance_id="vllm-0") == client.query("a", **requested)
        for name in ("seq_hashes", "block_hash"):
            for written in (rolling, list(map(to_signed, rolling)), list(map(hex, rolling))):
                status, answer = client.post(
                    "/query_by_hash", model="mooncake", block_size=BLOCK, tenant_id="a", **{name: written}
                )
                assert (status, answer["a"]["vllm-0"]["longest_matched"]) == (200, 64)
        unregistered = client.post("/unregister", instance_id="vllm-0", modelname="mooncake", tenant_id="a", dp_rank=1)
        assert unregistered == (200, {"status": "unregistered successfully", "removed_instances": ["vllm-0|a|1"]})
        assert client.query("b", **requested) == {}
        assert client.post("/unregister", instance_id="vllm-0", tenant_id="b")[0] == 200


def test_answers_are_msgpack_for_clients_that_prefer_it(service: Service) -> None:
    """Clients of newer releases of Mooncake's Conductor send msgpack and accept it. Errors are JSON in any case."""
    tokens = prompt(24)
    packed = "application/msgpack"

    def ask(path: str, accept: str, **fields: Any) -> Any:
        answer = service.ask("POST", path, msgspec.msgpack.encode(fields), content_type=packed, accept=accept)
        assert (answer.status in {200, 201}, answer.headers["content-type"]) == (True, accept)
        return msgspec.msgpack.decode(answer.body) if accept == packed else answer.json

    with engine(seed=60) as made:
        where = {"endpoint": made.endpoint, "replay_endpoint": made.replay_endpoint, "block_size": BLOCK}
        answer = ask("/register", packed, instance_id="p", modelname="packed", type="vLLM", **where)
        assert answer == {"status": "registered successfully", "instance_id": "p"}
        assert ask("/register", packed, instance_id="p", model_name="packed", **where) == {"status": "ok"}
        made.store(tokens)
        service.exact("p")
        service.wait_for_prefix("p", tokens, model_name="packed")
        for name in ("model", "model_name"):
            for path, given in (
                ("/query", {"token_ids": [*tokens, 1]}),
                ("/query_by_hash", {"seq_hashes": block_keys(tokens, BLOCK)}),
            ):
                fields = {name: "packed", **given}
                assert ask(path, packed, **fields) == ask(path, "application/json", **fields)
        removed = {"status": "unregistered successfully", "removed_instances": ["p|default|0"]}
        assert ask("/unregister", packed, instance_id="p") == removed


def test_routing_groups_are_separate(service: Service) -> None:
    tokens = prompt(22)
    with engine(seed=40) as made, refuse_connections() as nowhere:
        assert service.register("one", made.publisher, model_name="grouped", routing_group="one").status == 201
        assert service.register("two", nowhere, model_name="grouped", routing_group="two").status == 201
        made.store(tokens)
        service.wait_for_prefix("one", tokens, model_name="grouped", routing_group="one")
        assert service.held(tokens, model_name="grouped", routing_group="two") == {}
        rows = service.get("/workers?routing_group=one").json
        assert [row["instance_id"] for row in rows] == ["one"]
        for name in ("one", "two"):
            assert service.post("/unregister", instance_id=name, routing_group=name).status == 200


def test_services_and_global_view_list_each_rank(service: Service) -> None:
    with engine(seed=50) as made, refuse_connections() as nowhere:
        for name, rank, where in (("x", 0, made.publisher), ("x", 1, nowhere), ("y", 0, nowhere)):
            assert service.register(name, where, rank, model_name="viewed", tenant_id="t").status == 201
        made.store(prompt(23, 2))
        service.exact("x", blocks=2)
        wait_for("the port to be found closed", lambda: is_refused(service, "x", 1) and is_refused(service, "y"))
        listing = service.get("/services").json
        own = [each for each in listing["services"] if each["modelname"] == "viewed"]
        assert listing["count"] == len(listing["services"])
        assert {(each["instance_id"], each["dp_rank"], each["tenant_id"], each["block_size"]) for each in own} == {
            ("x", 0, "t", 16),
            ("x", 1, "t", 16),
            ("y", 0, "t", 16),
        }
        (group,) = [each for each in service.get("/global_view").json["groups"] if each["modelname"] == "viewed"]
        assert (group["tenant_id"], group["block_size"], group["blocks"]) == ("t", 16, 2)
        assert group["instances"]["x"] == {
            "0": {"endpoint": made.endpoint, "blocks": 2, "trust": service.source("x", 0)["trust"]},
            "1": {"endpoint": nowhere, "blocks": 0, "trust": service.source("x", 1)["trust"]},
        }
        for name in ("x", "y"):
            assert service.post("/unregister", instance_id=name, tenant_id="t").status == 200
