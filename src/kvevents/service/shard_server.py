"""The messages of `/v1/shard/...`, and the answers of one replica about the partitions that it serves."""

from __future__ import annotations

import secrets
import sys
from array import array
from collections.abc import Callable, Collection
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from kvevents.client.reasons import Reason
from kvevents.client.schemas import Rank, RequestName, ScopedRequest, SourceView
from kvevents.plane.layout import Layout
from kvevents.service.errors import NotFoundError, RefusedError
from kvevents.service.fleet import Fleet
from kvevents.service.member import Member, MemberMatch
from kvevents.service.registration import Registration, Scope
from kvevents.service.scope_fields import scope_of
from kvevents.settings import build_decoder_now
from kvevents.stream import TrustState

Partition: TypeAlias = Annotated[int, Meta(ge=0, le=255)]
PartitionList: TypeAlias = Annotated[list[Partition], Meta(max_length=256)]
BlockKey: TypeAlias = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": (1 << 64) - 1})]
Prompt: TypeAlias = Annotated[bytes, Meta(extra_json_schema={"pattern": "^([A-Za-z0-9+/]{4})*$"})]
"""Token ids as 32-bit little-endian numbers; in JSON their base64."""


class ShardQuery(ScopedRequest, frozen=True, kw_only=True):
    """A query for the matches of some prompts, given as tokens or as keys, in some partitions."""

    partitions: PartitionList = field(default_factory=list)
    prompts: Annotated[list[Prompt], Meta(max_length=1024)] = field(default_factory=list)
    keys: Annotated[list[list[BlockKey]], Meta(max_length=1024)] = field(default_factory=list)
    local: bool = False
    """Whether each key is the hash of its block alone; otherwise keys are rolling."""
    whole_prompt: bool = False
    """Whether the last token of a prompt counts, which engines recompute."""


class ShardMatch(Struct, frozen=True, array_like=True):
    """One rank that holds a prefix of a prompt: tokens on each tier, including faster tiers, and on all tiers."""

    name: str
    """Source name of the stream in the plane."""
    rank: int
    gpu: int
    cpu: int
    disk: int
    tokens: int
    certain: int
    """How many of `tokens` it certainly holds."""
    is_certain: bool
    """Whether it certainly holds all of this, on each tier."""
    state: TrustState
    reason: str
    reason_codes: tuple[Reason, ...] = ()
    attested: bool = False


@build_decoder_now
class ShardAnswer(Struct, frozen=True, kw_only=True):
    """The answer to a query, for the partitions that the replica serves."""

    partitions: list[Partition]
    """The queried partitions for which this is the answer."""
    known: bool
    """Whether any engine in them serves the model."""
    version: str
    """Version of the replica's members."""
    found: list[list[ShardMatch]]
    """Matches by prompt."""


class PartitionQuery(Struct, frozen=True, kw_only=True):
    """A query for the members of some partitions."""

    partitions: PartitionList = []


class MemberDescription(Struct, frozen=True, kw_only=True):
    """One rank of a replica, without its secrets."""

    registration: Registration
    view: SourceView
    is_hidden: bool
    salt_digest: str | None = None
    """Digest of the salt, which the registration omits. Prompts must have this salt to match the rank."""


@build_decoder_now
class MemberList(Struct, frozen=True, kw_only=True):
    """The ranks of some partitions."""

    partitions: list[Partition]
    """The queried partitions that the replica serves."""
    version: str
    members: list[MemberDescription]


class Expectation(ScopedRequest, frozen=True, kw_only=True):
    """A request to add a speculative entry: the rank will hold the prompt."""

    instance: RequestName
    rank: Rank
    prompt: Prompt
    seconds: Annotated[float, Meta(gt=0, le=60)]


@build_decoder_now
class ExpectationAnswer(Struct, frozen=True, kw_only=True):
    """The answer to an expectation."""

    known: bool
    """Whether the rank belongs to this replica."""


def within(partitions: Collection[int], served: Collection[int]) -> list[int]:
    """Return the requested partitions that are served, in order."""
    return sorted(set(partitions).intersection(served))


def fields_of(scope: Scope) -> dict[str, Any]:
    """Return a scope as fields of a `ScopedRequest`."""
    lora = "lora_id" if isinstance(scope.lora, int) else "lora"
    return {"model": scope.model, "tenant": scope.tenant, "group": scope.group, lora: scope.lora, "salt": scope.salt}


Rows: TypeAlias = list[list[MemberMatch]]
"""Matches by prompt."""


class ShardServer:
    """Answers queries of other replicas from a fleet.

    `layout` returns the layout of the plane, `served` the served partitions.
    """

    def __init__(self, fleet: Fleet, layout: Callable[[], Layout | None], served: Callable[[], frozenset[int]]) -> None:
        self.fleet: Final = fleet
        self.layout: Final = layout
        self.served: Final = served
        self._process_id: Final = secrets.token_hex(6)

    @property
    def version(self) -> str:
        """Version of the members. It changes when a member is added or removed."""
        return f"{self._process_id}.{self.fleet.version}"

    def rows(self, question: ShardQuery, partitions: Collection[int], prompts: list[Any]) -> Rows:
        """Return the matches in some partitions. Raises `NotFoundError` for a model that no engine of this replica serves."""
        scope = scope_of(question)
        found = [
            self.fleet.match(scope, tokens, mm=question.mm, expected=question.expected, whole_prompt=question.whole_prompt)
            for tokens in prompts
        ]
        found += [self.fleet.match_keys(scope, keys, local=question.local) for keys in question.keys]
        return [[row for row in rows if self.partition_of(row.member) in partitions] for rows in found]

    def partition_of(self, member: Member) -> int:
        """Return the partition of an engine; -1 before the plane is found."""
        layout = self.layout()
        return -1 if layout is None else layout.partition_of(member.registration.key[0])

    # --- answers to other replicas

    def part(self, question: ShardQuery) -> ShardAnswer:
        """Answer the query of another replica."""
        partitions = within(question.partitions, self.served())
        count = len(question.prompts) + len(question.keys)
        try:
            rows = self.rows(question, partitions, [_tokens(prompt) for prompt in question.prompts])
        except NotFoundError:
            return ShardAnswer(partitions=partitions, known=False, version=self.version, found=[[] for _ in range(count)])
        found = [[_shard_match(row) for row in each] for each in rows]
        return ShardAnswer(partitions=partitions, known=True, version=self.version, found=found)

    def members(self, query: PartitionQuery) -> MemberList:
        """Return the engines of some partitions."""
        partitions = within(query.partitions, self.served())
        members = [member for member in list(self.fleet.members.values()) if self.partition_of(member) in partitions]
        return MemberList(partitions=partitions, version=self.version, members=[_description(member) for member in members])

    def expect(self, expectation: Expectation) -> ExpectationAnswer:
        """Add a speculative entry if the engine belongs to this replica."""
        key = (expectation.instance, expectation.rank)
        known = self.fleet.expect(scope_of(expectation), key, _tokens(expectation.prompt), expectation.seconds)
        return ExpectationAnswer(known=known)


def _tokens(prompt: bytes) -> array[int]:
    if len(prompt) % 4:
        raise RefusedError(
            f"invalid prompt of {len(prompt)} bytes: expected 32-bit numbers", "malformed-body", "send 4 bytes per token"
        )
    numbers = array("I", prompt)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _shard_match(row: MemberMatch) -> ShardMatch:
    name, rank = row.member.registration.key
    trusted = row.member.trust_status
    held = (row.gpu, row.cpu, row.disk, row.tokens, row.certain, row.is_certain)
    return ShardMatch(name, rank, *held, trusted.state, trusted.reason, trusted.reason_codes, trusted.attested)


def _description(member: Member) -> MemberDescription:
    # Only the engine's own replica needs its secrets.
    registration = msgspec.structs.replace(member.registration, salt=None, curve=None)
    digest = member.registration.scope.salt_digest
    return MemberDescription(registration=registration, view=member.view(), is_hidden=member.is_hidden, salt_digest=digest)
