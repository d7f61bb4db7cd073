"""Access to the compiled package `kvevents_native`, without which publishers and subscribers work with fewer features."""

from __future__ import annotations

import importlib
from typing import Any

from kvevents.errors import MissingDependencyError
from kvevents.version import UNKNOWN_VERSION, version

INSTALL_COMMAND = "pip install 'kvevents[native]'"


def require_native(feature: str) -> Any:
    """Return the module `kvevents_native._native`.

    `feature` begins the message of the `MissingDependencyError` that is raised if the package is missing, or if its version
    is not the one of `kvevents`.
    """
    problem = _problem()
    if problem is not None:
        raise MissingDependencyError(f"{feature} needs the package kvevents-native, {problem}: {INSTALL_COMMAND}")
    return importlib.import_module("kvevents_native._native")


def find_native() -> Any | None:
    """Return the module `kvevents_native._native`; None if `require_native` would raise."""
    return None if _problem() is not None else importlib.import_module("kvevents_native._native")


def _problem() -> str | None:
    """Return why the compiled module cannot be used; None if it can."""
    try:
        native = importlib.import_module("kvevents_native._native")
    except ImportError as error:
        return f"which cannot be imported ({error})"
    if version() not in {UNKNOWN_VERSION, native.VERSION}:
        return f"whose version {native.VERSION} is not the version {version()} of kvevents"
    return None
