"""Listings of one worker's blocks, in pages.

Blocks in the index have no order, so a page could not continue after a given block. Therefore the request for the first page
copies all blocks of the worker, 32 bytes each. All pages together show the blocks at the time of the copy. A listing is dropped
after its final page, after a time without requests, and if memory is needed. A client must then start with the first page.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Final

from kvevents.client.schemas import BlocksAnswer, BlockView, TrustStatus
from kvevents.index import Block
from kvevents.service.errors import NotFoundError
from kvevents.service.fleet.registration import StreamKey


class _Listing:
    """The blocks of one worker at one moment."""

    def __init__(self, key: StreamKey, blocks: Iterable[Block], trust: Callable[[], TrustStatus]) -> None:
        self.key: Final = key
        self.used_at = 0.0
        self._numbers: Final = array("Q")
        """Four numbers per block: key, hash, index in `_tiers` (upper half) with group (lower half), and number of copies."""
        self._tiers: Final[list[str]] = []
        tier_numbers: dict[str, int] = {}
        for block in blocks:
            number = tier_numbers.get(block.tier)
            if number is None:
                number = tier_numbers[block.tier] = len(tier_numbers)
                self._tiers.append(block.tier)
            self._numbers.extend((block.key, block.hash, number << 32 | block.group, block.copies))
        self.trust: Final = trust()  # Read trust after the blocks, because trust is lowered before blocks are removed.

    def __len__(self) -> int:
        return len(self._numbers) // 4

    def page(self, start: int, limit: int) -> list[BlockView]:
        """Return at most `limit` blocks, the first of which has the index `start`."""
        numbers = self._numbers[4 * start : 4 * (start + limit)]
        return [
            BlockView(
                key=f"{numbers[offset]:016x}",
                hash=f"{numbers[offset + 1]:016x}",
                tier=self._tiers[numbers[offset + 2] >> 32],
                group=numbers[offset + 2] & 0xFFFF_FFFF,
                copies=numbers[offset + 3],
            )
            for offset in range(0, len(numbers), 4)
        ]


class BlockListings:
    """The listings of which further pages can be requested. Only one thread may use this object.

    All listings together have at most `max_blocks` blocks, unless the newest listing alone has more. A listing is dropped
    `seconds` after the newest request for one of its pages.
    """

    def __init__(self, max_blocks: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_blocks: Final = max_blocks
        self._seconds: Final = seconds
        self._clock: Final = clock
        self._listings: Final[dict[str, _Listing]] = {}
        """Listings by name, least recently used first."""

    def __len__(self) -> int:
        return len(self._listings)

    def first_page(self, key: StreamKey, blocks: Iterable[Block], limit: int, trust: Callable[[], TrustStatus]) -> BlocksAnswer:
        """Return the first page of a worker's blocks. `trust` is called after the blocks were read."""
        listing = _Listing(key, blocks, trust)
        self._expire()
        return self._page(secrets.token_hex(8), listing, 0, limit)

    def next_page(self, key: StreamKey, cursor: str, limit: int) -> BlocksAnswer:
        """Return the page at a cursor; `key` is the worker. Raises `NotFoundError` if the cursor's listing was dropped."""
        self._expire()
        name, _, start = cursor.partition(".")
        listing = self._listings.pop(name, None)
        if listing is None or listing.key != key:
            raise NotFoundError(f"unknown cursor {cursor!r} for this worker", "no-cursor", "start over without a cursor")
        return self._page(name, listing, int(start), limit)

    def _page(self, name: str, listing: _Listing, start: int, limit: int) -> BlocksAnswer:
        end = start + limit
        has_more = end < len(listing)
        if has_more:
            listing.used_at = self._clock()
            self._listings[name] = listing
            while len(self._listings) > 1 and sum(map(len, self._listings.values())) > self._max_blocks:
                del self._listings[next(iter(self._listings))]
        blocks = listing.page(start, limit)
        return BlocksAnswer(total=len(listing), blocks=blocks, next=f"{name}.{end}" if has_more else None, trust=listing.trust)

    def _expire(self) -> None:
        oldest = self._clock() - self._seconds
        for name in [name for name, listing in self._listings.items() if listing.used_at < oldest]:
            del self._listings[name]
