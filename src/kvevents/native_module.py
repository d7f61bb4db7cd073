"""The compiled package `kvevents_native`, without which publishers and subscribers work with fewer features."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from kvevents.errors import MissingDependencyError, install_hint
from kvevents.package_metadata import VERSION


def require_native(feature: str) -> Any:
    """Return the module `kvevents_native._native`.

    `feature` begins the message of the `MissingDependencyError` that is raised if the package is missing, or if its version
    differs from that of `kvevents`.
    """
    problem = _find_problem()
    if problem is not None:
        raise MissingDependencyError(f"{feature} needs {problem}", "native")
    return importlib.import_module("kvevents_native._native")


def find_native() -> Any | None:
    """Return the module `kvevents_native._native`; None if `require_native` would raise."""
    return None if _find_problem() is not None else importlib.import_module("kvevents_native._native")


def warn_without_native(logger: logging.Logger, subject: str, features: Sequence[str]) -> None:
    """Log a warning that `subject` works without `features`, unless the list is empty or the native module is installed."""
    problem = _find_problem() if features else None
    if problem is not None:
        logger.warning("%s: no %s without %s: %s", subject, " and no ".join(features), problem, install_hint("native"))


def _find_problem() -> str | None:
    """Return which package is needed and why it cannot be used; None if the package can be used."""
    try:
        native = importlib.import_module("kvevents_native._native")
    except ImportError as error:
        return f"the package kvevents-native, which cannot be imported ({error})"
    if native.VERSION != VERSION:
        return f"version {VERSION} of the package kvevents-native, which is installed in version {native.VERSION}"
    return None
