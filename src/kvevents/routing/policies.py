"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

from kvevents.errors import ConfigError
from kvevents.routing.basic import LeastLoaded, LeastLoadedSettings, NoSettings, RandomChoice, RoundRobin
from kvevents.routing.policy_types import Policy
from kvevents.routing.prefix_aware import PrefixAware, PrefixAwareSettings
from kvevents.routing.session_affinity import SessionAffinity, SessionAffinitySettings


def _factory(kind: Callable[[int | None, Any], Policy], name: str, settings: type[Any]) -> Callable[..., Policy]:
    known = [field.name for field in fields(settings)]

    def make(seed: int | None = None, **given: Any) -> Policy:
        for setting in given:
            if setting not in known:
                raise ConfigError(f"invalid setting {setting!r} of {name}: expected one of {', '.join(known) or '(none)'}")
        return kind(seed, settings(**given))

    return make


POLICIES: Final[Mapping[str, Callable[..., Policy]]] = MappingProxyType(
    {
        RandomChoice.name: _factory(RandomChoice, RandomChoice.name, NoSettings),
        RoundRobin.name: _factory(RoundRobin, RoundRobin.name, NoSettings),
        LeastLoaded.name: _factory(LeastLoaded, LeastLoaded.name, LeastLoadedSettings),
        SessionAffinity.name: _factory(SessionAffinity, SessionAffinity.name, SessionAffinitySettings),
        PrefixAware.name: _factory(PrefixAware, PrefixAware.name, PrefixAwareSettings),
    }
)
"""Factories of policies by name: functions of a seed and of the policy's settings as keywords."""


def policy(name: str, seed: int | None = None, **settings: Any) -> Policy:
    """Return a policy by its name. Raises `ConfigError` for an unknown name and for an invalid setting.

    With a seed, equal requests give equal decisions. Without one each policy starts at random, as several routers of one fleet
    should.
    """
    if name not in POLICIES:
        raise ConfigError(f"invalid policy {name!r}: expected one of {', '.join(POLICIES)}")
    return POLICIES[name](seed, **settings)
