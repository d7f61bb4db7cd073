"""The start of a service until it is ready."""

from __future__ import annotations

import time
from statistics import median
from typing import Final

from benchmarks.service.server import Server

SETTLE_SECONDS: Final = 1.0
"""Seconds before the CPU time of an idle service is measured, and seconds for which it is measured."""


def measure(contender: str, starts: int) -> dict[str, float]:
    """Return medians: seconds until the service answers, CPU time until then, memory in MB, and CPU when idle."""
    results = [_start(contender) for _ in range(starts)]
    return {name: median(result[name] for result in results) for name in results[0]}


def _start(contender: str) -> dict[str, float]:
    with Server(contender) as server:
        cpu = server.cpu
        time.sleep(SETTLE_SECONDS)
        cpu_before = server.cpu
        time.sleep(SETTLE_SECONDS)
        idle = (server.cpu - cpu_before) / SETTLE_SECONDS * 100
        return {"seconds": server.seconds, "cpu": cpu, "resident": server.resident / 1e6, "idle": idle}
