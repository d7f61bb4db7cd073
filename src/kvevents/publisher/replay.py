"""Replay beside publishing: a ROUTER socket with a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from kvevents.publisher.buffer import ReplayBuffer
from kvevents.publisher.replies import MAX_WAITING_REQUESTS, ReplyServer, Session
from kvevents.publisher.sockets import Socket
from kvevents.wire.framing import Malformed, parse_replay_request, replay_batch_frames, replay_end_frames

__all__ = ["MAX_REPLAY_SESSIONS", "MAX_WAITING_REQUESTS", "REPLAY_SEND_LIMIT", "REPLAY_STALL_TIMEOUT", "ReplayServer"]

logger = logging.getLogger(__name__)

REPLAY_STALL_TIMEOUT: Final = 30.0
"""Seconds without progress, beside those that large messages may take, after which a reply is given up: a consumer that busy
has lost its connection or its mind."""
MAX_REPLAY_SESSIONS: Final = 256
"""Replies in progress at once; each may hold a buffer's worth of batches. Further requests wait in ZeroMQ."""
REPLAY_SEND_LIMIT: Final = 256
"""Batches in one consumer's pipe (ZMQ_SNDHWM): enough to keep TCP busy for a millisecond, little enough to bound memory. Of
large ones there are fewer (`UNSENT_BYTES`)."""


class ReplayServer(ReplyServer):
    """Answers replay requests on a bound ROUTER socket from a `ReplayBuffer`.

    `topic` is repeated in every reply, or None for the shape of releases before vLLM 0.26 and SGLang 0.5.22. `run` is the body
    of the `zmq-replay` thread.
    """

    name = "replay"

    def __init__(self, socket: Socket, buffer: ReplayBuffer, topic: bytes | None) -> None:
        super().__init__(socket)
        self._buffer = buffer
        self._topic = topic

    def _receive(self, frames: list[bytes]) -> None:
        request = parse_replay_request(frames)
        if isinstance(request, Malformed):
            self._count["malformed"] += 1
            logger.debug("ignored a replay request: %s", request.reason)
            return
        self._open(request.identity, request.start)

    def _answer(self, request: int) -> tuple[Sequence[Any], list[bytes]]:
        return self._buffer.since(request), replay_end_frames(self._topic is not None)

    def _spelled(self, message: tuple[int, bytes]) -> list[bytes]:
        return replay_batch_frames(self._topic, *message)

    def _has_room(self) -> bool:
        return len(self._sessions) < MAX_REPLAY_SESSIONS

    def _stalled(self, session: Session, now: float) -> None:
        if now - session.progressed > self._patience_with(session, REPLAY_STALL_TIMEOUT):
            self._end(session, "abandoned")
            logger.warning("gave up a replay: its consumer read nothing for %g seconds", REPLAY_STALL_TIMEOUT)
