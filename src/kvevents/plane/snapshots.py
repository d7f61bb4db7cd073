"""Snapshots of a plane: an index and the ledgers that it was built from, in JetStream's object store.

A snapshot is two objects, and an entry in a bucket that says that it counts. The entry is written last, and only over the one
that its writer has read. Pages that the snapshot before it stands for are purged then: a reader begins with the newest one, or
with the one before where the newest cannot be read, and finds in the lanes all that came after.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvevents.errors import PlaneError, SnapshotError
from kvevents.index import PrefixIndex
from kvevents.plane.faults import told
from kvevents.plane.layout import Layout, state_of
from kvevents.plane.ledger import Ledger
from kvevents.plane.records import Key
from kvevents.stream import Doubt

if TYPE_CHECKING:
    from nats.js import JetStreamContext

log = logging.getLogger(__name__)

ENTRY: Final = "snapshot"
"""Key of the entry that says which snapshots count."""
VERSION: Final = 1
CHUNK_BYTES: Final = 512 << 10
"""Of a message of an object, less where servers take less."""
TRANSFER_SECONDS: Final = 300.0
"""For one snapshot to be written or read."""
REQUEST_SECONDS: Final = 10.0


class Kept(msgspec.Struct, frozen=True):
    """One snapshot, and where the lanes stood."""

    name: str
    at: float
    """When it was taken, seconds since the epoch."""
    by: str
    """The replica that took it."""
    positions: dict[str, int]
    """By lane the page that it ends with."""
    made: dict[str, str]
    """By lane which stream that is: one that was deleted and made anew has other pages."""
    blocks: int
    bytes: int


class Entry(msgspec.Struct, frozen=True):
    """Which snapshots count, the newest first: at most two."""

    version: int
    kept: list[Kept]


class Taken(msgspec.Struct, array_like=True):
    """What a snapshot has besides the index; of the same moment."""

    version: int
    ledgers: dict[int, bytes]
    doubts: list[tuple[str, int, list[str]]]
    digests: list[tuple[str, int, str]]
    """Of the index, by stream."""

    def restored(self) -> tuple[dict[int, Ledger], dict[Key, frozenset[Doubt]]]:
        """Ledgers and doubts as they were. Raises `SnapshotError`."""
        if self.version != VERSION:
            raise SnapshotError(f"a snapshot is of version {self.version}, and this release reads {VERSION}; take another one")
        try:
            ledgers = {lane: Ledger.restore(data) for lane, data in self.ledgers.items()}
            doubts = {(source, rank): frozenset(Doubt[name] for name in names) for source, rank, names in self.doubts}
        except (ValueError, KeyError) as error:
            raise SnapshotError(f"the streams of a snapshot cannot be read: {error}; take another one") from error
        return ledgers, doubts


def digests_of(index: PrefixIndex) -> list[tuple[str, int, str]]:
    """Of every stream in an index."""
    return [(info.source, info.rank, index.digest((info.source, info.rank))) for info in index.workers()]


class Snapshots:
    """The snapshots of one plane. Methods raise `PlaneError` where the servers do not do it."""

    def __init__(self, js: JetStreamContext, layout: Layout) -> None:
        self._js: Final = js
        self._layout: Final = layout
        self._revision = 0

    async def kept(self) -> list[Kept]:
        """Those that count, the newest first."""
        try:
            with told("asking for the newest snapshot"):
                bucket = await self._js.key_value(self._layout.bucket)
                entry = await bucket.get(ENTRY)
        except PlaneError as error:
            if error.fault != "missing":
                raise
            self._revision = 0
            return []
        self._revision = entry.revision or 0
        try:
            found = msgspec.json.decode(entry.value or b"", type=Entry)
        except msgspec.MsgspecError as error:
            log.error("the entry of snapshots cannot be read, and is passed over: %s", error)  # noqa: TRY400 - no fault of ours
            return []
        return found.kept if found.version == VERSION else []

    async def load(self, kept: Kept, index: PrefixIndex, folder: Path) -> Taken:
        """Bring an index to where a snapshot was, by way of a folder. Raises `SnapshotError` for one that is damaged."""
        path = folder / f"{kept.name}.index"
        try:
            async with asyncio.timeout(TRANSFER_SECONDS):
                with told(f"reading snapshot {kept.name}"):
                    store = await self._js.object_store(self._layout.snapshots)
                    streams = await store.get(f"{kept.name}.streams")
                    with path.open("wb") as file:
                        await store.get(f"{kept.name}.index", writeinto=file)
        except TimeoutError as error:
            raise PlaneError(f"snapshot {kept.name} was not read within {TRANSFER_SECONDS:g} s", fault="timeout") from error
        try:
            taken = msgspec.msgpack.decode(streams.data or b"", type=Taken)
            await asyncio.to_thread(index.restore, path)
        except msgspec.MsgspecError as error:
            raise SnapshotError(f"the streams of snapshot {kept.name} cannot be read: {error}; take another one") from error
        finally:
            path.unlink(missing_ok=True)
        if sorted(taken.digests) != sorted(await asyncio.to_thread(digests_of, index)):
            raise SnapshotError(f"snapshot {kept.name} does not hold what it says; another one is taken instead")
        return taken

    async def save(self, taken: Taken, path: Path, blocks: int, by: str, made: Mapping[int, str]) -> Kept:
        """Write a snapshot, have it count, and purge what no reader needs any more.

        Raises `PlaneError`, with the fault `conflict` where somebody else's came in between.
        """
        name = f"{int(time.time())}-{secrets.token_hex(6)}"
        before, revision = await self.kept(), self._revision
        ledgers, _ = taken.restored()
        kept = Kept(
            name,
            time.time(),
            by,
            {str(lane): ledger.position for lane, ledger in ledgers.items()},
            {str(lane): which for lane, which in made.items()},
            blocks,
            await asyncio.to_thread(os.path.getsize, path),
        )
        try:
            async with asyncio.timeout(TRANSFER_SECONDS):
                await self._put(kept, taken, path)
                await self._let_count([kept, *before[:1]], revision)
        except TimeoutError as error:
            raise PlaneError(f"snapshot {name} was not written within {TRANSFER_SECONDS:g} s", fault="timeout") from error
        await self._tidy([kept, *before[:1]], before[1:])
        return kept

    async def _put(self, kept: Kept, taken: Taken, path: Path) -> None:
        from nats.js import api  # noqa: PLC0415 - an extra

        with told(f"writing snapshot {kept.name}"):
            store = await self._js.object_store(self._layout.snapshots)
            chunk = min(CHUNK_BYTES, self._js._nc.max_payload)  # noqa: SLF001 - the client that it was made of
            for suffix in ("index", "streams"):
                meta = api.ObjectMeta(options=api.ObjectMetaOptions(max_chunk_size=chunk))
                if suffix == "streams":
                    await store.put(f"{kept.name}.streams", msgspec.msgpack.encode(taken), meta)
                else:
                    with path.open("rb") as file:
                        await store.put(f"{kept.name}.index", file, meta)

    async def _let_count(self, kept: list[Kept], revision: int) -> None:
        with told("having a snapshot count"):
            bucket = await self._js.key_value(self._layout.bucket)
            entry = msgspec.json.encode(Entry(VERSION, kept))
            if revision:
                await bucket.update(ENTRY, entry, revision)
            else:
                await bucket.create(ENTRY, entry)

    async def _tidy(self, kept: list[Kept], gone: list[Kept]) -> None:
        """Purge what is before the oldest snapshot that counts, and remove the others. What fails is done next time."""
        oldest = kept[-1]
        for lane, position in oldest.positions.items():
            if len(kept) > 1 and oldest.made.get(lane) == kept[0].made.get(lane) and position > 0:
                with suppress(PlaneError):
                    await self._purge(int(lane), position, kept[0].made.get(lane))
        with suppress(PlaneError), told("removing old snapshots"):
            store = await self._js.object_store(self._layout.snapshots)
            keep = {f"{each.name}.{suffix}" for each in kept for suffix in ("index", "streams")}
            doomed = {f"{each.name}.{suffix}" for each in gone for suffix in ("index", "streams")}
            doomed |= {info.name for info in await store.list() if info.name is not None} - keep
            for name in sorted(doomed):
                with suppress(Exception):  # it is gone already
                    await store.delete(name)

    async def _purge(self, lane: int, position: int, made: str | None) -> None:
        """Up to a page of the lane that the snapshots are of: one that was made anew has others, which no snapshot holds."""
        state = await state_of(self._js, self._layout, lane)
        if state.made == made:
            with told(f"purging lane {lane}"):
                await self._js.purge_stream(self._layout.stream(lane), seq=position + 1)
