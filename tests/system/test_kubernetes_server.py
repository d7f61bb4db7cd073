"""A service follows pods of a real API server: EXACT within 30 s, and no answer names a pod that drains.

`make kubernetes` builds the API server and runs these tests; without it they are skipped, and say so. There are no kubelets:
tests write the status of pods, and their engines listen at the addresses of the pods, 127.0.1.0/24.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

import service_cases
from discovery_fetch_cases import Engine
from helm_cases import OPEN, SELECTOR, needs_helm
from kubernetes_cases import (
    NAMESPACE,
    POOL_DEFINITION,
    POOLS_PATH,
    TOKEN,
    ApiServer,
    needs_api_server,
    not_ready,
    pod,
    pool,
    ready,
    run_api_server,
    wait_until,
)
from paths import ROOT
from service_cases import BLOCK, Service, engine, prompt, serving, suspend, wait_for
from tools.chart import render

pytestmark = [needs_api_server, pytest.mark.timeout(300)]

MODELS = ("llama", "qwen")
RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
"""The only right that a service needs."""
PROMPT = [*prompt(1, 6), 1]
NAMED_SECONDS = 2.0
"""Longest time after the deletion timestamp for which an answer may name a pod."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with run_api_server(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


@pytest.fixture(scope="module")
def config(server: ApiServer) -> str:
    """Return a kubeconfig with the token of a service account that has `RULES`."""
    return str(server.kubeconfig(server.account_token("kvevents", RULES)))


class Fleet:
    """Engines in pods with a label of their own; the blocks of each are those that it is started with."""

    def __init__(self, server: ApiServer, label: str) -> None:
        self.server = server
        self.label = label
        self.blocks: dict[str, int] = {}
        """Blocks of the prompt by engine, ended engines included."""
        self.drained: dict[str, float] = {}
        """Time at which the deletion timestamp was set."""
        self._running: dict[str, ExitStack] = {}
        self._addresses = iter(f"127.0.1.{number}" for number in range(1, 255))

    def start(self, name: str, model: str, blocks: int) -> None:
        """Start an engine in a new pod, and report it as Ready."""
        address, stack = next(self._addresses), ExitStack()
        anywhere = f"tcp://{address}:0"
        publisher = stack.enter_context(engine(endpoint=anywhere, replay_endpoint=anywhere, seed=len(self.blocks) + 1))
        source = {"0": {"publisher": "zmq", "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}}
        pages: dict[str, Any] = {"/kv_event_sources": source, "/v1/models": {"data": [{"id": model}]}, "/metrics": b""}
        http = stack.enter_context(Engine(pages, host=address))
        publisher.store(PROMPT[: blocks * BLOCK])
        self.blocks[name], self._running[name] = blocks, stack
        self.server.create(pod(name, {"app": self.label}, ("http", http.port)), ready(address))

    def drain(self, name: str) -> None:
        """Request the deletion of a pod; its engine runs on."""
        self.server.delete(name)
        self.drained[name] = time.monotonic()

    def end(self, name: str) -> None:
        """End an engine, and its pod if that is still there."""
        self._running.pop(name).close()
        self.server.delete(name, 0)

    def kill(self, name: str) -> None:
        """End an engine, as its node does."""
        self._running.pop(name).close()

    def close(self) -> None:
        for name in list(self._running):
            self.end(name)


@contextmanager
def fleet(server: ApiServer, label: str) -> Iterator[Fleet]:
    made = Fleet(server, label)
    try:
        yield made
    finally:
        made.close()


class Lookups(threading.Thread):
    """Asks for matches and selections until `end`, and checks every answer."""

    def __init__(self, url: str, pods: Fleet, model: str) -> None:
        super().__init__()
        self.count = 0
        self.wrong: list[str] = []
        self.latest = 0.0
        """Longest time after its deletion timestamp for which a pod was named."""
        self._client = service_cases.Client(url)
        self._pods = pods
        self._model = model
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.01):
            for path in ("/v1/match", "/v1/select"):
                began = time.monotonic()
                answer = self._client.post(path, {"model": self._model, "tokens": PROMPT})
                if answer.status in {200, 404, 409, 503}:
                    self._check(answer.json if answer.status == 200 else {}, began)
                else:
                    self.wrong.append(f"{path}: status {answer.status}")
                self.count += 1
        self._client.close()

    def _check(self, answer: dict[str, Any], began: float) -> None:
        for worker in answer.get("workers", [answer] if "instance" in answer else []):
            name = worker["instance"]
            named = began - self._pods.drained.get(name, began)
            self.latest = max(self.latest, named)
            tokens = self._pods.blocks[name] * BLOCK
            if "certain" in worker and worker["trust"]["state"] == "EXACT" and worker["tokens"] != tokens:
                self.wrong.append(f"{name} is EXACT with {worker['tokens']} tokens, not {tokens}")

    def end(self) -> None:
        self._ended.set()
        self.join()


@contextmanager
def looking_up(service: Service, pods: Fleet, model: str = MODELS[0]) -> Iterator[Lookups]:
    thread = Lookups(service.url, pods, model)
    thread.start()
    try:
        yield thread
    finally:
        thread.end()
    assert not thread.wrong


def exact(service: Service) -> set[str]:
    service.confirm()
    return {name for (name, _), source in service.sources().items() if source["trust"]["state"] == "EXACT"}


def is_replaced(service: Service, old: str, new: str) -> bool:
    return (old, 0) not in service.sources() and new in exact(service)


def timed(what: str, is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for a condition, and print how long it took."""
    began = time.monotonic()
    wait_for(what, is_so, seconds)
    print(f"\n{what}: after {time.monotonic() - began:.2f} s")


PLURALS = {"NetworkPolicy": "networkpolicies"}
"""Names in paths that are not the kind with an `s`."""


def install_chart(server: ApiServer, folder: Path) -> tuple[list[str], str]:
    """Create the objects of the chart with a selector. Return the options of its service, and a kubeconfig of its account."""
    objects = [each for each in yaml.safe_load_all(render("kv", NAMESPACE, "--set", f"{SELECTOR},{OPEN}")) if each]
    for each in objects:
        kind, api = each["kind"], each["apiVersion"]
        group = f"/api/{api}" if "/" not in api else f"/apis/{api}"
        server.request("POST", f"{group}/namespaces/{NAMESPACE}/{PLURALS.get(kind, kind.lower() + 's')}", each)
    [template] = [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"]
    [container] = template["containers"]
    [settings] = [each["data"] for each in objects if each["kind"] == "ConfigMap"]
    for name, text in settings.items():
        (folder / name).write_text(text)
    moved = {
        "/etc/kvevents/config": str(folder),
        "/var/lib/kvevents": str(folder / "state"),
        "--host=0.0.0.0": "--host=127.0.0.1",
    }
    options = [option for option in container["args"][1:] if not option.startswith("--port=")]
    for place, other in moved.items():
        options = [option.replace(place, other) for option in options]
    account = template["serviceAccountName"]
    return options, str(server.kubeconfig(server.token_of(account)))


@needs_helm
def test_twenty_pods_of_two_models_are_exact_with_nothing_but_a_selector(server: ApiServer, tmp_path: Path) -> None:
    """The service is that of the chart: its objects are accepted, and it has the options, the account and the Role of them."""
    names = {f"{MODELS[number % 2]}-{number}" for number in range(20)}
    options, config = install_chart(server, tmp_path)
    with fleet(server, "vllm") as pods, serving(*options, KUBECONFIG=config) as service:
        assert service.sources() == {}
        for name in sorted(names):
            pods.start(name, name.partition("-")[0], 4)
        timed("20 engines of two models to be EXACT", lambda: exact(service) == names)
        sources = service.sources()
        assert {source["model"] for source in sources.values()} == set(MODELS)
        assert all(source["url"].startswith("http://127.0.1.") for source in sources.values())
        assert not service.get("/v1/sources").json["faults"]
        assert "cannot be followed" not in "".join(service.get("/health").json["warnings"])
        for model in MODELS:
            workers = service.post("/v1/match", {"model": model, "tokens": PROMPT}).json["workers"]
            assert {worker["instance"] for worker in workers} == {name for name in names if name.startswith(model)}


def test_no_answer_names_a_pod_that_drains(server: ApiServer, config: str) -> None:
    """A rolling restart of all, a scale to 0 and back, and the loss of a node, under lookups."""
    with fleet(server, "rolling") as pods, serving("--kubernetes-selector", "app=rolling", KUBECONFIG=config) as service:
        first = [f"a{number}" for number in range(6)]
        for number, name in enumerate(first):
            pods.start(name, MODELS[0], 1 + number % 5)
        wait_for("the first pods", lambda: exact(service) == set(first), 30)
        with looking_up(service, pods) as lookups:
            second = [f"b{number}" for number in range(6)]
            for number, (old, new) in enumerate(zip(first, second, strict=True)):
                pods.start(new, MODELS[0], 1 + (number + 2) % 5)
                pods.drain(old)
                wait_for(f"{old} to be replaced", partial(is_replaced, service, old, new))
                pods.end(old)
            for name in second:
                pods.drain(name)
            timed("nothing to be left after a scale to 0", lambda: not service.sources())
            for name in second:
                pods.end(name)
            third = [f"c{number}" for number in range(4)]
            for number, name in enumerate(third):
                pods.start(name, MODELS[0], 5 - number)
            timed("the pods after a scale to 4", lambda: exact(service) == set(third))
            lost = third[:2]
            for name in lost:
                server.patch(name, {"conditions": not_ready("", "NodeStatusUnknown", "Unknown")["conditions"]})
            timed(
                "pods of a lost node to get no requests",
                lambda: all(service.source(name)["fault"] for name in lost),
                NAMED_SECONDS,
            )
            assert service.post("/v1/select", {"model": MODELS[0], "tokens": PROMPT}).json["instance"] in third[2:]
            for name in lost:
                pods.kill(name)
                pods.drain(name)
                server.delete(name, 0)
            timed("the pods of a lost node to be gone", lambda: {name for name, _ in service.sources()} == set(third[2:]))
            wait_for("1,000 lookups", lambda: lookups.count >= 1_000, 60)
        print(f"{lookups.count} lookups; a pod was named at most {lookups.latest:.2f} s after its deletion timestamp")
        assert lookups.latest < NAMED_SECONDS


@pytest.mark.parametrize("label", ["killed", "frozen"])
def test_changes_are_caught_up_after_the_api_server_was_away(server: ApiServer, config: str, label: str) -> None:
    end_server, begin_server = (server.stop, server.start) if label == "killed" else (server.freeze, server.thaw)
    with fleet(server, label) as pods, serving("--kubernetes-selector", f"app={label}", KUBECONFIG=config) as service:
        for name in ("a", "b", "c"):
            pods.start(name, MODELS[0], 3)
        wait_for("all engines", lambda: exact(service) == {"a", "b", "c"}, 30)
        with looking_up(service, pods):
            end_server()
            wait_for("a warning", lambda: "cannot be followed" in "".join(service.get("/health").json["warnings"]))
            end = time.monotonic() + 60
            while time.monotonic() < end:
                assert exact(service) == {"a", "b", "c"}
                time.sleep(1)
            begin_server()
            pods.drain("a")
            pods.start("d", MODELS[0], 2)
            timed("changes to be caught up", lambda: exact(service) == {"b", "c", "d"})
            wait_for("the warning to end", lambda: not service.get("/health").json["warnings"])


def test_deletions_behind_a_compacted_version_are_seen(server: ApiServer, config: str) -> None:
    """The service sleeps while pods come and go, etcd is compacted and the server starts again without their history."""
    with fleet(server, "expired") as pods, serving("--kubernetes-selector", "app=expired", KUBECONFIG=config) as service:
        for name in ("e-a", "e-b"):
            pods.start(name, MODELS[0], 3)
        wait_for("all engines", lambda: exact(service) == {"e-a", "e-b"}, 30)
        process = service.program.process
        suspend(process)
        pods.end("e-a")
        pods.start("e-c", MODELS[0], 2)
        server.compact()
        server.stop()
        server.start()
        process.send_signal(18)  # SIGCONT
        timed("a new list after an expired watch", lambda: exact(service) == {"e-b", "e-c"})


def test_a_pool_names_pods_and_ports(server: ApiServer) -> None:
    server.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", POOL_DEFINITION)
    rules = [{"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": ["list", "watch"]}]
    config = str(server.kubeconfig(server.account_token("with-pools", RULES + rules)))
    with fleet(server, "pooled") as pods, serving("--kubernetes-pool", "chat", KUBECONFIG=config) as service:
        pods.start("pooled-0", MODELS[1], 3)
        port = server.request("GET", f"{server.pods()}/pooled-0")["spec"]["containers"][0]["ports"][0]["containerPort"]

        def create() -> bool:
            try:
                server.request("POST", POOLS_PATH, pool("chat", port, app="pooled"))
            except OSError:  # the definition is not served yet
                return False
            return True

        wait_until("the pool", create)
        timed("the engine of a pool to be EXACT", lambda: exact(service) == {"pooled-0"}, 40)
        server.request("DELETE", f"{POOLS_PATH}/chat")
        wait_for("the engine to leave with its pool", lambda: not service.sources())


def test_a_missing_role_is_named_and_can_be_added_later(server: ApiServer) -> None:
    token = server.account_token("late", None)
    config = str(server.kubeconfig(token))
    with fleet(server, "late") as pods, serving("--kubernetes-selector", "app=late", KUBECONFIG=config) as service:
        pods.start("late-0", MODELS[0], 3)
        wait_for("a warning", lambda: "is forbidden" in "".join(service.get("/health").json["warnings"]))
        server.bind_role("late", RULES)
        timed("the engine after the role was added", lambda: exact(service) == {"late-0"})


# --- cost

PODS = 2_000
RATE = 200
SECONDS = 20


def change_pods(server: ApiServer, share: int, ended: threading.Event) -> None:
    """Change the readiness of every eighth pod, `RATE / 8` times a second."""
    connection = HTTPSConnection("127.0.0.1", server.port, context=server.tls)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/merge-patch+json"}
    began, number = time.monotonic(), 0
    while not ended.is_set():
        name = f"cost-{(share + 8 * number) % PODS}"
        status = (not_ready if (number * 8 // PODS) % 2 == 0 else ready)(f"10.2.{number % 250}.{share + 1}")
        del status["podIP"], status["podIPs"]
        connection.request("PATCH", f"{server.pods('cost')}/{name}/status", json.dumps({"status": status}), headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        number += 1
        ended.wait(max(0.0, began + number * 8 / RATE - time.monotonic()))
    connection.close()


def test_two_thousand_pods_with_two_hundred_changes_a_second_cost_little(server: ApiServer, tmp_path: Path) -> None:
    """The provider runs alone in a process, so that the figures are its own."""
    server.create_namespace("cost")
    padding = {f"example.com/key-{number}": "x" * 100 for number in range(30)}  # pods of clusters have 5 kB
    connection = HTTPSConnection("127.0.0.1", server.port, context=server.tls)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for number in range(PODS):
        manifest = pod(f"cost-{number}", {"app": "cost"}, ("http", 8000), annotations=padding)
        manifest["metadata"]["namespace"] = "cost"
        status = {"status": ready(f"10.1.{number // 250}.{number % 250 + 1}")}
        for method, path, body, kind in (
            ("POST", server.pods("cost"), manifest, "application/json"),
            ("PATCH", f"{server.pods('cost')}/cost-{number}/status", status, "application/merge-patch+json"),
        ):
            connection.request(method, path, json.dumps(body), headers | {"Content-Type": kind})
            answer = connection.getresponse()
            answer.read()
            assert answer.status in {200, 201}, answer.status
    connection.close()
    ended = threading.Event()
    changing = [threading.Thread(target=change_pods, args=(server, share, ended)) for share in range(8)]
    command = [sys.executable, "-m", "tests.system.kubernetes.follow", str(server.kubeconfig()), "cost", str(SECONDS)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        engines = json.loads(process.stdout.readline())
        for thread in changing:
            thread.start()
        try:
            cost = json.loads(process.stdout.readline())
        finally:
            ended.set()
            for thread in changing:
                thread.join()
    print(f"\n{PODS} pods, {cost['changes'] / SECONDS:.0f} changes/s, {cost['findings']} findings:")
    print(f"{cost['cores']:.3f} of a core, {cost['megabytes']:.0f} MB")
    assert engines == PODS
    assert cost["changes"] > RATE * SECONDS * 0.25, "the API server of this machine is too busy for this measurement"
    assert cost["cores"] * max(1.0, RATE * SECONDS / cost["changes"]) < 0.1
    assert cost["megabytes"] < 100
