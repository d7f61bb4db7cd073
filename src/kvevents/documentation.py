"""The address of the documentation, for messages and hints."""

import functools
import importlib.metadata


@functools.cache
def documentation() -> str | None:
    """Return the address in the metadata of the installed package; None for a package that was not built by a release."""
    try:
        addresses = importlib.metadata.metadata("kvevents").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return dict(address.split(", ", 1) for address in addresses).get("Documentation")


def documented(page: str) -> str:
    """Say where a page is, such as `operations/runbook.md#kveventssourcedegraded`, for use after "see"."""
    base = documentation()
    return f"{base}/{page}" if base else f"{page} in the documentation of kvevents"
