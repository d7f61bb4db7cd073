"""What replicas that hold a part each ask each other: the bodies of `/v1/shard/...`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, field

from kvevents.service.reasons import Reason
from kvevents.service.registration import Registration, Wall
from kvevents.service.shapes import Name, Rank, Scoped, SourceView
from kvevents.structs import prepared
from kvevents.weights import State

Partition: TypeAlias = Annotated[int, Meta(ge=0, le=255)]
PartitionList: TypeAlias = Annotated[list[Partition], Meta(max_length=256)]
BlockKey: TypeAlias = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": (1 << 64) - 1})]
Prompt: TypeAlias = Annotated[bytes, Meta(extra_json_schema={"pattern": "^([A-Za-z0-9+/]{4})*$"})]
"""Token ids as 32-bit little-endian numbers; in JSON their base64."""


class Question(Scoped, frozen=True, kw_only=True):
    """Who in some partitions holds how much of some prompts, which come as tokens or as keys."""

    partitions: PartitionList = field(default_factory=list)
    prompts: Annotated[list[Prompt], Meta(max_length=1024)] = field(default_factory=list)
    keys: Annotated[list[list[BlockKey]], Meta(max_length=1024)] = field(default_factory=list)
    local: bool = False
    """Whether keys are of each block alone; else they are rolling."""


class Found(Struct, frozen=True, array_like=True):
    """One rank that holds a beginning of a prompt: tokens on each tier with those before it, and on whatever tiers."""

    name: str
    """As streams are called in the plane."""
    rank: int
    gpu: int
    cpu: int
    disk: int
    tokens: int
    state: State
    reason: str
    reason_codes: tuple[Reason, ...] = ()


@prepared
class Part(Struct, frozen=True, kw_only=True):
    """The answer to a question, of the partitions that the replica shows."""

    partitions: list[Partition]
    """Those of the question that this is the answer for."""
    known: bool
    """Whether anybody in them serves the model."""
    version: str
    """Of the replica's members."""
    found: list[list[Found]]
    """By prompt."""


class Partitions(Struct, frozen=True, kw_only=True):
    """Which partitions are asked about."""

    partitions: PartitionList = []


class Described(Struct, frozen=True, kw_only=True):
    """One rank that a replica knows, without what is secret of it."""

    registration: Registration
    view: SourceView
    hidden: bool
    salt_digest: str | None = None
    """Of the salt that the registration leaves out: prompts must have it to find this rank."""


@prepared
class Members(Struct, frozen=True, kw_only=True):
    """The ranks of some partitions."""

    partitions: list[Partition]
    """Those that were asked about and that the replica shows."""
    version: str
    members: list[Described]


class Expectation(Scoped, frozen=True, kw_only=True):
    """A rank that is believed to hold a prompt soon."""

    instance: Name
    rank: Rank
    prompt: Prompt
    seconds: Annotated[float, Meta(gt=0, le=60)]


@prepared
class Noted(Struct, frozen=True, kw_only=True):
    """What became of an expectation."""

    known: bool
    """Whether the rank is one of this replica's."""


def within(partitions: Collection[int], shown: Collection[int]) -> list[int]:
    """Partitions that are asked about and shown."""
    return sorted(set(partitions).intersection(shown))


def fields_of(wall: Wall) -> dict[str, Any]:
    """What `Scoped` has of a wall."""
    lora = "lora_id" if isinstance(wall.lora, int) else "lora"
    return {"model": wall.model, "tenant": wall.tenant, "group": wall.group, lora: wall.lora, "salt": wall.salt}
