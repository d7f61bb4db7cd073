"""Reads the log without its writers, and checks that each batch is in it once, in order, and of one incarnation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import nats

from kvevents.wire import decode_batch
from kvevents_plane.layout import Layout
from kvevents_plane.records import (
    EMPTY_HISTORY,
    BatchRecord,
    FragmentRecord,
    GapRecord,
    IncarnationRecord,
    Page,
    decode_page,
    extend_history,
)
from tests.system.chaos_kit.truth import UNKNOWN_BATCH, Key, key_of

READ_SECONDS: Final = 20.0
READY_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.1


@dataclass(slots=True)
class Stream:
    """The newest number of one incarnation of a stream, and the engine's incarnation in the batches."""

    last: int | None = None
    lifetime: int | None = None


@dataclass(slots=True)
class Audit:
    """Counts and flaws of a log."""

    pages: int = 0
    batches: int = 0
    lost: int = 0
    """Batches that the log reports as lost."""
    foreign: int = 0
    """Pages that were written for a deleted partition."""
    ignored_pages: int = 0
    """Pages whose writer expected other pages before them. Readers ignore them."""
    flaws: list[str] = field(default_factory=list)
    _streams: dict[tuple[str, int, int], Stream] = field(default_factory=dict)
    _position: int = 0

    def take(self, position: int, page: Page) -> None:
        """Check the next page of a partition. The first page may be any. Pages may be purged while others are read."""
        self.pages += 1
        if position != self._position + 1:
            for stream in self._streams.values():
                stream.last = None
        self._position = position
        for record in page.records:
            if isinstance(record, BatchRecord):
                self._take_batch(position, record)
            elif isinstance(record, FragmentRecord) and record.offset + len(record.payload) == record.total:
                self._advance(position, record, record.seq, record.seq)
                self.batches += 1
            elif isinstance(record, GapRecord):
                self._advance(position, record, record.first, record.last)
                self.lost += record.last - record.first + 1
            elif isinstance(record, IncarnationRecord) and (*record.key, record.incarnation) in self._streams:
                self.flaws.append(f"page {position}: incarnation {record.incarnation} of {record.source} begins again")

    def skip(self, position: int) -> None:
        """Skip a message whose page does not count."""
        if position == self._position + 1:
            self._position = position

    def _take_batch(self, position: int, record: BatchRecord) -> None:
        self.batches += 1
        stream = self._advance(position, record, record.seq, record.seq)
        lifetime = _find_lifetime(record.payload)
        if lifetime is None:
            return
        if stream.lifetime not in {None, lifetime}:
            self.flaws.append(
                f"page {position}: number {record.seq} of {record.source} is of engine incarnation {lifetime}, but incarnation "
                f"{record.incarnation} has batches of engine incarnation {stream.lifetime}"
            )
        stream.lifetime = lifetime

    def _advance(self, position: int, record: BatchRecord | FragmentRecord | GapRecord, first: int, last: int) -> Stream:
        stream = self._streams.setdefault((*record.key, record.incarnation), Stream())
        if stream.last is not None and first != stream.last + 1:
            problem = "again" if first <= stream.last else "too soon"
            self.flaws.append(f"page {position}: number {first} of {record.source} {problem}, after {stream.last}")
        stream.last = last
        return stream


def _find_lifetime(payload: bytes) -> int | None:
    """Return the incarnation of the engine that made a batch, or None for other payloads."""
    packed = key_of(decode_batch(payload).batch.ts)
    return None if packed == UNKNOWN_BATCH else Key.unpack(packed).lifetime


async def read_log(servers: Iterable[str], layout: Layout, at_once: int) -> Audit:
    """Read all partitions, `at_once` pages at a time.

    Begin again while a cluster elects a leader, and until bridges have recreated a deleted stream.
    """
    from nats.js.errors import NotFoundError, ServiceUnavailableError  # noqa: PLC0415 - an extra

    async with asyncio.timeout(READY_SECONDS):
        while True:
            with suppress(NotFoundError, ServiceUnavailableError):
                return await _read_log(servers, layout, at_once)
            await asyncio.sleep(POLL_SECONDS)


async def _read_log(servers: Iterable[str], layout: Layout, at_once: int) -> Audit:
    audit = Audit()
    client = await nats.connect(list(servers))
    try:
        js = client.jetstream(timeout=READ_SECONDS)
        for partition in range(layout.partitions):
            await _read_partition(js, layout, partition, audit, at_once)
    finally:
        await client.close()
    return audit


async def _read_partition(js: Any, layout: Layout, partition: int, audit: Audit, at_once: int) -> None:
    from nats.js.api import ConsumerConfig, DeliverPolicy  # noqa: PLC0415 - an extra

    state = (await js.stream_info(layout.stream(partition))).state
    if not state.messages:
        return
    consumer = await js.pull_subscribe(
        layout.subject(partition), stream=layout.stream(partition), config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
    )
    position = 0
    history: bytes | None = EMPTY_HISTORY
    while position < state.last_seq:
        for message in await consumer.fetch(at_once, timeout=READ_SECONDS):
            await message.ack()
            before, position = position, message.metadata.sequence.stream
            if position > before + 1:
                history = None  # messages are missing
            page = decode_page(message.data)
            expected, known = None if page is None else page.history, history
            previous = EMPTY_HISTORY if page is not None and expected is None else expected if known is None else known
            history = None if previous is None else extend_history(previous, "" if page is None else page.name)
            if page is None:
                audit.skip(position)
                audit.foreign += 1
            elif expected is not None and known is not None and expected != known:
                audit.skip(position)
                audit.ignored_pages += 1
            else:
                audit.take(position, page)
    await consumer.unsubscribe()
