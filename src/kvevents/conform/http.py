"""HTTP requests to targets. A target that ends, hangs or answers without end is a `TargetError`."""

from __future__ import annotations

import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvevents.conform.target import TargetError
from kvevents.errors import ExternalError

ANSWER_SECONDS: Final = 10.0
"""Time of a target to answer one request."""
T = TypeVar("T")
MAX_BYTES: Final = 64 << 20
"""Size of one answer."""


class TargetResponse(NamedTuple):
    """Status and body."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is something else."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, RecursionError):
            return None

    def decode(self, kind: type[T]) -> T:
        """Return the body as a value of a type. Raise `TargetError` if it is something else."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TargetError(f"the answer cannot be decoded ({error}): {self.text[:200]}") from error

    @property
    def text(self) -> str:
        """The status with the error that the body names."""
        found = self.json
        error = found.get("error", "") if isinstance(found, dict) else self.body[:200].decode(errors="replace")
        return f"{self.status} {error}".strip()


def request(url: str, method: str = "GET", body: Any = None, *, seconds: float = ANSWER_SECONDS) -> TargetResponse:
    """Send a request, with `body` as JSON, and return the answer. Raise `TargetError`."""
    deadline = time.monotonic() + seconds
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds)
    try:
        data = None if body is None else msgspec.json.encode(body)
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        connection.request(method, target, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        found = bytearray()
        while chunk := response.read1(1 << 16):
            found += chunk
            _check(found, deadline)
        return TargetResponse(response.status, bytes(found))
    except TooLargeError as error:
        raise TargetError(f"{method} {url} answered more than {MAX_BYTES} bytes") from error
    except TimeoutError as error:
        raise TargetError(f"{method} {url} did not answer within {seconds:g} s") from error
    except (OSError, HTTPException) as error:
        raise TargetError(f"{method} {url} failed: {error or type(error).__name__}") from error
    finally:
        connection.close()


class TooLargeError(ExternalError):
    """An answer is longer than `MAX_BYTES`."""


def _check(found: bytearray, deadline: float) -> None:
    if len(found) > MAX_BYTES:
        raise TooLargeError
    if time.monotonic() > deadline:
        raise TimeoutError
