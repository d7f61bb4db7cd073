"""The event socket of a stream: batches of one sender, to all who subscribe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final, cast

import zmq
import zmq.backend

from kvevents.admission import Admission
from kvevents.bulk import FRAMES, bulk
from kvevents.publisher import sockets
from kvevents.publisher.connecting import Connecting
from kvevents.publisher.kept import Numbered

_SUBSCRIPTIONS_AT_ONCE: Final = 1000


class EventSocket:
    """An XPUB socket of one sending thread, which alone calls `send`, `look_around` and `end`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        *,
        hwm: int,
        bind: bool,
        admission: Admission | None,
        affinity: int,
    ) -> None:
        """`affinity` is the one of its I/O threads. Raises `EndpointError`."""
        self.subscriptions = 0
        """As of the last `look_around`; a consumer with two topics counts twice."""
        # XPUB is PUB that also tells who subscribed; to subscribers the two are the same.
        with sockets.opened(context, zmq.XPUB, admission, endpoint) as socket:
            socket.set_hwm(hwm)
            socket.affinity = affinity
            socket.xpub_verboser = True
            self._connecting = None if bind else Connecting(socket, endpoint, "event")
            self.bound = sockets.bind(socket, endpoint, "event") if bind else endpoint
            """The endpoint, with the port that the system chose; in connect mode, where it connects to."""
            self._socket = socket
        self._bulk = bulk()
        # The backend's own send: pyzmq's send_multipart costs six times as much for three frames.
        self._send: Callable[..., Any] = zmq.backend.Socket.send.__get__(socket)

    def send(self, topic: bytes, batches: Sequence[Numbered]) -> None:
        """Send batches in order to each consumer that subscribed to a prefix of the topic."""
        if self._bulk is None:
            self._send_frames(topic, batches)
        elif (done := self._bulk.send(self._socket.underlying, topic, batches)) < FRAMES * len(batches):
            self._send_frames(topic, batches[done // FRAMES :], done % FRAMES)

    def _send_frames(self, topic: bytes, batches: Sequence[Numbered], done: int = 0) -> None:
        """The same, frame by frame; the first `done` ones are out already."""
        send = self._send
        for seq, payload in batches:
            if done < 1:
                send(topic, zmq.SNDMORE)
            if done < 2:
                send(seq.to_bytes(8, "big"), zmq.SNDMORE)
            send(payload)
            done = 0

    def look_around(self) -> None:
        """Read subscriptions, and reconnect if that is due; to be called now and then."""
        if self._connecting is not None:
            self._connecting.look_after(monotonic())
        for _ in range(_SUBSCRIPTIONS_AT_ONCE):
            if not cast("int", self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            self.subscriptions += {b"\1": 1, b"\0": -1}.get(self._socket.recv(zmq.DONTWAIT)[:1], 0)

    def end(self, deadline: float | None) -> float:
        """Close the socket; libzmq flushes until `deadline` (monotonic seconds; None for no time). Returns when it gives up."""
        if self._connecting is not None:
            self._connecting.close()
        return sockets.close_by(self._socket, deadline)
