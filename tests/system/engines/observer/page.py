"""The layout of the file that the observer writes and `Observation` reads: 64-bit words in the byte order of the machine.

The observer imports nothing of this package, since only its module is copied to the Python path of the engine. A test compares
its constants with these.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final, NamedTuple

PUBLISHED: Final = 0
"""Word with the number of calls of `publish()` that have returned."""
LAST_TIMESTAMP: Final = 1
"""Word with the timestamp of the newest published batch, a double; 0.0 before the first one."""
IS_IDLE: Final = 2
"""Word that is 1 while the engine core waits for requests and none is in progress."""
STEPS: Final = 3
"""Word with the number of engine steps."""
SAMPLES: Final = 32_768
"""Number of the newest samples that each series keeps."""
SERIES: Final = ("publish_ns", "publish_cpu_ns", "step_ns", "step_cpu_ns")
"""Series after the words, in this order. Each begins with a word with the number of all samples, then has `SAMPLES` words."""
HEAD: Final = 8
"""Words before the series."""
PAGE_BYTES: Final = 8 * (HEAD + len(SERIES) * (1 + SAMPLES))


class Progress(NamedTuple):
    """Progress of an engine core."""

    published: int
    last_timestamp: float
    is_idle: bool
    steps: int


class Observation:
    """The progress of one engine core. It can be created before the engine starts."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        with path.open("wb") as file:
            file.truncate(PAGE_BYTES)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), PAGE_BYTES, prot=mmap.PROT_READ)

    def progress(self) -> Progress:
        """Return the progress. If the engine core is idle, all its batches have been published."""
        is_idle = self._word(IS_IDLE) == 1  # read first: what an idle engine core has published does not change
        timestamp = struct.unpack("=d", struct.pack("=Q", self._word(LAST_TIMESTAMP)))[0]
        return Progress(self._word(PUBLISHED), timestamp, is_idle, self._word(STEPS))

    def samples(self, series: str, skip: int = 0) -> list[int]:
        """Return the newest samples of a series, without the first `skip` of all samples."""
        start = HEAD + SERIES.index(series) * (1 + SAMPLES)
        written = self._word(start)
        numbers = range(max(skip, written - SAMPLES), written)
        return [self._word(start + 1 + number % SAMPLES) for number in numbers]

    def _word(self, at: int) -> int:
        value: int = struct.unpack_from("=Q", self._map, 8 * at)[0]
        return value

    def close(self) -> None:
        self._map.close()
