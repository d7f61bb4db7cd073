"""Modules import only from lower layers, and the protocol core imports neither sockets nor clocks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import kvevents
import kvevents_plane

ROOT = Path(kvevents.__file__).parent
PLANE = Path(kvevents_plane.__file__).parent
# Each part may import the parts of the rows before its own; parts of one row do not import each other. `__init__`, which
# re-exports, and `errors`, which imports nothing, have no layer.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("events", "endpoints", "package_metadata", "backoff", "closeable", "lazy_exports", "prometheus"),
    ("settings",),
    ("native_module",),
    ("zeromq",),
    ("wire",),
    ("config",),
    ("stream",),
    ("recording", "publisher", "subscriber", "index"),
    ("routing",),
    ("client",),
    ("diagnosis",),
    ("compat", "testing", "service", "export", "relay"),
    ("sim", "engines", "conform"),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
CORE = ("events", "wire", "stream")
IO_MODULES = {"zmq", "asyncio", "threading", "time", "random", "socket", "select", "selectors", "datetime", "secrets", "os"}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def part_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


@cache
def imported_names(module: Path, root: Path = ROOT) -> list[str]:
    """Return the dotted names that a module imports, including imports in functions and imports for type checkers."""
    found: list[str] = []
    package = [root.name, *module.with_suffix("").parts][:-1]
    for node in ast.walk(ast.parse((root / module).read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{origin}.{alias.name}" for alias in node.names]
    return found


def find_upward_imports(module: Path) -> list[str]:
    """Return a message for each import of a module that is not from a lower layer."""
    part = part_of(module)
    if part in {"__init__", "errors"}:
        return []
    if part not in LEVEL:
        return [f"{module}: {part} has no level in LAYERS"]
    others = [(name, name.split(".")[1]) for name in imported_names(module) if name.startswith("kvevents.")]
    return [
        f"{module} imports {name}"
        for name, other in others
        if other not in {part, "errors"} and LEVEL.get(other, len(LAYERS)) >= LEVEL[part]
    ]


def test_the_modules_are_found() -> None:
    """The other tests expect empty lists of violations, which they would also get if no module were found."""
    assert {part_of(module) for module in MODULES} >= {*CORE, "index", "cli"}
    assert "kvevents.events" in {name.rpartition(".")[0] for name in imported_names(Path("wire/encode.py"))}


def test_modules_import_only_from_lower_layers() -> None:
    assert [violation for module in MODULES for violation in find_upward_imports(module)] == []


def import_graph(root: Path) -> dict[Path, set[Path]]:
    """Return the modules of a package, each with those that it imports; the import of a package is that of its `__init__`."""
    known = {path.relative_to(root) for path in root.rglob("*.py")}

    def imported_by(module: Path) -> Iterator[Path]:
        for name in imported_names(module, root):
            parts = name.split(".")
            while len(parts) > 1 and parts[0] == root.name:
                path = Path(*parts[1:])
                if target := next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each in known), None):
                    yield target
                    break
                parts.pop()

    return {module: {*imported_by(module)} - {module} for module in known}


def find_cycles(graph: Mapping[Path, set[Path]]) -> list[list[Path]]:
    """Return the groups of modules that import each other, directly or through other modules."""
    reachable: dict[Path, set[Path]] = {}
    for module in graph:
        seen, left = set[Path](), [module]
        while left:
            new = graph[left.pop()] - seen
            seen |= new
            left += new
        reachable[module] = seen
    groups = {frozenset({module, *(each for each in reachable[module] if module in reachable[each])}) for module in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def test_cycles_are_found() -> None:
    """A module that only imports a module of a cycle, or is only imported by one, is not part of the cycle."""
    a, b, c, d, e = map(Path, "abcde")
    assert find_cycles({a: {b}, b: {c}, c: {b, d}, d: set(), e: {e} - {e}}) == [[b, c]]
    assert find_cycles({a: {b}, b: {c}, c: {a}, d: {e}, e: {d}}) == [[a, b, c], [d, e]]


@pytest.mark.parametrize("root", [ROOT, PLANE], ids=lambda root: root.name)
def test_no_modules_import_each_other(root: Path) -> None:
    """Imports within functions and imports for type checkers count."""
    graph = import_graph(root)
    assert sum(map(len, graph.values())) > len(graph), "too few imports were found"
    assert find_cycles(graph) == []


def test_nothing_below_the_plane_imports_it() -> None:
    """It is a distribution of its own: `kvevents.cli` loads its commands by name where it is installed."""
    names = [(module, name) for module in MODULES for name in imported_names(module)]
    assert [f"{module} imports {name}" for module, name in names if name.startswith(PLANE.name)] == []


CRATES = ROOT.parents[1] / "native"


def native_modules(crate: str) -> dict[Path, set[Path]]:
    """Return the modules of a Rust crate, each with the modules of the crate that its paths name, without unit tests.

    A module and its submodules count as one, because in Rust a submodule sees the private items of its parent.
    """
    source = CRATES / crate / "src"
    graph: dict[Path, set[Path]] = {}
    for file in source.rglob("*.rs"):
        module = Path(file.relative_to(source).with_suffix("").parts[0])
        if module.name in {"lib", "tests"} or file.stem == "tests":
            continue
        code = re.sub(r"//.*", "", file.read_text())
        top = r"\b(?:crate|super)::" if file.parent == source else r"\bcrate::"
        named = re.findall(top + r"(\w+)", code) + [
            name for group in re.findall(top + r"\{([^;]*)\}", code) for name in re.findall(r"(?:^|,)\s*(\w+)", group)
        ]
        graph.setdefault(module, set()).update(Path(name) for name in named)
    return {module: {each for each in named if each in graph} - {module} for module, named in graph.items()}


@pytest.mark.parametrize("crate", ["index", "compaction", "routing", "server", "smg", "python"])
def test_no_modules_of_a_crate_use_each_other(crate: str) -> None:
    graph = native_modules(crate)
    assert sum(map(len, graph.values())) > len(graph) / 2, "too few paths were found"
    assert find_cycles(graph) == []


def test_a_name_of_a_module_has_one_meaning_in_all_crates() -> None:
    names = [path.stem for path in CRATES.glob("*/src/**/*.rs") if path.stem not in {"lib", "tests", "testing"}]
    assert len(names) > 50, "too few modules were found"
    assert [name for name, count in Counter(names).items() if count > 1] == []


NATIVE = {
    Path("routing/policies.py"),
    Path("service/data_plane.py"),
    Path("service/fleet/follower.py"),
    Path("service/http/app.py"),
    Path("service/http/messages.py"),
}
"""Modules that import the native module, besides those of the index."""


def test_only_listed_modules_import_the_native_module() -> None:
    """Publishers and subscribers run on platforms without a native wheel."""
    assert [
        f"{module} imports {name}"
        for module in MODULES
        if part_of(module) != "index" and module not in NATIVE
        for name in imported_names(module)
        if name.startswith("kvevents_native")
    ] == []


def test_the_core_imports_neither_sockets_nor_clocks() -> None:
    assert [
        f"{module} imports {name}"
        for module in MODULES
        if part_of(module) in CORE
        for name in imported_names(module)
        if name.split(".")[0] in IO_MODULES
    ] == []


def test_the_core_runs_without_zmq() -> None:
    """The interpreter imports the core and must not load `zmq` or `asyncio`, also not through another module."""
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
