"""The policy that keeps a session on its worker.

Theory of operation: rendezvous hashing. The session is hashed with each worker, and goes to the worker with the highest value.
Nothing is stored, so all routers agree, also after restarts. A worker that joins takes the sessions for which it has the
highest value, one in n. A worker that leaves gives only its own sessions to others. A worker whose requests are above a bound
is skipped for the next one (consistent hashing with bounded loads; Mirrokni, Thorup and Zadimoghaddam 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Final

from kvevents.routing.policy_types import Candidate, Choice, Prompt, Worker, check_count, check_range
from kvevents.routing.scoring import Ties, break_tie

_MASK: Final = (1 << 64) - 1
_CACHED_WORKERS: Final = 16_384
"""Workers whose hashes are cached: four times as many as a service follows by default."""


@dataclass(frozen=True, slots=True)
class SessionAffinitySettings:
    """Settings of `SessionAffinity`."""

    factor: float = 1.25
    """A worker may have this many times the mean of requests in flight, at least 1; with infinity sessions never move. The
    default is the paper's. Lower values move more sessions, higher values allow hotter workers."""
    spare: int = 8
    """Requests that a worker may always have: an engine answers that many at once anyway, and in a fleet with little to do one
    request is many times the mean."""

    def __post_init__(self) -> None:
        check_range("factor", self.factor, 1)
        check_count("spare", self.spare)


class SessionAffinity:
    """Chooses the worker of the session; for a prompt without a session, the worker with the fewest requests."""

    name = "session-affinity"
    uses_index = False

    def __init__(self, seed: int | None = None, settings: SessionAffinitySettings = SessionAffinitySettings()) -> None:
        """`seed` affects prompts without a session only: all routers agree on the worker of a session."""
        self.settings = settings
        self._ties = Ties(Random(seed))  # noqa: S311 - spreads load, keeps no secret

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate]) -> Choice:
        """Choose the worker with the session's highest value that is below its bound of requests."""
        if prompt.session is None:
            fewest = min(one.load.requests for one in candidates)
            equal = [one for one in candidates if one.load.requests == fewest]
            chosen = break_tie(self._ties, equal)
            return Choice(chosen, "the least loaded of {candidates}, since the prompt has no session", len(equal))
        session = _hash(prompt.session.encode("utf-8", "surrogatepass"))
        ranked = sorted(candidates, key=lambda one: (_mix(session ^ _hash_worker(one.worker)), one.worker), reverse=True)
        most = self.max_requests(sum(one.load.requests for one in candidates), len(candidates))
        for place, one in enumerate(ranked):
            if one.load.requests < most:
                return Choice(one, _NEXT if place else _OWN)
        raise AssertionError("no worker is below a bound of at least the mean load")  # pragma: no cover

    def max_requests(self, requests: int, workers: int) -> float:
        """Return the bound of requests in flight on one worker, including the new one, if all workers have `requests`."""
        if math.isinf(self.settings.factor):
            return math.inf
        return max(self.settings.spare, math.ceil(self.settings.factor * ((requests + 1) / workers)))


_OWN: Final = "the session's own among {candidates}"
_NEXT: Final = "the session's next choice, since its own worker has too many requests"


def _hash(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


@lru_cache(_CACHED_WORKERS)
def _hash_worker(worker: Worker) -> int:
    source, rank = worker
    return _hash(b"%d:%s" % (rank, source.encode("utf-8", "surrogatepass")))


def _mix(number: int) -> int:
    """Apply the finaliser of SplitMix64: each of the 64 bits then depends on all others."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
