"""Types of the requests and responses of `/v1`, and of registrations, from which the OpenAPI document is generated.

Counts about a prompt are numbers of tokens. Times are Unix times in seconds; `expires_in` and `*_seconds` are durations.
"""

# Do not add `from __future__ import annotations`: msgspec would then compile every annotation when a service starts.
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal, NotRequired, TypeAlias, TypedDict

from msgspec import UNSET, Meta, Struct, UnsetType, field

from kvevents.client.reasons import Reason
from kvevents.routing.weights import TIER_WEIGHTS, TRUST_WEIGHTS, Tier
from kvevents.settings import build_decoder_now
from kvevents.stream import TrustState

DEFAULT_GROUP: Final = "default"
"""Default tenant, and default routing group, of requests and registrations."""
MAX_NAME_BYTES: Final = 512
"""Maximum size, in bytes, of an endpoint, and of the name of an instance, a model, a tenant or a LoRA."""
MAX_RESERVATION_ID_LENGTH: Final = 128
"""Maximum number of characters in the name of a reservation."""
RESERVATION_ID_PATTERN: Final = "^[.]*[A-Za-z0-9_~:-][A-Za-z0-9._~:-]*$(?!\\n)"
"""Pattern of a reservation's name. It excludes line feeds, and names of only dots: clients remove such names from paths."""
MAX_RESERVATION_SECONDS: Final = 86_400
"""Maximum number of seconds after which a reservation expires."""
MAX_LABELS: Final = 32
"""Maximum number of labels of one registration, and of one filter."""
MAX_LABEL_BYTES: Final = 2_048
"""Maximum number of bytes of all labels of one registration, because each answer about a worker contains them."""

Token: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
RequestName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_BYTES)]
ReservationId: TypeAlias = Annotated[str, Meta(pattern=RESERVATION_ID_PATTERN, max_length=MAX_RESERVATION_ID_LENGTH)]
"""Name of a reservation. The path of a reservation contains this name."""
ExpirySeconds: TypeAlias = Annotated[float, Meta(ge=1, le=MAX_RESERVATION_SECONDS)]
EngineId: TypeAlias = Annotated[int | str, Meta(extra_json_schema={"minimum": -(1 << 63), "maximum": (1 << 64) - 1})]
LoraId: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Problem(Struct, frozen=True, kw_only=True):
    """An error: problem details (RFC 9457) with the extension members `reason`, `hint` and `error`.

    `native/server/src/problems.rs` writes errors of connections in this form.
    """

    type: str
    """`urn:kvevents:problem:` followed by the reason."""
    title: str
    """The reason as a phrase for people."""
    status: int
    """HTTP status."""
    detail: str
    """What failed, as a sentence."""
    reason: str
    """Code of the error, such as `unknown-model`."""
    hint: str
    """What to do."""
    error: str
    """A copy of `detail` under the name that clients of Dynamo's indexer read."""

    @classmethod
    def of(cls, status: int, reason: str, detail: str, hint: str) -> "Problem":
        """Return the problem details of an error. `type`, `title` and `error` follow from the arguments."""
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
    """The trust in what the index knows about a worker."""

    state: TrustState
    reason: str = ""
    """Why the state is not EXACT, as a sentence; empty if it is EXACT."""
    reason_codes: tuple[Reason, ...] = ()
    """Codes of the reasons; the runbook lists them."""
    attested: bool = False
    """Whether the state is EXACT and the engine's newest attestation (a digest of its blocks) has confirmed the index."""


class Media(Struct, frozen=True, kw_only=True, gc=False):
    """An image, or another item that is not text, in a prompt."""

    id: Annotated[str | int, Meta(extra_json_schema={"minimum": -(1 << 63), "maximum": (1 << 64) - 1})]
    """Content hash of the item, as the engine computes it."""
    start: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """Index of the first token that stands for the item, among the tokens of the prompt."""
    length: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """Number of tokens that stand for the item."""


SCOPE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("model_name", "model", "modelname"),
    "tenant": ("tenant_id", "tenant"),
    "group": ("routing_group", "group"),
    "lora": ("lora_name", "lora"),
    "salt": ("cache_salt", "salt", "additionalsalt", "additional_salt"),
}
"""Maps the `/v1` name of each scope field to its names in all APIs."""


@build_decoder_now
class ScopedRequest(Struct, frozen=True, kw_only=True):
    """The scope of prompts. Names of one field, such as `model` and `model_name`, must not have different values."""

    model: RequestName | UnsetType = UNSET
    model_name: RequestName | UnsetType = UNSET
    modelname: RequestName | UnsetType = UNSET
    tenant: RequestName | UnsetType = UNSET
    tenant_id: RequestName | UnsetType = UNSET
    group: RequestName | UnsetType = UNSET
    routing_group: RequestName | UnsetType = UNSET
    lora: RequestName | None = None
    lora_name: RequestName | None = None
    lora_id: LoraId | None = None
    """Number of the LoRA, for engines whose events lack the name of the LoRA (vLLM before 0.14)."""
    salt: RequestName | None = None
    cache_salt: RequestName | None = None
    additionalsalt: RequestName | None = None
    additional_salt: RequestName | None = None

    ALIASES: ClassVar = frozenset(name for field, names in SCOPE_NAMES.items() for name in names if name != field)
    """Names that the OpenAPI document leaves out, because it has one name of each field."""
    mm: Annotated[list[Media], Meta(max_length=1024)] = []
    expected: bool = False
    """Whether to count speculative entries: selections that no event has confirmed yet."""
    whole_prompt: bool = False
    """Whether to look up the final token, although engines recompute the block of the final token."""


class MatchRequest(ScopedRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lookup of one prompt."""

    tokens: list[Token]


class MatchManyRequest(ScopedRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lookup of several prompts of one scope."""

    prompts: Annotated[list[list[Token]], Meta(max_length=1024)]


class Worker(Struct, frozen=True, kw_only=True):
    """A worker in an answer: one rank of one engine."""

    instance: str
    rank: int
    url: str | None = None
    """URL at which the rank takes requests; null if the service does not know the URL."""
    labels: dict[str, str] = {}
    """Labels of the rank, as registered."""


class WorkerTrust(Worker, frozen=True, kw_only=True):
    """The trust in one worker."""

    trust: TrustStatus


class WorkerMatch(Worker, frozen=True, kw_only=True):
    """How much of a prompt one worker holds."""

    tokens: int
    """Number of tokens of the longest prefix that the worker holds, on any tiers."""
    certain: int
    """How many of `tokens` the worker certainly holds. Blocks are uncertain if they might be gone, belong to former weights of
    a LoRA, or are speculative entries; `trust` then is not EXACT and has the code `uncertain-copies`."""
    tiers: dict[str, int]
    """Cumulative number of tokens on each tier: `cpu` counts a prefix that is partly on the GPU, partly on the CPU."""
    trust: TrustStatus


class MatchAnswer(Struct, frozen=True, kw_only=True):
    """The matches of one prompt, for all workers of its scope, including workers that hold nothing."""

    prompt_tokens: int
    workers: list[WorkerMatch]
    """The workers; those with a match come first."""


class PromptMatch(Struct, frozen=True, kw_only=True):
    """Workers that hold a prefix of one of several prompts."""

    prompt_tokens: int
    holders: list[WorkerMatch]


class MatchManyAnswer(Struct, frozen=True, kw_only=True):
    """Matches of each prompt, in the order of the prompts."""

    matches: list[PromptMatch]
    workers: list[WorkerTrust]
    """All workers of the scope. A worker that is not in a prompt's `holders` holds nothing of the prompt."""


class Candidate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker that may be selected."""

    instance: RequestName
    rank: Rank = 0
    load: Annotated[float, Meta(ge=0)] | None = None
    """Number of requests in flight at the worker; default: 0 if any candidate has a load. If no candidate has a load, the
    engines' own reports count. If no engine reports a load, the recent selections of the service count."""


class Reserve(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a selected worker is reserved."""

    id: ReservationId | None = None
    """Name of the reservation; default: a new name. The reservation replaces an open reservation with this name."""
    seconds: ExpirySeconds | None = None
    """Seconds after which the reservation expires without an update; default: `limits.reservation_seconds`."""


class SelectRequest(ScopedRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that asks which worker should take a prompt."""

    tokens: list[Token]
    candidates: list[Candidate] | None = None
    """The workers to choose from; default: all workers of the model."""
    tiers: dict[Tier, Annotated[float, Meta(ge=0, le=1)]] = field(default_factory=lambda: dict(TIER_WEIGHTS))
    """Maps a tier to the value of a cached token; 1 is the cost of computing the token. The key `other` is for unknown media,
    which have the lowest of all weights."""
    wait_weight: Annotated[float, Meta(ge=0, le=1000)] = 0.15
    """Weight of a token of work that waits at the worker; 1 is the weight of a token of the prompt that the worker must
    compute. Each request counts as 256 tokens of work. The decision record 0008 explains the defaults."""
    load_weight: Annotated[float, Meta(ge=0, le=1000)] = 0.05
    """Cost of a load that equals the mean load; 1 is the cost of computing the whole prompt."""
    trust: dict[TrustState, Annotated[float, Meta(ge=0, le=1)]] = field(default_factory=lambda: dict(TRUST_WEIGHTS))
    """Maps a trust state to the factor for matches of workers in this state."""
    tie: Literal["rotate", "random", "first"] = "rotate"
    """How to choose between candidates with equal scores."""
    expect_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Seconds for which the service assumes that the selected worker holds the prompt; 0 adds no speculative entry."""
    explain: bool = False
    ignores_cache: bool = False
    """Whether the engine will compute the whole prompt, for example for `prompt_logprobs`, so that caches do not count."""
    labels: Annotated[dict[RequestName, RequestName], Meta(max_length=MAX_LABELS)] = {}
    """Labels that a candidate must have, such as `{"role": "decode"}`."""
    session: RequestName | None = None
    """Name of the conversation to which the prompt belongs. The prompts of a conversation stay at one worker unless another
    worker would save more than a tenth of the prompt."""
    reserve: bool | Reserve = False
    """Whether to reserve the worker: the request counts as its load until `/v1/reservations/{id}` is deleted or expires."""


class Reservation(Struct, frozen=True, kw_only=True):
    """A request that was sent to a worker and has not ended."""

    id: str
    tenant: str
    group: str
    model: str
    instance: str
    rank: int
    url: str | None
    """URL at which the worker takes requests; null if the service does not know the URL."""
    prompt_tokens: int
    uncached_tokens: int
    """Number of tokens of the prompt that the worker must compute."""
    progress: Literal["waiting", "decoding"]
    """`waiting` until the request has its first token, then `decoding`."""
    output_tokens: int
    """Number of generated tokens that the client has reported."""
    expires_in: float
    """Seconds until the reservation expires."""


class ReservationUpdate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of a reservation. Each update, even an empty one, restarts the time to expiry."""

    first_token: bool = False
    """Whether the request has its first token."""
    output_tokens: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Number of generated tokens; null: no change."""
    seconds: ExpirySeconds | None = None
    """New number of seconds after which the reservation expires without an update; default: no change."""


class ReservationsAnswer(Struct, frozen=True, kw_only=True):
    """Open reservations."""

    open: int
    """Number of all open reservations, including those that this answer omits."""
    reservations: list[Reservation]
    """The reservations that expire first, at most `limit`."""


class ScoredCandidate(Worker, frozen=True, kw_only=True):
    """A candidate with the parts of its score."""

    score: float
    """`uncached` plus `load`, minus 0.1 for the worker of the session; the smallest score is selected."""
    uncached: float
    """Fraction of the prompt to compute, 0 to 1, after the weights of trust and tiers."""
    load: float
    """The part of the score that the load of the worker adds."""
    hot: bool
    """Whether the worker's cache did not count, because the worker had too many requests."""
    session: bool
    """Whether the session of the request is at this worker, which lowers the worker's score by 0.1."""
    tokens: int
    tiers: dict[str, int]
    trust: TrustStatus
    inexact_tiers: list[str]
    """Tiers from which the engine announces no removals. Tokens on these tiers had the weight of DEGRADED."""
    requests: float | None
    """Number of requests that counted as load of the worker; null if unknown, so that the mean of the other workers counted."""


class Selection(Worker, frozen=True, kw_only=True):
    """The worker that should take a prompt."""

    usable: bool
    """Whether the worker can be reached. If false, no candidate can be reached, and no worker is reserved."""
    score: float
    trust: TrustStatus
    """Trust in the worker; CONNECTING or STALE only if no candidate has a connection."""
    why: str
    """Reason for the selection, as a sentence."""
    load_from: Literal["none", "request", "engines", "selections"]
    """Origin of the loads: none, the request, the engines, or (`selections`) the service's reservations and selections."""
    reservation: Reservation | None = None
    """The reservation; null unless the request has `reserve` and the worker is usable."""
    considered: list[ScoredCandidate] | None = None
    """The scored candidates, the best first; null unless the request has `explain`."""
    unreachable: list[WorkerTrust] | None = None
    """Candidates that were excluded because they take no requests; null unless the request has `explain`."""


class Decision(Struct, frozen=True, kw_only=True):
    """A past selection, with its time and request."""

    at: float
    """Time of the selection, in seconds since the epoch."""
    model: str
    tenant: str
    group: str
    prompt_tokens: int
    selection: Selection
    """The response to the request, with the fields for `explain`, and with at most 16 candidates."""


class DecisionsAnswer(Struct, frozen=True, kw_only=True):
    """A sample of the newest selections: at most one selection per second, and at most 64 in all."""

    decisions: list[Decision]
    """The sampled selections, the newest first."""


class GapView(Struct, frozen=True, kw_only=True):
    """A range of consecutive lost batches."""

    first: int
    last: int
    incarnation: int
    at: float


@build_decoder_now
class LoadView(Struct, frozen=True, kw_only=True):
    """The newest load that an engine has reported."""

    running: int
    """Number of requests in the running batch."""
    waiting: int
    """Number of requests in the queue."""
    waiting_uncached_tokens: int | None
    """Number of prompt tokens that the waiting requests must compute; null if the engine does not report it (vLLM)."""
    used_tokens: int
    """Number of tokens of the KV cache that are in use; 0 if unknown."""
    max_tokens: int
    """Capacity of the KV cache in tokens; 0 if unknown."""
    age_seconds: float
    """Number of seconds since the report arrived."""


class DrainRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request to exclude an engine, or one of its ranks, from selections; the service goes on to follow the engine."""

    instance: EngineId
    rank: Annotated[int, Meta(ge=0, lt=1 << 32)] | None = None
    """Rank of the engine; None means all ranks."""
    model: str | None = None
    """Expected model of the engine: if the engine has another model, the request fails. None accepts any model."""
    tenant: str = DEFAULT_GROUP
    group: str = DEFAULT_GROUP
    draining: bool = True
    """True excludes the engine from selections; false includes it again."""


class DrainAnswer(Struct, frozen=True, kw_only=True):
    """The ranks of an engine that a `DrainRequest` has excluded or included."""

    instance: str
    ranks: list[int]
    draining: bool


def worker_name(instance: str, rank: int, tenant: str = DEFAULT_GROUP, group: str = DEFAULT_GROUP) -> str:
    """Return a name such as `engine-0/1`, with `@tenant` or `@tenant/group` unless these have the default values."""
    name = f"{instance}/{rank}"
    if group != DEFAULT_GROUP:
        return f"{name}@{tenant}/{group}"
    return name if tenant == DEFAULT_GROUP else f"{name}@{tenant}"


class SourceView(Struct, frozen=True, kw_only=True):
    """One data-parallel rank of one engine, as the service follows it."""

    instance: str
    rank: int
    model: str
    tenant: str
    group: str
    endpoint: str
    replay_endpoint: str | None
    url: str | None = None
    """URL at which the rank takes requests; null if the service does not know the URL."""
    labels: dict[str, str] = {}
    """Labels of the rank, as registered."""
    origin: str
    """`http` for a client's registration, else `discovery`, `topic` or `plane`."""
    lease_expires_at: float | None = None
    """Time at which a client's registration ends unless the client renews it; null without a lease."""
    draining: bool = False
    """Whether a client of `/v1/drain` has excluded this rank from selections."""
    trust: TrustStatus
    advice: str = ""
    """What people can do to restore the trust, as a text; empty if the state is `EXACT`."""
    since: float
    """Time of the newest change of the trust state."""
    fault: str | None
    """Fault of an endpoint, such as a name that does not resolve or a wrong socket type; null without a fault."""
    incarnation: int
    """Number of the publisher's current incarnation, to which gaps refer. Only its changes have a meaning, not its value."""
    last_seq: int
    """Sequence number of the newest batch; -1 before the first batch."""
    last_event: float | None
    """Arrival time of the newest batch; null before the first batch."""
    lag_seconds: float | None
    """Delay of the newest live batch: arrival time minus the publisher's timestamp; null before the first live batch."""
    waiting: int
    """Number of batches that have arrived and wait for a missing batch with a lower sequence number."""
    blocks: int
    tiers: dict[str, int]
    """Number of blocks on each tier."""
    stores_only: list[str]
    """Tiers from which the engine announces no removals: `EXACT` applies to the other tiers only."""
    drafts: list[int] | None = None
    """KV cache groups of the engine's draft model, as registered: an empty list for all groups, null without a draft model."""
    orphans: int
    """Number of blocks that wait for their parent."""
    uncertain: int
    """Number of blocks that might be gone, because the engine announced more stores than removals of each."""
    block_sizes: list[int]
    """Numbers of tokens per block that the events have shown."""
    declared_block_size: int | None
    batches: int
    replayed: int
    """Number of batches that arrived by replay."""
    lost: int
    """Number of lost batches."""
    compacted: int = 0
    """Number of batches that a snapshot of the publisher replaced; they are not lost."""
    gap_count: int
    gaps: list[GapView]
    """The newest gaps."""
    resets: int
    """Number of times that the service dropped the source's blocks, because the publisher restarted or lost its history."""
    reconnects: int
    load: LoadView | None = None
    """Load of the engine; null without a report, or if the newest report is older than `load.max_age_seconds`."""
    load_fault: str | None = None
    """Why the load is unknown although the source has the setting `load`; null without a fault."""
    rejected: dict[str, int]
    """Number of rejected events for each reason."""

    @property
    def name(self) -> str:
        """Name of the worker in texts for people."""
        return worker_name(self.instance, self.rank, self.tenant, self.group)

    @property
    def issues(self) -> str:
        """Text for people: the reason of the trust state, and the fault if the reason does not contain it."""
        fault = self.fault or ""
        return "; ".join(part for part in (self.trust.reason, fault if fault not in self.trust.reason else "") if part)


class SourcesAnswer(Struct, frozen=True, kw_only=True):
    """The sources of the fleet, and the faults of discovery."""

    sources: list[SourceView]
    faults: dict[str, list[str]]
    """Maps a discovery provider to its faults, such as a missing rank or a name that does not resolve."""
    next: str | None = None
    """Parameter `cursor` for the next page; null on the final page."""


class BlockView(Struct, frozen=True, kw_only=True):
    """One block on one tier of one worker."""

    key: str
    """Rolling key of the block's tokens, 16 hex digits."""
    hash: str
    """The engine's own hash of the block, 16 hex digits."""
    tier: str
    group: int
    copies: int


class BlocksAnswer(Struct, frozen=True, kw_only=True):
    """Blocks of one worker at one moment, unsorted."""

    total: int
    """Number of blocks on all pages together."""
    blocks: list[BlockView]
    next: str | None
    """Parameter `cursor` for the next page; null on the final page."""
    trust: TrustStatus
    """Trust in the worker when the blocks were read."""


class StatsAnswer(Struct, frozen=True, kw_only=True):
    """Counters of the service."""

    version: str
    uptime_seconds: float
    sources: dict[TrustState, int]
    """Number of sources by trust state."""
    workers: int
    blocks: int
    """Number of blocks of all workers together."""
    unique_blocks: int
    tiers: dict[str, int]
    """Number of blocks on each tier; a block on two tiers counts on both."""
    index_bytes: int
    memory_limit: int | None
    orphans: int
    evicted: int
    lookups: int
    hits: int
    """Number of lookups that matched at least one block."""
    batches: int
    batches_per_second: float
    """Mean number of batches per second over the last ten seconds."""
    snapshot_seconds: float | None
    """Interval between snapshots; null without `state_dir`."""
    snapshot_at: float | None
    """Time at which the service began to write the newest snapshot; null before the first snapshot."""
    snapshot_fault: str | None


class HealthAnswer(Struct, frozen=True, kw_only=True):
    """The liveness of the process."""

    status: Literal["ok", "failed"]
    warnings: list[str]
    """Problems that an operator should know, such as an open port without tokens or a full disk."""


class ReadyAnswer(Struct, frozen=True, kw_only=True):
    """The readiness of the process for queries."""

    ready: bool
    why: str
    exact: int
    """Number of EXACT sources."""
    sources: int
    quorum: float
    """Fraction of the sources that must be EXACT."""
    deadline_seconds: float
    """Seconds after the start of the service from which the quorum no longer counts."""


# --- registrations: Dynamo's and Mooncake's `/register` and `/unregister`


class ScopeFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The scope of prompts. Names of one field, such as `model` and `model_name`, must not have different values."""

    model_name: str | None = None
    modelname: str | None = None
    model: str | None = None
    tenant_id: str | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    group: str | UnsetType = UNSET
    lora_name: str | None = None
    lora: str | None = None
    lora_id: LoraId | None = None
    cache_salt: str | None = None
    salt: str | None = None
    additionalsalt: str | None = None
    additional_salt: str | None = None

    ALIASES: ClassVar = frozenset({"tenant", "group", "lora", "salt", "additional_salt"})
    """Names that the OpenAPI document leaves out, because it has one name of each field."""


class RegisterRequest(ScopeFields, kw_only=True, forbid_unknown_fields=True):
    """A request to follow a rank of an engine. Dynamo's API calls the model `model_name`, Mooncake's API `modelname`."""

    instance_id: EngineId
    endpoint: str = ""
    """Endpoint at which the rank publishes. If it is empty, the service queries the engine at `url` for all its endpoints."""
    block_size: int | None = None
    dp_rank: int | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    type: str | None = None
    stores_only: Annotated[list[str], Meta(max_length=16)] = []
    """Tiers from which the engine announces no removals, such as `cpu`. The original APIs do not have this field."""
    drafts: list[int] | None = None
    """KV cache groups of the engine's draft model (EAGLE, MTP); `[]` means all. The original APIs do not have this field."""
    load: str | None = None
    """Address from which the load is read: `tcp://HOST:PORT` of SGLang's load stream, or `http://HOST:PORT` of a server with
    metrics. The original APIs do not have this field."""
    lease_seconds: Annotated[int, Meta(ge=1, le=7 * 86_400)] | None = None
    """Seconds until the rank is unregistered, unless it is registered again. The original APIs do not have this field."""
    url: str | None = None
    """URL at which the engine takes requests; answers return it. The original APIs do not have this field."""
    labels: Annotated[dict[str, str], Meta(max_length=MAX_LABELS)] = {}
    """Labels by which `/v1/select` filters. The original APIs do not have this field."""

    ALIASES: ClassVar = ScopeFields.ALIASES | {"cache_salt", "lora_id"}


class UnregisterRequest(ScopeFields, kw_only=True, forbid_unknown_fields=True):
    """A request to stop following an instance, or one of its ranks."""

    instance_id: EngineId
    dp_rank: int | None = None

    ALIASES: ClassVar = ScopeFields.ALIASES | {"cache_salt", "lora_id"}


class RegistrationAnswer(TypedDict):
    """The response to a `RegisterRequest` or an `UnregisterRequest`."""

    status: str
    instance_id: NotRequired[EngineId]
    ranks: NotRequired[list[int]]
    removed_instances: NotRequired[list[str]]
    warnings: NotRequired[list[str]]
