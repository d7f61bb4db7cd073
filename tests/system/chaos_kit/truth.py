"""The truth of a round: the digest after each batch of an engine, which is found by the timestamp of the batch.

The fraction of a timestamp encodes incarnation and number of its batch; the whole seconds are the engine's clock. So a claim
can be checked whatever numbers a relay has given to the batches, and however far the clock jumps.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

_STEPS: Final = 1 << 22
"""Timestamps are multiples of a 2^22nd second, which a double holds exactly as long as seconds stay below 2^30."""
_PER_INCARNATION: Final = 1 << 16
MAX_BATCHES: Final = _PER_INCARNATION - 1
"""Batches of one incarnation at most."""
MAX_INCARNATIONS: Final = _STEPS // _PER_INCARNATION - 1
LAST_SECOND: Final = 1_500_000_000
"""The latest second of `stamp`. A later timestamp is from a real clock."""

NO_BATCH: Final = -1
"""The key of an incarnation of which no batch has arrived yet."""
UNKNOWN_BATCH: Final = -2
"""The key of a batch that no engine of the round has made: one of a relay, or of a foreign client."""
EMPTY: Final = bytes(16)
"""The digest of an empty cache."""


class Key(NamedTuple):
    """A batch: the incarnation of its engine, counted from 1, and its number in that incarnation."""

    lifetime: int
    number: int

    @property
    def packed(self) -> int:
        """Return the key as one number. Numbers ascend in the order in which batches are made."""
        return self.lifetime * _PER_INCARNATION + self.number

    @classmethod
    def unpack(cls, packed: int) -> Key:
        return cls(*divmod(packed, _PER_INCARNATION))


def stamp(key: Key, second: int) -> float:
    """Return the timestamp of a batch. `second` is the time of the engine's clock, from 0 to `LAST_SECOND`."""
    return second + key.packed / _STEPS


def key_of(ts: float) -> int:
    """Return the packed key that `stamp` has encoded, or `UNKNOWN_BATCH` for a timestamp of another origin."""
    packed = ts % 1.0 * _STEPS if 0 <= ts < LAST_SECOND + 1 else 0.0
    return int(packed) if packed >= _PER_INCARNATION and packed == int(packed) else UNKNOWN_BATCH


def describe_batch(packed: int) -> str:
    """Return the packed key as text."""
    if packed < 0:
        return "no batch"
    key = Key.unpack(packed)
    return f"batch {key.number} of incarnation {key.lifetime}"


# --- records in files, which survive kill -9 ---------------------------------------------------------------------------------

_FACT: Final = struct.Struct("<q16s")
_CLAIM: Final = struct.Struct("<q16sqd")
_TIME: Final = struct.Struct("<qd")


class Claim(NamedTuple):
    """A consumer was EXACT: it held the state with this digest after this batch, which has this number for the consumer."""

    key: int
    digest: bytes
    seq: int
    at: float = 0.0
    """Monotonic time, before the claim was made; 0 if unknown."""


def write_facts(path: Path, facts: Iterable[tuple[int, bytes]]) -> None:
    """Append packed keys, each with the digest after that batch."""
    with path.open("ab") as file:
        file.write(b"".join(_FACT.pack(*fact) for fact in facts))


def read_facts(path: Path) -> dict[int, bytes]:
    """Return the digests by packed key."""
    return dict(_FACT.iter_unpack(_read_complete_records(path, _FACT.size)))


def write_times(path: Path, keys: Iterable[int], at: float) -> None:
    """Append packed keys with the monotonic time at which their batches are published."""
    with path.open("ab") as file:
        file.write(b"".join(_TIME.pack(key, at) for key in keys))


def read_times(path: Path) -> dict[int, float]:
    """Return the times by packed key, in the order in which the batches were published."""
    return dict(_TIME.iter_unpack(_read_complete_records(path, _TIME.size)))


class ClaimWriter:
    """Appends the claims of one consumer to a file. Each is written before the next one is made."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, claim: Claim) -> None:
        os.write(self._file, _CLAIM.pack(*claim))


def read_claims(path: Path) -> Iterator[Claim]:
    """Yield every claim in the file of a consumer, also those from before it was killed."""
    return map(Claim._make, _CLAIM.iter_unpack(_read_complete_records(path, _CLAIM.size)))


def _read_complete_records(path: Path, size: int) -> bytes:
    """Return the complete records. A process that was killed may have written a part of the last one."""
    data = path.read_bytes() if path.exists() else b""
    return data[: len(data) // size * size]
