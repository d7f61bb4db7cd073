"""Results of a simulation."""

from __future__ import annotations

from typing import Any

from kvevents.sim.results import Distribution, PolicyResult, WorkerResult


def result(policy: str = "round-robin", **changes: Any) -> PolicyResult:
    """Return the result of a policy that finished all requests, with two workers and in a minute."""
    p90 = changes.pop("p90", 0.9)
    known: dict[str, Any] = {
        "seed": 0,
        "requests": 100,
        "finished": 100,
        "refused": 0,
        "retried": 0,
        "seconds": 60.0,
        "prompt_tokens": 1_000,
        "cached_tokens": 120,
        "hit_rate": 0.12,
        "ttft": Distribution(p90 / 2, p90 / 3, p90, p90 * 4, p90 * 5),
        "latency": Distribution(1.0, 1.0, 2.0, 3.0, 3.0),
        "tpot": Distribution(0.02, 0.02, 0.03, 0.04, 0.05),
        "output_tokens_per_second": 100.0,
        "imbalance": 1.1,
        "preemptions": 0,
        "checked": 100,
        "disagreements": 0,
        "unproven": 0,
        "predicted_tokens": 0,
        "overpredictions": 0,
        "batches": 500,
        "events": 900,
        "workers": [worker(number) for number in range(2)],
    }
    return PolicyResult(policy=policy, **(known | changes))


def worker(number: int) -> WorkerResult:
    return WorkerResult(
        source=f"engine-{number}",
        rank=0,
        requests=50,
        prompt_tokens=500 + number,
        cached_tokens=60,
        busy=0.5,
        preemptions=0,
        restarts=0,
    )
