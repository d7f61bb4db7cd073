"""What a decoder sets aside."""

from __future__ import annotations

from typing import Final

import msgspec

RAW_KEPT: Final = 256
"""Bytes of what was rejected that are kept for a person to look at."""
_DETAIL_KEPT: Final = 256
"""Characters of a detail; parts of it may be a peer's words."""


class Rejected(msgspec.Struct, frozen=True):
    """What was set aside and why. `reason` is one of a few fixed words, for counting; `detail` is for a person."""

    reason: str
    """One of: oversized, malformed, not-a-batch, too-many-events, too-many-hashes, too-many-fields, too-deep, unknown-tag,
    bad-field, bad-timestamp, bad-rank, more."""
    detail: str
    index: int | None = None
    """Position of the event in its batch; None when the batch itself, its timestamp or its rank is meant."""
    raw: bytes = b""
    """The first bytes of it."""
    count: int = 1
    """How many this entry stands for; above 1 only with the reason `more`, the last entry of a batch with very many."""

    @property
    def costs_events(self) -> bool:
        """Whether events are missing because of it; a bad timestamp or rank costs none."""
        return self.index is not None or self.reason not in {"bad-timestamp", "bad-rank"}


class RefusedError(Exception):
    """Why something is set aside; never leaves `kvevents.wire`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    def rejected(self, raw: bytes | memoryview | msgspec.Raw, index: int | None = None) -> Rejected:
        """The record of this refusal."""
        return Rejected(self.reason, str(self)[:_DETAIL_KEPT], index, bytes(memoryview(raw)[:RAW_KEPT]))
