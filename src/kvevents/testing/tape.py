"""A tape player: publishes recorded batches from real PUB and ROUTER sockets, with the engines' faults on demand.

A player takes the place of an engine in tests of a subscriber or a router::

    with TapePlayer("run.jsonl.gz", faults=Faults(drop={3, 4}, replay_send_limit=1000)) as tape:
        subscriber.connect(tape.endpoint, tape.replay_endpoint)
        assert tape.wait_for_subscriber(timeout=5)
        tape.play()
        tape.restart(unseen_until=200)
        assert subscriber.everything() == tape.batches()

Batches are sent only by calls of `play`, and every wait has a deadline. `kvevents.testing.playlist` describes the behaviour
of engines, and the releases that have it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import ceil
from queue import SimpleQueue
from typing import Any, Final, Literal, TypeAlias, TypeVar

import zmq

from kvevents.closeable import Closeable
from kvevents.errors import ClosedError, ConfigError, UsageError
from kvevents.recording import LiveBatch
from kvevents.settings import check_finite
from kvevents.testing.playlist import Faults, Playlist, Tape, load_tape
from kvevents.testing.tape_sockets import LINGER_MS, MESSAGES_PER_ROUND, Sent, TapeCounts, TapeSockets

ENGINE_HWM: Final = 100_000
"""Number of messages that engines queue for a slow subscriber before they drop messages (`hwm` of vLLM and SGLang)."""
MAX_LOG_ENTRIES: Final = 1_000_000
"""Maximum length of a tape's log of batches, and of its log of requests. Older entries are removed. A full log takes 250 MB."""
CATCH_UP_SECONDS: Final = 1.0
"""If a tape with a rate is late by more than this, it does not send the late batches at once but continues at its rate."""
ANY_LOCAL_PORT: Final = "tcp://127.0.0.1:*"

Rate: TypeAlias = float | Literal["recorded"] | None
"""Number of batches per second; `recorded` for the recorded times, or None for as fast as possible."""

_T = TypeVar("_T")


class _Play:
    """A call of `play`: the number of batches to publish, and the time at which the next batch is due."""

    def __init__(self, n: int | None, rate: Rate, times: int) -> None:
        self.n = n
        self.rate = rate
        self.times = times
        self.published_count = 0
        self.due = 0.0
        self.future: Future[int] = Future()

    def begin(self, playlist: Playlist, now: float) -> None:
        if self.n is None:
            self.n = playlist.remaining + (self.times - 1) * len(playlist)
        self.due = now

    def step(self, gap: float, now: float) -> None:
        """Count a published batch. `gap` is the recorded number of seconds until the next one."""
        self.published_count += 1
        if self.rate is None:
            return
        self.due += gap if isinstance(self.rate, str) else 1.0 / self.rate
        if self.due < now - CATCH_UP_SECONDS:
            self.due = now

    @property
    def is_complete(self) -> bool:
        return self.n is not None and self.published_count >= self.n

    def end(self, error: Exception | None = None) -> None:
        if not self.future.done():
            self.future.set_result(self.published_count) if error is None else self.future.set_exception(error)


class TapePlayer(Closeable):
    """Serves a tape from a PUB and a ROUTER socket, as an engine would.

    `tape` is a recording (`run` names one of its runs; by default the first stream is played) or a list of
    `(topic, seq, payload)`. `faults` can be replaced at any time. `endpoint` and `replay_endpoint` are bound; for the port `*`
    the OS chooses one. `replay_endpoint=None` means an engine without replay. `hwm` is the send limit of the PUB socket for
    each subscriber, in messages; `log` is the maximum length of each log. Any thread may call the methods.

    The first round of a tape has the recorded numbers and bytes. The next round continues the numbers; a restart resets them.
    In both cases the timestamps of the payloads move forward, because an engine never sends the same bytes again.

    If a fault rule raises an exception, the tape ends. Plays in progress and `close` raise the same exception.
    Raise `EndpointError` if an address cannot be bound, `RecordingError` or `ConfigError` for a tape that cannot be played.
    """

    def __init__(
        self,
        tape: Tape,
        *,
        run: str | None = None,
        faults: Faults | None = None,
        endpoint: str = ANY_LOCAL_PORT,
        replay_endpoint: str | None = ANY_LOCAL_PORT,
        hwm: int = ENGINE_HWM,
        log: int = MAX_LOG_ENTRIES,
    ) -> None:
        playlist = Playlist(load_tape(tape, run))
        self._sockets = TapeSockets(playlist, faults or Faults(), endpoint, replay_endpoint, hwm, log)
        self._plays: deque[_Play] = deque()
        self._actions: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        """Functions that other threads have queued; the thread that owns the sockets calls them."""
        self._wake_writer, self._wake_reader = socket.socketpair()
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: Exception | None = None
        """The exception that ended the thread of the player."""
        self._thread = threading.Thread(target=self._run, name="kvevents-tape", daemon=True)
        self._thread.start()

    # --- state of the player

    @property
    def endpoint(self) -> str:
        """Endpoint for SUB sockets, which stays the same after a restart."""
        return self._sockets.endpoints[0]

    @property
    def replay_endpoint(self) -> str | None:
        """Endpoint for DEALER sockets, or None if the tape has no replay."""
        return self._sockets.endpoints[1] if len(self._sockets.endpoints) > 1 else None

    @property
    def faults(self) -> Faults:
        """The current faults of this tape. An assignment takes effect from the next message on."""
        return self._sockets.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._sockets.faults = faults

    @property
    def counts(self) -> TapeCounts:
        """A copy of the counters."""
        with self._sockets.condition:
            return replace(self._sockets.counts)

    @property
    def requests(self) -> list[int]:
        """First requested sequence number of each replay request, oldest request first."""
        with self._sockets.condition:
            return list(self._sockets.requests)

    @property
    def subscriptions(self) -> int:
        """Current number of subscriptions from all subscribers."""
        with self._sockets.condition:
            return self._sockets.subscriptions.total()

    @property
    def log(self) -> list[Sent]:
        """An entry for each used sequence number, with its batch and its outcome, oldest first."""
        with self._sockets.condition:
            return list(self._sockets.log)

    def batches(self, incarnation: int | None = None) -> list[tuple[int, bytes]]:
        """Return number and payload of each batch that a subscriber without loss delivers, from one incarnation or all."""
        return [
            (entry.batch.seq, entry.batch.payload)
            for entry in self.log
            if entry.outcome != "skipped" and incarnation in (None, entry.incarnation)
        ]

    def __repr__(self) -> str:
        counts = self.counts
        state = "closed" if self._is_closed else "open" if self._sockets.is_open else "stopped"
        return (
            f"<TapePlayer {self.endpoint} {state}, incarnation {counts.incarnations - 1}, {counts.published} published,"
            f" {counts.dropped} dropped, {counts.requests} requests>"
        )

    # --- commands

    def play(self, n: int | None = None, *, rate: Rate = None, times: int = 1) -> int:
        """Publish `n` batches; if None, the rest of this round and `times - 1` further rounds. Return the number of batches.

        A tape starts again at its end. `rate` is in batches per second, `recorded` for the recorded times, None for as fast as
        possible. If the tape is stopped or closed during the call, the call ends early. Raise `UsageError` for a stopped tape.
        """
        return self.start_playing(n, rate=rate, times=times).result()

    def start_playing(self, n: int | None = None, *, rate: Rate = None, times: int = 1) -> Future[int]:
        """Start to play without waiting. Several calls play one after the other. The future's result is what `play` returns."""
        if (n is not None and n < 0) or times < 1:
            raise ConfigError(f"invalid n={n}, times={times}: expected n of 0 or more and times of 1 or more")
        if rate is not None and rate != "recorded" and not rate > 0:
            raise ConfigError(f"invalid rate {rate}: expected more than 0 batches per second, 'recorded' or None")
        play = _Play(n, rate, times)
        self._run_in_thread(lambda: self._enqueue(play))
        return play.future

    def restart(self, batches: Tape | None = None, *, unseen_until: int | None = None, abrupt: bool = False) -> None:
        """Restart the engine on the same ports: sequence numbers from 0 and an empty replay buffer.

        `batches` is the tape of the new incarnation; None repeats the current one with later timestamps. If `unseen_until` is
        set, batches up to that number are published before the sockets open, so these batches are only in the replay buffer. If
        `abrupt`, queued messages are lost; if not, they have up to 1 s to be sent. All calls of `play` end.
        """
        tape = None if batches is None else load_tape(batches)
        self._run_in_thread(lambda: self._restart(tape, unseen_until, abrupt))

    def stop(self, *, abrupt: bool = False) -> None:
        """Close the sockets, as the end of a process does. `restart` opens the sockets again on the same ports."""
        self._run_in_thread(lambda: self._stop(abrupt))

    def send_raw(self, frames: Sequence[bytes]) -> None:
        """Send these frames, which may be malformed, from the PUB socket. Subscriptions are compared with the first frame.

        Raise `ConfigError` for a message without frames.
        """
        if not frames:
            raise ConfigError("cannot send a message without frames: give at least one frame")
        self._run_in_thread(lambda: self._sockets.send(frames))

    # --- waiting for subscribers and requests

    def wait_for_subscriber(self, timeout: float, count: int = 1) -> bool:
        """Wait for `count` subscriptions, which then receive every later batch. Return False if `timeout` seconds pass first.

        After a restart a SUB socket subscribes again only when its application polls or reads it, because libzmq subscribes in
        the application's thread.
        """
        condition = self._sockets.condition
        with condition:
            return condition.wait_for(lambda: self._sockets.subscriptions.total() >= count, check_finite(timeout))

    def wait_until(self, condition: Callable[[TapeCounts], bool], timeout: float) -> bool:
        """Wait for a condition like `lambda counts: counts.replayed == 100`. Return False if `timeout` seconds pass first."""
        with self._sockets.condition:
            return self._sockets.condition.wait_for(lambda: condition(self._sockets.counts), check_finite(timeout))

    # --- closing the player

    def close(self) -> None:
        """Close the tape within about a second. Idempotent; any thread may call it. `play` ends; unsent replies are lost.

        Raise the exception that ended the tape, if a fault rule raised one.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._wake_writer.send(b"\0")
        self._thread.join(2 * LINGER_MS / 1000)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    # --- methods of the player's thread

    def _run_in_thread(self, action: Callable[[], _T]) -> _T:
        """Run `action` in the thread that owns the sockets, and return its result or raise its exception."""
        result: Future[_T] = Future()
        with self._lock:
            if self._is_closed:
                raise ClosedError("the tape is closed") from self._failure
            self._actions.put((action, result))
            self._wake_writer.send(b"\0")
        return result.result()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._run_once()
        except Exception as error:  # noqa: BLE001  the plays and `close` raise it
            self._failure = error
        finally:
            with self._lock:
                self._is_closed = True
            self._end_plays(self._failure)
            self._run_actions()
            self._sockets.destroy()
            self._wake_writer.close()
            self._wake_reader.close()

    def _run_once(self) -> None:
        """Publish the batches that are due, send replies, and wait for input. Then run the queued actions and read requests."""
        waits = (self._publish_due(), self._sockets.send_replies())
        wait = min((wait for wait in waits if wait is not None), default=None)
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        for open_socket in self._sockets.open_sockets():
            poller.register(open_socket, zmq.POLLIN)
        ready = dict(poller.poll(None if wait is None else ceil(min(1000 * wait, 2**31 - 1))))
        if self._wake_reader.fileno() in ready:
            self._wake_reader.recv(4096)
            self._run_actions()
        self._sockets.read_subscriptions()
        self._sockets.read_requests()

    def _publish_due(self) -> float | None:
        for _ in range(MESSAGES_PER_ROUND):
            if not self._plays:
                return None
            play = self._plays[0]
            if play.is_complete:
                self._plays.popleft().end()
                if self._plays:
                    self._plays[0].begin(self._sockets.playlist, time.monotonic())
                continue
            now = time.monotonic()
            if play.due > now:
                return play.due - now
            self._sockets.publish()
            play.step(self._sockets.playlist.next_gap(), now)
        return 0.0

    def _run_actions(self) -> None:
        while not self._actions.empty():
            action, result = self._actions.get()
            if self._is_closed:
                result.set_exception(ClosedError("the tape was closed during the call"))
                continue
            try:
                result.set_result(action())
            except BaseException as error:  # noqa: BLE001  the calling thread raises it
                result.set_exception(error)

    def _enqueue(self, play: _Play) -> None:
        if not self._sockets.is_open:
            raise UsageError("the tape is stopped: restart() opens its sockets again")
        if play.n and not len(self._sockets.playlist):
            raise ConfigError("the tape is empty: there is nothing to play")
        if not self._plays:
            play.begin(self._sockets.playlist, time.monotonic())
        self._plays.append(play)

    def _restart(self, batches: Sequence[LiveBatch] | None, unseen_until: int | None, abrupt: bool) -> None:
        self._stop(abrupt)
        self._sockets.begin_incarnation(batches)
        while unseen_until is not None and self._sockets.publish(is_seen=False) < unseen_until:
            pass
        self._sockets.open()

    def _stop(self, abrupt: bool) -> None:
        self._end_plays()
        self._sockets.close(0 if abrupt else LINGER_MS)

    def _end_plays(self, error: Exception | None = None) -> None:
        while self._plays:
            self._plays.popleft().end(error)
