"""Load reports of engines are decoded as SGLang encodes them, and the router uses them beside its own count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.routing import LeastLoaded, LeastLoadedSettings, Router
from kvevents.wire.load import MAX_LOAD_BYTES, EngineLoad, decode_load
from wire_cases import msgpack_values, pack

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "load_stats.json").read_text())


@pytest.mark.parametrize("report", RECORDED["readings"], ids=lambda report: str(report["fields"][:4]))
def test_every_field_of_a_load_report_of_sglang_is_decoded(report: dict[str, Any]) -> None:
    """The payloads are encoded with SGLang's own struct, which sends its defaults too."""
    defaults = [None, 0, 0, 0, 0, 0]
    fields = report["fields"] + defaults[len(report["fields"]) - 4 :]
    assert decode_load(bytes.fromhex(report["payload"])) == EngineLoad(*fields)


def test_unknown_fields_of_a_load_report_are_ignored() -> None:
    found = decode_load(pack(["LoadStat", 1, 2, 3, 4, 0, 5, 6, 7, 8, 9, {"new": 1}]))
    assert found == EngineLoad(1, 2, 3, 4, 0, 5, 6, 7, 8, 9)
    assert found.requests == 3


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        pack(["LoadStat", 1, 2, 3]),
        pack(["LoadStat", -1, 2, 3, 4]),
        pack(["LoadStat", 1.5, 2, 3, 4]),
        pack(["BlockRemoved", [1], "GPU"]),
        pack({"type": "LoadStat"}),
        pack(["LoadStat", 1, 2, 3, 4, None, 0, 0, 0, 0, 0, b"x" * MAX_LOAD_BYTES]),
    ],
)
def test_an_invalid_payload_is_not_a_load_report(payload: bytes) -> None:
    assert decode_load(payload) is None


@given(
    st.binary(max_size=80)
    | msgpack_values.map(pack)
    | st.lists(msgpack_values, max_size=12).map(lambda row: pack(["LoadStat", *row]))
)
def test_decoding_a_load_report_never_raises(payload: bytes) -> None:
    found = decode_load(payload)
    assert found is None or min(found.running, found.waiting, found.used_tokens, found.max_tokens) >= 0


def test_the_router_uses_load_reports_to_count_requests_of_other_routers() -> None:
    reports: dict[tuple[str, int], EngineLoad | None] = {("a", 0): EngineLoad(9, 1, 0, 0), ("b", 0): None}
    router = Router(LeastLoaded(), engine_load=reports.get)
    for worker in reports:
        router.add(worker)
    chosen = [router.route(number, [1, 2, 3]).worker for number in range(5)]
    assert chosen == [("b", 0)] * 5, "without a report its own count decides, which is below that of the other"
    reports["a", 0] = None
    assert router.route("next", [1, 2, 3]).worker == ("a", 0), "a missing report removes only its own effect"
    reports["b", 0] = EngineLoad(0, 0, 0, 0)
    assert router.route("last", [1, 2, 3]).worker == ("b", 0), "a report counts instead of the router's own requests"
    assert router.route("more", [1, 2, 3]).worker == ("a", 0), "requests that were sent since the report count too"


def test_waiting_requests_count_if_the_engine_reports_no_tokens() -> None:
    """vLLM reports how many requests wait, but not how long they are."""
    router = Router(LeastLoaded(), engine_load={("a", 0): EngineLoad(0, 3, 0, 0), ("b", 0): EngineLoad(2, 0, 0, 0)}.get)
    for worker in (("a", 0), ("b", 0)):
        router.add(worker)
    decision = router.route("r", [1, 2, 3])
    assert decision.worker == ("b", 0)
    assert {one.worker: one.load for one in decision.scored} == {("a", 0): 3 * 256.0, ("b", 0): 2 * 256.0}


def test_requests_sent_since_a_load_report_are_added_to_it() -> None:
    """Otherwise all prompts until the next report would be sent to the worker with the least load in the last report."""
    reports = {("a", 0): EngineLoad(4, 0, 0, 0), ("b", 0): EngineLoad(6, 0, 0, 0)}
    router = Router(LeastLoaded(settings=LeastLoadedSettings(by="requests")), engine_load=reports.get)
    for worker in reports:
        router.add(worker)
    decisions = [router.route(number, [1, 2, 3]) for number in range(6)]
    assert [decision.load.requests for decision in decisions] == [4, 5, 6, 6, 7, 7]
    assert [decision.worker for decision in decisions].count(("a", 0)) == 4
    for worker in reports:
        reports[worker] = EngineLoad(8, 0, 0, 0)
    assert router.route("next", [1, 2, 3]).load.requests == 8, "a new report includes the requests sent before it"
