"""Options that the commands of `kvevents sim` share: those of the fleet come from the fields of its settings."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec

from kvevents.cli.options import FOREVER, count
from kvevents.cli.sim.traffic import DEFAULT_REQUESTS, TRACE, TrafficChoice
from kvevents.sim.costs import PRESETS
from kvevents.sim.settings import FleetSettings
from kvevents.sim.workloads import WORKLOADS

HELP: Final = {
    "engines": "engines, all alike",
    "ranks": "data-parallel ranks of each engine, each with a cache of its own",
    "preset": f"how fast they are and what they have room for: {', '.join(PRESETS)}, or a .json file of your own",
    "block_size": "tokens of a block",
    "blocks": "GPU blocks of each rank; as many as the preset has memory for when not given",
    "host_blocks": "blocks of each rank in host memory",
    "window": "tokens of a sliding window, of a model that has such layers as well",
    "max_num_seqs": "sequences that run side by side on a rank",
    "max_num_batched_tokens": "tokens that a step computes at most",
    "dialect": "whose bytes the engines send, such as vllm-0.24 or sglang-0.5.22",
    "event_delay": "seconds from the end of a step until its events are in the index",
    "overlay": "seconds for which a prompt is believed to be cached where it was sent; 0 waits for the events",
    "seed": "of everything that is left to chance",
}
"""What each setting of a fleet is."""


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def _span(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < FOREVER:
        raise ArgumentTypeError(f"{text!r} must be a number of seconds, 0 or more")
    return value


def above(unit: str) -> Callable[[str], float]:
    """What reads a number above 0 and says that it must be `unit`, such as `a factor`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.0 < value < FOREVER:
            raise ArgumentTypeError(f"{text!r} must be {unit} above 0")
        return value

    return parse


_KINDS: Final[dict[Any, tuple[str, Callable[[str], Any]]]] = {
    int: ("N", count),
    int | None: ("N", count),
    float: ("S", _span),
    str: ("NAME", str),
}
"""Of a field's type: what help calls a value, and what reads one."""


def add_fleet(parser: ArgumentParser, *, without: Collection[str] = ()) -> None:
    """What the fleet is made of; settings in `without` mean nothing to the command."""
    group = parser.add_argument_group("the fleet")
    for field in msgspec.structs.fields(FleetSettings):
        if field.name in without:
            continue
        metavar, kind = _KINDS[field.type]
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            metavar=metavar,
            type=_whole if kind is count and field.default == 0 else kind,  # what is 0 unless told otherwise may be 0
            default=field.default,
            help=HELP[field.name] + ("" if field.default is None else " (default: %(default)s)"),
        )


def fleet_of(args: Namespace) -> FleetSettings:
    """The fleet that the options mean. Raises `ConfigError` and `UnknownDialectError`."""
    return FleetSettings(**{name: value for name, value in vars(args).items() if name in FleetSettings.__struct_fields__})


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
    pace.add_argument("--speed", type=above("a factor"), metavar="F", help="divides the times of a trace: 2 is twice as fast")


def traffic_of(args: Namespace) -> TrafficChoice:
    """The requests that the options mean. Raises `ConfigError`."""
    return TrafficChoice(**{name: getattr(args, name) for name in TrafficChoice.__struct_fields__})
