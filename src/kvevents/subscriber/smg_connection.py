"""A connection to a worker of SMG (Shepherd Model Gateway), whose events come over gRPC: `grpc://HOST:PORT`.

Theory of operation. The native client (`native/smg`) calls the worker, begins each call with the first batch, and numbers the
batches of a call as a publisher does: numbers of lost batches are missing. The batches of a call are stored here, and
answer the stream's requests for replay. Two calls can reach different engines, so each call is a separate incarnation.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvevents.endpoints import GRPC
from kvevents.errors import ConfigError, EndpointError
from kvevents.native_module import require_native
from kvevents.stream import FetchRequest, Source, Stream
from kvevents.subscriber.multiplexer import Connection
from kvevents.subscriber.socket_owner import SocketOwner
from kvevents.wire.framing import live_frames, replay_batch_frames, replay_end_frames

MAX_STORED_BYTES: Final = 16 << 20
"""Maximum number of bytes of payloads that are stored to answer requests for replay. A request for older payloads begins a new
call, which sends all batches again."""
_CONNECTED: Final = -1
"""Number with which the native client reports the beginning of a call; with -2 it reports the end of a call."""
_INCOMPLETE: Final = -3
"""Number with which the native client reports that further parts of a snapshot follow; with -4 it reports the last part."""
_WAKEUP_BYTES: Final = 4_096


class SmgConnection:
    """The stream of events of one worker, for one source."""

    def __init__(self, source: Source, owner: SocketOwner, on_close: Callable[[Connection], None]) -> None:
        if source.bind or source.curve is not None or source.topic:
            reason = f"{GRPC} endpoints have no topic, no CURVE keys, and are not bound"
            raise ConfigError(f"invalid source {source.label}: {reason}")
        native = require_native(f"an endpoint {GRPC}HOST:PORT")
        self.fault = "the worker has not answered yet"
        self._owner: Final = owner
        self._on_close: Final = on_close
        self._reader, writer = socket.socketpair()
        self._reader.setblocking(False)
        try:
            self._subscription: Any = native.SmgSubscription(source.endpoint.removeprefix(GRPC), writer.fileno())
        except (ValueError, OSError) as error:
            self._reader.close()
            raise EndpointError(f"cannot follow {source.endpoint}: {error}", endpoint=source.endpoint) from error
        finally:
            writer.close()
        self._batches: deque[tuple[int, bytes]] = deque()
        """Numbers and payloads of the current call; the oldest are dropped if the total exceeds `MAX_STORED_BYTES`."""
        self._stored_bytes = 0
        self._first = 0
        """The lowest stored number; 0 if no batch was dropped."""
        self._replies: deque[list[bytes]] = deque()
        self._is_connected = self._has_begun = False
        owner.selector.register(self._reader, selectors.EVENT_READ, frozenset({self}).__iter__)

    def deadline(self) -> None:
        """Return None: the native client has all timers."""

    def feed_stream(self, stream: Stream, now: float, limit: int) -> bool:
        """Feed batches, changes of the connection and replies to `stream`. Return True if there may be more to read."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(_WAKEUP_BYTES)
        arrivals = self._subscription.take(limit)
        for number, content in arrivals:
            if number >= 0:
                self._store(number, content)
                stream.receive_live(live_frames(b"", number, content), now)
            elif number == _CONNECTED:
                self._begin_stream(stream, now)
            elif number <= _INCOMPLETE:
                stream.mark_incomplete(is_incomplete=number == _INCOMPLETE)
            else:
                reason = content.decode(errors="replace")
                self.fault = f"no connection: {reason}"
                if self._is_connected:
                    self.fault, self._is_connected = f"the worker's stream of events has ended: {reason}", False
                    stream.end_connection()
        for _ in range(min(limit, len(self._replies))):
            stream.receive_replay(self._replies.popleft(), now)
        return len(arrivals) == limit or bool(self._replies)

    def _begin_stream(self, stream: Stream, now: float) -> None:
        self._batches.clear()
        self._replies.clear()
        self._stored_bytes = self._first = 0
        self.fault, self._is_connected = "", True
        stream.mark_incomplete(is_incomplete=False)
        stream.begin_connection(now)
        if self._has_begun:
            stream.start_over("the worker's stream of events has begun again")
        self._has_begun = True

    def _store(self, number: int, payload: bytes) -> None:
        self._batches.append((number, payload))
        self._stored_bytes += len(payload)
        while self._stored_bytes > MAX_STORED_BYTES and len(self._batches) > 1:
            self._stored_bytes -= len(self._batches.popleft()[1])
            self._first = self._batches[0][0]

    def request_replay(self, request: FetchRequest) -> None:
        """Answer with stored batches of this call, or begin a new call if the requested batches are no longer stored."""
        if request.needs_new_connection:
            self._replies.clear()
        if request.start < self._first:
            self._subscription.restart()
            return
        batches = [(number, payload) for number, payload in self._batches if number >= request.start]
        self._replies.extend(replay_batch_frames(b"", number, payload) for number, payload in batches)
        self._replies.append(replay_end_frames(has_topic=True))
        self._owner.marked_connections.add(self)

    def end_replay(self) -> None:
        """Drop the remaining replies."""
        self._replies.clear()

    def close(self) -> None:
        """End the call. Idempotent."""
        with contextlib.suppress(KeyError, ValueError):
            self._owner.selector.unregister(self._reader)
        self._reader.close()
        self._subscription = None  # dropping the object ends the call
        self._on_close(self)
