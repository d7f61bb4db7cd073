"""A plugin of vLLM for tests: writes what an engine core has published, whether it is idle, and how long its steps take.

It is loaded in each of vLLM's processes and does nothing without `ENGINE_OBSERVER_PAGE`, the file that it writes (`page.py`
has the layout). It wraps any publisher that the engine creates, with and without the plugin of kvevents.

`ENGINE_OBSERVER_PUBLISHER=compat` makes the engine create the publisher of `kvevents.compat.vllm` in place of its own.
`ENGINE_OBSERVER_FAULT=MODULE:NAME[.NAME]` replaces a function by one that raises RuntimeError, in every process.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import time
from typing import Any

PUBLISHED, LAST_TIMESTAMP, IS_IDLE, STEPS = range(4)
SAMPLES = 32_768
SERIES = ("publish_ns", "publish_cpu_ns", "step_ns", "step_cpu_ns")
HEAD = 8
PAGE_BYTES = 8 * (HEAD + len(SERIES) * (1 + SAMPLES))


class Page:
    """The file as words. Each assignment is one 64-bit store."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:  # noqa: PTH123 - imports nothing that the engine does not need
            self._map = mmap.mmap(file.fileno(), PAGE_BYTES)
        self.words = memoryview(self._map).cast("Q")
        self.doubles = memoryview(self._map).cast("d")

    def add_sample(self, series: int, value: int) -> None:
        start = HEAD + series * (1 + SAMPLES)
        written = self.words[start]
        self.words[start + 1 + written % SAMPLES] = value
        self.words[start] = written + 1


def register() -> None:
    """Install the observer, as an entry point of `vllm.general_plugins`. vLLM may call it more than once in a process."""
    fault = os.environ.get("ENGINE_OBSERVER_FAULT")
    if fault:
        _break(fault)
    path = os.environ.get("ENGINE_OBSERVER_PAGE")
    if not path:
        return
    # The modules of the engine can be imported when the entry point is called, not earlier.
    factory = importlib.import_module("vllm.distributed.kv_events").EventPublisherFactory
    core = importlib.import_module("vllm.v1.engine.core").EngineCoreProc
    if hasattr(core, "observer_page"):
        return
    page = core.observer_page = Page(path)
    _wrap_publisher(factory, page)
    _wrap_core(core, page)


def _break(fault: str) -> None:
    module, _, names = fault.partition(":")
    *owners, name = names.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"the observer makes {fault} fail")

    setattr(owner, name, fail)


def _wrap_publisher(factory: Any, page: Page) -> None:
    create = factory.create.__func__

    def create_observed(cls: Any, *arguments: Any, **options: Any) -> Any:
        if os.environ.get("ENGINE_OBSERVER_PUBLISHER") == "compat":
            cls._registry["zmq"] = importlib.import_module("kvevents.compat.vllm").ZmqEventPublisher
        publisher = create(cls, *arguments, **options)
        publish = publisher.publish

        def publish_observed(batch: Any) -> None:
            began, cpu = time.perf_counter_ns(), time.thread_time_ns()
            publish(batch)
            page.add_sample(1, time.thread_time_ns() - cpu)
            page.add_sample(0, time.perf_counter_ns() - began)
            page.doubles[LAST_TIMESTAMP] = batch.ts
            page.words[PUBLISHED] += 1

        publisher.publish = publish_observed
        return publisher

    factory.create = classmethod(create_observed)


def _wrap_core(core: Any, page: Page) -> None:
    wait, step = core._process_input_queue, core._process_engine_step

    def wait_observed(self: Any) -> Any:
        page.words[IS_IDLE] = int(not self.has_work())
        try:
            return wait(self)
        finally:
            page.words[IS_IDLE] = 0

    def step_observed(self: Any) -> Any:
        began, cpu = time.perf_counter_ns(), time.thread_time_ns()
        executed = step(self)
        if executed:
            page.add_sample(3, time.thread_time_ns() - cpu)
            page.add_sample(2, time.perf_counter_ns() - began)
        page.words[STEPS] += 1
        return executed

    core._process_input_queue, core._process_engine_step = wait_observed, step_observed
