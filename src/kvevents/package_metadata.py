"""The version of the installed package, and the address of its documentation, from its metadata."""

from __future__ import annotations

import functools
from typing import Final

UNKNOWN_VERSION: Final = "unknown"


@functools.cache
def version() -> str:
    """Return the version of the installed package; `UNKNOWN_VERSION` in a source tree that is not installed.

    It is read once, from files: a process whose package is replaced meanwhile still has the modules of the first one.
    """
    import importlib.metadata  # noqa: PLC0415 - it imports the parser of mail messages, and much else

    try:
        return importlib.metadata.version("kvevents")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN_VERSION


@functools.cache
def documentation() -> str | None:
    """Return the address of the site in the metadata of the package; None if it was not built by a release."""
    import importlib.metadata  # noqa: PLC0415 - as above

    try:
        addresses = importlib.metadata.metadata("kvevents").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return dict(address.split(", ", 1) for address in addresses).get("Documentation")


def documented(page: str) -> str:
    """Return the address of a documentation page such as `operations/runbook#kveventssourcedegraded`, for use after "see"."""
    base = documentation()
    name, separator, heading = page.partition("#")
    return f"{base}/{name}/{separator}{heading}" if base else f"{page} in the documentation of kvevents"
