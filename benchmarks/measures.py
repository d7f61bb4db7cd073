"""CPU time and memory of processes, as Linux reports them, and percentiles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_TICK: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, with threads that have ended, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def cpu_seconds_of_threads(pid: int) -> float:
    """Return the CPU seconds of the threads that exist now, to the nanosecond."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def percentile(values: Sequence[float], per_cent: float) -> float:
    """Return a percentile of values in any order."""
    sorted_values = sorted(values)
    return float(sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * per_cent / 100))])
