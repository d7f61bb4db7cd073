"""Reasons why a source is not EXACT: codes for programs, and advice for people. The advice can change in any release.

The codes are in each answer's `trust`, in `/v1/events`, and in the label `reason` of `kvevents_source_reason`. The runbook
explains each code.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Self

from kvevents.package_metadata import page_link

_CHECK_ADVICE = "run on the service's host: kvevents doctor {endpoint}"
_START_ADVICE = f"check that the engine runs; {_CHECK_ADVICE}"
_PORTS_ADVICE = "register it with the engine's own endpoints: endpoint is where it publishes, replay_endpoint where it replays"
_NAME_ADVICE = "check the name; inside Kubernetes use a headless service"
_ROUTE_ADVICE = "check the address, routes, firewalls and network policies between the service's host and the engine"
_KEYS_ADVICE = "configure matching keys in the service (curve) and the engine; `kvevents keys` creates them"
_REPLAY_ADVICE = "register the engine with its replay endpoint (replay_endpoint), and enable that in the engine"
_CLEAR_ADVICE = "exact again after the next AllBlocksCleared or restart of the engine"
_INDEX_ADVICE = "update the engine, or report it with a recording (kvevents record)"


class Reason(enum.StrEnum):
    """Codes of reasons, each with advice. If a source has several reasons, the reason defined first counts."""

    _text: str
    _page: str

    def __new__(cls, code: str, text: str = "", page: str = "") -> Self:
        """Make a member from its code, its advice, and the page of the documentation that explains it."""
        self = str.__new__(cls, code)
        self._value_, self._text, self._page = code, text, page
        return self

    @property
    def advice(self) -> str:
        """What to do, as a text. In the text, `{endpoint}` stands for the endpoint of the source."""
        return f"{self._text}; see {page_link(self._page)}" if self._page else self._text

    UNRESOLVED = "unresolved", _NAME_ADVICE
    """The host name of an endpoint does not resolve. Reasons up to `NO_PEER` are faults of an endpoint."""
    REFUSED = "refused", "check that the engine runs with KV events enabled and a wildcard endpoint such as tcp://*:5557"
    UNANSWERED = "unanswered", _ROUTE_ADVICE
    UNREACHABLE = "unreachable", _ROUTE_ADVICE
    NOT_ZEROMQ = "not-zeromq", _PORTS_ADVICE
    WRONG_SOCKET = "wrong-socket", _PORTS_ADVICE
    KEYS = "keys", _KEYS_ADVICE
    NO_PEER = "no-peer", "is the engine up, and does it connect to this service's host and port?"
    REPLAY_UNRESOLVED = "replay-unresolved", _NAME_ADVICE
    """The host name of a replay endpoint does not resolve. Reasons up to `REPLAY_KEYS` are faults of a replay endpoint."""
    REPLAY_REFUSED = "replay-refused", f"{_REPLAY_ADVICE}; {_CHECK_ADVICE}"
    REPLAY_UNANSWERED = "replay-unanswered", _ROUTE_ADVICE
    REPLAY_UNREACHABLE = "replay-unreachable", _ROUTE_ADVICE
    REPLAY_NOT_ZEROMQ = "replay-not-zeromq", _PORTS_ADVICE
    REPLAY_WRONG_SOCKET = "replay-wrong-socket", _PORTS_ADVICE
    REPLAY_KEYS = "replay-keys", _KEYS_ADVICE

    NO_REPLAY = "no-replay", _REPLAY_ADVICE
    """The source has no replay endpoint. The reasons from the first one to `SILENT` have the same names in `DegradedReason`."""
    REPLAY_SILENT = (
        "replay-silent",
        f"check that its replay endpoint is correct, and reachable from the service's host; {_CHECK_ADVICE}",
    )
    REPLAY_FOREIGN = "replay-foreign", "register it with the replay endpoint of this engine and rank"
    REPLAY_UNCONFIRMED = "replay-unconfirmed", "if this stays, the topic is wrong, or the replay endpoint is of another rank"
    IDENTITY = "identity", f"{_CLEAR_ADVICE}; a larger buffer_steps of the engine lets the service verify the stream"
    LOST = "lost", f"{_CLEAR_ADVICE}; a larger buffer_steps of the engine avoids it"
    REJECTED = "rejected", f"{_CLEAR_ADVICE}; check whether the engine's release is newer than kvevents; {_CHECK_ADVICE}"
    DIVERGED = "diverged", f"{_CLEAR_ADVICE}, or after a matching digest", "operations/runbook#kveventssourcediverged"
    UNATTESTED = "unattested", "report this with a recording (`kvevents record`); the next matching digest ends it"
    UNCERTAIN_COPIES = (
        "uncertain-copies",
        "install kvevents in the engine: its plugin omits repeated announcements",
        "guides/engines",
    )
    """Some blocks in the answer might be gone. Answers about a prompt have this reason, but sources never do."""
    STORES_ONLY = "stores-only", "no action is needed: by its configuration, the engine announces no removals from some tiers"
    """The engine announces no removals from some tiers. The state is EXACT, except for the tiers without removals."""
    SENDER = "sender", "see the reason: the upstream of a relay is not exact, or the engine does not announce everything"
    RANK = "rank", "compare the registered ports with the ports of the engine's ranks: the ports of two ranks are swapped"
    SHARED = "shared", "give each publisher its own topic, or its own endpoint"
    SILENT = "silent", f"check that the relay runs: its heartbeats have stopped; {_CHECK_ADVICE}"

    EVICTED = "evicted", f"raise --memory-limit, or distribute the engines over several services; {_CLEAR_ADVICE}"
    """The index refused blocks at the memory limit. The index reports the reasons up to `ESTIMATED_MATCHES`."""
    BLOCK_SIZE = "block-size", "register the engine with its actual block size, or without a block size"
    ORPHANS_DROPPED = "orphans-dropped", _INDEX_ADVICE
    SET_ASIDE = "set-aside", _INDEX_ADVICE
    """Some events of the stream store blocks in a way that the index cannot use."""
    UNKNOWN_PARENTS = "unknown-parents", _INDEX_ADVICE
    """No batch is missing, but events name blocks on the GPU whose parents or tokens were never announced."""
    ESTIMATED_MATCHES = "estimated-matches", "read the reason", "concepts/prefix-match#estimates"
    """Matches of the stream can differ from what the engine finds, for the reason in `WorkerInfo.estimate`."""

    FAILED = "failed", "restart the service, and report the traceback in its log"
    """The service no longer follows any source."""
    REPLAY_UNPROVEN = (
        "replay-unproven",
        "send the engine a request; if its batch does not end this, the replay endpoint belongs to another engine or rank",
    )
    NOT_FOLLOWED = "not-followed", "register the engine with the service (POST /register), or remove it from the candidates"
    """The service does not follow the worker."""
    CONNECTING = "connecting", _START_ADVICE
    """The stream is not yet connected. Reasons up to `DISCONNECTED` are phases of a stream without a fault."""
    REPLAYING = "replaying", f"if this stays, the replay endpoint is slow or loses messages; {_CHECK_ADVICE}"
    DISCONNECTED = "disconnected", _START_ADVICE
    OTHER = "other", f"see the reason; {_CHECK_ADVICE}"
    """A reason without a code of its own, or a code that this release does not know."""

    @classmethod
    def _missing_(cls, value: object) -> Reason:  # noqa: ARG003 - the base class sets the name
        """Map an unknown code to `OTHER`, so that clients can read answers of newer services."""
        return cls.OTHER


def advise(state: str, reasons: Collection[Reason], endpoint: str) -> str:
    """Return the advice for the source's reason that `Reason` defines first; empty if the state is EXACT."""
    if state == "EXACT":
        return ""
    # `REPLAY_UNPROVEN` always applies to a stream that connects or catches up, so only a DEGRADED stream needs its advice.
    relevant = set(reasons) - ({Reason.REPLAY_UNPROVEN} if state != "DEGRADED" else set())
    return next((reason for reason in Reason if reason in relevant), Reason.OTHER).advice.format(endpoint=endpoint)
