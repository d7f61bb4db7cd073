"""Findings of several providers are merged into one set of registrations and faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery_cases import ManualClock, await_in_time
from discovery_fetch_cases import Engine
from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.files import FileProvider, StaticProvider
from kvevents.service.discovery.provider import Finding, Provider, SourceTable
from kvevents.service.discovery.runner import EngineDiscovery, MergedFindings, ProviderRunner, merge_findings
from kvevents.service.fleet.registration import Registration, Scope, StreamKey
from kvevents.service.settings import EngineSources


def registration(instance: str, port: int = 1, *, tenant: str = "default", topic: str = "") -> Registration:
    return Registration(instance=instance, endpoint=f"tcp://h:{port}", model="m", tenant=tenant, topic=topic)


def finding(*instances: str) -> Finding:
    return Finding(tuple(registration(each) for each in instances))


@dataclass(frozen=True)
class ScriptedProvider:
    """A provider that yields the findings that a test passes to `find`, and sets `ended` when it is closed."""

    name: str
    queue: asyncio.Queue[Finding] = field(default_factory=asyncio.Queue, compare=False)
    ended: asyncio.Event = field(default_factory=asyncio.Event, compare=False)

    async def watch(self) -> AsyncGenerator[Finding, None]:
        try:
            while True:
                yield await self.queue.get()
        finally:
            self.ended.set()

    def find(self, found: Finding) -> None:
        self.queue.put_nowait(found)


class Findings:
    """The merged findings that the runner has reported, in order."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[MergedFindings] = asyncio.Queue()

    async def wait_for(self, labels: set[str], faults: int | None = None) -> MergedFindings:
        """Return the next findings with exactly these labels and, if given, this number of faults."""
        while True:
            found = await await_in_time(self.queue.get())
            labels_found = {each.label for each in found.registrations.values()}
            if labels_found == labels and faults in {None, sum(map(len, found.faults.values()))}:
                return found


@asynccontextmanager
async def run_providers(*providers: Provider, max_sources: int = 4_096) -> AsyncIterator[Findings]:
    received = Findings()
    task = asyncio.create_task(ProviderRunner(providers, received.queue.put_nowait, max_sources=max_sources, settle=0).run())
    yield received
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await await_in_time(task)


def test_the_first_of_two_conflicting_entries_is_used_and_the_other_is_a_fault() -> None:
    """The order of the providers counts; the fault lists the fields that differ."""
    found = merge_findings(
        [("config", Finding((registration("a", 1),))), ("dns x", Finding((registration("a", 2), registration("b"))))]
    )
    assert {each.label: each.endpoint for each in found.registrations.values()} == {
        "a rank 0": "tcp://h:1",
        "b rank 0": "tcp://h:1",
    }
    (fault,) = found.faults["dns x"]
    assert fault == "a rank 0 is named twice, with different endpoint: the value in config takes effect"


def test_equal_entries_do_not_conflict() -> None:
    """A file may repeat entries of flags; an engine of the same name of another tenant is another engine."""
    found = merge_findings([("config", finding("a")), ("file", finding("a"))])
    assert (len(found.registrations), found.faults) == (1, {})
    found = merge_findings([("config", Finding((registration("a"), registration("a", 2, tenant="t"))))])
    assert (len(found.registrations), found.faults) == (2, {})


def test_two_entries_of_one_provider_conflict_too() -> None:
    """A file can contain such entries, for example if a table was copied and not edited completely."""
    found = merge_findings([("file", Finding((registration("a", 1), registration("a", 2, topic="x"))))])
    assert "different endpoint, topic" in found.faults["file"][0]


def test_the_number_of_sources_is_bounded() -> None:
    """Excess sources are ignored and counted in a fault of their provider; a source found before does not count again."""
    found = merge_findings([("config", finding("a", "b")), ("dns x", finding("b", "c", "d", "e"))], max_sources=3)
    assert sorted(each.instance for each in found.registrations.values()) == ["a", "b", "c"]
    assert found.faults == {"dns x": ("2 ranks are ignored: max_sources allows 3",)}


@dataclass
class Target:
    """What discovery has registered and noted."""

    adapters: frozenset[Scope] = frozenset()
    unready_sources: Mapping[str, str] = field(default_factory=dict)
    is_discovery_complete: bool = False
    follow_errors: dict[StreamKey, str] = field(default_factory=dict)
    replaced: list[tuple[str, str]] = field(default_factory=list)

    def replace_registrations(self, _origin: str, _registrations: object, _resume: object, /) -> list[str]:
        return []

    def replace_adapter(self, source: str, lora: str, /) -> None:
        self.replaced.append((source.rpartition("\x1f")[2], lora))


def test_an_adapter_that_an_engine_lists_at_another_path_was_replaced() -> None:
    """Also if it was not listed in between. Another engine has its own paths; an engine that was removed is forgotten."""
    target = Target()
    discovery = EngineDiscovery(EngineSources(), None, target, lambda _: None)

    def find(**paths: str | None) -> list[tuple[str, str]]:
        target.replaced.clear()
        findings = [
            (name, Finding((registration(name),), adapters=((Scope("m", lora="one"), path),) if path else ()))
            for name, path in paths.items()
        ]
        discovery._register(merge_findings(findings))
        assert target.adapters == ({Scope("m", lora="one")} if any(paths.values()) else set())
        return [*target.replaced]

    assert find(a="/1", b="/2") == []
    assert find(a="/1", b="/2") == []
    assert find(a="/2", b="/2") == [("a", "one")]
    assert find(a=None, b="/2") == []
    assert find(a="/1", b="/3") == [("a", "one"), ("b", "one")]
    assert find(b="/3") == []
    assert find(a="/5", b="/3") == []


def test_providers_without_a_finding_are_listed_as_waiting() -> None:
    """After a restart, engines known before are not dropped until every provider has had a finding."""
    assert merge_findings([("config", finding("a")), ("dns x", None)]).waiting_providers == ("dns x",)


@given(st.lists(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 3)), max_size=6), max_size=5), st.integers(0, 6))
def test_merging_equals_reading_all_entries_in_order(entries_by_provider: list[list[tuple[str, int]]], limit: int) -> None:
    """The model is a dictionary that accepts entries until it has reached the limit."""
    model: dict[str, int] = {}
    for instance, port in (each for provider in entries_by_provider for each in provider):
        if instance in model or len(model) < limit:
            model.setdefault(instance, port)
    findings = [(str(n), Finding(tuple(registration(*each) for each in names))) for n, names in enumerate(entries_by_provider)]
    found = merge_findings(findings, limit)
    assert {each.instance: each.endpoint for each in found.registrations.values()} == {
        k: f"tcp://h:{v}" for k, v in model.items()
    }


async def test_changes_of_all_providers_are_reported() -> None:
    """A source that its provider no longer lists is removed; faults are listed under their provider."""
    one, two = ScriptedProvider("one"), ScriptedProvider("two")
    async with run_providers(one, two) as received:
        assert (await received.wait_for(set())).waiting_providers == ("one", "two")
        one.find(finding("a"))
        assert (await received.wait_for({"a rank 0"})).waiting_providers == ("two",)
        two.find(Finding(finding("b").registrations, ("is not there",)))
        found = await received.wait_for({"a rank 0", "b rank 0"})
        assert (found.faults, found.waiting_providers) == ({"two": ("is not there",)}, ())
        one.find(finding())
        await received.wait_for({"b rank 0"})
    assert one.ended.is_set()
    assert two.ended.is_set()


async def test_the_first_provider_takes_precedence_even_if_it_answers_later() -> None:
    """Precedence follows the order of the configuration, not the order of the answers."""
    one, two = ScriptedProvider("one"), ScriptedProvider("two")
    async with run_providers(one, two) as received:
        two.find(Finding((registration("a", 2),)))
        await received.wait_for({"a rank 0"}, faults=0)
        one.find(Finding((registration("a", 1),)))
        found = await received.wait_for({"a rank 0"}, faults=1)
        assert [each.endpoint for each in found.registrations.values()] == ["tcp://h:1"]


async def test_nested_providers_run_as_long_as_their_parent_lists_them() -> None:
    """An equal provider continues to run; one that is no longer listed ends with all providers that it has listed."""
    top, left, right, below = (ScriptedProvider(name) for name in ("top", "left", "right", "below"))
    async with run_providers(top) as received:
        top.find(Finding(providers=(left, right)))
        left.find(finding("a"))
        right.find(Finding(finding("b").registrations, providers=(below,)))
        below.find(finding("c"))
        await received.wait_for({"a rank 0", "b rank 0", "c rank 0"})
        top.find(Finding(finding("d").registrations, providers=(ScriptedProvider("left"),)))
        await received.wait_for({"a rank 0", "d rank 0"})
        await await_in_time(right.ended.wait())
        await await_in_time(below.ended.wait())
        left.find(finding("e"))
        await received.wait_for({"d rank 0", "e rank 0"})


async def test_the_number_of_providers_is_bounded() -> None:
    """A DNS answer with a million addresses does not start a million providers."""
    top = ScriptedProvider("top")
    async with run_providers(top, max_sources=3) as received:
        top.find(Finding(providers=tuple(ScriptedProvider(str(each)) for each in range(10))))
        found = await received.wait_for(set(), faults=1)
        assert found.faults["top"] == ("8 providers are ignored: max_sources allows 3",)
        assert found.waiting_providers == ("0", "1")


async def test_simultaneous_changes_are_reported_once() -> None:
    """A short wait collects changes, and nothing is reported if the merged result has not changed."""
    steps, received = ManualClock(), Findings()
    providers = [ScriptedProvider(str(each)) for each in range(100)]
    for each in providers:
        each.find(finding(each.name))
    task = asyncio.create_task(ProviderRunner(providers, received.queue.put_nowait, settle=0.05, clock=steps.clock).run())
    assert await steps.step() == 0.05
    assert len((await await_in_time(received.queue.get())).registrations) == 100
    providers[0].find(finding("0"))
    await steps.step()
    providers[0].find(finding())
    await steps.step()
    assert len((await await_in_time(received.queue.get())).registrations) == 99
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await await_in_time(task)


async def test_an_unexpected_exception_of_a_provider_ends_the_run() -> None:
    """Such an exception is a bug, not a failed query: it is raised, and all other providers end."""

    @dataclass(frozen=True)
    class Broken:
        name: str = "broken"

        async def watch(self) -> AsyncGenerator[Finding, None]:
            yield Finding()
            raise ZeroDivisionError

    other = ScriptedProvider("other")
    discovery = ProviderRunner([other, Broken()], lambda _: None, settle=0)
    with pytest.raises(ExceptionGroup) as caught:
        await await_in_time(discovery.run())
    assert caught.group_contains(ZeroDivisionError)
    assert other.ended.is_set()
    await asyncio.sleep(0)
    assert not discovery._tasks


async def test_providers_of_all_kinds_are_merged(tmp_path: Path) -> None:
    """Static, file and engine providers run together, with a real file and a real HTTP server."""
    path = tmp_path / "fleet.toml"
    with Engine({"/kv_event_sources": {"0": {"endpoint": "tcp://*:5557"}, "1": {"endpoint": "tcp://*:5558"}}}) as engine:
        path.write_text(f'[[sources]]\ninstance = "c"\nbase_url = "{engine.url}"\nmodel = "m"\n')
        config = StaticProvider((SourceTable(instance="a", endpoint="tcp://h:1", model="m"),))
        engine_provider = EngineProvider(engine.url, SourceTable(base_url=engine.url, model="m"), "b")
        async with run_providers(config, FileProvider(path), engine_provider) as received:
            found = await received.wait_for({"a rank 0", "b rank 0", "b rank 1", "c rank 0", "c rank 1"})
            assert (found.faults, found.waiting_providers) == ({}, ())
