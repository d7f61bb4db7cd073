"""The live connection of one stream by libzmq: a SUB socket and its monitor."""

from __future__ import annotations

import logging
import math
from selectors import BaseSelector
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents.stream import Source, Stream
from kvevents.subscriber.draining import drain, drain_live, has_news
from kvevents.subscriber.sockets import Sockets, attach, drop, end_monitor, endpoint_errors, monitor, watch
from kvevents.subscriber.stalls import StallDetector

_UP: Final = zmq.Event.HANDSHAKE_SUCCEEDED
_DOWN: Final = zmq.Event.DISCONNECTED
_RETRIED: Final = zmq.Event.CONNECT_RETRIED
_REACHED: Final = zmq.Event.CONNECTED
"""Something accepts connections; whether it is a publisher shows afterwards."""
_NOTHING: Final = "nothing listens there, or it cannot be reached"
_NO_PUBLISHER: Final = "what listens there is no publisher of events, has other keys, or closes at once"

log = logging.getLogger(__name__)


class ZmqLive:
    """SUB socket and monitor; `link` is what the selector tells of."""

    def __init__(self, source: Source, sockets: Sockets, selector: BaseSelector, link: object, stalls: StallDetector) -> None:
        self._source = source
        self._sockets = sockets
        self._selector = selector
        self._link = link
        self._stalls = stalls
        self._options = sockets.options
        self._ever_up = False
        self._is_up = False
        """What the stream was told last."""
        self._is_down = False
        """The connection has ended, and no newer one is up. The stream hears of it after what came before."""
        self._announce: float = 0
        """Messages of earlier connections that the socket may still hold, when `connected` is due; 0 when it is not."""
        self._reopen_at: float | None = None
        self._was_reached = False
        """Whether the last attempt to connect has found something that accepts connections."""
        self._retries_soon = False
        """A connection has ended. libzmq reports that it will retry, which is no failure of an attempt yet."""
        self.fault = ""
        """Why there is no connection. It was logged."""
        self._monitor: zmq.Socket[bytes] | None = None
        self._subscribe()

    def _subscribe(self) -> None:
        source, selector = self._source, self._selector
        self._sub = self._sockets.open(zmq.SUB, source.endpoint)
        try:
            with endpoint_errors(source.endpoint, f"cannot follow {source.endpoint}"):
                self._monitor = monitor(self._sub, _UP | _DOWN | _RETRIED | _REACHED)
                self._sub.set(zmq.RCVHWM, self._options.receive_hwm)
                self._sub.subscribe(source.topic.encode())
                watch(selector, self._sub, self._link)
                watch(selector, self._monitor, self._link)
                attach(self._sub, source.endpoint, bind=source.bind)
        except BaseException:
            self.close()
            raise

    def deadline(self) -> float | None:
        """When a connection that libzmq has given up is to be made anew; all else libzmq keeps time of itself."""
        return self._reopen_at

    def pump(self, stream: Stream[Any], now: float, limit: int) -> bool:
        """Feed live messages and connection changes to `stream`.

        libzmq reports changes on another socket, so their place among the messages is not known exactly. The monitor is read
        after the messages: a change before one of these messages is known by then. While no new connection is up, all messages
        are from before the end of the old one. They are fed first, until a read that began after it was known finds nothing.
        """
        before = self._changes() if self._stalls.is_stalled else []
        if _DOWN in before:
            self._begin_again(stream)
            return True
        payloads, messages, drained = drain_live(self._sub, stream.topic, stream.coming(limit), limit)
        changes = before + self._changes()
        if changes:
            self._reopen_at = self._unless_retried(now) if changes[-1] == _DOWN else None
            self._look_for_faults(changes)
            changes = [change for change in changes if change in {_UP, _DOWN}]
        if not self._ever_up and (_UP in changes or messages or self._source.endpoint.startswith("inproc://")):
            self._ever_up = self._is_up = True
            stream.connected(now)
            changes = changes[changes.index(_UP) + 1 :] if _UP in changes else changes
        was_down, self._is_down = self._is_down, self._is_down or _DOWN in changes
        if _UP in changes:
            # Any of the messages may be of the new connection.
            was_down = False
            self._lose(stream)
            self._announce = 0 if changes[-1] == _DOWN else (self._options.receive_hwm or math.inf) + 1
        if payloads:
            stream.receive_run(payloads, now)
        for frames in messages:
            stream.receive_live(frames, now)
        if self._announce:
            self._announce_when_drained(stream, now, len(payloads) + len(messages), drained=drained)
        if was_down and drained:
            self._lose(stream)
        if drained and self._reopen_at is not None and now >= self._reopen_at:
            self._renew()
        return not drained or self._is_down

    def _begin_again(self, stream: Stream[Any]) -> None:
        """Leave a socket whose connection was lost while nothing read it for longer than heartbeats wait; replay has the rest.

        If it was full, its pongs waited behind the messages, and libzmq 4.3.5 ends the process when it is read (its issues 3596
        and 3937).
        """
        self._announce = 0
        self._lose(stream)
        self._renew()

    def _lose(self, stream: Stream[Any]) -> None:
        self._is_down = False
        if self._is_up:
            self._is_up = False
            stream.disconnected()

    def _look_for_faults(self, changes: list[int]) -> None:
        """Log why there is no connection: once, until there is one or the reason is another."""
        fault = self.fault
        for change in changes:
            if change == _REACHED:
                self._was_reached = True
            elif change == _UP:
                self._was_reached, fault = False, ""
            elif change == _DOWN:
                fault = _NO_PUBLISHER if self._was_reached else fault
                self._was_reached, self._retries_soon = False, True
            elif self._retries_soon:
                self._retries_soon = False
            elif fault != _NO_PUBLISHER:
                fault = _NOTHING
        if fault != self.fault:
            self.fault = fault
            if fault:
                log.warning("%s: no connection: %s; it is tried again", self._source.endpoint, fault)
            else:
                log.info("%s: connected", self._source.endpoint)

    def _unless_retried(self, now: float) -> float | None:
        """When to connect anew unless libzmq says that it does.

        It never does after a peer broke the protocol (another kind of socket, other keys, too large a message).
        """
        return None if self._source.bind else now + self._options.reconnect_max_ms / 1000

    def _renew(self) -> None:
        self._reopen_at = None
        self.close()
        self._subscribe()

    def _announce_when_drained(self, stream: Stream[Any], now: float, count: int, *, drained: bool) -> None:
        """`connected` comes after every message of the old connection; those are at most what the socket can hold."""
        self._announce = 0 if drained else max(0, self._announce - count)
        if not self._announce:
            self._is_up = True
            stream.connected(now)

    def _changes(self) -> list[int]:
        if self._monitor is None or not has_news(self._monitor):
            return []
        messages, _ = drain(self._monitor, 1_000)
        return [int(parse_monitor_message(frames)["event"]) for frames in messages]

    def close(self) -> None:
        """Close both sockets."""
        if not self._sub.closed:
            if self._monitor is not None:
                end_monitor(self._sub)
                drop(self._selector, self._monitor)
                self._monitor = None
            drop(self._selector, self._sub)
