"""A session stays with its worker.

Theory of operation. Rendezvous hashing: session and worker together are hashed, and a session goes to the worker with which its
number is highest. Nothing is remembered, so that all routers and all restarts agree; a worker that joins takes the sessions
that it is the highest for, one in n, and one that leaves gives only its own to others. A worker whose requests are above a
bound is passed over for the next highest (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Final

from kvevents.routing.blind import in_turn
from kvevents.routing.choice import Candidate, Choice, Prompt, Worker
from kvevents.routing.scoring import Ties
from kvevents.routing.settings import check_count, check_range

_MASK: Final = (1 << 64) - 1
MAX_WORKERS: Final = 16_384
"""Workers whose numbers are remembered: four times as many as a service follows by default."""


@dataclass(frozen=True, slots=True)
class AffinitySettings:
    """See `SessionAffinity`."""

    factor: float = 1.25
    """A worker may have so many times the mean of requests in flight, from 1 on; infinity always keeps sessions where they are.
    The paper's figure; lower ones move more sessions, higher ones allow hotter workers."""
    spare: int = 8
    """Requests that a worker may have whatever the mean is: an engine answers that many at once anyway, and where there is
    little to do, one request is many times the mean."""

    def __post_init__(self) -> None:
        check_range("factor", self.factor, 1)
        check_count("spare", self.spare)


class SessionAffinity:
    """The worker that a session belongs to; prompts without a session go where the fewest requests are."""

    name = "session-affinity"
    asks_index = False

    def __init__(self, seed: int | None = None, settings: AffinitySettings = AffinitySettings()) -> None:
        """`seed` is for prompts without a session only: where a session belongs is for all routers the same."""
        self.settings = settings
        self._ties = Ties(Random(seed))  # noqa: S311 - spreads load, keeps no secret

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        """The highest worker of the session that is not full."""
        if prompt.session is None:
            fewest = min(one.load.requests for one in candidates)
            equal = [one for one in candidates if one.load.requests == fewest]
            return Choice(in_turn(self._ties, equal), "the least loaded of {candidates}, since it has no session", len(equal))
        session = _number(prompt.session.encode("utf-8", "surrogatepass"))
        ranked = sorted(candidates, key=lambda one: (_mixed(session ^ _number_of(one.worker)), one.worker), reverse=True)
        most = self.most_requests(sum(one.load.requests for one in candidates), len(candidates))
        for place, one in enumerate(ranked):
            if one.load.requests < most:
                return Choice(one, _NEXT if place else _OWN)
        raise AssertionError("a bound of at least the mean is above the fewest requests")  # pragma: no cover

    def most_requests(self, requests: int, workers: int) -> float:
        """How many requests a worker may have in flight, the one to be routed included, when all together have `requests`."""
        mean = (requests + 1) / workers
        return max(
            self.settings.spare, math.inf if math.isinf(self.settings.factor) else math.ceil(self.settings.factor * mean)
        )


_OWN: Final = "where its session belongs among {candidates}"
_NEXT: Final = "the next for its session, whose own worker has too many requests"


def _number(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


@lru_cache(MAX_WORKERS)
def _number_of(worker: Worker) -> int:
    source, rank = worker
    return _number(b"%d:%s" % (rank, source.encode("utf-8", "surrogatepass")))


def _mixed(number: int) -> int:
    """The finaliser of SplitMix64: every bit of 64 depends on every other."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
