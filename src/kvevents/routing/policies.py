"""The policies of routing: random, round-robin, least-loaded, session-affinity and prefix-aware; and their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from hashlib import blake2b
from random import Random
from types import MappingProxyType
from typing import Any, Final, TypeVar, get_args

import kvevents.index  # noqa: F401 - this import raises a readable error without the compiled module
from kvevents.errors import ConfigError
from kvevents.routing.policy_types import (
    Candidate,
    Choice,
    Load,
    Policy,
    Prompt,
    ScoredCandidate,
    Worker,
    check_count,
    check_name,
    check_range,
    check_weights,
)
from kvevents.routing.weights import TIER_WEIGHTS, TRUST_WEIGHTS
from kvevents.stream import TrustState
from kvevents_native import _native
from kvevents_native._native import Scorer, Ties

__all__ = [
    "DECODING_WEIGHT",
    "MEASURES",
    "POLICIES",
    "TIES",
    "LeastLoaded",
    "LeastLoadedSettings",
    "NoSettings",
    "PrefixAware",
    "PrefixAwareSettings",
    "RandomChoice",
    "RoundRobin",
    "Scorer",
    "SessionAffinity",
    "SessionAffinitySettings",
    "Ties",
    "break_tie",
    "nearest",
    "policy",
]

TIES: Final = ("rotate", "random", "first")
"""Ways to choose between equal workers: the worker that was chosen longest ago, a random one, or the first candidate."""

max_requests: Final = _native.max_requests
"""Function that returns the number of requests above which a worker's cache does not count in selections of the service."""
A = TypeVar("A")


def nearest(candidates: Sequence[A], distances: list[int]) -> Sequence[A]:
    """Return the candidates with the lowest distance, in the order of `candidates`.

    If `distance_of` returned the distances, a STALE worker is included only if no other worker is connected or connecting.
    """
    places = _native.nearest(distances)
    return candidates if len(places) == len(candidates) else [candidates[place] for place in places]


def break_tie(ties: Ties, candidates: Sequence[Candidate], rule: str = "rotate") -> Candidate:
    """Choose one of several equal candidates by a rule of `TIES`. The chosen candidate moves to the end of the rotation."""
    chosen = candidates[ties.pick(rule, [candidate.worker for candidate in candidates]) if len(candidates) > 1 else 0]
    ties.took(chosen.worker)
    return chosen


# --- policies that ignore caches

DECODING_WEIGHT: Final = 256.0
"""Load of a request after its first token, in prompt tokens with the same computing time.

A step that generates one token of an answer takes as long as computing about ten prompt tokens, since the step reads the keys
and values of all earlier tokens. An answer takes some hundred steps, but a new prompt only waits for some of them. The values
64 and 1,024 are each worse for some kind of traffic (decision record 0008).
"""


MEASURES: Final[dict[str, Callable[[Load], float]]] = {
    "requests": lambda load: load.requests,
    "tokens": lambda load: load.waiting_tokens + DECODING_WEIGHT * load.decoding,
}
"""Maps the name of each measure to the function that measures a load."""


@dataclass(frozen=True, slots=True)
class NoSettings:
    """Settings without fields, for policies that need no settings."""


class RandomChoice:
    """Chooses a random worker."""

    name = "random"
    uses_index = False

    def __init__(self, seed: int | None = None, _: NoSettings = NoSettings()) -> None:
        self._random = Random(seed)  # noqa: S311 - random choices spread load and protect no secret

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002 - policies share a signature
        """Choose each candidate with the same probability."""
        return Choice(candidates[self._random.randrange(len(candidates))], "at random from {candidates}")


class RoundRobin:
    """Chooses the worker that was chosen longest ago, so that the rotation stays fair when workers are added or removed."""

    name = "round-robin"
    uses_index = False

    def __init__(self, seed: int | None = None, _: NoSettings = NoSettings()) -> None:
        self._ties = Ties(Random(seed))  # noqa: S311 - random choices spread load and protect no secret

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002 - policies share a signature
        """Choose the next worker in the rotation. The rotation starts at a place that depends on the seed."""
        return Choice(break_tie(self._ties, candidates), "the next in rotation of {candidates}")


@dataclass(frozen=True, slots=True)
class LeastLoadedSettings:
    """Settings of `LeastLoaded`."""

    by: str = "tokens"
    """The load to compare: `tokens` (waiting prompt tokens, plus 256 for each request after its first token), or `requests` in
    flight. Tokens distinguish prompts of a hundred tokens from prompts of a hundred thousand."""
    sample: int = 0
    """Number of random workers to compare; 0 compares all workers. With 2 ("the power of two choices"), routers that do not
    know each other's requests do not all choose the same worker."""

    def __post_init__(self) -> None:
        check_name("by", self.by, MEASURES)
        check_count("sample", self.sample)


class LeastLoaded:
    """Chooses the worker with the least work in flight; equal workers are chosen in rotation."""

    name = "least-loaded"
    uses_index = False

    def __init__(self, seed: int | None = None, settings: LeastLoadedSettings = LeastLoadedSettings()) -> None:
        self.settings = settings
        self._random = Random(seed)  # noqa: S311 - random choices spread load and protect no secret
        self._ties = Ties(self._random)
        self._measure = MEASURES[settings.by]

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002 - policies share a signature
        """Choose the candidate with the lowest load. The score of a candidate is its load."""
        sampled, reason = candidates, "the least loaded of {candidates}"
        if 0 < self.settings.sample < len(candidates):
            sampled, reason = self._random.sample(candidates, self.settings.sample), "the least loaded of a random sample"
        loads = [self._measure(one.load) for one in sampled]
        least = min(loads)
        equal = [one for one, load in zip(sampled, loads, strict=True) if load == least]
        scored = [ScoredCandidate(one, load, 1.0, load) for one, load in zip(sampled, loads, strict=True)]
        return Choice(break_tie(self._ties, equal), reason, len(equal), scored)


# --- session-affinity

_MASK_64_BITS: Final = (1 << 64) - 1
_MAX_CACHED_WORKERS: Final = 16_384
"""Number of workers whose hashes are cached: four times the number that a service follows by default."""


@dataclass(frozen=True, slots=True)
class SessionAffinitySettings:
    """Settings of `SessionAffinity`."""

    factor: float = 1.25
    """Limit of the requests in flight at a worker, as a multiple of the mean of all workers. At least 1; with infinity,
    sessions never move. Lower values move more sessions, higher values allow more load on one worker."""
    spare: int = 8
    """Minimum of the limit, in requests: an engine can answer this number at a time, and in a nearly idle fleet one request is
    many times the mean."""

    def __post_init__(self) -> None:
        check_range("factor", self.factor, 1)
        check_count("spare", self.spare)


class SessionAffinity:
    """Chooses the worker of the session; for a prompt without a session, the worker with the fewest requests."""

    name = "session-affinity"
    uses_index = False

    def __init__(self, seed: int | None = None, settings: SessionAffinitySettings = SessionAffinitySettings()) -> None:
        """`seed` only affects prompts without a session, so that all routers agree on the worker of a session."""
        self.settings = settings
        self._ties = Ties(Random(seed))  # noqa: S311 - random choices spread load and protect no secret

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        """Choose, of the workers below the limit of requests, the one whose hash with the session is the highest."""
        if prompt.session is None:
            fewest = min(one.load.requests for one in candidates)
            equal = [one for one in candidates if one.load.requests == fewest]
            chosen = break_tie(self._ties, equal)
            return Choice(chosen, "the least loaded of {candidates}, since the prompt has no session", len(equal))
        session = _hash(prompt.session.encode("utf-8", "surrogatepass"))
        ranked = sorted(candidates, key=lambda one: (_mix_bits(session ^ _hash_worker(one.worker)), one.worker), reverse=True)
        limit = self.max_requests(sum(one.load.requests for one in candidates), len(candidates))
        for place, one in enumerate(ranked):
            if one.load.requests < limit:
                if place:
                    return Choice(one, "the session's next choice, since its own worker has too many requests")
                return Choice(one, "the session's own among {candidates}")
        raise AssertionError("no worker is below a bound of at least the mean load")  # pragma: no cover

    def max_requests(self, requests: int, workers: int) -> float:
        """Return the limit of requests in flight at one worker, if all workers have `requests` and the new request is added."""
        if math.isinf(self.settings.factor):
            return math.inf
        return max(self.settings.spare, math.ceil(self.settings.factor * ((requests + 1) / workers)))


def _hash(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


@lru_cache(_MAX_CACHED_WORKERS)
def _hash_worker(worker: Worker) -> int:
    source, rank = worker
    return _hash(b"%d:%s" % (rank, source.encode("utf-8", "surrogatepass")))


def _mix_bits(number: int) -> int:
    """Apply the finaliser of SplitMix64, after which each of the 64 bits depends on all other bits."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64_BITS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK_64_BITS
    return number ^ (number >> 31)


# --- prefix-aware

_TIE_REASONS: Final = {
    "rotate": "the next in rotation of {equal} equally good ones of {candidates}",
    "random": "at random from {equal} equally good ones of {candidates}",
    "first": "the first of {equal} equally good ones of {candidates}",
}


@dataclass(frozen=True, slots=True)
class PrefixAwareSettings:
    """Settings of `PrefixAware`."""

    wait_weight: float = 0.15
    """Weight of a waiting token, relative to a token of this prompt that must be computed; at least 0. With 1, both count
    equally: both delay this prompt's first token equally."""
    load_weight: float = 0.05
    """Cost of a load that equals the mean of all candidates, relative to computing the whole prompt; at least 0. If both
    weights are 0, only caches count."""
    decoding_weight: float = DECODING_WEIGHT
    """Load of a request after its first token, in prompt tokens to compute; at least 0."""
    context_weight: float = 0.0
    """Further load for each prompt token of a request after its first token, for engines short of memory; at least 0. With 1,
    the policy balances tokens in memory rather than waiting tokens."""
    tiers: Mapping[str, float] = field(default_factory=lambda: dict[str, float](TIER_WEIGHTS.items()))
    """Value of a token by the tier that holds it, from 0 (as bad as computing it) to 1. Tiers that are not in the mapping get
    their value from `TIER_WEIGHTS`; unknown tiers have the lowest value of all tiers."""
    trust: Mapping[str, float] = field(default_factory=lambda: dict[str, float](TRUST_WEIGHTS.items()))
    """Factor for tokens that a worker holds, by the state of its stream, 0 to 1. The default is in `TRUST_WEIGHTS`.
    Tokens that might be gone (`Candidate.uncertain`) have the lower of this factor and that of DEGRADED."""
    guard: float = 2.0
    """A worker gets no credit for its cache if it has more requests in flight than `guard_requests`, and more than `guard`
    times the mean of the other workers. `guard` is at least 1; infinity disables the rule."""
    guard_requests: int = 16
    """Number of requests in flight up to which a worker always gets credit for its cache. A GPU of 80 GB
    holds about 16 prompts of 12,000 tokens at once."""
    tie: str = "rotate"
    """How to choose between equal candidates: `rotate`, `random` or `first`."""
    sample: int = 0
    """Consider only the candidate with the longest prefix of the prompt, and this many random candidates; 0 considers all."""

    def __post_init__(self) -> None:
        for name in ("wait_weight", "load_weight", "decoding_weight", "context_weight"):
            check_range(name, getattr(self, name), 0, finite=True)
        check_weights("tiers", self.tiers)
        check_weights("trust", self.trust, get_args(TrustState))
        check_range("guard", self.guard, 1)
        check_count("guard_requests", self.guard_requests)
        check_name("tie", self.tie, TIES)
        check_count("sample", self.sample)


class PrefixAware:
    """Chooses the worker with the lowest sum of the uncached share of the prompt and the cost of the load."""

    name = "prefix-aware"
    uses_index = True

    def __init__(self, seed: int | None = None, settings: PrefixAwareSettings = PrefixAwareSettings()) -> None:
        self.settings = settings
        self._random = Random(seed)  # noqa: S311 - random choices spread load and protect no secret
        self._ties = Ties(self._random)
        tiers = dict[str, float](TIER_WEIGHTS.items()) | dict(settings.tiers)
        self._trust = dict[str, float](TRUST_WEIGHTS.items()) | dict(settings.trust)
        self._scorer = Scorer(
            tiers, settings.wait_weight, settings.load_weight, settings.guard, settings.guard_requests, self._trust["DEGRADED"]
        )

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        """Choose the lowest score; of equal scores, the candidate with fewer tokens to compute; then choose by `tie`."""
        sampled = self._sample(candidates)
        loads = [one.load for one in sampled]
        decoding, context = self.settings.decoding_weight, self.settings.context_weight
        scores, best = self._scorer.weigh(
            prompt.length,
            [one.tokens for one in sampled],
            [one.tokens - one.uncertain for one in sampled],
            [one.tiers for one in sampled],
            [self._trust.get(one.trust, 0.0) for one in sampled],
            [load.waiting_tokens + decoding * load.decoding + context * load.decoding_tokens for load in loads],
            [load.requests for load in loads],
            {place: one.inexact_tiers for place, one in enumerate(sampled) if one.inexact_tiers and one.trust == "EXACT"},
        )
        scored = [ScoredCandidate(one, *score) for one, score in zip(sampled, scores, strict=True)]
        chosen = break_tie(self._ties, [sampled[place] for place in best], self.settings.tie)
        reason = "the best of {candidates}" if len(best) == 1 else _TIE_REASONS[self.settings.tie]
        return Choice(chosen, reason, len(best), scored)

    def _sample(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        if not 0 < self.settings.sample < len(candidates) - 1:
            return candidates
        # The candidates are shuffled, so that a random one of those with the longest prefix is considered.
        order = self._random.sample(candidates, len(candidates))
        longest = max(range(len(order)), key=lambda place: order[place].tokens)
        return [order.pop(longest), *order[: self.settings.sample]]


# --- names


def _make_factory(kind: Callable[[int | None, Any], Policy], name: str, settings: type[Any]) -> Callable[..., Policy]:
    known = [field.name for field in fields(settings)]

    def make(seed: int | None = None, **given: Any) -> Policy:
        for setting in given:
            if setting not in known:
                raise ConfigError(f"invalid setting {setting!r} of {name}: expected one of {', '.join(known) or '(none)'}")
        return kind(seed, settings(**given))

    return make


POLICIES: Final[Mapping[str, Callable[..., Policy]]] = MappingProxyType(
    {
        RandomChoice.name: _make_factory(RandomChoice, RandomChoice.name, NoSettings),
        RoundRobin.name: _make_factory(RoundRobin, RoundRobin.name, NoSettings),
        LeastLoaded.name: _make_factory(LeastLoaded, LeastLoaded.name, LeastLoadedSettings),
        SessionAffinity.name: _make_factory(SessionAffinity, SessionAffinity.name, SessionAffinitySettings),
        PrefixAware.name: _make_factory(PrefixAware, PrefixAware.name, PrefixAwareSettings),
    }
)
"""Maps the name of each policy to its factory. The arguments of a factory are a seed, and the policy's settings as keywords."""


def policy(name: str, seed: int | None = None, **settings: Any) -> Policy:
    """Return a policy by its name. Raises `ConfigError` for an unknown name and for an invalid setting.

    With a seed, equal requests give equal decisions. Without a seed, each policy starts at random, so that several routers of
    one fleet do not all choose the same workers.
    """
    if name not in POLICIES:
        raise ConfigError(f"invalid policy {name!r}: expected one of {', '.join(POLICIES)}")
    return POLICIES[name](seed, **settings)
