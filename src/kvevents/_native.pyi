"""The compiled part of `kvevents.index`; see native/python/src/python.rs."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from kvevents.index.namespace import Namespace
from kvevents.index.reports import Applied
from kvevents.stream import RawBatch

SCRATCH_BYTES_PER_PAYLOAD_BYTE: int

class WorkerMatch:
    """What one worker holds of a prompt."""

    @property
    def source(self) -> str:
        """Name of the engine."""
    @property
    def rank(self) -> int:
        """Data-parallel rank."""
    @property
    def tokens(self) -> int:
        """Tokens of the longest prefix that it holds, on whatever tiers."""
    @property
    def tiers(self) -> dict[str, int]:
        """Tokens by tier, cumulative."""

class Match:
    """Workers that hold a beginning of a prompt."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[WorkerMatch]: ...
    @property
    def best(self) -> WorkerMatch | None:
        """The worker with the longest prefix."""
    def get(self, source: str, rank: int = 0) -> WorkerMatch | None:
        """What one worker holds, or None."""
    def rows(self) -> list[tuple[str, int, int, int, int, int]]:
        """Per worker `(source, rank, gpu, cpu, disk, tokens)`, tiers cumulative: the same without an object for each."""

class Listing:
    """The blocks of a stream at one moment, each of which is handed out once."""

    def take(self, most: int) -> list[tuple[int, int, str, int, int]]:
        """Per block and plane `(key, hash, tier, group, copies)`: the next ones, at most `most`; empty behind the last."""

class NativeIndex:
    """The native part of `kvevents.index.PrefixIndex`."""

    def __new__(
        cls,
        wire_limits: tuple[int, int, int, int, int, int],
        memory_limit: int | None,
        limits: dict[str, int],
        outcomes: tuple[Applied, Applied, Applied, Applied],
    ) -> Self: ...
    def apply_payload(self, stream: tuple[str, int] | str, incarnation: int, seq: int, payload: bytes) -> Applied:
        """Apply the payload of one batch as the engine sent it."""
    def match(self, tokens: Any, namespace: Namespace | None = None, *, overlay: bool = False) -> Match:
        """How long a prefix of `tokens` each worker holds."""
    def match_many(self, prompts: list[Any], namespace: Namespace | None = None) -> list[Match]:
        """`match` for each of several prompts of one namespace."""
    def match_keys(self, keys: Any, block_size: int | None = None, namespace: Namespace | None = None) -> Match:
        """The same for rolling keys that the caller has, from the root on."""
    def _apply(self, source: str, rank: int, incarnation: int, seq: int, payload: bytes) -> Applied | None: ...
    def _apply_many(self, batches: list[RawBatch]) -> list[Applied]: ...
    def _apply_run(
        self, source: str, rank: int, incarnation: int, first: int, payloads: Sequence[bytes]
    ) -> tuple[int, list[tuple[int, Applied]]]: ...
    def _gap(self, source: str, rank: int, incarnation: int, last: int) -> Applied: ...
    def _reset(self, source: str, rank: int, incarnation: int) -> Applied: ...
    def _label(self, source: str, model: str | None) -> None: ...
    def _remove(self, source: str, rank: int | None) -> int: ...
    def _admit(self, source: str, rank: int) -> None: ...
    def _workers(self) -> list[dict[str, Any]]: ...
    def _worker(self, source: str, rank: int) -> dict[str, Any] | None: ...
    def _totals(self) -> dict[str, Any]: ...
    def _blocks(self, source: str, rank: int) -> Listing | None: ...
    def _key_of(self, source: str, rank: int, block_hash: int) -> int | None: ...
    def _digest(self, source: str, rank: int) -> int | None: ...
    def _speculate(self, source: str, rank: int, tokens: Any, namespace: Namespace | None, now: float, ttl: float) -> None: ...
    def _snapshot(self, path: Path, workers: list[tuple[str, int]] | None) -> None: ...
    def _restore(self, read: Callable[[int], bytes]) -> None: ...
    def _absorb(self, read: Callable[[int], bytes]) -> list[tuple[str, int]]: ...

class Compactor:
    """Folds the payloads of one stream into what is still live. Calls of several threads wait for each other."""

    def __new__(cls, wire_limits: tuple[int, int, int, int, int, int]) -> Self: ...
    def fold(self, payload: bytes, respelled: bool = False) -> bool:
        """Take in the next payload. False where the scanner is not certain of it, and nothing has changed.

        `respelled` is for `kvevents.wire.respelling.respelled` of its events, which may be larger than what peers may send.
        """
    def fold_many(self, batches: list[tuple[int, bytes]]) -> int:
        """Fold payloads up to the first one that the scanner is not certain of, and return how many.

        Other threads run meanwhile where that takes long. Numbers are not looked at.
        """
    def events(self) -> list[tuple[Any, ...]] | None:
        """What rebuilds the state after a clear; None when `lost`, or when no order of events can say it.

        `("stored", hashes, parent, tokens, pairs, block_size, lora_id, medium, lora_name, extra_keys, group_idx, kind, window,
        locality, ownership, cache_salt, block_keys)`: blocks, each the parent of the next. `tokens` are 32-bit numbers,
        little-endian; when `pairs`, two for each token id, which is EAGLE's `[t, next]`. `extra_keys` is msgpack, an entry per
        block as it came. Without tokens, copies of known blocks; with `block_keys`, a key per block, blocks that were told by
        their keys and have no parent.

        `("removed", hashes, medium, group_idx, locality, ownership)`: blocks that only held a place in a chain.
        """
    def payloads(self, limit: int, ts: float) -> list[bytes] | None:
        """What `events` tells, as payloads for `fold(payload, respelled=True)`, in order. Other threads run meanwhile.

        Each has at most `limit` bytes, but for a single block that takes more; `ts` is their time, in seconds. The first one
        begins with a clear of everything, so a compactor that folds them is not `partial`. Raises `ValueError` for a limit or a
        time that is none.
        """
    def miss(self) -> None:
        """Note that some of the stream was never seen. What is known stays known; see `partial`."""
    def lose(self, reason: str) -> None:
        """Give up until the stream clears everything. `reason` is `batches`, `payloads` or `digests`."""
    def clear(self) -> None:
        """Forget everything."""
    @property
    def partial(self) -> bool:
        """Whether something was missed since the stream cleared everything last, or `clear`."""
    @property
    def live(self) -> int:
        """Blocks with at least one copy."""
    @property
    def nodes(self) -> int:
        """Blocks kept: live ones, dead ancestors, and orphans."""
    @property
    def bytes(self) -> int:
        """Heap memory, about."""
    @property
    def lost(self) -> str | None:
        """What there was too much of, or what `lose` was told; nothing is kept until the stream clears everything."""

class Zmtp:
    def __new__(cls, most: int) -> Self: ...
    def receive(
        self, descriptor: int, topic: bytes, first: int, due: int, limit: int
    ) -> tuple[list[bytes], list[list[bytes]], list[bytes], bool, bool, str | None]: ...

class Libzmq:
    """See `kvevents.bulk`. Raises `OSError` where a file that is loaded does not lead to libzmq."""

    def __new__(cls, module: str) -> Self: ...
    def send(self, socket: int, topic: bytes, batches: Sequence[tuple[int, bytes]]) -> int: ...
    def receive(
        self, socket: int, topic: bytes, first: int, due: int, limit: int
    ) -> tuple[list[bytes], list[list[bytes]], bool]: ...

def hashes(tokens: Any, block_size: int, namespace: Namespace | None, eagle: bool, chained: bool) -> list[int]: ...
def chained(hashes: list[int]) -> list[int]: ...
def lifted(text: bytes, name: str) -> tuple[bytes, bytes] | None: ...
def crc32_of(parts: Sequence[bytes], before: int) -> int: ...
def pour(
    descriptor: int, topic: bytes, batches: Sequence[tuple[int, bytes]], first: int, sent: int
) -> tuple[int, int, int]: ...
def give_way(descriptor: int, seconds: float) -> bool: ...
def look_for(descriptor: int, seconds: float) -> bool: ...
def scanned(wire_limits: tuple[int, ...], payload: bytes) -> list[dict[str, Any]] | None:
    """The events of a payload as the scanner reads them; None if it leaves them to Python. Only builds for tests have it."""

def decoded(
    wire_limits: tuple[int, ...], max_rejected: int, payload: bytes
) -> tuple[float, int | None, list[dict[str, Any]], list[tuple[str, int | None, int]], bytes]:
    """A payload as the careful decoder reads it: timestamp, rank, events, what was set aside, and the events for the scanner.

    What was set aside is `(reason, index, count)` each. Only builds for tests have it.
    """
