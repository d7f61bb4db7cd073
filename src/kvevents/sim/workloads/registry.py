"""All workloads, by name."""

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
    """A frozen dataclass of settings that makes requests."""

    def requests(self, seed: int = 0) -> Iterator[Request]:
        """Requests in the order of their times; the same ones for the same seed."""
        ...


WORKLOADS: Final[Mapping[str, Callable[..., Workload]]] = MappingProxyType(
    {"trace": Trace, "chat": Chat, "agents": Agents, "shared-prompts": SharedPrompts, "llm-d": LlmD}
)
"""The class of each workload; its fields are its settings."""


def workload(
    name: str, *, requests: int = 1_000, seed: int = 0, rate: float | None = None, **settings: Any
) -> Iterator[Request]:
    """The first `requests` requests of a workload, or fewer of a trace that ends before, in the order of their times.

    `rate` is the mean number a second, None for the workload's own; `settings` are fields of its class. Raises `ConfigError`
    for a name, a setting or a value that is none.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; there are {', '.join(WORKLOADS)}")
    if requests < 0:
        raise ConfigError(f"requests is {requests}; it is 0 or more")
    known = settings_of(name)
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(f"the workload {name} has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    given = settings if rate is None else settings | {"rate": rate}
    return islice(WORKLOADS[name](**given).requests(seed), requests)


def settings_of(name: str) -> list[str]:
    """The names of a workload's settings."""
    return [field.name for field in fields(cast("Any", WORKLOADS[name]))]
