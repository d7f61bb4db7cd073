r"""Serves placement snapshots as in SGLang's draft `snapshot-v1` (sgl-project/sglang, pull request 34407), beside replay.

A DEALER sends `["", "snapshot-v1"]` to a ROUTER socket and gets messages `["", kind, payload]`: a `header`, `chunk`s of records
`[parent, [hash]]`, and an empty `end`; or an `error` with a reason. The header is
`[version, epoch, replica_rank, resume_seq, barrier_seq, barrier_id, record_count]`. A publisher with a snapshot endpoint adds
information to its live stream, on which consumers of the draft rely:

- The topic of every batch ends with `\0sgl-kv-epoch=` and the epoch, which differs in each incarnation of the sender.
- A request inserts a *barrier* into the live batches: an empty batch with the next number, whose topic continues with
  `\0sgl-kv-snapshot=` and the id of the barrier. The snapshot is the state after it, and `resume_seq` the number after it.
- The consumer waits for that barrier before it uses the snapshot, and then needs every number from `resume_seq` on.

Theory of operation. The thread of the server requests a barrier. The sending thread, which assigns the numbers, sends it. The
server then builds a snapshot from what the replay buffer has up to the barrier, in a compactor of its own, and answers all
requests that came before. A snapshot has placements only: for each block in device memory its hash and its parent's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.events import MEDIUM_GPU
from kvevents.publisher.compaction import Compactor, EventTuple
from kvevents.publisher.replay_buffer import ReplayBuffer
from kvevents.publisher.replay_server import ReplySession, StreamingRouter
from kvevents.publisher.settings import SnapshotServerSettings
from kvevents.publisher.zmq_sockets import Socket

logger = logging.getLogger(__name__)

VERSION: Final = 1
REQUEST: Final = b"snapshot-v1"
MAX_RECORDS: Final = 10_000_000
"""Records of one snapshot that the consumer of the draft accepts."""

_DEVICE_MEDIA: Final = (None, MEDIUM_GPU)
_MEDIUM_INDEX: Final = {"stored": 5, "removed": 0}
"""Index of the medium among the fields after the hashes, by kind of event."""
_SIGN_BIT: Final = 1 << 63
_pack: Final = msgspec.msgpack.encode

Message = tuple[bytes, bytes]
"""Kind and payload."""


def live_topic(topic: bytes, epoch: str) -> bytes:
    """Return the topic of live batches in the draft. Subscriptions are prefixes, so subscribers to `topic` still get them."""
    return topic + b"\0sgl-kv-epoch=" + epoch.encode()


class _WaitingRequest(NamedTuple):
    """A request that waits for a snapshot."""

    identity: bytes
    since: float
    """When its barrier was requested, or when it arrived (monotonic seconds)."""


class SnapshotServer(StreamingRouter):
    """Answers requests for placement snapshots from a compacting `ReplayBuffer`.

    `run` is the body of the `zmq-snapshot` thread. The sending thread polls `barrier_requested`; it then sends a barrier and
    calls `barrier_sent`.
    """

    name = "snapshot"

    def __init__(
        self,
        socket: Socket,
        buffer: ReplayBuffer,
        epoch: str,
        rank: int,
        settings: SnapshotServerSettings,
        log_interval: float,
    ) -> None:
        super().__init__(socket, settings, log_interval)
        self._limits = settings
        self._buffer = buffer
        self._epoch = epoch
        self._rank = rank
        self.barrier_requested = False
        self._barrier: int | None = None
        """Number of the last barrier, until its snapshot is built."""
        self._new_requests: list[_WaitingRequest] = []
        """Requests that wait for the next barrier to be requested."""
        self._barrier_requests: list[_WaitingRequest] = []
        """Requests that wait for the requested barrier."""
        self._next_barrier_at = 0.0

    # --- called by the sending thread

    def barrier_topic(self, topic: bytes, number: int) -> bytes:
        """Return the topic of the barrier with this number; `topic` is that of ordinary batches."""
        return topic + b"\0sgl-kv-snapshot=" + self._barrier_id(number).encode()

    def barrier_sent(self, number: int) -> None:
        """Note that the barrier was sent with this number, and that no later batch was sent."""
        self._barrier = number
        self.barrier_requested = False  # last: while it is true, the other thread requests no barrier
        self.wake()

    # --- requests

    def _has_room(self) -> bool:
        waiting = len(self._new_requests) + len(self._barrier_requests)
        return len(self._sessions) + waiting < self._limits.max_sessions

    def _on_request(self, frames: list[bytes]) -> None:
        identity = frames[0]
        waiting = (*self._new_requests, *self._barrier_requests)
        if len(frames) != 3 or frames[1] or frames[2] != REQUEST:
            self._count["malformed"] += 1
            self._start_session(identity, "invalid snapshot-v1 request")
        elif identity in self._sessions or any(each.identity == identity for each in waiting):
            # One request at a time, so that no consumer has several snapshots held for it.
            self._count["refused"] += 1
        else:
            self._new_requests.append(_WaitingRequest(identity, monotonic()))

    def run_once(self) -> None:
        """Serve requests as every server does, and build or request a snapshot if one is due."""
        super().run_once()
        now = monotonic()
        if self._barrier is not None:
            number, self._barrier = self._barrier, None
            self._answer_waiting(self._build(number))
            # Wait as long as building took: repeated requests get at most half of this thread.
            self._next_barrier_at = max(now + self._limits.min_interval, 2 * monotonic() - now)
        elif self.barrier_requested and self._is_overdue(now):
            self.barrier_requested = False
            self._answer_waiting("no barrier was sent in time; request again")
        elif self._new_requests and not self.barrier_requested and now >= self._next_barrier_at:
            self._request_barrier()

    def _is_overdue(self, now: float) -> bool:
        return bool(self._barrier_requests) and now - self._barrier_requests[0].since > self._limits.barrier_timeout

    def _request_barrier(self) -> None:
        now = monotonic()
        self._barrier_requests = [each._replace(since=now) for each in self._new_requests]
        self._new_requests = []
        snapshots = {id(session.messages) for session in self._sessions.values() if session.messages}
        if len(snapshots) >= self._limits.max_snapshots:
            self._answer_waiting("snapshot provider busy")
        else:
            self.barrier_requested = True

    def _wait_seconds(self) -> float:
        due = self._next_barrier_at if self._new_requests and not self.barrier_requested else float("inf")
        return min(super()._wait_seconds(), max(0.0, due - monotonic()))

    def _answer_waiting(self, reply: list[Message] | str) -> None:
        """Start the replies to all requests that wait for the requested barrier."""
        requests, self._barrier_requests = self._barrier_requests, []
        for request in requests:
            self._start_session(request.identity, reply)

    # --- replies

    def _reply_to(self, request: list[Message] | str) -> tuple[Sequence[Any], list[bytes]]:
        if isinstance(request, str):
            return (), [b"", b"error", request.encode()]
        return request, [b"", b"end", b""]

    def _frames_of(self, message: Message) -> list[bytes]:
        return [b"", *message]

    def _on_no_progress(self, session: ReplySession, now: float) -> None:
        if now - session.started_at > self._limits.reply_timeout:
            self._end_session(session, "abandoned")
            logger.warning(
                "abandoned a placement snapshot: its consumer did not read it within %g seconds", self._limits.reply_timeout
            )

    def _build(self, number: int) -> list[Message] | str:
        """Return the messages of the snapshot after the barrier with this number, or the reason why it cannot be built."""
        source = self._buffer.history_up_to(number)
        compactor = Compactor.create()
        if source is None or compactor is None:
            return "later batches have already been compacted; request again"
        history, batches = source
        scratch = ReplayBuffer(0, compactor)
        if history is None:
            scratch.restore(-1, [], False, batches)
        else:
            scratch.restore(*history, batches)
        events = scratch.history_events()
        if events is None:
            reason = compactor.unavailable_reason or "batches"
            return f"the resident blocks are unknown until the cache is cleared: {reason}"
        records = list(_records_of(events))
        if len(records) > MAX_RECORDS:
            return f"more than {MAX_RECORDS} blocks"
        header = (VERSION, self._epoch, self._rank, number + 1, number, self._barrier_id(number), len(records))
        size = self._limits.records_per_chunk
        chunks = (records[start : start + size] for start in range(0, len(records), size))
        return [(b"header", _pack(header)), *((b"chunk", _pack(chunk)) for chunk in chunks)]

    def _barrier_id(self, number: int) -> str:
        return f"{self._epoch}-{number}"


def _records_of(events: list[EventTuple]) -> Iterator[tuple[int | None, tuple[int]]]:
    """Yield a record for each block in device memory, parents first, with one hash each as the draft's provider sends them."""
    copies: Counter[int] = Counter()
    parents: dict[int, int | None] = {}
    for kind, hashes, *fields in events:
        is_store = kind == "stored"
        if is_store and fields[1]:
            parents.update(zip(hashes, (fields[0], *hashes[:-1]), strict=True))
        if fields[_MEDIUM_INDEX[kind]] in _DEVICE_MEDIA:
            copies.update(hashes) if is_store else copies.subtract(hashes)
    for value, count in copies.items():
        if count > 0:
            parent = parents.get(value)
            yield None if parent is None else _signed(parent), (_signed(value),)


def _signed(value: int) -> int:
    """Return the hash as a signed 64-bit number, as the consumer of the draft stores it."""
    return value - 2 * _SIGN_BIT if value >= _SIGN_BIT else value
