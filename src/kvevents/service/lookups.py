"""Prefix lookups of the control plane: in this process's index, or with the replicas that hold the other shards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from kvevents.index import Namespace
from kvevents.service.data_plane import DataPlane
from kvevents.service.errors import UnavailableError
from kvevents.service.fleet import Fleet
from kvevents.service.hot_prefixes import HotNode, HotPrefixes
from kvevents.service.http.thread_pools import RunStep
from kvevents.service.member import MemberMatch
from kvevents.service.metrics import Metrics
from kvevents.service.registration import Scope
from kvevents.service.schemas import HotPrefix, Media, SelectRequest
from kvevents.service.shards.scatter_gather import ScatterGather, packed
from kvevents.service.shards.shard_server import Expectation, ShardQuery, fields_of

MAX_UNCOUNTED: Final = 64
"""Uncounted lookups above which the next lookup counts them."""
_PLAIN: Final = Namespace()
"""Namespace of prompts without LoRA and salt."""


class LookupResult(NamedTuple):
    """How much of a prompt each worker holds."""

    rows: list[MemberMatch]
    missing: str
    """Why the result lacks a part of the fleet; empty if it is complete."""


class FoundMany(NamedTuple):
    """How much of each of several prompts each worker holds, in the order of the prompts."""

    rows: list[list[MemberMatch]]
    missing: str


class HottestPrefixes(NamedTuple):
    """The prefixes that prompts begin with most."""

    sampled: int
    """Number of sampled prompts."""
    prefixes: list[HotPrefix]
    missing: str
    """Why the numbers of workers lack a part of the fleet; empty if they are complete."""


class Lookups:
    """Looks prompts up, counts lookups, and samples prompts for the hottest prefixes.

    Without shards, `run` calls the slow steps. With shards, the event loop sends requests to other replicas.
    `count` counts lookups and samples their prompts after the response was sent.
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
        self.on_lookup: Callable[[Scope, int, list[MemberMatch]], None] | None = None
        """Called within a request with the scope, the number of tokens (0 if unknown) and the result of each lookup."""

    async def find(
        self,
        run: RunStep,
        scope: Scope,
        tokens: Any,
        *,
        mm: Sequence[Media] = (),
        expected: bool = False,
        whole_prompt: bool = False,
    ) -> LookupResult:
        """Look up a prompt; with `whole_prompt` including its last token, which engines recompute."""
        (rows,), missing = await self.find_many(run, scope, [tokens], mm=mm, expected=expected, whole_prompt=whole_prompt)
        return LookupResult(rows, missing)

    async def find_many(
        self,
        run: RunStep,
        scope: Scope,
        prompts: Sequence[Any],
        *,
        mm: Sequence[Media] = (),
        expected: bool = False,
        whole_prompt: bool = False,
    ) -> FoundMany:
        """Look up several prompts, as `find` does."""
        if self._shards is None:
            return FoundMany(await run(self._match, scope, prompts, mm, expected, whole_prompt), "")
        self._check_ingest()
        query = ShardQuery(**fields_of(scope), mm=list(mm), expected=expected, whole_prompt=whole_prompt)
        found, missing = await self._shards.find(query, prompts)
        for tokens, rows in zip(prompts, found, strict=True):
            self._record(scope, tokens, rows)
        return FoundMany(found, missing)

    def _match(
        self, scope: Scope, prompts: Sequence[Any], mm: Sequence[Media], expected: bool, whole_prompt: bool
    ) -> list[list[MemberMatch]]:
        found = []
        for tokens in prompts:
            found.append(self._fleet.match(scope, tokens, mm=mm, expected=expected, whole_prompt=whole_prompt))
            self._record(scope, tokens, found[-1])
        return found

    def _check_ingest(self) -> None:
        if self._fleet.failure is not None:
            raise UnavailableError(
                f"the service no longer receives events: {self._fleet.failure}", "failed", "restart the service"
            )

    def _record(self, scope: Scope, tokens: Any, found: list[MemberMatch]) -> None:
        if self.on_lookup is not None:
            self.on_lookup(scope, len(tokens), found)
        self._uncounted.append((scope, tokens, found))
        if len(self._uncounted) > MAX_UNCOUNTED:
            self.count()

    def count(self) -> None:
        """Count the lookups so far. Any thread may call it: after a response, and before counters are read."""
        if self._data_plane is not None:
            for sample in self._data_plane.samples():
                self._sample(sample.scope, sample.tokens)
        while True:
            try:
                scope, tokens, found = self._uncounted.popleft()
            except IndexError:
                return
            self._metrics.record_lookup(len(tokens), max([row.tokens for row in found], default=0))
            self._sample(scope, tokens)

    async def find_keys(self, run: RunStep, scope: Scope, keys: list[int], *, local: bool) -> LookupResult:
        """Look up a prompt by block keys: hashes of each block alone if `local`, otherwise rolling keys."""
        if self._shards is None:
            rows, missing = await run(lambda: self._fleet.match_keys(scope, keys, local=local)), ""
        else:
            self._check_ingest()
            (rows,), missing = await self._shards.find(ShardQuery(**fields_of(scope), keys=[keys], local=local), [])
        self._record(scope, (), rows)
        return LookupResult(rows, missing)

    def expect(self, scope: Scope, worker: tuple[str, int], request: SelectRequest) -> None:
        """Count a prompt as held by a worker for `expect_seconds`, until its events arrive."""
        seconds = request.expect_seconds
        if self._fleet.expect(scope, worker, request.tokens, seconds) or self._shards is None:
            return
        prompt = packed(request.tokens)
        self._shards.expect(Expectation(**fields_of(scope), instance=worker[0], rank=worker[1], prompt=prompt, seconds=seconds))

    def _sample(self, scope: Scope, tokens: Any) -> None:
        size = self._fleet.block_sizes(scope)[:1]
        if not size and self._shards is not None:
            size = self._shards.block_sizes(scope)[:1]
        if size and len(tokens) >= size[0]:
            namespace = _PLAIN if scope.lora is scope.salt is None else Namespace(lora=scope.lora, salt=scope.salt)
            self.hot.record(scope, tokens, size[0], namespace)

    async def hottest(self, run: RunStep, scope: Scope, limit: int) -> HottestPrefixes:
        """Return the prefixes that prompts begin with most."""
        nodes, sampled = await run(self._top_prefixes, scope, limit)
        paths = [list(node.path) for node in nodes]
        if self._shards is None or not nodes:
            found, missing = await run(lambda: [self._fleet.match_keys(scope, path) for path in paths]), ""
        else:
            found, missing = await self._shards.find(ShardQuery(**fields_of(scope), keys=paths), [])
        return HottestPrefixes(sampled, _prefixes(nodes, found), missing)

    def _top_prefixes(self, scope: Scope, limit: int) -> tuple[list[HotNode], int]:
        self.count()
        return self.hot.top(scope, limit), self.hot.sampled(scope)


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
