"""Choose a worker for a prompt: at random, in rotation, by load, by session, or by what caches hold.

::

    router = Router(policy("prefix-aware"), index)
    router.add(("engine-7", 0))
    decision = router.route("request-1", token_ids)
    print(decision.worker, decision.explain())

The guide is the page `guides/routing.md` of the documentation. Like `kvevents.index` it needs the compiled module, and raises
`MissingDependencyError` without it.
"""

from kvevents.routing.policies import (
    POLICIES,
    LeastLoaded,
    LeastLoadedSettings,
    NoSettings,
    PrefixAware,
    PrefixAwareSettings,
    RandomChoice,
    RoundRobin,
    SessionAffinity,
    SessionAffinitySettings,
    Ties,
    policy,
)
from kvevents.routing.policy_types import Candidate, Choice, Load, Policy, Prompt, ScoredCandidate, Worker
from kvevents.routing.router import MAX_IN_FLIGHT, Decision, NoWorkerError, Router
from kvevents.weights import TIER_WEIGHTS, TRUST_WEIGHTS

__all__ = [
    "MAX_IN_FLIGHT",
    "POLICIES",
    "TIER_WEIGHTS",
    "TRUST_WEIGHTS",
    "Candidate",
    "Choice",
    "Decision",
    "LeastLoaded",
    "LeastLoadedSettings",
    "Load",
    "NoSettings",
    "NoWorkerError",
    "Policy",
    "PrefixAware",
    "PrefixAwareSettings",
    "Prompt",
    "RandomChoice",
    "RoundRobin",
    "Router",
    "ScoredCandidate",
    "SessionAffinity",
    "SessionAffinitySettings",
    "Ties",
    "Worker",
    "policy",
]
