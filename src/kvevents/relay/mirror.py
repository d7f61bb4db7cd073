"""What a stream has left resident, as an index has it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvevents.errors import UnknownSourceError
from kvevents.index import Applied, PrefixIndex
from kvevents.stream import Reset

_EMPTY_DIGEST: Final = "0" * 32


class Mirror:
    """One stream of an index, in whose numbers payloads follow each other, whoever sent them."""

    def __init__(self, index: PrefixIndex, name: str) -> None:
        self._index: Final = index
        self._name: Final = name
        self._life = 0
        self._seq = 0

    def apply(self, payloads: Sequence[bytes]) -> dict[int, Applied]:
        """The next ones; by their place what each has shown that was not simply applied."""
        first = self._seq
        self._seq += len(payloads)
        return self._index.apply_payloads(self._name, self._life, first, payloads)

    def reset(self) -> None:
        """Forget everything."""
        self._life += 1
        self._seq = 0
        self._index.apply(Reset(self._name, 0, self._life, "reset"))

    def digest(self) -> str:
        """`PrefixIndex.digest`."""
        with suppress(UnknownSourceError):
            return self._index.digest(self._name)
        return _EMPTY_DIGEST

    def key_of(self, block_hash: int) -> int | None:
        """The key under which a block is resident; None where it is not, or waits for its parent."""
        return self._index._key_of(self._name, 0, block_hash)  # noqa: SLF001 - asked by nobody else

    @property
    def blocks(self) -> int:
        """Resident, on whatever tiers."""
        return sum(each.blocks for each in self._index.workers() if each.source == self._name)
