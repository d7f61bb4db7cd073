"""Whether a stream is here what its sender's heartbeat says that it is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvevents._native import NativeIndex

Stream: TypeAlias = tuple[str, int]


@dataclass(slots=True)
class _Evicted:
    """What is known of one stream's evictions."""

    blocks: int = 0
    """How many the index said when it was last asked; not at every heartbeat, since that looks at all streams."""
    since: bool = False
    """Whether there were any since the stream was last known to be whole."""


class Agreement:
    """Compares digests, and knows where a difference says nothing: at its memory limit an index gives up blocks.

    What `IndexLimits.max_orphans` has cost is a difference that says something: a snapshot, whose blocks come after their
    parents, mends it. No two threads compare the same stream, since its deliveries are applied in order.
    """

    def __init__(self, *, may_evict: bool) -> None:
        self._may_evict = may_evict
        self._evicted: dict[Stream, _Evicted] = {}

    def of(self, index: NativeIndex, stream: Stream, told: str) -> bool | None:
        """Whether `told` is the stream's digest; None where it need not be, or where there is no such stream any more."""
        digest = index._digest(*stream)  # noqa: SLF001 - this module is a part of the index
        if digest is None:
            return None
        agrees = digits_of(digest) == told
        return self._of_less(index, stream, agrees=agrees) if self._may_evict else agrees

    def _of_less(self, index: NativeIndex, stream: Stream, *, agrees: bool) -> bool | None:
        known = self._evicted.setdefault(stream, _Evicted())
        if agrees:
            if known.since:
                self.begin(index, stream)
            return True
        if not known.since:
            evicted = _evicted_of(index, stream)
            known.since, known.blocks = evicted > known.blocks, evicted
        return None if known.since else False

    def begin(self, index: NativeIndex, stream: Stream) -> None:
        """The stream is whole, or empty: what was evicted before no longer matters."""
        if self._may_evict:
            self._evicted[stream] = _Evicted(_evicted_of(index, stream))

    def forget(self, source: str | None = None, rank: int | None = None) -> None:
        """Streams that are no more; a source's without a rank, or all."""
        for stream in list(self._evicted):
            if source in (None, stream[0]) and rank in (None, stream[1]):
                self._evicted.pop(stream, None)


def digits_of(digest: int) -> str:
    """A digest as text."""
    return f"{digest:032x}"


def _evicted_of(index: NativeIndex, stream: Stream) -> int:
    """Blocks that the memory limit has cost a stream in all of its lives."""
    info = index._worker(*stream)  # noqa: SLF001 - as above
    return 0 if info is None else info["evicted"]
