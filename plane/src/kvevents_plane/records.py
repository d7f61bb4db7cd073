"""Format of the log: records, pages of records, and the JetStream messages that carry pages.

A partition of the log is a sequence of pages. Each page is one JetStream message and holds records of any streams of the
partition, those of one stream in order. Every record of a stream names its incarnation and its number, so earlier records
suffice to decide whether it is the next one.
"""

# Without `from __future__ import annotations`, as in `kvevents.client.schemas`.
from hashlib import blake2b
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from kvevents.stream import printable
from kvevents.wire import MAX_SEQ

VERSION: Final = 4
"""Version of the page format; readers reject other versions."""
EMPTY_HISTORY: Final = bytes(8)
"""The history of a partition before its first message."""
MISSED_HEARTBEATS: Final = 3
"""Number of missing heartbeats after which a bridge counts as dead."""
CONFLICT_INTERVALS: Final = 2.0
"""Multiple of `HeartbeatRecord.alive_seconds` for which a bridge that follows another engine under the same name counts as
alive, so that a late heartbeat does not make the stream EXACT."""
MAX_HEARTBEAT_SECONDS: Final = 60.0
"""Longest heartbeat interval that readers accept: a bridge counts as alive for at most `MISSED_HEARTBEATS` such intervals."""
PAGE_HEADER: Final = "Kvevents-Page"
"""NATS header with the page's name."""
HISTORY_HEADER: Final = "Kvevents-History"
"""NATS header with `Page.history` in hexadecimal digits, or `NEW_HISTORY`."""
NEW_HISTORY: Final = "new"

_Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SEQ)]
_Last = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_SEQ)]

StreamKey: TypeAlias = tuple[str, int]
"""The source and rank of a stream."""


def stream_text(key: StreamKey) -> str:
    """Return the text that names a stream in messages: its source with printable characters, and its rank."""
    source, rank = key
    return f"{printable(source)} rank {rank}"


def bridge_name(bridge: str) -> str:
    """Return the configured name of a bridge from its id in the log, `NAME#RANDOM`, which differs for each process."""
    return printable(bridge.rpartition("#")[0] or bridge)


class _Endpoints(msgspec.Struct, frozen=True):
    """The part of a registration that identifies an engine."""

    endpoint: str
    replay_endpoint: str | None = None


_ENDPOINTS: Final = msgspec.json.Decoder(_Endpoints)


def engine_digest(registration: bytes) -> bytes:
    """Return a digest of what identifies a registration's engine: its endpoints, or the whole registration if it has none."""
    try:
        identity = repr(msgspec.structs.astuple(_ENDPOINTS.decode(registration))).encode("utf-8", "surrogatepass")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        identity = registration
    return blake2b(identity, digest_size=8).digest()


class _StreamRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    source: str
    rank: _Count

    @property
    def key(self) -> StreamKey:
        """The stream that the record belongs to."""
        return self.source, self.rank


class JoinRecord(_StreamRecord, frozen=True, array_like=True, tag="j", gc=False):
    """A bridge follows the stream, or its registration has changed."""

    registration: bytes
    """Data of the engine for replicas; the log does not interpret it."""


class LeaveRecord(_StreamRecord, frozen=True, array_like=True, tag="l", gc=False):
    """The stream has left the log, and replicas drop it. It can join again with a `JoinRecord` and a new incarnation."""

    reason: str


class BatchRecord(_StreamRecord, frozen=True, array_like=True, tag="b", gc=False):
    """A batch as the engine sent it."""

    incarnation: _Count
    seq: _Count
    replayed: bool
    payload: bytes


class FragmentRecord(_StreamRecord, frozen=True, array_like=True, tag="p", gc=False):
    """A part of a batch that is larger than a page. The batch is complete with its last fragment."""

    incarnation: _Count
    seq: _Count
    replayed: bool
    offset: _Count
    total: _Count
    """Size of the whole batch in bytes."""
    payload: bytes


class IncarnationRecord(_StreamRecord, frozen=True, array_like=True, tag="r", gc=False):
    """A new incarnation of the publisher begins: everything older is void."""

    incarnation: _Count
    reason: str


class GapRecord(_StreamRecord, frozen=True, array_like=True, tag="g", gc=False):
    """Batches `first` to `last` are lost: no bridge can obtain them."""

    incarnation: _Count
    first: _Count
    last: _Count
    compacted: bool = False
    """Whether the snapshot that follows represents the lost batches; see `Gap.compacted`."""


class TrustRecord(_StreamRecord, frozen=True, array_like=True, tag="t", gc=False):
    """A bridge's trust in the stream, as far as the log contains it before this record."""

    bridge: str
    trust: str
    """Name of the trust state. Empty: the bridge no longer follows the stream, and its earlier reports are void."""
    reason: str
    degraded_reasons: dict[str, _Last]
    """The last affected batch number by name of `DegradedReason`; the newest number for reasons that checkpoints omit."""


class ResetRecord(msgspec.Struct, frozen=True, array_like=True, tag="v", gc=False):
    """Readers of the partition start over, because the bridge does not know the state before this record.

    All streams leave, and join again.
    """

    floor: _Count
    """First incarnation of every stream from here on; higher than all earlier ones."""
    reason: str


class HeartbeatRecord(msgspec.Struct, frozen=True, array_like=True, tag="h", gc=False):
    """A bridge is alive, and its records up to here are in the log."""

    bridge: str
    interval: float
    """Maximum number of seconds until the next heartbeat."""
    suspicion: str = ""
    """Why the bridge suspects its own network rather than its engines; empty if it does not."""
    lag: float = 0.0
    """Seconds for which events of the bridge's engines have waited to be written or read; 0 while below the bridge's limit."""
    process: str = ""
    """Process and host of the bridge, for operators."""
    uptime: float = 0.0
    """The bridge's monotonic clock, in seconds; 0 if unknown. It shows how late the heartbeat arrives."""
    conflict: str = ""
    """A sentence that names a stream of the partition that another bridge uses for another engine; empty without a conflict."""

    @property
    def alive_seconds(self) -> float:
        """Seconds after this heartbeat for which the bridge counts as alive."""
        return MISSED_HEARTBEATS * min(self.interval, MAX_HEARTBEAT_SECONDS)


StreamRecord: TypeAlias = JoinRecord | LeaveRecord | BatchRecord | FragmentRecord | IncarnationRecord | GapRecord | TrustRecord
Record: TypeAlias = StreamRecord | ResetRecord | HeartbeatRecord


class Page(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The records of one message of a partition."""

    version: int
    bridge: str
    """Id of the bridge that wrote the page."""
    records: list[Record]
    name: str = ""
    """Unique name of the page."""
    history: bytes | None = None
    """Digest of the names of all messages that the bridge expects before the page (`extend_history`); the page is void if other
    messages precede it. None: a new history begins with this page, regardless of earlier pages."""


class Tail(NamedTuple):
    """The newest message of a partition as a reader knows it."""

    position: int
    """JetStream's sequence number; 0 before the first message."""
    name: str | None = None
    """The page's name; empty for a message that is not a page, None if unknown."""
    history: bytes | None = None
    """Digest of the names of all messages up to this one; None if unknown."""


class ReceivedMessage(NamedTuple):
    """One JetStream message of a partition."""

    position: int
    data: bytes
    pending: int
    """Number of later messages that the server had when it sent this one."""
    name: str = ""
    """The page's name from `PAGE_HEADER`."""
    history: str | None = None
    """Value of `HISTORY_HEADER`; None for a message that is not a page."""
    stored_at: float = 0.0
    """When the servers stored the message, in seconds since the epoch by their clock; bridges' clocks can differ."""

    @property
    def begins_history(self) -> bool:
        """Whether a new history begins with the message. Readers use the header, even if the message is not a valid page."""
        return self.history == NEW_HISTORY

    def page(self) -> Page | None:
        """Return the page; None for a message that is not a page, or whose headers contradict its page."""
        page = decode_page(self.data)
        if page is None or page.name != self.name:
            return None
        return page if self.history in {None, history_header(page.history)} else None


def extend_history(history: bytes, name: str) -> bytes:
    """Return the history of a partition after one more message."""
    return blake2b(history + name.encode("utf-8", "surrogatepass"), digest_size=len(EMPTY_HISTORY)).digest()


def history_header(history: bytes | None) -> str:
    """Return the value of `HISTORY_HEADER` for `Page.history`."""
    return NEW_HISTORY if history is None else history.hex()


_DECODER: Final = msgspec.msgpack.Decoder(Page)
encode_page: Final = msgspec.msgpack.Encoder().encode
"""Encodes a page as the payload of a message."""


def decode_page(data: bytes) -> Page | None:
    """Decode the payload of a message; return None if no bridge of this format version wrote it."""
    try:
        page = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return page if page.version == VERSION else None
