"""Many providers, one picture."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery_cases import Steps, within
from discovery_fetch_cases import Engine
from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.files import FileProvider, StaticProvider
from kvevents.service.discovery.provider import DiscoveryFault, Finding, Provider, SourceTable
from kvevents.service.discovery.runner import MergedFindings, ProviderRunner, merge_findings
from kvevents.service.registration import Registration


def registration(instance: str, port: int = 1, *, tenant: str = "default", topic: str = "") -> Registration:
    return Registration(instance=instance, endpoint=f"tcp://h:{port}", model="m", tenant=tenant, topic=topic)


def finding(*instances: str) -> Finding:
    return Finding(tuple(registration(each) for each in instances))


@dataclass(frozen=True)
class Scripted:
    """A provider that finds what is put into it, and says when it was ended. As much code as a new kind needs."""

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
    """The findings received, one after the other."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[MergedFindings] = asyncio.Queue()

    async def until(self, labels: set[str], faults: int | None = None) -> MergedFindings:
        """The first picture with exactly these ranks, and so many faults."""
        while True:
            found = await within(self.queue.get())
            known = {each.label for each in found.registrations.values()}
            if known == labels and faults in {None, sum(map(len, found.faults.values()))}:
                return found


@asynccontextmanager
async def running(*providers: Provider, max_sources: int = 4_096) -> AsyncIterator[Findings]:
    received = Findings()
    task = asyncio.create_task(ProviderRunner(providers, received.queue.put_nowait, max_sources=max_sources, settle=0).run())
    yield received
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(task)


def test_the_first_of_two_that_differ_counts_and_the_other_gets_a_fault() -> None:
    """By order of the providers, not of arrival; the sentence says in what they differ, and never prints keys."""
    found = merge_findings(
        [("config", Finding((registration("a", 1),))), ("dns x", Finding((registration("a", 2), registration("b"))))]
    )
    assert {each.label: each.endpoint for each in found.registrations.values()} == {
        "a rank 0": "tcp://h:1",
        "b rank 0": "tcp://h:1",
    }
    (fault,) = found.faults["dns x"]
    assert fault == DiscoveryFault("a rank 0", "a rank 0 is named twice, with another endpoint: the one of config takes effect")


def test_the_same_said_twice_is_no_conflict() -> None:
    """A file beside flags may well say the same; and another tenant's engine of that name is another one."""
    found = merge_findings([("config", finding("a")), ("file", finding("a"))])
    assert (len(found.registrations), found.faults) == (1, {})
    found = merge_findings([("config", Finding((registration("a"), registration("a", 2, tenant="t"))))])
    assert (len(found.registrations), found.faults) == (2, {})


def test_two_entries_of_one_provider_conflict_too() -> None:
    """A table that was copied and not finished."""
    found = merge_findings([("file", Finding((registration("a", 1), registration("a", 2, topic="x"))))])
    assert "another endpoint, topic" in found.faults["file"][0].sentence


def test_sources_are_bounded() -> None:
    """The rest is ignored, counted, and reported with its provider; a known source does not count as the rest."""
    found = merge_findings([("config", finding("a", "b")), ("dns x", finding("b", "c", "d", "e"))], max_sources=3)
    assert sorted(each.instance for each in found.registrations.values()) == ["a", "b", "c"]
    assert found.faults == {"dns x": (DiscoveryFault("max_sources", "2 ranks are ignored: max_sources allows 3"),)}


def test_a_provider_without_a_finding_is_named() -> None:
    """So that what was known before a restart is not dropped before the providers had a chance to name it."""
    assert merge_findings([("config", finding("a")), ("dns x", None)]).waiting == ("dns x",)


@given(st.lists(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 3)), max_size=6), max_size=5), st.integers(0, 6))
def test_merging_agrees_with_reading_all_in_order(named: list[list[tuple[str, int]]], most: int) -> None:
    """Against a model that a reader can check by eye: a dictionary that is filled until it is full."""
    model: dict[str, int] = {}
    for instance, port in (each for provider in named for each in provider):
        if instance in model or len(model) < most:
            model.setdefault(instance, port)
    findings = [(str(n), Finding(tuple(registration(*each) for each in names))) for n, names in enumerate(named)]
    found = merge_findings(findings, most)
    assert {each.instance: each.endpoint for each in found.registrations.values()} == {
        k: f"tcp://h:{v}" for k, v in model.items()
    }


async def test_changes_of_all_providers_arrive() -> None:
    """A source that its provider no longer names is gone; faults are listed under the provider that found them."""
    one, two = Scripted("one"), Scripted("two")
    async with running(one, two) as received:
        assert (await received.until(set())).waiting == ("one", "two")
        one.find(finding("a"))
        assert (await received.until({"a rank 0"})).waiting == ("two",)
        two.find(Finding(finding("b").registrations, (DiscoveryFault("x", "is not there"),)))
        found = await received.until({"a rank 0", "b rank 0"})
        assert (found.faults, found.waiting) == ({"two": (DiscoveryFault("x", "is not there"),)}, ())
        one.find(finding())
        await received.until({"b rank 0"})
    assert one.ended.is_set()
    assert two.ended.is_set()


async def test_the_first_provider_wins_even_when_late() -> None:
    """The order is that of the configuration: it does not depend on which provider answers faster."""
    one, two = Scripted("one"), Scripted("two")
    async with running(one, two) as received:
        two.find(Finding((registration("a", 2),)))
        await received.until({"a rank 0"}, faults=0)
        one.find(Finding((registration("a", 1),)))
        found = await received.until({"a rank 0"}, faults=1)
        assert [each.endpoint for each in found.registrations.values()] == ["tcp://h:1"]


async def test_providers_that_a_provider_names_run_as_long_as_it_names_them() -> None:
    """An equal one goes on undisturbed; one that is named no more ends, with all below it."""
    top, left, right, below = (Scripted(name) for name in ("top", "left", "right", "below"))
    async with running(top) as received:
        top.find(Finding(providers=(left, right)))
        left.find(finding("a"))
        right.find(Finding(finding("b").registrations, providers=(below,)))
        below.find(finding("c"))
        await received.until({"a rank 0", "b rank 0", "c rank 0"})
        top.find(Finding(finding("d").registrations, providers=(Scripted("left"),)))
        await received.until({"a rank 0", "d rank 0"})
        await within(right.ended.wait())
        await within(below.ended.wait())
        left.find(finding("e"))
        await received.until({"d rank 0", "e rank 0"})


async def test_providers_are_bounded_too() -> None:
    """A DNS answer with a million addresses does not start a million of them."""
    top = Scripted("top")
    async with running(top, max_sources=3) as received:
        top.find(Finding(providers=tuple(Scripted(str(each)) for each in range(10))))
        found = await received.until(set(), faults=1)
        assert found.faults["top"] == (DiscoveryFault("max_sources", "8 providers are ignored: max_sources allows 3"),)
        assert found.waiting == ("0", "1")


async def test_many_changes_at_once_are_sent_once() -> None:
    """A short wait collects others, and nothing is sent if the result is as it was."""
    steps, received = Steps(), Findings()
    providers = [Scripted(str(each)) for each in range(100)]
    for each in providers:
        each.find(finding(each.name))
    task = asyncio.create_task(ProviderRunner(providers, received.queue.put_nowait, settle=0.05, clock=steps.clock).run())
    assert await steps.step() == 0.05
    assert len((await within(received.queue.get())).registrations) == 100
    providers[0].find(finding("0"))
    await steps.step()
    providers[0].find(finding())
    await steps.step()
    assert len((await within(received.queue.get())).registrations) == 99
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(task)


async def test_a_provider_that_breaks_its_word_is_not_hidden() -> None:
    """An unexpected exception of a provider is a bug, not a failed answer: it ends the run, and all others with it."""

    @dataclass(frozen=True)
    class Broken:
        name: str = "broken"

        async def watch(self) -> AsyncGenerator[Finding, None]:
            yield Finding()
            raise ZeroDivisionError

    other = Scripted("other")
    discovery = ProviderRunner([other, Broken()], lambda _: None, settle=0)
    with pytest.raises(ExceptionGroup) as caught:
        await within(discovery.run())
    assert caught.group_contains(ZeroDivisionError)
    assert other.ended.is_set()
    await asyncio.sleep(0)
    assert repr(discovery) == "<ProviderRunner 2 providers, 0 running>"


async def test_a_fleet_of_flags_a_file_and_engines(tmp_path: Path) -> None:
    """All kinds together over a real file and a real HTTP server, and the end of them."""
    path = tmp_path / "fleet.toml"
    with Engine({"/kv_event_sources": {"0": {"endpoint": "tcp://*:5557"}, "1": {"endpoint": "tcp://*:5558"}}}) as engine:
        path.write_text(f'[[sources]]\ninstance = "c"\nbase_url = "{engine.url}"\nmodel = "m"\n')
        config = StaticProvider((SourceTable(instance="a", endpoint="tcp://h:1", model="m"),))
        asked = EngineProvider(engine.url, SourceTable(base_url=engine.url, model="m"), "b")
        async with running(config, FileProvider(path), asked) as received:
            found = await received.until({"a rank 0", "b rank 0", "b rank 1", "c rank 0", "c rank 1"})
            assert (found.faults, found.waiting) == ({}, ())
