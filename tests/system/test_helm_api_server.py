"""A real API server accepts what the chart renders, and what its ServiceAccount may do is enough and no more.

`make kubernetes` builds the API server and runs these tests; without it they are skipped, and say so. There are no kubelets:
the rendered command runs as a process, and tests write the status of the engines' pods.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError

import pytest
import yaml

from cluster_cases import Cluster, cluster_fixture, poll_for  # noqa: F401 - a fixture, which pytest finds by name
from discovery_fetch_cases import Engine as HttpEngine
from helm_cases import Object, needs_helm
from kubernetes_cases import ApiServer, needs_api_server, pod, ready, run_api_server, write_kubeconfig
from service_cases import engine, prompt
from tools.chart import CHART, ROOT, render, run_helm

pytestmark = [needs_api_server, needs_helm, pytest.mark.timeout(300)]

PODS: Final = 20
MODELS: Final = ("llama", "qwen")
PATHS: Final = {
    "v1": "/api/v1",
    "apps/v1": "/apis/apps/v1",
    "networking.k8s.io/v1": "/apis/networking.k8s.io/v1",
    "policy/v1": "/apis/policy/v1",
    "rbac.authorization.k8s.io/v1": "/apis/rbac.authorization.k8s.io/v1",
}
PLURALS: Final = {"NetworkPolicy": "networkpolicies", "Ingress": "ingresses"}
SELECTOR: Final = ("--set", "engines.selector.matchLabels.app=vllm")


@pytest.fixture(name="server", scope="module")
def run_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with run_api_server(tmp_path_factory.mktemp("kubernetes")) as running:
        yield running


def create(server: ApiServer, objects: list[Object], namespace: str) -> None:
    """Create objects; an unknown or a repeated field is an error. Kinds of other projects are left out."""
    for each in objects:
        if each["apiVersion"] in PATHS:
            plural = PLURALS.get(each["kind"], f"{each['kind'].lower()}s")
            path = f"{PATHS[each['apiVersion']]}/namespaces/{each['metadata'].get('namespace', namespace)}/{plural}"
            server.request("POST", f"{path}?fieldValidation=Strict", each)


@pytest.mark.parametrize(
    ("namespace", "flags"),
    [
        ("selector", SELECTOR),
        ("serve", ("--values", ROOT / "tests/data/chart/serve.values.yaml")),
        ("plane", ("--values", ROOT / "tests/data/chart/plane.values.yaml")),
        ("plane-by-label", (*SELECTOR, "--set", "mode=plane,networkPolicy.enabled=true")),
    ],
)
def test_the_server_accepts_the_objects_of_each_mode(server: ApiServer, namespace: str, flags: tuple[object, ...]) -> None:
    objects = [found for found in yaml.safe_load_all(render("kv", namespace, *flags)) if found]
    for name in {namespace} | {each["metadata"].get("namespace", namespace) for each in objects}:
        server.create_namespace(name)
    create(server, objects, namespace)


def test_the_server_accepts_the_manifests(server: ApiServer) -> None:
    server.create_namespace("kvevents")
    paths = [*sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml")), CHART / "examples" / "engine-with-relay.yaml"]
    for path in paths:
        objects = [each for each in yaml.safe_load_all(path.read_text()) if each]
        for each in objects:  # the names of the two engines are equal
            each["metadata"]["name"] = f"{path.stem}-{each['metadata']['name']}"[:60]
        create(server, objects, "kvevents")


def helm(server: ApiServer, *args: object) -> str:
    """Run Helm on the server, and return what it prints."""
    done = run_helm(*args, "--kubeconfig", server.kubeconfig())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_helm_installs_and_upgrades_and_keeps_the_token(server: ApiServer, tmp_path: Path) -> None:
    """The notes name the address and the Secret. An upgrade to mode plane keeps the token, and one more role gets another."""
    server.create_namespace("helm")
    chart = shutil.copytree(CHART, tmp_path / "kvevents")
    facts = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(re.sub("kubeVersion: .*\n", "", facts))  # the server is built without a version
    release = ("kvevents", chart, "--namespace", "helm", *SELECTOR)
    notes = helm(server, "install", *release)
    assert "Routers ask http://kvevents.helm.svc:8090" in notes
    assert "get secret kvevents-tokens" in notes
    path = "/api/v1/namespaces/helm/secrets/kvevents-tokens"
    before = server.request("GET", path)["data"]
    notes = helm(server, "upgrade", *release, "--set", "mode=plane,plane.copies=1,access.roles={read,register}")
    assert 'Plane "default" at nats://nats:4222' in notes
    assert "No login is configured for bridges" in notes
    assert "have 1 copy" in notes
    after = server.request("GET", path)["data"]
    assert after["read"] == before["read"]
    assert after["register"] not in after["read"]
    deployments = server.request("GET", "/apis/apps/v1/namespaces/helm/deployments")["items"]
    assert {each["metadata"]["name"] for each in deployments} == {"kvevents", "kvevents-bridge"}
    notes = helm(server, "upgrade", *release, "--set", "access.insecure=true,tls.secretName=x")
    assert "Routers ask https://kvevents.helm.svc:8090" in notes
    assert "No token is needed" in notes
    helm(server, "uninstall", "kvevents", "--namespace", "helm")


def status_of(server: ApiServer, path: str, token: str) -> int:
    try:
        server.request("GET", path, token=token)
    except HTTPError as error:
        return error.code
    return 200


def test_the_rendered_service_follows_all_labelled_pods_by_its_own_rights(server: ApiServer, cluster: Cluster) -> None:
    """Nothing but a selector is set: 20 pods of two models are EXACT, with the token of the chart's ServiceAccount."""
    namespace = "empty"
    server.create_namespace(namespace)
    objects = [found for found in yaml.safe_load_all(render("kvevents", namespace, *SELECTOR)) if found]
    create(server, objects, namespace)
    found = {each["kind"]: each for each in objects}
    [container] = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    cluster.write("/etc/kvevents/config/serve.toml", found["ConfigMap"]["data"]["serve.toml"])
    token = server.request("GET", f"/api/v1/namespaces/{namespace}/secrets/kvevents-tokens")["data"]["read"]
    cluster.write("/etc/kvevents/tokens/read", token)
    account = found["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"]
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = server.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", request)
    rights = answer["status"]["token"]
    assert status_of(server, server.pods(namespace), rights) == 200
    assert status_of(server, server.pods("kvevents"), rights) == 403
    assert status_of(server, f"/api/v1/namespaces/{namespace}/secrets", rights) == 403
    config = write_kubeconfig(cluster.folder / "kubeconfig", server.url, rights, namespace)
    cluster.variables["KUBECONFIG"] = str(config)
    with ExitStack() as stack:
        program = stack.enter_context(cluster.run(container["args"]))
        for number in range(PODS):
            made = stack.enter_context(engine(seed=number + 1))
            made.store(prompt(1))
            source = {"publisher": "zmq", "endpoint": made.endpoint, "replay_endpoint": made.replay_endpoint}
            pages = {"/kv_event_sources": {"0": source}, "/v1/models": {"data": [{"id": MODELS[number % 2]}]}, "/metrics": b""}
            http = stack.enter_context(HttpEngine(pages))
            manifest = pod(f"vllm-{number}", {"app": "vllm"}, annotations={"kvevents/http-port": str(http.port)})
            manifest["metadata"]["namespace"] = namespace
            server.create(manifest, ready("127.0.0.1"))
        server.create(
            {**pod("other", {"app": "other"}), "metadata": {"name": "other", "namespace": namespace}}, ready("127.0.0.1")
        )

        def sources() -> list[Any]:
            status, body = cluster.get(8090, "/v1/sources", token=token)
            return json.loads(body)["sources"] if status == 200 else []

        poll_for(lambda: [each["trust"]["state"] for each in sources()] == ["EXACT"] * PODS, program)
        assert {(each["instance"], each["model"]) for each in sources()} == {
            (f"vllm-{number}", MODELS[number % 2]) for number in range(PODS)
        }
