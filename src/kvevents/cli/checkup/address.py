"""Whether something is there, and whether it is a publisher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import zmq

from kvevents.cli.checkup.findings import Finding, fail, ok
from kvevents.cli.unlocking import Unlocking, unlock
from kvevents.endpoints import MAX_PORT, split_tcp
from kvevents.security import Curve
from kvevents.subscriber.handshake import Handshake, HandshakeOutcome, perform_handshake

MAX_RANKS_LOOKED_FOR: Final = 64
NEIGHBOUR_TIMEOUT: Final = 1.0

BOTH_CONNECT: Final = (
    "with a concrete host in its own endpoint the engine connects instead of listening;"
    " then both sides connect and nothing flows"
)
BINDS: Final = 'give the engine a wildcard, "endpoint": "tcp://*:PORT" in its KV events configuration'

_WRONG: Final[dict[HandshakeOutcome, tuple[str, str]]] = {
    "unknown-host": (
        "the host name is not known: {detail}",
        "check the name; inside Kubernetes use the pod's IP or a headless service",
    ),
    "refused": (
        "nothing listens there",
        f"is the engine up, with KV events enabled? Note that {BOTH_CONNECT}: {BINDS}, or listen for it with --bind",
    ),
    "unreachable": ("it cannot be reached: {detail}", "check the address, routes, and firewalls or network policies between"),
    "timeout": ("it does not answer", "check the address, routes, and firewalls or network policies between"),
    "closed": (
        "something accepts connections and closes them again",
        "a port forward, proxy or service without a running engine behind it does this; is the engine up?",
    ),
    "silent": (
        "something accepts connections and says nothing",
        "is this another service's port, or a proxy in front of a dead engine?",
    ),
    "not-zeromq": (
        "something listens that does not speak ZeroMQ",
        "is this another service's port? The port of KV events is in the engine's own configuration, 5557 by default",
    ),
    "curve": (
        "it demands CURVE keys",
        "name your own with --curve-key and its public key with --curve-server-key; `kvevents keys NAME` makes a pair",
    ),
}
_HTTP: Final = (
    "it speaks HTTP, not ZeroMQ",
    "is this the engine's HTTP port? vLLM names its port of KV events at /kv_event_sources, SGLang at /server_info",
)
_LOCKED_OUT: Final[dict[Unlocking, tuple[str, str]]] = {
    "dropped": (
        "it closes the connection when it sees these keys",
        "check that --curve-server-key is its public key (`kvevents keys --show FILE`), and that it allows your public key",
    ),
    "refused": (
        "it knows the public key of --curve-key and does not let it in",
        "add that public key to the keys that it allows (curve.allowed, --curve-allow)",
    ),
    "silent": (
        "it does not let this key in, or not soon",
        "check that it allows the public key of --curve-key (curve.allowed, --curve-allow); its log names keys that it refuses",
    ),
}


def check_address(endpoint: str, curve: Curve | None = None) -> tuple[list[Finding], bool]:
    """What stands at `endpoint`, and whether subscribing to it makes sense."""
    if endpoint.startswith("inproc://"):
        return [fail("address", f"{endpoint} exists inside the engine's process only", BINDS)], False
    found = split_tcp(endpoint)
    if found is not None and (found[0] in {"*", "0.0.0.0"} or found[1] == 0):  # noqa: S104 - recognised, not bound
        return [
            fail("address", f"{endpoint} is an address to listen at", "name the engine's host and port, or listen with --bind")
        ], False
    handshake = perform_handshake(endpoint)
    if curve is not None and handshake.outcome in {"curve", "socket"}:
        wrong = _locked("address", endpoint, handshake, curve, zmq.SUB)
        return ([ok("address", f"{endpoint} lets this key in")], True) if wrong is None else ([wrong], False)
    if handshake.outcome != "socket":
        return [_wrong("address", endpoint, handshake)], False
    if not handshake.is_publisher:
        return [_other_socket(endpoint, handshake.detail)], False
    return [ok("address", f"{endpoint} is a publisher ({handshake.detail} socket)")], True


def _wrong(check: str, endpoint: str, handshake: Handshake) -> Finding:
    text, advice = _HTTP if handshake.detail == "HTTP" else _WRONG[handshake.outcome]
    return fail(check, f"{endpoint}: {text.format(detail=handshake.detail).strip()}", advice)


def _locked(check: str, endpoint: str, handshake: Handshake, curve: Curve, kind: int) -> Finding | None:
    """Why these keys do not open `endpoint`; None when they do."""
    if handshake.outcome == "socket":
        text = f"{endpoint}: it speaks in clear, and keys are given for it"
        return fail(
            check,
            text,
            "give the engine keys (curve in its KV events configuration), or leave out --curve-key and --curve-server-key",
        )
    outcome = unlock(endpoint, curve, kind)
    if outcome == "open":
        return None
    text, advice = _LOCKED_OUT[outcome]
    return fail(check, f"{endpoint}: {text}", advice)


def _other_socket(endpoint: str, kind: str) -> Finding:
    if kind != "ROUTER":
        return fail("address", f"{endpoint} is a {kind} socket, not a publisher", "is this another service's port?")
    before = _neighbour(endpoint, -1)
    events = (
        f"{before} is a publisher"
        if before and _publishes(before)
        else "the event port is often the one before it, 5557 by default"
    )
    return fail(
        "address", f"{endpoint} is a ROUTER socket: a replay port, which publishes nothing", f"{events}; use that as ENDPOINT"
    )


def check_replay_address(endpoint: str, curve: Curve | None = None) -> Finding | None:
    """Why nothing at `endpoint` can answer replay requests; None when a ROUTER is there."""
    handshake = perform_handshake(endpoint)
    if handshake.outcome == "refused":
        advice = 'start the engine with "replay_endpoint": "tcp://*:5558" in its KV events configuration'
        return fail("replay", f"{endpoint}: nothing listens there", advice)
    if curve is not None and handshake.outcome in {"curve", "socket"}:
        return _locked("replay", endpoint, handshake, curve, zmq.DEALER)
    if handshake.outcome != "socket":
        return _wrong("replay", endpoint, handshake)
    if handshake.detail != "ROUTER":
        return fail(
            "replay",
            f"{endpoint} is a {handshake.detail} socket, not a replay endpoint",
            "name the replay endpoint with --replay",
        )
    return None


def next_ranks(endpoint: str) -> int:
    """How many of the next ports are publishers too: further ranks, as the engines number their ports."""
    count = 0
    for neighbour in _neighbours(endpoint):
        if not _publishes(neighbour):
            break
        count += 1
    return count


def _neighbours(endpoint: str) -> Iterator[str]:
    for distance in range(1, MAX_RANKS_LOOKED_FOR):
        neighbour = _neighbour(endpoint, distance)
        if neighbour is None:
            return
        yield neighbour


def _neighbour(endpoint: str, distance: int) -> str | None:
    found = split_tcp(endpoint)
    if found is None or not 0 < found[1] + distance <= MAX_PORT:
        return None
    return f"tcp://{found[0]}:{found[1] + distance}"


def _publishes(endpoint: str) -> bool:
    return perform_handshake(endpoint, NEIGHBOUR_TIMEOUT).is_publisher
