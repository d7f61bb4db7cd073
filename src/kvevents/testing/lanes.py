"""One direction of a proxied connection: what is dropped, what is held, and what has yet to be sent."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvevents.testing.zmtp import Piece, ZmtpSplitter

READ_BYTES: Final = 64 * 1024
"""Read at once from one connection."""
MAX_QUEUED_BYTES: Final = 64 * 1024 * 1024
"""Held or waiting for a slow reader, for each direction of each connection; at the limit the sender is no longer read, and
feels it as it would feel a full network."""

Rule: TypeAlias = int | float | Callable[[tuple[bytes, ...]], bool] | None
"""Which messages are dropped: the next so many (int), a share from 0.0 to 1.0 (float), those for whose frames a function is
true, or none."""


@dataclass(slots=True)
class LaneCounts:
    """Messages of one direction, over all connections."""

    messages: int = 0
    """Complete messages that arrived; commands (subscriptions of ZMTP 3.1, heartbeats) are not counted."""
    dropped: int = 0
    swapped: int = 0
    """Passed on behind the message that came after them."""
    injected: int = 0
    """Sent by the proxy itself."""
    held: int = 0
    """Waiting at this moment for `release`, or for their delay to pass."""
    bytes: int = 0
    """Passed on, handshakes and commands included."""


@dataclass(slots=True, eq=False)
class Parcel:
    """Bytes to pass on, once the gate is open."""

    raw: bytes
    gate: asyncio.Future[None] | None = None
    command: bool = False


class Lane:
    """The rules of one direction, for all connections; `books` guards the counters, the rest belongs to the event loop."""

    def __init__(self, counts: LaneCounts, books: threading.Condition) -> None:
        self.counts = counts
        self.books = books
        self.rule: Rule = None
        self.random = random.Random()  # noqa: S311  a fault, not a secret
        self.swap = 0.0
        self.hold = False
        self.delay = 0.0
        self._gates: deque[asyncio.Future[None]] = deque()
        self._ways: set[Way] = set()

    def heal(self) -> None:
        """Drop, swap and hold nothing, and let go what is held."""
        self.rule, self.swap, self.hold, self.delay = None, 0.0, False, 0.0
        self.release(None)

    def join(self, way: Way) -> None:
        """A connection was made."""
        self._ways.add(way)

    def leave(self, way: Way) -> None:
        """A connection has ended."""
        self._ways.discard(way)

    def inject(self, raw: bytes) -> None:
        """Pass a message of the proxy's own on, on every connection that has carried one before."""
        sent = sum(way.inject(raw) for way in self._ways)
        with self.books:
            self.counts.injected += sent
            self.books.notify_all()

    def swaps(self) -> bool:
        """Whether the next message changes places with the one behind it."""
        chosen = bool(self.swap) and self.random.random() < self.swap
        if chosen:
            with self.books:
                self.counts.swapped += 1
                self.books.notify_all()
        return chosen

    def release(self, n: int | None) -> None:
        """Let the `n` messages go that were held the longest; None for all."""
        while self._gates and n != 0:
            if _open(self._gates.popleft()) and n is not None:
                n -= 1

    def admit(self, piece: Piece) -> Parcel | None:
        """What becomes of a piece of the stream; None when it is dropped."""
        if piece.kind != "message":
            return Parcel(piece.raw, command=piece.kind == "command")
        dropped = self._drops(piece.frames)
        with self.books:
            self.counts.messages += 1
            self.counts.dropped += dropped
            self.books.notify_all()
        return None if dropped else Parcel(piece.raw, self._gate() if self.hold or self.delay else None)

    def passed(self, size: int) -> None:
        """Count bytes that went on."""
        with self.books:
            self.counts.bytes += size
            self.books.notify_all()

    def _drops(self, frames: tuple[bytes, ...]) -> bool:
        rule = self.rule
        if callable(rule):
            return rule(frames)
        if isinstance(rule, float):
            return self.random.random() < rule
        if not rule:
            return False
        self.rule = rule - 1
        return True

    def _gate(self) -> asyncio.Future[None]:
        """What a held message waits for, opened by `release` or by time."""
        loop = asyncio.get_running_loop()
        gate: asyncio.Future[None] = loop.create_future()
        gate.add_done_callback(lambda _: self._count_held(-1))
        self._count_held(1)
        if not self.hold:
            loop.call_later(self.delay, _open, gate)
        while self._gates and self._gates[0].done():
            self._gates.popleft()
        self._gates.append(gate)
        return gate

    def _count_held(self, change: int) -> None:
        with self.books:
            self.counts.held += change
            self.books.notify_all()


def _open(gate: asyncio.Future[None]) -> bool:
    if gate.done():
        return False
    gate.set_result(None)
    return True


class Way:
    """One direction of one connection: reads, applies the lane's rules, and writes while `flow` is set.

    Everything leaves in the order in which it came, except that commands go past messages that are held: peers give a
    connection up whose heartbeats wait behind them.
    """

    def __init__(self, lane: Lane, flow: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._lane = lane
        self._flow = flow
        self._reader = reader
        self._writer = writer
        self._parcels: deque[Parcel] = deque()
        self._commands = 0
        self._queued = 0
        self._ended = False
        self._greeted = False
        self._wake = asyncio.Event()
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Carry everything until the sender has closed and all of it was passed on."""
        halves = [asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._send())]
        self._lane.join(self)
        try:
            await asyncio.gather(*halves)
        finally:
            self._lane.leave(self)
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)
            for parcel in self._parcels:
                if parcel.gate is not None:
                    parcel.gate.cancel()

    def inject(self, raw: bytes) -> bool:
        """Send these bytes between two messages; False, and nothing done, before the first one."""
        if self._greeted:
            self._add(Parcel(raw))
        return self._greeted

    async def _receive(self) -> None:
        splitter = ZmtpSplitter()
        while data := await self._reader.read(READ_BYTES):
            await self._flow.wait()
            for parcel in self._parcels_of(splitter.feed(data)):
                await self._put(parcel)
        await self._put(Parcel(splitter.rest()))
        self._ended = True
        self._wake.set()

    def _parcels_of(self, pieces: list[Piece]) -> Iterator[Parcel]:
        """What may pass; without a delay it goes together, which saves a switch of tasks for each message."""
        free = bytearray()
        for piece in self._in_turn(pieces):
            parcel = self._lane.admit(piece)
            self._greeted = self._greeted or piece.kind == "message"
            if parcel is not None and parcel.gate is None and not parcel.command:
                free += parcel.raw
            elif parcel is not None:
                yield Parcel(bytes(free))
                free.clear()
                yield parcel
        yield Parcel(bytes(free))

    def _in_turn(self, pieces: list[Piece]) -> Iterator[Piece]:
        """Messages that change places do so among those that arrived together, so none waits for one that never comes."""
        late: Piece | None = None
        for piece in pieces:
            if late is None and piece.kind == "message" and self._lane.swaps():
                late = piece
                continue
            yield piece
            if late is not None:
                yield late
                late = None
        if late is not None:
            yield late

    async def _put(self, parcel: Parcel) -> None:
        if not parcel.raw:
            return
        while self._queued >= MAX_QUEUED_BYTES:
            self._room.clear()
            await self._room.wait()
        if parcel.gate is not None:
            parcel.gate.add_done_callback(lambda _: self._wake.set())
        self._add(parcel)

    def _add(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._commands += parcel.command
        self._queued += len(parcel.raw)
        self._wake.set()

    async def _send(self) -> None:
        while self._parcels or not self._ended:
            parcel = self._sendable()
            if parcel is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._flow.wait()
            self._writer.write(parcel.raw)
            await self._writer.drain()
            self._lane.passed(len(parcel.raw))
            self._parcels.remove(parcel)
            self._commands -= parcel.command
            self._queued -= len(parcel.raw)
            self._room.set()

    def _sendable(self) -> Parcel | None:
        """The first in the queue, or a command when that one is held."""
        if not self._parcels:
            return None
        head = self._parcels[0]
        if head.gate is None or head.gate.done():
            return head
        return next((parcel for parcel in self._parcels if parcel.command), None) if self._commands else None
