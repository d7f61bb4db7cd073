"""Engines that are simply named."""

from __future__ import annotations

from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.files import StaticProvider
from kvevents.service.discovery.provider import SourceTable


async def test_it_finds_once_what_it_was_given() -> None:
    """One finding with all ranks, and engines to be asked as providers of their own."""
    tables = (
        SourceTable(instance="a", endpoint="tcp://h:5557", model="m", ranks=2),
        SourceTable(instance="b", base_url="http://h:8000", tenant="t"),
    )
    (found,) = [each async for each in StaticProvider(tables).watch()]
    assert [each.label for each in found.registrations] == ["a rank 0", "a rank 1"]
    assert found.providers == (EngineProvider("http://h:8000", tables[1], "b"),)
    assert found.faults == ()


def test_equal_tables_are_the_same_provider() -> None:
    """So that an engine whose table did not change keeps being followed when another table did."""
    first, again = (StaticProvider((SourceTable(base_url="http://h:8000"),)) for _ in range(2))
    assert first == again
    assert hash(first) == hash(again)
    assert first != StaticProvider((SourceTable(base_url="http://h:8001"),))
