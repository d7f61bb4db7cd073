"""A model of the prefix index in plain Python that gives the answers that `kvevents.index` must give; slow, but easy to read.

A stream stores blocks by the engine's hash, the newest block of a hash last. A block stored by key differs from a block stored
by its tokens. What cannot be placed yet waits in one queue, oldest first: orphans wait for their parent, hashes without tokens
("untied") wait for a store that has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from index_keys import (
    DENSE,
    Plane,
    Scheme,
    Scope,
    Worker,
    block_key,
    has_keys,
    keyable_blocks,
    plane_of,
    prompt_keys,
    scheme_of,
    tier_of,
)
from kvevents.events import MEDIUM_ALL, MEDIUM_CPU_PINNED, TIERS, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.stream import Batch, Gap, Reset


@dataclass(eq=False)
class Block:
    hash: int
    scheme: Scheme
    key: int
    salt: int
    keyed: bool = False
    copies: Counter[Plane] = field(default_factory=Counter)

    @property
    def schemes(self) -> set[Scheme]:
        """The schemes of prompts that can have the block. A key does not show whether it covers the next token too."""
        return {self.scheme, (self.scheme[0], True)} if self.keyed else {self.scheme}


@dataclass(eq=False)
class Waiting:
    """An orphan, with its event and its index in it, or an untied hash, which has neither and waits for its own hash."""

    hash: int
    plane: Plane
    awaited: int | None
    event: BlockStored | None = None
    index: int = 0


@dataclass(eq=False)
class Stream:
    incarnation: int
    max_orphans: int
    last: int = -1
    blocks: dict[int, list[Block]] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    rules: dict[int, int | str] = field(
        default_factory=dict
    )  # by group: "dense", "unknown", or how many blocks its window needs
    counts: Counter[str] = field(default_factory=Counter)
    copied_levels: set[int] = field(default_factory=set)
    """Levels on which a second store of a block is another copy: those where the engine names groups, as vLLM does."""
    empties_host: bool = False
    """Whether a clear without a tier empties host memory too, as that of SGLang."""

    @property
    def all(self) -> list[Block]:
        return [block for blocks in self.blocks.values() for block in blocks]

    def apply(self, event: KVEvent) -> None:
        if isinstance(event, BlockStored):
            self.store(event)
        elif isinstance(event, AllBlocksCleared):
            self.clear(**event.unknown_fields or {})
        elif isinstance(event, BlockRemoved) and self.rules.get(event.group_idx or 0) != "unknown":
            for value in event.block_hashes:
                self.remove(value, plane_of(event), event.group_idx is not None)

    def store(self, event: BlockStored) -> None:
        kind, size, group, plane = event.kv_cache_spec_kind, event.block_size, event.group_idx or 0, plane_of(event)
        self.copied_levels |= {plane.level} if event.group_idx is not None else set()
        self.empties_host |= event.medium == MEDIUM_CPU_PINNED
        window = max(event.kv_cache_spec_sliding_window or 0, 0) if kind == "sliding_window" else 0
        if kind not in DENSE and not window:
            self.rules[group] = "unknown"
            self.counts["unknown-kind"] += 1
        elif window or not (event.token_ids or event.block_keys is not None):
            if window and size > 0:
                self.rules[group] = max(1, -(-(window - 1) // size))  # vLLM requires at least one block
            for value in event.block_hashes:
                self.put(Waiting(value, plane, value))
        elif event.block_keys is not None:
            self.store_keyed(event, plane)
        elif size <= 0 or len(event.token_ids) != len(event.block_hashes) * size:
            self.counts["length-mismatch"] += 1
        else:
            count = keyable_blocks(event)
            self.counts["bad-token"] += count < len(event.block_hashes)
            if plane.level == 0 and (count or not event.block_hashes):  # connectors announce chunks on other tiers
                self.rules[group] = "dense"
            before: Block | None = None
            first = event.parent_block_hash
            is_root = first is None or (first == 0 and 0 not in self.blocks)  # some engines send 0 for "no parent"
            parents = [None if is_root else first, *event.block_hashes]
            for index, value in enumerate(event.block_hashes[:count]):
                before = self.put(Waiting(value, plane, parents[index], event, index), before)

    def store_keyed(self, event: BlockStored, plane: Plane) -> None:
        if event.token_ids or not has_keys(event):
            self.counts["length-mismatch"] += 1
            return
        if plane.level == 0:
            self.rules[event.group_idx or 0] = "dense"
        for index, value in enumerate(event.block_hashes):
            self.put(Waiting(value, plane, None, event, index))

    def put(self, what: Waiting, before: Block | None = None) -> Block | None:
        """Place a block and those that waited for it, or add it to the queue. `before` is the previous block of its event."""
        if what.event is not None and what.event.block_keys is None and what.plane.level > 0 and what.hash in self.blocks:
            known = self.blocks[what.hash][-1]
            if not known.keyed and known.scheme == scheme_of(what.event):  # it has the known key
                self.add_copy(known, what.plane)
                return known
        parent = before or (self.blocks[what.awaited][-1] if what.awaited in self.blocks else None)
        if parent is None and what.awaited is not None:
            same = [
                it
                for it in self.waiting
                if (it.hash, it.plane, it.event is None) == (what.hash, what.plane, what.event is None)
            ]
            if same and same[-1].awaited == what.awaited and not self.counts_copies(what.plane):
                return None
            self.waiting.append(what)
            if len(self.waiting) > self.max_orphans:
                self.waiting.pop(0)
                self.counts["dropped"] += 1
            return None
        placed, queue = [], [(what, parent)]
        for item, above in queue:  # which grows during the iteration
            fresh = item.hash not in self.blocks
            placed.append(self.place(item, above))
            if fresh:
                queue += [(other, placed[-1]) for other in self.waiting if other.awaited == item.hash]
                self.waiting = [other for other in self.waiting if other.awaited != item.hash]
        return placed[0]

    def place(self, item: Waiting, parent: Block | None) -> Block:
        """Add a copy of the block of `item` under `parent`, as the newest of its hash; an untied hash adds one of `parent`."""
        if item.event is None:
            assert parent is not None
            self.add_copy(parent, item.plane)
            return parent
        keys = item.event.block_keys
        if keys is None:
            key, salt = block_key(item.event, item.index, (parent.key, parent.salt) if parent is not None else None)
        else:
            key, salt = keys[item.index], 0
        block = Block(item.hash, scheme_of(item.event), key, salt, keys is not None)
        known = self.blocks.get(item.hash, [])
        block = next((old for old in known if (old.scheme, old.key, old.keyed) == (block.scheme, key, block.keyed)), block)
        self.add_copy(block, item.plane)
        self.blocks[item.hash] = [*(old for old in known if old is not block), block]
        return block

    def counts_copies(self, plane: Plane) -> bool:
        return plane.level in self.copied_levels

    def add_copy(self, block: Block, plane: Plane) -> None:
        block.copies[plane] = block.copies[plane] + 1 if self.counts_copies(plane) else 1

    def remove(self, value: int, plane: Plane, has_group: bool) -> None:
        """Remove a copy on the plane, or else a copy on each plane that differs only in what one of the two does not state."""
        there = {held for block in self.blocks.get(value, []) for held in +block.copies}
        there |= {item.plane for item in self.waiting if item.hash == value}
        if plane in there:
            self.remove_on(value, plane)
            return
        meant = [
            held
            for held in there
            if held.tier == plane.tier
            and (not has_group or held.group == plane.group)
            and (held.locality == plane.locality or None in (held.locality, plane.locality))
            and (held.ownership == plane.ownership or None in (held.ownership, plane.ownership))
        ]
        for held in meant:
            self.remove_on(value, held)
        self.counts["unknown-hash"] += not meant

    def remove_on(self, value: int, plane: Plane) -> None:
        """Remove a copy of the oldest block of a hash on the plane, or a waiting item without such a block, orphans first."""
        held = [block for block in self.blocks.get(value, []) if block.copies[plane]]
        waiting = [item for item in self.waiting if (item.hash, item.plane) == (value, plane)]
        if held:
            held[0].copies[plane] -= 1
            self.sweep(value)
        elif waiting:
            self.waiting.remove(min(waiting, key=lambda item: item.event is None))

    def sweep(self, value: int) -> None:
        """Drop the blocks of a hash that have no copies, and the hash if no block is left."""
        self.blocks[value] = [block for block in self.blocks[value] if block.copies.total()]
        if not self.blocks[value]:
            del self.blocks[value]

    def clear(self, medium: str | None = None, group_idx: int | None = None) -> None:
        tier = None if medium in {None, MEDIUM_ALL} else tier_of(medium)
        meant: Callable[[Plane], bool] = lambda plane: tier in (None, plane.tier) and group_idx in (None, plane.group)  # noqa: E731
        waiting, self.waiting = self.waiting, [item for item in self.waiting if not meant(item.plane)]
        if medium == MEDIUM_ALL and group_idx is None:  # the next events can be those of another engine
            self.rules, self.copied_levels, self.empties_host = {}, set(), False
        used = any(map(meant, [item.plane for item in waiting] + [plane for block in self.all for plane in +block.copies]))
        if (tier not in {None, *TIERS} and not used) or (medium is None and group_idx is None):
            self.waiting = []
            meant = lambda plane: plane.level <= int(self.empties_host)  # noqa: E731
        for block in self.all:
            block.copies = Counter({plane: count for plane, count in block.copies.items() if not meant(plane)})
            self.sweep(block.hash)

    def held(self, scheme: Scheme, level: int, group: int | None) -> set[int]:
        """Return the keys of blocks on planes of at most `level`, of one group or of all groups."""
        on: Callable[[Plane], bool] = lambda plane: plane.level <= level and group in (None, plane.group)  # noqa: E731
        there = [block for block in self.all if any(count and on(plane) for plane, count in block.copies.items())]
        return {block.key for block in there if scheme in block.schemes}

    def longest(self, keys: list[int], scheme: Scheme, level: int) -> int:
        """Return how many blocks of a prompt match as a prefix at `level`."""
        rules: dict[int | None, int | str] = {group: rule for group, rule in self.rules.items() if rule != "unknown"}
        if rules and "dense" not in rules.values():
            return 0  # the blocks of no group on the device are known by their tokens
        rules = rules if len(rules) > 1 else {None: "dense"}
        held = {group: self.held(scheme, level, group) for group in rules}
        for length in range(len(keys), 0, -1):
            first = {group: 0 if isinstance(rule, str) else max(0, length - rule) for group, rule in rules.items()}
            if all(set(keys[first[group] : length]) <= held[group] for group in rules):
                return length
        return 0


@dataclass(eq=False)
class Oracle:
    max_orphans: int = 1_000_000
    streams: dict[Worker, Stream] = field(default_factory=dict)
    labels: dict[str, str | None] = field(default_factory=dict)
    fences: dict[Worker, int] = field(default_factory=dict)

    def apply(self, delivery: Batch | Reset | Gap) -> str:
        worker, incarnation = (delivery.source, delivery.rank), delivery.incarnation
        stream = self.streams.get(worker)
        if incarnation <= self.fences.get(worker, -1) or (stream is not None and incarnation < stream.incarnation):
            return "void"
        if stream is None or incarnation > stream.incarnation or isinstance(delivery, Reset):
            stream = self.streams[worker] = Stream(incarnation, self.max_orphans)
        if isinstance(delivery, Reset):
            return "applied"
        seq = delivery.seq if isinstance(delivery, Batch) else delivery.last
        if seq <= stream.last:
            return "duplicate"
        stream.last = seq
        for event in delivery.events if isinstance(delivery, Batch) else ():
            stream.apply(event)
        return "applied"

    def remove_worker(self, worker: Worker) -> None:
        self.fences |= {worker: self.streams.pop(worker).incarnation} if worker in self.streams else {}

    def match(self, tokens: Sequence[int], scope: Scope) -> dict[Worker, tuple[int, ...]]:
        """Return the matched tokens of each worker with a match: on the GPU, also the CPU, also a disk, on any tier."""
        answer = {}
        for worker, stream in self.streams.items():
            found = [
                (prompt_keys(tokens, scheme, scope), scheme)
                for scheme in set[Scheme]().union(*(block.schemes for block in stream.all))
            ]
            tiers = [max((stream.longest(*pair, level) * pair[1][0] for pair in found), default=0) for level in range(4)]
            if tiers[3] and self.labels.get(worker[0]) == scope.model:
                answer[worker] = tuple(tiers)
        return answer

    def blocks(self, worker: Worker) -> list[tuple[int, int, str, int, int]]:
        """Return (key, hash, tier, group, copies) of every block on every plane, sorted."""
        blocks = self.streams[worker].all if worker in self.streams else []
        return sorted((at.key, at.hash, plane.tier, plane.group, n) for at in blocks for plane, n in at.copies.items() if n)
