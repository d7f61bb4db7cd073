"""The scopes that registered streams belong to: model, tenant and routing group, with the LoRA and salt of the registration."""

from __future__ import annotations

from typing import Final

from kvevents.index import Namespace
from kvevents.service.errors import NotFoundError
from kvevents.service.registration import Scope


class Scopes:
    """Counts the streams of each scope, and maps a prompt's scope to namespaces of the index.

    Any thread may read it. A thread that changes it holds the fleet's lock.
    """

    def __init__(self) -> None:
        self._streams: Final[dict[Scope, int]] = {}
        """Number of streams by scope."""
        self._plain: dict[Scope, list[Namespace]] = {}
        """Namespaces of scopes without LoRA and salt, which nearly all prompts have; one for each scope at most."""

    def add(self, scope: Scope) -> None:
        """Count a stream of a scope."""
        self._streams[scope] = self._streams.get(scope, 0) + 1
        self._plain = {}

    def drop(self, scope: Scope) -> None:
        """Discount a stream of a scope."""
        self._streams[scope] -= 1
        if not self._streams[scope]:
            del self._streams[scope]
        self._plain = {}

    def namespaces(self, scope: Scope) -> list[Namespace]:
        """Return the namespaces in which a prompt's blocks may be.

        There is one for each registered scope that admits the prompt. It has the prompt's LoRA and salt, unless the
        registration has them already. Raises `NotFoundError` if no stream serves the model.
        """
        plain = self._plain  # every change replaces it
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
            raise NotFoundError(f"no engine serves model {model!r} for {_owner(scope)}", "unknown-model", self._hint(scope))
        return found

    def _hint(self, scope: Scope) -> str:
        known = sorted({other.model for other in list(self._streams) if other[1:3] == scope[1:3]})
        return f"known models: {', '.join(known[:8])}" if known else "register an engine first"


def _owner(scope: Scope) -> str:
    if (scope.tenant, scope.group) == ("default", "default"):
        return "the default tenant"
    return f"tenant {scope.tenant!r}, group {scope.group!r}"
