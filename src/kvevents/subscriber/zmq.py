"""Links over ZeroMQ: a SUB socket with its monitor, and a DEALER while replay is wanted.

All descriptors sit in one selector, so that a process with hundreds of idle sources pays only for those that speak.
libzmq signals a socket's descriptor once per change; therefore each socket is read until it says EAGAIN, or pumped again.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final

import zmq
import zmq.backend
from zmq.utils.monitor import parse_monitor_message

from kvevents.admission import admit
from kvevents.bulk import FRAMES, bulk
from kvevents.errors import EndpointError
from kvevents.stream import Ask, Source, Stream
from kvevents.wire import Live, parse_live, replay_request_frames


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Limits and times of the sockets of one stream."""

    receive_hwm: int = 100_000
    """Live messages that wait in the socket while the application is busy; beyond it the publisher drops; replay mends that."""
    max_message_bytes: int = 256 * 1024 * 1024
    """A larger message makes libzmq close the connection: eight times what the decoder accepts, so only abuse reaches it."""
    reconnect_ms: int = 100
    reconnect_max_ms: int = 5_000
    """Pause between attempts to connect: doubles, jittered, up to this."""
    heartbeat_ms: int = 5_000
    handshake_ms: int = 5_000
    """A peer that accepts a connection and says nothing for this long is tried anew; libzmq itself waits 30 s."""
    heartbeat_timeout_ms: int = 15_000
    """A peer that answers no ping for this long is disconnected: half-open connections end here."""
    keepalive_idle_s: int = 30


DEFAULT_SOCKET_OPTIONS: Final = SocketOptions()
DESCRIPTORS_PER_SOURCE: Final = 8
"""SUB, monitor (two), DEALER, and a TCP connection each, with some room."""

_UP: Final = zmq.Event.HANDSHAKE_SUCCEEDED
_DOWN: Final = zmq.Event.DISCONNECTED
_recv = zmq.backend.Socket.recv
_get = zmq.backend.Socket.get
_DONTWAIT: Final = int(zmq.DONTWAIT)
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_pack_seq: Final = Struct(">Q").pack
_ZERO_COPY_RECV: Final = 10
"""A context option for which pyzmq has no name. Off, since every message is copied into `bytes` anyway, and sharing the buffers
that were read from the socket costs a third more for messages of some kB, and keeps all of a buffer for any message in it."""


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """One message without waiting; raises `zmq.Again` when there is none.

    The wrappers of pyzmq cost three times what libzmq does here; this calls its backend directly.
    """
    frames = [_recv(socket, _DONTWAIT)]
    while _get(socket, _RCVMORE):
        frames.append(_recv(socket, _DONTWAIT))
    return frames


def drain(socket: zmq.Socket[bytes], limit: int) -> tuple[list[list[bytes]], bool]:
    """Up to `limit` messages, and whether there were no more."""
    messages: list[list[bytes]] = []
    try:
        for _ in range(limit):
            messages.append(receive(socket))  # noqa: PERF401 - what was read before the exception must be kept
    except zmq.Again:
        return messages, True
    return messages, False


def drain_run(socket: zmq.Socket[bytes], topic: bytes, numbers: range) -> tuple[list[bytes], list[list[bytes]], bool]:
    """Payloads of messages with this topic and these numbers, then what came instead if anything did, and as `drain`.

    It asks no message where it ends: three frames with the topic and exactly the number that was due are the batch that was
    due. Where a message had more frames than those, the rest of it does not look like that, and `drain_live` asks. There may be
    more with these numbers, unless something came instead.
    """
    many = bulk()
    if many is None or not numbers:
        return _drain_run(socket, topic, numbers)
    payloads, odd, drained = many.receive(socket.underlying, topic, numbers.start, len(numbers))
    return payloads, _whole(socket, odd) if len(odd) == FRAMES else [odd] if odd else [], drained


def _drain_run(socket: zmq.Socket[bytes], topic: bytes, numbers: range) -> tuple[list[bytes], list[list[bytes]], bool]:
    """The same, frame by frame."""
    payloads: list[bytes] = []
    first = second = None
    try:
        for number in map(_pack_seq, numbers):
            first = _recv(socket, _DONTWAIT)
            second = _recv(socket, _DONTWAIT)
            third = _recv(socket, _DONTWAIT)
            if second != number or first != topic:
                return payloads, _whole(socket, [first, second, third]), False
            if not payloads and not int(_get(socket, _EVENTS)) & _POLLIN:
                # The only one, as when an engine has little to say; to be told so by zmq.Again takes three times as long.
                return [third], [], True
            payloads.append(third)
            first = second = None
    except zmq.Again:
        return payloads, [[frame for frame in (first, second) if frame is not None]] if first is not None else [], True
    return payloads, [], False


def drain_live(socket: zmq.Socket[bytes], limit: int) -> tuple[list[list[bytes]], bool]:
    """As `drain`, for messages of three frames, asking once a message instead of once a frame where it ends.

    That question costs as much as two frames. Three frames of which the last has no successor are a whole message, or several
    that have fewer frames each and mean nothing anyway.
    """
    messages: list[list[bytes]] = []
    while len(messages) < limit:
        frames: list[bytes] = []
        try:
            frames.append(_recv(socket, _DONTWAIT))
            frames.append(_recv(socket, _DONTWAIT))
            frames.append(_recv(socket, _DONTWAIT))
        except zmq.Again:
            if frames:
                messages.append(frames)
            return messages, True
        messages += _whole(socket, frames)
    return messages, False


def _whole(socket: zmq.Socket[bytes], frames: list[bytes]) -> list[list[bytes]]:
    """The message of these three frames; if it goes on, it is a longer one, or a good one behind one that was too short."""
    if not _get(socket, _RCVMORE):
        return [frames]
    while _get(socket, _RCVMORE):
        frames.append(_recv(socket, _DONTWAIT))
    good = frames[-3:]
    if len(frames) <= 5 and isinstance(parse_live(good), Live):
        return [frames[:-3], good]
    return [frames]


class ZmqTransport:
    """Links over real sockets. Not thread-safe, as sockets are not."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]] | None = None, options: SocketOptions = DEFAULT_SOCKET_OPTIONS
    ) -> None:
        self.options = options
        self._owned = context is None
        self._context = context or _private_context()
        self._selector = selectors.DefaultSelector()
        self._links: set[ZmqLink] = set()

    def open(self, source: Source) -> ZmqLink:
        """Start connecting to `source`."""
        _allow_descriptors(DESCRIPTORS_PER_SOURCE * (len(self._links) + 1))
        # inproc endpoints exist only within one context, by convention the process-wide one.
        context = zmq.Context.instance() if source.endpoint.startswith("inproc://") else self._context
        link = ZmqLink(source, context, self)
        self._links.add(link)
        return link

    def wait(self, timeout: float | None) -> set[ZmqLink]:
        """Links whose descriptors are signalled."""
        return {key.data for key, _ in self._selector.select(timeout)}

    def fileno(self) -> int:
        """The selector's own descriptor, where the platform has one (epoll, kqueue)."""
        fileno = getattr(self._selector, "fileno", None)
        return -1 if fileno is None else int(fileno())

    def close(self) -> None:
        """Close every link and the context, if it is ours."""
        for link in list(self._links):
            link.close()
        self._selector.close()
        if self._owned:
            # Not term(): a socket that an exception left half made would block it for ever.
            self._context.destroy(linger=0)

    def watch(self, socket: zmq.Socket[bytes], link: ZmqLink) -> None:
        """Wake `wait` when `socket` has news."""
        self._selector.register(socket.fileno(), selectors.EVENT_READ, link)

    def drop(self, socket: zmq.Socket[bytes]) -> None:
        """Stop watching a socket and close it."""
        if not socket.closed:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(socket.fileno())
            socket.close(linger=0)

    def forget(self, link: ZmqLink) -> None:
        """A link was closed."""
        self._links.discard(link)


class ZmqLink:
    """SUB socket, monitor and DEALER of one stream."""

    def __init__(self, source: Source, context: zmq.Context[zmq.Socket[bytes]], transport: ZmqTransport) -> None:
        self._source = source
        self._context = context
        self._transport = transport
        self._options = transport.options
        self._replay: zmq.Socket[bytes] | None = None
        self._ever_up = False
        self._announce = 0
        self._pumped_at: float | None = None
        self._admission = admit(context, source.curve, source.endpoint)
        self._subscribe()

    def _subscribe(self) -> None:
        source, transport = self._source, self._transport
        try:
            self._sub = self._open_socket(zmq.SUB, source.endpoint)
        except BaseException:
            self._close_admission()
            raise
        try:
            self._monitor = self._sub.get_monitor_socket(_UP | _DOWN)
            self._sub.set(zmq.RCVHWM, self._options.receive_hwm)
            self._sub.subscribe(source.topic.encode())
            transport.watch(self._sub, self)
            transport.watch(self._monitor, self)
            _attach(self._sub, source.endpoint, bind=source.bind)
        except BaseException:
            self.close()
            raise

    def pump(self, stream: Stream[Any], now: float, limit: int) -> bool:
        """Feed live messages, connection changes and replayed messages to `stream`."""
        # How long nobody has read before the first time is not known.
        stalled = self._pumped_at is None or (now - self._pumped_at) * 1000 > self._options.heartbeat_timeout_ms
        self._pumped_at = now
        before = self._changes() if stalled else []
        if _DOWN in before:
            self._begin_again(stream)
            return True
        payloads, messages, drained = drain_run(self._sub, stream.topic, stream.coming(limit))
        if not drained and (messages or not payloads):
            others, drained = drain_live(self._sub, limit - len(payloads))
            messages += others
        # The monitor is read after the messages: a change that came before one of them is known by now.
        changes = before + self._changes()
        if not self._ever_up and (_UP in changes or messages or self._source.endpoint.startswith("inproc://")):
            self._ever_up = True
            stream.connected(now)
            changes = changes[changes.index(_UP) + 1 :] if _UP in changes else changes
        for change in changes:
            if change == _DOWN:
                stream.disconnected()
                self._announce = 0
            else:
                self._announce = self._options.receive_hwm + 1
        if payloads:
            stream.receive_run(payloads, now)
        for frames in messages:
            stream.receive_live(frames, now)
        if self._announce:
            self._announce_when_drained(stream, now, len(payloads) + len(messages), drained=drained)
        more = self._pump_replay(stream, now, limit)
        return more or not drained

    def _begin_again(self, stream: Stream[Any]) -> None:
        """Leave a socket whose connection was lost while nobody read it for longer than heartbeats wait; replay has what waits.

        If it was full, its pongs waited behind the messages, and libzmq 4.3.5 ends the process when such a socket is read (its
        issues 3596 and 3937).
        """
        self._close_live()
        self._subscribe()
        stream.disconnected()
        self._announce = 0

    def _announce_when_drained(self, stream: Stream[Any], now: float, count: int, *, drained: bool) -> None:
        """`connected` comes after every message of the old connection; those are at most what the socket can hold."""
        self._announce = 0 if drained else max(0, self._announce - count)
        if not self._announce:
            stream.connected(now)

    def _changes(self) -> list[int]:
        if not int(_get(self._monitor, _EVENTS)) & _POLLIN:
            # Nearly always; to be told so by zmq.Again costs three times as much.
            return []
        messages, _ = drain(self._monitor, 1_000)
        return [int(parse_monitor_message(frames)["event"]) for frames in messages]

    def _pump_replay(self, stream: Stream[Any], now: float, limit: int) -> bool:
        if self._replay is None:
            return False
        messages, drained = drain(self._replay, limit)
        for frames in messages:
            stream.receive_replay(frames, now)
        return not drained

    def send(self, ask: Ask) -> None:
        """Send a replay request."""
        if ask.fresh:
            self.end_replay()
        if self._replay is None and self._source.replay_endpoint is not None:
            self._replay = self._open_socket(zmq.DEALER, self._source.replay_endpoint)
            # Unlimited: whatever we do not take at once, an engine's ROUTER drops at 1,000 queued messages.
            self._replay.set(zmq.RCVHWM, 0)
            self._transport.watch(self._replay, self)
            _attach(self._replay, self._source.replay_endpoint, bind=False)
        if self._replay is not None:
            self._replay.send_multipart(replay_request_frames(ask.start), zmq.DONTWAIT)

    def end_replay(self) -> None:
        """Close the DEALER."""
        if self._replay is not None:
            self._transport.drop(self._replay)
            self._replay = None

    def close(self) -> None:
        """Close all sockets of this link."""
        self.end_replay()
        self._close_live()
        self._close_admission()
        self._transport.forget(self)

    def _close_live(self) -> None:
        monitor = getattr(self, "_monitor", None)
        if not self._sub.closed:
            if monitor is not None:
                self._sub.disable_monitor()
                self._transport.drop(monitor)
            self._transport.drop(self._sub)

    def _close_admission(self) -> None:
        if self._admission is not None:
            self._admission.close()

    def _open_socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        try:
            socket: zmq.Socket[bytes] = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise EndpointError(f"no socket for {endpoint}: {error}; raise the limit of open files (ulimit -n)") from error
        options = self._options
        socket.linger = 0
        socket.set(zmq.MAXMSGSIZE, options.max_message_bytes)
        socket.set(zmq.RECONNECT_IVL, options.reconnect_ms)
        socket.set(zmq.RECONNECT_IVL_MAX, options.reconnect_max_ms)
        socket.set(zmq.HANDSHAKE_IVL, options.handshake_ms)
        socket.set(zmq.HEARTBEAT_IVL, options.heartbeat_ms)
        socket.set(zmq.HEARTBEAT_TIMEOUT, options.heartbeat_timeout_ms)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, options.keepalive_idle_s)
        if "[" in endpoint:
            socket.set(zmq.IPV6, 1)
        if self._admission is not None:
            self._admission.apply(socket)
        return socket


def _attach(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> None:
    try:
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        raise EndpointError(
            f"cannot {verb} {endpoint}: {error}; expected tcp://host:port, ipc://path or inproc://name"
        ) from error


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
        raise EndpointError(f"{needed} descriptors are needed but the hard limit is {hard}; raise it (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (lifted, hard))
