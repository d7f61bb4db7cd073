"""Maps the exceptions of nats-py to `PlaneError`, with the kind of fault (`PlaneError.fault`) and a hint in the message.

Every other module of the plane calls nats-py within `map_errors`. So no exception of nats-py leaves the package, and a
cancelled task always ends. Without `map_errors` a cancellation could be lost: nats-py calls `asyncio.wait_for`, which in Python
3.11 ignores a cancellation that arrives together with the answer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

from nats import errors
from nats.aio.client import Client
from nats.js import errors as js

from kvevents.errors import PlaneError

log = logging.getLogger(__name__)

PlaneFault: TypeAlias = Literal[
    "away", "backlog", "closed", "conflict", "denied", "exists", "full", "large", "missing", "old", "refused", "timeout", "tls"
]
"""Values of `PlaneError.fault`, except `other`."""

HINTS: Final[dict[PlaneFault, str]] = {
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

_FAULTS_BY_CODE: Final[dict[int, PlaneFault]] = {
    10002: "full",  # JSAccountResourcesExceededErr
    10005: "away",  # JSClusterNoPeersErrF: too few servers, or one has just started (or no space: see `_is_without_space`)
    10009: "away",  # JSClusterNotLeaderErr
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
    10077: "full",  # JSStreamStoreFailedF: `maximum bytes exceeded`, `maximum messages exceeded`, and errors of the disk
    10097: "large",  # JSStreamHeaderExceedsMaximumErr
    10118: "away",  # JSStreamOfflineErr
    10119: "away",  # JSConsumerOfflineErr
    10122: "full",  # JSStreamMaxStreamBytesExceeded
    10158: "conflict",  # JSStreamDuplicateMessageConflict
    10164: "conflict",  # JSStreamWrongLastSequenceConstantErr: like 10071, for a replicated stream
}
"""Maps error codes to faults. The codes are in nats-server's `server/errors.json` and are the same in all releases."""

_FAULTS_BY_TYPE: Final[tuple[tuple[type[Exception], PlaneFault], ...]] = (
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
    (TimeoutError, "timeout"),  # also the base class of nats-py's timeouts
    (errors.Error, "refused"),
    (OSError, "away"),
)
"""The fault of each exception type. The first match counts, because some types are subclasses of later types."""
_NO_ROOM_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of the OS for a file that cannot grow, such as the file of a snapshot."""
_DENIED_PATTERN: Final = re.compile(
    r"^nats: .*(?:authorization|authentication|permissions) (?:violation|expired|timeout|revoked)", re.IGNORECASE
)
"""Pattern of errors without an exception type in nats-py; a server reports such errors only as text."""


@contextmanager
def map_errors(activity: str) -> Iterator[None]:
    """Convert exceptions of NATS and its sockets to `PlaneError`, whose message begins with `activity` and a colon."""
    try:
        with keep_cancellation():
            yield
    except PlaneError:
        raise
    except Exception as error:
        fault = classify_error(error)
        if fault is None:
            raise
        raise PlaneError(f"{activity}: {error_text(error)}; {HINTS[fault]}", fault=fault) from error


@contextmanager
def keep_cancellation() -> Iterator[None]:
    """Raise `asyncio.CancelledError` if the task was cancelled in this context, even if called code caught this exception."""
    before = _count_cancellations()
    try:
        yield
    except Exception as error:
        if _count_cancellations() > before:
            raise asyncio.CancelledError from error
        raise
    if _count_cancellations() > before:
        raise asyncio.CancelledError


def _count_cancellations() -> int:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # the caller is not in an event loop
        return 0
    return 0 if task is None else task.cancelling()


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a task group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def classify_error(error: Exception) -> PlaneFault | None:
    """Return the kind of fault of an exception of nats-py or of its sockets, or None for any other exception."""
    code = getattr(error, "err_code", None)
    if isinstance(code, int) and code in _FAULTS_BY_CODE:
        return "full" if _is_without_space(error) else _FAULTS_BY_CODE[code]
    if isinstance(error, OSError) and error.errno in _NO_ROOM_ERRNOS:
        return "full"
    if type(error) is errors.Error and _DENIED_PATTERN.search(str(error)):
        return "denied"
    return next((fault for kind, fault in _FAULTS_BY_TYPE if isinstance(error, kind)), None)


def _is_without_space(error: Exception) -> bool:
    """Return whether no server has enough space for a new stream, although all servers are running.

    The error text says why no server was selected, as in `no suitable peers for placement, peer offline, insufficient storage`
    (`selectPeerError` of nats-server's `jetstream_cluster.go`).
    """
    text = error_text(error)
    return text.startswith("no suitable peers") and "insufficient storage" in text and "peer offline" not in text


def error_text(error: Exception) -> str:
    """Return the message of an exception without the text that nats-py adds to it."""
    if isinstance(error, errors.SlowConsumerError):  # the exception's own text ends in a memory address
        return f"messages of {error.subject} arrived faster than they were processed, and were dropped"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, OSError) and not isinstance(error, errors.Error):
        return error.strerror or str(error) or "no answer"
    if description := getattr(error, "description", None):
        return str(description)
    if isinstance(error, js.ServiceUnavailableError):
        return "JetStream does not answer"
    return str(error).removeprefix("nats: ")


def report_fault(client: Client, error: PlaneError, previous_fault: str) -> str:
    """Return the fault that an error shows, and log the fault unless it equals `previous_fault`.

    While no server is connected, return the connection's error, which is already logged and more exact than a request's error.
    """
    if not client.is_connected:
        reason = client.last_error
        return "no NATS server is connected: " + ("reconnecting" if reason is None else error_text(reason))
    if str(error) != previous_fault:
        log.warning("%s", error)
    return str(error)
