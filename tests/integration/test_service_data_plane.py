"""`native/server`: both planes send the same responses; unusual requests go to the control plane."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvevents.client.schemas import ReadyAnswer
from kvevents.service.errors import ServiceError
from kvevents.service.fleet.registration import Scope
from kvevents.service.http.app import App
from kvevents.service.http.queries import ask
from kvevents.service.process import data_plane_settings
from kvevents.service.service import Service as ServiceInProcess
from kvevents.service.settings import ServiceSettings
from service_cases import BLOCK, DEADLINE, Answer, Service, engines, escape, is_refused, prompt, serving, wait_for

PROMPT: Final = prompt(1)
JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"


@pytest.fixture(scope="module", name="service")
def fleet() -> Iterator[Service]:
    """Return a service with engines that hold parts of a prompt on several tiers, with a LoRA and a salt, and an unreachable
    engine."""
    with engines(6) as made, serving() as service:
        for number, each in enumerate(made[:3]):
            service.register(f"e{number}", each.publisher)
        service.register("ranks", made[3].publisher, rank=0)
        service.register("ranks", made[4].publisher, rank=1)
        service.register("lora", made[5].publisher, lora_name="sql")
        service.register("gone", "tcp://127.0.0.1:1")
        service.register('na"me é', "tcp://127.0.0.1:1", additionalsalt="s3cret")
        first = made[0].store(PROMPT[: 2 * BLOCK])
        made[0].store(PROMPT[2 * BLOCK :], parent=first, medium="CPU")
        made[1].store(PROMPT[:BLOCK])
        made[1].store(PROMPT[:BLOCK], lora_name="own", lora_id=7)
        made[3].store(PROMPT)
        made[4].store(PROMPT[: 3 * BLOCK], medium="DISK")
        made[5].store(PROMPT)
        for name, rank, blocks in (("e0", 0, 4), ("e1", 0, 2), ("e2", 0, 0), ("ranks", 0, 4), ("ranks", 1, 3), ("lora", 0, 4)):
            service.exact(name, rank, blocks=blocks)
        for name in ("gone", 'na"me é'):  # a change between two requests would be a difference between their responses
            wait_for(f"the port of {name} to be found closed", lambda name=name: is_refused(service, name))  # type: ignore[misc]
        yield service


SCOPES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "a LoRA": {"lora_name": "sql"},
    "an adapter of events": {"lora": "own"},
    "an adapter number": {"lora_id": 7},
    "a salt": {"cache_salt": "s3cret"},
    "another tenant": {"tenant": "acme"},
    "empty names": {"lora": "", "salt": ""},
    "a contradiction": {"lora": "a", "lora_name": "b"},
    "a misspelling": {"tenantid": "x"},
    "whole prompt": {"whole_prompt": True},
    "null": {"lora": None, "tenant": None},
}
BODIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "dynamo": ("/query", {"model_name": "m", "token_ids": PROMPT}),
    "mooncake": ("/query", {"model": "m", "token_ids": PROMPT}),
    "adapter as model": ("/query", {"model": "sql", "token_ids": PROMPT}),
    "one instance": ("/query", {"model": "m", "token_ids": PROMPT, "instance_id": "e0", "block_size": BLOCK}),
    "another block size": ("/query", {"model_name": "m", "token_ids": PROMPT, "block_size": 32}),
    "no tokens": ("/query", {"model_name": "m", "token_ids": []}),
    "unknown": ("/query", {"model_name": "x", "token_ids": PROMPT}),
    "unknown field": ("/query", {"model_name": "m", "token_ids": PROMPT, "extra": 1}),
    "bad token": ("/query", {"model_name": "m", "token_ids": [*PROMPT, -1]}),
    "local hashes": ("/query_by_hash", {"model_name": "m", "block_hashes": [1, -1, "0xff"]}),
    "rolling hashes": ("/query_by_hash", {"model": "m", "seq_hashes": ["18446744073709551615", 7]}),
    "bad hash": ("/query_by_hash", {"model": "m", "seq_hashes": ["1_0"]}),
    "match": ("/v1/match", {"model": "m", "tokens": PROMPT}),
    "match with media": ("/v1/match", {"model": "m", "tokens": PROMPT, "mm": [{"id": "x", "start": 0, "length": 3}]}),
    "match expected": ("/v1/match", {"model": "m", "tokens": PROMPT, "expected": True}),
    "match of binary tokens": ("/v1/match", {"model": "m", "tokens": b"\x01\x00\x00\x00"}),
    "match_many of binary tokens": ("/v1/match_many", {"model": "m", "prompts": [b"\x01\x00\x00\x00"]}),
    "query of binary tokens": ("/query", {"model_name": "m", "token_ids": b"\x01\x00\x00\x00"}),
    "query of binary hashes": ("/query_by_hash", {"model_name": "m", "block_hashes": b"\x01\x00\x00\x00"}),
    "match of an array": ("/v1/match", {"model": "m", "tokens": PROMPT, "mm": [["x", 0, 3]]}),
    "many": ("/v1/match_many", {"model": "m", "prompts": [PROMPT, [], PROMPT[:20]]}),
    "select": (
        "/v1/select",
        # With loads, since otherwise the selections before count.
        {
            "model": "m",
            "tokens": PROMPT,
            "tie": "first",
            "explain": True,
            "candidates": [{"instance": "ranks", "load": 0}, {"instance": "e0"}],
            "ignores_cache": True,
        },
    ),
    "select among": (
        "/v1/select",
        {
            "model": "m",
            "tokens": PROMPT,
            "tie": "first",
            "explain": True,
            "candidates": [
                {"instance": "e0", "load": 3},
                {"instance": "ranks", "rank": 1, "load": 0.1},
                {"instance": "stranger", "load": 7.25},
                {"instance": "gone"},
                {"instance": "lora"},
            ],
            "tiers": {"cpu": 0.25, "other": 0.1},
            "trust": {"DEGRADED": 1},
            "load_weight": 0.3,
            "wait_weight": 0.01,
        },
    ),
    "select with duplicate candidates": (
        "/v1/select",
        {"model": "m", "tokens": [], "candidates": [{"instance": "e0"}, {"instance": "e0"}]},
    ),
    "select without candidates": ("/v1/select", {"model": "m", "tokens": [], "candidates": []}),
    "select with an unknown tier": ("/v1/select", {"model": "m", "tokens": [], "tiers": {"cpu": 1, "nvme": 0.1}}),
    "select with an unknown trust state": ("/v1/select", {"model": "m", "tokens": [], "trust": {"GOOD": 1}}),
    "select with a large load weight": ("/v1/select", {"model": "m", "tokens": [], "load_weight": 1001}),
    "select by array": ("/v1/select", {"model": "m", "tokens": [], "candidates": [["e0", 0, 0.0]]}),
}


def send_to_both_planes(service: Service, path: str, body: bytes, kind: str, accept: str) -> tuple[Answer, Answer]:
    """Return the responses of both planes."""
    headers = {"content_type": kind, "accept": accept}
    return service.ask("POST", path, body, **headers), service.ask("POST", escape(path), body, **headers)


def remove_date(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    """Return a response without the parts that change with each request."""
    return answer.status, {name: value for name, value in answer.headers.items() if name != "date"}, answer.body


@pytest.mark.parametrize("accept", ["*/*", MSGPACK])
@pytest.mark.parametrize("kind", [JSON, MSGPACK])
@pytest.mark.parametrize("scope", SCOPES)
def test_both_planes_send_equal_responses(service: Service, scope: str, kind: str, accept: str) -> None:
    for name, (path, fields) in BODIES.items():
        value = {**fields, **SCOPES[scope]}
        body = msgspec.json.encode(value) if kind == JSON else msgspec.msgpack.encode(value)
        native, forwarded = send_to_both_planes(service, path, body, kind, accept)
        assert remove_date(native) == remove_date(forwarded), name


@pytest.mark.parametrize(
    "query",
    [
        "model=m",
        "model_name=m&lora=sql",
        "model=m&whole_prompt=true",
        "model=m&what=1",
        "model=m&model=m",
        "model=%6D",
        "",
        "=",
        "model",
    ],
)
def test_both_planes_send_equal_responses_to_raw_prompts(service: Service, query: str) -> None:
    for body in (struct.pack(f"<{len(PROMPT)}I", *PROMPT), b"", b"odd"):
        native, forwarded = send_to_both_planes(service, f"/v1/match?{query}", body, "application/octet-stream", "*/*")
        assert remove_date(native) == remove_date(forwarded)


MALFORMED: Final = (
    b"",
    b"[]",
    b"null",
    b'["m", [1]]',
    b'{"model": "m", "tokens": [1]} x',
    b'{"model": "m", "tokens": [1], "tokens": [2]}',
    b'{"model": "m", "tokens": [1.0]}',
    b'{"model": "m", "tokens": [1e0]}',
    b'{"model": "m", "tokens": [-0]}',
    b'{"model": "m", "tokens": [4294967296]}',
    b'{"model": "\xff", "tokens": [1]}',
    b'{"model": "\\ud800", "tokens": [1]}',
    b'{"model": "m", "t\\u006fkens": [1]}',
    b'{"model": "m", "tokens": [1], "expected": 1}',
    b'{"model": "m", "tokens": null}',
    b'\xef\xbb\xbf{"model": "m", "tokens": [1]}',
)


@pytest.mark.parametrize("path", ["/v1/match", "/v1/select"])
def test_both_planes_send_equal_responses_to_unusual_requests(service: Service, path: str) -> None:
    for body in MALFORMED:
        native, forwarded = send_to_both_planes(service, path, body, JSON, "*/*")
        if native.status == 200 and path == "/v1/select":  # equal workers are selected in turn
            assert forwarded.status == 200
        else:
            assert remove_date(native) == remove_date(forwarded), body


def test_lookups_of_both_planes_are_counted_together(service: Service) -> None:
    before = service.get("/v1/stats").json["lookups"]
    body = msgspec.json.encode({"model_name": "m", "token_ids": PROMPT})
    send_to_both_planes(service, "/query", body, JSON, "*/*")
    assert service.get("/v1/stats").json["lookups"] == before + 2


def test_requests_of_both_planes_are_counted_together(service: Service) -> None:
    def count(path: str, status: int) -> float:
        families = text_string_to_metric_families(service.get("/metrics").body.decode())
        samples = [sample for family in families for sample in family.samples if sample.name == "kvevents_http_requests_total"]
        return sum(one.value for one in samples if one.labels == {"path": path, "status": str(status)})

    asked = ("/query", 200), ("/query", 404), ("/query", 405), ("/v1/sources", 200), ("/no-such-path", 404)
    before = [count(*each) for each in asked]
    body = msgspec.json.encode({"model_name": "m", "token_ids": PROMPT})
    send_to_both_planes(service, "/query", body, JSON, "*/*")
    assert service.post("/query", model_name="x", token_ids=PROMPT).status == 404
    assert service.get("/query").status == 405
    assert service.get("/v1/sources").status == 200
    assert service.get("/no-such-path").status == 404
    assert [count(*each) for each in asked] == [before[0] + 2, before[1] + 1, before[2] + 1, before[3] + 1, 0]


def test_http_2_connections_are_accepted(service: Service) -> None:
    """The server responds to the HTTP/2 preface with a SETTINGS frame."""

    with socket.create_connection((service.host, service.port), DEADLINE) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        assert connection.recv(9)[3:5] == b"\x04\x00"


async def test_a_thread_that_publishes_while_the_data_plane_closes_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower's thread publishes each change. If it failed, the last snapshot would not be written."""
    service = ServiceInProcess(ServiceSettings())
    is_reading, is_closed = threading.Event(), threading.Event()

    def readiness() -> ReadyAnswer:
        is_reading.set()
        assert is_closed.wait(DEADLINE)
        return ReadyAnswer(ready=True, why="", exact=0, sources=0, quorum=1.0, deadline_seconds=1.0)

    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            service.data_plane.start(listening, App(service), data_plane_settings(service, answers_queries=True))
        monkeypatch.setattr(service.data_plane, "_readiness", readiness)
        refreshing = asyncio.create_task(asyncio.to_thread(service.data_plane.refresh))
        assert await asyncio.to_thread(is_reading.wait, DEADLINE)
    finally:
        await service.data_plane.close()
        is_closed.set()
        service.fleet.follower.subscriber.close()
    await refreshing
    service.fleet.on_change()


def test_a_reading_of_the_fleet_does_not_write_the_routing_table(monkeypatch: pytest.MonkeyPatch) -> None:
    service = ServiceInProcess(ServiceSettings())
    service.fleet.follower.subscriber.close()

    def publish() -> None:
        raise AssertionError("a reading has written")

    monkeypatch.setattr(service.data_plane, "publish", publish)
    assert service.members() == {}
    with pytest.raises(ServiceError, match="no engine serves model 'm'"):
        ask(service, Scope("m", "default", "default", None, None), "/v1/match", {}, [1])
