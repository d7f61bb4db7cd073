"""What prompts can be behind: models of tenants and groups, with the LoRA and the salt that engines were registered with."""

from __future__ import annotations

from typing import Final

from kvevents.index import Namespace
from kvevents.service.errors import NotFoundError
from kvevents.service.registration import Wall


class Scopes:
    """Those that some stream is behind. May be asked from any thread; who changes it holds the fleet's lock."""

    def __init__(self) -> None:
        self._streams: Final[dict[Wall, int]] = {}
        """How many are behind each."""
        self._plain: dict[Wall, list[Namespace]] = {}
        """Of walls without LoRA and salt, which nearly all prompts are behind; one for each at most."""

    def add(self, wall: Wall) -> None:
        """One stream more is behind a wall."""
        self._streams[wall] = self._streams.get(wall, 0) + 1
        self._plain = {}

    def drop(self, wall: Wall) -> None:
        """One of them is not any more."""
        self._streams[wall] -= 1
        if not self._streams[wall]:
            del self._streams[wall]
        self._plain = {}

    def namespaces(self, wall: Wall) -> list[Namespace]:
        """Where in the index a prompt may be: walls, each with the LoRA and salt that events behind it tell themselves.

        Raises `NotFoundError` for a model that nobody serves.
        """
        plain = self._plain  # whoever changes anything makes another one
        known = plain.get(wall)
        if known is None:
            known = self._find(wall)
            if wall in self._streams and wall.lora is None and wall.salt is None:
                plain[wall] = known
        return known

    def _find(self, wall: Wall) -> list[Namespace]:
        model, tenant, group, lora, salt = wall
        found = [
            Namespace(model=view.name, lora=lora if own_lora is None else None, salt=salt if own_salt is None else None)
            for own_lora in dict.fromkeys((None, lora))
            for own_salt in dict.fromkeys((None, salt))
            if (view := Wall(model, tenant, group, own_lora, own_salt)) in self._streams
        ]
        if not found and not any(known[:3] == wall[:3] for known in list(self._streams)):
            raise NotFoundError(f"nobody serves model {model!r} for {_whom(wall)}", "unknown-model", self._known_models(wall))
        return found

    def _known_models(self, wall: Wall) -> str:
        known = sorted({other.model for other in list(self._streams) if other[1:3] == wall[1:3]})
        return f"known there: {', '.join(known[:8])}" if known else "register an engine first"


def _whom(wall: Wall) -> str:
    if (wall.tenant, wall.group) == ("default", "default"):
        return "the default tenant"
    return f"tenant {wall.tenant!r}, group {wall.group!r}"
