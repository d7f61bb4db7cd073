"""Reservations of `/v1`, and the sample of selections. The data plane stores both; this module checks forwarded requests."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from kvevents.client.schemas import MAX_RESERVATION_ID_LENGTH, RESERVATION_ID_PATTERN, ReservationUpdate
from kvevents.service.errors import NotFoundError, UnavailableError
from kvevents.service.http.messages import HttpRequest, Response, answer_json
from kvevents.service.http.pages import MAX_LISTED_ITEMS, read_number
from kvevents.service.service import Service

_NO_CHANGES: Final = ReservationUpdate()


def show(service: Service, request: HttpRequest) -> Response:
    """Return a reservation."""
    return _answer(service, request, _NO_CHANGES)


def update(service: Service, request: HttpRequest) -> Response:
    """Change a reservation, and restart its time to expiry."""
    return _answer(service, request, request.read())


def finish(service: Service, request: HttpRequest) -> Response:
    """End a reservation, because its request was answered, failed or was cancelled. Return the ended reservation."""
    return _answer(service, request, _NO_CHANGES)


def _answer(service: Service, request: HttpRequest, changes: ReservationUpdate) -> Response:
    method = "GET" if request.method == "HEAD" else request.method
    return answer_json(ask(service, method, request.item, changes), request)


def ask(service: Service, method: str, name: str, changes: ReservationUpdate = _NO_CHANGES) -> bytes:
    """Read (GET), change (POST) or end (DELETE) a reservation; return its JSON. Raises `NotFoundError` if it is not open."""
    if len(name) > MAX_RESERVATION_ID_LENGTH or not re.fullmatch(RESERVATION_ID_PATTERN, name):
        sentence = f"no reservation {name[:MAX_RESERVATION_ID_LENGTH]!r} is open"
        raise NotFoundError(sentence, "no-such-reservation", "use the `id` of the reservation")
    response = service.data_plane.answer(method, f"/v1/reservations/{name}", msgspec.structs.asdict(changes), ())
    if response is None:
        raise UnavailableError("the service is ending", "ending", "send the request to another replica")
    return response.body


def list_open(service: Service, request: HttpRequest) -> Response:
    """List open reservations; those that expire first come first."""
    limit = read_number(request.arguments, "limit", 1_000, MAX_LISTED_ITEMS)
    return answer_json(service.data_plane.reservations(limit), request)


def explain(service: Service, request: HttpRequest) -> Response:
    """Return a sample of the newest selections, each with its candidates and the parts of their scores."""
    return answer_json(service.data_plane.decisions(), request)
