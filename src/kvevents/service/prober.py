"""Probes of endpoints that have no connection or send no replay, and the check that a client may register an endpoint.

libzmq reconnects without end and reports no errors. So the prober opens connections of its own and exchanges ZeroMQ's greeting;
`Probing` has the intervals. The source's trust names the fault. The begin and the end of a fault are logged.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Final, Literal, TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct

from kvevents.backoff import Backoff
from kvevents.client.reasons import Reason
from kvevents.diagnosis.handshake import Handshake, HandshakeOutcome, perform_handshake_async
from kvevents.endpoints import GRPC, split_tcp, tcp_of
from kvevents.errors import KVEventsError
from kvevents.routing.load_readings import METRICS_PATH, is_load_url
from kvevents.service.allow_list import EndpointAllowList, EndpointRefusedError
from kvevents.service.discovery.engines import resolve_host
from kvevents.service.discovery.provider import bracket_host
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.member import HTTP_ORIGIN, Member, SourceFault
from kvevents.service.fleet.registration import Registration
from kvevents.service.settings import Probing
from kvevents.stream import DegradedReason, Trust
from kvevents.zeromq.name_resolver import has_name

log = logging.getLogger(__name__)

ROUND_SECONDS: Final = 0.1
"""Pause in seconds between two searches for endpoints to probe."""
FULL_RATE_ENDPOINTS: Final = 256
"""Number of probed endpoints above which the pauses between probes grow in proportion to the number of endpoints."""
CLIENT_CHECK_SECONDS: Final = 30.0
"""Seconds between two checks of all endpoints that clients registered, because a name can later resolve to another address."""

_LOAD_PATHS: Final = frozenset({"", "/", METRICS_PATH, "/load"})


async def check_allowed(allow_list: EndpointAllowList, *endpoints: str) -> None:
    """Raise `EndpointRefusedError` if the allow-list excludes one of `endpoints`, or an address of an endpoint's host name.

    An endpoint whose name does not resolve is allowed, because the prober checks it again later.
    """
    for endpoint in endpoints:
        if allow_list.check(endpoint) and (target := split_tcp(endpoint)) is not None:
            with suppress(socket.gaierror, TimeoutError):
                allow_list.check(endpoint, sorted(await resolve_host(target[0])))


def endpoints_of(registration: Registration) -> list[str]:
    """Return the endpoints to which the service connects because of a client's registration.

    Raises `EndpointRefusedError` if `load` is a URL whose path is not in `_LOAD_PATHS`.
    """
    endpoints = [tcp_of(registration.endpoint), registration.replay_endpoint]
    if (load := registration.load) is not None:
        parts = urlsplit(load) if is_load_url(load) else None
        if parts is not None and (parts.path not in _LOAD_PATHS or parts.query):
            raise EndpointRefusedError(load, "no load is read at this path", "write http://HOST:PORT or http://HOST:PORT/load")
        endpoints.append(load_target(load))
    if registration.url is not None and is_load_url(registration.url):
        endpoints.append(load_target(registration.url))
    return [endpoint for endpoint in endpoints if endpoint is not None]


def load_target(load: str) -> str:
    """Return the endpoint from which a load is read: `load` itself or, if `load` is a URL, the TCP endpoint of the server."""
    if not is_load_url(load):
        return load
    parts = urlsplit(load)
    return f"tcp://{bracket_host(parts.hostname or '')}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


EndpointField: TypeAlias = Literal["endpoint", "replay_endpoint"]


class _ProbeSchedule(Struct):
    """The schedule of the probes of one endpoint, by the event loop's clock."""

    began_at: float
    """Time at which the endpoint began to need probes."""
    due_at: float
    """Time of the next probe."""
    backoff: Backoff


class Prober:
    """Probes the endpoints of sources without a connection, and the replay endpoints of sources that wait for replay."""

    def __init__(self, fleet: Fleet, allow_list: EndpointAllowList, settings: Probing) -> None:
        self._fleet = fleet
        self._allow_list = allow_list
        self._settings = settings
        self._probes: dict[tuple[Member, EndpointField], _ProbeSchedule] = {}
        self._running_probes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        audit = loop.time() + CLIENT_CHECK_SECONDS
        try:
            while True:
                self._run_round(loop.time())
                if loop.time() >= audit:
                    audit = loop.time() + CLIENT_CHECK_SECONDS
                    self._start(self._check_clients())
                await asyncio.sleep(ROUND_SECONDS)
        finally:
            for task in self._running_probes:
                task.cancel()

    def _run_round(self, now: float) -> None:
        members = list(self._fleet.members.values())
        targets: dict[tuple[Member, EndpointField], None] = {
            (member, field): None for member in members if (field := _endpoint_to_probe(member)) is not None
        }
        for target in [former for former in self._probes if former not in targets]:
            del self._probes[target]
            self._record_fault(*target, None)
        stretch = max(1.0, len(targets) / FULL_RATE_ENDPOINTS)
        for target in targets:
            probe = self._probes.get(target)
            if probe is None:
                # Wait before probing a replay endpoint: its answer might still arrive. A missing connection needs no wait.
                wait = 0.0 if target[1] == "endpoint" else min(self._settings.patience_seconds, self._settings.pause_seconds)
                backoff = Backoff(maximum=self._settings.pause_seconds)
                probe = self._probes[target] = _ProbeSchedule(now, now + wait, backoff)
            if probe.due_at <= now and len(self._running_probes) < self._settings.at_once:
                probe.due_at = now + self._settings.connect_seconds + stretch * probe.backoff.next_delay()
                self._start(self._probe_member(*target, is_patient=now - probe.began_at < self._settings.patience_seconds))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._running_probes.add(task)
        task.add_done_callback(self._running_probes.discard)

    async def _probe_member(self, member: Member, field: EndpointField, *, is_patient: bool) -> None:
        if await self._may_stay(member):
            fault = await self._fault_of(member, field, is_patient=is_patient)
            if (member, field) in self._probes:  # If the entry is gone, the source has connected during the probe.
                self._record_fault(member, field, fault)

    async def _fault_of(self, member: Member, field: EndpointField, *, is_patient: bool) -> SourceFault | None:
        registration, seconds = member.registration, self._settings.connect_seconds
        has_keys = registration.curve is not None or self._fleet.curve is not None
        if field == "replay_endpoint":
            return await _probe_endpoint(field, registration.replay_endpoint or "", seconds, has_keys=has_keys)
        fault = None if registration.bind else await _probe_endpoint(field, registration.endpoint, seconds, has_keys=has_keys)
        if fault is not None or is_patient or member.trust != Trust.CONNECTING:
            return fault
        if registration.bind:
            return SourceFault(Reason.NO_PEER, f"no engine has connected to {registration.endpoint} yet")
        sentence = f"{registration.endpoint} does not accept the CURVE keys that are set for this source"
        return SourceFault(Reason.KEYS, sentence) if has_keys else None

    async def _check_clients(self) -> None:
        for member in list(self._fleet.members.values()):
            await self._may_stay(member)

    async def _may_stay(self, member: Member) -> bool:
        """Unregister a client's engine if its host name now resolves to an excluded address. Return False if unregistered."""
        if member.origin != HTTP_ORIGIN:
            return True
        try:
            await check_allowed(self._allow_list, *filter(has_name, endpoints_of(member.registration)))
        except EndpointRefusedError as error:
            log.error("%s is no longer followed: %s", member.registration.label, error)  # noqa: TRY400 - the message has the cause
            with suppress(KVEventsError):
                await asyncio.wrap_future(self._fleet.unregister(member.registration.key))
            return False
        return True

    def _record_fault(self, member: Member, field: EndpointField, fault: SourceFault | None) -> None:
        former = member.faults.get(field)
        if fault == former:
            return
        others = {name: item for name, item in member.faults.items() if name != field}
        member.faults = others if fault is None else {**others, field: fault}
        if fault is not None and (former is None or former.reason != fault.reason):
            log.warning("%s: %s", member.registration.label, fault.sentence)
        if fault is None and former is not None and self._fleet.members.get(member.registration.key) is member:
            log.info("%s: this fault has ended: %s", member.registration.label, former.sentence)


def _endpoint_to_probe(member: Member) -> EndpointField | None:
    """Return the field of the endpoint that must be probed; None if no endpoint must be probed."""
    if member.registration.endpoint.startswith(GRPC):  # A gRPC client reports its own errors.
        return None
    if member.trust.name in ("CONNECTING", "STALE"):  # Compare names, because the hash of a `Trust` takes long.
        return "endpoint"
    if member.registration.replay_endpoint is None:
        return None
    is_silent = member.status is not None and DegradedReason.REPLAY_SILENT in member.status.degraded_reasons
    return "replay_endpoint" if is_silent or member.trust.name == "REPLAYING" else None


_HANDSHAKE_FAULTS: Final[dict[HandshakeOutcome, tuple[Reason, str]]] = {
    "unknown-host": (Reason.UNRESOLVED, "the name {host} does not resolve: {detail}"),
    "refused": (Reason.REFUSED, "nothing listens at {endpoint}"),
    "timeout": (Reason.UNANSWERED, "{endpoint} does not answer within {seconds:g} s"),
    "silent": (Reason.UNANSWERED, "what listens at {endpoint} accepts connections and sends nothing within {seconds:g} s"),
    "unreachable": (Reason.UNREACHABLE, "{endpoint} cannot be reached: {detail}"),
    "closed": (Reason.UNREACHABLE, "what listens at {endpoint} closes connections at once"),
    "not-zeromq": (Reason.NOT_ZEROMQ, "what listens at {endpoint} is no ZeroMQ socket"),
}
"""Maps the outcome of a handshake that found no ZeroMQ socket to a reason code and a sentence."""


async def _probe_endpoint(field: EndpointField, endpoint: str, seconds: float, *, has_keys: bool) -> SourceFault | None:
    """Probe an endpoint. Return the fault that prevents events or replay; None without a fault."""
    handshake, is_replay = await perform_handshake_async(endpoint, seconds), field == "replay_endpoint"
    fault = _fault_of(handshake, endpoint, seconds, has_keys=has_keys)
    is_router = handshake.detail == "ROUTER"
    if fault is None and handshake.outcome != "curve" and not (is_router if is_replay else handshake.is_publisher):
        sentence = f"{endpoint} is a {handshake.detail} socket, "
        sentence += "which answers no replay requests" if is_replay else "not a publisher"
        if handshake.is_publisher:
            sentence += "; name the port that the engine was given as replay_endpoint"
        elif is_router:
            sentence += ": a replay port; are endpoint and replay_endpoint swapped?"
        fault = SourceFault(Reason.WRONG_SOCKET, sentence)
    if fault is None or not is_replay:
        return fault
    return SourceFault(Reason(f"replay-{fault.reason}"), f"replay_endpoint: {fault.sentence}")


def _fault_of(handshake: Handshake, endpoint: str, seconds: float, *, has_keys: bool) -> SourceFault | None:
    """Return a fault if an endpoint is not a ZeroMQ socket, or if only one end of the connection uses CURVE; else None."""
    if handshake.outcome in _HANDSHAKE_FAULTS:
        reason, sentence = _HANDSHAKE_FAULTS[handshake.outcome]
        host = (split_tcp(endpoint) or ("",))[0]
        return SourceFault(reason, sentence.format(endpoint=endpoint, host=host, detail=handshake.detail, seconds=seconds))
    if (handshake.outcome == "curve") == has_keys:
        return None
    state = "does not use CURVE, but keys are set" if has_keys else "demands CURVE keys, but none are set"
    return SourceFault(Reason.KEYS, f"{endpoint} {state} for this source")
