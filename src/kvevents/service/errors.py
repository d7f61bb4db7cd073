"""What a client of the service is told when it cannot have what it asked for.

::

    ServiceError                  has a status, a reason and a hint
    ├── RefusedError              400: what was sent cannot be used
    ├── NotFoundError             404
    ├── ConflictError             409: it contradicts what is registered
    ├── TooMuchError              413: above a named limit
    ├── UnauthorizedError         401, 403
    └── UnavailableError          503: try again later
"""

from __future__ import annotations

from typing import ClassVar

from kvevents.errors import UsageError


class ServiceError(UsageError):
    """An answer that is an error: a sentence, a reason for programs, and what to do."""

    status: ClassVar[int] = 400

    def __init__(self, sentence: str, reason: str, hint: str, *, status: int | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.reason = reason
        self.hint = hint
        self.code = status or self.status


class RefusedError(ServiceError):
    """What was sent cannot be used."""


class NotFoundError(ServiceError):
    """There is no such thing."""

    status = 404


class ConflictError(ServiceError):
    """It contradicts what is registered."""

    status = 409


class TooMuchError(ServiceError):
    """Above a named limit."""

    status = 413


class UnauthorizedError(ServiceError):
    """No token, or one that may not do this."""

    status = 401


class UnavailableError(ServiceError):
    """Not now."""

    status = 503
