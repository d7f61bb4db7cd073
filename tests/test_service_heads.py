"""`kvevents.service.http.heads`: to recognise a head is to read it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.service.http.heads import Head

FIRST = (
    "POST /v1/match?model=m HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\nContent-Type: application/msgpack; v=1\r\n"
    "Authorization: Bearer a\r\nAccept: application/msgpack"
)
LAST = "POST /query HTTP/1.1\r\nHost: content-length: 7\r\ncontent-length:\t 7 "
CHANGES = [
    "",
    "0",
    "9",
    "12345678901",
    "123456789012",
    " 8",
    "8 ",
    "+8",
    "8\r\nx: y",
    "8\r\ncontent-length: 8",
    "\N{SUPERSCRIPT TWO}",
]


def told(head: Head | None) -> object:
    if head is None:
        return None
    headers = head.headers
    return head.endpoint.path, head.query, headers.kind, headers.authorization, headers.accept, head.length


def test_what_is_read() -> None:
    assert told(Head.read(FIRST.encode())) == (
        "/v1/match",
        b"model=m",
        b"application/msgpack",
        b"Bearer a",
        b"application/msgpack",
        12,
    )
    assert told(Head.read(LAST.encode())) == ("/query", b"", b"", None, None, 7)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("text", "digits"), [(FIRST, "12"), (LAST, " 7 ")])
def test_a_head_with_another_length_is_recognised_only_where_it_would_be_read_so(text: str, digits: str, change: str) -> None:
    """The lengths of which there must be one only, and which are digits; whatever else is in their place."""
    known = Head.read(text.encode())
    assert known is not None
    at = text.rindex(digits) if text is LAST else text.index(digits)
    other = (text[:at] + (change if text is FIRST else f" {change} ") + text[at + len(digits) :]).encode()
    if known.recognises(other):
        assert told(known) == told(Head.read(other))
    else:
        assert not change.isdecimal() or len(change) > 11


@given(data=st.data())
def test_what_is_recognised_is_what_would_be_read(data: st.DataObject) -> None:
    """Whatever bytes come instead of some of a head that was read."""
    text = data.draw(st.sampled_from([FIRST, LAST])).encode()
    known = Head.read(text)
    assert known is not None
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 4)))
    other = text[:start] + data.draw(st.text("0123456789 \r\n:ac", max_size=5)).encode() + text[end:]
    before = told(known)
    if known.recognises(other):
        assert told(known) == told(Head.read(other))
    else:
        assert told(known) == before, "what is not recognised changes nothing"
