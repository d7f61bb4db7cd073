"""What an export keeps in memory: each bound named, defaulted and justified here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvevents.errors import ConfigError
from kvevents.recording_streams import DEFAULT_ORDERING_LIMITS, OrderingLimits


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """Bounds of an export. Reaching one of the last four is counted in the table `workers`, and told."""

    rows: int = 1 << 16
    """Rows of a table that are gathered before they are written, as a row group; about 50 MB of Python objects."""
    tokens: int = 1 << 20
    """Token ids that are gathered, where they are wanted: with them rows are long."""
    ordering: OrderingLimits = DEFAULT_ORDERING_LIMITS
    """Batches that wait for a missing one."""
    resident_blocks: int = 4_000_000
    """Blocks of one export that are resident at the same time, about 700 bytes each; beyond, the oldest of the worker that
    stores are taken for gone. More than the device memory of a fleet of 100 engines holds."""
    remembered_keys: int = 1 << 20
    """Blocks of one worker and tier whose last store is remembered for reuse distances, about 150 bytes each: sixteen million
    tokens in blocks of 16."""

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "resident_blocks", "remembered_keys"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


DEFAULT_EXPORT_LIMITS: Final = ExportLimits()
