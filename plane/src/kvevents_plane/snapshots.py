"""Snapshots of partitions in JetStream's object store: the index of one partition's streams, and its `PartitionState`.

Each partition has its own snapshots, so a replica that holds only some partitions writes and reads only their snapshots. A
snapshot is two objects, and an entry in a bucket that makes the snapshot valid. The writer writes the entry last, and replaces
the entry only if it has not changed. The writer then purges the pages that the previous snapshot represents. A reader begins
with the newest snapshot, or with the previous snapshot if the newest cannot be read, and finds all later pages in the
partition. If the servers have no room for another snapshot, the writer first deletes the previous snapshot, and the pages that
the newest snapshot contains.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from nats.js import JetStreamContext, api
from nats.js.errors import BadObjectMetaError, DigestMismatchError

from kvevents.errors import PlaneError, SnapshotError, UnknownSourceError
from kvevents.index import PrefixIndex
from kvevents.settings import build_decoder_now
from kvevents.stream import DegradedReason
from kvevents_plane.layout import Layout, PartitionInfo, has_tail, partition_info
from kvevents_plane.nats_errors import map_errors
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.records import StreamKey, Tail

log = logging.getLogger(__name__)

ENTRY_PREFIX: Final = "snapshot"
"""First part of the key of an entry that lists valid snapshots. The second part is the partition."""
VERSION: Final = 5
CHUNK_BYTES: Final = 512 << 10
"""Size of an object's chunks in bytes; smaller if the servers accept less."""
SWEEP_SECONDS: Final = 600.0
"""Seconds between two searches for unlisted objects, and age in seconds at which an unlisted object is deleted. A process that
is killed while it writes a snapshot leaves objects that no entry lists."""
TRANSFER_SECONDS: Final = 300.0
"""Timeout in seconds for reading or writing one snapshot."""
BODY_SECONDS: Final = 30.0
"""Timeout in seconds for reading a snapshot except its index. The other part has at most a few MiB."""
CLEANUP_SECONDS: Final = 60.0
"""Timeout in seconds for deleting pages and objects that are no longer needed after a snapshot was written."""
_OBJECT_SUFFIXES: Final = ("index", "streams")


class SnapshotInfo(msgspec.Struct, frozen=True):
    """One snapshot of one partition."""

    name: str
    partition: int
    taken_at: float
    """Time at which the snapshot was taken, in seconds since the epoch, by the replica's clock; for operators only."""
    replica: str
    """Name of the replica that took the snapshot."""
    position: int
    """Position of the last page that the snapshot contains."""
    stream_id: str
    """Id of the partition's stream, because a recreated stream has other pages."""
    blocks: int
    bytes: int
    page: str | None = None
    """Name of the last page. If the partition has lost pages, the page at this position has another name."""
    history: str = ""
    """History of the partition up to the last page in hexadecimal digits; empty if unknown."""

    @property
    def tail(self) -> Tail:
        """The last message that the snapshot contains."""
        return Tail(self.position, self.page, bytes.fromhex(self.history) or None)

    @property
    def objects(self) -> set[str]:
        """Names of the snapshot's objects."""
        return {f"{self.name}.{suffix}" for suffix in _OBJECT_SUFFIXES}


@build_decoder_now
class SnapshotList(msgspec.Struct, frozen=True):
    """The valid snapshots of a partition, at most two. The newest one is the first."""

    version: int
    snapshots: list[SnapshotInfo]


@build_decoder_now
class SnapshotBody(msgspec.Struct, array_like=True):
    """The part of a snapshot that is not the index."""

    version: int
    partition: int
    state: bytes
    """The encoded `PartitionState`."""
    degraded_reasons: dict[StreamKey, list[str]]
    """Names of the degraded reasons of each degraded stream."""
    digests: dict[StreamKey, str]
    """Index digest of each stream."""

    def decode(self, snapshot: SnapshotInfo) -> tuple[PartitionState, dict[StreamKey, frozenset[DegradedReason]]]:
        """Return the partition's state and the degraded reasons.

        Raises `SnapshotError`, also if the data belong to another snapshot: an operator can restore or copy objects by hand.
        """
        if self.version != VERSION:
            raise SnapshotError(
                f"the snapshot has version {self.version}, but this release reads version {VERSION}; use another snapshot"
            )
        try:
            state = PartitionState.decode(self.state)
            rows = self.degraded_reasons.items()
            reasons = {key: frozenset(DegradedReason[name] for name in names) for key, names in rows}
        except (ValueError, KeyError) as error:
            raise SnapshotError(f"cannot read the streams of the snapshot: {error}; use another snapshot") from error
        if (self.partition, state.tail) != (snapshot.partition, snapshot.tail):
            raise _damage_error(
                f"{snapshot.name}.streams",
                f"it has page {state.position} of partition {self.partition} instead of page {snapshot.position} of partition "
                f"{snapshot.partition}",
            )
        return state, reasons


def capture(
    partition: int,
    state: PartitionState,
    degraded_reasons: Mapping[StreamKey, frozenset[DegradedReason]],
    index: PrefixIndex,
    path: Path,
) -> SnapshotBody:
    """Write the index of a partition's streams to `path`. Return the other part. No event may be applied during the call."""
    index.snapshot(path, workers=list(state.streams))
    names = {key: [reason.name for reason in degraded_reasons[key]] for key in state.streams if key in degraded_reasons}
    return SnapshotBody(VERSION, partition, state.encode(), names, stream_digests(index, state.streams))


def stream_digests(index: PrefixIndex, keys: Iterable[StreamKey]) -> dict[StreamKey, str]:
    """Return the index digest of each given stream that the index contains."""
    digests = {}
    for key in keys:
        with suppress(UnknownSourceError):
            digests[key] = index.digest(key)
    return digests


class Snapshots:
    """The snapshots of one plane. Methods raise `PlaneError` if a request to the servers fails."""

    def __init__(self, js: JetStreamContext, layout: Layout, clock: Callable[[], float] = time.monotonic) -> None:
        self._js: Final = js
        self._layout: Final = layout
        self._clock: Final = clock
        self._store_stream: Final = f"OBJ_{layout.snapshots}"
        """Name of the object store's stream."""
        self._subjects: Final = f"$O.{layout.snapshots}."
        """Prefix of the subjects of the store's metadata and chunks."""
        self._swept_at = float("-inf")
        self._newest: dict[int, tuple[str, float]] = {}
        """Name of each partition's newest snapshot, and the time at which this process first found it."""
        self._unlisted: dict[str, float] = {}
        """Time at which this process first found each subject of an object that no entry lists."""

    # --- listing snapshots

    async def list_valid(self, partition: int) -> list[SnapshotInfo]:
        """Return the valid snapshots of a partition, the newest first."""
        snapshots, _ = await self._read_entry(partition)
        self._note_newest(partition, snapshots)
        return snapshots

    async def list_matching(self, partition: int, info: PartitionInfo) -> list[SnapshotInfo]:
        """Return the snapshots that match a partition's stream and its messages, the newest first."""
        snapshots = []
        for snapshot in await self.list_valid(partition):
            if snapshot.stream_id != info.stream_id:
                continue
            if await has_tail(self._js, self._layout, partition, info, snapshot.tail):
                snapshots.append(snapshot)
            else:
                log.error("ignoring snapshot %s: partition %d has lost pages that it contains", snapshot.name, partition)
        return snapshots

    def newest_age(self, partition: int) -> float | None:
        """Return the seconds since this process first found the newest snapshot of a partition, by its monotonic clock.

        Return None if the newest query found no snapshot.
        """
        name, since = self._newest.get(partition, ("", 0.0))
        return self._clock() - since if name else None

    def _note_newest(self, partition: int, snapshots: Sequence[SnapshotInfo]) -> None:
        name = snapshots[0].name if snapshots else ""
        if self._newest.get(partition, ("", 0.0))[0] != name:
            self._newest[partition] = name, self._clock()

    async def _read_entry(self, partition: int) -> tuple[list[SnapshotInfo], int]:
        """Return the valid snapshots, and the revision of the entry that lists them (0 if the entry does not exist)."""
        try:
            with map_errors(f"reading the list of snapshots of partition {partition}"):
                bucket = await self._js.key_value(self._layout.bucket)
                entry = await bucket.get(f"{ENTRY_PREFIX}.{partition}")
        except PlaneError as error:
            if error.fault != "missing":
                raise
            return [], 0
        revision = entry.revision or 0
        try:
            snapshot_list = msgspec.json.decode(entry.value or b"", type=SnapshotList)
        except msgspec.MsgspecError as error:
            log.error("ignoring the unreadable list of snapshots of partition %d: %s", partition, error)  # noqa: TRY400 - no traceback
            return [], revision
        return (snapshot_list.snapshots if snapshot_list.version == VERSION else []), revision

    # --- reading snapshots

    async def load_state(self, partition: int, info: PartitionInfo) -> PartitionState | None:
        """Return a partition's state from its newest readable snapshot, or None if no snapshot is readable.

        Raises `PlaneError`. If a request for a snapshot times out and no other snapshot is readable, the timeout is raised,
        because the snapshot might be intact.
        """
        timeout_error: PlaneError | None = None
        for snapshot in await self.list_matching(partition, info):
            try:
                return (await self.load_body(snapshot)).decode(snapshot)[0]
            except SnapshotError as error:
                log.warning("%s", error)
            except PlaneError as error:
                if error.fault not in {"missing", "timeout"}:
                    raise
                log.warning("%s", error)
                timeout_error = timeout_error or (error if error.fault == "timeout" else None)
        if timeout_error is not None:
            raise timeout_error
        return None

    async def load(
        self, snapshot: SnapshotInfo, index: PrefixIndex
    ) -> tuple[PartitionState, dict[StreamKey, frozenset[DegradedReason]]]:
        """Add a snapshot's streams to an index, with a temporary file; return the state and the degraded reasons.

        Raises `SnapshotError` for a damaged snapshot, after removing its streams from the index.
        """
        with temporary_file() as path, map_errors(f"reading snapshot {snapshot.name}"):
            async with asyncio.timeout(TRANSFER_SECONDS):
                body = await self.load_body(snapshot)
                state, degraded_reasons = body.decode(snapshot)
                with path.open("wb") as file:
                    await self._get_object(f"{snapshot.name}.index", file)
            await asyncio.to_thread(_merge_index, index, path, body, snapshot.name)
        return state, degraded_reasons

    async def load_body(self, snapshot: SnapshotInfo) -> SnapshotBody:
        """Read the part of a snapshot that is not the index. Raises `SnapshotError` for a damaged snapshot."""
        with map_errors(f"reading the streams of snapshot {snapshot.name}"):
            async with asyncio.timeout(BODY_SECONDS):
                encoded = await self._get_object(f"{snapshot.name}.streams")
        try:
            return msgspec.msgpack.decode(encoded, type=SnapshotBody)
        except msgspec.MsgspecError as error:
            raise SnapshotError(
                f"cannot read the streams of snapshot {snapshot.name}: {error}; use another snapshot"
            ) from error

    async def _get_object(self, name: str, writeinto: BinaryIO | None = None) -> bytes:
        """Return an object's bytes. If `writeinto` is given, write the bytes to that file and return b"".

        Raises `SnapshotError` for a damaged object. An object with a missing chunk is recognised first, because nats-py would
        wait forever for the chunk.
        """
        store = await self._js.object_store(self._layout.snapshots)
        try:
            info = await store.get_info(name)
            subject = f"{self._subjects}C.{info.nuid}"
            stream = await self._js.stream_info(self._store_stream, subjects_filter=subject)
            present, chunks = (stream.state.subjects or {}).get(subject, 0), info.chunks or 0
            if present < chunks:
                raise _damage_error(name, f"the servers have {present} of its {chunks} chunks")
            return (await store.get(name, writeinto=writeinto)).data or b""  # type: ignore[arg-type]  # it only writes
        except BadObjectMetaError as error:
            raise _damage_error(name, "its metadata cannot be read") from error
        except DigestMismatchError as error:
            raise _damage_error(name, "its digest does not match") from error

    # --- writing snapshots

    async def save(self, body: SnapshotBody, path: Path, blocks: int, replica: str, stream_id: str) -> SnapshotInfo:
        """Write a snapshot, make it valid, and purge the pages and objects that readers no longer need.

        Raises `PlaneError`; its fault is `conflict` if another process has written a snapshot during the call or if the
        partition has other pages.
        """
        partition = body.partition
        name = f"{partition}-{secrets.token_hex(8)}"
        before, revision = await self._read_entry(partition)
        size = await asyncio.to_thread(os.path.getsize, path)
        position, page, history = PartitionState.decode(body.state).tail
        snapshot = SnapshotInfo(
            name, partition, time.time(), replica, position, stream_id, blocks, size, page, (history or b"").hex()
        )
        info = await partition_info(self._js, self._layout, partition)
        if info.stream_id == stream_id and not await has_tail(self._js, self._layout, partition, info, snapshot.tail):
            raise PlaneError(f"partition {partition} has lost pages that snapshot {name} contains", fault="conflict")
        valid = [snapshot, *before[:1]]
        with map_errors(f"writing snapshot {name}"):
            async with asyncio.timeout(TRANSFER_SECONDS):
                try:
                    await self._put_objects(snapshot, body, path)
                except PlaneError as error:
                    if error.fault != "full" or not before:
                        raise
                    log.warning("%s; deleting the older snapshot of partition %d", error, partition)
                    await self._purge(before[0])
                    await self._delete_objects(set().union(*(replaced.objects for replaced in before[1:])))
                    await self._put_objects(snapshot, body, path)
                await self._publish_list(valid, revision)
        self._note_newest(partition, valid)
        try:
            async with asyncio.timeout(CLEANUP_SECONDS):
                await self._clean_up(valid, before[1:])
        except TimeoutError:
            log.warning(
                "the objects that snapshot %s replaces were not deleted within %g s; the next snapshot deletes them",
                name,
                CLEANUP_SECONDS,
            )
        return snapshot

    async def _put_objects(self, snapshot: SnapshotInfo, body: SnapshotBody, path: Path) -> None:
        with map_errors(f"writing snapshot {snapshot.name}"):
            store = await self._js.object_store(self._layout.snapshots)
            chunk = min(CHUNK_BYTES, self._js._nc.max_payload)  # noqa: SLF001 - the context does not expose its client
            for suffix in _OBJECT_SUFFIXES:
                meta = api.ObjectMeta(options=api.ObjectMetaOptions(max_chunk_size=chunk))
                if suffix == "streams":
                    await store.put(f"{snapshot.name}.streams", msgspec.msgpack.encode(body), meta)
                else:
                    with path.open("rb") as file:
                        await store.put(f"{snapshot.name}.index", file, meta)

    async def _publish_list(self, snapshots: Sequence[SnapshotInfo], revision: int) -> None:
        """Write the list of valid snapshots, if the entry of the list still has `revision`."""
        key = f"{ENTRY_PREFIX}.{snapshots[0].partition}"
        with map_errors(f"writing the list of snapshots of partition {snapshots[0].partition}"):
            bucket = await self._js.key_value(self._layout.bucket)
            entry = msgspec.json.encode(SnapshotList(VERSION, list(snapshots)))
            if revision:
                await bucket.update(key, entry, revision)
            else:
                await bucket.create(key, entry)

    # --- deleting snapshots

    async def _clean_up(self, valid: Sequence[SnapshotInfo], replaced: Sequence[SnapshotInfo]) -> None:
        """Purge the pages that the older valid snapshot contains, and delete replaced snapshots. A later call retries."""
        newest, oldest = valid[0], valid[-1]
        if len(valid) > 1 and oldest.stream_id == newest.stream_id and oldest.position > 0:
            with suppress(PlaneError):
                await self._purge(oldest)
        with suppress(PlaneError), map_errors("deleting old snapshots"):
            await self._delete_objects(set().union(*(snapshot.objects for snapshot in replaced)))
            if self._clock() - self._swept_at > SWEEP_SECONDS:
                self._swept_at = self._clock()
                await self._sweep()

    async def _delete_objects(self, names: Iterable[str]) -> None:
        store = await self._js.object_store(self._layout.snapshots)
        for name in sorted(names):
            with suppress(Exception):  # another process has already deleted the object
                await store.delete(name)

    async def _sweep(self) -> None:
        """Purge subjects of objects that no entry lists. Wait for the maximum time that a writer needs to list its objects.

        These subjects include chunks of an object whose writer was killed before the object was complete.
        """
        listed_objects: set[str] = set()
        for partition in range(self._layout.partitions):
            listed_objects.update(*(snapshot.objects for snapshot in await self.list_valid(partition)))
        listed_subjects: set[str] = set()
        for info in await (await self._js.object_store(self._layout.snapshots)).list(ignore_deletes=True):
            if info.name in listed_objects:
                listed_subjects |= {
                    f"{self._subjects}M.{urlsafe_b64encode(info.name.encode()).decode()}",
                    f"{self._subjects}C.{info.nuid}",
                }
        stream = await self._js.stream_info(self._store_stream, subjects_filter=f"{self._subjects}>")
        now = self._clock()
        unlisted = set(stream.state.subjects or {}) - listed_subjects
        self._unlisted = {subject: self._unlisted.get(subject, now) for subject in unlisted}
        for subject in [subject for subject, since in self._unlisted.items() if now - since >= SWEEP_SECONDS]:
            await self._js.purge_stream(self._store_stream, subject=subject)

    async def _purge(self, snapshot: SnapshotInfo) -> None:
        """Purge the pages that a snapshot contains, if the partition still holds them."""
        info = await partition_info(self._js, self._layout, snapshot.partition)
        if info.stream_id == snapshot.stream_id and await has_tail(
            self._js, self._layout, snapshot.partition, info, snapshot.tail
        ):
            with map_errors(f"purging partition {snapshot.partition}"):
                await self._js.purge_stream(self._layout.stream(snapshot.partition), seq=snapshot.position + 1)


@contextmanager
def temporary_file() -> Iterator[Path]:
    """Return a context with the path of a temporary file. Raises `PlaneError` if the file cannot be created."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="kvevents-", ignore_cleanup_errors=True)
    except OSError as error:
        raise PlaneError(
            f"cannot create a temporary file: {error.strerror}; set TMPDIR to a folder with room for a snapshot", fault="full"
        ) from error
    with folder as name:
        yield Path(name, "index")


def _damage_error(name: str, reason: str) -> SnapshotError:
    return SnapshotError(f"snapshot object {name} is damaged: {reason}; another snapshot is used instead")


def _merge_index(index: PrefixIndex, path: Path, body: SnapshotBody, name: str) -> None:
    keys = index.merge(path)
    if body.digests != stream_digests(index, keys):
        for key in keys:
            index.remove_worker(key)
            index.readmit(key)
        raise SnapshotError(f"the index in snapshot {name} does not have its digests; another snapshot is used instead")
