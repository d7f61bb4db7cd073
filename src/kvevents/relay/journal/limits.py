"""What a journal may take, and when it asks the disk: each bound named, defaulted and justified here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from kvevents.errors import ConfigError

MIB: Final = 1 << 20

FsyncPolicy: TypeAlias = Literal["always", "interval", "never"]
FSYNC_POLICIES: Final[tuple[FsyncPolicy, ...]] = get_args(FsyncPolicy)

MAX_BURST: Final = 1000
"""Batches of one frame; longer bursts are cut. A relay's bursts hold up to about 256. One write takes no more pieces
than 1024 (IOV_MAX), of which two are before them."""
MAX_FRAME_BYTES: Final = 64 * MIB
"""Of one burst, mark, or part of a snapshot: two of the largest payloads that the wire knows. Recovery holds one frame."""
MAX_MARK_BYTES: Final = MIB
"""Of one mark, encoded: it is written again at the head of each segment. Checkpoints take a few hundred bytes each."""
TAIL_BURST: Final = 256
"""Batches of a frame in which the relay says again what was sent behind a snapshot."""
TAIL_BURST_BYTES: Final = 8 * MIB
"""The same in bytes, about."""
PROBE_BYTES: Final = MIB
"""Room that a full disk must have again, besides that of the last snapshot, before another one is tried."""
SPARES: Final = 3
"""Segments that are kept to be written over when a snapshot has made them needless. Until the next one, `compact_bytes` later,
two are begun, or three; more would only lie there."""


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """How a journal is kept. Raises `ConfigError` for a setting that cannot be.

    What is lost: a process that is killed loses nothing that `append` returned from, whatever the policy, since the system has
    it. A machine that loses its power loses what was not on the disk: with "always" nothing that `append` returned from; with
    "interval" what was appended in the last `fsync_interval` seconds, and while the disk took it; with "never" whatever the
    system had not written by itself, about 30 seconds on Linux. Recovery says `unclean` then with any of them, since a disk may
    say that it has written what it has not.
    """

    fsync: FsyncPolicy = "interval"
    fsync_interval: float = 1.0
    """Seconds between two, with "interval"."""
    segment_bytes: int = 32 * MIB
    """Size from which the next burst begins a new file. What a snapshot covers is freed by whole files, or, but with "always",
    written over: up to `SPARES` of them wait for that."""
    compact_bytes: int = 64 * MIB
    """Bytes behind the last snapshot from which another one is wanted, or twice its size, if that is more."""
    limit_bytes: int = 8192 * MIB
    """Of all files together. Beyond it the journal goes to memory, as with a full disk: whoever shares the disk goes on. Files
    that wait to be written over go first, and are not kept where all take more than half of this."""
    retry_first: float = 1.0
    """Seconds until a disk that failed is tried again; doubling."""
    retry_most: float = 60.0
    """Seconds between two such tries at most."""
    close_timeout: float = 10.0
    """Seconds that `close` waits for the disk."""

    def __post_init__(self) -> None:
        if self.fsync not in FSYNC_POLICIES:
            raise ConfigError(f"fsync is {self.fsync!r}; it is one of {', '.join(FSYNC_POLICIES)}")
        for name in ("fsync_interval", "segment_bytes", "compact_bytes", "retry_first", "close_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be above 0")
        if self.retry_most < self.retry_first:
            raise ConfigError(f"retry_most is {self.retry_most!r}, below retry_first, {self.retry_first!r}")
        if self.limit_bytes < 2 * self.segment_bytes:
            raise ConfigError(f"limit_bytes is {self.limit_bytes!r}; it must hold two segments of {self.segment_bytes}")

    def wanted_beyond(self, snapshot_bytes: int) -> int:
        """Bytes behind a snapshot of this size from which another one is wanted; never more than half of `limit_bytes`."""
        return min(max(self.compact_bytes, 2 * snapshot_bytes), self.limit_bytes // 2)

    @property
    def fair_size(self) -> int:
        """Bytes of a segment from which a snapshot ends it, and it pays to write it over: a quarter of a full one."""
        return self.segment_bytes // 4

    @property
    def reuses(self) -> bool:
        """Whether files are written over: where each burst waits for the disk, that is the cost, and not the pages."""
        return self.fsync != "always"
