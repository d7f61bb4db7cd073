"""`kvevents.service.block_listings`: a page costs time in proportion to its size, and stored listings are bounded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.client.schemas import TrustStatus
from kvevents.index import Block
from kvevents.service.block_listings import BlockListings
from kvevents.service.errors import NotFoundError

BIG = st.integers(0, 2**64 - 1)
BLOCKS = st.lists(
    st.builds(
        Block, BIG, BIG, st.sampled_from(["gpu", "cpu", "disk", "NVFS"]), st.integers(0, 2**32 - 1), st.integers(1, 2**32)
    ),
    max_size=30,
)
A, B = ("a", 0), ("b", 0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def trust() -> TrustStatus:
    return TrustStatus("EXACT")


def make_blocks(count: int, start: int = 0) -> list[Block]:
    return [Block(number, number, "gpu", 0, 1, 1) for number in range(start, start + count)]


@given(BLOCKS, st.integers(1, 12))
def test_pages_have_every_block_once(blocks: list[Block], limit: int) -> None:
    """All pages together are the listing, no page exceeds the limit, and nothing is stored after the last page."""
    listings = BlockListings(1000, 60)
    page = listings.first_page(A, iter(blocks), limit, trust)
    found = list(page.blocks)
    while page.next is not None:
        assert len(page.blocks) == limit
        page = listings.next_page(A, page.next, limit)
        found += page.blocks
    assert [(int(each.key, 16), int(each.hash, 16), each.tier, each.group, each.copies) for each in found] == [
        (block.key, block.hash, block.tier, block.group, block.copies) for block in blocks
    ]
    assert (page.total, len(listings)) == (len(blocks), 0)


def test_blocks_are_read_for_the_first_page_only() -> None:
    read = 0

    def blocks() -> Iterator[Block]:
        nonlocal read
        for block in make_blocks(100):
            read += 1
            yield block

    listings = BlockListings(1000, 60)
    page = listings.first_page(A, blocks(), 10, trust)
    while page.next is not None:
        page = listings.next_page(A, page.next, 10)
    assert read == 100


def test_stored_listings_are_bounded() -> None:
    """Listings are limited by number of blocks, least recently used first, and by age; a single listing may be larger."""
    clock = Clock()
    listings = BlockListings(100, 60, clock)
    first, second = (listings.first_page(A, make_blocks(40), 10, trust) for _ in range(2))
    first = listings.next_page(A, first.next or "", 10)
    third = listings.first_page(B, make_blocks(40), 10, trust)
    assert len(listings) == 2
    with pytest.raises(NotFoundError, match="unknown cursor"):
        listings.next_page(A, second.next or "", 10)
    assert listings.next_page(A, first.next or "", 10).blocks[0].key == f"{20:016x}"
    clock.now += 61
    with pytest.raises(NotFoundError):
        listings.next_page(B, third.next or "", 10)
    large = listings.first_page(A, make_blocks(1000), 10, trust)
    assert len(listings) == 1
    assert listings.next_page(A, large.next or "", 10).total == 1000


def test_a_cursor_belongs_to_its_worker() -> None:
    listings = BlockListings(100, 60)
    page = listings.first_page(A, make_blocks(20), 10, trust)
    for cursor in (page.next or "", "0" * 16 + ".10"):
        with pytest.raises(NotFoundError):
            listings.next_page(B, cursor, 10)
