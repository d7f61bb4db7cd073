"""The request fields that name the scope of a prompt, under the names that Dynamo, Mooncake, vLLM and `/v1` use.

A misread name would mix prompts of two tenants. So each of these fields is accepted under any of its names. Two names with
different values are rejected, and so is an unknown name that is similar to one of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, Final

from msgspec import UNSET

from kvevents.client.schemas import DEFAULT_GROUP
from kvevents.index import Namespace
from kvevents.package_metadata import documented
from kvevents.service.errors import NotFoundError, RefusedError, ServiceError
from kvevents.service.fleet.registration import Scope


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
        """Remove one stream from the count of its scope."""
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


MODEL: Final = ("model_name", "model", "modelname")
TENANT: Final = ("tenant_id", "tenant")
GROUP: Final = ("routing_group", "group")
LORA: Final = ("lora_name", "lora")
SALT: Final = ("cache_salt", "salt", "additionalsalt", "additional_salt")
_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": MODEL,
    "tenant": TENANT,
    "group": GROUP,
    "lora": LORA,
    "salt": SALT,
}
"""Names of query parameters, by the name that handlers read."""
_CANONICAL: Final = {alias: name for name, aliases in _PARAMETERS.items() for alias in aliases}
_LIKE: Final = 0.8
"""Similarity by `difflib` from which a name is considered a misspelling of another one."""
_WORDS: Final[Mapping[str, str]] = {"tenant": "tenant_id", "salt": "cache_salt", "lora": "lora_name"}
"""Words without another meaning here: a field whose name contains one of them must not be ignored."""
_ALIASES: Final = (*TENANT, *GROUP, *LORA, *SALT)
_OPTIONAL: Final = (LORA, SALT)
_OTHERS: Final = re.compile(r"[^a-z0-9]")
MAX_UNKNOWN: Final = 64
"""Most unknown fields of one request, because each one is compared with the known ones."""
MAX_COMPARED: Final = 40
"""Longest name in characters that is compared with the known ones."""


def model_of(request: Any) -> str:
    """Return the name of the model. Raises `ServiceError` if it is missing."""
    model = pick(request, MODEL)
    if not model:
        raise ServiceError(
            "model_name (or model) is missing",
            "missing-model",
            f"for its names see {documented('guides/service#scope-and-namespace')}",
            status=422,
        )
    return model


def scope_of(request: Any) -> Scope:
    """Return the scope of the prompts of a request. An empty LoRA or salt means none. Raises `ServiceError`."""
    tenant, group = pick(request, TENANT), pick(request, GROUP)
    lora = pick(request, LORA)
    return Scope(
        model_of(request),
        DEFAULT_GROUP if tenant is None else tenant,
        DEFAULT_GROUP if group is None else group,
        request.lora_id if lora is None else lora,
        pick(request, SALT),
    )


def pick(request: Any, names: tuple[str, ...]) -> str | None:
    """Return the value that a request has under one of `names`; None if it has none. Raises `RefusedError` for two values.

    An empty LoRA or salt means no value; an empty tenant, group or model is a value.
    """
    found, at = None, ""
    for name in names:
        value = getattr(request, name)
        if value is None or value is UNSET or (not value and names in _OPTIONAL):
            continue
        if found is not None and value != found:
            raise RefusedError(f"{at} and {name} have different values", "contradiction", f"give {at} alone")
        found, at = value, at or name
    return found


def check_unknown(names: Collection[str]) -> None:
    """Raise `RefusedError` for too many unknown names, and for one that is similar to a scope field."""
    if len(names) > MAX_UNKNOWN:
        raise RefusedError(
            f"{len(names)} fields are unknown, more than {MAX_UNKNOWN}", "too-many-fields", "leave them out; see /openapi.json"
        )
    matchers = [SequenceMatcher(None, "", field.replace("_", "")) for field in _ALIASES]
    for name in names:
        meant = _meant_by(name, matchers)
        if meant is not None:
            raise RefusedError(f"unknown field {name[:MAX_COMPARED]!r}", "unknown-field", f"write {meant}, or leave it out")


def _meant_by(name: str, matchers: Sequence[SequenceMatcher[str]]) -> str | None:
    """Return the scope field that an unknown name is similar to; None if none is similar."""
    plain = _OTHERS.sub("", name.lower()) if len(name) <= MAX_COMPARED else name.lower()
    for word, field in _WORDS.items():
        if word in plain:
            return field
    if len(name) > MAX_COMPARED:
        return None
    ordered = sorted(plain)
    for field, matcher in zip(_ALIASES, matchers, strict=True):
        if ordered == sorted(field.replace("_", "")):
            return field
        matcher.set_seq1(plain)
        if matcher.real_quick_ratio() >= _LIKE and matcher.quick_ratio() >= _LIKE and matcher.ratio() >= _LIKE:
            return field
    return None


def scope_parameters(parameters: Mapping[str, str], known: Iterable[str], *, beside: str = "") -> dict[str, str]:
    """Return the parameters of a query string, with the scope fields under their `/v1` names.

    `known` are those of the endpoint, each under any of its names. Raises `RefusedError` for every other one,
    since ignoring a tenant would return the blocks of other tenants. `beside` is the hint for an endpoint without scope fields.
    """
    accepted = {_CANONICAL.get(name, name) for name in known}
    found: dict[str, str] = {}
    for given, value in parameters.items():
        name = _CANONICAL.get(given, given)
        if name not in accepted:
            takes = f"it takes {', '.join(sorted(accepted))}" if accepted else f"it takes none{beside}"
            raise RefusedError(f"unknown parameter {given[:MAX_COMPARED]!r}", "unknown-field", takes)
        if found.setdefault(name, value) != value:
            raise RefusedError(f"{name} is given twice, with different values", "contradiction", f"give {name} alone")
    return found
