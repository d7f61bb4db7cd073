"""Follows the pods of a namespace for S seconds, with nothing else in the process.

It prints the number of engines when they are listed, and at the end the cost as JSON.

`python -m tests.system.kubernetes.follow CONFIG NAMESPACE S`. The cost is the share of a core, and the memory on top of the
service's own modules.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import kvevents.service.process
from kvevents.routing import http_client
from kvevents.service.discovery import object_watch
from kvevents.service.discovery.kubernetes import KubernetesProvider
from kvevents.service.settings import KubernetesSettings

USED = (kvevents.service.process, http_client)
"""Modules that a service always has in memory."""


def megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


async def measure(config: str, namespace: str, seconds: float) -> dict[str, float]:
    before = megabytes()
    settings = KubernetesSettings(selector="app", namespaces=(namespace,), kubeconfig=config)
    findings = KubernetesProvider(settings).watch()
    first = await anext(findings)
    print(len(first.providers), flush=True)
    changes, apply = 0, object_watch.ObjectWatch._apply_event

    def count(watch: object_watch.ObjectWatch[object_watch.KubernetesObject], event: object_watch._WatchEvent) -> None:
        nonlocal changes
        changes += 1
        apply(watch, event)

    object_watch.ObjectWatch._apply_event = count  # type: ignore[method-assign, assignment]
    began, spent, number = time.monotonic(), time.process_time(), 0
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for _ in findings:
                number += 1
    cores = (time.process_time() - spent) / (time.monotonic() - began)
    return {
        "changes": changes,
        "cores": cores,
        "megabytes": megabytes() - before,
        "findings": number,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1], sys.argv[2], float(sys.argv[3])))))
