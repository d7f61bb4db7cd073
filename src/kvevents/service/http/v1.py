"""The `/v1` API of kvevents. `kvevents.client.schemas` has the types of its requests and responses."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final

import msgspec

from kvevents.client.schemas import (
    DEFAULT_GROUP,
    Candidate,
    MatchAnswer,
    MatchManyAnswer,
    MatchManyRequest,
    MatchRequest,
    PromptMatch,
    ScopedRequest,
    Selection,
    SelectRequest,
    SourcesAnswer,
    SourceView,
    WorkerMatch,
    WorkerTrust,
)
from kvevents.index import Block
from kvevents.service.errors import NotFoundError, RefusedError, ServiceError, TooMuchError, UnavailableError
from kvevents.service.fleet.event_bus import StreamEvent
from kvevents.service.fleet.member import Member, MemberMatch
from kvevents.service.fleet.registration import Scope
from kvevents.service.http.messages import RAW, Body, HttpRequest, Response, StreamingResponse, answer, encoded
from kvevents.service.scope_fields import scope_of
from kvevents.service.selection import SelectError, Standing
from kvevents.service.selection import select as select_worker
from kvevents.service.service import Service
from kvevents.settings import build_decoder_now

MATCH: Final = Body.of(MatchRequest)
MATCH_MANY: Final = Body.of(MatchManyRequest)
SELECT: Final = Body.of(SelectRequest)
MAX_PAGE: Final = 10_000
"""Largest page of `/v1/blocks`, in blocks."""
DEFAULT_PAGE: Final = 1_000
CURSOR: Final = re.compile(r"^([0-9a-f]{16}\.[0-9]{1,12})?$")
"""Form of a cursor of `/v1/blocks`; empty for the first page."""
MAX_DIGITS: Final = 10
"""Digits of a number in a query string; Python does not parse very long numbers."""
MAX_SHOWN: Final = 40
"""Characters of an invalid value that an error quotes."""
HEARTBEAT_SECONDS: Final = 15.0
"""Interval of comments on an idle `/v1/events`. They keep proxies from closing it and reveal disconnected clients."""


def _worker_matches(found: list[MemberMatch]) -> list[WorkerMatch]:
    return [
        WorkerMatch(
            instance=row.member.registration.instance,
            rank=row.member.registration.rank,
            tokens=row.tokens,
            certain=row.certain,
            tiers=row.tiers,
            trust=row.trust_status,
        )
        for row in found
    ]


def _trusts(service: Service, scope: Scope) -> list[WorkerTrust]:
    """Return the trust of each worker that may hold blocks of a prompt."""
    return [
        WorkerTrust(instance=member.instance, rank=member.registration.rank, trust=member.trust_status)
        for member in service.candidates.of(scope).members
    ]


# --- prompts


async def match(service: Service, request: HttpRequest) -> Response:
    """Return the longest prefix of a prompt that each worker holds.

    The body is a `MatchRequest` as JSON or msgpack, or raw token ids: unsigned 32-bit little-endian numbers with content type
    `application/octet-stream`, and all other fields in the query string.
    """
    query, tokens = await request.run(_prompt, service, request)
    scope = service.candidates.resolve(scope_of(query))
    run = service.runner(request.run, len(service.candidates.of(scope).members))
    found = await service.lookups.find(
        run, scope, tokens, mm=query.mm, expected=query.expected, whole_prompt=query.whole_prompt
    )
    return await run(_match_answer, service, request, scope, len(tokens), found)


def _prompt(service: Service, request: HttpRequest) -> tuple[ScopedRequest, Any]:
    if request.kind == RAW:
        tokens, query = _raw_prompt(request)
    else:
        query, tokens = MATCH.read_tokens(request, "tokens", service.settings.limits)
    service.check_tokens(len(tokens))
    return query, tokens


def _match_answer(service: Service, request: HttpRequest, scope: Scope, length: int, found: list[MemberMatch]) -> Response:
    holders = {row.member.worker for row in found}
    others = [member.empty_match for member in service.candidates.of(scope).members if member.worker not in holders]
    return answer(MatchAnswer(prompt_tokens=length, workers=_worker_matches(found) + others), request)


@build_decoder_now
class _RawScope(ScopedRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of a raw prompt."""


def _raw_prompt(request: HttpRequest) -> tuple[Any, ScopedRequest]:
    if len(request.body) % 4:
        raise RefusedError(
            f"invalid raw body of {len(request.body)} bytes: expected 4 bytes for each token",
            "malformed-body",
            "send 32-bit numbers",
        )
    try:
        query = msgspec.convert(dict(request.wanted), _RawScope, strict=False)
    except msgspec.ValidationError as error:
        raise ServiceError(f"invalid query string: {error}", "bad-shape", "see /openapi.json", status=422) from error
    return memoryview(request.body).cast("I"), query


async def match_many(service: Service, request: HttpRequest) -> Response:
    """Return the longest prefix of each of several prompts of one scope that each worker holds."""
    query: MatchManyRequest = await request.run(MATCH_MANY.read, request, service.settings.limits)
    service.check_tokens(sum(map(len, query.prompts)))
    scope = service.candidates.resolve(scope_of(query))
    found = await service.lookups.find_many(
        request.run, scope, query.prompts, mm=query.mm, expected=query.expected, whole_prompt=query.whole_prompt
    )
    return await request.run(_match_many_answer, service, request, scope, query, found)


def _match_many_answer(
    service: Service, request: HttpRequest, scope: Scope, query: MatchManyRequest, found: list[list[MemberMatch]]
) -> Response:
    # Each match is encoded alone, because the encoder holds the interpreter lock.
    matches: list[Any] = [
        encoded(PromptMatch(prompt_tokens=len(tokens), holders=_worker_matches(rows)), request)
        for tokens, rows in zip(query.prompts, found, strict=True)
    ]
    return answer(MatchManyAnswer(matches=matches, workers=_trusts(service, scope)), request)


async def select(service: Service, request: HttpRequest) -> Response:
    """Select the worker for a prompt by what each worker holds, its trust and its load."""
    query, tokens = await request.run(SELECT.read_tokens, request, "tokens", service.settings.limits)
    service.check_tokens(len(tokens))
    scope = service.candidates.resolve(scope_of(query))
    query = msgspec.structs.replace(query, tokens=tokens, model=scope.model, tenant=scope.tenant, group=scope.group)
    limits = service.settings.limits
    if query.candidates is None:
        count = len(service.candidates.of(scope).members)
    elif (count := len(query.candidates)) > limits.max_candidates:
        raise TooMuchError(
            f"the request has {count} candidates", "too-many-candidates", f"limits.max_candidates is {limits.max_candidates}"
        )
    run = service.runner(request.run, count)
    found = await service.lookups.find(
        run, scope, tokens, mm=query.mm, expected=query.expected, whole_prompt=query.whole_prompt
    )
    chosen = await run(_selection_answer, service, scope, query, found)
    if query.expect_seconds > 0:
        service.fleet.expect(scope, (chosen.instance, chosen.rank), query.tokens, query.expect_seconds)
    return answer(chosen, request)


def _selection_answer(service: Service, scope: Scope, query: SelectRequest, found: list[MemberMatch]) -> Selection:
    standings = {member.worker: Standing.of_member(member) for member in service.candidates.of(scope).members}
    candidates = query.candidates
    if candidates is None:
        candidates = [Candidate(instance=instance, rank=rank) for instance, rank in standings]
    else:
        # Workers of the same tenant and group with another model, LoRA or salt cannot serve the prompt.
        others = {
            member.worker for member in service.members().values() if member.registration.scope[1:3] == scope[1:3]
        } - standings.keys()
        candidates = [one for one in candidates if (one.instance, one.rank) not in others]
        if query.candidates and not candidates:
            raise SelectError(
                f"none of the {len(query.candidates)} candidates serves model {scope.model!r} with this LoRA and salt",
                "no-candidates",
                "leave `candidates` out, or name workers of /v1/sources",
            )
    held = {(each.instance, each.rank): each for each in _worker_matches(found)}
    for row in found:
        if not row.is_certain and (standing := standings.get(row.member.worker)) is not None:
            standings[row.member.worker] = standing._replace(match_trust=row.trust_status)
    return select_worker(query, candidates, held, standings, service.ties, service.fleet.loads.requests)


# --- the fleet


def sources(service: Service, request: HttpRequest) -> Response:
    """List every source with its trust, lag, gaps and counters."""
    views = [member.view() for _, member in sorted(service.members().items())]
    chosen = [view for view in views if _is_wanted(view, request.wanted)]
    return answer(SourcesAnswer(sources=chosen, faults=service.faults()), request)


def _is_wanted(view: SourceView | StreamEvent, wanted: Mapping[str, str]) -> bool:
    return all(getattr(view, name) == value for name, value in wanted.items())


def stats(service: Service, request: HttpRequest) -> Response:
    """Return the counters of the service."""
    return answer(service.stats(), request)


def _number(wanted: Any, name: str, default: int, most: int) -> int:
    text = wanted.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > MAX_DIGITS or not 1 <= int(text) <= most:
        raise RefusedError(
            f"invalid {name} {text[:MAX_SHOWN]!r}: expected a number from 1 to {most}", "bad-parameter", "see /openapi.json"
        )
    return int(text)


def blocks(service: Service, request: HttpRequest) -> Response:
    """List the blocks of one worker at one moment, in pages and in no order."""
    wanted = request.wanted
    member = _member(service, wanted)
    key = member.registration.key
    limit = _number(wanted, "limit", DEFAULT_PAGE, MAX_PAGE)
    cursor = wanted.get("cursor", "")
    if CURSOR.fullmatch(cursor) is None:
        raise RefusedError(f"invalid cursor {cursor[:MAX_SHOWN]!r}", "bad-parameter", "send `next` of the previous page")
    if cursor:
        return answer(service.block_listings.next(key, cursor, limit), request)
    try:
        held: Iterable[Block] = service.fleet.index.blocks(key)
    except LookupError:  # no event has arrived yet
        held = ()
    return answer(service.block_listings.first(key, held, limit, lambda: member.trust_status), request)


def _member(service: Service, wanted: Any) -> Member:
    instance, rank = wanted.get("instance"), _rank(wanted.get("rank", "0"))
    if instance is None:
        raise RefusedError("parameter instance is missing", "bad-parameter", "send an instance of /v1/sources")
    tenant, group = wanted.get("tenant", DEFAULT_GROUP), wanted.get("group", DEFAULT_GROUP)
    for member in service.members().values():
        registration = member.registration
        if (registration.instance, registration.rank, registration.tenant, registration.group) == (
            instance,
            rank,
            tenant,
            group,
        ):
            return member
    raise NotFoundError(f"{instance} rank {rank} is not registered", "not-registered", "see /v1/sources")


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > MAX_DIGITS or int(text) >> 32:
        raise RefusedError(f"invalid rank {text[:MAX_SHOWN]!r}: expected a number from 0", "bad-parameter", "see /v1/sources")
    return int(text)


# --- events


def events(service: Service, request: HttpRequest) -> StreamingResponse:
    """Stream server-sent events: changes of trust, losses, and up to four times a second the batches of each source."""
    if len(service.fleet.event_bus) >= service.settings.limits.max_listeners:
        raise UnavailableError(
            f"{service.settings.limits.max_listeners} clients are connected to /v1/events already",
            "too-many-listeners",
            "raise limits.max_listeners, or poll /v1/sources",
        )
    return StreamingResponse(_events(service, request.wanted), b"text/event-stream")


async def _events(service: Service, wanted: Mapping[str, str]) -> AsyncIterator[bytes]:
    with service.fleet.event_bus.subscribe() as queue:
        yield b"retry: 2000\n\n"
        while not queue.closed:
            event = await queue.get(HEARTBEAT_SECONDS)
            if event is None:
                yield b": still here\n\n"
            elif isinstance(event, int):
                yield b'event: missed\ndata: {"events":%d}\n\n' % event
            elif _is_wanted(event, wanted):
                kind = event.__struct_config__.tag
                yield b"event: %b\ndata: %b\n\n" % (str(kind).encode(), msgspec.json.encode(event))
