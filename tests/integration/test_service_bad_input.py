"""Malformed input of clients and engines: the result is an error or a state, and others are not affected."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from certificate_cases import make_certificates, sign_certificate
from cli_cases import refuse_connections, run
from kvevents.client.schemas import Problem
from kvevents.events import BlockStored, EventBatch
from kvevents.wire import encode_batch
from kvevents.zeromq.keys import Curve
from service_cases import (
    BLOCK,
    DEADLINE,
    Client,
    Engine,
    EventStream,
    Service,
    confirm,
    engine,
    engines,
    exchange,
    prompt,
    registration,
    run_raw_publisher,
    serving,
    wait_for,
    write,
)

TOKENS = {role: f"{role}-token-of-the-test" for role in ("read", "register")}


@pytest.fixture(scope="module", name="service")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    limits = "limits = { max_body_bytes = 100_000, max_tokens = 5_000, request_seconds = 1.5, max_sources = 30 }\n"
    config = write(tmp_path_factory.mktemp("bad") / "service.toml", limits)
    with serving("--config", config, "--log-level", "debug") as service:
        yield service


@pytest.fixture(scope="module", name="witness")
def witness_engine(service: Service) -> Iterator[Engine]:
    """An engine without faults."""
    with engine(seed=1) as made:
        assert service.register("witness", made.publisher, model_name="witness").status == 201
        made.store(prompt(1))
        service.exact("witness", blocks=4)
        yield made


@pytest.fixture(autouse=True)
def witness_is_unaffected(service: Service, witness: Engine) -> Iterator[None]:
    """Check after each test that the witness is EXACT, its newest blocks are found, and nothing was lost or restarted."""
    before = service.source("witness")
    yield
    parent = witness.store(prompt(2, 1))
    service.wait_for_prefix("witness", prompt(2, 1), model_name="witness")
    after = service.exact("witness")
    witness.remove(parent)
    assert [after[name] for name in ("lost", "resets", "reconnects", "incarnation", "rejected")] == [
        before[name] for name in ("lost", "resets", "reconnects", "incarnation", "rejected")
    ]
    assert service.get("/health").json["status"] == "ok"


# --- bodies


@pytest.mark.parametrize(
    "path", ["/register", "/unregister", "/query", "/query_by_hash", "/v1/match", "/v1/match_many", "/v1/select"]
)
@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"7", b'"text"', b"{", b"[" * 50_000, b'{"a":' * 20_000, b"\xff" * 100, b'{"model_name":"\\ud800"}'],
    ids=["empty", "null", "array", "number", "string", "cut", "deep", "deeper", "binary", "surrogate"],
)
def test_invalid_bodies_are_rejected(service: Service, path: str, body: bytes) -> None:
    for kind in ("application/json", "application/msgpack"):
        answer = service.ask("POST", path, body, content_type=kind)
        assert answer.status in {400, 422}
        assert answer.reason in {"malformed-body", "bad-shape"}


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 50_000,
        b"\xc1",
        b"\x81\xa5model\xa1\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81" * 9_000,
        b"\x82\xa5model\xa1m\xa6tokens\xdd\xff\xff\xff\xff",
    ],
    ids=["deep", "reserved", "no text", "endless map", "deep maps", "endless tokens"],
)
def test_malformed_msgpack_is_rejected(service: Service, body: bytes) -> None:
    answer = service.ask("POST", "/v1/match", body, content_type="application/msgpack")
    assert answer.status in {400, 422}
    assert answer.reason in {"malformed-body", "bad-shape"}


def test_large_bodies_are_413_with_and_without_chunks(service: Service) -> None:
    body = b" " * 100_001
    answer = service.ask("POST", "/query", body, content_type="application/json")
    assert (answer.status, answer.reason) == (413, "too-large")
    chunked = b"POST /query HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    raw = exchange(service, chunked + b"10000\r\n" + b" " * 0x10000 + b"\r\n10000\r\n" + b" " * 0x10000 + b"\r\n0\r\n\r\n")
    assert raw.startswith(b"HTTP/1.1 413 ")
    assert b'"too-large"' in raw
    assert service.post("/query", model_name="witness", token_ids=[1]).status == 200  # the same connection still works


POST = b"POST /query HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
BROKEN_BODIES = {
    "no size": CHUNKED + b"\r\n{}\r\n0\r\n\r\n",
    "no number": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "negative size": CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    "size above 64 bits": CHUNKED + b"10000000000000000\r\n{}\r\n0\r\n\r\n",
    "long extension": CHUNKED + b"2;a=" + b"b" * 20_000 + b"\r\n{}\r\n0\r\n\r\n",
    "no line end after a chunk": CHUNKED + b"2\r\n{}0\r\n\r\n",
    "longer chunk": CHUNKED + b"2\r\n{ }\r\n0\r\n\r\n",
    "malformed trailer": CHUNKED + b"2\r\n{}\r\n0\r\nx\r\n\r\n",
    "many trailers": CHUNKED + b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 2_000 + b"\r\n",
    "end in a size": CHUNKED + b"2",
    "end in a chunk": CHUNKED + b"2\r\n{",
    "end after a chunk": CHUNKED + b"2\r\n{}\r\n",
    "end in a trailer": CHUNKED + b"2\r\n{}\r\n0\r\nx",
    "end in a body with a length": POST + b"content-length: 2\r\n\r\n{",
    "two lengths": POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "chunks inside another coding": POST + b"transfer-encoding: chunked, gzip\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("path", [b"/query", b"/register"])
@pytest.mark.parametrize("name", BROKEN_BODIES)
def test_broken_bodies_are_answered_before_the_connection_is_closed(service: Service, name: str, path: bytes) -> None:
    """The status is 400 for queries and for requests to the control plane, also if the client has closed its sending side."""
    raw = exchange(service, BROKEN_BODIES[name].replace(b"/query", path), half="end" in name.split())
    assert raw.startswith(b"HTTP/1.1 400 "), raw
    assert b"\r\nconnection: close\r\n" in raw
    assert b'"malformed-request"' in raw


def test_other_transfer_codings_than_chunked_are_501(service: Service) -> None:
    for coding in (
        b"gzip, chunked",
        b"chunked, chunked",
        b"gzip\r\ntransfer-encoding: chunked",
        b"chunked\r\ntransfer-encoding: chunked",
    ):
        raw = exchange(service, POST + b"transfer-encoding: " + coding + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        assert raw.startswith(b"HTTP/1.1 501 "), raw
        assert b"\r\nconnection: close\r\n" in raw
        assert b"no other Transfer-Encoding than chunked" in raw


def test_too_many_tokens_are_413(service: Service) -> None:
    body = {"model": "witness", "model_name": "witness"}
    many = [1] * 5_001
    for path, more in (
        ("/query", {"token_ids": many}),
        ("/v1/match", {"tokens": many}),
        ("/v1/match_many", {"prompts": [many[:2_600], many[:2_600]]}),
        ("/v1/select", {"tokens": many}),
    ):
        named = {"model": "witness"} if path.startswith("/v1") else body
        answer = service.post(path, {**named, **more})
        assert (answer.status, answer.reason) == (413, "too-many-tokens")


@pytest.mark.parametrize("pause", [None, 0.1], ids=["stopped", "dripping"])
def test_slow_bodies_are_408(service: Service, pause: float | None) -> None:
    """Slow bytes do not extend the time limit."""
    began = time.monotonic()
    with socket.create_connection((service.host, service.port), DEADLINE) as connection:
        connection.sendall(
            b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
        )
        connection.settimeout(pause or DEADLINE)
        answer = b""
        while not answer:
            try:
                answer = connection.recv(65_536)
            except TimeoutError:
                connection.sendall(b" ")
        connection.settimeout(DEADLINE)
        while piece := connection.recv(65_536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"too-slow"' in answer
    assert 1.4 < time.monotonic() - began < DEADLINE / 2


def test_a_client_that_resets_its_connection_affects_no_others(service: Service) -> None:
    head = b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
    with socket.create_connection((service.host, service.port), DEADLINE) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(head)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"no http at all\r\n\r\n", 400),
        (b"POST /query HTTP/1.1\r\nhost: localhost\r\nx: y\ncontent-length: 50\r\ncontent-length: 2\r\n\r\n{}", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x-long: " + b"y" * 100_000, 431),
        (b"GET /" + b"y" * 100_000, 431),
        (b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n{}   ", 400),
        (b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999999\r\n\r\n", 400),
    ],
    ids=["text", "line feed", "long header", "long path", "two lengths", "endless"],
)
def test_malformed_requests_are_problem_details(service: Service, sent: bytes, status: int) -> None:
    answer = exchange(service, sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"content-type: application/problem+json\r\n" in head
    assert msgspec.json.decode(body, type=Problem).status == status


def test_connections_without_a_complete_request_are_closed(service: Service) -> None:
    """Unfinished heads, an empty connection and a TLS handshake get 400, 408 or no response."""
    for sent in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50,
        b"POST /query HTTP/1.1\r\nhost:",
        b"GET / HT",
        b"",
    ):
        answer = exchange(service, sent)
        assert not answer or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 408 "))


def test_offers_of_another_protocol_are_declined(service: Service) -> None:
    """`curl --http2` and WebSockets of browsers send these offers."""
    for offer in (b"h2c\r\nhttp2-settings: AAMAAABkAAQAAP__", b"websocket\r\nsec-websocket-key: x3JJHMbDL1EzLkh9GBhXDw=="):
        sent = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, close\r\nupgrade: " + offer + b"\r\n\r\n"
        assert exchange(service, sent).startswith(b"HTTP/1.1 200 ")


def test_query_strings_are_bounded(service: Service) -> None:
    """Parameters that are not UTF-8 are rejected, and unusual values match nothing."""
    given = (("&" * 60_000, 400), ("tenant=" + "%00" * 100, 200), ("x=%ff", 400), ("model=%00", 200), ("model=%ff", 400))
    for query, status in given:
        answer = service.get(f"/v1/sources?{query}"[:60_000])
        assert answer.status == status, query[:10]
        if status == 400:
            assert answer.reason == "bad-query-string"
    assert service.get("/v1/sources?model=%00").json["sources"] == []
    many = service.get("/v1/sources?" + "&".join(f"p{number}=1" for number in range(5_000)))
    assert (many.status, many.reason) == (400, "bad-query-string")


# --- registrations


@pytest.mark.parametrize(
    "more",
    [
        {"block_size": 0},
        {"block_size": -16},
        {"block_size": 2**40},
        {"dp_rank": -1},
        {"dp_rank": 2**32},
        {"instance_id": ""},
        {"instance_id": "a\nb"},
        {"instance_id": "a\x1fb"},
        {"instance_id": "x" * 513},
        {"model_name": "x" * 513},
        {"model_name": "a\x1b[31mb"},
        {"tenant_id": ""},
        {"routing_group": ""},
        {"topic": "x" * 513},
    ],
)
def test_invalid_registrations_are_400(service: Service, more: dict[str, Any]) -> None:
    answer = service.post("/register", {**registration("bad", "tcp://127.0.0.1:5557"), **more})
    assert (answer.status, answer.reason) == (400, "bad-registration")


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://169.254.169.254:80",
        "tcp://[fe80::1]:80",
        "tcp://[::ffff:169.254.169.254]:80",
        "tcp://100.100.100.200:80",
        "tcp://0.0.0.0:5557",
        "tcp://224.0.0.1:5557",
        "tcp://8.8.8.8:53",
        "tcp://0x7f000001:80",
        "tcp://127.1:80",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1:80;127.0.0.1:81",
        "tcp://*:5557",
        "ipc:///etc/passwd",
        "ipc://@abstract",
    ],
)
def test_registrations_with_forbidden_endpoints_are_refused(service: Service, endpoint: str) -> None:
    for more in ({"endpoint": endpoint}, {"replay_endpoint": endpoint}):
        answer = service.post("/register", {**registration("forged", "tcp://127.0.0.1:5557"), **more})
        assert answer.status == 400
        assert answer.reason in {"endpoint-refused", "bad-endpoint"}
    assert ("forged", 0) not in service.sources()


def test_a_host_name_that_resolves_to_a_forbidden_address_is_refused(service: Service, tmp_path: Path) -> None:
    """`localhost` resolves to an allowed address by default, and not with a list of other networks."""
    config = write(tmp_path / "service.toml", 'allow = ["tcp://10.0.0.0/8:*"]\n')
    with serving("--config", config) as strict:
        answer = strict.register("e", "tcp://localhost:5557")
        assert (answer.status, answer.reason) == (400, "endpoint-refused")
        assert "which no pattern of the allow-list covers" in answer.json["error"]


def test_the_number_of_sources_is_limited(service: Service) -> None:
    with refuse_connections() as nowhere:
        answers = [service.register("many", nowhere, rank, model_name="many") for rank in range(40)]
        assert {answer.status for answer in answers} == {201, 413}
        assert answers[-1].reason == "too-many-sources"
        assert len(service.sources()) == 30
        assert service.post("/unregister", instance_id="many").status == 200


# --- engines


def confirm_and_read_trust(service: Service, instance: str) -> tuple[str, str]:
    """Return state and reason. The engine first publishes a batch if a live one must confirm the replayed batches."""
    confirm(service.source(instance))
    return service.trust(instance)


def test_an_engine_with_another_block_size_than_registered_is_degraded(service: Service) -> None:
    with engine(seed=20) as made:
        assert service.register("liar", made.publisher, block_size=16).status == 201
        made.store(prompt(20), block_size=32)
        wait_for("all its blocks", lambda: service.source("liar")["blocks"] == 2)
        mismatch = ("DEGRADED", "it is registered with blocks of 16 tokens and sends blocks of 32")
        wait_for("the mismatch alone", lambda: confirm_and_read_trust(service, "liar") == mismatch)
        found = service.source("liar")
        assert (found["declared_block_size"], found["block_sizes"]) == (16, [32])
        # Blocks are looked up by their true size, so the response is still right.
        assert service.held(prompt(20)) == {"liar": 64}
        assert service.query(prompt(20))["instances"]["liar"]["trust"] == {"0": "DEGRADED"}
        assert service.post("/unregister", instance_id="liar").status == 200


def test_an_engine_that_restarts_with_another_block_size_is_degraded(service: Service) -> None:
    with engine(seed=21) as made:
        place = {"endpoint": made.endpoint, "replay_endpoint": made.replay_endpoint, "bind": True}
        assert service.register("back", made.publisher).status == 201
        made.store(prompt(21))
        service.exact("back", blocks=4)
    with engine(seed=22, **place) as again:
        again.store(prompt(21), block_size=32)
        wait_for("all its blocks", lambda: service.source("back")["blocks"] == 2)
        wait_for("the mismatch", lambda: "sends blocks of 32" in confirm_and_read_trust(service, "back")[1])
        assert service.trust("back")[0] == "DEGRADED"
        assert service.held(prompt(21)) == {"back": 64}
    assert service.post("/unregister", instance_id="back").status == 200
    with engine(seed=23, **place) as restarted:
        restarted.store(prompt(21), block_size=32)
        assert service.register("back", restarted.publisher, block_size=32).status == 201
        service.exact("back", blocks=2)
        assert service.post("/unregister", instance_id="back").status == 200


@pytest.mark.parametrize("ts", [0.0, -1e300, 1e300, float("inf"), float("nan"), 4e9], ids=str)
def test_timestamps_of_batches_can_have_any_value(service: Service, ts: float) -> None:
    with engine(seed=24) as made:
        assert service.register("clock", made.publisher).status == 201
        service.exact("clock")
        made.publish(BlockStored([1], None, prompt(24, 1), BLOCK, medium="GPU"), at=ts)
        made.store(prompt(25, 1))
        found = service.exact("clock", blocks=2)
        assert found["lost"] == 0
        assert service.get("/metrics").status == 200
        assert service.post("/unregister", instance_id="clock").status == 200


def test_malformed_batches_are_rejected_and_valid_ones_are_applied(service: Service) -> None:
    good = encode_batch(EventBatch(time.time(), [BlockStored([1], None, prompt(26, 1), BLOCK, medium="GPU")]))
    bad = [
        b"",
        b"\xc1",
        b"\x92\x01" + b"\x91" * 5_000 + b"\x01",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [2**40] * 16, 16, None, "GPU"]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1] * 16, 0, None, "GPU"]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1, 2], None, [1] * 3, 16, None, "GPU"]]]),
        msgspec.msgpack.encode([1.0, [["Unknown", 1]]]),
        msgspec.msgpack.encode({"ts": {}, "events": 5}),
        b"\x93\xcb" + struct.pack(">d", float("nan")) + b"\x90\xcf" + b"\xff" * 8,
    ]
    with run_raw_publisher() as made:
        assert service.register("noise", made.endpoint).status == 201
        made.wait()
        for payload in bad:
            made.send(payload)
        made.send_frames(b"one frame")
        made.send_frames(b"", b"short", good)
        made.send_frames(*[b"x"] * 50)
        made.send(good)
        service.wait_for_prefix("noise", prompt(26, 1))
        wait_for("the count", lambda: sum(service.source("noise")["rejected"].values()) >= 4)
        wait_for("the trust", lambda: service.trust("noise")[0] == "DEGRADED")
        assert b"kvevents_rejected_events" in service.get("/metrics").body
        assert service.post("/unregister", instance_id="noise").status == 200


def test_losses_of_an_engine_without_replay_are_reported(service: Service) -> None:
    """The source reports their number and the newest gaps. The log reports all of them in a few lines."""
    with run_raw_publisher() as made:
        assert service.register("lossy", made.endpoint).status == 201
        made.wait()
        for number in range(500):
            event = BlockStored([number], None, prompt(100 + number, 1), BLOCK, medium="GPU")
            made.send(encode_batch(EventBatch(time.time(), [event])), skip=2 if number else 0)
        service.wait_for_prefix("lossy", prompt(599, 1))
        wait_for("the count", lambda: service.source("lossy")["lost"] == 998)
        found = service.source("lossy")
        assert found["trust"]["state"] == "DEGRADED"
        assert (len(found["gaps"]), found["gaps"][-1]["last"]) == (64, 1496)
        service.wait_for_log("WARNING lossy rank 0: batches .* are lost")
        assert len(service.log_lines("WARNING lossy rank 0: batches .* are lost")) <= 5
        assert service.post("/unregister", instance_id="lossy").status == 200


@pytest.mark.parametrize("name", ['a"b', "a\\\\n", "{}", "ünïcödé 車", "a,b=c", "../..", "<b>"])
def test_names_can_have_any_printable_characters(service: Service, name: str) -> None:
    with engine(seed=27) as made, EventStream(service) as stream:
        assert service.register(name, made.publisher, model_name=name, tenant_id=name).status == 201
        made.store(prompt(27, 1))
        service.exact(name, blocks=1)
        assert stream.next("batches", lambda event: event["instance"] == name)["model"] == name
        assert service.held(prompt(27, 1), model_name=name, tenant_id=name) == {name: 16}
        query = urlencode({"instance": name, "tenant": name})
        assert service.get(f"/v1/blocks?{query}").json["total"] == 1
        samples = [
            sample
            for family in text_string_to_metric_families(service.get("/metrics").body.decode())
            for sample in family.samples
        ]
        assert name in {sample.labels.get("tenant") for sample in samples}
        assert service.post("/unregister", instance_id=name, tenant_id=name).status == 200


def test_concurrent_registrations_and_queries_leave_the_service_intact(service: Service) -> None:
    """Many clients register, unregister, query and list the same few engines."""
    with engines(2) as made, ThreadPoolExecutor(8) as pool:  # so few that the model is often unknown for a moment
        for each in made:
            each.store(prompt(28))

        def client(seed: int) -> Counter[int]:
            statuses: Counter[int] = Counter()
            dice, own = Random(seed), Client(service.url)
            for _ in range(150):
                number = dice.randrange(len(made))
                name = {"instance_id": f"storm-{number}", "model_name": "storm"}
                choice = dice.randrange(7)
                if choice < 2:
                    body = registration(f"storm-{number}", made[number].publisher, model_name="storm")
                    statuses[own.post("/register", body).status] += 1
                elif choice == 2:
                    statuses[own.post("/unregister", name).status] += 1
                elif choice == 3:
                    statuses[own.post("/v1/match_many", model="storm", prompts=[prompt(28)] * 3).status] += 1
                elif choice == 4:
                    statuses[own.get("/metrics").status] += 1
                elif choice == 5:
                    statuses[own.get(f"/v1/blocks?instance=storm-{number}").status] += 1
                else:
                    statuses[own.post("/v1/select", model="storm", tokens=prompt(28), expect_seconds=1).status] += 1
            own.close()
            return statuses

        total = sum(pool.map(client, range(8)), Counter())
        assert set(total) <= {200, 201, 400, 404, 409}
        assert total[200] > 50
        for number, each in enumerate(made):
            service.post("/unregister", instance_id=f"storm-{number}", model_name="storm")
            assert service.register(f"storm-{number}", each.publisher, model_name="storm").status == 201
            service.exact(f"storm-{number}", blocks=4)
            service.post("/unregister", instance_id=f"storm-{number}", model_name="storm")


# --- configured sources


def test_sources_follow_a_changed_configuration_file(tmp_path: Path) -> None:
    """Sources follow the file. An invalid file is reported as a fault, and the earlier sources stay."""
    with engines(2) as (first, second):

        def table(name: str, made: Engine, more: str = "") -> str:
            endpoints = f'endpoint = "{made.endpoint}"\nreplay_endpoint = "{made.replay_endpoint}"'
            return f'[[sources]]\ninstance = "{name}"\nmodel = "m"\n{endpoints}\n{more}\n'

        path = write(tmp_path / "service.toml", table("a", first))
        with serving("--config", path) as service:
            service.exact("a")
            write(path, table("a", first) + table("b", second))
            wait_for("the second", lambda: ("b", 0) in service.sources())
            service.exact("b")
            write(path, "nonsense")
            faults = wait_for("the fault", lambda: service.get("/v1/sources").json["faults"])
            assert str(path) in str(faults)
            service.wait_for_log(f"WARNING {path}: ")
            assert set(service.sources()) == {("a", 0), ("b", 0)}
            write(path, table("b", second))
            wait_for("the second alone", lambda: set(service.sources()) == {("b", 0)})
            assert service.get("/v1/sources").json["faults"] == {}
            service.wait_for_log(f"INFO +this fault has ended: {path}: ")
            # A client cannot register a source of the configuration.
            assert service.register("b", second.publisher).status == 409


def test_an_endpoint_that_cannot_be_bound_is_reported_as_a_fault(tmp_path: Path) -> None:
    with refuse_connections() as taken, engine(seed=29) as made:
        text = f'[[sources]]\ninstance = "taken"\nmodel = "m"\nbind = true\nendpoint = "{taken}"\n'
        text += f'[[sources]]\ninstance = "good"\nmodel = "m"\nendpoint = "{made.endpoint}"\n'
        text += f'replay_endpoint = "{made.replay_endpoint}"\n'
        with serving("--config", write(tmp_path / "service.toml", text)) as service:
            service.exact("good")
            (faults,) = wait_for("the fault", lambda: list(service.get("/v1/sources").json["faults"].values()))
            assert faults[0].startswith("cannot follow taken rank 0")
            service.wait_for_log("ERROR.*cannot follow taken rank 0")


# --- the process


def test_a_port_in_use_is_an_error_of_one_line(service: Service) -> None:
    ended = run("serve", "--port", service.port)
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert "cannot listen at 127.0.0.1 port" in line
    assert "Address already in use" in line


def test_an_http_port_that_the_service_listens_at_for_engines_is_an_error_of_one_line() -> None:
    """Both sockets can be bound, because neither listens yet. The error names the address."""
    with refuse_connections() as endpoint:
        pass
    ended = run("serve", "--port", endpoint.rpartition(":")[2], "--listen", endpoint)
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("kvevents: cannot listen at 127.0.0.1 port"), ended.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = 70000", "port is 70000"),
        ("prot = 1", "unknown field 'prot'"),
        ("limits = { max_body_bytes = 0 }", "limits.max_body_bytes is 0"),
        ("ready = { quorum = 2.0 }", "ready.quorum is 2.0"),
        ('allow = ["everything"]', "invalid pattern 'everything'"),
        ('[[sources]]\nendpoint = "tcp://127.0.0.1:1"', "model is missing"),
        ('access = { tokens = [{ role = "read", token = "short" }] }', "expected 16 to 4096"),
        ('tls = { certificate = "nowhere.pem", key = "nowhere.pem" }', "tls cannot be used"),
        ('state_dir = "/proc/nowhere"', "state_dir /proc/nowhere cannot be used"),
        ("host = 'no-such-host.invalid'\ninsecure = true", "cannot listen at no-such-host.invalid"),
        ("= nonsense", "cannot read"),
    ],
)
def test_a_wrong_setting_is_an_error_of_one_line(tmp_path: Path, text: str, message: str) -> None:
    ended = run("serve", "--config", write(tmp_path / "service.toml", text))
    assert ended.code in {1, 2}
    (line,) = ended.err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('allow = ["everything"]', "allow: invalid pattern 'everything'"),
        ('access = { tokens = [{ role = "read", token = "short" }] }', "token 1 has 5 bytes"),
        ('state_dir = "/proc/nowhere"', "state_dir /proc/nowhere cannot be used"),
    ],
)
def test_a_refused_setting_names_its_file(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "service.toml", text)
    for arguments in ((), ("--check",)):
        assert f"kvevents: {path}: {message}" in run("serve", "--config", path, *arguments).err


def test_a_refused_option_is_named_instead_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "service.toml", 'state_dir = "unused"')
    ended = run("serve", "--config", path, "--state-dir", "/proc/nowhere", "--check")
    assert ended.err.startswith("kvevents: --state-dir: state_dir /proc/nowhere cannot be used")


# --- permissions


def test_each_request_needs_its_role(tmp_path: Path) -> None:
    lines = ",".join(f'{{ role = "{role}", token = "{token}" }}' for role, token in TOKENS.items())
    config = write(tmp_path / "service.toml", f"access = {{ tokens = [{lines}] }}\n")
    with serving("--config", config) as service, refuse_connections() as nowhere:
        public, query_path, register_path = ("/health", "/livez", "/readyz", "/", "/openapi.json"), "/v1/sources", "/register"

        def statuses(token: str | None) -> tuple[set[int], int, int]:
            client = Client(service.url, token)
            try:
                given = {client.get(path).status for path in public} - {503}  # `/readyz` without readiness is public, too
                return given, client.get(query_path).status, client.post(register_path, registration("r", nowhere)).status
            finally:
                client.close()

        assert statuses(None) == ({200}, 401, 401)
        assert statuses("wrong-token-of-the-test") == ({200}, 401, 401)
        assert statuses(TOKENS["read"]) == ({200}, 200, 403)
        assert statuses(TOKENS["register"]) == ({200}, 200, 201)
        refused = service.get(query_path)
        assert (refused.reason, refused.headers["www-authenticate"]) == ("unauthorized", "Bearer")
        service.token = TOKENS["read"]
        assert service.post(register_path, {}).reason == "forbidden"
        # The service does not read the body of a client without a token: it responds before the body arrives.
        service.token = None
        with socket.create_connection((service.host, service.port), DEADLINE) as connection:
            connection.sendall(b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-length: 16000000\r\n\r\n{")
            assert connection.recv(65_536).startswith(b"HTTP/1.1 401 ")
        assert service.ask("POST", "/query", b"x" * 1000).status == 401
        assert [service.ask("GET", "/v1/sources", authorization=value).status for value in ("Basic eDp5", "Bearer", "")] == [
            401
        ] * 3
        with EventStream(service) as stream:
            assert stream.status == 401
        assert not any(token in line for token in TOKENS.values() for line in service.log)


@pytest.fixture(scope="module", name="certificates")
def made_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def make_client_context(folder: Path, client: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python does from 3.13 on
    if client is not None:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    return context


def test_tls_and_mutual_tls_are_required_as_configured(certificates: Path, tmp_path: Path) -> None:
    tls = f'certificate = "{certificates}/server.pem", key = "{certificates}/server.key"'
    plain = write(tmp_path / "tls.toml", f"tls = {{ {tls} }}\n")
    with serving("--config", plain, tls=make_client_context(certificates)) as service:
        assert service.url.startswith("https://")
        assert service.get("/health").status == 200
        answer = exchange(service, b"GET /health HTTP/1.1\r\n\r\n", half=True)  # without TLS: no response
        assert (answer[:1], len(answer)) in {(b"", 0), (b"\x15", 7)}, "at most a TLS alert"
    mutual = write(tmp_path / "mutual.toml", f'tls = {{ {tls}, client_ca = "{certificates}/ca.pem" }}\n')
    with serving("--config", mutual, tls=make_client_context(certificates, "client")) as service:
        assert service.get("/health").status == 200
        stranger = Client(service.url, tls=make_client_context(certificates))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            stranger.get("/health")
        stranger.close()


def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    """Files that cannot be used change nothing: /health and the log say so until they are replaced."""
    certificates = make_certificates(tmp_path)
    for name in ("first", "second"):
        sign_certificate(certificates, name)
    config = write(
        tmp_path / "tls.toml", f'tls = {{ certificate = "{certificates}/server.pem", key = "{certificates}/server.key" }}\n'
    )
    context = make_client_context(certificates)
    with serving("--config", config, tls=context) as service:

        def name_of_server() -> str:
            with (
                socket.create_connection((service.host, service.port), DEADLINE) as made,
                context.wrap_socket(made, server_hostname=service.host) as connection,
            ):
                found: Any = connection.getpeercert()
                name: str = found["subject"][0][0][1]
            return name

        def is_used(name: str) -> bool:
            return name_of_server() == name

        def install(content: str, suffix: str) -> None:
            (certificates / "new").write_text(content)
            (certificates / "new").replace(certificates / f"server.{suffix}")

        def refuse(content: str) -> None:
            """Install a certificate that cannot be used, and wait until it is refused."""
            refused = len(service.log_lines("tls cannot be used"))
            install(content, "pem")
            wait_for("a refusal", lambda: len(service.log_lines("tls cannot be used")) > refused)

        assert name_of_server() == "server"
        whole = (certificates / "first.pem").read_text()
        for content in ("", whole[: len(whole) // 2], whole):  # the last one has another key
            refuse(content)
            assert name_of_server() == "server"
            (warning,) = wait_for("the warning", lambda: service.get("/health").json["warnings"])
            assert warning.endswith("new connections use the certificate that was read before")
        for name in ("first", "second"):
            for suffix in ("pem", "key"):
                install((certificates / f"{name}.{suffix}").read_text(), suffix)
            wait_for("the new certificate", partial(is_used, name))
            wait_for("no warning", lambda: service.get("/health").json["warnings"] == [])
        wait_for("the log", lambda: len(service.log_lines("was read again")) == 2)


def test_only_engines_with_the_configured_curve_key_are_followed(tmp_path: Path) -> None:
    """Engines without encryption or with another key are not followed."""
    (server_public, server_secret), (public, secret) = (tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(2))
    stranger_public, stranger_secret = (key.decode() for key in zmq.curve_keypair())
    config = write(
        tmp_path / "service.toml",
        f'curve = {{ public_key = "{public}", secret_key = "{secret}", server_key = "{server_public}" }}\n',
    )
    with (
        engine(seed=30, curve=Curve(public_key=server_public, secret_key=server_secret)) as trusted,
        engine(seed=31, curve=Curve(public_key=stranger_public, secret_key=stranger_secret)) as stranger,
        engine(seed=32) as clear,
        serving("--config", config, "--log-level", "debug") as service,
    ):
        for name, each in (("trusted", trusted), ("stranger", stranger), ("clear", clear)):
            each.store(prompt(30))
            assert service.register(name, each.publisher).status == 201
        service.exact("trusted", blocks=4)
        assert service.held(prompt(30)) == {"trusted": 64}
        for name in ("stranger", "clear"):
            assert service.trust(name)[0] in {"CONNECTING", "STALE"}
        assert not service.log_lines(re.escape(secret))


def test_no_token_ids_are_in_the_log(tmp_path: Path) -> None:
    """This holds for valid and invalid events and requests, at the most verbose log level."""
    secret = [777_000_111 + place for place in range(4 * BLOCK)]
    with engine(seed=40) as made, serving("--log-level", "debug", "--state-dir", tmp_path / "state") as service:
        assert service.register("quiet", made.publisher).status == 201
        hashes = made.store(secret[:32])
        made.store(secret[32:], parent=[*hashes, 99])  # an orphan
        made.publish(["BlockStored", "nonsense", secret])
        wait_for("the prompt", lambda: service.held(secret) == {"quiet": 32})
        for body in (
            {"model_name": "m", "token_ids": [*secret, "x"]},
            {"model_name": "m", "token_ids": secret, "lora_name": 7},
            {"model_name": "absent", "token_ids": secret},
        ):
            assert service.post("/query", body).status in {404, 422}
        service.post("/v1/select", model="m", tokens=secret, explain=True)
        ended = service.end()
        assert ended.code == 0
        assert not [line for line in service.log if "777000" in line.replace("_", "").replace(",", "")]
