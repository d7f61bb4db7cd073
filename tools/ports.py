"""Ports for servers that need a fixed port, in tests, benchmarks and programs."""

from __future__ import annotations

import atexit
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Final

LOOPBACK: Final = "127.0.0.1"
_PORTS: Final = range(15_000, 32_000)
"""Ports below the ephemeral ones: while a server is down, no outgoing connection gets its port. A client that retries a local
ephemeral port could even connect to itself."""
_CHOICE: Final = random.SystemRandom()
_LEASES: Final = Path(tempfile.gettempdir(), f"kvevents-ports-{os.getuid()}").open("ab")  # noqa: SIM115
"""A process locks byte N of this file for port N until it ends, because tests run in several processes, and a test starts its
servers some time after it has chosen their ports. The file stays open, since closing it would release the locks."""
atexit.register(_LEASES.close)
_leases_of_process: Final[set[int]] = set()
"""Ports that this process has reserved. The locks on files do not prevent the same process from locking a port again."""


def reserve_port() -> int:
    """Return a port at which nothing listens, which no other test gets, and which is not an ephemeral port."""
    return reserve_adjacent_ports(1)


def reserve_adjacent_ports(count: int) -> int:
    """Return the first of `count` consecutive ports like those of `reserve_port`."""
    while True:
        port = _CHOICE.choice(_PORTS)
        if reserve_ports(*range(port, port + count)):
            return port


def reserve_ports(*ports: int) -> bool:
    """Reserve these ports for this process. Return False, and reserve none, if one of them is in use or reserved already."""
    if not all(port not in _leases_of_process and _is_free(port) for port in ports):
        return False
    locked_ports: list[int] = []
    for port in ports:
        try:
            fcntl.lockf(_LEASES, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            for locked_port in locked_ports:
                fcntl.lockf(_LEASES, fcntl.LOCK_UN, 1, locked_port)
            return False
        locked_ports.append(port)
    _leases_of_process.update(ports)
    return True


def _is_free(port: int) -> bool:
    """Return whether a port is free at all addresses, since some servers listen at all of them."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True
