"""What is true: the digest after each batch that an engine handed over, found again by the batch's timestamp.

A timestamp names incarnation and number of its batch. So a consumer's claim can be checked whatever numbers a relay gave it,
and however far the engine's clock jumps: the whole seconds are free.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

_STEPS: Final = 1 << 22
"""Timestamps are multiples of a 2^22nd second, which a double holds exactly as long as seconds stay below 2^30."""
_PER_LIFE: Final = 1 << 16
MAX_BATCHES: Final = _PER_LIFE - 1
"""Of one life."""
MAX_LIVES: Final = _STEPS // _PER_LIFE - 1
LAST_SECOND: Final = 1_500_000_000
"""A timestamp after this was not made here, but by a real clock."""

NOTHING: Final = -1
"""The key of a life of which nothing has come yet."""
UNPLACED: Final = -2
"""The key of a batch that no engine of ours has made: a relay's own, or a stranger's."""
EMPTY: Final = bytes(16)
"""The digest of an empty cache."""


class Key(NamedTuple):
    """A batch: which life, from 1, and which number there."""

    life: int
    number: int

    @property
    def packed(self) -> int:
        """As one number, in the order in which batches were made."""
        return self.life * _PER_LIFE + self.number

    @classmethod
    def unpack(cls, packed: int) -> Key:
        return cls(*divmod(packed, _PER_LIFE))


def stamp(key: Key, second: int) -> float:
    """The timestamp of a batch, at a second from 0 to `LAST_SECOND` that its engine believes in."""
    return second + key.packed / _STEPS


def key_of(ts: float) -> int:
    """The packed key that `stamp` put in; `UNPLACED` for a timestamp of another origin."""
    packed = ts % 1.0 * _STEPS if 0 <= ts < LAST_SECOND + 1 else 0.0
    return int(packed) if packed >= _PER_LIFE and packed == int(packed) else UNPLACED


# --- records in files, which survive kill -9 ---------------------------------------------------------------------------------

_FACT: Final = struct.Struct("<q16s")
_CLAIM: Final = struct.Struct("<q16sq")


class Claim(NamedTuple):
    """A consumer said EXACT: after this batch, of this number as it knows it, it held this."""

    key: int
    digest: bytes
    seq: int


def write_facts(path: Path, facts: Iterable[tuple[int, bytes]]) -> None:
    """Add what holds after some batches."""
    with path.open("ab") as file:
        file.write(b"".join(_FACT.pack(*fact) for fact in facts))


def read_facts(path: Path) -> dict[int, bytes]:
    """Digest by packed key."""
    return dict(_FACT.iter_unpack(_whole(path, _FACT.size)))


class Diary:
    """Claims of one consumer, each on its way to the file before the next one is made."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, claim: Claim) -> None:
        os.write(self._file, _CLAIM.pack(*claim))


def read_claims(path: Path) -> Iterator[Claim]:
    """Every claim of a consumer, also of those that were killed."""
    return map(Claim._make, _CLAIM.iter_unpack(_whole(path, _CLAIM.size)))


def _whole(path: Path, size: int) -> bytes:
    """Complete records only: the last one may be of a process that died."""
    data = path.read_bytes() if path.exists() else b""
    return data[: len(data) // size * size]
