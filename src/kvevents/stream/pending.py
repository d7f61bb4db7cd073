"""Batches that wait for a missing one, and digests of replayed ones that may come live as well."""

from __future__ import annotations

import heapq

from kvevents.stream.limits import StreamLimits
from kvevents.stream.state import payload_digest


class ReorderBuffer:
    """A bounded reorder buffer."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._batches: dict[int, tuple[bytes, bool]] = {}
        self._order: list[int] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def get(self, seq: int) -> bytes | None:
        """The payload waiting under this number."""
        found = self._batches.get(seq)
        return None if found is None else found[0]

    def peek(self, seq: int) -> tuple[bytes, bool] | None:
        """Return `(payload, replayed)` of this number."""
        return self._batches.get(seq)

    def add(self, seq: int, payload: bytes, *, replayed: bool) -> bool:
        """Keep a batch whose number is not here yet; False when there is no room."""
        size = self._bytes + len(payload)
        if len(self._batches) >= self._limits.max_pending_batches or size > self._limits.max_pending_bytes:
            return False
        self._batches[seq] = (payload, replayed)
        heapq.heappush(self._order, seq)
        self._bytes = size
        return True

    def take(self, seq: int) -> tuple[bytes, bool] | None:
        """Remove and return `(payload, replayed)` of this number."""
        found = self._batches.pop(seq, None)
        if found is not None:
            self._bytes -= len(found[0])
            # Whatever was taken out of turn before is here still, and would keep all that comes after it.
            while self._order and self._order[0] not in self._batches:
                heapq.heappop(self._order)
        return found

    def first(self) -> int | None:
        """The lowest number here."""
        return self._order[0] if self._order else None

    def drop_replayed(self) -> None:
        """Drop what did not come live."""
        for seq in [seq for seq, (_, replayed) in self._batches.items() if replayed]:
            self.take(seq)

    def clear(self) -> int:
        """Drop everything; returns how many batches that were."""
        count = len(self._batches)
        self._batches.clear()
        self._order.clear()
        self._bytes = 0
        return count


class ReplayedDigests:
    """Digests of the replayed batches that were delivered last, at most `StreamLimits.max_replayed_digests` of them."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._digests: dict[int, bytes] = {}

    def add(self, seq: int, payload: bytes) -> None:
        """Remember one, and forget the oldest for it."""
        self._digests.pop(seq, None)
        self._digests[seq] = payload_digest(payload)
        if len(self._digests) > self._limits.max_replayed_digests:
            del self._digests[next(iter(self._digests))]

    def take(self, seq: int) -> bytes | None:
        """Forget the digest of this number, and return it."""
        return self._digests.pop(seq, None)
