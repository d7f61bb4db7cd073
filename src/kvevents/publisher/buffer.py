"""The batches that can be replayed, and what stands for those that no longer can.

Theory of operation. What is pushed out of the buffer is folded into a history. Whoever asks from before the buffer gets a
snapshot of it first, which ordinary consumers take for ordinary batches, so everything it says it says with its numbers:

- Nothing missing: the snapshot has the numbers that end with that of the last batch it stands for. One that is larger than
  subscribers read is several batches (`parts`). Of these a consumer must have all or none, and it may hold live batches of the
  same numbers; so only who asks from before the first of them gets any, and the numbers of two snapshots never overlap: until
  the next one can have numbers of its own, the last one is sent, and what was pushed out since.
- Something missing, a number that was never sent: the snapshot ends just before that number. Nobody can have it, so everybody
  sees a hole behind the clear, and nobody takes the state for all there is. An empty batch has the number of the last one
  that the snapshot stands for: a consumer that holds that batch itself, and would apply it once more, sees two contents of one
  number, and begins anew.

Sending never waits for compaction. `compact_until_stopped` is the body of a thread that takes batches out of the buffer and
folds them; while it folds, or a snapshot is read, `extend` only appends. Without that thread, or when it is far behind,
`extend` folds itself, which bounds memory. The thread folds small pieces with pauses between: where a publisher's threads and
this one share a CPU, a batch waits as long as one piece takes. Locks, outermost first: `_asking` (one snapshot is made at a
time), `_folding` (the history, and what was taken out of the buffer), `_lock` (what is kept).

If compaction fails, whatever the exception, it is switched off: the history may have taken in half of a batch. From then on
the buffer keeps `steps` batches and sends no snapshot, so that a late consumer sees that history is truncated.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kvevents.events import KVEventBatch
from kvevents.publisher.history import History, Told
from kvevents.publisher.kept import Kept, Numbered
from kvevents.publisher.parts import MAX_PARTS, spelled
from kvevents.publisher.stats import HistoryStats
from kvevents.wire import DEFAULT_WIRE_LIMITS, decode_batch
from kvevents.wire.dialects import Dialect
from kvevents.wire.encode import batch_encoder

if TYPE_CHECKING:
    from kvevents.publisher.intake import Encode

logger = logging.getLogger(__name__)

GROUP: Final = 64
"""Batches that are folded at once, since a call of native code costs as much as a small batch."""
GROUPS: Final = 16
"""Groups that are kept at least, each smaller than that if need be."""
KEPT_BYTES: Final = 256 * 1024 * 1024
"""Bytes that are kept as they were sent, where there is a history for the rest: 10,000 batches of 26 KB. Those of engines have
some hundred bytes as a rule; but those of long prompts, and snapshots that a relay passes on, have MiB."""
BACKLOG: Final = 16 * GROUP
"""Batches that may wait for the compaction thread before `extend` folds them itself."""
PIECE_BYTES: Final = 16 * 1024
"""That the thread folds without a pause: 8 batches of 32 blocks, about 0.1 ms."""
PIECE_PAUSE: Final = 0.001
"""Seconds between two pieces, unless more than two groups wait."""
_REASON: Final = 200
"""Characters of a reason in `stats()`, at most."""


class Collapsed(NamedTuple):
    """What has left a buffer, in the form in which `ReplayBuffer.resume` takes it."""

    number: int
    """Of the last batch that it stands for."""
    payloads: list[bytes]
    """Not for consumers."""
    partial: bool = False
    """Whether a number below was never sent, since the stream was cleared last."""


class _Snapshot(NamedTuple):
    """What stands for everything up to a number."""

    through: int
    """Number of the last batch that it stands for."""
    batches: list[Numbered]
    latest: int
    """Who asks from above this gets none of it."""
    several: bool
    """Whether its numbers are those of batches that were sent, and more than one."""


class _Cut(NamedTuple):
    """What a snapshot is made of."""

    number: int
    last: bytes
    """The batch of that number."""
    missing: int | None
    told: list[Told] | None
    """None where there is nothing to tell, or no need."""
    lately: list[Numbered]
    """What was pushed out last."""


class ReplayBuffer:
    """The last `steps` published batches, in order. Numbers rise but may have holes. Safe to use from several threads.

    With a `history`, what is pushed out is collapsed into a snapshot: a clear, and stores that rebuild what was live. `encode`
    makes its payloads, of at most `limit` bytes, by default what subscribers read. Batches are pushed out in groups then: up to
    `GROUP` more are kept, a sixteenth of `steps` at most; and fewer, where they are more than `KEPT_BYTES`. One thread calls
    `extend`.
    """

    def __init__(
        self, steps: int, history: History | None = None, encode: Encode | None = None, *, limit: int | None = None
    ) -> None:
        self._steps = steps
        self._surplus = 0 if history is None else min(GROUP - 1, steps // GROUPS)
        self._kept = Kept()
        self._make_locks()
        self._history = history
        self._history_stats = None if history is None else HistoryStats()
        self._in_background = self._stopped = False
        self._compaction_failed = False
        self._encode = encode
        self._limit = DEFAULT_WIRE_LIMITS.max_payload_bytes if limit is None else limit
        self._rank: int | None = None
        self.incarnation = 0
        """The sender's, as its heartbeats tell it; for snapshots of several batches, which say it too."""
        self._folded: Numbered = (-1, b"")
        """The last batch that went into the history."""
        self._missing: int | None = None
        self._lately: deque[Numbered] = deque(maxlen=MAX_PARTS)
        self._snapshot: _Snapshot | None = None
        self._unsent: str | None = None
        """Why what was folded last had no snapshot when it was asked for."""

    @classmethod
    def collapsing(cls, steps: int, dialect: Dialect | None = None, *, limit: int | None = None) -> Self:
        """One with a history, whose snapshots are in `dialect`; without a history where the native module is not installed."""
        return cls(steps, History.create(), batch_encoder(dialect), limit=limit)

    def extend(self, batches: Sequence[Numbered]) -> None:
        """Add batches, pushing out the oldest. Called before they are sent live, so that what was seen can be asked for."""
        with self._lock:
            self._kept.extend(batches)
            surplus = self._count_surplus(self._surplus)
        if surplus and (not self._in_background or surplus > BACKLOG):
            with self._folding:
                self._compact()
        elif surplus:
            self._due.set()

    def compact_until_stopped(self) -> None:
        """Fold what leaves the buffer, until `stop_compacting`; the body of a thread, beside the one that calls `extend`."""
        self._in_background = True
        try:
            while not self._stopped:
                self._due.wait()
                self._due.clear()
                self._compact_in_pieces()
        except BaseException:
            logger.exception("the compaction thread failed; the publisher thread compacts from now on")
        finally:
            self._in_background = False

    def _compact_in_pieces(self) -> None:
        """Fold what is to leave now; all of it at once where so much waits that pauses would make it more."""
        with self._lock:
            left = self._count_surplus(self._surplus)
        while left > 0 and not self._stopped:
            with self._folding:
                folded = self._compact(exactly=True, most=PIECE_BYTES if left <= 2 * GROUP else None)
            # Somebody who asked for replay may have folded some of it.
            left = left - folded if folded else 0
            if left > 0:
                self._pause.wait(PIECE_PAUSE)

    def stop_compacting(self) -> None:
        """End `compact_until_stopped`. Returns at once; `extend` folds by itself from now on."""
        self._in_background, self._stopped = False, True
        self._due.set()
        self._pause.set()

    def _count_surplus(self, least: int) -> int:
        """How many of the oldest batches are to leave now; 0 unless they are more than `least`."""
        kept = self._kept
        surplus = len(kept) - self._steps
        surplus = surplus if surplus > least else 0
        stats = self._history_stats
        if kept.bytes > KEPT_BYTES and len(kept) > 1 and stats is not None and stats.lost is None:
            surplus = max(surplus, self._heavy())
        return surplus

    def _heavy(self) -> int:
        """How many of the oldest must go until there is room for a while; never the newest, by whose number replay goes."""
        room = KEPT_BYTES - KEPT_BYTES // GROUPS
        left = accumulate(self._kept, lambda left, batch: left - len(batch[1]), initial=self._kept.bytes)
        return min(sum(1 for _ in takewhile(lambda left: left > room, left)), len(self._kept) - 1)

    def _compact(self, *, exactly: bool = False, most: int | None = None) -> int:
        """Take out of the buffer what is to leave, and fold it; how many batches that were.

        `exactly` does not wait for a group of batches. With `most` these are the oldest ones of so many bytes, or one.
        """
        with self._lock:
            surplus = self._count_surplus(0 if exactly else self._surplus)
            if surplus and most is not None:
                surplus = min(surplus, self._kept.count_within(most))
            taken = self._kept.take(surplus) if surplus else []
        if taken and self._history is not None:
            with self._switching_off():
                self._push_out(self._history, taken)
        return len(taken)

    @contextmanager
    def _switching_off(self) -> Iterator[None]:
        """Do without the history if this fails."""
        try:
            yield
        # A panic of native code is a BaseException.
        except BaseException as error:
            with self._folding:
                self._history = self._snapshot = None
                self._lately.clear()
                self._compaction_failed = True
                reason = f"failed: {type(error).__name__}: {error}"[:_REASON]
                self._history_stats = HistoryStats(batches=self._folded[0] + 1, lost=reason)
            logger.exception("compaction failed and is switched off: replay begins with the oldest buffered batch from now on")
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise

    def since(self, start: int) -> list[Numbered]:
        """Every kept batch numbered `start` or higher.

        When `start` is older than the buffer: the snapshot of everything before it, where there is one, and all that is kept;
        without a snapshot the last `steps` batches.
        """
        with self._asking:
            with self._folding:
                self._compact(exactly=True)
                with self._lock:
                    found = self._kept.since(start) if self._kept else []
                    newest = self._kept.newest if self._kept else self._folded[0]
                is_older = start <= self._folded[0]
                cut = self._cut() if is_older and start <= newest else None
            before = [] if cut is None else self._before(start, cut)
            return before + found if before or not is_older else found[-self._steps :] if self._steps else []

    # --- for another buffer

    def collapse(self) -> Collapsed | None:
        """What has left the buffer so far; None where nothing has, or it cannot be told. Safe from any thread."""
        with self._folding:
            return self._collapse()

    def collapsed_at(self, number: int) -> tuple[Collapsed | None, list[Numbered]] | None:
        """The same, and what is kept up to `number`: together all that was sent until then. None where more has left."""
        with self._folding:
            if self._folded[0] > number:
                return None
            with self._lock:
                kept = [batch for batch in self._kept if batch[0] <= number]
            return self._collapse(), kept

    def resume(
        self,
        number: int,
        payloads: Sequence[bytes],
        partial: bool,
        batches: Sequence[Numbered] = (),
        *,
        rank: int | None = None,
    ) -> None:
        """Fill an empty buffer with what another one had `Collapsed`, and the batches after it.

        Where nothing was collapsed, `number` is -1. `rank` is for snapshots, until a batch with a rank has left this buffer.
        Nobody who asks for replay must hold batches up to `number` that he has not delivered: all connections are new ones.
        """
        with self._folding:
            self._rank = rank
            if payloads:
                self._folded = (number, payloads[-1])
                # Which number it was is not known any more, nor does it matter: nobody holds any of them.
                self._missing = number - 1 if partial else None
                if self._history is not None:
                    self._history.restore(payloads, partial=partial)
                    self._note()
        self.extend(batches)

    def told(self) -> list[Told] | None:
        """What has left the buffer as its history tells it, if nothing is missing."""
        with self._folding:
            return None if self._history is None or self._missing is not None else self._history.told()

    def _collapse(self) -> Collapsed | None:
        number, last = self._folded
        if self._history is None or number < 0:
            return None
        payloads = self._history.payloads(self._limit, decode_batch(last).batch.ts)
        return None if payloads is None else Collapsed(number, payloads, self._missing is not None)

    # --- in numbers

    def size(self) -> tuple[int, int]:
        """Number of batches that are kept as they were sent, and of their bytes."""
        with self._lock:
            return len(self._kept), self._kept.bytes

    def history_stats(self) -> HistoryStats | None:
        """What older batches are collapsed into, as of the last fold; None where they are forgotten. Waits for nobody."""
        return self._history_stats

    def _note(self) -> None:
        history = self._history
        if history is not None:
            self._history_stats = HistoryStats(
                batches=self._folded[0] + 1,
                blocks=history.live,
                bytes=history.bytes,
                partial=self._missing is not None,
                lost=history.lost or self._unsent,
            )

    def failures(self) -> dict[str, int]:
        """`{"compaction": 1}` once compaction was switched off."""
        return {"compaction": 1} if self._compaction_failed else {}

    def forget(self) -> None:
        """Drop everything that is kept, and compact no more: for a sender that could not add a batch."""
        with self._folding, self._lock:
            self._kept = Kept()
            if self._history is not None:
                self._history = self._snapshot = None
                self._history_stats = HistoryStats(batches=self._folded[0] + 1, lost="batches")

    @property
    def has_left(self) -> bool:
        """Whether anything has been pushed out."""
        return self._folded[0] >= 0

    def after_fork(self) -> None:
        """For a forked child, in which no other thread exists, nor will it ever release a lock."""
        self._make_locks()

    def _make_locks(self) -> None:
        self._asking, self._folding, self._lock = threading.Lock(), threading.RLock(), threading.Lock()
        self._due, self._pause = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return len(self._kept)

    # --- what was pushed out

    def _push_out(self, history: History, batches: list[Numbered]) -> None:
        if batches[-1][0] - self._folded[0] == len(batches):  # no number is missing
            history.fold_many(batches)
            self._folded = batches[-1]
        else:
            for seq, payload in batches:
                if seq != self._folded[0] + 1:
                    history.miss()
                    self._missing = seq - 1
                history.fold(payload)
                self._folded = (seq, payload)
        if self._missing is not None and not history.partial:
            self._missing = None
        self._lately.extend(batches)
        self._note()

    def _cut(self) -> _Cut | None:
        history, known = self._history, self._snapshot
        if history is None:
            return None
        number, last = self._folded
        # One of several batches is good for as many more batches: the next one could not have numbers of its own before.
        again = known is not None and number - known.through < (len(known.batches) if known.several else 1)
        with self._switching_off():
            cut = _Cut(number, last, self._missing, None if again else history.told(), list(self._lately))
        return None if self._history is None else cut

    # --- the snapshot, outside of the inner locks: to spell 50,000 blocks takes a tenth of a second, for which nobody must wait

    def _before(self, start: int, cut: _Cut) -> list[Numbered]:
        """What is sent before what is kept, to somebody who asks from `start`. Spelled once for all who ask."""
        if cut.told is not None:
            with self._switching_off():
                self._renew(cut, cut.told)
        known, lately = self._snapshot, cut.lately
        if known is None or (known.through < cut.number and (not lately or lately[0][0] > known.through + 1)):
            return []
        snapshot = known.batches if start <= known.latest else []
        return snapshot + [batch for batch in lately if batch[0] > known.through and batch[0] >= start]

    def _renew(self, cut: _Cut, told: list[Told]) -> None:
        made = self._made(cut, told)
        self._unsent = made if isinstance(made, str) else None
        with self._folding:
            self._note()
        known = self._snapshot
        if isinstance(made, str) or (known is not None and made.several and made.batches[0][0] <= known.through):
            return
        self._snapshot = made

    def _made(self, cut: _Cut, told: list[Told]) -> _Snapshot | str:
        """The snapshot, or why there is none."""
        batch = decode_batch(cut.last).batch
        rank = self._rank if batch.data_parallel_rank is None else batch.data_parallel_rank
        encode = self._encode
        parts = None if encode is None else spelled(told, batch.ts, rank, encode, self._limit, self.incarnation)
        if parts is None or encode is None:
            return "oversized"
        last = cut.number if cut.missing is None else cut.missing - 1
        first = last - len(parts) + 1
        several = cut.missing is None and len(parts) > 1
        if first < several:
            return "oversized" if cut.missing is None else "batches"
        batches = list(zip(range(first, last + 1), parts, strict=True))
        if cut.missing is not None:
            batches.append((cut.number, encode(KVEventBatch(batch.ts, [], rank))))
        return _Snapshot(cut.number, batches, first - several, several)
