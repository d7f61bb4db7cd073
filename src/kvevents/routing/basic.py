"""Policies that ignore caches: random, round-robin and least-loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from kvevents.routing.policy_types import Candidate, Choice, Load, Prompt, ScoredCandidate, check_count, check_name
from kvevents.routing.scoring import Ties, break_tie

DECODING_WEIGHT: Final = 256.0
"""Prompt tokens that one request after its first token counts as.

A step that makes one token for it takes as long as about ten prompt tokens, since it reads the keys and values of all tokens
before. Answers take some hundred steps, and a new prompt waits only for its own share of them. 64 and 1,024 are worse, each
for other traffic (docs/adr/0008-prefix-aware-score.md).
"""


MEASURES: Final[dict[str, Callable[[Load], float]]] = {
    "requests": lambda load: load.requests,
    "tokens": lambda load: load.waiting_tokens + DECODING_WEIGHT * load.decoding,
}
"""Measures of a load, by name."""


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Settings of a policy that has none."""


class RandomChoice:
    """Chooses a random worker."""

    name = "random"
    uses_index = False

    def __init__(self, seed: int | None = None, _: NoSettings = NoSettings()) -> None:
        self._random = Random(seed)  # noqa: S311 - spreads load, keeps no secret

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002 - as all policies
        """Choose each candidate with the same probability."""
        return Choice(candidates[self._random.randrange(len(candidates))], "at random from {candidates}")


class RoundRobin:
    """Chooses the worker that was chosen longest ago, which stays fair while workers come and go."""

    name = "round-robin"
    uses_index = False

    def __init__(self, seed: int | None = None, _: NoSettings = NoSettings()) -> None:
        self._ties = Ties(Random(seed))  # noqa: S311 - as above

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002 - as all policies
        """Choose the next one in rotation. The rotation starts at a place that depends on the seed."""
        return Choice(break_tie(self._ties, candidates), "the next in rotation of {candidates}")


@dataclass(frozen=True, slots=True)
class LeastLoadedSettings:
    """Settings of `LeastLoaded`."""

    by: str = "tokens"
    """What is compared: `tokens` (waiting ones, plus 256 for each request after its first token), or `requests` in flight.
    Tokens distinguish prompts of a hundred tokens from prompts of a hundred thousand."""
    sample: int = 0
    """Compare only this many random workers; 0 compares all. 2 is "the power of two choices": many routers that do not know
    each other's requests do not all send to the same worker."""

    def __post_init__(self) -> None:
        check_name("by", self.by, MEASURES)
        check_count("sample", self.sample)


class LeastLoaded:
    """Chooses the worker with the least work of those that this router sent to; equal ones in rotation."""

    name = "least-loaded"
    uses_index = False

    def __init__(self, seed: int | None = None, settings: LeastLoadedSettings = LeastLoadedSettings()) -> None:
        self.settings = settings
        self._random = Random(seed)  # noqa: S311 - as above
        self._ties = Ties(self._random)
        self._measure = MEASURES[settings.by]

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002 - as all policies
        """Choose by load: the score of a candidate is its load."""
        sampled, reason = candidates, "the least loaded of {candidates}"
        if 0 < self.settings.sample < len(candidates):
            sampled, reason = self._random.sample(candidates, self.settings.sample), "the least loaded of a random sample"
        loads = [self._measure(one.load) for one in sampled]
        least = min(loads)
        equal = [one for one, load in zip(sampled, loads, strict=True) if load == least]
        scored = [ScoredCandidate(one, load, 1.0, load) for one, load in zip(sampled, loads, strict=True)]
        return Choice(break_tie(self._ties, equal), reason, len(equal), scored)
