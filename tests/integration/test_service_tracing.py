"""OpenTelemetry spans of requests: their attributes and parents, and no cost without an SDK."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvevents.events import BlockStored, EventBatch
from kvevents.index import block_keys
from kvevents.service.fleet.registration import Registration
from kvevents.service.http.app import MAX_PATH_CHARACTERS, App, find_tracer
from kvevents.service.http.routes import ROUTES
from kvevents.service.process import data_plane_settings
from kvevents.service.service import Service
from kvevents.service.settings import ServiceSettings
from kvevents.stream import RawBatch
from kvevents.wire import encode_batch
from service_cases import DEADLINE, serving

BLOCK = 16
TOKENS = [700_000 + place for place in range(3 * BLOCK)]
HELD = 2 * BLOCK
TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
TRACEPARENT = f"00-{TRACE:032x}-{PARENT:016x}-01"


class Answer(NamedTuple):
    status: int
    body: bytes


class FakeRequest:
    """A fake of the native request: it has no connection, and keeps the response."""

    peer = "127.0.0.1:1"
    caller = "anonymous"
    refusal: str | None = None

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.path = path
        self.endpoint = (path, method if method in ROUTES[path] else "") if path in ROUTES else ("", "")
        self.query = b""
        self.headers = [(name.replace("_", "-"), value.encode()) for name, value in headers.items()]
        self.body = body
        self.answers: list[Answer] = []

    def respond(self, status: int, _: object, body: bytes) -> None:
        self.answers.append(Answer(status, body))


Ask = Callable[..., Answer]


@pytest.fixture(name="loop")
def runner_of_the_test() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(name="ask")
def requests_without_connections(loop: asyncio.Runner) -> Ask:
    """Return a function that sends one request to an application."""

    def ask(app: App, method: str, path: str, body: object = None, **headers: str) -> Answer:
        sent_as = headers if body is None else {"content_type": "application/json", **headers}
        request = FakeRequest(method, path, sent_as, b"" if body is None else json.dumps(body).encode())

        async def answer() -> None:
            app.start_task(cast("Any", request))
            await app.stop(DEADLINE)

        loop.run(answer())
        (answered,) = request.answers
        return answered

    return ask


@pytest.fixture(name="service")
def service_with_blocks(loop: asyncio.Runner) -> Iterator[Service]:
    """Return a service whose one engine holds two blocks of the prompt."""
    service = Service(ServiceSettings())
    registration = Registration(instance="engine-0", endpoint="tcp://127.0.0.1:1", model="tiny", block_size=BLOCK)
    service.fleet.register(registration).result()
    batch = EventBatch(0.0, [BlockStored([1, 2], None, TOKENS[:HELD], BLOCK, medium="GPU")])
    service.index.apply(RawBatch(*registration.key, 0, 0, False, encode_batch(batch)))

    async def start() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            service.data_plane.start(listening, App(service), data_plane_settings(service, answers_queries=False))

    loop.run(start())
    yield service
    loop.run(service.data_plane.close())
    service.fleet.follower.subscriber.close()


@pytest.fixture(name="spans")
def exported_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Replace the tracer provider, because a process can set the real one only once."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def read_only_span(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, dict[str, Any]]:
    (span,) = exporter.get_finished_spans()
    return span, dict(span.attributes or {})


def test_a_span_has_the_model_and_the_match(service: Service, ask: Ask, spans: InMemorySpanExporter) -> None:
    answer = ask(App(service), "POST", "/query", {"model_name": "tiny", "token_ids": TOKENS})
    span, attributes = read_only_span(spans)
    assert answer.status == 200
    assert attributes == {
        "http.request.method": "POST",
        "url.path": "/query",
        "http.route": "/query",
        "http.response.status_code": 200,
        "kvevents.model": "tiny",
        "kvevents.prompt_tokens": len(TOKENS),
        "kvevents.longest_matched": HELD,
    }
    assert (span.name, span.kind, span.parent) == ("POST /query", trace.SpanKind.SERVER, None)


def test_a_span_is_the_child_of_the_span_of_the_caller(service: Service, ask: Ask, spans: InMemorySpanExporter) -> None:
    ask(App(service), "POST", "/query", {"model_name": "tiny", "token_ids": TOKENS}, traceparent=TRACEPARENT)
    span, _ = read_only_span(spans)
    assert span.parent
    assert (span.parent.trace_id, span.parent.span_id, span.parent.is_remote) == (TRACE, PARENT, True)
    assert span.context.trace_id == TRACE


def test_an_invalid_traceparent_starts_a_new_trace(service: Service, ask: Ask, spans: InMemorySpanExporter) -> None:
    ask(App(service), "POST", "/query", {"model_name": "tiny", "token_ids": TOKENS}, traceparent="00-\xff-junk")
    assert read_only_span(spans)[0].parent is None


def test_spans_have_lookups_by_hash_and_in_threads(service: Service, ask: Ask, spans: InMemorySpanExporter) -> None:
    app = App(service)
    keys = list(block_keys(TOKENS, BLOCK))
    assert ask(app, "POST", "/query_by_hash", {"model_name": "tiny", "seq_hashes": keys}).status == 200
    _, attributes = read_only_span(spans)
    assert (attributes["kvevents.longest_matched"], "kvevents.prompt_tokens" in attributes) == (HELD, False)
    spans.clear()
    many = {"model": "tiny", "prompts": [TOKENS[:BLOCK], TOKENS, [1, 2, 3]]}
    assert ask(app, "POST", "/v1/match_many", many).status == 200
    _, attributes = read_only_span(spans)
    assert (attributes["kvevents.prompt_tokens"], attributes["kvevents.longest_matched"]) == (4 * BLOCK + 3, HELD)


@pytest.mark.parametrize(
    ("method", "path", "status", "name", "route"),
    [
        ("POST", "/query", 415, "POST /query", "/query"),
        ("GET", "/query", 405, "GET /query", "/query"),
        ("GET", "/v1/stats", 200, "GET /v1/stats", "/v1/stats"),
        ("GET", "/" + "secret" * 100, 404, "GET", None),
        ("BREW", "/nowhere", 404, "HTTP", None),
    ],
)
def test_span_names_are_bounded(
    service: Service, ask: Ask, spans: InMemorySpanExporter, method: str, path: str, status: int, name: str, route: str | None
) -> None:
    """Clients choose paths and methods, so these must not become names of spans."""
    assert ask(App(service), method, path).status == status
    span, attributes = read_only_span(spans)
    assert (span.name, attributes["http.response.status_code"], attributes.get("http.route")) == (name, status, route)
    assert len(attributes["url.path"]) <= MAX_PATH_CHARACTERS
    assert attributes["http.request.method"] in {"GET", "POST", "_OTHER"}
    assert span.status.status_code is trace.StatusCode.UNSET


def test_a_refused_request_has_a_span(
    service: Service, ask: Ask, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRequest, "refusal", "too-large")
    assert ask(App(service), "POST", "/query").status == 413
    assert read_only_span(spans)[1]["http.response.status_code"] == 413


def test_an_internal_error_sets_the_status(
    service: Service, ask: Ask, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"cannot match {TOKENS}")

    monkeypatch.setattr(service.data_plane, "answer", fail)
    assert ask(App(service), "POST", "/query", {"model_name": "tiny", "token_ids": TOKENS}).status == 500
    assert read_only_span(spans)[0].status.status_code is trace.StatusCode.ERROR
    assert "7000" not in format_span(read_only_span(spans)[0])


def test_probes_and_scrapes_have_no_span(service: Service, ask: Ask, spans: InMemorySpanExporter) -> None:
    for path in ("/livez", "/readyz", "/health", "/metrics", "/"):
        ask(App(service), "GET", path)
    assert spans.get_finished_spans() == ()


def format_span(span: ReadableSpan) -> str:
    """Return a span as text without times and ids, whose digits could match anything."""
    text = json.loads(span.to_json())
    for name in ("context", "parent_id", "start_time", "end_time"):
        text.pop(name, None)
    return json.dumps(text)


def test_no_token_and_no_hash_is_in_a_span(service: Service, ask: Ask, spans: InMemorySpanExporter) -> None:
    app, keys = App(service), [str(key) for key in block_keys(TOKENS, BLOCK)]
    for path, body in (
        ("/query", {"model_name": "tiny", "token_ids": TOKENS, "cache_salt": "pepper"}),
        ("/query", {"model_name": "tiny", "token_ids": [*TOKENS, "x"]}),
        ("/query_by_hash", {"model_name": "tiny", "seq_hashes": keys}),
        ("/v1/match", {"model": "tiny", "tokens": TOKENS}),
        ("/v1/match_many", {"model": "tiny", "prompts": [TOKENS]}),
        ("/v1/select", {"model": "tiny", "tokens": TOKENS, "expect_seconds": 1}),
    ):
        ask(app, "POST", path, body, authorization="Bearer hush-hush-hush")
    text = "".join(map(format_span, spans.get_finished_spans()))
    assert len(spans.get_finished_spans()) == 6
    assert not [secret for secret in ("7000", "pepper", "hush", *keys) if secret in text]


def test_without_an_sdk_the_application_is_not_wrapped(service: Service) -> None:
    """With the API alone, `find_tracer` returns None."""
    assert find_tracer() is None
    assert not App(service).has_spans


def test_without_the_api_requests_work(service: Service, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    app = App(service)
    assert not app.has_spans
    assert ask(app, "POST", "/query", {"model_name": "tiny", "token_ids": TOKENS}).status == 200


SERVING = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from kvevents.cli import main

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=lambda span: span.to_json(indent=None) + "\\n")))
trace.set_tracer_provider(provider)
main()
"""
"""A program that configures an SDK first, as `opentelemetry-instrument kvevents serve` does."""


def test_an_sdk_that_is_configured_before_the_service_starts_is_found() -> None:
    """The service uses the real global provider, and the request has a parent span."""
    with serving(command=(sys.executable, "-W", "error", "-c", SERVING, "serve", "--port", "0")) as service:
        response = service.ask(
            "POST",
            "/query",
            json.dumps({"model_name": "none", "token_ids": TOKENS}).encode(),
            content_type="application/json",
            traceparent=TRACEPARENT,
        )
        assert response.status == 404
        span = json.loads(service.program.out.wait(r"POST /query"))
        assert (span["context"]["trace_id"], span["parent_id"]) == (f"0x{TRACE:032x}", f"0x{PARENT:016x}")
        assert span["attributes"]["http.response.status_code"] == 404
