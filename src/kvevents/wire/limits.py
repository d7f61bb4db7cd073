"""What a decoder accepts from a peer: each limit named, defaulted and justified here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Limits on one payload. What exceeds them is rejected with a reason, never raised."""

    max_payload_bytes: int = 64 * 1024 * 1024
    """A step that stores one prompt of a million tokens is about 5 MiB."""
    max_events: int = 1_000_000
    """Events in one batch. A full reset that removes block by block is in the hundred thousands."""
    max_hashes: int = 1_000_000
    """Block hashes in one event: 16 million tokens at the smallest common block size."""
    max_nesting: int = 16
    """Depth of containers inside one event. Engines reach 4 (`extra_keys` with multimodal pairs)."""


DEFAULT_WIRE_LIMITS: Final = WireLimits()

MAX_SEQ: Final = 1 << 48
"""Sequence numbers at or above this are malformed: at 1,000 batches a second it takes 8,900 years to get there. Without the
bound one corrupt frame (2**63) would make every later number of the stream look old."""
