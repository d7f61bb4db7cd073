"""Many providers, one picture: who is registered, and what could not be found out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from kvevents.backoff import REAL_PACE, Pace
from kvevents.service.discovery.provider import Fault, Finding, Provider
from kvevents.service.registration import Registration, Wall

MAX_SOURCES: Final = 4_096
"""Ranks that are registered, and providers that run, at most: a wrong answer of a DNS server or an engine ends here."""
SETTLE_SECONDS: Final = 0.05
"""For which further changes are waited, so that a thousand engines that answer at once are told once."""

Key: TypeAlias = tuple[str, int]
"""`Registration.key`."""


@dataclass(frozen=True, slots=True)
class Discovered:
    """What all providers know together."""

    registrations: dict[Key, Registration] = field(default_factory=dict)
    faults: dict[str, tuple[Fault, ...]] = field(default_factory=dict)
    """By the name of the provider; one without faults is not among them."""
    waiting: tuple[str, ...] = ()
    """Names of providers that have not said anything yet: what they will name is missing from the registrations."""
    adapters: frozenset[Wall] = frozenset()
    """LoRA adapters that requests name as their model."""


def merge(findings: Iterable[tuple[str, Finding | None]], max_sources: int = MAX_SOURCES) -> Discovered:
    """The findings of providers, named, the most important first; None of one that has none yet.

    Of two that name the same rank of the same engine differently the first counts, and the other gets a fault.
    """
    registrations: dict[Key, Registration] = {}
    origins: dict[Key, str] = {}
    faults: dict[str, tuple[Fault, ...]] = {}
    waiting: list[str] = []
    adapters: set[Wall] = set()
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
    return Discovered(registrations, faults, tuple(waiting), frozenset(adapters))


def _conflict(first: Registration, origin: str, other: Registration) -> Fault:
    differing = [name for name in other.__struct_fields__ if getattr(first, name) != getattr(other, name)]
    return Fault(
        other.label,
        f"{other.label} is named twice, with another {', '.join(differing)}: what {origin} says first counts, this does not",
    )


def _too_many(ignored: int, what: str, most: int) -> Fault:
    return Fault("max_sources", f"{ignored} {what} are ignored: max_sources allows {most}")


@dataclass(slots=True, eq=False)
class _Branch:
    """A provider that runs, and those that it named."""

    provider: Provider
    finding: Finding | None = None
    children: dict[Provider, _Branch] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    refused: tuple[Fault, ...] = ()
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


class Discovery:
    """Runs providers, and those that they name, and tells `tell` what they know whenever that has changed.

    `tell` is called in the event loop and must not block. Of several providers the first ones go before the later.
    """

    def __init__(
        self,
        providers: Sequence[Provider],
        tell: Callable[[Discovered], None],
        *,
        max_sources: int = MAX_SOURCES,
        settle: float = SETTLE_SECONDS,
        pace: Pace = REAL_PACE,
    ) -> None:
        self._providers = tuple(dict.fromkeys(providers))
        self._tell = tell
        self._max_sources = max_sources
        self._settle = settle
        self._pace = pace
        self._branches: list[_Branch] = []
        self._running = 0
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Discovery {len(self._providers)} providers, {self._running} running>"

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
                await self._pace.sleep(self._settle)
            self._changed.clear()
            found = self._discovered()
            if found != last:
                self._tell(found)
            last = found

    def _discovered(self) -> Discovered:
        return merge((each for branch in self._branches for each in branch.findings()), self._max_sources)

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
