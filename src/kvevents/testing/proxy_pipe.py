"""One direction of a proxied connection: determines which messages are dropped, held, and queued for sending."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvevents.testing.zmtp import Segment, ZmtpSplitter

READ_BYTES: Final = 64 * 1024
"""Maximum number of bytes that one call reads from a connection."""

Rule: TypeAlias = int | float | Callable[[tuple[bytes, ...]], bool] | None
"""Selects the messages to drop: the next N (int), a share from 0.0 to 1.0 (float), those for whose frames a function returns
True, or no messages (None)."""


@dataclass(slots=True)
class DirectionCounts:
    """Counters of one direction over all connections."""

    messages: int = 0
    """Number of complete messages that arrived. Commands (subscriptions of ZMTP 3.1, heartbeats) are not counted."""
    dropped: int = 0
    dropped_tail: int = 0
    """Number of messages that were dropped after the last forwarded message, so that no later message shows their loss."""
    swapped: int = 0
    """Number of messages that were overtaken: a message that arrived later was forwarded earlier."""
    injected: int = 0
    """Number of messages that `inject` added."""
    held: int = 0
    """Number of messages that currently wait for `release` or for the end of their delay."""
    bytes: int = 0
    """Number of forwarded bytes, including handshakes and commands."""


def change_counts(condition: threading.Condition, counts: object, **changes: int) -> None:
    """Add `changes` to counters that `condition` guards, and notify the threads that wait for the condition."""
    with condition:
        for name, change in changes.items():
            setattr(counts, name, getattr(counts, name) + change)
        condition.notify_all()


@dataclass(slots=True, eq=False)
class Chunk:
    """Bytes to forward. If `gate` is a future, the bytes wait until it is done."""

    raw: bytes
    gate: asyncio.Future[None] | None = None
    is_command: bool = False


class DirectionFaults:
    """The faults of one direction, for all connections.

    `condition` guards the counters. All members except the counters are used only in the thread of the event loop.
    """

    def __init__(self, counts: DirectionCounts, condition: threading.Condition, max_queued_bytes: int) -> None:
        self.counts = counts
        self.condition = condition
        self.max_queued_bytes = max_queued_bytes
        self.rule: Rule = None
        self.random = random.Random()  # noqa: S311  a fault, not a secret
        self.swap_share = 0.0
        self.holds_all = False
        """Whether messages are held until `release`."""
        self.delay = 0.0
        """Seconds for which each message is held, unless `holds_all`."""
        self._gates: deque[asyncio.Future[None]] = deque()
        self.pipes: set[Pipe] = set()
        """Pipes of the current connections."""

    def set_drops(self, rule: Rule, seed: int) -> None:
        """Drop the messages that `rule` selects."""
        self.rule = rule
        self.random.seed(seed)

    def set_swaps(self, share: float, seed: int) -> None:
        """Swap a share of the messages with the message that follows."""
        self.swap_share = share
        self.random.seed(seed)

    def set_delay(self, seconds: float | None) -> None:
        """Hold messages for `seconds` seconds or, if None, until `release`."""
        self.holds_all, self.delay = seconds is None, seconds or 0.0

    def heal(self) -> None:
        """End all faults and release the held messages."""
        self.rule, self.swap_share, self.holds_all, self.delay = None, 0.0, False, 0.0
        self.release(None)

    def inject(self, raw: bytes) -> None:
        """Send an extra message on every connection that has carried a message before."""
        self.count(injected=sum(pipe.inject(raw) for pipe in self.pipes))

    def draw_swap(self) -> bool:
        """Decide at random whether the next message is swapped with the message after it, and count a swap."""
        is_swapped = bool(self.swap_share) and self.random.random() < self.swap_share
        self.count(swapped=is_swapped)
        return is_swapped

    def release(self, n: int | None) -> None:
        """Release the `n` messages that were held longest, or all messages if `n` is None."""
        while self._gates and n != 0:
            if _open_gate(self._gates.popleft()) and n is not None:
                n -= 1

    def admit(self, segment: Segment) -> Chunk | None:
        """Return the chunk to forward for a segment of the stream, or None if a rule drops the segment."""
        if segment.kind != "message":
            return Chunk(segment.raw, is_command=segment.kind == "command")
        is_dropped = self._drops(segment.frames)
        self.count(messages=1, dropped=is_dropped, dropped_tail=1 if is_dropped else -self.counts.dropped_tail)
        return None if is_dropped else Chunk(segment.raw, self._gate() if self.holds_all or self.delay else None)

    def count(self, **changes: int) -> None:
        """Change counters."""
        change_counts(self.condition, self.counts, **changes)

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
        """Return a future for which a held message waits. `release`, or the timer of the message, completes the future."""
        loop = asyncio.get_running_loop()
        gate: asyncio.Future[None] = loop.create_future()
        gate.add_done_callback(lambda _: self.count(held=-1))
        self.count(held=1)
        if not self.holds_all:
            loop.call_later(self.delay, _open_gate, gate)
        while self._gates and self._gates[0].done():
            self._gates.popleft()
        self._gates.append(gate)
        return gate


def _open_gate(gate: asyncio.Future[None]) -> bool:
    if gate.done():
        return False
    gate.set_result(None)
    return True


class Pipe:
    """One direction of one connection: reads, applies the faults of the direction, and writes while `flow` is set.

    Bytes are sent in the order in which they arrived, except that commands overtake held messages: peers would end a connection
    if its heartbeats were held.
    """

    def __init__(
        self, faults: DirectionFaults, flow: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._faults = faults
        self._flow = flow
        self._reader = reader
        self._writer = writer
        self._chunks: deque[Chunk] = deque()
        self._commands = 0
        self._queued_bytes = 0
        self._has_ended = False
        self._has_carried_message = False
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()

    async def run(self) -> None:
        """Forward bytes until the sender has closed its connection and all its bytes were sent."""
        tasks = [asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._send())]
        self._faults.pipes.add(self)
        try:
            await asyncio.gather(*tasks)
        finally:
            self._faults.pipes.discard(self)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for chunk in self._chunks:
                if chunk.gate is not None:
                    chunk.gate.cancel()

    def inject(self, raw: bytes) -> bool:
        """Send these bytes between two messages and return True. If no message was carried yet, do nothing and return False."""
        if self._has_carried_message:
            self._add(Chunk(raw))
        return self._has_carried_message

    async def _receive(self) -> None:
        splitter = ZmtpSplitter()
        while data := await self._reader.read(READ_BYTES):
            await self._flow.wait()
            for chunk in self._chunks_of(splitter.feed(data)):
                await self._put(chunk)
        await self._put(Chunk(splitter.remainder()))
        self._has_ended = True
        self._wake.set()

    def _chunks_of(self, segments: list[Segment]) -> Iterator[Chunk]:
        """Yield the chunks to forward. Messages that are not held are joined, which saves a task switch for each message."""
        content = bytearray()
        for segment in self._swap(segments):
            chunk = self._faults.admit(segment)
            self._has_carried_message = self._has_carried_message or segment.kind == "message"
            if chunk is not None and chunk.gate is None and not chunk.is_command:
                content += chunk.raw
            elif chunk is not None:
                yield Chunk(bytes(content))
                content.clear()
                yield chunk
        yield Chunk(bytes(content))

    def _swap(self, segments: list[Segment]) -> Iterator[Segment]:
        """Swap only messages that arrived together, so that no message waits for another that never arrives."""
        postponed_segment: Segment | None = None
        for segment in segments:
            if postponed_segment is None and segment.kind == "message" and self._faults.draw_swap():
                postponed_segment = segment
                continue
            yield segment
            if postponed_segment is not None:
                yield postponed_segment
                postponed_segment = None
        if postponed_segment is not None:
            yield postponed_segment

    async def _put(self, chunk: Chunk) -> None:
        if not chunk.raw:
            return
        while self._queued_bytes >= self._faults.max_queued_bytes:
            self._has_room.clear()
            await self._has_room.wait()
        if chunk.gate is not None:
            chunk.gate.add_done_callback(lambda _: self._wake.set())
        self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._commands += chunk.is_command
        self._queued_bytes += len(chunk.raw)
        self._wake.set()

    async def _send(self) -> None:
        while self._chunks or not self._has_ended:
            chunk = self._next_chunk()
            if chunk is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            await self._flow.wait()
            self._writer.write(chunk.raw)
            await self._writer.drain()
            self._faults.count(bytes=len(chunk.raw))
            self._chunks.remove(chunk)
            self._commands -= chunk.is_command
            self._queued_bytes -= len(chunk.raw)
            self._has_room.set()

    def _next_chunk(self) -> Chunk | None:
        """Return the first chunk of the queue or, if that chunk is held, the first command, or None if nothing can be sent."""
        if not self._chunks:
            return None
        head = self._chunks[0]
        if head.gate is None or head.gate.done():
            return head
        return next((chunk for chunk in self._chunks if chunk.is_command), None) if self._commands else None
