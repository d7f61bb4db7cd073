"""Why an engine cannot be reached, and whether it may be: ZeroMQ retries for ever and says nothing, so others have to look."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Final

from kvevents.backoff import Backoff
from kvevents.endpoints import split_tcp
from kvevents.errors import KVEventsError
from kvevents.service.allowing import AllowList, EndpointRefusedError
from kvevents.service.fleet import HTTP, Fleet
from kvevents.service.member import Member
from kvevents.service.registration import Registration
from kvevents.stream import Trust

log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 2.0
"""How long an attempt may take: more is as bad as nothing for a router."""
MAX_AT_ONCE: Final = 64
"""Attempts at one time."""
ROUND_SECONDS: Final = 0.1
"""How often it is looked for whom to try."""
SIGNATURE_BYTES: Final = 10
"""With which every ZeroMQ peer begins."""
AUDIT_SECONDS: Final = 30.0
"""How often it is looked where the names lead that clients have given: what was allowed may lead elsewhere now."""


async def addresses_of(endpoint: str) -> list[str]:
    """Where a TCP endpoint leads; nowhere for one of another kind. Raises `socket.gaierror` and `TimeoutError`."""
    found = split_tcp(endpoint)
    if found is None:
        return []
    async with asyncio.timeout(CONNECT_SECONDS):
        looked_up = await asyncio.get_running_loop().getaddrinfo(found[0].strip("[]"), found[1], type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in looked_up]


async def check_allowed(allowed: AllowList, registration: Registration) -> None:
    """Raise `EndpointRefusedError` where a client's registration leads to what it may not name.

    A name that does not resolve leads nowhere yet; it is looked at again when it does.
    """
    for endpoint in (registration.endpoint, registration.replay_endpoint):
        if endpoint is not None:
            allowed.check(endpoint, bind=registration.bind)
            with suppress(socket.gaierror, TimeoutError):
                allowed.check_addresses(endpoint, await addresses_of(endpoint), bind=registration.bind)


class Prober:
    """Tries a connection of its own to whatever is not connected, less and less often."""

    def __init__(self, fleet: Fleet, allowed: AllowList) -> None:
        self._fleet = fleet
        self._allowed = allowed
        self._due: dict[Member, tuple[float, Backoff]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        audit = loop.time() + AUDIT_SECONDS
        try:
            while True:
                self._round(loop.time())
                if loop.time() >= audit:
                    audit = loop.time() + AUDIT_SECONDS
                    self._start(self._audit())
                await asyncio.sleep(ROUND_SECONDS)
        finally:
            for task in self._running:
                task.cancel()

    def _round(self, now: float) -> None:
        lost = {member for member in list(self._fleet.members.values()) if member.trust in {Trust.CONNECTING, Trust.STALE}}
        for member in [known for known in self._due if known not in lost]:
            del self._due[member]
            self._tell(member, None)
        for member in lost:
            due, backoff = self._due.get(member) or (now, Backoff())
            if due <= now and len(self._running) < MAX_AT_ONCE:
                self._due[member] = now + CONNECT_SECONDS + backoff.pause(), backoff
                self._start(self._try(member))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _try(self, member: Member) -> None:
        if await self._may_stay(member):
            fault = await fault_of(member.registration)
            if member in self._due:  # it may have been connected meanwhile
                self._tell(member, fault)

    async def _audit(self) -> None:
        for member in list(self._fleet.members.values()):
            if member.origin == HTTP:
                await self._may_stay(member)

    async def _may_stay(self, member: Member) -> bool:
        """Follow a client's engine no more when its name has come to lead where it may not."""
        if member.origin != HTTP:
            return True
        try:
            await check_allowed(self._allowed, member.registration)
        except EndpointRefusedError as error:
            log.error("%s: %s; it is followed no more", member.registration.label, error)  # noqa: TRY400 - a sentence says it
            with suppress(KVEventsError):
                await asyncio.wrap_future(self._fleet.unregister(member.registration.key))
            return False
        return True

    def _tell(self, member: Member, fault: str | None) -> None:
        if fault == member.fault:
            return
        member.fault = fault
        if fault is not None:
            log.warning("%s: %s", member.registration.label, fault)


async def fault_of(registration: Registration) -> str | None:
    """Why there is no connection, as a sentence; None where nothing speaks against one."""
    endpoint = registration.endpoint
    found = split_tcp(endpoint)
    if found is None or registration.bind:
        return None
    try:
        await addresses_of(endpoint)
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(found[0].strip("[]"), found[1])
    except OSError as error:
        return _sentence(endpoint, found[0], error)
    except UnicodeError as error:
        return f"{found[0]} is no name of a machine: {error}"
    greeted = await _is_greeted(reader)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return None if greeted else f"what listens at {endpoint} is no ZeroMQ socket"


async def _is_greeted(reader: asyncio.StreamReader) -> bool:
    """Whether the other side begins as ZeroMQ does, which waits for nobody (ZMTP 3, RFC 23: %xFF, eight octets, %x7F)."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            signature = await reader.readexactly(SIGNATURE_BYTES)
    except (OSError, asyncio.IncompleteReadError):
        return False
    return signature[0] == 0xFF and signature[-1] == 0x7F


def _sentence(endpoint: str, host: str, error: OSError) -> str:
    match error:
        case TimeoutError():
            return f"{endpoint} does not answer within {CONNECT_SECONDS:g} s"
        case socket.gaierror():
            return f"the name {host} does not resolve: {error.strerror}"
        case ConnectionRefusedError():
            return f"nothing listens at {endpoint}"
    return f"{endpoint} cannot be reached: {error.strerror or error}"
