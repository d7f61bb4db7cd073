"""Which replica of a plane holds which of its partitions, where one index would be too large for one machine.

Theory of operation. Each partition is wanted from the `holders` replicas that rank highest for it by rendezvous hashing (Thaler
and Ravishankar, 1996): when a replica comes, it takes over a share from each of the others; when one goes, each of the others
takes over a share of its partitions; no other partition moves. All engines of a partition are in one place, so the answers of
replicas that together hold all partitions are a whole answer, and no engine is in two of them.

Nobody decides for all. Each replica says every few seconds where it can be asked and which partitions it can answer for, and
works out from what the others say which ones it is to hold. Two replicas may see different others for a moment. That costs
work, and no answer is wrong for it: who asks goes by what each *says* that it holds, and who answers says for which partitions
it did. A partition is let go by a replica only when all that are wanted for it have said for a while that they hold it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

import msgspec

from kvevents.settings import Seconds, Settings
from kvevents.structs import build_decoder_now

PREFIX: Final = "shard."
"""What keys of announcements begin with, in the bucket whose entries expire; the replica's name follows."""
MAX_HOLDERS: Final = 8
"""Of each partition, whoever asks for more."""


@build_decoder_now
class SharePace(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often replicas with a share announce themselves, and how long they wait for each other: the same in all of them."""

    announce_seconds: Seconds = 2.0
    """Seconds between two announcements."""
    settle_seconds: Seconds = 5.0
    """Seconds from the first announcement until anything is held. Of replicas that start together none takes all partitions."""
    present_seconds: Seconds = 6.0
    """Seconds for which a replica is asked after its newest announcement. One look may miss that, since a bucket is listed
    while it is written; and the announcement of a dead one stays in the bucket for longer."""
    dead_seconds: Seconds = 30.0
    """Seconds without an announcement after which others take over the partitions of a replica. A restart must not move
    them."""
    release_seconds: Seconds = 10.0
    """Seconds for which the others must have held a partition before one that is not to hold it releases it."""
    refresh_seconds: Seconds = 2.0
    """Seconds between two questions for the engines of other replicas."""
    away_seconds: Seconds = 2.0
    """Seconds after a failure for which a replica is asked only if no other one holds the same."""


@build_decoder_now
class Announcement(msgspec.Struct, frozen=True):
    """What a replica that holds a part says of itself."""

    url: str
    """Where others ask it."""
    holders: int
    """Replicas that are to hold each partition, as it was told."""
    held: list[int]
    """Partitions that it answers for."""
    beat: int = 0
    """Another number each time."""

    def encode(self) -> bytes:
        """For the bucket."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, value: bytes) -> Announcement | None:
        """What `encode` wrote; None for anything else, such as what nobody could be asked at."""
        with suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(value, type=cls)
            if is_url(found.url) and 1 <= found.holders <= MAX_HOLDERS:
                return found
        return None


def is_url(text: str) -> bool:
    """Whether a replica can be asked there: `http://HOST:PORT` or `https://HOST:PORT`, and nothing behind it."""
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - it raises for what is none
    except ValueError:
        return False
    plain = text.isascii() and text.isprintable() and parts.username is None
    return plain and parts.scheme in {"http", "https"} and bool(parts.hostname) and not (parts.path.strip("/") + parts.query)


@lru_cache(maxsize=1 << 16)
def _rank(name: str, partition: int) -> int:
    text = f"{partition}/{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def owners(partition: int, names: Iterable[str], holders: int) -> list[str]:
    """The replicas that are to hold a partition, the first one first."""
    return sorted(names, key=lambda name: (_rank(name, partition), name), reverse=True)[:holders]


def plan(own: str, partitions: Iterable[int], holding: Mapping[str, Collection[int]]) -> tuple[dict[str, list[int]], list[int]]:
    """Whom to ask for which partitions, as few as can be, and the partitions that nobody holds.

    Of those who hold as many, different askers (`own`) take different ones.
    """
    left = set(partitions)
    found: dict[str, list[int]] = {}
    while left:
        shares = {name: left.intersection(held) for name, held in holding.items() if name not in found}
        best = max(shares, key=lambda name: (len(shares[name]), _rank(f"{own}/{name}", 0)), default=None)
        if best is None or not shares[best]:
            break
        found[best] = sorted(shares[best])
        left -= shares[best]
    return found, sorted(left)


class Roster:
    """The replicas of a plane as one of them sees them, and the partitions that this one is to hold or may let go.

    `now` is of a clock that nobody sets.
    """

    def __init__(self, own: str, partitions: int, holders: int, pace: SharePace | None = None) -> None:
        self.present: Mapping[str, Announcement] = {}
        """The others that are heard of."""
        self._own: Final = own
        self._partitions: Final = partitions
        self._holders: Final = holders
        self._pace: Final = pace or SharePace()
        self._known: dict[str, tuple[Announcement, float]] = {}
        """Those that were heard of lately, and when they said something new last."""
        self._spare_since: dict[int, float] = {}
        self._looked_at: float | None = None

    def hear(self, others: Mapping[str, Announcement], held: Collection[int], now: float) -> None:
        """What the others say at this moment, and which partitions this replica answers for."""
        if self._looked_at is not None and now - self._looked_at > self._pace.present_seconds:
            # Nobody could be heard meanwhile: all have as long as they had to say something.
            away = now - self._looked_at
            self._known = {name: (each, at + away) for name, (each, at) in self._known.items()}
            self._spare_since.clear()
        self._looked_at = now
        for name, each in others.items():
            if name not in self._known or self._known[name][0] != each:
                self._known[name] = (each, now)
        self._known = {name: (each, at) for name, (each, at) in self._known.items() if now - at <= self._pace.dead_seconds}
        self.present = {name: each for name, (each, at) in self._known.items() if now - at <= self._pace.present_seconds}
        spare = [partition for partition in held if self._is_spare(partition, others)]
        self._spare_since = {partition: self._spare_since.get(partition, now) for partition in spare}

    def _is_spare(self, partition: int, others: Mapping[str, Announcement]) -> bool:
        names = self._owners(partition)
        there = [name for name in names if name in others and name in self.present and partition in others[name].held]
        return self._own not in names and there == names

    def _owners(self, partition: int) -> list[str]:
        return owners(partition, [self._own, *self._known], self.holders)

    @property
    def holders(self) -> int:
        """Replicas that are to hold each partition: the most that any of them was told."""
        return max([self._holders, *(each.holders for each, _ in self._known.values())])

    @property
    def wanted(self) -> frozenset[int]:
        """The partitions that this replica is to hold; none before it has heard of the others."""
        if self._looked_at is None:
            return frozenset()
        return frozenset(partition for partition in range(self._partitions) if self._own in self._owners(partition))

    def spare(self, now: float) -> frozenset[int]:
        """The partitions that it may let go; none while nobody can be heard."""
        if self._looked_at is None or now - self._looked_at > self._pace.present_seconds:
            return frozenset()
        return frozenset(
            partition for partition, since in self._spare_since.items() if now - since >= self._pace.release_seconds
        )
