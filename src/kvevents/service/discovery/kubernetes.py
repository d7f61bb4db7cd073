"""Discovery of the engines in pods that a label selector or an `InferencePool` names.

| pod | engine |
|---|---|
| was Ready once | followed |
| no longer Ready | followed, since its cache still exists; gets no requests while another engine can take them |
| has a deletion timestamp | drains: answers no longer name it |
| failed (evicted, out of memory) | gone, with a fault until the pod is deleted |
| deleted | gone |

Each namespace has one watch of pods, and if pools are configured one watch of pools, for any number of engines.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from kvevents.backoff import SYSTEM_CLOCK, Clock
from kvevents.errors import ConfigError, MissingDependencyError
from kvevents.service.discovery.object_watch import ObjectWatch, own_namespace
from kvevents.service.discovery.pods import POD_KIND, POOL_KIND, InferencePool, Pod, PodEngine, read_engine
from kvevents.service.discovery.provider import Finding
from kvevents.service.settings import KubernetesSettings

SETTLE_SECONDS: Final = 0.1
"""Pause in seconds after a finding, so that the changes of a rollout are reported together."""
MAX_FAULTS: Final = 16
"""Maximum number of faults of pods that are reported one by one; further pods are only counted."""


class _PodReading(NamedTuple):
    """The data that was read from one version of a pod."""

    pod: Pod
    pool: InferencePool | None = None
    engine: PodEngine | None = None
    was_ready: bool = False
    """Whether the pod has ever been Ready. If so, its engine is followed."""
    why_not_ready: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class KubernetesProvider:
    """Finds the engines in pods of the namespaces. Raises `MissingDependencyError` without kubernetes_asyncio."""

    settings: KubernetesSettings
    clock: Clock = field(default=SYSTEM_CLOCK, compare=False, repr=False)

    def __post_init__(self) -> None:
        if importlib.util.find_spec("kubernetes_asyncio") is None:
            raise MissingDependencyError("discovery by Kubernetes needs its client", "service,kubernetes")
        if (kubeconfig := self.settings.kubeconfig) is not None and not Path(kubeconfig).is_file():
            raise ConfigError(f"invalid kubeconfig {kubeconfig!r}: it is not a file")

    @property
    def name(self) -> str:
        """The name in logs, such as `kubernetes app=vllm`."""
        settings = self.settings
        return f"kubernetes {settings.selector or ', '.join(settings.pools)}"

    async def watch(self) -> AsyncGenerator[Finding, None]:
        """Yield the engines of all namespaces. If the API server does not answer, yield the former engines with a fault."""
        changed = asyncio.Event()
        names = self.settings.namespaces or (own_namespace(self.settings.kubeconfig),)
        namespaces = [_NamespacePods(name, self.settings, self.clock, changed.set) for name in names]
        watches = [watch for namespace in namespaces for watch in namespace.watches]
        tasks = [asyncio.create_task(watch.run()) for watch in watches]
        for task in tasks:
            task.add_done_callback(lambda _: changed.set())
        last = None
        try:
            while True:
                await changed.wait()
                changed.clear()
                for task in tasks:
                    if task.done():
                        task.result()
                if all(watch.is_listed or watch.fault for watch in watches):
                    finding = _build_finding(namespaces)
                    if finding != last:
                        yield finding
                    last = finding
                await self.clock.sleep(SETTLE_SECONDS)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _NamespacePods:
    """The pods of one namespace, and the reading of each pod."""

    def __init__(self, name: str, settings: KubernetesSettings, clock: Clock, on_change: Callable[[], None]) -> None:
        config = settings.kubeconfig
        self.name = name
        self._settings = settings
        self._pods = ObjectWatch(POD_KIND, name, clock, on_change, selector=settings.selector, kubeconfig=config)
        self._pools = ObjectWatch(POOL_KIND, name, clock, on_change, kubeconfig=config) if settings.pools else None
        self.watches: list[ObjectWatch[Pod] | ObjectWatch[InferencePool]] = [self._pods]
        if self._pools is not None:
            self.watches.append(self._pools)
        self._readings: dict[str, _PodReading] = {}

    def faults(self) -> list[str]:
        """Return sentences about watches that fail and pools that do not exist."""
        sentences = [watch.fault for watch in self.watches if watch.fault is not None]
        if self._pools is not None and self._pools.is_listed:
            missing = [name for name in self._settings.pools if name not in self._pools.objects]
            sentences += [f"InferencePool {name} is not in namespace {self.name}" for name in missing]
        return sentences

    def read(self) -> Iterable[_PodReading]:
        """Read the pods that have changed, and return the readings of all pods."""
        pools = None
        if self._pools is not None:
            pools = [pool for name in self._settings.pools if (pool := self._pools.objects.get(name)) is not None]
        self._readings = {name: self._read(pod, pools) for name, pod in self._pods.objects.items()}
        return self._readings.values()

    def _read(self, pod: Pod, pools: list[InferencePool] | None) -> _PodReading:
        metadata, before = pod.metadata, self._readings.get(pod.metadata.name)
        pool = next((pool for pool in pools if pool.selects(metadata.labels)), None) if pools is not None else None
        if before is not None and before.pod is pod and before.pool is pool:
            return before
        if (pools is not None and pool is None) or metadata.deletion_timestamp is not None:
            return _PodReading(pod, pool)
        if failure := pod.failure:
            return _PodReading(pod, pool, fault=f"pod {metadata.name} has failed: {failure}")
        reason = pod.why_not_ready
        was_ready = not reason or (before is not None and before.was_ready and before.pod.metadata.uid == metadata.uid)
        if not pod.status.pod_ip or pod.status.phase == "Succeeded":
            return _PodReading(pod, pool)
        ports = () if pool is None else pool.ports
        # With several namespaces, add the namespace to the name, because their pods can have equal names.
        instance = f"{metadata.name}.{self.name}" if len(self._settings.namespaces) > 1 else metadata.name
        try:
            engine = read_engine(pod, instance, self.name, ports, self._settings)
        except ConfigError as error:
            return _PodReading(pod, pool, fault=str(error))
        if before is not None and before.engine == engine:  # Keep the former object: a comparison with itself is fast.
            engine = before.engine
        return _PodReading(pod, pool, engine, was_ready, reason)


def _build_finding(namespaces: list[_NamespacePods]) -> Finding:
    readings = [reading for namespace in namespaces for reading in namespace.read()]
    engines = [reading.engine for reading in readings if reading.engine is not None and reading.was_ready]
    faults = [sentence for namespace in namespaces for sentence in namespace.faults()]
    of_pods = [reading.fault for reading in readings if reading.fault]
    if len(of_pods) > MAX_FAULTS:
        of_pods[MAX_FAULTS:] = [f"{len(of_pods) - MAX_FAULTS} further pods have a fault"]
    unready_sources = tuple((each.engine.source, each.why_not_ready) for each in readings if each.engine and each.why_not_ready)
    return Finding(
        registrations=tuple(registration for engine in engines for registration in engine.registrations),
        faults=(*faults, *of_pods),
        providers=tuple(provider for engine in engines for provider in engine.providers),
        unready_sources=unready_sources,
    )
