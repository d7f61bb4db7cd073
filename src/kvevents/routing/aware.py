"""The worker that has least to do until a prompt is computed, its cache considered.

Theory of operation. A candidate's score is the share of the prompt that it must compute, 0 to 1, plus what the work costs that
waits there, in two parts. `wait_weight` times the work over the length of this prompt: engines compute prompts one after the
other (chunked prefill shares a step, not the work), so with a weight of 1 it is how long the first token takes, in units of
computing the whole prompt. That is best for this request, and not for those behind it, which wait for what it computes, and
find evicted what it put in memory again. So computing counts more than waiting.

`load_weight` times the work over the mean of all candidates, as in `/v1/select`: whatever the length of prompts, a worker
without work takes some from one that holds little of them, which fills every cache of a fleet that has little to do. Alone it
would do that too well: in a fleet that is almost idle one small request is many times the mean, and would cost a long cached
prefix (docs/adr/0008-prefix-aware-score.md has figures of both, and of their sum).

Two things this does not see. Requests that are being answered take memory and steps, not prompt tokens: they count as some
tokens each, and a worker with far more requests than the others gets no credit for its cache (`guard`), so that a prefix that
everybody asks for spreads to others. And routers do not know each other's requests: ties rotate from a random place, and
`sample` has each look at some workers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, get_args

from kvevents.routing.blind import DECODING_WEIGHT, in_turn
from kvevents.routing.choice import Candidate, Choice, Considered, Load, Prompt
from kvevents.routing.scoring import TIES, Scorer, Ties
from kvevents.routing.settings import check_count, check_name, check_range, check_weights
from kvevents.weights import TIER_WEIGHTS, TRUST_WEIGHTS, State

_BEST: Final = "the best of {candidates}"
_WAYS: Final = {
    "rotate": "in turn from {equal} equally good ones of {candidates}",
    "random": "by chance from {equal} equally good ones of {candidates}",
    "first": "the first of {equal} equally good ones of {candidates}",
}


@dataclass(frozen=True, slots=True)
class PrefixAwareSettings:
    """See `PrefixAware`."""

    wait_weight: float = 0.15
    """What work that waits counts against computing as many tokens, from 0 on. With 1 only this request's TTFT matters."""
    load_weight: float = 0.05
    """What work of the mean of all candidates counts against computing the whole prompt, from 0 on. With 0 in both only caches
    decide."""
    decoding_weight: float = DECODING_WEIGHT
    """Tokens of work that each request being answered counts as, from 0 on."""
    context_weight: float = 0.0
    """Tokens of work that each prompt token of a request being answered counts as, from 0 on: for engines whose memory is what
    is scarce. 1 balances what is resident rather than what waits."""
    tiers: Mapping[str, float] = field(default_factory=lambda: dict(TIER_WEIGHTS))
    """What a token that a tier holds is worth against computing it, 0 to 1. Tiers not given keep their weight of
    `TIER_WEIGHTS`; unknown ones have the lowest of all."""
    trust: Mapping[str, float] = field(default_factory=lambda: dict[str, float](TRUST_WEIGHTS.items()))
    """How far a worker is believed in each state, 0 to 1. States not given keep their weight of `TRUST_WEIGHTS`."""
    guard: float = 2.0
    """A worker that has more than so many times the requests in flight that the others have on average, from 1 on, gets no
    credit for its cache. Infinity guards nothing."""
    guard_requests: int = 16
    """But not while it has this many or fewer: of prompts of 12,000 tokens, a GPU of 80 GB holds about so many at once."""
    tie: str = "rotate"
    """Between equal ones: `rotate`, `random`, or the `first`."""
    sample: int = 0
    """Look only at the one that holds most and so many others, drawn by chance; 0 looks at all."""

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
    """The worker with the smallest sum of uncached share and load."""

    name = "prefix-aware"
    asks_index = True

    def __init__(self, seed: int | None = None, settings: PrefixAwareSettings = PrefixAwareSettings()) -> None:
        self.settings = settings
        self._random = Random(seed)  # noqa: S311 - spreads load, keeps no secret
        self._ties = Ties(self._random)
        tiers = {**TIER_WEIGHTS, **settings.tiers}
        self._scorer = Scorer(tiers, settings.wait_weight, settings.load_weight, settings.guard, settings.guard_requests)
        self._trust = dict[str, float](TRUST_WEIGHTS.items()) | dict(settings.trust)

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        """Of equal ones that which computes less, since work that is not done helps everybody; then by `tie`."""
        drawn = self._drawn(candidates)
        loads = [one.load for one in drawn]
        scores, best = self._scorer.weigh(
            prompt.length,
            [one.tokens for one in drawn],
            [one.tiers for one in drawn],
            [self._trust.get(one.trust, 0.0) for one in drawn],
            [self._work(load) for load in loads],
            [load.requests for load in loads],
        )
        considered = [Considered(one, *score) for one, score in zip(drawn, scores, strict=True)]
        chosen = in_turn(self._ties, [drawn[place] for place in best], self.settings.tie)
        return Choice(chosen, _BEST if len(best) == 1 else _WAYS[self.settings.tie], len(best), considered)

    def _drawn(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        if not 0 < self.settings.sample < len(candidates) - 1:
            return candidates
        order = self._random.sample(
            candidates, len(candidates)
        )  # so that not the same one of equal holders is always looked at
        longest = max(range(len(order)), key=lambda place: order[place].tokens)
        return [order.pop(longest), *order[: self.settings.sample]]

    def _work(self, load: Load) -> float:
        return (
            load.waiting_tokens
            + self.settings.decoding_weight * load.decoding
            + self.settings.context_weight * load.decoding_tokens
        )
