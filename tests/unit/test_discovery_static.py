"""The static provider returns engines that are named in the settings."""

from __future__ import annotations

from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.files import StaticProvider
from kvevents.service.discovery.provider import SourceTable


async def test_a_static_provider_yields_its_tables_once() -> None:
    """There is one finding with all ranks; engines whose sources must be requested are providers of their own."""
    tables = (
        SourceTable(instance="a", endpoint="tcp://h:5557", model="m", ranks=2),
        SourceTable(instance="b", base_url="http://h:8000", tenant="t"),
    )
    (found,) = [each async for each in StaticProvider(tables).watch()]
    assert [each.label for each in found.registrations] == ["a rank 0", "a rank 1"]
    assert found.providers == (EngineProvider("http://h:8000", tables[1], "b"),)
    assert found.faults == ()


def test_providers_with_equal_tables_are_equal() -> None:
    """An engine whose table did not change is therefore followed without a break when another table changes."""
    first, again = (StaticProvider((SourceTable(base_url="http://h:8000"),)) for _ in range(2))
    assert first == again
    assert hash(first) == hash(again)
    assert first != StaticProvider((SourceTable(base_url="http://h:8001"),))
