"""Prompts that are looked up: here, or here and at the replicas that hold the rest."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvevents.index import Namespace
from kvevents.service.data_plane import DataPlane
from kvevents.service.errors import UnavailableError
from kvevents.service.fleet import Fleet
from kvevents.service.hot_prefixes import HotNode, HotPrefixes
from kvevents.service.http.thread_pools import Run
from kvevents.service.member import MemberMatch
from kvevents.service.metrics import Metrics
from kvevents.service.registration import Scope
from kvevents.service.schemas import HotPrefix, Media, SelectRequest
from kvevents.service.shards.scatter_gather import ScatterGather, packed
from kvevents.service.shards.shard_server import Expectation, ShardQuery, fields_of

MAX_UNCOUNTED: Final = 64
"""Lookups that are not counted yet, above which who looks something up counts them."""
_NEITHER: Final = (None, None)
_ALONE: Final = Namespace()
"""Of prompts without LoRA and salt."""


class Found(NamedTuple):
    """Who holds how much of a prompt."""

    rows: list[MemberMatch]
    missing: str
    """Why this is not of the whole fleet; empty if it is."""


class FoundMany(NamedTuple):
    """The same of several prompts, in their order."""

    rows: list[list[MemberMatch]]
    missing: str


class Hottest(NamedTuple):
    """The prefixes that prompts begin with most."""

    sampled: int
    """Prompts that were looked at."""
    prefixes: list[HotPrefix]
    missing: str
    """Why their numbers of workers are not of the whole fleet; empty if they are."""


class Lookups:
    """Looks prompts up, counts that, and knows which prefixes are asked for most.

    If all of the fleet is known here, `run` calls what takes long; if not, other replicas are asked in the event loop.

    Lookups are counted, and their prompts looked at, behind their answers: by `count`.
    """

    def __init__(
        self, fleet: Fleet, metrics: Metrics, shards: ScatterGather | None, data_plane: DataPlane | None = None
    ) -> None:
        self.hot: Final = HotPrefixes(clock=time.monotonic)
        self._fleet: Final = fleet
        self._metrics: Final = metrics
        self._shards: Final = shards
        self._data_plane: Final = data_plane
        self._uncounted: Final[deque[tuple[Scope, Any, list[MemberMatch]]]] = deque()

    async def find(
        self,
        run: Run,
        scope: Scope,
        tokens: Any,
        *,
        mm: Sequence[Media] = (),
        expected: bool = False,
        whole_prompt: bool = False,
    ) -> Found:
        """Who holds how much of a prompt; with `whole_prompt` its last token, which engines recompute, is looked up too."""
        (rows,), missing = await self.find_many(run, scope, [tokens], mm=mm, expected=expected, whole_prompt=whole_prompt)
        return Found(rows, missing)

    async def find_many(
        self,
        run: Run,
        scope: Scope,
        prompts: Sequence[Any],
        *,
        mm: Sequence[Media] = (),
        expected: bool = False,
        whole_prompt: bool = False,
    ) -> FoundMany:
        """The same for several prompts."""
        if self._shards is None:
            return FoundMany(await run(self._match, scope, prompts, mm, expected, whole_prompt), "")
        self._check_works()
        looked_up = prompts if whole_prompt else [usable(tokens) for tokens in prompts]
        found, missing = await self._shards.find(ShardQuery(**fields_of(scope), mm=list(mm), expected=expected), looked_up)
        for tokens, rows in zip(prompts, found, strict=True):
            self._note(scope, tokens, rows)
        return FoundMany(found, missing)

    def _match(
        self, scope: Scope, prompts: Sequence[Any], mm: Sequence[Media], expected: bool, whole_prompt: bool
    ) -> list[list[MemberMatch]]:
        found = []
        for tokens in prompts:
            found.append(self._fleet.match(scope, tokens if whole_prompt else usable(tokens), mm=mm, expected=expected))
            self._note(scope, tokens, found[-1])
        return found

    def _check_works(self) -> None:
        if self._fleet.failure is not None:
            raise UnavailableError(f"nothing is followed any more: {self._fleet.failure}", "failed", "restart the service")

    def _note(self, scope: Scope, tokens: Any, found: list[MemberMatch]) -> None:
        self._uncounted.append((scope, tokens, found))
        if len(self._uncounted) > MAX_UNCOUNTED:
            self.count()

    def count(self) -> None:
        """Count what has been looked up. Any thread may call it: behind an answer, and before what is counted is told."""
        if self._data_plane is not None:
            for sample in self._data_plane.samples():
                self._look_hot(sample.scope, sample.tokens)
        while True:
            try:
                scope, tokens, found = self._uncounted.popleft()
            except IndexError:
                return
            self._metrics.lookup(len(tokens), max([row.tokens for row in found], default=0))
            self._look_hot(scope, tokens)

    async def find_keys(self, run: Run, scope: Scope, keys: list[int], *, local: bool) -> Found:
        """The same by hashes: of each block alone, or rolling."""
        if self._shards is None:
            rows, missing = await run(lambda: self._fleet.match_keys(scope, keys, local=local)), ""
        else:
            self._check_works()
            (rows,), missing = await self._shards.find(ShardQuery(**fields_of(scope), keys=[keys], local=local), [])
        self._note(scope, (), rows)
        return Found(rows, missing)

    def expect(self, scope: Scope, worker: tuple[str, int], asked: SelectRequest) -> None:
        """Believe for a while that a worker will hold a prompt."""
        seconds = asked.expect_seconds
        if self._fleet.expect(scope, worker, asked.tokens, seconds) or self._shards is None:
            return
        prompt = packed(asked.tokens)
        self._shards.expect(Expectation(**fields_of(scope), instance=worker[0], rank=worker[1], prompt=prompt, seconds=seconds))

    def _look_hot(self, scope: Scope, tokens: Any) -> None:
        size = self._fleet.block_sizes(scope)[:1]
        if not size and self._shards is not None:
            size = self._shards.block_sizes(scope)[:1]
        if size and len(tokens) >= size[0]:
            self.hot.look(
                scope, tokens, size[0], _ALONE if scope[3:] == _NEITHER else Namespace(lora=scope.lora, salt=scope.salt)
            )

    async def hottest(self, run: Run, scope: Scope, limit: int) -> Hottest:
        """The prefixes that prompts begin with most."""
        nodes, sampled = await run(self._sampled, scope, limit)
        paths = [list(node.path) for node in nodes]
        if self._shards is None or not nodes:
            found, missing = await run(lambda: [self._fleet.match_keys(scope, path) for path in paths]), ""
        else:
            found, missing = await self._shards.find(ShardQuery(**fields_of(scope), keys=paths), [])
        return Hottest(sampled, _prefixes(nodes, found), missing)

    def _sampled(self, scope: Scope, limit: int) -> tuple[list[HotNode], int]:
        self.count()
        return self.hot.top(scope, limit), self.hot.sampled(scope)


def usable(tokens: Any) -> Any:
    """All of a prompt but its last token, which engines recompute, and with it the block that it is in.

    So of n tokens at most (n - 1) // block size blocks are of use: vLLM 0.33 `v1/core/kv_cache_manager.py`
    (`get_computed_blocks`), SGLang 0.5.23 `managers/schedule_batch.py` (`max_prefix_len`).
    """
    return tokens[: len(tokens) - 1] if len(tokens) else tokens


def _prefixes(nodes: list[HotNode], found: list[list[MemberMatch]]) -> list[HotPrefix]:
    return [
        HotPrefix(
            key=f"{node.key:016x}",
            parent=None if node.parent is None else f"{node.parent:016x}",
            tokens=node.tokens,
            lookups=node.lookups,
            workers=sum(row.tokens >= node.tokens for row in rows),
        )
        for node, rows in zip(nodes, found, strict=True)
    ]
