"""The state of one followed rank, for answers and for operators."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import Final, NamedTuple, cast

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from kvevents.client.reasons import Reason, advise
from kvevents.client.schemas import GapView, LoadView, SourceView, TrustStatus
from kvevents.index import WorkerInfo
from kvevents.index.prefix_index import describe_estimate
from kvevents.routing import LoadReading
from kvevents.routing.weights import DISTANCE_LOST, DISTANCE_SILENT, distance_of
from kvevents.service.fleet.registration import Lease, Registration
from kvevents.stream import DegradedReason, StreamCounters, Trust, TrustState
from kvevents.subscriber import StreamStatus
from kvevents.wire.load import EngineLoad

MAX_GAPS: Final = 64
"""Maximum number of gaps of one stream that are listed; further gaps are only counted."""
DRAINED_REASON: Final = "it is drained: a client of /v1/drain has excluded it from selections"
"""The reason why selections exclude a drained stream, although the service follows it."""
HTTP_ORIGIN: Final = "http"
"""Origin of the registrations of clients."""
ENDPOINT_FAULTS: Final = frozenset(
    map(Reason, ("unresolved", "refused", "unanswered", "unreachable", "not-zeromq", "wrong-socket", "keys", "no-peer"))
)
"""Faults of the endpoint for events. With one of these faults, no event arrives."""
CODES_OF_DEGRADED_REASONS: Final[dict[DegradedReason, Reason]] = {
    reason: Reason(reason.name.lower().replace("_", "-")) for reason in DegradedReason
}
_REASON_OF_STATE: Final = {"CONNECTING": Reason.CONNECTING, "REPLAYING": Reason.REPLAYING, "STALE": Reason.DISCONNECTED}
"""Maps a state to its reason if no other reason is known."""
_STALE_WHILE_CONNECTED: Final = frozenset({Reason.SENDER, Reason.SILENT})
_REGISTRATION_FIELDS: Final = ("instance", "rank", "model", "tenant", "group", "endpoint", "replay_endpoint", "url")
"""Fields of `Registration` that have the same names in `SourceView`."""
_COUNTER_FIELDS: Final = ("replayed", "lost", "compacted", "resets", "reconnects")
"""Fields of `StreamCounters` that have the same names in `SourceView`."""
_CONNECTING_STATUS: Final = TrustStatus("CONNECTING", reason_codes=(Reason.CONNECTING,))


class SourceFault(NamedTuple):
    """A fault of a source: a code for programs, and a sentence for people."""

    reason: Reason
    sentence: str


class Revision:
    """A number that changes after each change of the fleet that answers can show. Readers must read it before the fleet."""

    def __init__(self) -> None:
        self._next = count(1)
        self.number = 0
        self.changed_members: dict[Member, None] = {}
        """Members that have changed, or were added or removed. A reader removes an entry before it reads the member."""

    def advance(self, member: Member) -> None:
        """Change the number, because `member` has changed, or was added or removed."""
        self.changed_members[member] = None
        self.number = next(self._next)


class Member(Struct, eq=False):
    """One registered rank. The follower's thread replaces whole fields, so that any thread may read them."""

    registration: Registration
    origin: str
    """Origin of the registration: `http` for clients, `discovery` or `plane`."""
    since: float
    """Unix time at which the current trust state began."""
    revision: Revision = field(default_factory=Revision)
    """The revision of the fleet, which advances if this member changes."""
    carried_members: tuple[Member, ...] = ()
    """Further ranks whose events are in the stream of this rank. Further ranks have the trust of this rank, and are not
    registered."""
    is_hidden: bool = False
    """Whether the rank has had no connection for `hide_stale_seconds`. `/query` and `/query_by_hash` then omit it."""
    is_draining: bool = False
    """Whether a client has excluded the rank from selections."""
    lease: Lease | None = None
    """The lease of the registration; None if the registration does not expire."""
    trust: Trust = Trust.CONNECTING
    trust_status: TrustStatus = _CONNECTING_STATUS
    """The trust with its reasons, as answers contain it."""
    trust_inputs: tuple[object, ...] = ()
    """The values from which the trust was derived."""
    silence: str = ""
    """Result of `silence_of_server` at the previous update."""
    why_not_ready: str = ""
    """At the previous update, why the followed rank should get no requests; empty if it should get requests."""
    report: tuple[str, str, bool] = ("", "", False)
    """The subscriber's newest report: state, reason, and whether the state was attested."""
    faults: Mapping[str, SourceFault] = {}
    """Faults of `endpoint` and `replay_endpoint` that the prober found."""
    status: StreamStatus | None = None
    info: WorkerInfo | None = None
    gaps: deque[GapView] = field(default_factory=lambda: deque(maxlen=MAX_GAPS))
    last_event: float | None = None
    lag: float | None = None
    load: Callable[[], LoadReading | None] = lambda: None
    """Returns the newest load that the rank has reported; None if no load is read."""
    silence_of_server: Callable[[], str] = str
    """Returns why the rank's HTTP server has stopped answering; empty if the server answers, or if it has never answered."""
    why_unreachable: str = ""
    """Why the rank gets no requests even if its stream is connected; empty if it gets requests."""
    index_faults: tuple[SourceFault, ...] = ()
    """Faults that the index reports about this stream."""
    log_muted_until: float = 0.0
    """Time of the monotonic clock until which losses are not logged."""
    _was_exact: bool = False

    @property
    def worker(self) -> tuple[str, int]:
        """Instance and rank, which are unique within a tenant and group."""
        return self.registration.instance, self.registration.rank

    def is_outdated(self, why_not_ready: str) -> bool:
        """Return whether trust or reachability must be updated even if the subscriber's report is unchanged."""
        if self.silence != self.silence_of_server() or self.why_not_ready != why_not_ready:
            return True
        if self.trust_inputs[1:] != self._faults:
            return True
        return bool(self.carried_members) and any(worker.is_outdated(why_not_ready) for worker in self.carried_members)

    @property
    def _faults(self) -> tuple[object, ...]:
        stream_faults = None if self.status is None else (self.status.error, self.status.degraded_reasons)
        return self.faults, self.index_faults, self.tiers, stream_faults

    def update_trust(self, trust: Trust, now: float) -> TrustState | None:
        """Set the trust from the subscriber's report and all known faults. Return the former state if it changed, else None."""
        inputs = ((trust.name, trust.reason, trust.attested), *self._faults)
        if inputs == self.trust_inputs:
            return None
        self.trust_inputs = inputs
        sentences = [trust.reason] if trust.reason else []
        if trust == Trust.EXACT and self.index_faults:
            trust, sentences = Trust.DEGRADED, [fault.sentence for fault in self.index_faults]
        if trust.attested and any(blocks for tier, blocks in self.tiers.items() if tier != "gpu"):
            trust = replace(trust, attested=False)  # An attestation covers only the GPU, but an answer covers all tiers.
        fault = self.faults.get("endpoint" if trust in {Trust.CONNECTING, Trust.STALE} else "replay_endpoint")
        faults = [] if fault is None or trust == Trust.EXACT else [fault]
        if faults and self.status is not None and self.status.error:  # The prober's fault is more precise than `error`.
            sentences = [sentence] if (sentence := trust.reason.removesuffix(self.status.error).removesuffix("; ")) else []
        reasons = self._reasons_of(trust, faults)
        # Read `stores_only` from the registration: a replica reads streams from a log, which does not contain this field.
        if trust == Trust.EXACT and (inexact := self.registration.stores_only):
            reasons += (Reason.STORES_ONLY,)
            sentences.append(f"no removals are announced from {', '.join(inexact)}: what it holds there is not exact")
        return self.set_trust(trust.with_reason("; ".join([*(fault.sentence for fault in faults), *sentences])), reasons, now)

    def _reasons_of(self, trust: Trust, faults: list[SourceFault]) -> tuple[Reason, ...]:
        """Return the reasons of a state that is not EXACT, at least one. `faults` are the faults of the rank's endpoints."""
        if trust == Trust.EXACT:
            return ()
        degraded_reasons = self.status.degraded_reasons if self.status is not None else ()
        reasons = sorted(CODES_OF_DEGRADED_REASONS[reason] for reason in degraded_reasons)
        reasons += sorted(fault.reason for fault in (*faults, *self.index_faults))
        is_explained = bool(faults) or (trust == Trust.STALE and not _STALE_WHILE_CONNECTED.isdisjoint(reasons))
        if trust.name in _REASON_OF_STATE and not is_explained:
            reasons.append(_REASON_OF_STATE[trust.name])
        return tuple(dict.fromkeys(reasons)) or (Reason.OTHER,)

    def update_reach(self, why_not_ready: str = "") -> bool:
        """Update `why_unreachable`. Return whether the rank has become reachable or unreachable.

        A connected stream proves nothing: the HTTP server is another process, and a stopped process keeps its connections.
        If the replay endpoint has stopped answering and no event arrives, the engine counts as stopped.
        """
        self._was_exact |= self.trust_status.state == "EXACT"
        self.why_not_ready, self.silence = why_not_ready, self.silence_of_server()
        reason = self.why_not_ready or self.silence
        is_silent = Reason.REPLAY_SILENT in self.trust_status.reason_codes and (self.last_event or 0.0) < self.since
        if not reason and self._was_exact and is_silent:
            reason = "it seems to be stopped: its replay endpoint answered before, but now neither answers nor events arrive"
        former = self.obstacle
        self.why_unreachable = reason
        if former != self.obstacle:
            self.revision.advance(self)
        return bool(former) != bool(reason)

    def set_trust(self, trust: Trust, reasons: tuple[Reason, ...], now: float) -> TrustState | None:
        """Set the trust state and its reasons. Return the former state if the state has changed, else None."""
        former = self.trust_status
        status = TrustStatus(cast("TrustState", trust.name), trust.reason, reasons, trust.attested)
        if status == former:
            return None
        self.trust = trust
        self.trust_status = status
        self.revision.advance(self)
        if trust.name == former.state:
            return None
        self.since = now
        return former.state

    def refresh(self, status: StreamStatus, info: WorkerInfo | None, *, hidden_before: float) -> None:
        """Store what the subscriber (`status`) and the index (`info`) report about the stream."""
        former = self.is_hidden, self.block_sizes
        self.status, self.info = status, info
        self.index_faults = self._find_index_faults()
        self.is_hidden = self.trust in {Trust.CONNECTING, Trust.STALE} and self.since < hidden_before
        if (self.is_hidden, self.block_sizes) != former:
            self.revision.advance(self)

    def _find_index_faults(self) -> tuple[SourceFault, ...]:
        if self.info is None:
            return ()
        faults: list[SourceFault] = []
        declared, observed_sizes = self.registration.block_size, self.block_sizes
        if declared is not None and observed_sizes and declared not in observed_sizes:
            sizes = ", ".join(map(str, observed_sizes))
            sentence = f"it is registered with blocks of {declared} tokens and sends blocks of {sizes}"
            faults.append(SourceFault(Reason.BLOCK_SIZE, sentence))
        estimate = self.info.estimate
        if estimate is not None and estimate != "limits":  # limits have reasons of their own, below
            reason = _REASONS_OF_ESTIMATES.get(estimate, Reason.ESTIMATED_MATCHES)
            faults.append(SourceFault(reason, describe_estimate(estimate, max(1, self.info.orphans))))
        if self.info.lacks_refused:
            faults.append(SourceFault(Reason.EVICTED, "the index refused some of its blocks at the memory limit"))
        if self.info.lacks_dropped:
            sentence = "more of its blocks wait for their parents than the index stores"
            faults.append(SourceFault(Reason.ORPHANS_DROPPED, sentence))
        return tuple(faults)

    @property
    def engine_load(self) -> EngineLoad | None:
        """The newest load that the rank has reported; None if the report is too old, or if no report has arrived."""
        reading = self.load()
        return None if reading is None else reading.load

    @property
    def is_caught_up(self) -> bool:
        """Whether no batch is known to be missing: the rank is EXACT, or lacks only a live batch that confirms the replay."""
        return self.trust_status.state == "EXACT" or self.trust_status.reason_codes == (Reason.REPLAY_UNPROVEN,)

    @property
    def distance(self) -> int:
        """Rank in the order of reachability that `kvevents.routing.weights` defines; 0 is the best rank."""
        state = self.trust_status.state
        if self.why_unreachable:
            return max(DISTANCE_SILENT, distance_of(state))
        is_known_dead = state == "CONNECTING" and not ENDPOINT_FAULTS.isdisjoint(self.trust_status.reason_codes)
        return DISTANCE_LOST if is_known_dead else distance_of(state)

    @property
    def obstacle(self) -> str:
        """Kind of `why_unreachable` in explanations of selections: `drained`, `not ready` or empty."""
        return "drained" if self.why_unreachable == DRAINED_REASON else "not ready" if self.why_unreachable else ""

    @property
    def block_sizes(self) -> list[int]:
        """The numbers of tokens per block that the rank's events have shown."""
        return self.info.block_sizes if self.info is not None else []

    @property
    def expected_block_sizes(self) -> list[int]:
        """`block_sizes`, or the registered size if no event has shown a size."""
        declared = self.registration.block_size
        return self.block_sizes or ([declared] if declared else [])

    @property
    def tiers(self) -> dict[str, int]:
        """Maps each tier to its number of blocks."""
        return self.info.tiers if self.info is not None else {}

    @property
    def blocks(self) -> int:
        """Number of blocks at the newest refresh."""
        return self.info.blocks if self.info is not None else 0

    def view(self) -> SourceView:
        """Return the entry for `/v1/sources`."""
        registration, status, info = self.registration, self.status, self.info
        counters = status.counters if status is not None else StreamCounters()
        sentences = [fault.sentence for fault in self.faults.values()] + [self.why_unreachable]
        reading = self.load()
        load = None
        if reading is not None and reading.load is not None and reading.age is not None:
            load = msgspec.convert({**msgspec.structs.asdict(reading.load), "age_seconds": reading.age}, LoadView)
        rejections = dict(counters.rejected)
        if info is not None:
            rejections.update({f"{kind}: {reason}": count for (kind, reason), count in info.rejected.items()})
        return SourceView(
            **{name: getattr(registration, name) for name in _REGISTRATION_FIELDS},
            **{name: getattr(counters, name) for name in _COUNTER_FIELDS},
            labels=dict(registration.labels),
            origin=self.origin,
            lease_expires_at=None if (lease := self.lease) is None else lease.expires_at,
            draining=self.is_draining,
            trust=(trust := self.trust_status),
            advice=advise(trust.state, trust.reason_codes, registration.endpoint),
            since=self.since,
            fault="; ".join(filter(None, sentences)) or None,
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
            batches=counters.delivered,
            gap_count=counters.gaps,
            gaps=list(self.gaps),
            load=load,
            load_fault=None if reading is None else reading.fault or None,
            rejected=rejections,
        )


_REASONS_OF_ESTIMATES: Final = {"set-aside": Reason.SET_ASIDE, "unknown-parents": Reason.UNKNOWN_PARENTS}
"""Maps a kind of estimate to its reason. Kinds that are not in the table have the reason `ESTIMATED_MATCHES`."""
