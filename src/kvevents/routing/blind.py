"""Policies that do not look at caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from kvevents.routing.choice import Candidate, Choice, Considered, Load, Prompt
from kvevents.routing.scoring import Ties
from kvevents.routing.settings import check_count, check_name

DECODING_WEIGHT: Final = 256.0
"""Prompt tokens that one request being answered counts as.

A step that makes one token for it takes as long as some ten prompt tokens, since it reads the keys and values of all tokens
before; answers take some hundred steps, of which a new prompt waits for its own share only. 64 and 1,024 are worse, each
for other traffic (docs/adr/0008-prefix-aware-score.md).
"""


MEASURES: Final[dict[str, Callable[[Load], float]]] = {
    "requests": lambda load: load.requests,
    "tokens": lambda load: load.waiting_tokens + DECODING_WEIGHT * load.decoding,
}
"""What a load can be measured by."""


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Of a policy that has none."""


class RandomChoice:
    """Any worker, by chance."""

    name = "random"
    asks_index = False

    def __init__(self, seed: int | None = None, _: NoSettings = NoSettings()) -> None:
        self._random = Random(seed)  # noqa: S311 - spreads load, keeps no secret

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002 - as all policies
        """Each is as likely as any other."""
        return Choice(candidates[self._random.randrange(len(candidates))], "by chance from {candidates}")


class RoundRobin:
    """The worker that was chosen longest ago, so that turns are fair also while workers come and go."""

    name = "round-robin"
    asks_index = False

    def __init__(self, seed: int | None = None, _: NoSettings = NoSettings()) -> None:
        self._ties = Ties(Random(seed))  # noqa: S311 - as above

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002 - as all policies
        """Begins at a random place, where no seed says otherwise."""
        return Choice(in_turn(self._ties, candidates), "whose turn it was among {candidates}")


@dataclass(frozen=True, slots=True)
class LeastLoadedSettings:
    """See `LeastLoaded`."""

    by: str = "tokens"
    """What is compared: `tokens` of work, which are those that wait and 256 for each request being answered, or `requests` in
    flight. Tokens tell prompts of a hundred tokens from prompts of a hundred thousand."""
    sample: int = 0
    """Compare so many workers only, drawn by chance; 0 compares all. 2 is "the power of two choices": of many routers that do
    not see each other's requests, not all send to the same worker."""

    def __post_init__(self) -> None:
        check_name("by", self.by, MEASURES)
        check_count("sample", self.sample)


class LeastLoaded:
    """The worker that has least to do of what this router has sent; equal ones take turns."""

    name = "least-loaded"
    asks_index = False

    def __init__(self, seed: int | None = None, settings: LeastLoadedSettings = LeastLoadedSettings()) -> None:
        self.settings = settings
        self._random = Random(seed)  # noqa: S311 - as above
        self._ties = Ties(self._random)
        self._measure = MEASURES[settings.by]

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002 - as all policies
        """The score of a candidate is its load."""
        drawn, reason = candidates, "the least loaded of {candidates}"
        if 0 < self.settings.sample < len(candidates):
            drawn, reason = self._random.sample(candidates, self.settings.sample), "the least loaded of some drawn by chance"
        loads = [self._measure(one.load) for one in drawn]
        least = min(loads)
        equal = [one for one, load in zip(drawn, loads, strict=True) if load == least]
        considered = [Considered(one, load, 1.0, load) for one, load in zip(drawn, loads, strict=True)]
        return Choice(in_turn(self._ties, equal), reason, len(equal), considered)


def in_turn(ties: Ties, equal: Sequence[Candidate], how: str = "rotate") -> Candidate:
    """One of several equal candidates, which then is the last to come next."""
    chosen = equal[ties.pick(how, [one.worker for one in equal]) if len(equal) > 1 else 0]
    ties.took(chosen.worker)
    return chosen
