"""Our service and publisher end each scenario with the verdict of docs/reference/conformance.md.

`make conform` gives each scenario a process of its own and more time, and plays released rivals, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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

pytestmark = pytest.mark.timeout(600)
JOBS: Final = 12
"""Scenarios at a time: they wait more than they work."""
SHORT_CHECK_SECONDS: Final = 2.0
"""Seconds of the last check of a scenario whose verdict is not `correct`: what is wrong or reported stays so for that time."""
PATIENT_SECONDS: Final = 60.0
"""Longest time until the target subscribes, and until the answers are correct."""
MAX_NEEDLESS: Final = 5
"""Scenarios in which a stream that was proved is idle, and is reported until its next live batch."""
EXCLUDED: Final = frozenset({"stalled"})
"""Scenarios that take too long: a network that delivers nothing is noticed after 7 s."""
RESULTS: Final[dict[str, Any]] = json.loads((paths.ROOT / "docs" / "reference" / "conformance.json").read_text())


def load_verdicts(target: str) -> dict[str, str]:
    """Return the documented verdicts of a target by scenario."""
    return {each["name"]: each["verdict"] for each in RESULTS[target]["results"] if each["name"] not in EXCLUDED}


def with_time(scenario: Scenario, seconds: float) -> Scenario:
    """Return the scenario with this time limit for its last check."""
    last = scenario.steps[-1]
    assert isinstance(last, Check)
    return msgspec.structs.replace(scenario, steps=[*scenario.steps[:-1], msgspec.structs.replace(last, within=seconds)])


def play_quickly(scenario: Scenario, driver: Driver, verdict: str) -> Result:
    """Play a scenario. The last check ends early if `verdict` is `correct`, and takes all of its time otherwise.

    So it has little time then, and the time of the scenario if a busy machine needs it.
    """
    if verdict == "correct":
        return play(msgspec.structs.replace(with_time(scenario, PATIENT_SECONDS), subscribe=PATIENT_SECONDS), driver)
    result = play(with_time(scenario, SHORT_CHECK_SECONDS), driver)
    return result if result.verdict == verdict else play(scenario, driver)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Return the URL of a service that scenarios share."""
    with kvevents_indexer().running() as running:
        yield running


def test_our_service_ends_every_scenario_as_documented(url: str) -> None:
    """Scenarios share one service, except those that kill it."""
    verdicts = load_verdicts("ours")
    own_services, shared_service = kvevents_indexer(), RunningIndexer(url)
    scenarios = [each for each in shipped_scenarios() if isinstance(each, Scenario) and each.name in verdicts]
    scenarios.sort(key=lambda scenario: "kill" not in scenario.needs)  # those take longest
    plays = [
        partial(play_quickly, each, own_services if "kill" in each.needs else shared_service, verdicts[each.name])
        for each in scenarios
    ]
    results = list(play_all(plays, JOBS))
    wrong = [each for each in results if each.verdict != verdicts[each.name]]
    assert not wrong
    assert len(results) == len(verdicts)


def test_our_service_also_passes_with_the_indexer_api_of_mooncake(url: str) -> None:
    """Scenarios of ranks, tenants, salts, lists of workers and degraded answers have equal verdicts with this API."""
    names = {"ranks", "tenants", "salt", "gap-no-replay", "reannounced", "unreachable", "register-again"}
    verdicts = load_verdicts("ours")
    scenarios = [each for each in shipped_scenarios() if isinstance(each, Scenario) and each.name in names]
    driver = RunningIndexer(url, kind=MooncakeIndexer)
    results = list(play_all([partial(play_quickly, each, driver, verdicts[each.name]) for each in scenarios], JOBS))
    assert {each.name: each.verdict.value for each in results} == {name: verdicts[name] for name in names}, results


def test_our_publisher_ends_every_scenario_as_documented() -> None:
    verdicts = load_verdicts("ours-publisher")
    driver = kvevents_publisher()
    plays = [partial(driver.play, each) for each in shipped_scenarios() if isinstance(each, PublisherScenario)]
    assert {each.name: each.verdict.value for each in play_all(plays, JOBS)} == verdicts


@pytest.mark.parametrize("target", ["ours", "ours-publisher"])
def test_ours_is_never_silently_wrong(target: str) -> None:
    verdicts = [each["verdict"] for each in RESULTS[target]["results"]]
    assert set(verdicts) <= {"correct", "reported", "reported without need"}
    assert verdicts.count("reported without need") <= MAX_NEEDLESS
