"""Records lists and watches of a real API server for tests without one: `python -m tests.system.kubernetes.record`.

It writes `tests/data/kubernetes.json`: lists by name, and watches as steps, each with the lines that the server sent for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from kubernetes_cases import (
    NAMESPACE,
    POOL_DEFINITION,
    POOLS_PATH,
    PROJECTS,
    TOKEN,
    ApiServer,
    not_ready,
    pod,
    pool,
    ready,
    run_api_server,
    wait_until,
)
from kubernetes_stream_cases import RECORDED

QUIET_SECONDS = 0.5
"""Time without a line after which a step is over."""


class Watch(threading.Thread):
    """The lines of a watch from a version on."""

    def __init__(self, server: ApiServer, path: str, version: str) -> None:
        super().__init__(daemon=True)
        query = f"?watch=true&allowWatchBookmarks=true&timeoutSeconds=120&resourceVersion={version}"
        self._request = urllib.request.Request(server.url + path + query, headers={"Authorization": f"Bearer {TOKEN}"})  # noqa: S310
        self._tls = server.tls
        self._lines: Queue[str] = Queue()
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, context=self._tls) as answer:  # noqa: S310
            for line in answer:
                self._lines.put(line.decode().rstrip("\n"))

    def step(self, act: Callable[[], object]) -> list[str]:
        """Call `act`, and return the lines that the server sends because of the call."""
        act()
        found = [self._lines.get(timeout=90)]
        while True:
            try:
                found.append(self._lines.get(timeout=QUIET_SECONDS))
            except Empty:
                return found


def record_pods(server: ApiServer) -> dict[str, list[str]]:
    """Return the steps of the lives of some pods."""
    watch = Watch(server, server.pods(), server.request("GET", server.pods())["metadata"]["resourceVersion"])
    labels = {"app": "vllm"}
    killed = [{"name": "engine", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    return {
        "created": watch.step(lambda: [server.create(pod(f"vllm-{number}", labels, 8000)) for number in range(3)]),
        "ready": watch.step(lambda: [server.patch(f"vllm-{number}", ready(f"10.1.0.{number}")) for number in range(3)]),
        "killed": watch.step(lambda: server.patch("vllm-0", not_ready("10.1.0.0", containerStatuses=killed))),
        "restarted": watch.step(lambda: server.patch("vllm-0", ready("10.1.0.0", containerStatuses=None))),
        "lost": watch.step(lambda: server.patch("vllm-0", not_ready("10.1.0.0", "NodeStatusUnknown", "Unknown"))),
        "evicted": watch.step(lambda: server.patch("vllm-1", evicted)),
        "draining": watch.step(partial(server.delete, "vllm-2")),
        "deleted": watch.step(partial(delete_pods, server)),
        "bookmark": watch.step(lambda: None),
    }


def delete_pods(server: ApiServer) -> None:
    for number in range(3):
        server.delete(f"vllm-{number}", 0)


def record_refusals(server: ApiServer) -> dict[str, Any]:
    """Return answers to requests that are refused, and the end of a watch from a version that the server no longer has."""
    old = server.request("GET", server.pods())["metadata"]["resourceVersion"]
    server.create(pod("other", {}))
    server.compact()
    server.stop()  # its cache still has the changes
    server.start()
    found = {"expired": Watch(server, server.pods(), "1" if int(old) < 1 else old).step(lambda: None)[0]}
    for name, token in (("forbidden", server.account_token("without-a-role", None)), ("unauthorized", "unknown")):
        try:
            server.request("GET", server.pods(), token=token)
        except urllib.error.HTTPError as error:
            found[name] = json.loads(error.read())
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, run_api_server(Path(folder)) as server:
        server.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", POOL_DEFINITION)
        steps = record_pods(server)
        for number, manifest in enumerate(PROJECTS.values(), 1):
            server.create(manifest, ready(f"10.1.0.{number}"))
        projects = server.request("GET", server.pods())
        wait_until("the definition of pools", lambda: has_pools(server))
        server.request("POST", POOLS_PATH, pool("qwen", 8000, **{"llm-d.ai/guide": "precise-prefix-cache-routing"}))
        pools = server.request("GET", POOLS_PATH)
        found = {"steps": steps, "projects": projects, "pools": pools, **record_refusals(server)}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{RECORDED}: {len(steps)} steps in {NAMESPACE}, {time.strftime('%Y-%m-%d')}")


def has_pools(server: ApiServer) -> bool:
    try:
        server.request("GET", POOLS_PATH)
    except urllib.error.HTTPError:
        return False
    return True


if __name__ == "__main__":
    main()
