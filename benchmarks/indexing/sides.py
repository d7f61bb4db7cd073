"""Who is compared within one process: our index and Dynamo's `RadixTree`, driven alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from benchmarks.indexing.workload import Chain, Event

Lookup = Callable[[], Any]


class Side(Protocol):
    """An index, and the form in which it takes events."""

    def encoded(self, event: Event) -> bytes: ...

    def apply(self, worker: int, events: Iterable[bytes]) -> None: ...

    def lookups(self, whole: Chain) -> dict[str, Lookup]:
        """By name: `list` is from a list of token ids to an answer, which `list_read` reads too; `array` is from a buffer."""


class Ours:
    """Payloads from the wire, tokens and all."""

    def __init__(self) -> None:
        from benchmarks.indexing.payloads import in_maps  # noqa: PLC0415 - each process loads only what its trial is about
        from kvevents.index import PrefixIndex  # noqa: PLC0415 - as above

        self.index = PrefixIndex()
        self.encoded = in_maps
        self._seq = 0

    def apply(self, worker: int, events: Iterable[bytes]) -> None:
        apply, seq, stream = self.index.apply_payload, self._seq, (f"worker-{worker}", 0)
        for payload in events:
            apply(stream, 0, seq, payload)
            seq += 1
        self._seq = seq

    def lookups(self, whole: Chain) -> dict[str, Lookup]:
        import numpy as np  # noqa: PLC0415 - as above

        match, tokens, listed = self.index.match, np.array(whole.tokens, dtype=np.uint32), whole.tokens.tolist()
        return {
            "list": lambda: match(listed),
            "list_read": lambda: [hit.tokens for hit in match(listed)],
            "array": lambda: match(tokens),
        }


class Dynamo:
    """JSON with the hash of each block's tokens."""

    def __init__(self) -> None:
        from dynamo.llm import RadixTree  # type: ignore[import-not-found] # noqa: PLC0415 - as above

        from benchmarks.indexing.radix import in_json  # noqa: PLC0415 - as above

        self._tree = RadixTree()
        self.encoded = in_json

    def apply(self, worker: int, events: Iterable[bytes]) -> None:
        apply = self._tree.apply_event
        for event in events:
            apply(worker, event)

    def lookups(self, whole: Chain) -> dict[str, Lookup]:
        from dynamo.llm import compute_block_hash_for_seq  # noqa: PLC0415 - as above

        find, size, listed = self._tree.find_matches, whole.block_size, whole.tokens.tolist()
        return {
            "list": lambda: find(compute_block_hash_for_seq(listed, size)),
            "list_read": lambda: list(find(compute_block_hash_for_seq(listed, size)).scores.items()),
        }


def _pinned() -> Dynamo:
    """Every call of a `RadixTree` goes to its thread and back: on one CPU that costs least."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return Dynamo()


SIDES: Final[dict[str, Callable[[], Side]]] = {"ours": Ours, "dynamo-pinned": _pinned}
