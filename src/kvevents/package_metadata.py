"""The version of the package, and the address of its documentation, which the package metadata states."""

from __future__ import annotations

import functools
from typing import Final

VERSION: Final = "0.1.0"
"""The version in `native/Cargo.toml`, as a constant: every command needs it, and importing `importlib.metadata` takes 15 ms."""


@functools.cache
def documentation() -> str | None:
    """Return the address of the documentation in the package's metadata; None if the metadata has no address."""
    import importlib.metadata  # noqa: PLC0415 - this import takes 15 ms, and few commands need it

    try:
        addresses = importlib.metadata.metadata("kvevents").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return dict(address.split(", ", 1) for address in addresses).get("Documentation")


def page_link(page: str) -> str:
    """Return the address of a documentation page such as `operations/runbook#kveventssourcedegraded`, for use after "see"."""
    base = documentation()
    name, separator, heading = page.partition("#")
    return f"{base}/{name}/{separator}{heading}" if base else f"{page} in the documentation of kvevents"
