"""Registrations by clients: the rules for registering and unregistering, leases, and the file of registrations.

The handlers of `service/http/` translate requests and answers. This module has the rules, which are the same for all APIs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from msgspec import Struct, field

from kvevents.client.schemas import DEFAULT_GROUP
from kvevents.errors import ConfigError, EndpointError, SnapshotError
from kvevents.service.access import AuditLog, Client
from kvevents.service.allow_list import EndpointAllowList
from kvevents.service.errors import ConflictError, NotFoundError, RefusedError, ServiceError
from kvevents.service.fleet.fleet import LISTING_HINT, Fleet
from kvevents.service.fleet.member import HTTP_ORIGIN, Member
from kvevents.service.fleet.registration import Lease, Registration, StreamKey, source_name
from kvevents.service.prober import check_allowed, endpoints_of
from kvevents.service.state_store import SavedRegistration, StateStore
from kvevents.stream import Checkpoint

LEASE_CHECK_SECONDS: Final = 0.2
"""Pause in seconds between two searches for leases that have ended."""


class InstanceQuery(NamedTuple):
    """Selects ranks of one instance, for example to unregister them. A field with None accepts any value."""

    instance: str
    rank: int | None = None
    model: str | None = None
    tenant: str = DEFAULT_GROUP
    group: str = DEFAULT_GROUP
    lora: str | None = None
    salt: str | None = None


class RegistrationOutcome(NamedTuple):
    """The effect of a request to register."""

    is_new: bool
    """False if an equal registration already existed."""
    warning: str = ""
    """A warning for the client, as a sentence; empty without a warning."""


class Registrations(Struct, eq=False, kw_only=True):
    """Adds and removes the engines that clients register. Methods are called in the event loop and raise `ServiceError`."""

    fleet: Fleet
    allow_list: EndpointAllowList
    store: StateStore | None
    audit: AuditLog
    advice: str
    """Where clients can register engines if this service follows no engines itself; else empty."""
    owner_of: Callable[[StreamKey], str | None]
    """Returns the name of the discovery provider that has found a rank; None if no provider has found it."""
    resume: Callable[[StreamKey], Checkpoint | None]
    """Function that returns the checkpoint from which the stream of a rank continues; None without a checkpoint."""
    report_fault: Callable[[str], None]
    """Function that is called after each write, with a sentence about the failure or, after a success, with an empty text."""
    were_saved: bool = False
    """Whether the file had registrations by clients (not only drained ranks) when the service started."""
    ended_leases: int = 0
    """Number of ranks that were unregistered because their leases had ended."""
    _write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changes: int = 0
    """Number of calls of `save`."""
    _saved_changes: int = 0
    """Value of `_changes` at the begin of the newest complete write."""

    def restore(self, report_lost: Callable[[str], None]) -> None:
        """Restore the registrations in the file. Call `report_lost` for each registration that cannot be restored."""
        if self.store is None:
            return
        try:
            entries = self.store.load_registrations()
        except SnapshotError as error:
            report_lost(str(error))
            return
        self.were_saved = any(entry.origin == HTTP_ORIGIN for entry in entries)
        for entry in entries:
            registration = entry.registration
            if entry.origin != HTTP_ORIGIN:
                self.fleet.drained[registration.key] = Member(registration, entry.origin, time.time(), is_draining=True)
                continue
            try:
                for endpoint in endpoints_of(registration):
                    self.allow_list.check(endpoint)  # The allow-list might have changed after the registration.
                self.fleet.register(registration, HTTP_ORIGIN, resume=self.resume)
                self._grant_lease(registration.key, entry.lease_seconds)
                if entry.is_draining:
                    self.fleet.set_draining(registration.key, is_draining=True)
            except ServiceError as error:
                report_lost(f"{registration.label} is not followed again: {error}")

    async def register(
        self, registration: Registration, client: Client, lease_seconds: int | None = None
    ) -> RegistrationOutcome:
        """Follow an engine's rank, if its endpoints are allowed. If an equal registration exists, only renew its lease.

        The lease begins now. Without `lease_seconds`, the registration has no lease. Registrations by discovery have no lease.
        """
        self._check_follows_engines()
        await check_allowed(self.allow_list, *endpoints_of(registration))
        member = self.fleet.members.get(registration.key)
        if member is not None and member.origin != HTTP_ORIGIN:
            return self._find_owned(member.registration, registration)
        if member is not None and not member.registration.differences(registration):
            has_changed = lease_seconds != (member.lease and member.lease.seconds)
            self._grant_lease(registration.key, lease_seconds)
            if has_changed:
                await self.save()
            return RegistrationOutcome(is_new=False)
        following = self.fleet.register(registration, HTTP_ORIGIN, resume=self.resume)
        self._grant_lease(registration.key, lease_seconds)
        try:
            await asyncio.wrap_future(following)
        except (ConfigError, EndpointError) as error:
            raise RefusedError(f"cannot follow {registration.label}: {error}", "bad-endpoint", "check its endpoints") from error
        await self.save()
        change = f"registered {registration.label} of tenant {registration.tenant} at {registration.endpoint}"
        self.audit.log_change(change, client)
        return RegistrationOutcome(is_new=True, warning=self._describe_duplicate(registration))

    def _describe_duplicate(self, new: Registration) -> str:
        """Return a warning if the engine is also registered under another name; else an empty text."""
        for other in [member.registration for member in self.fleet.members_at(new.endpoint)]:
            if other.topic == new.topic and other.scope == new.scope and other.instance != new.instance:
                return f"{other.label} has the same endpoint and topic: one engine counts as two, and is chosen twice as often"
        return ""

    def _find_owned(self, current: Registration, registration: Registration) -> RegistrationOutcome:
        """Return the outcome for a rank that discovery found. Raises `ConflictError` if the client's registration differs."""
        owner = self.owner_of(current.key) or "discovery"
        if different := current.differences(registration):
            sentence = f"{current.label} was found by {owner}, with a different {' and '.join(different)}"
            raise ConflictError(sentence, "named-by-discovery", "change the engine where discovery finds it")
        return RegistrationOutcome(is_new=False, warning=f"{current.label} was found by {owner}, which alone can unregister it")

    def _grant_lease(self, key: StreamKey, seconds: int | None) -> None:
        if (member := self.fleet.members.get(key)) is not None:  # None if the follower has refused the rank.
            member.lease = Lease.start(seconds)

    async def end_leases(self) -> None:
        """Unregister each rank whose lease has ended. Run until cancelled."""
        while True:
            leases = [(lease, member.registration) for member in list(self.fleet.members.values()) if (lease := member.lease)]
            due = [(lease, registration) for lease, registration in leases if lease.ends_at <= time.monotonic()]
            for lease, registration in due:
                with suppress(NotFoundError):  # The follower has refused the rank.
                    self.fleet.unregister(registration.key)
                    name = f"{registration.label} of tenant {registration.tenant}"
                    self.ended_leases += 1
                    self.audit.log_change(f"unregistered {name}: its lease of {lease.seconds} s ended")
            if due:
                await self.save()
            await asyncio.sleep(LEASE_CHECK_SECONDS)

    async def unregister(self, query: InstanceQuery, client: Client) -> list[Registration]:
        """Stop following the ranks of an instance, drop their blocks, and return the registrations that ended.

        Raises `NotFoundError` if no rank is registered, or if the instance has another model, LoRA or salt. Raises
        `ConflictError` if discovery has found one of the ranks.
        """
        members = self._find(query)
        for member in members:
            if member.origin != HTTP_ORIGIN and (owner := self.owner_of(member.registration.key)) is not None:
                sentence = f"{member.registration.label} was found by {owner}"
                raise ConflictError(sentence, "named-by-discovery", "remove the engine where discovery finds it")
        self._check_follows_engines()
        ranks = [member.registration for member in members]
        await asyncio.gather(*(asyncio.wrap_future(self.fleet.unregister(rank.key)) for rank in ranks))
        await self.save()
        for rank in ranks:
            self.audit.log_change(f"unregistered {rank.label} of tenant {rank.tenant}", client)
        return ranks

    async def drain(self, query: InstanceQuery, client: Client, *, is_draining: bool) -> list[Registration]:
        """Exclude the ranks of an instance from selections, or include them again, and return their registrations.

        Raises `NotFoundError` if no rank is registered.
        """
        self._check_follows_engines()
        ranks = [member.registration for member in self._find(query)]
        changes = [self.fleet.set_draining(rank.key, is_draining=is_draining) for rank in ranks]
        await asyncio.gather(*map(asyncio.wrap_future, changes))
        await self.save()
        for rank in ranks:
            change = f"{'drained' if is_draining else 'ended the draining of'} {rank.label} of tenant {rank.tenant}"
            self.audit.log_change(change, client)
        return ranks

    def _find(self, query: InstanceQuery) -> list[Member]:
        source = source_name(query.tenant, query.group, query.instance)
        members = self.fleet.members_of(source)
        ranks = [member for member in members if query.rank in {None, member.registration.rank}]
        if not ranks:
            suffix = "" if query.rank is None else f" rank {query.rank}"
            rows = [(each.registration.rank, one.registration.label) for one in members for each in one.carried_members]
            why = next((f": it changes with {label}, which has its events" for rank, label in rows if rank == query.rank), "")
            raise NotFoundError(f"instance {query.instance}{suffix} not found{why}", "not-registered", LISTING_HINT)
        first, subject = ranks[0].registration, f"instance {query.instance} is registered"
        if query.model is not None and first.model != query.model:
            raise NotFoundError(f"{subject} with model {first.model!r}", "other-model", "send this model, or no model")
        if (query.lora and query.lora != first.lora_name) or (query.salt and query.salt != first.salt):
            raise NotFoundError(f"{subject} with another LoRA or salt", "other-scope", "send that LoRA and salt, or neither")
        return ranks

    def _check_follows_engines(self) -> None:
        if self.advice:
            raise ConflictError("this service does not follow engines itself", "replica", self.advice)

    async def save(self) -> None:
        """Write the registrations to the disk. If a registration changes during the write, write them again."""
        if self.store is None:
            return
        self._changes += 1
        change = self._changes
        async with self._write_lock:
            if self._saved_changes >= change:
                return
            newest, fault = self._changes, ""
            try:
                await asyncio.to_thread(self.store.save_registrations, self._list_registrations)
            except SnapshotError as error:  # The service calls `save` again with the next snapshot.
                fault = str(error)
            self._saved_changes = newest
            self.report_fault(fault)

    def _list_registrations(self) -> list[SavedRegistration]:
        members = {key: member for key, member in list(self.fleet.members.items()) if member.origin == HTTP_ORIGIN}
        return [
            SavedRegistration(member.registration, member.lease and member.lease.seconds, member.is_draining, member.origin)
            for member in {**self.fleet.drained.copy(), **members}.values()
        ]
