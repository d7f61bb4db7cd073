"""Snapshot and restore: `python -m benchmarks.indexing.saving save WHO BLOCKS`; Dynamo's service has a dump."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.indexing import procfs
from benchmarks.indexing.holders import ours, service
from benchmarks.indexing.workload import CHAIN
from benchmarks.processes import Peer, say

STREAM: Final = ("worker-0", 0)
LESS: Final = 4
"""Dynamo's service is asked for a dump of so many times fewer blocks: that of 4 M takes 5 GB."""


def _ours(blocks: int) -> dict[str, float]:
    with TemporaryDirectory() as folder, ours("chains", CHAIN, 512) as holder:
        held, file, index = holder.take(blocks), Path(folder) / "snapshot", holder.side.index
        digest, before = index.digest(STREAM), holder.resident()
        procfs.forget_peak()
        began = time.monotonic()
        index.snapshot(file)
        seconds, extra = time.monotonic() - began, procfs.peak() - before
        with Peer("indexing.saving", "restore", file) as other:
            restored = other.hear()
        if restored.pop("digest") != digest:
            raise RuntimeError("what was restored is not what was saved")
        size = file.stat().st_size / held
    return {"seconds": seconds, "extra": extra / before * 100, "size": size, **restored}


def restore(file: str) -> dict[str, Any]:
    """In a process of its own: how long it takes, and how far memory rises above where it stays."""
    from kvevents.index import PrefixIndex  # noqa: PLC0415 - each process loads only what its trial is about

    index = PrefixIndex()
    procfs.forget_peak()
    began = time.monotonic()
    index.restore(file)
    seconds, peak = time.monotonic() - began, procfs.peak()
    gc.collect()
    extra = max(0, peak - procfs.resident()) / procfs.resident() * 100
    return {"digest": index.digest(STREAM), "restore_seconds": seconds, "restore_extra": extra}


def _service(blocks: int) -> dict[str, float]:
    with service("chains", CHAIN, 512) as holder:
        held, before = holder.take(blocks // LESS), holder.resident()
        procfs.forget_peak(holder.service.pid)
        began = time.monotonic()
        size = len(holder.service.ask("GET", "/dump"))
        seconds, extra = time.monotonic() - began, procfs.peak(holder.service.pid) - before
    return {"seconds": seconds, "extra": extra / before * 100, "size": size / held}


SIDES: Final[dict[str, Callable[[int], dict[str, float]]]] = {"ours": _ours, "service": _service}

if __name__ == "__main__":
    if sys.argv[1] == "restore":
        say(restore(sys.argv[2]))
    else:
        say(SIDES[sys.argv[2]](int(sys.argv[3])))
