"""The protocol core of the client: it builds requests, decodes responses, and decides which requests are sent again.

This module does no input or output: `kvevents.client.sync` and `kvevents.client.aio` send the calls, and report their outcomes.

A request is sent again if the service has refused it temporarily (429, 503). After a failed connection, a request is sent again
only if it had no effect, or if a repetition changes nothing. For example, a repeated reservation with an `id` replaces itself.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from urllib.parse import urlencode, urlsplit
from uuid import uuid4

import msgspec

from kvevents.backoff import Backoff
from kvevents.client import schemas
from kvevents.errors import ConfigError, ExternalError, reason_of
from kvevents.settings import check_finite

if TYPE_CHECKING:
    from kvevents.routing.http_client import HttpErrorKind

T = TypeVar("T")

_decoders: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}
_decoders_lock: Final = threading.Lock()
TOKEN_VARIABLE: Final = "KVEVENTS_TOKEN"  # noqa: S105 - the name of a variable, not a token
DEADLINE_SECONDS: Final = 5.0
"""Default time in seconds for a call with all its attempts."""
MAX_RETRIES: Final = 3
"""Default maximum number of attempts of a call after the first."""
MAX_RESPONSE_BYTES: Final = 64 << 20
"""Maximum size of a response in bytes. A response with 4,096 sources and all their gaps has 25 MiB."""
MAX_IDLE_SECONDS: Final = 20.0
"""Seconds for which an idle connection can be reused: less than the service's `limits.idle_seconds`."""
FINISH_SECONDS: Final = 2.0
"""Time limit in seconds of the request that ends a reservation after an error."""
INITIAL_RETRY_SECONDS: Final = 0.05
"""Maximum pause in seconds before the second attempt; the actual pause is random. The maximum doubles with each attempt."""
MAX_RETRY_SECONDS: Final = 1.0
READY_POLL_SECONDS: Final = 0.1
"""Pause in seconds between two requests of `wait_ready`."""
_QUOTE_LENGTH: Final = 80
"""Maximum number of characters that an error message quotes of an unknown response, or of an error's detail."""
OK: Final = 200
UNAVAILABLE: Final = 503
_BUSY_STATUSES: Final = frozenset({429, UNAVAILABLE})


class ServiceRequestError(ExternalError):
    """A request to a service failed, or its response was an error. The message consists of `sentence` and `hint`."""

    def __init__(self, sentence: str, reason: str, hint: str, status: int | None = None) -> None:
        super().__init__(f"{sentence}; {hint}" if hint else sentence)
        self.sentence = sentence
        self.reason = reason
        """A code for programs: the reason in the service's error, an `HttpErrorKind` of the HTTP client, or `not-kvevents`."""
        self.hint = hint
        self.status = status
        """HTTP status of the response; None if no response arrived."""


# --- calls


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and the type of its response."""

    method: str
    path: str
    kind: type[T]
    body: bytes | None = None
    accepted_status: int = OK
    """A further status, beside 200, whose responses have the type `kind`."""
    is_repeatable: bool = True
    """Whether two requests have the same effect as one request."""


def get(path: str, kind: type[T], parameters: Mapping[str, str] | None = None, *, accepted_status: int = OK) -> Call[T]:
    """Return a GET request to an endpoint of the service, as a call."""
    return Call("GET", f"{path}?{urlencode(parameters)}" if parameters else path, kind, accepted_status=accepted_status)


def post(
    path: str, request: msgspec.Struct, kind: type[T], *, accepted_status: int = OK, is_repeatable: bool = True
) -> Call[T]:
    """Return a call that sends `request` without fields that have default values, so that the service's own defaults apply."""
    given = ((field, getattr(request, field.name)) for field in _fields_of(type(request)))
    body = {field.encode_name: value for field, value in given if value is not msgspec.UNSET and value != _default_of(field)}
    return Call("POST", path, kind, msgspec.json.encode(body), accepted_status, is_repeatable)


@cache
def _fields_of(kind: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)  # Cached, because reading annotations takes long.


def _default_of(field: msgspec.structs.FieldInfo) -> object:
    factory: Any = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else factory()


def match(request: schemas.MatchRequest) -> Call[schemas.MatchAnswer]:
    """Return the call that asks how much of a prompt the workers hold."""
    return post("/v1/match", request, schemas.MatchAnswer)


def match_many(request: schemas.MatchManyRequest) -> Call[schemas.MatchManyAnswer]:
    """Return the call that asks how much of several prompts the workers hold."""
    return post("/v1/match_many", request, schemas.MatchManyAnswer)


def select(request: schemas.SelectRequest) -> Call[schemas.Selection]:
    """Return the call that asks which worker should take a prompt. Add an `id` to a reservation without one, for retries."""
    if request.reserve is True or (isinstance(request.reserve, schemas.Reserve) and request.reserve.id is None):
        request = with_reservation_name(request)
    return post("/v1/select", request, schemas.Selection, is_repeatable=isinstance(request.reserve, schemas.Reserve))


def with_reservation_name(request: schemas.SelectRequest) -> schemas.SelectRequest:
    """Return a copy of the request that reserves the worker under an id."""
    reserve = request.reserve if isinstance(request.reserve, schemas.Reserve) else schemas.Reserve()
    return msgspec.structs.replace(request, reserve=msgspec.structs.replace(reserve, id=reserve.id or str(uuid4())))


def reservation(name: str) -> Call[schemas.Reservation]:
    """Return the call that asks for a reservation."""
    return get(f"/v1/reservations/{name}", schemas.Reservation)


def update(name: str, changes: schemas.ReservationUpdate) -> Call[schemas.Reservation]:
    """Return the call that changes a reservation, and restarts its time to expiry."""
    return post(f"/v1/reservations/{name}", changes, schemas.Reservation)


def finish(name: str) -> Call[schemas.Reservation]:
    """Return the call that ends a reservation."""
    return Call("DELETE", f"/v1/reservations/{name}", schemas.Reservation)


def sources(filters: Mapping[str, str]) -> Call[schemas.SourcesAnswer]:
    """Return the call that asks for the sources of the fleet."""
    return get("/v1/sources", schemas.SourcesAnswer, filters)


def ready() -> Call[schemas.ReadyAnswer]:
    """Return the call that asks whether the service is ready for queries."""
    return get("/readyz", schemas.ReadyAnswer, accepted_status=UNAVAILABLE)


def register(request: schemas.RegisterRequest) -> Call[dict[str, Any]]:
    """Return the call that registers a rank of an engine. An equal registration, sent again, changes nothing."""
    return post("/register", request, dict[str, Any], accepted_status=201)


def unregister(request: schemas.UnregisterRequest) -> Call[dict[str, Any]]:
    """Return the call that unregisters an engine. The service answers a repeated call with an error."""
    return post("/unregister", request, dict[str, Any], is_repeatable=False)


def drain(request: schemas.DrainRequest) -> Call[schemas.DrainAnswer]:
    """Return the call that excludes an engine from selections, or includes it again. A repeated call changes nothing."""
    return post("/v1/drain", request, schemas.DrainAnswer)


def unusable_selection_error(selection: schemas.Selection) -> ServiceRequestError:
    """Return the error of a selection that reserved no worker."""
    sentence = f"no worker can be reached; the best of them is {selection.instance} rank {selection.rank}"
    return ServiceRequestError(sentence, "no-usable-worker", selection.why)


class ReservedWorkerBase(Generic[T]):
    """The common base class of `ReservedWorker` and `AsyncReservedWorker`.

    A report about the answer only improves the selections for other requests, so a failed report raises no error. If the
    request that ends the reservation fails, the reservation expires by itself.
    """

    def __init__(self, client: T, request: schemas.SelectRequest, deadline: float | None) -> None:
        self._client = client
        self._request = request
        self._deadline = deadline
        self.id = request.reserve.id if isinstance(request.reserve, schemas.Reserve) and request.reserve.id else ""
        """Name of the reservation."""
        self.selection: schemas.Selection
        """The selected worker; set when the context begins."""

    @property
    def url(self) -> str | None:
        """URL at which the worker takes requests; None if the service does not know the URL."""
        return self.selection.url


# --- the service and its errors


class Endpoint:
    """The service to which a client sends requests: URL, headers, TLS, and errors that name the URL."""

    def __init__(self, url: str, token: str | None, ca_file: Path | None, max_response_bytes: int) -> None:
        parts = urlsplit(url)
        try:
            self.port = parts.port
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"invalid url of a service {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        self.url = url
        self.base = url.rstrip("/")
        self.prefix = parts.path.rstrip("/")
        """Path in the service's URL; it precedes the path of each call."""
        self.host = parts.hostname
        self.max_bytes = max_response_bytes
        self.tls = _make_tls_context(ca_file) if parts.scheme == "https" else None
        self.headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        if token is not None:
            self.headers["Authorization"] = f"Bearer {token}"

    def decode(self, call: Call[T], status: int, content: bytes) -> T:
        """Return the value of a response. Raises `ServiceRequestError`."""
        if status not in {OK, call.accepted_status}:
            raise self.response_error(status, content)
        try:
            return decode_json(content, call.kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            if status != OK:
                raise self.response_error(status, content) from None
            path = call.path.partition("?")[0]
            sentence = f"the response of {self.url} to {path} is not that of a kvevents service: {error}"
            hint = "check the port, and that the service has the same release"
            raise ServiceRequestError(sentence, "not-kvevents", hint, status) from error

    def transport_error(self, kind: HttpErrorKind, detail: str, seconds: float) -> ServiceRequestError:
        """Return the error for a request that got no response."""
        sentence, hint = _TRANSPORT_ERRORS[kind]
        detail = detail if len(detail) <= _QUOTE_LENGTH else f"{detail[:_QUOTE_LENGTH]}..."  # Other protocols send any text.
        text = sentence.format(url=self.url, host=self.host, seconds=f"{seconds:g}", detail=detail, limit=self.max_bytes >> 20)
        return ServiceRequestError(text, kind, hint)

    def response_error(self, status: int, content: bytes) -> ServiceRequestError:
        """Return the error that a response describes."""
        try:
            problem = decode_json(content, schemas.Problem)
        except msgspec.MsgspecError:
            quotation = content[:_QUOTE_LENGTH].decode(errors="replace").strip()
            sentence = f"{self.url} answered with status {status}" + (f": {quotation}" if quotation else "")
            return ServiceRequestError(sentence, "not-kvevents", _STATUS_HINTS.get(status // 100, ""), status)
        hint = f"set {TOKEN_VARIABLE}, or name a file with --token-file" if status == 401 else problem.hint
        return ServiceRequestError(problem.detail, problem.reason, hint, status)


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode JSON as a value of `kind`; any thread may call this function. Raises `msgspec.MsgspecError` and `RecursionError`.

    Only one thread at a time creates a decoder, for the reason in `kvevents.settings.build_decoder_now`.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _decoders_lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    value: T = decoder.decode(data)
    return value


_STATUS_HINTS: Final = {
    3: "the client does not follow redirects, because their targets would receive the token: use the final address",
    4: "check that this is a kvevents service",
    5: "if this is a proxy, check that the service behind it runs",
}
_PORT_HINT: Final = "check the port, and whether the URL begins with https://"
_TRANSPORT_ERRORS: Final[dict[HttpErrorKind, tuple[str, str]]] = {
    "untrusted": ("the certificate of {url} is not trusted: {detail}", "name the authority that signed it with --tls-ca"),
    "no-tls": ("the TLS handshake with {url} failed: {detail}", "check whether the URL begins with http://"),
    "unknown-host": ("the host name {host} cannot be resolved: {detail}", "check the name"),
    "timeout": ("{url} does not answer within {seconds} s", "see the service's log, or raise --timeout"),
    "refused": ("nothing listens at {url}", "start a service with `kvevents serve`, or name another service with --service"),
    "closed": ("{url} closes the connection: {detail}", _PORT_HINT),
    "not-http": ("{url} does not answer in HTTP: {detail}", _PORT_HINT),
    "too-large": ("the response of {url} has more than {limit} MiB", "check that this is a kvevents service"),
    "unreachable": ("{url} cannot be reached: {detail}", "check the address, routes and firewalls"),
}


def _make_tls_context(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot use --tls-ca {ca_file}: {reason_of(error)}; expected a PEM file of certificates") from error


# --- attempts of one call


@dataclass(frozen=True, slots=True)
class RetryPause:
    """The delay after which a client must send the call again."""

    seconds: float


class Attempts(Generic[T]):
    """The attempts of one call. A client sends the call and reports the outcome. After a `RetryPause`, it sends it again."""

    def __init__(self, endpoint: Endpoint, call: Call[T], *, deadline: float, retries: int, now: Callable[[], float]) -> None:
        self._endpoint = endpoint
        self._call = call
        self._seconds = deadline
        self._end = now() + check_finite(deadline)
        self._retries_left = retries
        self._now = now
        self._backoff = Backoff(initial=INITIAL_RETRY_SECONDS, maximum=MAX_RETRY_SECONDS)

    @property
    def seconds(self) -> float:
        """Time limit in seconds of the next attempt."""
        return max(self._end - self._now(), 0.001)

    def on_answer(self, status: int, content: bytes) -> T | RetryPause:
        """Return the value of a response, or the pause before the next attempt. Raises `ServiceRequestError`."""
        if status in _BUSY_STATUSES and status != self._call.accepted_status:
            error = self._endpoint.response_error(status, content)
            # A proxy that refuses a request might have forwarded it. If the service refuses, the request had no effect.
            if self._call.is_repeatable or error.reason != "not-kvevents":
                return self._next_pause(error)
        return self._endpoint.decode(self._call, status, content)

    def on_error(self, kind: HttpErrorKind, detail: str) -> RetryPause:
        """Return the pause before the next attempt. Raises `ServiceRequestError`."""
        error = self._endpoint.transport_error(kind, detail, self._seconds)
        if kind == "refused" or (kind in {"closed", "unreachable"} and self._call.is_repeatable):
            return self._next_pause(error)
        raise error

    def _next_pause(self, error: ServiceRequestError) -> RetryPause:
        seconds = self._backoff.next_delay()
        if not self._retries_left or self._now() + seconds >= self._end:
            raise error
        self._retries_left -= 1
        return RetryPause(seconds)


class ReadyWait:
    """A wait until the service is ready."""

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self._end = now() + check_finite(seconds)
        self._now = now

    @property
    def seconds_left(self) -> float:
        """Time limit in seconds of the next request."""
        return min(max(self._end - self._now(), 0.001), DEADLINE_SECONDS)

    def check(self, answer: schemas.ReadyAnswer) -> schemas.ReadyAnswer:
        """Return the answer if the service is ready, else raise `ServiceRequestError`."""
        if not answer.ready:
            raise ServiceRequestError(f"the service is not ready: {answer.why}", "not-ready", "", UNAVAILABLE)
        return answer

    def check_error(self, error: ServiceRequestError) -> None:
        """Raise the error unless a further attempt might succeed. After the deadline, raise every error."""
        if self._now() >= self._end or (error.status is not None and error.status not in _BUSY_STATUSES):
            raise error


def request_may_have_run(error: BaseException) -> bool:
    """Whether a request that ended with this error might have had an effect."""
    return not isinstance(error, ServiceRequestError) or error.reason in {"timeout", "closed", "not-http", "too-large"}
