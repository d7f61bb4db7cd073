"""The installed release."""

import importlib.metadata


def version() -> str:
    """As pip knows it; `unknown` from a source tree that is not installed."""
    try:
        return importlib.metadata.version("kvevents")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
