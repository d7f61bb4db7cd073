"""Prompts that are looked up: here, or here and at the replicas that hold the rest."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from kvevents.index import Namespace
from kvevents.service.errors import UnavailableError
from kvevents.service.fleet import Fleet
from kvevents.service.hot import HotNode, HotPrefixes
from kvevents.service.member import Row
from kvevents.service.registration import Wall
from kvevents.service.shapes import HotPrefix, Media, SelectRequest
from kvevents.service.shards.asking import Shards, packed
from kvevents.service.shards.shapes import Expectation, Question, fields_of

if TYPE_CHECKING:
    from kvevents.service.metrics import Metrics

T = TypeVar("T")

Told: TypeAlias = Callable[[list[Row], str], T]
"""Makes something of the rows of a prompt, and of why they are not of the whole fleet; empty where they are."""
ToldMany: TypeAlias = Callable[[list[list[Row]], str], T]
"""The same of several prompts."""
MAX_UNCOUNTED: Final = 64
"""Lookups that are not counted yet, above which who looks something up counts them."""
_NEITHER: Final = (None, None)
_ALONE: Final = Namespace()
"""Of prompts without LoRA and salt."""


class Lookups:
    """Looks prompts up, counts that, and knows which prefixes are asked for most.

    What is found is given to a function that makes the answer, together with why it is not of the whole fleet, if it is not:
    at once where all of the fleet is known here, later where other replicas must be asked.

    Lookups are counted, and their prompts looked at, behind their answers: by `count`.
    """

    def __init__(self, fleet: Fleet, metrics: Metrics, shards: Shards | None) -> None:
        self.hot: Final = HotPrefixes(clock=time.monotonic)
        self._fleet: Final = fleet
        self._metrics: Final = metrics
        self._shards: Final = shards
        self._uncounted: Final[deque[tuple[Wall, Any, list[Row]]]] = deque()

    def find(
        self,
        wall: Wall,
        tokens: Any,
        then: Told[T],
        *,
        mm: Sequence[Media] = (),
        expected: bool = False,
        whole_prompt: bool = False,
    ) -> T | Awaitable[T]:
        """Who holds how much of a prompt; with `whole_prompt` its last token, which engines recompute, is looked up too."""
        if self._shards is not None:
            return self._find_everywhere(
                self._shards, wall, [tokens], lambda found, missing: then(found[0], missing), mm, expected, whole_prompt
            )
        found = self._fleet.match(wall, tokens if whole_prompt else usable(tokens), mm=mm, expected=expected)
        self._note(wall, tokens, found)
        return then(found, "")

    def find_many(
        self,
        wall: Wall,
        prompts: Sequence[Any],
        then: ToldMany[T],
        *,
        mm: Sequence[Media] = (),
        expected: bool = False,
        whole_prompt: bool = False,
    ) -> T | Awaitable[T]:
        """The same for several prompts."""
        if self._shards is not None:
            return self._find_everywhere(self._shards, wall, prompts, then, mm, expected, whole_prompt)
        found = []
        for tokens in prompts:
            found.append(self._fleet.match(wall, tokens if whole_prompt else usable(tokens), mm=mm, expected=expected))
            self._note(wall, tokens, found[-1])
        return then(found, "")

    async def _find_everywhere(
        self,
        shards: Shards,
        wall: Wall,
        prompts: Sequence[Any],
        then: ToldMany[T],
        mm: Sequence[Media],
        expected: bool,
        whole_prompt: bool,
    ) -> T:
        self._check_works()
        looked_up = prompts if whole_prompt else [usable(tokens) for tokens in prompts]
        found, missing = await shards.find(Question(**fields_of(wall), mm=list(mm), expected=expected), looked_up)
        for tokens, rows in zip(prompts, found, strict=True):
            self._note(wall, tokens, rows)
        return then(found, missing)

    def _check_works(self) -> None:
        if self._fleet.failure is not None:
            raise UnavailableError(f"nothing is followed any more: {self._fleet.failure}", "failed", "restart the service")

    def _note(self, wall: Wall, tokens: Any, found: list[Row]) -> None:
        self._uncounted.append((wall, tokens, found))
        if len(self._uncounted) > MAX_UNCOUNTED:
            self.count()

    def count(self) -> None:
        """Count what has been looked up. Any thread may call it: behind an answer, and before what is counted is told."""
        while True:
            try:
                wall, tokens, found = self._uncounted.popleft()
            except IndexError:
                return
            self._metrics.lookup(len(tokens), max([row.tokens for row in found], default=0))
            self._look_hot(wall, tokens)

    def find_keys(self, wall: Wall, keys: list[int], then: Told[T], *, local: bool) -> T | Awaitable[T]:
        """The same by hashes: of each block alone, or rolling."""
        if self._shards is not None:
            return self._find_keys_everywhere(self._shards, wall, keys, then, local=local)
        found = self._fleet.match_keys(wall, keys, local=local)
        self._note(wall, (), found)
        return then(found, "")

    async def _find_keys_everywhere(self, shards: Shards, wall: Wall, keys: list[int], then: Told[T], *, local: bool) -> T:
        self._check_works()
        (found,), missing = await shards.find(Question(**fields_of(wall), keys=[keys], local=local), [])
        self._note(wall, (), found)
        return then(found, missing)

    def expect(self, wall: Wall, worker: tuple[str, int], asked: SelectRequest) -> None:
        """Believe for a while that a worker will hold a prompt."""
        seconds = asked.expect_seconds
        if self._fleet.expect(wall, worker, asked.tokens, seconds) or self._shards is None:
            return
        prompt = packed(asked.tokens)
        self._shards.expect(Expectation(**fields_of(wall), instance=worker[0], rank=worker[1], prompt=prompt, seconds=seconds))

    def _look_hot(self, wall: Wall, tokens: Any) -> None:
        size = self._fleet.block_sizes(wall)[:1]
        if not size and self._shards is not None:
            size = self._shards.block_sizes(wall)[:1]
        if size and len(tokens) >= size[0]:
            self.hot.look(wall, tokens, size[0], _ALONE if wall[3:] == _NEITHER else Namespace(lora=wall.lora, salt=wall.salt))

    def hottest(self, wall: Wall, limit: int, then: Callable[[int, list[HotPrefix], str], T]) -> T | Awaitable[T]:
        """How many prompts were sampled, and the prefixes that they begin with most."""
        self.count()
        nodes, sampled = self.hot.top(wall, limit), self.hot.sampled(wall)
        if self._shards is not None and nodes:
            return self._hottest_everywhere(
                self._shards, wall, nodes, lambda prefixes, missing: then(sampled, prefixes, missing)
            )
        found = [self._fleet.match_keys(wall, list(node.path)) for node in nodes]
        return then(sampled, _prefixes(nodes, found), "")

    async def _hottest_everywhere(
        self, shards: Shards, wall: Wall, nodes: list[HotNode], then: Callable[[list[HotPrefix], str], T]
    ) -> T:
        question = Question(**fields_of(wall), keys=[list(node.path) for node in nodes])
        found, missing = await shards.find(question, [])
        return then(_prefixes(nodes, found), missing)


def usable(tokens: Any) -> Any:
    """All of a prompt but its last token, which engines recompute, and with it the block that it is in.

    So of n tokens at most (n - 1) // block size blocks are of use: vLLM 0.33 `v1/core/kv_cache_manager.py`
    (`get_computed_blocks`), SGLang 0.5.23 `managers/schedule_batch.py` (`max_prefix_len`).
    """
    return tokens[: len(tokens) - 1] if len(tokens) else tokens


def _prefixes(nodes: list[HotNode], found: list[list[Row]]) -> list[HotPrefix]:
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
