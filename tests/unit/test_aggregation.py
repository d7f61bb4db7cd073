"""Aggregation returns the events that all workers announced."""

from __future__ import annotations

from typing import Any

import pytest

from kvevents import events
from kvevents.compat import vllm
from kvevents.events import KVConnectorKVEvents, KVEventAggregator

with_both_kinds = pytest.mark.parametrize("kinds", [events, vllm], ids=["kvevents", "vllm"])


def make_event(kinds: Any, number: int) -> Any:
    return kinds.BlockStored([number], None, [1, 2], 2, None, "GPU", None)


@with_both_kinds
def test_only_events_that_every_worker_announced_are_common(kinds: Any) -> None:
    """Equal events of different workers are one event; the order is that of the first announcement."""
    aggregator = KVEventAggregator(num_workers=3)
    common, partial = [make_event(kinds, 1), kinds.BlockRemoved([2], "GPU"), kinds.AllBlocksCleared()], [make_event(kinds, 3)]
    for worker in range(3):
        aggregator.add_events([make_event(kinds, 1), kinds.BlockRemoved([2], "GPU"), kinds.AllBlocksCleared()])
        if worker:
            aggregator.add_events(partial)
    assert aggregator.get_common_events() == common
    assert aggregator.get_all_events() == [event for event in common for _ in range(3)] + partial * 2
    assert repr(aggregator) == "<KVEventAggregator workers=3, events=4>"


def test_an_event_announced_more_often_than_there_are_workers_is_not_common() -> None:
    """An event must be announced exactly as often as there are workers, as in vLLM 0.33."""
    aggregator = KVEventAggregator(1)
    aggregator.add_events([make_event(events, 1)] * 2)
    assert aggregator.get_common_events() == []
    aggregator.increment_workers()
    assert aggregator.get_common_events() == [make_event(events, 1)]


def test_the_number_of_workers_can_be_incremented_and_reset() -> None:
    """The number increases, is reset to one, and does not change when the events are cleared."""
    aggregator = KVEventAggregator(2)
    aggregator.increment_workers()
    aggregator.increment_workers(count=4)
    aggregator.add_events([make_event(events, 1)])
    aggregator.clear_events()
    assert aggregator.get_number_of_workers() == 7
    assert aggregator.get_all_events() == []
    aggregator.reset_workers()
    assert aggregator.get_number_of_workers() == 1


def test_wrong_arguments_are_rejected_as_in_vllm() -> None:
    """The errors and messages are those of the engines."""
    for workers in (0, -1):
        with pytest.raises(ValueError, match="num_workers must be greater than zero"):
            KVEventAggregator(workers)
    aggregator = KVEventAggregator(1)
    for count in (0, -1):
        with pytest.raises(ValueError, match="count must be positive"):
            aggregator.increment_workers(count)
    with pytest.raises(TypeError, match="events must be a list"):
        aggregator.add_events((make_event(events, 1),))  # type: ignore[arg-type]


class ConnectorEvents(KVConnectorKVEvents):
    """A container of a connector, as LMCache writes it."""

    def __init__(self) -> None:
        self._aggregator = KVEventAggregator(1)

    def add_events(self, events: list[Any]) -> None:
        self._aggregator.add_events(events)

    def aggregate(self) -> KVConnectorKVEvents:
        common = self._aggregator.get_common_events()
        self._aggregator.clear_events()
        self._aggregator.add_events(common)
        self._aggregator.reset_workers()
        return self

    def increment_workers(self, count: int = 1) -> None:
        self._aggregator.increment_workers(count)

    def get_all_events(self) -> list[Any]:
        return self._aggregator.get_all_events()

    def get_number_of_workers(self) -> int:
        return self._aggregator.get_number_of_workers()

    def clear_events(self) -> None:
        self._aggregator.clear_events()


def test_a_connectors_events_merge_and_reduce() -> None:
    """`merge` adds the events of the other container and returns itself, so that outputs of workers can be reduced."""
    first, second = ConnectorEvents(), ConnectorEvents()
    first.add_events([make_event(events, 1), make_event(events, 2)])
    second.add_events([make_event(events, 2)])
    assert first.merge(second) is first
    first.increment_workers()
    assert first.aggregate().get_all_events() == [make_event(events, 2)]
    assert first.get_number_of_workers() == 1
    with pytest.raises(TypeError):
        KVConnectorKVEvents()  # type: ignore[abstract]
