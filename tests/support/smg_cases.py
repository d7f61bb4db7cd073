"""A worker of SMG without an engine: a gRPC server that sends the batches that a test gives it."""

from __future__ import annotations

import functools
import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

import paths

FOLDER: Final = paths.ROOT / "tests" / "support" / "smg"
BLOCK: Final = 4


@functools.cache
def read_protocol() -> tuple[Any, Any]:
    """Return the classes of the messages, and those of the service."""
    sys.path.insert(0, str(FOLDER))
    try:
        protocol: tuple[Any, Any] = grpc.protos_and_services("worker.proto")
        return protocol
    finally:
        sys.path.remove(str(FOLDER))


def stored(*hashes: int, parent: int | None = None, **more: Any) -> Any:
    """Return a store of blocks, whose tokens all are the block's hash."""
    messages, _ = read_protocol()
    blocks = [messages.KvBlock(block_hash=each, token_ids=[each] * BLOCK, block_size=BLOCK) for each in hashes]
    return messages.KvCacheEvent(stored=messages.KvBlocksStored(blocks=blocks, parent_block_hash=parent, **more))


def removed(*hashes: int, **more: Any) -> Any:
    """Return a removal."""
    messages, _ = read_protocol()
    return messages.KvCacheEvent(removed=messages.KvBlocksRemoved(block_hashes=hashes, **more))


def cleared() -> Any:
    """Return a clear."""
    messages, _ = read_protocol()
    return messages.KvCacheEvent(cleared=messages.KvCacheCleared())


def batch(number: int, *events: Any, time: float | None = None, **more: Any) -> Any:
    """Return a batch. By default its time is its number. The entries of `more` are fields of the message."""
    messages, _ = read_protocol()
    timestamp = float(number) if time is None else time
    return messages.KvEventBatch(sequence_number=number, timestamp=timestamp, events=events, **more)


def part(number: int, index: int, *events: Any, count: int = 1, unknown_before: int = 0) -> Any:
    """Return one part of a snapshot."""
    messages, _ = read_protocol()
    snapshot = messages.KvSnapshotChunk(index=index, count=count, unknown_before=unknown_before)
    return batch(number, *events, snapshot=snapshot)


def heartbeat(number: int) -> Any:
    """Return the record of the load that a servicer sends while its engine is idle."""
    messages, _ = read_protocol()
    return batch(number, load=messages.EngineLoad(load_only=True))


class Worker:
    """Serves `SubscribeKvEvents` at a free port. Each call receives `history`, and then what `send` gives it."""

    def __init__(self, *history: Any, port: int = 0, has_events: bool = True) -> None:
        messages, services = read_protocol()
        self.history = list(history)
        self._lock = threading.Lock()
        self.calls: list[queue.SimpleQueue[Any]] = []
        """The queue of each call."""
        worker = self

        class Servicer(services.VllmEngineServicer):  # type: ignore[misc, name-defined]
            def SubscribeKvEvents(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802 - the name of the call
                assert request == messages.SubscribeKvEventsRequest(load_records_before_first_batch=True)
                if not has_events:
                    context.abort(grpc.StatusCode.UNIMPLEMENTED, "KV cache events not enabled")
                calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
                with worker._lock:
                    history = list(worker.history)
                    worker.calls.append(calls)
                yield from [heartbeat(0), *history]
                while (sent := calls.get()) is not None:
                    yield sent

        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        services.add_VllmEngineServicer_to_server(Servicer(), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    @property
    def endpoint(self) -> str:
        """The endpoint of the worker's events."""
        return f"grpc://127.0.0.1:{self.port}"

    def send(self, *batches: Any) -> None:
        """Send batches to all callers, and to those that come later."""
        with self._lock:
            self.history.extend(batches)
            for calls in self.calls:
                for each in batches:
                    calls.put(each)

    def hang_up(self) -> None:
        """End all calls."""
        calls, self.calls = self.calls, []
        for each in calls:
            each.put(None)

    def stop(self) -> None:
        """End the server."""
        self.hang_up()
        self._server.stop(0).wait()
