"""The installed version of kvevents."""

import importlib.metadata


def version() -> str:
    """Return the version of the installed package; `unknown` in a source tree that is not installed."""
    try:
        return importlib.metadata.version("kvevents")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
