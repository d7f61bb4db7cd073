"""Parts of the index tests: builders of events, histories made of bytes, an engine's block pool, and views of an index."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import astuple
from xxhash import xxh3_64_intdigest as xxh3

from index_keys import Scope, Worker, item_hash, local_hash, rolling, salt_term, seed_of
from index_model import Oracle
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.index import Match, MultiModal, Namespace, PrefixIndex
from kvevents.stream import Batch, Gap, Reset
from kvevents.wire import DEFAULT_WIRE_LIMITS, Dialect, dialect_for, dialects, encode_batch
from kvevents_native import _native

T = TypeVar("T")

# --- builders ---------------------------------------------------------------------------------------------------------------


def store(hashes: Sequence[int], tokens: Sequence[Any], size: int, parent: int | None = None, **fields: Any) -> BlockStored:
    """Return a store as vLLM announces it, on the GPU unless `fields` has another medium."""
    return BlockStored(list(hashes), parent, list(tokens), size, **{"medium": "GPU", **fields})


def removal(*hashes: int, **fields: Any) -> BlockRemoved:
    return BlockRemoved(list(hashes), **{"medium": "GPU", **fields})


def cleared(**scope: Any) -> AllBlocksCleared:
    return AllBlocksCleared(scope or None)


_LIMITS = astuple(DEFAULT_WIRE_LIMITS)[:6]
NEWEST = dialect_for("vllm", "0.33.0")
"""A dialect of maps, in which only stores with a group count as copies."""


def scanned(payload: bytes) -> list[dict[str, Any]] | None:
    """Return the events of a payload as the native scanner reads them; None if it leaves them to Python."""
    return _native.scanned(_LIMITS, payload)


class Feed:
    """Numbered batches of one stream, applied to an index."""

    def __init__(self, index: PrefixIndex, source: str = "a", rank: int = 0, incarnation: int = 0) -> None:
        self.index, self.source, self.rank, self.incarnation, self.seq = index, source, rank, incarnation, 0

    @property
    def worker(self) -> Worker:
        return self.source, self.rank

    def batch(self, *events: KVEvent) -> Batch:
        self.seq += 1
        return Batch(self.source, self.rank, self.incarnation, self.seq - 1, 1.0, list(events), False)

    def __call__(self, *events: KVEvent) -> Any:
        return self.index.apply(self.batch(*events))


def namespace(scope: Scope) -> Namespace:
    return Namespace(scope.model, scope.lora, scope.salt, [MultiModal(*item) for item in scope.mm])


# --- comparable views of an index -------------------------------------------------------------------------------------------

LEVELS = ("gpu", "cpu", "disk", "other")


def tokens_by_level(match: Match) -> dict[Worker, tuple[int, ...]]:
    """Return the matched tokens of each worker up to each level, as `Oracle.match` does.

    `Match.tiers` may omit "other" if it adds nothing.
    """
    found = {}
    for hit in match:
        tiers = {"other": hit.tokens, **hit.tiers}
        found[hit.source, hit.rank] = tuple(tiers[level] for level in LEVELS)
        assert hit.tokens == max(tiers.values())
    assert len(match) == len(found)
    return found


def tokens_of(index: PrefixIndex, tokens: Any, scope: Scope = Scope(), worker: Worker = ("a", 0)) -> int:  # noqa: B008
    """Return how many tokens of a prompt one worker holds."""
    hit = index.match(tokens, namespace(scope)).get(*worker)
    return hit.tokens if hit is not None else 0


def blocks_of(index: PrefixIndex, worker: Worker) -> list[tuple[int, int, str, int, int]]:
    """Return the blocks of a worker as `Oracle.blocks` does; an empty list if the index does not know the worker."""
    if worker not in workers_of(index):
        return []
    return sorted((block.key, block.hash, block.tier, block.group, block.copies) for block in index.blocks(worker))


def count_blocks(oracle: Oracle, worker: Worker) -> int:
    """Return the number of blocks of a stream; a block on several planes counts once."""
    return len(oracle.streams[worker].all) if worker in oracle.streams else 0


def count_orphans(index: PrefixIndex) -> int:
    """Return the number of orphans and of hashes without tokens."""
    return index.stats().orphans


def count_rejected(index: PrefixIndex) -> int:
    """Return how many stores the index has rejected, because of an unknown kind of cache or lengths that do not agree."""
    return sum(index.stats().rejected.values())


def workers_of(index: PrefixIndex) -> set[Worker]:
    return {(info.source, info.rank) for info in index.workers()}


# --- dialects ---------------------------------------------------------------------------------------------------------------


def carries(row: Dialect, event: KVEvent) -> bool:
    """Return whether `row` can encode all fields of `event`."""
    if isinstance(event, AllBlocksCleared):
        return event.unknown_fields is None or row.event_form == "map"
    names = (row.stored_fields if isinstance(event, BlockStored) else row.removed_fields) + (
        "block_digests",
        "parent_block_digest",
    )
    names += ("block_keys",) if row.event_form == "map" else ()
    if row.event_form == "array" and isinstance(event, BlockStored) and event.group_idx is None:
        return False  # another store of it might be another copy, which a group shows in each form
    return all(name in names or getattr(event, name) is None for name in event.__struct_fields__)


def encode_in_dialect(batch: Batch, choice: int) -> bytes:
    """Return the payload of `batch` in one of the dialects that can encode it; in our own encoding if none can."""
    rows = [row for row in dialects() if all(carries(row, event) for event in batch.events)]
    return encode_batch(KVEventBatch(batch.ts, batch.events, batch.rank), rows[choice % len(rows)] if rows else NEWEST)


# --- histories made of bytes ------------------------------------------------------------------------------------------------


class Choices:
    """Decisions made by bytes: Hypothesis draws and shrinks bytes much faster than decisions."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_used_up(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        self._at += 1
        return 0 if self._at > len(self._data) else self._data[self._at - 1]

    def choose(self, options: Sequence[T]) -> T:
        return options[self.byte() % len(options)]

    def chance(self, percent: int) -> bool:
        return self.byte() >= 256 - percent * 256 // 100


@dataclass(frozen=True)
class Remove:
    worker: Worker


@dataclass(frozen=True)
class Admit:
    worker: Worker


@dataclass(frozen=True)
class Label:
    source: str
    model: str | None


Step: TypeAlias = Batch | Reset | Gap | Remove | Admit | Label
Item = tuple[str | int | bytes, int]
"""A multimodal item and the token of its page at which it begins."""


@dataclass(frozen=True)
class Page:
    tokens: tuple[int, ...]
    """With EAGLE one token more: the first one of the next page."""
    items: tuple[Item, ...] = ()
    unseen: str | bytes | None = None
    """An extra key that no prompt can have: a digest, or a bare string in a block that is not the root."""


@dataclass(frozen=True)
class Path:
    """Contents of a chain of blocks, from the root."""

    scope: Scope = Scope()  # noqa: RUF009
    pages: tuple[Page, ...] = ()


@dataclass
class Stream:
    """The properties of one invented engine. `Adversary` decides where and how its blocks are announced."""

    worker: Worker
    size: int
    eagle: bool
    hashing: str
    """What hashes depend on: "opaque" (the whole path and the worker), "page" (the page only) or "chaos" (8 random values)."""
    style: str
    """"old" (hashes, tokens, a LoRA's number), "vllm", "sglang" or "groups" (vLLM's, a hybrid model)."""
    window: int
    digests: bool
    keyed: bool
    """Whether some stores have keys instead of tokens, as behind a relay that removes tokens."""
    incarnation: int = 0
    seq: int = 0
    paths: list[Path] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    sent: list[Batch] = field(default_factory=list)


class Adversary:
    """Generates deliveries of three streams that cover all cases of the index's rules, with few values so that they collide."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.streams = [self._stream(worker) for worker in (("a", 0), ("a", 1), ("b", 0))]

    def _stream(self, worker: Worker) -> Stream:
        choose = self.choices.choose
        style = choose(("old", "vllm", "vllm", "sglang", "groups", "groups"))
        size = choose((1, 2, 2, 2, 3, 4))
        return Stream(
            worker,
            size,
            eagle=style in {"old", "sglang"} and choose((False, False, True)),
            hashing=choose(("opaque", "opaque", "opaque", "page", "chaos")),
            style=style,
            window=choose((1, 2, 4, 5, 7)),
            digests=style != "sglang" and choose((False, False, False, True)),
            keyed=style != "old" and choose((False, True)),
        )

    def steps(self) -> Iterator[Step]:
        """Yield steps until the bytes are used up."""
        while not self.choices.is_used_up:
            stream = self.choices.choose(self.streams)
            yield from self._step(stream, self.choices.byte())

    def prompt(self) -> tuple[list[int], Scope]:
        """Return a prompt that probably matches some blocks."""
        stream = self.choices.choose(self.streams)
        path = self.choices.choose(stream.paths) if stream.paths else Path()
        tokens = [token for page in path.pages for token in page.tokens[: stream.size]]
        items = [
            (name, at * stream.size + start, 1)
            for at, page in enumerate(path.pages)
            for name, start in page.items
            if 0 <= start < stream.size
        ]
        tokens += [self.choices.choose((1, 2, 3)) for _ in range(self.choices.choose((0, 1, 1, 2, 4)))]
        model = self.choices.choose((None, None, None, "m"))
        return tokens, Scope(model, path.scope.lora, path.scope.salt, tuple(items))

    def _step(self, stream: Stream, what: int) -> Iterator[Step]:
        if what < 224:
            yield self._batch(stream, [self._event(stream) for _ in range(1 + what % 3)])
        elif what < 230 and stream.sent:
            yield self.choices.choose(stream.sent)
        elif what < 234:
            lost = self._batch(stream, [self._event(stream)])  # it may still be delivered later
            yield Gap(*stream.worker, lost.seq, lost.seq, stream.incarnation)
        elif what < 237:
            stream.incarnation, stream.seq = stream.incarnation + what % 2, 0
            yield Reset(*stream.worker, stream.incarnation, "restart")
        elif what < 239:
            stream.incarnation, stream.seq = stream.incarnation + 1, 0
            yield self._batch(stream, [self._event(stream)])
        elif what < 244:
            yield Remove(stream.worker)
        elif what < 250:
            yield Admit(stream.worker)
        elif what < 253:
            yield Label(stream.worker[0], self.choices.choose((None, "m")))

    def _batch(self, stream: Stream, events: list[KVEvent]) -> Batch:
        batch = Batch(*stream.worker, stream.incarnation, stream.seq, 1.0, events, False)
        stream.seq += 1
        stream.sent.append(batch)
        return batch

    def _event(self, stream: Stream) -> KVEvent:
        what = self.choices.byte()
        if what < 136 or not stream.hashes:
            return self._store(stream, self._choose_path(stream))
        if what < 146:
            return self._store(stream, self.choices.choose(stream.paths))
        if what < 206:
            return self._remove(stream, 1 + what % 2)
        return self._choose_rare_event(stream, what)

    def _choose_rare_event(self, stream: Stream, what: int) -> KVEvent:
        if what < 230 and stream.style == "groups":
            return self._store_sparsely(stream, self.choices.choose(stream.paths))
        if what < 240 and stream.style != "old":
            return self._store_without_tokens(stream)
        if what < 248:
            return self._store_invalid(stream)
        scopes: list[dict[str, Any]] = [
            {},
            {"medium": "*"},
            {"medium": "cpu"},
            {"medium": "tape"},
            {"group_idx": 1},
            {"medium": "GPU", "group_idx": 0},
        ]
        return cleared(**self.choices.choose(scopes if stream.style != "old" else scopes[:1]))

    def _remove(self, stream: Stream, count: int) -> KVEvent:
        hashes = [self.choices.choose(stream.hashes[-12:]) for _ in range(count)]
        return self._with_byte_hashes(
            stream, removal(*hashes, **self._choose_placement(stream, dense_only=False)), hashes, None
        )

    def _choose_path(self, stream: Stream) -> Path:
        """Return a chain to announce: a new one, one that continues an announced chain, or one with a gap behind it."""
        path = (
            self.choices.choose(stream.paths) if stream.paths and self.choices.chance(70) else Path(self._choose_scope(stream))
        )
        if len(path.pages) > 3:
            path = Path(path.scope, path.pages[: self.choices.choose((1, 2, 3))])
        for _ in range(self.choices.choose((1, 1, 1, 2, 2, 3))):
            path = Path(path.scope, (*path.pages, self._choose_page(stream, path)))
        return path

    def _choose_scope(self, stream: Stream) -> Scope:
        lora: str | int | None = None
        if self.choices.chance(15):
            lora = 7 if stream.style == "old" or self.choices.chance(30) else "adapter"
        salt = self.choices.choose(("s1", "s2")) if stream.style != "old" and self.choices.chance(25) else None
        return Scope(None, lora, salt)

    def _choose_page(self, stream: Stream, path: Path) -> Page:
        first, step = self.choices.choose((1, 1, 2, 3)), self.choices.choose((0, 0, 1))
        if stream.eagle and path.pages:
            first = path.pages[-1].tokens[-1]
        tokens = [first + step * (at % 2) for at in range(stream.size)]
        if stream.eagle:
            tokens.append(self.choices.choose((1, 2)))
        items: list[Item] = []
        if stream.style in {"vllm", "groups"} and self.choices.chance(12):
            names: tuple[str | int, ...] = ("image", "aB" * 32, 7)
            items = [
                (self.choices.choose(names), self.choices.choose((0, 0, 1, -1))) for _ in range(self.choices.choose((1, 2)))
            ]
        unseen: str | bytes | None = None
        if stream.style == "vllm" and self.choices.chance(3):
            unseen = "bare" if path.pages and self.choices.chance(50) else b"\x07" * 32
        return Page(tuple(tokens), tuple(items), unseen)

    def _hash_path(self, stream: Stream, path: Path) -> int:
        """Return the engine's hash of the last block of a path, which may be any number."""
        if stream.hashing == "chaos":
            return self.choices.choose(range(8))
        what = path if stream.hashing == "opaque" else path.pages[-1].tokens
        return xxh3(repr((what, stream.worker)).encode())

    def _choose_placement(self, stream: Stream, *, dense_only: bool = True) -> dict[str, Any]:
        if stream.style == "old":
            return {"medium": None}
        plane: dict[str, Any] = {
            "medium": self.choices.choose(("GPU", "GPU", "GPU", "GPU", "gpu", None, "CPU", "DISK", "tape"))
        }
        if stream.style == "vllm" and self.choices.chance(6):
            plane |= {
                "medium": self.choices.choose(("GPU", "STORAGE")),
                "locality": "REMOTE",
                "ownership": self.choices.choose((None, "fs")),
            }
        if stream.style == "groups":
            plane["group_idx"] = self.choices.choose((0, 0, 0, 3)) if dense_only else self.choices.choose((0, 0, 1, 1, 2, 3))
        return plane

    def _store(self, stream: Stream, path: Path) -> KVEvent:
        """Return a store of the last pages of `path`, or of all of them. The parent's hash identifies the others."""
        count = min(self.choices.choose((1, 1, 2, 3, 8)), len(path.pages))
        chain = [Path(path.scope, path.pages[: at + 1]) for at in range(len(path.pages))]
        hashes = [self._hash_path(stream, part) for part in chain]
        stream.paths.append(path)
        stream.hashes += hashes[-count:]
        parent = hashes[-count - 1] if count < len(chain) else None
        fields = self._choose_placement(stream)
        if stream.style == "groups":
            fields["kv_cache_spec_kind"] = "full_attention" if fields["group_idx"] == 0 else "mla_attention"
        if stream.keyed and self.choices.chance(25):
            keys = self._make_keys(path)[-count:]
            event = store(hashes[-count:], [], stream.size, parent, **fields, block_keys=keys)
            return self._with_byte_hashes(stream, event, event.block_hashes, parent)
        event = store(hashes[-count:], self._encode_tokens(stream, path.pages[-count:]), stream.size, parent, **fields)
        return self._with_byte_hashes(stream, self._add_namespace(stream, event, path, count), event.block_hashes, parent)

    def _make_keys(self, path: Path) -> list[int]:
        """Return keys of a path as a relay sends them: correct ones, or random numbers."""
        if self.choices.chance(15):
            return [self.choices.choose(range(4)) for _ in path.pages]
        seed, keys = seed_of(path.scope.lora, salt_term(path.scope.salt)), list[int]()
        for page in path.pages:
            unseen = [] if page.unseen is None else [page.unseen.encode() if isinstance(page.unseen, str) else page.unseen]
            extras = [*(item_hash(*item) for item in page.items), *(xxh3(key, 3) for key in unseen)]
            keys.append(rolling(keys[-1] if keys else None, local_hash(page.tokens, seed, extras)))
        return keys

    def _encode_tokens(self, stream: Stream, pages: Sequence[Page]) -> list[Any]:
        if not stream.eagle:
            return [token for page in pages for token in page.tokens]
        return [pair for page in pages for pair in zip(page.tokens, page.tokens[1:], strict=False)]

    def _add_namespace(self, stream: Stream, event: BlockStored, path: Path, count: int) -> BlockStored:
        """Add LoRA, salt and multimodal items to a store, in the fields that the engine uses."""
        scope = path.scope
        event.lora_name = scope.lora if isinstance(scope.lora, str) else None
        event.lora_id = scope.lora if isinstance(scope.lora, int) else 3 if scope.lora and self.choices.chance(50) else None
        if stream.style == "sglang":
            event.cache_salt = scope.salt if event.parent_block_hash is None or self.choices.chance(50) else None
        elif stream.style != "old":
            root = event.parent_block_hash is None
            keys = [
                self._make_extra_keys(page, event.lora_name, scope.salt if root and not at else None)
                for at, page in enumerate(path.pages[-count:])
            ]
            event.extra_keys = keys if any(keys) else None
        return event

    def _make_extra_keys(self, page: Page, lora: str | None, salt: str | None) -> tuple[Any, ...] | None:
        keys = [lora, *([name, start] for name, start in page.items), salt, page.unseen]
        return tuple(key for key in keys if key is not None) or None

    def _store_sparsely(self, stream: Stream, path: Path) -> KVEvent:
        """Return a store of some hashes of a chain, as a sliding window group announces them."""
        hashes = [self._hash_path(stream, Path(path.scope, path.pages[: at + 1])) for at in range(len(path.pages))]
        kept = [value for value in hashes if self.choices.chance(75)]
        kind: dict[str, Any] = {
            "kv_cache_spec_kind": "sliding_window",
            "kv_cache_spec_sliding_window": stream.window,
            "group_idx": 1,
        }
        medium = self.choices.choose(("GPU", "GPU", "GPU", "CPU"))
        return self._with_byte_hashes(
            stream, store(kept, self._encode_tokens(stream, path.pages), stream.size, medium=medium, **kind), kept, None
        )

    def _store_without_tokens(self, stream: Stream) -> KVEvent:
        """Return a store without tokens: a move between tiers, sometimes of a hash that is announced later or never."""
        path = self.choices.choose(stream.paths)
        hashes = [
            self.choices.choose(stream.hashes),
            self._hash_path(stream, Path(path.scope, (*path.pages, Page((1,) * stream.size)))),
        ]
        count = self.choices.choose((1, 1, 2))
        return self._with_byte_hashes(
            stream, store(hashes[:count], [], 0, **self._choose_placement(stream)), hashes[:count], None
        )

    def _store_invalid(self, stream: Stream) -> KVEvent:
        """Return a store that the index rejects: an unknown kind of cache in a separate group, or lengths that do not agree."""
        value = self.choices.choose(stream.hashes)
        if stream.style == "groups" and self.choices.chance(50):
            return store([value], [1] * stream.size, stream.size, group_idx=2, kv_cache_spec_kind="chunked_local_attention")
        if stream.keyed and self.choices.chance(50):
            tokens, size, keys = self.choices.choose(
                (([], 0, [1]), ([], stream.size, [1, 2]), ([1] * stream.size, stream.size, [1]))
            )
            return store([value], tokens, size, block_keys=keys)
        plane = {"medium": None} if stream.style == "old" else {}
        return store([value], [1] * (stream.size + 1), stream.size, **plane)

    def _with_byte_hashes(self, stream: Stream, event: Any, hashes: Sequence[int], parent: int | None) -> KVEvent:
        """Return the event with byte hashes beside the numbers if the engine sends those."""
        if stream.digests:
            event.block_digests = [struct.pack(">24xQ", value) for value in hashes] or None
            if parent is not None:
                event.parent_block_digest = struct.pack(">24xQ", parent)
        return event  # type: ignore[no-any-return]


# --- an engine's block pool -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    tokens: list[int]
    salt: str | None
    decode: int
    """Number of tokens that are still to be generated."""
    tables: list[list[int | None]]
    """Blocks of the pool by group; None for blocks that the window has passed."""
    computed: int
    announced: int
    """Number of blocks whose hashes are in the cache."""


class Engine:
    """A model of vLLM's prefix cache: one pool of blocks for all groups, evicted in the order in which they were freed.

    `windows` has an entry per group: None for full attention, else the width of its sliding window. Blocks that leave the
    window are freed while the request runs. `cached` searches the cache as vLLM does.
    """

    def __init__(self, seed: int, size: int, blocks: int, windows: Sequence[int | None] = (None,)) -> None:
        self.seed, self.size, self.windows = seed, size, tuple(windows)
        self.free: list[int] = list(range(blocks))
        self.users = [0] * blocks
        self.contents: list[tuple[int, int] | None] = [None] * blocks
        """(hash, group) of each block of the pool; None for a block without contents."""
        self.events: list[KVEvent] = []

    def take_events(self) -> list[KVEvent]:
        taken, self.events = self.events, []
        return taken

    def hashes(self, tokens: Sequence[int], salt: str | None) -> list[int]:
        found, last = [], self.seed
        for start in range(0, len(tokens) - self.size + 1, self.size):
            last = xxh3(repr((last, tuple(tokens[start : start + self.size]), None if start else salt)).encode())
            found.append(last)
        return found

    def cached(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Return how many blocks of a prompt are in the cache. The last token is always computed again."""
        hashes = self.hashes(tokens, salt)[: (len(tokens) - 1) // self.size]
        length, before = len(hashes), -1
        while length != before:
            before = length
            for group, window in enumerate(self.windows):
                held = [self._find_block(value, group) is not None for value in hashes[:length]]
                length = _search_forward(held) if window is None else _search_backward(held, self._blocks_of_window(window))
        return length

    def admit(self, tokens: Sequence[int], salt: str | None = None, decode: int = 0) -> Request:
        hit, hashes = self.cached(tokens, salt), self.hashes(tokens, salt)
        tables: list[list[int | None]] = []
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, hit - self._blocks_of_window(window))
            held = [self._find_block(value, group) for value in hashes[first:hit]]
            for block in held:
                assert block is not None
                self._touch(block)
            passed: list[int | None] = [None] * first
            tables.append(passed + held)
        return Request(list(tokens), salt, decode, tables, hit * self.size, hit)

    def step(self, request: Request, chunk: int) -> bool:
        """Compute up to `chunk` tokens, or generate one. Return False when the request is done and its blocks are freed."""
        if request.computed == len(request.tokens):
            if request.decode == 0:
                self._finish(request)
                return False
            request.decode -= 1
            request.tokens.append(1 + xxh3(repr(request.tokens).encode()) % 5)
        until = min(len(request.tokens), request.computed + chunk)
        for group, window in enumerate(self.windows):
            table = request.tables[group]
            if window is not None:
                self._release(table, max(0, request.computed - window + 1) // self.size)
            table += [self._allocate() for _ in range(len(table), -(-until // self.size))]
        request.computed = until
        self._announce(request)
        return True

    def reset(self) -> None:
        """Clear the cache, which is allowed only while no request runs."""
        assert not any(self.users)
        self.contents = [None] * len(self.contents)
        self.events.append(AllBlocksCleared())

    def _blocks_of_window(self, window: int) -> int:
        return -(-(window - 1) // self.size)

    def _find_block(self, value: int, group: int) -> int | None:
        return self.contents.index((value, group)) if (value, group) in self.contents else None

    def _touch(self, block: int) -> None:
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1

    def _allocate(self) -> int:
        block = self.free.pop(0)
        name, self.contents[block] = self.contents[block], None
        self.users[block] = 1
        if name is not None:
            self.events.append(removal(name[0], group_idx=name[1]))
        return block

    def _drop(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            self.free.append(block)

    def _release(self, table: list[int | None], until: int) -> None:
        for at in reversed(range(min(until, len(table)))):
            block, table[at] = table[at], None
            if block is not None:
                self._drop(block)

    def _finish(self, request: Request) -> None:
        for table in request.tables:
            self._release(table, len(table))

    def _announce(self, request: Request) -> None:
        hashes, first, end = self.hashes(request.tokens, request.salt), request.announced, request.computed // self.size
        if first == end:
            return
        tokens, parent = request.tokens[first * self.size : end * self.size], hashes[first - 1] if first else None
        salted = request.salt is not None and first == 0
        for group, window in enumerate(self.windows):
            here = [(at, block) for at, block in enumerate(request.tables[group][first:end]) if block is not None]
            for at, block in here:
                self.contents[block] = (hashes[first + at], group)
            kind = "full_attention" if window is None else "sliding_window"
            event = store([hashes[first + at] for at, _ in here], tokens, self.size, parent, group_idx=group)
            event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = kind, window
            event.extra_keys = [(request.salt,) if salted and not at else None for at, _ in here]
            self.events.append(event)
        request.announced = end


def _search_forward(held: list[bool]) -> int:
    return held.index(False) if False in held else len(held)


def _search_backward(held: list[bool], need: int) -> int:
    """Return the end of the last run of `need` blocks, as vLLM does for windows; only a run from the start may be shorter."""
    run = 0
    for at in reversed(range(len(held))):
        run = run + 1 if held[at] else 0
        if run >= need:
            return at + run
    return run


class Traffic:
    """Requests with common prefixes, run on an `Engine` step by step."""

    def __init__(self, engine: Engine, choices: Choices, *, salts: Sequence[str | None] = (None,), longest: int = 40) -> None:
        self.engine, self.choices, self.salts, self.longest = engine, choices, salts, longest
        self.running: list[tuple[Request, int]] = []

    def arrive(self) -> tuple[list[int], str | None]:
        """Return the next prompt and its salt: one of a few prefixes, followed by random tokens."""
        topic, salt = self.choices.choose(range(4)), self.choices.choose(self.salts)
        shared = [10 + topic + at % 7 for at in range(min(self.choices.byte() % self.longest, self.longest))]
        return shared + [30 + self.choices.choose(range(2)) for _ in range(1 + self.choices.choose(range(8)))], salt

    def admit(self, tokens: list[int], salt: str | None, most: int = 2) -> None:
        while len(self.running) >= most:
            self.step()
        request = self.engine.admit(tokens, salt, self.choices.choose((0, 0, 3, 9)))
        self.running.append((request, self.choices.choose((4, 16, 64))))
        self.step()

    def step(self) -> None:
        self.running = [(request, chunk) for request, chunk in self.running if self.engine.step(request, chunk)]

    def drain(self) -> None:
        while self.running:
            self.step()
