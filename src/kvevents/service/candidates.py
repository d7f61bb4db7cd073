"""The members that may hold blocks of a prompt, whether they hold any or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from kvevents.service.fleet import Fleet
from kvevents.service.member import Member
from kvevents.service.registration import Wall

if TYPE_CHECKING:
    from kvevents.service.shards.asking import Shards

MAX_REMEMBERED: Final = 256
"""Scopes whose candidates are remembered: clients may name any LoRA and salt."""


class Candidates(NamedTuple):
    """Members whose answer about a prompt is wanted."""

    members: tuple[Member, ...]
    doubtful: tuple[Member, ...]
    """Those that are not EXACT: if one of them holds nothing as far as is known, it may still hold something."""


class CandidateCache:
    """Finds the candidates of a scope, and remembers them until members come, go, or change their state."""

    def __init__(self, fleet: Fleet, shards: Shards | None) -> None:
        self._fleet: Final = fleet
        self._shards: Final = shards
        self._version = (-1, -1)
        self._known: dict[Wall, Candidates] = {}

    def of(self, wall: Wall) -> Candidates:
        """Any thread may call it."""
        if self._shards is not None:
            return _found({**self._shards.members, **self._fleet.members}.values(), wall)
        version = (self._fleet.version, self._fleet.state_version)  # before members are read, so that no older ones are kept
        if version != self._version or len(self._known) >= MAX_REMEMBERED:
            self._known, self._version = {}, version
        known = self._known
        found = known.get(wall)
        if found is None:
            found = known[wall] = _found(list(self._fleet.members.values()), wall)
        return found


def _found(members: Iterable[Member], wall: Wall) -> Candidates:
    found = tuple(member for member in members if member.admits(wall))
    return Candidates(found, tuple(member for member in found if member.trusted.state != "EXACT"))
