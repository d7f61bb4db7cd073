"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from kvevents.errors import ConfigError
from kvevents.routing.affinity import AffinitySettings, SessionAffinity
from kvevents.routing.aware import PrefixAware, PrefixAwareSettings
from kvevents.routing.blind import LeastLoaded, LeastLoadedSettings, NoSettings, RandomChoice, RoundRobin
from kvevents.routing.choice import Policy


def _maker(kind: Callable[[int | None, Any], Policy], name: str, settings: type[Any]) -> Callable[..., Policy]:
    known = [field.name for field in fields(settings)]

    def make(seed: int | None = None, **given: Any) -> Policy:
        for setting in given:
            if setting not in known:
                raise ConfigError(f"{name} has no setting {setting!r}; it has {', '.join(known) or 'none'}")
        return kind(seed, settings(**given))

    return make


POLICIES: Final[Mapping[str, Callable[..., Policy]]] = MappingProxyType(
    {
        RandomChoice.name: _maker(RandomChoice, RandomChoice.name, NoSettings),
        RoundRobin.name: _maker(RoundRobin, RoundRobin.name, NoSettings),
        LeastLoaded.name: _maker(LeastLoaded, LeastLoaded.name, LeastLoadedSettings),
        SessionAffinity.name: _maker(SessionAffinity, SessionAffinity.name, AffinitySettings),
        PrefixAware.name: _maker(PrefixAware, PrefixAware.name, PrefixAwareSettings),
    }
)
"""What makes a policy, by its name: a function of a seed and the policy's settings by name."""


def policy(name: str, seed: int | None = None, **settings: Any) -> Policy:
    """A policy by its name. Raises `ConfigError` for an unknown name and for a wrong setting.

    With a seed the same requests give the same decisions. Without one each begins at random, as several routers of one fleet
    should.
    """
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](seed, **settings)
