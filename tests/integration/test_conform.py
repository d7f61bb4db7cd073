"""`kvevents conform` with real sockets, against programs whose faults are known. `tests/system` has our own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

import msgspec
import pytest

import conform_publisher
import conform_router
from cli_cases import run
from conform_cases import Habit, naive_indexer
from kvevents.cli import main
from kvevents.conform.indexer import RunningIndexer
from kvevents.conform.player import play
from kvevents.conform.publisher import publisher_driver
from kvevents.conform.router_target import command_router
from kvevents.conform.scenario import Check, CheckWatched, PublisherScenario, Scenario, Settle, shipped_scenarios
from kvevents.conform.verdict import Verdict
from kvevents.errors import ConfigError
from kvevents.events import EventBatch
from kvevents.testing import Faults, TapePlayer
from kvevents.wire import encode_batch

SCENARIOS: Final = {each.name: each for each in shipped_scenarios() if isinstance(each, Scenario)}
PUBLISHING: Final = {each.name: each for each in shipped_scenarios() if isinstance(each, PublisherScenario)}


def hurried(scenario: Scenario, seconds: float = 0.5) -> Scenario:
    """The same with shorter waits for a right answer, for targets that never give one."""
    steps = [
        msgspec.structs.replace(step, within=min(step.within, seconds)) if isinstance(step, Check | Settle) else step
        for step in scenario.steps
    ]
    return msgspec.structs.replace(scenario, steps=steps)


@pytest.mark.parametrize(
    ("habit", "scenario", "verdict"),
    [
        ("ignores", "gap-no-replay", Verdict.SILENT),
        ("reports", "gap-no-replay", Verdict.REPORTED),
        ("ignores", "middle", Verdict.CORRECT),
        ("ignores", "unreachable", Verdict.SILENT),
        ("ignores", "killed", Verdict.NOT_APPLICABLE),
        ("babbles", "middle", Verdict.UNANSWERED),
    ],
)
def test_an_indexer_gets_the_verdict_that_it_deserves(habit: Habit, scenario: str, verdict: Verdict) -> None:
    with naive_indexer(habit) as url:
        result = play(hurried(SCENARIOS[scenario]), RunningIndexer(url))
    assert result.verdict is verdict, result


@pytest.mark.parametrize(
    ("scenario", "verdict"),
    [
        ("middle", Verdict.CORRECT),
        ("gap-no-replay", Verdict.SILENT),
        ("restart-idle", Verdict.SILENT),
        ("tenants", Verdict.NOT_APPLICABLE),
    ],
)
def test_a_router_gets_the_verdict_that_it_deserves(scenario: str, verdict: Verdict) -> None:
    """It follows live messages alone: it misses what is lost, and believes in blocks of a life that has ended."""
    program = Path(conform_router.__file__)
    driver = command_router(f"{sys.executable} {program} {{port}} {{urls}} {{endpoints}}")
    result = play(hurried(SCENARIOS[scenario]), driver)
    assert result.verdict is verdict, result


@pytest.mark.parametrize(
    ("habit", "scenario", "verdict"),
    [
        ("none", "publisher-replay", Verdict.CORRECT),
        ("forgets", "publisher-replay", Verdict.SILENT),
        ("truncates", "publisher-replay", Verdict.REPORTED),
        ("stutters", "publisher-live", Verdict.SILENT),
        ("exits", "publisher-hostile-requests", Verdict.UNANSWERED),
        ("exits-late", "publisher-hostile-requests", Verdict.UNANSWERED),
    ],
)
def test_a_publisher_gets_the_verdict_that_it_deserves(habit: str, scenario: str, verdict: Verdict) -> None:
    program = Path(conform_publisher.__file__)
    driver = publisher_driver(f"{sys.executable} {program} {habit} {{endpoint}} {{replay_endpoint}}")
    result = driver.play(PUBLISHING[scenario])
    assert result.verdict is verdict, result


def test_a_publisher_that_runs_is_watched() -> None:
    """Its replay is compared with its live batches. What needs batches of the referee is not applicable."""
    with TapePlayer([(b"", seq, encode_batch(EventBatch(float(seq), [], 0))) for seq in range(1_000)]) as tape:
        playing = tape.start_playing(rate=100)
        driver = publisher_driver(f"{tape.endpoint},{tape.replay_endpoint}")
        watched = msgspec.structs.replace(PUBLISHING["publisher-watched"], steps=[CheckWatched(0.5)])
        result = driver.play(watched)
        assert driver.play(PUBLISHING["publisher-live"]).verdict is Verdict.NOT_APPLICABLE
        tape.faults = Faults(replay_holes=1.0)
        lossy = driver.play(watched)
        tape.stop()
        assert playing.result() > 0
    assert (result.verdict, result.detail) == (Verdict.CORRECT, "")
    assert (lossy.verdict, "are not replayed" in lossy.detail) == (Verdict.REPORTED, True), lossy


@pytest.mark.parametrize("target", ["publisher '", "publisher {port}", "tcp://127.0.0.1:1"])
def test_a_publisher_that_cannot_be_found_is_a_sentence(target: str) -> None:
    with pytest.raises(ConfigError, match="invalid publisher"):
        publisher_driver(target)


@pytest.mark.parametrize("template", ["router '", "router {port} {workers}", ""])
def test_a_router_command_that_cannot_be_filled_in_is_a_sentence(template: str) -> None:
    with pytest.raises(ConfigError, match="invalid router command"):
        command_router(template)


def test_an_indexer_that_hangs_is_a_result() -> None:
    """So is one that is not there."""
    with naive_indexer("hangs") as url:
        result = play(SCENARIOS["middle"], RunningIndexer(url, answer_seconds=0.5))
    assert (result.verdict, "did not answer within" in result.detail) == (Verdict.UNANSWERED, True), result
    gone = play(SCENARIOS["middle"], RunningIndexer(url))
    assert (gone.verdict, "refused" in gone.detail) == (Verdict.UNANSWERED, True), gone


def test_the_command_fails_on_silent_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 1, as test tools do, and not with --exit-zero. A file of one's own takes the place of the scenarios."""
    mine = tmp_path / "mine.json"
    mine.write_bytes(msgspec.json.encode(hurried(SCENARIOS["gap-no-replay"])))
    saved = tmp_path / "results.xml"
    with naive_indexer("ignores") as url:
        words = ["conform", "--indexer", url, "--scenarios", str(mine)]
        assert main([*words, "--save", str(saved)]) == 1
        text = capsys.readouterr().out
        passed = run(*words, "-o", "json", "--exit-zero")
    assert "silently wrong  gap-no-replay: one batch lost, no replay endpoint" in text
    assert "1 silently wrong" in text.splitlines()[-1]
    assert ET.parse(saved).getroot()[0].get("failures") == "1"  # noqa: S314 - our own
    assert passed.code == 0, passed
    assert json.loads(passed.out)["results"][0]["verdict"] == "silently wrong"


def test_wrong_uses_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, message in (
        ([], "name a target"),
        (["ours", "--only", "nothing-like-this"], "no scenario fits --only nothing-like-this; --list prints all scenarios"),
        (["ours", "--scenarios", str(wrong)], f"invalid {wrong}"),
        (["ours", "--scenarios", str(empty)], f"{empty} holds no scenario"),
    ):
        assert main(["conform", *words]) != 0
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["conform", "our"])
    assert "unknown target 'our'; did you mean 'ours'? expected one of ours, " in capsys.readouterr().err
    assert main(["conform", "--list", "--only", "gap"]) == 0
    assert "gap-no-replay" in capsys.readouterr().out
