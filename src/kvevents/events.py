"""KV cache events of all engines, the digest of an attestation, and the aggregation of the events of several workers.

One set of types holds the union of what vLLM 0.33 (`vllm/distributed/kv_events.py`) and SGLang 0.5.23
(`sglang/srt/disaggregation/kv_events.py`) announce. Encoded without a dialect, these structs give the bytes of
vLLM 0.33; every other release is a row in `kvevents.wire.dialects`.

The digest of an attestation (`Heartbeat.attestation`) is a sum with one term for each copy of a block, so it can be updated
when a block enters or leaves the cache.

`KVEventAggregator` and `KVConnectorKVEvents` have the interface and behaviour of vLLM 0.33: each tensor-parallel worker reports
what its connector stored, and a block counts as stored when every worker has it.
"""

# This module has no `from __future__ import annotations`, for the reason that `kvevents.client.schemas` states.
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeAlias

import msgspec

__all__ = [
    "MEDIUM_ALL",
    "MEDIUM_CPU",
    "MEDIUM_CPU_PINNED",
    "MEDIUM_DISK",
    "MEDIUM_EXTERNAL",
    "MEDIUM_GPU",
    "MEDIUM_STORAGE",
    "TIERS",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "ExtraKey",
    "Heartbeat",
    "KVCacheEvent",
    "KVConnectorKVEvents",
    "KVEvent",
    "KVEventAggregator",
    "KVEventBatch",
    "TokenId",
    "UnknownFields",
]

MEDIUM_GPU: Final = "GPU"
"""Device memory (vLLM, SGLang)."""
MEDIUM_ALL: Final = "*"
"""The medium in a clear of all tiers (`AllBlocksCleared({"medium": "*"})`). Only kvevents sends this medium."""
MEDIUM_CPU: Final = "CPU"
"""Host memory (vLLM from 0.27)."""
MEDIUM_STORAGE: Final = "STORAGE"
"""Anything below host memory (vLLM from 0.27)."""
MEDIUM_CPU_PINNED: Final = "CPU_PINNED"
"""Pinned host memory (SGLang from 0.5.9)."""
MEDIUM_DISK: Final = "DISK"
"""SSD or NVMe (SGLang from 0.5.11)."""
MEDIUM_EXTERNAL: Final = "EXTERNAL"
"""A shared or remote pool (SGLang from 0.5.11)."""

TIERS: Final = ("gpu", "cpu", "disk")
"""Known tiers, the fastest first. The index also defines the tiers, with the media of each tier (`placements.rs`)."""

if TYPE_CHECKING:
    TokenId: TypeAlias = int | tuple[int, int] | str
    """A token id; under EAGLE the pair `(token, next token)` (SGLang); for the first token of a multimodal item the digest of
    the item, 64 hexadecimal digits (TensorRT-LLM). Decoders replace any other value by -1."""
    BlockHash: TypeAlias = int
    ExtraKey: TypeAlias = Any
    UnknownFields: TypeAlias = dict[str, Any]
else:
    # The values that the fast decoder may build from a peer's input: no nested maps, and no nesting of unlimited depth.
    # `kvevents.wire.tolerant` decodes all other values, within limits. Encoding does not use annotations.
    TokenId = int | tuple[int, int]
    # `kvevents.wire.decode` replaces byte hashes by integers.
    BlockHash = int | bytes
    ExtraKey = str | int | list[str | int]
    UnknownFields = dict[str, bool | int | float | str | None]


def _always_sent() -> None:
    """Default factory of a field that vLLM sends even if it is nil: msgspec omits plain defaults, not factory defaults."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one scheduler step: on the wire the array `[ts, events, data_parallel_rank]`.

    `ts` is in seconds since the epoch. `events` can hold any type that msgspec can encode, including users' own events.
    """

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def _make_hashable(value: Any) -> Any:
    """Return a hashable value that is equal for equal values; for a map, which may contain anything, return its length."""
    if isinstance(value, dict):
        return len(value)
    value = value if isinstance(value, Hashable) else tuple(value)
    try:
        hash(value)
    except TypeError:  # extra keys can contain lists
        return tuple(map(_make_hashable, value))
    return value


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Base class of all KV cache events."""

    def __repr__(self) -> str:
        """Return a text without the optional fields that are None, since events have up to 21 fields."""
        required = len(self.__struct_fields__) - len(self.__struct_defaults__)
        values = [(name, getattr(self, name)) for name in self.__struct_fields__]
        fields = [f"{name}={value!r}" for at, (name, value) in enumerate(values) if at < required or value is not None]
        return f"{type(self).__name__}({', '.join(fields)})"

    def __hash__(self) -> int:
        return hash(tuple(map(_make_hashable, msgspec.structs.astuple(self))))


MAX_HEARTBEAT_SECONDS: Final = 86_400
"""Longest interval between two heartbeats in seconds."""


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The state of a sender and the digest of its resident blocks. Only kvevents sends heartbeats, no engine does.

    A heartbeat is a field of a `BlockRemoved` without blocks, which other consumers ignore.
    """

    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")] | None
    """`PrefixIndex.digest` of the stream after the batch that contains the heartbeat. None if the digest cannot be computed."""
    interval: Annotated[float, msgspec.Meta(gt=0, le=MAX_HEARTBEAT_SECONDS)] = msgspec.field(name="every")
    """Maximum number of seconds until the next heartbeat; the name on the wire is `every`."""
    trust: Annotated[str, msgspec.Meta(max_length=32)] = "EXACT"
    """How far the sender trusts its own stream: the name of a `Trust` state."""
    reason: Annotated[str, msgspec.Meta(max_length=1_000)] = ""
    incarnation: Annotated[int, msgspec.Meta(ge=0)] = 0
    """A number that differs in each incarnation of the sender."""
    attestation: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """64-bit digest of the engine's own prefix cache on the GPU tier, after the batch before the heartbeat's batch. None if the
    sender does not know the engine's cache. The digest is a sum modulo 2**64, to which each cached copy of a block adds
    `hash XOR (group * 0x9E3779B97F4A7C15 mod 2**64)`. `hash` is the low 64 bits of an integer, or the last 8 bytes of a byte
    hash, big-endian; a block without a group is in group 0. A sender with attestations announces each copy of a block exactly
    once, so it announces neither a resident copy again nor a block without a copy."""


class BlockStored(KVCacheEvent):
    """Blocks became resident on a medium, in the order of the prefix they belong to.

    `token_ids` are the tokens of all blocks. The number of tokens can differ from `len(block_hashes) * block_size`: masked
    groups announce fewer hashes than blocks, and offload events have no tokens.
    """

    block_hashes: list[BlockHash]
    """An opaque hash for each block, unsigned 64 bits. A hash has a meaning only within its stream."""
    parent_block_hash: BlockHash | None
    """Hash of the block before the event's first block; None if the first block begins a prompt. 0 is a legal hash."""
    token_ids: Sequence[TokenId]
    block_size: int
    """Number of tokens per block; 0 if the event announces a move between tiers."""
    lora_id: int | None = msgspec.field(default_factory=_always_sent)
    """Deprecated by vLLM; use `lora_name`."""
    medium: str | None = msgspec.field(default_factory=_always_sent)
    lora_name: str | None = msgspec.field(default_factory=_always_sent)
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None
    """In vLLM, a block's LoRA name, `(multimodal id, offset)` pairs, cache salt (block 0 only), prompt-embedding digests."""
    group_idx: int | None = None
    """KV cache group of a hybrid model; the same hash occurs in several groups."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """LOCAL or REMOTE, relative to the publisher."""
    ownership: str | None = None
    """Name of a secondary offloading tier."""
    session_id: str | None = None
    """Session whose request caused the event; other sessions can share the blocks."""
    lookahead_token_ids: list[list[int]] | None = None
    """For each block, the tokens after it that its hash also covers (vLLM 0.33)."""
    cache_salt: str | None = None
    """Cache salt of the prompt. SGLang sends the salt in this field from 0.5.20; vLLM sends it in `extra_keys`."""
    block_keys: list[int] | None = None
    """One key per block if a relay of kvevents has removed the tokens: the key that `kvevents.index` computes from tokens and
    namespace, or an arbitrary number."""
    block_digests: list[bytes] | None = None
    """Full digests if a peer sent byte hashes; `block_hashes` has the last 8 bytes of each digest, big-endian."""
    parent_block_digest: bytes | None = None
    unknown_fields: UnknownFields | None = None
    """Fields that this version of kvevents does not know, by name, or by position (`"12"`) in array events."""


class BlockRemoved(KVCacheEvent):
    """Blocks left a medium."""

    block_hashes: list[BlockHash]
    medium: str | None = msgspec.field(default_factory=_always_sent)
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    heartbeat: Heartbeat | None = None
    block_digests: list[bytes] | None = None
    unknown_fields: UnknownFields | None = None


class AllBlocksCleared(KVCacheEvent):
    """The prefix cache of the stream was reset.

    Blocks on tiers below the GPU might remain, since engines do not say whether they emptied these tiers. `medium` and
    `group_idx` among the unknown fields limit the clear to a medium, if it is known or has blocks, and to a group.
    """

    unknown_fields: UnknownFields | None = None


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(EventBatch):
    """An `EventBatch` of KV cache events."""

    events: list[KVEvent]


# --- attestation -----------------------------------------------------------------------------------------------------------

ATTESTATION_MASK: Final = 2**64 - 1
_GROUP_FACTOR: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: its products with small group numbers differ in many bits."""


def attestation_group_term(group: int | None) -> int:
    """Return the number with which hashes of a KV cache group are combined by XOR; a block without a group is in group 0."""
    return (group or 0) * _GROUP_FACTOR & ATTESTATION_MASK


def attestation_term(block_hash: int | bytes, group: int | None = None) -> int:
    """Return the number that one copy of a block adds to the digest.

    Only 64 bits of the announced hash are used: the low bits of an integer, or the last 8 bytes of a byte hash, big-endian.
    """
    number = block_hash & ATTESTATION_MASK if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
    return number ^ attestation_group_term(group)


# --- aggregation -----------------------------------------------------------------------------------------------------------


class KVEventAggregator:
    """Counts how often each event was announced. Events must be hashable, as the types of `kvevents.events` are.

    Raises ValueError if `num_workers` is not positive.
    """

    __slots__ = ("_event_counter", "_num_workers")

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError("num_workers must be greater than zero.")
        self._event_counter: Counter[KVCacheEvent] = Counter()
        self._num_workers = num_workers

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Count the events of one worker. Raises TypeError unless `events` is a list."""
        if not isinstance(events, list):
            raise TypeError("events must be a list of KVCacheEvent.")
        self._event_counter.update(events)

    def get_common_events(self) -> list[KVCacheEvent]:
        """Return the events announced exactly as often as there are workers, in the order of their first announcement."""
        return [event for event, count in self._event_counter.items() if count == self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """Return every event, as often as it was announced."""
        return list(self._event_counter.elements())

    def clear_events(self) -> None:
        """Drop all events; the number of workers does not change."""
        self._event_counter.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Expect `count` more workers. Raises ValueError if `count` is not positive."""
        if count <= 0:
            raise ValueError("count must be positive.")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Expect one worker."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """Return the number of expected workers."""
        return self._num_workers

    def __repr__(self) -> str:
        return f"<KVEventAggregator workers={self._num_workers}, events={len(self._event_counter)}>"


class KVConnectorKVEvents(ABC):
    """Collects the events of a vLLM KV connector. Connectors implement this class, usually with a `KVEventAggregator`.

    The two methods about workers were added after the others, so they are optional: by default they raise NotImplementedError.
    """

    @abstractmethod
    def add_events(self, events: list[Any]) -> None:
        """Add the events of one worker."""

    @abstractmethod
    def aggregate(self) -> "KVConnectorKVEvents":
        """Keep only the events that all workers announced."""

    def increment_workers(self, count: int = 1) -> None:
        """Expect `count` more workers."""
        raise NotImplementedError(f"{type(self).__name__} does not implement increment_workers()")

    @abstractmethod
    def get_all_events(self) -> list[Any]:
        """Return every event, as often as it was announced."""

    def get_number_of_workers(self) -> int:
        """Return the number of expected workers."""
        raise NotImplementedError(f"{type(self).__name__} does not implement get_number_of_workers()")

    @abstractmethod
    def clear_events(self) -> None:
        """Drop all events."""

    def merge(self, other: "KVConnectorKVEvents") -> Self:
        """Add the events of `other`; return self."""
        self.add_events(other.get_all_events())
        return self
