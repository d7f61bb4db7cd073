"""How two event streams are compared whose hashes differ, and what is counted meanwhile."""

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
    """The two do not agree."""


@dataclass
class Counts:
    """What was compared."""

    histories: int = 0
    steps: int = 0
    lookups: int = 0
    hits: int = 0
    """Lookups that found something."""
    refusals: int = 0
    """Lookups without room, or steps after which a request waited."""
    preemptions: int = 0
    resets: int = 0
    stored: int = 0
    """Blocks."""
    twins: int = 0
    """Of them, those whose contents another block held already."""
    removed: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{value:,} {name}" for name, value in vars(self).items())


class Streams:
    """Ours and vLLM's, which must say the same up to a renaming of hashes, one to one."""

    def __init__(self, counts: Counts) -> None:
        self.counts: Final = counts
        self._ours: Final[dict[int, int]] = {}
        """By vLLM's hash."""
        self._theirs: Final[dict[int, int]] = {}
        """By ours."""
        self._live: Final[Counter[tuple[int | None, int]]] = Counter()
        """How many blocks hold a hash, by group and hash."""

    def compare(self, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
        """The next events of both. Raises `DifferenceError`."""
        if len(ours) != len(theirs) or not all(map(self._same, ours, theirs)):
            raise DifferenceError(
                "events:\n" + "\n".join([*(f"  ours   {e}" for e in ours), *(f"  vLLM's {e}" for e in theirs)])
            )
        for event in ours:
            self._count(event)

    def _same(self, ours: Any, theirs: Any) -> bool:
        kind = type(theirs).__name__
        if type(ours).__name__ != kind or any(_plain(ours, name) != _plain(theirs, name) for name in COMPARED[kind]):
            return False
        mine, real = (
            [*getattr(event, "block_hashes", ()), getattr(event, "parent_block_hash", None)] for event in (ours, theirs)
        )
        return len(mine) == len(real) and all(map(self._renamed, mine, real))

    def _renamed(self, ours: int | None, theirs: int | None) -> bool:
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
    """What both say. Raises `DifferenceError` when they do not say the same."""
    if ours != theirs:
        raise DifferenceError(f"{what}: ours {ours}, vLLM's {theirs}")
    return ours


def _plain(event: Any, name: str) -> Any:
    value = getattr(event, name)
    return list(value) if name == "token_ids" else value
