"""All ways to query name blocks that might be gone and tiers without removals.

The data plane and the control plane answer, each over HTTP and over gRPC.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final, NamedTuple, TypeAlias

import grpc
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from kvevents.events import BlockStored
from load_cases import load_server
from service_cases import BLOCK, DEADLINE, MODEL, Client, engines, prompt, serving, wait_for
from service_connection_cases import TRACED
from service_grpc_cases import read_messages

PROMPT: Final = prompt(1)
Ask: TypeAlias = Callable[[str, dict[str, Any]], Any]
"""Sends a request to a method of `/v1`, and returns the answer as JSON."""


class WorkerMatch(NamedTuple):
    """The matched tokens of one worker, and the trust in them."""

    tokens: int
    certain: int
    gpu: int
    state: str
    reason_codes: list[str]


def over_http(client: Client) -> Ask:
    def ask(method: str, fields: dict[str, Any]) -> Any:
        answer = client.post(f"/v1/{method}", fields)
        assert answer.status == 200, answer
        return answer.json

    return ask


def over_grpc(client: Client) -> Ask:
    messages = read_messages()

    def ask(method: str, fields: dict[str, Any]) -> Any:
        name = "".join(part.capitalize() for part in method.split("_"))
        message = ParseDict(fields, getattr(messages, f"{name}Request")())
        read = getattr(messages, f"{name}Response").FromString
        with grpc.insecure_channel(f"{client.host}:{client.port}") as channel:
            call = channel.unary_unary(f"/kvevents.v1.Query/{name}", type(message).SerializeToString, read)
            answer = call(message, timeout=DEADLINE)
        return MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    return ask


@pytest.fixture(scope="module", name="service", params=["data plane", "control plane"])
def service_with_three_engines(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Return a service with three engines.

    The first engine has announced four blocks twice and removed the last block once. The second engine has announced two
    blocks. The third engine has announced a block in GPU memory and three blocks in host memory, from which it announces no
    removals.
    """
    with ExitStack() as stack:
        made = stack.enter_context(engines(3))
        twice, once = (stack.enter_context(load_server(*load)) for load in ((900, 100), (1, 1)))
        settings: dict[str, dict[str, Any]] = {
            "twice": {"load": twice.url},
            "once": {"load": once.url},
            "lmcache": {"stores_only": ["cpu"]},
        }
        command = None if request.param == "data plane" else (sys.executable, "-W", "error", "-c", TRACED)
        service = stack.enter_context(serving(command=command))
        for (name, more), each in zip(settings.items(), made, strict=True):
            assert service.register(name, each.publisher, **more).status == 201
        hashes = made[0].store(PROMPT)
        made[0].publish(BlockStored(hashes, None, PROMPT, BLOCK, medium="GPU", group_idx=0))
        made[0].remove(hashes[-1:])
        made[1].store(PROMPT[: 2 * BLOCK])
        made[2].store(PROMPT[BLOCK:], parent=made[2].store(PROMPT[:BLOCK]), medium="CPU")
        wait_for("all sources to be EXACT", lambda: are_exact(service))
        wait_for("loads", lambda: read_loads(service) == {"twice": 1000, "once": 2, "lmcache": None})
        wait_for("all batches", lambda: count_certain_tokens(service) == {"twice": 48, "once": 32, "lmcache": 64})
        yield service


def are_exact(client: Client) -> bool:
    client.confirm()
    return [each["trust"]["state"] for each in client.get("/v1/sources").json["sources"]] == ["EXACT"] * 3


def read_loads(client: Client) -> dict[str, int | None]:
    loads = {each["instance"]: each["load"] for each in client.get("/v1/sources").json["sources"]}
    return {name: None if load is None else load["running"] + load["waiting"] for name, load in loads.items()}


def count_certain_tokens(client: Client) -> dict[str, int]:
    return {name: each.certain for name, each in match_prompt(over_http(client)).items()}


@pytest.fixture(name="ask", params=[over_http, over_grpc], ids=["http", "grpc"])
def ask_service(request: pytest.FixtureRequest, service: Client) -> Ask:
    ask: Ask = request.param(service)
    return ask


def match_prompt(ask: Ask) -> dict[str, WorkerMatch]:
    return parse_workers(ask("match", {"model": MODEL, "tokens": PROMPT, "whole_prompt": True})["workers"])


def parse_workers(rows: list[dict[str, Any]]) -> dict[str, WorkerMatch]:
    return {
        row["instance"]: WorkerMatch(
            row["tokens"],
            row["certain"],
            row["tiers"]["gpu"],
            row["trust"]["state"].removeprefix("STATE_"),
            row["trust"]["reason_codes"],
        )
        for row in rows
    }


EXPECTED: Final = {
    "twice": WorkerMatch(4 * BLOCK, 3 * BLOCK, 4 * BLOCK, "DEGRADED", ["uncertain-copies"]),
    "once": WorkerMatch(2 * BLOCK, 2 * BLOCK, 2 * BLOCK, "EXACT", []),
    "lmcache": WorkerMatch(4 * BLOCK, 4 * BLOCK, BLOCK, "EXACT", ["stores-only"]),
}


def test_a_match_reports_uncertain_blocks_and_tiers_without_removals(ask: Ask) -> None:
    assert match_prompt(ask) == EXPECTED


def test_only_a_prompt_with_uncertain_blocks_is_degraded(ask: Ask) -> None:
    """Each of several prompts has the trust of its own blocks."""
    field = {"model": MODEL, "whole_prompt": True}
    prompts: Any = [PROMPT, PROMPT[: 3 * BLOCK]]
    if ask.__qualname__.startswith(over_grpc.__name__):
        prompts = [{"tokens": each} for each in prompts]
    whole, short = (parse_workers(each["holders"]) for each in ask("match_many", {**field, "prompts": prompts})["matches"])
    assert whole["twice"] == EXPECTED["twice"]
    assert short["twice"] == WorkerMatch(3 * BLOCK, 3 * BLOCK, 3 * BLOCK, "EXACT", [])
    assert whole["lmcache"].reason_codes == short["lmcache"].reason_codes == ["stores-only"]


def test_a_selection_gives_uncertain_blocks_half_the_credit(ask: Ask) -> None:
    """A block that might be gone, and blocks on a tier without removals, have half the credit of exact ones."""
    body = {"model": MODEL, "tokens": PROMPT, "whole_prompt": True, "explain": True}
    body |= {"candidates": [{"instance": name, "load": 0} for name in ("twice", "once", "lmcache")]}
    considered = {row["instance"]: row for row in ask("select", body)["considered"]}
    uncached = {name: row["uncached"] for name, row in considered.items()}
    host = 3 * BLOCK * 0.8 * 0.5
    assert uncached == pytest.approx({"lmcache": 1 - (BLOCK + host) / len(PROMPT), "once": 0.5, "twice": 0.125})
    assert considered["twice"]["trust"]["reason_codes"] == ["uncertain-copies"]
    assert {name: row["inexact_tiers"] for name, row in considered.items()} == {
        "twice": [],
        "once": [],
        "lmcache": ["cpu"],
    }


def test_a_selection_counts_the_requests_that_engines_report(ask: Ask) -> None:
    """Two engines report their load. The load of the third is unknown, so it counts as their mean."""
    body = {"model": MODEL, "tokens": [1], "explain": True}
    answer = ask("select", body)
    assert answer["load_from"] == "engines"
    rows = {row["instance"]: row for row in answer["considered"]}
    assert rows["lmcache"].get("requests") is None
    # Selections of this suite since the newest report count too, so there can be more than reported.
    assert rows["twice"]["requests"] > rows["once"]["requests"] >= 2
    loads = {name: row["load"] for name, row in rows.items()}
    assert loads["once"] < loads["lmcache"] < loads["twice"]
    assert loads["lmcache"] == pytest.approx((loads["once"] + loads["twice"]) / 2)
    given = ask("select", {**body, "candidates": [{"instance": "twice", "load": 0.0}, {"instance": "once", "load": 5.0}]})
    assert (given["instance"], given["load_from"]) == ("twice", "request")


def test_sources_show_tiers_without_removals_and_blocks_that_might_be_gone(service: Client) -> None:
    # Counts of blocks are refreshed every few seconds.
    wait_for("the count", lambda: find_uncertain_instances(service) == ["twice"])
    found = {each["instance"]: each for each in service.get("/v1/sources").json["sources"]}
    assert {name: each["stores_only"] for name, each in found.items()} == {"twice": [], "once": [], "lmcache": ["cpu"]}
    assert found["twice"]["trust"]["state"] == "EXACT", "the stream is exact, the match of these blocks is not"


def find_uncertain_instances(client: Client) -> list[str]:
    return [each["instance"] for each in client.get("/v1/sources").json["sources"] if each["uncertain"] == 1]
