"""Choosing a worker for a prompt: by chance, in turn, by load, by session, or by what caches hold.

::

    router = Router(policy("prefix-aware"), index)
    router.add(("engine-7", 0))
    decision = router.route("request-1", token_ids)
    print(decision.worker, decision.why())

`docs/routing.md` is the guide. Needs the compiled module, as `kvevents.index` does; `MissingDependencyError` without it.
"""

from kvevents.routing.affinity import AffinitySettings, SessionAffinity
from kvevents.routing.aware import PrefixAware, PrefixAwareSettings
from kvevents.routing.blind import LeastLoaded, LeastLoadedSettings, NoSettings, RandomChoice, RoundRobin
from kvevents.routing.choice import Candidate, Choice, Considered, Load, Policy, Prompt, Worker
from kvevents.routing.ledger import MAX_IN_FLIGHT
from kvevents.routing.policies import POLICIES, policy
from kvevents.routing.router import Decision, NoWorkerError, Router
from kvevents.routing.scoring import Ties
from kvevents.weights import TIER_WEIGHTS, TRUST_WEIGHTS

__all__ = [
    "MAX_IN_FLIGHT",
    "POLICIES",
    "TIER_WEIGHTS",
    "TRUST_WEIGHTS",
    "AffinitySettings",
    "Candidate",
    "Choice",
    "Considered",
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
    "SessionAffinity",
    "Ties",
    "Worker",
    "policy",
]
