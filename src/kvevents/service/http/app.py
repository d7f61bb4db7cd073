"""The ASGI application: one request, from bytes to bytes, by the table of endpoints.

There is no framework between the server and the table: the hot path is a dictionary lookup, and what a framework would do
besides (roles, limits, errors, metrics) is a few lines here, each of them once for all endpoints.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from kvevents.service.access import Caller, Role
from kvevents.service.errors import ServiceError, TooMuchError, UnauthorizedError, UnavailableError
from kvevents.service.http.connections import CLOSE
from kvevents.service.http.messages import Headers, Request, Response, Streamed, problem
from kvevents.service.http.origins import OriginPolicy
from kvevents.service.http.routing import TABLE, Endpoint
from kvevents.service.http.workers import MATCHING
from kvevents.service.spellings import scope_parameters
from kvevents.service.tracing import traced

if TYPE_CHECKING:
    from kvevents.service.service import Service

Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]

log = logging.getLogger(__name__)
_NOT_FOUND: Final = "see /openapi.json for what there is"
_HEADERS: Final[dict[int, tuple[tuple[bytes, bytes], ...]]] = {
    401: ((b"www-authenticate", b"Bearer"),),
}


class GoneError(Exception):
    """The client has left before its request was complete."""


class App:
    """What the server calls."""

    def __init__(self, service: Service) -> None:
        self.service, self._answer = traced(service, self._http)
        self._origins = OriginPolicy.of(service.config, service.access)
        self.traces = self.service is not service
        """Whether requests have spans."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            with suppress(asyncio.CancelledError):  # the server ends, and has told so
                await self._answer(scope, receive, send)
        else:  # no websockets here
            await send({"type": "websocket.close"})

    async def probes_only(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3, for a connection above the limit: probes are answered, everything else is 503."""
        methods = TABLE.get(scope["path"], {})
        if any(endpoint.probe for endpoint in methods.values()):
            await self(scope, receive, send)
            return
        limits = self.service.config.limits
        sentence = f"{limits.max_clients} clients are connected, and each has a request in progress"
        error = UnavailableError(sentence, "too-many-clients", "ask again in a second, or raise limits.max_clients")
        self.service.connections.refusals[error.reason] += 1
        await _send(problem(error, (CLOSE, (b"retry-after", b"1"))), send, body=scope["method"] != "HEAD")
        if methods:
            self.service.metrics.request(scope["path"], error.code, 0.0)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = perf_counter()
        method, path = scope["method"], scope["path"]
        methods = TABLE.get(path)
        endpoint = None if methods is None else methods.get("GET" if method == "HEAD" else method)
        try:
            response = await self._respond(endpoint, methods, scope, receive)
        except GoneError:
            return
        except asyncio.CancelledError:  # only then does the server cancel anything
            response = problem(UnavailableError("the service ends, and this request was not complete", "ending", "ask again"))
        if isinstance(response, Streamed):
            try:
                await _stream(response, receive, send, body=method != "HEAD")
            finally:
                response.release()
        else:
            await _send(response, send, body=method != "HEAD")
        if endpoint is not None:
            status = response.status if isinstance(response, Response) else 200
            self.service.metrics.request(path, status, perf_counter() - began)
        self.service.lookups.count()

    async def _respond(
        self, endpoint: Endpoint | None, methods: dict[str, Endpoint] | None, scope: Scope, receive: Receive
    ) -> Response | Streamed:
        path = scope["path"]
        if methods is None:
            return _before_body(problem(ServiceError(f"there is no {path}", "no-such-path", _NOT_FOUND, status=404)), scope)
        if endpoint is None:
            return _before_body(_not_allowed(scope["method"], path, methods), scope)
        body: bytes | None = None
        try:
            headers, peer = Headers(scope["headers"]), _peer(scope)
            caller = self.service.access.caller(headers.authorization)
            try:
                self._authorize(endpoint, headers, caller)
            except ServiceError as error:
                self.service.audit.refused(
                    f"{endpoint.method} {endpoint.path}", caller=caller.name, peer=peer, reason=error.sentence
                )
                raise
            if not endpoint.probe:  # an answer that says whether the process lives waits for nothing
                body = await self._body(receive, scope["headers"])
            given = body or b""
            request = Request(scope["method"], path, scope["query_string"], headers, given, caller=caller.name, peer=peer)
            if endpoint.method == "GET" and endpoint.role is not None:
                request.wanted = scope_parameters(request.parameters, [each.name for each in endpoint.parameters])
            response = await self._handle(endpoint, request)
            return _before_body(response, scope) if body is None and isinstance(response, Response) else response
        except GoneError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            response = _refusal(endpoint, error)
            return _before_body(response, scope) if body is None else response

    def answer(self, endpoint: Endpoint, request: Request) -> Response | Awaitable[Response]:
        """Answer an admitted request to a quick endpoint, whose body is complete: at once, unless other replicas are asked.

        A large body is handled in a thread.
        """
        if len(request.body) > endpoint.inline_bytes:
            return _finished(endpoint, cast("Awaitable[Response]", self._handle(endpoint, request)))
        try:
            response = endpoint.handler(self.service, request)
        except Exception as error:  # noqa: BLE001 - as above
            return _refusal(endpoint, error)
        return response if isinstance(response, Response) else _finished(endpoint, cast("Awaitable[Response]", response))

    def admits(self, endpoint: Endpoint, headers: Headers) -> bool:
        """Whether a request with these headers may be sent at all, before its body is read."""
        try:
            self._authorize(endpoint, headers, self.service.access.caller(headers.authorization))
        except ServiceError:
            return False
        return True

    def _authorize(self, endpoint: Endpoint, headers: Headers, caller: Caller) -> None:
        if not endpoint.probe:
            self._origins.check(headers, is_read=endpoint.method == "GET")
        if endpoint.role is None or caller.role >= endpoint.role:
            return
        if caller.role is Role.NONE or not headers.authorization:
            what = "unknown token" if headers.authorization else "a token is required"
            raise UnauthorizedError(what, "unauthorized", "send `Authorization: Bearer TOKEN`")
        hint = f"it takes the role {endpoint.role.name.lower()}"
        raise UnauthorizedError("this token may not do this", "forbidden", hint, status=403)

    async def _body(self, receive: Receive, headers: list[tuple[bytes, bytes]]) -> bytes:
        limit = self.service.config.limits.max_body_bytes
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise _too_large(limit)
        return await _complete(receive, limit)  # the connection has a deadline for it

    async def _handle(self, endpoint: Endpoint, request: Request) -> Response | Streamed:
        worker = endpoint.worker
        if endpoint.quick and len(request.body) > endpoint.inline_bytes:
            worker = MATCHING
        if worker:
            result = await self.service.workers[worker].run(endpoint.handler, self.service, request)
        else:
            result = endpoint.handler(self.service, request)
        return result if isinstance(result, (Response, Streamed)) else await result


async def _finished(endpoint: Endpoint, response: Awaitable[Response]) -> Response:
    try:
        return await response
    except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
        return _refusal(endpoint, error)


def _refusal(endpoint: Endpoint, error: Exception) -> Response:
    """The answer to a request that raised an error; a `ServiceError` is the client's, any other one is logged as ours."""
    if isinstance(error, ServiceError):
        return problem(error, _HEADERS.get(error.code, ()))
    log.error("%s %s failed", endpoint.method, endpoint.path, exc_info=error)
    return problem(ServiceError("the service has failed here", "internal", "see its log, and report it", status=500))


def _before_body(response: Response, scope: Scope) -> Response:
    """An answer that does not wait for the request's body: the connection ends behind it, unless there is none."""
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if length.strip(b"0") or any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        response.headers += (CLOSE,)
    return response


def _peer(scope: Scope) -> str:
    """The client's address and port for the log."""
    client = scope.get("client")
    if client is None:
        return "an unknown address"
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _complete(receive: Receive, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return b"".join([*pieces, piece]) if pieces else piece
        pieces.append(piece)


def _too_large(limit: int) -> TooMuchError:
    return TooMuchError(f"the body has more than {limit} bytes", "too-large", "raise limits.max_body_bytes, or send less")


def _not_allowed(method: str, path: str, methods: dict[str, Endpoint]) -> Response:
    allowed = sorted(methods) + (["HEAD"] if "GET" in methods else [])
    error = ServiceError(f"{path} has no {method}", "method-not-allowed", f"use {' or '.join(sorted(methods))}", status=405)
    return problem(error, ((b"allow", ", ".join(allowed).encode()),))


async def _send(response: Response, send: Send, *, body: bool) -> None:
    headers = [(b"content-type", response.kind), (b"content-length", b"%d" % len(response.body)), *response.headers]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body if body else b""})


async def _stream(response: Streamed, receive: Receive, send: Send, *, body: bool) -> None:
    headers = [(b"content-type", response.kind), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if not body:
        await send({"type": "http.response.body", "body": b""})
        return
    left = asyncio.ensure_future(_left(receive))
    pieces = aiter(response.pieces)
    following = asyncio.ensure_future(anext(pieces, None))
    try:
        while True:
            done, _ = await asyncio.wait({left, following}, return_when=asyncio.FIRST_COMPLETED)
            if left in done:
                return
            if (piece := following.result()) is None:
                await send({"type": "http.response.body", "body": b""})
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            following = asyncio.ensure_future(anext(pieces, None))
    finally:
        for task in (left, following):
            task.cancel()
        await asyncio.gather(left, following, return_exceptions=True)
        await response.pieces.aclose()  # type: ignore[attr-defined]  # it is a generator


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
