"""`kvevents conform` with real sockets, against programs with known faults; `tests/system` runs it on kvevents itself."""

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
from conform_cases import CHEATS, Habit, naive_indexer
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


def shorten_waits(scenario: Scenario, seconds: float = 0.5) -> Scenario:
    """Return the scenario with shorter waits for a correct answer, for targets that never give one."""
    steps = [
        msgspec.structs.replace(step, within=min(step.within, seconds)) if isinstance(step, Check | Settle) else step
        for step in scenario.steps
    ]
    return msgspec.structs.replace(scenario, steps=steps)


def select_scenario(name: str, verdict: Verdict) -> Scenario:
    """Return a scenario with waits that a target with this verdict can keep on a busy machine."""
    if verdict is Verdict.CORRECT:
        return SCENARIOS[name]
    return shorten_waits(SCENARIOS[name], 3.0 if verdict in {Verdict.REPORTED, Verdict.NEEDLESS} else 0.5)


@pytest.mark.parametrize(
    ("habit", "scenario", "verdict"),
    [
        ("ignores", "gap-no-replay", Verdict.SILENT),
        ("reports", "gap-no-replay", Verdict.REPORTED),
        ("reports", "gap", Verdict.NEEDLESS),
        ("ignores", "middle", Verdict.CORRECT),
        ("ignores", "unreachable", Verdict.SILENT),
        ("ignores", "killed", Verdict.NOT_APPLICABLE),
        ("babbles", "middle", Verdict.UNANSWERED),
    ],
)
def test_an_indexer_gets_the_expected_verdict(habit: Habit, scenario: str, verdict: Verdict) -> None:
    with naive_indexer(habit) as url:
        result = play(select_scenario(scenario, verdict), RunningIndexer(url))
    assert result.verdict is verdict, result


@pytest.mark.parametrize("cheat", CHEATS)
def test_every_cheat_fails(cheat: Habit, tmp_path: Path) -> None:
    """An indexer that does not cheat passes the same scenario. The text names what is wrong."""
    name = CHEATS[cheat]
    whole, short = tmp_path / "whole.json", tmp_path / "short.json"
    whole.write_bytes(msgspec.json.encode(SCENARIOS[name]))
    short.write_bytes(msgspec.json.encode(shorten_waits(SCENARIOS[name], 1.0)))
    with naive_indexer(cheat) as cheater, naive_indexer("reports") as honest:
        found = run("conform", "--indexer", cheater, "--scenarios", str(short))
        control = run("conform", "--indexer", honest, "--scenarios", str(whole))
    assert (found.code, control.code) == (1, 0), (found, control)
    verdict = "reported without need" if cheat.startswith("pending") else "silently wrong"
    assert [line.strip().startswith(verdict) for line in found.out.splitlines() if f" {name}: " in line] == [True], found


def test_needless_reports_fail_beyond_their_limit(tmp_path: Path) -> None:
    def play_pending(name: str, *limit: str) -> int:
        scenario_file = tmp_path / f"{name}.json"
        scenario_file.write_bytes(msgspec.json.encode(shorten_waits(SCENARIOS[name])))
        return run("conform", "--indexer", url, "--scenarios", str(scenario_file), *limit).code

    with naive_indexer("pending") as url:
        assert [play_pending("middle", "--max-needless", limit) for limit in "01"] == [1, 0]
        assert play_pending("middle") == 1, "the default is a share of the scenarios"
        assert play_pending("healthy", "--max-needless", "1") == 1, "where nothing goes wrong, no report is needed"


@pytest.mark.parametrize(
    ("scenario", "verdict"),
    [
        ("middle", Verdict.CORRECT),
        ("gap-no-replay", Verdict.SILENT),
        ("restart-idle", Verdict.SILENT),
        ("tenants", Verdict.NOT_APPLICABLE),
    ],
)
def test_a_router_gets_the_expected_verdict(scenario: str, verdict: Verdict) -> None:
    """The router reads only live messages: it misses lost batches and keeps blocks of an incarnation that has ended."""
    program = Path(conform_router.__file__)
    driver = command_router(f"{sys.executable} {program} {{port}} {{urls}} {{endpoints}}")
    result = play(select_scenario(scenario, verdict), driver)
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
def test_a_publisher_gets_the_expected_verdict(habit: str, scenario: str, verdict: Verdict) -> None:
    program = Path(conform_publisher.__file__)
    driver = publisher_driver(f"{sys.executable} {program} {habit} {{endpoint}} {{replay_endpoint}}")
    result = driver.play(PUBLISHING[scenario])
    assert result.verdict is verdict, result


def test_the_replay_of_a_running_publisher_is_compared_with_its_live_batches() -> None:
    """Scenarios that need batches chosen by `kvevents conform` are not applicable to it."""
    with TapePlayer([(b"", seq, encode_batch(EventBatch(float(seq), [], 0))) for seq in range(1_000)]) as tape:
        playing = tape.start_playing(rate=100)
        port = (tape.replay_endpoint or "").rpartition(":")[2]
        driver = publisher_driver(f"{tape.endpoint},{port}")
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
def test_an_invalid_publisher_target_is_rejected(target: str) -> None:
    with pytest.raises(ConfigError, match="invalid publisher"):
        publisher_driver(target)


@pytest.mark.parametrize("template", ["router '", "router {port} {workers}", ""])
def test_an_invalid_router_command_is_rejected(template: str) -> None:
    with pytest.raises(ConfigError, match="invalid router command"):
        command_router(template)


@pytest.mark.parametrize("option", ["--router", "--publisher"])
def test_a_command_that_cannot_be_started_ends_before_the_first_scenario(option: str) -> None:
    ended = run("conform", option, "no-such-program {endpoints}".replace("s}", "}" if option == "--publisher" else "s}"))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("kvevents: cannot start 'no-such-program': expected a program in PATH")


def test_an_indexer_that_hangs_gets_a_verdict() -> None:
    """An indexer that is not running gets the same verdict."""
    with naive_indexer("hangs") as url:
        result = play(SCENARIOS["middle"], RunningIndexer(url, answer_seconds=0.5))
    assert (result.verdict, "did not answer within" in result.detail) == (Verdict.UNANSWERED, True), result
    stopped = play(SCENARIOS["middle"], RunningIndexer(url))
    assert (stopped.verdict, "refused" in stopped.detail) == (Verdict.UNANSWERED, True), stopped


def test_the_command_fails_if_a_target_is_silently_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its exit code is 1, or 0 with `--exit-zero`. Scenarios can be read from a file of the user."""
    scenario_file = tmp_path / "mine.json"
    scenario_file.write_bytes(msgspec.json.encode(shorten_waits(SCENARIOS["gap-no-replay"])))
    saved = tmp_path / "results.xml"
    with naive_indexer("ignores") as url:
        arguments = ["conform", "--indexer", url, "--scenarios", str(scenario_file)]
        assert main([*arguments, "--save", str(saved)]) == 1
        text = capsys.readouterr().out
        passed = run(*arguments, "-o", "json", "--exit-zero")
    assert "silently wrong         gap-no-replay: one batch lost, no replay endpoint" in text
    assert "1 silently wrong" in text.splitlines()[-1]
    assert ET.parse(saved).getroot()[0].get("failures") == "1"  # noqa: S314 - written by this test
    assert passed.code == 0, passed
    assert json.loads(passed.out)["results"][0]["verdict"] == "silently wrong"


def test_wrong_usage_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, message in (
        ([], "name a target"),
        (["ours", "--only", "nothing-like-this"], "no scenario fits --only nothing-like-this; --list prints all scenarios"),
        (["ours", "--scenarios", str(wrong)], f"invalid {wrong}"),
        (["ours", "--scenarios", str(empty)], f"{empty} contains no scenario"),
    ):
        assert main(["conform", *arguments]) != 0
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["conform", "our"])
    assert "invalid value 'our'; did you mean 'ours'? expected ours, " in capsys.readouterr().err
    assert main(["conform", "--list", "--only", "gap"]) == 0
    assert "gap-no-replay" in capsys.readouterr().out
