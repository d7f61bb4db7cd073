"""A wall clock for NATS servers that tests set. `clock_shift.py` describes how it works."""

from __future__ import annotations

import platform
import struct
import sys
from pathlib import Path
from typing import Final

import pytest

from clock_shift import CODE, SHIFT

LAUNCHER: Final = Path(__file__).with_name("clock_shift.py")
_HAS_CLOCKS: Final = sys.platform == "linux" and platform.machine() == "x86_64"
needs_clocks = pytest.mark.skipif(not _HAS_CLOCKS, reason="clocks of servers can be set on x86-64 Linux only")


class ServersClock:
    """The time that processes started with `command` see: a number of seconds later than the real time."""

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder / "clock"
        self._folder.mkdir()
        self.set(0)
        self.command: Final = (sys.executable, str(LAUNCHER), str(self._folder))

    def set(self, seconds: int) -> None:
        """Set the number of seconds. Running processes see the new time at once."""
        written = struct.pack("<q", seconds)
        (self._folder / SHIFT).write_bytes(written)
        for started in self._folder.glob("[0-9]*"):
            try:
                self._write(int(started.name), int(started.read_text()), written)
            except OSError:
                started.unlink()  # the process has ended

    @staticmethod
    def _write(pid: int, at: int, seconds: bytes) -> None:
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(at - len(CODE))
            if memory.read(len(CODE)) != CODE:
                raise ProcessLookupError(pid)  # another process has its id
            memory.seek(at)
            memory.write(seconds)
