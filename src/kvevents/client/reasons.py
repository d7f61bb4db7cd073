"""Codes for the reasons why a source is not EXACT. The sentences beside them are for people and can change in any release.

The codes are in each answer's `trust`, in `/v1/events`, in the label `reason` of `kvevents_source_reason`, and in
the runbook, which says what to do about each.
"""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """One code for each reason."""

    NO_REPLAY = "no-replay"
    """The reasons from here on are those that a stream reports, under their own names."""
    REPLAY_SILENT = "replay-silent"
    REPLAY_FOREIGN = "replay-foreign"
    REPLAY_UNCONFIRMED = "replay-unconfirmed"
    IDENTITY = "identity"
    LOST = "lost"
    REJECTED = "rejected"
    DIVERGED = "diverged"
    UNATTESTED = "unattested"
    SENDER = "sender"
    SILENT = "silent"
    ESTIMATED_MATCHES = "estimated-matches"
    """Its matches can differ from what the engine finds, for the reason in `WorkerInfo.estimate`."""
    RANK = "rank"
    SHARED = "shared"
    REPLAY_UNPROVEN = "replay-unproven"

    BLOCK_SIZE = "block-size"
    """The reasons from here on are those that the index reports about a stream."""
    EVICTED = "evicted"
    ORPHANS_DROPPED = "orphans-dropped"
    SET_ASIDE = "set-aside"
    """Its events have stores that cannot be used."""
    UNKNOWN_PARENTS = "unknown-parents"
    """No batch is missing, and its events name blocks on the GPU whose parents or tokens were never announced."""
    STORES_ONLY = "stores-only"
    """Its engine announces no removals from some tiers: the state, which is EXACT, is about the others."""

    UNRESOLVED = "unresolved"
    """The reasons from here on are faults of an endpoint. This one: its name does not resolve."""
    REFUSED = "refused"
    UNANSWERED = "unanswered"
    UNREACHABLE = "unreachable"
    NOT_ZEROMQ = "not-zeromq"
    WRONG_SOCKET = "wrong-socket"
    KEYS = "keys"
    NO_PEER = "no-peer"
    REPLAY_UNRESOLVED = "replay-unresolved"
    """The reasons from here on are the same faults of a replay endpoint."""
    REPLAY_REFUSED = "replay-refused"
    REPLAY_UNANSWERED = "replay-unanswered"
    REPLAY_UNREACHABLE = "replay-unreachable"
    REPLAY_NOT_ZEROMQ = "replay-not-zeromq"
    REPLAY_WRONG_SOCKET = "replay-wrong-socket"
    REPLAY_KEYS = "replay-keys"

    UNCERTAIN_COPIES = "uncertain-copies"
    """Some blocks of this answer might be gone. Only answers about a prompt have it, not sources."""

    CONNECTING = "connecting"
    """The reasons from here on are phases of a stream without another reason."""
    REPLAYING = "replaying"
    DISCONNECTED = "disconnected"

    FAILED = "failed"
    """The service has stopped to follow all sources."""
    NOT_FOLLOWED = "not-followed"
    """The service does not follow the worker."""
    OTHER = "other"
    """Any other reason, and any code that is newer than this release."""

    @classmethod
    def _missing_(cls, value: object) -> Reason:  # noqa: ARG003 - its name is the base class's
        """Map an unknown code to `OTHER`, so that clients can read answers of newer services."""
        return cls.OTHER
