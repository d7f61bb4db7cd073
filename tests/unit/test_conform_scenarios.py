"""Scenarios of `kvevents conform` equal their published files, and verdicts follow from the evidence."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from typing import Any, Final
from xml.etree import ElementTree as ET

import jsonschema  # type: ignore[import-untyped]  # it has no types
import msgspec
import pytest

import paths
from kvevents.conform.publisher import ReceivedStream, judge_stream
from kvevents.conform.scenario import (
    GROUPS,
    Check,
    Publish,
    PublisherScenario,
    Scenario,
    expand,
    in_dialect,
    json_schema,
    payload_of,
    read_scenario,
    shipped_scenarios,
)
from kvevents.conform.verdict import Result, ScenarioOutcome, Verdict, WrongAnswer, judge, make_run, to_json, to_junit, worst
from kvevents.errors import ConfigError
from kvevents.wire import decode_batch, dialect_for, dialects

sys.path.append(str(paths.ROOT))  # `python -m pytest` knows the checkout, `pytest` does not
from tools.conform import results
from tools.conform.__main__ import files as written_files

FOLDER: Final = files("kvevents.conform")
SCENARIOS: Final = [each for each in shipped_scenarios() if isinstance(each, Scenario)]
PUBLISHING: Final = [each for each in shipped_scenarios() if isinstance(each, PublisherScenario)]
MINIMAL: Final[dict[str, Any]] = {
    "target": "reader",
    "version": 1,
    "name": "x",
    "title": "t",
    "group": "losses",
    "engines": {"a": {}},
    "steps": [{"do": "register", "engine": "a"}],
}


# --- the files


def test_published_files_equal_those_that_the_tool_writes() -> None:
    """`python -m tools.conform` writes scenarios and schema; no file was changed by hand or is left over."""
    written = {path.name: text for path, text in written_files().items()}
    shipped = {each.name: each.read_text() for each in (FOLDER / "scenarios").iterdir() if each.name.endswith(".json")}
    # Compare values: `typing` caches equal types, so a limit is 0 or 0.0 as in the module that was imported first.
    assert json.loads((FOLDER / "schema.json").read_text()) == json.loads(written.pop("schema.json"))
    assert shipped == written


def test_scenarios_match_the_published_schema() -> None:
    """Another project can check its own files with any implementation of JSON Schema."""
    schema = json.loads((FOLDER / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for each in (FOLDER / "scenarios").iterdir():
        if each.name.endswith(".json"):
            validator.validate(json.loads(each.read_text()))
    for wrong in ({"version": 2}, {"steps": [{"do": "explode"}]}, {"more": 1}, {"engines": {"a": {"replay": "maybe"}}}):
        assert not validator.is_valid(MINIMAL | wrong), wrong
    assert json_schema() == schema


def test_every_group_and_every_dialect_has_scenarios() -> None:
    all_scenarios = list(shipped_scenarios())
    assert {each.group for each in all_scenarios} == set(GROUPS)
    names = {each.name for each in all_scenarios}
    assert {f"dialect-{each.name.replace('@', '-')}" for each in dialects()} <= names
    assert len(names) == len(all_scenarios) >= 100


def test_every_scenario_ends_with_a_check_of_queries_or_reports() -> None:
    for each in SCENARIOS:
        last = each.steps[-1]
        assert isinstance(last, Check), each.name
        assert last.queries or last.reports, each.name


def test_batches_of_dialect_scenarios_are_decoded_without_rejection() -> None:
    """A batch is JSON in the file; as msgpack, our decoder reads all its events."""
    for scenario in SCENARIOS:
        if scenario.group == "dialects":
            batches = [step.batch for step in scenario.steps if isinstance(step, Publish)]
            decoded = [decode_batch(msgspec.msgpack.encode(expand(batch))) for batch in batches]
            assert all(each.batch.events and not each.rejected for each in decoded), scenario.name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": [{"do": "explode"}]}, "explode"),
        ({"version": 2}, "invalid x.json.*version 1"),
        ({"steps": [{"do": "restart", "engine": "b"}]}, "does not have: b"),
        ({"engines": {"a": {"replays": 1}}}, "replays"),
    ],
)
def test_a_wrong_scenario_is_rejected_with_a_message(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scenario(json.dumps(MINIMAL | wrong), "x.json")


def test_tokens_and_bytes_are_expanded_from_json() -> None:
    assert read_scenario(json.dumps(MINIMAL)) == msgspec.convert(MINIMAL, Scenario)
    assert expand([1.5, {"a": {"$tokens": [7, 3]}, "b": [{"$hex": "00ff"}]}, None]) == [
        1.5,
        {"a": [7, 8, 9], "b": [b"\0\xff"]},
        None,
    ]


@pytest.mark.parametrize("release", ["vllm-0.9.0", "vllm-0.24.0", "sglang-0.4.6.post5", "sglang-0.5.22"])
def test_a_scenario_in_another_dialect_has_the_same_events(release: str) -> None:
    """Each batch has the form of that release and the same events; a release without adapters cannot send them."""
    dialect = dialect_for(*release.split("-", 1))
    scenarios_by_name = {each.name: each for each in SCENARIOS}
    found = in_dialect(scenarios_by_name["middle"], dialect)
    assert found is not None
    for step, original in zip(found.steps, scenarios_by_name["middle"].steps, strict=True):
        if isinstance(step, Publish) and isinstance(original, Publish):
            decoded = decode_batch(payload_of(step))
            hashes = [getattr(event, "block_hashes", None) for event in decoded.batch.events]
            assert hashes == [event.get("block_hashes") for event in expand(original.batch)[1]]
            assert decoded.dialect is not None
            assert (decoded.dialect.event_form, decoded.dialect.has_rank) == (dialect.event_form, dialect.has_rank)
    assert {engine.reply_shape for engine in found.engines.values()} == {"topic" if dialect.has_replay_topic else "no-topic"}
    assert (in_dialect(scenarios_by_name["lora"], dialect) is None) == ("lora_name" not in dialect.stored_fields)
    assert in_dialect(scenarios_by_name["garbage"], dialect) is not None


# --- the results page


def test_the_page_has_the_results_of_its_file() -> None:
    """The tables are those of `conformance.json`, and results exist for exactly the present scenarios."""
    runs = results.read()
    text = results.PAGE.read_text()
    assert results.page(text, runs) == text, "python -m tools.conform.results --tables"
    names = {name: {each.name for each in runs[name].results} for name in results.TARGETS}
    readers, publishing = {each.name for each in SCENARIOS}, {each.name for each in PUBLISHING}
    assert names == {name: publishing if "publisher" in name else readers for name in results.TARGETS}
    assert all(run.date and run.machine and run.seconds < 600 for run in runs.values())


# --- verdicts

WRONG: Final = WrongAnswer("a", "a: 1 of 2 tokens")


@pytest.mark.parametrize(
    ("differences", "reports", "required", "verdict"),
    [
        ([], {"a": None}, [], Verdict.CORRECT),
        ([], {"a": "DEGRADED"}, [], Verdict.CORRECT),
        ([WRONG], {"a": "DEGRADED"}, [], Verdict.REPORTED),
        ([WRONG], {"a": None}, [], Verdict.SILENT),
        ([WRONG], {"a": None, "b": "DEGRADED"}, [], Verdict.SILENT),
        ([WRONG], {}, [], Verdict.SILENT),
        ([WRONG._replace(report="the answer is DEGRADED")], {"a": None}, [], Verdict.REPORTED),
        ([WRONG, WrongAnswer("b", "b: 0 of 2 tokens")], {"a": "DEGRADED", "b": None}, [], Verdict.SILENT),
        ([], {"a": None}, ["a"], Verdict.SILENT),
        ([], {"a": "not there"}, ["a"], Verdict.REPORTED),
    ],
)
def test_a_difference_counts_as_reported_only_for_its_worker(
    differences: list[WrongAnswer], reports: dict[str, str | None], required: list[str], verdict: Verdict
) -> None:
    assert judge(differences, reports, required).verdict is verdict


def test_the_verdict_of_a_scenario_is_that_of_its_worst_check() -> None:
    reported, silent = ScenarioOutcome(Verdict.REPORTED, "r"), ScenarioOutcome(Verdict.SILENT, "s")
    assert worst([]).verdict is Verdict.CORRECT
    assert worst([reported, silent, reported]) == silent


def _batch(number: int, *events: dict[str, Any]) -> tuple[int, bytes]:
    return number, msgspec.msgpack.encode([0.5, list(events), 0])


def _store_event(*hashes: int) -> dict[str, Any]:
    tokens = list(range(16 * len(hashes)))
    fields = {"parent_block_hash": None, "token_ids": tokens, "block_size": 16, "lora_id": None, "medium": "GPU"}
    return {"type": "BlockStored", "block_hashes": list(hashes), **fields}


THREE: Final = [_batch(number, _store_event(number)) for number in range(3)]
CLEARED: Final = {"type": "AllBlocksCleared"}


@pytest.mark.parametrize(
    ("stream", "verdict"),
    [
        (ReceivedStream(THREE), Verdict.CORRECT),
        (ReceivedStream(THREE, "the reply has no end marker"), Verdict.REPORTED),
        (ReceivedStream(THREE[:2]), Verdict.SILENT),
        (ReceivedStream(THREE[1:]), Verdict.REPORTED),
        (ReceivedStream([THREE[0], THREE[2]]), Verdict.REPORTED),
        (ReceivedStream([*THREE, THREE[2]]), Verdict.SILENT),
        (ReceivedStream([THREE[1], THREE[0], THREE[2]]), Verdict.SILENT),
        (ReceivedStream([_batch(2, CLEARED, _store_event(0, 1, 2))]), Verdict.CORRECT),
        (ReceivedStream([_batch(2, CLEARED, _store_event(0, 2))]), Verdict.SILENT),
        (ReceivedStream([*THREE, _batch(3, _store_event(99))]), Verdict.SILENT),
        (ReceivedStream([*THREE[:2], (2, b"garbage")]), Verdict.SILENT),
        (ReceivedStream([]), Verdict.SILENT),
    ],
)
def test_only_faults_that_sequence_numbers_reveal_are_reported(stream: ReceivedStream, verdict: Verdict) -> None:
    """A missing number and a late beginning are visible; batches missing at the end, or a snapshot without a block, are not."""
    assert judge_stream(stream, 0, {0, 1, 2}, {0, 1, 2}).verdict is verdict


# --- reports


def _result(name: str, verdict: Verdict) -> Result:
    return Result(name, "losses", "title", verdict, "detail \x00", 1.0, 0.0)


def test_junit_has_failures_errors_and_skipped_scenarios() -> None:
    run = make_run("target", ["kvevents", "conform"], 4.0, [_result(verdict.name, verdict) for verdict in Verdict])
    suite = next(iter(ET.fromstring(to_junit(run))))  # noqa: S314 - our own
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == dict.fromkeys(
        ("failures", "errors", "skipped"), "1"
    ) | {"tests": "5"}
    tags = {case.get("name"): next(iter(case)).tag for case in suite}
    assert tags == {
        "NOT_APPLICABLE": "skipped",
        "CORRECT": "system-out",
        "REPORTED": "system-out",
        "SILENT": "failure",
        "UNANSWERED": "error",
    }
    assert json.loads(to_json(run))["results"][3]["verdict"] == "silently wrong"
    assert run.has_failed
    assert not make_run("target", [], 1.0, [_result("x", Verdict.REPORTED)]).has_failed
