"""The installed version of kvevents."""

import importlib.metadata
from typing import Final

UNKNOWN_VERSION: Final = "unknown"


def version() -> str:
    """Return the version of the installed package; `UNKNOWN_VERSION` in a source tree that is not installed."""
    try:
        return importlib.metadata.version("kvevents")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN_VERSION
