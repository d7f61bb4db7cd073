"""The state of one followed rank, for answers and for operators."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Final, NamedTuple, cast

from kvevents.client.reasons import Reason
from kvevents.client.schemas import GapView, LoadView, SourceView, TrustStatus, WorkerMatch
from kvevents.index import WorkerInfo
from kvevents.index.prefix_index import describe_estimate
from kvevents.routing import LoadReading
from kvevents.routing.engine_load import EngineLoad
from kvevents.routing.weights import DISTANCE_LOST, distance_of
from kvevents.service.fleet.faults import ENDPOINT_FAULTS, SourceFault, reasons_of
from kvevents.service.fleet.registration import Registration, Scope
from kvevents.stream import Trust, TrustState
from kvevents.subscriber import StreamStatus

_NO_TOKENS: Final = {"gpu": 0, "cpu": 0, "disk": 0}
MAX_GAPS: Final = 64
"""Most gaps of one stream that are listed one by one; all are counted."""
HTTP: Final = "http"
"""Origin of the registrations of clients."""


class Revision:
    """A number that changes before and after each change of the fleet that answers show."""

    __slots__ = ("_next", "number")

    def __init__(self) -> None:
        self._next = count(1)
        self.number = 0

    def advance(self) -> None:
        """Change the number. Call it before and after a change, so that a reader of the change sees another number too."""
        self.number = next(self._next)


class Member:
    """One registered rank. The follower's thread writes it and any thread reads it: each field is replaced as a whole."""

    __slots__ = (
        "carried",
        "evicted",
        "faults",
        "gaps",
        "index_faults",
        "info",
        "instance",
        "is_hidden",
        "lag",
        "last_event",
        "load",
        "log_muted_until",
        "origin",
        "registration",
        "reported",
        "revision",
        "since",
        "status",
        "suppressed_losses",
        "trust",
        "trust_inputs",
        "trust_status",
        "worker",
    )

    def __init__(self, registration: Registration, origin: str, now: float, revision: Revision | None = None) -> None:
        self.registration = registration
        self.revision = revision or Revision()
        """The revision of the fleet."""
        self.instance = registration.instance
        self.worker = registration.instance, registration.rank
        """Instance and rank, which are unique within a tenant and group."""
        self.carried: tuple[Member, ...] = ()
        """The other ranks that its stream carries. They share its trust, and are not registered themselves."""
        self.is_hidden = False
        """Whether endpoints whose clients might ignore trust omit it, because it has had no connection for long."""
        self.origin = origin
        """Origin of the registration: `http` for clients, `discovery` or `plane`."""
        self.since = now
        """Unix time at which the current state began."""
        self.trust = Trust.CONNECTING
        self.trust_status = TrustStatus("CONNECTING", reason_codes=(Reason.CONNECTING,))
        """Trust with its reasons, for answers."""
        self.trust_inputs: tuple[object, ...] = ()
        """What the trust was derived from."""
        self.reported: tuple[str, str, bool] = ("", "", False)
        """State and sentence of the last report of the subscriber."""
        self.faults: Mapping[str, SourceFault] = {}
        """Faults of `endpoint` and `replay_endpoint` that the prober found."""
        self.status: StreamStatus | None = None
        self.info: WorkerInfo | None = None
        self.gaps: deque[GapView] = deque(maxlen=MAX_GAPS)
        self.last_event: float | None = None
        self.lag: float | None = None
        self.load: Callable[[], LoadReading | None] = lambda: None
        """Returns the newest load that the rank has reported; None if it is not read."""
        self.evicted = 0
        """Blocks refused at the memory limit before the current incarnation began or the cache was last cleared."""
        self.index_faults: tuple[SourceFault, ...] = ()
        """Faults that the index reports about this stream."""
        self.log_muted_until = 0.0
        """Monotonic time until which losses are not logged."""
        self.suppressed_losses = 0
        """Losses that were not logged since the last log line about losses."""

    @property
    def empty_match(self) -> WorkerMatch:
        """The match of a prompt of which this rank holds nothing."""
        return WorkerMatch(
            instance=self.instance, rank=self.registration.rank, tokens=0, certain=0, tiers=_NO_TOKENS, trust=self.trust_status
        )

    def update_trust(self, trust: Trust, now: float) -> TrustState | None:
        """Set the trust from the subscriber's report and all known faults. Return the former state if it has changed."""
        known = None if self.status is None else (self.status.error, self.status.degraded_reasons)
        inputs = (trust.name, trust.reason, trust.attested, self.faults, self.index_faults, self.tiers, known)
        if inputs == self.trust_inputs:
            return None
        self.trust_inputs = inputs
        sentences = [trust.reason] if trust.reason else []
        if trust == Trust.EXACT and self.index_faults:
            trust, sentences = Trust.DEGRADED, [fault.sentence for fault in self.index_faults]
        if trust.attested and any(blocks for tier, blocks in self.tiers.items() if tier != "gpu"):
            trust = replace(trust, attested=False)  # an attestation is of the GPU, and answers count all tiers
        faults = self._faults_that_explain(trust)
        if faults and self.status is not None and self.status.error:  # the prober knows more than that
            sentences = [left] if (left := trust.reason.removesuffix(self.status.error).removesuffix("; ")) else []
        degraded_reasons = self.status.degraded_reasons if self.status is not None else ()
        reasons = reasons_of(trust.name, degraded_reasons, faults, self.index_faults)
        # The registration names them, not the stream: a replica reads its streams from a log, which has no such setting.
        if trust == Trust.EXACT and (inexact := self.registration.stores_only):
            reasons += (Reason.STORES_ONLY,)
            sentences.append(f"no removals are announced from {', '.join(inexact)}: what it holds there is not exact")
        return self.set_trust(trust.with_reason("; ".join([*(fault.sentence for fault in faults), *sentences])), reasons, now)

    def _faults_that_explain(self, trust: Trust) -> list[SourceFault]:
        """Return the endpoint faults that explain the state."""
        which = "endpoint" if trust in {Trust.CONNECTING, Trust.STALE} else "replay_endpoint"
        fault = self.faults.get(which)
        return [] if fault is None or trust == Trust.EXACT else [fault]

    def set_trust(self, trust: Trust, reasons: tuple[Reason, ...], now: float) -> TrustState | None:
        """Set state and reasons. Return the former state if it has changed."""
        former = self.trust_status
        status = TrustStatus(cast("TrustState", trust.name), trust.reason, reasons, trust.attested)
        if status == former:
            return None
        self.revision.advance()
        self.trust = trust
        self.trust_status = status
        self.revision.advance()
        if trust.name == former.state:
            return None
        self.since = now
        return former.state

    def refresh(self, status: StreamStatus, info: WorkerInfo | None, *, hidden_before: float) -> None:
        """Store the status of the subscriber and the index."""
        self.status, self.info = status, info
        self.index_faults = self._find_index_faults()
        is_hidden = self.trust == Trust.STALE and self.since < hidden_before
        if is_hidden != self.is_hidden:
            self.is_hidden = is_hidden
            self.revision.advance()

    def _find_index_faults(self) -> tuple[SourceFault, ...]:
        """Return the faults that the index reports about this stream."""
        if self.info is None:
            return ()
        found: list[SourceFault] = []
        declared, seen = self.registration.block_size, self.block_sizes
        if declared is not None and seen and declared not in seen:
            sizes = ", ".join(map(str, seen))
            found.append(
                SourceFault(Reason.BLOCK_SIZE, f"it is registered with blocks of {declared} tokens and sends blocks of {sizes}")
            )
        if (estimate := self.info.estimate) is not None:
            reason = _REASONS_OF_ESTIMATES.get(estimate, Reason.ESTIMATED_MATCHES)
            found.append(SourceFault(reason, describe_estimate(estimate, max(1, self.info.orphans))))
        if self.info.evicted > self.evicted:
            found.append(SourceFault(Reason.EVICTED, "the index refused some of its blocks at the memory limit"))
        if self.info.orphans_dropped:
            found.append(SourceFault(Reason.ORPHANS_DROPPED, "more of its blocks wait for their parents than the index stores"))
        return tuple(found)

    @property
    def engine_load(self) -> EngineLoad | None:
        """The newest load that the rank has reported; None if it is too old, or the rank has reported no load."""
        reading = self.load()
        return None if reading is None else reading.load

    def admits(self, scope: Scope) -> bool:
        """Whether this rank can hold blocks of prompts in a scope."""
        return self.registration.scope.admits(scope)

    @property
    def is_caught_up(self) -> bool:
        """Whether no batch is known to be missing: it is EXACT, or waits for a live batch that confirms its replay."""
        return self.trust_status.state == "EXACT" or self.trust_status.reason_codes == (Reason.REPLAY_UNPROVEN,)

    @property
    def distance(self) -> int:
        """How unlikely it is to accept a request, as `kvevents.routing.weights` defines it."""
        state = self.trust_status.state
        is_known_dead = state == "CONNECTING" and not ENDPOINT_FAULTS.isdisjoint(self.trust_status.reason_codes)
        return DISTANCE_LOST if is_known_dead else distance_of(state)

    @property
    def block_sizes(self) -> list[int]:
        """Tokens per block in its events."""
        return self.info.block_sizes if self.info is not None else []

    @property
    def tiers(self) -> dict[str, int]:
        """Number of blocks by tier."""
        return self.info.tiers if self.info is not None else {}

    @property
    def blocks(self) -> int:
        """Number of blocks at the last refresh."""
        return self.info.blocks if self.info is not None else 0

    def view(self) -> SourceView:
        """Return the entry for `/v1/sources`."""
        registration, status, info = self.registration, self.status, self.info
        counters = status.counters if status is not None else None
        reading = self.load()
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
            stores_only=list(registration.stores_only),
            drafts=None if registration.drafts is None else list(registration.drafts),
            orphans=info.orphans if info is not None else 0,
            uncertain=info.uncertain if info is not None else 0,
            block_sizes=self.block_sizes,
            declared_block_size=registration.block_size,
            batches=counters.delivered if counters is not None else 0,
            replayed=counters.replayed if counters is not None else 0,
            lost=counters.lost if counters is not None else 0,
            compacted=counters.compacted if counters is not None else 0,
            gap_count=counters.gaps if counters is not None else 0,
            gaps=list(self.gaps),
            load=_load_view(reading),
            load_fault=None if reading is None else reading.fault or None,
            resets=counters.resets if counters is not None else 0,
            reconnects=counters.reconnects if counters is not None else 0,
            rejected=rejected,
        )


def _load_view(reading: LoadReading | None) -> LoadView | None:
    if reading is None or reading.load is None or reading.age is None:
        return None
    load = reading.load
    return LoadView(
        running=load.running,
        waiting=load.waiting,
        waiting_uncached_tokens=load.waiting_uncached_tokens,
        used_tokens=load.used_tokens,
        max_tokens=load.max_tokens,
        age_seconds=reading.age,
    )


_REASONS_OF_ESTIMATES: Final = {"set-aside": Reason.SET_ASIDE, "unknown-parents": Reason.UNKNOWN_PARENTS}
"""The estimates that have a code of their own."""


class MemberMatch(NamedTuple):
    """The longest prefix of a prompt that one member holds, in tokens. Each tier includes the faster tiers."""

    member: Member
    gpu: int
    cpu: int
    disk: int
    tokens: int
    """On all tiers."""
    certain: int = 0
    """How many of `tokens` it certainly holds."""
    is_certain: bool = True
    """Whether it certainly holds all of this, on each tier."""

    @property
    def trust_status(self) -> TrustStatus:
        """The trust in this match: not EXACT if some of the blocks might be gone."""
        status = self.member.trust_status
        return status if self.is_certain else _if_uncertain(status)

    @property
    def tiers(self) -> dict[str, int]:
        """Tokens by the name of the tier."""
        return {"gpu": self.gpu, "cpu": self.cpu, "disk": self.disk}


_UNCERTAIN: Final = (
    "some of these blocks might be gone: they were announced more often than removed, were below the GPU when the cache was "
    "cleared, or are of former weights of a LoRA"
)


@lru_cache(maxsize=256)
def _if_uncertain(status: TrustStatus) -> TrustStatus:
    """Return the trust in a match that has blocks which might be gone, or of another LoRA."""
    state: TrustState = "DEGRADED" if status.state == "EXACT" else status.state
    reason = f"{status.reason}; {_UNCERTAIN}" if status.reason else _UNCERTAIN
    return TrustStatus(state, reason, (*status.reason_codes, Reason.UNCERTAIN_COPIES))
