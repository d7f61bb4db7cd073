"""What an index is told to keep to, and what it tells of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from kvevents.errors import ConfigError
from kvevents.stream import BatchReport


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds of an index, besides its memory. Reaching one is counted in `IndexStats`."""

    max_orphans: int = 65_536
    """Blocks of one stream that wait for their parent or their tokens; the oldest ones fall out. About 200 bytes each."""
    max_orphan_bytes: int = 64 << 20
    """Bytes of those: a block may have as many tokens as fit in a payload. With a memory limit an eighth of that at most."""
    max_places: int = 64
    """Names of places (tier, locality, owner, group) that one life of a stream may use; an engine has a handful."""
    max_groups: int = 64
    """KV cache groups of one life of a stream; a hybrid model has a handful."""
    max_block_sizes: int = 16
    """Block sizes of one life of a stream, since each is another search for every prompt; an engine has one."""
    max_records_per_key: int = 16
    """Records with one block key: streams that hold a block under two hashes at once need one for each."""
    max_blocks_per_hash: int = 1_024
    """Blocks of one stream with one hash: engines that hash pages without their prefix have some."""
    max_fences: int = 65_536
    """Removed workers whose late deliveries are still recognised; beyond, the oldest ones are forgotten."""
    max_speculated: int = 1_000_000
    """Blocks of the overlay; beyond, the oldest decisions end early."""

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if limit < 0:
                raise ConfigError(f"{name} is {limit}; it must be at least 0")


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a delivery."""

    status: Literal["applied", "duplicate", "void"]
    """`duplicate`: it was there before. `void`: it is of an ended life of its publisher, or of a removed worker."""
    report: BatchReport | None = None
    """What to `report` to the subscriber; None, as nearly always, where that is nothing."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block on one plane of one worker."""

    key: int
    """Rolling key of its tokens, as `block_keys` makes it."""
    hash: int
    """The engine's own hash."""
    tier: str
    """`gpu`, `cpu`, `disk`, or an unknown medium in upper case."""
    group: int
    """KV cache group; 0 where engines name none."""
    copies: int
    """How often the engine has announced it beyond what it has removed."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What an index counts, for one worker or for all."""

    blocks: int
    """Different blocks held, on however many tiers each is."""
    orphans: int
    """Blocks that wait for their parent, or for their tokens."""
    copies: int
    """Copies beyond the first of each block on a tier."""
    rejected: dict[tuple[str, str], int]
    """Stores that were set aside, by kind of KV cache group (`none` where none is named) and reason: `unknown-kind`,
    `length-mismatch`, `bad-token`, `too-many-planes`, `too-many-alike`."""
    unknown_removals: int
    """Removals of hashes that were not held."""
    orphans_dropped: int
    """Blocks that waited until `IndexLimits.max_orphans` dropped them."""
    evicted: int
    """Blocks that the memory limit has cost."""
    duplicates: int
    """Batches that came twice."""
    void: int
    """Deliveries of ended lives."""
    gaps: int
    """Gaps told by the subscriber."""


@dataclass(frozen=True, slots=True)
class WorkerInfo(Counted):
    """One worker: one data-parallel rank of one engine."""

    source: str
    rank: int
    model: str | None
    incarnation: int
    last_seq: int
    """Number of the newest batch; -1 before the first."""
    block_sizes: list[int]
    """Tokens per block, as its present life has told; more than one where it contradicts itself."""
    tiers: dict[str, int]
    """Blocks by tier; a block counts on each that holds it, and once for each group of a hybrid model."""


@dataclass(frozen=True, slots=True)
class IndexStats(Counted):
    """An index in numbers; what workers that are gone have counted is in the sums."""

    workers: int
    bytes: int
    """Heap memory of the index."""
    unique_blocks: int
    """Blocks, however many workers hold each."""
    wire_rejected: dict[str, int] = field(default_factory=dict)
    """What could not be read of payloads, by reason."""
    speculated: int = 0
    """Blocks of the overlay."""
    confirmed: int = 0
    """Decisions of the overlay that ended with their prompt held."""
    expired: int = 0
    """Decisions that ended without."""
