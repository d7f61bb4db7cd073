"""Random histories that our simulation and vLLM's own modules execute side by side.

`CacheHistory` calls the cache as an erratic scheduler would: a random request gets a chunk of any length. `EngineHistory`
only submits requests and leaves everything else to the two schedulers. The pools are small, so that almost every block is
used.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NamedTuple

from kvevents.sim.cache import CacheSize, PrefixCache
from kvevents.sim.costs import CostModel
from kvevents.sim.requests import Request, Text
from kvevents.sim.requests import Sequence as Simulated
from kvevents.sim.simulated_engine import Job, SimulatedEngine, StepLimits
from tests.system.vllm_oracle.comparing import Counts, Streams, expect
from tests.system.vllm_oracle.vllm_blocks import RealCache, request
from tests.system.vllm_oracle.vllm_scheduler import RealScheduler

VOCABULARY: Final = 1 << 16
ANSWER: Final = 24
"""Tokens of the longest answer."""
REMEMBERED: Final = 8
"""Earlier texts that the beginning of a prompt may be taken from."""
QUEUE: Final = 6
"""Requests that wait, at most."""


class Case(NamedTuple):
    """One kind of cache, and the kind of its requests."""

    name: str
    window: float | None = None
    """Blocks that the other group's window reaches over, about; None for full attention alone."""
    adapters: tuple[str | None, ...] = (None,)
    salts: tuple[str | None, ...] = (None,)
    repeated: bool = False
    """Whether prompts are beginnings of one text and end with a block, so that their last block is recomputed each time."""


CASES: Final = (
    Case("full attention"),
    Case("LoRA and salts", adapters=(None, "sql"), salts=(None, "a", "b")),
    Case("sliding window", window=2),
    Case("the same prompts again and again", repeated=True),
    Case("the same again, sliding window", window=3, repeated=True),
    Case("long window, LoRA and salts", window=5, adapters=(None, "sql"), salts=(None, "a")),
)


class GeneratedRequest(NamedTuple):
    """A request for both caches."""

    name: str
    prompt: list[int]
    answer: list[int]
    options: dict[str, str | None]
    """The options `lora` and `salt`."""


class Generator:
    """The cache size and the requests of a history of one case and seed; requests share prefixes."""

    def __init__(self, case: Case, kind: str, seed: int) -> None:
        self.random = draw = Random(f"{case.name} {kind} {seed}")
        self._case = case
        self.block_size = size = draw.choice((1, 2, 4, 16))
        blocks = draw.randint(4, 40) * (1 if case.window is None else 2)
        window = None if case.window is None else max(2, int(case.window * size) + draw.randint(-2, 2))
        self.step_tokens = draw.choice((blocks * size, draw.randint(QUEUE, max(QUEUE, blocks * size // 4))))
        self.size = CacheSize(blocks, size, window=window)
        self.windows = (None,) if window is None else (window, None)
        self._room = blocks * size
        """Tokens that all blocks together hold."""
        self._max_fresh = draw.choice((2 * size, self._room // 8 + 1, self._room // 2))
        """New tokens of a prompt, at most, in most prompts."""
        self._texts = [self._make_words(self._room // 2)]
        self._count = 0

    def __str__(self) -> str:
        return f"{self.size}, {self.step_tokens} tokens a step"

    def request(self) -> GeneratedRequest:
        """Return a request that may begin like an earlier text."""
        draw = self.random
        prompt = self._make_repeated() if self._case.repeated else self._make_branch(draw.choice(self._texts))
        answer = self._make_words(draw.randint(1, ANSWER))
        if not self._case.repeated:
            self._texts = [*self._texts, prompt + answer][-REMEMBERED:]
        self._count += 1
        options = {"lora": draw.choice(self._case.adapters), "salt": draw.choice(self._case.salts)}
        return GeneratedRequest(f"r{self._count}", prompt, answer, options)

    def _make_repeated(self) -> list[int]:
        text, blocks = self._texts[0], min(4, len(self._texts[0]) // self.block_size)
        return text[: self.block_size * self.random.randint(1, blocks)]

    def _make_branch(self, text: list[int]) -> list[int]:
        draw, size = self.random, self.block_size
        shared = draw.choice((0, draw.randint(0, len(text)), draw.randint(0, len(text) // size) * size, len(text)))
        fresh = draw.choice((0, 1, draw.randint(1, self._max_fresh), draw.randint(1, self._max_fresh)))
        return (text[:shared] + self._make_words(fresh))[: self._room] or self._make_words(1)

    def _make_words(self, count: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(count)]


@dataclass(eq=False)
class Pair:
    """One request in both caches."""

    tokens: list[int]
    """Tokens of the prompt, then of the answer."""
    ours: Simulated
    theirs: Any
    known: int
    computed: int = 0


_WEIGHTS: Final = (4, 8, 24, 0.5, 0.5, 0.1)
"""How often each action of `CacheHistory._actions` is chosen."""


class CacheHistory:
    """Random calls of a cache. Each step raises `DifferenceError` when the two caches do not agree after it."""

    def __init__(self, case: Case, seed: int, counts: Counts) -> None:
        self.generator: Final = Generator(case, "cache", seed)
        generator = self.generator
        self._random = generator.random
        self._counts = counts
        self._ours = PrefixCache(generator.size, max_step_tokens=generator.step_tokens)
        self._theirs = RealCache(
            generator.size.blocks, generator.block_size, generator.windows, max_step_tokens=generator.step_tokens
        )
        self._streams = Streams(counts)
        self._waiting: list[Pair] = []
        self._running: list[Pair] = []
        self._actions = (self._arrive, self._admit, self._work, self._preempt, self._abort, self._reset)

    def step(self) -> None:
        """Call both caches once, and compare."""
        self._random.choices(self._actions, _WEIGHTS)[0]()
        self._counts.steps += 1
        self._streams.compare(self._ours.take_events(), self._theirs.take_events())
        expect("free blocks", self._ours.pool.free_blocks, self._theirs.free)

    def _arrive(self) -> None:
        if len(self._waiting) < QUEUE:
            generated, size = self.generator.request(), self.generator.block_size
            tokens = generated.prompt + generated.answer
            ours = Simulated(array("I", tokens), len(generated.prompt), size, "seed", **generated.options)
            theirs = request(generated.name, generated.prompt, size, output=len(generated.answer), **generated.options)
            self._waiting.append(Pair(tokens, ours, theirs, len(generated.prompt)))

    def _admit(self) -> None:
        if not self._waiting:
            return
        pair = self._waiting[0]
        found = self._ours.find(pair.ours)
        cached = expect("cached tokens", found.tokens, self._theirs.lookup(pair.theirs))
        self._counts.lookups += 1
        self._counts.hits += cached > 0
        chunk = self._chunk(pair.known - cached)
        if expect("admitted", self._ours.admit(pair.ours, found, chunk), self._theirs.admit(pair.theirs, chunk)):
            pair.computed = cached + chunk
            self._running.append(self._waiting.pop(0))
            return
        self._counts.refusals += 1
        if not self._running:
            self._waiting.pop(0)  # longer than the whole pool

    def _work(self) -> None:
        """Compute the next tokens of a request, and preempt others if there are too few free blocks."""
        if not self._running:
            return
        pair = self._random.choice(self._running)
        if pair.computed == pair.known == len(pair.tokens):
            self._finish(pair)
            return
        if pair.computed == pair.known:
            pair.theirs.append_output_token_ids(pair.tokens[pair.known])
            pair.known += 1
            pair.ours.known = pair.known
        chunk = self._chunk(pair.known - pair.computed)
        while not expect("room", self._ours.extend(pair.ours, chunk), self._theirs.extend(pair.theirs, chunk)):
            self._preempt()
            if pair not in self._running:
                return
        pair.computed += chunk

    def _preempt(self) -> None:
        if self._running:
            pair = self._running[-1]
            self._finish(pair)
            pair.computed = 0
            self._waiting.insert(0, pair)
            self._counts.preemptions += 1

    def _abort(self) -> None:
        if self._running:
            self._finish(self._random.choice(self._running))

    def _reset(self) -> None:
        while self._running and self._random.random() < 0.9:
            self._finish(self._running[-1])
        self._counts.resets += expect("reset", self._ours.reset(), self._theirs.reset())

    def _finish(self, pair: Pair) -> None:
        self._running.remove(pair)
        self._ours.release(pair.ours)
        self._theirs.release(pair.theirs)

    def _chunk(self, most: int) -> int:
        most = min(most, self.generator.step_tokens)
        return most if self._random.random() < 0.5 else self._random.randint(1, most)


class EngineHistory:
    """Steps of our engine and of vLLM's scheduler. Each step raises `DifferenceError` when the two do not agree after it."""

    def __init__(self, case: Case, seed: int, counts: Counts) -> None:
        self.generator: Final = Generator(case, "engine", seed)
        generator = self.generator
        self._random = generator.random
        self._counts = counts
        seqs = self._random.randint(1, min(QUEUE, generator.step_tokens))
        step_limits = StepLimits(max_num_seqs=seqs, max_num_batched_tokens=generator.step_tokens)
        self._ours = SimulatedEngine(generator.size, CostModel(step=1.0, token=0.0), step_limits, seed="seed")
        self._theirs = RealScheduler(
            generator.size.blocks, generator.block_size, generator.windows,
            max_num_seqs=seqs, max_num_batched_tokens=generator.step_tokens,
        )  # fmt: skip
        self._streams = Streams(counts)
        self._names: dict[Job, str] = {}
        self._arrival_probability = self._random.choice((0.05, 0.3, 0.8))
        """Probability that a request is submitted before a step."""

    def step(self) -> None:
        """Submit requests, do one step of both, and compare."""
        while self._ours.waiting < QUEUE and self._random.random() < self._arrival_probability:
            self._arrive()
        if not self._ours.running and self._random.random() < 0.1:
            self._ours.reset()
            self._counts.resets += expect("reset", ours=True, theirs=self._theirs.reset())
        preemptions = self._ours.preemptions
        self._ours.begin()
        output = self._theirs.begin()
        expect("free blocks when scheduled", self._ours.cache.pool.free_blocks, self._theirs.free)
        ours, theirs = self._ours.end(), self._theirs.end(output)
        names = self._names
        lookups = {names[each.job]: (each.tokens, each.cached, each.position) for each in ours.lookups}
        expect("lookups (tokens, cached, position)", lookups, {name: tuple(each) for name, each in theirs.lookups.items()})
        expect("finished", [names[job] for job in ours.finished], theirs.finished)
        expect("refused", ours.refused, [])
        self._streams.compare(ours.events, theirs.events)
        expect("free blocks", self._ours.cache.pool.free_blocks, self._theirs.free)
        expect("running", self._ours.running, len(self._theirs.running))
        expect("waiting", self._ours.waiting, len(self._theirs.waiting))
        counts = self._counts
        counts.steps += 1
        counts.lookups += len(lookups)
        counts.hits += sum(each.cached > 0 for each in ours.lookups)
        counts.refusals += self._ours.waiting > 0
        counts.preemptions += self._ours.preemptions - preemptions

    def _arrive(self) -> None:
        generated = self.generator.request()
        if not self._ours.cache.could_hold(len(generated.prompt) + len(generated.answer)):
            return  # ours refuses it; vLLM refuses at startup, since max_model_len must fit
        self._theirs.submit(generated.name, generated.prompt, generated.answer, **generated.options)
        job = self._ours.submit(
            Request(0.0, Text.from_tokens(generated.prompt), Text.from_tokens(generated.answer), None, **generated.options)
        )
        self._names[job] = generated.name
