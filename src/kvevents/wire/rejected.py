"""Limits on what a decoder accepts from a peer, and records of what it rejected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Limits on one payload. What exceeds them is rejected with a reason; nothing is raised.

    Counts are read from the declared lengths, before anything is allocated.
    """

    max_payload_bytes: int = 32 * 1024 * 1024
    """Size of a payload. A step that stores one prompt of a million tokens is about 5 MiB. Decoded, a payload of token ids only
    takes about 13 times its size in memory."""
    max_events: int = 1_000_000
    """Events in one batch. A full reset that removes block by block is in the hundred thousands."""
    max_hashes: int = 1_000_000
    """Block hashes in one event: 16 million tokens at the smallest common block size."""
    max_fields: int = 256
    """Fields of one event, or elements of one batch. Engines send up to 16. An unknown field takes a hundred times its size."""
    max_free_form_bytes: int = 4 * 1024 * 1024
    """Bytes of one batch in fields of free form, which are `extra_keys` and unknown fields. While they are read, empty lists
    take 140 times their size. Extra keys of a million tokens with a LoRA are about 2 MiB."""
    max_nesting: int = 8
    """Depth of containers in one event, itself included. Engines reach 4 (`extra_keys` with multimodal pairs)."""
    max_rejected: int = 1_000
    """`Rejected` entries of one batch. One more entry counts all that follow."""


DEFAULT_WIRE_LIMITS: Final = WireLimits()

MAX_FREE_CONTAINERS: Final = 50_000
"""Lists and maps of one batch in fields of free form, except extra keys as engines send them. Each takes up to 2 us to read."""

MAX_FAST_BYTES: Final = 1024 * 1024
"""Larger payloads skip the fast decoder. One native call does not check lengths before it allocates: it makes 70 MiB of 1 MiB
of empty lists. The tolerant decoder checks every length."""
MAX_NONRECURSIVE_BYTES: Final = 1024 * 1024
"""Largest container that is split in Python if it is nested too deeply for msgspec, at up to 0.2 us per byte."""

MAX_SEQ: Final = 1 << 48
"""Sequence numbers from this on are malformed. At 1,000 batches a second it takes 8,900 years to reach it. Without the limit,
one corrupt frame (2**63) would make every later number of the stream look old."""


MAX_RAW_BYTES: Final = 256
"""Bytes of the rejected input that a record holds, for diagnosis."""
_MAX_DETAIL: Final = 256
"""Characters of a detail. Parts of it may be chosen by a peer."""


class Rejected(msgspec.Struct, frozen=True):
    """Input that was rejected, and why. `reason` is one of a few fixed words, for counting; `detail` is for people."""

    reason: str
    """One of: oversized, malformed, not-a-batch, too-many-events, too-many-hashes, too-many-fields, too-deep, unknown-tag,
    bad-field, bad-timestamp, bad-rank, more."""
    detail: str
    index: int | None = None
    """Position of the event in its batch; None for the batch itself, its timestamp or its rank."""
    raw: bytes = b""
    """The first bytes of the rejected input."""
    count: int = 1
    """Number of rejections that this entry represents. Above 1 only for the reason `more`, the last entry of a long list."""

    @property
    def loses_events(self) -> bool:
        """Whether events are missing because of it. An invalid timestamp or rank loses none."""
        return self.index is not None or self.reason not in {"bad-timestamp", "bad-rank"}


class DecodeRejectedError(Exception):
    """Raised inside `kvevents.wire` for input that is rejected; `decode_batch` returns it as `Rejected`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    def rejected(self, raw: bytes | memoryview | msgspec.Raw, index: int | None = None) -> Rejected:
        """Return the record of this rejection."""
        return Rejected(self.reason, str(self)[:_MAX_DETAIL], index, bytes(memoryview(raw)[:MAX_RAW_BYTES]))
