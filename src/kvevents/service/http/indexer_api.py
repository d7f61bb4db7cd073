"""The indexer API of Dynamo's standalone indexer and of Mooncake Conductor (RFC #1403): registration and queries.

Both APIs derive from one draft and differ in names. A request with `model_name` gets a response as from Dynamo. A request with
`model` (`modelname` to register) gets a response as from Mooncake. Unknown fields are ignored, as both do, and counted. Unknown
fields that resemble a field of the scope are rejected (`kvevents.service.scope_fields`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvevents.client.schemas import LoraId
from kvevents.endpoints import split_tcp
from kvevents.errors import ConfigError
from kvevents.package_metadata import documented
from kvevents.service.discovery.provider import check_load
from kvevents.service.errors import RefusedError, ServiceError, TooMuchError
from kvevents.service.fleet.member import MemberMatch
from kvevents.service.fleet.registration import Registration, Scope
from kvevents.service.http.messages import Body, HttpRequest, Response, answer
from kvevents.service.registrations import Client, InstanceQuery
from kvevents.service.scope_fields import GROUP, LORA, MODEL, SALT, TENANT, pick, scope_of
from kvevents.service.service import Service

Id = Annotated[int | str, Meta(extra_json_schema={"minimum": -(1 << 63), "maximum": (1 << 64) - 1})]
_HINT: Final = f"for the fields of both APIs see {documented('guides/service#dynamos-and-mooncakes-api')}"
HASH: Final = re.compile(r"0x[0-9a-fA-F]{1,16}|-?(0|[1-9][0-9]{0,19})", re.ASCII)
Hash = Annotated[
    int | str,
    Meta(
        extra_json_schema={
            "minimum": -(1 << 63),
            "maximum": (1 << 64) - 1,
            "pattern": "^(0x[0-9a-fA-F]{1,16}|-?(0|[1-9][0-9]{0,17}))$",
        }
    ),
]
MAX_TIERS: Final = 16
"""Most tiers of one registration."""
MAX_WARNINGS: Final = 8
"""Ignored fields that a response names."""
MAX_SHOWN: Final = 40
"""Characters of an invalid value that an error quotes."""


class ScopeFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The scope of prompts. A field with several names accepts any of them; two names must not have different values."""

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
    """Names that the OpenAPI document leaves out, since one name of each field is enough."""


class RegisterRequest(ScopeFields, kw_only=True, forbid_unknown_fields=True):
    """An engine's rank to follow. Dynamo's API has `model_name`, Mooncake's `modelname`."""

    instance_id: Id
    endpoint: str
    block_size: int | None = None
    dp_rank: int | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    type: str | None = None
    stores_only: Annotated[list[str], Meta(max_length=MAX_TIERS)] = []
    """Tiers from which the engine announces no removals, such as `cpu`; no field of the original APIs."""
    drafts: list[int] | None = None
    """KV cache groups of its draft model (EAGLE, MTP), `[]` for all; no field of the original APIs."""
    load: str | None = None
    """Where the load is read: `tcp://HOST:PORT` of SGLang's load stream, or `http://HOST:PORT` of a server with metrics; no
    field of the original APIs."""

    ALIASES: ClassVar = ScopeFields.ALIASES | {"cache_salt", "lora_id"}


class UnregisterRequest(ScopeFields, kw_only=True, forbid_unknown_fields=True):
    """An instance, or one rank of it, that the service stops following."""

    instance_id: Id
    dp_rank: int | None = None

    ALIASES: ClassVar = ScopeFields.ALIASES | {"cache_salt", "lora_id"}


class IndexerRequest(ScopeFields, kw_only=True, forbid_unknown_fields=True):
    """Fields that both kinds of query have."""

    instance_id: Id | None = None
    block_size: Annotated[int, Meta(gt=0, extra_json_schema={"maximum": (1 << 64) - 1})] | None = None
    whole_prompt: bool = False
    """Look up the last token too. Engines recompute it and its block."""

    ALIASES: ClassVar = ScopeFields.ALIASES | {"additionalsalt"}


class QueryRequest(IndexerRequest, kw_only=True, forbid_unknown_fields=True):
    """A query with the token ids of a prompt."""

    token_ids: list[Annotated[int, Meta(ge=0, lt=1 << 32)]]


class HashQueryRequest(IndexerRequest, kw_only=True, forbid_unknown_fields=True):
    """A query with the hashes of a prompt's blocks.

    `block_hashes` (Dynamo) are hashes of each block alone, `seq_hashes` (Mooncake) are rolling hashes. They are signed or
    unsigned numbers, or strings with decimal digits, or `0x` and hexadecimal digits.
    """

    block_hashes: list[Hash] | None = None
    seq_hashes: list[Hash] | None = None
    block_hash: list[Hash] | None = None


_TOLERANT: Final[dict[str, Any]] = {"additionalProperties": True}
_ONE_MODEL: Final[dict[str, Any]] = _TOLERANT | {
    "oneOf": [
        {
            "required": [name],
            "properties": {other: {"type": "string", "minLength": 1} if other == name else {"type": "null"} for other in MODEL},
        }
        for name in MODEL
    ]
}
_NO_MODEL: Final[dict[str, Any]] = {"not": {"anyOf": [{"required": [name]} for name in MODEL]}}
_ONE_KIND: Final[dict[str, Any]] = {
    "oneOf": [
        {"required": [name], "properties": {name: {"type": "array"}}} for name in ("block_hashes", "seq_hashes", "block_hash")
    ]
}
SCHEMA_RULES: Final[dict[type, dict[str, Any]]] = {
    RegisterRequest: _ONE_MODEL,
    UnregisterRequest: _TOLERANT | {"oneOf": [*_ONE_MODEL["oneOf"], _NO_MODEL]},
    QueryRequest: _ONE_MODEL,
    HashQueryRequest: _TOLERANT | {"allOf": [_ONE_MODEL, _ONE_KIND]},
}
"""JSON Schema rules of these bodies that their types do not express."""

REGISTER: Final = Body.of(RegisterRequest, tolerant=True)
UNREGISTER: Final = Body.of(UnregisterRequest, tolerant=True)
QUERY: Final = Body.of(QueryRequest, tolerant=True)
HASH_QUERY: Final = Body.of(HashQueryRequest, tolerant=True)


# --- registration


async def register(service: Service, request: HttpRequest) -> Response:
    """Register a rank of an engine, which the service follows from then on."""
    body: RegisterRequest = REGISTER.read(request, service.settings.limits)
    await service.registrations.register(_registration(body), Client(request.caller, request.peer))
    service.metrics.record_ignored_fields(request)
    fields: dict[str, Any] = {
        "warnings": [f"ignored unknown field {name[:MAX_SHOWN]!r}" for name in request.ignored[:MAX_WARNINGS]]
    }
    if not request.ignored:
        fields = {}
    if body.model_name is not None:
        return answer({"status": "ok", **fields}, status=201)
    return answer({"status": "registered successfully", "instance_id": body.instance_id, **fields})


def _registration(body: RegisterRequest) -> Registration:
    scope = scope_of(body)
    if isinstance(scope.lora, int):
        raise RefusedError(
            f"lora_id {scope.lora} does not name a LoRA", "lora-id", "send its name as lora_name, or leave it out"
        )
    _check_endpoint("endpoint", body.endpoint)
    if body.replay_endpoint:  # clients in Go send an empty string for none
        _check_endpoint("replay_endpoint", body.replay_endpoint)
    try:
        if body.load:
            check_load(body.load)
        return Registration(
            instance=str(body.instance_id),
            endpoint=body.endpoint,
            model=scope.model,
            rank=body.dp_rank or 0,
            replay_endpoint=body.replay_endpoint or None,
            topic=body.topic,
            block_size=body.block_size,
            tenant=scope.tenant,
            group=scope.group,
            lora_name=scope.lora,
            salt=scope.salt,
            stores_only=tuple(body.stores_only),
            drafts=None if body.drafts is None else tuple(body.drafts),
            load=body.load or None,
        )
    except ConfigError as error:
        raise RefusedError(str(error), "bad-registration", _HINT) from error


def _check_endpoint(name: str, endpoint: str) -> None:
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in {"tcp", "ipc"} or not address or (scheme == "tcp" and split_tcp(endpoint) is None):
        raise RefusedError(
            f"invalid {name} {endpoint!r}: expected tcp://HOST:PORT or ipc:///PATH",
            "bad-endpoint",
            f"see {documented('guides/service#engines')}",
        )


async def unregister(service: Service, request: HttpRequest) -> Response:
    """Unregister a rank of an engine and drop its blocks; without `dp_rank` all ranks of the instance."""
    body: UnregisterRequest = UNREGISTER.read(request, service.settings.limits)
    tenant, group, lora, salt = (pick(body, names) for names in (TENANT, GROUP, LORA, SALT))
    query = InstanceQuery(str(body.instance_id), body.dp_rank, pick(body, MODEL), tenant, group, lora, salt)
    ended = await service.registrations.unregister(query, Client(request.caller, request.peer))
    service.metrics.record_ignored_fields(request)
    if body.model_name is not None:
        return Response(b'{"status":"ok"}')
    removed = [f"{each.instance}|{each.tenant}|{each.rank}" for each in ended]
    return answer({"status": "unregistered successfully", "removed_instances": removed})


# --- queries


async def query(service: Service, request: HttpRequest) -> Response:
    """Return how much of a prompt each worker holds."""
    body, tokens = await request.run(QUERY.read_tokens, request, "token_ids", service.settings.limits)
    service.check_tokens(len(tokens))
    service.metrics.record_ignored_fields(request)
    scope = service.candidates.resolve(scope_of(body))
    run = service.runner(request.run, len(service.candidates.of(scope).members))
    found = await service.lookups.find(run, scope, tokens, whole_prompt=body.whole_prompt)
    return await run(_answered, service, body, scope, found)


async def query_by_hash(service: Service, request: HttpRequest) -> Response:
    """Return how much of a prompt each worker holds, by the hashes of its blocks."""
    body, keys = await request.run(_hashes, service, request)
    service.metrics.record_ignored_fields(request)
    scope = service.candidates.resolve(scope_of(body))
    run = service.runner(request.run, len(service.candidates.of(scope).members))
    # The hashes include the salt, and the LoRA if the engine's events name it.
    found = await service.lookups.find_keys(run, scope, keys, local=body.block_hashes is not None)
    return await run(_answered, service, body, scope, found)


def _hashes(service: Service, request: HttpRequest) -> tuple[HashQueryRequest, list[int]]:
    body: HashQueryRequest = HASH_QUERY.read(request, service.settings.limits)
    given = [hashes for hashes in (body.block_hashes, body.seq_hashes, body.block_hash) if hashes is not None]
    if len(given) != 1:
        raise ServiceError("expected either block_hashes or seq_hashes", "bad-shape", _HINT, status=422)
    if len(given[0]) > (most := service.settings.limits.max_hashes):
        raise TooMuchError(f"{len(given[0])} hashes were sent", "too-many-hashes", f"limits.max_hashes is {most}")
    return body, [_unsigned(each) for each in given[0]]


def _answered(service: Service, body: IndexerRequest, scope: Scope, rows: list[MemberMatch]) -> Response:
    if inexact := service.candidates.of(scope).inexact:  # they may hold more blocks than the index knows, as their trust says
        holders = {row.member.worker for row in rows}
        rows = rows + [MemberMatch(member, 0, 0, 0, 0) for member in inexact if member.worker not in holders]
    rows = [each for each in rows if not each.member.is_hidden]
    if body.instance_id is not None and body.model_name is None:
        rows = [each for each in rows if each.member.registration.instance == str(body.instance_id)]
    if body.block_size is not None:
        rows = [each for each in rows if each.member.registration.block_size in {None, body.block_size}]
    return Response(mooncake(scope.tenant, rows) if body.model_name is None else dynamo(rows))


def _unsigned(given: int | str) -> int:
    if isinstance(given, int):
        number = given
    elif HASH.fullmatch(given):
        number = int(given, 0)
    else:
        number = 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        shown = given[:MAX_SHOWN] if isinstance(given, str) else given
        raise ServiceError(
            f"invalid hash {shown!r}: expected a 64-bit integer",
            "bad-hash",
            "send integers, signed or unsigned, or 0x...",
            status=422,
        )
    return number & 0xFFFF_FFFF_FFFF_FFFF


_encode = msgspec.json.Encoder().encode


def _by_instance(rows: Iterable[MemberMatch]) -> dict[str, list[MemberMatch]]:
    found: dict[str, list[MemberMatch]] = {}
    for each in rows:
        instance = each.member.instance
        if instance in found:
            found[instance].append(each)
        else:
            found[instance] = [each]
    return found


def dynamo(rows: Iterable[MemberMatch]) -> bytes:
    """Encode a response as Dynamo's standalone indexer does, with the trust of each rank."""
    scores: list[bytes] = []
    instances: list[bytes] = []
    for ranks in _by_instance(rows).values():
        name = _encode(ranks[0].member.instance)
        held = b",".join([b'"%d":%d' % (each.member.registration.rank, each.gpu) for each in ranks if each.gpu])
        if held:
            scores.append(b"%b:{%b}" % (name, held))
        device = b",".join([b'"%d":%d' % (each.member.registration.rank, each.gpu) for each in ranks])
        instances.append(
            b'%b:{"longest_matched":%d,"gpu":%d,"dp":{%b},"cpu":%d,"disk":%d,"trust":{%b}}'
            % (name, *_longest(ranks), device, max(each.cpu for each in ranks), max(each.disk for each in ranks), _trust(ranks))
        )
    return b'{"scores":{%b},"frequencies":[],"instances":{%b}}' % (b",".join(scores), b",".join(instances))


def mooncake(tenant: str, rows: Iterable[MemberMatch]) -> bytes:
    """Encode a response as Mooncake Conductor does, with the trust of each rank."""
    instances = [
        b'%b:{"longest_matched":%d,"GPU":%d,"DP":{%b},"CPU":%d,"DISK":%d,"trust":{%b}}'
        % (
            _encode(ranks[0].member.instance),
            *_longest(ranks),
            b",".join([b'"%d":%d' % (each.member.registration.rank, each.tokens) for each in ranks]),
            max(each.cpu for each in ranks),
            max(each.disk for each in ranks),
            _trust(ranks),
        )
        for ranks in _by_instance(rows).values()
    ]
    return b"{%b:{%b}}" % (_encode(tenant), b",".join(instances))


def _longest(ranks: list[MemberMatch]) -> tuple[int, int]:
    """Return the longest match in tokens on any tier, and on the GPU."""
    return max(each.tokens for each in ranks), max(each.gpu for each in ranks)


def _trust(ranks: list[MemberMatch]) -> bytes:
    return b",".join([b'"%d":%b' % (each.member.registration.rank, _encode(each.trust_status.state)) for each in ranks])
