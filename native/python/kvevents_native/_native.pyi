"""The compiled part of `kvevents.index`, `kvevents.routing` and `kvevents.service`; see native/python/src/lib.rs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Self

from kvevents.index.namespace import Namespace
from kvevents.index.prefix_index import ApplyResult
from kvevents.stream import RawBatch

SCRATCH_BYTES_PER_PAYLOAD_BYTE: int
VERSION: str
"""Version of the package `kvevents-native`."""
TIERS: list[str]

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
    def certain(self) -> int:
        """Tokens of the longest prefix that it certainly holds: fewer than `tokens` if some of its blocks might be gone."""
    @property
    def is_certain(self) -> bool:
        """Whether it certainly holds all that this says, on each tier."""
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
    def rows(self) -> list[tuple[str, int, int, int, int, int, int, bool]]:
        """Per worker `(source, rank, gpu, cpu, disk, tokens, certain, is_certain)`, tiers cumulative."""

class Listing:
    """The blocks of a stream at one moment, each of which is handed out once."""

    def take(self, most: int) -> list[tuple[int, int, str, int, int, int]]:
        """The next blocks, at most `most`; empty after the last.

        Per block and placement `(key, hash, tier, group, most copies, least copies)`.
        """

class NativeIndex:
    """The native part of `kvevents.index.PrefixIndex`."""

    def __new__(
        cls,
        wire_limits: tuple[int, int, int, int, int, int],
        memory_limit: int | None,
        limits: dict[str, int],
        outcomes: tuple[ApplyResult, ApplyResult, ApplyResult, ApplyResult],
    ) -> Self: ...
    def apply_payload(self, stream: tuple[str, int] | str, incarnation: int, seq: int, payload: bytes) -> ApplyResult:
        """Apply the payload of one batch as the engine sent it."""
    def match(
        self, tokens: Any, namespace: Namespace | None = None, *, overlay: bool = False, max_tokens: int | None = None
    ) -> Match:
        """How long a prefix of `tokens` each worker holds."""
    def match_many(self, prompts: list[Any], namespace: Namespace | None = None) -> list[Match]:
        """`match` for each of several prompts of one namespace."""
    def match_keys(self, keys: Any, block_size: int | None = None, namespace: Namespace | None = None) -> Match:
        """The same for rolling keys that the caller has, from the root on."""
    def _apply(
        self, stream: tuple[str, int], incarnation: int, seq: int, payload: bytes, loses_events: bool
    ) -> ApplyResult | None: ...
    def _apply_many(self, batches: list[RawBatch]) -> list[ApplyResult]: ...
    def _apply_run(
        self, source: str, rank: int, incarnation: int, first: int, payloads: Sequence[bytes]
    ) -> dict[int, ApplyResult]: ...
    def _compare(
        self, source: str, rank: int, stated: int | None, digest: str | None, attestation: int | None
    ) -> tuple[bool | None, bool | None]: ...
    def _gap(self, source: str, rank: int, incarnation: int, last: int) -> ApplyResult: ...
    def _reset(self, source: str, rank: int, incarnation: int) -> ApplyResult: ...
    def _label(self, source: str, model: str | None) -> None: ...
    def _set_drafts(self, source: str, groups: list[int] | None) -> None: ...
    def _replace_lora(self, source: str, lora: str) -> None: ...
    def _remove(self, source: str, rank: int | None) -> int: ...
    def _admit(self, source: str, rank: int) -> None: ...
    def _workers(self) -> list[dict[str, Any]]: ...
    def _worker(self, source: str, rank: int) -> dict[str, Any] | None: ...
    def _totals(self) -> dict[str, Any]: ...
    def _blocks(self, source: str, rank: int) -> Listing | None: ...
    def _key_of(self, source: str, rank: int, stated: int | None, block_hash: int) -> int | None: ...
    def _digest(self, source: str, rank: int) -> int | None: ...
    def _speculate(self, source: str, rank: int, tokens: Any, namespace: Namespace | None, now: float, ttl: float) -> None: ...
    def _snapshot(self, path: Path, workers: list[tuple[str, int]] | None) -> None: ...
    def _restore(self, read: Callable[[int], bytes]) -> None: ...
    def _absorb(self, read: Callable[[int], bytes]) -> list[tuple[str, int]]: ...
    def _break(self) -> None:
        """Panic in the middle of a change. Only builds for tests have it."""

class Compactor:
    """Compacts the payloads of one stream to its live blocks. Calls of several threads wait for each other."""

    def __new__(cls, wire_limits: tuple[int, int, int, int, int, int]) -> Self: ...
    def apply(self, payload: bytes, own: bool = False) -> None:
        """Apply the next payload. `lost` is set if its events cannot be decoded.

        `own` is for payloads that `payloads` returned, which can be larger than those of peers.
        """
    def apply_many(self, batches: list[tuple[int, bytes]]) -> None:
        """Apply the payloads of several batches, whatever their numbers. Other threads run if that takes long."""
    def payloads(self, limit: int, ts: float) -> list[bytes] | None:
        """Return the events that rebuild the state, as payloads for `apply(payload, own=True)`. Other threads run meanwhile.

        Each has at most `limit` bytes, except for a single block that takes more; `ts` is their time, in seconds. Events are
        maps with the fields of `kvevents.events`. Each rank has payloads of its own; the first one clears everything, so a
        compactor that applies them is not `partial`, and only that one begins with a clear. Returns None if `lost`, or if no
        order of events can express the state. Raises `ValueError` for an invalid limit or time.
        """
    def mark_partial(self) -> None:
        """Record that a part of the stream was not received. The known blocks stay; see `partial`."""
    def invalidate(self, reason: str) -> None:
        """Drop the state, and ignore events until everything is cleared. `reason` is `batches`, `payloads` or `digests`."""
    def clear(self) -> None:
        """Remove all blocks."""
    @property
    def partial(self) -> bool:
        """Whether a part of the stream was not received since everything was cleared last."""
    @property
    def live(self) -> int:
        """Blocks with at least one copy."""
    @property
    def nodes(self) -> int:
        """Blocks kept: live ones, dead ancestors, and orphans."""
    @property
    def bytes(self) -> int:
        """Approximate heap memory."""
    @property
    def lost(self) -> str | None:
        """The exceeded limit, or the reason given to `invalidate`. No block is kept until everything is cleared."""
    def _locked(self, call: Callable[[], object]) -> None:
        """Call something while it is locked. Only builds for tests have it."""
    def _break(self) -> None:
        """Panic in the middle of a change. Only builds for tests have it."""

class DataPlane:
    """The native HTTP server: see `kvevents.service.data_plane`."""

    def __new__(cls, settings: bytes, listening: int, waker: int, loads: Loads) -> Self: ...
    def take(self) -> list[Request | int]: ...
    def answer(
        self, method: str, path: str, fields: bytes, tokens: Any, wants_msgpack: bool
    ) -> tuple[bytes, int] | tuple[int, str, str, str] | None: ...
    def replace_table(self, index: NativeIndex, changes: bytes) -> None: ...
    def replace_probes(self, live: tuple[int, bytes], ready: tuple[int, bytes]) -> None: ...
    def reload_tls(self) -> None: ...
    def metrics(self) -> bytes: ...
    def decisions(self) -> bytes: ...
    def reservations(self, limit: int) -> bytes: ...
    def drain(self, seconds: float) -> None: ...
    def close(self) -> None: ...

class Request:
    """A request that the control plane answers."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def query(self) -> bytes: ...
    @property
    def headers(self) -> list[tuple[str, bytes]]: ...
    @property
    def peer(self) -> str: ...
    @property
    def endpoint(self) -> tuple[str, str]: ...
    @property
    def caller(self) -> str: ...
    @property
    def refusal(self) -> str | None: ...
    @property
    def body(self) -> bytes: ...
    def respond(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None: ...
    def stream(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> ResponseStream: ...

class ResponseStream:
    """A response in pieces."""

    @property
    def number(self) -> int: ...
    @property
    def is_gone(self) -> bool: ...
    def send(self, piece: bytes) -> bool: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...

class Libzmq:
    """See `kvevents.zeromq.bulk_transfer`. Raises `OSError` where a file that is loaded does not lead to libzmq.

    A socket is given as pyzmq's `Socket.underlying`; it must be open, and used by no other thread.
    """

    def __new__(cls, module: str) -> Self: ...
    def send(self, socket: int, topic: bytes, batches: Sequence[tuple[int, bytes]]) -> int:
        """Send messages of a topic, a number and a payload. Return the number of frames sent, up to the first refused one."""
    def receive(
        self, socket: int, topic: bytes, first: int, due: int, limit: int
    ) -> tuple[list[bytes], list[list[bytes]], bool]:
        """Receive waiting messages without blocking: about 1 MiB, and at most `limit` messages.

        Returns three values: the payloads of at most `due` messages with this topic and the numbers from `first` on, the frames
        of all later messages, and whether no message is left. If all are empty and a message is left, receive it with pyzmq,
        whose exception has the reason.
        """

class Scorer:
    """The score of workers, by what tiers and loads are worth."""

    def __new__(
        cls, tiers: dict[str, float], wait: float, mean: float, guard: float, guard_requests: float, uncertain_weight: float
    ) -> Self: ...
    def weigh(
        self,
        length: int,
        tokens: list[int],
        certain: list[int],
        tiers: list[Mapping[str, int]],
        believed: list[float],
        work: list[float],
        requests: list[int],
        inexact: Mapping[int, Sequence[str]] = ...,
    ) -> tuple[list[tuple[float, float, float, bool]], list[int]]:
        """Of workers `(score, uncached share, load, whether it is hot)`, and the places of those that are best and equal.

        Of each worker `tokens` are held on whatever tiers, `certain` of them certainly; `tiers` has how far the prefix reaches
        on each, with faster ones; `believed` is from 0 to 1. `inexact` has, by place, tiers whose tokens might all be gone.
        Tokens that might be gone have the weight `uncertain_weight`.
        """

class SmgSubscription:
    """A subscription to the KV cache events of a worker of SMG. It ends when it is dropped."""

    def __new__(cls, address: str, waker: int) -> Self:
        """Begin to call the worker at `HOST:PORT`. `waker` is a socket, of which a copy is written to when something arrives.

        Raises ValueError for an invalid address, and OSError.
        """

    def take(self, limit: int) -> list[tuple[int, bytes]]:
        """Return up to `limit` arrivals: number and payload of a batch, -1 for a call that has begun, -2 and why one ended."""

    def restart(self) -> None:
        """End the call and begin another one, which brings everything again."""

class Ties:
    """Which of several equally good workers comes next. Any thread may ask.

    The first turn is at a random place, so that many routers that have just started do not send to one worker at once.
    `random` also draws.
    """

    def __new__(cls, random: Random, max_workers: int = ...) -> Self: ...
    @property
    def remembered(self) -> int:
        """Workers whose last turn is remembered."""
    def pick(self, how: str, equal: list[Any]) -> int:
        """The place of the one to take; `how` is `rotate`, `random` or `first`."""
    def took(self, worker: Any) -> None:
        """Note that a worker was chosen, whatever for: of equal ones it is the last to come next."""

class Loads:
    """The requests that engines report, with reservations and selections. Any thread may call it.

    Reports that are older than `max_age` seconds do not count. At most `max_reservations` are open.
    """

    def __new__(cls, max_age: float, max_reservations: int = ...) -> Self: ...
    def report(self, source: str, rank: int, requests: float, age: float = 0.0) -> None:
        """Store what an engine reported `age` seconds ago; ignored if a newer report is known."""
    def join(self, source: str, rank: int, peers: Sequence[tuple[str, int]]) -> None:
        """Add a worker, which begins with the mean reservations of its peers; nothing if it is known."""
    def remove(self, source: str, rank: int) -> None:
        """Forget a worker."""
    def requests(self, source: str, rank: int) -> float | None:
        """The newest report, with what has begun and ended since; None without a recent one."""

def nearest(distances: list[int]) -> list[int]: ...
def hashes(tokens: Any, block_size: int, namespace: Namespace | None, eagle: bool, chained: bool) -> list[int]: ...
def chained(hashes: list[int]) -> list[int]: ...
def stored_keys(payload: bytes, parent: tuple[int, int] | None) -> tuple[list[int], int | None, str | None]: ...
def tier_of(medium: str) -> str: ...
def lifted(text: bytes, name: str) -> tuple[bytes, bytes] | None: ...
def check_names(body: bytes, is_msgpack: bool) -> None:
    """Raises `ValueError` if an object of a body of JSON or msgpack has a name twice."""

def scanned(wire_limits: tuple[int, ...], payload: bytes) -> list[dict[str, Any]] | None:
    """The events of a payload as the scanner reads them; None if it leaves them to Python. Only builds for tests have it."""

def select(question: bytes, ties: Ties, loads: Loads) -> bytes:
    """The choice of `/v1/select` among given candidates, in msgpack. Only builds for tests have it."""

def decoded(
    wire_limits: tuple[int, ...], max_rejected: int, payload: bytes
) -> tuple[float, int | None, list[dict[str, Any]], list[tuple[str, str, int | None, bytes, int]], bytes]:
    """A payload as the tolerant decoder reads it: timestamp, rank, events, what was set aside, and the events for the scanner.

    What was set aside is `(reason, detail, index, raw, count)` each. Only builds for tests have it.
    """

def turns() -> int:
    """How often calls have let other threads run in the middle of their work. Only builds for tests have it."""
