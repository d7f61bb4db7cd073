"""Links over real connections: one that brings what is live, and a DEALER while replay is wanted.

All descriptors sit in one selector, so that a process with hundreds of idle sources pays only for those that speak.
libzmq signals a socket's descriptor once per change; therefore each socket is read until it says EAGAIN, or pumped again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import zmq

from kvevents.admission import admit
from kvevents.errors import EndpointError
from kvevents.stream import Ask, Source, Stream
from kvevents.subscriber.draining import drain, has_news
from kvevents.subscriber.live import ZmqLive
from kvevents.subscriber.options import DEFAULT_SOCKET_OPTIONS, SocketOptions
from kvevents.subscriber.sockets import Sockets, attach, drop, endpoint_errors, watch
from kvevents.subscriber.stalls import StallDetector
from kvevents.wire import replay_request_frames

DESCRIPTORS_PER_SOURCE: Final = 8
"""SUB, monitor (two), DEALER, and a TCP connection each, with some room."""

_ZERO_COPY_RECV: Final = 10
"""A context option for which pyzmq has no name. Off, since every message is copied into `bytes` anyway, and sharing the buffers
that were read from the socket costs a third more for messages of some kB, and keeps all of a buffer for any message in it."""


class ZmqTransport:
    """Links over real sockets, of `context` if one is given. Not thread-safe, as sockets are not."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        options: SocketOptions = DEFAULT_SOCKET_OPTIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.stalls = StallDetector(options.heartbeat_timeout_ms / 1000, clock)
        self.owns_context = context is None
        self.context = context or _private_context()
        self.selector = selectors.DefaultSelector()
        self._links: set[ZmqLink] = set()
        self._wake_lock = threading.RLock()
        """So that `wake` never writes to a descriptor that `close` has given back."""
        self._closed = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self.selector.register(self._wake_reader, selectors.EVENT_READ)

    def open(self, source: Source) -> ZmqLink:
        """Start connecting to `source`."""
        _allow_descriptors(DESCRIPTORS_PER_SOURCE * (len(self._links) + 1))
        link = ZmqLink(source, self)
        self._links.add(link)
        return link

    def forget(self, link: ZmqLink) -> None:
        """A link was closed."""
        self._links.discard(link)

    def wait(self, timeout: float | None) -> set[ZmqLink]:
        """Links whose descriptors are signalled."""
        self.stalls.begin_wait()
        signalled = {key.data for key, _ in self.selector.select(timeout) if key.data is not None}
        self.stalls.end_wait()
        return signalled

    @property
    def max_pause(self) -> float | None:
        """So often that a stall of the application is told from a source that is quiet."""
        return self.stalls.max_pause

    def fileno(self) -> int:
        """The selector's own descriptor, where the platform has one (epoll, kqueue)."""
        fileno = getattr(self.selector, "fileno", None)
        return -1 if fileno is None else int(fileno())

    def wake(self) -> None:
        """Leave something to read in the selector."""
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._wake_writer, b"\0")

    def close(self) -> None:
        """Close every link and the context, if it is ours."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_writer)
        for link in list(self._links):
            link.close()
        self.selector.close()
        os.close(self._wake_reader)
        if self.owns_context:
            # Not term(): a socket that an exception left half made would block it for ever.
            self.context.destroy(linger=0)


class ZmqLink:
    """What is live, and replay, of one stream."""

    def __init__(self, source: Source, transport: ZmqTransport) -> None:
        options, context, selector = transport.options, transport.context, transport.selector
        self._source = source
        self._transport = transport
        self._replay: zmq.Socket[bytes] | None = None
        self._read_first = 0
        """Live messages that may have been read while an answer was there."""
        self._most_read_first = options.receive_hwm or DEFAULT_SOCKET_OPTIONS.receive_hwm
        self._admission = admit(context, source.curve, source.endpoint)
        self._sockets = Sockets(context, options, self._admission, is_private=transport.owns_context)
        try:
            self._live = ZmqLive(source, self._sockets, selector, self, transport.stalls)
        except BaseException:
            self._close_admission()
            raise

    def pump(self, stream: Stream[Any], now: float, limit: int) -> bool:
        """Feed live messages, connection changes and replayed messages to `stream`."""
        more = self._live.pump(stream, now, limit)
        if more and self._live_comes_first(stream, now, limit):
            return True
        self._read_first = 0
        return self._pump_replay(stream, now, limit) or more

    def _live_comes_first(self, stream: Stream[Any], now: float, limit: int) -> bool:
        """Whether to read on what is live before an answer that is there.

        It may have been sent before the answer, and by a life that has ended: the stream would drop it. Not where something is
        missing, since live messages only wait then; and not for more of them than a socket holds, or a busy stream would never
        take an answer.
        """
        if self._replay is None or not stream.coming(1) or self._read_first >= self._most_read_first:
            return False
        if not has_news(self._replay):
            self._read_first = 0
            return False
        self._read_first += limit
        stream.replay_waits(now)
        return True

    @property
    def fault(self) -> str:
        """Why there is no live connection."""
        return self._live.fault

    def deadline(self) -> float | None:
        """When the live connection wants to be pumped though nothing has come."""
        return self._live.deadline()

    def _pump_replay(self, stream: Stream[Any], now: float, limit: int) -> bool:
        if self._replay is None:
            return False
        messages, drained = drain(self._replay, limit)
        for frames in messages:
            stream.receive_replay(frames, now)
        return not drained

    def send(self, ask: Ask) -> None:
        """Send a replay request. One that the socket refuses is one that is not answered: the stream asks again."""
        if ask.fresh:
            self.end_replay()
        if self._replay is None and self._source.replay_endpoint is not None:
            self._replay = self._sockets.open(zmq.DEALER, self._source.replay_endpoint)
            try:
                # Unlimited: whatever we do not take at once, an engine's ROUTER drops at 1,000 queued messages.
                self._replay.set(zmq.RCVHWM, 0)
                attach(self._replay, self._source.replay_endpoint, bind=False)
                with endpoint_errors(self._source.replay_endpoint, f"cannot wait for {self._source.replay_endpoint}"):
                    watch(self._transport.selector, self._replay, self)
            except BaseException:
                self.end_replay()
                raise
        if self._replay is not None:
            try:
                self._replay.send_multipart(replay_request_frames(ask.start), zmq.DONTWAIT)
            except zmq.Again:
                # libzmq never connects again to a peer that broke the protocol, as one that is no replay endpoint does.
                self.end_replay()

    def end_replay(self) -> None:
        """Close the DEALER."""
        if self._replay is not None:
            drop(self._transport.selector, self._replay)
            self._replay = None

    def close(self) -> None:
        """Close all sockets of this link."""
        self.end_replay()
        self._live.close()
        self._close_admission()
        self._transport.forget(self)

    def _close_admission(self) -> None:
        if self._admission is not None:
            self._admission.close()


def _private_context() -> zmq.Context[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    # A libzmq without the option is only slower.
    with contextlib.suppress(zmq.ZMQError):
        context.set(_ZERO_COPY_RECV, 0)
    return context


def _allow_descriptors(needed: int) -> None:
    """Lift the soft limit of open files towards the hard one, as servers do; libzmq gives no error it could be mapped from."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + 256
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return
    lifted = wanted * 2 if hard == resource.RLIM_INFINITY else min(hard, wanted * 2)
    if lifted < wanted:
        raise EndpointError(
            f"{needed} descriptors are needed but the hard limit is {hard}; raise it (ulimit -Hn)", errno=errno.EMFILE
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (lifted, hard))
