"""This machine in place of a cluster: commands of its containers run as processes, with other ports and folders."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import pytest

from cli_cases import SECONDS, Program
from tools.ports import reserve_ports

PORTS: Final[tuple[int, ...]] = (*range(5557, 5570), *range(6557, 6570), 8090, *range(9464, 9467))
"""The ports that manifests, examples and tests name."""


class Cluster:
    """This machine in place of a cluster, with other ports and folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables: dict[str, str] = {}
        """The environment of containers."""
        self._port_offset = _find_free_distance()

    def port(self, number: int) -> int:
        """Return the port of this machine that replaces a port of a manifest."""
        return number + self._port_offset

    def localize(self, text: str, **names: str) -> str:
        """Replace ports, folders and host names in an argument or a file by those of this machine.

        `names` maps names of the cluster to their replacements.
        """
        for name, value in names.items():
            text = text.replace(name, value)
        text = text.replace("$(POD_NAME)", "pod-0")
        text = re.sub(r"/(etc|var/lib)/kvevents", f"{self.folder}/\\1/kvevents", text)
        pattern = r"(?<=[:=])(\d{4})(?=[\"',]|$)|(?<=^port = )(\d{4})$"
        return re.sub(pattern, lambda found: self._replace_port(found[0]), text, flags=re.MULTILINE)

    def _replace_port(self, text: str) -> str:
        return str(self.port(int(text))) if int(text) in PORTS else text

    def write(self, place: str, text: str, **names: str) -> None:
        """Write a file of a ConfigMap at the path where its volume is mounted."""
        path = Path(self.localize(place))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.localize(text, **names))

    def run(self, arguments: Sequence[str], **names: str) -> Program:
        """Start a kvevents command of a container."""
        return Program(*(self.localize(arg, **names) for arg in arguments), **self.variables)

    def get(self, port: int, path: str, body: dict[str, Any] | None = None, token: str = "") -> tuple[int, bytes]:
        """Return the status and body of an HTTP request; the status is 0 if nothing listens at the port yet."""
        connection = HTTPConnection("127.0.0.1", self.port(port), timeout=SECONDS)
        try:
            headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()


def _find_free_distance() -> int:
    for _ in range(200):
        distance = random.SystemRandom().randrange(10_000, 20_000)
        if reserve_ports(*(port + distance for port in PORTS)):
            return distance
    raise AssertionError("no offset at which all ports are free was found")


@pytest.fixture(name="cluster")
def cluster_fixture(tmp_path: Path) -> Cluster:
    """Return a cluster with ports and folders that no other test has."""
    for folder in ("etc", "var/lib"):
        (tmp_path / folder / "kvevents").mkdir(parents=True)
    return Cluster(tmp_path)


def poll_for(done: Callable[[], object], *programs: Program) -> None:
    """Wait until a condition is true; fail if one of the programs ends before."""
    end = time.monotonic() + SECONDS
    while not done():
        for program in programs:
            assert program.process.poll() is None, program.err.all
        assert time.monotonic() < end, [program.err.all for program in programs]
        time.sleep(0.05)
