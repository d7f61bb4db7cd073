"""The table of rules in README.md of this folder: each row names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import paths

FOLDER = paths.TESTS


@cache
def find_names(module: Path) -> set[str]:
    """Return the names of tests in a module: functions, and test cases that a state machine assigns."""
    names: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_each_rule_names_tests_that_exist() -> None:
    """The test fails if a test of the table is renamed or deleted, and prints the rule that is not tested any more."""
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| ") and "`test_" in line]
    assert len(rows) > 30
    modules = {module.name: module for module in FOLDER.glob("*/test_*.py")}
    missing = []
    for row in rows:
        for file, name in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", row):
            if file not in modules or (name and name not in find_names(modules[file])):
                missing.append((file, name, row.split("|")[1].strip()))
    assert missing == []
