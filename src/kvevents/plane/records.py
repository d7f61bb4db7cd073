"""What is written into the log: records of streams, and pages of records.

A partition of the log is a sequence of pages, each one JetStream message. A page holds records of any streams of its partition,
those of one stream in order. Every record of a stream says of which incarnation it is and which number it has, so a reader
needs nothing but the records before it to know whether it is the next one.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from kvevents.wire import MAX_SEQ

VERSION: Final = 2
"""Of pages; readers refuse others."""
START: Final = bytes(8)
"""The history of a partition before its first message."""
MISSED_BEATS: Final = 3
"""After so many that did not come a bridge is taken for dead."""
MOST_BEAT_SECONDS: Final = 60.0
"""Between two beats that a bridge may promise: it is not believed to be alive for longer than `MISSED_BEATS` of them."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SEQ)]
_Through = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_SEQ)]

Key: TypeAlias = tuple[str, int]
"""A stream: source and rank."""


def name_of(bridge: str) -> str:
    """Return what an operator calls a bridge, given what the log calls it: `NAME#LIFE`, another one in each process."""
    return bridge.rpartition("#")[0] or bridge


class _Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    source: str
    rank: _Count

    @property
    def key(self) -> Key:
        """The stream that it is of."""
        return self.source, self.rank


class Join(_Record, frozen=True, array_like=True, tag="j", gc=False):
    """A bridge follows the stream; or does so with another card."""

    card: bytes
    """What replicas must know of the engine, in a form that the log does not look into."""


class Leave(_Record, frozen=True, array_like=True, tag="l", gc=False):
    """The stream is gone: replicas forget it. What comes later begins with a `Join` and a new incarnation."""

    reason: str


class Batched(_Record, frozen=True, array_like=True, tag="b", gc=False):
    """A batch, as the engine sent it."""

    incarnation: _Count
    seq: _Count
    replayed: bool
    payload: bytes


class Piece(_Record, frozen=True, array_like=True, tag="p", gc=False):
    """A part of a batch that is larger than a message may be. The batch is there with the last one."""

    incarnation: _Count
    seq: _Count
    replayed: bool
    offset: _Count
    total: _Count
    """Bytes of the whole."""
    payload: bytes


class Renewed(_Record, frozen=True, array_like=True, tag="r", gc=False):
    """A new life of the publisher: everything older is void."""

    incarnation: _Count
    reason: str


class Lost(_Record, frozen=True, array_like=True, tag="g", gc=False):
    """Batches that no bridge will ever have."""

    incarnation: _Count
    first: _Count
    last: _Count
    compacted: bool = False
    """Whether the snapshot that follows represents them; see `Gap.compacted`."""


class Trusting(_Record, frozen=True, array_like=True, tag="t", gc=False):
    """How far a bridge trusts what has been written of the stream up to here."""

    bridge: str
    trust: str
    """Empty: the bridge follows the stream no more, and what it said is void."""
    reason: str
    doubts: dict[str, _Through]
    """Names of `DegradedReason`, each with the last number affected; the newest one if a checkpoint does not keep it."""


class Blank(msgspec.Struct, frozen=True, array_like=True, tag="v", gc=False):
    """The partition begins here: whoever wrote this could not know what was before. All streams have left, and begin anew."""

    floor: _Count
    """First incarnation of every stream from here on: above all that were."""
    reason: str


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="h", gc=False):
    """A bridge is alive, and has written what it had."""

    bridge: str
    every: float
    """Seconds until the next, at most."""
    at: float
    """Its clock, seconds since the epoch."""
    suspects: str = ""
    """Why it doubts its own network rather than its engines; empty where it does not."""
    lag: float = 0.0
    """Seconds for which what its engines say has waited to be written, or was not read; 0 while that is as usual."""
    process: str = ""
    """Where it runs, for people."""

    @property
    def alive_seconds(self) -> float:
        """For how long after this beat the bridge counts as alive."""
        return MISSED_BEATS * min(self.every, MOST_BEAT_SECONDS)


StreamRecord: TypeAlias = Join | Leave | Batched | Piece | Renewed | Lost | Trusting
Record: TypeAlias = StreamRecord | Blank | Beat


class Page(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message of a partition."""

    version: int
    bridge: str
    """Who wrote it."""
    at: float
    """The writer's clock, seconds since the epoch."""
    records: list[Record]
    life: str = ""
    """Of the partition, as the writer knew it: a page that was meant for a partition that has been deleted is void in the next
    one."""
    name: str = ""
    """What its writer calls it; no other page has the same."""
    history: bytes | None = None
    """Digest of the names of all messages that its writer expects before it (`extend_history`); the page is void behind any
    others. None: a new history begins with this page, whatever is before it."""


class Tail(NamedTuple):
    """The newest message of a partition, as a reader knows it."""

    position: int
    """0 before the first message."""
    name: str | None = None
    """The page's name; empty for a message that is no page, None where it is not known."""
    history: bytes | None = None
    """Digest of the names of all messages up to this one; None where it is not known."""


def extend_history(history: bytes, name: str) -> bytes:
    """Return the history of a partition after one more message."""
    return blake2b(history + name.encode("utf-8", "surrogatepass"), digest_size=len(START)).digest()


_DECODER: Final = msgspec.msgpack.Decoder(Page)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode_page(page: Page) -> bytes:
    """The bytes of a message."""
    return _ENCODER.encode(page)


def decode_page(data: bytes) -> Page | None:
    """What `encode_page` wrote; None for anything else, which no bridge of ours has written."""
    try:
        page = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return page if page.version == VERSION else None
