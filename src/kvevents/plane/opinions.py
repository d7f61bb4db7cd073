"""What a replica tells the others: digests of what it held of each partition at some places of it.

One digest for all streams of a partition, over those of each: it is as small with a hundred thousand streams as with one, so it
fits into a message, and may be told every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Final

import msgspec

from kvevents.plane.records import Key
from kvevents.structs import build_decoder_now

PREFIX: Final = "digest."
"""What keys of opinions begin with, in the bucket whose entries expire; the replica's name follows."""
DIGEST_BYTES: Final = 16
"""Of a partition's digest: nobody makes an index that differs on purpose."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """What a replica held of one partition."""

    position: int
    """After which page."""
    streams: int
    digest: str
    """Of all of them."""

    @classmethod
    def of(cls, position: int, digests: Mapping[Key, str]) -> Place:
        """Given the digest of each stream."""
        rows = sorted((source, rank, digest) for (source, rank), digest in digests.items())
        return cls(position, len(rows), sha256(msgspec.msgpack.encode(rows)).digest()[:DIGEST_BYTES].hex())


@build_decoder_now
class Opinion(msgspec.Struct, frozen=True):
    """What a replica held, by partition."""

    places: dict[str, list[Place]]

    @classmethod
    def of(cls, census: Mapping[int, Iterable[Place]]) -> Opinion:
        """What was counted last."""
        return cls({str(partition): list(places) for partition, places in census.items()})

    def encode(self) -> bytes:
        """For the bucket."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, value: bytes) -> Opinion | None:
        """What `encode` wrote; None for anything else."""
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(value, type=cls)
        return None

    def agrees(self, other: Opinion) -> bool | None:
        """Whether both held the same where both have looked; None where they have not looked at the same place."""
        same = [
            one == two
            for partition, places in self.places.items()
            for one in places
            for two in other.places.get(partition, ())
            if one.position == two.position
        ]
        return all(same) if same else None
