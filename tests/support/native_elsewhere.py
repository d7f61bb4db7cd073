"""A plugin of pytest that loads the native module from the path in `KVEVENTS_NATIVE`, as in `make sanitize`."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location

import kvevents_native

NAME = "kvevents_native._native"


def load(path: str) -> None:
    assert NAME not in sys.modules
    spec = spec_from_file_location(NAME, path, loader=ExtensionFileLoader(NAME, path))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(kvevents_native)["_native"] = module


load(os.environ["KVEVENTS_NATIVE"])
