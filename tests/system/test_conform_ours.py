"""What docs/reference/conformance.md says of our service and publisher: each scenario ends as it does there.

`make conform` gives each scenario a process of its own and full time, and plays released rivals too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import pytest

import paths
from kvevents.conform.indexer import MooncakeIndexer, RunningIndexer, kvevents_indexer
from kvevents.conform.player import play, play_all
from kvevents.conform.publisher import kvevents_publisher
from kvevents.conform.scenario import Check, PublisherScenario, Scenario, shipped_scenarios
from kvevents.conform.target import Driver
from kvevents.conform.verdict import Result

JOBS: Final = 4
BRIEF: Final = 2.0
"""Seconds for an answer that stays wrong, and is reported."""
LEFT_OUT: Final = frozenset({"stalled"})
"""A network that delivers nothing is noticed after 7 s."""
RESULTS: Final[dict[str, Any]] = json.loads((paths.ROOT / "docs" / "reference" / "conformance.json").read_text())


def expected(target: str) -> dict[str, str]:
    """Verdicts by scenario."""
    return {each["name"]: each["verdict"] for each in RESULTS[target]["results"] if each["name"] not in LEFT_OUT}


def brief(scenario: Scenario) -> Scenario:
    """The same with little time for its last check."""
    last = scenario.steps[-1]
    assert isinstance(last, Check)
    return msgspec.structs.replace(scenario, steps=[*scenario.steps[:-1], msgspec.structs.replace(last, within=BRIEF)])


def played(scenarios: Sequence[Scenario], driver: Driver, verdicts: dict[str, str]) -> Iterator[Result]:
    timed = [brief(each) if verdicts[each.name] == "reported" else each for each in scenarios]
    return play_all([partial(play, each, driver) for each in timed], JOBS)


def test_our_service_ends_every_scenario_as_documented() -> None:
    """Scenarios share a service, except those that kill it."""
    verdicts = expected("ours")
    scenarios = [each for each in shipped_scenarios() if isinstance(each, Scenario) and each.name in verdicts]
    killing = [each for each in scenarios if "kill" in each.needs]
    sharing = [each for each in scenarios if "kill" not in each.needs]
    fresh = kvevents_indexer()
    results = list(played(killing, fresh, verdicts))
    with fresh.running() as url:
        results += played(sharing, RunningIndexer(url), verdicts)
    wrong = [each for each in results if each.verdict != verdicts[each.name]]
    assert not wrong
    assert len(results) == len(verdicts)


def test_our_service_has_both_forms_of_the_indexer_api() -> None:
    """As Mooncake has it, too: ranks, tenants, salts, what is listed, and the doubt of an answer."""
    names = {"ranks", "tenants", "salt", "gap-no-replay", "reannounced", "unreachable", "register-again"}
    verdicts = expected("ours")
    scenarios = [each for each in shipped_scenarios() if isinstance(each, Scenario) and each.name in names]
    with kvevents_indexer().running() as url:
        results = list(played(scenarios, RunningIndexer(url, kind=MooncakeIndexer), verdicts))
    assert {each.name: each.verdict.value for each in results} == {name: verdicts[name] for name in names}, results


def test_our_publisher_ends_every_scenario_as_documented() -> None:
    verdicts = expected("ours-publisher")
    driver = kvevents_publisher()
    plays = [partial(driver.play, each) for each in shipped_scenarios() if isinstance(each, PublisherScenario)]
    assert {each.name: each.verdict.value for each in play_all(plays, JOBS)} == verdicts


@pytest.mark.parametrize("target", ["ours", "ours-publisher"])
def test_ours_is_never_silently_wrong(target: str) -> None:
    verdicts = {each["verdict"] for each in RESULTS[target]["results"]}
    assert verdicts <= {"correct", "reported"}
