"""Format of the log: records, pages of records, and the JetStream messages that carry pages.

A partition of the log is a sequence of pages. Each page is one JetStream message, and holds records of any streams in the
partition. The records of one stream are in order. Every record of a stream has an incarnation and a number, so a reader can
decide from earlier records whether it is the next one.
"""

# This module does not import `annotations` from `__future__`, for the reason in `kvevents.client.schemas`.
from hashlib import blake2b
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from kvevents.stream import printable
from kvevents.wire import MAX_SEQ

VERSION: Final = 4
"""Version of the page format; readers reject other versions."""
EMPTY_HISTORY: Final = bytes(8)
"""The history of an empty partition."""
MISSED_HEARTBEATS: Final = 3
"""Number of consecutive missing heartbeats after which a bridge counts as dead."""
CONFLICT_INTERVALS: Final = 2.0
"""If two bridges follow different engines under one name, each counts as alive for this multiple of
`HeartbeatRecord.alive_seconds`, so that the conflict does not seem to be over if a heartbeat of one bridge is late."""
MAX_HEARTBEAT_SECONDS: Final = 60.0
"""Maximum heartbeat interval that readers accept, in seconds. A bridge counts as alive for `MISSED_HEARTBEATS` intervals."""
PAGE_HEADER: Final = "Kvevents-Page"
"""NATS header with the page's name."""
HISTORY_HEADER: Final = "Kvevents-History"
"""NATS header with `Page.history` in hexadecimal digits, or `NEW_HISTORY_MARK`."""
NEW_HISTORY_MARK: Final = "new"

_Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SEQ)]
_LastSeq = Annotated[int, msgspec.Meta(ge=-1, lt=MAX_SEQ)]

StreamKey: TypeAlias = tuple[str, int]
"""The source and rank of a stream."""


def stream_text(key: StreamKey) -> str:
    """Return the name of a stream for messages: its source with only printable characters, and its rank."""
    source, rank = key
    return f"{printable(source)} rank {rank}"


def bridge_name(bridge: str) -> str:
    """Return the configured name of a bridge, given the bridge's id in the log, `NAME#RANDOM`. Each process has its own id."""
    return printable(bridge.rpartition("#")[0] or bridge)


class _Endpoints(msgspec.Struct, frozen=True):
    """The fields of a registration that identify an engine."""

    endpoint: str
    replay_endpoint: str | None = None


_ENDPOINTS_DECODER: Final = msgspec.json.Decoder(_Endpoints)


def engine_digest(registration: bytes) -> bytes:
    """Return a digest of the fields that identify a registration's engine: the endpoints or, without these, all fields."""
    try:
        identity = repr(msgspec.structs.astuple(_ENDPOINTS_DECODER.decode(registration))).encode("utf-8", "surrogatepass")
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
    """A bridge begins to follow the stream, or the stream's registration has changed."""

    registration: bytes
    """Data about the engine for replicas. Bridges do not interpret these data."""


class LeaveRecord(_StreamRecord, frozen=True, array_like=True, tag="l", gc=False):
    """The stream has left the log, and replicas drop it. A `JoinRecord` lets the stream join again, with a new incarnation."""

    reason: str


class BatchRecord(_StreamRecord, frozen=True, array_like=True, tag="b", gc=False):
    """A batch as the engine sent it."""

    incarnation: _Count
    seq: _Count
    replayed: bool
    payload: bytes


class FragmentRecord(_StreamRecord, frozen=True, array_like=True, tag="p", gc=False):
    """A part of a batch that is larger than a page. The last fragment completes the batch."""

    incarnation: _Count
    seq: _Count
    replayed: bool
    offset: _Count
    total: _Count
    """Size of the whole batch in bytes."""
    payload: bytes


class IncarnationRecord(_StreamRecord, frozen=True, array_like=True, tag="r", gc=False):
    """A new incarnation of the publisher begins. The blocks of all older batches no longer exist."""

    incarnation: _Count
    reason: str


class GapRecord(_StreamRecord, frozen=True, array_like=True, tag="g", gc=False):
    """The batches `first` to `last` are lost: no bridge can obtain them."""

    incarnation: _Count
    first: _Count
    last: _Count
    compacted: bool = False
    """Whether a snapshot after this record represents the lost batches; see `Gap.compacted`."""


class TrustRecord(_StreamRecord, frozen=True, array_like=True, tag="t", gc=False):
    """A bridge's trust in the part of the stream that the log contains before this record."""

    bridge: str
    trust: str
    """Name of the trust state. Empty if the bridge no longer follows the stream; readers then drop its earlier reports."""
    reason: str
    degraded_reasons: dict[str, _LastSeq]
    """Maps the name of each `DegradedReason` to the number of the last batch that it affects. A reason that checkpoints omit
    has the number of the newest batch."""


class ResetRecord(msgspec.Struct, frozen=True, array_like=True, tag="v", gc=False):
    """Readers of the partition start over, because the bridge does not know the state before this record.

    All streams leave the log, and join it again.
    """

    floor: _Count
    """First incarnation of every stream after this record. The number is higher than all earlier incarnations."""
    reason: str


class HeartbeatRecord(msgspec.Struct, frozen=True, array_like=True, tag="h", gc=False):
    """A bridge is alive, and its records up to this one are in the log."""

    bridge: str
    interval: float
    """Maximum number of seconds until the bridge's next heartbeat in this partition."""
    suspicion: str = ""
    """Why the bridge suspects its own network; empty if it has no suspicion."""
    lag: float = 0.0
    """Seconds for which events of the bridge's engines have waited to be read or written; 0 if below the bridge's limit."""
    process: str = ""
    """Text with the process id and the host of the bridge, for operators."""
    uptime: float = 0.0
    """The bridge's monotonic clock in seconds; 0 if unknown. Readers derive from it how late the heartbeat arrives."""
    conflict: str = ""
    """A sentence about a stream of the partition that another bridge uses for another engine; empty without a conflict."""

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
    """Digest of the names of all messages that the bridge expects before the page (`extend_history`); readers ignore the page
    if other messages precede it. If None, a new history begins with this page, regardless of earlier pages."""


class Tail(NamedTuple):
    """The newest message of a partition that a reader knows."""

    position: int
    """JetStream's sequence number; 0 before the first message."""
    name: str | None = None
    """The page's name; empty if the message is not a page, None if the name is unknown."""
    history: bytes | None = None
    """Digest of the names of all messages up to this one, or None if unknown."""


class ReceivedMessage(NamedTuple):
    """One JetStream message of a partition."""

    position: int
    data: bytes
    pending: int
    """Number of later messages that the server had when it sent this message."""
    name: str = ""
    """The page's name from `PAGE_HEADER`."""
    history: str | None = None
    """Value of `HISTORY_HEADER`, or None if the message is not a page."""
    stored_at: float = 0.0
    """Time at which the servers stored the message, in seconds since the epoch, by the servers' clock."""

    @property
    def begins_history(self) -> bool:
        """Whether a new history begins with the message. Readers obey the header, even if the message is not a valid page."""
        return self.history == NEW_HISTORY_MARK

    def page(self) -> Page | None:
        """Return the decoded page, or None if the message is not a page, or its headers contradict the page."""
        page = decode_page(self.data)
        if page is None or page.name != self.name:
            return None
        return page if self.history in {None, history_header(page.history)} else None


def extend_history(history: bytes, name: str) -> bytes:
    """Return the history of a partition after a further message with the name `name`."""
    return blake2b(history + name.encode("utf-8", "surrogatepass"), digest_size=len(EMPTY_HISTORY)).digest()


def history_header(history: bytes | None) -> str:
    """Return the value of `HISTORY_HEADER` for `Page.history`."""
    return NEW_HISTORY_MARK if history is None else history.hex()


_DECODER: Final = msgspec.msgpack.Decoder(Page)
encode_page: Final = msgspec.msgpack.Encoder().encode
"""Encodes a page as the payload of a message."""


def decode_page(data: bytes) -> Page | None:
    """Decode the payload of a message. Return None unless a bridge with this format version wrote it."""
    try:
        page = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return page if page.version == VERSION else None
