"""OpenTelemetry spans of requests, for whoever has configured an SDK.

The service knows only the API, and only where it is installed. Whether there is an SDK is asked once, when the application is
built: without one nothing stands between the server and the application, and tracing costs nothing at all. Configure it before,
as `opentelemetry-instrument kvevents serve` does.

A span tells of what was asked and how much was found, never of token ids, hashes, or who asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from kvevents.service.http.routes import ROUTES
from kvevents.service.http.thread_pools import Run
from kvevents.service.lookups import Found, FoundMany, Lookups
from kvevents.service.member import MemberMatch
from kvevents.service.registration import Scope
from kvevents.service.service import Service

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

Http: TypeAlias = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
"""An ASGI application of HTTP alone."""

NAME: Final = "kvevents.service"
MAX_PATH: Final = 256
"""Characters of a path that a span keeps: clients write it."""
_OTHER: Final = "_OTHER"
"""Method of those that nobody knows, as OpenTelemetry's conventions have it."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_UNTRACED: Final = frozenset(path for path, methods in ROUTES.items() if any(each.tag == "probes" for each in methods.values()))
"""Probes, scrapes and the page: every few seconds, and nobody's request."""


class _Noted:
    """What the lookups of one request have found; several of `/v1/match_many` are summed up."""

    __slots__ = ("longest", "model", "tokens")

    def __init__(self) -> None:
        self.model: str | None = None
        self.tokens = 0
        self.longest = 0

    def attributes(self) -> dict[str, str | int]:
        """For the span; nothing where nothing was looked up."""
        if self.model is None:
            return {}
        told: dict[str, str | int] = {"kvevents.model": self.model, "kvevents.longest_matched": self.longest}
        if self.tokens:  # of hashes nobody knows how many tokens they stand for
            told["kvevents.prompt_tokens"] = self.tokens
        return told


_noted: ContextVar[_Noted | None] = ContextVar("kvevents-noted", default=None)
"""Of the request at hand, if it has a span; it goes along into the threads of slow endpoints."""


def find_tracer() -> Tracer | None:
    """The tracer of the SDK that is configured, if there is one."""
    try:
        from opentelemetry import trace  # noqa: PLC0415 - it may not be installed
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    return provider.get_tracer(NAME)


def traced(service: Service, http: Http) -> tuple[Service, Http]:
    """The same two with a span for each request, where somebody takes them; else just these two."""
    tracer = find_tracer()
    return (service, http) if tracer is None else (cast("Service", _Noting(service)), _with_spans(tracer, http))


def _with_spans(tracer: Tracer, http: Http) -> Http:
    from opentelemetry.propagate import extract  # noqa: PLC0415 - as above
    from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415

    async def answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope["path"]
        if path in _UNTRACED:
            return await http(scope, receive, send)
        asked = http
        if any(name == b"kvevents-announced" for name, _ in scope["headers"]):
            # The head alone: unless that is refused, the whole request comes next.
            messages: list[dict[str, Any]] = []

            async def keep(message: dict[str, Any]) -> None:
                messages.append(message)

            async def repeat(_scope: dict[str, Any], _receive: Any, send: Any) -> None:
                for message in messages:
                    await send(message)

            await http(scope, receive, keep)
            if messages and messages[0].get("status") == HTTPStatus.NO_CONTENT:
                return await repeat(scope, receive, send)
            asked = repeat
        status = 0

        async def sending(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        noted = _Noted()
        before = _noted.set(noted)
        name, attributes = _described(scope["method"], path)
        context = extract({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
        try:
            with tracer.start_as_current_span(name, context, kind=SpanKind.SERVER, attributes=attributes) as span:
                try:
                    await asked(scope, receive, sending)
                finally:
                    span.set_attributes(noted.attributes())
                if status:  # else the client has left
                    span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
        finally:
            _noted.reset(before)

    return answer


def _described(method: str, path: str) -> tuple[str, dict[str, str]]:
    """Name and first attributes of a span, as the conventions for HTTP servers have them."""
    known = method if method in _METHODS else _OTHER
    attributes = {"http.request.method": known, "url.path": path[:MAX_PATH]}
    if path not in ROUTES:
        return ("HTTP" if known == _OTHER else known), attributes
    return f"{known} {path}", attributes | {"http.route": path}


class _Noting:
    """A service whose lookups are noted for the span of their request; in everything else the one that it is given."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.lookups = _NotingLookups(service.lookups)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)


class _NotingLookups:
    """The same of the lookups themselves."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lookups, name)

    async def find(self, run: Run, scope: Scope, tokens: Sequence[int], **more: Any) -> Found:
        """As `Lookups`."""
        found = await self._lookups.find(run, scope, tokens, **more)
        _note(scope, len(tokens), found.rows)
        return found

    async def find_many(self, run: Run, scope: Scope, prompts: Sequence[Any], **more: Any) -> FoundMany:
        """As `Lookups`."""
        found = await self._lookups.find_many(run, scope, prompts, **more)
        for tokens, rows in zip(prompts, found.rows, strict=True):
            _note(scope, len(tokens), rows)
        return found

    async def find_keys(self, run: Run, scope: Scope, keys: list[int], **more: Any) -> Found:
        """As `Lookups`."""
        found = await self._lookups.find_keys(run, scope, keys, **more)
        _note(scope, 0, found.rows)
        return found


def _note(scope: Scope, tokens: int, found: list[MemberMatch]) -> None:
    if (noted := _noted.get()) is not None:
        noted.model = scope.model
        noted.tokens += tokens
        noted.longest = max([noted.longest, *[row.tokens for row in found]])
