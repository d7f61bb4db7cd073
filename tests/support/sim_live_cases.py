"""Simulated engines on real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvevents.sim.live import LiveFleet, parse_faults
from kvevents.sim.settings import FleetSettings, LiveTimers

SMALL: dict[str, Any] = {"engines": 3, "blocks": 70, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 64}
"""Settings with so little memory that blocks are evicted and sequences are preempted all the time."""


@contextmanager
def open_fleet(*, name: str = "prefix-aware", pace: float | None = 4.0, wrong: str = "", **given: Any) -> Iterator[LiveFleet]:
    options = {key: given.pop(key) for key in ("host", "base_port", "timers") if key in given}
    options.setdefault("timers", LiveTimers(connect=60.0, settle=60.0, down=0.05, stall=0.1))
    with LiveFleet(FleetSettings(**(SMALL | given)), name, pace=pace, requested=parse_faults(wrong), **options) as fleet:
        yield fleet
