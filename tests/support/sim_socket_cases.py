"""Ports and sockets for simulated engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvevents.sim.network import Sockets
from kvevents.sim.settings import FleetSettings

TWO_RANKS = FleetSettings(engines=1, ranks=2, blocks=10, block_size=4)


@contextmanager
def open_sockets(settings: FleetSettings = TWO_RANKS, **given: Any) -> Iterator[Sockets]:
    with Sockets(settings, **given) as sockets:
        for worker in settings.workers:
            sockets.open(worker)
        yield sockets
