"""The manifests in `deploy/` work: their commands run as processes with real sockets and carry an engine's events to clients.

The tests replace only what a cluster provides: names of Services and pods, folders of volumes, and ports, which are all
shifted by the same number.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest
import yaml

from cli_cases import SECONDS, Program
from cluster_cases import (  # noqa: F401 - a fixture, which pytest finds by name
    Cluster,
    cluster_fixture,
    poll_for,
)
from helm_cases import CHART, OPEN, ROOT, SCHEMAS, VERSIONS, Object, faults_of, needs_helm, needs_schemas, render_chart
from kvevents import Batch, BlockStored, KVEventBatch, Source, Subscriber
from kvevents.compat.vllm import EventPublisherFactory, KVEventsConfig
from kvevents.publisher import EventPublisher
from nats_cases import needs_nats
from tools.nats_servers import nats_server

DEPLOY: Final = ROOT / "deploy"
EXAMPLE: Final = CHART / "examples" / "engine-with-relay.yaml"
PLAIN: Final = DEPLOY / "kubernetes"
PROMPT: Final = list(range(16))


def read_documents(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text()))


def containers_by_name(each: Object) -> dict[str, Object]:
    return {container["name"]: container for container in each["spec"]["template"]["spec"]["containers"]}


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
def test_the_chart_carries_events_from_engines_to_clients_of_replicas(cluster: Cluster, ranks: int) -> None:
    """The relays, the bridge and the replica run with the arguments that the chart renders; each rank is a worker."""
    settings = ["engines.model=llama", "plane.copies=1", "plane.partitions=2", "plane.partitionSize=16MiB", OPEN]
    if ranks > 1:
        settings += [f"engines.ranks={ranks}", "engines.replayPort=6567", "relay.engineReplayPort=5567"]
    objects = render_chart(*settings)
    relays = render_relays(settings, cluster.folder)
    bridge = containers_of_workload(objects, "plane-kvevents-bridge")["bridge"]
    replica = containers_of_workload(objects, "plane-kvevents-replica")["replica"]
    [config] = [each["data"]["bridge.toml"] for each in objects if each["kind"] == "ConfigMap"]
    cluster.write("/etc/kvevents/config/bridge.toml", config)
    replay = 5558 if ranks == 1 else 5567
    kv_events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": f"tcp://*:{replay}"}
    engine = {"args": [f"--kv-events-config={json.dumps(kv_events)}"]}
    with nats_server(cluster.folder / "nats") as nats, ExitStack() as stack:
        publishers = [stack.enter_context(run_vllm_publisher(cluster, engine, rank)) for rank in range(ranks)]
        names = {"nats://nats:4222": nats.url}
        programs = [stack.enter_context(cluster.run(each["args"], **names)) for each in (*relays, bridge, replica)]
        poll_for(lambda: len(find_workers(cluster, "llama")) == ranks, *programs)
        for rank, publisher in enumerate(publishers):
            publisher.publish(KVEventBatch(time.time(), [], rank))  # a live batch confirms what was replayed
        check_probes(cluster, replica, *programs)
        check_probes(cluster, bridge, *programs)
        assert sorted(name.rpartition("/")[2] for name in find_workers(cluster, "llama")) == [
            str(rank) for rank in range(ranks)
        ]


def render_relays(settings: Sequence[str], folder: Path) -> list[Object]:
    """Return the containers that the named template renders in a chart that depends on this one."""
    chart = folder / "engines"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v1\nname: engines\nversion: 1.0.0\n")
    shutil.copytree(CHART, chart / "charts" / "kvevents")
    (chart / "templates" / "engine.yaml").write_text(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: engine}\nspec:\n  template:\n    spec:\n      containers:\n"
        '        {{- include "kvevents.relay.container" (dict "root" .Subcharts.kvevents) | nindent 8 }}\n'
    )
    objects = render_chart(*(f"kvevents.{setting}" for setting in settings), chart=chart)
    return list(containers_of_workload(objects, "engine").values())


def containers_of_workload(objects: list[Object], name: str) -> dict[str, Object]:
    [found] = [each for each in objects if each["kind"] == "Deployment" and each["metadata"]["name"] == name]
    return containers_by_name(found)


def test_a_plain_service_finds_engines_behind_a_headless_service(cluster: Cluster) -> None:
    """deploy/kubernetes needs no NATS and no relay: the service finds the engine's blocks, and its stream is EXACT."""
    [engine] = read_documents(PLAIN / "engine.yaml")
    config, headless, service, deployment = read_documents(PLAIN / "serve.yaml")
    serve = containers_by_name(deployment)["serve"]
    cluster.write("/etc/kvevents/kvevents.toml", config["data"]["kvevents.toml"])
    labels = engine["spec"]["template"]["metadata"]["labels"]
    assert headless["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    ports = {port["containerPort"] for port in containers_by_name(engine)["engine"]["ports"]}
    assert {port["port"] for port in headless["spec"]["ports"]} <= ports
    [model] = [arg.partition("=")[2] for arg in containers_by_name(engine)["engine"]["args"] if arg.startswith("--model=")]
    with run_vllm_publisher(cluster, containers_by_name(engine)["engine"]) as publisher, cluster.run(serve["args"]) as program:
        poll_for(lambda: find_workers(cluster, model), program)
        publisher.publish(KVEventBatch(time.time(), [BlockStored([7], None, [7] * 16, 16, medium="GPU")], 0))
        poll_for(lambda: b'"state":"EXACT"' in cluster.get(8090, "/v1/sources")[1], program)
        check_probes(cluster, serve, program)


@needs_schemas
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", [EXAMPLE, *sorted(PLAIN.glob("*.yaml"))], ids=lambda path: path.name)
def test_manifests_match_the_schemas_of_kubernetes(path: Path, version: str) -> None:
    """Each object of each manifest matches Kubernetes' own schema."""
    assert SCHEMAS.is_dir()
    for each in read_documents(path):
        assert faults_of(each, version) == [], each["metadata"]["name"]
