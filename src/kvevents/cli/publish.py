"""`kvevents publish`: publish events from JSON lines, for experiments and for producers in other languages."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console, Span
from kvevents.cli.delivery_output import BATCH_KEYS
from kvevents.cli.options import add_curve, add_publisher, linger, read_curve, wait_for_subscriber
from kvevents.cli.signals import StopSignal
from kvevents.cli.values import positive_int, rate
from kvevents.diagnosis.text_format import plural
from kvevents.errors import EncodeError
from kvevents.events import KVEvent, KVEventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.wire import Dialect, encode_batch, resolve_dialect

DESCRIPTION: Final = (
    "Publish events given as JSON lines. A line is an event, a list of events or a batch:\n"
    '  {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [7, 8], "block_size": 2}\n'
    '  [{"type": "BlockRemoved", "block_hashes": [1]}, {"type": "AllBlocksCleared"}]\n'
    '  {"ts": 1760000000.0, "events": [...]}\n'
    "or a line of `kvevents tail -o json`. An invalid line is reported and skipped; the exit code is then 1."
)
EXAMPLES: Final = """\
  echo '{"type": "AllBlocksCleared"}' | kvevents publish --wait-for-subscriber
  kvevents publish events.jsonl --dialect sglang-0.5.17 --rate 100 --linger 60
  kvevents publish events.jsonl --curve-key engine-0.key_secret --curve-allow clients --linger
  kvevents tail 10.0.0.7:5557 -o json | kvevents publish --endpoint tcp://127.0.0.1:6557 --topic kv@pod-7@model
"""

STDIN: Final = Path("-")


class _JsonBatch(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a line with a batch. `batch_of` first removes further keys, which `kvevents tail -o json` writes."""

    events: list[KVEvent]
    ts: float | None = None
    data_parallel_rank: int | None = None


_IGNORED_KEYS: Final = {"kind", *BATCH_KEYS} - {"events", "ts"}


def batch_of(line: bytes) -> KVEventBatch | None:
    """Return the batch of a line; None if the line has no batch. Raises ValueError, for example msgspec's errors."""
    if not line.strip():
        return None
    found = msgspec.json.decode(line)
    if isinstance(found, dict) and "events" not in found and "kind" in found:
        return None  # The line is a gap, a reset or a change of trust, as `tail -o json` prints it.
    if isinstance(found, dict) and "events" in found:
        batch = msgspec.convert({key: value for key, value in found.items() if key not in _IGNORED_KEYS}, _JsonBatch)
        ts = time.time() if batch.ts is None else batch.ts
        return KVEventBatch(ts, batch.events, batch.data_parallel_rank)
    kind: Any = list[KVEvent] if isinstance(found, list) else KVEvent
    events = msgspec.convert(found, kind)
    return KVEventBatch(time.time(), events if isinstance(found, list) else [events])


class LinePublisher:
    """Publishes the batches of input lines at a given rate."""

    def __init__(self, publisher: ZmqEventPublisher, dialect: Dialect | None, rate: float | None, console: Console) -> None:
        self.invalid = 0
        self.finished = False
        self._publisher = publisher
        self._dialect = dialect
        self._pause = 0.0 if rate is None else 1.0 / rate
        self._console = console

    def run(self, file: BinaryIO) -> None:
        """Publish the batches of valid lines; print a note about each invalid line."""
        due = time.monotonic()
        for number, line in enumerate(file, 1):
            batch = self._read_line(number, line)
            if batch is None:
                continue
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic() - 1.0) + self._pause
            self._publisher.publish(batch)
            if number % 1_000 == 0:
                self._console.progress(f"{plural(self._publisher.stats().accepted, 'batch')} published")
                while self._publisher.stats().queued > 50_000:  # Half of the publisher's queue; a full queue drops batches.
                    time.sleep(0.02)
        self.finished = True

    def _read_line(self, number: int, line: bytes) -> KVEventBatch | None:
        try:
            batch = batch_of(line)
            if batch is not None:
                # Detect errors here. In the publisher an error would leave a gap, because batches get numbers before encoding.
                encode_batch(batch, self._dialect)
        except (ValueError, EncodeError, RecursionError) as error:
            self.invalid += 1
            self._console.note(Span(f"line {number}: {error}", "warn"))
            return None
        return batch


def run(args: Namespace) -> int:
    """Publish all lines, answer replay requests for the time of `--linger`, and print a summary."""
    console = Console()
    endpoints = {"endpoint": args.endpoint, "replay_endpoint": args.replay_endpoint}
    curve = read_curve(args)
    with nullcontext(sys.stdin.buffer) if args.file == STDIN else args.file.open("rb") as file, StopSignal() as stop:
        options = {"topic": args.topic, "dialect": args.dialect, "buffer_steps": args.buffer_steps, "curve": curve}
        publisher = ZmqEventPublisher(**endpoints, bind=not args.connect, **options)
        feed = LinePublisher(publisher, args.dialect, args.rate, console)
        try:
            console.note(f"publishing at {publisher.endpoint}, replay {publisher.replay_endpoint}")
            with stop.raising():
                wait_for_subscriber(args, publisher.endpoint, lambda: publisher.stats().subscribers > 0)
                feed.run(file)
                linger(args, console)
        except KeyboardInterrupt:
            if not feed.finished:
                return ExitCode.INTERRUPTED
        finally:
            report = publisher.shutdown(5.0)  # A slow subscriber has 5 s to receive the final batches.
            invalid = f", {plural(feed.invalid, 'invalid line')}" if feed.invalid else ""
            accepted = publisher.stats().accepted
            console.note(f"{accepted} accepted, {report.dropped} dropped, {report.unsent} unsent{invalid}")
    return ExitCode.OK if report.complete and not report.dropped and not feed.invalid else ExitCode.FAILED


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    text = "file with JSON lines, or - for stdin"
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, default=STDIN, help=text)
    add_publisher(parser)
    parser.add_argument("--connect", action="store_true", help="connect to --endpoint, where a consumer listens with --bind")
    parser.add_argument("--topic", default="", help="topic of the batches (default: empty)")
    text = "release whose wire format is used, such as vllm-0.33 (default: arrays, which almost all consumers read)"
    parser.add_argument("--dialect", type=resolve_dialect, metavar="NAME", help=text)
    text = "batches kept for replay, older ones are compacted"
    parser.add_argument("--buffer-steps", type=positive_int, default=10_000, help=text)
    add_curve(parser)
    parser.add_argument("--rate", type=rate, help="batches per second (default: no limit)")
