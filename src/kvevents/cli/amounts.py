"""What commands that ask a service say alike: durations, sizes, shares, names of workers and their doubts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvevents.service.registration import DEFAULT_GROUP
from kvevents.service.schemas import SourceView

MAX_NAMED: Final = 5
"""Names spelled out in one sentence."""
_DURATIONS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))
_SIZES: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def duration(seconds: float) -> str:
    """`0.2 s`, `5 min`, `3 h`: the largest unit that is at least two of."""
    for length, unit in _DURATIONS:
        if abs(seconds) >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} s" if abs(seconds) >= 10 else f"{seconds:.1f} s"


def size(count: int) -> str:
    """`12.5 MiB`."""
    for length, unit in _SIZES:
        if count >= length:
            return f"{count / length:,.1f} {unit}"
    return f"{count} bytes"


def share(part: float, whole: float) -> str:
    """`56%`; of nothing, nothing. All and nothing are said of all and nothing only."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 1:
        return "<1%"
    return ">99%" if 99 < percent < 100 else f"{percent:.0f}%"


def worker(instance: str, rank: int, tenant: str = DEFAULT_GROUP, group: str = DEFAULT_GROUP) -> str:
    """`engine-0/1`, and whose it is where that says something: `engine-0/1@tenant`, `engine-0/1@tenant/group`."""
    name = f"{instance}/{rank}"
    if group != DEFAULT_GROUP:
        return f"{name}@{tenant}/{group}"
    return name if tenant == DEFAULT_GROUP else f"{name}@{tenant}"


def why(source: SourceView) -> str:
    """What speaks against a source: the reason of its state, and the fault, which is often part of that."""
    fault = source.fault or ""
    return "; ".join(part for part in (source.trust.reason, fault if fault not in source.trust.reason else "") if part)


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest:,} more" if rest > 0 else "")
