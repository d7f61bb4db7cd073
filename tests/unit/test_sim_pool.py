"""`kvevents.sim.pool` compared with a list and a dict (`sim_model.PlainPool`)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvevents.sim.pool import NULL_BLOCK, BlockTable, Pool
from sim_model import PlainPool, list_free_blocks

NAMES = range(1, 6)
"""A small range, so that duplicates are common."""


class PoolMachine(RuleBasedStateMachine):
    """After any operations the queue, the contents and the evicted blocks equal those of the model."""

    @initialize(size=st.integers(1, 8))
    def start(self, size: int) -> None:
        self.real, self.plain = Pool(size), PlainPool(size)
        self.tables = BlockTable(0), BlockTable(1)

    def used_blocks(self) -> list[int]:
        return [block for block, uses in sorted(self.plain.uses.items()) if uses]

    @precondition(lambda self: self.plain.queue)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.plain.queue)))
        assert self.real.allocate(count) == self.plain.allocate(count)

    @precondition(lambda self: bool(set(self.used_blocks()) - set(self.plain.contents)))
    @rule(data=st.data(), group=st.sampled_from([0, 1]))
    def name(self, data: st.DataObject, group: int) -> None:
        empty = [block for block in self.used_blocks() if block not in self.plain.contents]
        blocks = data.draw(st.permutations(empty))[: data.draw(st.integers(1, len(empty)))]
        names = data.draw(st.lists(st.sampled_from(NAMES), min_size=len(blocks), max_size=len(blocks)))
        self.real.set_contents(self.tables[group], [NULL_BLOCK, *blocks], [99, *names])
        self.plain.contents.update({block: (group, name) for block, name in zip(blocks, names, strict=True)})

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        known = sorted({*self.used_blocks(), *self.plain.contents})
        blocks = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
        assert self.real.count_unused([NULL_BLOCK, *blocks]) == sum(block in self.plain.queue for block in blocks)
        self.real.touch([NULL_BLOCK, *blocks])
        self.plain.touch(blocks)

    @precondition(lambda self: self.used_blocks())
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.used_blocks()), unique=True, min_size=1))
        self.real.give_back([NULL_BLOCK, *blocks])
        self.plain.give_back(blocks)

    @rule()
    def release_all_and_reset(self) -> None:
        """A reset is refused while a block is in use, and does not change the order of the queue."""
        while self.used_blocks():
            assert not self.real.reset()
            blocks = self.used_blocks()
            self.real.give_back(blocks)
            self.plain.give_back(blocks)
        assert self.real.reset()
        self.plain.contents.clear()

    @invariant()
    def pool_and_model_are_equal(self) -> None:
        real, plain = self.real, self.plain
        assert list_free_blocks(real) == plain.queue
        assert real.free_blocks == len(plain.queue)
        assert real.uses == [0, *(plain.uses[block] for block in range(1, plain.size + 1))]
        for group, table in enumerate(self.tables):
            found = {name: plain.find((group, name)) for name in NAMES}
            assert table.block_by_hash == {name: block for name, block in found.items() if block is not None}
            copies = {name: [b for b, held in plain.contents.items() if held == (group, name)] for name in NAMES}
            assert table.duplicates == {name: blocks[1:] for name, blocks in copies.items() if blocks[1:]}


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25)


def test_the_queue_has_each_free_block_once_however_often_it_is_used_again() -> None:
    pool, table = Pool(3), BlockTable(0)
    blocks = used_blocks(pool, table, [1, 2, 3])
    pool.give_back(blocks)
    for _ in range(20):
        pool.touch(blocks[:2])
        pool.give_back(blocks[:2])
        assert list_free_blocks(pool) == [blocks[2], *blocks[:2]]
    assert pool.allocate(3) == ([blocks[2], *blocks[:2]], [(0, 3), (0, 1), (0, 2)])


def used_blocks(pool: Pool, table: BlockTable, names: list[int]) -> list[int]:
    """Return new blocks of a sequence, which hold the given contents."""
    blocks, _ = pool.allocate(len(names))
    pool.set_contents(table, blocks, names)
    return blocks


def test_the_least_recently_used_sequence_is_evicted_first_from_its_tail() -> None:
    pool, table = Pool(4), BlockTable(0)
    first, second = used_blocks(pool, table, [11, 12]), used_blocks(pool, table, [21, 22])
    pool.give_back(reversed(first))
    pool.give_back(reversed(second))
    assert pool.allocate(4)[1] == [(0, 12), (0, 11), (0, 22), (0, 21)]


def test_a_block_that_is_used_again_is_evicted_last() -> None:
    pool, table = Pool(3), BlockTable(0)
    blocks = used_blocks(pool, table, [1, 2, 3])
    pool.give_back(blocks)
    pool.touch(blocks[:1])
    pool.give_back(blocks[:1])
    assert pool.allocate(3)[1] == [(0, 2), (0, 3), (0, 1)]


def test_blocks_without_contents_are_reused_before_all_others() -> None:
    pool, table = Pool(4), BlockTable(0)
    whole = used_blocks(pool, table, [1, 2])
    pool.give_back(whole)
    pool.touch(whole)
    halves, _ = pool.allocate(2)
    pool.give_back(whole)
    pool.give_back(halves)
    assert pool.allocate(4) == ([*halves, *whole], [(0, 1), (0, 2)])


def test_the_older_of_two_blocks_with_one_hash_is_found_and_each_is_evicted_separately() -> None:
    """If one is evicted, the other is found; a copy that is stored again is the younger one."""
    pool, table = Pool(2), BlockTable(0)
    older, younger = used_blocks(pool, table, [7]), used_blocks(pool, table, [7])
    assert [table.block_by_hash[7]] == older
    pool.give_back(older)
    assert pool.allocate(1) == (older, [(0, 7)])
    assert [table.block_by_hash[7]] == younger
    pool.set_contents(table, older, [7])
    assert [table.block_by_hash[7]] == younger
    pool.give_back(younger)
    assert pool.allocate(1) == (younger, [(0, 7)])
    assert [table.block_by_hash[7]] == older
    assert not table.duplicates


@pytest.mark.parametrize("uses", [1, 2])
def test_a_block_is_free_when_its_last_user_gives_it_back(uses: int) -> None:
    pool = Pool(1)
    blocks, _ = pool.allocate(1)
    for _ in range(uses - 1):
        pool.touch(blocks)
    for left in range(uses - 1, -1, -1):
        pool.give_back(blocks)
        assert pool.free_blocks == (left == 0)
