"""`kvevents.service.http.connections`: whatever clients do, probes are answered, and each connection has bounds."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from certificate_cases import make_certificates
from kvevents.service.config import Limits
from kvevents.service.http.connections import CLOSING_SECONDS, FREE_BYTES, MIN_TAKEN_BYTES, Connections, State
from service_cases import COMMAND, DEADLINE, Client, Service, serving, until, write

# --- the rules, with a clock of the test -------------------------------------------------------------------------------------


class Wire:
    """A transport of which the test says how much of its answer was not read."""

    def __init__(self) -> None:
        self.unread = 0
        self.ended: str | None = None
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.ended is not None

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The client may go on sending."""

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def get_write_buffer_size(self) -> int:
        return self.unread


class Scene:
    """Connections with small limits, and a clock."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        settings = {
            "max_clients": 3,
            "reserved_clients": 2,
            "request_seconds": 5.0,
            "idle_seconds": 50.0,
            "unread_seconds": 8.0,
        }
        self.connections = Connections(Limits(**{**settings, **limits}), lambda: self.now)

    def admit(self) -> tuple[Any, Wire]:
        wire = Wire()
        return self.connections.admit(wire), wire

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.connections.sweep()


def test_each_state_ends() -> None:
    """Without anything from the client, and however much of it has come."""
    scene = Scene()
    made = [scene.admit() for _ in range(3)]
    _, (slow, _), (idle, idle_wire) = made
    slow.give_up = lambda: slow.close("too-slow")
    slow.reading()
    idle.reading()
    idle.answering()
    scene.after(4.9)
    slow.reading()  # another byte
    assert [wire.ended for _, wire in made] == [None, None, None]
    scene.after(0.2)
    assert [wire.ended for _, wire in made] == ["aborted", "closed", None]
    scene.after(1000.0)
    assert [idle_wire.ended] == [None], "the service itself bounds how long an answer takes"
    idle.idle()
    scene.after(49.9)
    assert [idle_wire.ended] == [None]
    scene.after(0.2)
    assert idle_wire.ended == "closed"
    scene.after(CLOSING_SECONDS + 0.1)
    assert [wire.ended for _, wire in made] == ["aborted"] * 3
    assert scene.connections.all() == []
    assert scene.connections.closed == {"silent": 1, "too-slow": 1, "idle": 1, "not-closed": 2}


def test_a_new_connection_takes_the_place_of_an_idle_one() -> None:
    """Of the oldest that never asked anything; then of the one that is idle for the longest time; never of a busy one."""
    scene = Scene()
    (first, first_wire), (busy, busy_wire), (_, silent_wire) = (scene.admit() for _ in range(3))
    for each in (first, busy):
        each.reading()
        each.head_is_complete()
    first.answering()
    first.idle()
    scene.now = 1.0
    (newer, newer_wire) = scene.admit()
    assert (silent_wire.ended, first_wire.ended, newer.is_reserved) == ("aborted", None, False)
    newer.head_is_complete()
    newer.answering()
    (_, last_wire) = scene.admit()
    assert (first_wire.ended, last_wire.ended, newer_wire.ended, busy_wire.ended) == ("aborted", None, None, None)
    assert scene.connections.closed == {"evicted": 2}


def test_beyond_the_limit_some_are_reserved() -> None:
    """Silent ones among them make room for the next; when each has a request in progress, the next one is refused."""
    scene = Scene()
    for _ in range(3):
        scene.admit()[0].head_is_complete()
    for each in scene.connections.all():
        each.answering()
    (one, one_wire), (two, _) = scene.admit(), scene.admit()
    assert one.is_reserved
    assert two.is_reserved
    three, _ = scene.admit()
    assert (one_wire.ended, three.is_reserved) == ("aborted", True)
    for each in (two, three):
        each.head_is_complete()
        each.answering()
    refused, _ = scene.admit()
    assert (refused, len(scene.connections.all())) == (None, 5)
    assert scene.connections.closed == {"evicted": 1, "full": 1}


def test_a_reserved_one_that_waits_for_a_body_makes_room() -> None:
    """Its head is complete, but nothing is being answered."""
    scene = Scene(max_clients=1)
    (busy, _) = scene.admit()
    busy.head_is_complete()
    busy.answering()
    (one, one_wire), (two, two_wire) = scene.admit(), scene.admit()
    for each in (one, two):
        each.reading()
        each.head_is_complete()
    one.answering()
    three, _ = scene.admit()
    assert (one_wire.ended, two_wire.ended, three.is_reserved) == (None, "aborted", True)


def test_a_client_must_read_its_answers() -> None:
    """Whatever its connection does otherwise; of a long answer it must take a named number of bytes in a named time."""
    scene = Scene()
    (slow, slow_wire), (stuck, stuck_wire), (quick, quick_wire) = (scene.admit() for _ in range(3))
    for connection, wire in ((slow, slow_wire), (stuck, stuck_wire), (quick, quick_wire)):
        connection.head_is_complete()
        connection.answering()
        wire.unread = 5 * MIN_TAKEN_BYTES
        connection.pause_writing()
    for taken in (1, 2):
        slow_wire.unread = (5 - taken) * MIN_TAKEN_BYTES
        quick_wire.unread = 0
        quick.resume_writing()
        scene.after(8.1)
        assert (slow_wire.ended, stuck_wire.ended, quick_wire.ended) == (None, "aborted", None)
    slow.close()
    assert slow_wire.ended == "closed"
    scene.after(8.1)
    assert slow_wire.ended == "aborted"
    assert scene.connections.closed == {"unread": 2}


def test_answers_that_are_not_read_have_a_bound_over_all_connections() -> None:
    scene = Scene(max_unread_bytes=1000)
    made = [scene.admit() for _ in range(3)]
    for (connection, wire), size in zip(made, (300, 600, 400), strict=True):
        connection.head_is_complete()
        connection.idle()
        wire.unread = size
    scene.after(0.1)
    assert [wire.ended for _, wire in made] == [None, "aborted", None]
    assert scene.connections.unread == 700


def test_every_connection_may_hold_a_small_request() -> None:
    """However much the others hold, and what it held is free when it ends."""
    scene = Scene(max_received_bytes=1000)
    (large, _), (small, _) = scene.admit(), scene.admit()
    large.hold(FREE_BYTES + 1000)
    small.hold(FREE_BYTES)
    with pytest.raises(Exception, match="requests hold more than 1000 bytes together"):
        small.hold(FREE_BYTES + 1)
    large.lost()
    small.hold(FREE_BYTES + 1)
    assert scene.connections.received == 1


# --- a real service ----------------------------------------------------------------------------------------------------------

LIMITS: Final[dict[str, Any]] = {
    "max_clients": 12,
    "reserved_clients": 2,
    "request_seconds": 1.5,
    "idle_seconds": 3.0,
    "unread_seconds": 1.0,
    "max_body_bytes": 8 << 20,
    "max_received_bytes": 12 << 20,
}
PATIENT: Final[dict[str, Any]] = {**LIMITS, "request_seconds": 60.0, "idle_seconds": 60.0}
"""For tests of what clients may do all at once."""
TRACED: Final = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from kvevents.cli import main
trace.set_tracer_provider(TracerProvider())
sys.exit(main(["serve", "--port", "0", *sys.argv[1:]]))
"""
"""As `opentelemetry-instrument kvevents serve` does."""


def config(folder: Path, limits: dict[str, Any], more: str = "") -> Path:
    fields = ", ".join(f"{name} = {value}" for name, value in limits.items())
    return write(folder / "service.toml", f"{more}\nlimits = {{ {fields} }}\n")


@pytest.fixture(scope="module", name="service", params=["plain", "traced"])
def impatient_service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With short times. With tracing requests take another way through the service; its bounds are the same."""
    settings = config(tmp_path_factory.mktemp("limits"), LIMITS)
    command = COMMAND if request.param == "plain" else (sys.executable, "-W", "error", "-c", TRACED)
    with serving("--config", settings, command=command) as service:
        yield service


@pytest.fixture(scope="module", name="one_patient")
def patient_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving("--config", config(tmp_path_factory.mktemp("patient"), PATIENT)) as service:
        yield service


@pytest.fixture(name="patient")
def patient_and_idle_service(one_patient: Service) -> Iterator[Service]:
    """Each test leaves it without connections."""
    yield one_patient
    until("connections to end", lambda: sum(metrics(one_patient, "kvevents_http_connections").values()) == 1)


@contextmanager
def connected(service: Client, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection((service.host, service.port), DEADLINE) as made:
        made.sendall(sent)
        yield made


def everything(connection: socket.socket) -> bytes:
    """All that comes until the service ends the connection, which it must before the deadline."""
    connection.settimeout(DEADLINE)
    received = bytearray()
    try:
        while piece := connection.recv(1 << 16):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


def one_answer(connection: socket.socket) -> bytes:
    """The head of a whole answer."""
    received = b""
    while (length := re.search(rb"content-length: (\d+).*\r\n\r\n", received, re.DOTALL)) is None or (
        len(received) < length.end() + int(length[1])
    ):
        piece = connection.recv(1 << 16)
        assert piece, received
        received += piece
    return received.partition(b"\r\n\r\n")[0]


def once(client: Client, path: str) -> int:
    """Status of one request on a connection of its own."""
    asking = Client(f"http://{client.host}:{client.port}")
    try:
        return asking.get(path).status
    finally:
        asking.close()


def probe(client: Service, tls: ssl.SSLContext | None = None) -> None:
    """Ask what orchestrators ask, each on a connection of its own."""
    for path, field in (("/livez", "status"), ("/health", "status"), ("/readyz", "ready")):
        asking = Client(client.url, tls=tls)
        try:
            answer = asking.get(path)
            assert (answer.status == 200 or path == "/readyz", field in answer.json) == (True, True), answer
        finally:
            asking.close()


def metrics(service: Client, name: str) -> dict[str, float]:
    """A family by its labels, asked for on a new connection: an old one may have made room for others."""
    service.close()
    text = service.get("/metrics").body.decode()
    return {found[1] or "": float(found[2]) for found in re.finditer(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)}


def head(body: int, path: str = "/query", *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {body}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


PROBE: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
QUESTION: Final = b'{"model_name": "m", "token_ids": [1]}'


def test_idle_connections_never_keep_probes_from_their_answers(patient: Service) -> None:
    """However many there are, and whether they have asked something before; other clients are served as well."""
    with ExitStack() as stack:
        for number in range(4 * PATIENT["max_clients"]):
            made = stack.enter_context(
                connected(patient, b"" if number % 2 else b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            )
            if not number % 2:
                assert one_answer(made).startswith(b"HTTP/1.1 200 ")
        probe(patient)
        assert once(patient, "/v1/stats") == 200
        assert (
            sum(metrics(patient, "kvevents_http_connections").values()) <= PATIENT["max_clients"] + PATIENT["reserved_clients"]
        )
        assert metrics(patient, "kvevents_http_connections_closed_total")['reason="evicted"'] >= 3 * PATIENT["max_clients"]


def test_busy_connections_never_keep_probes_from_their_answers(patient: Service) -> None:
    """Of which each has a body that never ends; others hear that there is no room, as documented errors are."""
    with ExitStack() as stack:
        for number in range(PATIENT["max_clients"]):
            path = "/query" if number % 2 else "/v1/match_many"
            stack.enter_context(connected(patient, head(1000, path) + b"{"))
        until("all to be busy", lambda: once(patient, "/v1/stats") == 503)
        for _ in range(5):
            stack.enter_context(connected(patient))  # silent ones of the reserve
        probe(patient)
        other = Client(patient.url)
        refused = other.get("/v1/stats")
        assert (refused.status, refused.reason) == (503, "too-many-clients")
        assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
        assert other.post("/query", model_name="m", token_ids=[1]).status == 503
        other.close()
    until("room", lambda: once(patient, "/v1/stats") == 200)
    assert metrics(patient, "kvevents_http_refusals_total")['reason="too-many-clients"'] >= 3
    assert metrics(patient, "kvevents_http_requests_total")['path="/v1/stats",status="503"'] >= 2


SLOW: Final = {
    "nothing": (b"", b""),
    "half a head": (b"GET /v1/stats HTT", b"408"),
    "half a head for the lane": (b"POST /query HTTP/1.1\r\nhost: l", b"408"),
    "half a body": (head(100) + b"{", b"408"),
    "half a body of a general request": (head(100, "/register") + b"{", b"408"),
    "half a chunk": (b"POST /query HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{", b"408"),
}
BEFORE: Final = {
    "fresh": b"",
    "after a question": head(len(QUESTION)) + QUESTION,
    "after a probe": PROBE,
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("slow", SLOW)
def test_a_request_that_never_ends_does(service: Service, slow: str, before: str) -> None:
    """With 408 if it had begun, and within its time also on a connection that was kept."""
    with connected(service, BEFORE[before]) as connection:
        if before != "fresh":
            assert one_answer(connection).startswith(b"HTTP/1.1 ")
        sent, status = SLOW[slow]
        began = time.monotonic()
        connection.sendall(sent)
        answer = everything(connection)
        assert time.monotonic() - began < DEADLINE / 2
        assert answer[9:12] == status
        if status:
            assert msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["reason"] == "too-slow"


def test_an_empty_line_behind_a_request_keeps_no_connection(service: Service) -> None:
    with connected(service, PROBE) as connection:
        assert one_answer(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"\r\n")
        assert everything(connection)[9:12] in {b"", b"408"}


REFUSED: Final = {
    "no such path": (head(1_000_000, "/nope"), 404),
    "no such method": (head(1_000_000, "/livez"), 405),
    "too large": (head(100_000_000), 413),
    "foreign host": (head(1_000_000).replace(b"localhost", b"evil.example"), 421),
    "chunked": (b"POST /nope HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n", 404),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_body_of_a_refused_request_is_not_waited_for(patient: Service, name: str) -> None:
    """The answer comes first, says that the connection ends, and arrives though the client is still sending."""
    sent, status = REFUSED[name]
    with connected(patient, sent + b"x") as connection:
        connection.sendall(b"y")
        answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close\r\n" in answer
    until("it to end", lambda: sum(metrics(patient, "kvevents_http_connections").values()) == 1)


UNENDING: Final = {
    "a body": b"content-length: 10\r\n\r\n",
    "a part of a body": b"content-length: 10\r\n\r\n{",
    "chunks": b"transfer-encoding: chunked\r\n\r\n",
    "a whole body": b"content-length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("path", ["/livez", "/health", "/readyz"])
@pytest.mark.parametrize("what", UNENDING)
def test_a_probe_is_answered_without_its_body(patient: Service, what: str, path: str) -> None:
    """What it would be is not looked at; the connection ends, since what comes next cannot be known."""
    with connected(patient, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n".encode() + UNENDING[what]) as connection:
        answer = everything(connection)
    assert answer[9:12] in ({b"200"} if path != "/readyz" else {b"200", b"503"})
    assert b"connection: close\r\n" in answer


def test_probes_without_their_bodies_never_keep_others_from_their_answers(patient: Service) -> None:
    """With every other connection busy, and as many of them as there may be."""
    with ExitStack() as stack:
        for _ in range(PATIENT["max_clients"]):
            stack.enter_context(connected(patient, head(1000) + b"{"))
        until("all to be busy", lambda: once(patient, "/v1/stats") == 503)
        for _ in range(2 * PATIENT["reserved_clients"]):
            stack.enter_context(connected(patient, b"GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n"))
        probe(patient)


def test_a_refused_request_without_a_body_keeps_its_connection(service: Service) -> None:
    with connected(service, b"GET /nope HTTP/1.1\r\nhost: localhost\r\n\r\n") as connection:
        assert b"connection: close" not in one_answer(connection)
        connection.sendall(PROBE)
        assert one_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_never_reads_is_cut_off(service: Service) -> None:
    """It asks for long answers, on a way that is the lane's and on one that is not, until the service takes no more."""
    for question in (b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 4, (head(len(QUESTION)) + QUESTION) * 1000):
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((service.host, service.port))
            connection.settimeout(0.05)

            def pushed(connection: socket.socket = connection, question: bytes = question) -> bool:
                try:
                    connection.sendall(question)
                except TimeoutError:
                    return False
                except (BrokenPipeError, ConnectionResetError):
                    return True
                return False

            until("it to be cut off", pushed)
    closed = metrics(service, "kvevents_http_connections_closed_total")
    assert closed['reason="unread"'] >= 1


def test_requests_that_wait_for_answers_are_bounded(service: Service) -> None:
    """On one connection: what it asks without reading does not pile up."""
    with connected(service) as connection:
        connection.settimeout(1.0)
        with suppress(OSError):
            for _ in range(200):
                connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100)
        everything(connection)
    until("it to be gone", lambda: sum(metrics(service, "kvevents_http_connections").values()) == 1)


def test_bodies_have_a_bound_over_all_connections(patient: Service) -> None:
    """A bound that many large bodies reach: some are refused, in the end there is room again, and the memory shows it."""
    size = 7 << 20
    with ExitStack() as stack:
        made = [stack.enter_context(connected(patient, head(size, path))) for path in ["/query", "/register"] * 2]
        for connection in made:
            connection.settimeout(2.0)
            with suppress(OSError):  # refused
                connection.sendall(b" " * (size - 1))
        until("refusals", lambda: metrics(patient, "kvevents_http_refusals_total").get('reason="too-much-at-once"', 0) >= 2)
        assert metrics(patient, "kvevents_http_received_bytes")[""] <= PATIENT["max_received_bytes"]
        assert once(patient, "/v1/stats") == 200
        assert patient.post("/query", model_name="m", token_ids=[1] * 10_000).status == 404  # a small one is always taken
    until("room", lambda: metrics(patient, "kvevents_http_received_bytes") == {"": 0})


def test_requests_that_wait_for_an_answer_are_not_read() -> None:
    """Behind one whose answer never ends: the client cannot send on."""
    header = b"x-long: " + b"y" * 50_000 + b"\r\n"
    queued = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n"
    events = b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving() as service, connected(service, events) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.sendall(queued * 1_000)
        assert metrics(service, "kvevents_http_received_bytes")[""] < 1 << 20
        assert once(service, "/v1/stats") == 200


def test_what_is_malformed_takes_no_earlier_answer_away(service: Service) -> None:
    """Behind a request whose answer takes a while: no error is taken for that answer."""
    events = b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connected(service, events + b"no http at all\r\n\r\n") as connection:
        assert b"malformed-request" not in everything(connection)


@pytest.mark.parametrize("silent", [True, False])
def test_handshakes_that_never_end_do(tmp_path: Path, silent: bool) -> None:
    """They are connections as all others are: they make room for probes, and have the time of a request."""
    certificates = make_certificates(tmp_path)
    tls = f'tls = {{ certificate = "{certificates}/server.pem", key = "{certificates}/server.key" }}'
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    with serving("--config", config(tmp_path, LIMITS, tls), tls=context) as service, ExitStack() as stack:
        hello = b"" if silent else b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50
        made = [stack.enter_context(connected(service, hello)) for _ in range(2 * LIMITS["max_clients"])]
        probe(service, context)
        for connection in made:
            everything(connection)
        counted = metrics(service, "kvevents_http_connections")
        until("all to be gone", lambda: sum(metrics(service, "kvevents_http_connections").values()) == 1)
        assert set(counted) == {f'state="{state.value}"' for state in State}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux")
async def test_more_silent_connections_than_the_default_limit(tmp_path: Path) -> None:
    """1,200 of them, with the limits of production: a probe has its answer within the second that kubelet waits."""
    with serving() as service:
        made = [await asyncio.open_connection(service.host, service.port) for _ in range(1_200)]
        try:
            await asyncio.to_thread(probe, service)
        finally:
            for _, writer in made:
                writer.transport.abort()
