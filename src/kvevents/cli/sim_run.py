"""`kvevents sim run`: a simulated fleet that publishes over real sockets."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console, Span, is_terminal
from kvevents.cli.options import add_wait_for_subscriber, wait_for_subscriber
from kvevents.cli.output import DATA_FORMATS, add_output, write_record
from kvevents.cli.signals import StopSignal
from kvevents.cli.sim_compare import add_simulation, print_comparison, read_simulation, report_disagreements
from kvevents.cli.values import factor, positive_int, positive_seconds
from kvevents.diagnosis.text_format import duration, percentage, plural
from kvevents.errors import ConfigError
from kvevents.sim.live import FAULT_KINDS, LiveFleet, parse_faults
from kvevents.sim.network import WorkerEndpoints
from kvevents.sim.report_text import report_settings
from kvevents.sim.requests import Request
from kvevents.sim.results import Comparison, LiveResult, StreamResult
from kvevents.sim.routers import POLICIES
from kvevents.sim.settings import SimulationSettings

DESCRIPTION: Final = (
    "Run a fleet of simulated engines that publish events over real sockets, with a router that sends requests to them, and "
    "with faults. Any consumer can subscribe to it: the endpoints are printed at the start, and --write-sources writes them to "
    "a file for `kvevents serve`. The fleet runs until Ctrl-C, unless --requests, --trace or --duration limits it."
)
EXAMPLES: Final = """\
  kvevents sim run
  kvevents sim run --engines 8 --dialect vllm-0.24 --faults restart:60s,drop:1% --write-sources fleet.toml
  kvevents serve --sources fleet.toml                in another terminal, and then: kvevents top
  kvevents sim run --requests 500 --time-scale 10 -o json | jq .policies[0].ttft
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("--policy", choices=list(POLICIES), default="prefix-aware", help="policy of the router")
    faults = "; ".join(f"{name}: {kind.effect}" for name, kind in FAULT_KINDS.items()).replace("%", "%%")
    text = f"faults to inject, such as restart:60s,drop:1%% (default: none). {faults}"
    parser.add_argument("--faults", default="", metavar="LIST", help=text)
    parser.add_argument("--time-scale", type=factor, default=1.0, help="simulated seconds per second")
    parser.add_argument("--duration", type=positive_seconds, help="stop after S seconds (default: never)")
    parser.add_argument("--host", default="127.0.0.1", help="address to publish at; 0.0.0.0 is all addresses")
    text = "port of the first worker's events; its replay port is the next one, and so on (default: free ports)"
    parser.add_argument("--base-port", type=positive_int, metavar="PORT", help=text)
    text = "write the endpoints to FILE, which is replaced, for `kvevents serve --sources` (default: no file)"
    parser.add_argument("--write-sources", type=Path, help=text)
    parser.add_argument("--model", metavar="NAME", default="sim", help="model in that file")
    add_wait_for_subscriber(parser)
    add_output(parser, "one object at the end")
    add_simulation(parser, excluded_paths=("event_delay",))  # Real sockets already delay events.


def run(args: Namespace) -> int:
    """Run the fleet, show its progress, and print the result."""
    console = Console()
    if not args.model.isprintable():
        raise ConfigError(f"invalid --model {args.model!r}: expected printable characters")
    settings, faults = read_simulation(args), parse_faults(args.faults)
    is_finite = settings.requests is not None or settings.trace is not None
    settings.count()  # Raise an error in the workload before a socket is opened.
    sockets: dict[str, Any] = {"host": args.host, "base_port": args.base_port, "requested": faults}
    with StopSignal() as stop, LiveFleet(settings, args.policy, pace=args.time_scale, **sockets) as fleet:
        if args.write_sources is not None:
            _write_sources(args.write_sources, fleet.addresses, args.model, fleet.settings.block_size)
            console.note(f"wrote {args.write_sources}; try: kvevents serve --sources {args.write_sources}")
        for address in fleet.addresses:
            label = Span("{}/{}".format(*address.worker), "name")
            console.note(label, f" publishes at {address.endpoint}, replay at {address.replay_endpoint}")
        with stop.raising():  # The fleet's own router is the first subscriber, so wait for a second subscriber.
            wait_for_subscriber(args, fleet.addresses[0].endpoint, lambda: fleet.sockets.subscribers() > 1)
        began = time.monotonic()
        show = None if args.output in DATA_FORMATS else show_progress(fleet, console)

        def poll(_: LiveFleet) -> None:
            if show is not None:
                show()
            if stop.requested or (args.duration is not None and time.monotonic() - began >= args.duration):
                fleet.stop()

        result = fleet.run(settings.generate() if is_finite else _repeat_requests(settings), look=poll)
        live = LiveResult(
            settings=report_settings(settings, time_scale=args.time_scale, faults=args.faults),
            policies=[result],
            streams=fleet.streams(),
            faults=dict(fleet.injected),
            seconds=time.monotonic() - began,
            behind=fleet.behind,
        )
    if not write_record(live, args.output, console):
        print_comparison(Comparison(settings=live.settings, policies=live.policies), console)
        console.line(streams_line(live.streams, live.faults))
    if live.behind > 1.0:  # seconds
        advice = f"the fleet was up to {live.behind:.1f} s late; use fewer engines, or a smaller --time-scale"
        console.note(Span("this machine is too slow for this fleet: ", "warn"), advice)
    return ExitCode.FAILED if report_disagreements(live.policies, console) else ExitCode.OK


def _repeat_requests(settings: SimulationSettings) -> Iterator[Request]:
    """Yield the requests of a workload in an endless loop; each repetition has another seed."""
    start, seed = 0.0, settings.seed
    while True:
        last = 0.0
        for request in msgspec.structs.replace(settings, seed=seed).generate():
            last = request.at
            yield replace(request, at=start + request.at)
        start += last + 1.0  # Add a pause of one simulated second.
        seed += 1


def _write_sources(file: Path, addresses: list[WorkerEndpoints], model: str, block_size: int) -> None:
    text = "# A simulated fleet, for `kvevents serve --sources`.\n"
    for address in addresses:
        instance, rank = address.worker
        values: dict[str, Any] = {"instance": instance, "rank": rank, "model": model, "block_size": block_size}
        values |= {"endpoint": address.endpoint, "replay_endpoint": address.replay_endpoint}
        # Strings and numbers of JSON are valid TOML.
        lines = [f"{name} = {msgspec.json.encode(value).decode()}\n" for name, value in values.items()]
        text += "\n[[sources]]\n" + "".join(lines)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def streams_line(streams: Sequence[StreamResult], faults: Mapping[str, int]) -> str:
    """Return one line about the streams of a live fleet, and the faults that were injected."""
    exact = sum(stream.trust == "EXACT" for stream in streams)
    names = ("batches", "gaps_repaired", "lost", "resets")
    batches, repaired, lost, resets = (sum(getattr(stream, name) for stream in streams) for name in names)
    injected = "".join(f", {plural(count, kind)}" for kind, count in faults.items())
    return (
        f"{exact} of {plural(len(streams), 'stream')} EXACT; {plural(batches, 'batch')} delivered, "
        f"{plural(repaired, 'gap')} repaired, {lost:,} lost, {plural(resets, 'reset')}{injected}"
    )


# --- progress


LINE_INTERVAL_SECONDS: Final = 5.0
"""Seconds between two lines of progress if stderr is not a terminal."""
FRAME_INTERVAL_SECONDS: Final = 0.25
"""Seconds between two updates of the progress line on a terminal."""


def show_progress(fleet: LiveFleet, console: Console) -> Callable[[], None]:
    """Return a function that shows the fleet's state at intervals: on a terminal always in the same line, else in new lines."""
    is_live = is_terminal(sys.stderr)
    seconds, show = (FRAME_INTERVAL_SECONDS, console.progress) if is_live else (LINE_INTERVAL_SECONDS, console.note)
    shown_at = time.monotonic()

    def show_if_due() -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= seconds:
            shown_at = time.monotonic()
            show(fleet_line(fleet))

    return show_if_due


def fleet_line(fleet: LiveFleet) -> str:
    """Return a line about the state of the fleet."""
    progress, tally, trust = fleet.fleet.progress, fleet.fleet.metrics, list(fleet.follower.trust.values())
    engines = [worker.engine for worker in fleet.fleet.workers.values() if worker.is_up]
    counts = fleet.follower.audit.counts
    return (
        f"{duration(progress.now)}: {progress.finished:,} of {progress.arrived:,} answered, "
        f"{sum(engine.running for engine in engines):,} running, {sum(engine.waiting for engine in engines):,} waiting, "
        f"{percentage(tally.cached_tokens, tally.prompt_tokens)} of prompt tokens cached, "
        f"{trust.count('EXACT')} of {len(trust)} streams EXACT, {tally.batches:,} batches, "
        f"index and engine agreed on {counts.checked - counts.disagreements:,} of {counts.checked:,}"
    )
