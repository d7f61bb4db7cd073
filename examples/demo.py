"""What KV cache events are worth: simulated engines over real sockets, under each routing policy. `make demo` runs it.

It needs no GPU. Four engines with vLLM's block manager work on a packaged trace, several times as fast as the clock. Each
publishes its events on a socket of its own, which loses a share of them; a router follows all of them through our subscriber
and index. In the end there is a table: time to the first token and hit rate under each policy, and whether the index was right
about every prompt.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Final

from kvevents.cli.console import Console, Span
from kvevents.cli.sim.compare import print_comparison, report_disagreements
from kvevents.cli.sim.run import live_view, streams_line
from kvevents.routing import POLICIES
from kvevents.sim.faults import parse_faults
from kvevents.sim.live import LiveFleet
from kvevents.sim.report import report_settings
from kvevents.sim.results import Comparison, PolicyResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.workloads import rescaled, workload

SETTINGS: Final = FleetSettings(engines=4, preset="llama-3.1-8b-a100", blocks=12_000, dialect="vllm-0.24")
"""Caches half of what such a GPU has room for, as a larger model would leave."""
REQUESTS: Final = 400
SPEED: Final = 4.0
"""The trace's requests come this much closer together, which is what four such engines can just do."""
PACE: Final = 14.0
"""Seconds of the fleet that pass in one of the clock."""
FAULTS: Final = "drop:1%"

NEXT = """
Try next:
  .venv/bin/kvevents sim compare --html report.html          the same with a fleet of your own, in virtual time; with figures
  .venv/bin/kvevents sim run --sources fleet.toml            such a fleet to point any consumer at, and in other terminals:
  .venv/bin/kvevents serve --sources fleet.toml              who holds how much of a prompt, over HTTP
  .venv/bin/kvevents top                                     that fleet, live
  .venv/bin/python examples/recorded_run.py                  a recorded vLLM run with losses and a restart, byte for byte
and with an engine of your own:
  vllm serve MODEL --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
    "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
  .venv/bin/kvevents doctor tcp://127.0.0.1:5557             what works, what does not, what to do
"""


def run(policy: str, requests: int, pace: float, console: Console) -> PolicyResult:
    """The fleet under one policy."""
    with LiveFleet(SETTINGS, policy, pace=pace, requested=parse_faults(FAULTS)) as fleet:
        with live_view(fleet, console) as show:
            result = fleet.run(rescaled(workload("trace", requests=requests), SPEED), look=lambda _: show())
        console.line(Span(f"{policy}: ", "name"), streams_line(fleet.streams(), fleet.injected))
    return result


def main() -> int:
    """Run all policies and compare them."""
    parser = argparse.ArgumentParser(description="Routing policies over a live fleet of simulated engines.")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of the trace (default: %(default)s)")
    parser.add_argument(
        "--time-scale", type=float, default=PACE, help="seconds of the fleet in one of the clock (default: %(default)g)"
    )
    asked = parser.parse_args()
    console = Console()
    began = time.monotonic()
    console.line(
        f"{SETTINGS.engines} engines publish over sockets that lose 1% of their batches; {asked.requests} requests, under each "
        f"of {len(POLICIES)} policies:"
    )
    results = [run(policy, asked.requests, asked.time_scale, console) for policy in POLICIES]
    comparison = Comparison(settings=report_settings(SETTINGS, {"requests": asked.requests, "speed": SPEED}), policies=results)
    console.line()
    print_comparison(comparison, console, json=False)
    console.line(f"{time.monotonic() - began:.0f} seconds.")
    for line in NEXT.splitlines():
        console.line(line)
    return int(report_disagreements(results, console))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
