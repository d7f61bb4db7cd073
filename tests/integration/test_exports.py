"""The public names of the package root."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kvevents


def test_the_package_root_exports_exactly_these_names() -> None:
    """This list must be changed when a public name is added or removed."""
    assert sorted(kvevents.__all__) == [
        "AllBlocksCleared",
        "AsyncSubscriber",
        "Batch",
        "BatchReport",
        "BlockRemoved",
        "BlockStored",
        "Checkpoint",
        "Curve",
        "Decoded",
        "DegradedReason",
        "Delivery",
        "Dialect",
        "EventBatch",
        "EventPublisher",
        "EventPublisherFactory",
        "Gap",
        "Heartbeat",
        "KVCacheEvent",
        "KVConnectorKVEvents",
        "KVEventAggregator",
        "KVEventBatch",
        "KVEventsConfig",
        "KVEventsError",
        "MEDIUM_CPU",
        "MEDIUM_CPU_PINNED",
        "MEDIUM_DISK",
        "MEDIUM_EXTERNAL",
        "MEDIUM_GPU",
        "MEDIUM_STORAGE",
        "NullEventPublisher",
        "PublisherStats",
        "RawBatch",
        "RawDelivery",
        "Reset",
        "ShutdownReport",
        "SocketOptions",
        "Source",
        "StreamLimits",
        "StreamStatus",
        "Subscriber",
        "Trust",
        "TrustChange",
        "ZmqEventPublisher",
        "decode_batch",
        "dialect_for",
        "encode_batch",
    ]
    assert all(hasattr(kvevents, name) for name in kvevents.__all__)


def test_importing_kvevents_loads_only_msgspec_and_pyzmq() -> None:
    """Engine images need no other third-party package, and the import loads no module of the CLI or of `kvevents.testing`."""
    script = (
        "import sys, msgspec, zmq, zmq.utils.garbage, zmq.utils.monitor, zmq.utils.z85, importlib.metadata as m;"
        "before = set(sys.modules);"
        "import kvevents, kvevents.compat.vllm, kvevents.compat.sglang;"
        "added = set(sys.modules) - before; roots = {name.partition('.')[0] for name in added};"
        "owners = m.packages_distributions();"
        "print(sorted({dist for root in roots for dist in owners.get(root, ())} - {'kvevents'}));"
        "print([name for name in added if name.startswith(('kvevents.testing', 'kvevents.cli'))])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.splitlines() == ["[]", "[]"]


@pytest.mark.parametrize("package", ["kvevents", "kvevents.client", "kvevents.routing", "kvevents.subscriber"])
def test_the_imports_for_type_checkers_are_the_table_of_lazy_imports(package: str) -> None:
    """A name in only one of the two lists would cause an error either in a program or in its type checker."""
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    checked = {
        (alias.name, node.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    table = next(
        ast.literal_eval(node.value.args[1])
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    )
    assert {(name, origin) for origin, names in table.items() for name in names.split()} == checked
    assert sorted(name for name, _ in checked) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_importing_the_package_loads_nothing_else_and_threads_need_no_asyncio() -> None:
    """Engines import the package at each start. They load only the modules that they use."""
    script = (
        "import sys, zmq, msgspec, typing; before = set(sys.modules);"
        "import kvevents; print(sorted(set(sys.modules) - before));"
        "from kvevents import Subscriber, ZmqEventPublisher; print(sorted({'asyncio', 'ssl'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.splitlines() == ["['kvevents', 'kvevents.lazy_exports']", "[]"]


UNUSED = {"aiohttp", "importlib.metadata", "kvevents.client.sync", "prometheus_client", "tomllib"}
"""Modules that no command needs before it has something to do."""
DISCOVERY = {"kvevents.service.discovery.dns", "kvevents.service.discovery.kubernetes"}


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        (["--version"], UNUSED | {"asyncio", "kvevents.service", "kvevents.stream"}),
        (["serve", "--check", "--port", "0"], UNUSED | DISCOVERY | {"kvevents.client.protocol"}),
    ],
)
def test_a_start_loads_nothing_that_only_some_uses_need(command: list[str], unused: set[str]) -> None:
    """`serve --check` has imported all that `serve` imports. Nor does it read sources: only help texts need them."""
    script = (
        "import linecache, sys; from kvevents.cli import main\n"
        f"try: main({command})\n"
        f"finally: print(sorted({unused} & set(sys.modules)), [name for name in linecache.cache if 'kvevents' in name])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[] []"
