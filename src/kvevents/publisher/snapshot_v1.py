r"""Placement snapshots as in SGLang's draft `snapshot-v1` (sgl-project/sglang, pull request 34407), beside replay.

A DEALER sends `["", "snapshot-v1"]` to a ROUTER socket of its own, and gets `["", kind, payload]`: a `header`, `chunk`s of
records `[parent, [hash]]`, and an empty `end`; or an `error` with a reason. The header is
`[version, epoch, replica_rank, resume_seq, barrier_seq, barrier_id, record_count]`. Where there is such an endpoint, the live
stream says more, and a consumer of the draft relies on it:

- Every batch's topic ends with `\0sgl-kv-epoch=` and the epoch, which is another one in each life of the sender.
- A request puts a *barrier* among the live batches: a batch of no events, with the next number, whose topic goes on with
  `\0sgl-kv-snapshot=` and the barrier's id. The snapshot is the state after it, and `resume_seq` the number after it.
- The consumer waits for that very barrier before it takes the snapshot, and then wants every number from `resume_seq` on.

Theory of operation. The server's thread wants a cut; the sending thread, which gives the numbers, sends the barrier; the
server's thread puts together what the replay buffer has up to there, in a history of its own, and answers all who asked before.
A snapshot is placements only: of each block it has what the draft has a place for, that device memory holds it, and its parent.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.events import MEDIUM_GPU
from kvevents.publisher.buffer import ReplayBuffer
from kvevents.publisher.history import History, Told
from kvevents.publisher.replies import ReplyServer, Session
from kvevents.publisher.sockets import Socket

logger = logging.getLogger(__name__)

VERSION: Final = 1
REQUEST: Final = b"snapshot-v1"
MAX_RECORDS: Final = 10_000_000
"""Records of one snapshot, as the draft's consumer takes."""
RECORDS_PER_CHUNK: Final = 8_192
"""As the draft's consumer takes at most; about 160 KiB."""
SNAPSHOT_SEND_LIMIT: Final = 8
"""Chunks in one consumer's pipe (ZMQ_SNDHWM)."""
MAX_SESSIONS: Final = 64
"""Answers in progress at once, and requests that wait for a cut. Further requests wait in ZeroMQ."""
MAX_CUTS: Final = 4
"""Snapshots in memory at once. Who asks for another one while so many are being read is told to come again."""
ANSWER_TIMEOUT: Final = 30.0
"""Seconds for one answer, however slowly it is read: the draft's consumer gives up then."""
CUT_TIMEOUT: Final = 5.0
"""Seconds until the sending thread must have sent a barrier."""
CUT_EVERY: Final = 0.25
"""Seconds between two cuts at least, so that no reader makes a publisher send barriers without end."""

_DEVICE: Final = (None, MEDIUM_GPU)
_SIGN: Final = 1 << 63
_pack: Final = msgspec.msgpack.encode

Part = tuple[bytes, bytes]
"""Kind and payload of a message."""


def live_topic(topic: bytes, epoch: str) -> bytes:
    """The topic of the draft's live batches; who subscribes to `topic` gets them, since subscriptions are prefixes."""
    return topic + b"\0sgl-kv-epoch=" + epoch.encode()


class _Waiting(NamedTuple):
    """Somebody who waits for a cut."""

    identity: bytes
    since: float


class SnapshotServer(ReplyServer):
    """Answers requests for placement snapshots from a `ReplayBuffer` with a history; `run` is the body of `zmq-snapshot`.

    The sending thread looks at `wanted` and answers with a barrier and `cut_at`.
    """

    name = "snapshot"

    def __init__(self, socket: Socket, buffer: ReplayBuffer, epoch: str, rank: int) -> None:
        super().__init__(socket)
        self._buffer = buffer
        self._epoch = epoch
        self._rank = rank
        self.wanted = False
        """Whether the sending thread is to send a barrier."""
        self._barrier: int | None = None
        """The last one sent, as long as nothing was made of it."""
        self._asked: list[_Waiting] = []
        """Who waits for the next cut."""
        self._promised: list[_Waiting] = []
        """Who waits for the one that is wanted."""
        self._next_cut = 0.0

    # --- the sending thread's

    def barrier_topic(self, topic: bytes, number: int) -> bytes:
        """Topic of the barrier with this number, for batches of `topic`."""
        return topic + b"\0sgl-kv-snapshot=" + self._id(number).encode()

    def cut_at(self, number: int) -> None:
        """The barrier was sent with this number; nothing after it has been."""
        self._barrier = number
        self.wanted = False  # last: as long as it is true, the other thread wants no other one
        self.wake()

    # --- requests

    def _has_room(self) -> bool:
        return len(self._sessions) + len(self._asked) + len(self._promised) < MAX_SESSIONS

    def _receive(self, frames: list[bytes]) -> None:
        identity = frames[0]
        if len(frames) != 3 or frames[1] or frames[2] != REQUEST:
            self._count["malformed"] += 1
            self._open(identity, "invalid snapshot-v1 request")
        elif identity in self._sessions or any(each.identity == identity for each in (*self._asked, *self._promised)):
            # One at a time, so that nobody has several snapshots kept for him.
            self._count["refused"] += 1
        else:
            self._asked.append(_Waiting(identity, monotonic()))

    def turn(self) -> None:
        """As every server's, and a cut where one is due."""
        super().turn()
        now = monotonic()
        if self._barrier is not None:
            number, self._barrier = self._barrier, None
            self._deliver(self._made(number))
            # As long again as it took: one who asks and asks gets at most half of this thread.
            self._next_cut = max(now + CUT_EVERY, 2 * monotonic() - now)
        elif self.wanted and self._promised and now - self._promised[0].since > CUT_TIMEOUT:
            self.wanted = False
            self._deliver("no barrier was sent in time; ask again")
        elif self._asked and not self.wanted and now >= self._next_cut:
            self._want()

    def _want(self) -> None:
        if len({id(session.messages) for session in self._sessions.values() if session.messages}) >= MAX_CUTS:
            self._promised, self._asked = self._asked, []
            self._deliver("snapshot provider busy")
            return
        now = monotonic()
        self._promised, self._asked = [each._replace(since=now) for each in self._asked], []
        self.wanted = True

    def _patience(self) -> float:
        usual = super()._patience()
        due = self._next_cut if self._asked and not self.wanted else float("inf")
        return min(usual, max(0.0, due - monotonic()))

    def _deliver(self, answer: list[Part] | str) -> None:
        """Begin to answer all who were promised this cut."""
        promised, self._promised = self._promised, []
        for waiting in promised:
            self._open(waiting.identity, answer)

    # --- answers

    def _answer(self, request: list[Part] | str) -> tuple[Sequence[Any], list[bytes]]:
        if isinstance(request, str):
            return (), [b"", b"error", request.encode()]
        return request, [b"", b"end", b""]

    def _spelled(self, message: Part) -> list[bytes]:
        return [b"", *message]

    def _stalled(self, session: Session, now: float) -> None:
        if now - session.began > ANSWER_TIMEOUT:
            self._end(session, "abandoned")
            logger.warning("gave up a placement snapshot: its reader did not take it within %g seconds", ANSWER_TIMEOUT)

    def _made(self, number: int) -> list[Part] | str:
        """Messages of the snapshot after the barrier with this number, or why there is none."""
        found = self._buffer.collapsed_at(number)
        history = History.create()
        if found is None or history is None:
            return "the publisher was quicker than the snapshot; ask again"
        collapsed, kept = found
        scratch = ReplayBuffer(0, history)
        if collapsed is None:
            scratch.resume(-1, [], False, kept)
        else:
            scratch.resume(*collapsed, kept)
        told = scratch.told()
        if told is None:
            return f"what is resident is not known until everything is cleared: {history.lost or 'batches'}"
        records = list(_records(told))
        if len(records) > MAX_RECORDS:
            return f"more than {MAX_RECORDS} blocks"
        header = (VERSION, self._epoch, self._rank, number + 1, number, self._id(number), len(records))
        chunks = (records[start : start + RECORDS_PER_CHUNK] for start in range(0, len(records), RECORDS_PER_CHUNK))
        return [(b"header", _pack(header)), *((b"chunk", _pack(chunk)) for chunk in chunks)]

    def _id(self, number: int) -> str:
        return f"{self._epoch}-{number}"


def _records(told: list[Told]) -> Iterator[tuple[int | None, tuple[int]]]:
    """A record for each block in device memory, parents first: one hash in each, as the draft's provider sends."""
    copies: Counter[int] = Counter()
    parents: dict[int, int | None] = {}
    for kind, hashes, *fields in told:
        stored = kind == "stored"
        if stored and fields[1]:
            parents.update(zip(hashes, (fields[0], *hashes[:-1]), strict=True))
        if fields[_MEDIUM[kind]] in _DEVICE:
            copies.update(hashes) if stored else copies.subtract(hashes)
    for value, count in copies.items():
        if count > 0:
            parent = parents.get(value)
            yield None if parent is None else _signed(parent), (_signed(value),)


_MEDIUM: Final = {"stored": 5, "removed": 0}
"""Place of the medium behind the hashes."""


def _signed(value: int) -> int:
    """The draft's consumer keeps hashes as signed numbers of 64 bits."""
    return value - 2 * _SIGN if value >= _SIGN else value
