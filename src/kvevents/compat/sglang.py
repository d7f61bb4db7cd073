"""A replacement of `sglang.srt.disaggregation.kv_events` that uses the publisher of kvevents.

The names, signatures, defaults, fields and observable behaviour are those of SGLang 0.5.23. Events are sent as arrays (as up to
0.5.19), which almost all subscribers read; `dialect="sglang-0.5.23"` of the publisher sends the bytes of that release.

Improvements: `publish` does not block, replay neither loses batches nor delays live ones, `ipc://` endpoints work with ranks,
and `shutdown` never raises.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias, get_type_hints

import msgspec

from kvevents import events, publisher
from kvevents.compat.field_parsers import parse_fields
from kvevents.config import parse_object
from kvevents.endpoints import MAX_PORT, connectable_endpoint, split_tcp
from kvevents.errors import ConfigError, MissingDependencyError
from kvevents.publisher.factory import PublisherRegistry
from kvevents.wire.dialects import DEFAULT_SGLANG_DIALECT, Dialect

__all__ = [
    "LOAD_TOPIC",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "KVCacheEvent",
    "KVEventBatch",
    "KVEventsConfig",
    "NullEventPublisher",
    "OffloadedState",
    "StorageMedium",
    "ZmqEventPublisher",
    "is_kv_publisher_rank",
    "kv_event_namespace_seed",
    "namespaced_block_hash",
    "parse_advertisable_tcp",
    "parse_bindable_tcp",
    "parse_tcp_port",
    "resolve_load_pub_range",
    "select_kv_publisher_dp_rank",
    "uses_dynamo_format",
]

LOAD_TOPIC: Final = "load"
"""Topic of SGLang's load reports, which are sent on their own socket."""


class StorageMedium(str, enum.Enum):  # noqa: UP042 - SGLang has no StrEnum, whose `str()` differs
    """Tiers of SGLang's hierarchical cache, with their names on the wire."""

    GPU = "GPU"
    CPU = "CPU_PINNED"
    DISK = "DISK"
    EXTERNAL = "EXTERNAL"


class OffloadedState(msgspec.Struct):
    """Progress of offloading the decoded tokens of one request."""

    inc_len: int = 0
    last_hash: str | None = None


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one scheduler step: `[ts, events, attn_dp_rank]`."""

    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class KVCacheEvent(events.KVCacheEvent, array_like=True, forbid_unknown_fields=False):
    """Base class of all KV cache events; a subclass of the one in `kvevents.events`."""


class BlockStored(KVCacheEvent):
    """Blocks became resident. `kvevents.events.BlockStored` explains the fields."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks were removed from a medium."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """The whole prefix cache was reset."""


class KVEventBatch(EventBatch):
    """An `EventBatch` of KV cache events."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


@dataclass(init=False)
class KVEventsConfig:
    """The configuration that SGLang 0.5.23 reads from `--kv-events-config`, with the interface of SGLang's pydantic model.

    Fields are given by name; unknown fields are ignored, as in SGLang. Raises `ConfigError`, a ValueError, which names the
    invalid fields.
    """

    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    """Whether to bind instead of connecting; if None, the endpoint decides."""
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    format: Literal["default", "dynamo"] = "default"
    """`default` or, if the engine publishes namespaced hashes, `dynamo`. The publisher does not use this field."""

    def __init__(self, **data: Any) -> None:
        values = parse_fields(type(self).__name__, _CONFIG_FIELDS, data)
        self.model_fields_set = set(values)
        for name in _CONFIG_FIELDS:
            setattr(self, name, values.get(name, getattr(type(self), name)))

    @classmethod
    def from_cli(cls, cli_value: str) -> Self:
        """Parse the value of `--kv-events-config`."""
        return cls.model_validate_json(cli_value)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes) -> Self:
        """Parse a JSON object."""
        return cls.model_validate(parse_object(json_data, cls.__name__))

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Create an instance from a mapping; return an instance unchanged."""
        if isinstance(obj, cls):
            return obj
        if not isinstance(obj, Mapping):
            raise ConfigError(f"invalid {cls.__name__} {obj!r}: expected an object")
        return cls(**obj)

    def model_dump(self) -> dict[str, Any]:
        """Return all fields, in their order."""
        return asdict(self)

    def model_dump_json(self) -> str:
        """Return all fields as JSON without spaces."""
        return msgspec.json.encode(self.model_dump()).decode()

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return a copy with some fields replaced; the new values are not checked."""
        copy = type(self)(**self.model_dump())
        copy.model_fields_set = self.model_fields_set | set(update or ())
        for name, value in (update or {}).items():
            setattr(copy, name, value)
        return copy


_CONFIG_FIELDS: Final = get_type_hints(KVEventsConfig)


def uses_dynamo_format(kv_events_config: str | None) -> bool:
    """Whether the JSON of `--kv-events-config` contains `"format": "dynamo"`."""
    return bool(kv_events_config) and KVEventsConfig.from_cli(kv_events_config or "").format == "dynamo"


class EventPublisher(publisher.EventPublisher):
    """Base class of all publishers."""

    def __init__(self, attn_dp_rank: int = 0) -> None:
        super().__init__(attn_dp_rank)
        self._attn_dp_rank = attn_dp_rank

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:  # noqa: ARG002 - SGLang's method has this parameter
        """Return how another process on this host can subscribe, or None if no other process can."""
        return None


class NullEventPublisher(publisher.NullEventPublisher, EventPublisher):
    """Accepts every batch and sends nothing."""


class ZmqEventPublisher(publisher.ZmqEventPublisher, EventPublisher):
    """A `kvevents.publisher.ZmqEventPublisher` with the parameters of SGLang's publisher, and `dialect`."""

    _default_dialect = DEFAULT_SGLANG_DIALECT
    _may_collide = True

    def __init__(  # noqa: PLR0913 - SGLang's parameters, and `dialect`
        self,
        attn_dp_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
        bind: bool | None = None,
        *,
        dialect: Dialect | str | None = None,
    ) -> None:
        limits = buffer_steps, hwm, max_queue_size
        super().__init__(attn_dp_rank, endpoint, replay_endpoint, *limits, topic, bind=bind, dialect=dialect)
        self._set_local_endpoints()

    def _set_local_endpoints(self) -> None:
        # The paths are resolved now, because the working directory can change later.
        self._local_pub_endpoint = _with_absolute_path(self._bound_endpoint) if self._binds else None
        self._local_replay_endpoint = None if self._replay_bound is None else _with_absolute_path(self._replay_bound)

    def publish(self, events: Any) -> None:
        """Accept one batch, as `kvevents.publisher.ZmqEventPublisher.publish` does; its rank field is `attn_dp_rank`."""
        # The fast path of the base class is repeated here, because a call of that method would double the cost.
        try:
            if events.attn_dp_rank is None:
                events.attn_dp_rank = self._data_parallel_rank
        except Exception:  # noqa: BLE001 - exceptions of a user's own type must not reach the engine
            self._set_attention_rank(events)
        queue = self._queue
        if len(queue) >= self._limit:
            self._publish_slowly(events)
            return
        queue.append(events)

    def describe_local_source(self, block_size: int) -> dict[str, Any] | None:
        """Return rank, endpoint, topic, block size, and the replay endpoint if any, as reachable from this host.

        Return None if the socket connects or has the transport `inproc://`, because no other process can subscribe then.
        """
        endpoint = _advertised_replay_endpoint(self._local_pub_endpoint)
        if endpoint is None:
            return None
        topic = self._topic_bytes.decode()
        source = {"dp_rank": self._data_parallel_rank, "endpoint": endpoint, "topic": topic, "block_size": block_size}
        replay_endpoint = _advertised_replay_endpoint(self._local_replay_endpoint)
        return source if replay_endpoint is None else {**source, "replay_endpoint": replay_endpoint}


def _with_absolute_path(endpoint: str) -> str:
    """Make the path of an `ipc://` endpoint absolute; names in the abstract namespace (`@...`) are not paths."""
    transport, _, path = endpoint.partition("://")
    return endpoint if transport != "ipc" or path.startswith("@") else f"ipc://{Path(path).absolute()}"


def _advertised_replay_endpoint(endpoint: str | None) -> str | None:
    if endpoint is not None and endpoint.startswith("ipc://"):
        return endpoint
    return None if parse_advertisable_tcp(endpoint) is None or endpoint is None else connectable_endpoint(endpoint)


class EventPublisherFactory(PublisherRegistry):
    """Creates the publisher that a configuration names."""

    _registry = {"null": NullEventPublisher, "zmq": ZmqEventPublisher}  # noqa: RUF012 - a ClassVar of the base class

    @classmethod
    def create(cls, config: str | None, attn_dp_rank: int = 0, **options: Any) -> publisher.EventPublisher:
        """Return one rank's publisher from the JSON of `--kv-events-config`; a `NullEventPublisher` if `config` is None.

        `options`, such as `dialect`, are passed to the publisher's constructor.

        Raises ValueError for a name that is not registered and for an invalid configuration.
        """
        settings = KVEventsConfig.from_cli(config or "{}").model_dump()
        del settings["format"]
        if settings["bind"] is None:  # publishers written for older releases do not have this option
            del settings["bind"]
        kind = settings.pop("publisher")
        if kind == "null":
            return NullEventPublisher(attn_dp_rank)
        return cls._constructor(kind)(attn_dp_rank=attn_dp_rank, **settings, **options)


# --- the rank that publishes, and namespaced hashes --------------------------------------------------------------------------

_NAMESPACE_TAG: Final = b"sglang-kv-event-namespace-v1"
"""Prefix of the hashed bytes; routers that compute namespaced hashes use the same prefix."""


def select_kv_publisher_dp_rank(attn_dp_size: int, attn_dp_rank: int, dp_rank: int | None) -> int:
    """Return the rank that is added to a scheduler's ports.

    This is the attention rank if the scheduler uses attention data parallelism, and the replica's rank if it does not.
    """
    return attn_dp_rank if attn_dp_size > 1 else dp_rank or 0


def is_kv_publisher_rank(kv_events_config: str | None) -> bool:
    """Whether this scheduler publishes: a scheduler does if its pipeline, tensor and context ranks are 0.

    Raises `MissingDependencyError` if SGLang is not installed, because its runtime knows the ranks.
    """
    if not kv_events_config:
        return False
    try:
        runtime = import_module("sglang.srt.runtime_context")
    except ImportError as error:
        raise MissingDependencyError("is_kv_publisher_rank() needs the runtime of SGLang; install sglang") from error
    parallel = runtime.get_parallel()
    return bool(parallel.pp_rank == 0 and parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)


def kv_event_namespace_seed(*, extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """Return the 32-byte seed of the namespace of an extra key and a cache salt, or None if both are None.

    The seed is SHA-256 of a tag and both parts. Each part is a presence byte, a length (8 bytes, little-endian) and UTF-8 text.
    """
    if extra_key is None and cache_salt is None:
        return None
    parts = [_NAMESPACE_TAG]
    for text in (extra_key, cache_salt):
        if text is None:
            parts.append(b"\0")
        else:
            content = text.encode()
            parts += [b"\1", len(content).to_bytes(8, "little"), content]
    return hashlib.sha256(b"".join(parts)).digest()


def namespaced_block_hash(block_hash: int, *, namespace_seed: bytes | None) -> int:
    """Return the signed 64-bit hash of a block within a namespace: the first 8 bytes of SHA-256 over the seed and the hash.

    If the seed is None, return the hash unchanged. Raises OverflowError for a hash that is not a signed 64-bit integer.
    """
    if namespace_seed is None:
        return block_hash
    digest = hashlib.sha256(namespace_seed + block_hash.to_bytes(8, "big", signed=True)).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


# --- endpoints: which can be advertised, which can be bound, and where load reports go --------------------------------------
# The rules are those of `sglang/srt/disaggregation/kv_events.py`, 0.5.23. The functions return None for an invalid endpoint,
# since `/server_info` calls them for each request and must not fail.

_BINDABLE_HOSTS: Final = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - hosts to recognise, not to bind

HostPort: TypeAlias = tuple[str, int]
"""A host, written without brackets, and a port."""


def _split_tcp(endpoint: str | None) -> HostPort | None:
    """Return host and port of a `tcp://` endpoint. An IPv6 host needs brackets, since its port is ambiguous without them."""
    target = split_tcp(endpoint or "")
    if target is None or not 0 < target[1] <= MAX_PORT or (":" in target[0]) != target[0].startswith("["):
        return None
    return target[0].strip("[]"), target[1]


def parse_tcp_port(endpoint: str | None) -> int | None:
    """Return the port, 1 to 65535, of a `tcp://` endpoint with any host."""
    target = _split_tcp(endpoint)
    return None if target is None else target[1]


def parse_advertisable_tcp(endpoint: str | None) -> HostPort | None:
    """Return host and port as `/server_info` reports them, an IPv6 host in brackets."""
    target = _split_tcp(endpoint)
    if target is None:
        return None
    host, port = target
    return (f"[{host}]" if ":" in host else host), port


def parse_bindable_tcp(endpoint: str | None) -> HostPort | None:
    """Return host and port if the host is a wildcard, and None if not: SGLang connects to other hosts instead of binding."""
    target = _split_tcp(endpoint)
    return target if target is not None and target[0] in _BINDABLE_HOSTS else None


def resolve_load_pub_range(
    *, kv_endpoint: str | None, replay_endpoint: str | None, dp_size: int, load_publish_endpoint: str | None = None
) -> tuple[HostPort | None, str | None]:
    """Return the address at which rank 0 publishes its load, or the reason why it publishes none.

    Rank r publishes at that port plus r. `load_publish_endpoint` is `off` or empty (no address and no reason), `auto` (the
    ports after those of the events, or after those of replay if they would overlap), or an address.
    """
    mode = (load_publish_endpoint or "").strip()
    if dp_size < 1 or not mode or mode.lower() == "off":
        return None, None
    if mode.lower() == "auto":
        address, reason = _load_address_after_events(kv_endpoint, replay_endpoint, dp_size)
    else:
        address, reason = _load_address_as_configured(kv_endpoint, replay_endpoint, dp_size, mode)
    if address is not None and address[1] + dp_size - 1 > MAX_PORT:
        return None, f"the load port range from {address[1]} would run past the u16 ceiling, {MAX_PORT}"
    return address, reason


def _load_address_after_events(
    kv_endpoint: str | None, replay_endpoint: str | None, dp_size: int
) -> tuple[HostPort | None, str | None]:
    events = parse_bindable_tcp(kv_endpoint)
    if events is None:
        reason = "it is not set" if kv_endpoint is None else f"it is {kv_endpoint!r}"
        return None, f"--load-publish-endpoint=auto needs a wildcard tcp:// endpoint in --kv-events-config; {reason}"
    host, base = events[0], events[1] + dp_size
    replay = parse_tcp_port(replay_endpoint)
    if replay is not None and abs(replay - base) < dp_size:
        base = replay + dp_size
    return (host, base), None


def _load_address_as_configured(
    kv_endpoint: str | None, replay_endpoint: str | None, dp_size: int, mode: str
) -> tuple[HostPort | None, str | None]:
    if parse_tcp_port(kv_endpoint) is None:
        absent = "without --kv-events-config" if kv_endpoint is None else f"for endpoint {kv_endpoint!r}"
        return None, (
            f"--load-publish-endpoint={mode!r} needs a routable tcp:// endpoint in --kv-events-config: routers find it through "
            f"the kv_events block of /server_info, which is absent {absent}"
        )
    address = parse_bindable_tcp(mode)
    if address is None:
        return None, f"--load-publish-endpoint={mode!r} is not a bindable tcp:// address; its host must be a wildcard"
    for port in (parse_tcp_port(kv_endpoint), parse_tcp_port(replay_endpoint)):
        if port is not None and abs(port - address[1]) < dp_size:
            return None, f"--load-publish-endpoint={mode!r} overlaps the {dp_size} kv-events ports from {port}"
    return address, None
