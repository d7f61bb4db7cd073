"""The indexer API of Dynamo's standalone indexer and of Mooncake Conductor (RFC #1403): registration and queries.

The APIs of Mooncake and Dynamo derive from one draft and differ in names. A request with `model_name` gets a response in
Dynamo's form. A request with `model` (`modelname` to register) gets a response in Mooncake's form. As in both projects, unknown
fields are ignored, but counted. A field whose name is similar to a scope field is rejected instead
(`kvevents.service.scope_fields`).
"""

# No `from __future__ import annotations`: `kvevents.client.schemas` has the reason.
import re
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from kvevents.client.schemas import EngineId, RegisterRequest, ScopeFields, UnregisterRequest
from kvevents.errors import ConfigError
from kvevents.package_metadata import page_link
from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.provider import EngineQueryError, Template, check_endpoint, check_load
from kvevents.service.errors import RefusedError, ServiceError, TooMuchError, UnavailableError
from kvevents.service.fleet.registration import QUOTE_LENGTH, Registration
from kvevents.service.http.messages import HttpRequest, Response, answer
from kvevents.service.http.queries import answer_query
from kvevents.service.prober import check_allowed, load_target
from kvevents.service.registrations import InstanceQuery
from kvevents.service.scope_fields import LORA, MODEL, SALT, model_of, number_of_lora, owner_of, read_value
from kvevents.service.service import Service

HASH_REGEX: Final = re.compile(r"0x[0-9a-fA-F]{1,16}|-?(0|[1-9][0-9]{0,19})", re.ASCII)
_HASH_PATTERN: Final = "^(0x[0-9a-fA-F]{1,16}|-?(0|[1-9][0-9]{0,17}))$"
Hash = Annotated[int | str, Meta(extra_json_schema={"minimum": -(1 << 63), "maximum": (1 << 64) - 1, "pattern": _HASH_PATTERN})]
MAX_WARNINGS: Final = 8
"""Maximum number of ignored fields that a response names."""


def _fields_hint() -> str:
    return f"for the fields of both APIs see {page_link('guides/service#dynamos-and-mooncakes-api')}"


class IndexerRequest(ScopeFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of a query, by token ids or by hashes."""

    instance_id: EngineId | None = None
    block_size: Annotated[int, Meta(gt=0, extra_json_schema={"maximum": (1 << 64) - 1})] | None = None
    whole_prompt: bool = False
    """Whether to look up the final token, although engines recompute the block of the final token."""

    ALIASES: ClassVar = ScopeFields.ALIASES | {"additionalsalt"}


class QueryRequest(IndexerRequest, kw_only=True, forbid_unknown_fields=True):
    """A query with the token ids of a prompt."""

    token_ids: list[Annotated[int, Meta(ge=0, lt=1 << 32)]]


class HashQueryRequest(IndexerRequest, kw_only=True, forbid_unknown_fields=True):
    """A query with the hashes of a prompt's blocks.

    `block_hashes` (Dynamo) are hashes of single blocks, `seq_hashes` (Mooncake) are rolling hashes. A hash is a signed or
    unsigned number. A hash can also be a string of decimal digits, or of `0x` and hexadecimal digits.
    """

    block_hashes: list[Hash] | None = None
    seq_hashes: list[Hash] | None = None
    block_hash: list[Hash] | None = None


_HASH_FIELDS: Final = ("block_hashes", "seq_hashes", "block_hash")
_ONE_MODEL_RULE: Final[dict[str, Any]] = {
    "oneOf": [
        {
            "required": [name],
            "properties": {field: {"type": "string", "minLength": 1} if field == name else {"type": "null"} for field in MODEL},
        }
        for name in MODEL
    ]
}
_ONE_HASH_LIST_RULE: Final[dict[str, Any]] = {
    "oneOf": [{"required": [name], "properties": {name: {"type": "array"}}} for name in _HASH_FIELDS]
}
SCHEMA_RULES: Final[dict[type, dict[str, Any]]] = {
    RegisterRequest: {
        "anyOf": [
            _ONE_MODEL_RULE | {"required": ["endpoint"], "properties": {"endpoint": {"minLength": 1}}},
            {"required": ["url"], "properties": {"url": {"type": "string", "minLength": 1}}},
        ]
    },
    UnregisterRequest: {"oneOf": [*_ONE_MODEL_RULE["oneOf"], {"not": {"anyOf": [{"required": [name]} for name in MODEL]}}]},
    QueryRequest: _ONE_MODEL_RULE,
    HashQueryRequest: {"allOf": [_ONE_MODEL_RULE, _ONE_HASH_LIST_RULE]},
}
"""JSON Schema rules for request bodies, beside those that follow from the types."""


# --- registration


async def register(service: Service, request: HttpRequest) -> Response:
    """Register a rank of an engine, or all ranks of the engine at `url`; the status is 200 if equal registrations exist."""
    body: RegisterRequest = request.read()
    try:
        ranks = (_make_registration(body),) if body.endpoint else await _ask_engine(service, body)
    except ConfigError as error:
        raise RefusedError(str(error), "bad-registration", _fields_hint()) from error
    outcomes = [await service.registrations.register(rank, request.client, body.lease_seconds) for rank in ranks]
    warnings = [f"ignored unknown field {name[:QUOTE_LENGTH]!r}" for name in request.ignored_fields[:MAX_WARNINGS]]
    warnings += filter(None, (outcome.warning for outcome in outcomes))
    fields: dict[str, Any] = {"warnings": warnings} if warnings else {}
    if not body.endpoint:
        fields["ranks"] = [rank.rank for rank in ranks]
    if body.model_name is not None or not body.endpoint:
        return answer({"status": "ok", **fields}, request, status=201 if any(outcome.is_new for outcome in outcomes) else 200)
    return answer({"status": "registered successfully", "instance_id": body.instance_id, **fields}, request)


def _shared_fields(body: RegisterRequest) -> dict[str, Any]:
    """Return the fields of a request that apply to all ranks, under their names in `Registration` and `Template`."""
    tenant, group = owner_of(body)
    lora = read_value(body, LORA)
    if lora is None and (number := number_of_lora(body)) is not None:
        sentence = f"lora_id {number} does not name a LoRA"
        raise RefusedError(sentence, "lora-id", "send the name of the LoRA as lora_name, or leave out lora_id")
    return {
        "topic": body.topic,
        "block_size": body.block_size,
        "tenant": tenant,
        "group": group,
        "lora_name": lora,
        "salt": read_value(body, SALT),
        "stores_only": tuple(body.stores_only),
        "drafts": None if body.drafts is None else tuple(body.drafts),
        "load": body.load or None,
        "labels": body.labels,
    }


def _make_registration(body: RegisterRequest) -> Registration:
    model, shared, replay_endpoint = model_of(body), _shared_fields(body), body.replay_endpoint or None  # Go clients send "".
    try:
        check_endpoint("endpoint", body.endpoint)
        if replay_endpoint is not None:
            check_endpoint("replay_endpoint", replay_endpoint)
    except ConfigError as error:
        raise RefusedError(str(error), "bad-endpoint", f"see {page_link('guides/service#engines')}") from error
    if body.load:
        check_load(body.load)
    return Registration(
        instance=str(body.instance_id),
        endpoint=body.endpoint,
        model=model,
        rank=body.dp_rank or 0,
        replay_endpoint=replay_endpoint,
        url=body.url or None,
        **shared,
    )


async def _ask_engine(service: Service, body: RegisterRequest) -> tuple[Registration, ...]:
    """Return the registrations of the ranks that the engine at `url` reports."""
    if not body.url:
        raise ServiceError("the request has neither endpoint nor url", "bad-shape", _fields_hint(), status=422)
    provider = EngineProvider(body.url, Template(model=read_value(body, MODEL), **_shared_fields(body)), str(body.instance_id))
    await check_allowed(service.allow_list, load_target(body.url))
    try:
        finding = await provider.query()
    except EngineQueryError as error:
        raise UnavailableError(str(error), "engine-silent", "start the engine first, or send its endpoint") from error
    ranks = tuple(registration for registration in finding.registrations if body.dp_rank in {None, registration.rank})
    if not ranks:
        sentence = "; ".join(finding.faults) or f"the engine at {body.url} has no rank {body.dp_rank}"
        raise RefusedError(sentence, "no-events", "start the engine with KV events, or send its endpoint")
    return ranks


async def unregister(service: Service, request: HttpRequest) -> Response:
    """Unregister a rank of an engine, or without `dp_rank` all ranks of the instance, and drop their blocks."""
    body: UnregisterRequest = request.read()
    scope = read_value(body, MODEL), *owner_of(body), read_value(body, LORA), read_value(body, SALT)
    query = InstanceQuery(str(body.instance_id), body.dp_rank, *scope)
    registrations = await service.registrations.unregister(query, request.client)
    if body.model_name is not None:
        return answer({"status": "ok"}, request)
    labels = [f"{registration.instance}|{registration.tenant}|{registration.rank}" for registration in registrations]
    return answer({"status": "unregistered successfully", "removed_instances": labels}, request)


# --- queries


def query(service: Service, request: HttpRequest) -> Response:
    """Return how much of a prompt each worker holds."""
    body, tokens = request.read_tokens("token_ids")
    return answer_query(service, request, body, tokens, instance_id=_instance_of(body))


def query_by_hash(service: Service, request: HttpRequest) -> Response:
    """Return how much of a prompt each worker holds; the request has the hashes of the prompt's blocks.

    A hash depends on the salt, and on the LoRA if the engine's events name the LoRA.
    """
    body: HashQueryRequest = request.read()
    queries = {name: hashes for name in _HASH_FIELDS if (hashes := getattr(body, name)) is not None}
    if len(queries) != 1:
        raise ServiceError("the body needs either block_hashes or seq_hashes", "bad-shape", _fields_hint(), status=422)
    ((name, hashes),) = queries.items()
    changes = {name: read_hashes(service, hashes), "instance_id": _instance_of(body)}
    return answer_query(service, request, body, **changes)


def _instance_of(body: IndexerRequest) -> str | None:
    """Return the instance of a query as text, because a number of any size can name an instance."""
    return None if body.instance_id is None else str(body.instance_id)


def read_hashes(service: Service, hashes: list[int | str]) -> list[int]:
    """Return the hashes of a query as unsigned numbers. Raises `ServiceError` for too many hashes, or one above 64 bits."""
    if len(hashes) > (limit := service.settings.limits.max_hashes):
        raise TooMuchError(f"the request has {len(hashes)} hashes", "too-many-hashes", f"limits.max_hashes allows {limit}")
    return [_to_unsigned(value) for value in hashes]


def _to_unsigned(value: int | str) -> int:
    if isinstance(value, int):
        number = value
    elif HASH_REGEX.fullmatch(value):
        number = int(value, 0)
    else:
        number = 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        text = value[:QUOTE_LENGTH] if isinstance(value, str) else value
        hint = "send integers, signed or unsigned, or 0x..."
        raise ServiceError(f"invalid hash {text!r}: expected a 64-bit integer", "bad-hash", hint, status=422)
    return number & 0xFFFF_FFFF_FFFF_FFFF
