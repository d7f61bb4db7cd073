"""Formats of counts, ranges, sizes and durations for sentences that people read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_LISTED_NAMES: Final = 5
"""Maximum number of names in one sentence; further names are counted, but not listed."""
_MAX_RANGES: Final = 3
_DURATIONS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))
_SIZES: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 block`, `2 blocks`, `3 batches`."""
    suffix = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{suffix}"


def number_range(first: int, last: int) -> str:
    """Return a range of sequence numbers as a text, such as `#3`, `#3 to #5`."""
    return f"#{first}" if first == last else f"#{first} to #{last}"


def number_ranges(ranges: Sequence[tuple[int, int]]) -> str:
    """Return the first ranges of sequence numbers as a text, such as `#3, #5 to #7, ...`."""
    text = ", ".join(number_range(first, last) for first, last in ranges[:_MAX_RANGES])
    return f"{text}, ..." if len(ranges) > _MAX_RANGES else text


def duration(seconds: float) -> str:
    """Return a duration in days, hours or minutes if it has two or more of the unit, else in seconds: `3 h`, `0.2 s`."""
    for length, unit in _DURATIONS:
        if abs(seconds) >= 2 * length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.0f} s" if abs(seconds) >= 10 else f"{seconds:.1f} s"


def size(count: int) -> str:
    """Return a number of bytes with a unit: `12.5 MiB`."""
    for length, unit in _SIZES:
        if count >= length:
            return f"{count / length:,.1f} {unit}"
    return f"{count} bytes"


def percentage(part: float, total: float) -> str:
    """Return `part` of `total` in percent. A value near 0% is `<1%`, and a value near 100% is `>99%`."""
    percent = 100 * part / total if total else 0.0
    return "<1%" if 0 < percent < 1 else ">99%" if 99 < percent < 100 else f"{percent:.0f}%"


def first_names(names: Sequence[str]) -> str:
    """Return the first `MAX_LISTED_NAMES` names as a text, with the number of further names."""
    further_count = len(names) - MAX_LISTED_NAMES
    return ", ".join(names[:MAX_LISTED_NAMES]) + (f" and {further_count:,} more" if further_count > 0 else "")
