"""Ports that stay ours while nobody listens on them, so that a peer can come back where it was."""

from __future__ import annotations

import socket
import sys
from typing import Final, NamedTuple

_TCP: Final = "tcp://"
_ANY: Final = ("*", "0")


class HeldPort(NamedTuple):
    """`endpoint` with its port decided, and the socket that keeps others off it (None where that is not possible)."""

    endpoint: str
    holder: socket.socket | None


def hold_port(endpoint: str) -> HeldPort:
    """Decide the port of a TCP endpoint (`*` and `0` let the OS choose) and keep it.

    Linux lets two sockets with SO_REUSEADDR share a port as long as only one listens: one that is bound and never listens
    keeps the OS from giving the port away while the real listener is closed, and connecting to it is refused.
    """
    host, _, port = endpoint.removeprefix(_TCP).rpartition(":")
    if not endpoint.startswith(_TCP) or "[" in host or sys.platform != "linux":
        return HeldPort(endpoint, None)
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0" if host == "*" else host, 0 if port in _ANY else int(port)))  # noqa: S104  asked for
    except (OSError, ValueError):
        # Taken, or not an address at all: whoever binds next says it in its own words.
        holder.close()
        return HeldPort(endpoint, None)
    return HeldPort(f"{_TCP}{host}:{holder.getsockname()[1]}", holder)
