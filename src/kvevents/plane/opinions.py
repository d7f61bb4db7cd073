"""What a replica tells the others: the digests of all streams at one place of each lane."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec

from kvevents.plane.subscriber import Census

PREFIX: Final = "digest."
"""What keys of opinions begin with, in the bucket whose entries expire; the replica's name follows."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """What a replica held of one lane."""

    position: int
    """After which page."""
    digests: dict[str, str]
    """By stream."""


class Opinion(msgspec.Struct, frozen=True):
    """What a replica held, by lane."""

    places: dict[str, Place]

    @classmethod
    def of(cls, census: Mapping[int, Census]) -> Opinion:
        """What was counted last."""
        return cls(
            {
                str(lane): Place(
                    found.position, {f"{source}\x1f{rank}": digest for (source, rank), digest in found.digests.items()}
                )
                for lane, found in census.items()
            }
        )

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
        both = [(place, other.places[lane]) for lane, place in self.places.items() if lane in other.places]
        same = [one.digests == two.digests for one, two in both if one.position == two.position]
        return all(same) if same else None
