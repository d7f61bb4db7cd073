"""Options of `kvevents sim compare` and `kvevents sim run`: the fleet, and the requests that are sent to it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterator
from typing import Final

import msgspec

from kvevents.cli.options import number, positive_int
from kvevents.cli.settings_parser import SettingsParser, SettingsValues
from kvevents.errors import ConfigError
from kvevents.sim.requests import Request
from kvevents.sim.settings import FleetSettings
from kvevents.sim.workloads import WORKLOADS, rescaled, workload

TRACE: Final = "trace"
"""The workload that is read from a file."""
DEFAULT_REQUESTS: Final = 1_000
"""Requests of a generated workload, which has no end."""


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A workload, and how much of it to use. It can be sent to another process. Raises `ConfigError` for a contradiction."""

    trace: str | None = None
    """File of the trace, instead of the packaged one."""
    workload: str = TRACE
    requests: int | None = None
    """Number of requests; None for the whole trace, or `DEFAULT_REQUESTS` generated ones."""
    rate: float | None = None
    """Requests per second; None for that of the workload."""
    trace_speed: float | None = None
    """Factor by which the times of a trace are divided."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trace_speed is not None and self.workload != TRACE:
            raise ConfigError(f"trace_speed needs a trace; use a rate for the requests per second of {self.workload}")
        if self.trace is not None and self.workload != TRACE:
            raise ConfigError(f"{self.trace} is a trace, and {self.workload} generates requests; use one of them")

    def generate(self) -> Iterator[Request]:
        """Return the requests, which are the same at each call. Raises `ConfigError`; iterating raises `WorkloadError`."""
        file = {} if self.trace is None else {"path": self.trace}
        found = workload(self.workload, requests=self._limit, seed=self.seed, rate=self.rate, **file)
        return found if self.trace_speed is None else rescaled(found, self.trace_speed)

    def count(self) -> int:
        """Return the number of requests, which reads and checks a trace. Raises `ConfigError` and `WorkloadError`."""
        if self.workload != TRACE:
            self.generate()  # checks the settings
            return self._limit
        found = sum(1 for _ in self.generate())
        if not found:
            raise ConfigError(f"{self.trace} has no requests; expected one JSON object per line, in Mooncake's format")
        return found

    @property
    def _limit(self) -> int:
        return self.requests or (sys.maxsize if self.workload == TRACE else DEFAULT_REQUESTS)


def positive(description: str) -> Callable[[str], float]:
    """Return a function that reads a number above 0; `description` is what it is, such as `a factor`."""
    return lambda text: number(text, f"{description} above 0")


def add_fleet(parser: ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Declare the settings of the fleet, except those that the command does not use."""
    settings = SettingsParser(FleetSettings, "sim", without=without)
    settings.add(parser.add_argument_group("fleet"), *settings.settings)
    settings.add_rest(parser, "TOML file with settings of the fleet")


def read_fleet(args: Namespace) -> FleetSettings:
    """Return the settings of the fleet. Raises `ConfigError`."""
    given: SettingsValues[FleetSettings] = args.settings.read(args)
    return given.settings()


def add_workload(parser: ArgumentParser) -> None:
    """Declare the requests that are sent to the fleet."""
    group = parser.add_argument_group("requests")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--trace",
        metavar="FILE",
        help="trace with one JSON object per line, in Mooncake's or our own format; compressed if its name ends in .gz",
    )
    source.add_argument(
        "--workload",
        choices=list(WORKLOADS),
        default=TRACE,
        help=f"kind of requests (default: %(default)s, which is the packaged sample unless --{TRACE} is given)",
    )
    group.add_argument(
        "--requests",
        type=positive_int,
        metavar="N",
        help=f"number of requests (default: all of a trace, or {DEFAULT_REQUESTS:,} generated ones)",
    )
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate",
        type=positive("a number of requests per second"),
        metavar="R",
        help="mean requests per second; a trace keeps its bursts (default: that of the workload)",
    )
    pace.add_argument(
        "--trace-speed",
        type=positive("a factor"),
        metavar="F",
        help="divide the times of a trace by F, so that 2 is twice as fast (default: 1)",
    )


def read_workload(args: Namespace) -> WorkloadOptions:
    """Return the workload of the options, with the seed of the fleet. Raises `ConfigError`."""
    named = {name: getattr(args, name) for name in WorkloadOptions.__struct_fields__ if name != "seed"}
    return WorkloadOptions(seed=read_fleet(args).seed, **named)
