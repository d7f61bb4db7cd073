"""The control plane's part of the HTTP server: it handles each request that the data plane forwards by the table of endpoints.

It uses no framework: dispatch is a dictionary lookup, and roles, limits and errors are a few lines here for all endpoints.

`OriginPolicy` refuses cross-site requests and DNS rebinding. A web page can make the browser of its visitor send requests to
any address that the machine reaches, loopback included. The browser sends the page's origin in `Origin` and `Sec-Fetch-Site`,
which scripts cannot change, so the service refuses requests of other origins. With DNS rebinding the host name of the page
resolves to the service, and both headers say "same origin", but `Host` then has the name of the page. So `Host` must be an
address or a configured name as long as callers without a token have any role. If every request needs a token, `Host` may be
anything, because a browser does not add a bearer token by itself.

Requests have OpenTelemetry spans if an SDK is configured. The service depends on OpenTelemetry's API alone, and uses it only if
it is installed. It looks for an SDK once, when the application is built, so the SDK must be configured before, as
`opentelemetry-instrument kvevents serve` does. Without one, tracing costs nothing. A span has the model and the numbers of
tokens of a lookup. It never has token ids, hashes or the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from contextlib import AbstractContextManager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from kvevents.service.access import Caller, Client, HostPatterns, Role, address_of, host_of, is_loopback
from kvevents.service.errors import NotFoundError, ServiceError, TooMuchError, UnauthorizedError, UnavailableError
from kvevents.service.http.messages import RAW, AnyResponse, Headers, HttpRequest, Response, StreamingResponse, problem
from kvevents.service.http.routes import ROUTES, Route, item_of, match_path
from kvevents.service.scope_fields import scope_parameters
from kvevents.service.service import Service
from kvevents_native import _native

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)
ADMITTED: Final = Response(status=204)
"""Response to the headers of a request whose body the data plane may receive now."""


class _Sending(NamedTuple):
    """A response in pieces that is being sent."""

    stream: _native.ResponseStream
    has_room: asyncio.Event
    task: asyncio.Task[Any] | None


class App:
    """Handles the requests that the data plane forwards, one task each. Only the event loop may use it.

    A request with a body arrives twice. The first time its body is only announced. The application responds with `ADMITTED`
    if it accepts the body, and otherwise with the error for the client.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        host, names = service.settings.host, service.settings.allowed_hosts
        self._origins = OriginPolicy(host, names, checks_host=service.access.has_anonymous)
        self._tracer = find_tracer()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open_streams: dict[int, _Sending] = {}
        """The answers that are being sent in parts, by the number of their stream."""

    @property
    def has_spans(self) -> bool:
        """Whether requests have OpenTelemetry spans."""
        return self._tracer is not None

    def handle(self, request: _native.Request) -> None:
        """Begin to handle a request."""
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __call__(self, item: _native.Request | int) -> None:
        """Begin to handle a request, or continue the response in pieces with this number."""
        if not isinstance(item, int):
            self.handle(item)
        elif (response := self._open_streams.get(item)) is not None:
            if response.stream.is_gone and response.task is not None:
                response.task.cancel()
            response.has_room.set()

    async def stop(self, seconds: float) -> None:
        """Wait for the requests in progress, and after some time cancel them."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, request: _native.Request) -> None:
        has_body = request.method != "HEAD"
        try:
            response = await self._respond_with_span(request)
        except asyncio.CancelledError:  # only when the service stops
            response = problem(UnavailableError("the service stopped before the request was complete", "ending", "retry"))
        if isinstance(response, Response):
            headers = [*response.headers]
            if response.status != HTTPStatus.NOT_MODIFIED:  # which has no body, and says nothing about one
                headers += [(b"content-type", response.kind), (b"content-length", b"%d" % len(response.body))]
            request.respond(response.status, headers, response.body if has_body else b"")
            return
        try:
            with suppress(asyncio.CancelledError):  # the client has left, or the service stops
                await self._send_pieces(request, response, has_body=has_body)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
        finally:
            response.release()

    async def _send_pieces(self, request: _native.Request, response: StreamingResponse, *, has_body: bool) -> None:
        headers = [(b"content-type", response.kind), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        if not has_body:
            request.respond(200, headers, b"")
            return
        stream = request.stream(200, headers)
        progress = self._open_streams[stream.number] = _Sending(stream, asyncio.Event(), asyncio.current_task())
        try:
            async for piece in response.pieces:
                while not stream.send(piece) and not stream.is_gone:
                    progress.has_room.clear()
                    await progress.has_room.wait()
            stream.finish()
        finally:
            stream.close()
            del self._open_streams[stream.number]
            await response.pieces.aclose()  # type: ignore[attr-defined]  # it is a generator

    async def _respond_with_span(self, native: _native.Request) -> AnyResponse:
        path = unquote(native.path)
        if self._tracer is None or path in _UNTRACED:
            return await self._respond(native, path)
        response = None
        if native.announced is not None:
            response = await self._respond(native, path)
            if response is ADMITTED:  # the whole request follows, and has the span
                return response
        with start_span(self._tracer, native.method, path, native.headers) as span:
            response = response or await self._respond(native, path, span)
            finish_span(span, response)
            return response

    async def _respond(self, native: _native.Request, path: str, span: Span | None = None) -> AnyResponse:
        methods = ROUTES.get(match_path(path) or "")
        if methods is None:
            return problem(NotFoundError(f"no endpoint {path}", "no-such-path", "see /openapi.json for all endpoints"))
        endpoint = methods.get("GET" if native.method == "HEAD" else native.method)
        if endpoint is None:
            hint = f"use {' or '.join(sorted(methods))}"
            error = ServiceError(f"{path} does not support {native.method}", "method-not-allowed", hint, status=405)
            allowed_methods = sorted(methods) + (["HEAD"] if "GET" in methods else [])
            return problem(error, ((b"allow", ", ".join(allowed_methods).encode()),))
        try:
            return await self._admit(endpoint, native, path, span)
        except ServiceError as error:
            return problem(error, ((b"www-authenticate", b"Bearer"),) if error.code == HTTPStatus.UNAUTHORIZED else ())
        except Exception:
            log.exception("%s %s failed", endpoint.method, endpoint.path)
            hint = "see the log of the service, and report the error"
            return problem(ServiceError("internal error", "internal", hint, status=500))

    async def _admit(self, endpoint: Route, native: _native.Request, path: str, span: Span | None) -> AnyResponse:
        """Check the caller, handle the request if its body is here, and log it if it is refused and would change something."""
        headers = Headers(native.headers)
        caller = self.service.access.caller(headers.authorization)
        try:
            self._authorize(endpoint, headers, caller)
            if native.announced is not None:
                limit = self.service.settings.limits.max_body_bytes
                if native.announced.isdigit() and int(native.announced) > limit:
                    hint = "send less, or raise limits.max_body_bytes"
                    raise TooMuchError(f"the body has more than {limit} bytes", "too-large", hint)
                return ADMITTED
            request = HttpRequest(
                method=native.method,
                path=path,
                query=native.query,
                headers=headers,
                body=native.body,
                decoders=endpoint.decoders,
                limits=self.service.settings.limits,
                client=Client(caller.name, native.peer),
                item=item_of(endpoint.path, path),
            )
            _read_parameters(endpoint, request)
            response = await self._handle(endpoint, request)
        except ServiceError as error:
            if endpoint.role is Role.REGISTER or isinstance(error, UnauthorizedError):
                name = f"{endpoint.method} {endpoint.path}"
                self.service.audit.log_refusal(name, caller=caller.name, peer=native.peer, reason=error.sentence)
            raise
        if span is not None:
            span.set_attributes(request.span_attributes)
        return response

    def _authorize(self, endpoint: Route, headers: Headers, caller: Caller) -> None:
        if not endpoint.probe:
            self._origins.check(headers, is_read=endpoint.method == "GET")
        if endpoint.role is None or caller.role >= endpoint.role:
            return
        if caller.role is Role.NONE or not headers.authorization:
            problem = "unknown token" if headers.authorization else "a token is required"
            raise UnauthorizedError(problem, "unauthorized", "send `Authorization: Bearer TOKEN`")
        hint = f"use a token with role {endpoint.role.name.lower()}"
        raise UnauthorizedError("this token does not have the required role", "forbidden", hint, status=403)

    async def _handle(self, endpoint: Route, request: HttpRequest) -> AnyResponse:
        try:
            if not endpoint.pool:
                response = endpoint.handler(self.service, request)
            else:
                response = await self.service.pools[endpoint.pool].run(endpoint.handler, self.service, request)
            return await response if isinstance(response, Awaitable) else response
        finally:
            if request.ignored_fields:
                self.service.ignored_fields[endpoint.path] += len(request.ignored_fields)


def _read_parameters(endpoint: Route, request: HttpRequest) -> None:
    """Set the parameters of the query string. Raises `RefusedError` for unknown ones, except at public endpoints."""
    if not request.query or endpoint.role is None:
        return
    has_body = endpoint.takes is not None and not (endpoint.raw and request.headers.kind == RAW)
    names = () if has_body else [parameter["name"] for parameter in endpoint.parameters if parameter["in"] == "query"]
    request.arguments = scope_parameters(request.parameters, names, beside=" beside a body of this type" if has_body else "")


# --- the origins of requests

MAX_SHOWN: Final = 80
"""Maximum number of characters of a header that an error quotes."""
_OWN_SITE: Final = frozenset({None, b"same-origin", b"none"})
"""Values of `Sec-Fetch-Site` in requests of the service's page, of the user, and of other programs than browsers."""


class OriginPolicy:
    """Refuses requests that a web page of another origin makes a browser send.

    The service listens at `host`, and clients reach it by `names`. `checks_host` says whether `Host` is checked.
    """

    def __init__(self, host: str, names: Sequence[str], *, checks_host: bool) -> None:
        self._names: Final = HostPatterns(names, "allowed_hosts")
        self._host: Final = host.lower()
        self._checks_host: Final = checks_host
        self._is_loopback: Final = is_loopback(host)

    def check(self, headers: Headers, *, is_read: bool) -> None:
        """Raise `UnauthorizedError` for a request of another origin, or with an unknown host name.

        `is_read` says that the request changes nothing, so a link on another site may open it in a browser.
        """
        if self._checks_host and headers.host is not None and not self._is_own_host(host_of(_text(headers.host))):
            hint = "use an address of this service, or add the name to allowed_hosts"
            raise UnauthorizedError(f"unknown host {_text(headers.host)[:MAX_SHOWN]!r}", "unknown-host", hint, status=421)
        if headers.origin is not None and not self._is_own_origin(headers.origin, headers.host):
            hint = "a browser may send requests only from the service's own page; see allowed_hosts"
            raise UnauthorizedError(f"foreign origin {_text(headers.origin)[:MAX_SHOWN]!r}", "foreign-origin", hint, status=403)
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


# --- spans

MAX_PATH: Final = 256
"""Maximum number of characters of a path in a span, since clients choose the path."""
_OTHER_METHOD: Final = "_OTHER"
"""Name of unknown methods in OpenTelemetry's conventions."""
_KNOWN_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_UNTRACED: Final = frozenset(path for path, routes in ROUTES.items() if any(route.tag == "probes" for route in routes.values()))
"""Probes, scrapes and the page, which come every few seconds."""


def find_tracer() -> Tracer | None:
    """Return the tracer of the configured SDK; None without an SDK."""
    try:
        from opentelemetry import trace  # noqa: PLC0415 - it might not be installed
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    return provider.get_tracer("kvevents.service")


def start_span(tracer: Tracer, method: str, path: str, headers: Sequence[tuple[str, bytes]]) -> AbstractContextManager[Span]:
    """Return the span of a request, a child of the span that its headers name, by the conventions for HTTP servers."""
    from opentelemetry.propagate import extract  # noqa: PLC0415 - it might not be installed
    from opentelemetry.trace import SpanKind  # noqa: PLC0415

    known_method, route = method if method in _KNOWN_METHODS else _OTHER_METHOD, match_path(path)
    attributes = {"http.request.method": known_method, "url.path": path[:MAX_PATH]}
    name = "HTTP" if known_method == _OTHER_METHOD else known_method
    if route is not None:
        name, attributes["http.route"] = f"{known_method} {route}", route
    context = extract({name: value.decode("latin-1") for name, value in headers})
    return tracer.start_as_current_span(name, context, kind=SpanKind.SERVER, attributes=attributes)


def finish_span(span: Span, response: AnyResponse) -> None:
    """Note the status of a response."""
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - it might not be installed

    status = response.status if isinstance(response, Response) else HTTPStatus.OK
    span.set_attribute("http.response.status_code", int(status))
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.set_status(Status(StatusCode.ERROR))
