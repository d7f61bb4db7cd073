"""Engines that list their event sources over HTTP, as vLLM 0.33 and SGLang 0.5.23 do; with real sockets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from discovery_cases import ManualClock, await_in_time, start_next
from discovery_fetch_cases import Engine
from kvevents.compat.sglang import KVEventsConfig as SGLangConfig
from kvevents.compat.vllm import KVEventsConfig as VLLMConfig
from kvevents.errors import ConfigError
from kvevents.service.discovery.engines import EngineHttpClient, EngineProvider, is_same_host
from kvevents.service.discovery.provider import Finding, SourceTable, Template
from kvevents.service.fleet.registration import Scope


def vllm_rank(endpoint: str | None, replay: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return a `KVEventsConfig` of vLLM 0.33 as decoded JSON."""
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


def make_server_info(**fields: Any) -> dict[str, Any]:
    """Return an excerpt of `/server_info` of SGLang 0.5.23, with fields that discovery reads and others."""
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


async def query_engine(engine: Engine, template: Template | None = None, instance: str | None = "e") -> Finding:
    """Ask an engine that may name other hosts, as one with ranks on several nodes does."""
    provider = EngineProvider(engine.url, replace(template or Template(), other_hosts=True), instance)
    found = provider.watch()
    first = await await_in_time(start_next(found))
    await found.aclose()
    return first


def list_streams(found: Finding) -> list[tuple[str, str, str | None]]:
    return [(each.label, each.endpoint, each.replay_endpoint) for each in found.registrations]


def list_sentences(found: Finding) -> list[str]:
    return list(found.faults)


async def test_vllm_lists_all_its_ranks(engine: Engine) -> None:
    """Registrations have ports that the OS chose, the replay endpoint if there is one, the topic and the base model."""
    engine.pages |= {
        "/kv_event_sources": {
            "0": vllm_rank("tcp://10.0.0.1:41233", "tcp://10.0.0.1:41234"),
            "1": vllm_rank("tcp://10.0.0.2:41235"),
        },
        "/v1/models": VLLM_MODELS,
    }
    found = await query_engine(engine)
    assert list_streams(found) == [
        ("e rank 0", "tcp://10.0.0.1:41233", "tcp://10.0.0.1:41234"),
        ("e rank 1", "tcp://10.0.0.2:41235", None),
    ]
    assert {(each.model, each.topic, each.block_size) for each in found.registrations} == {
        ("Qwen/Qwen3-0.6B", "kv-events", None)
    }
    assert found.adapters == ((Scope("Qwen/Qwen3-0.6B", lora="an-adapter"), "/l"),)
    assert found.faults == ()
    assert {each.load for each in found.registrations} == {f"{engine.url}/metrics"}, "vLLM publishes no load"


async def test_adapters_are_requested_even_if_the_model_is_configured(engine: Engine) -> None:
    """Only adapters of the base model are listed, under its configured name. An invalid answer gives no adapters."""
    models = {"data": [*VLLM_MODELS["data"], {"id": "another", "parent": "another-model"}]}
    engine.pages |= {"/kv_event_sources": {"0": vllm_rank("tcp://10.0.0.1:41233")}, "/v1/models": models}
    named = Template(model="qwen", tenant="t", group="g")
    assert (await query_engine(engine, named)).adapters == ((Scope("qwen", "t", "g", "an-adapter"), "/l"),)
    pages: list[dict[str, Any]] = [{"data": 7}, {"data": []}]
    for page in pages:
        engine.pages["/v1/models"] = page
        found = await query_engine(engine, named)
        assert (len(found.registrations), found.adapters, found.faults) == (1, (), ())


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", "::"])  # noqa: S104
async def test_a_wildcard_host_becomes_the_host_that_was_queried(engine: Engine, host: str) -> None:
    """This holds for both engines and for replay endpoints: engines list the address that they bind."""
    engine.pages["/kv_event_sources"] = {"0": vllm_rank(f"tcp://{host}:5557", f"tcp://{host}:6557")}
    expected = [("e rank 0", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557")]
    assert list_streams(await query_engine(engine, Template(model="m"))) == expected
    engine.pages.clear()
    engine.pages["/server_info"] = make_server_info(
        kv_events={"endpoint_host": host, "dp_size": 1, "replay_endpoint_port_base": 6557}
    )
    assert list_streams(await query_engine(engine)) == expected


async def test_vllm_behind_an_external_load_balancer_lists_only_its_own_ranks(engine: Engine) -> None:
    """Ranks 0 to 3 are not reported as missing for a server that lists ranks 4 and 5."""
    engine.pages["/kv_event_sources"] = {rank: vllm_rank(f"tcp://*:{5557 + int(rank)}") for rank in ("4", "5")}
    found = await query_engine(engine, Template(model="m"))
    assert [each.rank for each in found.registrations] == [4, 5]
    assert found.faults == ()


async def test_a_rank_that_cannot_be_followed_is_a_fault_that_names_it(engine: Engine) -> None:
    """A missing rank, or one with an invalid endpoint or another publisher, is a fault; the other ranks are followed."""
    engine.pages["/kv_event_sources"] = {
        "0": vllm_rank("tcp://*:5557"), "2": vllm_rank(None), "3": vllm_rank("tcp://*:0"), "4": vllm_rank("inproc://x"),
        "5": {"endpoint": 7}, "6": vllm_rank("tcp://*:5563", publisher="null"), "7": [], "8": vllm_rank("tcp://h:1", "x"),
    }  # fmt: skip
    found = await query_engine(engine, Template(model="m"))
    assert [each.rank for each in found.registrations] == [0]
    assert [sentence[:11] for sentence in found.faults] == [f"rank {rank} of e" for rank in range(1, 9)]
    assert list_sentences(found)[0] == "rank 1 of e is not in /kv_event_sources"
    assert "rank 2 of e cannot be followed: it has no endpoint" in list_sentences(found)
    assert "needs a port" in list_sentences(found)[2]


async def test_configured_ranks_that_the_engine_does_not_list_are_faults(engine: Engine) -> None:
    """With `ranks = 4` and a base_url, an engine that lists two ranks lacks two."""
    engine.pages["/kv_event_sources"] = {rank: vllm_rank("tcp://*:5557") for rank in ("0", "1")}
    found = await query_engine(engine, SourceTable(model="m", base_url=engine.url, ranks=4))
    assert list_sentences(found) == [f"rank {rank} of e is configured, but the engine does not report it" for rank in (2, 3)]


async def test_sglang_lists_all_its_ranks(engine: Engine) -> None:
    """Ports of events and of replay count up from their base; the block size and the model are read too."""
    engine.pages["/server_info"] = make_server_info(kv_events={"replay_endpoint_port_base": 6557, "topic": "kv"})
    found = await query_engine(engine)
    assert list_streams(found) == [
        ("e rank 0", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557"),
        ("e rank 1", "tcp://127.0.0.1:5558", "tcp://127.0.0.1:6558"),
    ]
    assert {(each.model, each.topic, each.block_size) for each in found.registrations} == {("Qwen/Qwen3-0.6B", "kv", 64)}
    assert engine.requested_paths == ["/kv_event_sources", "/server_info", "/v1/models"]
    assert [each.load for each in found.registrations] == [None, None], "metrics of SGLang are off by default"


@pytest.mark.parametrize("listed", [None, [{"dp_rank": 2, "endpoint": "tcp://127.0.0.1:5559"}, {"dp_rank": 3}]])
async def test_ranks_on_other_nodes_of_sglang_are_faults(engine: Engine, listed: list[Any] | None) -> None:
    """With attention data parallelism over two nodes, the second node does not list the host of ranks 0 and 1."""
    engine.pages["/server_info"] = make_server_info(kv_events={"dp_size": 4}, nnodes=2, node_rank=1, kv_event_sources=listed)
    found = await query_engine(engine)
    assert list_streams(found) == [("e rank 2", "tcp://127.0.0.1:5559", None), ("e rank 3", "tcp://127.0.0.1:5560", None)]
    assert [sentence[:11] for sentence in found.faults] == ["rank 0 of e", "rank 1 of e"]
    assert "another node" in list_sentences(found)[0]


async def test_an_older_sglang_is_read_from_its_start_settings(engine: Engine) -> None:
    """Releases without `kv_events` and `/server_info` return `kv_events_config`, the JSON that they were started with."""
    info = make_server_info(
        kv_events_config='{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}', dp_size=2
    )
    del info["kv_events"]
    engine.pages["/get_server_info"] = info
    found = await query_engine(engine)
    assert [each.replay_endpoint for each in found.registrations] == ["tcp://127.0.0.1:6557", "tcp://127.0.0.1:6558"]
    assert {each.block_size for each in found.registrations} == {32}


async def test_absent_fields_are_tolerated(engine: Engine) -> None:
    """Only the port is required; later releases may omit other fields or add some."""
    engine.pages["/server_info"] = {"kv_events": {"endpoint_port_base": 5557, "new": []}}
    engine.pages["/v1/models"] = VLLM_MODELS
    assert list_streams(await query_engine(engine, instance=None)) == [
        (f"127.0.0.1:{engine.port} rank 0", "tcp://127.0.0.1:5557", None)
    ]


@pytest.mark.parametrize(
    ("path", "page", "engine_name"),
    [
        ("/kv_event_sources", {}, "vLLM"),
        ("/server_info", {"kv_events": None}, "SGLang"),
        ("/server_info", {"kv_events_config": None}, "SGLang"),
        ("/server_info", {"kv_events_config": '{"publisher": "null"}'}, "SGLang"),
    ],
)
async def test_an_engine_without_events_is_a_fault_with_the_flag_to_use(
    engine: Engine, path: str, page: Any, engine_name: str
) -> None:
    """It has no ranks; the JSON that the fault suggests is valid for the engine and enables events and replay."""
    engine.pages[path] = page
    found = await query_engine(engine)
    assert found.registrations == ()
    assert f"e publishes no KV events: start {engine_name} with --kv-events-config" in list_sentences(found)[0]
    [suggested] = re.findall(r"\{.*\}", list_sentences(found)[0])
    config = VLLMConfig.from_cli(suggested) if engine_name == "vLLM" else SGLangConfig.from_cli(suggested)
    assert (config.publisher, config.endpoint, config.replay_endpoint) == ("zmq", "tcp://*:5557", "tcp://*:5558")


async def test_the_template_takes_precedence_over_the_answer_of_the_engine(engine: Engine) -> None:
    """Scope, model, topic, block size and replay endpoint are those of the template; replay ports count up by rank."""
    engine.pages["/server_info"] = make_server_info(kv_events={"topic": "kv"})
    template = Template(model="m", tenant="t", group="g", topic="mine", block_size=16, salt="s", replay_endpoint="tcp://*:7000")
    first, second = (await query_engine(engine, template)).registrations
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
    ("pages", "fault_text"),
    [
        ({}, "neither /kv_event_sources (vLLM from 0.31 on) nor /server_info (SGLang)"),
        ({"/kv_event_sources": []}, "does not return a JSON object of ranks"),
        ({"/kv_event_sources": {"zero": {}}}, "the key 'zero' in place of a rank number"),
        ({"/kv_event_sources": {"0": {}, "999999999": {}}}, "reports 1000000000 data-parallel ranks"),
        ({"/server_info": make_server_info(kv_events={"dp_size": 10**12})}, "reports 1000000000000 data-parallel ranks"),
        ({"/server_info": make_server_info(kv_events={"dp_size": -1})}, "reports -1 data-parallel ranks"),
        ({"/server_info": make_server_info(kv_events={"endpoint_port_base": "x"})}, "$.kv_events.endpoint_port_base"),
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
async def test_an_invalid_answer_is_a_fault(engine: Engine, pages: dict[str, Any], fault_text: str) -> None:
    """The finding has no ranks, and its fault has the reason."""
    engine.pages |= pages
    found = await query_engine(engine)
    assert found.registrations == ()
    assert fault_text in list_sentences(found)[0]


async def test_an_engine_that_stops_answering_is_retried_with_growing_pauses_and_keeps_its_ranks(engine: Engine) -> None:
    """Pauses double from 0.5 s to 2 s with one fault for all failures; a finding is yielded only if it has changed."""
    engine.pages["/server_info"] = make_server_info()
    steps = ManualClock()
    findings = EngineProvider(engine.url, clock=steps.clock).watch()
    good = await await_in_time(start_next(findings))
    next_finding = start_next(findings)
    assert await steps.step() == 15
    assert await steps.wait_for_sleep() == 15
    engine.status = 500
    steps.end_sleep()
    failing = await await_in_time(next_finding)
    assert failing.registrations == good.registrations
    assert "status 500" in list_sentences(failing)[0]
    next_finding = start_next(findings)
    assert [await steps.step() for _ in range(4)] == [0.5, 1, 2, 2]
    assert await steps.wait_for_sleep() == 2
    engine.status = 200
    steps.end_sleep()
    assert await await_in_time(next_finding) == good
    await findings.aclose()


async def test_cancelling_ends_a_pending_query(engine: Engine) -> None:
    """It does not wait for an engine that is slow to answer."""

    def slow(_handler: object) -> None:
        engine.reached.set()
        engine.hold.wait(20)

    engine.pages["/kv_event_sources"] = slow
    next_finding = start_next(EngineProvider(engine.url, http=EngineHttpClient(read_seconds=20)).watch())
    assert await asyncio.to_thread(engine.reached.wait, 20)
    next_finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await await_in_time(next_finding)


def test_the_name_of_a_provider_contains_its_url() -> None:
    """An invalid URL is rejected by the constructor, not when the engine is queried."""
    assert EngineProvider("http://h:8000").name == "engine http://h:8000"
    with pytest.raises(ConfigError):
        EngineProvider("h:8000")


# --- endpoints of other hosts


@pytest.mark.parametrize(
    ("endpoint", "replay"),
    [
        ("tcp://169.254.169.254:80", None),
        ("tcp://127.0.0.1:5557", "tcp://169.254.169.254:80"),
        ("tcp://no-such-host.invalid:5557", None),
        ("ipc:///tmp/engine.sock", None),
    ],
)
async def test_endpoints_of_other_hosts_need_a_setting(engine: Engine, endpoint: str, replay: str | None) -> None:
    """An engine must not make the service connect to any address. Its other ranks are followed."""
    engine.pages["/kv_event_sources"] = {"0": vllm_rank(endpoint, replay), "1": vllm_rank("tcp://*:5559", "tcp://*:5560")}
    watching = EngineProvider(engine.url, Template(model="m"), "e").watch()
    found = await await_in_time(start_next(watching))
    await watching.aclose()
    assert list_streams(found) == [("e rank 1", "tcp://127.0.0.1:5559", "tcp://127.0.0.1:5560")]
    (sentence,) = list_sentences(found)
    assert sentence.startswith(f"rank 0 of e cannot be followed: {replay or endpoint} is not at the host 127.0.0.1;")
    assert [each.label for each in (await query_engine(engine, Template(model="m"))).registrations] == ["e rank 0", "e rank 1"]


async def test_endpoints_that_the_configuration_names_may_be_anywhere(engine: Engine) -> None:
    engine.pages["/kv_event_sources"] = {"0": vllm_rank("tcp://*:5557", "tcp://169.254.169.254:80")}
    template = Template(model="m", replay_endpoint="tcp://10.0.0.9:5558", load="tcp://10.0.0.9:5559")
    watching = EngineProvider(engine.url, template, "e").watch()
    found = await await_in_time(start_next(watching))
    await watching.aclose()
    assert list_streams(found) == [("e rank 0", "tcp://127.0.0.1:5557", "tcp://10.0.0.9:5558")]
    assert found.registrations[0].load == "tcp://10.0.0.9:5559"


async def test_names_and_addresses_of_one_host_are_equal() -> None:
    """An engine that is asked at loopback may name another address of this machine."""
    assert await is_same_host("127.0.0.1", "localhost")
    assert await is_same_host("localhost", "localhost")
    assert await is_same_host("127.0.0.2", "127.0.0.1"), "it is an address of this machine"
    assert not await is_same_host("127.0.0.1", "10.254.254.1")
    assert not await is_same_host("10.254.254.1", "127.0.0.1")
    assert not await is_same_host("no-such-host.invalid", "127.0.0.1")
