"""Comparison of two event streams whose hashes differ, and counts of what was compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvevents.events import AllBlocksCleared, BlockRemoved

COMPARED: Final = {
    "BlockStored": (
        *("token_ids", "block_size", "lora_id", "lora_name", "medium", "extra_keys"),
        *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Fields that must be equal, by event; hashes are renamed."""


class DifferenceError(AssertionError):
    """Ours and vLLM's results differ."""


@dataclass
class Counts:
    """Counts of what was compared."""

    histories: int = 0
    steps: int = 0
    lookups: int = 0
    hits: int = 0
    """Lookups that found cached tokens."""
    refusals: int = 0
    """Lookups without enough free blocks, or steps after which a request waited."""
    preemptions: int = 0
    resets: int = 0
    stored: int = 0
    """Stored blocks."""
    twins: int = 0
    """Stored blocks whose contents another block held already."""
    removed: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{value:,} {name}" for name, value in vars(self).items())


class Streams:
    """Our events and vLLM's, which must be equal up to a one-to-one renaming of hashes."""

    def __init__(self, counts: Counts) -> None:
        self.counts: Final = counts
        self._ours: Final[dict[int, int]] = {}
        """Our hash, by vLLM's hash."""
        self._theirs: Final[dict[int, int]] = {}
        """vLLM's hash, by our hash."""
        self._live: Final[Counter[tuple[int | None, int]]] = Counter()
        """How many blocks hold a hash, by group and hash."""

    def compare(self, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
        """Compare the next events of both caches. Raises `DifferenceError` if the events differ."""
        if len(ours) != len(theirs) or not all(map(self._is_same_event, ours, theirs)):
            raise DifferenceError(
                "events:\n" + "\n".join([*(f"  ours   {e}" for e in ours), *(f"  vLLM's {e}" for e in theirs)])
            )
        for event in ours:
            self._count(event)

    def _is_same_event(self, ours: Any, theirs: Any) -> bool:
        kind = type(theirs).__name__
        if type(ours).__name__ != kind or any(_comparable(ours, name) != _comparable(theirs, name) for name in COMPARED[kind]):
            return False
        mine, real = (
            [*getattr(event, "block_hashes", ()), getattr(event, "parent_block_hash", None)] for event in (ours, theirs)
        )
        return len(mine) == len(real) and all(map(self._is_same_hash, mine, real))

    def _is_same_hash(self, ours: int | None, theirs: int | None) -> bool:
        if ours is None or theirs is None:
            return ours is theirs
        return self._theirs.setdefault(ours, theirs) == theirs and self._ours.setdefault(theirs, ours) == ours

    def _count(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self._live.clear()
            return
        held = [(event.group_idx, name) for name in event.block_hashes]
        if isinstance(event, BlockRemoved):
            self._live.subtract(held)
            self.counts.removed += len(held)
        else:
            self.counts.twins += sum(self._live[each] > 0 for each in held)
            self._live.update(held)
            self.counts.stored += len(held)


def expect(what: str, ours: Any, theirs: Any) -> Any:
    """Return the value if both are equal. Raises `DifferenceError` when they differ."""
    if ours != theirs:
        raise DifferenceError(f"{what}: ours {ours}, vLLM's {theirs}")
    return ours


def _comparable(event: Any, name: str) -> Any:
    value = getattr(event, name)
    return list(value) if name == "token_ids" else value
