"""Chooses a worker for a prompt: at random, in rotation, by load, by session, or by the cached part of the prompt.

::

    router = Router(policy("prefix-aware"), index)
    router.add(("engine-7", 0))
    decision = router.route("request-1", token_ids)
    print(decision.worker, decision.explain())

The guide is the page `guides/routing.md` of the documentation. Policies and `Router` raise `MissingDependencyError` if the
compiled module is missing, as `kvevents.index` does. Code that reads the loads of engines works without that module.
"""

from typing import TYPE_CHECKING

from kvevents.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from kvevents.routing.load_readings import LoadReading, LoadSettings, LoadSource
    from kvevents.routing.load_subscriber import LoadSubscriber
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
    from kvevents.routing.weights import TIER_WEIGHTS, TRUST_WEIGHTS
    from kvevents.wire.load import EngineLoad

__all__ = [
    "MAX_IN_FLIGHT",
    "POLICIES",
    "TIER_WEIGHTS",
    "TRUST_WEIGHTS",
    "Candidate",
    "Choice",
    "Decision",
    "EngineLoad",
    "LeastLoaded",
    "LeastLoadedSettings",
    "Load",
    "LoadReading",
    "LoadSettings",
    "LoadSource",
    "LoadSubscriber",
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

__getattr__ = lazy_exports(
    __name__,
    {
        "kvevents.wire.load": "EngineLoad",
        "kvevents.routing.load_readings": "LoadReading LoadSettings LoadSource",
        "kvevents.routing.load_subscriber": "LoadSubscriber",
        "kvevents.routing.policies": (
            "POLICIES LeastLoaded LeastLoadedSettings NoSettings PrefixAware PrefixAwareSettings RandomChoice RoundRobin "
            "SessionAffinity SessionAffinitySettings Ties policy"
        ),
        "kvevents.routing.policy_types": "Candidate Choice Load Policy Prompt ScoredCandidate Worker",
        "kvevents.routing.router": "MAX_IN_FLIGHT Decision NoWorkerError Router",
        "kvevents.routing.weights": "TIER_WEIGHTS TRUST_WEIGHTS",
    },
)
