"""Reserves TCP ports, so that a listener can be closed and opened again at the same port."""

from __future__ import annotations

import socket
import sys
from typing import Final, NamedTuple

_TCP_PREFIX: Final = "tcp://"


class ReservedPort(NamedTuple):
    """An endpoint with a fixed port, and the socket that reserves the port, or None if no socket can reserve it."""

    endpoint: str
    holder: socket.socket | None

    def close(self) -> None:
        """Release the port."""
        if self.holder is not None:
            self.holder.close()


def reserve_port(endpoint: str) -> ReservedPort:
    """Reserve the port of a TCP endpoint. If the port is `*` or `0`, the OS chooses one.

    Linux lets two sockets with SO_REUSEADDR share a port if only one of them listens. A socket that is bound but never listens
    keeps the OS from giving the port to another process while the real listener is closed. The OS then refuses connections.
    """
    host, _, port = endpoint.removeprefix(_TCP_PREFIX).rpartition(":")
    if not endpoint.startswith(_TCP_PREFIX) or "[" in host or sys.platform != "linux":
        return ReservedPort(endpoint, None)
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("0.0.0.0" if host == "*" else host, 0 if port == "*" else int(port)))  # noqa: S104  asked for
    except (OSError, ValueError):
        # The port is in use, or the endpoint is invalid. The error of the caller's bind says which.
        holder.close()
        return ReservedPort(endpoint, None)
    return ReservedPort(f"{_TCP_PREFIX}{host}:{holder.getsockname()[1]}", holder)
