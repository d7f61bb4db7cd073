"""The parts that a stream's state is made of: phases and their transitions, the open request, counters."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple


class Phase(enum.Enum):
    """What a stream is doing."""

    CONNECTING = "not connected yet"
    CATCHING_UP = "batches are missing; replay was asked for"
    VERIFYING = "reconnected; is the publisher still the same?"
    FOLLOWING = "live batches are delivered as they come"
    DISCONNECTED = "disconnected"
    RESTORED = "restored; not yet connected"


TRANSITIONS: Final[dict[Phase, dict[Phase, str]]] = {
    Phase.CONNECTING: {
        Phase.CATCHING_UP: "connected; history is asked for from 0",
        Phase.FOLLOWING: "connected, without a replay endpoint",
    },
    Phase.CATCHING_UP: {
        Phase.CATCHING_UP: "the publisher restarted, or holds something else; from 0 again",
        Phase.FOLLOWING: "nothing is missing, or what is missing was given up",
        Phase.DISCONNECTED: "disconnected",
    },
    Phase.VERIFYING: {
        Phase.CATCHING_UP: "same life: fetch what was missed; other life: from 0",
        Phase.FOLLOWING: "no answer: goes on, degraded",
        Phase.DISCONNECTED: "disconnected",
    },
    Phase.FOLLOWING: {
        Phase.CATCHING_UP: "a number is missing; or the publisher restarted, or holds something else: from 0",
        Phase.FOLLOWING: "the publisher restarted, without a replay endpoint",
        Phase.DISCONNECTED: "disconnected",
    },
    Phase.DISCONNECTED: {
        Phase.VERIFYING: "reconnected",
        Phase.CATCHING_UP: "reconnected before anything was delivered",
        Phase.FOLLOWING: "reconnected, without a replay endpoint",
    },
    Phase.RESTORED: {
        Phase.VERIFYING: "connected",
        Phase.CATCHING_UP: "connected, with nothing by which to recognise the publisher",
        Phase.FOLLOWING: "connected, without a replay endpoint",
    },
}


class FetchRequest(NamedTuple):
    """A replay request to send. `new_connection` asks for one of its own, on which no older answer can arrive."""

    start: int
    new_connection: bool


class Anchor:
    """A batch by which a life is recognised: a delivered one, or one that waits for that.

    It has the payload until the digest is asked for, and the digest alone after that. The newest batch of a busy stream is
    replaced before anything is compared with it, and is never digested.
    """

    __slots__ = ("_digest", "_payload", "live", "seq")

    def __init__(self, seq: int, payload: bytes | None, live: bool, *, digest: bytes | None = None) -> None:
        self.seq = seq
        self.live = live
        """Whether it came live: then a replay that repeats it is of the same stream."""
        self._payload = payload
        self._digest = digest

    @property
    def digest(self) -> bytes:
        """SHA-256 of the payload, which is dropped."""
        if self._digest is None:
            self._digest = payload_digest(self._payload or b"")
            self._payload = None
        return self._digest

    def is_of(self, payload: bytes) -> bool:
        """Whether this is the payload by which the life is recognised."""
        return self._payload == payload if self._payload is not None else self.digest == payload_digest(payload)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Anchor):
            return NotImplemented
        return self is other or (self.seq, self.live, self.digest) == (other.seq, other.live, other.digest)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Anchor {self.seq} {'live' if self.live else 'replayed'}>"


def payload_digest(payload: bytes) -> bytes:
    """SHA-256 of a payload."""
    return hashlib.sha256(payload).digest()


@dataclass(slots=True)
class OpenAsk:
    """The open request and what its answers brought so far."""

    start: int
    anchor: Anchor | None
    """What the answer must repeat next, before anything that follows in it is history; None when nothing is left of that."""
    fills: bool = False
    """Whether it was sent for batches that are missing, and only its own are to be proven by it."""
    joint: Anchor | None = None
    """The live batch which, if the answer repeats it too, proves whose answer it is."""
    reads_on: bool = False
    """Whether it has brought all that was missing, and is open only until it comes to the joint."""
    fresh: bool = True
    sent: bool = False
    heard_at: float = 0.0
    """When it was sent or last brought something new."""
    expected_before: int = 0
    first: bool = True
    """Whether the next batch is the first of its answer: the one that no engine drops."""
    reunites: bool = False
    """Whether the anchor from before a reconnect has come, and what else was there before is to come behind it."""
    confirms: bool = False
    """Whether it asks for a live batch that just came, to compare it."""
    beyond: bool = False
    """Whether this answer held more than the anchor: such an answer may have lost some of its messages."""
    joint_before: int = -1
    """Number of the newest live batch when this was asked, -1 for none. The right endpoint holds it, or newer ones."""
    newest: int = -1
    """The highest number in this answer."""
    reached: int = -1
    """The highest number that this answer, or those before it in a row, brought too early."""
    proven: bool = False
    """Whether this answer began with a batch that had come live."""
    part: int = -2
    """Number of the newest part of the snapshot that it began with, while the next message may be the next part."""
    useless: int = 0
    """Messages in a row that brought nothing new."""
    unanswered: int = 0
    """Requests before this one, in a row, that brought nothing in time."""
    fruitless: int = 0
    """Answers before this one, in a row, without the batch that was asked for."""


@dataclass(slots=True)
class StreamCounters:
    """What happened to a stream so far."""

    live: int = 0
    delivered: int = 0
    replayed: int = 0
    duplicates: int = 0
    """Messages with nothing new, live or replayed, the rest of an answer that was no longer needed among them."""
    malformed: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    gaps: int = 0
    """Runs of numbers that are lost. Those that a snapshot represents are not among them."""
    lost: int = 0
    """Batches inside those gaps."""
    compacted: int = 0
    """Batches that were not delivered because a snapshot represents them: nothing is lost."""
    gaps_repaired: int = 0
    """Holes after something live that replay has begun to fill: losses, and what was missed between two connections. The
    history before the first live batch is none. One of which a part is lost counts among `gaps` as well."""
    resets: int = 0
    reconnects: int = 0
    requests: int = 0
    """For replay. What came of them is in the next four; of one that a lost connection or a restart has ended, nothing is."""
    complete: int = 0
    """Answered, and nothing more was known to be missing then."""
    truncated: int = 0
    """Answered without all that was asked for."""
    unanswered: int = 0
    conflicts: int = 0
    """Answered with something that contradicts the live stream."""
    overflowed: int = 0
    """Live batches that found no room to wait; they are replayed later."""
    discarded: int = 0
    """Waiting batches of a life that ended."""
    heartbeats: int = 0
    """Batches with a heartbeat of the sender; of raw ones those that were reported."""
    digests_matched: int = 0
    """Of those, how many found here what the sender holds."""
    digests_mismatched: int = 0
    """Of those, how many found something else where nothing was known against the stream: 0, unless something is broken. A
    difference that is explained, as by a gap, is not counted; nor is the same one again at the next heartbeat."""

    def copy(self) -> StreamCounters:
        """The counters as they are now."""
        return replace(self, malformed=dict(self.malformed), rejected=dict(self.rejected))
