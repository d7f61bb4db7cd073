"""The control plane's part of the HTTP server: it handles requests that the data plane forwards, by the table of endpoints.

Dispatch is a dictionary lookup, and a few lines handle the errors of all endpoints, without a framework. The data plane has
already found the endpoint and the caller of a request, and has decided whether to refuse it (`native/server/src/policy.rs`).

Requests have OpenTelemetry spans if an SDK is configured. The service uses only OpenTelemetry's API, and only if that is
installed. The service looks for an SDK only when it creates the application. So the SDK must be configured before, as
`opentelemetry-instrument kvevents serve` does. Without an SDK, tracing costs nothing. A span has the model and the numbers of
tokens of a lookup. Spans never have token ids, hashes or the caller.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Mapping
from contextlib import AbstractContextManager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvevents.service.access import Client
from kvevents.service.errors import NotFoundError, ServiceError, UnavailableError
from kvevents.service.http.messages import RAW_TYPE, AnyResponse, Headers, HttpRequest, Response, StreamingResponse, problem
from kvevents.service.http.routes import ROUTES, Route, item_of
from kvevents.service.scope_fields import scope_parameters
from kvevents.service.service import Service
from kvevents_native import _native

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

log = logging.getLogger(__name__)


class _OpenStream(NamedTuple):
    """A response that is being sent in pieces."""

    stream: _native.ResponseStream
    has_room: asyncio.Event
    task: asyncio.Task[Any] | None


class App:
    """Handles the requests that the data plane forwards, each in a task of its own. Only the event loop may use the object."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._tracer = find_tracer()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open_streams: dict[int, _OpenStream] = {}
        """Maps the number of a stream to the response that is being sent in pieces."""

    @property
    def has_spans(self) -> bool:
        """Whether requests have OpenTelemetry spans."""
        return self._tracer is not None

    def start_task(self, request: _native.Request) -> None:
        """Begin to handle a request."""
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __call__(self, item: _native.Request | int) -> None:
        """Begin to handle a request, or continue the response in pieces whose number is `item`."""
        if not isinstance(item, int):
            self.start_task(item)
        elif (response := self._open_streams.get(item)) is not None:
            if response.stream.is_gone and response.task is not None:
                response.task.cancel()
            response.has_room.set()

    async def stop(self, seconds: float) -> None:
        """Wait for the requests in progress. After `seconds`, cancel the requests that are not complete."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, request: _native.Request) -> None:
        has_body = request.method != "HEAD"
        try:
            response = await self._respond_with_span(request)
        except asyncio.CancelledError:  # Only `stop` cancels a request that has no response yet.
            response = problem(UnavailableError("the service stopped before the request was complete", "ending", "retry"))
        if isinstance(response, Response):
            headers = [*response.headers]
            if response.status != HTTPStatus.NOT_MODIFIED:  # A response 304 has no body, and no headers about a body.
                headers += [(b"content-type", response.kind), (b"content-length", b"%d" % len(response.body))]
            request.respond(response.status, headers, response.body if has_body else b"")
            return
        try:
            with suppress(asyncio.CancelledError):  # The client has left, or the service stops.
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
        progress = self._open_streams[stream.number] = _OpenStream(stream, asyncio.Event(), asyncio.current_task())
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
        if self._tracer is None or native.endpoint[0] in _UNTRACED_PATHS:
            return await self._respond(native)
        with start_span(self._tracer, native) as span:
            response = await self._respond(native, span)
            finish_span(span, response)
            return response

    async def _respond(self, native: _native.Request, span: Span | None = None) -> AnyResponse:
        path, method = native.endpoint
        methods = ROUTES.get(path)
        if methods is None:
            hint = "see /openapi.json for all endpoints"
            return problem(NotFoundError(f"no endpoint {native.path}", "no-such-path", hint))
        endpoint = methods.get(method)
        if endpoint is None:
            hint = f"use {' or '.join(sorted(methods))}"
            error = ServiceError(f"{native.path} does not support {native.method}", "method-not-allowed", hint, status=405)
            allowed_methods = sorted(methods) + (["HEAD"] if "GET" in methods else [])
            return problem(error, ((b"allow", ", ".join(allowed_methods).encode()),))
        try:
            return await self._serve_audited(endpoint, native, span)
        except ServiceError as error:
            return problem(error, ((b"www-authenticate", b"Bearer"),) if error.code == HTTPStatus.UNAUTHORIZED else ())
        except Exception:
            log.exception("%s %s failed", endpoint.method, endpoint.path)
            hint = "see the log of the service, and report the error"
            return problem(ServiceError("internal error", "internal", hint, status=500))

    async def _serve_audited(self, endpoint: Route, native: _native.Request, span: Span | None) -> AnyResponse:
        """Handle a request. The audit log names refused requests, and failed requests to register engines."""
        headers, path, limits = Headers(native.headers), native.path, self.service.settings.limits
        try:
            if native.refusal is not None:
                raise _refusal_error(native.refusal, endpoint, headers, limits.max_body_bytes)
            request = HttpRequest(
                method=native.method,
                path=path,
                query=native.query,
                headers=headers,
                body=native.body,
                decoders=endpoint.decoders,
                limits=limits,
                client=Client(native.caller, native.peer),
                item=item_of(endpoint.path, path),
            )
            _read_parameters(endpoint, request)
            response = await self._run_handler(endpoint, request)
        except ServiceError as error:
            if endpoint.role == "register" or native.refusal not in {None, "too-large"}:
                name = f"{endpoint.method} {endpoint.path}"
                self.service.audit.log_refusal(name, caller=native.caller, peer=native.peer, reason=error.sentence)
            raise
        if span is not None:
            span.set_attributes(request.span_attributes)
        return response

    async def _run_handler(self, endpoint: Route, request: HttpRequest) -> AnyResponse:
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
    """Set `request.arguments` from the query string. Raises `RefusedError` for unknown names, except at public endpoints."""
    if not request.query or endpoint.role is None:
        return
    has_body = endpoint.body is not None and not (endpoint.accepts_raw and request.headers.kind == RAW_TYPE)
    names = () if has_body else [parameter["name"] for parameter in endpoint.parameters if parameter["in"] == "query"]
    request.arguments = scope_parameters(request.parameters, names, beside=" beside a body of this type" if has_body else "")


# --- refused requests

QUOTE_LENGTH: Final = 80
"""Maximum number of characters of a header that an error quotes."""
_BROWSER_HINT: Final = "a browser may send requests only from the service's own page"
_TOKEN_HINT: Final = "send `Authorization: Bearer TOKEN`"  # noqa: S105 - the text contains no token
_REFUSALS: Final[Mapping[str, tuple[int, str, str, str]]] = {
    # Keys: the reasons in `native/server/src/policy.rs`. Values: status, reason, sentence and hint.
    "unknown-host": (
        421,
        "unknown-host",
        "unknown host {host!r}",
        "use an address of this service, or add the name to allowed_hosts",
    ),
    "foreign-origin": (403, "foreign-origin", "foreign origin {origin!r}", f"{_BROWSER_HINT}; see allowed_hosts"),
    "foreign-page": (403, "foreign-origin", "a page of another origin sent this request", _BROWSER_HINT),
    "token-missing": (401, "unauthorized", "a token is required", _TOKEN_HINT),
    "token-unknown": (401, "unauthorized", "unknown token", _TOKEN_HINT),
    "forbidden": (403, "forbidden", "this token does not have the required role", "use a token with role {role}"),
    "too-large": (413, "too-large", "the body has more than {limit} bytes", "send less, or raise limits.max_body_bytes"),
}


def _refusal_error(refusal: str, endpoint: Route, headers: Headers, limit: int) -> ServiceError:
    """Return the error response for a request that the data plane refuses; `refusal` is a key of `_REFUSALS`."""
    status, reason, sentence, hint = _REFUSALS[refusal]
    fields = {"host": _quote(headers.host), "origin": _quote(headers.origin), "role": endpoint.role, "limit": limit}
    return ServiceError(sentence.format(**fields), reason, hint.format(**fields), status=status)


def _quote(value: bytes) -> str:
    return value.decode("latin-1").strip(" \t")[:QUOTE_LENGTH]


# --- spans

MAX_PATH_CHARACTERS: Final = 256
"""Maximum number of characters of a path in a span, since clients choose the path."""
_OTHER_METHOD: Final = "_OTHER"
"""Name that OpenTelemetry's conventions give to all unknown methods."""
_KNOWN_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_UNTRACED_PATHS: Final = {path for path, routes in ROUTES.items() if any(route.tag == "probes" for route in routes.values())}
"""Paths without spans: probes, scrapes and the page, which are requested every few seconds."""


def find_tracer() -> Tracer | None:
    """Return the tracer of the configured SDK; None if no SDK is configured."""
    if (trace := sys.modules.get("opentelemetry.trace")) is None:  # Absent if no SDK is configured.
        return None
    provider: TracerProvider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    return provider.get_tracer("kvevents.service")


def start_span(tracer: Tracer, request: _native.Request) -> AbstractContextManager[Span]:
    """Return a span by OpenTelemetry's conventions for HTTP servers. Its parent is the span in the request's headers."""
    from opentelemetry.propagate import extract  # noqa: PLC0415 - OpenTelemetry might not be installed
    from opentelemetry.trace import SpanKind  # noqa: PLC0415

    known_method, route = request.method if request.method in _KNOWN_METHODS else _OTHER_METHOD, request.endpoint[0]
    attributes = {"http.request.method": known_method, "url.path": request.path[:MAX_PATH_CHARACTERS]}
    name = "HTTP" if known_method == _OTHER_METHOD else known_method
    if route:
        name, attributes["http.route"] = f"{known_method} {route}", route
    context = extract({name: value.decode("latin-1") for name, value in request.headers})
    return tracer.start_as_current_span(name, context, kind=SpanKind.SERVER, attributes=attributes)


def finish_span(span: Span, response: AnyResponse) -> None:
    """Record the status of a response in its span."""
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - OpenTelemetry might not be installed

    status = response.status if isinstance(response, Response) else HTTPStatus.OK
    span.set_attribute("http.response.status_code", int(status))
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.set_status(Status(StatusCode.ERROR))
