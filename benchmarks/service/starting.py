"""From nothing to ready: `python -m benchmarks.service.starting start WHO TIMES`."""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Final

from benchmarks.processes import send_line
from benchmarks.service.running import Running

SETTLING: Final = 1.0
"""Seconds before the memory of an idle service is read."""


def start(contender: str, times: int) -> dict[str, float]:
    """Seconds until it answers, CPU time until then, and resident MB: medians."""
    found = [_once(contender) for _ in range(times)]
    return {name: median(each[name] for each in found) for name in found[0]}


def _once(contender: str) -> dict[str, float]:
    with Running(contender) as service:
        cpu = service.cpu
        time.sleep(SETTLING)
        before = service.cpu
        time.sleep(SETTLING)
        idle = (service.cpu - before) / SETTLING * 100
        return {"seconds": service.seconds, "cpu": cpu, "resident": service.resident / 1e6, "idle": idle}


if __name__ == "__main__":
    _, _, name, times = sys.argv
    send_line(start(name, int(times)))
