"""What a stream doubts, and since which number: a clear heals what was before it, whenever it is told."""

from __future__ import annotations

from collections.abc import Iterator

from kvevents.stream.trust import HEALED_BY_CLEAR, KEPT_BY_CHECKPOINT, Doubt


class Doubts:
    """The doubts of one stream, each with the last number in doubt because of it.

    A consumer that reads payloads itself tells of a clear or of unreadable events some time after the batch was handed out, in
    any order. The numbers make the outcome the same as if each batch had been read before the next one was delivered.
    """

    def __init__(self) -> None:
        self._through: dict[Doubt, int] = {}
        self._cleared = -1

    def __bool__(self) -> bool:
        return bool(self._through)

    def __contains__(self, doubt: Doubt) -> bool:
        return doubt in self._through

    def __iter__(self) -> Iterator[Doubt]:
        """In the order in which `Doubt` lists them."""
        return (doubt for doubt in Doubt if doubt in self._through) if self._through else iter(())

    def add(self, doubt: Doubt, through: int) -> None:
        """Doubt everything up to number `through`."""
        self._through[doubt] = max(through, self._through.get(doubt, -1))

    def discard(self, doubt: Doubt) -> None:
        """A doubt was settled."""
        self._through.pop(doubt, None)

    def clear(self, seq: int) -> None:
        """Batch `seq` clears everything: what was doubted before it no longer matters."""
        self._cleared = max(seq, self._cleared)
        self._heal(seq)

    def reject(self, seq: int) -> None:
        """Events of batch `seq` could not be read; that matters unless a later batch is known to clear everything."""
        if seq >= self._cleared:
            self.add(Doubt.REJECTED, seq)

    def kept(self) -> dict[Doubt, int]:
        """Those that outlive a process, each with the last number in doubt."""
        return {doubt: self._through[doubt] for doubt in self if doubt in KEPT_BY_CHECKPOINT}

    def begin_life(self) -> None:
        """What was doubted about events is about a life that has ended."""
        self._cleared = -1
        self._heal(None)

    def _heal(self, before: int | None) -> None:
        for doubt in HEALED_BY_CLEAR & self._through.keys():
            if before is None or self._through[doubt] < before:
                del self._through[doubt]
