"""Engines that describe themselves, as vLLM 0.33 and SGLang 0.5.23 do, over real HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from discovery_cases import Steps, soon, within
from discovery_fetch_cases import Engine
from kvevents.compat.sglang import KVEventsConfig as SGLangConfig
from kvevents.compat.vllm import KVEventsConfig as VLLMConfig
from kvevents.errors import ConfigError
from kvevents.service.discovery.engines import EngineHttpClient, EngineProvider
from kvevents.service.discovery.provider import Finding, SourceTable, Template
from kvevents.service.registration import Scope


def vllm_rank(endpoint: str | None, replay: str | None = None, **fields: Any) -> dict[str, Any]:
    """As `KVEventsConfig` of vLLM 0.33 becomes JSON."""
    return {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay,
        "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": "kv-events", **fields,
    }  # fmt: skip


VLLM_MODELS = {
    "object": "list",
    "data": [
        {"id": "an-adapter", "object": "model", "owned_by": "vllm", "root": "/l", "parent": "Qwen/Qwen3-0.6B"},
        {"id": "Qwen/Qwen3-0.6B", "object": "model", "owned_by": "vllm", "root": "Qwen/Qwen3-0.6B", "parent": None},
    ],
}


def sglang(**fields: Any) -> dict[str, Any]:
    """The part of `/server_info` of SGLang 0.5.23 that matters, among what does not."""
    kv_events = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "",
        "block_size": 64,
        "dp_size": 2,
    }
    return {
        "model_path": "/models/qwen", "served_model_name": "Qwen/Qwen3-0.6B", "page_size": 32, "dp_size": 1, "attn_dp_size": 2,
        "nnodes": 1, "node_rank": 0, "kv_events_config": "{}", "internal_states": [{}], "version": "0.5.23",
        "kv_events": kv_events | fields.pop("kv_events", {}), **fields,
    }  # fmt: skip


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as found:
        yield found


async def ask(engine: Engine, template: Template | None = None, instance: str | None = "e") -> Finding:
    provider = EngineProvider(engine.url, template or Template(), instance)
    found = provider.watch()
    first = await within(soon(found))
    await found.aclose()
    return first


def streams(found: Finding) -> list[tuple[str, str, str | None]]:
    return [(each.label, each.endpoint, each.replay_endpoint) for each in found.registrations]


def sentences(found: Finding) -> list[str]:
    return [fault.sentence for fault in found.faults]


async def test_vllm_lists_all_its_ranks(engine: Engine) -> None:
    """Endpoints with ports that the OS chose, the replay endpoint if it exists, the topic, and the model (not an adapter)."""
    engine.pages |= {
        "/kv_event_sources": {
            "0": vllm_rank("tcp://10.0.0.1:41233", "tcp://10.0.0.1:41234"),
            "1": vllm_rank("tcp://10.0.0.2:41235"),
        },
        "/v1/models": VLLM_MODELS,
    }
    found = await ask(engine)
    assert streams(found) == [
        ("e rank 0", "tcp://10.0.0.1:41233", "tcp://10.0.0.1:41234"),
        ("e rank 1", "tcp://10.0.0.2:41235", None),
    ]
    assert {(each.model, each.topic, each.block_size) for each in found.registrations} == {
        ("Qwen/Qwen3-0.6B", "kv-events", None)
    }
    assert found.adapters == (Scope("Qwen/Qwen3-0.6B", lora="an-adapter"),)
    assert found.faults == ()
    assert {each.load for each in found.registrations} == {f"{engine.url}/metrics"}, "vLLM publishes no load"


async def test_adapters_are_asked_for_where_the_model_is_known(engine: Engine) -> None:
    """Those of the engine's own model, under the name that the operator gives it; without an answer the list is empty."""
    models = {"data": [*VLLM_MODELS["data"], {"id": "another", "parent": "another-model"}]}
    engine.pages |= {"/kv_event_sources": {"0": vllm_rank("tcp://10.0.0.1:41233")}, "/v1/models": models}
    named = Template(model="qwen", tenant="t", group="g")
    assert (await ask(engine, named)).adapters == (Scope("qwen", "t", "g", "an-adapter"),)
    pages: list[dict[str, Any]] = [{"data": 7}, {"data": []}]
    for page in pages:
        engine.pages["/v1/models"] = page
        found = await ask(engine, named)
        assert (len(found.registrations), found.adapters, found.faults) == (1, (), ())


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "::"])  # noqa: S104
async def test_a_wildcard_host_is_the_one_that_was_asked(engine: Engine, host: str) -> None:
    """Of both engines, and of replay too: they say where they listen, not where they are."""
    engine.pages["/kv_event_sources"] = {"0": vllm_rank(f"tcp://{host}:5557", f"tcp://{host}:6557")}
    expected = [("e rank 0", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557")]
    assert streams(await ask(engine, Template(model="m"))) == expected
    engine.pages.clear()
    engine.pages["/server_info"] = sglang(kv_events={"endpoint_host": host, "dp_size": 1, "replay_endpoint_port_base": 6557})
    assert streams(await ask(engine)) == expected


async def test_vllm_behind_an_external_load_balancer_has_its_own_ranks(engine: Engine) -> None:
    """A server that knows ranks 4 and 5 has them, and is not missing 0 to 3."""
    engine.pages["/kv_event_sources"] = {rank: vllm_rank(f"tcp://*:{5557 + int(rank)}") for rank in ("4", "5")}
    found = await ask(engine, Template(model="m"))
    assert [each.rank for each in found.registrations] == [4, 5]
    assert found.faults == ()


async def test_a_rank_that_cannot_be_followed_is_named(engine: Engine) -> None:
    """A hole between ranks, no endpoint, no port, another transport, nonsense: each a fault, and the others are followed."""
    engine.pages["/kv_event_sources"] = {
        "0": vllm_rank("tcp://*:5557"), "2": vllm_rank(None), "3": vllm_rank("tcp://*:0"), "4": vllm_rank("inproc://x"),
        "5": {"endpoint": 7}, "6": vllm_rank("tcp://*:5563", publisher="null"), "7": [], "8": vllm_rank("tcp://h:1", "x"),
    }  # fmt: skip
    found = await ask(engine, Template(model="m"))
    assert [each.rank for each in found.registrations] == [0]
    assert [fault.subject for fault in found.faults] == [f"e rank {rank}" for rank in range(1, 9)]
    assert sentences(found)[0] == "rank 1 of e is not in /kv_event_sources"
    assert "rank 2 of e cannot be followed: it has no endpoint" in sentences(found)
    assert "needs a port" in sentences(found)[2]


async def test_ranks_that_the_operator_expects_are_reported_missing(engine: Engine) -> None:
    """`ranks = 4` beside a base_url: an engine that lists two of them lacks two."""
    engine.pages["/kv_event_sources"] = {rank: vllm_rank("tcp://*:5557") for rank in ("0", "1")}
    found = await ask(engine, SourceTable(model="m", base_url=engine.url, ranks=4))
    assert sentences(found) == [f"rank {rank} of e is configured, but the engine does not report it" for rank in (2, 3)]


async def test_sglang_lists_all_its_ranks(engine: Engine) -> None:
    """Ports count up from one base, those of replay too; block size and model come with them."""
    engine.pages["/server_info"] = sglang(kv_events={"replay_endpoint_port_base": 6557, "topic": "kv"})
    found = await ask(engine)
    assert streams(found) == [
        ("e rank 0", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557"),
        ("e rank 1", "tcp://127.0.0.1:5558", "tcp://127.0.0.1:6558"),
    ]
    assert {(each.model, each.topic, each.block_size) for each in found.registrations} == {("Qwen/Qwen3-0.6B", "kv", 64)}
    assert engine.asked == ["/kv_event_sources", "/server_info", "/v1/models"]
    assert [each.load for each in found.registrations] == [None, None], "its metrics are off unless they are switched on"


@pytest.mark.parametrize("listed", [None, [{"dp_rank": 2, "endpoint": "tcp://127.0.0.1:5559"}, {"dp_rank": 3}]])
async def test_ranks_on_other_nodes_of_sglang_are_missing_by_name(engine: Engine, listed: list[Any] | None) -> None:
    """Attention DP over two nodes: ports of ranks 0 and 1 are on a host that the second node does not name."""
    engine.pages["/server_info"] = sglang(kv_events={"dp_size": 4}, nnodes=2, node_rank=1, kv_event_sources=listed)
    found = await ask(engine)
    assert streams(found) == [("e rank 2", "tcp://127.0.0.1:5559", None), ("e rank 3", "tcp://127.0.0.1:5560", None)]
    assert [fault.subject for fault in found.faults] == ["e rank 0", "e rank 1"]
    assert "another node" in sentences(found)[0]


async def test_an_older_sglang_lists_its_flag(engine: Engine) -> None:
    """Before `kv_events` and before `/server_info`: the same, from the settings that it was started with."""
    info = sglang(
        kv_events_config='{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}', dp_size=2
    )
    del info["kv_events"]
    engine.pages["/get_server_info"] = info
    found = await ask(engine)
    assert [each.replay_endpoint for each in found.registrations] == ["tcp://127.0.0.1:6557", "tcp://127.0.0.1:6558"]
    assert {each.block_size for each in found.registrations} == {32}


async def test_absent_fields_are_tolerated(engine: Engine) -> None:
    """Only a port is needed; a later release may leave out the rest, or add to it."""
    engine.pages["/server_info"] = {"kv_events": {"endpoint_port_base": 5557, "new": []}}
    engine.pages["/v1/models"] = VLLM_MODELS
    assert streams(await ask(engine, instance=None)) == [(f"127.0.0.1:{engine.port} rank 0", "tcp://127.0.0.1:5557", None)]


@pytest.mark.parametrize(
    ("path", "page", "word"),
    [
        ("/kv_event_sources", {}, "vLLM"),
        ("/server_info", {"kv_events": None}, "SGLang"),
        ("/server_info", {"kv_events_config": None}, "SGLang"),
        ("/server_info", {"kv_events_config": '{"publisher": "null"}'}, "SGLang"),
    ],
)
async def test_an_engine_without_events_says_how_to_get_them(engine: Engine, path: str, page: Any, word: str) -> None:
    """It is known to publish nothing: no ranks, and a fault with the flag, whose JSON makes the engine listen and replay."""
    engine.pages[path] = page
    found = await ask(engine)
    assert found.registrations == ()
    assert f"e publishes no KV events: start {word} with --kv-events-config" in sentences(found)[0]
    [suggested] = re.findall(r"\{.*\}", sentences(found)[0])
    taken = VLLMConfig.from_cli(suggested) if word == "vLLM" else SGLangConfig.from_cli(suggested)
    assert (taken.publisher, taken.endpoint, taken.replay_endpoint) == ("zmq", "tcp://*:5557", "tcp://*:5558")


async def test_the_template_goes_before_what_the_engine_says(engine: Engine) -> None:
    """Scopes, model, topic, block size and replay as the operator wants them; replay ports count up by rank."""
    engine.pages["/server_info"] = sglang(kv_events={"topic": "kv"})
    template = Template(model="m", tenant="t", group="g", topic="mine", block_size=16, salt="s", replay_endpoint="tcp://*:7000")
    first, second = (await ask(engine, template)).registrations
    assert (first.model, first.tenant, first.group, first.topic, first.block_size, first.salt) == (
        "m",
        "t",
        "g",
        "mine",
        16,
        "s",
    )
    assert (first.replay_endpoint, second.replay_endpoint) == ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001")


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ({}, "neither /kv_event_sources (vLLM from 0.31 on) nor /server_info (SGLang)"),
        ({"/kv_event_sources": []}, "does not return a JSON object of ranks"),
        ({"/kv_event_sources": {"zero": {}}}, "the key 'zero' in place of a rank number"),
        ({"/kv_event_sources": {"0": {}, "999999999": {}}}, "reports 1000000000 data-parallel ranks"),
        ({"/server_info": sglang(kv_events={"dp_size": 10**12})}, "reports 1000000000000 data-parallel ranks"),
        ({"/server_info": sglang(kv_events={"dp_size": -1})}, "reports -1 data-parallel ranks"),
        ({"/server_info": sglang(kv_events={"endpoint_port_base": "x"})}, "$.kv_events.endpoint_port_base"),
        ({"/server_info": "?"}, "does not have the shape of SGLang's"),
        ({"/server_info": {"kv_events": {"endpoint_port_base": 1}}}, "lists no model"),
        ({"/server_info": {"kv_events": {"endpoint_port_base": 1}}, "/v1/models": {"data": []}}, "lists no model"),
        ({"/server_info": {"kv_events": {"endpoint_port_base": 1}}, "/v1/models": 1}, "does not have the shape of OpenAI's"),
        ({"/kv_event_sources": b"HTTP/1.0 200 OK\r\n\r\n<html>"}, "not answer in JSON"),
        ({"/kv_event_sources": b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 500_000}, "not answer in JSON"),
        ({"/kv_event_sources": b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe"}, "not answer in JSON"),
        ({"/kv_event_sources": b"HTTP/1.0 503 Later\r\n\r\n"}, "answers with status 503"),
        ({"/kv_event_sources": b"HTTP/1.0 401 No\r\n\r\n"}, "requires a key"),
    ],
)  # fmt: skip
async def test_an_answer_that_cannot_be_used_is_a_fault(engine: Engine, pages: dict[str, Any], words: str) -> None:
    """Whatever it answers, watching goes on."""
    engine.pages |= pages
    found = await ask(engine)
    assert found.registrations == ()
    assert words in sentences(found)[0]


async def test_an_engine_that_stops_answering_is_asked_less_and_less_often_and_keeps_its_ranks(engine: Engine) -> None:
    """0.5 s doubling to 30 s, one fault for all failures; then every 15 s again, and only changes are yielded."""
    engine.pages["/server_info"] = sglang()
    steps = Steps()
    watched = EngineProvider(engine.url, clock=steps.clock).watch()
    good = await within(soon(watched))
    following = soon(watched)
    assert await steps.step() == 15
    assert await steps.paused() == 15
    engine.status = 500
    steps.go()
    failing = await within(following)
    assert failing.registrations == good.registrations
    assert "status 500" in sentences(failing)[0]
    following = soon(watched)
    assert [await steps.step() for _ in range(7)] == [0.5, 1, 2, 4, 8, 16, 30]
    assert await steps.paused() == 30
    engine.status = 200
    steps.go()
    assert await within(following) == good
    await watched.aclose()


async def test_cancelling_ends_it_in_the_middle_of_a_question(engine: Engine) -> None:
    """The end does not wait for an engine that is slow to answer."""

    def slow(_handler: object) -> None:
        engine.reached.set()
        engine.hold.wait(20)

    engine.pages["/kv_event_sources"] = slow
    following = soon(EngineProvider(engine.url, http=EngineHttpClient(read_seconds=20)).watch())
    assert await asyncio.to_thread(engine.reached.wait, 20)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await within(following)


def test_it_is_called_by_its_url() -> None:
    """An invalid URL is refused when the settings are read, not when the engine is queried."""
    assert EngineProvider("http://h:8000").name == "engine http://h:8000"
    with pytest.raises(ConfigError):
        EngineProvider("h:8000")
