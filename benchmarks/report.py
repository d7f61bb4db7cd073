"""The table of figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from statistics import median

import zmq

from benchmarks.trials import TITLES, Row


def machine() -> str:
    """Return a description of the machine in one line."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    cpu_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.release()}, {platform.python_implementation()} {platform.python_version()}"
    libraries = f"libzmq {zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}, msgspec {version('msgspec')}"
    return f"{cpu}, {cpu_count} CPUs, {system}, {libraries}, load {os.getloadavg()[0]:.1f}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def table(rows: Iterable[Row]) -> str:
    """Return one line for each figure and rival: medians, with minimum and maximum of all runs in brackets."""
    lines = [("figure", "against", "ours", "theirs", "ratio", "reach", "")]
    lines += [_line(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _line(row: Row) -> tuple[str, str, str, str, str, str, str]:
    unit = row.figure.unit
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    verdict = {True: "met", False: "MISSED", None: ""}[row.met]
    return row.figure.what, TITLES[row.rival], spread(row.ours, unit), spread(row.theirs, unit), ratio, _reach(row), verdict


def spread(values: list[float], unit: str) -> str:
    """Return the median, with minimum and maximum if these differ."""
    if not values:
        return ""
    center, minimum, maximum = (number(value) for value in (median(values), min(values), max(values)))
    return f"{center} {unit} ({minimum} to {maximum})" if len({center, minimum, maximum}) > 1 else f"{center} {unit}".strip()


def number(value: float) -> str:
    """Return a number with three digits, or a whole number."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _reach(row: Row) -> str:
    reach = row.figure.reach
    if reach is None:
        return ""
    alone = f"{reach:g} {row.figure.unit}"
    words = {
        "ratio at most": f"<= {reach:.2f}",
        "ratio at least": f">= {reach:.1f}",
        "at most": f"<= {alone}",
        "below": f"< {alone}",
    }
    return words.get(row.figure.judge, "none")
