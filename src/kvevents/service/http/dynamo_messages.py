"""Types of the requests and responses of Dynamo's selection service, as released in the crate `dynamo-kv-router` 1.6.1.

The names and defaults of the fields are the same as in `services/selection/types.rs` and `input.rs`. Fields that have no effect
here are ignored, as are unknown fields.
"""

# No `from __future__ import annotations`: `kvevents.client.schemas` has the reason.
from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Struct, UnsetType, field

from kvevents.client.schemas import DEFAULT_GROUP, MAX_LABELS, MAX_NAME_BYTES, Rank, RequestName, ReservationId, Token
from kvevents.service.http.indexer_api import Hash

WorkerId = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": (1 << 64) - 1})]
Count = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": (1 << 63) - 1})]
OptionalName = Annotated[str, Meta(max_length=MAX_NAME_BYTES)]
"""A name; an empty text means no name."""


class WorkerRank(Struct, frozen=True):
    """A rank of a worker. A missing `dp_rank` means rank 0, or in `affinity_target` any rank."""

    worker_id: WorkerId
    dp_rank: Rank | None = None


class RoutingTokens(Struct, frozen=True):
    """The tokens of a prompt with images. The service does not read the images, so a match ends before the first image."""

    routing_token_ids: list[Token]


class RouterOverride(Struct, frozen=True):
    """Settings of Dynamo's router for one request."""

    overlap_score_credit: float | None = None
    """0 if the selection must ignore caches; all other values have no effect."""
    track_prefill_tokens: bool | None = None
    """False for a request that does not wait for its prefill."""


class SessionContext(Struct, frozen=True):
    """The conversation of a request."""

    session_id: OptionalName


class RoutingConstraints(Struct, frozen=True):
    """Restricts the workers by their labels."""

    required_taints: Annotated[list[Annotated[RequestName, Meta(pattern="^[^=]")]], Meta(max_length=MAX_LABELS)] = []
    """Labels as `NAME=VALUE`; `NAME` alone means `NAME=true`."""


class PromptRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt as token ids, or as the hashes of its blocks and the number of its tokens."""

    model_name: str = "default"
    tenant_id: str = DEFAULT_GROUP
    routing_group: str = DEFAULT_GROUP
    token_ids: list[Token] | None = None
    mm_routing_info: RoutingTokens | None = None
    block_hashes: list[Hash] | None = None
    isl_tokens: Annotated[int, Meta(ge=1, extra_json_schema={"maximum": (1 << 63) - 1})] | None = None
    lora_name: OptionalName | None = None
    cache_salt: OptionalName | None = None
    router_config_override: RouterOverride | None = None


class SelectWorkerRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """A request to `/select` or `/select_and_reserve`."""

    selection_id: ReservationId | None = None
    session_id: OptionalName | None = None
    session_context: SessionContext | None = None
    affinity_target: WorkerRank | None = None
    pinned_worker: WorkerRank | None = None
    allowed_worker_ids: list[WorkerId] | None = None
    routing_constraints: RoutingConstraints = RoutingConstraints()

    @property
    def session(self) -> str | None:
        """The name of the conversation; None if the request does not name a conversation."""
        return (self.session_id if self.session_context is None else self.session_context.session_id) or None


class BookRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """A request to reserve the worker `worker_id`; without it, the worker that `/select` chose under `selection_id`."""

    selection_id: ReservationId
    worker_id: WorkerId | None = None
    dp_rank: Rank | None = None
    effective_prefill_tokens: Count | None = None
    track_prefill_tokens: bool | None = None


class OutputBlockRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A report that a request has one more block of output."""

    decay_fraction: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Has no effect."""


class TieredQueryRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A query with the hashes of a prompt's blocks, in the form that Dynamo's routers send to a remote index."""

    block_hashes: list[Hash]
    model_name: str
    tenant_id: str = DEFAULT_GROUP
    routing_group: str = DEFAULT_GROUP


class Overlap(Struct, frozen=True, kw_only=True):
    """How many tokens of a prompt a worker holds: cumulatively on each tier, and in `dp` on the device of each rank."""

    longest_matched: int
    gpu: int
    dp: dict[str, int]
    cpu: int
    disk: int


class PlacedRequest(Struct, frozen=True, kw_only=True):
    """The worker to which a request was assigned."""

    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    endpoint: str


class Booked(PlacedRequest, frozen=True, kw_only=True):
    """A reservation."""

    selection_id: str


class SelectedWorker(PlacedRequest, frozen=True, kw_only=True):
    """The worker that should take a prompt."""

    selection_id: str | UnsetType = UNSET
    isl_tokens: int | UnsetType = UNSET
    track_prefill_tokens: bool | UnsetType = UNSET
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    potential_decode_blocks: int
    """Number of blocks of this prompt. `/loads` has the blocks of all requests."""


class Done(Struct, frozen=True):
    """The response to a successful change."""

    status: str = "ok"


class PotentialLoad(Struct, kw_only=True):
    """The load of a rank, according to the service's open reservations."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


class ModelLoad(Struct, frozen=True, kw_only=True):
    """Loads of the ranks of one model. The service does not queue requests, so no request is pending."""

    model_name: str
    routing_group: str
    loads: list[PotentialLoad]
    pending_count: int = 0
    pending_isl_tokens: int = 0


class WorkerOverlap(Struct, frozen=True, kw_only=True):
    """How many blocks of a prompt a rank holds on each tier."""

    worker_id: int
    dp_rank: int
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    host_pinned_extension_blocks: int
    disk_extension_blocks: int
    shared_beyond_device_blocks: None = None


class SharedCache(Struct, frozen=True, kw_only=True):
    """The answer about a shared cache, which is constant: the service does not know shared caches."""

    enabled: bool = False
    total_hit_blocks: int = 0
    ranges: list[tuple[int, int]] = []
    error: None = None


class OverlapScores(Struct, frozen=True, kw_only=True):
    """How many blocks of a prompt each rank of a model holds."""

    block_size: int
    num_blocks: int
    workers: list[WorkerOverlap]
    shared_cache: SharedCache = SharedCache()


class CatalogWorker(Struct, frozen=True, kw_only=True):
    """A worker in the response of `/ready`."""

    worker_id: int
    model_name: str
    routing_group: str
    tenant_id: str
    lifecycle: str
    """`schedulable`, or `unschedulable` if no rank can be reached."""
    endpoint: str | None
    kv_events_endpoints: dict[str, str]
    block_size: int | None
    data_parallel_start_rank: int
    data_parallel_size: int
    not_schedulable_reasons: list[str] = field(default_factory=list)


class ReadyWorkers(Struct, frozen=True, kw_only=True):
    """The response of `/ready`: whether any worker can be selected, and all workers."""

    ready: bool
    schedulable_workers: int
    workers: list[CatalogWorker]


class DeviceScores(Struct, frozen=True, kw_only=True):
    """Number of matched blocks that each rank has on the device."""

    scores: list[tuple[WorkerRank, int]]
    frequencies: list[int] = []


class TierHits(Struct, frozen=True, kw_only=True):
    """Number of blocks on one tier that continue the prefix on the faster tiers, for each rank."""

    hits: list[tuple[WorkerRank, int]]


class TieredMatch(Struct, frozen=True, kw_only=True):
    """The matched blocks on the device and on each lower tier."""

    device: DeviceScores
    lower_tier: list[tuple[str, TierHits]]


class TieredAnswer(Struct, frozen=True, kw_only=True):
    """The response to `/query_tiered_by_hash`."""

    block_size: int
    tiered: TieredMatch


_PROMPT_RULES: Final = [
    {"required": ["token_ids"], "properties": {"token_ids": {"type": "array"}}},
    {"required": ["isl_tokens"], "properties": {"isl_tokens": {"type": "integer"}}},
]
SCHEMA_RULES: Final[dict[type, dict[str, Any]]] = {
    PromptRequest: {"anyOf": _PROMPT_RULES},
    SelectWorkerRequest: {"anyOf": _PROMPT_RULES},
    BookRequest: {"anyOf": [*_PROMPT_RULES, {"properties": {"worker_id": {"type": "null"}}}]},  # `/select` stored the prompt.
}
"""JSON Schema rules for request bodies, beside those that follow from the types."""
