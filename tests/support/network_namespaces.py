"""Several hosts on this machine, each in a network namespace, and network partitions between them.

All hosts are connected to one switch. `split` moves some of them to a second switch, which is not connected to the first one.
Packets between the two are lost without an error, as between machines. The test itself is connected to the first switch.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

IP: Final = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin") or ""
SECONDS: Final = 30.0
_ATTEMPTS: Final = 5
"""Number of attempts with other names and addresses, since another run of the tests may have the same."""
_NEWNET: Final = 0x40000000
"""`CLONE_NEWNET` of Linux's sched.h."""


class Network:
    """A network of named hosts, each with an address; a context manager."""

    def __init__(self, *hosts: str) -> None:
        self._tag = f"kv{random.randrange(1 << 24):06x}"
        subnet = f"10.{random.randrange(128, 250)}.{random.randrange(256)}"
        self.address: Final = f"{subnet}.1"
        """The address of the test itself."""
        self.addresses: Final = {host: f"{subnet}.{at}" for at, host in enumerate(hosts, 2)}
        self._switches: Final = (f"{self._tag}a", f"{self._tag}b")

    def __enter__(self) -> Self:
        try:
            for switch in self._switches:
                _ip("link", "add", switch, "type", "bridge")
                _ip("link", "set", switch, "up")
            _ip("address", "add", f"{self.address}/24", "dev", self._switches[0])
            for host in self.addresses:
                self._add(host)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _add(self, host: str) -> None:
        space, port = self._space(host), self._port(host)
        _ip("netns", "add", space)
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", port, "master", self._switches[0], "up")
        _ip("-n", space, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", space, "link", "set", link, "up")

    def _remove(self) -> None:
        for host in self.addresses:
            with suppress(subprocess.CalledProcessError):
                _ip("link", "delete", self._port(host))
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", self._space(host))
        for switch in self._switches:
            with suppress(subprocess.CalledProcessError):
                _ip("link", "delete", switch)

    def _space(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def _port(self, host: str) -> str:
        return f"{self._tag}p{list(self.addresses).index(host)}"

    # --- control of hosts and of the network

    def command(self, host: str) -> Sequence[str]:
        """Return the command that runs another command on a host; put it before the command line."""
        return (IP, "netns", "exec", self._space(host))

    def enter(self, host: str) -> None:
        """Move this thread, and those that it starts, to a host."""
        with Path("/run/netns", self._space(host)).open() as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network of {host}")

    def split(self, *hosts: str) -> None:
        """Disconnect these hosts from all others; they stay connected to each other."""
        for host in hosts:
            _ip("link", "set", self._port(host), "master", self._switches[1])

    def reconnect(self) -> None:
        """Connect all hosts."""
        for host in self.addresses:
            _ip("link", "set", self._port(host), "master", self._switches[0])


def network(*hosts: str) -> Network:
    """Return a network whose names and addresses are free. The caller enters it."""
    for _ in range(_ATTEMPTS - 1):
        found = Network(*hosts)
        if found.address not in _ip("-o", "address"):
            return found
    return Network(*hosts)


def _ip(*words: str) -> str:
    return subprocess.run((IP, *words), check=True, capture_output=True, text=True, timeout=SECONDS).stdout


def _find_obstacle() -> str:
    """Return why this machine cannot have such networks; empty if it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if not IP:
        return "`ip` is not installed; `tools/setup tests` installs Debian's iproute2"
    try:
        with Network("probe"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"this machine cannot create network namespaces: {error.stderr.strip()}"


OBSTACLE: Final = _find_obstacle()
needs_networks = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)
