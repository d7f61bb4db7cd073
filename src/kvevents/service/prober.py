"""Probes of endpoints without a connection or without replay, and the check that a client may register an endpoint.

ZeroMQ reconnects without end and reports no errors. So the prober opens connections of its own and exchanges ZeroMQ's greeting;
`Probing` sets how often. A fault becomes part of the source's trust, and is logged when it begins and when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

from kvevents.backoff import Backoff
from kvevents.client.reasons import Reason
from kvevents.diagnosis.handshake import Handshake, HandshakeOutcome, perform_handshake_async
from kvevents.endpoints import GRPC, split_tcp, tcp_of
from kvevents.errors import KVEventsError
from kvevents.routing.load_readings import METRICS_PATH, is_load_url
from kvevents.service.allow_list import EndpointAllowList, EndpointRefusedError
from kvevents.service.discovery.provider import bracket_host
from kvevents.service.fleet.faults import SourceFault
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.member import HTTP, Member
from kvevents.service.fleet.registration import Registration
from kvevents.service.settings import Probing
from kvevents.stream import DegradedReason, Trust

log = logging.getLogger(__name__)

RESOLVE_SECONDS: Final = 2.0
"""Longest time to resolve the name in a client's endpoint."""
ROUND_SECONDS: Final = 0.1
"""Pause between two searches for endpoints to probe."""
AUDIT_SECONDS: Final = 30.0
"""Pause between two checks of all endpoints that clients registered, because a name can resolve to another address later."""

_LOAD_PATHS: Final = frozenset({"", "/", METRICS_PATH, "/load"})


async def addresses_of(endpoint: str) -> list[str]:
    """Return the addresses of a TCP endpoint; empty for another kind. Raises `socket.gaierror` and `TimeoutError`."""
    target = split_tcp(endpoint)
    if target is None:
        return []
    async with asyncio.timeout(RESOLVE_SECONDS):
        records = await asyncio.get_running_loop().getaddrinfo(target[0].strip("[]"), target[1], type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in records]


async def check_allowed(allow_list: EndpointAllowList, registration: Registration) -> None:
    """Raise `EndpointRefusedError` if a client's registration has an endpoint that the allow list excludes.

    A name that does not resolve is allowed. The prober checks it again later.
    """
    for endpoint, bind in check_endpoints(allow_list, registration):
        await _check_addresses(allow_list, endpoint, bind=bind)


async def check_url_allowed(allow_list: EndpointAllowList, url: str) -> None:
    """Raise `EndpointRefusedError` if the allow list excludes the server of a URL."""
    target = load_target(url) or ""
    if allow_list.check(target, bind=False):
        await _check_addresses(allow_list, target, bind=False)


async def _check_addresses(allow_list: EndpointAllowList, endpoint: str, *, bind: bool) -> None:
    with suppress(socket.gaierror, TimeoutError):
        allow_list.check_addresses(endpoint, await addresses_of(endpoint), bind=bind)


def check_endpoints(allow_list: EndpointAllowList, registration: Registration) -> list[tuple[str, bool]]:
    """Raise `EndpointRefusedError` as `check_allowed`, but resolve no names. Return the endpoints with a host name.

    With each endpoint it returns whether the service listens there.
    """
    if registration.load is not None and is_load_url(registration.load):
        parts = urlsplit(registration.load)
        if parts.path not in _LOAD_PATHS or parts.query:
            raise EndpointRefusedError(
                registration.load, "no load is read at this path", "write http://HOST:PORT, or its /load"
            )
    return [(endpoint, bind) for endpoint, bind in _endpoints(registration) if allow_list.check(endpoint, bind=bind)]


def _endpoints(registration: Registration) -> list[tuple[str, bool]]:
    """Return the endpoints to which a registration makes the service connect, and whether it listens there instead."""
    bind = registration.bind
    url = registration.url if is_load_url(registration.url or "") else None
    polls = [(load_target(target), False) for target in (registration.load, url)]
    endpoints = [(tcp_of(registration.endpoint), bind), (registration.replay_endpoint, bind), *polls]
    return [(endpoint, binds) for endpoint, binds in endpoints if endpoint is not None]


def load_target(load: str | None) -> str | None:
    """Return the endpoint from which a load is read; of a URL, the endpoint of its server."""
    if load is None or not is_load_url(load):
        return load
    parts = urlsplit(load)
    return f"tcp://{bracket_host(parts.hostname or '')}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


EndpointField: TypeAlias = Literal["endpoint", "replay_endpoint"]


@dataclass(slots=True)
class _Probe:
    """The schedule of the probes of one endpoint."""

    since: float
    """Time from which the endpoint has needed probes."""
    due: float
    backoff: Backoff


class Prober:
    """Probes the endpoint of each source that has no connection, and the replay endpoint of each that gets no replay."""

    def __init__(self, fleet: Fleet, allow_list: EndpointAllowList, settings: Probing) -> None:
        self._fleet = fleet
        self._allow_list = allow_list
        self._settings = settings
        self._probes: dict[tuple[Member, EndpointField], _Probe] = {}
        self._running_probes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled."""
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
            for task in self._running_probes:
                task.cancel()

    def _round(self, now: float) -> None:
        targets: set[tuple[Member, EndpointField]] = set()
        for member in list(self._fleet.members.values()):
            if (field := _endpoint_to_probe(member)) is not None:
                targets.add((member, field))
        for target in [former for former in self._probes if former not in targets]:
            del self._probes[target]
            self._note(*target, None)
        for target in targets:
            probe = self._probes.get(target)
            if probe is None:
                # A replay usually arrives after a moment. A connection is established at once or not at all.
                wait = 0.0 if target[1] == "endpoint" else min(self._settings.patience_seconds, self._settings.pause_seconds)
                backoff = Backoff(maximum=self._settings.pause_seconds)
                probe = self._probes[target] = _Probe(now, now + wait, backoff)
            if probe.due <= now and len(self._running_probes) < self._settings.at_once:
                probe.due = now + self._settings.connect_seconds + probe.backoff.next_delay()
                self._start(self._try(*target, is_patient=now - probe.since < self._settings.patience_seconds))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._running_probes.add(task)
        task.add_done_callback(self._running_probes.discard)

    async def _try(self, member: Member, field: EndpointField, *, is_patient: bool) -> None:
        if await self._may_stay(member):
            fault = await self._fault_of(member, field, is_patient=is_patient)
            if (member, field) in self._probes:  # else it has connected meanwhile
                self._note(member, field, fault)

    async def _fault_of(self, member: Member, field: EndpointField, *, is_patient: bool) -> SourceFault | None:
        registration = member.registration
        if field == "replay_endpoint":
            return await fault_of_replay(registration, self._settings.connect_seconds, has_keys=self._has_keys(registration))
        fault = await fault_of(registration, self._settings.connect_seconds, has_keys=self._has_keys(registration))
        if fault is not None or is_patient or member.trust != Trust.CONNECTING:
            return fault
        if registration.bind:
            return SourceFault(Reason.NO_PEER, f"no engine has connected to {registration.endpoint} so far")
        if self._has_keys(registration):
            return SourceFault(
                Reason.KEYS, f"{registration.endpoint} does not accept the CURVE keys that are set for this source"
            )
        return None

    def _has_keys(self, registration: Registration) -> bool:
        return registration.curve is not None or self._fleet.curve is not None

    async def _audit(self) -> None:
        for member in list(self._fleet.members.values()):
            if member.origin == HTTP:
                await self._may_stay(member)

    async def _may_stay(self, member: Member) -> bool:
        """Unregister a client's engine if its name now resolves to an excluded address. Return whether it stays."""
        if member.origin != HTTP:
            return True
        try:
            await check_allowed(self._allow_list, member.registration)
        except EndpointRefusedError as error:
            log.error("%s: %s; it is no longer followed", member.registration.label, error)  # noqa: TRY400 - a sentence says it
            with suppress(KVEventsError):
                await asyncio.wrap_future(self._fleet.unregister(member.registration.key))
            return False
        return True

    def _note(self, member: Member, field: EndpointField, fault: SourceFault | None) -> None:
        former = member.faults.get(field)
        if fault == former:
            return
        member.faults = {name: item for name, item in member.faults.items() if name != field}
        if fault is not None:
            member.faults = {**member.faults, field: fault}
        if fault is not None and (former is None or former.reason != fault.reason):
            log.warning("%s: %s", member.registration.label, fault.sentence)
        if fault is None and former is not None and self._fleet.members.get(member.registration.key) is member:
            log.info("%s: this fault has ended: %s", member.registration.label, former.sentence)


def _endpoint_to_probe(member: Member) -> EndpointField | None:
    """Return which endpoint of a member needs a probe; None if none does. A gRPC client reports its own errors."""
    if member.registration.endpoint.startswith(GRPC):
        return None
    if member.trust in {Trust.CONNECTING, Trust.STALE}:
        return "endpoint"
    is_silent = member.status is not None and DegradedReason.REPLAY_SILENT in member.status.degraded_reasons
    has_replay = member.registration.replay_endpoint is not None
    return "replay_endpoint" if has_replay and (is_silent or member.trust == Trust.REPLAYING) else None


_MEANINGS: Final[dict[HandshakeOutcome, tuple[Reason, str]]] = {
    "unknown-host": (Reason.UNRESOLVED, "the name {host} does not resolve: {detail}"),
    "refused": (Reason.REFUSED, "nothing listens at {endpoint}"),
    "timeout": (Reason.UNANSWERED, "{endpoint} does not answer within {seconds:g} s"),
    "silent": (
        Reason.UNANSWERED,
        "what listens at {endpoint} accepts connections and sends nothing within {seconds:g} s",
    ),
    "unreachable": (Reason.UNREACHABLE, "{endpoint} cannot be reached: {detail}"),
    "closed": (Reason.UNREACHABLE, "what listens at {endpoint} closes connections at once"),
    "not-zeromq": (Reason.NOT_ZEROMQ, "what listens at {endpoint} is no ZeroMQ socket"),
}
"""The reason and the sentence for each outcome of a handshake that found no ZeroMQ socket."""


async def fault_of(registration: Registration, seconds: float, *, has_keys: bool) -> SourceFault | None:
    """Probe the endpoint. Return why there is no connection; None if no fault is found."""
    endpoint = registration.endpoint
    if registration.bind:
        return None
    handshake = await _perform_handshake(endpoint, seconds)
    if fault := _fault_of(handshake, endpoint, seconds, has_keys=has_keys):
        return fault
    if handshake.outcome == "curve" or handshake.is_publisher:
        return None
    sentence = f"{endpoint} is a {handshake.detail} socket, not a publisher"
    if handshake.detail == "ROUTER":
        sentence += ": a replay port; are endpoint and replay_endpoint swapped?"
    return SourceFault(Reason.WRONG_SOCKET, sentence)


async def fault_of_replay(registration: Registration, seconds: float, *, has_keys: bool) -> SourceFault | None:
    """Probe the replay endpoint. Return why it does not answer; None if no fault is found."""
    endpoint = registration.replay_endpoint
    if endpoint is None:
        return None
    handshake = await _perform_handshake(endpoint, seconds)
    fault = _fault_of(handshake, endpoint, seconds, has_keys=has_keys)
    if fault is not None:
        return SourceFault(Reason(f"replay-{fault.reason}"), f"replay_endpoint: {fault.sentence}")
    if handshake.outcome == "curve" or handshake.detail == "ROUTER":
        return None
    sentence = f"replay_endpoint: {endpoint} is a {handshake.detail} socket, which answers no replay requests"
    if handshake.is_publisher:
        sentence += "; name the port that the engine was given as replay_endpoint"
    return SourceFault(Reason.REPLAY_WRONG_SOCKET, sentence)


async def _perform_handshake(endpoint: str, seconds: float) -> Handshake:
    try:
        return await perform_handshake_async(endpoint, seconds)
    except UnicodeError as error:
        return Handshake("unknown-host", str(error))


def _fault_of(handshake: Handshake, endpoint: str, seconds: float, *, has_keys: bool) -> SourceFault | None:
    """Return why nothing can be received from an endpoint: no ZeroMQ socket, or other keys; None without a fault."""
    if handshake.outcome in _MEANINGS:
        reason, sentence = _MEANINGS[handshake.outcome]
        host = (split_tcp(endpoint) or ("",))[0]
        return SourceFault(reason, sentence.format(endpoint=endpoint, host=host, detail=handshake.detail, seconds=seconds))
    if (handshake.outcome == "curve") == has_keys:
        return None
    sentence = (
        f"{endpoint} speaks in clear, and CURVE keys are set for this source"
        if has_keys
        else f"{endpoint} demands CURVE keys, and none are set for this source"
    )
    return SourceFault(Reason.KEYS, sentence)
