"""Every exception that kvevents raises.

::

    KVEventsError
    ├── DamagedIndexError            an error of kvevents left an index changed by half (RuntimeError)
    ├── UsageError                   you asked for something that cannot be done
    │   ├── ConfigError              a setting is wrong                   (ValueError)
    │   ├── UnknownDialectError      no such engine or release            (ValueError)
    │   ├── UnknownSourceError       no such source or rank               (LookupError)
    │   ├── EncodeError              this batch has no bytes              (ValueError)
    │   ├── ClosedError              used after close() or shutdown()     (RuntimeError)
    │   ├── ForkedError              used in a forked child               (RuntimeError)
    │   └── MissingDependencyError   an extra is not installed            (ImportError)
    └── PeerError                    something outside this process is at fault
        ├── EndpointError            a socket cannot be bound or opened   (OSError)
        ├── RecordingError           a recording cannot be read or written (ValueError)
        ├── JournalError             a journal cannot be kept in its folder (OSError)
        ├── PlaneError               the plane's NATS servers cannot be used (OSError)
        ├── SnapshotError            a snapshot cannot be read or written (ValueError)
        └── WorkloadError            a trace of requests cannot be read or written (ValueError)

What a peer *sends* never raises: it is set aside with a reason and counted (`kvevents.wire.Rejected`).
"""

from __future__ import annotations


class KVEventsError(Exception):
    """Root of every exception raised by kvevents."""


class DamagedIndexError(KVEventsError, RuntimeError):
    """An index was left changed by half by an error of kvevents itself, and answers nothing until a snapshot is restored."""


class UsageError(KVEventsError):
    """The caller did something that cannot work."""


class ConfigError(UsageError, ValueError):
    """A setting is wrong; the message names it and what would be right."""


class UnknownDialectError(UsageError, ValueError):
    """No dialect is known for this engine or release."""


class UnknownSourceError(UsageError, LookupError):
    """No stream of this subscriber has that source name and rank."""


class EncodeError(UsageError, ValueError):
    """A batch holds something that has no encoding in the wanted dialect."""


class ClosedError(UsageError, RuntimeError):
    """A publisher or subscriber was used after it was closed."""


class ForkedError(UsageError, RuntimeError):
    """An index was used in a forked child of the process that made it; make another one there."""


class MissingDependencyError(UsageError, ImportError):
    """An optional dependency is needed; the message says which extra installs it."""


class PeerError(KVEventsError):
    """Something outside this process failed."""


class EndpointError(PeerError, OSError):
    """A socket could not be bound, connected or opened at an endpoint.

    `endpoint` is the endpoint as it was given, `""` where there is none. `errno` is the system's or ZeroMQ's number of the
    error, None where none was reported.
    """

    def __init__(self, *args: object, endpoint: str = "", errno: int | None = None) -> None:
        super().__init__(*args)
        self.endpoint = endpoint
        if errno is not None:
            self.errno = errno


class RecordingError(PeerError, ValueError):
    """A recording cannot be read or written; the message names the file, and the line where there is one."""


class JournalError(PeerError, OSError):
    """A journal cannot be kept in its folder; the message names the folder and what to do.

    Bad bytes never raise, nor does a disk that is full, failing or read-only: the journal's state tells of those.
    """


class PlaneError(PeerError, OSError):
    """The plane's NATS servers cannot be used; the message says what happened, where, and what to do.

    `fault` is the kind of it in one word, of which `kvevents.plane.faults` has the list.
    """

    def __init__(self, message: str, *, fault: str = "other") -> None:
        super().__init__(message)
        self.fault = fault


class SnapshotError(PeerError, ValueError):
    """A snapshot cannot be read or written; the message names the file and what to do."""


class WorkloadError(PeerError, ValueError):
    """A trace of requests cannot be read or written; the message names file, line and what to do."""
