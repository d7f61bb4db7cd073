"""Thread pools and `/dump`: few threads do slow work, for few clients, in bounded memory."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack, closing
from http.client import HTTPConnection, IncompleteRead, RemoteDisconnected
from pathlib import Path

import msgspec
import pytest

from kvevents.service.errors import UnavailableError
from kvevents.service.fleet.registration import Registration
from kvevents.service.http import indexer_listings
from kvevents.service.http.app import App
from kvevents.service.http.indexer_listings import PIECE_BLOCKS
from kvevents.service.http.thread_pools import BoundedLock, ThreadPool
from kvevents.service.process import data_plane_settings
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
    pool = ThreadPool("test", 2, 100)
    names = await asyncio.gather(*(pool.run(lambda: threading.current_thread().name) for _ in range(50)))
    assert set(names) <= {"kvevents-test_0", "kvevents-test_1"}


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


async def test_an_answer_in_pieces_that_fails_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the client would regard the received pieces as the whole answer. The next client can read a dump."""
    service = Service(ServiceSettings())
    service.fleet.register(Registration(instance="e", endpoint="tcp://127.0.0.1:1", model="m")).result()

    def dump(port: int) -> int:
        with closing(HTTPConnection("127.0.0.1", port, timeout=DEADLINE)) as client:
            client.request("GET", "/dump")
            return len(client.getresponse().read())

    def fail(*_: object) -> bytes:
        raise RuntimeError("cannot encode")

    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            service.data_plane.start(listening, App(service), data_plane_settings(service, answers_queries=True))
            port = listening.getsockname()[1]
        with monkeypatch.context() as patches:
            patches.setattr(indexer_listings, "_encode", fail)
            with pytest.raises((IncompleteRead, RemoteDisconnected)):  # the connection may end before the head has left
                await asyncio.to_thread(dump, port)
        assert "GET /dump failed" in caplog.text
        assert await asyncio.to_thread(dump, port)
    finally:
        await service.data_plane.close()
        service.fleet.follower.subscriber.close()


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
