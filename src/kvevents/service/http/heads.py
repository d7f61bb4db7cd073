"""Heads of plain requests: read in full once for a connection, then recognised.

A client that keeps its connection sends the same head again and again, in which only the length of the body differs. So it is
compared with the one before, and read again only where it is another one.
"""

from __future__ import annotations

from typing import Final

from kvevents.service.http.messages import Headers
from kvevents.service.http.routing import TABLE, Endpoint

_UNUSUAL: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"content-encoding", b"te", b"trailer"})
"""Headers of requests that are not plain."""
_QUICK: Final[dict[bytes, Endpoint]] = {
    path.encode("ascii"): endpoint
    for path, methods in TABLE.items()
    for method, endpoint in methods.items()
    if method == "POST" and endpoint.quick
}
_LENGTH: Final = b"content-length"
_MAX_DIGITS: Final = 11
"""Of a body's length."""


class Head:
    """What a plain POST to a quick endpoint says before its body."""

    __slots__ = ("_after", "_before", "endpoint", "headers", "length", "query")

    def __init__(
        self,
        endpoint: Endpoint,
        query: bytes,
        headers: Headers,
        length: int,
        around: tuple[bytes, bytes],
    ) -> None:
        self.endpoint = endpoint
        self.query = query
        self.headers = headers
        self.length = length
        """Bytes of the body."""
        self._before, self._after = around
        """The head's text around the digits of the length."""

    @classmethod
    def read(cls, text: bytes) -> Head | None:
        """From all bytes before the empty line; None where anything about them is unusual."""
        line, _, rest = text.partition(b"\r\n")
        method, _, target = line.partition(b" ")
        target, _, version = target.partition(b" ")
        path, _, query = target.partition(b"?")
        endpoint = _QUICK.get(path)
        if endpoint is None or method != b"POST" or version != b"HTTP/1.1" or not _is_plain(text):
            return None
        headers = _headers(rest)
        told = [value for name, value in headers or () if name == _LENGTH]
        if headers is None or len(told) != 1 or not _is_length(told[0]):
            return None
        # A name is at the beginning of a line, and nothing else is.
        place = text.index(told[0], text.lower().index(b"\r\n%b:" % _LENGTH) + len(_LENGTH) + 3)
        around = text[:place], text[place + len(told[0]) :]
        return cls(endpoint, query, Headers(headers), int(told[0]), around)

    def recognises(self, text: bytes) -> bool:
        """Whether this is the same head but for the length, which is taken over."""
        before, after = self._before, self._after
        if not (text.startswith(before) and text.endswith(after)):
            return False
        digits = text[len(before) : len(text) - len(after)]
        if not _is_length(digits):
            return False
        self.length = int(digits)
        return True


def _is_plain(head: bytes) -> bool:
    """Whether lines end as they should only: what else ends one for somebody must not be read in two ways."""
    ends = head.count(b"\r\n")
    return head.count(b"\n") == ends == head.count(b"\r") and b"\0" not in head


def _headers(text: bytes) -> list[tuple[bytes, bytes]] | None:
    """Names in lower case, and values; None where anything about them is unusual."""
    found: list[tuple[bytes, bytes]] = []
    for line in text.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if not colon or not name or name in _UNUSUAL or name[0] <= 32 or name[-1] <= 32:
            return None
        if name == b"connection" and value.lower() != b"keep-alive":
            return None
        found.append((name, value))
    return found


def _is_length(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _MAX_DIGITS
