"""Thread pools and `/dump`: few threads do slow work, for few clients, in bounded memory."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import socket
import threading
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import msgspec
import pytest

from kvevents.service.errors import UnavailableError
from kvevents.service.http.app import App
from kvevents.service.http.indexer_listings import PIECE_BLOCKS
from kvevents.service.http.messages import Headers, HttpRequest, Response
from kvevents.service.http.routes import ROUTES
from kvevents.service.http.thread_pools import BoundedLock, ThreadPool
from kvevents.service.service import Service
from kvevents.service.settings import ServiceSettings
from service_cases import DEADLINE, Client, engines, prompt, serving, wait_for, write


async def test_a_pool_has_a_bounded_queue() -> None:
    """A full queue rejects calls at once, and a call that ends or whose caller was cancelled makes room for another."""
    pool, go = ThreadPool("test", 1, 2), threading.Event()
    waiting = [asyncio.create_task(pool.run(go.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="3 requests of kind 'test'"):
        await pool.run(go.wait)
    waiting[2].cancel()
    await asyncio.gather(waiting[2], return_exceptions=True)
    last = asyncio.create_task(pool.run(lambda: "done"))
    await asyncio.sleep(0)
    go.set()
    assert await last == "done"
    assert await asyncio.gather(*waiting[:2]) == [True, True]


async def test_a_pool_has_at_most_its_number_of_threads() -> None:
    """Each call runs in the caller's context, so that spans see it."""
    pool, noted = ThreadPool("test", 2, 100), contextvars.ContextVar[int]("noted")

    def work() -> tuple[int, str]:
        return noted.get(), threading.current_thread().name

    async def ask(number: int) -> tuple[int, str]:
        noted.set(number)
        return await pool.run(work)

    found = await asyncio.gather(*(ask(number) for number in range(50)))
    assert [number for number, _ in found] == list(range(50))
    assert {name for _, name in found} <= {"kvevents-test_0", "kvevents-test_1"}


async def test_one_client_at_a_time_has_the_lock() -> None:
    """A bounded number of others wait for a bounded time."""
    lock = BoundedLock("test", 1)
    await lock.acquire(DEADLINE)
    second = asyncio.create_task(lock.acquire(DEADLINE))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="another client is reading a test"):
        await lock.acquire(DEADLINE)  # too many callers wait already
    lock.release()
    await second
    with pytest.raises(UnavailableError, match="another client is reading a test"):
        await lock.acquire(0.01)  # the timeout is too short
    lock.release()
    await lock.acquire(DEADLINE)


EXACT = {"state": "EXACT", "reason": "", "reason_codes": [], "attested": False}


def test_a_dump_of_several_pieces_is_complete(tmp_path: Path) -> None:
    """Each block of an engine occurs once. Blocks of one model and group are together, also if an engine has none."""
    blocks = PIECE_BLOCKS + 10
    with engines(3) as (first, second, other), serving() as service:
        for number, each in enumerate((first, second)):
            assert service.register(f"e{number}", each.publisher).status == 201
            each.store(prompt(number + 1, blocks))
            service.exact(f"e{number}", blocks=blocks)
        assert service.register("none", other.publisher).status == 201
        assert service.register("other", other.publisher, model_name='a "model"').status == 201
        for name in ("e0", "e1", "none", "other"):
            service.exact(name)
        answer = service.get("/dump")
        assert answer.headers["content-type"] == "application/json"
        dump = answer.json
        assert set(dump) == {"m:default", 'a "model":default'}
        assert dump['a "model":default'] == {"block_size": 16, "events": [], "trust": {"other": {"0": EXACT}}}
        assert dump["m:default"]["trust"] == {name: {"0": EXACT} for name in ("e0", "e1", "none")}
        events = dump["m:default"]["events"]
        for name in ("e0", "e1"):
            own = [event["event"] for event in events if event["worker_id"] == name]
            assert [event["event_id"] for event in own] == list(range(blocks))
            assert len({event["data"]["stored"]["blocks"][0]["tokens_hash"] for event in own}) == blocks
        assert len(events) == 2 * blocks
        assert service.ask("HEAD", "/dump").body == b""
        assert service.get("/dump").json == dump, "a HEAD request releases its turn"


def test_a_dump_that_is_not_read_delays_others_only_for_a_while(tmp_path: Path) -> None:
    """A few of many clients wait, and the others get "busy". Probes and metrics are answered meanwhile."""
    settings = "limits = { unread_seconds = 8.0, request_seconds = 0.5, max_waiting = 2 }\n"
    with engines(1) as (one,), serving("--config", write(tmp_path / "service.toml", settings)) as service, ExitStack() as stack:
        assert service.register("e", one.publisher).status == 201
        for number in range(10):
            one.store(prompt(number + 1, PIECE_BLOCKS))
        service.exact("e", blocks=10 * PIECE_BLOCKS)
        unread = stack.enter_context(socket.socket())
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        unread.connect((service.host, service.port))
        unread.sendall(b"GET /dump HTTP/1.1\r\nhost: localhost\r\n\r\n")
        wait_for("the response to begin", lambda: unread.recv(1))
        clients = [HTTPConnection(service.host, service.port, timeout=DEADLINE) for _ in range(6)]
        for each in clients:
            stack.callback(each.close)
            each.request("GET", "/dump")
        answers = [each.getresponse() for each in clients]
        assert {answer.status for answer in answers} == {503}
        assert {msgspec.json.decode(answer.read())["reason"] for answer in answers} == {"busy"}
        for path in ("/livez", "/metrics", "/v1/blocks?instance=e&limit=1"):
            assert service.get(path).status == 200

        def can_dump() -> bool:
            other = Client(service.url)
            try:
                return other.get("/dump").status == 200
            finally:
                other.close()

        wait_for("a dump of another client", can_dump)


@pytest.mark.parametrize(("path", "size"), [("/query", 1 << 20), ("/v1/match", 1 << 20), ("/v1/select", 1 << 16)])
async def test_a_large_body_is_handled_in_a_thread(path: str, size: int) -> None:
    """Smaller bodies are handled on the event loop, which costs less."""
    service = Service(ServiceSettings())
    app, found = App(service), ROUTES[path]["POST"]
    endpoint = dataclasses.replace(found, handler=lambda *_: Response(threading.current_thread().name.encode()))
    try:
        for body, name in ((b" " * size, b"MainThread"), (b" " * (size + 1), b"kvevents-matching_0")):
            request = HttpRequest("POST", path, b"", Headers([]), body)
            answered = await app._handle(endpoint, request)
            assert isinstance(answered, Response)
            assert answered.body == name
    finally:
        service.fleet.follower.subscriber.close()
