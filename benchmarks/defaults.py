"""`kvevents sim compare` with its defaults: the example in docs/reference/cli.md, and whether other settings are better."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

import msgspec

from kvevents.routing import policy
from kvevents.sim.results import Comparison
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import simulate
from kvevents.sim.workloads import workload

OTHER_SETTINGS: Final[tuple[dict[str, Any], ...]] = (
    {"wait_weight": 0.0},
    {"wait_weight": 1.0, "load_weight": 0.0},
    {"load_weight": 0.0},
    {"load_weight": 0.25},
    {"decoding_weight": 0.0},
)
"""Settings of `prefix-aware` beside the defaults; decision record 0008 has many more, on many kinds of traffic."""
LINE: Final = 120
"""Columns of a line in a document."""


def find_faults(pool: Executor) -> Iterator[str]:
    """Yield the faults of the defaults as sentences."""
    runs = [pool.submit(run_settings, settings) for settings in ({}, *OTHER_SETTINGS)]
    comparison = pool.submit(run_command, "--output=json")
    default, *other_runs = (run.result() for run in runs)
    for settings, columns in zip(OTHER_SETTINGS, other_runs, strict=True):
        if is_better(columns, default):
            yield f"{settings} is better than the defaults: {columns} instead of {default}"
    for result in msgspec.json.decode(comparison.result().stdout, type=Comparison).policies:
        for worker in result.workers:
            if not worker.requests:
                yield f"{result.policy} sends no request to {worker.source}"


def run_settings(settings: dict[str, Any]) -> list[float]:
    """Run `prefix-aware` with some settings, and return the columns by which policies differ. Smaller is better."""
    fleet = FleetSettings(block_size=128)  # large blocks, so that the run is short
    result = simulate(fleet, "prefix-aware", workload("trace"), chosen=partial(policy, "prefix-aware", **settings))
    assert result.ttft is not None, "some requests were answered"
    larger_is_better = (result.hit_rate, result.output_tokens_per_second)
    return [result.ttft.p50, result.ttft.p90, result.ttft.p99, *(-value for value in larger_is_better), result.imbalance]


def is_better(other: list[float], default: list[float]) -> bool:
    """Return whether other settings are as good as the defaults in every column, and better in one."""
    return other != default and all(value <= reference for value, reference in zip(other, default, strict=True))


def run_command(*options: str) -> subprocess.CompletedProcess[str]:
    """Run `kvevents sim compare`."""
    command = (sys.executable, "-m", "kvevents", "sim", "compare", *options)
    return subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - our own


def with_example(reference: str) -> str:
    """Return the reference with the output of the command, in lines that fit into a document."""
    process = run_command()
    output = [line for text in (process.stderr, process.stdout) for line in text.splitlines()]
    lines = [part for line in output for part in ([line] if len(line) <= LINE else textwrap.wrap(line, LINE))]
    example = "\n".join(["$ kvevents sim compare", *lines, "```"])
    return re.sub(r"^\$ kvevents sim compare$.*?^```$", lambda _: example, reference, count=1, flags=re.DOTALL | re.MULTILINE)
