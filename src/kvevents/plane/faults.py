"""What goes wrong with NATS and JetStream, as one kind of exception with a word for each kind of fault.

nats-py's exceptions end here: every other module of the plane uses a server within `told`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final, Literal, TypeAlias

from kvevents.errors import PlaneError

Fault: TypeAlias = Literal[
    "away", "backlog", "closed", "conflict", "denied", "exists", "full", "large", "missing", "old", "refused", "timeout", "tls"
]
"""What `PlaneError.fault` is, besides `other`."""

HINTS: Final[dict[Fault, str]] = {
    "away": "there is no connection, or JetStream or this stream has no leader: look whether enough of its servers run",
    "backlog": "more waits to be sent than may; wait until the servers take it",
    "closed": "the connection is closed; open another one",
    "conflict": "somebody else has written in between; read again",
    "denied": "give this user the permission, or log in as another one",
    "exists": "it is there already with other settings; use those, or another name",
    "full": "the stream, the account or the disk has no room left; raise its limit or free some",
    "large": "the message is above what the server or the stream takes; raise max_payload",
    "missing": "it has never been there, or somebody has deleted it",
    "old": "update it",
    "refused": "the server understands the request and will not have it",
    "timeout": "there was no answer in time; look at the servers' load, their disks, and whether a majority of them runs",
    "tls": "look at tls_ca, tls_certificate, tls_key and tls_hostname, and whether the server speaks TLS",
}

_BY_CODE: Final[dict[int, Fault]] = {
    10002: "full",  # JSAccountResourcesExceededErr
    10004: "away",  # JSClusterIncompleteErr
    10005: "full",  # JSClusterNoPeersErrF: no server with enough room; too few servers are told in the same way
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
    10077: "full",  # JSStreamStoreFailedF: `maximum bytes exceeded`, `maximum messages exceeded`, and the disk's own errors
    10097: "large",  # JSStreamHeaderExceedsMaximumErr
    10118: "away",  # JSStreamOfflineErr
    10119: "away",  # JSConsumerOfflineErr
    10122: "full",  # JSStreamMaxStreamBytesExceeded
    10158: "conflict",  # JSStreamDuplicateMessageConflict
    10164: "conflict",  # JSStreamWrongLastSequenceConstantErr: as 10071, of a stream with copies
}
"""By the numbers of nats-server's `server/errors.json`, which are the same in all releases."""

_DENIED: Final = re.compile(
    r"^nats: .*(?:authorization|authentication|permissions) (?:violation|expired|timeout|revoked)", re.IGNORECASE
)
"""What a server says in words alone, for which nats-py has no exception of its own."""


@contextmanager
def told(what: str) -> Iterator[None]:
    """Within, whatever NATS has against it becomes `PlaneError`; `what` is what was being done, to be read before a colon."""
    try:
        yield
    except PlaneError:
        raise
    except Exception as error:
        fault = fault_of(error)
        if fault is None:
            raise
        raise PlaneError(f"{what}: {text_of(error)}; {HINTS[fault]}", fault=fault) from error


def fault_of(error: Exception) -> Fault | None:
    """The kind of fault that an exception of nats-py or of the sockets below tells; None for any other exception."""
    code = getattr(error, "err_code", None)
    if isinstance(code, int) and code in _BY_CODE:
        return _BY_CODE[code]
    if _has_no_type(error) and _DENIED.search(str(error)):
        return "denied"
    return next((fault for kind, fault in _by_kind() if isinstance(error, kind)), None)


def text_of(error: Exception) -> str:
    """What an exception says, without the frame that nats-py puts around it."""
    from nats import errors  # noqa: PLC0415 - an extra

    if isinstance(error, errors.SlowConsumerError):  # its own text ends in an address in memory
        return f"messages of {error.subject} came faster than they were taken, and were dropped"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate cannot be believed: {error.verify_message}"
    if isinstance(error, OSError) and not isinstance(error, errors.Error):
        return error.strerror or str(error) or "no answer"
    description: str | None = getattr(error, "description", None)
    return description or str(error).removeprefix("nats: ")


def _has_no_type(error: Exception) -> bool:
    from nats import errors  # noqa: PLC0415 - an extra

    return type(error) is errors.Error


@cache
def _by_kind() -> tuple[tuple[type[Exception], Fault], ...]:
    """Those below are also kinds of those above or the other way round: the first that fits counts."""
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
        (TimeoutError, "timeout"),  # nats-py's are of this kind too
        (errors.Error, "refused"),
        (OSError, "away"),
    )
