"""Imports run one way, and the protocol core knows neither sockets nor clocks."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvevents

ROOT = Path(kvevents.__file__).parent
# Each part may import those before it; parts in one row know nothing of each other. `__init__`, which re-exports, and
# `errors`, which imports nothing, are aside.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("events", "endpoints", "version", "certificates", "backoff", "scraping", "structs"),
    ("wire",),
    ("config",),
    ("stream", "admission"),
    ("_native",),
    ("bulk",),
    ("recording", "aggregation", "publisher", "subscriber", "index"),
    ("routing",),
    ("plane",),
    ("compat", "testing", "service", "export", "relay"),
    ("sim",),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
CORE = ("events", "wire", "stream")
OUTSIDE = {"zmq", "asyncio", "threading", "time", "random", "socket", "select", "selectors", "datetime", "secrets", "os"}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def part_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def imports_of(module: Path) -> list[str]:
    """Dotted names that a module imports, at any depth of its code; those for type checkers alone included."""
    found: list[str] = []
    package = ["kvevents", *module.with_suffix("").parts][:-1]
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{origin}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_run_downward_only(module: Path) -> None:
    part = part_of(module)
    if part in {"__init__", "errors"}:
        return
    assert part in LEVEL, f"{part} has no level; DESIGN.md says where it belongs"
    for name in imports_of(module):
        other = name.split(".")[1] if name.startswith("kvevents.") else part
        if other in {part, "errors"}:
            continue
        assert LEVEL.get(other, len(LAYERS)) < LEVEL[part], f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_only_the_index_needs_the_native_module(module: Path) -> None:
    """What has no wheel for its platform publishes and subscribes all the same."""
    assert part_of(module) == "index" or not any(name.startswith("kvevents._native") for name in imports_of(module))


@pytest.mark.parametrize("module", [module for module in MODULES if part_of(module) in CORE], ids=str)
def test_the_core_knows_neither_sockets_nor_clocks(module: Path) -> None:
    assert not {name.split(".")[0] for name in imports_of(module)} & OUTSIDE


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_module_imports_with_a_star(module: Path) -> None:
    assert not any(name.endswith(".*") for name in imports_of(module))


def test_the_core_runs_without_zmq() -> None:
    """Asked of the interpreter, since a chain of imports is longer than one module."""
    parts = [part for part in CORE if (ROOT / part).exists() or (ROOT / f"{part}.py").exists()]
    code = "\n".join(
        [
            "import sys, types",
            f"package = types.ModuleType('kvevents'); package.__path__ = [{str(ROOT)!r}]; sys.modules['kvevents'] = package",
            *(f"import kvevents.{part}" for part in parts),
            "assert not {'zmq', 'asyncio'} & sys.modules.keys()",
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True)
