"""What the table of endpoints says of each endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvevents.service.access import Role
from kvevents.service.http.messages import Request, Response, Streamed
from kvevents.service.service import Service

Handler: TypeAlias = "Callable[[Service, Request], Response | Streamed]"
"""Answers a request; it is called by `Request.run`."""
AsyncHandler: TypeAlias = "Callable[[Service, Request], Awaitable[Response | Streamed]]"
"""Answers a request, and calls those of its steps that may take long by `Request.run`."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of the query string."""

    name: str
    description: str
    required: bool = False
    schema: dict[str, Any] = field(default_factory=lambda: {"type": "string"})
    """In the words of JSON Schema."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row."""

    method: str
    path: str
    handler: Handler | AsyncHandler
    role: Role | None
    """Who may ask; None for everybody."""
    tag: str
    takes: Any = None
    """Type of the body."""
    gives: Any = None
    """Type of the answer; None where it is not JSON of one type."""
    status: int = 200
    also: tuple[tuple[int, str], ...] = ()
    """Other statuses of answers of this type, and when they come."""
    raw: bool = False
    """Whether token ids may also come as raw 32-bit numbers."""
    inline_bytes: int | None = None
    """Of a body that is handled between two others; for a larger one it takes a thread of `MATCHING`, so that no request keeps
    all others waiting. Token ids are read by native code, and so may be more."""
    probe: bool = False
    """Whether orchestrators ask it, under whatever host name, and also when there is no room for other clients."""
    worker: str = ""
    """Threads that do it, by their name in `Workers`, since it may take longer than a match."""
    parameters: tuple[Parameter, ...] = field(default=())
    """Of the query string; those of an endpoint with a body are for raw ones. Every other one is refused, unless everybody may
    ask."""
    media: str = "application/json"
    """Of the answer."""

    @property
    def summary(self) -> str:
        """First line of the handler's docstring."""
        return (self.handler.__doc__ or "").partition("\n")[0]
