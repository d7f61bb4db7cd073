"""docs/reference/faults.md on our service: each fault of `tests/system/faults`, done to a real one, ends as it should.

`make faults` watches longer, gives every fault a process of its own, and does the same to Dynamo's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

import pytest

import paths

sys.path.append(str(paths.ROOT))  # `python -m pytest` knows the checkout, `pytest` does not
from tests.system.faults.scenarios import SCENARIOS, Scenario
from tests.system.faults.sides import Ours
from tests.system.faults.stage import Stage, Verdict

PATIENCE: Final = 10.0
"""Seconds; nothing takes this long unless it is broken."""
CALM: Final = 0.2
"""Seconds for which an outcome must have stayed what it is."""
SHARED: Final = [scenario for scenario in SCENARIOS if scenario.suite == "shared"]
ALONE: Final = [scenario for scenario in SCENARIOS if scenario.suite == "alone"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Ours]:
    with Ours() as side:
        yield side


@pytest.mark.parametrize("scenario", SHARED, ids=lambda scenario: scenario.name)
def test_a_fault_heals_or_shows(shared: Ours, scenario: Scenario) -> None:
    """Answers are right in the end, or answers about the worker say that they might not be: never wrong and EXACT."""
    number = SHARED.index(scenario)
    play(scenario, Stage(shared, model=scenario.name, first=100 * number + 1, calm=CALM))


@pytest.mark.parametrize("scenario", ALONE, ids=lambda scenario: scenario.name)
def test_a_fault_of_the_service_itself_heals(scenario: Scenario) -> None:
    """The same with a service that no other test needs meanwhile."""
    with Ours() as side:
        play(scenario, Stage(side, calm=CALM))


def play(scenario: Scenario, stage: Stage) -> None:
    with stage:
        scenario.play(stage)
        outcome = stage.watch(PATIENCE, scenario.wanted)
    assert outcome.verdict is scenario.wanted, outcome


def test_only_faults_that_no_consumer_can_heal_stay_wrong() -> None:
    """No fault may be expected to end silently, or with nothing but a line in the log."""
    assert {scenario.wanted for scenario in SCENARIOS} <= {Verdict.RIGHT, Verdict.DOUBTED, Verdict.REPORTED}
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
