"""The blocking client of a service."""

from __future__ import annotations

import io
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead, RemoteDisconnected
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from kvevents.client import protocol, schemas
from kvevents.client.protocol import OK, Attempts, Call, Endpoint, RetryPause, ServiceRequestError
from kvevents.closeable import Closeable
from kvevents.errors import reason_of

if TYPE_CHECKING:
    from kvevents.routing.http_client import HttpErrorKind

T = TypeVar("T")

_MAX_IDLE_CONNECTIONS: Final = 16
"""Maximum number of idle connections that stay open for further calls."""


class Client(Closeable):
    """A client of one service, for any number of threads; also a context manager, which closes its connections.

    `deadline` is the time in seconds for a call with all its attempts; the argument `deadline` of a method replaces it.
    `retries` is the maximum number of attempts after the first. Every method raises `ServiceRequestError`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        deadline: float = protocol.DEADLINE_SECONDS,
        retries: int = protocol.MAX_RETRIES,
        max_response_bytes: int = protocol.MAX_RESPONSE_BYTES,
    ) -> None:
        self.url = url
        self._idle: Final[deque[tuple[float, HTTPConnection]]] = deque()
        self._endpoint = Endpoint(url, token, ca_file, max_response_bytes)
        self._deadline = deadline
        self._retries = retries

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are not in use. Later calls open new connections."""
        while self._idle:
            self._idle.pop()[1].close()

    # --- prompts

    def match(self, request: schemas.MatchRequest, *, deadline: float | None = None) -> schemas.MatchAnswer:
        """Return how many tokens of a prompt each worker holds."""
        return self.send(protocol.match(request), deadline=deadline)

    def match_many(self, request: schemas.MatchManyRequest, *, deadline: float | None = None) -> schemas.MatchManyAnswer:
        """Return, for several prompts, how many tokens of each prompt each worker holds."""
        return self.send(protocol.match_many(request), deadline=deadline)

    def select(self, request: schemas.SelectRequest, *, deadline: float | None = None) -> schemas.Selection:
        """Return the worker that should take a prompt."""
        return self.send(protocol.select(request), deadline=deadline)

    def reserve(self, request: schemas.SelectRequest, *, deadline: float | None = None) -> ReservedWorker:
        """Return a context manager that selects a worker. Within the context, the prompt counts as load of the worker."""
        return ReservedWorker(self, protocol.with_reservation_name(request), deadline)

    def reservation(self, name: str, *, deadline: float | None = None) -> schemas.Reservation:
        """Return an open reservation."""
        return self.send(protocol.reservation(name), deadline=deadline)

    # --- the fleet

    def sources(self, *, deadline: float | None = None, **filters: str) -> schemas.SourcesAnswer:
        """Return the sources that have the given `instance`, `model`, `tenant` and `group`; without filters, all sources."""
        return self.send(protocol.sources(filters), deadline=deadline)

    def register(self, request: schemas.RegisterRequest, *, deadline: float | None = None) -> Mapping[str, Any]:
        """Register a rank of an engine, and return the service's answer."""
        return self.send(protocol.register(request), deadline=deadline)

    def unregister(self, request: schemas.UnregisterRequest, *, deadline: float | None = None) -> Mapping[str, Any]:
        """Unregister an engine, or one of its ranks, and return the service's answer."""
        return self.send(protocol.unregister(request), deadline=deadline)

    def drain(self, request: schemas.DrainRequest, *, deadline: float | None = None) -> schemas.DrainAnswer:
        """Exclude an engine or one rank from selections, or include it again. In both cases the service follows the engine."""
        return self.send(protocol.drain(request), deadline=deadline)

    def ready(self, *, deadline: float | None = None) -> schemas.ReadyAnswer:
        """Return whether the service is ready for queries; if it is not, the answer says why."""
        return self.send(protocol.ready(), deadline=deadline)

    def wait_ready(self, seconds: float = 60.0) -> schemas.ReadyAnswer:
        """Wait until the service is ready for queries. Raises `ServiceRequestError` after `seconds`."""
        wait = protocol.ReadyWait(seconds, time.monotonic)
        while True:
            try:
                return wait.check(self.ready(deadline=wait.seconds_left))
            except ServiceRequestError as error:
                wait.check_error(error)
            time.sleep(protocol.READY_POLL_SECONDS)

    # --- transport

    def get(self, path: str, kind: type[T], parameters: Mapping[str, str] | None = None, *, accepted_status: int = OK) -> T:
        """Send a GET request, and return the response as `kind`. The status must be 200 or `accepted_status`."""
        return self.send(protocol.get(path, kind, parameters, accepted_status=accepted_status))

    def send(self, call: Call[T], *, deadline: float | None = None) -> T:
        """Send a call, with further attempts if necessary, and return its response."""
        seconds = self._deadline if deadline is None else deadline
        attempts = Attempts(self._endpoint, call, deadline=seconds, retries=self._retries, now=time.monotonic)
        while True:
            try:
                outcome = attempts.on_answer(*self.exchange(call, attempts.seconds))
            except (OSError, HTTPException, UnicodeError) as error:
                kind: HttpErrorKind = next(kind for error_type, kind in _ERROR_KINDS if isinstance(error, error_type))
                outcome = attempts.on_error(kind, reason_of(error))
            if not isinstance(outcome, RetryPause):
                return outcome
            time.sleep(outcome.seconds)

    def exchange(self, call: Call[Any], seconds: float) -> tuple[int, bytes]:
        """Send a call in one attempt. Return the status and the body. Raises `OSError` and `HTTPException`."""
        end = time.monotonic() + seconds
        connection = self._take_idle() or self._connect(seconds)
        connected_socket: Any = connection.sock
        try:
            connection.sock = cast("socket.socket", _TimedSocket(connected_socket, end))
            connection.request(call.method, self._endpoint.prefix + call.path, call.body, self._endpoint.headers)
            response = connection.getresponse()
            content = response.read(self._endpoint.max_bytes + 1)
            if len(content) > self._endpoint.max_bytes:
                raise _TooLargeError("the response is too large")  # noqa: TRY301 - the handler closes the socket
            if response.length:
                raise IncompleteRead(content, response.length)  # noqa: TRY301 - the handler closes the socket
        except BaseException:
            connected_socket.close()
            raise
        if response.will_close or len(self._idle) >= _MAX_IDLE_CONNECTIONS:
            connected_socket.close()
        else:
            connection.sock = connected_socket
            self._idle.append((time.monotonic(), connection))
        return response.status, content

    def _take_idle(self) -> HTTPConnection | None:
        """Return an idle connection that the service has not closed; None if no such connection exists."""
        while self._idle:
            try:
                idle_since, connection = self._idle.pop()
            except IndexError:  # Another thread has taken the only idle connection.
                return None
            is_readable = connection.sock.fileno() < 0 or select.select([connection.sock], [], [], 0)[0]
            if time.monotonic() - idle_since < protocol.MAX_IDLE_SECONDS and not is_readable:
                return connection
            connection.close()
        return None

    def _connect(self, seconds: float) -> HTTPConnection:
        endpoint = self._endpoint
        if endpoint.tls is None:
            connection = HTTPConnection(endpoint.host, endpoint.port, timeout=seconds)
        else:
            connection = HTTPSConnection(endpoint.host, endpoint.port, timeout=seconds, context=endpoint.tls)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection


class ReservedWorker(protocol.ReservedWorkerBase[Client]):
    """A reserved worker. Until this context ends, even by an error, the request counts as load of the worker."""

    def __enter__(self) -> Self:
        try:
            self.selection = self._client.select(self._request, deadline=self._deadline)
        except BaseException as error:
            if protocol.request_may_have_run(error):
                self._send(protocol.finish(self.id), protocol.FINISH_SECONDS)
            raise
        if self.selection.reservation is None:
            raise protocol.unusable_selection_error(self.selection)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._send(protocol.finish(self.id))

    def first_token(self) -> schemas.Reservation | None:
        """Report the first token of the answer, and return the reservation; None if the report failed."""
        return self._send(protocol.update(self.id, schemas.ReservationUpdate(first_token=True)))

    def output(self, tokens: int) -> schemas.Reservation | None:
        """Report the number of generated tokens, and return the reservation; None if the report failed."""
        return self._send(protocol.update(self.id, schemas.ReservationUpdate(output_tokens=tokens)))

    def _send(self, call: Call[T], deadline: float | None = None) -> T | None:
        try:
            return self._client.send(call, deadline=deadline)
        except ServiceRequestError:
            return None


# --- the transport


class _TooLargeError(HTTPException):
    """Raised for a response above the size limit."""


class _TimedSocket(io.RawIOBase):
    """A connected socket for `HTTPConnection`. The socket's operations time out at the time `end`.

    The object is also the file that `makefile` returns. `close` leaves the socket open for the reader; `Client` closes it.
    """

    def __init__(self, connected_socket: socket.socket, end: float) -> None:
        self._socket = connected_socket
        self._end = end

    def sendall(self, data: Any) -> None:
        self._limit_next()
        self._socket.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._limit_next()
        return self._socket.recv_into(buffer)

    def close(self) -> None:
        pass

    def _limit_next(self) -> None:
        """Set the timeout of the next operation. Raises `TimeoutError` if no time is left."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(seconds)


# The first type that fits an error counts: some types are subclasses of types below them.
_ERROR_KINDS: Final[tuple[tuple[type[BaseException], HttpErrorKind], ...]] = (
    (TimeoutError, "timeout"),
    (ssl.SSLCertVerificationError, "untrusted"),
    (ssl.SSLError, "no-tls"),
    (socket.gaierror, "unknown-host"),
    (UnicodeError, "unknown-host"),
    (ConnectionRefusedError, "refused"),
    (RemoteDisconnected, "closed"),
    (ConnectionError, "closed"),
    (_TooLargeError, "too-large"),
    (HTTPException, "not-http"),
    (BaseException, "unreachable"),
)
