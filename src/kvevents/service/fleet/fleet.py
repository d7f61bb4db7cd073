"""The fleet: the registered members, the state of each stream, and the index that answers for all of them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

import msgspec

from kvevents.client.reasons import Reason
from kvevents.client.schemas import GapView, Media
from kvevents.errors import UnknownSourceError
from kvevents.index import Match, MultiModal, Namespace, PrefixIndex, WorkerInfo, keys_from_local_hashes
from kvevents.routing import LoadSettings
from kvevents.service.errors import ConflictError, NotFoundError, TooMuchError, UnavailableError
from kvevents.service.fleet.event_bus import BatchesEvent, EventBus, LossEvent, SnapshotEvent, SourceEvent, StreamEvent
from kvevents.service.fleet.follower import Follower, IndexSink, Listener, LoadFollower, timestamp_of
from kvevents.service.fleet.member import HTTP, Member, MemberMatch, Revision
from kvevents.service.fleet.registration import Key, Registration, Scope, check_same_engine
from kvevents.service.scope_fields import Scopes
from kvevents.service.settings import DEFAULT_FLEET_TIMING, FleetTiming
from kvevents.stream import Checkpoint, Gap, RawBatch, Reset, Trust
from kvevents.subscriber import StreamStatus, Subscriber
from kvevents.wire import Rejected, decode_batch
from kvevents.zeromq.keys import Curve

log = logging.getLogger(__name__)

DEFAULT_LOAD_SETTINGS: Final = LoadSettings()


Resume: TypeAlias = Callable[[Key], Checkpoint | None]
"""Returns the checkpoint at which to resume a stream; None for its beginning."""


def _no_checkpoint(_: Key) -> Checkpoint | None:
    return None


class Fleet(Listener):
    """The registered members and their index. Any thread may call every method; the follower changes the subscriber."""

    adapters: frozenset[Scope] = frozenset()
    """LoRA adapters that requests may name as their model, as engines list them."""
    version = 0
    """It changes when a member is added or removed."""
    state_version = 0
    """It changes when a member changes its state."""
    failure: str | None = None
    """The error that ended the follower; None while it runs."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        max_sources: int,
        hide_stale_seconds: float = float("inf"),
        curve: Curve | None = None,
        timing: FleetTiming = DEFAULT_FLEET_TIMING,
        load: LoadSettings = DEFAULT_LOAD_SETTINGS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.index = index
        self.event_bus = EventBus()
        self.members: dict[Key, Member] = {}
        """The registered members."""
        self.workers: Mapping[Key, Member] = self.members
        """The members, and the other ranks that their streams carry."""
        self.counts: dict[tuple[str, str], int] = {}
        """Rejected events by dialect and reason, for `kvevents_rejected_events`."""
        self.follow_errors: dict[Key, str] = {}
        """Why engines of discovery are not followed, such as an endpoint that cannot be bound."""
        self._max_sources = max_sources
        self._hide_stale_seconds = hide_stale_seconds
        self.curve = curve
        """CURVE keys for engines whose registration has none. They are not in registrations, which are written to the disk."""
        self._timing = timing
        self._clock = clock
        self._lock = threading.Lock()
        self.revision: Final = Revision()
        """It changes with each change of the members that answers show."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the revision might have changed."""
        self._published_batches: dict[Key, int] = {}
        self._sizes: dict[tuple[str, ...], list[int]] = {}
        self._scopes = Scopes()
        self.why_incomplete: Callable[[], str] = str
        """Returns why engines of any model may be missing; empty if all are known."""
        self._dirty: set[Key] = set()
        """Members that received events since the last refresh."""
        self._pending_refresh: list[Key] = []
        """Members that are still to be refreshed in the current round over all members."""
        self._refresh_batch = 1
        """How many of them the next refresh takes."""
        self._refresh_due = 0.0
        self._trust_due = 0.0
        self.loads: Final = LoadFollower(load)
        sink = IndexSink(index, self)
        self.follower = Follower(Subscriber(decode=False, sink=sink), sink)

    def replace_index(self, follower: Follower, index: PrefixIndex) -> Follower:
        """Answer from another index, which `follower` writes. Return the previous follower, which the caller must stop.

        The registrations stay. The streams of both indexes must have the same names.
        """
        before = self.follower
        for member in list(self.members.values()):
            registration = member.registration
            index.set_model(registration.key[0], registration.scope.name)
            index.set_drafts(registration.key[0], registration.drafts)
        before.sink.listener = Listener()
        self.index, self.follower = index, follower
        follower.sink.listener = self
        self.on_change()
        return before

    # --- membership

    def register(self, registration: Registration, origin: str = HTTP, *, resume: Resume = _no_checkpoint) -> Future[None]:
        """Register a stream, and follow it from the checkpoint that `resume` returns.

        Raises `ConflictError` and `TooMuchError`. The future raises `EndpointError` or `ConfigError` for an unusable endpoint.
        """
        with self._lock:
            self._check(registration)
            checkpoint = resume(registration.key)
            member = Member(registration, origin, self._clock(), self.revision)
            self.members[registration.key] = member
            self._collect_workers()
            self._scopes.add(registration.scope)
            self.version += 1
            self.revision.advance()
            self._update_block_sizes()
        self.on_change()
        done = self.follower.submit(lambda: self._follow(member, checkpoint))
        done.add_done_callback(lambda future: self._refuse(member, error) if (error := future.exception()) else None)
        return done

    def _check(self, registration: Registration) -> None:
        label = registration.label
        if (known := self.members.get(registration.key)) is not None:
            same = known.registration == registration
            what = (
                "registered already"
                if same
                else f"registered already, with {_describe_difference(known.registration, registration)}"
            )
            raise ConflictError(f"{label} is {what}", "registered", "unregister it first")
        if len(self.members) >= self._max_sources:
            raise TooMuchError(
                f"{len(self.members)} sources are registered, which is the limit",
                "too-many-sources",
                "raise limits.max_sources",
            )
        name = registration.key[0]
        for other in [member.registration for key, member in self.members.items() if key[0] == name]:
            check_same_engine(registration, other)

    def _follow(self, member: Member, resume: Checkpoint | None) -> None:
        registration = member.registration
        name, rank = registration.key
        source = registration.source()
        if source.curve is None and self.curve is not None:
            source = replace(source, curve=self.curve)
        if resume is None:
            self.index.remove_worker((name, rank))
            self.index.readmit((name, rank))
        self.follower.subscriber.add(source, resume)
        if registration.load is not None:
            member.load = self.loads.follow(registration, self.curve)
        self.index.set_model(name, registration.scope.name)
        self.index.set_drafts(name, registration.drafts)
        log.info("%s: following %s", registration.label, registration.endpoint)

    def unregister(self, key: Key) -> Future[int]:
        """Stop following a stream and remove its blocks; the future returns their number. Raises `NotFoundError`."""
        with self._lock:
            member = self.members.get(key)
            if member is None:
                raise NotFoundError(
                    f"{key[0].split(chr(31))[-1]} rank {key[1]} is not registered", "not-registered", "see /workers"
                )
            self._drop(member)
        self.on_change()
        return self.follower.submit(lambda: self._leave(member))

    def _refuse(self, member: Member, error: BaseException) -> None:
        log.error("cannot follow %s: %s", member.registration.label, error)
        with self._lock:
            if self.members.get(member.registration.key) is member:
                self._drop(member)
                self.on_change()
            if member.origin != HTTP:  # a client receives the error in the answer
                self.follow_errors[member.registration.key] = f"cannot follow {member.registration.label}: {error}"

    def _drop(self, member: Member) -> None:
        del self.members[member.registration.key]
        self._collect_workers()
        self.version += 1
        self.revision.advance()
        self._published_batches.pop(member.registration.key, None)
        self._scopes.drop(member.registration.scope)

    def _leave(self, member: Member) -> int:
        name, rank = member.registration.key
        self.follower.subscriber.remove(name, rank)
        self.loads.leave((name, rank))
        if self._is_followed(name, rank):  # a stream of a log that joined again meanwhile
            return 0
        blocks = self.index.remove_worker((name, rank))
        if not any(key[0] == name for key in list(self.members)):
            self.index.set_model(name, None)
            self.index.set_drafts(name, None)
        log.info("%s: no longer followed; it held %d blocks", member.registration.label, blocks)
        return blocks

    def _is_followed(self, name: str, rank: int) -> bool:
        try:
            self.follower.subscriber.trust(name, rank)
        except LookupError:
            return False
        return True

    def replace_registrations(self, origin: str, registrations: Iterable[Registration], resume: Resume) -> list[str]:
        """Make `registrations` the only ones of `origin`. Return sentences about those that cannot be registered."""
        wanted = {registration.key: registration for registration in registrations}
        faults: list[str] = []
        self.follow_errors.clear()
        for member in [member for member in list(self.members.values()) if member.origin == origin]:
            if wanted.get(member.registration.key) != member.registration:
                with suppress(NotFoundError):  # it was removed meanwhile
                    self.unregister(member.registration.key)
        for key, registration in wanted.items():
            if (known := self.members.get(key)) is None or known.origin != origin:
                try:
                    self.register(registration, origin, resume=resume)
                except (ConflictError, TooMuchError) as error:
                    faults.append(f"{error}; {error.hint}")
        return faults

    def replace_adapter(self, source: str, lora: str) -> None:
        """Note that an engine has loaded a LoRA name from another path."""
        self.index.replace_lora(source, lora)

    # --- answers

    def match(
        self,
        scope: Scope,
        tokens: Any,
        *,
        mm: Sequence[Media] = (),
        expected: bool = False,
        whole_prompt: bool = False,
    ) -> list[MemberMatch]:
        """Return the matches of a prompt in a scope. Raises `NotFoundError` for a model without workers.

        Unless `whole_prompt`, the last token does not count. An engine recomputes it and its block, so at most (n - 1) // block
        size blocks of n tokens are useful: vLLM 0.33 `v1/core/kv_cache_manager.py` (`get_computed_blocks`), SGLang 0.5.23
        `managers/schedule_batch.py` (`max_prefix_len`).
        """
        found: list[MemberMatch] = []
        longest = len(tokens) if whole_prompt else max(len(tokens) - 1, 0)
        media = tuple(MultiModal(id=each.id, start=each.start, length=each.length) for each in mm) if mm else ()
        for namespace in self.namespaces(scope):
            within = replace(namespace, mm=media) if media else namespace
            found += self._rows(self.index.match(tokens, within, overlay=expected, max_tokens=longest))
        return found

    def match_keys(self, scope: Scope, keys: list[int], *, local: bool = False) -> list[MemberMatch]:
        """Return the matches of block keys: rolling ones, or with `local` the hash of each block alone."""
        rolling = keys_from_local_hashes(keys) if local else keys
        found: list[MemberMatch] = []
        sizes = self.block_sizes(scope)
        for namespace in self.namespaces(scope):
            for size in sizes:
                found += self._rows(self.index.match_keys(rolling, size, namespace))
        return found

    def expect(self, scope: Scope, worker: tuple[str, int], tokens: Any, seconds: float) -> None:
        """Add a speculative entry for `seconds`: the worker will hold the prompt. Do nothing if it is not a member."""
        for member in list(self.workers.values()):
            registration = member.registration
            if (registration.instance, registration.rank) == worker and member.admits(scope):
                own = registration.scope
                namespace = Namespace(
                    model=own.name, lora=None if own.lora else scope.lora, salt=None if own.salt else scope.salt
                )
                self.index.speculate(registration.key, tokens, namespace, ttl=seconds)
                return

    def block_sizes(self, scope: Scope) -> list[int]:
        """Return the tokens per block of the members in a scope, the smallest first."""
        return self._sizes.get(scope[:3], [])

    @property
    def all_block_sizes(self) -> dict[tuple[str, ...], list[int]]:
        """Tokens per block by model, tenant and group."""
        return self._sizes

    def _update_block_sizes(self) -> None:
        found: dict[tuple[str, ...], set[int]] = {}
        for member in list(self.workers.values()):
            declared = member.registration.block_size
            sizes = member.block_sizes or ([] if declared is None else [declared])
            found.setdefault(member.registration.scope[:3], set()).update(sizes)
        ordered = {scope: sorted(sizes) for scope, sizes in found.items()}
        if ordered != self._sizes:
            self._sizes = ordered
            self.revision.advance()

    def _rows(self, match: Match) -> list[MemberMatch]:
        members = self.workers
        return [
            MemberMatch(member, gpu, cpu, disk, tokens, certain, is_certain)
            for source, rank, gpu, cpu, disk, tokens, certain, is_certain in match.rows()
            if (member := members.get((source, rank))) is not None
        ]

    def namespaces(self, scope: Scope) -> list[Namespace]:
        """Return the namespaces of the index in which a prompt can be, by its scope, its LoRA and its salt.

        Raises `NotFoundError` for a model that no worker serves, and `UnavailableError` after the follower has failed.
        """
        if self.failure is not None:
            raise UnavailableError(f"the service no longer receives events: {self.failure}", "failed", "restart the service")
        try:
            return self._scopes.namespaces(scope)
        except NotFoundError:
            if why := self.why_incomplete():
                raise UnavailableError(why, "not-followed-yet", "retry in a second; /readyz says when it is ready") from None
            raise

    # --- callbacks of the follower

    def on_received(self, keys: Iterable[Key]) -> None:
        """See `Listener`. Trust that the deliveries lower is updated before the index contains them."""
        for key in keys:
            member = self.members.get(key)
            if member is None or member.trust != Trust.EXACT:
                continue
            with suppress(LookupError):  # it has left meanwhile
                if self.follower.subscriber.trust(*key) != Trust.EXACT:
                    self._update_trust(member, self._clock())
        self.on_change()

    def on_applied(self, batches: list[RawBatch], losses: list[Reset | Gap]) -> None:
        """See `Listener`."""
        now = self._clock()
        for batch in batches:
            member = self.members.get((batch.source, batch.rank))
            if member is not None:
                self._dirty.add(member.registration.key)
                member.last_event = now
                stamp = None if batch.replayed else timestamp_of(batch.payload)
                if stamp is not None:
                    member.lag = now - stamp
                self._update_after(batch, member, now)
        for loss in losses:
            member = self.members.get((loss.source, loss.rank))
            if member is not None:
                self._dirty.add(member.registration.key)
                self._record_loss(member, loss, now)
        if losses:
            self._update_all_trust(now)
        self.on_change()

    def _update_after(self, batch: RawBatch, member: Member, now: float) -> None:
        """Update the trust of a member at once if it is not EXACT, or might not be after this batch."""
        info, key = member.info, member.registration.key
        has_unknown_size = info is None or info.incarnation != batch.incarnation or not info.block_sizes
        if member.registration.block_size is not None and has_unknown_size:
            self._refresh(key, now)
            self._update_trust(member, now)
            return
        with suppress(LookupError):  # it has left meanwhile
            if member.trust != Trust.EXACT or self.follower.subscriber.trust(*key) != Trust.EXACT:
                self._update_trust(member, now)

    def _record_loss(self, member: Member, loss: Reset | Gap, now: float) -> None:
        what: Literal["gap", "reset"] = "gap"
        if isinstance(loss, Gap) and loss.compacted:
            log.info("%s: a snapshot represents batches %d to %d", member.registration.label, loss.first, loss.last)
            self._announce(SnapshotEvent, member, now, first=loss.first, last=loss.last)
            return
        if isinstance(loss, Gap):
            member.gaps.append(GapView(first=loss.first, last=loss.last, incarnation=loss.incarnation, at=now))
            sentence = f"batches {loss.first} to {loss.last} are lost"
        else:
            what, sentence = "reset", f"its blocks are removed: {loss.reason}"
            member.evicted = member.info.evicted if member.info is not None else 0
        self._warn(member, sentence)
        self._announce(LossEvent, member, now, what=what, sentence=sentence)

    def _warn(self, member: Member, sentence: str) -> None:
        if time.monotonic() < member.log_muted_until:
            member.suppressed_losses += 1
            return
        more = f" ({member.suppressed_losses} more losses were not logged)" if member.suppressed_losses else ""
        log.warning("%s: %s%s", member.registration.label, sentence, more)
        member.log_muted_until, member.suppressed_losses = time.monotonic() + self._timing.loss_log_seconds, 0

    def on_rejected(self, batch: RawBatch, events: tuple[Rejected, ...]) -> None:
        """See `Listener`."""
        known = decode_batch(batch.payload).dialect
        dialect = "unknown" if known is None else f"{known.engine}-{known.since}"
        for one in events:
            self.counts[dialect, one.reason] = self.counts.get((dialect, one.reason), 0) + one.count

    def on_tick(self) -> None:
        """See `Listener`."""
        now, instant = self._clock(), time.monotonic()
        if instant >= self._refresh_due:
            self._refresh_due = instant + self._timing.refresh_seconds
            self._refresh_some(now)
        if instant >= self._trust_due:
            self._trust_due = instant + self._timing.trust_seconds
            self._update_all_trust(now)
        self.on_change()

    def refresh(self) -> None:
        """Refresh all members at once. Only the follower's thread may call it."""
        now = self._clock()
        for key in list(self.members):
            self._refresh(key, now)
        self._update_block_sizes()
        self._update_all_trust(now)
        self.on_change()

    def on_failure(self, error: BaseException) -> None:
        """See `Listener`."""
        self.failure = f"{type(error).__name__}: {error}"
        stale = Trust.STALE.with_reason(f"the service no longer follows engines: {self.failure}")
        for member in list(self.workers.values()):
            member.set_trust(stale, (Reason.FAILED,), self._clock())
        self.state_version += 1
        self.on_change()

    def _update_all_trust(self, now: float) -> None:
        for member in list(self.members.values()):
            self._update_trust(member, now)

    def _update_trust(self, member: Member, now: float) -> None:
        registration = member.registration
        try:
            trust = self.follower.subscriber.trust(*registration.key)
            if (reported := (trust.name, trust.reason, trust.attested)) != member.reported:
                member.reported = reported
                member.status = self.follower.subscriber.status(*registration.key)  # it contains the reasons of this trust
        except LookupError:  # its order is on its way
            return
        codes = member.trust_status.reason_codes
        former = member.update_trust(trust, now)
        for each in member.carried:
            each.status, each.faults = member.status, member.faults
            self.state_version += each.update_trust(trust, now) is not None
        if former is not None:
            self.state_version += 1
            self._dirty.add(registration.key)
            is_wrong = trust in {Trust.DEGRADED, Trust.STALE} and not member.is_caught_up
            level = logging.WARNING if is_wrong else logging.INFO
            log.log(level, "%s: %s, was %s", registration.label, member.trust, former)
        if former is not None or codes != member.trust_status.reason_codes:
            self._announce(SourceEvent, member, now, trust=member.trust_status, was=former or member.trust_status.state)

    def _refresh_some(self, now: float) -> None:
        if not self._pending_refresh:
            self._update_block_sizes()
            self._pending_refresh = list(self.members)
            self._refresh_batch = math.ceil(len(self._pending_refresh) / self._timing.refreshes_per_round)
        due, self._dirty = self._dirty, set()
        due.update(self._pending_refresh[: self._refresh_batch])
        due.update([key for key, member in list(self.members.items()) if member.status is None])
        del self._pending_refresh[: self._refresh_batch]
        for key in due:
            self._refresh(key, now)

    def _refresh(self, key: Key, now: float) -> None:
        member = self.members.get(key)
        if member is None:
            return
        try:
            status = self.follower.subscriber.status(*key)
        except LookupError:  # its order is on its way
            return
        info, sizes = None, member.block_sizes
        with suppress(UnknownSourceError):  # nothing of it has come yet
            info = self.index.worker(key)
        hidden_before = now - self._hide_stale_seconds
        member.refresh(status, info, hidden_before=hidden_before)
        if (info is not None and info.carried_ranks) or member.carried:
            self._refresh_carried(member, status, info, hidden_before)
        if member.block_sizes != sizes:
            self._update_block_sizes()
        if self._published_batches.get(key) != status.counters.delivered and len(self.event_bus):
            self._published_batches[key] = status.counters.delivered
            fields = {"batches": status.counters.delivered, "last_seq": status.last_seq, "blocks": member.blocks}
            self._announce(BatchesEvent, member, now, **fields)

    def _refresh_carried(self, member: Member, status: StreamStatus, info: WorkerInfo | None, hidden_before: float) -> None:
        """Refresh the other ranks that a member's stream carries, and follow changes of these."""
        name, _ = member.registration.key
        ranks = [] if info is None else [rank for rank in info.carried_ranks if (name, rank) not in self.members]
        known = {each.registration.rank: each for each in member.carried}
        sizes = [each.block_sizes for each in member.carried]
        has_changed = ranks != list(known)
        if has_changed:
            for rank in ranks:
                if rank not in known:
                    registration = msgspec.structs.replace(member.registration, rank=rank, load=None)
                    known[rank] = Member(registration, member.origin, self._clock(), self.revision)
            with self._lock:
                member.carried = tuple(known[rank] for rank in ranks)
                self._collect_workers()
                self.version += 1
                self.revision.advance()
        for each in member.carried:
            with suppress(UnknownSourceError):  # its stream has just ended
                each.refresh(status, self.index.worker(each.registration.key), hidden_before=hidden_before)
        if has_changed:
            self._update_trust(member, self._clock())
        if sizes != [each.block_sizes for each in member.carried]:
            self._update_block_sizes()

    def _collect_workers(self) -> None:
        members = list(self.members.values())
        carried = {each.registration.key: each for member in members for each in member.carried}
        self.workers = {**carried, **self.members} if carried else self.members

    def _announce(self, kind: Callable[..., StreamEvent], member: Member, now: float, **more: object) -> None:
        registration = member.registration
        self.event_bus.publish(
            kind(
                at=now,
                instance=registration.instance,
                rank=registration.rank,
                model=registration.model,
                tenant=registration.tenant,
                group=registration.group,
                **more,
            )
        )


def _describe_difference(known: Registration, given: Registration) -> str:
    names = [name for name in known.__struct_fields__ if getattr(known, name) != getattr(given, name)]
    return "another " + " and ".join(names)
