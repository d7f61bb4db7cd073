"""Ports and sockets for simulated engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvevents.errors import ConfigError, EndpointError
from kvevents.sim.network import Sockets
from kvevents.sim.settings import FleetSettings
from ports import quiet_port

TWO = FleetSettings(engines=1, ranks=2, blocks=10, block_size=4)


@contextmanager
def opened(settings: FleetSettings = TWO, **given: Any) -> Iterator[Sockets]:
    with Sockets(settings, **given) as sockets:
        for worker in settings.workers:
            sockets.open(worker)
        yield sockets


def four_free_ports() -> int:
    """Return the first of four consecutive free ports."""
    for _ in range(100):
        port = quiet_port()
        try:
            with opened(base_port=port):
                return port
        except (EndpointError, ConfigError):
            continue
    raise AssertionError("no four free ports in a row")
