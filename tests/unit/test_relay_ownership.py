"""If several upstreams share one stream, a clear of one upstream does not remove the blocks of the others."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.index import PrefixIndex
from kvevents.relay.upstreams import UpstreamBlocks
from kvevents.stream import Batch

MEDIA = st.sampled_from(["GPU", "CPU"])
GROUPS = st.sampled_from([None, 0, 1])
HASHES = st.lists(st.integers(0, 5), min_size=1, max_size=3)
STORES = st.builds(
    lambda hashes, medium, group: BlockStored(hashes, None, [], 4, medium=medium, group_idx=group), HASHES, MEDIA, GROUPS
)
REMOVALS = st.builds(BlockRemoved, HASHES, MEDIA, GROUPS)
SCOPES: list[dict[str, Any] | None] = [
    None,
    {"medium": "*"},
    {"medium": "GPU"},
    {"group_idx": 1},
    {"medium": "CPU", "group_idx": 0},
]
CLEARS = st.sampled_from(SCOPES).map(lambda scope: AllBlocksCleared(unknown_fields=scope))
EVENTS = st.lists(st.one_of(STORES, REMOVALS, CLEARS), max_size=40)


def is_cleared(scope: dict[str, Any] | None, medium: str | None, group: int) -> bool:
    """Return whether a clear of this scope is of a placement. Without a scope it leaves tiers below the GPU as they are."""
    if scope is None:
        return medium != "CPU"
    return scope.get("medium") in {None, "*", medium} and scope.get("group_idx", group) == group


def count_copies(events: list[KVEvent]) -> Counter[tuple[int, str | None, int]]:
    """Count copies by block and placement, as a consumer does."""
    copies: Counter[tuple[int, str | None, int]] = Counter()
    for event in events:
        if isinstance(event, AllBlocksCleared):
            for place in [place for place in copies if is_cleared(event.unknown_fields, place[1], place[2])]:
                del copies[place]
            continue
        for each in event.block_hashes:
            place = (each, event.medium, event.group_idx or 0)
            copies[place] += 1 if isinstance(event, BlockStored) else -1
            if copies[place] <= 0:
                del copies[place]
    return copies


@given(st.lists(st.tuples(st.integers(0, 1), EVENTS), max_size=12))
def test_a_shared_stream_holds_what_all_its_upstreams_hold(history: list[tuple[int, list[KVEvent]]]) -> None:
    upstreams = (UpstreamBlocks(), UpstreamBlocks())
    own_events: tuple[list[KVEvent], list[KVEvent]] = ([], [])
    shared: list[KVEvent] = []
    for which, events in history:
        own_events[which].extend(events)
        forwarded = upstreams[which].apply(events)
        shared += forwarded
        assert not any(isinstance(event, AllBlocksCleared) for event in forwarded)
        assert len(upstreams[which]) == len(count_copies(own_events[which]))
    assert count_copies(shared) == count_copies(own_events[0]) + count_copies(own_events[1])


@given(EVENTS, CLEARS)
def test_a_dump_restores_the_same_blocks(events: list[KVEvent], clear: AllBlocksCleared) -> None:
    first = UpstreamBlocks()
    first.apply(events)
    second = UpstreamBlocks()
    for piece in msgspec.msgpack.decode(msgspec.msgpack.encode(first.dump())):
        second.load(piece)
    assert len(second) == len(first)
    assert count_copies([*_stores(second), *second.apply([clear])]) == count_copies([*_stores(first), *first.apply([clear])])


def _stores(blocks: UpstreamBlocks) -> list[KVEvent]:
    found: list[KVEvent] = []
    for plane, hashes, counts in blocks.dump():
        for each, count in zip(hashes, counts, strict=True):
            found += [BlockStored([each], None, [], 4, medium=plane[0], group_idx=plane[1])] * count
    return found


def test_an_upstream_without_blocks_has_no_removals() -> None:
    blocks = UpstreamBlocks()
    assert blocks.clear() == []
    blocks.apply([BlockStored([1, 1, 2], None, [], 4, medium="GPU", locality="LOCAL", ownership="tier")])
    assert blocks.clear() == [BlockRemoved([1, 1, 2], "GPU", 0, "LOCAL", "tier")]
    assert blocks.clear() == []
    assert len(blocks) == 0


def test_a_removal_means_blocks_of_what_only_one_of_both_states() -> None:
    blocks = UpstreamBlocks()
    blocks.apply(
        [BlockStored([1, 2, 3], None, [], 4, medium="GPU", locality="LOCAL"), BlockStored([3], None, [], 4, medium="gpu")]
    )
    removals = [BlockRemoved([1], "GPU", 0, "LOCAL"), BlockRemoved([3], "gpu", 0)]
    assert blocks.apply([BlockRemoved([1, 3], "gpu"), BlockRemoved([2], "GPU", 0, "REMOTE")]) == [*reversed(removals)]


@pytest.mark.parametrize("medium", ["gpu", "npu:0", "VRAM"])
def test_a_clear_by_another_name_of_the_tier_removes_the_blocks_of_an_upstream(medium: str) -> None:
    """A tier that the upstream never used can be any, so it clears like a clear without a tier."""
    blocks = UpstreamBlocks()
    blocks.apply([BlockStored([1], None, [], 4, medium="GPU")])
    assert blocks.apply([AllBlocksCleared({"medium": medium})]) == [BlockRemoved([1], "GPU", 0)]


def test_after_a_clear_of_one_upstream_its_lower_blocks_might_be_gone() -> None:
    """The blocks of the other upstream stay certain. A store makes a block certain again, and a removal removes the only
    copy."""
    upstreams, index = (UpstreamBlocks(), UpstreamBlocks()), PrefixIndex()
    numbers = itertools.count()

    def forward(which: int, *events: KVEvent) -> tuple[int, int]:
        """Return the tokens that the shared stream holds, and how many are certain."""
        batch = Batch("relay", 0, 0, next(numbers), 1.0, upstreams[which].apply(events), False)
        index.apply(batch)
        match = index.match([1, 2, 3, 4]).best
        return (0, 0) if match is None else (match.tokens, match.certain)

    host = [BlockStored([hash_], parent, [hash_ * 2 - 1, hash_ * 2], 2, medium="CPU") for hash_, parent in ((1, None), (2, 1))]
    assert forward(0, *host) == (4, 4)
    assert forward(0, AllBlocksCleared(), AllBlocksCleared()) == (4, 0)
    assert forward(1, host[0]) == (4, 2)
    assert forward(0, host[0], host[1]) == (4, 4)
    assert forward(0, BlockRemoved([2], "CPU")) == (2, 2)
    assert forward(1, AllBlocksCleared({"medium": "*"})) == (2, 0), "the shared stream does not say whose copy was certain"
    assert forward(0, AllBlocksCleared({"medium": "*"})) == (0, 0)
