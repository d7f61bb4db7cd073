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
from kvevents.routing.choice import Candidate, Choice, Considered, Prompt
from kvevents.routing.scoring import TIER_WEIGHTS, TRUST_WEIGHTS, State, TierWeights, best_of, relative_loads
from kvevents.routing.settings import check_count, check_name, check_range, check_weights
from kvevents.routing.turns import TIES, Turns

_UNBOUND: Final = float("inf")
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
        self._turns = Turns(self._random)
        self._tiers = TierWeights({**TIER_WEIGHTS, **settings.tiers})
        self._trust = dict[str, float](TRUST_WEIGHTS.items()) | dict(settings.trust)

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        """Of equal ones that which computes less, since work that is not done helps everybody; then by `tie`."""
        considered = self._consider(prompt.length, self._drawn(candidates))
        equal = best_of(considered)
        chosen = in_turn(self._turns, [one.candidate for one in equal], self.settings.tie)
        return Choice(chosen, _BEST if len(equal) == 1 else _WAYS[self.settings.tie], len(equal), considered)

    def _drawn(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        if not 0 < self.settings.sample < len(candidates) - 1:
            return candidates
        order = self._random.sample(
            candidates, len(candidates)
        )  # so that not the same one of equal holders is always looked at
        longest = max(range(len(order)), key=lambda place: order[place].tokens)
        return [order.pop(longest), *order[: self.settings.sample]]

    def _consider(self, length: int, drawn: Sequence[Candidate]) -> list[Considered]:
        trusted, saved_by, bound = self._trust.get, self._tiers.saved, self._bound(drawn)
        work = self._work(drawn)
        wait, load = self.settings.wait_weight / max(length, 1), self.settings.load_weight
        found: list[Considered] = []
        for one, tokens, relative in zip(drawn, work, relative_loads(work), strict=True):
            uncached, weighted, hot = 1.0, wait * tokens + load * relative, one.load.requests > bound
            if one.tokens and not hot:
                uncached -= trusted(one.trust, 0.0) * saved_by(one.tokens, one.tiers, length)
            found.append(Considered(one, uncached + weighted, uncached, weighted, hot))
        return found

    def _work(self, drawn: Sequence[Candidate]) -> list[float]:
        request, token = self.settings.decoding_weight, self.settings.context_weight
        loads = [one.load for one in drawn]
        return [load.waiting_tokens + request * load.decoding + token * load.decoding_tokens for load in loads]

    def _bound(self, drawn: Sequence[Candidate]) -> float:
        """Requests above which a worker is hot: r > guard * (all - r) / (n - 1), solved for r."""
        requests = sum([one.load.requests for one in drawn])
        guard, others = self.settings.guard, len(drawn) - 1
        relative = guard * requests / (others + guard) if others and guard < _UNBOUND else requests
        return max(relative, self.settings.guard_requests)
