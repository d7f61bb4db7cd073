"""The log, read without knowledge of its writers: is every batch there once, in order, and of one incarnation?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import nats

from kvevents.plane.layout import Layout
from kvevents.plane.records import (
    EMPTY_HISTORY,
    BatchRecord,
    FragmentRecord,
    GapRecord,
    IncarnationRecord,
    Page,
    decode_page,
    extend_history,
)
from kvevents.wire import decode_batch
from tests.system.chaos.truth import UNPLACED, Key, key_of

READ_SECONDS: Final = 20.0
LEADER_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 0.1


@dataclass(slots=True)
class Stream:
    """What one incarnation of a stream has shown."""

    last: int | None = None
    life: int | None = None


@dataclass(slots=True)
class Audit:
    """What was found in a log."""

    pages: int = 0
    batches: int = 0
    lost: int = 0
    """Batches that the log says are lost."""
    foreign: int = 0
    stale_epoch_pages: int = 0
    """Pages that were meant for a partition that has been deleted."""
    void_pages: int = 0
    """Pages whose writer expected others before them."""
    flaws: list[str] = field(default_factory=list)
    _streams: dict[tuple[str, int, int], Stream] = field(default_factory=dict)
    _position: int = 0

    def take(self, position: int, page: Page) -> None:
        """The next page of a partition; the first one may be any, and pages may be purged while others are read."""
        self.pages += 1
        if position != self._position + 1:
            for stream in self._streams.values():
                stream.last = None
        self._position = position
        for record in page.records:
            if isinstance(record, BatchRecord):
                self._take_batch(position, record)
            elif isinstance(record, FragmentRecord) and record.offset + len(record.payload) == record.total:
                self._follow(position, record, record.seq, record.seq)
                self.batches += 1
            elif isinstance(record, GapRecord):
                self._follow(position, record, record.first, record.last)
                self.lost += record.last - record.first + 1
            elif isinstance(record, IncarnationRecord) and (*record.key, record.incarnation) in self._streams:
                self.flaws.append(f"page {position}: incarnation {record.incarnation} of {record.source} begins again")

    def pass_over(self, position: int) -> None:
        """A message that says nothing."""
        if position == self._position + 1:
            self._position = position

    def _take_batch(self, position: int, record: BatchRecord) -> None:
        self.batches += 1
        stream = self._follow(position, record, record.seq, record.seq)
        life = _life_of(record.payload)
        if life is None:
            return
        if stream.life not in {None, life}:
            self.flaws.append(
                f"page {position}: number {record.seq} of {record.source} is of life {life}, but incarnation "
                f"{record.incarnation} is life {stream.life}"
            )
        stream.life = life

    def _follow(self, position: int, record: BatchRecord | FragmentRecord | GapRecord, first: int, last: int) -> Stream:
        stream = self._streams.setdefault((*record.key, record.incarnation), Stream())
        if stream.last is not None and first != stream.last + 1:
            what = "again" if first <= stream.last else "too soon"
            self.flaws.append(f"page {position}: number {first} of {record.source} {what}, after {stream.last}")
        stream.last = last
        return stream


def _life_of(payload: bytes) -> int | None:
    """Return the incarnation of a chaos engine that made a batch; None for other payloads."""
    packed = key_of(decode_batch(payload).batch.ts)
    return None if packed == UNPLACED else Key.unpack(packed).life


async def read_log(servers: Iterable[str], layout: Layout, at_once: int) -> Audit:
    """Everything that is there, of all partitions, so many pages at once; again where a cluster is choosing a leader
    meanwhile."""
    from nats.js.errors import ServiceUnavailableError  # noqa: PLC0415 - an extra

    async with asyncio.timeout(LEADER_SECONDS):
        while True:
            with suppress(ServiceUnavailableError):
                return await _read_log(servers, layout, at_once)
            await asyncio.sleep(LOOK_SECONDS)


async def _read_log(servers: Iterable[str], layout: Layout, at_once: int) -> Audit:
    audit = Audit()
    client = await nats.connect(list(servers))
    try:
        js = client.jetstream(timeout=READ_SECONDS)
        for partition in range(layout.partitions):
            await _until_there(js, layout.stream(partition))
            await _read_partition(js, layout, partition, audit, at_once)
    finally:
        await client.close()
    return audit


async def _until_there(js: Any, name: str) -> None:
    """Wait until it is there. Bridges recreate a deleted one, which they notice when nothing has come for a while."""
    from nats.js.errors import NotFoundError  # noqa: PLC0415 - an extra

    async with asyncio.timeout(READ_SECONDS):
        while True:
            with suppress(NotFoundError):
                await js.stream_info(name)
                return
            await asyncio.sleep(LOOK_SECONDS)


async def _read_partition(js: Any, layout: Layout, partition: int, audit: Audit, at_once: int) -> None:
    from nats.js.api import ConsumerConfig, DeliverPolicy  # noqa: PLC0415 - an extra

    state = (await js.stream_info(layout.stream(partition))).state
    if not state.messages:
        return
    consumer = await js.pull_subscribe(
        layout.subject(partition), stream=layout.stream(partition), config=ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
    )
    position, life = 0, ""
    history: bytes | None = EMPTY_HISTORY if state.first_seq == 1 else None
    while position < state.last_seq:
        for message in await consumer.fetch(at_once, timeout=READ_SECONDS):
            await message.ack()
            position = message.metadata.sequence.stream
            page = decode_page(message.data)
            life = life or ("" if page is None else page.epoch)
            expected, known = None if page is None else page.history, history
            before = EMPTY_HISTORY if page is not None and expected is None else expected if known is None else known
            history = None if before is None else extend_history(before, "" if page is None else page.name)
            if page is None:
                audit.pass_over(position)
                audit.foreign += 1
            elif page.epoch != life:
                audit.pass_over(position)
                audit.stale_epoch_pages += 1
            elif expected is not None and known is not None and expected != known:
                audit.pass_over(position)
                audit.void_pages += 1
            else:
                audit.take(position, page)
    await consumer.unsubscribe()
