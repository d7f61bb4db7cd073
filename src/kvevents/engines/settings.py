"""Settings of the plugins, from the environment variable `KVEVENTS_PUBLISHER`.

The engines' own options name endpoints and buffers. They reject or drop options that they do not know, so ours have a variable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kvevents.errors import ConfigError
from kvevents.publisher.settings import DEFAULT_PUBLISHER_SETTINGS, PublisherSettings
from kvevents.security import Curve
from kvevents.settings import Range, Seconds, Settings, convert, read_toml, suggestion

VARIABLE: Final = "KVEVENTS_PUBLISHER"
_POSITIVE: Final = Range(is_open=True)


class EngineSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plugin does inside an engine."""

    enabled: bool = True
    """Whether the publisher of kvevents replaces the engine's."""
    heartbeat: Seconds = 5.0
    """Time between batches that carry the publisher's digest and the attestation."""
    compact: bool = True
    """Whether consumers that join late get all resident blocks, however old. Needs a replay endpoint."""
    attestation: bool = True
    """Whether heartbeats carry a digest of the engine's own cache, which consumers compare with their state."""
    curve: Curve | None = None
    """CURVE keys of the publisher's sockets."""
    limits: PublisherSettings = DEFAULT_PUBLISHER_SETTINGS
    """Limits and timers of the publisher."""


def read_settings(environ: Mapping[str, str]) -> EngineSettings:
    """Return the settings in `KVEVENTS_PUBLISHER`: a JSON object, or the path of a TOML file. Without it, the defaults.

    Raises `ConfigError`, which names the field, for other text, an unknown field, and a value of another type or range.
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return EngineSettings()
    found = _parse_json(text) if text.startswith("{") else read_toml(Path(text))
    _reject_unknown_limits(found.get("limits"), PublisherSettings, "limits")
    settings = convert(found, EngineSettings, VARIABLE)
    _check_limits(settings.limits, "limits")
    return settings


def _parse_json(text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{VARIABLE} is not a JSON object: {error}") from error
    return found


def _check_limits(limits: Any, place: str) -> None:
    """Raise `ConfigError` for a limit that is not above 0: a publisher with it would send nothing, or never wait."""
    for field in dataclasses.fields(limits):
        value, name = getattr(limits, field.name), f"{place}.{field.name}"
        if dataclasses.is_dataclass(value):
            _check_limits(value, name)
        elif not all(_POSITIVE.holds(each) for each in (value if isinstance(value, tuple) else (value,))):
            raise ConfigError(f"{VARIABLE}: {name} is {value}; it must be {_POSITIVE}")


def _reject_unknown_limits(found: Any, kind: Any, place: str) -> None:
    """Raise `ConfigError` for a field that `kind`, a dataclass, does not have: msgspec would ignore it."""
    if not isinstance(found, dict):
        return
    known = {field.name: getattr(field.default, "__class__", None) for field in dataclasses.fields(kind)}
    for name, value in found.items():
        if name not in known:
            raise ConfigError(
                f"{VARIABLE}: {place}: unknown field {name!r}{suggestion(name, known)} known fields: {', '.join(known)}"
            )
        if dataclasses.is_dataclass(known[name]):
            _reject_unknown_limits(value, known[name], f"{place}.{name}")
