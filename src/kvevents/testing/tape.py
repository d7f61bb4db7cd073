"""A tape player: recorded batches from real PUB and ROUTER sockets, with the engines' faults on demand.

Test a subscriber or a router against it as against an engine::

    with TapePlayer("run.jsonl.gz", faults=Faults(drop={3, 4}, replay_send_limit=1000)) as tape:
        subscriber.connect(tape.endpoint, tape.replay_endpoint)
        assert tape.wait_for_subscriber(timeout=5)
        tape.play()
        tape.restart(unseen_until=200)
        assert subscriber.everything() == tape.batches()

Nothing happens by itself: a batch is sent when `play` is called, and every wait has a deadline. How engines behave, and since
which release, stands in `kvevents.testing.faults`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from math import ceil
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

import zmq

from kvevents.errors import ClosedError, ConfigError, UsageError
from kvevents.recording import LiveBatch
from kvevents.testing.deck import LINGER_MS, MESSAGES_PER_TURN, Deck, Sent, TapeCounts
from kvevents.testing.faults import Faults
from kvevents.testing.reel import Reel, Tape, load_tape

ENGINE_HWM: Final = 100_000
"""Messages that engines queue for a slow subscriber (`hwm` of vLLM and SGLang) before they drop."""
MAX_LOG: Final = 1_000_000
"""Numbers and requests that a tape remembers for comparison; the oldest go first. About 250 MB when full."""
CATCH_UP_SECONDS: Final = 1.0
"""A paced tape that is later than this, after a silence, goes on from now instead of sending everything it missed at once."""
ANYWHERE: Final = "tcp://127.0.0.1:*"

Rate: TypeAlias = float | Literal["recorded"] | None
"""Batches per second, in real time as `recorded`, or as fast as possible (None)."""

_T = TypeVar("_T")


class _Play:
    """A number of batches to publish, and when the next one is due on the clock."""

    def __init__(self, n: int | None, rate: Rate, times: int) -> None:
        self.n = n
        self.rate = rate
        self.times = times
        self.done = 0
        self.due = 0.0
        self.future: Future[int] = Future()

    def begin(self, reel: Reel, now: float) -> None:
        if self.n is None:
            self.n = reel.remaining + (self.times - 1) * len(reel)
        self.due = now

    def step(self, gap: float, now: float) -> None:
        """One batch was sent; `gap` is the recorded time to the next."""
        self.done += 1
        if self.rate is None:
            return
        self.due += gap if isinstance(self.rate, str) else 1.0 / self.rate
        if self.due < now - CATCH_UP_SECONDS:
            self.due = now

    @property
    def over(self) -> bool:
        return self.n is not None and self.done >= self.n

    def end(self) -> None:
        if not self.future.done():
            self.future.set_result(self.done)


class TapePlayer:
    """Serves a tape from a PUB and a ROUTER socket, as an engine would.

    `tape` is a recording (`run` names one of its runs, else the first stream is taken) or a list of `(topic, seq, payload)`;
    `faults` may be replaced at any time. `endpoint` and `replay_endpoint` are bound where they say, a port of `*` wherever the
    OS likes; `replay_endpoint=None` is an engine without replay. `hwm` is the PUB socket's send limit per subscriber in
    messages, `log` the number of batches and requests remembered. Methods may be called from any thread.

    The first round of a tape has the recorded numbers and bytes. Played again it goes on counting; after a restart it counts
    from 0; either way the payloads' timestamps move on, since a real engine never repeats the bytes of a number.

    Raises `EndpointError` when an address cannot be bound, `RecordingError` and `ConfigError` for a tape that cannot be played.
    """

    def __init__(
        self,
        tape: Tape,
        *,
        run: str | None = None,
        faults: Faults | None = None,
        endpoint: str = ANYWHERE,
        replay_endpoint: str | None = ANYWHERE,
        hwm: int = ENGINE_HWM,
        log: int = MAX_LOG,
    ) -> None:
        reel = Reel(load_tape(tape, run))
        self._deck = Deck(reel, faults or Faults(), endpoint, replay_endpoint, hwm, log)
        self._plays: deque[_Play] = deque()
        self._orders: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._bell, self._ear = socket.socketpair()
        self._gate = threading.Lock()
        self._closed = False
        self._silent = False
        self._seen_requests = 0
        self._thread = threading.Thread(target=self._run, name="kvevents-tape", daemon=True)
        self._thread.start()

    # What is where, and what was done

    @property
    def endpoint(self) -> str:
        """Where to connect a SUB socket; the same for every life."""
        return self._deck.endpoints[0]

    @property
    def replay_endpoint(self) -> str | None:
        """Where to connect a DEALER; None for a tape without replay."""
        return self._deck.endpoints[1] if len(self._deck.endpoints) > 1 else None

    @property
    def faults(self) -> Faults:
        """The faults in force; assign others to change them from the next message on."""
        return self._deck.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._deck.faults = faults

    @property
    def counts(self) -> TapeCounts:
        """A copy of the counters."""
        with self._deck.books:
            return replace(self._deck.counts)

    @property
    def requests(self) -> list[int]:
        """The starts of all replay requests, oldest first."""
        with self._deck.books:
            return list(self._deck.requests)

    @property
    def log(self) -> list[Sent]:
        """What became of every number, oldest first."""
        with self._deck.books:
            return list(self._deck.log)

    @property
    def kept(self) -> list[LiveBatch]:
        """What the replay buffer holds."""
        with self._deck.books:
            return list(self._deck.kept)

    def batches(self, life: int | None = None) -> list[tuple[int, bytes]]:
        """Number and payload of everything published in a life (from 0; None for all): what a lossless subscriber delivers."""
        return [(sent.batch.seq, sent.batch.payload) for sent in self.log if sent.fate != "burnt" and life in (None, sent.life)]

    def __repr__(self) -> str:
        counts = self.counts
        state = "closed" if self._closed else "silent" if self._silent else "open" if self._deck.is_open else "stopped"
        return (
            f"<TapePlayer {self.endpoint} {state}, life {counts.lives - 1}, {counts.published} published,"
            f" {counts.dropped} dropped, {counts.requests} requests>"
        )

    # What it can be told to do

    def play(self, n: int | None = None, *, rate: Rate = None, times: int = 1) -> int:
        """Publish the next `n` batches and return how many were; without `n` the rest of the tape and `times - 1` rounds more.

        A tape at its end begins anew. `rate` is in batches per second, `recorded` for real time, None for as fast as possible.
        Returns early when the tape is stopped or closed meanwhile. Raises `UsageError` for a silent or stopped tape.
        """
        if self._silent:
            raise UsageError("the tape is silent: resume() lets it play on")
        return self.start_playing(n, rate=rate, times=times).result()

    def start_playing(self, n: int | None = None, *, rate: Rate = None, times: int = 1) -> Future[int]:
        """As `play`, without waiting for it: plays follow one another, and each future tells how many batches it published."""
        if (n is not None and n < 0) or times < 1:
            raise ConfigError(f"n is 0 or more and times 1 or more, not n={n}, times={times}")
        if rate is not None and rate != "recorded" and not rate > 0:
            raise ConfigError(f"rate is more than 0 batches per second, 'recorded' or None, not {rate}")
        job = _Play(n, rate, times)
        self._ask(lambda: self._enqueue(job))
        return job.future

    def restart(self, batches: Tape | None = None, *, unseen_until: int | None = None, abrupt: bool = False) -> None:
        """Let the engine die and come back on the same ports, counting from 0, with an empty replay buffer.

        `batches` is the tape of the new life; None begins the same one anew, with later timestamps. With `unseen_until` the new
        life publishes up to that number before its sockets open: nobody hears it, replay has it. `abrupt` loses what the old
        life had queued but not sent, else that gets up to 1 s to leave. Plays under way end.
        """
        loaded = None if batches is None else load_tape(batches)
        self._ask(lambda: self._restart(loaded, unseen_until, abrupt))

    def stop(self, *, abrupt: bool = False) -> None:
        """Close the sockets, as a process that is gone; `restart` opens them again on the same ports."""
        self._ask(lambda: self._stop(abrupt))

    def silence(self) -> None:
        """Neither publish nor answer, with all sockets open: a process that hangs. Requests wait in the ROUTER."""
        self._ask(lambda: self._set_silent(True))

    def resume(self) -> None:
        """End a silence; plays go on, requests that waited are answered."""
        self._ask(lambda: self._set_silent(False))

    def send_raw(self, frames: Sequence[bytes]) -> None:
        """Send any frames from the PUB socket: malformed ones, say. The first is what subscriptions are matched with."""
        self._ask(lambda: self._deck.send(frames))

    # What can be waited for

    def wait_for_subscriber(self, timeout: float, count: int = 1) -> bool:
        """Wait until `count` subscriptions are in place; False after `timeout` seconds. What is played then is not missed.

        After a restart a SUB socket subscribes again only when its owner polls or reads it: libzmq does it in that thread.
        """
        books = self._deck.books
        with books:
            return books.wait_for(lambda: self._deck.subscriptions.total() >= count, timeout)

    def wait_until(self, reached: Callable[[TapeCounts], bool], timeout: float) -> bool:
        """Wait until a condition holds, `lambda counts: counts.replayed == 100` say; False after `timeout` seconds."""
        with self._deck.books:
            return self._deck.books.wait_for(lambda: reached(self._deck.counts), timeout)

    def wait_for_request(self, timeout: float) -> int | None:
        """The start of the next replay request that no earlier call returned; None after `timeout` seconds."""
        deck = self._deck
        with deck.books:
            if not deck.books.wait_for(lambda: deck.counts.requests > self._seen_requests, timeout):
                return None
            unseen = deck.counts.requests - self._seen_requests
            self._seen_requests += 1
            return deck.requests[-min(unseen, len(deck.requests))]

    # Its end

    def close(self) -> None:
        """Close everything within about a second; idempotent, from any thread. Plays end, replies under way are lost."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._bell.send(b"\0")
        self._thread.join(2 * LINGER_MS / 1000)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # The thread

    def _ask(self, action: Callable[[], _T]) -> _T:
        """Have the thread that owns the sockets do something; return or raise what it does."""
        answer: Future[_T] = Future()
        with self._gate:
            if self._closed:
                raise ClosedError("the tape is closed")
            self._orders.put((action, answer))
            self._bell.send(b"\0")
        return answer.result()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        finally:
            with self._gate:
                self._closed = True
            self._end_plays()
            self._refuse_orders()
            self._deck.destroy()
            self._bell.close()
            self._ear.close()

    def _turn(self) -> None:
        """Answer who asks, publish what is due, do what callers ordered, then wait for more."""
        wait = None if self._silent else self._work()
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        for each in () if self._silent else self._deck.sockets():
            poller.register(each, zmq.POLLIN)
        ready = dict(poller.poll(None if wait is None else ceil(1000 * wait)))
        if self._ear.fileno() in ready:
            self._ear.recv(4096)
            self._obey()
        if not self._silent:
            self._deck.read_subscriptions()
            self._deck.read_requests()

    def _work(self) -> float | None:
        """Play and reply; seconds until there is more to do, None when there is nothing."""
        waits = (self._play_due(), self._deck.answer())
        return min((wait for wait in waits if wait is not None), default=None)

    def _play_due(self) -> float | None:
        for _ in range(MESSAGES_PER_TURN):
            if not self._plays:
                return None
            play = self._plays[0]
            if play.over:
                self._next_play()
                continue
            now = time.monotonic()
            if play.due > now:
                return play.due - now
            self._deck.publish()
            play.step(self._deck.reel.peek_gap(), now)
        return 0.0

    def _next_play(self) -> None:
        self._plays.popleft().end()
        if self._plays:
            self._plays[0].begin(self._deck.reel, time.monotonic())

    def _obey(self) -> None:
        with suppress(Empty):
            while True:
                action, answer = self._orders.get_nowait()
                try:
                    answer.set_result(action())
                except BaseException as error:  # noqa: BLE001  it is the caller's, and is raised there
                    answer.set_exception(error)

    def _enqueue(self, job: _Play) -> None:
        if not self._deck.is_open:
            raise UsageError("the tape is stopped: restart() opens its sockets again")
        if job.n and not len(self._deck.reel):
            raise ConfigError("the tape is empty: there is nothing to play")
        if not self._plays:
            job.begin(self._deck.reel, time.monotonic())
        self._plays.append(job)

    def _restart(self, batches: Sequence[LiveBatch] | None, unseen_until: int | None, abrupt: bool) -> None:
        self._stop(abrupt)
        self._deck.begin_life(batches)
        while unseen_until is not None and self._deck.publish(seen=False) < unseen_until:
            pass
        self._deck.open()

    def _stop(self, abrupt: bool) -> None:
        self._end_plays()
        self._deck.close(0 if abrupt else LINGER_MS)

    def _set_silent(self, silent: bool) -> None:
        self._silent = silent

    def _end_plays(self) -> None:
        while self._plays:
            self._plays.popleft().end()

    def _refuse_orders(self) -> None:
        with suppress(Empty):
            while True:
                self._orders.get_nowait()[1].set_exception(ClosedError("the tape was closed meanwhile"))
