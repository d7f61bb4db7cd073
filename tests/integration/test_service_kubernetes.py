"""A service that follows pods, with real engines and recorded watches, whose pods get the addresses of the engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import service_cases
from discovery_fetch_cases import Engine
from kubernetes_cases import write_kubeconfig
from kubernetes_stream_cases import recorded, run_stream_server
from service_cases import MODEL, Service, engines, prompt, serving, wait_for

PROMPT = [*prompt(1), 1]


@contextmanager
def run_engines(count: int) -> Iterator[list[tuple[service_cases.Engine, Engine]]]:
    """Yield publishers, each with an HTTP server that describes it."""
    with ExitStack() as stack:
        made = stack.enter_context(engines(count))
        sources = [
            {"0": {"publisher": "zmq", "endpoint": each.endpoint, "replay_endpoint": each.replay_endpoint}} for each in made
        ]
        models = {"data": [{"id": MODEL}]}
        yield [
            (publisher, stack.enter_context(Engine({"/kv_event_sources": source, "/v1/models": models, "/metrics": b""})))
            for publisher, source in zip(made, sources, strict=True)
        ]


def at(lines: list[str], servers: list[Engine]) -> list[str]:
    """Return recorded lines whose pods have the addresses of these servers."""
    found: list[str] = []
    for line in map(json.loads, lines):
        number = int(line["object"]["metadata"]["name"].removeprefix("vllm-"))
        if number < len(servers):
            line["object"]["metadata"]["annotations"] = {"kvevents/http-port": str(servers[number].port)}
            if line["object"]["status"].get("podIP"):
                line["object"]["status"]["podIP"] = "127.0.0.1"
            found.append(json.dumps(line))
    return found


def select(service: Service) -> Any:
    idle = [{"instance": f"vllm-{number}", "load": 0} for number in range(2)]
    return service.post("/v1/select", {"model": MODEL, "tokens": PROMPT, "candidates": idle}).json


def named(service: Service) -> set[str]:
    """Return all engines in an answer about the prompt."""
    return {worker["instance"] for worker in service.post("/v1/match", {"model": MODEL, "tokens": PROMPT}).json["workers"]}


async def test_a_service_without_pods_is_ready_and_one_that_cannot_list_them_is_not(tmp_path: Path) -> None:
    """Otherwise an installation in a namespace without engines would never be complete."""
    async with run_stream_server() as server:
        config = str(write_kubeconfig(tmp_path / "kubeconfig", server.url))
        server.refusal = recorded("forbidden")

        def run() -> None:
            ready = "--ready-deadline-seconds", "0.1"
            with serving("--kubernetes-selector", "app=vllm", *ready, KUBECONFIG=config) as service:
                wait_for("a warning", lambda: service.get("/health").json["warnings"])
                assert service.get("/readyz").json["why"] == "engines are expected, but no engine is registered or found yet"
                assert service.post("/v1/match", {"model": MODEL, "tokens": PROMPT}).status == 503
                server.refusal = None
                service.wait_until_ready()
                asked = {"model": MODEL, "tokens": PROMPT}
                wait_for("an answer", lambda: service.post("/v1/match", asked).status == 404)

        await asyncio.to_thread(run)


async def test_a_service_needs_only_a_selector(tmp_path: Path) -> None:
    """A pod that is not Ready stays followed and gets no requests; one that drains is in no answer."""
    steps: dict[str, list[str]] = recorded("steps")
    async with run_stream_server() as server:
        config = write_kubeconfig(tmp_path / "kubeconfig", server.url)

        def run() -> None:
            with run_engines(2) as made, serving("--kubernetes-selector", "app=vllm", KUBECONFIG=str(config)) as service:
                first = made[0][0]
                servers = [server for _, server in made]
                first.store(prompt(1))
                push(at(steps["created"] + steps["ready"], servers))
                for name in ("vllm-0", "vllm-1"):
                    found = service.exact(name)
                    assert (found["labels"], found["origin"]) == ({"namespace": "inference"}, "discovery")
                assert service.source("vllm-0")["url"] == f"http://127.0.0.1:{servers[0].port}"
                wait_for("the first", lambda: select(service)["instance"] == "vllm-0")
                push(at(steps["killed"], servers))
                wait_for("the other one", lambda: select(service)["instance"] == "vllm-1")
                found = service.exact("vllm-0", blocks=4)
                assert found["fault"] == "its pod is not Ready: ContainersNotReady, container engine: OOMKilled"
                push(at(steps["restarted"], servers))
                wait_for("the first again", lambda: select(service)["instance"] == "vllm-0")
                draining = json.loads(steps["draining"][0])
                draining["object"]["metadata"]["name"] = "vllm-0"
                push(at([json.dumps(draining)], servers))
                wait_for("the first to be gone", lambda: named(service) == {"vllm-1"})
                assert not service.get("/health").json["warnings"]
                push([recorded("expired")])
                server.refusal = recorded("forbidden")
                wait_for("a warning", lambda: "status 403" in "".join(service.get("/health").json["warnings"]))
                assert set(service.sources()) == {("vllm-1", 0)}

        loop = asyncio.get_running_loop()

        def push(lines: list[str]) -> None:
            loop.call_soon_threadsafe(server.push, lines)

        await asyncio.to_thread(run)


async def test_a_drained_pod_stays_drained_though_it_is_not_ready_when_the_service_starts(tmp_path: Path) -> None:
    """The pod was never Ready for the new service, which does not follow it until it is."""
    steps: dict[str, list[str]] = recorded("steps")
    async with run_stream_server() as server:
        config = write_kubeconfig(tmp_path / "kubeconfig", server.url)

        def start() -> AbstractContextManager[Service]:
            return serving("--kubernetes-selector", "app=vllm", "--state-dir", tmp_path, KUBECONFIG=str(config))

        def push(lines: list[str]) -> None:
            loop.call_soon_threadsafe(server.push, lines)

        def run() -> None:
            with run_engines(1) as made:
                servers = [server for _, server in made]
                with start() as service:
                    push(at(steps["created"] + steps["ready"], servers))
                    service.exact("vllm-0")
                    assert service.post("/v1/drain", instance="vllm-0").status == 200
                    service.end()
                pods = [json.loads(line)["object"] for line in at(steps["killed"], servers)]
                server.lists["pods"] = {"metadata": {"resourceVersion": "1"}, "items": pods}
                with start() as service:
                    service.wait_until_ready()
                    assert not service.sources()
                    push(at(steps["restarted"], servers))
                    assert service.exact("vllm-0")["draining"]

        loop = asyncio.get_running_loop()
        await asyncio.to_thread(run)
