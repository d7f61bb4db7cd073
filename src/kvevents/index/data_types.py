"""Limits, outcomes and statistics of an index."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from kvevents.errors import ConfigError
from kvevents.stream import BatchReport


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Limits of an index besides its memory. `IndexStats` counts what exceeds them."""

    max_orphans: int = 65_536
    """Blocks of one stream that wait for their parent or their tokens, about 200 bytes each; the oldest are dropped."""
    max_orphan_bytes: int = 64 << 20
    """Bytes of those, since a block can have as many tokens as fit in a payload; at most an eighth of a memory limit."""
    max_places: int = 64
    """Placements (tier, locality, ownership, group) of one incarnation of a stream; an engine has a few."""
    max_groups: int = 64
    """KV cache groups of one incarnation of a stream; a hybrid model has a few."""
    max_block_sizes: int = 16
    """Block sizes of one incarnation of a stream: each needs another search for every prompt. An engine has one."""
    max_records_per_key: int = 16
    """Records of one block key. A stream that holds a block under two hashes at once needs two."""
    max_blocks_per_hash: int = 1_024
    """Blocks of one stream with the same hash. Engines that hash pages without their prefix have several."""
    max_fences: int = 65_536
    """Removed workers whose late deliveries are still rejected; beyond, the oldest are forgotten."""
    max_speculated: int = 1_000_000
    """Blocks of the overlay; beyond, the oldest decisions expire early."""

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if limit < 0:
                raise ConfigError(f"invalid {name} {limit}: expected at least 0")


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """The outcome of a delivery."""

    status: Literal["applied", "duplicate", "void"]
    """`duplicate`: it was applied before. `void`: it belongs to an earlier incarnation, or to a removed worker."""
    report: BatchReport | None = None
    """To be passed to the subscriber's `report`; usually None, which means that there is nothing to report."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block on one tier and in one group of one worker."""

    key: int
    """Rolling key of its tokens; see `block_keys`."""
    hash: int
    """The engine's own hash."""
    tier: str
    """`gpu`, `cpu`, `disk`, or an unknown medium in upper case."""
    group: int
    """KV cache group; 0 if the engine sends none."""
    copies: int
    """How many more times the engine has stored it than removed it: the most copies that there can be."""
    certain_copies: int
    """The fewest copies that there can be. 0 if the block might be gone: an engine can announce a block again that is resident
    already, so one of several stores adds no certain copy."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of an index, for one worker or for all."""

    blocks: int
    """Different blocks held; a block on several tiers counts once."""
    orphans: int
    """Blocks that wait for their parent or their tokens."""
    copies: int
    """Copies beyond the first of each block on a tier, at most."""
    uncertain: int
    """Blocks that might be gone, once for each tier and group: they were announced several times and removed less often."""
    rejected: dict[tuple[str, str], int]
    """Rejected stores, by kind of KV cache group (`none` if the engine sends none) and reason: `unknown-kind`,
    `length-mismatch`, `bad-token`, `too-many-placements`, `too-many-alike`."""
    unknown_removals: int
    """Removals of blocks that were not held."""
    orphans_dropped: int
    """Orphans dropped because of `IndexLimits.max_orphans` or `max_orphan_bytes`."""
    evicted: int
    """Blocks rejected because of the memory limit."""
    duplicates: int
    """Batches delivered more than once."""
    void: int
    """Deliveries of earlier incarnations."""
    gaps: int
    """Gaps reported by the subscriber."""
    neutral_events: int
    """Events that do not change which blocks are resident, such as `BlockInactive`."""


@dataclass(frozen=True, slots=True)
class WorkerInfo(Counters):
    """One worker: one data-parallel rank of one engine."""

    source: str
    rank: int
    model: str | None
    incarnation: int
    last_seq: int
    """Sequence number of the newest batch; -1 before the first."""
    block_sizes: list[int]
    """Tokens per block in its current incarnation; several if its KV cache groups differ in that, or cache blocks in part."""
    estimate: str | None
    """Why matches of this worker can differ from what its engine finds, even if the index has all of its events; None if they
    cannot.

    `unknown-kind`: it has KV cache groups whose lookup is unknown. `unknown-hashing`: its groups need the engine's hashes of
    a prompt, which no known scheme has reproduced. `several-block-sizes`: its blocks differ in size, and its events state no
    groups."""
    attested: bool | None
    """Whether the worker held exactly what its engine's own cache does at the last attestation of the current incarnation; None
    before the first. Only a publisher inside the engine sends attestations."""
    tiers: dict[str, int]
    """Blocks by tier; a block counts on each tier that holds it, and once for each group of a hybrid model."""


@dataclass(frozen=True, slots=True)
class IndexStats(Counters):
    """Statistics of an index. Sums include removed workers."""

    workers: int
    bytes: int
    """Heap memory of the index."""
    unique_blocks: int
    """Different blocks; a block that several workers hold counts once."""
    wire_rejected: dict[str, int] = field(default_factory=dict)
    """Events and fields of payloads that could not be decoded, by reason."""
    speculated: int = 0
    """Blocks of the overlay."""
    confirmed: int = 0
    """Decisions of the overlay whose prompt was stored before they expired."""
    expired: int = 0
    """Decisions of the overlay that expired."""
