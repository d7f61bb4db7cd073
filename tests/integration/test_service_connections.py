"""`native/server`: probes are always answered, and each connection has limits."""

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
from http2_cases import ACK, DATA, HEADERS, PING, encode_frame, encode_request, encode_settings, receive_frames
from service_cases import DEADLINE, Client, Service, serving, wait_for, write

# --- a real service ----------------------------------------------------------------------------------------------------------

LIMITS: Final[dict[str, Any]] = {
    "max_clients": 12,
    "reserved_clients": 2,
    "request_seconds": 1.5,
    "idle_seconds": 2.0,
    "unread_seconds": 1.0,
    "max_body_bytes": 8 << 20,
    "max_received_bytes": 12 << 20,
}
PATIENT: Final[dict[str, Any]] = {**LIMITS, "request_seconds": 60.0, "idle_seconds": 60.0}
"""Limits for tests with many clients at once."""


def write_config(folder: Path, limits: dict[str, Any], more: str = "") -> Path:
    fields = ", ".join(f"{name} = {value}" for name, value in limits.items())
    return write(folder / "service.toml", f"{more}\nlimits = {{ {fields} }}\n")


@pytest.fixture(scope="module", name="service")
def impatient_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Return a service with short timeouts."""
    with serving("--config", write_config(tmp_path_factory.mktemp("limits"), LIMITS)) as service:
        yield service


@pytest.fixture(scope="module", name="one_patient")
def patient_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving("--config", write_config(tmp_path_factory.mktemp("patient"), PATIENT)) as service:
        yield service


@pytest.fixture(name="patient")
def patient_and_idle_service(one_patient: Service) -> Iterator[Service]:
    """Return a service that has no connections before each test."""
    yield one_patient
    wait_for("connections to end", lambda: sum(read_metrics(one_patient, "kvevents_http_connections").values()) == 1)


@contextmanager
def connect_to(service: Client, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection((service.host, service.port), DEADLINE) as made:
        made.sendall(sent)
        yield made


def receive_all(connection: socket.socket) -> bytes:
    """Return everything that arrives until the service closes the connection, before the deadline."""
    connection.settimeout(DEADLINE)
    received = bytearray()
    try:
        while piece := connection.recv(1 << 16):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


def receive_response_head(connection: socket.socket) -> bytes:
    """Return the head of a complete response."""
    received = b""
    while (length := re.search(rb"content-length: (\d+).*\r\n\r\n", received, re.DOTALL)) is None or (
        len(received) < length.end() + int(length[1])
    ):
        piece = connection.recv(1 << 16)
        assert piece, received
        received += piece
    return received.partition(b"\r\n\r\n")[0]


def request_status(client: Client, path: str) -> int:
    """Return the status of a request on a new connection."""
    new_client = Client(f"http://{client.host}:{client.port}")
    try:
        return new_client.get(path).status
    finally:
        new_client.close()


def probe(client: Service, tls: ssl.SSLContext | None = None) -> None:
    """Send each probe of an orchestrator on a new connection."""
    for path, field in (("/livez", "status"), ("/health", "status"), ("/readyz", "ready")):
        new_client = Client(client.url, tls=tls)
        try:
            answer = new_client.get(path)
            assert (answer.status == 200 or path == "/readyz", field in answer.json) == (True, True), answer
        finally:
            new_client.close()


def read_metrics(service: Client, name: str) -> dict[str, float]:
    """Return a metric family by label text, over a new connection, because an old one may have been evicted."""
    service.close()
    text = service.get("/metrics").body.decode()
    return {found[1] or "": float(found[2]) for found in re.finditer(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)}


def count_closed(service: Client, reason: str) -> float:
    """Return how many connections the service has closed for a reason."""
    return read_metrics(service, "kvevents_http_connections_closed_total").get(f'reason="{reason}"', 0)


def format_head(body: int, path: str = "/query", *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {body}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


PROBE: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
QUERY: Final = b'{"model_name": "m", "token_ids": [1]}'
LONG_HEADER: Final = b"x-long: " + b"y" * 50_000 + b"\r\n"
"""Few requests with responses of this size exceed the buffers of sockets."""


def test_probes_are_answered_beside_idle_connections(patient: Service) -> None:
    """Idle connections are evicted, whether they had an earlier request or not. Other clients get responses, too."""
    with ExitStack() as stack:
        for number in range(4 * PATIENT["max_clients"]):
            made = stack.enter_context(
                connect_to(patient, b"" if number % 2 else b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            )
            if not number % 2:
                assert receive_response_head(made).startswith(b"HTTP/1.1 200 ")
        probe(patient)
        assert request_status(patient, "/v1/stats") == 200
        assert (
            sum(read_metrics(patient, "kvevents_http_connections").values())
            <= PATIENT["max_clients"] + PATIENT["reserved_clients"]
        )
        wait_for(
            "the evictions to be counted",
            lambda: count_closed(patient, "evicted") >= 3 * PATIENT["max_clients"],
        )


@pytest.mark.parametrize(
    ("command", "lowered"),
    [("ulimit -S -n 256", False), ("ulimit -n 400", True), ("ulimit -n 64", True)],
    ids=["soft", "hard", "tiny"],
)
def test_connections_leave_file_descriptors_for_probes(command: str, lowered: bool) -> None:
    """Shells and systemd allow 1,024 open files by default, as many as the default of `max_clients`."""
    limited = ("sh", "-c", f'{command} && exec {sys.executable} -W error -m kvevents serve --port 0 "$@"', "sh")
    with ExitStack() as stack:
        service = stack.enter_context(serving(command=limited))
        for _ in range(450):
            connection = stack.enter_context(socket.create_connection((service.host, service.port), DEADLINE))
            with suppress(OSError):  # it was evicted already
                connection.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n")
        for path in ("/livez", "/readyz"):
            probe = Client(service.url)
            assert probe.get(path).status == 200
            probe.close()
        probe = Client(service.url)
        warnings = [each for each in probe.get("/health").json["warnings"] if each.startswith("limits.max_clients is ")]
        probe.close()
        assert len(warnings) == len(service.log_lines(r"limits\.max_clients is ")) == int(lowered)


def test_probes_are_answered_beside_busy_connections(patient: Service) -> None:
    """Each busy connection sends a body that never ends. Other requests get the documented error `too-many-clients`."""
    with ExitStack() as stack:
        for number in range(PATIENT["max_clients"]):
            path = "/query" if number % 2 else "/v1/match_many"
            stack.enter_context(connect_to(patient, format_head(1000, path) + b"{"))
        wait_for("all connections to be busy", lambda: request_status(patient, "/v1/stats") == 503)
        for _ in range(5):
            stack.enter_context(connect_to(patient))  # idle connections of the reserve
        probe(patient)
        other = Client(patient.url)
        refused = other.get("/v1/stats")
        assert (refused.status, refused.reason) == (503, "too-many-clients")
        assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
        assert other.post("/query", model_name="m", token_ids=[1]).status == 503
        other.close()
        assert read_metrics(patient, "kvevents_http_connections_limit")[""] == PATIENT["max_clients"]
    wait_for("room", lambda: request_status(patient, "/v1/stats") == 200)
    # They are counted on connections of their own.
    wait_for(
        "the refusals to be counted",
        lambda: read_metrics(patient, "kvevents_http_rejected_requests_total").get('reason="too-many-clients"', 0) >= 3,
    )
    wait_for(
        "the answers to be counted",
        lambda: read_metrics(patient, "kvevents_http_requests_total").get('path="/v1/stats",status="503"', 0) >= 2,
    )


SLOW: Final = {
    "nothing": (b"", b""),
    "half a head": (b"GET /v1/stats HTT", b"408"),
    "half a head of a query": (b"POST /query HTTP/1.1\r\nhost: l", b"408"),
    "half a body": (format_head(100) + b"{", b"408"),
    "half a body of a general request": (format_head(100, "/register") + b"{", b"408"),
    "half a chunk": (b"POST /query HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{", b"408"),
}
BEFORE: Final = {
    "fresh": b"",
    "after a query": format_head(len(QUERY)) + QUERY,
    "after a probe": PROBE,
}


@pytest.mark.parametrize("before", BEFORE)
def test_an_unfinished_request_times_out(service: Service, before: str) -> None:
    """The service sends 408 if the request had begun, also on a reused connection and for many connections at once."""
    with ExitStack() as stack:
        made = {slow: stack.enter_context(connect_to(service, BEFORE[before])) for slow in SLOW}
        if before != "fresh":
            assert all(receive_response_head(connection).startswith(b"HTTP/1.1 ") for connection in made.values())
        began = time.monotonic()
        for slow, (sent, _) in SLOW.items():
            made[slow].sendall(sent)
        answers = {slow: receive_all(connection) for slow, connection in made.items()}
        assert time.monotonic() - began < DEADLINE / 2
    assert {slow: answer[9:12] for slow, answer in answers.items()} == {slow: status for slow, (_, status) in SLOW.items()}
    bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers.values() if answer]
    assert [msgspec.json.decode(body)["reason"] for body in bodies] == ["too-slow"] * 5


def test_an_empty_line_after_a_request_does_not_keep_a_connection_open(service: Service) -> None:
    with connect_to(service, PROBE) as connection:
        assert receive_response_head(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"\r\n")
        assert receive_all(connection)[9:12] in {b"", b"408"}


REFUSED: Final = {
    "no such path": (format_head(1_000_000, "/nope"), 404),
    "no such method": (format_head(1_000_000, "/livez"), 405),
    "too large": (format_head(100_000_000), 413),
    "foreign host": (format_head(1_000_000).replace(b"localhost", b"evil.example"), 421),
    "chunked": (b"POST /nope HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n", 404),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_request_is_answered_before_its_body(patient: Service, name: str) -> None:
    """The response announces the close and arrives although the client is still sending."""
    sent, status = REFUSED[name]
    with connect_to(patient, sent + b"x") as connection:
        connection.sendall(b"y")
        answer = receive_all(connection)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close\r\n" in answer
    wait_for("the connection to end", lambda: sum(read_metrics(patient, "kvevents_http_connections").values()) == 1)


UNENDING: Final = {
    "a body": b"content-length: 10\r\n\r\n",
    "a part of a body": b"content-length: 10\r\n\r\n{",
    "chunks": b"transfer-encoding: chunked\r\n\r\n",
    "a whole body": b"content-length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("path", ["/livez", "/health", "/readyz"])
@pytest.mark.parametrize("what", UNENDING)
def test_a_probe_is_answered_before_its_body(patient: Service, what: str, path: str) -> None:
    """The service closes the connection, because it cannot find the beginning of the next request."""
    with connect_to(patient, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n".encode() + UNENDING[what]) as connection:
        answer = receive_all(connection)
    assert answer[9:12] in ({b"200"} if path != "/readyz" else {b"200", b"503"})
    assert b"connection: close\r\n" in answer


def test_unfinished_probes_do_not_delay_others(patient: Service) -> None:
    """All other connections are busy, and their number is the maximum."""
    with ExitStack() as stack:
        for _ in range(PATIENT["max_clients"]):
            stack.enter_context(connect_to(patient, format_head(1000) + b"{"))
        wait_for("all connections to be busy", lambda: request_status(patient, "/v1/stats") == 503)
        for _ in range(2 * PATIENT["reserved_clients"]):
            stack.enter_context(connect_to(patient, b"GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n"))
        probe(patient)


def test_a_refused_request_without_a_body_keeps_its_connection(service: Service) -> None:
    with connect_to(service, b"GET /nope HTTP/1.1\r\nhost: localhost\r\n\r\n") as connection:
        assert b"connection: close" not in receive_response_head(connection)
        connection.sendall(PROBE)
        assert receive_response_head(connection).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_never_reads_is_disconnected(service: Service) -> None:
    """The client requests long responses of both planes until the service stops reading."""
    for burst in (b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 4, (format_head(len(QUERY)) + QUERY) * 1000):
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((service.host, service.port))
            connection.settimeout(0.05)

            def is_disconnected(connection: socket.socket = connection, burst: bytes = burst) -> bool:
                try:
                    connection.sendall(burst)
                except TimeoutError:
                    return False
                except (BrokenPipeError, ConnectionResetError):
                    return True
                return False

            wait_for("the disconnection", is_disconnected)
    wait_for("the disconnections to be counted", lambda: count_closed(service, "unread") >= 1)


CALL: Final = "/grpc.health.v1.Health/Check"


@pytest.mark.parametrize("window", [0, 1, 20_000])
@pytest.mark.parametrize("path", ["/livez", "/openapi.json", CALL])
def test_answers_count_and_end_although_http_2_does_not_permit_to_send_them(service: Service, path: str, window: int) -> None:
    """The client requests answers of both planes and of a gRPC call, and opens no window for them."""
    service.close()  # the service may have closed an idle connection
    length, count = 7 if path == CALL else len(service.get(path).body), 10
    window = min(window, length - 1)
    body, more = (b"\0" * 5, {"content_type": "application/grpc"}) if path == CALL else (b"", {"method": "GET"})
    requests = [encode_request(2 * number + 1, path, body, **more) for number in range(count)]

    def are_counted_until_the_end() -> bool:
        """Return whether all answers counted; False if the connection ended before the metrics were read."""
        before, missing = count_closed(service, "unread"), count
        with connect_to(service, encode_settings(window) + b"".join(requests)) as connection:
            frames = receive_frames(connection)
            while missing:
                missing -= next(frames).kind == HEADERS
            buffered = read_metrics(service, "kvevents_http_response_buffer_bytes")[""]
            is_open = count_closed(service, "unread") == before
            assert buffered >= length * count or not is_open
            assert sum(len(frame.payload) for frame in frames if frame.kind == DATA) <= window * count
        wait_for("no answers", lambda: read_metrics(service, "kvevents_http_response_buffer_bytes") == {"": 0})
        wait_for("the end to be counted", lambda: count_closed(service, "unread") == before + 1)
        return is_open

    wait_for("answers that count", are_counted_until_the_end)


WATCH: Final = encode_request(1, "/grpc.health.v1.Health/Watch", b"\0" * 5, content_type="application/grpc")


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_dead_client_of_http_2_is_disconnected(service: Service, is_alive: bool) -> None:
    """A client that watches the health sends nothing itself. It must answer pings."""
    with connect_to(service, encode_settings(1 << 16) + WATCH) as connection:
        pings = 0
        for frame in receive_frames(connection):
            if frame.kind == PING and not frame.flags & ACK:
                pings += 1
                if is_alive:
                    connection.sendall(encode_frame(PING, ACK, 0, frame.payload))
                if pings == 3:
                    break
    assert (pings == 3) == is_alive


def test_pings_between_requests_do_not_end_a_connection(tmp_path: Path) -> None:
    """They are answers to pings of the service, and no beginning of a request that is never complete."""
    limits = {"request_seconds": 0.5, "unread_seconds": 1.5}
    sent = encode_settings(1 << 16) + encode_request(1, "/livez", method="GET")
    with serving("--config", write_config(tmp_path, limits)) as service, connect_to(service, sent) as connection:
        pings = answers = 0
        for frame in receive_frames(connection):
            answers += frame.kind == HEADERS
            if frame.kind == PING and not frame.flags & ACK:
                pings += 1
                connection.sendall(encode_frame(PING, ACK, 0, frame.payload))
                if pings == 2:  # after three seconds at least
                    connection.sendall(encode_request(3, "/livez", method="GET"))
            if answers == 2:
                break
    assert answers == 2


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux")
def test_connections_have_tcp_keep_alive(patient: Service) -> None:
    """The system checks whether the client of a connection without traffic is there: it has a timer of kind 2."""
    with connect_to(patient, PROBE) as connection:
        receive_response_head(connection)
        ours, theirs = (f":{address[1]:04X}" for address in (connection.getsockname(), connection.getpeername()))

        def read_timers() -> list[str]:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            return [row[5].partition(":")[0] for row in rows if row[1].endswith(theirs) and row[2].endswith(ours)]

        wait_for("the timer", lambda: read_timers() == ["02"])  # before, it may be that of an answer without acknowledgement


def test_pipelined_requests_are_bounded(service: Service) -> None:
    """Responses that a client does not read do not accumulate."""
    requests = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n" + LONG_HEADER + b"\r\n"
    with connect_to(service) as connection:
        connection.settimeout(1.0)
        with pytest.raises(OSError):  # noqa: PT011 - the send times out, or the service closes the connection
            connection.sendall(requests * 1_000)
        receive_all(connection)
    wait_for("the connection to end", lambda: sum(read_metrics(service, "kvevents_http_connections").values()) == 1)


def test_bodies_of_all_connections_are_bounded(patient: Service) -> None:
    """Large bodies reach the limit: some are rejected, and the memory is free again afterwards."""
    size = 7 << 20
    with ExitStack() as stack:
        made = [stack.enter_context(connect_to(patient, format_head(size, path))) for path in ["/query", "/register"] * 2]
        for connection in made:
            connection.settimeout(2.0)
            with suppress(OSError):  # refused
                connection.sendall(b" " * (size - 1))
        wait_for(
            "refusals",
            lambda: read_metrics(patient, "kvevents_http_rejected_requests_total").get('reason="too-much-at-once"', 0) >= 2,
        )
        assert read_metrics(patient, "kvevents_http_request_buffer_bytes")[""] <= PATIENT["max_received_bytes"]
        assert request_status(patient, "/v1/stats") == 200
        assert patient.post("/query", model_name="m", token_ids=[1] * 10_000).status == 404  # a small one is always accepted
    wait_for("room", lambda: read_metrics(patient, "kvevents_http_request_buffer_bytes") == {"": 0})


def test_pipelined_requests_are_not_read() -> None:
    """A pipelined request waits behind a response that never ends, and the client cannot send more."""
    queued = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + LONG_HEADER + b"\r\n"
    events = b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving() as service, connect_to(service, events) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.sendall(queued * 1_000)
        assert read_metrics(service, "kvevents_http_request_buffer_bytes")[""] < 1 << 20
        assert request_status(service, "/v1/stats") == 200


def test_a_malformed_request_keeps_earlier_responses(service: Service) -> None:
    """A malformed request behind a slow one is rejected after the slow one's response."""
    metrics_and = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connect_to(service, metrics_and + b"no http at all\r\n\r\n") as connection:
        answer = receive_all(connection)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1 ") == 2
        assert b"malformed-request" in answer.rpartition(b"HTTP/1.1 400 ")[2]


@pytest.mark.parametrize("is_silent", [True, False])
def test_unfinished_tls_handshakes_time_out(tmp_path: Path, is_silent: bool) -> None:
    """Unfinished TLS handshakes count as connections: they can be evicted for probes and have a timeout."""
    certificates = make_certificates(tmp_path)
    tls = f'tls = {{ certificate = "{certificates}/server.pem", key = "{certificates}/server.key" }}'
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    with serving("--config", write_config(tmp_path, LIMITS, tls), tls=context) as service, ExitStack() as stack:
        hello = b"" if is_silent else b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50
        made = [stack.enter_context(connect_to(service, hello)) for _ in range(2 * LIMITS["max_clients"])]
        probe(service, context)
        for connection in made:
            receive_all(connection)
        counted = read_metrics(service, "kvevents_http_connections")
        wait_for("all connections to end", lambda: sum(read_metrics(service, "kvevents_http_connections").values()) == 1)
        assert set(counted) == {f'state="{state}"' for state in ("new", "reading", "answering", "idle", "closing")}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux")
async def test_a_probe_is_answered_beside_more_idle_connections_than_the_default_limit(tmp_path: Path) -> None:
    """With 1,200 connections and default limits, a probe has its response within kubelet's timeout of a second."""
    with serving() as service:
        made = [await asyncio.open_connection(service.host, service.port) for _ in range(1_200)]
        try:
            await asyncio.to_thread(probe, service)
        finally:
            for _, writer in made:
                writer.transport.abort()
