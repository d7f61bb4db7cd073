"""Ports for servers that need a fixed port."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Final

LOOPBACK: Final = "127.0.0.1"
_PORTS: Final = range(15_000, 32_000)
"""Below those that systems give to outgoing connections: while a server is down nothing else gets its port, not even a client
that tries to reach it, which could otherwise reach itself."""
_CHOICE: Final = random.SystemRandom()
_LEASES: Final = Path(tempfile.gettempdir(), f"kvevents-test-ports-{os.getuid()}").open("ab")  # noqa: SIM115
"""A process locks byte N of this file for port N, until it ends: tests run in several processes, and a test starts its servers
some time after it has chosen their ports. It is open as long as the process runs, since closing it would end the locks."""
_leased: Final[set[int]] = set()
"""Those of this process, which its own locks do not keep from it."""


def quiet_port() -> int:
    """A port that nothing listens at, that no test of any process gets again, and that no system gives away by itself."""
    while not lease(port := _CHOICE.choice(_PORTS)):
        pass
    return port


def lease(*ports: int) -> bool:
    """Reserve all of these ports for this process, or none of them, if one is in use or leased already."""
    if not all(port not in _leased and _is_free(port) for port in ports):
        return False
    locked: list[int] = []
    for port in ports:
        try:
            fcntl.lockf(_LEASES, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            for other in locked:
                fcntl.lockf(_LEASES, fcntl.LOCK_UN, 1, other)
            return False
        locked.append(port)
    _leased.update(ports)
    return True


def _is_free(port: int) -> bool:
    """At every address, since some servers listen at all."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
    return True
