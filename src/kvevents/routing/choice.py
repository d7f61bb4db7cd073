"""What a policy is asked and what it answers.

Everything here is made for each decision, so these are msgspec structs: one costs a tenth of a microsecond, and none can be
part of a cycle that a garbage collection would have to find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

Worker: TypeAlias = tuple[str, int]
"""Source and rank."""


class Load(Struct, frozen=True, gc=False):
    """What a router knows of a worker's work: what it has sent there itself and has not seen answered."""

    requests: int = 0
    """In flight."""
    waiting_tokens: int = 0
    """Prompt tokens that are expected to be computed, of requests whose first token has not come."""
    decoding: int = 0
    """Requests whose first token has come."""
    decoding_tokens: int = 0
    """Prompt tokens of those, cached ones included: what their answers attend to."""


IDLE = Load()


class Candidate(Struct, frozen=True, gc=False):
    """A worker that may be chosen."""

    worker: Worker
    load: Load = IDLE
    tokens: int = 0
    """Tokens of the longest prefix that it holds, on whatever tiers; 0 where the index was not asked."""
    tiers: Mapping[str, int] = {}
    """The same by tier, cumulative: `cpu` counts a prefix that begins on the GPU and goes on in host memory."""
    trust: str = "EXACT"
    """State of its stream, as `kvevents.Trust` names it."""


class Prompt(Struct, frozen=True, gc=False):
    """What is to be routed."""

    length: int
    """In tokens."""
    session: str | None = None
    """Whose conversation it is, where that is known."""


class Considered(Struct, frozen=True, gc=False):
    """Why a candidate has its score."""

    candidate: Candidate
    score: float
    """The smaller the better."""
    uncached: float
    """Share of the prompt that it would have to compute, 0 to 1, after trust and the tiers' weights."""
    load: float
    """What its load adds to the score."""
    hot: bool = False
    """Whether it had so much to do that its cache gave it no credit."""

    @property
    def worker(self) -> Worker:
        """Source and rank."""
        return self.candidate.worker


class Choice(Struct, frozen=True, gc=False):
    """What a policy chose, and what it would say about that if asked."""

    chosen: Candidate
    reason: str
    """Continues "it chose a worker, ...". A template: `{candidates}` and `{equal}` in it are numbers."""
    equal: int = 1
    """How many were as good as the chosen one, itself included."""
    considered: Sequence[Considered] = ()
    """All that it weighed, in no order; empty where it weighs nothing."""


class Policy(Protocol):
    """How to choose a worker. Not for several threads at once: `Router` sees to that."""

    @property
    def name(self) -> str:
        """As settings and explanations call it."""
        ...

    @property
    def asks_index(self) -> bool:
        """Whether the prompt must be looked up before `choose`, so that candidates say what they hold."""
        ...

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        """One of the candidates, of which there is at least one."""
        ...
