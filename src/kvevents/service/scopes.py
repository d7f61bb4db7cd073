"""What prompts can be behind: models of tenants and groups, with the LoRA and the salt that engines were registered with."""

from __future__ import annotations

from typing import Final

from kvevents.index import Namespace
from kvevents.service.errors import NotFoundError
from kvevents.service.registration import Scope


class Scopes:
    """Those that some stream is behind. May be asked from any thread; who changes it holds the fleet's lock."""

    def __init__(self) -> None:
        self._streams: Final[dict[Scope, int]] = {}
        """How many are behind each."""
        self._plain: dict[Scope, list[Namespace]] = {}
        """Of scopes without LoRA and salt, which nearly all prompts are behind; one for each at most."""

    def add(self, scope: Scope) -> None:
        """One stream more is in a scope."""
        self._streams[scope] = self._streams.get(scope, 0) + 1
        self._plain = {}

    def drop(self, scope: Scope) -> None:
        """One of them is not any more."""
        self._streams[scope] -= 1
        if not self._streams[scope]:
            del self._streams[scope]
        self._plain = {}

    def namespaces(self, scope: Scope) -> list[Namespace]:
        """Where in the index a prompt may be: scopes, each with the LoRA and salt that events behind it tell themselves.

        Raises `NotFoundError` for a model that nobody serves.
        """
        plain = self._plain  # whoever changes anything makes another one
        known = plain.get(scope)
        if known is None:
            known = self._find(scope)
            if scope in self._streams and scope.lora is None and scope.salt is None:
                plain[scope] = known
        return known

    def _find(self, scope: Scope) -> list[Namespace]:
        model, tenant, group, lora, salt = scope
        found = [
            Namespace(model=view.name, lora=lora if own_lora is None else None, salt=salt if own_salt is None else None)
            for own_lora in dict.fromkeys((None, lora))
            for own_salt in dict.fromkeys((None, salt))
            if (view := Scope(model, tenant, group, own_lora, own_salt)) in self._streams
        ]
        if not found and not any(known[:3] == scope[:3] for known in list(self._streams)):
            raise NotFoundError(f"nobody serves model {model!r} for {_whom(scope)}", "unknown-model", self._known_models(scope))
        return found

    def _known_models(self, scope: Scope) -> str:
        known = sorted({other.model for other in list(self._streams) if other[1:3] == scope[1:3]})
        return f"known there: {', '.join(known[:8])}" if known else "register an engine first"


def _whom(scope: Scope) -> str:
    if (scope.tenant, scope.group) == ("default", "default"):
        return "the default tenant"
    return f"tenant {scope.tenant!r}, group {scope.group!r}"
