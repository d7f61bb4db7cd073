"""OpenTelemetry spans of requests, if an SDK is configured.

The service depends only on the API, and only if it is installed. It looks for an SDK once, when the application is built, so
the SDK must be configured before, as `opentelemetry-instrument kvevents serve` does. Without one, tracing costs nothing.

A span has the model and the numbers of tokens of a lookup. It never has token ids, hashes or the caller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvevents.service.http.routes import ROUTES
from kvevents.service.member import MemberMatch
from kvevents.service.registration import Scope

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

Http: TypeAlias = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
"""An ASGI application for HTTP requests."""

NAME: Final = "kvevents.service"
MAX_PATH: Final = 256
"""Characters of a path in a span, since clients choose the path."""
_OTHER: Final = "_OTHER"
"""Name of unknown methods in OpenTelemetry's conventions."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
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


_current: ContextVar[_LookupSummary | None] = ContextVar("kvevents-lookup-summary", default=None)
"""Summary of the current request if it has a span; threads that work for the request inherit it."""


def record_lookup(scope: Scope, tokens: int, found: list[MemberMatch]) -> None:
    """Add a lookup to the summary of the current request; `Lookups.on_lookup` calls this if requests have spans."""
    if (summary := _current.get()) is not None:
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
    return provider.get_tracer(NAME)


def with_spans(tracer: Tracer, http: Http) -> Http:
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
        token = _current.set(summary)
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
            _current.reset(token)

    return traced_http


def _name_and_attributes(method: str, path: str) -> tuple[str, dict[str, str]]:
    """Return the name and the first attributes of a span, by OpenTelemetry's conventions for HTTP servers."""
    known = method if method in _METHODS else _OTHER
    attributes = {"http.request.method": known, "url.path": path[:MAX_PATH]}
    if path not in ROUTES:
        return ("HTTP" if known == _OTHER else known), attributes
    return f"{known} {path}", attributes | {"http.route": path}
