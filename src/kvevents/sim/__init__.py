"""A fleet of simulated engines: caches, schedulers and events like vLLM's, in virtual time or over real sockets.

::

    requests = workload("chat", requests=200)
    result = simulate(FleetSettings(engines=4), "prefix-aware", requests)
    print(result.hit_rate, result.ttft)

The page `guides/simulation.md` of the documentation says what is modelled and how that was checked. Needs the compiled
module, as `kvevents.index` does.
"""

from kvevents.sim.costs import PRESETS, CostModel, cost_model
from kvevents.sim.live import LiveFleet
from kvevents.sim.requests import Drawn, Request, Text
from kvevents.sim.results import Comparison, Distribution, LiveResult, PolicyResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import Progress, simulate

__all__ = [
    "PRESETS",
    "Comparison",
    "CostModel",
    "Distribution",
    "Drawn",
    "FleetSettings",
    "LiveFleet",
    "LiveResult",
    "PolicyResult",
    "Progress",
    "Request",
    "Text",
    "cost_model",
    "simulate",
]
