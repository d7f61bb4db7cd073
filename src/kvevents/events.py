"""KV cache events as every engine means them.

One set of types holds the union of what vLLM 0.33 (`vllm/distributed/kv_events.py`) and SGLang 0.5.23
(`sglang/srt/disaggregation/kv_events.py`) announce. Encoded as they stand, these structs are vLLM 0.33's bytes; every other
release is a row in `kvevents.wire.dialects`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

MEDIUM_GPU: Final = "GPU"
"""Device memory (vLLM, SGLang)."""
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

TokenId: TypeAlias = int | tuple[int, int]
"""A token id, or the pair `(token, next token)` that SGLang sends under EAGLE."""

if TYPE_CHECKING:
    ExtraKey: TypeAlias = Any
    Aside: TypeAlias = dict[str, Any]
else:
    # What one native decode may build at a peer's wish: no map with keys of the peer's choice, no depth. Anything else in these
    # fields is read by `kvevents.wire.tolerant`, within limits. Encoding does not look at annotations.
    ExtraKey = str | int | list[str | int]
    Aside = dict[str, bool | int | float | str | None]


def _always_sent() -> None:
    """Default of a field that vLLM sends even when it is nil: msgspec omits plain defaults, not made ones."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one scheduler step announced: on the wire the array `[ts, events, data_parallel_rank]`.

    `ts` is in seconds since the epoch. `events` may hold any type that msgspec can encode, so users' own events publish too.
    """

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Base class of all KV cache events."""


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a sender says of itself, and of what its stream has left resident; of kvevents, no engine sends it.

    It travels in a `BlockRemoved` of no blocks, which everybody else takes for nothing.
    """

    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """`PrefixIndex.digest` of the stream after the batch that this is in."""
    every: Annotated[float, msgspec.Meta(gt=0, le=86_400)]
    """Seconds until the next one at most."""
    trust: Annotated[str, msgspec.Meta(max_length=32)] = "EXACT"
    """How far the sender itself can trust what it tells: the name of a `Trust`."""
    reason: Annotated[str, msgspec.Meta(max_length=1_000)] = ""
    incarnation: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Another number in each life of the sender."""


class BlockStored(KVCacheEvent):
    """Blocks became resident on a medium, in the order of the prefix they belong to.

    `token_ids` are those of all blocks; their number need not be `len(block_hashes) * block_size`, since masked groups announce
    fewer hashes than blocks and offload events no tokens at all.
    """

    block_hashes: list[int]
    """One per block, unsigned 64 bits, opaque, meaningful only within its stream."""
    parent_block_hash: int | None
    """Hash of the block before the first one; None for the root. 0 is a legal hash."""
    token_ids: Sequence[TokenId]
    block_size: int
    """Tokens per block; 0 where an engine announces a move between tiers."""
    lora_id: int | None = msgspec.field(default_factory=_always_sent)
    """Deprecated by vLLM in favour of `lora_name`."""
    medium: str | None = msgspec.field(default_factory=_always_sent)
    lora_name: str | None = msgspec.field(default_factory=_always_sent)
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None
    """vLLM, per block: LoRA name, `(multimodal id, offset)` pairs, cache salt (block 0 only), prompt-embedding digests."""
    group_idx: int | None = None
    """KV cache group of a hybrid model; the same hash occurs in several groups."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    """LOCAL or REMOTE, relative to the publisher."""
    ownership: str | None = None
    """Name of a secondary offloading tier."""
    session_id: str | None = None
    """Session whose request caused the event; other sessions may share the blocks."""
    lookahead_token_ids: list[list[int]] | None = None
    """vLLM 0.33: per block, the tokens beyond it that its hash covers."""
    cache_salt: str | None = None
    """SGLang from 0.5.20; vLLM sends its salt in `extra_keys`."""
    block_keys: list[int] | None = None
    """One per block where a relay of kvevents has taken the tokens out: keys as `kvevents.index` makes them of tokens and
    namespace, or numbers that mean nothing."""
    block_digests: list[bytes] | None = None
    """Full digests where a peer sent byte hashes; `block_hashes` then holds their last 8 bytes, big-endian."""
    parent_block_digest: bytes | None = None
    unrecognised: Aside | None = None
    """Fields that this release of kvevents does not know, by name, or by position (`"12"`) in array events."""

    def __hash__(self) -> int:
        return hash(
            (
                tuple(self.block_hashes),
                self.parent_block_hash,
                tuple(self.token_ids),
                self.medium,
                self.lora_name,
                self.group_idx,
                self.locality,
                self.ownership,
                self.session_id,
                self.cache_salt,
            )
        )


class BlockRemoved(KVCacheEvent):
    """Blocks left a medium."""

    block_hashes: list[int]
    medium: str | None = msgspec.field(default_factory=_always_sent)
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    heartbeat: Heartbeat | None = None
    block_digests: list[bytes] | None = None
    unrecognised: Aside | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.block_hashes), self.medium, self.group_idx, self.locality, self.ownership))


class AllBlocksCleared(KVCacheEvent):
    """The whole prefix cache of the stream was reset."""

    unrecognised: Aside | None = None

    def __hash__(self) -> int:
        return hash(AllBlocksCleared)


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(EventBatch):
    """An `EventBatch` of KV cache events."""

    events: list[KVEvent]
