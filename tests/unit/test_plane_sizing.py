"""The arithmetic of `python -m tools.plane_sizing` is right, and docs/operations/sizing.md has the table that it prints."""

from __future__ import annotations

import re
from typing import Final

import pytest

import paths
from tools.plane_sizing import MAX_QUEUED_BYTES, Costs, Fleet, amount, plan, rows, sizes

DOCUMENT: Final = (paths.ROOT / "docs" / "operations" / "sizing.md").read_text()
FLEET: Final = Fleet(
    engines=100,
    blocks=1e9,
    tokens_per_second=320.0,
    batches_per_second=10.0,
    block_size=16,
    machine_bytes=100e9,
    snapshot_seconds=100.0,
    bootstrap_seconds=1e9,
    holders=1,
    copies=3,
    latency=1e-9,
)
COSTS: Final = Costs(
    payload=400, record=420, memory=50, saved=16, apply=100e-6, restore=1e-6, written=1e9, read=1e9, store=1e-9
)


def test_the_scarcest_resource_determines_the_number_of_replicas() -> None:
    """Memory, the time to apply batches or the time to save snapshots limits the partitions of a replica."""
    found = plan(FLEET, COSTS)
    assert found.replicas == found.by_memory == 1
    three = plan(FLEET._replace(blocks=3e9), COSTS)
    assert three.by_memory >= 3
    assert three.memory <= 0.6 * 100e9
    assert plan(FLEET._replace(engines=20_000), COSTS).by_apply > 28
    assert plan(FLEET, COSTS._replace(written=10e6)).by_saving > 22


def test_each_partition_has_the_configured_number_of_holders() -> None:
    found = plan(FLEET._replace(holders=2), COSTS)
    assert (found.replicas, found.share, found.replicas_per_answer) == (2, 1.0, 1)
    many = plan(FLEET._replace(blocks=10e9, holders=2), COSTS)
    assert many.replicas > 20
    assert 2 / many.replicas < many.share < 4 / many.replicas
    assert many.replicas / 2 <= many.replicas_per_answer <= many.replicas


def test_a_bootstrap_also_reads_the_log_that_arrives_meanwhile() -> None:
    """The bootstrap restores 1e9 blocks in 1,000 s, reads them in 16 s, and reads the log of 100 s in 10 s."""
    found = plan(FLEET, COSTS)
    assert found.bootstrap == pytest.approx((1_000 + 16 + 100 * 0.1) / 0.9)
    assert found.move == pytest.approx((1_016 + 10) / 256 / 0.9)


def test_a_bootstrap_that_takes_too_long_is_spread_over_more_replicas() -> None:
    found = plan(FLEET._replace(bootstrap_seconds=300.0), COSTS)
    assert found.replicas == found.by_bootstrap > 3
    assert found.bootstrap <= 300


def test_partitions_have_room_for_the_log_of_three_snapshot_intervals() -> None:
    found = plan(FLEET, COSTS)
    assert found.partition_bytes * found.partitions == pytest.approx(3 * 100 * 1_000 * 420)


def test_amounts_have_three_digits_and_a_unit() -> None:
    assert [amount(value, "B") for value in (16, 1_350.0, 5e9, 2e15)] == ["16 B", "1.35 kB", "5 GB", "2e+03 TB"]


def test_the_document_has_the_table_that_is_printed() -> None:
    documented = re.findall(r"^\| ([^|]+) \| ([^|]*) \| ([^|]*) \|$", DOCUMENT, re.MULTILINE)
    assert [name for name, _, _ in documented] == [name for name, _, _ in rows(FLEET, COSTS, plan(FLEET, COSTS))]


def test_bridges_follow_the_number_of_engines_and_have_memory_for_full_queues() -> None:
    """The memory of bridges does not grow with the number of blocks."""
    found, more = plan(FLEET, COSTS), plan(FLEET._replace(engines=10_000), COSTS)
    assert found.bridges < more.bridges
    assert plan(FLEET._replace(blocks=2e9), COSTS).bridge_memory == found.bridge_memory > 2 * MAX_QUEUED_BYTES


def test_servers_store_every_copy() -> None:
    """Servers store three copies of the partitions and of three snapshots: two valid ones and one that is being written."""
    found = plan(FLEET, COSTS)
    assert found.disk_bytes == pytest.approx(3 * (found.partition_bytes * found.partitions + 3 * 1e9 * 16))
    assert found.disk_writes == pytest.approx(3 * (found.bytes + found.saved))
    assert plan(FLEET._replace(engines=10_000), COSTS).server_memory > found.server_memory
    assert plan(FLEET._replace(snapshot_seconds=10.0), COSTS).server_cores > found.server_cores


def test_each_chunk_of_a_snapshot_waits_for_a_majority() -> None:
    """The higher the latency between servers, the fewer bytes one replica and one partition can write."""
    near, far = (plan(FLEET._replace(latency=latency), COSTS) for latency in (0.001, 0.010))
    assert near.written / far.written == pytest.approx(10, rel=0.5)
    assert near.partition_takes / far.partition_takes == pytest.approx(10)


def test_sizes_in_the_document_are_still_those_of_the_code() -> None:
    """The sizes are bytes of batches, pages and blocks, which are equal on every machine."""
    documented = dict(re.findall(r"^\| ([^|]+) \| ([^|]*) \|", DOCUMENT, re.MULTILINE))
    found = sizes(int(documented["blocks of a batch"].split()[0]), 100_000)
    for name, value in (
        ("a batch", found.payload),
        ("a batch in a partition", found.record),
        ("a block in the index", found.memory),
        ("a block in a snapshot", found.saved),
    ):
        number, unit = documented[name].split()
        assert value == pytest.approx(float(number) * {"B": 1, "kB": 1000}[unit], rel=0.05), name
