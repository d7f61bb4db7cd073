"""Snapshots of partitions in JetStream's object store: the index of one partition's streams, and its ledger.

Each partition has snapshots of its own, so that a replica that holds some partitions alone can take them, and begin with them.
A snapshot is two objects, and an entry in a bucket that says that it counts. The entry is written last, and only over the one
that its writer has read. Pages that the snapshot before it stands for are purged then: a reader begins with the newest one, or
with the one before where the newest cannot be read, and finds in the partition all that came after. Where there is no room for
another snapshot, the older of the two gives way first, with the pages up to the newest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from kvevents.errors import PlaneError, SnapshotError, UnknownSourceError
from kvevents.index import PrefixIndex
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout, PartitionInfo, state_of
from kvevents.plane.ledger import Ledger
from kvevents.plane.reading import has_tail
from kvevents.plane.records import Key, Tail
from kvevents.stream import DegradedReason
from kvevents.structs import build_decoder_now

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.api import ObjectInfo
    from nats.js.object_store import ObjectStore

log = logging.getLogger(__name__)

ENTRY: Final = "snapshot"
"""Level of the keys of entries that say which snapshots count; the partition follows."""
VERSION: Final = 3
CHUNK_BYTES: Final = 512 << 10
"""Of a message of an object, less where servers take less."""
TRANSFER_SECONDS: Final = 300.0
"""For one snapshot to be written or read."""
STREAMS_SECONDS: Final = 30.0
"""For what one has besides the index to be read, which is some MiB at most."""
TIDY_SECONDS: Final = 60.0
"""For what no reader needs any more to be removed, after a snapshot was written."""
SWEEP_SECONDS: Final = 600.0
"""Between two looks for objects that no entry names; one that was seen for so long is removed. A process that was killed while
it wrote a snapshot has left it."""
_SUFFIXES: Final = ("index", "streams")
_CHUNKS: Final = "$O."
"""What subjects of an object store begin with."""


class Kept(msgspec.Struct, frozen=True):
    """One snapshot of one partition."""

    name: str
    partition: int
    at: float
    """When it was taken, seconds since the epoch by its taker's clock: for people alone."""
    by: str
    """The replica that took it."""
    position: int
    """The page that it ends with."""
    made: str
    """Which stream the partition is: one that was deleted and made anew has other pages."""
    blocks: int
    bytes: int
    page: str | None = None
    """The name of that page, and the history of the partition up to it: one that has lost pages has others there."""
    history: str = ""
    """In hexadecimal digits; empty where it is not known."""

    @property
    def tail(self) -> Tail:
        """Where it ends."""
        return Tail(self.position, self.page, bytes.fromhex(self.history) or None)

    @property
    def objects(self) -> set[str]:
        """Names of what it is made of."""
        return {f"{self.name}.{suffix}" for suffix in _SUFFIXES}


@build_decoder_now
class Entry(msgspec.Struct, frozen=True):
    """Which snapshots of a partition count, the newest first: at most two."""

    version: int
    kept: list[Kept]


@build_decoder_now
class Taken(msgspec.Struct, array_like=True):
    """What a snapshot has besides the index; of the same moment."""

    version: int
    partition: int
    ledger: bytes
    doubts: list[tuple[str, int, list[str]]]
    digests: list[tuple[str, int, str]]
    """Of the partition's streams in the index."""

    def restored(self) -> tuple[Ledger, dict[Key, frozenset[DegradedReason]]]:
        """Ledger and doubts as they were. Raises `SnapshotError`."""
        if self.version != VERSION:
            raise SnapshotError(f"a snapshot is of version {self.version}, and this release reads {VERSION}; take another one")
        try:
            ledger = Ledger.restore(self.ledger)
            doubts = {(source, rank): frozenset(DegradedReason[name] for name in names) for source, rank, names in self.doubts}
        except (ValueError, KeyError) as error:
            raise SnapshotError(f"the streams of a snapshot cannot be read: {error}; take another one") from error
        return ledger, doubts


def take(
    partition: int, ledger: Ledger, doubts: Mapping[Key, frozenset[DegradedReason]], index: PrefixIndex, path: Path
) -> Taken:
    """Write the streams of a partition to `path`, and say what belongs to them. Nothing may be applied to them meanwhile."""
    index.snapshot(path, workers=list(ledger.streams))
    named = [(*key, [doubt.name for doubt in doubts[key]]) for key in ledger.streams if key in doubts]
    return Taken(VERSION, partition, ledger.save(), named, digests_of(index, ledger.streams))


def digests_of(index: PrefixIndex, keys: Iterable[Key]) -> list[tuple[str, int, str]]:
    """Of those of some streams that are in an index."""
    found = []
    for key in sorted(keys):
        with suppress(UnknownSourceError):
            found.append((*key, index.digest(key)))
    return found


class Snapshots:
    """The snapshots of one plane. Methods raise `PlaneError` where the servers do not do it."""

    def __init__(self, js: JetStreamContext, layout: Layout, clock: Callable[[], float] = time.monotonic) -> None:
        self._js: Final = js
        self._layout: Final = layout
        self._clock: Final = clock
        self._swept_at = float("-inf")
        self._seen: dict[int, tuple[str, float]] = {}
        """By partition the name of the newest snapshot, and when this process found it there first."""
        self._unnamed: dict[str, float] = {}
        """Objects that no entry names, and when this process found them first."""

    def known_for(self, partition: int) -> float | None:
        """Seconds since this process found the newest snapshot of a partition: by its own clock, since others may be wrong.

        None where there was none when it looked last.
        """
        name, since = self._seen.get(partition, ("", 0.0))
        return self._clock() - since if name else None

    async def kept(self, partition: int) -> list[Kept]:
        """Those of a partition that count, the newest first."""
        kept, _ = await self._entry(partition)
        self._see(partition, kept)
        return kept

    def _see(self, partition: int, kept: Sequence[Kept]) -> None:
        name = kept[0].name if kept else ""
        if self._seen.get(partition, ("", 0.0))[0] != name:
            self._seen[partition] = name, self._clock()

    async def usable(self, partition: int, state: PartitionInfo) -> list[Kept]:
        """Return the snapshots of a partition that match its stream and its messages, the newest first."""
        found = []
        for kept in await self.kept(partition):
            if kept.made != state.made:
                continue
            if await has_tail(self._js, self._layout, partition, state, kept.tail):
                found.append(kept)
            else:
                log.error("snapshot %s is passed over: partition %d has lost pages that it was made of", kept.name, partition)
        return found

    async def is_whole(self, kept: Kept) -> bool:
        """Whether all parts of a snapshot are there."""
        try:
            with told(f"looking for snapshot {kept.name}"):
                for name in sorted(kept.objects):
                    await self._find(name)
        except SnapshotError:
            return False
        except PlaneError as error:
            if error.fault != "missing":
                raise
            return False
        return True

    async def _find(self, name: str) -> ObjectStore:
        """The object store, which has all parts of an object.

        Raises `SnapshotError` where one is lost: nats-py waits without end for a chunk that does not come.
        """
        from nats.js.errors import BadObjectMetaError  # noqa: PLC0415 - an extra

        store = await self._js.object_store(self._layout.snapshots)
        try:
            info = await store.get_info(name)
        except BadObjectMetaError as error:
            raise _damaged(name, "its description cannot be read") from error
        subject = f"{_CHUNKS}{self._layout.snapshots}.C.{info.nuid}"
        found = await self._js.stream_info(self._stream, subjects_filter=subject)
        there, chunks = (found.state.subjects or {}).get(subject, 0), info.chunks or 0
        if there < chunks:
            raise _damaged(name, f"the servers have {there} of its {chunks} chunks")
        return store

    async def _get(self, name: str, writeinto: BinaryIO | None = None) -> bytes:
        """What an object holds; nothing where that is written into a file. Raises `SnapshotError` for one that is damaged."""
        from nats.js.errors import DigestMismatchError  # noqa: PLC0415 - an extra

        store = await self._find(name)
        try:
            return (await store.get(name, writeinto=writeinto)).data or b""  # type: ignore[arg-type]  # it writes alone
        except DigestMismatchError as error:
            raise _damaged(name, "it does not have its digest") from error

    async def _entry(self, partition: int) -> tuple[list[Kept], int]:
        """The same with the number of the entry; 0 where there is none."""
        try:
            with told(f"asking for the newest snapshot of partition {partition}"):
                bucket = await self._js.key_value(self._layout.bucket)
                entry = await bucket.get(f"{ENTRY}.{partition}")
        except PlaneError as error:
            if error.fault != "missing":
                raise
            return [], 0
        revision = entry.revision or 0
        try:
            found = msgspec.json.decode(entry.value or b"", type=Entry)
        except msgspec.MsgspecError as error:
            log.error("the entry of snapshots of partition %d cannot be read, and is passed over: %s", partition, error)  # noqa: TRY400 - no fault of ours
            return [], revision
        return (found.kept if found.version == VERSION else []), revision

    async def load(self, kept: Kept, index: PrefixIndex, folder: Path) -> tuple[Ledger, dict[Key, frozenset[DegradedReason]]]:
        """Add what a snapshot holds to an index, by way of a folder.

        Raises `SnapshotError` for one that is damaged, of which nothing stays in the index.
        """
        path = folder / f"{kept.name}.index"
        try:
            async with asyncio.timeout(TRANSFER_SECONDS):
                taken = await self.streams(kept)
                with told(f"reading snapshot {kept.name}"), path.open("wb") as file:
                    await self._get(f"{kept.name}.index", file)
            ledger, doubts = taken.restored()
            await asyncio.to_thread(_merge, index, path, taken, kept.name)
        except TimeoutError as error:
            raise PlaneError(f"snapshot {kept.name} was not read within {TRANSFER_SECONDS:g} s", fault="timeout") from error
        finally:
            path.unlink(missing_ok=True)
        return ledger, doubts

    async def streams(self, kept: Kept) -> Taken:
        """What a snapshot has besides the index. Raises `SnapshotError` for one that is damaged."""
        with told(f"reading the streams of snapshot {kept.name}"):
            async with asyncio.timeout(STREAMS_SECONDS):
                found = await self._get(f"{kept.name}.streams")
        try:
            return msgspec.msgpack.decode(found, type=Taken)
        except msgspec.MsgspecError as error:
            raise SnapshotError(f"the streams of snapshot {kept.name} cannot be read: {error}; take another one") from error

    async def save(self, taken: Taken, path: Path, blocks: int, by: str, made: str) -> Kept:
        """Write a snapshot, have it count, and purge what no reader needs any more.

        Raises `PlaneError`, with the fault `conflict` where somebody else's came in between, or where the partition has other
        pages.
        """
        name = f"{taken.partition}-{secrets.token_hex(8)}"
        before, revision = await self._entry(taken.partition)
        ledger, _ = taken.restored()
        size = await asyncio.to_thread(os.path.getsize, path)
        position, page, history = ledger.tail
        kept = Kept(name, taken.partition, time.time(), by, position, made, blocks, size, page, (history or b"").hex())
        state = await state_of(self._js, self._layout, taken.partition)
        if state.made == made and not await has_tail(self._js, self._layout, taken.partition, state, kept.tail):
            raise PlaneError(f"partition {taken.partition} has lost pages that snapshot {name} was made of", fault="conflict")
        count = [kept, *before[:1]]
        try:
            async with asyncio.timeout(TRANSFER_SECONDS):
                try:
                    await self._put(kept, taken, path)
                except PlaneError as error:
                    if error.fault != "full" or not before:
                        raise
                    log.warning("%s; the snapshot before the newest of partition %d gives way", error, taken.partition)
                    await self._make_room(before)
                    await self._put(kept, taken, path)
                await self._let_count(count, revision)
        except TimeoutError as error:
            raise PlaneError(f"snapshot {name} was not written within {TRANSFER_SECONDS:g} s", fault="timeout") from error
        self._see(taken.partition, count)
        try:
            async with asyncio.timeout(TIDY_SECONDS):
                await self._tidy(count, before[1:])
        except TimeoutError:
            log.warning("what snapshot %s replaces was not removed within %g s; the next one removes it", name, TIDY_SECONDS)
        return kept

    async def _put(self, kept: Kept, taken: Taken, path: Path) -> None:
        from nats.js import api  # noqa: PLC0415 - an extra

        with told(f"writing snapshot {kept.name}"):
            store = await self._js.object_store(self._layout.snapshots)
            chunk = min(CHUNK_BYTES, self._js._nc.max_payload)  # noqa: SLF001 - the client that it was made of
            for suffix in _SUFFIXES:
                meta = api.ObjectMeta(options=api.ObjectMetaOptions(max_chunk_size=chunk))
                if suffix == "streams":
                    await store.put(f"{kept.name}.streams", msgspec.msgpack.encode(taken), meta)
                else:
                    with path.open("rb") as file:
                        await store.put(f"{kept.name}.index", file, meta)

    async def _make_room(self, kept: list[Kept]) -> None:
        """Leave of a partition only its newest snapshot and the pages behind it."""
        await self._purge(kept[0])
        with told("removing old snapshots"):
            await self._remove(set().union(*(each.objects for each in kept[1:])))

    async def _let_count(self, kept: list[Kept], revision: int) -> None:
        key = f"{ENTRY}.{kept[0].partition}"
        with told(f"having a snapshot of partition {kept[0].partition} count"):
            bucket = await self._js.key_value(self._layout.bucket)
            entry = msgspec.json.encode(Entry(VERSION, kept))
            if revision:
                await bucket.update(key, entry, revision)
            else:
                await bucket.create(key, entry)

    async def _tidy(self, kept: list[Kept], gone: list[Kept]) -> None:
        """Purge what is before the older snapshot that counts, and remove the others. What fails is done next time."""
        newest, oldest = kept[0], kept[-1]
        if len(kept) > 1 and oldest.made == newest.made and oldest.position > 0:
            with suppress(PlaneError):
                await self._purge(oldest)
        with suppress(PlaneError), told("removing old snapshots"):
            await self._remove(set().union(*(each.objects for each in gone)))
            if self._clock() - self._swept_at > SWEEP_SECONDS:
                self._swept_at = self._clock()
                await self._sweep()

    async def _remove(self, names: Iterable[str]) -> None:
        store = await self._js.object_store(self._layout.snapshots)
        for name in sorted(names):
            with suppress(Exception):  # it is gone already
                await store.delete(name)

    async def _sweep(self) -> None:
        """Remove objects that no entry names, once nobody can be about to have them count."""
        from nats.js.errors import NotFoundError  # noqa: PLC0415 - an extra

        try:
            infos = await (await self._js.object_store(self._layout.snapshots)).list(ignore_deletes=True)
        except NotFoundError:
            return
        keep: set[str] = set()
        for partition in range(self._layout.partitions):
            keep.update(*(each.objects for each in await self.kept(partition)))
        now = self._clock()
        names = {info.name for info in infos if info.name and info.name not in keep} | await self._chunks(infos)
        self._unnamed = {name: self._unnamed.get(name, now) for name in names}
        for name in [name for name, since in self._unnamed.items() if now - since >= SWEEP_SECONDS]:
            if name.startswith(_CHUNKS):
                await self._js.purge_stream(self._stream, subject=name)
            else:
                await self._remove([name])

    @property
    def _stream(self) -> str:
        """That of the object store."""
        return f"OBJ_{self._layout.snapshots}"

    async def _chunks(self, infos: Iterable[ObjectInfo]) -> set[str]:
        """Subjects of chunks of no object: its writer was killed before it was whole."""
        prefix = f"{_CHUNKS}{self._layout.snapshots}.C."
        found = await self._js.stream_info(self._stream, subjects_filter=f"{prefix}>")
        return set(found.state.subjects or {}) - {f"{prefix}{info.nuid}" for info in infos}

    async def _purge(self, kept: Kept) -> None:
        """Up to the end of a snapshot, where the partition holds what that was made of."""
        state = await state_of(self._js, self._layout, kept.partition)
        if state.made == kept.made and await has_tail(self._js, self._layout, kept.partition, state, kept.tail):
            with told(f"purging partition {kept.partition}"):
                await self._js.purge_stream(self._layout.stream(kept.partition), seq=kept.position + 1)


def _damaged(name: str, why: str) -> SnapshotError:
    return SnapshotError(f"snapshot object {name} is damaged: {why}; another snapshot is taken instead")


def _merge(index: PrefixIndex, path: Path, taken: Taken, name: str) -> None:
    came = index.merge(path)
    if sorted(taken.digests) != digests_of(index, came):
        for key in came:
            index.remove_worker(key)
            index.readmit(key)
        raise SnapshotError(f"snapshot {name} does not hold what it says; another one is taken instead")
