"""The table of workloads by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, Protocol, cast

from kvevents.errors import ConfigError
from kvevents.sim.requests import Request
from kvevents.sim.workloads.agents import Agents
from kvevents.sim.workloads.chat import Chat
from kvevents.sim.workloads.sample import Trace
from kvevents.sim.workloads.shared import LlmD, SharedPrompts


class Workload(Protocol):
    """A frozen dataclass of settings that generates requests."""

    def requests(self, seed: int = 0) -> Iterator[Request]:
        """Yield requests in the order of their times. Equal seeds give equal requests."""
        ...


WORKLOADS: Final[Mapping[str, Callable[..., Workload]]] = MappingProxyType(
    {"trace": Trace, "chat": Chat, "agents": Agents, "shared-prompts": SharedPrompts, "llm-d": LlmD}
)
"""Workload classes by name; their fields are the settings."""


def workload(
    name: str, *, requests: int = 1_000, seed: int = 0, rate: float | None = None, **settings: Any
) -> Iterator[Request]:
    """Yield the first `requests` requests of a workload in the order of their times, or fewer if a trace ends before.

    `rate` is the mean number per second, None for the workload's default; `settings` are fields of its class. Raises
    `ConfigError` for an unknown name or setting and for an invalid value.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}: expected {', '.join(WORKLOADS)}")
    if requests < 0:
        raise ConfigError(f"invalid requests {requests}: expected at least 0")
    known = settings_of(name)
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)} of workload {name}: expected {', '.join(known)}")
    given = settings if rate is None else settings | {"rate": rate}
    return islice(WORKLOADS[name](**given).requests(seed), requests)


def settings_of(name: str) -> list[str]:
    """Return the names of a workload's settings."""
    return [field.name for field in fields(cast("Any", WORKLOADS[name]))]
