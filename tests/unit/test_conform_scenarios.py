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
    PublisherScenario,
    Scenario,
    payloads,
    read_scenario,
    shipped_scenarios,
    to_dialect,
)
from kvevents.conform.verdict import Result, ScenarioOutcome, Verdict, WrongAnswer, judge, make_run, to_json, to_junit, worst
from kvevents.errors import ConfigError
from kvevents.wire import Dialect, decode_batch, dialects, encode_batch

sys.path.append(str(paths.ROOT))  # `python -m pytest` knows the checkout, `pytest` does not
from tools.conform import results
from tools.conform.schema import json_schema
from tools.conform.schema import text as schema_text

FOLDER: Final = files("kvevents.conform")
SCENARIOS: Final = [each for each in shipped_scenarios() if isinstance(each, Scenario)]
PUBLISHING: Final = [each for each in shipped_scenarios() if isinstance(each, PublisherScenario)]
MINIMAL: Final[dict[str, Any]] = {
    "target": "reader",
    "version": 2,
    "name": "x",
    "title": "t",
    "group": "losses",
    "rule": "replay-repairs",
    "source": "vllm 0.33.0",
    "hold": 0.3,
    "subscribe": 15.0,
    "engines": {"a": {}},
    "steps": [{"do": "register", "engine": "a"}],
}


# --- the files


def test_every_scenario_names_a_rule_and_a_source() -> None:
    """All rules are used. A neutral player needs nothing else: no word of kvevents is in the files."""
    rules = json.loads((FOLDER / "rules.json").read_text())
    assert {each.rule for each in shipped_scenarios()} == set(rules)
    assert all(each.source for each in shipped_scenarios())
    for each in (FOLDER / "scenarios").iterdir():
        if each.name.endswith(".json"):
            assert "kvevents" not in each.read_text().lower(), each.name
    assert "Apache-2.0" in (FOLDER / "scenarios" / "LICENSE.txt").read_text()


def test_healthy_scenarios_allow_no_reports() -> None:
    """Where nothing goes wrong, every answer must be right and nothing may be reported."""
    healthy = [each for each in SCENARIOS if each.group in {"healthy", "dialects"}]
    assert len(healthy) > 20
    for each in healthy:
        checks = [step for step in each.steps if isinstance(step, Check)]
        assert not any(check.may_report or check.may_be_wrong or check.must_report for check in checks), each.name


def test_scenarios_match_the_published_schema() -> None:
    """Another project can check its own files with any implementation of JSON Schema."""
    schema = json.loads((FOLDER / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for each in (FOLDER / "scenarios").iterdir():
        if each.name.endswith(".json"):
            validator.validate(json.loads(each.read_text()))
    for wrong in ({"version": 1}, {"steps": [{"do": "explode"}]}, {"more": 1}, {"engines": {"a": {"replay": "maybe"}}}):
        assert not validator.is_valid(MINIMAL | wrong), wrong
    # Values are compared: `typing` caches equal types, so a limit is 0 or 0.0 as in the module that was imported first.
    assert json_schema() == schema == json.loads(schema_text()), "python -m tools.conform.schema"


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
        assert last.queries or last.must_report, each.name


def test_batches_of_dialect_scenarios_are_decoded_without_rejection() -> None:
    """All macros are filled in: our decoder reads all events, in the form of the release."""
    for scenario in SCENARIOS:
        if scenario.group == "dialects":
            decoded = [decode_batch(payload) for published in payloads(scenario) for payload in published]
            assert all(each.batch.events and not each.rejected for each in decoded), scenario.name


@pytest.mark.parametrize("dialect", dialects(), ids=lambda dialect: dialect.name)
def test_forms_of_a_release_are_what_our_encoder_writes(dialect: Dialect) -> None:
    """The forms were written by hand, the encoder is compared with released publishers: both have the same values."""
    [scenario] = [each for each in SCENARIOS if each.name == f"dialect-{dialect.name.replace('@', '-')}"]
    written = [payload for published in payloads(scenario) for payload in published]
    encoded = [encode_batch(decode_batch(payload).batch, dialect) for payload in written]
    assert list(map(msgspec.msgpack.decode, encoded)) == list(map(msgspec.msgpack.decode, written))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": [{"do": "explode"}]}, "explode"),
        ({"version": 1}, "invalid x.json.*version 2"),
        ({"steps": [{"do": "restart", "engine": "b"}]}, "does not contain: b"),
        ({"engines": {"a": {"replays": 1}}}, "replays"),
    ],
)
def test_a_wrong_scenario_is_rejected_with_a_message(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scenario(json.dumps(MINIMAL | wrong), "x.json")


def payloads_of(*steps: dict[str, Any], **fields: Any) -> list[list[Any]]:
    """Return the decoded payloads of the steps of a scenario."""
    scenario = read_scenario(json.dumps(MINIMAL | {"steps": [{"engine": "a", **step} for step in steps], **fields}))
    assert isinstance(scenario, Scenario)
    return [[msgspec.msgpack.decode(payload) for payload in published] for published in payloads(scenario)]


def test_macros_are_filled_in() -> None:
    """A store names its parent, hashes are as documented, and no two batches have equal bytes."""
    steps = (
        {"do": "store", "prompt": 100, "blocks": [0, 2]},
        {"do": "publish", "events": [{"$store": [100, 2, 1], "medium": "CPU"}, {"$remove": [100, 0, 2]}, {"$clear": True}, 7]},
        {"do": "publish", "batch": ["$milliseconds", {"$hex": "00ff"}, {"$tokens": [5, 3]}, {"$hash": [100, 1]}], "times": 2},
    )
    [first, second], [mixed], repeated = payloads_of(*steps)
    hashes = [((1 << 32) + 100 + place) * 0x9E3779B97F4A7C15 % 2**64 for place in range(3)]
    assert [batch[0] for batch in (first, second, mixed)] == [1760000000.0, 1760000000.0625, 1760000000.125]
    assert [first[1][0]["block_hashes"], first[1][0]["parent_block_hash"]] == [[hashes[0]], None]
    assert [second[1][0]["block_hashes"], second[1][0]["parent_block_hash"]] == [[hashes[1]], hashes[0]]
    assert second[1][0]["token_ids"] == list(range(116, 132))
    assert (mixed[1][0]["medium"], mixed[1][1]["block_hashes"]) == ("CPU", hashes[:2])
    assert mixed[1][2:] == [{"type": "AllBlocksCleared"}, 7]
    assert repeated == [[1760000000187, b"\0\xff", [5, 6, 7], hashes[1]]] * 2


def test_hashes_have_the_form_of_the_engine() -> None:
    """Engines with another seed have other hashes for equal tokens."""
    forms: dict[str, Any] = {"batch": "$events", "store": "$hash", "remove": 0, "clear": 0}
    store = {"do": "publish", "events": [{"$store": [0, 0, 1]}]}
    found = [payloads_of(store, forms={**forms, "hashes": name})[0][0][0] for name in ("unsigned", "signed", "bytes")]
    assert found[0] == found[1] % 2**64 == int.from_bytes(found[2], "big")
    assert found[0] != payloads_of(store, forms=forms, engines={"a": {"seed": 2}})[0][0][0]


def test_an_unknown_macro_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"unknown macro '\$blocks' with 1"):
        payloads_of({"do": "publish", "events": [{"type": {"$blocks": 1}}]})


@pytest.mark.parametrize("release", ["vllm-0.9.0", "vllm-0.24.0", "sglang-0.4.6.post5", "sglang-0.5.22"])
def test_a_scenario_in_another_dialect_has_the_same_events(release: str) -> None:
    """Each batch has the form of that release and the same events; a release without adapters cannot send them."""
    scenarios_by_name = {each.name: each for each in SCENARIOS}
    forms, original = scenarios_by_name[f"dialect-{release}"], scenarios_by_name["middle"]
    found = to_dialect(original, forms)
    assert found is not None
    for published, others in zip(payloads(found), payloads(original), strict=True):
        for payload, other in zip(published, others, strict=True):
            hashes = [
                [number % 2**64 for number in getattr(event, "block_hashes", ())]
                for event in decode_batch(payload).batch.events
            ]
            assert hashes == [event.get("block_hashes") for event in msgspec.msgpack.decode(other)[1]]
    assert {engine.reply_shape for engine in found.engines.values()} == {forms.engines["a"].reply_shape}
    assert (to_dialect(scenarios_by_name["lora"], forms) is None) == (release != "vllm-0.24.0")
    assert to_dialect(scenarios_by_name["garbage"], forms) is not None
    assert to_dialect(scenarios_by_name["unknown-event"], forms) is None


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


EXACT: Final = Check(1.0)
DOUBT: Final = Check(1.0, may_report=["a"])
UNKNOWABLE: Final = Check(1.0, may_be_wrong=["a"])
FAULT: Final = Check(1.0, must_report=["a"])


@pytest.mark.parametrize(
    ("check", "differences", "reports", "verdict"),
    [
        (EXACT, [], {"a": None}, Verdict.CORRECT),
        (EXACT, [], {"a": "DEGRADED"}, Verdict.NEEDLESS),
        (EXACT, [WRONG], {"a": "DEGRADED"}, Verdict.NEEDLESS),
        (EXACT, [WRONG], {"a": None}, Verdict.SILENT),
        (DOUBT, [], {"a": "DEGRADED"}, Verdict.CORRECT),
        (DOUBT, [WRONG], {"a": "DEGRADED"}, Verdict.NEEDLESS),
        (DOUBT, [], {"a": None, "b": "DEGRADED"}, Verdict.NEEDLESS),
        (UNKNOWABLE, [], {"a": None}, Verdict.CORRECT),
        (UNKNOWABLE, [], {"a": "DEGRADED"}, Verdict.CORRECT),
        (UNKNOWABLE, [WRONG], {"a": "DEGRADED"}, Verdict.REPORTED),
        (UNKNOWABLE, [WRONG], {"a": None}, Verdict.SILENT),
        (UNKNOWABLE, [WRONG], {"a": None, "b": "DEGRADED"}, Verdict.SILENT),
        (UNKNOWABLE, [WRONG], {}, Verdict.SILENT),
        (UNKNOWABLE, [WRONG._replace(report="an error")], {"a": None}, Verdict.REPORTED),
        (UNKNOWABLE, [WRONG, WrongAnswer("b", "b: 0 of 2 tokens")], {"a": "DEGRADED", "b": None}, Verdict.SILENT),
        (FAULT, [], {"a": None}, Verdict.SILENT),
        (FAULT, [], {"a": "not there"}, Verdict.REPORTED),
    ],
)
def test_a_verdict_is_about_each_worker(
    check: Check, differences: list[WrongAnswer], reports: dict[str, str | None], verdict: Verdict
) -> None:
    """A report excuses a wrong answer only about its own worker, and only where no reader can know what is right."""
    assert judge(check, differences, reports).verdict is verdict


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
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "2", "errors": "1", "skipped": "1"}
    tags = {case.get("name"): next(iter(case)).tag for case in suite}
    assert tags == {
        "NOT_APPLICABLE": "skipped",
        "CORRECT": "system-out",
        "REPORTED": "system-out",
        "NEEDLESS": "failure",
        "SILENT": "failure",
        "UNANSWERED": "error",
    }
    assert json.loads(to_json(run))["results"][4]["verdict"] == "silently wrong"
    assert run.has_failed(9)
    assert not make_run("target", [], 1.0, [_result("x", Verdict.REPORTED)]).has_failed(0)


def test_needless_reports_fail_beyond_the_limit() -> None:
    run = make_run("target", [], 1.0, [_result("x", Verdict.NEEDLESS), _result("y", Verdict.NEEDLESS)])
    assert [run.has_failed(limit) for limit in (0, 1, 2, 3)] == [True, True, False, False]


def test_by_default_a_twentieth_of_the_played_scenarios_may_be_reported_without_need() -> None:
    left_out = [_result(f"n{number}", Verdict.NOT_APPLICABLE) for number in range(40)]
    for needless, is_failed in ((5, False), (6, True)):
        played = [_result(f"c{number}", Verdict.CORRECT) for number in range(116 - needless)]
        played += [_result(f"r{number}", Verdict.NEEDLESS) for number in range(needless)]
        assert make_run("target", [], 1.0, [*played, *left_out]).has_failed() is is_failed


def test_no_report_is_allowed_where_nothing_goes_wrong() -> None:
    faultless = msgspec.structs.replace(_result("healthy", Verdict.NEEDLESS), group="healthy")
    assert make_run("target", [], 1.0, [faultless]).has_failed(9)
