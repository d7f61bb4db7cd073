"""Recordings for tests of exports, and functions that read the exported tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]  # it has no types

import paths
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.recording import RecordedFrame, RecordingWriter
from kvevents.wire import encode_batch, live_frames

SIZE = 4
RECORDING = paths.DATA / "vllm-0.32-captures.jsonl.gz"


def tokens_of(*names: int) -> list[int]:
    """Return the tokens of a sequence of blocks, one block for each name."""
    return [name * SIZE + place for name in names for place in range(SIZE)]


def stored(hashes: Sequence[int], names: Sequence[int], parent: int | None = None, **fields: Any) -> BlockStored:
    """Return a store of blocks with the tokens of `names`."""
    return BlockStored(list(hashes), parent, tokens_of(*names), SIZE, **fields)


def removed(*hashes: int, **fields: Any) -> BlockRemoved:
    return BlockRemoved(list(hashes), **fields)


def cleared() -> AllBlocksCleared:
    return AllBlocksCleared()


def payload(events: Iterable[KVEvent], ts: float = 1.0, rank: int | None = 0) -> bytes:
    return encode_batch(KVEventBatch(ts, list(events), rank))


def pub(seq: int, body: bytes, run: str = "a", t: float | None = 1.0, endpoint: str = "tcp://a:5557") -> RecordedFrame:
    return RecordedFrame(socket="pub", run=run, endpoint=endpoint, t=t, frames=tuple(live_frames(b"kv", seq, body)))


def replay(seq: int, body: bytes, run: str = "a", t: float | None = 9.0) -> RecordedFrame:
    frames = (b"", b"kv", seq.to_bytes(8, "big"), body)
    return RecordedFrame(socket="replay", run=run, endpoint="tcp://a:5558", t=t, frames=frames)


def note(run: str, source: str, rank: int, **said: Any) -> RecordedFrame:
    return RecordedFrame(socket="meta", run=run, t=1.0, frames=(), meta={"source": source, "rank": rank} | said)


def write(path: Path, frames: Iterable[RecordedFrame]) -> Path:
    with RecordingWriter(path) as writer:
        for frame in frames:
            writer.write(frame)
    return path


def history(path: Path, workers: dict[str, Sequence[tuple[float, Sequence[KVEvent]]]]) -> Path:
    """Write a recording of workers. Each has a list of batches, as times with events, which are numbered from 0."""
    frames = [
        (ts, pub(seq, payload(events, ts), run, ts, f"tcp://{run}:5557"))
        for run, batches in workers.items()
        for seq, (ts, events) in enumerate(batches)
    ]
    return write(path, (frame for _, frame in sorted(frames, key=lambda pair: pair[0])))


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(pq.read_table(folder / f"{name}.parquet").to_pylist())


def column(folder: Path, name: str, *columns: str) -> list[Any]:
    """Return the values of one column, or tuples with the values of several columns."""
    rows = table(folder, name)
    return [row[columns[0]] for row in rows] if len(columns) == 1 else [tuple(row[each] for each in columns) for row in rows]
