"""Checks of an address: whether it can be reached, which type of socket it has, and whether it accepts the CURVE keys."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import takewhile
from math import ceil
from typing import Final, Literal, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents.diagnosis.findings import CheckResult, fail, ok
from kvevents.diagnosis.handshake import Handshake, HandshakeOutcome, perform_handshake
from kvevents.diagnosis.replay_sample import open_client
from kvevents.endpoints import MAX_PORT, split_tcp
from kvevents.zeromq.keys import Curve
from kvevents.zeromq.sockets import disable_monitor

CURVE_SECONDS: Final = 3.0
"""Maximum number of seconds for the connection and the CURVE handshake together, which normally take milliseconds."""

CurveOutcome: TypeAlias = Literal["accepted", "refused", "dropped", "silent"]

_CURVE_OUTCOMES: Final[dict[int, CurveOutcome]] = {
    zmq.Event.HANDSHAKE_SUCCEEDED: "accepted",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "refused",
    # If --curve-server-key is not the server's key, the server cannot decrypt the first message and closes the connection.
    # A server of kvevents that refuses a key also closes the connection, or sends nothing.
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "dropped",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "dropped",
    zmq.Event.DISCONNECTED: "dropped",
}


def probe_curve(endpoint: str, curve: Curve, kind: int, timeout: float = CURVE_SECONDS) -> CurveOutcome:
    """Connect a socket of `kind`, and return the outcome of the first CURVE handshake.

    If a server of kvevents refuses a key, it sends no error, and the peer retries (see `kvevents.zeromq.zap`). The outcome
    is then `silent` or `dropped`.
    """
    deadline = time.monotonic() + timeout
    with open_client(kind, endpoint, curve) as socket:
        monitor = socket.get_monitor_socket(sum(_CURVE_OUTCOMES))
        try:
            with suppress(zmq.ZMQError):
                socket.connect(endpoint)
            while (remaining := deadline - time.monotonic()) > 0 and monitor.poll(ceil(1000 * remaining)):
                outcome = _CURVE_OUTCOMES.get(int(parse_monitor_message(monitor.recv_multipart())["event"]))
                if outcome is not None:
                    return outcome
        finally:
            disable_monitor(socket)  # If the socket closed first, libzmq's I/O thread would block for ever on the monitor.
    return "silent"


MAX_PROBED_RANKS: Final = 64
NEIGHBOUR_SECONDS: Final = 1.0
"""Maximum number of seconds to probe one of the ports that follow the engine's port."""

CONNECT_HINT: Final = (
    "an engine whose own endpoint has a concrete host connects instead of listening;"
    " then both sides connect and nothing is transferred"
)
BIND_HINT: Final = 'give the engine a wildcard, "endpoint": "tcp://*:PORT" in its KV events configuration'

_HANDSHAKE_FAULTS: Final[dict[HandshakeOutcome, tuple[str, str]]] = {
    "unknown-host": (
        "the host name cannot be resolved: {detail}",
        "check the name; inside Kubernetes use the pod's IP or a headless service",
    ),
    "refused": (
        "nothing listens there",
        f"check that the engine runs with KV events enabled. Note that {CONNECT_HINT}: {BIND_HINT}, or listen with --bind",
    ),
    "unreachable": ("it cannot be reached: {detail}", "check the address, routes, and firewalls and network policies"),
    "timeout": ("it does not answer", "check the address, routes, and firewalls and network policies"),
    "closed": (
        "something accepts connections and closes them",
        "a port forward, proxy or service without a running engine does this; check that the engine runs",
    ),
    "silent": (
        "something accepts connections and sends nothing",
        "check that this is not the port of another service, nor a proxy without a running engine",
    ),
    "not-zeromq": (
        "something listens that does not speak ZeroMQ",
        "check the port; that of KV events is in the engine's configuration, 5557 by default",
    ),
    "curve": (
        "it requires CURVE keys",
        "use --curve-key with your own keys and --curve-server-key with its public key; `kvevents keys NAME` creates a pair",
    ),
}
_HTTP_FAULT: Final = (
    "it speaks HTTP, not ZeroMQ",
    "this may be the engine's HTTP port; vLLM returns that of KV events at /kv_event_sources, SGLang at /server_info",
)
_CURVE_FAULTS: Final[dict[CurveOutcome, tuple[str, str]]] = {
    "dropped": (
        "it closes the connection when it sees these keys",
        "check that --curve-server-key is its public key (`kvevents keys --show FILE`), and that it allows your public key",
    ),
    "refused": (
        "it refuses the public key of --curve-key",
        "add that public key to the keys that it allows (curve.allowed, --curve-allow)",
    ),
    "silent": (
        "it does not accept the public key of --curve-key, or not within the timeout",
        "check that it allows the public key of --curve-key (curve.allowed, --curve-allow); its log names keys that it refuses",
    ),
}


def check_address(endpoint: str, curve: Curve | None = None) -> CheckResult:
    """Check whether a SUB socket can subscribe at `endpoint`."""
    if endpoint.startswith("inproc://"):
        return fail("address", f"{endpoint} exists in the process of the engine only", BIND_HINT)
    target = split_tcp(endpoint)
    if target is not None and (target[0] == "0.0.0.0" or target[1] == 0):  # noqa: S104 - this code binds no socket
        return fail("address", f"{endpoint} is an address to listen at", "use the engine's host and port, or --bind")
    result = _check_reach("address", endpoint, curve, zmq.SUB)
    if isinstance(result, CheckResult):
        return result
    if result.outcome == "curve":
        return ok("address", f"{endpoint} accepts the key")
    if not result.is_publisher:
        return _report_other_socket(endpoint, result.detail)
    return ok("address", f"{endpoint} is a publisher ({result.detail} socket)")


def _check_reach(check: str, endpoint: str, curve: Curve | None, kind: int) -> Handshake | CheckResult:
    """Return the handshake if a ZeroMQ socket at `endpoint` accepts `curve`, else a finding named `check` with the fault."""
    handshake = perform_handshake(endpoint)
    if curve is not None and handshake.outcome == "socket":
        text = f"{endpoint} does not use CURVE, but keys are given"
        advice = (
            "configure keys in the engine (curve in its KV events configuration), or omit --curve-key and --curve-server-key"
        )
    elif curve is not None and handshake.outcome == "curve":
        outcome = probe_curve(endpoint, curve, kind)
        if outcome == "accepted":
            return handshake
        text, advice = _CURVE_FAULTS[outcome]
    elif handshake.outcome == "socket":
        return handshake
    elif handshake.outcome == "refused" and kind == zmq.DEALER:
        advice = 'start the engine with "replay_endpoint": "tcp://*:5558" in its KV events configuration'
        text = "nothing listens there"
    else:
        text, advice = _HTTP_FAULT if handshake.detail == "HTTP" else _HANDSHAKE_FAULTS[handshake.outcome]
    return fail(check, f"{endpoint}: {text.format(detail=handshake.detail).strip()}", advice)


def _report_other_socket(endpoint: str, kind: str) -> CheckResult:
    if kind != "ROUTER":
        return fail("address", f"{endpoint} is a {kind} socket, not a publisher", "check the port; this may be another service")
    former_endpoint = endpoint_of_rank(endpoint, -1)
    events = "the port of the events is often the one below it, 5557 by default"
    if former_endpoint and _is_publisher(former_endpoint):
        events = f"{former_endpoint} is a publisher"
    text = f"{endpoint} is a ROUTER socket: a replay endpoint, which publishes nothing"
    return fail("address", text, f"{events}; use that as ENDPOINT")


def check_replay_address(endpoint: str, curve: Curve | None = None) -> CheckResult | None:
    """Return a finding if `endpoint` cannot answer replay requests; None if the peer is a ROUTER socket."""
    result = _check_reach("replay", endpoint, curve, zmq.DEALER)
    if isinstance(result, CheckResult):
        return result
    if result.outcome == "curve" or result.detail == "ROUTER":
        return None
    text = f"{endpoint} is a {result.detail} socket, not a replay endpoint"
    return fail("replay", text, "use the engine's replay endpoint with --replay")


def count_next_ranks(endpoint: str) -> int:
    """Return how many consecutive ports after the port of `endpoint` have publishers, for example further ranks."""
    neighbours = (endpoint_of_rank(endpoint, distance) for distance in range(1, MAX_PROBED_RANKS))
    return sum(1 for _ in takewhile(lambda neighbour: neighbour is not None and _is_publisher(neighbour), neighbours))


def endpoint_of_rank(endpoint: str, distance: int) -> str | None:
    """Return `endpoint` with `distance` added to its port; None if this is not a TCP endpoint with a valid port."""
    target = split_tcp(endpoint)
    if target is None or not 0 < target[1] + distance <= MAX_PORT:
        return None
    return f"tcp://{target[0]}:{target[1] + distance}"


def _is_publisher(endpoint: str) -> bool:
    return perform_handshake(endpoint, NEIGHBOUR_SECONDS).is_publisher
