"""Pods as projects deploy them, and a real API server without kubelets: tests write the status of pods themselves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import pytest

from paths import ROOT
from tools.ports import reserve_port

API_SERVER: Final = ROOT / ".cache" / "kubernetes" / "kube-apiserver"
ETCD: Final = shutil.which("etcd")
NAMESPACE: Final = "inference"
TOKEN: Final = "of-the-tests"  # noqa: S105 - of a server on loopback that holds nothing
DEADLINE: Final = 60.0

needs_api_server = pytest.mark.skipif(
    os.environ.get("KVEVENTS_KUBERNETES") is None or not API_SERVER.exists() or ETCD is None,
    reason="needs a real API server: make kubernetes",
)


def pod(
    name: str, labels: dict[str, str], *ports: tuple[str, int] | int, annotations: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the manifest of a pod on a node."""
    named = [
        {"containerPort": each} if isinstance(each, int) else {"name": each[0], "containerPort": each[1]} for each in ports
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels, "annotations": annotations or {}},
        "spec": {"nodeName": "node-1", "containers": [{"name": "engine", "image": "engine", "ports": named}]},
    }


def ready(address: str, **status: Any) -> dict[str, Any]:
    """Return the status of a pod that is Ready."""
    condition = {"type": "Ready", "status": "True"}
    return {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [condition], **status}


def not_ready(address: str, reason: str = "ContainersNotReady", state: str = "False", **status: Any) -> dict[str, Any]:
    """Return the status of a pod that runs and takes no requests."""
    return ready(address, conditions=[{"type": "Ready", "status": state, "reason": reason}], **status)


PROJECTS: Final = {
    # helm/templates/deployment-vllm-multi.yaml and values.yaml of vllm-project/production-stack
    "vLLM production stack": pod(
        "vllm-llama3-deployment-vllm-6c9f", {"model": "llama3", "helm-release-name": "vllm", "environment": "test"},
        ("container-port", 8000), ("zmq-port", 55555), ("ucx-port", 9999),
    ),
    # docker/k8s-sglang-service.yaml of sgl-project/sglang
    "SGLang": pod(
        "meta-llama-31-8b-instruct-sglang-7d4b",
        {"app": "meta-llama-31-8b-instruct-sglang", "model": "meta-llama-31-8b-instruct", "engine": "sglang"}, 30000,
    ),
    # guides/precise-prefix-cache-routing/modelserver/gpu/vllm/base of llm-d/llm-d
    "llm-d": pod(
        "precise-prefix-cache-routing-gpu-vllm-decode-5b7c",
        {"llm-d.ai/guide": "precise-prefix-cache-routing", "llm-d.ai/model": "Qwen3-32B", "llm-d.ai/role": "decode",
         "llm-d.ai/accelerator-vendor": "nvidia", "topology.kubernetes.io/zone": "zone-b"},
        ("modelserver", 8000), ("kv-events", 5556),
    ),
    # samples/quickstart/model-with-kv-events.yaml of vllm-project/aibrix, and `role-name` of its StormService
    "AIBrix": pod(
        "deepseek-r1-distill-llama-8b-0",
        {"model.aibrix.ai/name": "deepseek-r1-distill-llama-8b", "model.aibrix.ai/port": "8000",
         "model.aibrix.ai/kv-events-enabled": "true", "role-name": "prefill"},
        ("api", 8000), ("kv-events", 5557), ("kv-replay", 5558),
    ),
    # deploy/operator/internal/consts/consts.go and internal/dynamo of ai-dynamo/dynamo
    "Dynamo": pod(
        "agg-decode-0",
        {"nvidia.com/dynamo-component-type": "worker", "nvidia.com/dynamo-sub-component-type": "decode",
         "nvidia.com/dynamo-namespace": "agg", "nvidia.com/dynamo-base-model-hash": "1e8a2a0c"},
        ("system", 9090), ("nixl", 19090), annotations={"nvidia.com/dynamo-base-model": "Qwen/Qwen3-0.6B"},
    ),
}  # fmt: skip
"""A pod of each project, with the labels, annotations and ports of its own manifests."""


class ApiServer:
    """`kube-apiserver` and `etcd` in a folder, which survive `stop` and `start`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._etcd_port, peers = (reserve_port() for _ in range(3))
        self.url = f"https://127.0.0.1:{self.port}"
        self.tls = ssl._create_unverified_context()  # noqa: S323 - the server makes a certificate of its own
        self._etcd_url = f"http://127.0.0.1:{self._etcd_port}"
        key = folder / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)  # noqa: S607
        (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
        self._etcd = self._start(
            ETCD or "etcd", "--data-dir", folder / "etcd", "--listen-client-urls", self._etcd_url, "--unsafe-no-fsync",
            "--advertise-client-urls", self._etcd_url, "--listen-peer-urls", f"http://127.0.0.1:{peers}",
        )  # fmt: skip
        self._server: subprocess.Popen[bytes] | None = None

    def _start(self, program: str | Path, *options: object) -> subprocess.Popen[bytes]:
        with (self.folder / f"{Path(program).name}.log").open("ab") as log:
            return subprocess.Popen([program, *map(str, options)], stdout=log, stderr=log, cwd=self.folder)

    def start(self) -> None:
        """Start the API server, and wait until it is ready."""
        key = self.folder / "service-accounts.key"
        self._server = self._start(
            API_SERVER, f"--etcd-servers={self._etcd_url}", f"--secure-port={self.port}", "--bind-address=127.0.0.1",
            f"--cert-dir={self.folder / 'certificates'}", f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24",
        )  # fmt: skip
        wait_until("the API server to be ready", self._is_ready)

    def _is_ready(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, (self.folder / "kube-apiserver.log").read_text()[-2_000:]
        with suppress(OSError, HTTPException):
            self.request("GET", "/readyz")
            return True
        return False

    def stop(self) -> None:
        """Kill the API server, which would wait for the end of all watches. Its data stays in etcd."""
        if self._server is not None:
            self._server.kill()
            self._server.wait(DEADLINE)

    def freeze(self) -> None:
        """Suspend the API server: it keeps its connections and answers nothing."""
        assert self._server is not None
        self._server.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the API server continue."""
        assert self._server is not None
        self._server.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop all processes."""
        self.stop()
        self._etcd.terminate()
        self._etcd.wait(DEADLINE)

    def request(self, method: str, path: str, body: Any = None, kind: str = "application/json", token: str = TOKEN) -> Any:
        """Send a request, and return the answer. Raises `HTTPError`."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
        sent = urllib.request.Request(self.url + path, data, headers, method=method)  # noqa: S310
        with urllib.request.urlopen(sent, timeout=10, context=self.tls) as answer:  # noqa: S310
            text = answer.read()
        return json.loads(text) if text[:1] == b"{" else text

    def pods(self, namespace: str = NAMESPACE) -> str:
        """Return the path of the pods of a namespace."""
        return f"/api/v1/namespaces/{namespace}/pods"

    def create(self, manifest: dict[str, Any], status: dict[str, Any] | None = None) -> Any:
        """Create a pod with a status, and return it."""
        metadata = manifest["metadata"]
        found = self.request("POST", self.pods(metadata["namespace"]), manifest)
        return found if status is None else self.patch(metadata["name"], status, metadata["namespace"])

    def patch(self, name: str, status: dict[str, Any], namespace: str = NAMESPACE) -> Any:
        """Replace parts of the status of a pod, and return it."""
        path = f"{self.pods(namespace)}/{name}/status"
        return self.request("PATCH", path, {"status": status}, "application/merge-patch+json")

    def delete(self, name: str, seconds: int = 30, namespace: str = NAMESPACE) -> None:
        """Delete a pod with a grace period; with 0 it is gone at once."""
        self.request("DELETE", f"{self.pods(namespace)}/{name}", {"kind": "DeleteOptions", "gracePeriodSeconds": seconds})

    def create_namespace(self, name: str = NAMESPACE) -> None:
        """Create a namespace."""
        self.request("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def compact(self) -> None:
        """Compact etcd up to now: no earlier version can be watched from."""
        status = json.loads(_post(f"{self._etcd_url}/v3/maintenance/status", {}))
        _post(f"{self._etcd_url}/v3/kv/compaction", {"revision": status["header"]["revision"], "physical": True})

    def account_token(self, name: str, rules: list[dict[str, Any]] | None, namespace: str = NAMESPACE) -> str:
        """Create a service account with the rules of a Role, and return a token of it."""
        metadata = {"name": name, "namespace": namespace}
        accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
        self.request("POST", accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        if rules is not None:
            self.bind_role(name, rules, namespace)
        return self.token_of(name, namespace)

    def token_of(self, account: str, namespace: str = NAMESPACE) -> str:
        """Return a token of a service account."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token: str = self.request("POST", path, asked)["status"]["token"]
        return token

    def bind_role(self, name: str, rules: list[dict[str, Any]], namespace: str = NAMESPACE) -> None:
        """Create a Role, and bind it to the service account of its name."""
        group, metadata = "rbac.authorization.k8s.io", {"name": name, "namespace": namespace}
        path = f"/apis/{group}/v1/namespaces/{namespace}"
        role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules}
        self.request("POST", f"{path}/roles", role)
        reference = {"apiGroup": group, "kind": "Role", "name": name}
        binding = {"apiVersion": f"{group}/v1", "kind": "RoleBinding", "metadata": metadata}
        subjects = [{"kind": "ServiceAccount", **metadata}]
        self.request("POST", f"{path}/rolebindings", {**binding, "roleRef": reference, "subjects": subjects})

    def kubeconfig(self, token: str = TOKEN) -> Path:
        """Write a kubeconfig for a token, and return its path."""
        return write_kubeconfig(self.folder / f"kubeconfig-{abs(hash(token))}", self.url, token)


def write_kubeconfig(path: Path, url: str, token: str = TOKEN, namespace: str = NAMESPACE) -> Path:
    """Write a kubeconfig, and return its path."""
    cluster = {"server": url, **({"insecure-skip-tls-verify": True} if url.startswith("https") else {})}
    context = {"cluster": "c", "user": "u", "namespace": namespace}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": context}],
    }
    path.write_text(json.dumps(config))
    return path


POOL_DEFINITION: Final = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "inferencepools.inference.networking.k8s.io", "annotations": {
        "api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api-inference-extension/pull/1173"}},
    "spec": {
        "group": "inference.networking.k8s.io",
        "scope": "Namespaced",
        "names": {"plural": "inferencepools", "singular": "inferencepool", "kind": "InferencePool"},
        "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {
            "type": "object", "x-kubernetes-preserve-unknown-fields": True}}}],
    },
}  # fmt: skip
"""The least definition of `InferencePool`."""
POOLS_PATH: Final = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"


def pool(name: str, port: int, **labels: str) -> dict[str, Any]:
    """Return the manifest of an `InferencePool`."""
    spec = {"selector": {"matchLabels": labels}, "targetPorts": [{"number": port}], "endpointPickerRef": {"name": "picker"}}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": metadata, "spec": spec}


@contextmanager
def run_api_server(folder: Path) -> Iterator[ApiServer]:
    """Yield a running API server with the namespace `NAMESPACE`."""
    server = ApiServer(folder)
    try:
        server.start()
        server.create_namespace()
        yield server
    finally:
        server.close()


def wait_until(what: str, is_so: Callable[[], bool], seconds: float = DEADLINE) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def _post(url: str, body: Any) -> bytes:
    sent = urllib.request.Request(url, json.dumps(body).encode(), method="POST")  # noqa: S310
    with urllib.request.urlopen(sent, timeout=10) as answer:  # noqa: S310
        text: bytes = answer.read()
        return text
