"""`PrefixIndex.speculate`: decisions without confirming events are kept for a while, apart from announced blocks."""

from __future__ import annotations

import pytest

from index_cases import Feed, blocks_of, cleared, store, tokens_of
from kvevents.errors import ConfigError
from kvevents.events import BlockStored
from kvevents.index import IndexLimits, Namespace, PrefixIndex
from kvevents.testing import VirtualClock

PROMPT = list(range(1, 9))
"""Four blocks of two tokens."""


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def index(clock: VirtualClock) -> PrefixIndex:
    return PrefixIndex(clock=clock)


def chain(*hashes: int) -> BlockStored:
    """A store of as many blocks of `PROMPT` as there are hashes, from the root."""
    return store(hashes, PROMPT[: 2 * len(hashes)], 2)


def expected(index: PrefixIndex, prompt: list[int] = PROMPT, scope: Namespace | None = None) -> dict[tuple[str, int], int]:
    """By worker its tokens, decisions included."""
    return {(hit.source, hit.rank): hit.tokens for hit in index.match(prompt, scope, overlay=True)}


def decided(index: PrefixIndex) -> tuple[int, int, int]:
    """Blocks of the overlay, confirmed and expired decisions."""
    stats = index.stats()
    return stats.speculated, stats.confirmed, stats.expired


def test_speculation_counts_only_where_asked_for_and_for_a_while(index: PrefixIndex, clock: VirtualClock) -> None:
    """A prompt just routed is expected to be cached soon; the confirmed state never knows of it."""
    feed = Feed(index)
    feed(chain(1))
    blocks, digest = blocks_of(index, feed.worker), index.digest("a")

    def seen() -> tuple[int, int]:
        return tokens_of(index, PROMPT), expected(index).get(("a", 0), 0)

    assert seen() == (2, 2)
    index.speculate(("a", 0), PROMPT[:7], ttl=2.0)
    assert seen() == (2, 6)
    assert (blocks_of(index, feed.worker), index.digest("a")) == (blocks, digest)
    clock.advance(1.9)
    index.speculate(("a", 0), PROMPT[:5], ttl=2.0)
    assert seen() == (2, 6)
    clock.advance(0.2)
    assert seen() == (2, 4)
    feed(chain(1, 2, 3))
    assert seen() == (6, 6), "the confirmed state counts where it is longer"
    clock.advance(2.0)
    assert seen() == (6, 6)
    feed(cleared())
    assert seen() == (0, 0)


def test_speculation_keeps_to_its_namespace_its_model_and_its_worker(index: PrefixIndex) -> None:
    Feed(index)(chain(1))
    Feed(index, "b")(chain(1))
    index.speculate(("a", 0), PROMPT, Namespace(salt="t"))
    assert expected(index) == {("a", 0): 2, ("b", 0): 2}
    assert expected(index, scope=Namespace(salt="t")) == {("a", 0): 8}
    index.set_model("a", "llama")
    assert expected(index, scope=Namespace(salt="t")) == {}
    assert expected(index, scope=Namespace(model="llama", salt="t")) == {("a", 0): 8}


def test_decisions_are_counted_by_whether_their_prompt_was_held_when_they_ended(
    index: PrefixIndex, clock: VirtualClock
) -> None:
    """By the worker they were made for: that another one holds the prompt confirms nothing."""
    Feed(index, "b")(chain(1, 2, 3, 4))
    Feed(index)(chain(1))
    for worker, prompt in (("a", PROMPT), ("b", PROMPT), ("absent", PROMPT), ("a", [7, 7])):
        index.speculate((worker, 0), prompt)
    index.speculate("a", PROMPT[:1])
    assert decided(index) == (13, 0, 0), "a prompt shorter than a block decides nothing"
    clock.advance(2.0)
    assert decided(index) == (0, 1, 3)


def test_a_removed_worker_is_expected_to_hold_nothing(index: PrefixIndex) -> None:
    """Its decisions are removed with its blocks, for one rank or for all ranks of the source; those of other workers stay."""
    for source, rank in (("a", 0), ("a", 1), ("b", 0)):
        Feed(index, source, rank)(chain(1))
        index.speculate((source, rank), PROMPT)
    index.speculate(("a", 7), PROMPT)
    index.remove_worker("a", 1)
    assert expected(index) == {("a", 0): 8, ("a", 7): 8, ("b", 0): 8}
    index.remove_worker("a")
    assert expected(index) == {("b", 0): 8}
    assert decided(index) == (4, 0, 0), "forgotten, which is neither confirmed nor expired"
    index.remove_worker(("b", 0))
    assert (expected(index), decided(index)) == ({}, (0, 0, 0))


def test_the_oldest_decisions_make_room_and_leave_what_others_share_with_them(clock: VirtualClock) -> None:
    """Three decisions with one beginning, of which two fit; the oldest, though believed for longest, ends first."""
    index = PrefixIndex(clock=clock, limits=IndexLimits(max_speculated=8))
    Feed(index, "b")(store([1], [9, 9], 2))
    index.speculate("a", PROMPT, ttl=60)
    index.speculate("a", [*PROMPT[:4], 50, 51, 52, 53], ttl=2)
    assert expected(index) == {("a", 0): 8}
    index.speculate("a", PROMPT[:6], ttl=1)
    assert decided(index) == (7, 0, 1)
    assert expected(index) == {("a", 0): 6}
    assert expected(index, [*PROMPT[:4], 50, 51, 52, 53]) == {("a", 0): 8}
    clock.advance(1)
    assert expected(index) == {("a", 0): 4}
    clock.advance(1)
    assert (expected(index), decided(index)) == ({}, (0, 0, 3))


@pytest.mark.parametrize("ttl", [0, -1, float("nan")])
def test_a_time_that_cannot_be_is_refused(index: PrefixIndex, ttl: float) -> None:
    with pytest.raises(ConfigError, match="ttl"):
        index.speculate("a", PROMPT, ttl=ttl)
