"""The input and output of policies, and the validation of their settings.

A router makes these objects for each decision, so they are msgspec structs: a struct takes a tenth of a microsecond, and the
garbage collector need not track it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from kvevents.errors import ConfigError

Worker: TypeAlias = tuple[str, int]
"""Source and rank."""


class Load(Struct, frozen=True, gc=False):
    """The work of a worker: the requests that the router has sent to the worker and that have not ended.

    If the engine reports its load, the report replaces these numbers (`Router`).
    """

    requests: int = 0
    """Number of requests in flight."""
    waiting_tokens: int = 0
    """Number of prompt tokens that the worker must still compute, for requests before their first token."""
    decoding: int = 0
    """Number of requests after their first token."""
    decoding_tokens: int = 0
    """Number of prompt tokens of the requests in `decoding`, including cached tokens, which each step also reads."""


IDLE = Load()


class Candidate(Struct, frozen=True, gc=False):
    """A worker that a policy may choose."""

    worker: Worker
    load: Load = IDLE
    tokens: int = 0
    """Number of tokens of the longest prefix that the worker holds, on any tiers; 0 if the policy does not use the index."""
    tiers: Mapping[str, int] = {}
    """Cumulative number of matched tokens on each tier: `cpu` counts a prefix that starts on the GPU and continues in host
    memory."""
    trust: str = "EXACT"
    """State of the worker's stream, as `kvevents.Trust` names it."""
    inexact_tiers: tuple[str, ...] = ()
    """Tiers to which `trust` does not apply, as in `Trust.inexact_tiers`. If `trust` is EXACT, tokens on these tiers count as
    DEGRADED."""
    uncertain: int = 0
    """How many of `tokens`, at the end of the prefix, might be gone; `WorkerMatch.certain` counts the others."""


class Prompt(Struct, frozen=True, gc=False):
    """A prompt to route."""

    length: int
    """Length in tokens."""
    session: str | None = None
    """ID of the conversation; None if it is unknown."""


class ScoredCandidate(Struct, frozen=True, gc=False):
    """A candidate with its score and the parts of the score."""

    candidate: Candidate
    score: float
    """A lower score is better."""
    uncached: float
    """Share of the prompt that the worker would have to compute, 0 to 1, after weights of tiers and trust."""
    load: float
    """Part of the score that the load of the worker adds."""
    hot: bool = False
    """Whether the candidate's cache was ignored because the candidate has too many requests."""

    @property
    def worker(self) -> Worker:
        """Source and rank."""
        return self.candidate.worker


class Choice(Struct, frozen=True, gc=False):
    """The choice of a policy, with its reason."""

    chosen: Candidate
    reason: str
    """End of the sentence "POLICY chose WORKER, ..."; `{candidates}` and `{equal}` stand for the numbers of candidates."""
    equal: int = 1
    """Number of candidates that are as good as the chosen candidate, which is counted too."""
    scored: Sequence[ScoredCandidate] = ()
    """All candidates that were scored, in any order; empty if the policy does not score."""


class Policy(Protocol):
    """Chooses a worker. A policy need not be thread-safe: `Router` calls it under a lock."""

    @property
    def name(self) -> str:
        """Name of the policy in settings and explanations."""
        ...

    @property
    def uses_index(self) -> bool:
        """Whether the router must look up the prompt before `choose`, so that candidates have their matches."""
        ...

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        """Choose one of the candidates. `candidates` is not empty."""
        ...


# --- validation of settings


def check_range(name: str, value: float, minimum: float, maximum: float = math.inf, *, finite: bool = False) -> None:
    """Raise `ConfigError` unless `value` is from `minimum` to `maximum`, both included; `finite` excludes infinity."""
    if not minimum <= value <= maximum or (finite and math.isinf(value)):
        range_text = f"from {minimum:g} to {maximum:g}" if math.isfinite(maximum) else f"of at least {minimum:g}"
        raise ConfigError(f"invalid {name} {value}: expected a {'finite ' if finite else ''}number {range_text}")


def check_count(name: str, value: int) -> None:
    """Raise `ConfigError` unless `value` is an integer of at least 0."""
    if type(value) is not int or value < 0:
        raise ConfigError(f"invalid {name} {value!r}: expected an integer of at least 0")


def check_name(name: str, value: str, known: Collection[str]) -> None:
    """Raise `ConfigError` unless `value` is one of the known names."""
    if value not in known:
        raise ConfigError(f"invalid {name} {value!r}: expected one of {', '.join(known)}")


def check_weights(name: str, weights: Mapping[str, float], known: Collection[str] | None = None) -> None:
    """Raise `ConfigError` for a weight outside of 0 to 1, and for an unknown key."""
    for key, weight in weights.items():
        if known is not None:
            check_name(f"key of {name}", key, known)
        check_range(f"{name}[{key!r}]", weight, 0, 1)
