"""Every exception that kvevents raises.

::

    KVEventsError
    ├── DamagedIndexError            a bug of kvevents left an index half changed (RuntimeError)
    ├── UsageError                   the caller asked for something impossible
    │   ├── ConfigError              a setting is wrong                   (ValueError)
    │   ├── UnknownDialectError      unknown engine or release            (ValueError)
    │   ├── UnknownSourceError       unknown source or rank               (LookupError)
    │   ├── EncodeError              a batch cannot be encoded            (ValueError)
    │   ├── ClosedError              used after close() or shutdown()     (RuntimeError)
    │   ├── ForkedError              used in a forked child               (RuntimeError)
    │   └── MissingDependencyError   an extra is not installed            (ImportError)
    └── ExternalError                something outside this process failed
        ├── EndpointError            a socket cannot be bound or opened   (OSError)
        ├── RecordingError           a recording cannot be read or written (ValueError)
        ├── JournalError             a journal cannot be opened in its folder (OSError)
        ├── PlaneError               the plane's NATS servers cannot be used (OSError)
        ├── SnapshotError            a snapshot cannot be read or written (ValueError)
        ├── TrustTimeoutError        streams did not reach a trust in time (TimeoutError)
        └── WorkloadError            a trace cannot be read or written     (ValueError)

Input from a peer never raises: invalid input is rejected with a reason and counted (`kvevents.wire.Rejected`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KVEventsError(Exception):
    """Root of all exceptions of kvevents."""


class DamagedIndexError(KVEventsError, RuntimeError):
    """A bug of kvevents left an index half changed; the index answers no query until a snapshot is restored."""


class UsageError(KVEventsError):
    """The caller asked for something that is impossible."""


class ConfigError(UsageError, ValueError):
    """A setting is invalid; the message names the setting and the expected value."""


class UnknownDialectError(UsageError, ValueError):
    """The engine or its release has no dialect."""


class UnknownSourceError(UsageError, LookupError):
    """The subscriber has no stream with this source name and rank."""


class EncodeError(UsageError, ValueError):
    """A batch contains something that the dialect cannot encode."""


class ClosedError(UsageError, RuntimeError):
    """A publisher or subscriber was used after it was closed."""


class ForkedError(UsageError, RuntimeError):
    """An index or a subscriber was used in a forked child of its process; create a new one in the child."""


class MissingDependencyError(UsageError, ImportError):
    """An optional dependency is not installed. If an extra of `kvevents` installs it, the message names the extra."""

    def __init__(self, text: str, extra: str = "") -> None:
        super().__init__(f"{text}: {install_hint(extra)}" if extra else text)
        self.text = text


def install_hint(extra: str) -> str:
    """Return advice on a missing extra, without an install command: a registry may have foreign packages of these names."""
    return f"install kvevents[{extra}], see Install in the documentation"


def reason_of(error: BaseException) -> str:
    """Return an exception's message, or its type if the message is empty; omit error number and file name of an OSError."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class ExternalError(KVEventsError):
    """Something outside this process failed."""


class EndpointError(ExternalError, OSError):
    """A socket could not be bound, connected or opened at an endpoint.

    `endpoint` is the endpoint as configured, or `""`. `errno` is the error number of the system or of ZeroMQ, or None.
    """

    def __init__(self, *args: object, endpoint: str = "", errno: int | None = None) -> None:
        super().__init__(*args)
        self.endpoint = endpoint
        if errno is not None:
            self.errno = errno


class RecordingError(ExternalError, ValueError):
    """A recording cannot be read or written; the message names the file, and the line if there is one."""


class JournalError(ExternalError, OSError):
    """A journal cannot be opened in its folder; the message names the folder and what to do.

    Damaged content and a full, failing or read-only disk raise no exception: the state of the journal reports them.
    """


class PlaneError(ExternalError, OSError):
    """The plane's NATS servers cannot be used; the message says what happened, where, and what to do.

    `fault` is the kind of failure in one word; `kvevents_plane.nats_errors` lists the words.
    """

    def __init__(self, message: str, *, fault: str = "other") -> None:
        super().__init__(message)
        self.fault = fault


class TrustTimeoutError(ExternalError, TimeoutError):
    """`wait_for` has reached its time limit. `deliveries` are the deliveries that `wait_for` received before its time limit."""

    def __init__(self, message: str, deliveries: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.deliveries = deliveries


class SnapshotError(ExternalError, ValueError):
    """A snapshot cannot be read or written; the message names the file and what to do."""


class WorkloadError(ExternalError, ValueError):
    """A trace of requests cannot be read or written; the message names file, line and what to do."""
