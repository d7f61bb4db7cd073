"""The `/v1` API of kvevents. `kvevents.client.schemas` has the types of its requests and responses."""

from __future__ import annotations

import math
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from typing import Any, Final

import msgspec

from kvevents.client import schemas
from kvevents.service.errors import NotFoundError, RefusedError, TooMuchError, UnavailableError
from kvevents.service.fleet.event_bus import Subscription
from kvevents.service.fleet.registration import source_name
from kvevents.service.http.messages import RAW_TYPE, HttpRequest, Response, StreamingResponse, answer
from kvevents.service.http.pages import MAX_LISTED_ITEMS, add_entity_tag, cut_page, matches, read_cursor, read_number
from kvevents.service.http.queries import answer_query, check_tokens
from kvevents.service.registrations import InstanceQuery
from kvevents.service.service import Service

CURSOR_PATTERN: Final = re.compile(r"^([0-9a-f]{16}\.[0-9]{1,12})?$")
"""Pattern of the cursor of `/v1/blocks`; empty for the first page."""
HEARTBEAT_SECONDS: Final = 15.0
"""Seconds without an event after which `/v1/events` sends a comment. The comment keeps proxies from closing the connection and
reveals clients that have left. The comment's id becomes the client's last id, even if the filters exclude all events."""


# --- prompts


def match(service: Service, request: HttpRequest) -> Response:
    """Return how many tokens of a prompt each worker holds: the length of the longest prefix.

    The body is a `MatchRequest` as JSON or msgpack, or raw token ids (unsigned 32-bit little-endian numbers with content type
    `application/octet-stream`). With raw token ids, all other fields are in the query string.
    """
    query, tokens = _raw_prompt(request) if request.headers.kind == RAW_TYPE else request.read_tokens("tokens")
    return answer_query(service, request, query, tokens)


def _raw_prompt(request: HttpRequest) -> tuple[schemas.ScopedRequest, Any]:
    if len(request.body) % 4:
        sentence = f"invalid raw body of {len(request.body)} bytes: expected 4 bytes for each token"
        raise RefusedError(sentence, "malformed-body", "send 32-bit little-endian numbers")
    try:
        query = msgspec.convert(dict(request.arguments), schemas.ScopedRequest, strict=False)
    except msgspec.ValidationError as error:
        raise RefusedError(f"invalid query string: {error}", "bad-parameter", "see /openapi.json") from error
    if not query.model:
        raise RefusedError("parameter model is missing", "missing-model", "send the model in the query string")
    return query, memoryview(request.body).cast("I")


def match_many(service: Service, request: HttpRequest) -> Response:
    """Return, for several prompts of one scope, how many tokens of each prompt each worker holds."""
    query: schemas.MatchManyRequest = request.read()
    check_tokens(service, sum(map(len, query.prompts)))
    return answer_query(service, request, query)


def select(service: Service, request: HttpRequest) -> Response:
    """Select the worker for a prompt by the prefix that each worker holds, and by each worker's trust and load."""
    query, tokens = request.read_tokens("tokens")
    candidates = query.candidates or ()
    if len(candidates) > (limit := service.settings.limits.max_candidates):
        sentence = f"the request has {len(candidates)} candidates"
        raise TooMuchError(sentence, "too-many-candidates", f"limits.max_candidates is {limit}")
    loads = [candidate.load for candidate in candidates if candidate.load is not None]
    seconds = query.reserve.seconds if isinstance(query.reserve, schemas.Reserve) else None
    weights = [*query.tiers.values(), *query.trust.values(), query.wait_weight, query.load_weight]
    numbers = [*loads, *weights, query.expect_seconds, seconds or 0.0]
    if not all(map(math.isfinite, numbers)):
        raise RefusedError("a load, a weight or a number of seconds is not finite", "bad-number", "send finite numbers")
    return answer_query(service, request, query, tokens)


# --- the fleet


def sources(service: Service, request: HttpRequest) -> Response:
    """List every source with its trust, lag, gaps and counters."""
    members = [item for item in service.members().items() if matches(item[1].registration, request.arguments)]
    page, cursor = cut_page(members, request.arguments)
    listing = schemas.SourcesAnswer(sources=[member.view() for member in page], faults=service.faults(), next=cursor)
    return add_entity_tag(answer(listing, request), request)


async def drain(service: Service, request: HttpRequest) -> Response:
    """Exclude an engine, or one of its ranks, from selections, or include it again; its streams are followed in both cases."""
    body: schemas.DrainRequest = request.read()
    query = InstanceQuery(str(body.instance), body.rank, body.model, body.tenant, body.group)
    ranks = await service.registrations.drain(query, request.client, is_draining=body.draining)
    numbers = [registration.rank for registration in ranks]
    return answer(schemas.DrainAnswer(instance=query.instance, ranks=numbers, draining=body.draining), request)


def stats(service: Service, request: HttpRequest) -> Response:
    """Return the counters of the service."""
    return answer(service.stats(), request)


def blocks(service: Service, request: HttpRequest) -> Response:
    """List the blocks that a worker holds at a single moment, in pages. The blocks are not sorted."""
    arguments = request.arguments
    if (instance := arguments.get("instance")) is None:
        raise RefusedError("parameter instance is missing", "bad-parameter", "send an instance of /v1/sources")
    rank = read_number(arguments, "rank", 0, (1 << 32) - 1, minimum=0)
    tenant, group = (arguments.get(name, schemas.DEFAULT_GROUP) for name in ("tenant", "group"))
    key = source_name(tenant, group, instance), rank
    if (member := service.members().get(key)) is None:
        raise NotFoundError(f"{instance} rank {rank} is not registered", "not-registered", "see /v1/sources")
    limit = read_number(arguments, "limit", 1_000, MAX_LISTED_ITEMS)
    if cursor := read_cursor(arguments, CURSOR_PATTERN):
        return answer(service.block_listings.next_page(key, cursor, limit), request)
    return answer(service.block_listings.first_page(key, service.blocks(key), limit, lambda: member.trust_status), request)


# --- events


def events(service: Service, request: HttpRequest) -> StreamingResponse:
    """Stream server-sent events: changes of trust, losses, and up to four times a second the number of each source's batches.

    Events have ids. After `Last-Event-ID`, the stream continues with the next event, or reports the number of missed events.
    """
    if len(service.fleet.event_bus) >= (limit := service.settings.limits.max_listeners):
        sentence = f"{limit} clients are already connected to /v1/events"
        raise UnavailableError(sentence, "too-many-listeners", "raise limits.max_listeners, or poll /v1/sources")
    context = ExitStack()
    # Subscribe before the generator starts, so that `len(event_bus)` counts this client at once.
    subscription = context.enter_context(service.fleet.event_bus.subscribe(request.headers.last_event_id))
    return StreamingResponse(_encode_events(subscription, request.arguments), b"text/event-stream", release=context.close)


async def _encode_events(subscription: Subscription, filters: Mapping[str, str]) -> AsyncIterator[bytes]:
    yield b"retry: 2000\nid: %b\n\n" % subscription.last_id.encode()
    sent_at = time.monotonic()
    while not subscription.bus.is_closed:
        event = await subscription.get(max(0.0, sent_at + HEARTBEAT_SECONDS - time.monotonic()))
        if isinstance(event, int):
            lines = b'event: missed\ndata: {"events":%d}' % event
        elif event is not None and matches(event, filters):
            lines = b"event: %b\ndata: %b" % (str(event.__struct_config__.tag).encode(), msgspec.json.encode(event))
        elif time.monotonic() - sent_at >= HEARTBEAT_SECONDS:
            lines = b": still here"
        else:
            continue  # No event arrived, or the filters exclude the event.
        yield b"%b\nid: %b\n\n" % (lines, subscription.last_id.encode())
        sent_at = time.monotonic()
