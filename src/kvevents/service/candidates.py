"""The members that may hold blocks of a prompt, whether they hold any or not, and whose prompt it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from kvevents.service.errors import ConflictError
from kvevents.service.fleet import Fleet
from kvevents.service.member import Member
from kvevents.service.registration import Wall
from kvevents.service.shards.asking import Shards

MAX_REMEMBERED: Final = 256
"""Scopes whose candidates are remembered: clients may name any LoRA and salt."""


class Candidates(NamedTuple):
    """Members whose answer about a prompt is wanted."""

    members: tuple[Member, ...]
    doubtful: tuple[Member, ...]
    """Those that are not EXACT: if one of them holds nothing as far as is known, it may still hold something."""


class CandidateCache:
    """Finds the candidates of a scope, and remembers them until members come, go, or change their state.

    `adapters` returns the LoRA adapters that engines list as models of their own. Any thread may call every method.
    """

    def __init__(self, fleet: Fleet, shards: Shards | None, adapters: Callable[[], frozenset[Wall]]) -> None:
        self._fleet: Final = fleet
        self._shards: Final = shards
        self._adapters: Final = adapters
        self._view = _View((), (), frozenset())

    def of(self, wall: Wall) -> Candidates:
        """The members that may hold blocks of a prompt."""
        view = self._current()
        found = view.known.get(wall)
        if found is None:
            if len(view.known) >= MAX_REMEMBERED:
                view.known.clear()
            members = tuple(member for member in view.members if member.admits(wall))
            found = Candidates(members, tuple(member for member in members if member.trusted.state != "EXACT"))
            view.known[wall] = found
        return found

    def resolve(self, wall: Wall) -> Wall:
        """Whose a prompt is whose model may be the name of an adapter: then it is its base model's, with that LoRA.

        A model that is served goes before an adapter of the same name. Raises `ConflictError` for an adapter of several models.
        """
        view = self._current()
        if wall[:3] in view.models or wall.lora not in {None, wall.model}:
            return wall
        bases = view.bases.get(wall[:3])
        if not bases:
            return wall
        if len(bases) > 1:
            raise ConflictError(
                f"{wall.model!r} is an adapter of {len(bases)} models: {', '.join(sorted(bases)[:8])}",
                "ambiguous-adapter",
                "name one of them as the model, and the adapter as lora_name",
            )
        return wall._replace(model=next(iter(bases)), lora=wall.model)

    def _current(self) -> _View:
        """What is known of the members, made again after any change."""
        adapters = self._adapters()
        # Read before the members are, so that no older ones are kept under a newer version.
        version: tuple[Any, ...] = (self._fleet.version, self._fleet.state_version, adapters)
        if self._shards is not None:
            version += (self._shards.version, self._shards.answering.shown())
        view = self._view
        if view.version != version:
            members = dict(self._fleet.members)
            if self._shards is not None:
                members = {**self._shards.members, **members}
            self._view = view = _View(version, members.values(), adapters)
        return view


class _View:
    """The members at one time, and what was found among them."""

    def __init__(self, version: tuple[Any, ...], members: Iterable[Member], adapters: frozenset[Wall]) -> None:
        self.version: Final = version
        self.members: Final = tuple(members)
        self.known: Final[dict[Wall, Candidates]] = {}
        walls = {member.registration.wall for member in self.members}
        self.models: Final = {wall[:3] for wall in walls}
        """Models that are served, with tenant and group."""
        self.bases: Final[dict[tuple[str, str, str], set[str]]] = {}
        """The base models of adapters, by the adapter's name, tenant and group."""
        for wall in {*walls, *adapters}:
            if isinstance(wall.lora, str) and wall[:3] in self.models:
                self.bases.setdefault((wall.lora, wall.tenant, wall.group), set()).add(wall.model)
