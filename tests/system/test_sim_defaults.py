"""The output of `kvevents sim compare` with its defaults."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import msgspec
import pytest

import paths
from kvevents.cli import main
from kvevents.cli.console import Console
from kvevents.cli.sim_compare import print_comparison
from kvevents.routing import policy
from kvevents.sim.results import Comparison, PolicyResult
from kvevents.sim.settings import FleetSettings
from kvevents.sim.simulated_fleet import simulate
from kvevents.sim.workloads import workload

DOCUMENT = paths.ROOT / "docs" / "reference" / "cli.md"
pytestmark = pytest.mark.timeout(400)  # some 30 seconds of CPU, beside other load of the machine
OTHER_SETTINGS: list[dict[str, Any]] = [
    {"wait_weight": 0.0},
    {"wait_weight": 1.0, "load_weight": 0.0},
    {"load_weight": 0.0},
    {"load_weight": 0.25},
    {"decoding_weight": 0.0},
]
"""Settings beside the defaults; docs/adr/0008 has many more, on many kinds of traffic."""


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Return the result of the command; the fleet runs once for all tests."""
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(written):
        assert main(["sim", "compare", "--output=json"]) == 0
    return msgspec.json.decode(written.buffer.getvalue(), type=Comparison)


def read_columns(result: PolicyResult) -> list[float]:
    """Return the columns of the table by which policies differ; smaller is better."""
    assert result.ttft is not None
    negated = (result.hit_rate, result.output_tokens_per_second)
    return [result.ttft.p50, result.ttft.p90, result.ttft.p99, *(-value for value in negated), result.imbalance]


def test_the_document_shows_the_output_of_the_command(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/reference/cli.md has the same words; only its lines are as long as lines of documents."""
    print_comparison(comparison, Console(), json=False)
    printed = capsys.readouterr()
    shown = DOCUMENT.read_text(encoding="utf-8").partition("$ kvevents sim compare\n")[2].partition("\n```")[0]
    assert shown.split() == (printed.err + printed.out).split()


def test_every_policy_sends_requests_to_every_engine(comparison: Comparison) -> None:
    for result in comparison.policies:
        assert [worker.source for worker in result.workers if not worker.requests] == [], result.policy


def test_no_other_setting_is_better_than_the_defaults() -> None:
    """No other setting is as good in every column and better in one. Blocks are large, so that the runs are short."""

    def run(settings: dict[str, Any]) -> list[float]:
        fleet = FleetSettings(block_size=128)
        chosen = policy("prefix-aware", fleet.seed, **settings)
        return read_columns(simulate(fleet, "prefix-aware", workload("trace"), chosen=chosen))

    default = run({})
    for settings in OTHER_SETTINGS:
        other = run(settings)
        is_better = (
            all(their_value <= our_value for our_value, their_value in zip(default, other, strict=True)) and other != default
        )
        assert not is_better, settings
