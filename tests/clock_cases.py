"""A clock of the day that tests set, for NATS servers alone: `clock_shift.c`, which says how."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).with_name("clock_shift.c")
COMPILER: Final = shutil.which("cc") or ""
SECONDS: Final = 60.0
_HERE: Final = sys.platform == "linux" and platform.machine() == "x86_64" and bool(COMPILER)
needs_clocks = pytest.mark.skipif(not _HERE, reason="clocks of servers are set on x86-64 Linux with a C compiler alone")


class ServersClock:
    """What all processes with its `env` take for the time: so many seconds later than it is."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "clock_shift", folder / "clock_shift.so"
        self.set(0)
        build = (COMPILER, "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-o", library, SOURCE)
        subprocess.run(build, check=True, timeout=SECONDS)
        self.env: Final = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._file)}

    def set(self, seconds: int) -> None:
        """From now on; where it was written to before, processes see it at once."""
        written = struct.pack("<q", seconds)
        if not self._file.exists():
            self._file.write_bytes(written)
        with self._file.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), written, 0)
