"""The JetStream objects of a plane: their names, their creation, and queries about them.

    KVEVENTS_<plane>_<partition>    stream; subject kvevents.<plane>.partition.<partition>
    KVEVENTS_<plane>                key-value bucket: which snapshots are valid
    KVEVENTS_<plane>_digests        key-value bucket whose entries expire: the digests of each replica
    KVEVENTS_<plane>_snapshots      object store

The number of subjects does not depend on the number of engines, because a server's memory grows with its subjects. A hash of
the engine's name selects the partition, so all ranks of an engine are in one partition.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from nats.js import JetStreamContext, api
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError

from kvevents.errors import ConfigError, PlaneError
from kvevents.settings import build_decoder_now
from kvevents_plane.nats_errors import map_errors
from kvevents_plane.records import HISTORY_HEADER, NEW_HISTORY_MARK, PAGE_HEADER, ReceivedMessage, Tail
from kvevents_plane.settings import PlaneSettings

log = logging.getLogger(__name__)

LAYOUT_VERSION: Final = 3
"""Version of the layout of a plane's objects. A release that supports another version cannot use the plane."""
METADATA_PREFIX: Final = "kvevents-"
"""Prefix of the keys in a stream's metadata. A key consists of this prefix and the name of a field of `PartitionMetadata`."""
DIGEST_EXPIRY_SECONDS: Final = 15
"""Seconds after which a replica's digests expire, unless the replica publishes new digests."""
FETCH_SECONDS: Final = 5.0
"""Timeout in seconds for one request for a message."""


@build_decoder_now
class PartitionMetadata(msgspec.Struct, frozen=True):
    """Metadata of a partition's stream."""

    layout: int
    partitions: int
    epoch: str
    """Identifies the content: a recreated stream has a new epoch, and a stream restored from a backup has the old one."""

    def as_metadata(self) -> dict[str, str]:
        """Return the metadata in the form that a stream's configuration has."""
        return {METADATA_PREFIX + name: str(value) for name, value in msgspec.structs.asdict(self).items()}

    @classmethod
    def from_info(cls, info: StreamInfo) -> PartitionMetadata | None:
        """Return the metadata of a stream, or None for a stream that is not a partition."""
        known = {key.removeprefix(METADATA_PREFIX): value for key, value in (info.config.metadata or {}).items()}
        try:
            return msgspec.convert(known, cls, strict=False)
        except msgspec.ValidationError:
            return None


REPAIR_ADVICE: Final = "restore its settings, or delete it: a bridge creates it again"
"""Advice to an operator whose stream cannot be a partition."""


class PartitionInfo(NamedTuple):
    """The state of a partition as the servers report it."""

    first: int
    """Position of the oldest page."""
    last: int
    """Position of the newest page; 0 before the first page."""
    bytes: int
    stream_id: str
    """Id of the JetStream stream. A recreated stream has another id."""
    leader: str | None
    """Name of the leader, empty while no leader exists, or None if the server is not in a cluster."""
    missing: int = 0
    """Number of positions, between the oldest and the newest page, whose messages no longer exist."""
    stream_fault: str = ""
    """Why the stream cannot be a partition, for example after a change by an operator; empty if it can."""


class Layout:
    """Names of one plane's JetStream objects."""

    def __init__(self, name: str, partitions: int) -> None:
        self.name: Final = name
        self.partitions: Final = partitions
        self.bucket: Final = f"KVEVENTS_{name}"
        """Name of the bucket whose entries do not expire."""
        self.digests: Final = f"KVEVENTS_{name}_digests"
        """Name of the bucket whose entries expire."""
        self.snapshots: Final = f"KVEVENTS_{name}_snapshots"
        """Name of the object store."""

    def stream(self, partition: int) -> str:
        """Return the name of a partition's stream."""
        return f"KVEVENTS_{self.name}_{partition}"

    def subject(self, partition: int) -> str:
        """Return the subject to which a partition's pages are published."""
        return f"kvevents.{self.name}.partition.{partition}"

    def partition_of(self, source: str) -> int:
        """Return the partition of an engine, which depends only on the engine's name and on the number of partitions."""
        return _hash_of(source) % self.partitions


@lru_cache(maxsize=1 << 16)
def _hash_of(source: str) -> int:
    """Return a hash of an engine's name. The result is cached, because a bridge needs the hash for every record."""
    return int.from_bytes(hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


# --- creating the layout -----------------------------------------------------------------------------------------------------


async def find_plane(js: JetStreamContext, name: str) -> Layout | None:
    """Return the layout of an existing plane, or None if no plane has this name.

    Raises `PlaneError`, and `ConfigError` if a stream with that name belongs to another application or layout version.
    """
    layout = Layout(name, 1)
    # If one of the two partitions was just deleted, the other one still has the metadata.
    info = await _stream_info(js, layout, 0) or await _stream_info(js, layout, 1)
    if info is None:
        return None
    metadata = PartitionMetadata.from_info(info)
    if metadata is None:
        raise ConfigError(
            f"stream {info.config.name} was not created by kvevents: delete it, or choose another name for the plane"
        )
    if metadata.layout != LAYOUT_VERSION:
        raise ConfigError(
            f"plane {name!r} has layout version {metadata.layout}, but this release supports version {LAYOUT_VERSION}: use "
            "another release of kvevents or another plane"
        )
    return Layout(name, metadata.partitions)


async def _stream_info(js: JetStreamContext, layout: Layout, partition: int) -> StreamInfo | None:
    try:
        with map_errors(f"querying partition {partition} of plane {layout.name!r}"):
            return await js.stream_info(layout.stream(partition))
    except PlaneError as error:
        if error.fault == "missing":
            return None
        raise


async def create_plane(js: JetStreamContext, settings: PlaneSettings) -> Layout:
    """Create the missing parts of a plane and return its layout. Existing parts are not changed.

    Raises `PlaneError`, and `ConfigError` if an existing stream with the same name cannot be a partition.
    """
    layout = await find_plane(js, settings.name)
    if layout is None:
        await create_partition(js, Layout(settings.name, settings.partitions), 0, settings)
        # Another process might have created the plane first, with a different number of partitions.
        layout = await find_plane(js, settings.name) or Layout(settings.name, settings.partitions)
    for partition in range(layout.partitions):
        await create_partition(js, layout, partition, settings)
    await create_buckets(js, layout, settings)
    return layout


async def create_buckets(js: JetStreamContext, layout: Layout, settings: PlaneSettings) -> None:
    """Create the buckets and the object store of a plane if they are missing. Raises `PlaneError`."""
    with map_errors(f"creating the buckets of plane {settings.name!r}"):
        for bucket, ttl in ((layout.bucket, None), (layout.digests, DIGEST_EXPIRY_SECONDS)):
            try:
                await js.key_value(bucket)
            except NotFoundError:
                await js.create_key_value(bucket=bucket, replicas=settings.copies, ttl=ttl)
        try:
            await js.object_store(layout.snapshots)
        except NotFoundError:
            await js.create_object_store(layout.snapshots, replicas=settings.copies)


async def create_partition(js: JetStreamContext, layout: Layout, partition: int, settings: PlaneSettings) -> None:
    """Create a partition if it is missing. Raises `PlaneError`, and `ConfigError` if its stream cannot be a partition."""
    info = await _stream_info(js, layout, partition)
    if info is None:
        try:
            with map_errors(f"creating partition {partition} of plane {layout.name!r}"):
                await js.add_stream(
                    name=layout.stream(partition),
                    description=f"Partition {partition} of the kvevents plane {layout.name!r}",
                    metadata=PartitionMetadata(LAYOUT_VERSION, layout.partitions, secrets.token_hex(6)).as_metadata(),
                    subjects=[layout.subject(partition)],
                    retention=api.RetentionPolicy.LIMITS,
                    discard=api.DiscardPolicy.NEW,
                    max_bytes=settings.partition_bytes,
                    storage=api.StorageType.FILE,
                    num_replicas=settings.copies,
                )
        except PlaneError as error:
            if error.fault == "exists":  # another process has just created the stream, with another epoch
                return
            if (advice := _advise_on_error(error, layout, settings)) is None:
                raise
            raise PlaneError(f"{error}. {advice}", fault=error.fault) from error
    elif (fault := _stream_fault(info, layout, partition)) is not None:
        raise ConfigError(
            f"stream {info.config.name} {fault}, so it cannot be a partition of plane {layout.name!r}: "
            f"{REPAIR_ADVICE}, or choose another name for the plane"
        )
    elif partition == 0:
        _log_unused_settings(info, layout, settings)


def _log_unused_settings(info: StreamInfo, layout: Layout, settings: PlaneSettings) -> None:
    """Log settings of new planes that differ from an existing plane, except default values."""
    config, defaults = info.config, PlaneSettings(servers=settings.servers)
    for option, value, wanted, default in (
        ("--partitions", layout.partitions, settings.partitions, defaults.partitions),
        ("--copies", config.num_replicas, settings.copies, defaults.copies),
        ("--partition-size", config.max_bytes, settings.partition_bytes, defaults.partition_bytes),
    ):
        if wanted not in {value, default}:
            text = "plane %r exists with %s %s, so %s has no effect: change its streams in NATS, or create another plane"
            log.warning(text, layout.name, option, value, wanted)


def _advise_on_error(error: PlaneError, layout: Layout, settings: PlaneSettings) -> str | None:
    """Return advice to an operator whose server refused to create a partition; None for an unknown error."""
    if error.fault == "full":
        room = layout.partitions * settings.partition_bytes >> 20
        return (
            f"{layout.partitions} partitions reserve {room} MiB in all on {settings.copies} of the servers: "
            "lower --partitions or --partition-size"
        )
    if settings.copies > 1 and ("replicas" in str(error) or "no suitable peers" in str(error)):
        return f"{settings.copies} copies need a cluster with as many running servers: start them, or lower --copies"
    return None


def _stream_fault(info: StreamInfo, layout: Layout, partition: int) -> str | None:
    """Return why a stream cannot be a partition, or None if it can. The size and the number of copies are not checked."""
    config = info.config
    if PartitionMetadata.from_info(info) is None:
        return "was not created by kvevents"
    if config.subjects != [layout.subject(partition)]:
        return f"stores subjects {config.subjects} instead of {layout.subject(partition)} alone"
    if config.discard != "new" or config.retention != "limits":
        return f"discards {config.discard} messages and retains by {config.retention}"
    if config.max_age or (config.max_msgs or -1) > 0:
        return "discards messages by their age or number"
    return None


# --- reading the layout ------------------------------------------------------------------------------------------------------


async def partition_info(js: JetStreamContext, layout: Layout, partition: int) -> PartitionInfo:
    """Query a partition's current state. Raises `PlaneError`."""
    with map_errors(f"querying partition {partition} of plane {layout.name!r}"):
        info = await js.stream_info(layout.stream(partition))
    metadata = PartitionMetadata.from_info(info)
    return PartitionInfo(
        info.state.first_seq,
        info.state.last_seq,
        info.state.bytes,
        metadata.epoch if metadata is not None else str(info.created),
        (info.cluster.leader or "") if info.cluster is not None else None,
        max(0, info.state.last_seq - max(info.state.first_seq, 1) + 1 - info.state.messages),
        _stream_fault(info, layout, partition) or "",
    )


async def fetch_message(
    js: JetStreamContext, layout: Layout, partition: int, position: int, *, allows_later: bool = False
) -> ReceivedMessage | None:
    """Return the message of a partition at `position`, or None if it does not exist. Raises `PlaneError`.

    If `allows_later`, return the first message at `position` or later.
    """
    subject = layout.subject(partition) if allows_later else None
    try:
        with map_errors(f"reading page {position} of partition {partition}"):
            async with asyncio.timeout(FETCH_SECONDS):
                stored = await js.get_msg(layout.stream(partition), position, subject, next=allows_later)
    except PlaneError as error:
        if error.fault != "missing":
            raise
        return None
    headers = stored.headers or {}
    name, history = headers.get(PAGE_HEADER, ""), headers.get(HISTORY_HEADER)
    stored_at = 0.0 if stored.time is None else stored.time.timestamp()
    return ReceivedMessage(stored.seq or position, stored.data or b"", 0, name, history, stored_at)


async def has_tail(js: JetStreamContext, layout: Layout, partition: int, info: PartitionInfo, tail: Tail) -> bool:
    """Return whether a partition holds the messages up to `tail`, which a reader has read.

    Only the message at `tail` and the next message are checked. Raises `PlaneError` if these messages cannot be read.
    """
    if tail.position > info.last:
        return False
    if tail.name is not None and tail.position >= max(1, info.first):
        message = await fetch_message(js, layout, partition, tail.position)
        if message is not None and message.name != tail.name:
            return False
    if tail.history is not None and info.first <= tail.position + 1 <= info.last:
        message = await fetch_message(js, layout, partition, tail.position + 1)
        if message is not None and message.history not in {None, NEW_HISTORY_MARK}:
            return message.history == tail.history.hex()
    return True
