"""Connecting an event socket to a consumer that listens, for as long as the publisher lives."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents.publisher import sockets

CONNECT_ANEW_SECONDS: Final = 5.0
"""After which we connect again where libzmq does not."""
_CHANGES_AT_ONCE: Final = 100

_CHANGES: Final = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED


class Connecting:
    """The connection of `socket` to `endpoint`. Raises `EndpointError`.

    libzmq tries again after most failures, and its monitor says so; after a peer broke the protocol (another kind of socket,
    other keys) it never does, though the right one may come to that address.
    """

    def __init__(self, socket: sockets.Socket, endpoint: str, what: str) -> None:
        self._socket: Final = socket
        self._endpoint: Final = endpoint
        self._anew_at: float | None = None
        self._monitor: Final[sockets.Socket] = socket.get_monitor_socket(_CHANGES)
        try:
            sockets.connect(socket, endpoint, what)
        except BaseException:
            self.close()
            raise

    def look_after(self, now: float) -> None:
        """To be called now and then; `now` is in monotonic seconds."""
        for _ in range(_CHANGES_AT_ONCE):
            if not cast("int", self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
                break
            change = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))["event"]
            self._anew_at = now + CONNECT_ANEW_SECONDS if change == zmq.Event.DISCONNECTED else None
        if self._anew_at is not None and now >= self._anew_at:
            self._anew_at = None
            with suppress(zmq.ZMQError):  # where libzmq has forgotten the endpoint as well
                self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    def close(self) -> None:
        """Watch it no more; the socket stays."""
        with suppress(zmq.ZMQError):  # of a context that was ended
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
