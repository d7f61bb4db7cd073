"""The manifests in `deploy/` work: their commands run as processes with real sockets and carry an engine's events to clients.

The tests replace only what a cluster provides: names of Services and pods, folders of volumes, and ports, which are all
shifted by the same number.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from cli_cases import SECONDS, Program
from cluster_cases import (  # noqa: F401 - a fixture, which pytest finds by name
    Cluster,
    cluster_fixture,
    poll_for,
)
from discovery_fetch_cases import Engine as HttpEngine
from helm_cases import OPEN, SCHEMAS, VERSIONS, Object, faults_of, needs_helm, needs_schemas, render_chart, render_sidecars
from kubernetes_cases import ready, write_kubeconfig
from kubernetes_stream_cases import run_stream_server
from kvevents import Batch, BlockStored, KVEventBatch, Source, Subscriber
from kvevents.compat.vllm import EventPublisherFactory, KVEventsConfig
from kvevents.publisher import EventPublisher
from nats_cases import needs_nats
from tools.chart import CHART, ROOT
from tools.nats_servers import nats_server

DEPLOY: Final = ROOT / "deploy"
EXAMPLE: Final = CHART / "examples" / "engine-with-relay.yaml"
PLAIN: Final = DEPLOY / "kubernetes"
PROMPT: Final = list(range(16))


def read_documents(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text()))


def containers_by_name(each: Object) -> dict[str, Object]:
    """Return the containers of a pod, with its sidecars."""
    spec = each["spec"]["template"]["spec"]
    return {container["name"]: container for kind in ("initContainers", "containers") for container in spec.get(kind, [])}


@contextmanager
def run_vllm_publisher(cluster: Cluster, container: Object, rank: int = 0) -> Iterator[EventPublisher]:
    """Run vLLM's publisher with the configuration of the container: it listens only at endpoints with a `*`."""
    [config] = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--kv-events-config=")]
    settings = KVEventsConfig(**json.loads(cluster.localize(config)))
    publisher = EventPublisherFactory.create(settings, rank)
    try:
        stored = BlockStored([rank + 1], None, PROMPT, len(PROMPT), medium="GPU")
        publisher.publish(KVEventBatch(time.time(), [stored], rank))
        yield publisher
    finally:
        publisher.shutdown()


def receive_first_block(cluster: Cluster, port: int, replay_port: int) -> BlockStored:
    """Return the first block that a consumer receives at these ports."""
    source = Source(f"tcp://127.0.0.1:{cluster.port(port)}", f"tcp://127.0.0.1:{cluster.port(replay_port)}")
    with Subscriber(source) as subscriber:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            delivery = subscriber.receive(timeout=0.5)
            events = delivery.events if isinstance(delivery, Batch) else []
            for event in events:
                if isinstance(event, BlockStored):
                    return event
    raise AssertionError(f"no block was received within {SECONDS} s: {subscriber!r}")


def find_workers(cluster: Cluster, model: str) -> list[str]:
    """Return the workers that hold the whole prompt."""
    status, body = cluster.get(8090, "/v1/match", {"model": model, "tokens": [*PROMPT, 99]})  # engines recompute the last token
    if status != 200:
        return []
    return [
        f"{worker['instance']}/{worker['rank']}" for worker in json.loads(body)["workers"] if worker["tokens"] == len(PROMPT)
    ]


def are_exact(cluster: Cluster, publishers: Sequence[EventPublisher], token: str = "") -> bool:
    """Return whether every rank is EXACT. If not, each publishes again: a live batch confirms what was replayed."""
    if cluster.get(8090, "/v1/sources", token=token)[1].count(b'"state":"EXACT"') == len(publishers):
        return True
    for rank, publisher in enumerate(publishers):
        publisher.publish(KVEventBatch(time.time(), [], rank))
    return False


def check_probes(cluster: Cluster, container: Object, *programs: Program) -> None:
    """Assert that each probe of the kubelet is answered with 200."""
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        if name in container:
            probe = container[name]["httpGet"]
            poll_for(lambda probe=probe: cluster.get(ports[probe["port"]], probe["path"])[0] == 200, *programs)  # type: ignore[misc]


def test_the_relay_of_the_example_forwards_the_events_of_the_engine_beside_it(cluster: Cluster) -> None:
    """The engine listens, the relay connects to it, and a consumer receives the events at the relay's ports."""
    [pod] = read_documents(EXAMPLE)
    found = containers_by_name(pod)
    with run_vllm_publisher(cluster, found["engine"]), cluster.run(found["kvevents-relay"]["args"]) as relay:
        assert receive_first_block(cluster, 6557, 6558).token_ids == PROMPT
        check_probes(cluster, found["kvevents-relay"], relay)


@needs_helm
@needs_nats
@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_chart_carries_events_from_relays_to_clients_of_replicas(cluster: Cluster, ranks: int) -> None:
    """The relays, the bridge and the replica run with the arguments that the chart renders; each rank is a worker."""
    settings = ["mode=plane", "plane.copies=1", "plane.partitions=2", "plane.partitionSize=16MiB"]
    with nats_server(cluster.folder / "nats") as nats:
        await run_chart(cluster, settings, ranks, **{"nats://nats:4222": nats.url})


@needs_helm
async def test_the_chart_carries_events_from_relays_to_clients_of_a_service(cluster: Cluster) -> None:
    """A service follows the relays without NATS."""
    await run_chart(cluster, [], 1)


async def run_chart(cluster: Cluster, settings: Sequence[str], ranks: int, **names: str) -> None:
    """Run the containers of the chart, and relays beside an engine of these ranks, until clients find each rank EXACT."""
    settings = [*settings, OPEN]
    if ranks > 1:
        settings += [f"relay.ranks={ranks}", "relay.replayPort=6567", "relay.engineReplayPort=5567"]
    objects = render_chart(*settings)
    for each in objects:
        if each["kind"] == "ConfigMap":
            for file, text in each["data"].items():
                cluster.write(f"/etc/kvevents/config/{file}", text)
    relays = render_sidecars(cluster.folder, *settings)["initContainers"]
    containers = [found for each in objects if each["kind"] == "Deployment" for found in containers_by_name(each).values()]
    replay = 5558 if ranks == 1 else 5567
    kv_events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": f"tcp://*:{replay}"}
    engine = {"args": [f"--kv-events-config={json.dumps(kv_events)}"]}

    def run() -> None:
        with ExitStack() as stack:
            publishers = [stack.enter_context(run_vllm_publisher(cluster, engine, rank)) for rank in range(ranks)]
            programs = [stack.enter_context(cluster.run(each["args"], **names)) for each in (*containers, *relays)]
            poll_for(lambda: len(find_workers(cluster, "llama")) == ranks, *programs)
            poll_for(partial(are_exact, cluster, publishers), *programs)
            for each in (*containers, *relays):
                check_probes(cluster, each, *programs)
            assert sorted(find_workers(cluster, "llama")) == [f"llama-0/{rank}" for rank in range(ranks)]

    source = json.loads(cluster.localize(json.dumps(kv_events)))
    async with run_pod(cluster, "llama-0", {"initContainers": relays, "containers": []}, source, "llama"):
        await asyncio.to_thread(run)


@asynccontextmanager
async def run_pod(cluster: Cluster, name: str, spec: Object, source: dict[str, Any], model: str) -> AsyncGenerator[None, None]:
    """Run an API server that knows one pod, and the HTTP server of its engine, which says where its first rank publishes."""
    pages = {"/kv_event_sources": {"0": source}, "/v1/models": {"data": [{"id": model}]}, "/metrics": b""}
    spec = json.loads(json.dumps(spec))
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        for port in container.get("ports", []):
            port["containerPort"] = cluster.port(port["containerPort"])
    async with run_stream_server() as server:
        with HttpEngine(pages) as engine:
            metadata = {"name": name, "labels": {"app": "vllm"}, "annotations": {"kvevents/http-port": str(engine.port)}}
            pod = {"metadata": metadata, "spec": spec, "status": ready("127.0.0.1")}
            server.lists["pods"] = {"metadata": {"resourceVersion": "1"}, "items": [pod]}
            config = write_kubeconfig(cluster.folder / "kubeconfig", server.url)
            cluster.variables["KUBECONFIG"] = str(config)
            yield


@needs_helm
async def test_the_chart_serves_engines_that_it_finds_by_label(cluster: Cluster) -> None:
    """The service of deploy/kubernetes finds the pod of engine.yaml, asks its engine, and answers only with the token."""
    config, deployment = (find_document(PLAIN / "serve.yaml", kind) for kind in ("ConfigMap", "Deployment"))
    [engine] = read_documents(PLAIN / "engine.yaml")
    serve, template = containers_by_name(deployment)["serve"], engine["spec"]["template"]
    assert "--kubernetes-selector=app=vllm" in serve["args"]
    assert template["metadata"]["labels"]["app"] == "vllm"
    cluster.write("/etc/kvevents/config/serve.toml", config["data"]["serve.toml"])
    token = secrets.token_hex(16)
    cluster.write("/etc/kvevents/tokens/read", token)
    [container] = template["spec"]["containers"]
    options = dict(arg.split("=", 1) for arg in container["args"])

    def run() -> None:
        with run_vllm_publisher(cluster, container) as publisher, cluster.run(serve["args"]) as program:
            check_probes(cluster, serve, program)
            assert cluster.get(8090, "/v1/sources")[0] == 401
            poll_for(partial(are_exact, cluster, [publisher], token), program)
            [found] = json.loads(cluster.get(8090, "/v1/sources", token=token)[1])["sources"]
            assert (found["model"], found["instance"]) == (options["--model"], "qwen3-8b-0")

    source = json.loads(cluster.localize(options["--kv-events-config"]))
    async with run_pod(cluster, "qwen3-8b-0", template["spec"], source, options["--model"]):
        await asyncio.to_thread(run)


def find_document(path: Path, kind: str) -> Object:
    return next(each for each in read_documents(path) if each["kind"] == kind)


@needs_schemas
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", [EXAMPLE, *sorted(PLAIN.glob("*.yaml"))], ids=lambda path: path.name)
def test_manifests_match_the_schemas_of_kubernetes(path: Path, version: str) -> None:
    """Each object of each manifest matches Kubernetes' own schema."""
    assert SCHEMAS.is_dir()
    for each in read_documents(path):
        assert faults_of(each, version) == [], each["metadata"]["name"]
