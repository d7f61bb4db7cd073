"""`kvevents demo`: show how much sooner users get answers with KV cache events, on simulated engines and real sockets."""

from __future__ import annotations

import logging
import time
from argparse import ArgumentParser, Namespace
from typing import Final

from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console, Span
from kvevents.cli.sim_compare import report_disagreements
from kvevents.cli.values import positive_int
from kvevents.diagnosis.text_format import plural
from kvevents.sim.live import LiveFleet, parse_faults
from kvevents.sim.results import PolicyResult, StreamResult
from kvevents.sim.settings import FleetSettings, LiveTimers
from kvevents.sim.workloads import rescaled, workload

DESCRIPTION: Final = (
    "Show what KV cache events are worth to several routers. Four simulated engines, with the block manager of vLLM and the "
    "speed of an A100, serve the same requests four times; each time four routers choose the engines by another policy. The "
    "engines publish events over real sockets that lose 1% of the batches, and some restart; the last policy knows from these "
    "events what each engine has cached, the one before only what its router has sent. With one router both are about as fast "
    "(kvevents sim compare). No GPU is needed, and the figures are the same on every machine. Exit code 1 means that the index "
    "and an engine disagreed about a cache."
)
EXAMPLES: Final = """\
  kvevents demo
  kvevents demo --requests 40          a first look in seconds
  kvevents demo --requests 1000        the whole trace, more than four engines can serve
"""

SETTINGS: Final = FleetSettings(engines=4, routers=4, preset="llama-3.1-8b-a100", blocks=12_000, dialect="vllm-0.24")
"""The cache has half the size that fits on this GPU, as if the model were larger."""
POLICIES: Final = {
    "least-loaded": "least-loaded",
    "session-affinity": "session-affinity",
    "approximate-tree": "tree of what was sent",
    "prefix-aware": "prefix-aware, by events",
}
"""The policies that are compared, with their names in the table."""
REQUESTS: Final = 400
SPEED: Final = 4.0
"""Factor by which the trace is accelerated. With this factor, four engines can just serve the requests."""
FAULTS: Final = "drop:1%,restart:56s"
TIMERS: Final = LiveTimers(settle=60.0, down=14.0)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("--requests", type=positive_int, default=REQUESTS, help="requests of the trace")


def run(args: Namespace) -> int:
    """Run the fleet under each policy, print a row for each, and summarise the delivery of events."""
    console = Console()
    logging.getLogger("kvevents").setLevel(logging.ERROR)  # do not warn of closed connections: the injected restarts close them
    began = time.monotonic()
    console.line(f"4 simulated engines answer {plural(args.requests, 'request')} of chats and agents.")
    console.line("Users wait this long for the first token, by the policy of the four routers that choose the engine:")
    console.line()
    console.line(Span(f"{'':24}{'half within':>12}{'90% within':>13}{'prompts cached':>17}", "dim"))
    results, streams, dropped = list[PolicyResult](), list[StreamResult](), 0
    for policy, name in POLICIES.items():
        with LiveFleet(SETTINGS, policy, pace=None, requested=parse_faults(FAULTS), timers=TIMERS) as fleet:
            results.append(fleet.run(rescaled(workload("trace", requests=args.requests), SPEED)))
            streams += fleet.streams()
            dropped += fleet.sockets.dropped
        ttft = results[-1].ttft  # the simulated users' times to first token
        waits = ("-", "-") if ttft is None else (f"{ttft.p50:.1f} s", f"{ttft.p90:.1f} s")
        console.line(Span(f"{name:24}", "name"), f"{waits[0]:>12}{waits[1]:>13}{results[-1].hit_rate:>17.0%}")
    console.line()
    console.line(_events(streams, dropped))
    checked, wrong = (sum(getattr(each, name) for each in results) for name in ("checked", "disagreements"))
    prompts = plural(checked, "prompt")
    console.line(f"Index: right about the cache of the engine for {checked - wrong:,} of the {prompts} that could be compared.")
    seconds = f"{time.monotonic() - began:.0f} s"
    console.line(f"It took {seconds} and no GPU: engines and requests are simulated, sockets and index are real.")
    console.line()
    console.line("Next, with an engine of your own: kvevents doctor tcp://127.0.0.1:5557")
    return ExitCode.FAILED if report_disagreements(results, console) else ExitCode.OK


def _events(streams: list[StreamResult], dropped: int) -> str:
    batches, lost, restarts = (sum(getattr(stream, name) for stream in streams) for name in ("batches", "lost", "resets"))
    return (
        f"Events: the network lost {dropped:,} of {plural(batches + lost, 'batch')}; after replay {lost:,} are missing; "
        f"{plural(restarts, 'restart')} of engines were noticed."
    )
