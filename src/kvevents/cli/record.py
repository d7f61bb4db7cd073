"""`kvevents record`: what an engine publishes, byte for byte, in a file that `kvevents play` and tests can serve."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvevents.cli import options
from kvevents.cli.command import Command
from kvevents.cli.console import Console
from kvevents.cli.following import Following
from kvevents.cli.lines import plural
from kvevents.cli.sources import report_missing, sources_of
from kvevents.cli.stopping import Stop
from kvevents.errors import UsageError
from kvevents.recording import RecordedFrame, RecordingWriter
from kvevents.stream import Batch, Delivery, Gap, Reset, Source
from kvevents.subscriber import Subscriber
from kvevents.wire import live_frames

FLUSH_SECONDS: Final = 1.0
"""How old a batch may be before it is in the file."""


class Recorder:
    """Writes deliveries as frames of their streams; each life of a publisher is a run of its own.

    A file that holds an older recording is replaced when the first delivery comes: if no engine comes, nothing is lost.
    """

    def __init__(self, path: Path, sources: Iterable[Source]) -> None:
        self.bytes = 0
        self._path = path
        self._sources = {(source.label, source.rank): source for source in sources}
        self._flushed_at = 0.0
        self._opened: RecordingWriter | None = None if _holds_something(path) else self._open()

    def _open(self) -> RecordingWriter:
        if _holds_something(self._path):
            self._path.unlink()
        writer = self._opened = RecordingWriter(self._path)
        for key, source in self._sources.items():
            self._note(key, 0, replay_endpoint=source.replay_endpoint, topic=source.topic)
        return writer

    @property
    def has_opened(self) -> bool:
        """Whether the file is this recording's."""
        return self._opened is not None

    @property
    def _writer(self) -> RecordingWriter:
        return self._opened or self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._opened is not None:
            self._opened.close()

    def record(self, delivery: Delivery) -> None:
        """Write one delivery. Raises `RecordingError` when the file cannot take it."""
        key = (delivery.source, delivery.rank)
        if isinstance(delivery, Batch):
            frames = tuple(live_frames(delivery.topic, delivery.seq, delivery.payload))
            self._write(key, delivery.incarnation, frames)
            self.bytes += len(delivery.payload)
        elif isinstance(delivery, Reset):
            self._note(key, delivery.incarnation, reset=delivery.reason)
        elif isinstance(delivery, Gap):
            self._note(key, delivery.incarnation, gap=[delivery.first, delivery.last], compacted=delivery.compacted)

    def flush(self, now: float) -> None:
        """Hand to the file what is older than `FLUSH_SECONDS`."""
        if self._opened is not None and now - self._flushed_at >= FLUSH_SECONDS:
            self._flushed_at = now
            self._opened.flush()

    def _write(self, key: tuple[str, int], incarnation: int, frames: tuple[bytes, ...]) -> None:
        endpoint = self._sources[key].endpoint
        run = run_name(*key, incarnation)
        self._writer.write(RecordedFrame(socket="pub", run=run, endpoint=endpoint, t=time.time(), frames=frames))

    def _note(self, key: tuple[str, int], incarnation: int, **said: Any) -> None:
        about = {"source": key[0], "rank": key[1], "incarnation": incarnation, "endpoint": self._sources[key].endpoint}
        run = run_name(*key, incarnation)
        self._writer.write(RecordedFrame(socket="meta", run=run, t=time.time(), frames=(), meta=about | said))


def run_name(source: str, rank: int, incarnation: int) -> str:
    """Numbers and hashes are comparable within one life of one rank, so that is a run."""
    return f"{source}/{rank}/life{incarnation}"


def run(args: Namespace) -> int:
    """Record until told to stop."""
    console = Console()
    if not args.file.absolute().parent.is_dir():
        raise UsageError(f"{args.file} cannot be written: there is no folder {args.file.absolute().parent}")
    if _holds_something(args.file) and not args.force:
        raise UsageError(f"{args.file} exists; name another file, or give --force to replace it")
    with Stop() as stop:
        sources = sources_of(args)
        report_missing(args, console)
        with Recorder(args.file, sources) as recorder, Subscriber(sources) as subscriber:
            following = Following(subscriber, args, stop)
            _follow(following, recorder, console, args.count)
            code = following.summarize(console)
        size = f"{plural(following.batches, 'batch')} ({recorder.bytes:,} bytes)"
        if recorder.has_opened:
            console.note(f"recorded {size} in {args.file}; `kvevents play {args.file}` serves them")
        return code


def _follow(following: Following, recorder: Recorder, console: Console, count: int | None) -> None:
    began = time.monotonic()
    for delivery in following:
        if delivery is not None:
            recorder.record(delivery)
        now = time.monotonic()
        recorder.flush(now)
        console.progress(f"{plural(following.batches, 'batch')}, {recorder.bytes:,} bytes, {now - began:.0f} s; Ctrl-C ends it")
        if following.batches == count:
            return


def _holds_something(path: Path) -> bool:
    """A recording is a record: nothing is written over, or after, an older one unasked."""
    return path.is_file() and path.stat().st_size > 0


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    options.add_stream(parser)
    parser.add_argument("file", metavar="FILE", type=Path, help="recording to write; compressed if its name ends in .gz")
    options.add_end(parser)
    parser.add_argument("-f", "--force", action="store_true", help="replace FILE if it exists")


COMMAND: Final = Command(
    "record",
    "keep what an engine publishes, byte for byte",
    "Keep what an engine publishes, byte for byte, in order and without holes as far as replay can fill them.\n"
    "The file holds the prompts' token ids: keep it as you would keep the prompts. Stop with Ctrl-C.",
    """\
  kvevents record tcp://127.0.0.1:5557 run.jsonl.gz --replay tcp://127.0.0.1:5558
  kvevents record 10.0.0.7:5557 run.jsonl.gz --replay 10.0.0.7:5558 --duration 60
  kvevents record 10.0.0.7:5557 all.jsonl.gz --replay 10.0.0.7:5567 --ranks 4 --source-name pod-7
""",
    add_arguments,
    run,
)
