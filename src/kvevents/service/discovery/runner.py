"""Runs the providers of a configuration, merges their findings, and registers the engines that they found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from kvevents.backoff import SYSTEM_CLOCK, Clock
from kvevents.errors import ConfigError
from kvevents.service.config import DnsTable, EngineSources, Limits
from kvevents.service.discovery.dns import DnsProvider
from kvevents.service.discovery.files import FileProvider, StaticProvider, read_sources
from kvevents.service.discovery.provider import DiscoveryFault, Finding, Provider
from kvevents.service.discovery.source_config import SourceTable, Template
from kvevents.service.errors import ConflictError
from kvevents.service.registration import Key, Registration, Scope, check_same_engine
from kvevents.stream import Checkpoint

MAX_SOURCES: Final = 4_096
"""Ranks that are registered, and providers that run, at most: a wrong answer of a DNS server or an engine ends here."""
SETTLE_SECONDS: Final = 0.05
"""For which further changes are waited, so that a thousand engines that answer at once are told once."""


@dataclass(frozen=True, slots=True)
class MergedFindings:
    """What all providers know together."""

    registrations: dict[Key, Registration] = field(default_factory=dict)
    faults: dict[str, tuple[DiscoveryFault, ...]] = field(default_factory=dict)
    """By the name of the provider; one without faults is not among them."""
    waiting: tuple[str, ...] = ()
    """Names of providers that have not said anything yet: what they will name is missing from the registrations."""
    adapters: frozenset[Scope] = frozenset()
    """LoRA adapters that requests name as their model."""


def merge_findings(findings: Iterable[tuple[str, Finding | None]], max_sources: int = MAX_SOURCES) -> MergedFindings:
    """The findings of providers, named, the most important first; None of one that has none yet.

    Of two that name the same rank of the same engine differently the first counts, and the other gets a fault.
    """
    registrations: dict[Key, Registration] = {}
    origins: dict[Key, str] = {}
    faults: dict[str, tuple[DiscoveryFault, ...]] = {}
    waiting: list[str] = []
    adapters: set[Scope] = set()
    for name, finding in findings:
        if finding is None:
            waiting.append(name)
            continue
        adapters.update(finding.adapters)
        told, ignored = list(finding.faults), 0
        for registration in finding.registrations:
            known = registrations.get(registration.key)
            if known is not None and known != registration:
                told.append(_conflict(known, origins[known.key], registration))
            elif known is None and len(registrations) >= max_sources:
                ignored += 1
            elif known is None:
                registrations[registration.key] = registration
                origins[registration.key] = name
        if ignored:
            told.append(_too_many(ignored, "ranks", max_sources))
        if told:
            faults[name] = faults.get(name, ()) + tuple(told)
    return MergedFindings(registrations, faults, tuple(waiting), frozenset(adapters))


def _conflict(first: Registration, origin: str, other: Registration) -> DiscoveryFault:
    differing = [name for name in other.__struct_fields__ if getattr(first, name) != getattr(other, name)]
    return DiscoveryFault(
        other.label,
        f"{other.label} is named twice, with another {', '.join(differing)}: what {origin} says first counts, this does not",
    )


def _too_many(ignored: int, what: str, most: int) -> DiscoveryFault:
    return DiscoveryFault("max_sources", f"{ignored} {what} are ignored: max_sources allows {most}")


@dataclass(slots=True, eq=False)
class _Branch:
    """A provider that runs, and those that it named."""

    provider: Provider
    finding: Finding | None = None
    children: dict[Provider, _Branch] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    refused: tuple[DiscoveryFault, ...] = ()
    """Why not all of them run."""

    def findings(self) -> Iterator[tuple[str, Finding | None]]:
        """Its own and theirs, in order."""
        known = self.finding
        yield self.provider.name, known and replace(known, faults=known.faults + self.refused)
        for child in self.children.values():
            yield from child.findings()

    def cut(self) -> None:
        """End this one and all below."""
        if self.task is not None:
            self.task.cancel()
        for child in self.children.values():
            child.cut()


class ProviderRunner:
    """Runs providers, and those that they name, and tells `tell` what they know whenever that has changed.

    `tell` is called in the event loop and must not block. Of several providers the first ones go before the later.
    """

    def __init__(
        self,
        providers: Sequence[Provider],
        tell: Callable[[MergedFindings], None],
        *,
        max_sources: int = MAX_SOURCES,
        settle: float = SETTLE_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._providers = tuple(dict.fromkeys(providers))
        self._tell = tell
        self._max_sources = max_sources
        self._settle = settle
        self._clock = clock
        self._branches: list[_Branch] = []
        self._running = 0
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ProviderRunner {len(self._providers)} providers, {self._running} running>"

    async def run(self) -> None:
        """Until cancelled, which ends all providers. Raises what a provider or `tell` raises, as an `ExceptionGroup`."""
        async with asyncio.TaskGroup() as group:
            self._branches = [self._grown(group, provider) for provider in self._providers]
            self._changed.set()
            await self._tell_changes()

    async def _tell_changes(self) -> None:
        last = None
        while True:
            await self._changed.wait()
            if self._settle > 0:
                await self._clock.sleep(self._settle)
            self._changed.clear()
            found = self._discovered()
            if found != last:
                self._tell(found)
            last = found

    def _discovered(self) -> MergedFindings:
        return merge_findings((each for branch in self._branches for each in branch.findings()), self._max_sources)

    def _grown(self, group: asyncio.TaskGroup, provider: Provider) -> _Branch:
        branch = _Branch(provider)
        branch.task = group.create_task(self._follow(group, branch), name=f"discovery: {provider.name}")
        self._running += 1
        branch.task.add_done_callback(self._ended)
        return branch

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._running -= 1

    async def _follow(self, group: asyncio.TaskGroup, branch: _Branch) -> None:
        async with aclosing(branch.provider.watch()) as findings:
            async for finding in findings:
                branch.finding = finding
                self._tend(group, branch)
                self._changed.set()

    def _tend(self, group: asyncio.TaskGroup, branch: _Branch) -> None:
        """Let those run that the branch's finding names, in its order, and no others."""
        wanted = dict.fromkeys(branch.finding.providers if branch.finding else ())
        for gone in branch.children.keys() - wanted.keys():
            branch.children.pop(gone).cut()
        before = branch.children
        branch.children = {}
        refused = 0
        for provider in wanted:
            if provider in before:
                branch.children[provider] = before[provider]
            elif self._running < self._max_sources:
                branch.children[provider] = self._grown(group, provider)
            else:
                refused += 1
        branch.refused = (_too_many(refused, "providers", self._max_sources),) if refused else ()


log = logging.getLogger(__name__)

DISCOVERED = "discovery"
"""Origin of what was found."""
FLEET = "fleet"
"""Under which name it is told what the fleet cannot follow of it."""


class RegistrationTarget(Protocol):
    """Who follows what is found: the service's fleet, or a bridge."""

    @property
    def refused(self) -> dict[Key, str]:
        """Why some of it cannot be followed, as sentences."""
        ...

    def replace(
        self, origin: str, registrations: Iterable[Registration], resume: Callable[[Key], Checkpoint | None], /
    ) -> list[str]:
        """Make what one origin has registered be just this. Returns sentences about what could not be."""
        ...


class EngineDiscovery:
    """Runs what the configuration names, and keeps the fleet to it."""

    def __init__(
        self,
        config: EngineSources,
        watched: Path | None,
        fleet: RegistrationTarget,
        resume: Callable[[Key], Checkpoint | None],
        max_sources: int = Limits().max_sources,
    ) -> None:
        self._max_sources = max_sources
        self._fleet = fleet
        self._resume = resume
        self._providers = build_providers(config, watched)
        self._found = MergedFindings(waiting=tuple(provider.name for provider in self._providers))
        self._refused: list[str] = []
        self._told: set[str] = set()
        """What the log was told is wrong with what was found."""

    async def run(self) -> None:
        """Until cancelled."""
        if self._providers:
            await ProviderRunner(self._providers, self._tell, max_sources=self._max_sources).run()
        else:
            await asyncio.Event().wait()

    def _tell(self, found: MergedFindings) -> None:
        self._found = found
        self._refused = self._fleet.replace(DISCOVERED, found.registrations.values(), self._resume)
        faults = {fault.sentence for each in found.faults.values() for fault in each}
        for sentence in sorted(faults - self._told):
            log.warning("%s", sentence)
        for sentence in sorted(self._told - faults):
            log.info("no more: %s", sentence)
        self._told = faults

    @property
    def has_completed(self) -> bool:
        """Whether every provider has said something."""
        return not self._found.waiting

    @property
    def adapters(self) -> frozenset[Scope]:
        """LoRA adapters that requests name as their model, as engines list them."""
        return self._found.adapters

    def faults(self) -> dict[str, list[str]]:
        """Sentences by provider."""
        found = {name: [fault.sentence for fault in faults] for name, faults in self._found.faults.items()}
        if refused := [*self._refused, *list(self._fleet.refused.values())]:
            found[FLEET] = refused
        return found


def build_providers(config: EngineSources, watched: Path | None) -> list[Provider]:
    """Those of a configuration, the most important first; `watched` is a file with other settings beside its sources."""
    found: list[Provider] = []
    if watched is not None:
        found.append(FileProvider(watched, alone=False))
    if config.sources:
        found.append(StaticProvider(tuple(config.sources)))
    found += [FileProvider(Path(path)) for path in config.source_files]
    found += [_dns(table) for table in config.dns]
    return found


def _dns(table: DnsTable) -> DnsProvider:
    fields = {name: getattr(table, name) for name in Template.__struct_fields__}
    try:
        return DnsProvider(table.target, Template(**fields))
    except ConfigError as error:
        raise ConfigError(f"dns {table.target}: {error}") from error


def check_engines(config: EngineSources, watched: Path | None) -> None:
    """Raise `ConfigError` for engines that cannot be followed as they are named; `watched` is a file with more of them."""
    build_providers(config, watched)
    named: dict[Key, tuple[Registration, str]] = {}
    for registration, origin in _named(config, watched):
        first, where = named.setdefault(registration.key, (registration, origin))
        if first != registration:
            differing = [name for name in first.__struct_fields__ if getattr(first, name) != getattr(registration, name)]
            raise ConfigError(
                f"{registration.label} is named twice, in {where} and in {origin}, with another {', '.join(differing)}: "
                "leave one of them out, or call it something else"
            )
    _check_ranks([registration for registration, _ in named.values()])


def _named(config: EngineSources, watched: Path | None) -> Iterator[tuple[Registration, str]]:
    tables: list[tuple[Iterable[SourceTable], str]] = []
    try:
        if watched is not None:
            tables.append((read_sources(watched, alone=False), str(watched)))
        tables.append((config.sources, "the settings"))
        tables += [(read_sources(Path(path)), path) for path in config.source_files]
    except ExceptionGroup as errors:
        raise ConfigError(str(errors.exceptions[0])) from errors
    for found, origin in tables:
        for table in found:
            for registration in table.listed():
                yield registration, origin


def _check_ranks(registrations: Sequence[Registration]) -> None:
    firsts: dict[str, Registration] = {}
    sockets: dict[tuple[str, str, str], tuple[Registration, str]] = {}
    for registration in registrations:
        try:
            check_same_engine(registration, firsts.setdefault(registration.key[0], registration))
        except ConflictError as error:
            raise ConfigError(f"{error}; {error.hint}") from error
        for name, endpoint in (("endpoint", registration.endpoint), ("replay_endpoint", registration.replay_endpoint)):
            if endpoint is None:
                continue
            # Ranks may publish at one endpoint, each under a topic of its own.
            topic = registration.topic if name == "endpoint" else ""
            other, of_other = sockets.setdefault((registration.key[0], endpoint, topic), (registration, name))
            if (other, of_other) != (registration, name):
                raise ConfigError(
                    f"{name} {endpoint} of {registration.label} is the {of_other} of {other.label}; "
                    "each rank has endpoints of its own"
                )
