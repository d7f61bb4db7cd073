"""The event socket without libzmq: the sending thread writes into consumers' connections itself.

Theory of operation. libzmq copies each message and hands it to a thread of its own, which copies it again and writes it; to
wake that thread takes longer than to send a batch. Here a run of batches goes to the system in one call for each consumer, from
where the payloads lie (`_native.pour`). All else is done by one thread, `kvevents-consumers`, which sleeps while everybody
takes what comes: it lets consumers in, reads what they say, and goes on with what the system had no room for.

It is TCP without keys, at an address that need not be looked up; everything else is libzmq's (`address_of`).
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from time import monotonic
from typing import Final

from kvevents.bulk import Connections, connections
from kvevents.endpoints import literal_tcp
from kvevents.publisher import sockets
from kvevents.publisher.consumer import Consumer, LostError
from kvevents.publisher.kept import Numbered

log = logging.getLogger(__name__)

MAX_CONSUMERS: Final = 1000
"""At a time; further ones are turned away, and told about."""
BREATHER_SECONDS: Final = 1.0
"""Until somebody is let in again when the system has no more descriptors."""
MAX_TOLD: Final = 100
"""Hosts whose fault is remembered, so that it is told once."""
_ACCEPTS: Final = 100
"""Connections that are taken in one go."""
_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def address_of(endpoint: str) -> tuple[str, int] | None:
    """Where to listen; None for what only libzmq can do: names to be looked up, and other transports."""
    return None if connections() is None else literal_tcp(endpoint)


class DirectOutlet:
    """Listens at `address`, which is that of `endpoint`; at most `hwm` batches wait for a consumer. See `Outlet`.

    Raises `EndpointError`.
    """

    def __init__(self, address: tuple[str, int], endpoint: str, hwm: int) -> None:
        native = connections()
        assert native is not None  # noqa: S101 - or there is no address
        self._native: Connections = native
        self._hwm: Final = hwm
        self._listening: socket.socket | None = sockets.listening(address, endpoint, "event")
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.bound = f"tcp://{host}:{self._listening.getsockname()[1]}"
        self._consumers: tuple[Consumer, ...] = ()
        """Another tuple whenever somebody comes or goes, so that the sending thread needs no lock."""
        self._gone = 0
        """Batches that consumers were not sent which are gone."""
        self._counting: Final = threading.Lock()
        """So that nobody is counted twice, or not at all."""
        self._stuck: deque[Consumer] = deque()
        """Of which the sending thread says that they have to be looked after."""
        self._told: dict[tuple[str, str], None] = {}
        self._again: set[Consumer] = set()
        """Of which more can be read than was."""
        self._listen_at = 0.0
        """When to listen again, while nobody can be let in."""
        self._deadline: float | None = None
        """Until when what waits is flushed, once it is the end."""
        self._flushed = True
        self._selector = DefaultSelector()
        self._alarm, self._waker = socket.socketpair()
        for each in (self._alarm, self._waker):
            each.setblocking(False)
        self._selector.register(self._alarm, EVENT_READ)
        self._selector.register(self._listening, EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kvevents-consumers", daemon=True)
        self._thread.start()

    # --- the sending thread's

    @property
    def subscriptions(self) -> int:
        """Of `Outlet`; as of now."""
        return sum(each.subscriptions for each in self._consumers)

    @property
    def dropped(self) -> int:
        """Of `Outlet`."""
        with self._counting:
            return self._gone + sum(each.dropped for each in self._consumers)

    def send(self, topic: bytes, batches: Sequence[Numbered]) -> None:
        """Of `Outlet`."""
        for consumer in self._consumers:
            if consumer.send(topic, batches):
                self._stuck.append(consumer)
                self._wake()

    def look_around(self) -> None:
        """Of `Outlet`: there is a thread for it."""

    def end(self, deadline: float | None) -> float:
        """Of `Outlet`."""
        now = monotonic()
        self._deadline = now if deadline is None else max(deadline, now + sockets.FLUSH_GRACE)
        self._wake()
        return self._deadline

    def join(self) -> bool:
        """Of `Outlet`."""
        self._thread.join()
        return self._flushed

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # it is awake, or has ended
            self._waker.send(b"\0")

    # --- its own thread's

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._turn()
        finally:
            self._flushed = not any(each.waits for each in self._consumers)
            for consumer in self._consumers:
                self._let_go(consumer)
            self._stop_listening()
            self._selector.close()
            for each in (self._alarm, self._waker):
                each.close()

    def _is_over(self) -> bool:
        if self._deadline is None:
            return False
        self._stop_listening()
        return monotonic() >= self._deadline or not any(each.waits for each in self._consumers)

    def _turn(self) -> None:
        again, self._again = self._again, set()
        for key, events in self._selector.select(self._pause(bool(again))):
            if key.data is not None:
                again.discard(key.data)
                self._serve(key.data, events)
            elif key.fileobj is self._alarm:
                with suppress(BlockingIOError):
                    self._alarm.recv(1 << 12)
            else:
                self._let_in()
        for consumer in again:
            self._serve(consumer, EVENT_READ)
        while self._stuck:
            self._serve(self._stuck.popleft(), EVENT_WRITE)
        self._look_at_time()

    def _pause(self, at_once: bool) -> float | None:
        """Seconds until something is due; None for nothing."""
        if at_once:
            return 0.0
        due = [each.deadline for each in self._consumers]
        due += [each for each in (self._deadline, self._listen_at) if each]
        soonest = min(due, default=float("inf"))
        return None if soonest == float("inf") else max(0.0, soonest - monotonic())

    def _look_at_time(self) -> None:
        now = monotonic()
        for consumer in self._consumers:
            if now >= consumer.deadline:
                self._lose(consumer, "it does not say in time what it is")
        if self._listen_at and now >= self._listen_at and self._listening is not None:
            self._listen_at = 0.0
            self._selector.register(self._listening, EVENT_READ)

    def _serve(self, consumer: Consumer, events: int) -> None:
        """Read what came, and write what waits."""
        if consumer not in self._consumers:
            return
        try:
            if events & EVENT_READ and consumer.read():
                self._again.add(consumer)
            flushed = consumer.flush() if events & EVENT_WRITE else not consumer.waits
            self._selector.modify(consumer, EVENT_READ if flushed else EVENT_READ | EVENT_WRITE, consumer)
        except LostError as lost:
            self._lose(consumer, str(lost))
        except Exception:
            log.exception("%s: this must not be; the connection is closed", consumer.peer)
            self._let_go(consumer)

    # --- who comes and goes

    def _let_in(self) -> None:
        for _ in range(_ACCEPTS):
            if self._listening is None:
                return
            try:
                connection, peer = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _DESCRIPTORS:
                    log.warning("%s: nobody can be let in: %s; raise the limit of open files (ulimit -n)", self.bound, error)
                    self._selector.unregister(self._listening)
                    self._listen_at = monotonic() + BREATHER_SECONDS
                    return
                continue  # it has gone again
            self._welcome(connection, peer[0], peer[1])

    def _welcome(self, connection: socket.socket, host: str, port: int) -> None:
        if len(self._consumers) >= MAX_CONSUMERS:
            self._tell(host, f"there are {MAX_CONSUMERS} consumers already")
            connection.close()
            return
        try:
            consumer = Consumer(connection, f"{host}:{port}", self._hwm, self._native, monotonic())
        except LostError:
            connection.close()
            return
        self._selector.register(connection, EVENT_READ, consumer)
        self._consumers = (*self._consumers, consumer)

    def _lose(self, consumer: Consumer, why: str) -> None:
        """A connection has ended, or was none of a consumer."""
        if not consumer.subscriptions:
            self._tell(consumer.peer.rpartition(":")[0], why)
        self._let_go(consumer)

    def _tell(self, host: str, why: str) -> None:
        """Who is not let in, once."""
        if (host, why) not in self._told:
            self._told[host, why] = None
            log.info("%s: a connection from %s ends: %s", self.bound, host, why)
            if len(self._told) > MAX_TOLD:
                del self._told[next(iter(self._told))]

    def _let_go(self, consumer: Consumer) -> None:
        self._again.discard(consumer)
        self._selector.unregister(consumer)
        consumer.close()
        with self._counting:
            self._consumers = tuple(each for each in self._consumers if each is not consumer)
            self._gone += consumer.dropped

    def _stop_listening(self) -> None:
        if self._listening is not None:
            if not self._listen_at:
                self._selector.unregister(self._listening)
            self._listening.close()
            self._listening = None
