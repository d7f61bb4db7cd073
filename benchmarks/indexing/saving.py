"""Snapshot, restore and merge: `python -m benchmarks.indexing.saving save ours BLOCKS`."""

from __future__ import annotations

import gc
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from benchmarks.indexing import procfs
from benchmarks.indexing.holders import ours
from benchmarks.indexing.workload import CHAIN
from benchmarks.processes import Peer, send_line

if TYPE_CHECKING:
    from kvevents.index import PrefixIndex

STREAM: Final = ("worker-0", 0)
PAUSE: Final = 0.000_5
"""Seconds between two matches meanwhile."""


def save(blocks: int) -> dict[str, float]:
    with TemporaryDirectory() as folder, ours("chains", CHAIN, 512) as holder:
        held, file, index = holder.take(blocks), Path(folder) / "snapshot", holder.side.index
        digest, before = index.digest(STREAM), holder.resident()
        procfs.forget_peak()
        began = time.monotonic()
        index.snapshot(file)
        seconds, extra = time.monotonic() - began, procfs.peak() - before
        read: dict[str, float] = {}
        for verb in READERS:
            with Peer("indexing.saving", verb, file) as other:
                found = other.receive()
            if found.pop("digest") != digest:
                raise RuntimeError(f"what came by {verb} is not what was saved")
            read |= {f"{verb}_{name}": value for name, value in found.items()}
        size = file.stat().st_size / held
    return {"seconds": seconds, "extra": extra / before * 100, "size": size, **read}


def restore(file: str) -> dict[str, Any]:
    """In a process of its own: how long it takes, and how far memory rises above where it stays."""
    return _read(lambda index: index.restore(file))


def merge(file: str) -> dict[str, Any]:
    """The same for an index that takes it in as it is; and again for one that is asked meanwhile: how long that takes."""
    found = _read(lambda index: index.merge(file))
    return {**found, "match": _match_p99(file)}


def _read(how: Callable[[PrefixIndex], object]) -> dict[str, Any]:
    from kvevents.index import PrefixIndex  # noqa: PLC0415 - each process loads only what its trial is about

    index = PrefixIndex()
    procfs.forget_peak()
    began = time.monotonic()
    how(index)
    seconds, peak = time.monotonic() - began, procfs.peak()
    gc.collect()
    extra = max(0, peak - procfs.resident()) / procfs.resident() * 100
    return {"digest": index.digest(STREAM), "seconds": seconds, "extra": extra}


def _match_p99(file: str) -> float:
    """Microseconds, of a prompt of which another worker holds all; one in a hundred takes longer."""
    from kvevents.events import BlockStored  # noqa: PLC0415 - as above
    from kvevents.index import PrefixIndex  # noqa: PLC0415 - as above
    from kvevents.stream import Batch  # noqa: PLC0415 - as above

    index, tokens, took = PrefixIndex(), array("I", range(16 * 512)), list[float]()
    index.apply(Batch("other", 0, 0, 0, 0.0, [BlockStored(list(range(512)), None, list(tokens), 16)], False))
    merging = Thread(target=index.merge, args=(file,))
    merging.start()
    while merging.is_alive():
        began = time.monotonic()
        assert len(index.match(tokens)) == 1
        took.append(time.monotonic() - began)
        time.sleep(PAUSE)
    return sorted(took)[len(took) * 99 // 100] * 1e6


READERS: Final[dict[str, Callable[[str], dict[str, Any]]]] = {"restore": restore, "merge": merge}

if __name__ == "__main__":
    if sys.argv[1] in READERS:
        send_line(READERS[sys.argv[1]](sys.argv[2]))
    else:
        send_line(save(int(sys.argv[3])))
