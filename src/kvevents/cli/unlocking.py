"""Whether CURVE keys open an address, as libzmq itself finds out."""

from __future__ import annotations

import time
from contextlib import suppress
from math import ceil
from typing import Final, Literal, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvevents.endpoints import needs_ipv6
from kvevents.security import Curve

TIMEOUT: Final = 3.0
"""Seconds for connecting and for the handshake, which takes milliseconds."""

Unlocking: TypeAlias = Literal["open", "refused", "dropped", "silent"]

_OUTCOMES: Final[dict[int, Unlocking]] = {
    zmq.Event.HANDSHAKE_SUCCEEDED: "open",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "refused",
    # So does a server that cannot open the first message, which is sealed for the key that we take for its own; and one of ours
    # that refuses a key, unless it stays silent.
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "dropped",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "dropped",
    zmq.Event.DISCONNECTED: "dropped",
}


def unlock(endpoint: str, curve: Curve, kind: int, timeout: float = TIMEOUT) -> Unlocking:
    """Connect a socket of `kind`: what becomes of the first connection.

    Servers of ours refuse a key in such a way that it is tried again (see `kvevents.security.zap`): `silent` or `dropped`.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(kind)
        if needs_ipv6(endpoint):
            socket.set(zmq.IPV6, 1)
        curve.apply(socket)
        monitor = socket.get_monitor_socket(sum(_OUTCOMES))
        with suppress(zmq.ZMQError):
            socket.connect(endpoint)
        return _first_outcome(monitor, timeout)
    finally:
        context.destroy(linger=0)


def _first_outcome(monitor: zmq.Socket[bytes], timeout: float) -> Unlocking:
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0 and monitor.poll(ceil(1000 * left)):
        found = _OUTCOMES.get(int(parse_monitor_message(monitor.recv_multipart())["event"]))
        if found is not None:
            return found
    return "silent"
