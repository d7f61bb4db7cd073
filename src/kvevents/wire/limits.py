"""What a decoder accepts from a peer: each limit named, defaulted and justified here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Limits on one payload. What exceeds them is rejected with a reason, never raised.

    Counts are read from the declared lengths, before anything is allocated.
    """

    max_payload_bytes: int = 32 * 1024 * 1024
    """A step that stores one prompt of a million tokens is about 5 MiB. Decoded, a payload of nothing but token ids takes about
    13 times its size in memory."""
    max_events: int = 1_000_000
    """Events in one batch. A full reset that removes block by block is in the hundred thousands."""
    max_hashes: int = 1_000_000
    """Block hashes in one event: 16 million tokens at the smallest common block size."""
    max_fields: int = 256
    """Fields of one event, or elements of one batch. Engines send up to 16; an unknown one costs a hundred times its byte."""
    max_free_bytes: int = 4 * 1024 * 1024
    """Bytes of one batch in fields of free form, which are `extra_keys` and those that this release does not know. Empty lists
    in them take 140 times their size while they are read. Extra keys of a million tokens with a LoRA are about 2 MiB."""
    max_nesting: int = 8
    """Depth of containers in one event, itself included. Engines reach 4 (`extra_keys` with multimodal pairs)."""
    max_rejected: int = 1_000
    """`Rejected` entries kept of one batch; the last one stands for all that follow."""


DEFAULT_WIRE_LIMITS: Final = WireLimits()

MAX_FREE_CONTAINERS: Final = 50_000
"""Lists and maps of a batch in fields of free form, but for extra keys as engines send them: each takes up to 2 us to read."""

FAST_BYTES: Final = 1024 * 1024
"""Payloads above this are read with every length checked before it is allocated: one native call checks none, and makes 70 MiB
of 1 MiB of empty lists."""
SKIM_BYTES: Final = 1024 * 1024
"""Payloads up to this are cut into events in Python when one is nested too deep for the native scanner, at up to 0.2 us a
byte."""

MAX_SEQ: Final = 1 << 48
"""Sequence numbers at or above this are malformed: at 1,000 batches a second it takes 8,900 years to get there. Without the
bound one corrupt frame (2**63) would make every later number of the stream look old."""
