"""nats-py's client, extended for a process that runs for months.

Differences from nats-py 2.16 (`nats/aio/client.py`):

- If TLS is required, the client sends nothing to a server that does not offer it. nats-py follows the server's INFO alone, so
  an attacker in between could read the login.
- The client reconnects whatever reason a server gives for ending a connection, such as an expired login. nats-py would close.
- The client aborts a connection that it has given up. nats-py waits until all written data is read, which a stopped server
  never does, and meanwhile connects to no other server.
- A task that waits to publish can be cancelled; nats-py swallows the cancellation. The same holds for a task whose answer
  arrives at the moment of its cancellation, which `asyncio.wait_for` of Python 3.11 swallows.
- A request that the server forbids fails at once. nats-py waits for the timeout.
- A server that answers with another protocol than NATS counts as one failed attempt. nats-py stops trying, for example, when
  its first line is too long.
- Servers that have left the cluster are removed from the pool.

Most of this overrides private methods, so `pyproject.toml` allows no other minor release of nats-py. For a newer one, compare
these methods with its `client.py`, and run `test_nats_client.py` and `test_plane_connection.py` of `tests/integration`.

Exceptions of nats-py become `PlaneError`, with a word for each kind of fault and a hint. Every other module of the plane calls
nats-py within `map_errors`, so no exception of nats-py leaves the package.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, Literal, TypeAlias

from nats import errors
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.protocol.parser import PERMISSIONS_ERR

from kvevents.errors import PlaneError

Fault: TypeAlias = Literal[
    "away", "backlog", "closed", "conflict", "denied", "exists", "full", "large", "missing", "old", "refused", "timeout", "tls"
]
"""Values of `PlaneError.fault`, besides `other`."""

HINTS: Final[dict[Fault, str]] = {
    "away": "not connected, or JetStream or the stream has no leader: check that enough servers run",
    "backlog": "the send buffer is full: wait until the servers read it",
    "closed": "the connection is closed: open another one",
    "conflict": "another client has written in between: read again",
    "denied": "grant this user the permission, or log in as another user",
    "exists": "it exists with other settings: use those settings or another name",
    "full": "the stream, the account or the disk is full: raise its limit or free space",
    "large": "the message is larger than the server or the stream allows: raise max_payload",
    "missing": "it does not exist, or was deleted",
    "old": "update it",
    "refused": "the server rejected the request",
    "timeout": "no answer in time: check the load and the disks of the servers, and that a majority of them runs",
    "tls": "check tls_ca, tls_certificate, tls_key and tls_hostname, and that the server uses TLS",
}

_BY_CODE: Final[dict[int, Fault]] = {
    10002: "full",  # JSAccountResourcesExceededErr
    10004: "away",  # JSClusterIncompleteErr
    10005: "full",  # JSClusterNoPeersErrF: no server has enough room, or there are too few servers
    10008: "away",  # JSClusterNotAvailErr
    10009: "away",  # JSClusterNotLeaderErr
    10013: "exists",  # JSConsumerNameExistErr
    10023: "full",  # JSInsufficientResourcesErr
    10026: "full",  # JSMaximumConsumersLimitErr
    10027: "full",  # JSMaximumStreamsLimitErr
    10028: "full",  # JSMemoryResourcesExceededErr
    10035: "denied",  # JSNoAccountErr
    10039: "denied",  # JSNotEnabledForAccountErr
    10047: "full",  # JSStorageResourcesExceededErr
    10054: "large",  # JSStreamMessageExceedsMaximumErr
    10058: "exists",  # JSStreamNameExistErr
    10063: "conflict",  # JSStreamSequenceNotMatchErr
    10070: "conflict",  # JSStreamWrongLastMsgIDErrF
    10071: "conflict",  # JSStreamWrongLastSequenceErrF
    10076: "away",  # JSNotEnabledErr
    10077: "full",  # JSStreamStoreFailedF: `maximum bytes exceeded`, `maximum messages exceeded`, and errors of the disk
    10097: "large",  # JSStreamHeaderExceedsMaximumErr
    10118: "away",  # JSStreamOfflineErr
    10119: "away",  # JSConsumerOfflineErr
    10122: "full",  # JSStreamMaxStreamBytesExceeded
    10158: "conflict",  # JSStreamDuplicateMessageConflict
    10164: "conflict",  # JSStreamWrongLastSequenceConstantErr: like 10071, for a replicated stream
}
"""Faults by the error codes of nats-server's `server/errors.json`, which are the same in all releases."""

_DENIED: Final = re.compile(
    r"^nats: .*(?:authorization|authentication|permissions) (?:violation|expired|timeout|revoked)", re.IGNORECASE
)
"""Errors that a server reports as text only, and for which nats-py has no exception type."""


@contextmanager
def map_errors(activity: str) -> Iterator[None]:
    """Raise exceptions of NATS and of the sockets below as `PlaneError`; `activity` begins its message, before a colon."""
    try:
        yield
    except PlaneError:
        raise
    except Exception as error:
        fault = classify_error(error)
        if fault is None:
            raise
        raise PlaneError(f"{activity}: {error_text(error)}; {HINTS[fault]}", fault=fault) from error


def classify_error(error: Exception) -> Fault | None:
    """Return the kind of fault of an exception of nats-py or of the sockets below; None for any other exception."""
    from nats import errors  # noqa: PLC0415 - an extra

    code = getattr(error, "err_code", None)
    if isinstance(code, int) and code in _BY_CODE:
        return _BY_CODE[code]
    if type(error) is errors.Error and _DENIED.search(str(error)):
        return "denied"
    return next((fault for kind, fault in _by_kind() if isinstance(error, kind)), None)


def error_text(error: Exception) -> str:
    """Return the message of an exception without the frame that nats-py puts around it."""
    from nats import errors  # noqa: PLC0415 - an extra

    if isinstance(error, errors.SlowConsumerError):  # its own text ends in a memory address
        return f"messages of {error.subject} arrived faster than they were processed, and were dropped"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, OSError) and not isinstance(error, errors.Error):
        return error.strerror or str(error) or "no answer"
    description: str | None = getattr(error, "description", None)
    return description or str(error).removeprefix("nats: ")


@cache
def _by_kind() -> tuple[tuple[type[Exception], Fault], ...]:
    """Return faults by exception type. The first match counts, because some types are subclasses of others."""
    from nats import errors  # noqa: PLC0415 - an extra
    from nats.js import errors as js  # noqa: PLC0415 - an extra

    return (
        (errors.AuthorizationError, "denied"),
        (js.KeyWrongLastSequenceError, "conflict"),
        (js.ObjectAlreadyExists, "exists"),
        (js.NotFoundError, "missing"),
        (js.NoKeysError, "missing"),
        (js.ServiceUnavailableError, "away"),
        (js.NoStreamResponseError, "away"),
        (js.TooManyStalledMsgsError, "backlog"),
        (errors.NoRespondersError, "away"),
        (errors.ConnectionReconnectingError, "away"),
        (errors.ConnectionClosedError, "closed"),
        (errors.ConnectionDrainingError, "closed"),
        (errors.OutboundBufferLimitError, "backlog"),
        (errors.MaxPayloadError, "large"),
        (errors.SecureConnWantedError, "tls"),
        (ssl.SSLError, "tls"),
        (errors.StaleConnectionError, "away"),
        (TimeoutError, "timeout"),  # also the base of nats-py's timeouts
        (errors.Error, "refused"),
        (OSError, "away"),
    )


_FORBIDDEN_SUBJECT: Final = re.compile(r'publish to "(.*?)"')
_WEB: Final = ("ws", "wss")


class NotPermittedError(errors.AuthorizationError):
    """The server does not permit this user to publish to a subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self.subject = subject

    def __str__(self) -> str:
        return f"this user must not publish to {self.subject!r}"


class PlaneClient(Client):
    """A client that reconnects until it is closed; `kvevents.plane.connection.connect` creates it."""

    def __init__(self, *, needs_tls: bool = False) -> None:
        super().__init__()
        self._needs_tls = needs_tls
        self._requests: dict[asyncio.Timeout, str] = {}

    def add_servers(self, addresses: Sequence[str]) -> None:
        """Add servers to use when the current one is unreachable."""
        known = {server.uri.netloc for server in self._server_pool}
        found = [self._parse_server_uri(address) for address in addresses]
        self._server_pool += [Srv(uri) for uri in found if uri.netloc not in known]

    def abort(self) -> None:
        """Abort the connection and drop unsent data, so that `close` does not wait."""
        self._abort_transport()
        self._transport = None
        self._pending.clear()
        self._pending_data_size = 0

    def _abort_transport(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109 - nats-py's signature
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Send a request as nats-py does, but raise `NotPermittedError` at once if the server forbids it."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._requests[limit] = subject
                before = _cancellations()
                try:
                    answer = await super().request(subject, payload, timeout, old_style, headers)
                finally:
                    del self._requests[limit]
                if _cancellations() > before:
                    raise asyncio.CancelledError
                return answer
        except TimeoutError as error:
            if limit.expired():
                raise NotPermittedError(subject) from error
            raise

    # --- overridden methods of nats-py
    # ------------------------------------------------------------------------------------------------

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        upgrades = self._current_server is not None and self._current_server.uri.scheme not in _WEB
        if initial_connection and upgrades and self._needs_tls and not info.get("tls_required"):
            raise errors.SecureConnWantedError
        if listed := info.get("connect_urls"):
            self._server_pool = [each for each in self._server_pool if not each.discovered or each.uri.netloc in listed]
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        if PERMISSIONS_ERR in err_msg:
            self._fail_requests(err_msg)
            await super()._process_err(err_msg)
            return
        error = errors.Error(f"nats: the server reported {err_msg}")
        await self._error_cb(error)
        await self._process_op_err(error)

    def _fail_requests(self, message: str) -> None:
        """Fail the requests that the server has forbidden; its message has the subject in lower case."""
        found = _FORBIDDEN_SUBJECT.search(message)
        for limit, subject in list(self._requests.items()):
            if found is not None and subject.lower() == found[1]:
                limit.reschedule(0)

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        before = _cancellations()
        found = await super()._flush_pending(force_flush)
        if _cancellations() > before:
            raise asyncio.CancelledError
        return found

    async def _connect_to_server(self, s: Srv) -> None:
        self._abort_transport()
        await super()._connect_to_server(s)

    async def _attempt_reconnect(self) -> None:
        while True:
            self._abort_transport()
            try:
                return await super()._attempt_reconnect()
            except Exception as error:  # noqa: BLE001 - an unexpected error would end nats-py's attempts
                await self._error_cb(error)


def _cancellations() -> int:
    """Return the number of cancellation requests of the current task."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
