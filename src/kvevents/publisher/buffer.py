"""The batches that can be replayed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from kvevents.publisher.history import History, Told
from kvevents.publisher.stats import HistoryStats
from kvevents.wire import DEFAULT_WIRE_LIMITS, decode_batch

if TYPE_CHECKING:
    from kvevents.publisher.intake import Encode

Numbered: TypeAlias = tuple[int, bytes]
"""A batch as it is sent: its number and its payload."""


class ReplayBuffer:
    """The last `steps` published batches, in order. Numbers rise but may have holes. Safe to use from several threads.

    With a `history`, what is pushed out is collapsed into one snapshot batch: a clear, and stores that rebuild what was live,
    numbered as the last batch that it stands for. `encode` makes its payload. A number that is missing before it was a batch
    that nobody will ever see, so from then on there is no snapshot until the stream is cleared.
    """

    def __init__(self, steps: int, history: History | None = None, encode: Encode | None = None) -> None:
        self._steps = steps
        self._kept: deque[Numbered] = deque()
        self._lock = threading.Lock()
        self._history = history
        self._encode = encode
        self._folded: Numbered = (-1, b"")
        """The last batch that went into the history."""
        self._snapshot: Numbered = (-1, b"")
        self._oversized = False
        """Whether the snapshot is larger than subscribers read; it is not sent then."""

    def extend(self, batches: Sequence[Numbered]) -> None:
        """Add batches, pushing out the oldest. Called before they are sent live, so that what was seen can be asked for."""
        with self._lock:
            self._kept.extend(batches)
            surplus = len(self._kept) - self._steps
            if surplus > 0:
                self._push_out([self._kept.popleft() for _ in range(surplus)])

    def since(self, start: int) -> list[Numbered]:
        """Every kept batch numbered `start` or higher.

        When `start` is older than the buffer: the snapshot of everything before it, where there is one, and all that is kept.
        """
        with self._lock:
            if not self._kept or start > self._kept[-1][0]:
                return []
            folded = self._folded
            old = start <= folded[0]
            told = self._history.told() if old and self._history is not None and self._snapshot[0] != folded[0] else None
            # Without holes this many batches are wanted; with holes, fewer, and the surplus is cut off below.
            wanted = self._kept[-1][0] - start + 1
            found = list(islice(reversed(self._kept), wanted))
        while found and found[-1][0] < start:
            found.pop()
        if old:
            found += self._collapsed(folded, told)
        found.reverse()
        return found

    def size(self) -> tuple[int, int]:
        """Number of batches that are kept as they were sent, and of their bytes."""
        with self._lock:
            kept = list(self._kept)
        return len(kept), sum(len(payload) for _, payload in kept)

    def history_stats(self) -> HistoryStats | None:
        """What older batches are collapsed into; None where they are forgotten."""
        if self._history is None:
            return None
        with self._lock:
            history = self._history
            lost = history.lost or ("oversized" if self._oversized else None)
            return HistoryStats(batches=self._folded[0] + 1, blocks=history.live, bytes=history.bytes, lost=lost)

    def forget_lock(self) -> None:
        """For a forked child, in which the thread that held the lock does not exist."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def _push_out(self, batches: list[Numbered]) -> None:
        history = self._history
        if history is None:
            return
        if batches[-1][0] - self._folded[0] == len(batches):  # no number is missing
            history.fold_many([payload for _, payload in batches])
        else:
            for seq, payload in batches:
                if seq != self._folded[0] + 1:
                    history.lose("batches")
                history.fold(payload)
                self._folded = (seq, payload)
        self._folded = batches[-1]

    def _collapsed(self, folded: Numbered, told: list[Told] | None) -> list[Numbered]:
        """The snapshot of what has left the buffer; spelled once for all who ask before the next batch leaves.

        Outside of the lock: to spell 50,000 blocks takes a tenth of a second, and the publisher must not wait for it.
        """
        number, last = folded
        if told is not None and self._encode is not None:
            decoded = decode_batch(last).batch
            payload = self._encode(History.snapshot(told, decoded.ts, decoded.data_parallel_rank))
            self._oversized = len(payload) > DEFAULT_WIRE_LIMITS.max_payload_bytes
            self._snapshot = (number, payload)
        return [] if self._snapshot[0] != number or self._oversized else [self._snapshot]
