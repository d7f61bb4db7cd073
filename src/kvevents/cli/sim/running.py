"""What `kvevents sim run` does."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from kvevents.cli.command import FAILED, OK
from kvevents.cli.console import Console, Span
from kvevents.cli.lines import plural
from kvevents.cli.serving import nobody_came
from kvevents.cli.sim.board import board
from kvevents.cli.sim.comparing import judge, tell
from kvevents.cli.sim.options import fleet_of, traffic_of
from kvevents.cli.sim.traffic import TrafficChoice
from kvevents.cli.stopping import Stop
from kvevents.errors import ConfigError
from kvevents.sim.faults import parse_faults
from kvevents.sim.live import LiveFleet
from kvevents.sim.report import described
from kvevents.sim.requests import Request
from kvevents.sim.results import Comparison, LiveResult, StreamResult
from kvevents.sim.sockets import Address

LATE_SECONDS: Final = 1.0
"""A fleet that was later than this ran on a machine that is too slow for it, which is told."""
POLL: Final = 0.02
ROUND_PAUSE: Final = 1.0
"""Seconds of the fleet between two rounds of requests that go on and on."""
OURS: Final = 1
"""Subscribers that every engine has anyway: the router's."""


def run_live(args: Namespace, console: Console) -> int:
    """Run, show, and tell what came out."""
    if not args.model.isprintable():
        raise ConfigError(f"--model {args.model!r} has characters that no name should have")
    settings, traffic, wishes = fleet_of(args), traffic_of(args), parse_faults(args.faults)
    ends = args.requests is not None or args.trace is not None
    traffic.count()  # finds what is wrong with them before anything is opened
    with (
        Stop() as stop,
        LiveFleet(
            settings, args.policy, pace=args.time_scale, host=args.host, base_port=args.base_port, wishes=wishes
        ) as fleet,
    ):
        _announce(fleet, args, console)
        with stop.raising():
            _wait_for_subscriber(fleet, args.wait_for_subscriber)
        began = time.monotonic()
        with board(fleet, console, quiet=args.output == "json") as show:
            result = fleet.run(
                traffic.make() if ends else _on_and_on(traffic), look=_looking(fleet, stop, show, began, args.duration)
            )
        live = LiveResult(
            settings=described(settings, msgspec.structs.asdict(traffic))
            | {"time_scale": args.time_scale, "faults": args.faults},
            policies=[result],
            streams=fleet.streams(),
            faults=dict(fleet.struck),
            seconds=time.monotonic() - began,
            behind=fleet.behind,
        )
    _tell(live, console, json=args.output == "json")
    return FAILED if judge(live.policies, console) else OK


def _looking(
    fleet: LiveFleet, stop: Stop, show: Callable[[], None], began: float, duration: float | None
) -> Callable[[LiveFleet], None]:
    def look(_: LiveFleet) -> None:
        show()
        if stop.requested or (duration is not None and time.monotonic() - began >= duration):
            fleet.stop()

    return look


def _on_and_on(traffic: TrafficChoice) -> Iterator[Request]:
    """The requests again and again, those of generators with another seed each time."""
    start, seed = 0.0, traffic.seed
    while True:
        last = 0.0
        for request in msgspec.structs.replace(traffic, seed=seed).make():
            last = request.at
            yield replace(request, at=start + request.at)
        start += last + ROUND_PAUSE
        seed += 1


def _announce(fleet: LiveFleet, args: Namespace, console: Console) -> None:
    if args.sources is not None:
        _write_sources(args.sources, fleet.addresses, args.model, fleet.settings.block_size)
        console.note(f"wrote {args.sources}; try: kvevents serve --sources {args.sources}")
    for address in fleet.addresses:
        source, rank = address.worker
        console.note(
            Span(f"{source}/{rank}", "name"), f" publishes at {address.endpoint}, answers replay at {address.replay_endpoint}"
        )


def _write_sources(file: Path, addresses: list[Address], model: str, block_size: int) -> None:
    text = "# A simulated fleet, as `kvevents serve --sources` reads it.\n"
    for address in addresses:
        source, rank = address.worker
        values = {
            "instance": source,
            "rank": rank,
            "model": model,
            "endpoint": address.endpoint,
            "replay_endpoint": address.replay_endpoint,
            "block_size": block_size,
        }
        # JSON's strings and numbers are TOML's.
        lines = [f"{name} = {msgspec.json.encode(value).decode()}\n" for name, value in values.items()]
        text += "\n[[sources]]\n" + "".join(lines)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from error


def _wait_for_subscriber(fleet: LiveFleet, seconds: float | None) -> None:
    if seconds is None:
        return
    until = time.monotonic() + seconds
    while fleet.sockets.subscribers() <= OURS:
        if time.monotonic() > until:
            raise nobody_came(fleet.addresses[0].endpoint, seconds)
        time.sleep(POLL)


def _tell(live: LiveResult, console: Console, *, json: bool) -> None:
    if json:
        console.data(msgspec.json.encode(live))
    else:
        tell(Comparison(settings=live.settings, policies=live.policies), console, json=False)
        console.line(streams_line(live.streams, live.faults))
    if live.behind > LATE_SECONDS:
        console.note(
            Span("this machine is too slow for this fleet: ", "warn"),
            f"it was late by up to {live.behind:.1f} s; use fewer engines, or a smaller --time-scale",
        )


def streams_line(streams: Sequence[StreamResult], faults: Mapping[str, int]) -> str:
    """What became of the streams of a live fleet, in a line."""
    exact = sum(stream.trust == "EXACT" for stream in streams)
    batches, healed, lost, resets = (
        sum(getattr(stream, name) for stream in streams) for name in ("batches", "healed", "lost", "resets")
    )
    struck = "".join(f", {plural(count, kind)}" for kind, count in faults.items())
    return (
        f"{exact} of {plural(len(streams), 'stream')} EXACT; {plural(batches, 'batch')} delivered, "
        f"{plural(healed, 'hole')} healed, {lost:,} lost for good, {plural(resets, 'reset')}{struck}"
    )
