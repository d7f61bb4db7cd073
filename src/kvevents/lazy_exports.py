"""Imports public names of a package from its modules when the names are first used.

So importing the package loads only the modules that the program uses. Type checkers and readers see ordinary imports, under
`TYPE_CHECKING`; a test compares them with the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_exports(package: str, table: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package. `table` maps modules to the names to import from them, separated by spaces."""
    origin = {name: module for module, names in table.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in origin:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(origin[name]), name)
        setattr(sys.modules[package], name, value)  # Python then never calls this function for this name again
        return value

    return get
