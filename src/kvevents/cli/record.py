"""`kvevents record`: write the events of an engine, byte for byte, to a file that `kvevents play` and tests can publish."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from kvevents.cli.console import Console
from kvevents.cli.delivery_output import DeliveryLoop, subscribe
from kvevents.cli.options import add_limits, add_source, check_writable, note_missing_endpoints, read_sources
from kvevents.cli.signals import StopSignal
from kvevents.diagnosis.text_format import plural
from kvevents.recording import RecordedFrame, RecordingWriter
from kvevents.stream import Batch, Delivery, Gap, Reset, Source
from kvevents.wire import live_frames

DESCRIPTION: Final = (
    "Write the events of an engine to a recording, byte for byte and in order. Batches that were lost are requested from its "
    "replay endpoint.\n"
    "Prompts can be read from the token ids in a recording: protect it like the prompts. Ctrl-C ends the command."
)
EXAMPLES: Final = """\
  kvevents record tcp://127.0.0.1:5557 run.jsonl.gz --replay tcp://127.0.0.1:5558
  kvevents record 10.0.0.7:5557 run.jsonl.gz --replay 10.0.0.7:5558 --duration 60
  kvevents record 10.0.0.7:5557 all.jsonl.gz --replay 10.0.0.7:5567 --ranks 4 --source-name pod-7
"""

FLUSH_SECONDS: Final = 1.0
"""Maximum seconds from the arrival of a batch to its write to the file."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add_source(parser)
    parser.add_argument("file", metavar="FILE", type=Path, help="recording to write; compressed if its name ends in .gz")
    add_limits(parser)
    parser.add_argument("-f", "--force", action="store_true", help="replace FILE if it exists")


def run(args: Namespace) -> int:
    """Record until a limit or a signal ends the command."""
    console = Console()
    check_writable(args.file, force=args.force)
    with StopSignal() as stop:
        sources = read_sources(args)
        note_missing_endpoints(args, console)
        with closing(Recorder(args.file, sources)) as recorder, subscribe(sources) as subscriber:
            deliveries = DeliveryLoop(subscriber, args, stop)
            began = time.monotonic()
            for delivery in deliveries:
                if delivery is not None:
                    recorder.record(delivery)
                now = time.monotonic()
                recorder.flush(now)
                batches = plural(deliveries.batches, "batch")
                console.progress(f"{batches}, {recorder.bytes:,} bytes, {now - began:.0f} s; Ctrl-C ends the command")
                if deliveries.batches == args.count:
                    break
            code = deliveries.print_summary(console)
        if recorder.writer is not None:
            size = f"{plural(deliveries.batches, 'batch')} ({recorder.bytes:,} bytes)"
            console.note(f"recorded {size} in {args.file}; `kvevents play {args.file}` publishes them")
        return code


class Recorder:
    """Writes deliveries to a recording. Each incarnation of a stream is a run.

    The recorder opens the file at the first delivery. So an existing recording is not replaced if the engine sends nothing.
    """

    def __init__(self, path: Path, sources: Iterable[Source]) -> None:
        self.bytes = 0
        self.writer: RecordingWriter | None = None
        """The open file; None before the first delivery."""
        self._path = path
        self._sources = {(source.label, source.rank): source for source in sources}
        self._flushed_at = 0.0

    def close(self) -> None:
        """Close the file. Raises `RecordingError` if the file cannot be written."""
        if self.writer is not None:
            self.writer.close()

    def record(self, delivery: Delivery) -> None:
        """Write one delivery. Raises `RecordingError` if the file cannot be written."""
        key = (delivery.source, delivery.rank)
        if isinstance(delivery, Batch):
            frames = tuple(live_frames(delivery.topic, delivery.seq, delivery.payload))
            run = run_name(*key, delivery.incarnation)
            endpoint = self._sources[key].endpoint
            self._write(RecordedFrame(socket="pub", run=run, endpoint=endpoint, t=time.time(), frames=frames))
            self.bytes += len(delivery.payload)
        elif isinstance(delivery, Reset):
            self._write_meta(key, delivery.incarnation, reset=delivery.reason)
        elif isinstance(delivery, Gap):
            self._write_meta(key, delivery.incarnation, gap=[delivery.first, delivery.last], compacted=delivery.compacted)

    def flush(self, now: float) -> None:
        """Flush the file if `FLUSH_SECONDS` have passed since the previous flush."""
        if self.writer is not None and now - self._flushed_at >= FLUSH_SECONDS:
            self._flushed_at = now
            self.writer.flush()

    def _write_meta(self, key: tuple[str, int], incarnation: int, **values: Any) -> None:
        stream = {"source": key[0], "rank": key[1], "incarnation": incarnation, "endpoint": self._sources[key].endpoint}
        run = run_name(*key, incarnation)
        self._write(RecordedFrame(socket="meta", run=run, t=time.time(), frames=(), meta=stream | values))

    def _write(self, frame: RecordedFrame) -> None:
        if self.writer is None:
            if self._path.is_file() and self._path.stat().st_size:
                self._path.unlink()
            self.writer = RecordingWriter(self._path)
            for key, source in self._sources.items():
                self._write_meta(key, 0, replay_endpoint=source.replay_endpoint, topic=source.topic)
        self.writer.write(frame)


def run_name(source: str, rank: int, incarnation: int) -> str:
    """Return the name of a run: one incarnation of one rank, within which sequence numbers and hashes are comparable."""
    return f"{source}/{rank}/incarnation{incarnation}"
