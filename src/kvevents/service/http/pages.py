"""Pages of listings, and entity tags. A client that polls a listing sends its tag, to learn whether the listing has changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Final, TypeVar
from urllib.parse import urlencode

from kvevents.service.errors import RefusedError
from kvevents.service.fleet.event_bus import StreamEvent
from kvevents.service.fleet.registration import QUOTE_LENGTH, Registration, StreamKey
from kvevents.service.http.messages import HttpRequest, Response

T = TypeVar("T")

MAX_LISTED_ITEMS: Final = 10_000
"""Maximum number of items on a page, and the default of `limit` in listings of the fleet. The default of
`max_sources` is less than half of this number."""
CURSOR_PATTERN: Final = re.compile(r"^((?:[0-9a-f]{2})+\.[0-9]{1,10})?$")
"""Pattern of the cursor in listings of the fleet: the key of the item before the page; empty for the first page."""
_FILTERS: Final = ("instance", "model", "tenant", "group")


def read_number(arguments: Mapping[str, str], name: str, default: int, maximum: int, minimum: int = 1) -> int:
    """Return a number from the query string. Raises `RefusedError` for a number below `minimum` or above `maximum`."""
    text = arguments.get(name)
    if text is None:
        return default
    # Check the length first: `int` raises an error for very long numbers.
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or not minimum <= int(text) <= maximum:
        sentence = f"invalid {name} {text[:QUOTE_LENGTH]!r}: expected a number from {minimum} to {maximum}"
        raise RefusedError(sentence, "bad-parameter", "see /openapi.json")
    return int(text)


def read_cursor(arguments: Mapping[str, str], pattern: re.Pattern[str]) -> str:
    """Return the cursor from the query string. Raises `RefusedError` for a cursor that `pattern` does not match."""
    cursor = arguments.get("cursor", "")
    if pattern.fullmatch(cursor) is None:
        raise RefusedError(f"invalid cursor {cursor[:QUOTE_LENGTH]!r}", "bad-parameter", "send `next` of the previous page")
    return cursor


def matches(item: Registration | StreamEvent, filters: Mapping[str, str]) -> bool:
    """Return whether an engine, or an event of its stream, passes the filters of a listing."""
    return all(getattr(item, name) == filters[name] for name in _FILTERS if name in filters)


def cut_page(items: Iterable[tuple[StreamKey, T]], arguments: Mapping[str, str]) -> tuple[list[T], str | None]:
    """Return the items of the requested page, sorted by key, and the cursor of the next page (None on the final page)."""
    limit = read_number(arguments, "limit", MAX_LISTED_ITEMS, MAX_LISTED_ITEMS)
    name, _, rank = read_cursor(arguments, CURSOR_PATTERN).partition(".")
    position = (bytes.fromhex(name).decode("utf-8", "replace"), int(rank)) if name else None
    sorted_items = sorted((item for item in items if position is None or item[0] > position), key=lambda item: item[0])
    page = sorted_items[:limit]
    last = page[-1][0] if len(page) < len(sorted_items) else None
    return [item for _, item in page], None if last is None else f"{last[0].encode().hex()}.{last[1]}"


def link_next(request: HttpRequest, cursor: str | None) -> tuple[tuple[bytes, bytes], ...]:
    """Return the header `Link` with the address of the next page, for answers without a field `next`."""
    if cursor is None:
        return ()
    query = urlencode({**request.parameters, "cursor": cursor})
    return ((b"link", f'<{request.path}?{query}>; rel="next"'.encode()),)


def add_entity_tag(response: Response, request: HttpRequest) -> Response:
    """Return a response with an entity tag, or 304 if the request names this tag in `If-None-Match`."""
    etag = b'"%b"' % blake2b(response.body, digest_size=16).hexdigest().encode()
    headers = (*response.headers, (b"etag", etag), (b"cache-control", b"private, no-cache"), (b"vary", b"accept"))
    tags = [entry.strip(b" \t").removeprefix(b"W/") for entry in request.headers.if_none_match.split(b",")]
    if etag in tags or tags == [b"*"]:
        return Response(status=304, headers=headers)
    return Response(response.body, kind=response.kind, headers=headers)
