"""Both planes write every error as problem details (RFC 9457), as the OpenAPI document describes."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from io import BytesIO
from typing import Any, Final

import jsonschema_rs
import msgspec
import pytest

from kvevents.service.http.routes import openapi_document
from service_cases import DEADLINE, Answer, Client, Service, registration, serving, wait_for, write

TOKENS: Final = {"read": "reading-0123456789", "register": "registering-0123456789"}
JSON: Final = "application/json"
LIMITS: Final = "max_body_bytes = 100_000, max_tokens = 100, max_clients = 4, reserved_clients = 1, request_seconds = 0.5"


@pytest.fixture(scope="module", name="service")
def one_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    lines = ",".join(f'{{ role = "{role}", token = "{token}" }}' for role, token in TOKENS.items())
    text = f"access = {{ tokens = [{lines}] }}\nlimits = {{ {LIMITS} }}\n"
    config = write(tmp_path_factory.mktemp("errors") / "service.toml", text)
    with serving("--config", config, token=TOKENS["register"]) as service:
        assert service.register("e", "tcp://127.0.0.1:1").status == 201
        yield service


class _Received:
    """The socket interface from which `http.client` reads a response."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def makefile(self, *_: object) -> BytesIO:
        return BytesIO(self.content)


def exchange(service: Service, sent: bytes, *others: bytes) -> Answer:
    """Send bytes on a new connection and return the response. Connections that have sent `others` stay open meanwhile."""
    connections = [socket.create_connection((service.host, service.port), DEADLINE) for _ in others]
    try:
        for connection, unfinished in zip(connections, others, strict=True):
            connection.sendall(unfinished)
        with socket.create_connection((service.host, service.port), DEADLINE) as connection:
            connection.sendall(sent)
            received = bytearray()
            while piece := connection.recv(1 << 16):
                received += piece
    finally:
        for connection in connections:
            connection.close()
    response = http.client.HTTPResponse(_Received(bytes(received)))  # type: ignore[arg-type]  # it uses only this method
    response.begin()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def make_request(
    method: str, path: str, body: bytes | None = None, token: str | None = TOKENS["register"], **headers: str
) -> Any:
    def ask(service: Service) -> Answer:
        client = Client(service.url, token)
        try:
            return client.ask(method, path, body, **headers)
        finally:
            client.close()

    return ask


def make_post(path: str, value: Any, token: str | None = TOKENS["register"]) -> Any:
    return make_request("POST", path, msgspec.json.encode(value), token, content_type=JSON)


def exceed_max_clients(service: Service) -> Answer:
    """Return the response to a request while unfinished requests use all allowed connections."""
    head = b"POST /query HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %b\r\n" % TOKENS["read"].encode()
    busy = head + b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"

    def try_request() -> Answer | None:
        answer = exchange(service, b"GET /v1/stats HTTP/1.1\r\nhost: localhost\r\n\r\n", *[busy] * 4)
        return answer if answer.status == 503 else None

    return wait_for("a refused request", try_request)


def two_hosts(*hosts: str) -> bytes:
    return "\r\n".join(["GET /health HTTP/1.1", *(f"host: {host}" for host in hosts), "", ""]).encode()


def many_headers(count: int, size: int = 1) -> bytes:
    more = b"".join(b"x%d: %b\r\n" % (number, b"y" * size) for number in range(count - 2))
    return b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + more + b"\r\n"


HEAD: Final = b"POST /query HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer reading-0123456789\r\n"
QUERY: Final = {"model_name": "m", "token_ids": [1, 2]}
ERRORS: Final[dict[str, tuple[int, str, tuple[str, str] | None, Callable[[Service], Answer]]]] = {
    # Status, reason, the operation of the document (None for a request that it does not describe), and the request.
    "malformed": (400, "malformed-body", ("post", "/query"), make_request("POST", "/query", b"{", content_type=JSON)),
    "not http": (400, "malformed-request", None, lambda service: exchange(service, b"no http at all\r\n\r\n")),
    "no host": (400, "malformed-request", None, lambda service: exchange(service, b"GET /health HTTP/1.1\r\n\r\n")),
    "two hosts": (400, "malformed-request", None, lambda service: exchange(service, two_hosts("localhost", "localhost"))),
    "two different hosts": (
        400,
        "malformed-request",
        None,
        lambda service: exchange(service, two_hosts("localhost", "a.example")),
    ),
    "connect": (
        400,
        "not-a-proxy",
        None,
        lambda service: exchange(service, b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: 127.0.0.1:22\r\n\r\n"),
    ),
    "endpoint": (400, "bad-endpoint", ("post", "/register"), make_post("/register", registration(7, "tcp://x"))),
    "no token": (401, "unauthorized", ("post", "/query"), make_post("/query", QUERY, token=None)),
    "wrong token": (401, "unauthorized", ("post", "/v1/match"), make_post("/v1/match", {}, token="x" * 20)),
    "role": (403, "forbidden", ("post", "/register"), make_post("/register", {}, token=TOKENS["read"])),
    "origin": (403, "foreign-origin", ("get", "/v1/stats"), make_request("GET", "/v1/stats", origin="http://evil.example")),
    "model": (404, "unknown-model", ("post", "/query"), make_post("/query", {**QUERY, "model_name": "x"})),
    "model in /v1": (404, "unknown-model", ("post", "/v1/select"), make_post("/v1/select", {"model": "x", "tokens": [1]})),
    "path": (404, "no-such-path", None, make_request("GET", "/nothing")),
    "method": (405, "method-not-allowed", None, make_request("DELETE", "/query")),
    "slow head": (408, "too-slow", None, lambda service: exchange(service, b"GET /health HTTP/1.1\r\nhost:")),
    "slow body": (
        408,
        "too-slow",
        ("post", "/query"),
        lambda service: exchange(service, HEAD + b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{"),
    ),
    "conflict": (409, "registered", ("post", "/register"), make_post("/register", registration("e", "tcp://127.0.0.1:2"))),
    "large": (413, "too-large", ("post", "/query"), make_request("POST", "/query", b" " * 100_001, content_type=JSON)),
    "tokens": (413, "too-many-tokens", ("post", "/v1/match"), make_post("/v1/match", {"model": "m", "tokens": [1] * 101})),
    "type": (
        415,
        "unsupported-media-type",
        ("post", "/query"),
        make_request("POST", "/query", b"{}", content_type="text/plain"),
    ),
    "shape": (422, "bad-shape", ("post", "/query"), make_post("/query", {**QUERY, "token_ids": "x"})),
    "headers": (
        431,
        "headers-too-large",
        None,
        lambda service: exchange(service, b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 100_000),
    ),
    "many headers": (431, "headers-too-large", None, lambda service: exchange(service, many_headers(101))),
    "too many clients": (503, "too-many-clients", ("get", "/v1/stats"), exceed_max_clients),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_problem_details(service: Service, name: str) -> None:
    """`Answer.reason` checks the content type and the members; this test compares them with the document."""
    status, reason, operation, ask = ERRORS[name]
    answer = ask(service)
    assert (answer.status, answer.reason) == (status, reason), answer
    get_document = make_request("GET", "/openapi.json")
    document = wait_for("an accepted request", lambda: (answer := get_document(service)).status == 200 and answer.json)
    schema = document["components"]["schemas"]["Problem"]
    jsonschema_rs.validate(schema, answer.json)
    assert set(schema["required"]) == set(answer.json)
    if operation is not None:
        method, path = operation
        content = document["paths"][path][method]["responses"][str(status)]["content"]
        assert content == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


def test_431_names_the_limit(service: Service) -> None:
    assert exchange(service, many_headers(100, 500)).status == 200
    assert "more than 100 headers" in exchange(service, many_headers(101, 500)).json["detail"]
    assert "more than 65536 bytes" in exchange(service, many_headers(100, 700)).json["detail"]


def test_http_1_0_needs_no_host(service: Service) -> None:
    assert exchange(service, b"GET /health HTTP/1.0\r\n\r\n").status == 200


def test_requests_for_an_unknown_host_are_421() -> None:
    """Host names are verified if requests need no token."""
    with serving() as service:
        for target, host in (("/query", "evil.example"), ("http://evil.example/query", "localhost")):
            answer = service.ask("POST", target, b"{}", host=host, content_type=JSON)
            assert (answer.status, answer.reason) == (421, "unknown-host")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--engine", "http://127.0.0.1:1"), "engines are expected, but no engine is registered or found yet"),
        (("--nats", "nats://127.0.0.1:1"), "cannot use the NATS server|the log is being read"),
    ],
)
def test_a_model_is_not_unknown_before_its_engines_can_be_known(arguments: tuple[str, ...], sentence: str) -> None:
    """A client that takes 404 for "no engine serves it" would send its prompts elsewhere permanently."""
    with serving(*arguments) as service:
        for path, body in (("/v1/match", {"model": "m"}), ("/v1/select", {"model": "m"})):
            answer = service.post(path, body | {"tokens": [1]})
            assert (answer.status, answer.reason) == (503, "not-followed-yet")
            assert re.search(sentence, answer.json["detail"] or answer.json["title"])
        if arguments[0] == "--engine":
            assert service.register("e", "tcp://127.0.0.1:1").status == 201
            assert service.post("/v1/match", {"model": "other", "tokens": [1]}).reason == "unknown-model"


@pytest.mark.parametrize("accept", ["*/*", "application/msgpack"])
def test_errors_are_json_for_any_accept_header(service: Service, accept: str) -> None:
    body = msgspec.msgpack.encode({"model": "x", "tokens": [1]})
    ask = make_request("POST", "/v1/match", body, content_type="application/msgpack", accept=accept)
    assert ask(service).reason == "unknown-model"


# --- 400 and 422

BODIES: Final[dict[str, tuple[str, Any]]] = {
    "of another type": ("/v1/match", {"model": "m", "tokens": "x"}),
    "unknown field": ("/v1/match", {"model": "m", "tokens": [1], "unknown": 1}),
    "unknown field in select": ("/v1/select", {"model": "m", "tokens": [1], "tenantId": "t"}),
    "missing field": ("/v1/match_many", {"model": "m"}),
    "no model": ("/v1/match", {"tokens": [1]}),
    "list": ("/v1/match", [1]),
    "missing tokens": ("/query", {"model": "m"}),
    "no model in query": ("/query", {"token_ids": [1]}),
    "invalid hash": ("/query_by_hash", {"model": "m", "seq_hashes": ["x"]}),
    "two kinds of hashes": ("/query_by_hash", {"model": "m", "seq_hashes": [1], "block_hashes": [1]}),
    "misspelled scope": ("/query", {"model": "m", "token_ids": [1], "tenantId": "t"}),
    "contradiction": ("/query", {"model": "m", "token_ids": [1], "tenant_id": "a", "tenant": "b"}),
    "unknown tier": ("/v1/select", {"model": "m", "tokens": [1], "tiers": {"x": 1.0}}),
    "weight out of range": ("/v1/select", {"model": "m", "tokens": [1], "tiers": {"gpu": 2.0}}),
    "no endpoint": ("/register", {"instance_id": 1, "model_name": "m"}),
    "bad endpoint": ("/register", {"instance_id": 1, "model_name": "m", "endpoint": "x"}),
    "refused endpoint": ("/register", {"instance_id": 1, "model_name": "m", "endpoint": "tcp://8.8.8.8:1"}),
    "bad lease": ("/register", {"instance_id": 1, "model_name": "m", "endpoint": "tcp://127.0.0.1:1", "lease_seconds": 0}),
    "bad drafts": ("/register", {"instance_id": 1, "model_name": "m", "endpoint": "tcp://127.0.0.1:1", "drafts": [-1]}),
    "no instance": ("/unregister", {"model_name": "m"}),
}


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_422_means_that_the_body_does_not_match_its_schema(service: Service, path: str, body: Any) -> None:
    """Everything else that cannot be used is 400, whatever the API."""
    document = openapi_document()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    is_valid = jsonschema_rs.is_valid(schema, body)
    with closing(Client(service.url, service.token)) as client:  # the service may have closed an idle connection
        assert client.post(path, body).status == (400 if is_valid else 422)


@pytest.mark.parametrize("query", ["", "model=", "model=m&lora_id=x", "model=m&expected=7", "model=m&unknown=1"])
def test_an_invalid_query_string_is_400(service: Service, query: str) -> None:
    with closing(Client(service.url, service.token)) as client:
        answer = client.ask("POST", f"/v1/match?{query}", b"\1\0\0\0", content_type="application/octet-stream")
    assert (answer.status, answer.reason in {"missing-model", "bad-parameter", "unknown-field"}) == (400, True)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"modle": "m", "tokens": [1]}, "unknown field 'modle'; did you mean 'model'?"),
        ({"model": "m", "token_ids": [1]}, "unknown field 'token_ids'; did you mean 'tokens'?"),
    ],
)
def test_a_misspelled_field_has_a_suggestion(service: Service, body: Any, expected: str) -> None:
    with closing(Client(service.url, service.token)) as client:
        assert expected in client.post("/v1/match", body).json["detail"]
