"""Host names that tests define, and whose lookups they delay."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvevents.zeromq import name_resolver

DEADLINE = 30.0


class Names:
    """Answers for names under `.example`, and can let lookups wait."""

    def __init__(self) -> None:
        self.addresses: dict[str, list[str]] = {}
        self.release = threading.Event()
        self.lookups: list[str] = []
        self._real = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *arguments: Any, **named: Any) -> Any:
        if not str(host).endswith(".example"):
            return self._real(host, port, *arguments, **named)
        self.lookups.append(host)
        if host.startswith("slow"):
            assert self.release.wait(DEADLINE)
        found = self.addresses.get(host)
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]


@pytest.fixture(name="names")
def replace_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """Answer lookups of this process, and use an address for a tenth of a second without another lookup."""
    monkeypatch.setattr(name_resolver, "CACHE_SECONDS", 0.1)
    found = Names()
    monkeypatch.setattr(socket, "getaddrinfo", found)
    yield found
    found.release.set()
