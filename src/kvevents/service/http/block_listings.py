"""The blocks of one worker, page by page.

Theory of operation. The index keeps blocks in no order that a page could begin at, so the first page reads all blocks of the
worker, and what does not fit into it is kept for the pages that follow, in 32 bytes a block. Each of those then costs what it
has in it, and all pages together are the blocks of one moment. A listing is dropped when its last page was read, when no page
was asked for in a while, and when newer ones need its room: then the client begins again.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Final

from kvevents.index import Block
from kvevents.service.errors import NotFoundError
from kvevents.service.registration import Key
from kvevents.service.schemas import BlocksAnswer, BlockView, TrustStatus


class _Listing:
    """The blocks of one worker at one moment."""

    def __init__(self, key: Key, blocks: Iterable[Block], trust: Callable[[], TrustStatus]) -> None:
        self.key: Final = key
        self.used_at = 0.0
        self._numbers: Final = array("Q")
        """Key, hash, number of the tier with the group, and copies, one after the other."""
        self._tiers: Final[list[str]] = []
        places: dict[str, int] = {}
        for block in blocks:
            place = places.get(block.tier)
            if place is None:
                place = places[block.tier] = len(places)
                self._tiers.append(block.tier)
            self._numbers.extend((block.key, block.hash, place << 32 | block.group, block.copies))
        self.trust: Final = trust()  # behind the blocks: trust is less before they are

    def __len__(self) -> int:
        return len(self._numbers) // 4

    def page(self, start: int, limit: int) -> list[BlockView]:
        """Some blocks, from a place on."""
        numbers = self._numbers[4 * start : 4 * (start + limit)]
        return [
            BlockView(
                key=f"{numbers[at]:016x}",
                hash=f"{numbers[at + 1]:016x}",
                tier=self._tiers[numbers[at + 2] >> 32],
                group=numbers[at + 2] & 0xFFFF_FFFF,
                copies=numbers[at + 3],
            )
            for at in range(0, len(numbers), 4)
        ]


class BlockListings:
    """Listings whose next page is awaited. Of one thread.

    Of all of them together no more than `max_blocks` are kept, except that the newest one is kept whatever it has, each for
    `seconds` after its last page.
    """

    def __init__(self, max_blocks: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_blocks: Final = max_blocks
        self._seconds: Final = seconds
        self._clock: Final = clock
        self._listings: Final[dict[str, _Listing]] = {}
        """By their names, the one used longest ago first."""

    def __len__(self) -> int:
        return len(self._listings)

    def first(self, key: Key, blocks: Iterable[Block], limit: int, trust: Callable[[], TrustStatus]) -> BlocksAnswer:
        """The first page of a worker's blocks, which can be trusted as far as `trust` returns when they were read."""
        listing = _Listing(key, blocks, trust)
        self._expire()
        return self._page(secrets.token_hex(8), listing, 0, limit)

    def next(self, key: Key, cursor: str, limit: int) -> BlocksAnswer:
        """The page that a cursor of the same worker leads to. Raises `NotFoundError` for one that leads nowhere any more."""
        self._expire()
        name, _, place = cursor.partition(".")
        listing = self._listings.pop(name, None)
        if listing is None or listing.key != key:
            raise NotFoundError(f"no listing of this worker has cursor {cursor!r}", "no-cursor", "begin again without one")
        return self._page(name, listing, int(place), limit)

    def _page(self, name: str, listing: _Listing, start: int, limit: int) -> BlocksAnswer:
        end = start + limit
        more = end < len(listing)
        if more:
            listing.used_at = self._clock()
            self._listings[name] = listing
            while len(self._listings) > 1 and sum(map(len, self._listings.values())) > self._max_blocks:
                del self._listings[next(iter(self._listings))]
        blocks = listing.page(start, limit)
        return BlocksAnswer(total=len(listing), blocks=blocks, next=f"{name}.{end}" if more else None, trust=listing.trust)

    def _expire(self) -> None:
        oldest = self._clock() - self._seconds
        for name in [name for name, listing in self._listings.items() if listing.used_at < oldest]:
            del self._listings[name]
