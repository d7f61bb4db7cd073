"""What a journal tells about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["new", "disk", "memory", "closed"]
"""Not yet begun; what is sent is in the files; the disk refuses, and nothing is recorded; closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStats:
    """Counters since the journal was opened."""

    state: State
    reason: str
    """Why the state is "memory", or the last snapshot failed; empty otherwise."""
    marked: bool
    """Whether, in memory, the files say that they do not tell everything. Where not even that could be written, a relay that
    dies now and finds them again would go on with numbers it has used: remove the folder before it starts."""
    bytes: int
    """Of all files, those that wait to be written over among them."""
    segments: int
    appended: int
    """Batches that were written."""
    dropped: int
    """Batches that were not, in memory."""
    failures: int
    """Times that the disk refused something."""
    compactions: int
    """Snapshots written."""
    fsyncs: int
    lag: float
    """Seconds for which the oldest bytes that the disk may not have wait for it; 0 when there are none, or nobody asks it."""
    torn_bytes: int
    """Cut off by recovery: half a write of a killed process. In a file that was written over before, all that its frame was to
    take, if its head was finished, and none otherwise; what the file held before does not count."""
    dropped_bytes: int
    """Left aside by recovery, since something before them was damaged; what was not acknowledged does not count."""
    recovery_seconds: float
