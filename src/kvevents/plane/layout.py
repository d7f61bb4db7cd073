"""What a plane is in JetStream: its partitions, each a stream with one subject, and how they are made.

    KVEVENTS_<plane>_<partition>         stream; subject kvevents.<plane>.partition.<partition>
    KVEVENTS_<plane>                key-value bucket: which snapshot counts
    KVEVENTS_<plane>_leases         key-value bucket whose entries expire: leases, replicas and their digests
    KVEVENTS_<plane>_snapshots      object store

Few subjects, whatever the number of engines: a server's memory grows with their number. Engines are spread over partitions by
name, so that all ranks of one are in one partition.
"""

from __future__ import annotations

import hashlib
import secrets
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvevents.errors import ConfigError, PlaneError
from kvevents.plane.faults import told
from kvevents.plane.settings import PlaneSettings
from kvevents.structs import build_decoder_now

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.api import StreamInfo

LAYOUT: Final = 2
"""Version of all this; another one is another plane."""
METADATA: Final = "kvevents-"
"""What the keys of ours in a stream's metadata begin with; the name of a field of `PartitionMetadata` follows."""
LEASE_SECONDS: Final = 15
"""After which an entry of the bucket of leases is gone unless it was renewed."""


@build_decoder_now
class PartitionMetadata(msgspec.Struct, frozen=True):
    """In the metadata of each partition's stream."""

    layout: int
    partitions: int
    life: str
    """Of this stream: one that is deleted and made anew has another, and a copy that is brought back has the same."""

    def as_metadata(self) -> dict[str, str]:
        """For a stream's configuration."""
        return {METADATA + name: str(value) for name, value in msgspec.structs.asdict(self).items()}

    @classmethod
    def of(cls, info: StreamInfo) -> PartitionMetadata | None:
        """What a stream has; None for one that is no partition."""
        known = {key.removeprefix(METADATA): value for key, value in (info.config.metadata or {}).items()}
        try:
            return msgspec.convert(known, cls, strict=False)
        except msgspec.ValidationError:
            return None


class PartitionInfo(NamedTuple):
    """What the servers say of a partition."""

    first: int
    """Number of the oldest page."""
    last: int
    """Number of the newest; 0 before the first."""
    bytes: int
    made: str
    """Which stream it is: one that was deleted and made anew is another one."""
    leader: str | None
    """None for a server of no cluster; empty while there is no leader."""


class Layout:
    """Names and places of one plane."""

    def __init__(self, name: str, partitions: int) -> None:
        self.name: Final = name
        self.partitions: Final = partitions

    def stream(self, partition: int) -> str:
        """Of a partition."""
        return f"KVEVENTS_{self.name}_{partition}"

    def subject(self, partition: int) -> str:
        """To which its pages are published."""
        return f"kvevents.{self.name}.partition.{partition}"

    @property
    def bucket(self) -> str:
        """For what lasts."""
        return f"KVEVENTS_{self.name}"

    @property
    def leases(self) -> str:
        """For what expires."""
        return f"KVEVENTS_{self.name}_leases"

    @property
    def snapshots(self) -> str:
        """The object store."""
        return f"KVEVENTS_{self.name}_snapshots"

    def partition_of(self, source: str) -> int:
        """The partition of an engine, which is the same everywhere and always."""
        return _number_of(source) % self.partitions


@lru_cache(maxsize=1 << 16)
def _number_of(source: str) -> int:
    """Asked for every record that a bridge writes."""
    return int.from_bytes(hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


async def find(js: JetStreamContext, name: str) -> Layout | None:
    """The layout of a plane that is there; None where there is none.

    Raises `PlaneError`, and `ConfigError` where the streams of that name are another's.
    """
    for partition in (0, 1):  # somebody may just have deleted one
        if (info := await _info(js, Layout(name, 1), partition)) is not None:
            return _layout(name, info)
    return None


async def _info(js: JetStreamContext, layout: Layout, partition: int) -> StreamInfo | None:
    try:
        with told(f"asking for partition {partition} of plane {layout.name!r}"):
            return await js.stream_info(layout.stream(partition))
    except PlaneError as error:
        if error.fault == "missing":
            return None
        raise


def _layout(name: str, info: StreamInfo) -> Layout:
    found = PartitionMetadata.of(info)
    if found is None:
        raise ConfigError(f"stream {info.config.name} is no partition of kvevents; give the plane another name")
    if found.layout != LAYOUT:
        raise ConfigError(
            f"plane {name!r} has layout {found.layout}, and this release knows {LAYOUT}; use another release, or name"
        )
    return Layout(name, found.partitions)


async def make(js: JetStreamContext, settings: PlaneSettings) -> Layout:
    """The plane, each part of it made where it is missing, and left as it is where it is there.

    Raises `PlaneError`, and `ConfigError` where streams of the same names cannot be its partitions.
    """
    layout = await find(js, settings.name)
    if layout is None:
        await make_partition(js, Layout(settings.name, settings.partitions), 0, settings)
        # Somebody else may have been quicker, with another number of partitions.
        layout = await find(js, settings.name) or Layout(settings.name, settings.partitions)
    for partition in range(layout.partitions):
        await make_partition(js, layout, partition, settings)
    await make_buckets(js, layout, settings)
    return layout


async def make_buckets(js: JetStreamContext, layout: Layout, settings: PlaneSettings) -> None:
    """What a plane has besides its partitions, where it is missing. Raises `PlaneError`."""
    with told(f"making the buckets of plane {settings.name!r}"):
        await _make_bucket(js, bucket=layout.bucket, replicas=settings.copies)
        await _make_bucket(js, bucket=layout.leases, replicas=settings.copies, ttl=LEASE_SECONDS)
        await _make_store(js, layout.snapshots, settings.copies)


async def make_partition(js: JetStreamContext, layout: Layout, partition: int, settings: PlaneSettings) -> None:
    """One partition, where it is missing. Raises `PlaneError`, and `ConfigError` where its stream is another's."""
    info = await _info(js, layout, partition)
    if info is None:
        try:
            with told(f"making partition {partition} of plane {layout.name!r}"):
                await js.add_stream(_partition_config(layout, partition, settings))
        except PlaneError as error:
            if error.fault == "full":
                room = layout.partitions * settings.partition_bytes >> 20
                raise PlaneError(
                    f"{error}. {layout.partitions} partitions reserve {room} MiB in all on {settings.copies} of the servers: "
                    "see --partitions and --partition-size",
                    fault=error.fault,
                ) from error
            if error.fault != "exists":  # made by somebody else in this moment, and with another life
                raise
    elif (fault := _unfit(info, layout, partition)) is not None:
        raise ConfigError(
            f"stream {info.config.name} {fault}; a partition of plane {layout.name!r} cannot be that, give it another name"
        )


def _unfit(info: StreamInfo, layout: Layout, partition: int) -> str | None:
    """What a partition must not be, or it would lose what nobody has read. Its size and copies are its operator's."""
    config = info.config
    if PartitionMetadata.of(info) is None:
        return "is no partition of kvevents"
    if config.subjects != [layout.subject(partition)]:
        return f"takes {config.subjects}, and not {layout.subject(partition)} alone"
    if config.discard != "new" or config.retention != "limits":
        return f"discards {config.discard} messages and keeps them by {config.retention}"
    if config.max_age or (config.max_msgs or -1) > 0:
        return "forgets messages by their age or number"
    return None


async def state_of(js: JetStreamContext, layout: Layout, partition: int) -> PartitionInfo:
    """How a partition is now. Raises `PlaneError`."""
    with told(f"asking for partition {partition} of plane {layout.name!r}"):
        return _state(await js.stream_info(layout.stream(partition)))


def _state(info: StreamInfo) -> PartitionInfo:
    state = info.state
    return PartitionInfo(
        state.first_seq,
        state.last_seq,
        state.bytes,
        found.life if (found := PartitionMetadata.of(info)) is not None else str(info.created),
        (info.cluster.leader or "") if info.cluster is not None else None,
    )


def _partition_config(layout: Layout, partition: int, settings: PlaneSettings) -> Any:
    from nats.js import api  # noqa: PLC0415 - an extra

    return api.StreamConfig(
        name=layout.stream(partition),
        description=f"Partition {partition} of the kvevents plane {layout.name!r}",
        metadata=PartitionMetadata(LAYOUT, layout.partitions, secrets.token_hex(6)).as_metadata(),
        subjects=[layout.subject(partition)],
        retention=api.RetentionPolicy.LIMITS,
        discard=api.DiscardPolicy.NEW,
        max_bytes=settings.partition_bytes,
        storage=api.StorageType.FILE,
        num_replicas=settings.copies,
    )


async def _make_bucket(js: JetStreamContext, **config: Any) -> None:
    from nats.js.errors import NotFoundError  # noqa: PLC0415 - an extra

    try:
        await js.key_value(config["bucket"])
    except NotFoundError:
        await js.create_key_value(**config)


async def _make_store(js: JetStreamContext, bucket: str, copies: int) -> None:
    from nats.js.errors import NotFoundError  # noqa: PLC0415 - an extra

    try:
        await js.object_store(bucket)
    except NotFoundError:
        await js.create_object_store(bucket, replicas=copies)
