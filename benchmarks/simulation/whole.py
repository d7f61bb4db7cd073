"""A whole trace under one policy, with a real index: `python -m benchmarks.simulation.whole run WHO REQUESTS`, 0 for all."""

from __future__ import annotations

import sys
import time

from benchmarks.indexing import procfs
from benchmarks.processes import send_line
from benchmarks.simulation.cases import to_stderr, trace, trace_path
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import simulate
from kvevents.sim.workloads import SAMPLE


def run(requests: int) -> dict[str, float]:
    """Seconds from requests in memory to the result, of eight engines with blocks of 16 tokens."""
    if trace_path() == SAMPLE:
        to_stderr("the conversation trace is not here, so this is the packaged sample; see benchmarks/README.md")
    asked = trace(trace_path(), requests or None)
    procfs.forget_peak()
    began, cpu = time.monotonic(), time.process_time()
    result = simulate(FleetSettings(engines=8, block_size=16), "prefix-aware", asked)
    return {
        "seconds": time.monotonic() - began,
        "cpu": time.process_time() - cpu,
        "peak": procfs.peak() / 1e6,
        "requests": result.requests,
        "tokens": result.prompt_tokens,
        "checked": result.checked,
        "disagreements": result.disagreements,
        "unproven": result.unproven,
    }


if __name__ == "__main__":
    send_line(run(int(sys.argv[3])))
