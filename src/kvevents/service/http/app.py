"""The ASGI application of the control plane: it handles each request by the table of endpoints.

It uses no framework: dispatch is a dictionary lookup, and roles, limits, errors and metrics are a few lines here for all
endpoints.

`OriginPolicy` refuses cross-site requests and DNS rebinding. A web page can make the browser of its visitor send requests to
any address that the machine reaches, loopback included. The browser sends the page's origin in `Origin` and `Sec-Fetch-Site`,
which scripts cannot change, so the service refuses requests of other origins. With DNS rebinding the host name of the page
resolves to the service, and both headers say "same origin", but `Host` then has the name of the page. So `Host` must be an
address or a configured name as long as callers without a token have any role. If every request needs a token, `Host` may be
anything, because a browser does not add a bearer token by itself.

Requests have OpenTelemetry spans if an SDK is configured. The service depends only on the API, and only if it is installed. It
looks for an SDK once, when the application is built, so the SDK must be configured before, as
`opentelemetry-instrument kvevents serve` does. Without one, tracing costs nothing. A span has the model and the numbers of
tokens of a lookup. It never has token ids, hashes or the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from http import HTTPStatus
from inspect import iscoroutinefunction
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from kvevents.service.access import Access, Caller, HostPatterns, Role, address_of, host_of, is_loopback
from kvevents.service.errors import ServiceError, TooMuchError, UnauthorizedError, UnavailableError
from kvevents.service.fleet.member import MemberMatch
from kvevents.service.fleet.registration import Scope
from kvevents.service.http.messages import RAW, Headers, HttpRequest, Response, StreamingResponse, problem
from kvevents.service.http.routes import ROUTES, AsyncHandler, Handler, Route
from kvevents.service.http.thread_pools import MATCHING
from kvevents.service.scope_fields import scope_parameters
from kvevents.service.service import Service
from kvevents.service.settings import ServiceSettings

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


AsgiScope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
AsgiSend: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
HttpApp: TypeAlias = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
"""An ASGI application for HTTP requests."""

log = logging.getLogger(__name__)
ADMITTED: Final = Response(status=204)
"""Response to the headers of a request whose body the data plane may receive now."""
_HEADERS: Final[dict[int, tuple[tuple[bytes, bytes], ...]]] = {
    401: ((b"www-authenticate", b"Bearer"),),
}


class GoneError(Exception):
    """The client disconnected before its request was complete."""


class App:
    """Handles the requests that the data plane forwards.

    A request with a body arrives twice. The first time it has only its headers, among them `kvevents-announced`. The
    application responds with `ADMITTED` if it accepts the body, and otherwise with the error for the client.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._origins = OriginPolicy.of(service.settings, service.access)
        tracer = find_tracer()
        self.has_spans = tracer is not None
        """Whether requests have OpenTelemetry spans."""
        self._handle_http: HttpApp = self._http
        if tracer is not None:
            self._handle_http = with_spans(tracer, self._http)
            service.lookups.on_lookup = record_lookup

    async def __call__(self, scope: AsgiScope, receive: Receive, send: AsgiSend) -> None:
        """Handle an ASGI 3 connection."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            with suppress(asyncio.CancelledError):  # the server stops, and the client has its response
                await self._handle_http(scope, receive, send)
        else:  # the service has no websockets
            await send({"type": "websocket.close"})

    async def _http(self, scope: AsgiScope, receive: Receive, send: AsgiSend) -> None:
        began = perf_counter()
        method, path = scope["method"], scope["path"]
        methods = ROUTES.get(path)
        endpoint = None if methods is None else methods.get("GET" if method == "HEAD" else method)
        try:
            response = await self._respond(endpoint, methods, scope, receive)
        except GoneError:
            return
        except asyncio.CancelledError:  # the server cancels requests only when it stops
            error = UnavailableError("the service stopped before the request was complete", "ending", "retry")
            response = problem(error)
        if isinstance(response, StreamingResponse):
            try:
                await _stream(response, receive, send, body=method != "HEAD")
            finally:
                response.release()
        else:
            await _send(response, send, body=method != "HEAD")
        if endpoint is not None and response is not ADMITTED:
            status = response.status if isinstance(response, Response) else 200
            self.service.metrics.record_request(path, status, perf_counter() - began)

    async def _respond(
        self, endpoint: Route | None, methods: dict[str, Route] | None, scope: AsgiScope, receive: Receive
    ) -> Response | StreamingResponse:
        path = scope["path"]
        if methods is None:
            return problem(
                ServiceError(f"no endpoint {path}", "no-such-path", "see /openapi.json for all endpoints", status=404)
            )
        if endpoint is None:
            return _not_allowed(scope["method"], path, methods)
        try:
            headers = Headers(scope["headers"])
            caller = self.service.access.caller(headers.authorization)
            try:
                self._authorize(endpoint, headers, caller)
            except ServiceError as error:
                self.service.audit.log_refusal(
                    f"{endpoint.method} {endpoint.path}", caller=caller.name, peer=headers.peer, reason=error.sentence
                )
                raise
            limit = self.service.settings.limits.max_body_bytes
            if headers.announced is not None:
                _check_announced(headers.announced, limit)
                return ADMITTED
            body = await _receive_body(receive, limit)
            request = HttpRequest(
                scope["method"], path, scope["query_string"], headers, body, caller=caller.name, peer=headers.peer
            )
            _read_parameters(endpoint, request)
            return await self._handle(endpoint, request)
        except GoneError:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets a response to every error
            return _error_response(endpoint, error)

    def _authorize(self, endpoint: Route, headers: Headers, caller: Caller) -> None:
        if not endpoint.probe:
            self._origins.check(headers, is_read=endpoint.method == "GET")
        if endpoint.role is None or caller.role >= endpoint.role:
            return
        if caller.role is Role.NONE or not headers.authorization:
            what = "unknown token" if headers.authorization else "a token is required"
            raise UnauthorizedError(what, "unauthorized", "send `Authorization: Bearer TOKEN`")
        hint = f"use a token with role {endpoint.role.name.lower()}"
        raise UnauthorizedError("this token does not have the required role", "forbidden", hint, status=403)

    async def _handle(self, endpoint: Route, request: HttpRequest) -> Response | StreamingResponse:
        pool = endpoint.pool
        if endpoint.inline_bytes is not None and len(request.body) > endpoint.inline_bytes:
            pool = MATCHING
        if pool:
            request.run = self.service.pools[pool].run
        if iscoroutinefunction(endpoint.handler):
            return await cast("AsyncHandler", endpoint.handler)(self.service, request)
        return await request.run(cast("Handler", endpoint.handler), self.service, request)


def _read_parameters(endpoint: Route, request: HttpRequest) -> None:
    """Set the parameters of the query string. Raises `RefusedError` for unknown ones, except at public endpoints."""
    if not request.query or endpoint.role is None:
        return
    has_body = endpoint.takes is not None and not (endpoint.raw and request.kind == RAW)
    names = () if has_body else [each.name for each in endpoint.parameters]
    request.wanted = scope_parameters(request.parameters, names, beside=" beside a body of this type" if has_body else "")


def _error_response(endpoint: Route, error: Exception) -> Response:
    """Return the response for an error: a `ServiceError` as it is; any other error is logged and returned as status 500."""
    if isinstance(error, ServiceError):
        return problem(error, _HEADERS.get(error.code, ()))
    log.error("%s %s failed", endpoint.method, endpoint.path, exc_info=error)
    return problem(ServiceError("internal error", "internal", "see the log of the service, and report the error", status=500))


async def _receive_body(receive: Receive, limit: int) -> bytes:
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


def _check_announced(length: bytes, limit: int) -> None:
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> TooMuchError:
    return TooMuchError(f"the body has more than {limit} bytes", "too-large", "send less, or raise limits.max_body_bytes")


def _not_allowed(method: str, path: str, methods: dict[str, Route]) -> Response:
    allowed = sorted(methods) + (["HEAD"] if "GET" in methods else [])
    error = ServiceError(
        f"{path} does not support {method}", "method-not-allowed", f"use {' or '.join(sorted(methods))}", status=405
    )
    return problem(error, ((b"allow", ", ".join(allowed).encode()),))


async def _send(response: Response, send: AsgiSend, *, body: bool) -> None:
    headers = [(b"content-type", response.kind), (b"content-length", b"%d" % len(response.body)), *response.headers]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body if body else b""})


async def _stream(response: StreamingResponse, receive: Receive, send: AsgiSend, *, body: bool) -> None:
    headers = [(b"content-type", response.kind), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if not body:
        await send({"type": "http.response.body", "body": b""})
        return
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    pieces = aiter(response.pieces)
    following = asyncio.ensure_future(anext(pieces, None))
    try:
        while True:
            done, _ = await asyncio.wait({disconnected, following}, return_when=asyncio.FIRST_COMPLETED)
            if disconnected in done:
                return
            if (piece := following.result()) is None:
                await send({"type": "http.response.body", "body": b""})
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            following = asyncio.ensure_future(anext(pieces, None))
    finally:
        for task in (disconnected, following):
            task.cancel()
        await asyncio.gather(disconnected, following, return_exceptions=True)
        await response.pieces.aclose()  # type: ignore[attr-defined]  # it is a generator


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: AsgiSend) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


# --- the origins of requests

MAX_SHOWN: Final = 80
"""Characters of a header that an error quotes."""
_OWN_SITE: Final = frozenset({None, b"same-origin", b"none"})
"""Values of `Sec-Fetch-Site` in requests of the service's page, of the user, and of other programs than browsers."""


class OriginPolicy:
    """Refuses requests that a web page of another origin makes a browser send.

    The service listens at `host`, and clients reach it by `names`. `checks_host` says whether `Host` is checked.
    """

    def __init__(self, host: str, names: Sequence[str], *, checks_host: bool) -> None:
        self.names: Final = tuple(names)
        self._names: Final = HostPatterns(names, "allowed_hosts")
        self._host: Final = host.lower()
        self.checks_host: Final = checks_host
        self._is_loopback: Final = is_loopback(host)

    @classmethod
    def of(cls, config: ServiceSettings, access: Access) -> OriginPolicy:
        """Return the policy of a service with these settings."""
        return cls(config.host, config.allowed_hosts, checks_host=access.anonymous.role is not Role.NONE)

    def check(self, headers: Headers, *, is_read: bool) -> None:
        """Raise `UnauthorizedError` for a request of another origin, and `ServiceError` (421) for an unknown host name.

        `is_read` says that the request changes nothing, so a link on another site may open it in a browser.
        """
        if self.checks_host and headers.host is not None and not self._is_own_host(host_of(_text(headers.host))):
            hint = "use an address of this service, or add the name to allowed_hosts"
            raise ServiceError(f"unknown host {_quoted_text(headers.host)!r}", "unknown-host", hint, status=421)
        if headers.origin is not None and not self._is_own_origin(headers.origin, headers.host):
            hint = "a browser may send requests only from the service's own page; see allowed_hosts"
            raise UnauthorizedError(f"foreign origin {_quoted_text(headers.origin)!r}", "foreign-origin", hint, status=403)
        if headers.fetch_site not in _OWN_SITE and not (is_read and headers.fetch_mode == b"navigate"):
            hint = "a browser may send requests only from the service's own page"
            raise UnauthorizedError("a page of another origin sent this request", "foreign-origin", hint, status=403)

    def _is_own_origin(self, origin: bytes, host: bytes | None) -> bool:
        scheme, separator, place = _text(origin).lower().partition("://")
        if not separator or scheme not in {"http", "https"}:
            return False  # also `null`, the origin of sandboxed frames and files
        return (host is not None and place == _text(host).lower()) or host_of(place) in self._names

    def _is_own_host(self, host: str) -> bool:
        if host in (self._host, "localhost") or host.endswith(".localhost") or host in self._names:
            return True
        address = address_of(host)
        return address is not None and (address.is_loopback or not self._is_loopback)


def _text(value: bytes) -> str:
    return value.decode("latin-1").strip(" \t")


def _quoted_text(value: bytes) -> str:
    return _text(value)[:MAX_SHOWN]


# --- spans

TRACER_NAME: Final = "kvevents.service"
MAX_PATH: Final = 256
"""Characters of a path in a span, since clients choose the path."""
_OTHER_METHOD: Final = "_OTHER"
"""Name of unknown methods in OpenTelemetry's conventions."""
_KNOWN_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_UNTRACED: Final = frozenset(path for path, methods in ROUTES.items() if any(each.tag == "probes" for each in methods.values()))
"""Probes, scrapes and the page, which come every few seconds."""


class _LookupSummary:
    """The sum of the lookups of one request, of which `/v1/match_many` has several."""

    __slots__ = ("longest", "model", "tokens")

    def __init__(self) -> None:
        self.model: str | None = None
        self.tokens = 0
        self.longest = 0

    def attributes(self) -> dict[str, str | int]:
        """Return the attributes of the span; empty without a lookup."""
        if self.model is None:
            return {}
        found: dict[str, str | int] = {"kvevents.model": self.model, "kvevents.longest_matched": self.longest}
        if self.tokens:  # unknown for lookups by hash
            found["kvevents.prompt_tokens"] = self.tokens
        return found


_current_lookups: ContextVar[_LookupSummary | None] = ContextVar("kvevents-lookup-summary", default=None)
"""Summary of the current request if it has a span; threads that work for the request inherit it."""


def record_lookup(scope: Scope, tokens: int, found: list[MemberMatch]) -> None:
    """Add a lookup to the summary of the current request; `Lookups.on_lookup` calls this if requests have spans."""
    if (summary := _current_lookups.get()) is not None:
        summary.model = scope.model
        summary.tokens += tokens
        summary.longest = max([summary.longest, *[row.tokens for row in found]])


def find_tracer() -> Tracer | None:
    """Return the tracer of the configured SDK; None without an SDK."""
    try:
        from opentelemetry import trace  # noqa: PLC0415 - it might not be installed
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    return provider.get_tracer(TRACER_NAME)


def with_spans(tracer: Tracer, http: HttpApp) -> HttpApp:
    """Return an application that makes a span for each request."""
    from opentelemetry.propagate import extract  # noqa: PLC0415 - as above
    from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415

    async def traced_http(scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope["path"]
        if path in _UNTRACED:
            return await http(scope, receive, send)
        handle = http
        if any(name == b"kvevents-announced" for name, _ in scope["headers"]):
            # The data plane sends the headers first. If they are accepted, the whole request follows and has the span.
            messages: list[dict[str, Any]] = []

            async def store(message: dict[str, Any]) -> None:
                messages.append(message)

            async def repeat(_scope: dict[str, Any], _receive: Any, send: Any) -> None:
                for message in messages:
                    await send(message)

            await http(scope, receive, store)
            if messages and messages[0].get("status") == HTTPStatus.NO_CONTENT:
                return await repeat(scope, receive, send)
            handle = repeat
        status = 0

        async def send_and_watch(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        summary = _LookupSummary()
        token = _current_lookups.set(summary)
        name, attributes = _name_and_attributes(scope["method"], path)
        context = extract({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
        try:
            with tracer.start_as_current_span(name, context, kind=SpanKind.SERVER, attributes=attributes) as span:
                try:
                    await handle(scope, receive, send_and_watch)
                finally:
                    span.set_attributes(summary.attributes())
                if status:  # 0 if the client disconnected
                    span.set_attribute("http.response.status_code", status)
                if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    span.set_status(Status(StatusCode.ERROR))
        finally:
            _current_lookups.reset(token)

    return traced_http


def _name_and_attributes(method: str, path: str) -> tuple[str, dict[str, str]]:
    """Return the name and the first attributes of a span, by OpenTelemetry's conventions for HTTP servers."""
    known = method if method in _KNOWN_METHODS else _OTHER_METHOD
    attributes = {"http.request.method": known, "url.path": path[:MAX_PATH]}
    if path not in ROUTES:
        return ("HTTP" if known == _OTHER_METHOD else known), attributes
    return f"{known} {path}", attributes | {"http.route": path}
