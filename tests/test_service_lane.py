"""`kvevents.service.http.lane`: what it answers is what the general protocol answers, however the bytes arrive."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.service.config import Limits, ServiceConfig
from kvevents.service.http.app import App
from kvevents.service.http.connections import Connection, Connections
from kvevents.service.http.lane import FIRST_BYTES, Lane
from kvevents.service.http.messages import Headers, Request, Response
from kvevents.service.http.routing import TABLE
from kvevents.service.http.turns import GROUP, Turns
from kvevents.service.service import Service

LIMITS: Final = Limits(max_body_bytes=3 << 20, max_clients=2, reserved_clients=1, request_seconds=5.0)


class Asked:
    """A service that answers with what it was asked."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(limits=LIMITS)
        self.counted: list[tuple[str, int]] = []
        self.metrics = SimpleNamespace(request=lambda path, status, _: self.counted.append((path, status)))


class EchoApp:
    """In place of `App`: its answer is the request's body and query string."""

    def __init__(self) -> None:
        self.service = Asked()

    def admits(self, _endpoint: Any, _headers: Any) -> bool:
        return True

    def answer(self, _endpoint: Any, request: Any) -> Any:
        return Response(request.query + b"|" + request.body, headers=((b"x-length", b"%d" % len(request.body)),))


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.reading = True
        self.protocol: Any = None

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class General:
    """In place of uvicorn's protocol: it takes what it is given."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.received = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data


def quiet() -> Turns:
    return Turns(0.0, before=lambda: None, behind=lambda: None)


def admitted(wire: Wire, connections: Connections | None = None) -> Connection:
    connection = (connections or Connections(LIMITS)).admit(wire)
    assert connection is not None
    return connection


def laned(
    connections: Connections | None = None, turns: Turns | None = None, app: EchoApp | None = None, wire: Wire | None = None
) -> tuple[Lane, Wire, EchoApp]:
    app, wire = app or EchoApp(), wire or Wire()
    lane = Lane(app, turns or quiet(), set(), General, admitted(wire, connections))  # type: ignore[arg-type]
    lane.connection_made(wire)  # type: ignore[arg-type]
    return lane, wire, app


def feed(lane: Lane, wire: Wire, data: bytes, step: Callable[[], int]) -> None:
    """Bytes as a transport brings them: into the protocol's own buffer, as much as fits, as long as it is the protocol."""
    while data:
        if wire.protocol is not None:
            wire.protocol.data_received(data)
            return
        room = lane.get_buffer(-1)
        assert len(room), "a protocol always has room for something"
        size = min(len(room), len(data), step())
        room[:size] = data[:size]
        data = data[size:]
        lane.buffer_updated(size)


def post(body: bytes, target: str = "/query", *more: str) -> bytes:
    head = [f"POST {target} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *more]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def answers(written: bytes) -> list[bytes]:
    """Bodies of the responses, each as long as it says."""
    found = []
    while written:
        head, _, rest = written.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(rest[:length])
        written = rest[length:]
    return found


async def test_what_is_due_before_and_behind_answers_is_done_once_in_a_turn() -> None:
    """Before the first question is looked at, and behind the last answer; for questions that are answered later, too."""
    done: list[str] = []

    class App(WaitingApp):
        def answer(self, endpoint: Any, request: Any) -> Any:
            done.append("handled")
            return super().answer(endpoint, request)

    class Line(Wire):
        def write(self, data: bytes) -> None:
            done.append("answered")
            super().write(data)

    turns, app = Turns(0.0, before=lambda: done.append("before"), behind=lambda: done.append("behind")), App([0, 0, 1])
    wires = Line(), Line()
    lanes = [laned(turns=turns, app=app, wire=wire)[0] for wire in wires]
    for lane, wire in zip(lanes, wires, strict=True):
        feed(lane, wire, post(b"{}"), lambda: FIRST_BYTES)
    await asyncio.sleep(0)
    assert done == ["before", "handled", "answered", "handled", "answered", "behind"]
    done.clear()
    feed(lanes[0], wires[0], post(b"{}"), lambda: FIRST_BYTES)
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
    await asyncio.sleep(0)
    assert done == ["before", "handled", "behind", "answered", "behind"]


BODIES = st.lists(st.binary(max_size=60) | st.integers(0, 70_000).map(lambda size: b"x" * size), min_size=1, max_size=4)


@settings(max_examples=60)
@given(bodies=BODIES, steps=st.lists(st.integers(1, 50_000), min_size=1, max_size=5))
def test_requests_are_answered_in_order_however_their_bytes_are_cut(bodies: list[bytes], steps: list[int]) -> None:
    """Pipelined, in pieces of any size, with bodies larger than the first buffer, and heads that are like the one before."""

    async def scenario() -> None:
        lane, wire, app = laned()
        cuts = itertools.cycle(steps)
        feed(
            lane,
            wire,
            b"".join(post(body, f"/query?n={number // 2}") for number, body in enumerate(bodies)),
            lambda: next(cuts),
        )
        assert answers(wire.written) == [b"n=%d|%b" % (number // 2, body) for number, body in enumerate(bodies)]
        assert app.service.counted == [("/query", 200)] * len(bodies)
        lane.connection_lost(None)

    asyncio.run(scenario())


UNUSUAL = {
    "chunked": b"POST /query HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "another method": b"GET /query HTTP/1.1\r\nhost: x\r\n\r\n",
    "another path": post(b"{}", "/register"),
    "a slow endpoint": post(b"{}", "/v1/match_many"),
    "no length": b"POST /query HTTP/1.1\r\nhost: x\r\n\r\n",
    "two lengths": b"POST /query HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
    "a length with a sign": b"POST /query HTTP/1.1\r\ncontent-length: +2\r\n\r\n{}",
    "too long a body": b"POST /query HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n{}",
    "expectations": post(b"{}", "/query", "Expect: 100-continue"),
    "an upgrade": post(b"{}", "/query", "Upgrade: h2c"),
    "an end": post(b"{}", "/query", "Connection: close"),
    "HTTP 1.0": b"POST /query HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}",
    "a folded header": b"POST /query HTTP/1.1\r\ncontent-length: 2\r\nx: a\r\n b\r\n\r\n{}",
    "a space before the colon": b"POST /query HTTP/1.1\r\ncontent-length : 2\r\n\r\n{}",
    "no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
    "an endless head": b"POST /query HTTP/1.1\r\nx: " + b"a" * FIRST_BYTES,
}


class WaitingApp(EchoApp):
    """Some of whose answers take a few turns of the loop, as those do that other replicas have a part in."""

    def __init__(self, turns: list[int]) -> None:
        super().__init__()
        self._turns = iter(turns)

    def answer(self, endpoint: Any, request: Any) -> Any:
        answer, turns = super().answer(endpoint, request), next(self._turns)
        return self._later(answer, turns) if turns else answer

    async def _later(self, answer: Response, turns: int) -> Response:
        for _ in range(turns):
            await asyncio.sleep(0)
        return answer


@settings(max_examples=60)
@given(
    asked=st.lists(st.tuples(st.binary(max_size=60) | st.just(b"x" * 70_000), st.integers(0, 3)), min_size=1, max_size=5),
    steps=st.lists(st.integers(1, 90_000), min_size=1, max_size=5),
)
def test_answers_that_are_waited_for_keep_their_order(asked: list[tuple[bytes, int]], steps: list[int]) -> None:
    """Whatever comes behind their questions meanwhile; and no more is read than was on its way."""

    async def scenario() -> None:
        lane, wire, _ = laned(app=WaitingApp([turns for _, turns in asked]))
        pace = itertools.cycle(steps)
        data = b"".join(post(body) for body, _ in asked)
        while data or not wire.reading:
            if not wire.reading:
                await asyncio.sleep(0)
                continue
            room = lane.get_buffer(-1)
            size = min(len(room), len(data), next(pace))
            room[:size] = data[:size]
            data = data[size:]
            lane.buffer_updated(size)
        await asyncio.sleep(0)  # before the turn ends, the last ones may not be written
        assert answers(wire.written) == [b"|" + body for body, _ in asked]
        assert (wire.protocol, wire.closed) == (None, False)
        lane.connection_lost(None)

    asyncio.run(scenario())


async def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    lane, wire, _ = laned(app=WaitingApp([5]))
    question = post(b"x")
    lane.get_buffer(-1)[: len(question)] = question
    lane.buffer_updated(len(question))
    assert not wire.reading
    lane.connection_lost(None)
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
    assert (wire.written, wire.reading) == (b"", False)


@pytest.mark.parametrize("name", UNUSUAL)
async def test_what_is_not_plain_goes_over_with_every_byte(name: str) -> None:
    """After a plain request was answered too: nothing of it is left behind, and nothing of what follows is lost."""
    lane, wire, _ = laned()
    feed(lane, wire, post(b"{}") + UNUSUAL[name], lambda: FIRST_BYTES)
    assert answers(wire.written) == [b"|{}"]
    assert isinstance(wire.protocol, General)
    assert wire.protocol.received == UNUSUAL[name]
    assert wire.protocol.transport is wire


async def test_a_reserved_connection_goes_over_at_once() -> None:
    """The general protocol answers probes on it, and refuses the rest."""
    connections = Connections(LIMITS)
    busy = [laned(connections) for _ in range(2)]
    for lane, wire, _ in busy:
        feed(lane, wire, post(b"{}")[:-1], lambda: FIRST_BYTES)
    third = laned(connections)
    assert [wire.protocol for _, wire, _ in busy] == [None, None]
    assert isinstance(third[1].protocol, General)


async def test_an_announced_body_takes_no_memory_before_it_comes() -> None:
    lane, wire, _ = laned()
    feed(lane, wire, b"POST /query HTTP/1.1\r\ncontent-length: 3000000\r\n\r\n", lambda: FIRST_BYTES)
    assert len(lane.get_buffer(-1)) < FIRST_BYTES
    feed(lane, wire, b"x" * 3_000_000, lambda: FIRST_BYTES)
    assert len(answers(wire.written)) == 1
    assert len(lane.get_buffer(-1)) == FIRST_BYTES


async def test_bodies_have_a_bound_over_all_connections() -> None:
    """One that would exceed it is 503 and ends its connection; when another one is answered, there is room again."""
    connections = Connections(Limits(max_body_bytes=3 << 20, max_received_bytes=3 << 20))
    body = post(b"x" * (2 << 20))
    first, second, third = (laned(connections) for _ in range(3))
    feed(first[0], first[1], body[:-1], lambda: FIRST_BYTES)
    assert connections.received == len(body) - FIRST_BYTES
    feed(second[0], second[1], body[:-1], lambda: FIRST_BYTES)
    assert second[1].written.startswith(b"HTTP/1.1 503 ")
    assert json.loads(second[1].written.partition(b"\r\n\r\n")[2])["reason"] == "too-much-at-once"
    assert (second[1].closed, connections.refusals) == (True, {"too-much-at-once": 1})
    feed(first[0], first[1], body[-1:], lambda: FIRST_BYTES)
    assert connections.received == 0
    feed(third[0], third[1], body, lambda: FIRST_BYTES)
    assert [len(found) for _, wire, _ in (first, third) for found in answers(wire.written)] == [(2 << 20) + 1] * 2


async def test_who_does_not_read_answers_may_ask_no_more() -> None:
    lane, wire, _ = laned()
    lane.pause_writing()
    assert not wire.reading
    lane.resume_writing()
    assert wire.reading


async def busy_turns() -> Turns:
    """After a turn in which several were answered."""
    turns, wire = quiet(), Wire()
    for _ in range(2):
        turns.answer(wire, b"", 0.0)
    await asyncio.sleep(0)
    return turns


async def test_where_many_ask_answers_go_together_and_none_stays_behind() -> None:
    """At most `GROUP` wait, until the turn ends; whose connection has ended gets nothing, and nobody else misses any."""
    turns = await busy_turns()
    lanes = [laned(turns=turns) for _ in range(2 * GROUP - 1)]
    for lane, wire, _ in lanes:
        feed(lane, wire, post(b"{}"), lambda: FIRST_BYTES)
    written = [bool(wire.written) for _, wire, _ in lanes]
    assert written == [True] * GROUP + [False] * (GROUP - 1)
    lanes[GROUP][1].close()
    await asyncio.sleep(0)
    assert [bool(wire.written) for _, wire, _ in lanes] == [True] * GROUP + [False] + [True] * (GROUP - 2)
    assert all(answers(wire.written) in ([b"|{}"], []) for _, wire, _ in lanes)


async def test_an_answer_that_waits_is_written_before_anything_else_happens_to_its_connection() -> None:
    """Its end, by either side, and requests that are not for the lane, whose answers are uvicorn's."""
    turns = await busy_turns()
    over, over_wire, _ = laned(turns=turns)
    feed(over, over_wire, post(b"{}") + b"GET / HTTP/1.1\r\n\r\n", lambda: FIRST_BYTES)
    assert (answers(over_wire.written), over_wire.protocol.received) == ([b"|{}"], b"GET / HTTP/1.1\r\n\r\n")
    draining, draining_wire, _ = laned(turns=turns)
    feed(draining, draining_wire, post(b"{}"), lambda: FIRST_BYTES)
    draining.shutdown()
    assert (answers(draining_wire.written), draining_wire.closed) == ([b"|{}"], True)
    ended, ended_wire, _ = laned(turns=turns)
    feed(ended, ended_wire, post(b"{}"), lambda: FIRST_BYTES)
    ended.eof_received()
    assert answers(ended_wire.written) == [b"|{}"]


async def test_draining_ends_idle_connections_at_once_and_others_after_their_answer() -> None:
    idle, idle_wire, _ = laned()
    idle.shutdown()
    assert idle_wire.closed
    busy, wire, _ = laned()
    request = post(b"{}")
    feed(busy, wire, request[:-1], lambda: FIRST_BYTES)
    busy.shutdown()
    assert not wire.closed
    feed(busy, wire, request[-1:], lambda: FIRST_BYTES)
    assert (answers(wire.written), wire.closed) == ([b"|{}"], True)


async def test_a_slow_request_is_refused_and_ended() -> None:
    """The time runs from its first byte on, on a connection that was kept as on a fresh one: a byte does not prolong it."""
    now = 0.0
    connections = Connections(LIMITS, lambda: now)
    for before in (b"", post(b"{}")):
        lane, wire, _ = laned(connections)
        feed(lane, wire, before, lambda: FIRST_BYTES)
        wire.written = b""
        for piece in (b"P", post(b"{}")[1:-1], b""):
            feed(lane, wire, piece, lambda: FIRST_BYTES)
            now += 2.4
            connections.sweep()
            assert (wire.closed, wire.written != b"") == (piece == b"",) * 2
        assert wire.written.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert json.loads(wire.written.partition(b"\r\n\r\n")[2])["reason"] == "too-slow"
        feed(lane, wire, b"}" + post(b"{}"), lambda: FIRST_BYTES)
        assert wire.written.count(b"HTTP/1.1") == 1
        lane.connection_lost(None)


async def test_an_idle_connection_is_kept_for_a_while() -> None:
    """One that has asked nothing yet only as long as a request may take."""
    now = 0.0
    connections = Connections(LIMITS, lambda: now)
    silent, (lane, wire, _) = laned(connections), laned(connections)
    feed(lane, wire, post(b"{}"), lambda: FIRST_BYTES)
    now = 5.1
    connections.sweep()
    assert (silent[1].closed, wire.closed) == (True, False)
    now = 75.1
    connections.sweep()
    assert wire.closed


@pytest.fixture(name="app")
def real_app() -> Iterator[App]:
    service = Service(ServiceConfig())
    yield App(service)
    service.fleet.follower.subscriber.close()


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b'{"model_name": "m", "token_ids": []}', 404, "unknown-model"),
        (b"{", 400, "malformed-body"),
        (b'{"model_name": "m", "token_ids": [-1]}', 422, "bad-shape"),
    ],
)
def test_what_a_client_does_wrong_is_an_answer(app: App, body: bytes, status: int, reason: str) -> None:
    """The errors of a real service's handler, as the general protocol answers them too."""
    headers = Headers([(b"content-type", b"application/json")])
    answered = app.answer(TABLE["/query"]["POST"], Request("POST", "/query", b"", headers, body))
    assert isinstance(answered, Response)
    assert (answered.status, json.loads(answered.body)["reason"]) == (status, reason)


@pytest.mark.parametrize("error", [TypeError("'NoneType'"), OverflowError("int too large"), ConfigError("x"), KeyError(1)])
def test_an_error_of_ours_is_not_the_clients(
    app: App, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever an index raises that no handler expects is 500 and logged with its traceback; its text is not in the answer."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(app.service.fleet, "match", fail)
    headers = Headers([(b"content-type", b"application/json")])
    request = Request("POST", "/query", b"", headers, b'{"model_name": "m", "token_ids": [1]}')
    answered = app.answer(TABLE["/query"]["POST"], request)
    assert isinstance(answered, Response)
    assert (answered.status, json.loads(answered.body)["reason"]) == (500, "internal")
    assert str(error).encode() not in answered.body
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


async def test_a_head_is_admitted_once_and_one_that_is_not_goes_over() -> None:
    """Before its body is there: the general protocol refuses it; a head that is recognised needs no second look."""
    asked: list[bytes] = []

    class Choosy(EchoApp):
        def admits(self, _endpoint: Any, headers: Any) -> bool:
            asked.append(headers.authorization)
            return bool(headers.authorization == b"Bearer good")

    lane, wire, _ = laned(app=Choosy())
    good, bad = (post(b"{}", "/query", f"Authorization: Bearer {word}") for word in ("good", "bad"))
    feed(lane, wire, good * 3 + bad[:-1], lambda: FIRST_BYTES)
    assert (answers(wire.written), asked) == ([b"|{}"] * 3, [b"Bearer good", b"Bearer bad"])
    assert wire.protocol.received == bad[:-1]
