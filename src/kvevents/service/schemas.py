"""What `/v1` takes and gives: the types that answers are encoded from and the OpenAPI document is generated from.

Counts of a prompt are tokens. Times are seconds since the epoch unless their name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, field

from kvevents.service.reasons import Reason
from kvevents.service.registration import MAX_NAME_BYTES
from kvevents.structs import build_decoder_now
from kvevents.weights import TIER_WEIGHTS, TRUST_WEIGHTS, State

Token: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_BYTES)]
LoraId: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
MAX_MEDIA: Final = 1_024
"""Images and other items of one request: they are read in Python, some microseconds each."""


class Problem(Struct, frozen=True, kw_only=True):
    """Every error is this: the problem details of RFC 9457, with members of ours behind `detail`.

    `native/server/src/problems.rs` writes the same about connections.
    """

    type: str
    """`urn:kvevents:problem:` and the reason."""
    title: str
    """The reason in words."""
    status: int
    """That of HTTP."""
    detail: str
    """What happened, as a sentence."""
    reason: str
    """The same for programs, such as `unknown-model`."""
    hint: str
    """What to do."""
    error: str
    """`detail` once more: clients of Dynamo's indexer read it here."""

    @classmethod
    def of(cls, status: int, reason: str, detail: str, hint: str) -> Problem:
        """With everything that follows from these."""
        return cls(
            type=f"urn:kvevents:problem:{reason}",
            title=reason.replace("-", " ").capitalize(),
            status=status,
            detail=detail,
            reason=reason,
            hint=hint,
            error=detail,
        )


class TrustStatus(Struct, frozen=True):
    """How far a worker's part of an answer can be trusted."""

    state: State
    reason: str = ""
    """Why it is not EXACT, as a sentence."""
    reason_codes: tuple[Reason, ...] = ()
    """The same for programs: docs/runbook.md has all of them."""


class Media(Struct, frozen=True, kw_only=True, gc=False):
    """One image or other item of a prompt."""

    id: str | int
    """Its content hash, as the engine has it."""
    start: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """First token of its span."""
    length: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """Tokens of its span."""


@build_decoder_now
class ScopedRequest(Struct, frozen=True, kw_only=True):
    """Whose prompts these are. A field that has several names may have any of them; two must not have different values."""

    model: Name | UnsetType = UNSET
    model_name: Name | UnsetType = UNSET
    modelname: Name | UnsetType = UNSET
    tenant: Name | UnsetType = UNSET
    tenant_id: Name | UnsetType = UNSET
    group: Name | UnsetType = UNSET
    routing_group: Name | UnsetType = UNSET
    lora: Name | None = None
    lora_name: Name | None = None
    lora_id: LoraId | None = None
    """Number of the LoRA, for engines whose events have no name of it (vLLM before 0.14)."""
    salt: Name | None = None
    cache_salt: Name | None = None
    additionalsalt: Name | None = None
    additional_salt: Name | None = None

    ALIASES: ClassVar = frozenset(
        {
            "model_name",
            "modelname",
            "tenant_id",
            "routing_group",
            "lora_name",
            "cache_salt",
            "additionalsalt",
            "additional_salt",
        }
    )
    """Names that are not written into the OpenAPI document, since one name of each is enough."""
    mm: Annotated[list[Media], Meta(max_length=MAX_MEDIA)] = []
    expected: bool = False
    """Count what `select` has decided and no event has confirmed yet."""
    whole_prompt: bool = False
    """Look up the last token too. Engines recompute it, and with it the block that it is in."""


class MatchRequest(ScopedRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt."""

    tokens: list[Token]


class MatchManyRequest(ScopedRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several prompts of one namespace."""

    prompts: Annotated[list[list[Token]], Meta(max_length=1024)]


class WorkerTrust(Struct, frozen=True, kw_only=True):
    """How far one worker is trusted."""

    instance: str
    rank: int
    trust: TrustStatus


class WorkerMatch(Struct, frozen=True, kw_only=True):
    """What one worker holds of a prompt."""

    instance: str
    rank: int
    tokens: int
    """Tokens of the longest prefix, on whatever tiers."""
    tiers: dict[str, int]
    """The same by tier, cumulative: `cpu` counts a prefix that begins on the GPU and goes on in host memory."""
    trust: TrustStatus


class MatchAnswer(Struct, frozen=True, kw_only=True):
    """All workers that may hold a beginning of the prompt, those that hold nothing included."""

    prompt_tokens: int
    workers: list[WorkerMatch]
    """Those that hold something come first."""
    missing: str = ""
    """Why this is not of the whole fleet, where other replicas hold a part of it; empty where it is."""


class PromptMatch(Struct, frozen=True, kw_only=True):
    """Workers that hold a beginning of one of several prompts."""

    prompt_tokens: int
    holders: list[WorkerMatch]


class MatchManyAnswer(Struct, frozen=True, kw_only=True):
    """One answer for each prompt, in their order."""

    matches: list[PromptMatch]
    workers: list[WorkerTrust]
    """All workers that may hold a beginning of the prompts: those that are not among the holders of one hold nothing of it."""
    missing: str = ""
    """Why this is not of the whole fleet, where other replicas hold a part of it; empty where it is."""


class Candidate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker that may be chosen."""

    instance: Name
    rank: Rank = 0
    load: Annotated[float, Meta(ge=0)] = 0.0
    """Anything that grows with its work: tokens queued, requests running. Only proportions between candidates count."""


class SelectRequest(ScopedRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt that some worker should take."""

    tokens: list[Token]
    candidates: list[Candidate] | None = None
    """All workers of the model when not given."""
    tiers: dict[str, Annotated[float, Meta(ge=0, le=1)]] = field(default_factory=lambda: dict(TIER_WEIGHTS))
    """What a token that a tier holds is worth, against computing it."""
    load_weight: Annotated[float, Meta(ge=0, le=1000)] = 0.1
    """What a load of the mean counts against computing the whole prompt; docs/adr/0008 says why so little."""
    trust: dict[State, Annotated[float, Meta(ge=0, le=1)]] = field(default_factory=lambda: dict(TRUST_WEIGHTS))
    """How far a worker is believed in each state."""
    tie: Literal["rotate", "random", "first"] = "rotate"
    """Between equal candidates."""
    expect_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Believe for so long that the chosen worker will hold this prompt; 0 believes nothing."""
    explain: bool = False


class ScoredCandidate(Struct, frozen=True, kw_only=True):
    """Why a candidate has its score."""

    instance: str
    rank: int
    score: float
    """The smaller the better: uncached share of the prompt, and load."""
    uncached: float
    """Share of the prompt that it would have to compute, 0 to 1, after trust and the tiers' weights."""
    load: float
    """Its load over the mean of all candidates, times the weight."""
    tokens: int
    tiers: dict[str, int]
    trust: TrustStatus


class Selection(Struct, frozen=True, kw_only=True):
    """The worker that should take a prompt."""

    instance: str
    rank: int
    score: float
    trust: TrustStatus
    """CONNECTING or STALE only if no candidate has a connection."""
    why: str
    """One sentence."""
    considered: list[ScoredCandidate] | None = None
    """With `explain`, the candidates that were scored, the best first."""
    unreachable: list[WorkerTrust] | None = None
    """With `explain`, the candidates that were left out because they have no connection and others do."""
    missing: str = ""
    """Why this is not of the whole fleet, where other replicas hold a part of it; empty where it is."""


class GapView(Struct, frozen=True, kw_only=True):
    """Batches that are lost for good."""

    first: int
    last: int
    incarnation: int
    at: float


class SourceView(Struct, frozen=True, kw_only=True):
    """One data-parallel rank of one engine."""

    instance: str
    rank: int
    model: str
    tenant: str
    group: str
    endpoint: str
    replay_endpoint: str | None
    origin: str
    """Who named it: `http`, or a way of discovery."""
    trust: TrustStatus
    since: float
    """When it came into this state."""
    fault: str | None
    """What is wrong with its endpoints: nothing listens, a name does not resolve, it is another kind of socket."""
    incarnation: int
    """Lives of the publisher seen before."""
    last_seq: int
    """Number of the newest batch; -1 before the first."""
    last_event: float | None
    """When the newest batch came."""
    lag_seconds: float | None
    """From the engine's clock to ours when the newest live batch came."""
    waiting: int
    """Batches held back because an earlier one is missing."""
    blocks: int
    tiers: dict[str, int]
    """Of those, how many on each tier."""
    orphans: int
    """Blocks that wait for their parent."""
    block_sizes: list[int]
    """Tokens per block as its events say."""
    declared_block_size: int | None
    batches: int
    replayed: int
    """Of those, how many came by replay."""
    lost: int
    """Batches inside gaps."""
    compacted: int = 0
    """Older batches that a snapshot of the engine's state came in place of: nothing of them is lost."""
    gap_count: int
    gaps: list[GapView]
    """The newest ones."""
    resets: int
    reconnects: int
    rejected: dict[str, int]
    """Events that could not be read or used, by reason."""


class SourcesAnswer(Struct, frozen=True, kw_only=True):
    """The fleet."""

    sources: list[SourceView]
    faults: dict[str, list[str]]
    """What ways of discovery could not find out: a missing rank, a name that does not resolve."""


class BlockView(Struct, frozen=True, kw_only=True):
    """One block on one tier of one worker."""

    key: str
    """Rolling key of its tokens, 16 hex digits."""
    hash: str
    """The engine's own hash, 16 hex digits."""
    tier: str
    group: int
    copies: int


class BlocksAnswer(Struct, frozen=True, kw_only=True):
    """Blocks of one worker at one moment, in no order."""

    total: int
    """Of all pages."""
    blocks: list[BlockView]
    next: str | None
    """The `cursor` of the next page; None on the last one."""
    trust: TrustStatus
    """How far the worker could be trusted at that moment."""


class HotPrefix(Struct, frozen=True, kw_only=True):
    """A node of the tree of prefixes that are asked for most."""

    key: str
    """Rolling key of its last block, 16 hex digits."""
    parent: str | None
    tokens: int
    """Length from the beginning of the prompt."""
    lookups: int
    """How many of the sampled prompts began with it."""
    workers: int
    """Workers that hold it."""


class HotAnswer(Struct, frozen=True, kw_only=True):
    """Prefixes by how many sampled prompts began with them, parents before children."""

    model: str
    sampled: int
    """Prompts that were looked at."""
    prefixes: list[HotPrefix]
    workers: list[WorkerTrust]
    """All workers that may hold them."""
    missing: str = ""
    """Why this is not of the whole fleet, where other replicas hold a part of it; empty where it is."""


class StatsAnswer(Struct, frozen=True, kw_only=True):
    """The service in numbers."""

    version: str
    uptime_seconds: float
    sources: dict[State, int]
    """By state."""
    workers: int
    blocks: int
    """Of all workers, as of the last look at each."""
    unique_blocks: int
    tiers: dict[str, int]
    """The same by tier; a block on two tiers counts on each."""
    index_bytes: int
    memory_limit: int | None
    orphans: int
    evicted: int
    lookups: int
    hits: int
    """Lookups that found something."""
    batches: int
    batches_per_second: float
    """Batches of the last ten seconds, per second."""
    snapshot_seconds: float | None
    """Between two snapshots; None where nothing is kept."""
    snapshot_at: float | None
    """When the last one was written."""
    snapshot_fault: str | None


class HealthAnswer(Struct, frozen=True, kw_only=True):
    """Whether this process works."""

    status: Literal["ok", "failed"]
    warnings: list[str]
    """What an operator should know: an open port without tokens, a disk that is full."""


class ReadyAnswer(Struct, frozen=True, kw_only=True):
    """Whether this process may be asked."""

    ready: bool
    why: str
    exact: int
    """Sources that are EXACT."""
    sources: int
    quorum: float
    """Share of the sources that must be EXACT."""
    deadline_seconds: float
    """Seconds after the start from which it is ready in any case."""


class SourceEvent(Struct, frozen=True, kw_only=True, tag_field="type", tag="state"):
    """Of `/v1/events`: a source has come into another state."""

    at: float
    instance: str
    rank: int
    model: str
    tenant: str
    group: str
    trust: TrustStatus
    was: State


class BatchesEvent(Struct, frozen=True, kw_only=True, tag_field="type", tag="batches"):
    """Of `/v1/events`: what a source has told since the last one of its kind."""

    at: float
    instance: str
    rank: int
    model: str
    tenant: str
    group: str
    batches: int
    last_seq: int
    blocks: int
    """Blocks that it holds now."""


class SnapshotEvent(Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot"):
    """Of `/v1/events`: a snapshot of the engine's state came in place of older batches, of which nothing is lost."""

    at: float
    instance: str
    rank: int
    model: str
    tenant: str
    group: str
    first: int
    last: int


class LossEvent(Struct, frozen=True, kw_only=True, tag_field="type", tag="loss"):
    """Of `/v1/events`: a gap, or a reset because the publisher began a new life."""

    at: float
    instance: str
    rank: int
    model: str
    tenant: str
    group: str
    what: Literal["gap", "reset"]
    sentence: str


StreamEvent: TypeAlias = SourceEvent | BatchesEvent | SnapshotEvent | LossEvent
