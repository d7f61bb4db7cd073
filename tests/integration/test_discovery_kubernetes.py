"""Discovery of pods, with the lists and watches that kube-apiserver 1.34.4 sent (`tests/data/kubernetes.json`).

A small HTTP server serves them. `make kubernetes` runs `tests/system/test_kubernetes_server.py`, with the API server itself.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio.config import incluster_config

from certificate_cases import make_certificates
from discovery_cases import await_in_time
from discovery_fetch_cases import Engine
from kubernetes_cases import NAMESPACE, write_kubeconfig
from kubernetes_stream_cases import StreamServer, recorded, run_stream_server
from kvevents.errors import MissingDependencyError
from kvevents.service.discovery import object_watch
from kvevents.service.discovery.engines import Declaration, EngineProvider
from kvevents.service.discovery.kubernetes import KubernetesProvider
from kvevents.service.discovery.provider import Finding, Template
from kvevents.service.fleet.registration import source_name
from kvevents.service.settings import KubernetesSettings

STEPS: dict[str, list[str]] = recorded("steps")
EMPTY = {"metadata": {"resourceVersion": "1"}, "items": []}


class Followed:
    """A provider that runs, and its newest finding."""

    def __init__(self, provider: KubernetesProvider) -> None:
        self.newest: Finding | None = None
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(provider))

    async def _run(self, provider: KubernetesProvider) -> None:
        async for found in provider.watch():
            self.newest = found
            self._changed.set()

    async def until(self, fits: Callable[[Finding], object]) -> Finding:
        """Wait for a finding that fits, and return it."""

        async def look() -> Finding:
            while self.newest is None or not fits(self.newest):
                self._changed.clear()
                await self._changed.wait()
            return self.newest

        return await await_in_time(look())

    async def until_pods(self, *names: str) -> Finding:
        """Wait until exactly these pods are engines."""
        return await self.until(lambda found: names_of(found) == set(names))

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def names_of(found: Finding) -> set[str | None]:
    return {each.instance for each in found.providers if isinstance(each, EngineProvider)}


def sentences(found: Finding) -> list[str]:
    return list(found.faults)


@asynccontextmanager
async def following(server: StreamServer, folder: Path, **settings: Any) -> AsyncGenerator[Followed, None]:
    settings |= {"kubeconfig": str(write_kubeconfig(folder / "kubeconfig", server.url))}
    if "pools" not in settings:
        settings["selector"] = "app=vllm"
    followed = Followed(KubernetesProvider(KubernetesSettings(**settings)))
    try:
        yield followed
    finally:
        await followed.end()


@pytest.fixture
async def server() -> AsyncGenerator[StreamServer, None]:
    async with run_stream_server() as found:
        yield found


async def test_an_engine_lives_as_long_as_its_pod(server: StreamServer, tmp_path: Path) -> None:
    async with following(server, tmp_path) as pods:
        await pods.until_pods()
        asked = await server.next_request(watch="True")
        assert (asked["labelSelector"], asked["resourceVersion"], asked["allowWatchBookmarks"]) == ("app=vllm", "1", "True")
        server.push(STEPS["created"] + STEPS["ready"])
        found = await pods.until_pods("vllm-0", "vllm-1", "vllm-2")
        assert [each.name for each in found.providers] == [f"engine http://10.1.0.{number}:8000" for number in range(3)]
        server.push(STEPS["killed"])
        found = await pods.until(lambda found: found.unready_sources)
        why = "its pod is not Ready: ContainersNotReady, container engine: OOMKilled"
        assert found.unready_sources == ((source_name("default", "default", "vllm-0"), why),)
        assert names_of(found) == {"vllm-0", "vllm-1", "vllm-2"}
        assert not found.faults
        server.push(STEPS["restarted"])
        await pods.until(lambda found: not found.unready_sources)
        server.push(STEPS["lost"])
        await pods.until(lambda found: "NodeStatusUnknown" in found.unready_sources[0][1] if found.unready_sources else False)
        server.push(STEPS["evicted"])
        found = await pods.until_pods("vllm-0", "vllm-2")
        assert sentences(found) == ["pod vllm-1 has failed: Evicted; The node was low on resource: memory."]
        server.push(STEPS["draining"])
        found = await pods.until_pods("vllm-0")
        assert len(found.faults) == 1  # a pod that was scaled down has none
        server.push(STEPS["deleted"])
        assert await pods.until_pods() == Finding()


async def test_a_pod_that_is_not_ready_yet_is_no_engine(server: StreamServer, tmp_path: Path) -> None:
    server.lists["pods"] = EMPTY | {"items": [json.loads(line)["object"] for line in STEPS["killed"]]}
    async with following(server, tmp_path) as pods:
        found = await pods.until(lambda _: True)
        assert (found.registrations, found.providers, found.faults) == ((), (), ())
        assert [name for name, _ in found.unready_sources] == [source_name("default", "default", "vllm-0")]
        server.push(STEPS["ready"][1:2])
        await pods.until_pods("vllm-1")


async def test_a_watch_goes_on_where_the_last_one_ended(server: StreamServer, tmp_path: Path) -> None:
    async with following(server, tmp_path) as pods:
        await server.next_request(watch="True")
        server.push(STEPS["ready"] + STEPS["bookmark"])
        await pods.until_pods("vllm-0", "vllm-1", "vllm-2")
        server.end_watch()
        version = json.loads(STEPS["bookmark"][-1])["object"]["metadata"]["resourceVersion"]
        assert (await server.next_request())["resourceVersion"] == version
        server.push(STEPS["draining"])
        found = await pods.until_pods("vllm-0", "vllm-1")
        assert not found.faults


async def test_engines_stay_while_the_api_server_is_away(server: StreamServer, tmp_path: Path) -> None:
    async with following(server, tmp_path) as pods:
        server.push(STEPS["ready"])
        await pods.until_pods("vllm-0", "vllm-1", "vllm-2")
        await server.stop()
        found = await pods.until(lambda found: "Cannot connect" in "".join(sentences(found)))
        assert names_of(found) == {"vllm-0", "vllm-1", "vllm-2"}
        [sentence] = sentences(found)
        assert sentence.startswith(f"the pods of namespace {NAMESPACE} cannot be followed: ")
        assert sentence.endswith("; the 3 known before stay")
        server.push(STEPS["draining"])  # the first thing that the next watch gets
        await server.start()
        found = await pods.until_pods("vllm-0", "vllm-1")
        assert not found.faults


async def test_pods_that_were_deleted_behind_an_expired_version_are_gone(server: StreamServer, tmp_path: Path) -> None:
    async with following(server, tmp_path) as pods:
        server.push(STEPS["ready"])
        await pods.until_pods("vllm-0", "vllm-1", "vllm-2")
        server.lists["pods"] = {"metadata": {"resourceVersion": "900"}, "items": [json.loads(STEPS["ready"][0])["object"]]}
        server.push([recorded("expired")])
        found = await pods.until_pods("vllm-0")
        assert not found.faults
        await server.next_request(watch="True", resourceVersion="900")


async def test_a_refused_request_is_a_fault_that_ends(server: StreamServer, tmp_path: Path) -> None:
    server.refusal = recorded("forbidden")
    async with following(server, tmp_path) as pods:
        found = await pods.until(lambda found: found.faults)
        assert 'status 403: pods is forbidden: User "system:serviceaccount:inference:without-a-role"' in sentences(found)[0]
        server.refusal = recorded("unauthorized")
        await pods.until(lambda found: "status 401: Unauthorized" in "".join(sentences(found)))
        server.refusal = None
        await pods.until(lambda found: not found.faults)


async def test_a_list_comes_in_pages(server: StreamServer, tmp_path: Path) -> None:
    first, second = ([json.loads(STEPS["ready"][number])["object"]] for number in (0, 1))
    server.lists["pods"] = {"metadata": {"resourceVersion": "7", "continue": "more"}, "items": first}
    async with following(server, tmp_path) as pods:
        await server.next_request(limit="500")
        server.lists["pods"] = {"metadata": {"resourceVersion": "7"}, "items": second}
        await server.next_request(**{"continue": "more"})
        await pods.until_pods("vllm-0", "vllm-1")


async def test_a_silent_connection_is_given_up(server: StreamServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_watch, "SILENCE_SECONDS", 0.2)
    async with following(server, tmp_path) as pods:
        await server.next_request(watch="True")
        await server.next_request(watch="True")
        await pods.until(lambda found: not sentences(found))


async def test_a_server_that_no_longer_answers_is_a_fault(
    server: StreamServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process keeps its connections. The engines stay, and what happens meanwhile is caught up."""
    monkeypatch.setattr(object_watch, "SILENCE_SECONDS", 0.2)
    async with following(server, tmp_path) as pods:
        server.push(STEPS["created"] + STEPS["ready"])
        engines = names_of(await pods.until_pods("vllm-0", "vllm-1", "vllm-2"))
        server.is_frozen = True
        finding = await pods.until(lambda finding: any("does not answer" in sentence for sentence in sentences(finding)))
        assert names_of(finding) == engines
        server.push(STEPS["deleted"])
        server.is_frozen = False
        await pods.until(lambda finding: not finding.faults and not finding.providers)


async def test_an_invalid_pod_does_not_hide_the_others(server: StreamServer, tmp_path: Path) -> None:
    line = json.loads(STEPS["ready"][0])
    line["object"]["metadata"]["annotations"] = {"kvevents/ranks": "many"}
    async with following(server, tmp_path) as pods:
        server.push([json.dumps(line), *STEPS["ready"][1:]])
        found = await pods.until_pods("vllm-1", "vllm-2")
        assert sentences(found) == ["invalid kvevents/ranks 'many' of pod vllm-0: expected 1 to 1024"]


async def test_an_object_of_another_shape_is_left_out(
    server: StreamServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = json.loads(STEPS["ready"][0])
    line["object"]["spec"]["containers"] = None
    async with following(server, tmp_path) as pods:
        server.push(STEPS["ready"][:1])
        await pods.until_pods("vllm-0")
        server.push([json.dumps(line), *STEPS["ready"][1:]])
        assert not (await pods.until_pods("vllm-1", "vllm-2")).faults
    assert f"pods vllm-0 of namespace {NAMESPACE} cannot be read" in caplog.text


async def test_a_pool_names_pods_and_their_port(server: StreamServer, tmp_path: Path) -> None:
    server.lists |= {"pods": recorded("projects"), "inferencepools": recorded("pools")}
    async with following(server, tmp_path, pools=("qwen", "missing")) as pods:
        asked = await server.next_request(kind="pods", watch="True")
        assert "labelSelector" not in asked
        found = await pods.until_pods("precise-prefix-cache-routing-gpu-vllm-decode-5b7c")
        assert [each.name for each in found.providers] == ["engine http://10.1.0.3:8000"]
        assert sentences(found) == [f"InferencePool missing is not in namespace {NAMESPACE}"]
        changed = recorded("pools")["items"][0]
        changed["spec"]["targetPorts"] = [{"number": 8200}]
        server.push([json.dumps({"type": "MODIFIED", "object": changed})], "inferencepools")
        await pods.until(lambda found: [each.name for each in found.providers] == ["engine http://10.1.0.3:8200"])
        server.push([json.dumps({"type": "DELETED", "object": changed})], "inferencepools")
        assert len((await pods.until_pods()).faults) == 2


async def test_each_namespace_has_one_watch(server: StreamServer, tmp_path: Path) -> None:
    async with following(server, tmp_path, namespaces=("a", "b")) as pods:
        await server.next_request(watch="True")
        await server.next_request(watch="True")
        server.push(STEPS["ready"])  # one of both gets each line
        found = await pods.until(lambda found: len(found.providers) == 3)
        assert {str(name).partition(".")[2] for name in names_of(found)} <= {"a", "b"}
        assert server.requests.empty()


async def test_a_pod_uses_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespace is that of the account. A token that the kubelet replaces is read again."""
    make_certificates(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    (tmp_path / "namespace").write_text("prod\n")
    (tmp_path / "token").write_text("first")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.pem"))
    monkeypatch.setattr(object_watch, "_ACCOUNT_FOLDER", tmp_path)
    async with run_stream_server(tls) as server:
        server.bearer = "first"
        host, _, port = server.url.removeprefix("https://").partition(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        pods = Followed(KubernetesProvider(KubernetesSettings(selector="app=vllm")))
        assert (await server.next_request(watch="True"))["namespace"] == "prod"
        server.push(STEPS["ready"])
        await pods.until_pods("vllm-0", "vllm-1", "vllm-2")
        (tmp_path / "token").write_text("second")
        server.bearer = "second"
        server.push(STEPS["draining"])
        server.end_watch()
        await pods.until(lambda found: not found.faults and len(found.providers) == 2)
        server.push(STEPS["deleted"])
        await pods.until_pods()
        await pods.end()


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"kvevents\[service,kubernetes\]"):
        KubernetesProvider(KubernetesSettings(selector="a"))


# --- what a pod says, and what its engine says

DECLARED = Declaration("Qwen/Qwen3-0.6B", names_model=True, events_port=5557, replay_port=5558)
MODELS = {"object": "list", "data": [{"id": "Qwen/Qwen3-0.6B", "object": "model"}]}


def source(events: int, replay: int | None) -> dict[str, Any]:
    """Return what vLLM says of its only rank."""
    replay_endpoint = None if replay is None else f"tcp://*:{replay}"
    return {"0": {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": replay_endpoint}}


async def query(pages: dict[str, Any], declared: Declaration = DECLARED, status: int = 200, **template: Any) -> Finding:
    with Engine(pages) as engine:
        engine.status = status
        found = EngineProvider(engine.url, Template(**template), "e", declaration=declared).watch()
        first = await await_in_time(anext(found))
        await found.aclose()
        return first


async def test_an_engine_that_agrees_with_its_pod_has_no_fault() -> None:
    found = await query({"/kv_event_sources": source(5557, 5558), "/v1/models": MODELS})
    assert not found.faults
    assert [each.endpoint for each in found.registrations] == ["tcp://127.0.0.1:5557"]


async def test_what_the_engine_says_takes_effect_and_contradictions_are_faults() -> None:
    models = {"data": [{"id": "llama"}]}
    found = await query({"/kv_event_sources": source(6001, None), "/v1/models": models})
    [registration] = found.registrations
    assert (registration.endpoint, registration.replay_endpoint, registration.model) == ("tcp://127.0.0.1:6001", None, "llama")
    assert sentences(found) == [
        "e: it is declared to serve Qwen/Qwen3-0.6B, but serves llama; what the engine reports takes effect",
        "e: its declared events port is 5557, but the engine names tcp://127.0.0.1:6001; what the engine reports takes effect",
        "e: its declared replay port is 5558, but the engine names no endpoint; what the engine reports takes effect",
    ]


async def test_ports_count_up_by_rank() -> None:
    """Behind an external load balancer each server of an engine has other ranks."""
    second = {"2": {"publisher": "zmq", "endpoint": "tcp://*:5559", "replay_endpoint": "tcp://*:5560"}}
    assert not (await query({"/kv_event_sources": second, "/v1/models": MODELS})).faults


async def test_a_nickname_and_assumed_ports_contradict_nothing() -> None:
    """Settings of the service assume ports for all pods that state none."""
    assumed = Declaration("qwen", assumed_replay_port=5558)
    found = await query({"/kv_event_sources": source(6001, None), "/v1/models": MODELS}, assumed)
    assert not found.faults
    assert found.registrations[0].model == "Qwen/Qwen3-0.6B"


async def test_ports_of_the_pod_count_for_an_engine_that_names_none() -> None:
    """vLLM before 0.31 has no `/kv_event_sources`."""
    found = await query({"/v1/models": MODELS}, DECLARED, ranks=2)
    assert [(each.rank, each.endpoint, each.replay_endpoint) for each in found.registrations] == [
        (0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        (1, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:5559"),
    ]
    assert {each.model for each in found.registrations} == {"Qwen/Qwen3-0.6B"}
    assert not any(each.replay_is_proven for each in found.registrations)


async def test_relays_are_followed_in_place_of_the_engine_that_names_its_own_ports() -> None:
    """The model is still that of the engine. It is no contradiction that it has other ports, or none that can be reached."""
    relays = Declaration(events_port=6557, replay_port=6567, is_relay=True)
    for sources in (source(5557, 5558), {"0": {"publisher": "zmq", "endpoint": "ipc:///tmp/events"}}):
        found = await query({"/kv_event_sources": sources, "/v1/models": MODELS}, relays, ranks=2)
        assert not found.faults
        assert [(each.rank, each.endpoint, each.replay_endpoint) for each in found.registrations] == [
            (0, "tcp://127.0.0.1:6557", "tcp://127.0.0.1:6567"),
            (1, "tcp://127.0.0.1:6558", "tcp://127.0.0.1:6568"),
        ]
        assert {each.model for each in found.registrations} == {"Qwen/Qwen3-0.6B"}
        assert not any(each.replay_is_proven for each in found.registrations)


async def test_an_engine_that_requires_a_key_is_as_its_pod_says() -> None:
    found = await query({"/kv_event_sources": {}, "/server_info": {}, "/get_server_info": {}, "/v1/models": {}}, status=401)
    [registration] = found.registrations
    assert (registration.model, registration.endpoint) == ("Qwen/Qwen3-0.6B", "tcp://127.0.0.1:5557")


async def test_without_any_model_the_annotation_is_named() -> None:
    found = await query({}, Declaration())
    assert "lists no model: set the annotation kvevents/model of its pod" in sentences(found)[0]
