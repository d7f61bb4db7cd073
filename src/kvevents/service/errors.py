"""Errors that the service returns to clients.

::

    ServiceError                  has a status, a reason and a hint
    ├── RefusedError              400: the request cannot be used
    ├── NotFoundError             404
    ├── ConflictError             409: the request conflicts with what is registered
    ├── TooMuchError              413: the request exceeds a limit
    └── UnavailableError          503: the client can retry later
"""

from __future__ import annotations

from typing import ClassVar

from kvevents.errors import UsageError


class ServiceError(UsageError):
    """An error response: a sentence that says what failed, a reason code, and a hint that says what to do."""

    status: ClassVar[int] = 400

    def __init__(self, sentence: str, reason: str, hint: str, *, status: int | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.reason = reason
        self.hint = hint
        self.code = status or self.status


class RefusedError(ServiceError):
    """The request cannot be used."""


class NotFoundError(ServiceError):
    """The request names something that does not exist."""

    status = 404


class ConflictError(ServiceError):
    """The request conflicts with what is registered, or with the role of this service."""

    status = 409


class TooMuchError(ServiceError):
    """The request exceeds a limit."""

    status = 413


class UnavailableError(ServiceError):
    """The service cannot answer now; the client can retry later."""

    status = 503
