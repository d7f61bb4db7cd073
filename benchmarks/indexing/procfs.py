"""What Linux says about a process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICK: Final = os.sysconf("SC_CLK_TCK")
_SELF: Final = os.getpid()


def cpu(pid: int) -> float:
    """Seconds of all its threads, its own and the kernel's for it, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def cpu_of_threads(pid: int) -> float:
    """The same to the nanosecond, of the threads that it has now: for what is short, and begins and ends with the same ones."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def resident(pid: int = _SELF) -> int:
    """Bytes in memory."""
    return _status(pid, "VmRSS")


def peak(pid: int = _SELF) -> int:
    """The most bytes in memory since `forget_peak`."""
    return _status(pid, "VmHWM")


def forget_peak(pid: int = _SELF) -> None:
    """Let `peak` start from now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
