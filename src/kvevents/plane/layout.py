"""What a plane is in JetStream: its lanes, each a stream with one subject, and how they are made.

    KVEVENTS_<plane>_<lane>         stream; subject kvevents.<plane>.lane.<lane>
    KVEVENTS_<plane>                key-value bucket: which snapshot counts
    KVEVENTS_<plane>_leases         key-value bucket whose entries expire: leases, replicas and their digests
    KVEVENTS_<plane>_snapshots      object store

Few subjects, whatever the number of engines: a server's memory grows with their number. Engines are spread over lanes by name,
so that all ranks of one are in one lane.
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
from kvevents.structs import prepared

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.api import StreamInfo

LAYOUT: Final = 2
"""Version of all this; another one is another plane."""
METADATA: Final = "kvevents-"
"""What the keys of ours in a stream's metadata begin with; the name of a field of `LaneMetadata` follows."""
LEASE_SECONDS: Final = 15
"""After which an entry of the bucket of leases is gone unless it was renewed."""


@prepared
class LaneMetadata(msgspec.Struct, frozen=True):
    """In the metadata of each lane's stream."""

    layout: int
    lanes: int
    life: str
    """Of this stream: one that is deleted and made anew has another, and a copy that is brought back has the same."""

    def as_metadata(self) -> dict[str, str]:
        """For a stream's configuration."""
        return {METADATA + name: str(value) for name, value in msgspec.structs.asdict(self).items()}

    @classmethod
    def of(cls, info: StreamInfo) -> LaneMetadata | None:
        """What a stream has; None for one that is no lane."""
        known = {key.removeprefix(METADATA): value for key, value in (info.config.metadata or {}).items()}
        try:
            return msgspec.convert(known, cls, strict=False)
        except msgspec.ValidationError:
            return None


class LaneState(NamedTuple):
    """What the servers say of a lane."""

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

    def __init__(self, name: str, lanes: int) -> None:
        self.name: Final = name
        self.lanes: Final = lanes

    def stream(self, lane: int) -> str:
        """Of a lane."""
        return f"KVEVENTS_{self.name}_{lane}"

    def subject(self, lane: int) -> str:
        """To which its pages are published."""
        return f"kvevents.{self.name}.lane.{lane}"

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

    def lane_of(self, source: str) -> int:
        """The lane of an engine, which is the same everywhere and always."""
        return _number_of(source) % self.lanes


@lru_cache(maxsize=1 << 16)
def _number_of(source: str) -> int:
    """Asked for every record that a bridge writes."""
    return int.from_bytes(hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


async def find(js: JetStreamContext, name: str) -> Layout | None:
    """The layout of a plane that is there; None where there is none.

    Raises `PlaneError`, and `ConfigError` where the streams of that name are another's.
    """
    for lane in (0, 1):  # somebody may just have deleted one
        if (info := await _info(js, Layout(name, 1), lane)) is not None:
            return _layout(name, info)
    return None


async def _info(js: JetStreamContext, layout: Layout, lane: int) -> StreamInfo | None:
    try:
        with told(f"asking for lane {lane} of plane {layout.name!r}"):
            return await js.stream_info(layout.stream(lane))
    except PlaneError as error:
        if error.fault == "missing":
            return None
        raise


def _layout(name: str, info: StreamInfo) -> Layout:
    found = LaneMetadata.of(info)
    if found is None:
        raise ConfigError(f"stream {info.config.name} is no lane of kvevents; give the plane another name")
    if found.layout != LAYOUT:
        raise ConfigError(
            f"plane {name!r} has layout {found.layout}, and this release knows {LAYOUT}; use another release, or name"
        )
    return Layout(name, found.lanes)


async def make(js: JetStreamContext, settings: PlaneSettings) -> Layout:
    """The plane, each part of it made where it is missing, and left as it is where it is there.

    Raises `PlaneError`, and `ConfigError` where streams of the same names cannot be its lanes.
    """
    layout = await find(js, settings.name)
    if layout is None:
        await make_lane(js, Layout(settings.name, settings.lanes), 0, settings)
        # Somebody else may have been quicker, with another number of lanes.
        layout = await find(js, settings.name) or Layout(settings.name, settings.lanes)
    for lane in range(layout.lanes):
        await make_lane(js, layout, lane, settings)
    await make_buckets(js, layout, settings)
    return layout


async def make_buckets(js: JetStreamContext, layout: Layout, settings: PlaneSettings) -> None:
    """What a plane has besides its lanes, where it is missing. Raises `PlaneError`."""
    with told(f"making the buckets of plane {settings.name!r}"):
        await _make_bucket(js, bucket=layout.bucket, replicas=settings.copies)
        await _make_bucket(js, bucket=layout.leases, replicas=settings.copies, ttl=LEASE_SECONDS)
        await _make_store(js, layout.snapshots, settings.copies)


async def make_lane(js: JetStreamContext, layout: Layout, lane: int, settings: PlaneSettings) -> None:
    """One lane, where it is missing. Raises `PlaneError`, and `ConfigError` where its stream is another's."""
    info = await _info(js, layout, lane)
    if info is None:
        try:
            with told(f"making lane {lane} of plane {layout.name!r}"):
                await js.add_stream(_lane_config(layout, lane, settings))
        except PlaneError as error:
            if error.fault == "full":
                room = layout.lanes * settings.lane_bytes >> 20
                raise PlaneError(
                    f"{error}. {layout.lanes} lanes reserve {room} MiB in all on {settings.copies} of the servers: see --lanes "
                    "and --lane-size",
                    fault=error.fault,
                ) from error
            if error.fault != "exists":  # made by somebody else in this moment, and with another life
                raise
    elif (fault := _unfit(info, layout, lane)) is not None:
        raise ConfigError(
            f"stream {info.config.name} {fault}; a lane of plane {layout.name!r} cannot be that, give it another name"
        )


def _unfit(info: StreamInfo, layout: Layout, lane: int) -> str | None:
    """What a lane must not be, or it would lose what nobody has read. Its size and copies are its operator's."""
    config = info.config
    if LaneMetadata.of(info) is None:
        return "is no lane of kvevents"
    if config.subjects != [layout.subject(lane)]:
        return f"takes {config.subjects}, and not {layout.subject(lane)} alone"
    if config.discard != "new" or config.retention != "limits":
        return f"discards {config.discard} messages and keeps them by {config.retention}"
    if config.max_age or (config.max_msgs or -1) > 0:
        return "forgets messages by their age or number"
    return None


async def state_of(js: JetStreamContext, layout: Layout, lane: int) -> LaneState:
    """How a lane is now. Raises `PlaneError`."""
    with told(f"asking for lane {lane} of plane {layout.name!r}"):
        return _state(await js.stream_info(layout.stream(lane)))


def _state(info: StreamInfo) -> LaneState:
    state = info.state
    return LaneState(
        state.first_seq,
        state.last_seq,
        state.bytes,
        found.life if (found := LaneMetadata.of(info)) is not None else str(info.created),
        (info.cluster.leader or "") if info.cluster is not None else None,
    )


def _lane_config(layout: Layout, lane: int, settings: PlaneSettings) -> Any:
    from nats.js import api  # noqa: PLC0415 - an extra

    return api.StreamConfig(
        name=layout.stream(lane),
        description=f"Lane {lane} of the kvevents plane {layout.name!r}",
        metadata=LaneMetadata(LAYOUT, layout.lanes, secrets.token_hex(6)).as_metadata(),
        subjects=[layout.subject(lane)],
        retention=api.RetentionPolicy.LIMITS,
        discard=api.DiscardPolicy.NEW,
        max_bytes=settings.lane_bytes,
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
