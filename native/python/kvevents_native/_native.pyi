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
    """The prefix of a prompt that one worker holds."""

    @property
    def source(self) -> str:
        """Name of the engine."""
    @property
    def rank(self) -> int:
        """Data-parallel rank."""
    @property
    def tokens(self) -> int:
        """Length in tokens of the prefix that the worker holds, over all tiers."""
    @property
    def certain(self) -> int:
        """Length in tokens of the prefix that the worker certainly holds: less than `tokens` if some blocks might be gone."""
    @property
    def is_certain(self) -> bool:
        """Whether the worker certainly holds all tokens of this match, on each tier."""
    @property
    def tiers(self) -> dict[str, int]:
        """Length of the prefix in tokens by tier, including faster tiers."""

class Match:
    """The workers that hold a prefix of a prompt."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[WorkerMatch]: ...
    @property
    def best(self) -> WorkerMatch | None:
        """The worker with the longest prefix."""
    def get(self, source: str, rank: int = 0) -> WorkerMatch | None:
        """Return the match of one worker; None if it holds no prefix."""
    def rows(self) -> list[tuple[str, int, int, int, int, int, int, bool]]:
        """Return `(source, rank, gpu, cpu, disk, tokens, certain, is_certain)` for each worker, with cumulative tiers."""

class Listing:
    """The blocks of a stream at one moment. Each block is returned once."""

    def take(self, most: int) -> list[tuple[int, int, str, int, int, int]]:
        """Return the next blocks, at most `most`; an empty list after the last block.

        For each block and placement there is one `(key, hash, tier, group, maximum copies, minimum copies)`.
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
        """Return the prefix of `tokens` that each worker holds."""
    def match_many(self, prompts: list[Any], namespace: Namespace | None = None) -> list[Match]:
        """Return the matches of several prompts of one namespace."""
    def match_keys(self, keys: Any, block_size: int | None = None, namespace: Namespace | None = None) -> Match:
        """Return the match of a prompt that is given by its rolling keys, from the first block on."""
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
        """Panic in the middle of a change. Only in builds for tests."""

class Compactor:
    """Compacts the payloads of one stream into its live blocks. Calls of several threads wait for each other."""

    def __new__(cls, wire_limits: tuple[int, int, int, int, int, int]) -> Self: ...
    def apply(self, payload: bytes, own: bool = False) -> None:
        """Apply the next payload. `lost` is set if its events cannot be decoded.

        `own` is for payloads that `payloads` has returned, which can be larger than those of peers.
        """
    def apply_many(self, batches: list[tuple[int, bytes]]) -> None:
        """Apply the payloads of several batches; their numbers are ignored. Other threads can run if that takes long."""
    def payloads(self, limit: int, ts: float) -> list[bytes] | None:
        """Return the events that rebuild the state, as payloads for `apply(payload, own=True)`.

        A payload has at most `limit` bytes, or more if a single block needs more. Its time is `ts`, in seconds. Events are maps
        with the fields of `kvevents.events`. No payload has events of several ranks. Only the first payload begins with a
        clear; thus a compactor that applies the payloads is not `partial`. Returns None if `lost`, or if no order of events can
        express the state. Raises `ValueError` for an invalid limit or time. Other threads can run during the call.
        """
    def mark_partial(self) -> None:
        """Record that a part of the stream was not received. The known blocks stay; see `partial`."""
    @property
    def partial(self) -> bool:
        """Whether a part of the stream was not received since everything was last cleared."""
    @property
    def live(self) -> int:
        """Number of blocks with at least one copy."""
    @property
    def nodes(self) -> int:
        """Number of blocks that are kept: live ones, dead ancestors, and orphans."""
    @property
    def bytes(self) -> int:
        """Approximate number of bytes of heap memory."""
    @property
    def lost(self) -> str | None:
        """Why the state was dropped: the exceeded limit, `payloads` or `digests` (they cannot be read). None after a clear."""
    def _locked(self, call: Callable[[], object]) -> None:
        """Call `call` while the compactor is locked. Only in builds for tests."""
    def _break(self) -> None:
        """Panic in the middle of a change. Only in builds for tests."""

class DataPlane:
    """The native HTTP server: see `kvevents.service.data_plane`."""

    def __new__(cls, settings: bytes, listening: int, waker: int, loads: Loads) -> Self: ...
    def take(self) -> list[Request | int]: ...
    def answer(
        self, method: str, path: str, fields: bytes, tokens: Any, wants_msgpack: bool
    ) -> tuple[bytes, int] | tuple[int, str, str, str] | None: ...
    def change_table(self, index: NativeIndex, change: bytes) -> None: ...
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
    """An answer in pieces."""

    @property
    def number(self) -> int: ...
    @property
    def is_gone(self) -> bool: ...
    def send(self, piece: bytes) -> bool: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...

class Libzmq:
    """See `kvevents.zeromq.sockets`. Raises `OSError` if the loaded file `module` does not give the functions of libzmq.

    Sockets are passed as pyzmq's `Socket.underlying`. A socket must be open, and no other thread may use it.
    """

    def __new__(cls, module: str) -> Self: ...
    def send(self, socket: int, topic: bytes, batches: Sequence[tuple[int, bytes]]) -> int:
        """Send messages of topic, number and payload until a frame is refused. Return the number of frames that were sent."""
    def receive(
        self, socket: int, topic: bytes, first: int, due: int, limit: int
    ) -> tuple[list[bytes], list[list[bytes]], bool]:
        """Receive waiting messages without blocking: at most `limit` messages and about 1 MiB.

        Returns three values: the payloads of messages with this topic that are numbered from `first` on, at most `due`; the
        frames of all later messages; and whether no message is left. If both lists are empty although a message is left,
        receive that message with pyzmq, whose exception has the reason.
        """

class Scorer:
    """Computes scores of workers from weights of tiers and loads."""

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
        """Return `(score, uncached share, load, is hot)` for each worker, and the positions of the workers with the best score.

        For each worker, `tokens` is the length of its prefix over all tiers, `certain` the length that it certainly holds, and
        `tiers` the length on each tier including faster tiers. `believed` is the weight of its trust, from 0 to 1. `inexact`
        maps the position of a worker to the tiers whose tokens might all be gone. Their weight is `uncertain_weight` instead
        of `believed`.
        """

class SmgSubscription:
    """A subscription to the KV cache events of a worker of SMG. It ends when it is dropped."""

    def __new__(cls, address: str, waker: int) -> Self:
        """Begin to call the worker at `HOST:PORT`. When an item arrives, a byte is written to a copy of the socket `waker`.

        Raises ValueError for an invalid address, and OSError.
        """

    def take(self, limit: int) -> list[tuple[int, bytes]]:
        """Return up to `limit` arrivals, in order.

        An arrival is the number and the payload of a batch, -1 and no bytes if a call has begun, or -2 and the reason, as
        UTF-8, if a call has ended.
        """

    def restart(self) -> None:
        """End the call and begin another one, in which the worker sends everything again."""

class Ties:
    """Chooses among equally good workers in rotation. Any thread may call it.

    The rotation begins at a random position, so that many routers that have just started do not send to one worker at once.
    `random` determines this position and random choices.
    """

    def __new__(cls, random: Random, max_workers: int = ...) -> Self: ...
    @property
    def remembered(self) -> int:
        """Number of workers whose last choice is stored."""
    def pick(self, how: str, equal: list[Any]) -> int:
        """Return the position of the chosen worker; `how` is `rotate`, `random` or `first`."""
    def took(self, worker: Any) -> None:
        """Record that a worker was chosen, so that it is the last one in the rotation."""

class Loads:
    """The work of workers: the requests that their engines report, reservations and selections. Any thread may call it.

    Reports older than `max_age` seconds do not count. At most `max_reservations` reservations can be open.
    """

    def __new__(cls, max_age: float, max_reservations: int = ...) -> Self: ...
    def report(self, source: str, rank: int, requests: float, age: float = 0.0) -> None:
        """Store the number of requests that an engine reported `age` seconds ago, unless a newer report is known."""
    def join(self, source: str, rank: int, peers: Sequence[tuple[str, int]]) -> None:
        """Add a worker. Its counts of reservations and choices begin with the means of its peers. Ignore a known worker."""
    def remove(self, source: str, rank: int) -> None:
        """Forget a worker. Its reservations stay open, but count for no worker."""
    def requests(self, source: str, rank: int) -> float | None:
        """Return the reported number of requests, corrected by later beginnings and ends; None without a recent report."""

def nearest(distances: list[int]) -> list[int]: ...
def max_requests(requests: list[float], shares: list[float]) -> float: ...
def hashes(tokens: Any, block_size: int, namespace: Namespace | None, eagle: bool, chained: bool) -> list[int]: ...
def chained(hashes: list[int]) -> list[int]: ...
def stored_keys(payload: bytes, parent: tuple[int, int] | None) -> tuple[list[int], int | None, str | None]: ...
def tier_of(medium: str) -> str: ...
def lifted(text: bytes, name: str) -> tuple[bytes, bytes] | None: ...
def check_names(body: bytes, is_msgpack: bool) -> None:
    """Raise `ValueError` if an object in a body of JSON or msgpack has a name twice."""

def scanned(wire_limits: tuple[int, ...], payload: bytes) -> list[dict[str, Any]] | None:
    """Return the events of a payload as the scanner reads them; None if it reads no such payload. Only in builds for tests."""

def select(question: bytes, ties: Ties, loads: Loads) -> bytes:
    """Return the choice of `/v1/select` among given candidates; question and answer are msgpack. Only in builds for tests."""

def decoded(
    wire_limits: tuple[int, ...], max_rejected: int, payload: bytes
) -> tuple[float, int | None, list[dict[str, Any]], list[tuple[str, str, int | None, bytes, int]], bytes]:
    """Decode a payload with the tolerant decoder: timestamp, rank, events, rejections, and a payload of the events.

    The payload is for an index. A rejection is `(reason, detail, index, raw, count)`. Only in builds for tests.
    """

def turns() -> int:
    """Return how often calls have let other threads run during work with Python objects. Only in builds for tests."""
