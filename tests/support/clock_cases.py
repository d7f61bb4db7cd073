"""A clock of the day that tests set, for NATS servers alone: `clock_shift.py`, which says how."""

from __future__ import annotations

import platform
import struct
import sys
from pathlib import Path
from typing import Final

import pytest

from clock_shift import CODE, SHIFT

LAUNCHER: Final = Path(__file__).with_name("clock_shift.py")
_HERE: Final = sys.platform == "linux" and platform.machine() == "x86_64"
needs_clocks = pytest.mark.skipif(not _HERE, reason="clocks of servers are set on x86-64 Linux alone")


class ServersClock:
    """What all processes started with its `command` take for the time: so many seconds later than it is."""

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder / "clock"
        self._folder.mkdir()
        self.set(0)
        self.command: Final = (sys.executable, str(LAUNCHER), str(self._folder))

    def set(self, seconds: int) -> None:
        """From now on; processes that run see it at once."""
        written = struct.pack("<q", seconds)
        (self._folder / SHIFT).write_bytes(written)
        for started in self._folder.glob("[0-9]*"):
            try:
                self._write(int(started.name), int(started.read_text()), written)
            except OSError:
                started.unlink()  # it has ended

    @staticmethod
    def _write(pid: int, at: int, seconds: bytes) -> None:
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(at - len(CODE))
            if memory.read(len(CODE)) != CODE:
                raise ProcessLookupError(pid)  # another process has its id
            memory.seek(at)
            memory.write(seconds)
