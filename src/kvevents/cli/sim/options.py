"""Options that the commands of `kvevents sim` share: those of the fleet come from the fields of its settings."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection

from kvevents.cli.options import count, number
from kvevents.cli.settings import Form, Given
from kvevents.cli.sim.traffic import DEFAULT_REQUESTS, TRACE, TrafficChoice
from kvevents.sim.settings import FleetSettings
from kvevents.sim.workloads import WORKLOADS


def above(unit: str) -> Callable[[str], float]:
    """What reads a number above 0 and says that it must be `unit`, such as `a factor`."""
    return lambda text: number(text, f"{unit} above 0")


def add_fleet(parser: ArgumentParser, *, without: Collection[str] = ()) -> None:
    """What the fleet is made of; settings in `without` mean nothing to the command."""
    form = Form(FleetSettings, "sim", without=without)
    form.add(parser.add_argument_group("the fleet"), *form.settings)
    form.add_rest(parser, "TOML file of settings of the fleet")


def fleet_of(args: Namespace) -> FleetSettings:
    """The fleet that is asked for. Raises `ConfigError`."""
    given: Given[FleetSettings] = args.form.read(args)
    return given.settings()


def add_traffic(parser: ArgumentParser) -> None:
    """What the fleet is asked."""
    group = parser.add_argument_group("the requests")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--trace", metavar="FILE", help="JSON lines in Mooncake's format or our own; of a name that ends in .gz, compressed"
    )
    source.add_argument(
        "--workload",
        choices=list(WORKLOADS),
        default=TRACE,
        help=f"where they come from (default: %(default)s, which is the packaged sample unless --{TRACE} names another)",
    )
    group.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help=f"the first N (default: all of a trace, {DEFAULT_REQUESTS:,} of what never ends)",
    )
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate", type=above("requests a second"), metavar="R", help="requests a second; a trace keeps its bursts"
    )
    pace.add_argument(
        "--trace-speed", type=above("a factor"), metavar="F", help="divides the times of a trace: 2 is twice as fast"
    )


def traffic_of(args: Namespace) -> TrafficChoice:
    """The requests that the options mean, with the seed of the fleet. Raises `ConfigError`."""
    named = {name: getattr(args, name) for name in TrafficChoice.__struct_fields__ if name != "seed"}
    return TrafficChoice(seed=fleet_of(args).seed, **named)
