"""The policy that chooses the worker with the least work until the prompt is computed, considering its cache.

Theory of operation. A candidate's score is the share of the prompt that it must compute, 0 to 1, plus the cost of the work that
waits there. The cost has two parts.

`wait_weight` multiplies the waiting work divided by the length of this prompt. Engines compute prompts one after the other
(chunked prefill shares a step, not the work). So with a weight of 1 the score is the time to first token, in units of computing
the whole prompt. That is best for this request, but not for later ones, which wait for what this one computes and find evicted
what it stores again. So computing counts more than waiting.

`load_weight` multiplies the waiting work divided by the mean of all candidates, as in `/v1/select`. Whatever the length of
prompts, an idle worker then takes prompts from a worker that holds little of them, which fills all caches of a fleet with
little to do. Alone it would go too far: in a nearly idle fleet one small request is many times the mean, and would outweigh a
long cached prefix. docs/adr/0008-prefix-aware-score.md has figures of both parts and of their sum.

The score does not see two things. Requests after their first token use memory and steps, not prompt tokens. So each counts as
some tokens, and a worker with far more requests than the others gets no credit for its cache (`guard`), which spreads a prefix
that all clients use. And routers do not know each other's requests. So ties rotate from a random start, and with `sample` each
router considers only some workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, get_args

from kvevents.routing.basic import DECODING_WEIGHT
from kvevents.routing.policy_types import (
    Candidate,
    Choice,
    Load,
    Prompt,
    ScoredCandidate,
    check_count,
    check_name,
    check_range,
    check_weights,
)
from kvevents.routing.scoring import TIES, Scorer, Ties, break_tie
from kvevents.weights import TIER_WEIGHTS, TRUST_WEIGHTS, State

_BEST: Final = "the best of {candidates}"
_TIE_REASONS: Final = {
    "rotate": "the next in rotation of {equal} equally good ones of {candidates}",
    "random": "at random from {equal} equally good ones of {candidates}",
    "first": "the first of {equal} equally good ones of {candidates}",
}


@dataclass(frozen=True, slots=True)
class PrefixAwareSettings:
    """Settings of `PrefixAware`."""

    wait_weight: float = 0.15
    """Weight of waiting work against computing as many tokens, at least 0. With 1 only the TTFT of this request counts."""
    load_weight: float = 0.05
    """Weight of work equal to the mean of all candidates against computing the whole prompt, at least 0. With 0 in both weights
    only caches count."""
    decoding_weight: float = DECODING_WEIGHT
    """Tokens of work that each request after its first token counts as, at least 0."""
    context_weight: float = 0.0
    """Tokens of work that each prompt token of such a request counts as, at least 0: for engines that are short of memory. 1
    balances what is resident rather than what waits."""
    tiers: Mapping[str, float] = field(default_factory=lambda: dict(TIER_WEIGHTS))
    """Value of a token that a tier holds against computing it, 0 to 1. Missing tiers keep their weight of `TIER_WEIGHTS`;
    unknown tiers have the lowest of all."""
    trust: Mapping[str, float] = field(default_factory=lambda: dict[str, float](TRUST_WEIGHTS.items()))
    """Factor for what a worker holds, by the state of its stream, 0 to 1. Missing states keep that of `TRUST_WEIGHTS`."""
    guard: float = 2.0
    """A worker gets no credit for its cache if it has more than this many times the mean requests in flight of the others; at
    least 1. Infinity disables this."""
    guard_requests: int = 16
    """A worker with at most this many requests always gets credit: of prompts of 12,000 tokens, a GPU of 80 GB holds about as
    many at once."""
    tie: str = "rotate"
    """How to choose between equal candidates: `rotate`, `random` or `first`."""
    sample: int = 0
    """Consider only the candidate that holds most and this many random others; 0 considers all."""

    def __post_init__(self) -> None:
        for name in ("wait_weight", "load_weight", "decoding_weight", "context_weight"):
            check_range(name, getattr(self, name), 0, finite=True)
        check_weights("tiers", self.tiers)
        check_weights("trust", self.trust, get_args(State))
        check_range("guard", self.guard, 1)
        check_count("guard_requests", self.guard_requests)
        check_name("tie", self.tie, TIES)
        check_count("sample", self.sample)


class PrefixAware:
    """Chooses the worker with the lowest sum of uncached share and load."""

    name = "prefix-aware"
    uses_index = True

    def __init__(self, seed: int | None = None, settings: PrefixAwareSettings = PrefixAwareSettings()) -> None:
        self.settings = settings
        self._random = Random(seed)  # noqa: S311 - spreads load, keeps no secret
        self._ties = Ties(self._random)
        tiers = {**TIER_WEIGHTS, **settings.tiers}
        self._scorer = Scorer(tiers, settings.wait_weight, settings.load_weight, settings.guard, settings.guard_requests)
        self._trust = dict[str, float](TRUST_WEIGHTS.items()) | dict(settings.trust)

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        """Choose the lowest score; of equal ones the one that computes less, since that saves work; then by `tie`."""
        sampled = self._sample(candidates)
        loads = [one.load for one in sampled]
        scores, best = self._scorer.weigh(
            prompt.length,
            [one.tokens for one in sampled],
            [one.tiers for one in sampled],
            [self._trust.get(one.trust, 0.0) for one in sampled],
            [self._work(load) for load in loads],
            [load.requests for load in loads],
        )
        scored = [ScoredCandidate(one, *score) for one, score in zip(sampled, scores, strict=True)]
        chosen = break_tie(self._ties, [sampled[place] for place in best], self.settings.tie)
        return Choice(chosen, _BEST if len(best) == 1 else _TIE_REASONS[self.settings.tie], len(best), scored)

    def _sample(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        if not 0 < self.settings.sample < len(candidates) - 1:
            return candidates
        # Shuffled, so that of equal holders not always the same one is considered.
        order = self._random.sample(candidates, len(candidates))
        longest = max(range(len(order)), key=lambda place: order[place].tokens)
        return [order.pop(longest), *order[: self.settings.sample]]

    def _work(self, load: Load) -> float:
        return (
            load.waiting_tokens
            + self.settings.decoding_weight * load.decoding
            + self.settings.context_weight * load.decoding_tokens
        )
