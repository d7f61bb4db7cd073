"""The journal of a relay: what it has sent, so that it goes on after a kill with the same numbers and the same bytes."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

from kvevents.errors import ClosedError, UsageError
from kvevents.relay.journal.clerk import Clerk
from kvevents.relay.journal.disk import Disk
from kvevents.relay.journal.keeping import Keeping
from kvevents.relay.journal.limits import MAX_BURST, MAX_FRAME_BYTES, MIB, JournalSettings
from kvevents.relay.journal.records import (
    BURST,
    HOLE,
    MARK,
    MAX_PAYLOADS_BYTES,
    RESET,
    Columns,
    End,
    Hole,
    Mark,
    Record,
    Relayed,
    UpstreamReset,
    frames_of,
    pack_burst,
    pack_hole,
    pack_mark,
    pack_reset,
    unpack_mark,
)
from kvevents.relay.journal.recovery import Recovered
from kvevents.relay.journal.scan import recover
from kvevents.relay.journal.stats import JournalStats, State
from kvevents.relay.journal.writer import Told


class Journal:
    """An append-only record in one folder. `recover` first, then `begin` or `resume`; then it may be told things.

    For one thread, which calls `tick` several times a second. Append a burst before it is sent: then nothing was sent that is
    not here. What the disk refuses never raises: the state becomes "memory" then, with a reason, and nothing is recorded until
    the disk takes things again and the relay, asked by `wants_snapshot`, gives a snapshot.

    Raises `JournalError` for a folder that an operator must mend: none that can be written, or in use by another process.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: JournalSettings | None = None,
        *,
        disk: Disk | None = None,
        clerk: Clerk | None = None,
    ) -> None:
        self.path: Final = Path(folder)
        self.settings: Final = settings or JournalSettings()
        self._keeping = Keeping(self.path, self.settings, disk or Disk(), clerk or Clerk())
        self._told = Told()
        self._snapshot_number = -1
        self._recovered: Recovered | None = None
        self._appended = self._dropped = 0

    # --- beginning ----------------------------------------------------------------------------------------------------------

    def recover(self) -> Recovered:
        """What the files hold. Writes nothing; raises `JournalError` for files of a later release only."""
        self._expect_new()
        began, folder = time.monotonic(), self._keeping.folder
        if folder is None:
            found = Recovered(incarnation=None, unclean=True, because=f"{self.path} cannot be used now")
        else:
            found = recover(folder)
        self._recovered = replace(found, seconds=time.monotonic() - began)
        return self._recovered

    def begin(self, incarnation: int) -> None:
        """Begin a new life of the relay, with number 0; whatever the folder holds goes."""
        self._expect_new()
        self._told = Told(incarnation)
        self._keeping.begin(self._told, self._recovered or self.recover())

    def resume(self) -> None:
        """Go on behind what was recovered. Raises `UsageError` where that must not be: see `Recovered.resumable`."""
        self._expect_new()
        found = self._recovered or self.recover()
        if not found.resumable or found.incarnation is None:
            raise UsageError(f"the journal in {self.path} cannot be resumed: {found.because or 'it is empty'}; begin it anew")
        self._told = Told(found.incarnation, found.next_number, found.mark, dict(found.positions))
        self._snapshot_number = -1 if found.snapshot is None else found.snapshot.number
        self._keeping.resume(self._told, found)

    # --- being told things --------------------------------------------------------------------------------------------------

    def append(self, burst: Sequence[Relayed]) -> None:
        """Record batches that are about to be sent, numbered on from `next_number`; plain tuples do.

        Raises `UsageError` for other numbers and for payloads beyond 63 MiB, `ClosedError` after `close`; never for the disk.
        """
        if burst:
            self.append_columns(cast("Columns", tuple(zip(*burst, strict=True))))
        else:
            self._expect_begun()

    def append_columns(self, columns: Columns) -> None:
        """The same, column by column. Raises as `append` does."""
        self._expect_begun()
        count = len(columns[0])
        if count <= MAX_BURST:
            self._append(columns, count)
            return
        for at in range(0, count, MAX_BURST):
            self.append_columns(_part(columns, slice(at, at + MAX_BURST)))

    def hole(self, first: int, last: int) -> None:
        """These numbers are burnt; `first` is `next_number`. Raises as `append` does."""
        self._expect_begun()
        told = self._told
        if not told.next_number == first <= last:
            raise UsageError(f"a hole from {first} to {last} does not follow number {told.next_number - 1}")
        self._keeping.put(HOLE, pack_hole(Hole(first, last)))
        told.next_number = last + 1

    def mark(self, mark: Mark) -> None:
        """Keep a small mapping, such as the checkpoints of upstreams, in the place of the one before.

        Raises `UsageError` for more than 1 MiB, and for what msgpack has no bytes for.
        """
        self._expect_begun()
        body = pack_mark(mark)
        self._keeping.put(MARK, body)
        self._told.mark = unpack_mark(body)

    def reset(self, upstream: int, incarnation: int) -> None:
        """An upstream began a new life. Raises `UsageError` for what is no ordinal or incarnation."""
        self._expect_begun()
        try:
            body = pack_reset(UpstreamReset(self._told.next_number - 1, upstream, incarnation))
        except struct.error as error:
            raise UsageError(f"incarnation {incarnation} of upstream {upstream} is out of range: {error}") from error
        self._keeping.put(RESET, body)
        self._told.positions[upstream] = (incarnation, -1)

    def snapshot(self, number: int, parts: Sequence[bytes], *, partial: bool = False, tail: Iterable[Record] = ()) -> bool:
        """Have the state as of `number` stand for everything up to it; whether that was begun.

        It is written in the background, and files that are needless then are removed. A second one while another is under way
        is not begun. In memory, when `wants_snapshot`, it is the way back to the disk: `tail` is everything that was told since
        `number` then, again; otherwise it is not read, since it is in the files.

        `number` may be -1, for nothing. Raises `UsageError` for one that was not told yet or is older than the last snapshot's,
        for a tail that does not reach from there to `next_number`, and for parts beyond 64 MiB.
        """
        self._expect_begun()
        if not self._snapshot_number <= number < self._told.next_number:
            raise UsageError(
                f"a snapshot of {number} is not between the last one, {self._snapshot_number}, and {self._told.next_number - 1}"
            )
        if any(len(part) > MAX_FRAME_BYTES for part in parts):
            raise UsageError(f"a part of a snapshot has more than {MAX_FRAME_BYTES} bytes; cut it")
        end, keeping = End(number, partial, len(parts)), self._keeping
        if keeping.state == "disk":
            begun = keeping.compact(end, tuple(parts))
        elif begun := keeping.wants_snapshot:
            records = tuple(tail)
            self._check_tail(records, number)
            begun = keeping.come_back(self._told, end, tuple(parts), frames_of(records))
        if begun:
            self._snapshot_number = number
        return begun

    def tick(self, now: float | None = None) -> None:
        """Do what is due: fsync, take note of what is done, try a disk again. `now` is in seconds and never goes back."""
        self._expect_begun()
        self._keeping.tick(time.monotonic() if now is None else now)

    def close(self) -> bool:
        """Write that this is the end, and let go of the folder; idempotent. Whether the disk had it all in `close_timeout`."""
        return self._keeping.state == "closed" or self._keeping.close()

    # --- telling ------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """See `State`."""
        return self._keeping.state

    @property
    def incarnation(self) -> int:
        """Of the relay."""
        return self._told.incarnation

    @property
    def next_number(self) -> int:
        """Of the next batch."""
        return self._told.next_number

    @property
    def needs_compaction(self) -> bool:
        """Whether more is behind the last snapshot than `compact_bytes`, and than twice its size."""
        return self._keeping.needs_compaction

    @property
    def wants_snapshot(self) -> bool:
        """Whether `snapshot` is to be called: the journal `needs_compaction`, or would come back from memory by it."""
        return self._keeping.wants_snapshot

    def stats(self) -> JournalStats:
        """How it stands, as of the last `tick`."""
        keeping, found = self._keeping, self._recovered
        writer = keeping.writer
        return JournalStats(
            state=keeping.state,
            reason=keeping.reason,
            marked=keeping.marked,
            bytes=0 if writer is None else writer.size,
            segments=0 if writer is None else writer.segments,
            appended=self._appended,
            dropped=self._dropped,
            failures=keeping.failures,
            compactions=keeping.compactions,
            fsyncs=keeping.fsyncs,
            lag=keeping.lag,
            torn_bytes=0 if found is None else found.torn_bytes,
            dropped_bytes=0 if found is None else found.dropped_bytes,
            recovery_seconds=0.0 if found is None else found.seconds,
        )

    def __repr__(self) -> str:
        stats, told = self.stats(), self._told
        life = f"incarnation {told.incarnation}, next number {told.next_number}"
        files = f"{stats.bytes / MIB:.1f} MiB in {stats.segments} segments"
        reason = f" ({stats.reason})" if stats.reason else ""
        dropped = f", {stats.dropped} batches not recorded" if stats.dropped else ""
        return f"<Journal {self.path} {stats.state}{reason}, {life}, {files}{dropped}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _append(self, columns: Columns, count: int) -> None:
        numbers, upstreams, incarnations, seqs, payloads = columns
        told, first = self._told, self._told.next_number
        due = range(first, first + count)
        if numbers != due and tuple(numbers) != tuple(due):
            raise UsageError(f"a burst is numbered {numbers[0]} to {numbers[-1]}, and must go on from {first}")
        if sum(map(len, payloads)) > MAX_PAYLOADS_BYTES:
            self._append_halves(columns, count)
            return
        try:
            body = pack_burst(columns, first)
        except struct.error as error:
            raise UsageError(f"a burst from {first} has an ordinal or number that is out of range: {error}") from error
        if self._keeping.put(BURST, *body):
            self._appended += count
        else:
            self._dropped += count
        if len(set(upstreams)) == 1:
            told.positions[upstreams[0]] = (incarnations[-1], seqs[-1])
        else:
            told.positions.update(zip(upstreams, zip(incarnations, seqs, strict=True), strict=True))
        told.next_number = first + count

    def _append_halves(self, columns: Columns, count: int) -> None:
        if count == 1:
            raise UsageError(
                f"the payload of number {columns[0][0]} has more than {MAX_PAYLOADS_BYTES} bytes, which none on the wire has"
            )
        for half in (slice(count // 2), slice(count // 2, None)):
            part = _part(columns, half)
            self._append(part, len(part[0]))

    def _check_tail(self, tail: Iterable[Record], number: int) -> None:
        for record in tail:
            if isinstance(record, UpstreamReset):
                continue
            first, last = record if isinstance(record, Hole) else (record[0], record[0])
            if first != number + 1:
                raise UsageError(f"in the tail of a snapshot {first} follows {number}")
            number = last
        if number != self._told.next_number - 1:
            raise UsageError(f"the tail of a snapshot ends with {number}, and must reach {self._told.next_number - 1}")

    def _expect_new(self) -> None:
        if self.state != "new":
            raise UsageError(f"the journal in {self.path} was begun already; open another one to recover it again")

    def _expect_begun(self) -> None:
        if self._keeping.state == "closed":
            raise ClosedError(f"the journal in {self.path} is closed")
        if self._keeping.state == "new":
            raise UsageError(f"the journal in {self.path} was opened only; begin or resume it first")


def _part(columns: Columns, rows: slice) -> Columns:
    return cast("Columns", tuple(column[rows] for column in columns))
