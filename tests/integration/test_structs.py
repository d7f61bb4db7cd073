"""msgspec has built the decoders of all decoded structs before two threads can decode them at the same time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import kvevents
import kvevents_plane

ROOTS = [Path(*each.__path__) for each in (kvevents, kvevents_plane)]
SINGLE_THREADED = {"cli", "client", "engines", "sim", "compat", "testing"}
"""Parts that decode their input before they start another thread."""

VARIABLES = {"kind"}
"""The variable of functions whose callers pass the struct."""


def find_decoded_structs() -> list[tuple[str, str]]:
    """Return module and name of each struct that a function passes to `decode` or `convert`. `cls` is the class around it."""
    found: set[tuple[str, str]] = set()
    for package, path in [(root, path) for root in ROOTS for path in root.rglob("*.py")]:
        parts = path.relative_to(package).with_suffix("").parts
        if parts[0] in SINGLE_THREADED:
            continue
        module = ".".join([package.name, *(part for part in parts if part != "__init__")])
        _CallVisitor(module, found).visit(ast.parse(path.read_text()))
    return sorted(found)


class _CallVisitor(ast.NodeVisitor):
    def __init__(self, module: str, found: set[tuple[str, str]]) -> None:
        self._module, self._found, self._class = module, found, ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = before

    def visit_Call(self, node: ast.Call) -> None:
        callee = f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        kinds = [each.value for each in node.keywords if each.arg == "type"] if callee.endswith(".decode") else []
        kinds += node.args[1:2] if callee.endswith("convert") else []
        for kind in kinds:
            name = ast.unparse(kind)
            self._found.add((self._module, self._class if name == "cls" else name))
        self.generic_visit(node)


CODE = """
import gc, importlib, msgspec, sys
for line in sys.stdin:
    module, name = line.split()
    kind = getattr(importlib.import_module(module), name, None)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        known = any(type(each).__name__ == "StructInfo" for each in gc.get_referents(kind))
        print(module, name, known)
"""


def test_every_decoded_struct_has_its_decoder_built() -> None:
    """Importing the module is enough."""
    decoded = find_decoded_structs()
    names = "\n".join(f"{module} {name}" for module, name in decoded if name.isidentifier())
    done = subprocess.run([sys.executable, "-c", CODE], input=names, capture_output=True, text=True, check=True, timeout=60)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) > 15
    assert [row for row in rows if row[2] != "True"] == []
    assert {name for _, name in decoded if name.islower()} - {"dict", "float"} == VARIABLES
