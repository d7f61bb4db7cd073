"""Records of what a decoder rejected."""

from __future__ import annotations

from typing import Final

import msgspec

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
