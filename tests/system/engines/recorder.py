"""Records an engine's stream together with the requests that it served, for tests that have no engine.

The file is a recording (`kvevents.recording`) that `kvevents play` and `TapePlayer` can play. Between the batches, in the place
where the service had applied all earlier batches and no later ones, `meta` lines hold requests (`request`: the prompt, its
cached tokens in the engine, and the trust of the service at that moment) and kills (`restart`).
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final, Self

from kvevents.recording import RecordedFrame, RecordingWriter
from kvevents.service.fleet.follower import timestamp_of
from kvevents.stream import RawBatch, Reset, Source
from kvevents.subscriber import Subscriber
from kvevents.wire import live_frames
from tests.system.engines.server import wait_until
from tests.system.engines.service import SAME_TIME, SETTLE_SECONDS, Prediction
from tests.system.engines.traffic import Prompt

NAME: Final = "engine"


class Recorder:
    """Follows one stream in a thread and writes its batches. A context manager."""

    def __init__(self, path: Path, endpoint: str, replay_endpoint: str | None) -> None:
        path.unlink(missing_ok=True)
        self._endpoint: Final = endpoint
        self._writer: Final = RecordingWriter(path)
        self._subscriber: Final = Subscriber(Source(endpoint, replay_endpoint, name=NAME), decode=False)
        self._lock: Final = threading.Lock()
        self._newest = 0.0
        """Timestamp of the newest written batch."""
        self._incarnation = 0
        self._is_ending = False
        self._thread: Final = threading.Thread(target=self._follow, name="recorder", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._is_ending:
            deliveries = self._subscriber.receive_many(timeout=0.05)
            with self._lock:
                for delivery in deliveries:
                    if isinstance(delivery, RawBatch):
                        self._write_batch(delivery)
                    elif isinstance(delivery, Reset):
                        self._incarnation = delivery.incarnation
                    else:
                        self._write_meta({"gap": [delivery.first, delivery.last]})

    def _write_batch(self, batch: RawBatch) -> None:
        timestamp = timestamp_of(batch.payload)
        frames = tuple(live_frames(batch.topic, batch.seq, batch.payload))
        self._writer.write(
            RecordedFrame(socket="pub", run=self._run, endpoint=self._endpoint, t=round(timestamp or 0.0, 3), frames=frames)
        )
        self._newest = timestamp or self._newest

    def _write_meta(self, meta: dict[str, Any]) -> None:
        self._writer.write(RecordedFrame(socket="meta", run=self._run, frames=(), meta=meta))

    @property
    def _run(self) -> str:
        return f"{NAME}/0/life{self._incarnation}"

    def hold(self) -> None:
        """Write no batch until `add_request`. Batches that arrive meanwhile wait."""
        self._lock.acquire()

    def add_request(self, prompt: Prompt, prediction: Prediction, cached: int) -> None:
        """Write a request before all batches that have arrived since `hold`."""
        request: dict[str, Any] = {"tokens": prompt.tokens, "cached": cached, "trust": prediction.trust}
        request |= {"salt": prompt.salt} if prompt.salt else {}
        request |= {"lora": prompt.lora} if prompt.lora else {}
        try:
            self._write_meta({"request": request})
        finally:
            self._lock.release()

    def add_restart(self) -> None:
        """Write a note that the engine was killed at this position of the recording."""
        with self._lock:
            self._write_meta({"restart": True})

    def settle(self, timestamp: float) -> bool:
        """Wait until the batch with this timestamp is written. Return False if it is not within `SETTLE_SECONDS`."""
        return wait_until(lambda: self._newest > timestamp - SAME_TIME, SETTLE_SECONDS, pause=0.002)

    def close(self) -> None:
        self._is_ending = True
        self._thread.join(10.0)
        self._subscriber.close()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
