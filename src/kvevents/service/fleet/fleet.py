"""The fleet: the registered members, the state of each stream, and the index that answers for all of them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, Literal, TypeAlias

import msgspec

from kvevents.client.reasons import Reason
from kvevents.client.schemas import GapView
from kvevents.endpoints import GRPC
from kvevents.errors import ConfigError, UnknownSourceError
from kvevents.index import PrefixIndex, WorkerInfo
from kvevents.routing import LoadSettings
from kvevents.service.errors import ConflictError, NotFoundError, ServiceError, TooMuchError, UnavailableError
from kvevents.service.fleet.event_bus import BatchesEvent, EventBus, LossEvent, SnapshotEvent, SourceEvent, StreamEvent
from kvevents.service.fleet.follower import Follower, IndexSink, Listener, LoadFollower, timestamp_of
from kvevents.service.fleet.member import DRAINED_REASON, HTTP_ORIGIN, Member, Revision
from kvevents.service.fleet.registration import NAME_SEPARATOR, Registration, Scope, StreamKey, check_same_engine
from kvevents.service.scope_fields import Scopes
from kvevents.stream import Checkpoint, Gap, RawBatch, Reset, Source, Trust
from kvevents.subscriber import StreamStatus, Subscriber
from kvevents.wire import Rejected, decode_batch
from kvevents.zeromq.keys import Curve

log = logging.getLogger(__name__)

DEFAULT_LOAD_SETTINGS: Final = LoadSettings()
TOPIC_ORIGIN: Final = "topic"
"""Origin of the registration of an engine that connects to the service and is identified by its topic."""
TRUST_UPDATE_SECONDS: Final = 0.1
"""Pause in seconds between two updates of all members' trust, and so the maximum delay until a lost connection is noticed."""
LOSS_LOG_SECONDS: Final = 10.0
"""Minimum seconds between two log lines about losses of one stream, so that a network with many losses cannot fill the disk."""
REFRESH_SECONDS: Final = 0.25
"""Pause in seconds between two refreshes. A refresh reads blocks, orphans and rejected stores of changed members."""
REFRESHES_PER_ROUND: Final = 8
"""Number of refreshes in a round, which reads each member at least one time. A refresh of all members at once would delay
queries."""
MAX_IDLE_REFRESHES: Final = 64
"""Maximum number of members without new events in one refresh. A round has more refreshes if it has more members than
`REFRESHES_PER_ROUND` times this number."""
MAX_AVERAGED_STREAMS: Final = 64
"""Maximum number of streams of the same scope from which the initial load of a new stream is averaged."""
LISTING_HINT: Final = "`kvevents sources` or /v1/sources lists the engines"


Resume: TypeAlias = Callable[[StreamKey], Checkpoint | None]
"""Function that returns the checkpoint from which a stream resumes; None without a checkpoint."""


class Fleet(Listener):
    """The registered members and their index. Any thread may call the methods; only the follower changes the subscriber."""

    adapters: frozenset[Scope] = frozenset()
    """LoRA adapters that engines list. Requests may name them as their model."""
    unready_sources: Mapping[str, str] = {}
    """Maps the name of a followed source that should get no requests to the reason."""
    is_discovery_complete: bool = False
    """Whether every provider has yielded a finding, and no finding has a fault."""
    failure: str | None = None
    """The error that ended the follower; None if the follower has not failed."""
    _registration_of: Callable[[str], Registration]
    """Function that returns the registration for an engine's topic; missing if engines cannot connect to the service."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        max_sources: int,
        hide_stale_seconds: float = float("inf"),
        curve: Curve | None = None,
        load: LoadSettings = DEFAULT_LOAD_SETTINGS,
        max_reservations: int = 65_536,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.index, self.event_bus = index, EventBus()
        self.members: dict[StreamKey, Member] = {}
        """The registered members."""
        self.workers: dict[StreamKey, Member] = {}
        """The members, and the further ranks that the members' streams carry."""
        self._engines: dict[str, dict[StreamKey, Member]] = {}
        """Maps the name of each source to its workers."""
        self._endpoints: dict[str, dict[StreamKey, Member]] = {}
        """Maps each endpoint to its members."""
        self.drained: dict[StreamKey, Member] = {}
        """The drained members, including members of discovery that are not followed now."""
        self.counts: dict[tuple[str, str], int] = {}
        """Maps dialect and reason to the number of rejected events, for `kvevents_rejected_events`."""
        self.follow_errors: dict[StreamKey, str] = {}
        """Maps a rank that was discovered, but is not followed, to the reason, such as an endpoint that cannot be bound."""
        self._max_sources, self._hide_stale_seconds = max_sources, hide_stale_seconds
        self.curve = curve
        """CURVE keys for engines whose registration has no keys. Stored registrations omit these keys."""
        self._clock, self._lock = clock, threading.Lock()
        self.revision: Final = Revision()
        """The number changes after each change of members that is visible in answers."""
        self.on_change: Callable[[], None] = lambda: None
        """Function that is called when the revision might have changed."""
        self._published_batches: dict[StreamKey, int] = {}
        self.scopes = Scopes()
        self.why_incomplete: Callable[[], str] = str
        """Returns why engines of any model may be unknown; returns an empty text if all engines are known."""
        self._changed_members: set[StreamKey] = set()
        """Members that received events since the previous refresh."""
        self._reported_members: set[StreamKey] = set()
        """Members whose `report` has changed after the newest run of `_update_outdated_trust`."""
        self._pending_refresh: list[StreamKey] = []
        """Members that the current round of refreshes has not read yet."""
        self._refresh_due = self._trust_due = 0.0
        self.loads: Final = LoadFollower(load, max_reservations)
        self.topic_faults: dict[str, str] = {}
        """Maps the topic of an engine that has connected, but is not followed, to the reason."""
        sink = IndexSink(index, self)
        self.follower = Follower(Subscriber(decode=False, sink=sink, on_found=self._on_found), sink)

    def replace_index(self, follower: Follower, index: PrefixIndex) -> Follower:
        """Answer from `index`, to which `follower` writes. Return the previous follower, which the caller must stop.

        The registrations do not change. The streams of both indexes must have the same names.
        """
        former = self.follower
        for member in list(self.members.values()):
            registration = member.registration
            index.set_model(registration.key[0], registration.scope.name)
            index.set_drafts(registration.key[0], registration.drafts)
        former.sink.listener = Listener()
        self.index, self.follower = index, follower
        follower.sink.listener = self
        self.on_change()
        return former

    # --- membership

    def register(self, registration: Registration, origin: str = HTTP_ORIGIN, *, resume: Resume | None = None) -> Future[None]:
        """Register a stream, and follow it from the checkpoint that `resume` returns.

        Raises `ConflictError` and `TooMuchError`. The future raises `EndpointError` or `ConfigError` for an unusable endpoint.
        """
        member = self._add(registration, origin)
        checkpoint = resume(registration.key) if resume is not None else None
        following = self.follower.submit(lambda: self._follow(member, checkpoint))
        following.add_done_callback(lambda future: self._refuse(member, error) if (error := future.exception()) else None)
        return following

    def _add(self, registration: Registration, origin: str) -> Member:
        with self._lock:
            self._check(registration)
            member = Member(registration, origin, self._clock(), self.revision)
            self.members[registration.key] = member
            if registration.key in self.drained:
                member.is_draining, self.drained[registration.key] = True, member
            self.scopes.add(registration.scope, registration.key)
            self._endpoints.setdefault(registration.endpoint, {})[registration.key] = member
            self._collect_workers(registration.key[0], member)
            self.on_change()
        return member

    def members_of(self, name: str) -> list[Member]:
        """Return the members of a source."""
        return [member for key, member in self._engines.get(name, {}).items() if self.members.get(key) is member]

    def members_at(self, endpoint: str) -> list[Member]:
        """Return the members whose events come from an endpoint."""
        return list(self._endpoints.get(endpoint, {}).values())

    def follow_topics(self, finder: Source, registration_of: Callable[[str], Registration]) -> Future[None]:
        """Register the engines that connect to the endpoint of `finder`. `registration_of` returns a topic's registration.

        The future raises `EndpointError` if the endpoint cannot be bound.
        """
        self._registration_of = registration_of
        return self.follower.submit(lambda: self.follower.subscriber.add(finder))

    def _on_found(self, source: Source) -> Source | None:
        """Register an engine that the follower's thread has found by its topic. Return None if that fails."""
        try:
            member = self._add(self._registration_of(source.topic), TOPIC_ORIGIN)
        except (ConfigError, ServiceError) as error:
            sentence = f"the engine with the topic {source.topic!r} is not followed: {error}"
            if self.topic_faults.get(source.topic) != sentence:
                log.warning("%s", sentence)
            self.topic_faults[source.topic] = sentence
            return None
        self.topic_faults.pop(source.topic, None)
        return self._prepare(member, None)

    def _unregister_idle_topics(self) -> None:
        """Unregister engines whose topic has had no connection for `hide_stale_seconds`. Retry engines in `topic_faults`."""
        for member in [member for member in list(self.members.values()) if member.origin == TOPIC_ORIGIN and member.is_hidden]:
            if self.follower.subscriber.trust(*member.registration.key) == Trust.STALE:
                log.info("%s: unregistered, because its topic has long had no connection", member.registration.label)
                with self._lock:
                    self._drop(member)
                self._leave(member)
        for topic in list(self.topic_faults):
            with suppress(ConfigError, ServiceError):
                self.register(self._registration_of(topic), TOPIC_ORIGIN)
                del self.topic_faults[topic]

    def _check(self, registration: Registration) -> None:
        label = registration.label
        if (former := self.members.get(registration.key)) is not None:
            different = " and ".join(former.registration.differences(registration))
            problem = "registered over HTTP already" if former.origin == HTTP_ORIGIN else "followed already"
            problem += f", with another {different}" if different else ""
            raise ConflictError(f"{label} is {problem}", "registered", "unregister it first")
        if len(self.members) >= self._max_sources:
            sentence = f"{len(self.members)} sources are registered, which is the limit"
            raise TooMuchError(sentence, "too-many-sources", "raise limits.max_sources")
        for sibling in self.members_of(registration.key[0]):
            check_same_engine(registration, sibling.registration)

    def _follow(self, member: Member, resume: Checkpoint | None) -> None:
        self.follower.subscriber.add(self._prepare(member, resume), resume)
        self.follow_errors.pop(member.registration.key, None)
        log.info("%s: following %s", member.registration.label, member.registration.endpoint)

    def _prepare(self, member: Member, resume: Checkpoint | None) -> Source:
        """Prepare the index and the loads for a stream, and return its source."""
        registration = member.registration
        name, rank = registration.key
        source = registration.source()
        if source.curve is None and self.curve is not None and not source.endpoint.startswith(GRPC):
            source = msgspec.structs.replace(source, curve=self.curve)
        if resume is None:
            self.index.remove_worker((name, rank))
            self.index.readmit((name, rank))
        self._join(registration)
        member.load = self.loads.follow(registration, self.curve)
        member.silence_of_server = self.loads.watch(registration)
        self.index.set_model(name, registration.scope.name)
        self.index.set_drafts(name, registration.drafts)
        return source

    def _join(self, registration: Registration) -> None:
        """Count as many requests for a new engine as its peers have on average."""
        peers = self.scopes.streams_of(registration.scope)
        self.loads.requests.join(*registration.key, peers[:: len(peers) // MAX_AVERAGED_STREAMS + 1])

    def unregister(self, key: StreamKey) -> Future[int]:
        """Stop following a stream and remove its blocks; the future returns their number. Raises `NotFoundError`."""
        with self._lock:
            member = self._find(key)
            self._drop(member)
        return self.follower.submit(lambda: self._leave(member))

    def _find(self, key: StreamKey) -> Member:
        if (member := self.members.get(key)) is None:
            name = f"{key[0].split(NAME_SEPARATOR)[-1]} rank {key[1]}"
            raise NotFoundError(f"{name} is not registered", "not-registered", LISTING_HINT)
        return member

    def set_draining(self, key: StreamKey, *, is_draining: bool) -> Future[None]:
        """Exclude a stream from selections, or include it again; the service follows it in both cases.

        The future ends after the change. Raises `NotFoundError`.
        """
        member = self._find(key)
        member.is_draining = is_draining
        self.drained.pop(key, None)
        if is_draining:
            self.drained[key] = member
        return self.follower.submit(lambda: self._update_trust(member, self._clock()))

    def _refuse(self, member: Member, error: BaseException) -> None:
        sentence = f"cannot follow {member.registration.label}: {error}"
        if self.follow_errors.get(member.registration.key) != sentence:  # Log only once, because discovery retries regularly.
            log.error("%s", sentence)
        with self._lock:
            if self.members.get(member.registration.key) is member:
                self._drop(member)
            if member.origin != HTTP_ORIGIN:  # A client receives the error in the answer.
                self.follow_errors[member.registration.key] = sentence

    def _drop(self, member: Member) -> None:
        del self.members[member.registration.key]
        self._published_batches.pop(member.registration.key, None)
        self.scopes.drop(member.registration.scope, member.registration.key)
        members = self._endpoints[member.registration.endpoint]
        del members[member.registration.key]
        if not members:
            del self._endpoints[member.registration.endpoint]
        if member.origin in {HTTP_ORIGIN, TOPIC_ORIGIN}:  # If discovery finds an engine again, the engine stays drained.
            self.drained.pop(member.registration.key, None)
        self._collect_workers(member.registration.key[0])
        self.on_change()  # Answers must omit the member before the index drops its blocks, else they show EXACT without blocks.

    def _leave(self, member: Member) -> int:
        name, rank = member.registration.key
        self.follower.subscriber.remove(name, rank)
        self.loads.leave((name, rank))
        with suppress(LookupError):
            self.follower.subscriber.trust(name, rank)
            return 0  # The index source has added the stream again before this task.
        blocks = self.index.remove_worker((name, rank))
        if not self.members_of(name):
            self.index.set_model(name, None)
            self.index.set_drafts(name, None)
        log.info("%s: no longer followed; it held %d blocks", member.registration.label, blocks)
        return blocks

    def replace_registrations(self, origin: str, registrations: Iterable[Registration], resume: Resume) -> list[str]:
        """Replace all registrations of `origin` by `registrations`. Return sentences about the registrations that failed.

        A client's registration that equals one of `registrations` becomes a registration of `origin`.
        """
        targets = {registration.key: registration for registration in registrations}
        faults: list[str] = []
        for key in self.follow_errors.keys() - targets.keys():
            self.follow_errors.pop(key, None)
        for key, member in list(self.drained.items()):
            is_known = key in targets or key[0] in self.unready_sources
            if member.origin == origin and not is_known and self.is_discovery_complete:
                self.drained.pop(key, None)
        for member in [member for member in list(self.members.values()) if member.origin in {origin, HTTP_ORIGIN}]:
            target = targets.get(member.registration.key)
            is_equal = target is not None and not member.registration.differences(target)
            if is_equal and member.origin == HTTP_ORIGIN:
                log.info("%s: discovery has found this engine; only discovery can unregister it now", member.registration.label)
                member.origin, member.lease = origin, None
            elif not is_equal and member.origin == origin:
                with suppress(NotFoundError):  # Another thread has unregistered the member.
                    self.unregister(member.registration.key)
        for key, registration in targets.items():
            if (former := self.members.get(key)) is None or former.origin != origin:
                try:
                    self.register(registration, origin, resume=resume)
                except (ConflictError, TooMuchError) as error:
                    faults.append(f"{error}; {error.hint}")
        self.on_change()  # The caller might have changed `adapters`.
        return faults

    def replace_adapter(self, source: str, lora: str) -> None:
        """Record that an engine has loaded the LoRA with this name from another path."""
        self.index.replace_lora(source, lora)

    # --- answers

    def why_unanswered(self, scope: Scope) -> ServiceError:
        """Return the error for a query for which the routing table has no worker. The scope might have a worker by now."""
        if self.failure is not None:
            return UnavailableError(f"the service no longer receives events: {self.failure}", "failed", "restart the service")
        if reason := self.why_incomplete():
            return UnavailableError(reason, "not-followed-yet", "retry in a second; /readyz says when it is ready")
        return self.scopes.unknown_model_error(scope)

    # --- callbacks of the follower

    def on_received(self, keys: Iterable[StreamKey]) -> None:
        """Lower the trust of the streams `keys`, if necessary, before the index applies their new deliveries."""
        for key in keys:
            member = self.members.get(key)
            if member is None or member.trust != Trust.EXACT:
                continue
            with suppress(LookupError):  # The stream was removed before this callback.
                if self.follower.subscriber.trust(*key) != Trust.EXACT:
                    self._update_trust(member, self._clock())
        self.on_change()

    def on_applied(self, batches: list[RawBatch], losses: list[Reset | Gap]) -> None:
        """Update the members whose deliveries the index has applied. `batches` has only the newest batch of each stream."""
        now = self._clock()
        for batch in batches:
            member = self.members.get((batch.source, batch.rank))
            if member is not None:
                self._changed_members.add(member.registration.key)
                member.last_event = now
                stamp = None if batch.replayed else timestamp_of(batch.payload)
                if stamp is not None:
                    member.lag = now - stamp
                self._update_after(batch, member, now)
        for loss in losses:
            member = self.members.get((loss.source, loss.rank))
            if member is not None:
                self._changed_members.add(member.registration.key)
                self._record_loss(member, loss, now)
                self._update_trust(member, now)
        self.on_change()

    def _update_after(self, batch: RawBatch, member: Member, now: float) -> None:
        """Update the trust of a member immediately if it is not EXACT, or might no longer be EXACT after this batch."""
        info, key = member.info, member.registration.key
        # Hashes of a query are looked up by the block sizes, and a block size can contradict the registration.
        if info is None or info.incarnation != batch.incarnation or not info.block_sizes:
            self._refresh(key, now)
            self._update_trust(member, now)
            return
        with suppress(LookupError):  # The stream was removed before this callback.
            if member.trust != Trust.EXACT or self.follower.subscriber.trust(*key) != Trust.EXACT:
                self._update_trust(member, now)

    def _record_loss(self, member: Member, loss: Reset | Gap, now: float) -> None:
        kind: Literal["gap", "reset"] = "gap"
        if isinstance(loss, Gap) and loss.compacted:
            log.info("%s: a snapshot represents batches %d to %d", member.registration.label, loss.first, loss.last)
            self._announce(SnapshotEvent, member, now, first=loss.first, last=loss.last)
            return
        if isinstance(loss, Gap):
            member.gaps.append(GapView(first=loss.first, last=loss.last, incarnation=loss.incarnation, at=now))
            sentence = f"batches {loss.first} to {loss.last} are lost"
        else:
            kind, sentence = "reset", f"its blocks are removed: {loss.reason}"
            if loss.is_restart:  # The requests of the process before it have ended with it.
                for worker in (member, *member.carried_members):
                    self.loads.requests.remove(*worker.registration.key)
                self._join(member.registration)
        if time.monotonic() >= member.log_muted_until:
            log.warning("%s: %s", member.registration.label, sentence)
            member.log_muted_until = time.monotonic() + LOSS_LOG_SECONDS
        self._announce(LossEvent, member, now, what=kind, sentence=sentence)

    def on_rejected(self, batch: RawBatch, events: tuple[Rejected, ...]) -> None:
        """Count the undecodable events of an applied batch."""
        wire_dialect = decode_batch(batch.payload).dialect
        dialect = "unknown" if wire_dialect is None else f"{wire_dialect.engine}-{wire_dialect.since}"
        for rejection in events:
            self.counts[dialect, rejection.reason] = self.counts.get((dialect, rejection.reason), 0) + rejection.count

    def on_tasks_done(self) -> None:
        """Publish, in one change, the members that submitted tasks have added or removed, before the futures are done."""
        self.on_change()

    def on_tick(self) -> None:
        """Update trust every `TRUST_UPDATE_SECONDS`, and refresh members every `REFRESH_SECONDS`."""
        now, instant = self._clock(), time.monotonic()
        if instant >= self._refresh_due:
            self._refresh_due = instant + REFRESH_SECONDS
            self._refresh_some(now)
        if instant >= self._trust_due:
            self._trust_due = instant + TRUST_UPDATE_SECONDS
            self._update_outdated_trust(now)
        self.on_change()

    def refresh(self) -> None:
        """Refresh all members now. Only the follower's thread may call this method."""
        now = self._clock()
        for key in list(self.members):
            self._refresh(key, now)
        self._update_outdated_trust(now)
        self.on_change()

    def on_failure(self, error: BaseException) -> None:
        """Mark all members as STALE, because the follower's thread has ended with an error."""
        self.failure = f"{type(error).__name__}: {error}"
        trust = Trust.STALE.with_reason(f"the service no longer follows engines: {self.failure}")
        for member in list(self.workers.values()):
            member.set_trust(trust, (Reason.FAILED,), self._clock())
        self.on_change()

    def _update_outdated_trust(self, now: float) -> None:
        """Update each member whose trust or reachability might have changed since its previous update."""
        reported, self._reported_members = self._reported_members, set()
        changes = dict(self.follower.subscriber.trust_changes())
        for key, member in list(self.members.items()):
            if key in changes or key in reported or member.is_outdated(self._why_not_ready(key, member)):
                self._update_trust(member, now, changes.get(key))

    def _why_not_ready(self, key: StreamKey, member: Member) -> str:
        return DRAINED_REASON if member.is_draining else self.unready_sources.get(key[0], "")

    def _update_trust(self, member: Member, now: float, trust: Trust | None = None) -> None:
        registration = member.registration
        try:
            trust = trust or self.follower.subscriber.trust(*registration.key)
            if (report := (trust.name, trust.reason, trust.attested)) != member.report:
                self._reported_members.add(registration.key)
                member.report = report
                member.status = self.follower.subscriber.status(*registration.key)  # The status has the reasons of the trust.
        except LookupError:  # The task that adds or removes the stream has not run yet.
            return
        codes, why_not_ready = member.trust_status.reason_codes, self._why_not_ready(registration.key, member)
        former = member.update_trust(trust, now)
        for worker in (member, *member.carried_members):
            if worker is not member:
                worker.status, worker.faults, worker.is_draining = member.status, member.faults, member.is_draining
                worker.silence_of_server, worker.last_event = member.silence_of_server, member.last_event
                worker.update_trust(trust, now)
            if worker.update_reach(why_not_ready):
                log.warning("%s: %s", worker.registration.label, worker.why_unreachable or "it can be reached again")
        self.on_change()  # Publish each member immediately, so that listings are not newer than the routing table for long.
        if former is not None:
            self._changed_members.add(registration.key)
            is_wrong = trust in {Trust.DEGRADED, Trust.STALE} and not member.is_caught_up
            level = logging.WARNING if is_wrong else logging.INFO
            log.log(level, "%s: %s, was %s", registration.label, member.trust, former)
        if former is not None or codes != member.trust_status.reason_codes:
            self._announce(SourceEvent, member, now, trust=member.trust_status, was=former or member.trust_status.state)

    def _refresh_some(self, now: float) -> None:
        if not self._pending_refresh:
            self._unregister_idle_topics()
            self._pending_refresh = list(self.members)
        count = min(math.ceil(len(self.members) / REFRESHES_PER_ROUND), MAX_IDLE_REFRESHES)
        due, self._changed_members = self._changed_members, set()
        due.update(self._pending_refresh[:count])
        due.update([key for key, member in list(self.members.items()) if member.status is None])
        del self._pending_refresh[:count]
        for key in due:
            self._refresh(key, now)

    def _refresh(self, key: StreamKey, now: float) -> None:
        member = self.members.get(key)
        if member is None:
            return
        try:
            status = self.follower.subscriber.status(*key)
        except LookupError:  # The task that adds or removes the stream has not run yet.
            return
        info = None
        with suppress(UnknownSourceError):  # No batch has arrived yet.
            info = self.index.worker(key)
        hidden_before = now - self._hide_stale_seconds
        member.refresh(status, info, hidden_before=hidden_before)
        if (info is not None and info.carried_ranks) or member.carried_members:
            self._refresh_carried(member, status, info, hidden_before)
        if self._published_batches.get(key) != status.counters.delivered and len(self.event_bus):
            self._published_batches[key] = status.counters.delivered
            fields = {"batches": status.counters.delivered, "last_seq": status.last_seq, "blocks": member.blocks}
            self._announce(BatchesEvent, member, now, **fields)

    def _refresh_carried(self, member: Member, status: StreamStatus, info: WorkerInfo | None, hidden_before: float) -> None:
        """Refresh the further ranks that a member's stream carries; add new ranks, and remove ranks that are gone."""
        name, _ = member.registration.key
        ranks = [] if info is None else [rank for rank in info.carried_ranks if (name, rank) not in self.members]
        carried = {worker.registration.rank: worker for worker in member.carried_members}
        has_changed = ranks != list(carried)
        if has_changed:
            for rank in ranks:
                if rank not in carried:
                    registration = msgspec.structs.replace(member.registration, rank=rank, load=None)
                    carried[rank] = Member(registration, member.origin, self._clock(), self.revision)
            with self._lock:
                member.carried_members = tuple(carried[rank] for rank in ranks)
                self._collect_workers(name)
        for worker in member.carried_members:
            with suppress(UnknownSourceError):  # The index has just removed the stream.
                worker.refresh(status, self.index.worker(worker.registration.key), hidden_before=hidden_before)
        if has_changed:
            self._update_trust(member, self._clock())

    def _collect_workers(self, name: str, *new: Member) -> None:
        """Update the workers of a source whose members have changed, and record which workers were added or removed."""
        members = [*self.members_of(name), *new]
        former = self._engines.pop(name, {})
        engine = {worker.registration.key: worker for member in members for worker in member.carried_members}
        engine.update({member.registration.key: member for member in members})
        if engine:
            self._engines[name] = engine
        self.workers.update(engine)
        for key in former.keys() - engine.keys():
            del self.workers[key]
        for key, worker in (*former.items(), *engine.items()):
            if former.get(key) is not engine.get(key):
                self.revision.advance(worker)

    def _announce(self, kind: Callable[..., StreamEvent], member: Member, now: float, **fields: object) -> None:
        registration = member.registration
        scope = {name: getattr(registration, name) for name in ("instance", "rank", "model", "tenant", "group")}
        self.event_bus.publish(kind(at=now, **scope, **fields))
