"""How sources are named and explained for people."""

from __future__ import annotations

from kvevents.client.schemas import DEFAULT_GROUP, SourceView


def worker_name(instance: str, rank: int, tenant: str = DEFAULT_GROUP, group: str = DEFAULT_GROUP) -> str:
    """Return `engine-0/1`, with `@tenant` or `@tenant/group` unless these are the default ones."""
    name = f"{instance}/{rank}"
    if group != DEFAULT_GROUP:
        return f"{name}@{tenant}/{group}"
    return name if tenant == DEFAULT_GROUP else f"{name}@{tenant}"


def source_issues(source: SourceView) -> str:
    """Return the reason of a source's trust, and its fault unless the reason contains it."""
    fault = source.fault or ""
    return "; ".join(part for part in (source.trust.reason, fault if fault not in source.trust.reason else "") if part)
