"""Lookups of an engine with several KV cache groups in plain Python: the rules of vLLM 0.33.0, from events alone.

vLLM finds blocks by hashes of all tokens before a position. Events do not carry the tokens of every position, so the model
computes the hashes itself: it looks for the hash unit that reproduces a hash that was announced together with its tokens. The
rules are those of `HybridKVCacheCoordinator.find_longest_cache_hit` (`v1/core/kv_cache_coordinator.py`) and of the finders of
`v1/core/single_type_kv_cache_manager.py`. Positions are counted in tokens.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

FULL: Final = ("full_attention", "mla_attention", "sink_full_attention")
WINDOWS: Final = ("sliding_window", "sliding_window_mla")
STATE: Final = "mamba"
SEED: Final = "vllm-none-hash"
"""vLLM's seed of sha256 hashes when `PYTHONHASHSEED` is not set."""


def engine_hashes(tokens: Sequence[int], unit: int, lookahead: int, salt: str | None = None) -> list[int]:
    """Return vLLM's hashes (`prefix_caching_hash_algo` sha256) at every multiple of `unit` tokens, as events carry them."""
    found: list[int] = []
    before = _digest(SEED)
    for start in range(0, len(tokens) - unit - lookahead + 1, unit):
        end = start + unit
        extra = (("cache_salt", salt),) if salt and start == 0 else None
        keys = (extra, *tokens[end : end + lookahead]) if lookahead else extra
        before = _digest((before, tuple(tokens[start:end]), keys))
        found.append(int.from_bytes(before[-8:]))
    return found


def _digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


@dataclass(eq=False)
class Group:
    kind: str
    size: int
    """Tokens of a block."""
    window: int = 0
    """Tokens that attention reaches back, the present token included; 0 if the group has no window."""
    held: Counter[int] = field(default_factory=Counter)
    """Number of copies, by hash."""

    @property
    def spec(self) -> tuple[str, int, int]:
        """Return the key of groups that are searched together."""
        return (self.kind, self.size, self.window)


class EngineCache:
    """The blocks that an engine holds, from its events."""

    def __init__(self, drafts: Iterable[int] | None = None) -> None:
        """`drafts` are the groups of a draft model (EAGLE, MTP); empty for all groups, None without a draft model."""
        self.groups: Final[dict[int, Group]] = {}
        self.hashing: tuple[int, int] | None = None
        """Tokens of a hash unit, and tokens behind it that its hash covers too."""
        self._drafts: Final = None if drafts is None else frozenset(drafts)

    def apply(self, event: KVEvent) -> None:
        """Apply one event."""
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            group = self.groups.get(event.group_idx or 0)
            if group is not None:
                group.held.subtract(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            for group in self.groups.values():
                group.held.clear()

    def _store(self, event: BlockStored) -> None:
        kind = event.kv_cache_spec_kind or FULL[0]
        if kind not in (*FULL, *WINDOWS, STATE):
            return
        window = (event.kv_cache_spec_sliding_window or 0) if kind in WINDOWS else 0
        group = self.groups.setdefault(event.group_idx or 0, Group(kind, event.block_size, window))
        # The event of an entry inside a block has the size of its last hash unit.
        group.size = max(group.size, event.block_size)
        group.held.update(event.block_hashes)
        is_whole = len(event.token_ids) == event.block_size * len(event.block_hashes)
        is_plain = event.lora_name is None and not any(event.extra_keys or ())
        if self.hashing is None and event.block_hashes and event.parent_block_hash is None and is_whole and is_plain:
            self.hashing = _find_hashing([token for token in event.token_ids if isinstance(token, int)], event)

    def tokens(self, prompt: Sequence[int], longest: int, salt: str | None = None) -> int:
        """Return how many tokens of a prompt the engine finds cached, at most `longest`; 0 while its hashes are unknown."""
        if self.hashing is None or not self.groups:
            return 0
        unit, lookahead = self.hashing
        return Search(self, engine_hashes(prompt, unit, lookahead, salt), longest).run()

    def drops(self, number: int) -> bool:
        """Return whether the engine recomputes the last block of a hit. It does so unless hashes cover the tokens after the
        block."""
        if self._drafts is None or (self.hashing is not None and self.hashing[1]):
            return False
        return not self._drafts or number in self._drafts


def _find_hashing(tokens: Sequence[int], event: BlockStored) -> tuple[int, int] | None:
    size = event.block_size
    lookahead = (event.lookahead_token_ids or [[]])[0]
    prompt = [*tokens[:size], *lookahead]
    for unit in (unit for unit in range(size, 0, -1) if size % unit == 0):
        if engine_hashes(prompt, unit, len(lookahead))[-1:] == [event.block_hashes[0]]:
            return unit, len(lookahead)
    return None


@dataclass(eq=False)
class Spec:
    kind: str
    size: int
    window: int
    groups: list[Group] = field(default_factory=list)
    drops: bool = False


class Search:
    """One lookup."""

    def __init__(self, cache: EngineCache, hashes: Sequence[int], longest: int) -> None:
        assert cache.hashing is not None
        self._hashes, self._longest, self._unit = hashes, longest, cache.hashing[0]
        self._is_single = len(cache.groups) == 1
        specs: dict[tuple[str, int, int], Spec] = {}
        for number, group in sorted(cache.groups.items()):
            spec = specs.setdefault(group.spec, Spec(*group.spec))
            spec.groups.append(group)
            spec.drops |= cache.drops(number)
        self._specs = sorted(specs.values(), key=lambda spec: spec.kind not in FULL)
        unit = self._unit
        self._is_fine = any(spec.kind == STATE and spec.size > unit for spec in self._specs) and all(
            spec.kind not in WINDOWS or spec.size == unit for spec in self._specs
        )
        self._alignment = unit if self._is_fine else math.lcm(*(spec.size for spec in self._specs))

    def run(self) -> int:
        """Return the longest prefix that all groups can serve: each group shortens the candidate until none does."""
        if self._is_single:
            return self._find(self._specs[0], self._longest, self._specs[0].drops)
        is_simple = len(self._specs) == 2 and self._specs[0].kind in FULL
        found: list[int | None] = [None] * len(self._specs)
        verified: set[int] = set()
        candidate = self._longest
        while True:
            hit = candidate
            for at, spec in enumerate(self._specs):
                known = found[at]
                if spec.kind in FULL and known is not None:
                    hit = min(hit, known)
                    continue
                drops = spec.drops and at not in verified
                most = hit
                if drops and spec.kind != STATE:
                    most = min(hit + self._margin(spec), len(self._hashes) * self._unit)
                shorter = self._find(spec, most, drops)
                if drops:
                    verified.add(at)
                elif shorter < hit:
                    verified.clear()
                hit = found[at] = shorter
            if hit >= candidate or is_simple:
                return min(hit, candidate)
            candidate = hit

    def _margin(self, spec: Spec) -> int:
        return self._unit if self._is_fine and spec.kind in FULL and spec.size > self._unit else spec.size

    def _is_held(self, spec: Spec, position: int) -> bool:
        at = position // self._unit - 1
        return at < len(self._hashes) and all(group.held[self._hashes[at]] > 0 for group in spec.groups)

    def _find(self, spec: Spec, most: int, drops: bool) -> int:
        alignment = spec.size if self._is_single else self._alignment
        if spec.kind in FULL:
            return self._find_full(spec, most, drops, alignment)
        if spec.kind in WINDOWS:
            return self._find_window(spec, most, drops, alignment)
        step = min(alignment, spec.size)
        ends = range(most // step * step, 0, -step)
        return next((end for end in ends if end % alignment == 0 and self._is_held(spec, end)), 0)

    def _find_full(self, spec: Spec, most: int, drops: bool, alignment: int) -> int:
        hit = 0
        while hit + spec.size <= most and self._is_held(spec, hit + spec.size):
            hit += spec.size
        if alignment < spec.size:
            last = min(hit + spec.size - alignment, most // alignment * alignment)
            hit = next((end for end in range(last, hit, -alignment) if self._is_held(spec, end)), hit)
        if drops and hit > 0:
            hit -= min(alignment, spec.size)
        return hit - hit % alignment

    def _find_window(self, spec: Spec, most: int, drops: bool, alignment: int) -> int:
        size = spec.size
        need = -(-(spec.window - 1) // size) + drops
        run = end = 0
        for at in reversed(range(most // size)):
            if not self._is_held(spec, (at + 1) * size):
                run = 0
                continue
            if run == 0:
                if size != alignment and (at + 1 - drops) * size % alignment:
                    continue
                end = at + 1
            run += 1
            if run >= need:
                break
        is_found = 0 < run >= need
        blocks = end if is_found else run
        if not is_found:
            blocks = self._aligned(blocks, size, alignment)
        if drops and blocks > 0:
            blocks = self._aligned(blocks - 1, size, alignment)
        return blocks * size

    @staticmethod
    def _aligned(blocks: int, size: int, alignment: int) -> int:
        while size != alignment and blocks * size % alignment:
            blocks -= 1
        return blocks
