"""The address of the documentation, for messages and hints."""

import functools
import importlib.metadata


@functools.cache
def documentation() -> str | None:
    """Return the address of the site in the metadata of the package; None if it was not built by a release."""
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
