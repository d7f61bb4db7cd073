"""Registrations by clients: what may be registered, which ones a request to unregister means, and their file on the disk.

The handlers of `service/http/` translate requests and answers; the rules are here, for each API that registers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from kvevents.client.schemas import DEFAULT_GROUP
from kvevents.errors import ConfigError, EndpointError, SnapshotError
from kvevents.service.access import AuditLog
from kvevents.service.allow_list import EndpointAllowList
from kvevents.service.errors import ConflictError, NotFoundError, RefusedError, ServiceError
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.member import HTTP
from kvevents.service.fleet.registration import Key, Registration
from kvevents.service.prober import check_allowed, check_endpoints
from kvevents.service.state_store import StateStore
from kvevents.stream import Checkpoint


class Client(NamedTuple):
    """The sender of a request, for the audit log."""

    caller: str
    """Name of its token."""
    peer: str
    """Its address."""


class InstanceQuery(NamedTuple):
    """The ranks of one instance that a request to unregister means. None accepts any value."""

    instance: str
    rank: int | None = None
    model: str | None = None
    tenant: str | None = None
    """None is the default tenant."""
    group: str | None = None
    """None is the default routing group."""
    lora: str | None = None
    salt: str | None = None


class Registrations:
    """Adds clients' engines to a fleet and removes them. Methods are called in the event loop and raise `ServiceError`."""

    were_saved = False
    """Whether the file had registrations when the service started."""
    is_saved = True
    """Whether the file has all registrations; False after a write that failed."""

    def __init__(
        self,
        fleet: Fleet,
        allowed: EndpointAllowList,
        store: StateStore | None,
        *,
        audit: AuditLog,
        is_replica: bool,
        resume: Callable[[Key], Checkpoint | None],
        report_fault: Callable[[str], None],
    ) -> None:
        """`resume` returns the checkpoint from which a stream continues. `report_fault` is called if a write fails."""
        self._audit = audit
        self._fleet = fleet
        self._allowed = allowed
        self._store = store
        self._is_replica = is_replica
        self._resume = resume
        self._report_fault = report_fault
        self._writing = asyncio.Lock()
        self._changes = 0
        """Number of calls of `save`."""
        self._saved_changes = 0
        """Number of those after which the newest write began."""

    def restore(self, report_lost: Callable[[str], None]) -> None:
        """Register again what the file has. Call `report_lost` for what cannot be."""
        if self._store is None:
            return
        try:
            saved = self._store.load_registrations()
        except SnapshotError as error:
            report_lost(str(error))
            return
        self.were_saved = bool(saved)
        for registration in saved:
            try:
                check_endpoints(self._allowed, registration)  # the allow-list may have changed since
                self._fleet.register(registration, HTTP, resume=self._resume)
            except ServiceError as error:
                report_lost(f"{registration.label} is not followed again: {error}")

    async def register(self, registration: Registration, client: Client) -> None:
        """Follow an engine's rank, if its endpoints are allowed."""
        self._check_follows()
        await check_allowed(self._allowed, registration)
        try:
            await asyncio.wrap_future(self._fleet.register(registration, HTTP, resume=self._resume))
        except (ConfigError, EndpointError) as error:
            raise RefusedError(f"cannot follow {registration.label}: {error}", "bad-endpoint", "see its endpoints") from error
        await self.save()
        change = f"registered {registration.label} of tenant {registration.tenant} at {registration.endpoint}"
        self._audit.log_change(change, caller=client.caller, peer=client.peer)

    async def unregister(self, query: InstanceQuery, client: Client) -> list[Registration]:
        """Stop following the ranks of an instance, drop their blocks, and return the registrations that ended.

        Raises `NotFoundError` if no rank is registered, or if it is registered with another model, LoRA or salt.
        """
        found = self._find(query)
        outcomes = await asyncio.gather(*(self._remove(registration.key) for registration in found), return_exceptions=True)
        # Another client may have unregistered some of them meanwhile.
        ended = [each for each, outcome in zip(found, outcomes, strict=True) if not isinstance(outcome, BaseException)]
        for each in ended:
            self._audit.log_change(f"unregistered {each.label} of tenant {each.tenant}", caller=client.caller, peer=client.peer)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures and (not ended or not all(isinstance(failure, NotFoundError) for failure in failures)):
            raise next((failure for failure in failures if not isinstance(failure, NotFoundError)), failures[0])
        return ended

    def _find(self, query: InstanceQuery) -> list[Registration]:
        owner = (
            query.instance,
            DEFAULT_GROUP if query.tenant is None else query.tenant,
            DEFAULT_GROUP if query.group is None else query.group,
        )
        found = [
            member.registration
            for member in list(self._fleet.members.values())
            if (member.registration.instance, member.registration.tenant, member.registration.group) == owner
            and query.rank in {None, member.registration.rank}
        ]
        if not found:
            which = "" if query.rank is None else f" rank {query.rank}"
            raise NotFoundError(
                f"instance {query.instance}{which} not found", "not-registered", "see /workers for registered instances"
            )
        if query.model is not None and found[0].model != query.model:
            raise NotFoundError(
                f"instance {query.instance} is registered for model={found[0].model}", "other-model", "send that model, or none"
            )
        if (query.lora and query.lora != found[0].lora_name) or (query.salt and query.salt != found[0].salt):
            raise NotFoundError(
                f"instance {query.instance} is registered with another LoRA or salt", "other-scope", "send those, or none"
            )
        return found

    async def _remove(self, key: Key) -> None:
        self._check_follows()
        await asyncio.wrap_future(self._fleet.unregister(key))
        await self.save()

    def _check_follows(self) -> None:
        if self._is_replica:
            raise ConflictError("this service is a replica", "replica", "register the engine with the bridges of its plane")

    async def save(self) -> None:
        """Write the registrations to the disk. Changes during a write are written together by the next one."""
        if self._store is None:
            return
        self._changes += 1
        change = self._changes
        async with self._writing:
            if self._saved_changes >= change:
                return
            written = self._changes
            try:
                await asyncio.to_thread(self._store.save_registrations, self._registered)
            except SnapshotError as error:
                self.is_saved = False  # the next snapshot tries again
                self._report_fault(str(error))
            else:
                self.is_saved = True
            self._saved_changes = written

    def _registered(self) -> list[Registration]:
        return [member.registration for member in list(self._fleet.members.values()) if member.origin == HTTP]
