"""Runs the configured providers, merges their findings, and registers the engines that they find."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from kvevents.backoff import SYSTEM_CLOCK, Clock
from kvevents.errors import ConfigError
from kvevents.service.discovery.files import FileProvider, StaticProvider, read_sources
from kvevents.service.discovery.provider import Finding, Provider
from kvevents.service.errors import ConflictError
from kvevents.service.fleet.registration import Registration, Scope, StreamKey, check_same_engine
from kvevents.service.settings import EngineSources, Limits
from kvevents.stream import Checkpoint

log = logging.getLogger(__name__)

RECONCILE_SECONDS: Final = 2.0
"""Seconds without a new finding after which the service retries the failed registrations of found engines."""
SETTLE_SECONDS: Final = 0.05
"""Delay in seconds from a new finding to the report, so that the answers of a thousand engines are reported together."""


# --- merging findings


class MergedFindings(Struct):
    """The findings of all providers together."""

    registrations: dict[StreamKey, Registration] = {}
    faults: dict[str, tuple[str, ...]] = {}
    """Maps the name of each provider that has faults to these faults."""
    waiting_providers: tuple[str, ...] = ()
    """Names of providers that have not yielded a finding yet, so that their engines are missing from the registrations."""
    adapters: set[Scope] = set()
    """LoRA adapters that requests can name as their model."""
    origins: dict[StreamKey, str] = {}
    """Maps the key of each registration to the name of the provider that found it."""
    adapter_paths: dict[tuple[str, str], str] = {}
    """Maps the names of an engine and of its adapter to the path of the adapter."""
    unready_sources: dict[str, str] = {}
    """Maps the name of a source that should get no requests to the reason."""


def merge_findings(findings: Iterable[tuple[str, Finding | None]], max_sources: int = Limits().max_sources) -> MergedFindings:
    """Merge findings, given with their providers' names in order of decreasing precedence; None for a missing finding.

    If two findings have different registrations of a rank, the first takes effect, and the provider of the second gets a fault.
    """
    merged = MergedFindings()
    for name, finding in findings:
        if finding is None:
            merged.waiting_providers += (name,)
            continue
        merged.unready_sources.update(finding.unready_sources)
        for scope, path in finding.adapters:
            merged.adapters.add(scope)
            if path is not None and isinstance(scope.lora, str):
                names = ((registration.key[0], scope.lora) for registration in finding.registrations)
                merged.adapter_paths |= dict.fromkeys(names, path)
        faults, ignored = list(finding.faults), 0
        for registration in finding.registrations:
            known = merged.registrations.get(registration.key)
            if known is not None and known.differences(registration):
                differing, origin = ", ".join(known.differences(registration)), merged.origins[known.key]
                faults.append(f"{known.label} is named twice, with different {differing}: the value in {origin} takes effect")
            elif known is None and len(merged.registrations) >= max_sources:
                ignored += 1
            elif known is None:
                merged.registrations[registration.key] = registration
                merged.origins[registration.key] = name
        if ignored:
            faults.append(_limit_fault(ignored, "ranks", max_sources))
        if faults:
            merged.faults[name] = merged.faults.get(name, ()) + tuple(faults)
    return merged


def _limit_fault(count: int, noun: str, limit: int) -> str:
    return f"{count} {noun} are ignored: max_sources allows {limit}"


# --- running providers


class _RunningProvider:
    """A running provider, and the running providers that its newest finding contains."""

    def __init__(self, provider: Provider) -> None:
        self.provider: Final = provider
        self.finding: Finding | None = None
        self.children: dict[Provider, _RunningProvider] = {}
        self.task: asyncio.Task[None]

    def findings(self) -> Iterator[tuple[str, Finding | None]]:
        """Yield the findings of this provider, and then of the providers below it."""
        yield self.provider.name, self.finding
        for child in self.children.values():
            yield from child.findings()

    def cancel(self) -> None:
        """Stop the provider and all providers below it."""
        self.task.cancel()
        for child in self.children.values():
            child.cancel()


class ProviderRunner:
    """Runs providers, and the providers that they find, and reports all findings together after each change.

    `on_change` is called in the event loop and must not block. Of two providers in `providers`, the first takes precedence.
    """

    def __init__(
        self,
        providers: Sequence[Provider],
        on_change: Callable[[MergedFindings], None],
        *,
        max_sources: int = Limits().max_sources,
        settle: float = SETTLE_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._providers = tuple(dict.fromkeys(providers))
        self._on_change = on_change
        self._max_sources = max_sources
        self._settle = settle
        self._clock = clock
        self._branches: list[_RunningProvider] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled.

        An error in a provider or in `on_change` ends all providers, and is raised in an `ExceptionGroup`.
        """
        async with asyncio.TaskGroup() as group:
            self._branches = [self._start(group, provider) for provider in self._providers]
            self._changed.set()
            await self._report_changes()

    async def _report_changes(self) -> None:
        last = None
        while True:
            await self._changed.wait()
            if self._settle > 0:
                await self._clock.sleep(self._settle)
            self._changed.clear()
            merged = merge_findings((each for branch in self._branches for each in branch.findings()), self._max_sources)
            if merged != last:
                self._on_change(merged)
            last = merged

    def _start(self, group: asyncio.TaskGroup, provider: Provider) -> _RunningProvider:
        branch = _RunningProvider(provider)
        branch.task = group.create_task(self._follow(group, branch), name=f"discovery: {provider.name}")
        self._tasks.add(branch.task)
        branch.task.add_done_callback(self._tasks.discard)
        return branch

    async def _follow(self, group: asyncio.TaskGroup, branch: _RunningProvider) -> None:
        async with aclosing(branch.provider.watch()) as findings:
            async for finding in findings:
                refused = self._adjust_children(group, branch, finding.providers)
                faults = (_limit_fault(refused, "providers", self._max_sources),) if refused else ()
                branch.finding = replace(finding, faults=finding.faults + faults)
                self._changed.set()

    def _adjust_children(self, group: asyncio.TaskGroup, branch: _RunningProvider, providers: Iterable[Provider]) -> int:
        """Make `providers`, in this order, the children of a branch. Return how many are left out because of `max_sources`."""
        wanted = dict.fromkeys(providers)
        for gone in branch.children.keys() - wanted.keys():
            branch.children.pop(gone).cancel()
        before = branch.children
        branch.children = {}
        refused = 0
        for provider in wanted:
            if provider in before:
                branch.children[provider] = before[provider]
            elif len(self._tasks) < self._max_sources:
                branch.children[provider] = self._start(group, provider)
            else:
                refused += 1
        return refused


# --- registering found engines


class RegistrationTarget(Protocol):
    """Interface of objects that follow the engines found by discovery: the service's `Fleet`, or a bridge."""

    adapters: frozenset[Scope]
    unready_sources: Mapping[str, str]
    is_discovery_complete: bool

    @property
    def follow_errors(self) -> dict[StreamKey, str]: ...
    def replace_adapter(self, source: str, lora: str, /) -> None: ...
    def replace_registrations(
        self, origin: str, registrations: Iterable[Registration], resume: Callable[[StreamKey], Checkpoint | None], /
    ) -> list[str]: ...


class EngineDiscovery:
    """Runs the providers of a configuration, and registers the engines that they find."""

    def __init__(
        self,
        config: EngineSources,
        watched_file: Path | None,
        target: RegistrationTarget,
        resume: Callable[[StreamKey], Checkpoint | None],
        max_sources: int = Limits().max_sources,
    ) -> None:
        self._target = target
        self._resume = resume
        self._providers = build_providers(config, watched_file)
        self._runner = ProviderRunner(self._providers, self._register, max_sources=max_sources)
        self._merged = MergedFindings(waiting_providers=tuple(provider.name for provider in self._providers))
        self._adapter_paths: dict[tuple[str, str], str] = {}
        """The newest known path of each adapter, including adapters that the engine does not list now."""
        self._refused: list[str] = []
        self._logged: set[str] = set()
        """Sentences of the faults that were logged and still exist."""

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._runner.run())
            while True:  # Retry refused engines: the reason may have gone, for example if another engine was unregistered.
                await asyncio.sleep(RECONCILE_SECONDS)
                self._register(self._merged)

    def _register(self, merged: MergedFindings) -> None:
        self._merged = merged
        self._target.adapters, self._target.unready_sources = frozenset(merged.adapters), merged.unready_sources
        self._target.is_discovery_complete = self.has_completed and not merged.faults
        self._refused = self._target.replace_registrations("discovery", merged.registrations.values(), self._resume)
        self._compare_paths(merged)
        faults = {sentence for sentences in merged.faults.values() for sentence in sentences} | set(self._refused)
        for sentence in sorted(faults - self._logged):
            log.warning("%s", sentence)
        for sentence in sorted(self._logged - faults):
            log.info("this fault has ended: %s", sentence)
        self._logged = faults

    def _compare_paths(self, merged: MergedFindings) -> None:
        names = {registration.key[0]: registration.instance for registration in merged.registrations.values()}
        for (source, lora), path in merged.adapter_paths.items():
            before = self._adapter_paths.get((source, lora), path)
            if path != before:
                log.info("adapter %s of %s: loaded from %s instead of %s", lora, names.get(source, source), path, before)
                self._target.replace_adapter(source, lora)
        known = {key: path for key, path in self._adapter_paths.items() if key[0] in names}
        self._adapter_paths = known | merged.adapter_paths

    @property
    def has_completed(self) -> bool:
        """Whether every provider has yielded a finding."""
        return not self._merged.waiting_providers

    def owner_of(self, key: StreamKey) -> str | None:
        """Return the name of the provider that has found a rank; None if no provider has found the registration."""
        return self._merged.origins.get(key)

    def provider_faults(self) -> list[str]:
        """Return sentences about the faults of the configured providers, without the faults of engines that they found."""
        return [sentence for provider in self._providers for sentence in self._merged.faults.get(provider.name, ())]

    def faults(self) -> dict[str, list[str]]:
        """Map providers to sentences about their faults, and `fleet` to the reasons why found engines are not followed."""
        faults = {name: list(sentences) for name, sentences in self._merged.faults.items()}
        if refused := [*self._refused, *list(self._target.follow_errors.values())]:
            faults["fleet"] = refused
        return faults


def build_providers(config: EngineSources, watched_file: Path | None) -> list[Provider]:
    """Return the providers of a configuration in order of decreasing precedence.

    `watched_file` is the file of `--config`, or None; its `[[sources]]` are watched. Raises `ConfigError`.
    """
    providers: list[Provider] = []
    if watched_file is not None:
        providers.append(FileProvider(watched_file, config.__struct_fields__))
    if config.sources:
        providers.append(StaticProvider(tuple(config.sources)))
    providers += [FileProvider(Path(path)) for path in config.source_files]
    for table in config.dns:
        from kvevents.service.discovery.dns import DnsProvider  # noqa: PLC0415 - needs dnspython

        try:
            providers.append(DnsProvider(table.target, table))
        except ConfigError as error:
            raise ConfigError(f"dns {table.target}: {error}") from error
    if config.kubernetes is not None:
        from kvevents.service.discovery.kubernetes import KubernetesProvider  # noqa: PLC0415 - needs kubernetes_asyncio

        providers.append(KubernetesProvider(config.kubernetes))
    return providers


# --- checks before the start


def check_engines(config: EngineSources, watched_file: Path | None) -> None:
    """Raise `ConfigError` if engines in the settings and in `watched_file` contradict each other."""
    build_providers(config, watched_file)
    named: dict[StreamKey, tuple[Registration, str]] = {}
    firsts: dict[str, Registration] = {}
    sockets: dict[tuple[str, str, str], tuple[Registration, str]] = {}
    for registration, origin in _configured_registrations(config, watched_file):
        first, where = named.setdefault(registration.key, (registration, origin))
        if differing := first.differences(registration):
            places = f"in {where}" if where == origin else f"in {where} and in {origin}"
            problem = f"{registration.label} is named twice {places}, with another {', '.join(differing)}"
            raise ConfigError(f"{problem}: remove one of them, or give it another instance name")
        try:
            check_same_engine(registration, firsts.setdefault(registration.key[0], registration))
        except ConflictError as error:
            raise ConfigError(f"{error}; {error.hint}") from error
        for name, endpoint in (("endpoint", registration.endpoint), ("replay_endpoint", registration.replay_endpoint)):
            # Several ranks can publish at one endpoint if their topics differ.
            topic = registration.topic if name == "endpoint" else ""
            other, of_other = sockets.setdefault((registration.key[0], endpoint or "", topic), (registration, name))
            if endpoint is not None and (other, of_other) != (registration, name):
                problem = f"{name} {endpoint} of {registration.label} is the {of_other} of {other.label}"
                raise ConfigError(f"{problem}; give each rank endpoints of its own")


def _configured_registrations(config: EngineSources, watched_file: Path | None) -> list[tuple[Registration, str]]:
    try:
        watched = read_sources(watched_file, keys=config.__struct_fields__) if watched_file is not None else []
        tables = [(table, str(watched_file)) for table in watched] + [(table, "the settings") for table in config.sources]
        tables += [(table, path) for path in config.source_files for table in read_sources(Path(path))]
    except ExceptionGroup as errors:
        raise ConfigError(str(errors.exceptions[0])) from errors
    return [(registration, origin) for table, origin in tables for registration in table.static_registrations()]
