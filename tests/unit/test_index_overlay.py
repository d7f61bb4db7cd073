"""`PrefixIndex.speculate` stores routing decisions until they expire, apart from announced blocks."""

from __future__ import annotations

import pytest

from index_cases import Feed, blocks_of, cleared, removal, store, tokens_of
from kvevents.errors import ConfigError
from kvevents.events import BlockStored
from kvevents.index import IndexLimits, Namespace, PrefixIndex
from kvevents.stream import Reset
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
    """Return a store of the first blocks of `PROMPT`, one for each hash."""
    return store(hashes, PROMPT[: 2 * len(hashes)], 2)


def expected(index: PrefixIndex, prompt: list[int] = PROMPT, scope: Namespace | None = None) -> dict[tuple[str, int], int]:
    """Return the matched tokens of each worker, with speculative entries."""
    return {(hit.source, hit.rank): hit.tokens for hit in index.match(prompt, scope, overlay=True)}


def decision_counts(index: PrefixIndex) -> tuple[int, int, int]:
    """Return the number of blocks in the overlay, of confirmed decisions and of expired decisions."""
    stats = index.stats()
    return stats.speculated, stats.confirmed, stats.expired


def test_speculation_counts_only_in_overlay_matches_and_until_it_expires(index: PrefixIndex, clock: VirtualClock) -> None:
    """A prompt that was just routed is expected to be cached soon. The confirmed state does not contain it."""
    feed = Feed(index)
    feed(chain(1))
    blocks, digest = blocks_of(index, feed.worker), index.digest("a")

    def confirmed_and_expected() -> tuple[int, int]:
        return tokens_of(index, PROMPT), expected(index).get(("a", 0), 0)

    assert confirmed_and_expected() == (2, 2)
    index.speculate(("a", 0), PROMPT[:7], ttl=2.0)
    assert confirmed_and_expected() == (2, 6)
    assert (blocks_of(index, feed.worker), index.digest("a")) == (blocks, digest)
    clock.advance(1.9)
    index.speculate(("a", 0), PROMPT[:5], ttl=2.0)
    assert confirmed_and_expected() == (2, 6)
    clock.advance(0.2)
    assert confirmed_and_expected() == (2, 4)
    feed(chain(1, 2, 3))
    assert confirmed_and_expected() == (6, 6), "the confirmed state counts where it is longer"
    clock.advance(2.0)
    assert confirmed_and_expected() == (6, 6)
    feed(cleared())
    assert confirmed_and_expected() == (0, 0)


def test_speculation_counts_only_for_its_namespace_model_and_worker(index: PrefixIndex) -> None:
    Feed(index)(chain(1))
    Feed(index, "b")(chain(1))
    index.speculate(("a", 0), PROMPT, Namespace(salt="t"))
    assert expected(index) == {("a", 0): 2, ("b", 0): 2}
    assert expected(index, scope=Namespace(salt="t")) == {("a", 0): 8}
    index.set_model("a", "llama")
    assert expected(index, scope=Namespace(salt="t")) == {}
    assert expected(index, scope=Namespace(model="llama", salt="t")) == {("a", 0): 8}


def test_expected_tokens_are_never_certain(index: PrefixIndex) -> None:
    Feed(index)(chain(1))
    Feed(index, "b")(chain(1, 2, 3, 4))
    for source in ("a", "b", "c"):
        index.speculate((source, 0), PROMPT)
    found = {hit.source: (hit.tokens, hit.certain, hit.is_certain) for hit in index.match(PROMPT, overlay=True)}
    assert found == {"a": (8, 2, False), "b": (8, 8, True), "c": (8, 0, False)}
    assert {hit.source: hit.is_certain for hit in index.match(PROMPT)} == {"a": True, "b": True}


@pytest.mark.parametrize("how", ["clear", "restart", "reset", "confirmed", "confirmed block by block", "in another size too"])
def test_a_decision_ends_with_a_clear_a_restart_or_its_confirmation(index: PrefixIndex, how: str) -> None:
    """From then on the events of the worker say what it holds, also when it evicts the prompt again."""
    feed, other = Feed(index), Feed(index, "b")
    feed(chain(1))
    other(chain(1))
    if how == "in another size too":
        Feed(index, "c")(store([1], [1, 2, 3], 3))
    for worker in ("a", "b"):
        index.speculate((worker, 0), PROMPT)
    match how:
        case "clear":
            feed(cleared())
        case "restart":
            feed = Feed(index, incarnation=1)
            feed(chain(1))
        case "reset":
            index.apply(Reset("a", 0, 1, "restart"))
        case "confirmed block by block":
            for count in (2, 3, 4):
                feed(chain(*range(1, count + 1)))
        case _:
            feed(chain(1, 2, 3, 4))
    if how not in {"clear", "restart", "reset"}:
        assert expected(index)["a", 0] == 8
        feed(removal(4, 3, 2, 1))
    held = 2 if how == "restart" else 0
    assert expected(index).get(("a", 0), 0) == held
    assert expected(index)["b", 0] == 8, "decisions for other workers stay"


def test_a_clear_of_one_tier_ends_no_decision(index: PrefixIndex) -> None:
    feed = Feed(index)
    feed(chain(1))
    index.speculate(("a", 0), PROMPT)
    feed(cleared(medium="CPU"), chain(1, 2))
    assert expected(index) == {("a", 0): 8}


def test_a_decision_that_ends_counts_as_confirmed_only_if_its_worker_holds_the_prompt(
    index: PrefixIndex, clock: VirtualClock
) -> None:
    """A prompt that another worker holds confirms nothing."""
    Feed(index, "b")(chain(1, 2, 3, 4))
    Feed(index)(chain(1))
    for worker, prompt in (("a", PROMPT), ("b", PROMPT), ("absent", PROMPT), ("a", [7, 7])):
        index.speculate((worker, 0), prompt)
    index.speculate("a", PROMPT[:1])
    assert decision_counts(index) == (13, 0, 0), "a prompt shorter than a block decides nothing"
    clock.advance(2.0)
    assert decision_counts(index) == (0, 1, 3)


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
    assert decision_counts(index) == (4, 0, 0), "forgotten, which is neither confirmed nor expired"
    index.remove_worker(("b", 0))
    assert (expected(index), decision_counts(index)) == ({}, (0, 0, 0))


def test_the_oldest_decisions_are_dropped_first_and_shared_blocks_stay(clock: VirtualClock) -> None:
    """Two of three decisions with a common prefix fit. The oldest ends first, although its ttl is the longest."""
    index = PrefixIndex(clock=clock, limits=IndexLimits(max_speculated=8))
    Feed(index, "b")(store([1], [9, 9], 2))
    index.speculate("a", PROMPT, ttl=60)
    index.speculate("a", [*PROMPT[:4], 50, 51, 52, 53], ttl=2)
    assert expected(index) == {("a", 0): 8}
    index.speculate("a", PROMPT[:6], ttl=1)
    assert (*decision_counts(index), index.stats().displaced) == (7, 0, 0, 1), "it ended before its time"
    assert expected(index) == {("a", 0): 6}
    assert expected(index, [*PROMPT[:4], 50, 51, 52, 53]) == {("a", 0): 8}
    clock.advance(1)
    assert expected(index) == {("a", 0): 4}
    clock.advance(1)
    assert (expected(index), decision_counts(index)) == ({}, (0, 0, 2))


def test_decisions_have_keys_of_the_block_sizes_of_their_model_only(index: PrefixIndex) -> None:
    """Workers of another model have blocks of one token: they neither fill the overlay nor displace decisions."""
    index.set_model("a", "A")
    index.set_model("b", "B")
    Feed(index, "a")(store([1], [90, 91], 2))
    Feed(index, "b")(store([1], [90], 1))
    index.speculate("a", PROMPT, Namespace(model="A"))
    assert index.stats().speculated == 4
    assert expected(index, scope=Namespace(model="A")) == {("a", 0): 8}
    assert expected(index, scope=Namespace(model="B")) == {}


@pytest.mark.parametrize("ttl", [0, -1, float("nan")])
def test_an_invalid_ttl_is_rejected(index: PrefixIndex, ttl: float) -> None:
    with pytest.raises(ConfigError, match="ttl"):
        index.speculate("a", PROMPT, ttl=ttl)
