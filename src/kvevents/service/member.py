"""What the service knows of one stream, as an operator and an answer need it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Final, NamedTuple, cast

from kvevents.index import WorkerInfo
from kvevents.service.reasons import ENDPOINT_FAULTS, Reason, SourceFault, reasons_of
from kvevents.service.registration import Registration, Scope
from kvevents.service.schemas import GapView, SourceView, TrustStatus, WorkerMatch
from kvevents.stream import Trust
from kvevents.subscriber import StreamStatus
from kvevents.weights import DISTANCE_LOST, State, distance_of

_NO_TOKENS: Final = {"gpu": 0, "cpu": 0, "disk": 0}
MAX_GAPS: Final = 64
"""Gaps of one stream that are told one by one; all of them are counted."""


class Revision:
    """A number that is another one whenever what answers say of the fleet has changed, or is about to."""

    __slots__ = ("_next", "number")

    def __init__(self) -> None:
        self._next = count(1)
        self.number = 0

    def advance(self) -> None:
        """To be called before and after a change, so that whoever sees it sees another number too."""
        self.number = next(self._next)


class Member:
    """One registered rank. Written by the follower's thread, read by all; every field is replaced as a whole."""

    __slots__ = (
        "evicted",
        "faults",
        "gaps",
        "index_faults",
        "info",
        "instance",
        "is_hidden",
        "lag",
        "last_event",
        "log_muted_until",
        "origin",
        "registration",
        "reported",
        "revision",
        "since",
        "status",
        "suppressed_losses",
        "trust",
        "trust_status",
        "worker",
    )

    def __init__(self, registration: Registration, origin: str, now: float, revision: Revision | None = None) -> None:
        self.registration = registration
        self.revision = revision or Revision()
        """That of the fleet."""
        self.instance = registration.instance
        self.worker = registration.instance, registration.rank
        """What clients call it, which is unique within a tenant and group."""
        self.is_hidden = False
        """Whether it has had no connection for so long that clients who may not look at trust are not told of it."""
        self.origin = origin
        """Who named it: `http`, or a provider."""
        self.since = now
        """When it came into its present state."""
        self.trust = Trust.CONNECTING
        self.trust_status = TrustStatus("CONNECTING", reason_codes=(Reason.CONNECTING,))
        """The same for answers, with the reason."""
        self.reported: tuple[str, str] = ("", "")
        """State and sentence as the subscriber reported them last."""
        self.faults: Mapping[str, SourceFault] = {}
        """What the prober has found wrong with `endpoint` and `replay_endpoint`."""
        self.status: StreamStatus | None = None
        self.info: WorkerInfo | None = None
        self.gaps: deque[GapView] = deque(maxlen=MAX_GAPS)
        self.last_event: float | None = None
        self.lag: float | None = None
        self.evicted = 0
        """Blocks that the memory limit had cost it when its present life began, or it was last cleared."""
        self.index_faults: tuple[SourceFault, ...] = ()
        """What the index says against it."""
        self.log_muted_until = 0.0
        """Until when, by the clock that never goes back, the log is not told of losses."""
        self.suppressed_losses = 0
        """Losses since then."""

    @property
    def empty_match(self) -> WorkerMatch:
        """What answers say of it if it holds nothing of a prompt."""
        return WorkerMatch(
            instance=self.instance, rank=self.registration.rank, tokens=0, tiers=_NO_TOKENS, trust=self.trust_status
        )

    def judge(self, trust: Trust, now: float) -> State | None:
        """Take over what the subscriber says, and what else is known against it. Returns the former state if it has changed."""
        sentences = [trust.reason] if trust.reason else []
        if trust == Trust.EXACT and self.index_faults:
            trust, sentences = Trust.DEGRADED, [fault.sentence for fault in self.index_faults]
        faults = self._faults_in(trust)
        if faults and self.status is not None and self.status.error:  # the prober knows more than that
            sentences = [left] if (left := trust.reason.removesuffix(self.status.error).removesuffix("; ")) else []
        doubts = self.status.degraded_reasons if self.status is not None else ()
        reasons = reasons_of(trust.name, doubts, faults, self.index_faults)
        return self.take(trust.with_reason("; ".join([*(fault.sentence for fault in faults), *sentences])), reasons, now)

    def _faults_in(self, trust: Trust) -> list[SourceFault]:
        """Those faults of its endpoints that explain the state."""
        which = "endpoint" if trust in {Trust.CONNECTING, Trust.STALE} else "replay_endpoint"
        fault = self.faults.get(which)
        return [] if fault is None or trust == Trust.EXACT else [fault]

    def take(self, trust: Trust, reasons: tuple[Reason, ...], now: float) -> State | None:
        """Be in a state for some reasons from now on. Returns the former state if it has changed."""
        former = self.trust_status
        if (trust.name, trust.reason, reasons) == (former.state, former.reason, former.reason_codes):
            return None
        self.revision.advance()
        self.trust = trust
        self.trust_status = TrustStatus(cast("State", trust.name), trust.reason, reasons)
        self.revision.advance()
        if trust.name == former.state:
            return None
        self.since = now
        return former.state

    def look(self, status: StreamStatus, info: WorkerInfo | None, *, hidden_before: float) -> None:
        """Take over what subscriber and index say."""
        self.status, self.info = status, info
        self.index_faults = self.complaints()
        is_hidden = self.trust == Trust.STALE and self.since < hidden_before
        if is_hidden != self.is_hidden:
            self.is_hidden = is_hidden
            self.revision.advance()

    def complaints(self) -> tuple[SourceFault, ...]:
        """What the index has to say against this stream."""
        if self.info is None:
            return ()
        found: list[SourceFault] = []
        declared, seen = self.registration.block_size, self.block_sizes
        if declared is not None and any(size != declared for size in seen):
            sizes = ", ".join(map(str, seen))
            found.append(
                SourceFault(Reason.BLOCK_SIZE, f"it is registered with blocks of {declared} tokens and sends blocks of {sizes}")
            )
        if self.info.evicted > self.evicted:
            found.append(SourceFault(Reason.EVICTED, "the index refused some of its blocks at the memory limit"))
        if self.info.orphans_dropped:
            found.append(SourceFault(Reason.ORPHANS_DROPPED, "more of its blocks wait for their parents than the index stores"))
        found += [
            SourceFault(Reason.SET_ASIDE, f"blocks of kind {kind} were set aside: {reason}")
            for kind, reason in sorted(self.info.rejected)
            if reason in _LOSING
        ]
        return tuple(found)

    def admits(self, scope: Scope) -> bool:
        """Whether it may hold blocks of a prompt in a scope."""
        return self.registration.scope.admits(scope)

    @property
    def is_caught_up(self) -> bool:
        """Whether nothing is known to be missing: it is EXACT, or only waits for a live batch that confirms its replay."""
        return self.trust == Trust.EXACT or self.trust_status.reason_codes == (Reason.REPLAY_UNPROVEN,)

    @property
    def distance(self) -> int:
        """How far it is from taking a request, as `kvevents.weights` counts."""
        state = self.trust_status.state
        is_known_dead = state == "CONNECTING" and not ENDPOINT_FAULTS.isdisjoint(self.trust_status.reason_codes)
        return DISTANCE_LOST if is_known_dead else distance_of(state)

    @property
    def block_sizes(self) -> list[int]:
        """Tokens per block, as its events say."""
        return self.info.block_sizes if self.info is not None else []

    @property
    def tiers(self) -> dict[str, int]:
        """Blocks by tier."""
        return self.info.tiers if self.info is not None else {}

    @property
    def blocks(self) -> int:
        """Blocks held, as of the last look."""
        return self.info.blocks if self.info is not None else 0

    def view(self) -> SourceView:
        """For `/v1/sources`."""
        registration, status, info = self.registration, self.status, self.info
        counters = status.counters if status is not None else None
        rejected = dict(counters.rejected) if counters is not None else {}
        if info is not None:
            rejected.update({f"{kind}: {reason}": count for (kind, reason), count in info.rejected.items()})
        return SourceView(
            instance=registration.instance,
            rank=registration.rank,
            model=registration.model,
            tenant=registration.tenant,
            group=registration.group,
            endpoint=registration.endpoint,
            replay_endpoint=registration.replay_endpoint,
            origin=self.origin,
            trust=self.trust_status,
            since=self.since,
            fault="; ".join(fault.sentence for fault in self.faults.values()) or None,
            incarnation=status.incarnation if status is not None else 0,
            last_seq=status.last_seq if status is not None else -1,
            last_event=self.last_event,
            lag_seconds=self.lag,
            waiting=status.waiting if status is not None else 0,
            blocks=self.blocks,
            tiers=self.tiers,
            orphans=info.orphans if info is not None else 0,
            block_sizes=self.block_sizes,
            declared_block_size=registration.block_size,
            batches=counters.delivered if counters is not None else 0,
            replayed=counters.replayed if counters is not None else 0,
            lost=counters.lost if counters is not None else 0,
            compacted=counters.compacted if counters is not None else 0,
            gap_count=counters.gaps if counters is not None else 0,
            gaps=list(self.gaps),
            resets=counters.resets if counters is not None else 0,
            reconnects=counters.reconnects if counters is not None else 0,
            rejected=rejected,
        )


class MemberMatch(NamedTuple):
    """What one member holds of a prompt, in tokens; each tier with those before it."""

    member: Member
    gpu: int
    cpu: int
    disk: int
    tokens: int
    """On whatever tiers."""

    @property
    def tiers(self) -> dict[str, int]:
        """By name."""
        return {"gpu": self.gpu, "cpu": self.cpu, "disk": self.disk}


_LOSING: Final = frozenset({"length-mismatch", "bad-token", "too-many-planes", "too-many-alike"})
"""Of stores that were set aside, the reasons that leave the index behind the engine. A kind of group that nobody can match is
none: no other answer about it would be better."""
