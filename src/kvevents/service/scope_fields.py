"""The request fields that name the scope of a prompt, under the names that Dynamo, Mooncake, vLLM and `/v1` use.

If a name were misread, prompts of two tenants would be mixed. Therefore each field is accepted under any of its names. A
request is rejected if two names of a field have different values, or if an unknown name is similar to a known name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from msgspec import UNSET

from kvevents.client.schemas import DEFAULT_GROUP, SCOPE_NAMES
from kvevents.package_metadata import page_link
from kvevents.service.errors import NotFoundError, RefusedError, ServiceError
from kvevents.service.fleet.registration import Scope, StreamKey


class Scopes:
    """The streams of each scope.

    Any thread may read a `Scopes` object. A thread that changes it must hold the fleet's lock.
    """

    def __init__(self) -> None:
        self._streams: Final[dict[Scope, dict[StreamKey, None]]] = {}

    def add(self, scope: Scope, key: StreamKey) -> None:
        """Add a stream."""
        self._streams.setdefault(scope, {})[key] = None

    def drop(self, scope: Scope, key: StreamKey) -> None:
        """Remove a stream."""
        del self._streams[scope][key]
        if not self._streams[scope]:
            del self._streams[scope]

    def streams_of(self, scope: Scope) -> list[StreamKey]:
        """Return the streams of the scope's model, tenant and group, with any LoRA and salt."""
        return [key for candidate, keys in list(self._streams.items()) if candidate[:3] == scope[:3] for key in list(keys)]

    def unknown_model_error(self, scope: Scope) -> NotFoundError:
        """Return the error for a model that no stream serves."""
        is_default = scope[1:3] == (DEFAULT_GROUP, DEFAULT_GROUP)
        owner = "the default tenant" if is_default else f"tenant {scope.tenant!r}, group {scope.group!r}"
        models = sorted({candidate.model for candidate in list(self._streams) if candidate[1:3] == scope[1:3]})
        hint = f"known models: {', '.join(models[:8])}" if models else "register an engine first"
        return NotFoundError(f"no engine serves model {scope.model!r} for {owner}", "unknown-model", hint)


MODEL, TENANT, GROUP, LORA, SALT = SCOPE_NAMES.values()
_CANONICAL_NAMES: Final = {alias: name for name, aliases in SCOPE_NAMES.items() for alias in aliases}
"""Maps each accepted name to the name in `/v1`, under which handlers read the value."""
_FIELDS_BY_WORD: Final[Mapping[str, str]] = {"tenant": "tenant_id", "salt": "cache_salt", "lora": "lora_name"}
"""Words that only names of scope fields contain, each with a field to suggest. An unknown name with such a word is rejected."""
_ALIASES: Final = {alias.replace("_", ""): alias for alias in (*TENANT, *GROUP, *LORA, *SALT)}
"""Maps each name of a scope field, without its underscores, to the name itself. The names of the model are left out."""
MAX_UNKNOWN_FIELDS: Final = 64
"""Maximum number of unknown fields in one request, because comparing each field with the known names takes time."""
MAX_COMPARED_CHARACTERS: Final = 40
"""Maximum length, in characters, of names that are compared with the known names."""


def model_of(request: Any) -> str:
    """Return the name of the model. Raises `ServiceError` if it is missing."""
    model = read_value(request, MODEL)
    if not model:
        hint = f"for its names see {page_link('guides/service#scope-and-namespace')}"
        raise ServiceError("model_name (or model) is missing", "missing-model", hint, status=422)
    return model


def scope_of(request: Any) -> Scope:
    """Return the scope of the prompts of a request. An empty LoRA or salt counts as missing. Raises `ServiceError`."""
    lora = read_value(request, LORA) or number_of_lora(request)
    return Scope(model_of(request), *owner_of(request), lora, read_value(request, SALT))


def number_of_lora(request: Any) -> int | None:
    """Return the number of the LoRA of a request; None if it is missing or negative: Mooncake sends -1 for the base model."""
    return None if request.lora_id is None or request.lora_id < 0 else request.lora_id


def owner_of(request: Any) -> tuple[str, str]:
    """Return the tenant and the routing group of a request; `DEFAULT_GROUP` for each that is missing."""
    tenant, group = read_value(request, TENANT), read_value(request, GROUP)
    return DEFAULT_GROUP if tenant is None else tenant, DEFAULT_GROUP if group is None else group


def read_value(request: Any, names: tuple[str, ...]) -> str | None:
    """Return the value that a request has under `names`; None without a value. Raises `RefusedError` for different values.

    An empty LoRA or salt means no value; an empty tenant, group or model is a value.
    """
    result, first_name = None, ""
    for name in names:
        value = getattr(request, name)
        if value is None or value is UNSET or (not value and names in (LORA, SALT)):
            continue
        if result is not None and value != result:
            raise RefusedError(f"{first_name} and {name} have different values", "contradiction", f"send only {first_name}")
        result, first_name = value, first_name or name
    return result


def check_unknown_fields(unknown_names: Collection[str], all_names: Collection[str]) -> None:
    """Raise `RefusedError` for too many unknown names, and for names similar to a scope field (to a model, if it is absent)."""
    if len(unknown_names) > MAX_UNKNOWN_FIELDS:
        sentence = f"the request has {len(unknown_names)} unknown fields, more than {MAX_UNKNOWN_FIELDS}"
        raise RefusedError(sentence, "too-many-fields", "leave them out; see /openapi.json")
    aliases = _ALIASES | ({} if any(name in all_names for name in MODEL) else {name.replace("_", ""): name for name in MODEL})
    for name in unknown_names:
        if (field := _similar_field(name, aliases)) is not None:
            sentence = f"unknown field {name[:MAX_COMPARED_CHARACTERS]!r}; did you mean {field!r}?"
            raise RefusedError(sentence, "unknown-field", f"write {field}, or leave it out")


def _similar_field(name: str, aliases: Mapping[str, str]) -> str | None:
    """Return the scope field to which an unknown name is similar; None if no field is similar."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower()) if len(name) <= MAX_COMPARED_CHARACTERS else name.lower()
    for word, field in _FIELDS_BY_WORD.items():
        if word in letters:
            return field
    if len(name) > MAX_COMPARED_CHARACTERS:
        return None
    anagrams = [known for known in aliases if sorted(known) == sorted(letters)]
    similar = anagrams or get_close_matches(letters, aliases, 1, cutoff=0.8)
    return aliases[similar[0]] if similar else None


def scope_parameters(parameters: Mapping[str, str], known_names: Iterable[str], *, beside: str = "") -> dict[str, str]:
    """Return the parameters of a query string, with the scope fields under their `/v1` names.

    `known_names` are the parameters of the endpoint; each is accepted under all its names. Raises `RefusedError` for unknown
    names: ignoring a tenant would return the blocks of other tenants. Without parameters, the error's hint ends with `beside`.
    """
    accepted_names = {_CANONICAL_NAMES.get(name, name) for name in known_names}
    result: dict[str, str] = {}
    for parameter, value in parameters.items():
        name = _CANONICAL_NAMES.get(parameter, parameter)
        if name not in accepted_names:
            hint = f"this endpoint takes {', '.join(sorted(accepted_names)) or f'no parameters{beside}'}"
            raise RefusedError(f"unknown parameter {parameter[:MAX_COMPARED_CHARACTERS]!r}", "unknown-field", hint)
        if result.setdefault(name, value) != value:
            raise RefusedError(f"parameter {name} has two different values", "contradiction", f"send only {name}")
    return result
