"""`kvevents.client` with a real service, and with servers that close, refuse and stall."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest

from cli_cases import refuse_connections
from kvevents.client import AsyncClient, Client, ServiceRequestError, protocol
from kvevents.client.schemas import (
    HealthAnswer,
    MatchManyRequest,
    MatchRequest,
    Problem,
    RegisterRequest,
    Reserve,
    SelectRequest,
    UnregisterRequest,
)
from kvevents.client.sync import ReservedWorker
from kvevents.errors import ConfigError
from service_cases import BLOCK, DEADLINE, MODEL, Service, engines, prompt, serving, wait_for
from tools.ports import reserve_port

PROMPT = [*prompt(1), 1]
REQUEST = SelectRequest(model=MODEL, tokens=PROMPT)
MATCH = MatchRequest(model=MODEL, tokens=PROMPT)


@pytest.fixture(scope="module", name="service")
def fleet() -> Iterator[Service]:
    """A service with an engine that holds a prompt, registered by the client."""
    with engines(1) as (one,), serving() as service:
        with Client(service.url, deadline=DEADLINE) as client:
            endpoint, replay = one.publisher.endpoint, one.publisher.replay_endpoint
            registration = RegisterRequest(
                instance_id="a", endpoint=endpoint, replay_endpoint=replay, model_name=MODEL, block_size=BLOCK, url="http://a:1"
            )
            assert client.register(registration)["status"] == "ok"
            assert client.register(registration)["status"] == "ok"
        one.store(prompt(1))
        service.exact("a", blocks=4)
        yield service


def open_reservations(service: Service) -> int:
    count: int = service.get("/v1/reservations").json["open"]
    return count


def test_prompts_and_the_fleet(service: Service) -> None:
    with Client(service.url, deadline=DEADLINE) as client:
        (worker,) = client.match(MATCH).workers
        assert (worker.instance, worker.tokens, worker.url) == ("a", 4 * BLOCK, "http://a:1")
        (first, _) = client.match_many(MatchManyRequest(model=MODEL, prompts=[PROMPT, [1]])).matches
        assert first.holders[0].instance == "a"
        assert client.select(REQUEST).instance == "a"
        assert [one.instance for one in client.sources(model=MODEL).sources] == ["a"]
        assert client.sources(model="other").sources == []
        assert client.wait_ready().ready
        assert client.get("/health", HealthAnswer).status == "ok"


def test_prompts_and_the_fleet_with_asyncio(service: Service) -> None:
    async def ask() -> None:
        async with AsyncClient(service.url, deadline=DEADLINE) as client:
            answers = await asyncio.gather(*(client.match(MATCH) for _ in range(8)))
            assert {answer.workers[0].tokens for answer in answers} == {4 * BLOCK}
            assert (await client.match_many(MatchManyRequest(model=MODEL, prompts=[PROMPT]))).matches[0].holders
            assert (await client.select(REQUEST)).instance == "a"
            assert [one.instance for one in (await client.sources(instance="a")).sources] == ["a"]
            assert (await client.wait_ready()).ready
            assert (await client.get("/health", HealthAnswer)).status == "ok"
            with pytest.raises(ServiceRequestError) as caught:
                await client.unregister(UnregisterRequest(instance_id="none", model_name=MODEL))
            assert caught.value.status == 404

    asyncio.run(ask())


def test_a_reservation_ends_with_its_block(service: Service) -> None:
    with Client(service.url, deadline=DEADLINE) as client:
        with client.reserve(REQUEST) as worker:
            assert (worker.url, worker.selection.instance) == ("http://a:1", "a")
            assert client.reservation(worker.id).progress == "waiting"
            worker.first_token()
            worker.output(7)
            found = client.reservation(worker.id)
            assert (found.progress, found.output_tokens) == ("decoding", 7)
        assert open_reservations(service) == 0
        with pytest.raises(ZeroDivisionError), client.reserve(REQUEST):
            _ = 1 // 0
        assert open_reservations(service) == 0
        with client.reserve(SelectRequest(model=MODEL, tokens=PROMPT, reserve=Reserve(id="mine", seconds=60))) as worker:
            assert client.reservation("mine").expires_in <= 60
            service.ask("DELETE", "/v1/reservations/mine")
            assert worker.output(1) is None


def test_a_reservation_ends_with_its_block_with_asyncio(service: Service) -> None:
    async def hold(client: AsyncClient, entered: asyncio.Event) -> None:
        async with client.reserve(REQUEST) as worker:
            assert worker.url == "http://a:1"
            found = await worker.first_token()
            assert found is not None
            assert found.progress == "decoding"
            assert (await client.reservation(worker.id)).id == worker.id
            entered.set()
            await asyncio.Event().wait()

    async def cancel() -> None:
        async with AsyncClient(service.url, deadline=DEADLINE) as client:
            entered = asyncio.Event()
            task = asyncio.create_task(hold(client, entered))
            await entered.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()

    asyncio.run(cancel())
    assert open_reservations(service) == 0


def test_nothing_is_reserved_without_a_worker_that_can_be_reached() -> None:
    with serving() as service, Client(service.url, deadline=DEADLINE) as client:
        client.register(RegisterRequest(instance_id="dead", endpoint="tcp://127.0.0.1:1", model_name=MODEL))
        with pytest.raises(ServiceRequestError) as caught, client.reserve(REQUEST):
            pass
        assert caught.value.reason == "no-usable-worker"
        assert client.unregister(UnregisterRequest(instance_id="dead", model_name=MODEL))["status"] == "ok"


def test_errors_have_status_reason_and_hint(service: Service) -> None:
    with Client(service.url, deadline=DEADLINE) as client, pytest.raises(ServiceRequestError) as caught:
        client.match(MatchRequest(model="unknown", tokens=[1]))
    assert (caught.value.status, caught.value.reason) == (404, "unknown-model")
    assert MODEL in caught.value.hint


def test_threads_share_a_client(service: Service) -> None:
    with Client(service.url, deadline=DEADLINE, retries=0) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.match(MATCH).workers[0].tokens, range(200)))
    assert set(answers) == {4 * BLOCK}


def test_a_client_survives_a_restart_of_the_service() -> None:
    port = reserve_port()
    with serving("--port", port) as first:
        client = Client(first.url, deadline=60, retries=1_000)
        assert client.ready()
        first.end()
    waiting = ThreadPoolExecutor(1)
    try:
        answer = waiting.submit(client.wait_ready)
        with serving("--port", port) as second:
            assert answer.result(60).ready
            assert second.port == port
    finally:
        waiting.shutdown()
        client.close()


# --- faults


class FaultyServer:
    """A server that answers each request by the next of its replies: bytes, None to stall, or empty bytes to close."""

    def __init__(self, *replies: bytes | None) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._replies = list(replies)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            with suppress(OSError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        while request := self._read(connection):
            self.requests.append(request)
            reply = self._replies.pop(0) if self._replies else b""
            if reply is None:
                return
            if not reply:
                break
            connection.sendall(reply)
            if b"Connection: close" in reply:
                break
        connection.close()

    def _read(self, connection: socket.socket) -> bytes:
        request = b""
        while b"\r\n\r\n" not in request:
            if not (piece := connection.recv(65_536)):
                return b""
            request += piece
        head, _, body = request.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", b"0"))
        while len(body) < length:
            body += connection.recv(65_536)
        return head.partition(b" HTTP")[0] + body

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._open:
            connection.close()
        self._thread.join()


@contextmanager
def faulty(*replies: bytes | None) -> Iterator[FaultyServer]:
    server = FaultyServer(*replies)
    try:
        yield server
    finally:
        server.close()


def reply(status: int, body: object, *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return "\r\n".join([f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}", *headers, "", ""]).encode() + content


BUSY = reply(503, Problem.of(503, "busy", "it is busy", "retry"))
HEALTHY = reply(200, HealthAnswer(status="ok", warnings=[]))
TRUST = {"state": "EXACT"}
SELECTED = reply(
    200,
    {"instance": "a", "rank": 0, "usable": True, "score": 0, "trust": TRUST, "why": "", "load_from": "none"},
)
PROXY = reply(503, b"<html>")
CUT = b"HTTP/1.1 200 X\r\nConnection: close\r\nContent-Length: 9\r\n\r\n{"


def ask_async(url: str, call: Callable[[AsyncClient], Any], **options: Any) -> Any:
    async def ask() -> Any:
        async with AsyncClient(url, **{"deadline": DEADLINE, **options}) as client:
            return await call(client)

    return asyncio.run(ask())


def ask_sync(url: str, call: Callable[[Client], Any], **options: Any) -> Any:
    with Client(url, **{"deadline": DEADLINE, **options}) as client:
        return call(client)


ASKS = [pytest.param(ask_sync, id="sync"), pytest.param(ask_async, id="async")]


def health(client: Any) -> Any:
    return client.get("/health", HealthAnswer)


@pytest.mark.parametrize("ask", ASKS)
def test_a_busy_service_is_asked_again(ask: Callable[..., Any]) -> None:
    with faulty(BUSY, BUSY, SELECTED) as server:
        assert ask(server.url, lambda client: client.select(REQUEST)).instance == "a"
    assert len(server.requests) == 3
    assert server.connections == 1, "one connection is reused"


@pytest.mark.parametrize("ask", ASKS)
def test_retries_are_limited(ask: Callable[..., Any]) -> None:
    with faulty(*[BUSY] * 9) as server, pytest.raises(ServiceRequestError) as caught:
        ask(server.url, health, retries=2)
    assert (caught.value.status, caught.value.reason, caught.value.hint) == (503, "busy", "retry")
    assert len(server.requests) == 3


@pytest.mark.parametrize("ask", ASKS)
def test_a_closed_connection_is_replaced_for_what_may_be_repeated(ask: Callable[..., Any]) -> None:
    named = SelectRequest(model=MODEL, tokens=PROMPT, reserve=Reserve(id="r"))
    unnamed = SelectRequest(model=MODEL, tokens=PROMPT, reserve=True)
    calls: list[tuple[Callable[[Any], Any], bytes]] = [
        (health, HEALTHY),
        (lambda client: client.select(named), SELECTED),
        (lambda client: client.select(unnamed), SELECTED),
    ]
    for call, answer in calls:
        with faulty(b"", answer) as server:
            ask(server.url, call)
        assert len(server.requests) == 2
        assert server.requests[0] == server.requests[1]


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize(("answer", "reason"), [(b"", "closed"), (PROXY, "not-kvevents"), (CUT, "not-http")])
def test_a_request_that_may_have_had_an_effect_is_not_repeated(ask: Callable[..., Any], answer: bytes, reason: str) -> None:
    with faulty(answer) as server, pytest.raises(ServiceRequestError) as caught:
        ask(server.url, lambda client: client.select(REQUEST))
    assert (len(server.requests), caught.value.reason) == (1, reason)


@pytest.mark.parametrize("ask", ASKS)
def test_the_deadline_holds_for_all_attempts(ask: Callable[..., Any]) -> None:
    with faulty(BUSY, None) as server, pytest.raises(ServiceRequestError) as caught:
        ask(server.url, health, deadline=2)
    assert (caught.value.reason, caught.value.status) == ("timeout", None)
    with faulty(CUT.replace(b"close", b"keep-alive")) as server, pytest.raises(ServiceRequestError) as caught:
        ask(server.url, health, deadline=0.2)
    assert caught.value.reason == "timeout"


@pytest.mark.parametrize("ask", ASKS)
def test_a_call_has_a_deadline_of_its_own(ask: Callable[..., Any]) -> None:
    with faulty(None) as server, pytest.raises(ServiceRequestError) as caught:
        ask(server.url, lambda client: client.match(MATCH, deadline=0.2), deadline=60)
    assert caught.value.reason == "timeout"


@pytest.mark.parametrize("ask", ASKS)
def test_nothing_listens(ask: Callable[..., Any]) -> None:
    with refuse_connections() as endpoint, pytest.raises(ServiceRequestError) as caught:
        ask(endpoint.replace("tcp", "http"), lambda client: client.select(REQUEST), retries=1)
    assert caught.value.reason == "refused"


def test_a_connection_that_the_server_closed_is_not_used() -> None:
    closing = reply(200, HealthAnswer(status="ok", warnings=[]), "Connection: close")
    with faulty(closing, HEALTHY, HEALTHY) as server, Client(server.url, retries=0) as client:
        for _ in range(3):
            assert health(client).status == "ok"
        assert server.connections == 2


def test_a_reservation_whose_answer_is_lost_is_ended() -> None:
    done = reply(404, Problem.of(404, "no-such-reservation", "x", "y"))
    with faulty(b"", b"", done) as server, Client(server.url, retries=1) as client:
        held: ReservedWorker = client.reserve(REQUEST)
        with pytest.raises(ServiceRequestError), held:
            pass
        wait_for("the end", lambda: len(server.requests) >= 3)
        assert server.requests[-1] == f"DELETE /v1/reservations/{held.id}".encode()


@pytest.mark.parametrize("url", ["10.0.0.9:8090", "ftp://a", "http://", "http://a:port", ""])
def test_an_invalid_url_is_an_error_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        Client(url)


def test_a_client_sends_only_what_is_not_as_by_default() -> None:
    body = protocol.select(SelectRequest(model="m", tokens=[1], session="s")).body
    assert msgspec.json.decode(body or b"") == {"model": "m", "tokens": [1], "session": "s"}
