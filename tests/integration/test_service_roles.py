"""Each endpoint of the table by each caller, host and origin: the status, the problem, and the line of the audit log."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from http.client import HTTPConnection
from typing import Any, Final, NamedTuple

import grpc
import msgspec
import pytest

from kvevents.service.access import AccessSettings, AuditLog, TokenSettings
from kvevents.service.http.app import App
from kvevents.service.http.routes import ENDPOINTS, Route
from kvevents.service.process import data_plane_settings
from kvevents.service.service import Service
from kvevents.service.settings import ServiceSettings
from service_cases import DEADLINE

READER, WRITER = "reader-0123456789", "writer-0123456789"
TOKENS: Final = (TokenSettings(role="read", token=READER, name="grafana"), TokenSettings(role="register", token=WRITER))
ROLES: Final = ("none", "read", "register")
OWN: Final = "127.0.0.1:8090"
EVIL: Final = "https://evil.example"


class Case(NamedTuple):
    """A caller, and the headers of its requests."""

    role: str
    name: str
    headers: dict[str, str]


ANONYMOUS: Final = Case("anonymous", "anonymous", {})
CASES: Final = {
    "no token": ANONYMOUS,
    "read token": Case("read", "grafana", {"authorization": f"Bearer {READER}"}),
    "register token": Case("register", "token 2", {"authorization": f"Bearer {WRITER}"}),
    "unknown token": Case("none", "unknown token", {"authorization": "Bearer unknown-0123456789"}),
    "foreign host": Case("register", "token 2", {"authorization": f"Bearer {WRITER}", "host": "evil.example"}),
    "foreign origin": Case("register", "token 2", {"authorization": f"Bearer {WRITER}", "origin": EVIL}),
    "foreign page": Case("register", "token 2", {"authorization": f"Bearer {WRITER}", "sec-fetch-site": "cross-site"}),
    "own page": Case("read", "grafana", {"authorization": f"Bearer {READER}", "origin": f"http://{OWN}"}),
}


class Refusal(NamedTuple):
    """A refused request."""

    status: int
    reason: str
    detail: str


def refusal_of(endpoint: Route, case: Case, anonymous: str) -> Refusal | None:
    """Return the refusal of a request by the rules of the guide; None if it must be answered."""
    role, refusal = anonymous if case is ANONYMOUS else case.role, None
    if not endpoint.is_probe and anonymous != "none" and "host" in case.headers:
        refusal = Refusal(421, "unknown-host", "unknown host 'evil.example'")
    elif not endpoint.is_probe and case.headers.get("origin") == EVIL:
        refusal = Refusal(403, "foreign-origin", f"foreign origin '{EVIL}'")
    elif not endpoint.is_probe and "sec-fetch-site" in case.headers:
        refusal = Refusal(403, "foreign-origin", "a page of another origin sent this request")
    elif endpoint.role is not None and ROLES.index(role) < ROLES.index(endpoint.role):
        refusal = Refusal(403, "forbidden", "this token does not have the required role")
        if role == "none" or case is ANONYMOUS:
            detail = "a token is required" if case is ANONYMOUS else "unknown token"
            refusal = Refusal(401, "unauthorized", detail)
    return refusal


class Answer(NamedTuple):
    """A response, without its body if it is no error."""

    status: int
    challenge: str | None
    problem: Any


def send(port: int, method: str, path: str, case: Case, body: bytes | None = None) -> Answer:
    with closing(HTTPConnection("127.0.0.1", port, timeout=DEADLINE)) as client:
        more = {} if body is None else {"content-type": "application/json"}
        client.request(method, path, body, {"host": OWN, **case.headers, **more})
        response = client.getresponse()
        has_problem = response.status >= 400 and response.headers["content-type"] == "application/problem+json"
        problem = msgspec.json.decode(response.read()) if has_problem and method != "HEAD" else None
        return Answer(response.status, response.headers["www-authenticate"], problem)


@asynccontextmanager
async def run_service(anonymous: Any) -> AsyncIterator[tuple[Service, int]]:
    """Yield a service in this process, and its port. Its audit log has a line for each refusal."""
    service = Service(ServiceSettings(access=AccessSettings(tokens=TOKENS, anonymous=anonymous)))
    seconds = itertools.count()
    service.audit = AuditLog(lambda: float(next(seconds)))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            service.data_plane.start(listening, App(service), data_plane_settings(service, answers_queries=True))
            yield service, listening.getsockname()[1]
    finally:
        await service.data_plane.close()
        service.fleet.follower.subscriber.close()


def read_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the audit log without the ports of clients, and remove them."""
    lines = [record.getMessage() for record in caplog.records if record.name == "kvevents.service.audit"]
    caplog.clear()
    return [f"{line.partition(':')[0]}:{line.partition(': ')[2]}" for line in lines]


@pytest.mark.parametrize("anonymous", ["none", "read"])
@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
async def test_each_endpoint_is_for_its_callers_only(endpoint: Route, anonymous: str, caplog: pytest.LogCaptureFixture) -> None:
    """HEAD is GET. A refused request has one line in the audit log, which names the endpoint and the caller."""
    caplog.set_level(logging.INFO)
    path = endpoint.path.replace("{id}", "some")
    async with run_service(anonymous) as (_, port):
        for case in CASES.values():
            for method in (endpoint.method, *(["HEAD"] if endpoint.method == "GET" else [])):
                for body in (None, b"{}"):
                    answer = await asyncio.to_thread(send, port, method, path, case, body)
                    refusal, lines = refusal_of(endpoint, case, anonymous), read_lines(caplog)
                    start = f"refused {endpoint.method} {endpoint.path} by {case.name} client=127.0.0.1:"
                    if refusal is None:
                        assert answer.status not in {401, 403, 421}
                        assert len(lines) == (endpoint.role == "register" and answer.status >= 400)
                        continue
                    assert (answer.status, lines) == (refusal.status, [start + refusal.detail])
                    assert answer.challenge == ("Bearer" if refusal.status == 401 else None)
                    if method != "HEAD":
                        assert (answer.problem["reason"], answer.problem["detail"]) == refusal[1:]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_unknown_paths_and_methods_are_reported_to_every_caller(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """The table of endpoints is public. An escaped path is that of its endpoint."""
    caplog.set_level(logging.INFO)
    async with run_service("read") as (_, port):
        for method, path, status in (
            ("GET", "/nowhere", 404),
            ("POST", "/nowhere", 404),
            ("OPTIONS", "/register", 405),
            ("PUT", "/v1/sources", 405),
            ("GET", "/v1/reservations/a%2Fb", 404),
        ):
            for body in (None, b"{}"):
                assert (await asyncio.to_thread(send, port, method, path, case, body)).status == status
        assert read_lines(caplog) == []
        refusal = refusal_of(next(each for each in ENDPOINTS if each.path == "/register"), case, "read")
        answer = await asyncio.to_thread(send, port, "POST", "/%72egister", case, b"{}")
        assert answer.status == (422 if refusal is None else refusal.status)
        assert len(read_lines(caplog)) == 1


CALLS: Final = {
    "Match": "POST /v1/match",
    "MatchMany": "POST /v1/match_many",
    "Select": "POST /v1/select",
    "UpdateReservation": "POST /v1/reservations/{id}",
    "FinishReservation": "DELETE /v1/reservations/{id}",
}


def call(port: int, name: str, case: Case) -> grpc.StatusCode:
    """Make a call with an empty message, and return its status."""
    metadata = [pair for pair in case.headers.items() if pair[0] != "host"]
    options = [("grpc.default_authority", case.headers.get("host", OWN))]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        method = channel.unary_unary(name, bytes, bytes)
        try:
            method(b"", metadata=metadata, timeout=DEADLINE)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("anonymous", ["none", "read"])
async def test_calls_are_for_the_callers_of_their_queries(anonymous: str, caplog: pytest.LogCaptureFixture) -> None:
    """A refused call is logged as the query that it is equivalent to. Only `Check` of the health service needs no token."""
    caplog.set_level(logging.INFO)
    endpoints = {f"{endpoint.method} {endpoint.path}": endpoint for endpoint in ENDPOINTS}
    codes = {401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED}
    codes[421] = grpc.StatusCode.PERMISSION_DENIED
    async with run_service(anonymous) as (_, port):
        for case in CASES.values():
            for name, query in CALLS.items():
                code, refusal = await asyncio.to_thread(call, port, f"/kvevents.v1.Query/{name}", case), None
                refusal, lines = refusal_of(endpoints[query], case, anonymous), read_lines(caplog)
                if refusal is None:
                    assert (code in codes.values(), lines) == (False, [])
                else:
                    start = f"refused {query} by {case.name} client=127.0.0.1:"
                    assert (code, lines) == (codes[refusal.status], [start + refusal.detail])
            assert await asyncio.to_thread(call, port, "/grpc.health.v1.Health/Check", case) is grpc.StatusCode.OK
