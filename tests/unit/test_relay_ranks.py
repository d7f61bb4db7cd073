"""A relay of several ranks: consumers hold the blocks of each rank apart, whenever they join and whatever restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvevents.errors import ConfigError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.wire import encode_batch
from relay_cases import SIZE, Consumer, World, block, world

RANKS = [4, 0, 9]


@pytest.fixture(name="scenario")
def make_scenario(tmp_path: Path) -> Iterator[World]:
    """Three ranks, whose engines state no rank themselves."""
    with world(tmp_path / "journal", ranks=RANKS) as found:
        yield found


def assert_apart(scenario: World, *consumers: Consumer) -> None:
    """Settle, and check that all consumers are EXACT and hold what each rank holds."""
    scenario.confirm()
    truth = {rank: each.held for rank, each in zip(RANKS, scenario.upstreams, strict=True) if each.held}
    for consumer in consumers:
        assert consumer.trust.name == "EXACT", consumer.trust
        assert consumer.held_by_rank == truth
        assert all(consumer.agreements())


@pytest.mark.parametrize("settings", [{}, {"dialect": "vllm"}, {"tokens": "hash"}, {"tokens": "drop"}], ids=str)
def test_ranks_stay_apart_for_early_and_late_consumers(scenario: World, settings: dict[str, Any]) -> None:
    """Also after a kill of the relay, and with a rank whose first blocks come late."""
    settings = {"buffer_steps": 3, **settings}
    scenario.begin(**settings)
    first, second, third = scenario.upstreams
    early = scenario.consumer()
    first.store(1, 2, 3)
    second.store(1, 2, 3, 4)
    second.remove(1, 2)
    assert_apart(scenario, early, scenario.consumer())
    scenario.kill()
    scenario.begin(**settings)
    third.store(2, 5)
    third.remove(2)
    first.remove(3)
    late = scenario.consumer()
    assert_apart(scenario, early, late)
    second.clear()
    first.store(8, medium="CPU")
    assert_apart(scenario, early, late, scenario.consumer())


def test_the_restart_of_one_rank_takes_its_blocks_alone(scenario: World) -> None:
    scenario.begin(buffer_steps=3)
    first, second, third = scenario.upstreams
    early, plain = scenario.consumer(), scenario.consumer(reads_heartbeats=False)
    for each in (first, second, third):
        each.store(1, 2, 3)
    scenario.settle()
    second.restart(block(7))
    assert_apart(scenario, early, plain, scenario.consumer())
    third.restart()
    scenario.settle()
    scenario.kill()
    scenario.begin(buffer_steps=3)
    assert_apart(scenario, early, plain, scenario.consumer())


def test_a_rank_without_blocks_does_not_name_another(scenario: World) -> None:
    """The only rank with blocks is known by its own number, not by that of the registration."""
    scenario.begin()
    scenario.upstreams[2].store(1)
    assert_apart(scenario, scenario.consumer(), scenario.consumer())


def test_hashes_of_tokens_are_those_of_the_rank(scenario: World) -> None:
    """Equal hashes of ranks can be of different tokens."""
    scenario.begin(tokens="hash", buffer_steps=3)
    first, second, _ = scenario.upstreams
    others = BlockStored([1], None, list(range(500, 500 + SIZE)), SIZE, medium="GPU", group_idx=0)
    scenario.settle()
    first.store(1)
    second.publish_events(others)
    scenario.settle()
    scenario.kill()
    scenario.begin(tokens="hash", buffer_steps=3)
    child = BlockStored([2], 1, list(range(600, 600 + SIZE)), SIZE, medium="GPU", group_idx=0)
    first.publish_events(child)
    second.publish_events(child)
    consumer = scenario.consumer()
    assert_apart(scenario, consumer)
    for rank, start in ((RANKS[0], SIZE), (RANKS[1], 500)):
        match = consumer.index.match([*range(start, start + SIZE), *range(600, 600 + SIZE)])
        assert [(worker, tokens) for _, worker, *_, tokens, _, _ in match.rows()] == [(rank, 2 * SIZE)]


@pytest.mark.parametrize("settings", [{}, {"dialect": "vllm"}, {"tokens": "hash"}], ids=str)
def test_an_upstream_of_several_ranks_is_relayed_as_such(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Such an upstream can be another relay. A clear without a rank, and a restart, affect all ranks."""
    with world(tmp_path / "journal") as scenario:
        scenario.begin(buffer_steps=3, **settings)
        early = scenario.consumer()

        def publish(rank: int | None, *events: KVEvent) -> None:
            scenario.upstream.engine.publish_payload(encode_batch(KVEventBatch(0.0, list(events), rank)))

        def held(consumer: Consumer) -> dict[int, set[int]]:
            return {rank: {number for number, _ in blocks} for rank, blocks in consumer.held_by_rank.items()}

        def consumers_hold(expected: dict[int, set[int]]) -> None:
            late = scenario.consumer()
            scenario.settle()
            assert held(early) == held(late) == expected

        publish(3, block(1), block(2))
        publish(5, block(1), block(2))
        publish(3, BlockRemoved([1], "GPU", 0))
        for _ in range(5):
            publish(5)
        consumers_hold({3: {2}, 5: {1, 2}})
        publish(5, AllBlocksCleared())
        consumers_hold({3: {2}})
        publish(5, block(6))
        publish(None, AllBlocksCleared())
        publish(5, block(7))
        consumers_hold({5: {7}})
        publish(3, block(8))
        scenario.settle()
        scenario.upstream.restart()
        publish(3, block(9))
        scenario.settle()
        assert [blocks for blocks in held(early).values() if blocks] == [{9}]


def test_a_dialect_without_ranks_is_refused(scenario: World) -> None:
    with pytest.raises(ConfigError, match="has no field for the rank"):
        scenario.settings(dialect="vllm-0.9.0")


def test_a_dialect_without_ranks_leaves_out_a_second_one(tmp_path: Path) -> None:
    """Consumers would mix them, and see that something is missing instead."""
    with world(tmp_path / "journal") as scenario:
        scenario.begin(dialect="vllm-0.9.0")
        consumer = scenario.consumer()
        for rank in (3, 5):
            scenario.upstream.engine.publish_payload(encode_batch(KVEventBatch(0.0, [block(rank)], rank)))
        scenario.settle()
        assert {number for number, _ in consumer.held} == {3}
        assert consumer.trust.name == "DEGRADED"
