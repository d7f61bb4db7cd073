"""`kvevents publish`: events from JSON lines, for trying things out and for producers that are not Python."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

import msgspec

from kvevents.cli import options
from kvevents.cli.command import FAILED, INTERRUPTED, OK, Command
from kvevents.cli.console import Console, Span
from kvevents.cli.lines import plural
from kvevents.cli.serving import nobody_came, stay
from kvevents.cli.stopping import Stop
from kvevents.config import resolve_dialect
from kvevents.endpoints import should_bind
from kvevents.errors import EncodeError, UnknownDialectError, UsageError
from kvevents.events import KVEvent, KVEventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.wire import Dialect, encode_batch

SHUTDOWN_SECONDS: Final = 5.0
"""How long a slow subscriber has to take the last batches."""
POLL: Final = 0.02
MAX_QUEUED: Final = 50_000
"""Half of the publisher's queue: a fast file waits here instead of being dropped there."""
LOOK_EVERY: Final = 1_000
"""Lines between two looks at the queue."""


class _Batch(msgspec.Struct, forbid_unknown_fields=True):
    """A line that is a whole batch. The rest of the keys are those of `kvevents tail -o json`, whose lines may be published."""

    events: list[KVEvent]
    ts: float | None = None
    data_parallel_rank: int | None = None
    kind: str | None = None
    source: Any = None
    rank: Any = None
    incarnation: Any = None
    seq: Any = None
    replayed: Any = None
    rejected: Any = None


def batch_of(line: bytes) -> KVEventBatch | None:
    """The batch of one line; None for a line without one. Raises ValueError, of which msgspec's errors are kinds."""
    if not line.strip():
        return None
    found = msgspec.json.decode(line)
    if isinstance(found, dict) and "events" not in found and "kind" in found:
        return None  # gaps, resets and changes of trust, as `tail -o json` tells them
    if isinstance(found, dict) and "events" in found:
        batch = msgspec.convert(found, _Batch)
        ts = time.time() if batch.ts is None else batch.ts
        return KVEventBatch(ts, batch.events, batch.data_parallel_rank)
    # mypy has no word for "a type form", which msgspec takes.
    wanted: Any = list[KVEvent] if isinstance(found, list) else KVEvent
    events = msgspec.convert(found, wanted)
    return KVEventBatch(time.time(), events if isinstance(found, list) else [events])


class Feed:
    """Lines into a publisher, at a pace."""

    def __init__(self, publisher: ZmqEventPublisher, dialect: Dialect | None, rate: float | None, console: Console) -> None:
        self.bad = 0
        self.finished = False
        self._publisher = publisher
        self._dialect = dialect
        self._pause = 0.0 if rate is None else 1.0 / rate
        self._console = console

    def run(self, file: BinaryIO) -> None:
        """Publish every line; a bad one is told and left out."""
        due = time.monotonic()
        for number, line in enumerate(file, 1):
            batch = self._read(number, line)
            if batch is None:
                continue
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic() - 1.0) + self._pause
            self._publisher.publish(batch)
            if number % LOOK_EVERY == 0:
                self._wait_for_room()
        self.finished = True

    def _read(self, number: int, line: bytes) -> KVEventBatch | None:
        try:
            batch = batch_of(line)
            if batch is not None:
                # The publisher would find out too late: the number would be burnt, and consumers would look for it.
                encode_batch(batch, self._dialect)
        except (ValueError, EncodeError) as error:
            self.bad += 1
            self._console.note(Span(f"line {number}: {error}", "warn"))
            return None
        return batch

    def _wait_for_room(self) -> None:
        stats = self._publisher.stats()
        self._console.progress(f"{plural(stats.accepted, 'batch')} published")
        while self._publisher.stats().queued > MAX_QUEUED:
            time.sleep(POLL)


def run(args: Namespace) -> int:
    """Publish all lines, stay as long as wanted, and report."""
    console = Console()
    ends = {"endpoint": args.endpoint, "replay_endpoint": args.replay_endpoint}
    curve = options.curve_of(args)
    with _opened(args.file) as file, Stop() as stop:
        publisher = ZmqEventPublisher(**ends, topic=args.topic, dialect=args.dialect, curve=curve)
        feed = Feed(publisher, args.dialect, args.rate, console)
        try:
            console.note(f"publishing at {publisher.endpoint}, replay {publisher.replay_endpoint}")
            if not should_bind(args.endpoint):
                console.note(
                    Span(f"it connects to {args.endpoint}, as engines do without a `*`; to be listened to, write one", "warn")
                )
            with stop.raising():
                _wait_for_subscriber(publisher, args.wait_for_subscriber)
                feed.run(file)
                _stay(args.linger, console)
        except KeyboardInterrupt:
            if not feed.finished:
                return INTERRUPTED
        finally:
            complete = _report(publisher, feed, console)
    return OK if complete and not feed.bad else FAILED


def _stay(seconds: float | None, console: Console) -> None:
    if seconds is not None:
        console.note("everything is published; answering replay requests, Ctrl-C ends it")
        stay(seconds)


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: PTH123, SIM115 - closed below; a failure to open is told apart from one to read
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    with file:
        yield file


def _wait_for_subscriber(publisher: ZmqEventPublisher, seconds: float | None) -> None:
    if seconds is None:
        return
    until = time.monotonic() + seconds
    while publisher.stats().subscribers < 1:
        if time.monotonic() > until:
            raise nobody_came(publisher.endpoint, seconds)
        time.sleep(POLL)


def _report(publisher: ZmqEventPublisher, feed: Feed, console: Console) -> bool:
    """Shut down and say what became of everything; whether nothing is known to be lost."""
    report = publisher.shutdown(SHUTDOWN_SECONDS)
    accepted = publisher.stats().accepted
    bad = f", {plural(feed.bad, 'bad line')}" if feed.bad else ""
    console.note(f"{accepted} accepted, {report.dropped} dropped, {report.unsent} unsent{bad}")
    return report.complete and not report.dropped


def _dialect(text: str) -> Dialect | None:
    try:
        return resolve_dialect(text)
    except UnknownDialectError as error:
        raise ArgumentTypeError(str(error)) from error


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help="JSON lines; - or nothing for stdin")
    options.add_publisher(parser)
    parser.add_argument("--topic", default="", help="first frame of every batch")
    parser.add_argument(
        "--dialect", type=_dialect, metavar="ENGINE-RELEASE", help="be understood as this release, such as sglang-0.5.17"
    )
    options.add_keys(parser)
    parser.add_argument("--rate", type=options.rate, metavar="N", help="batches per second; as fast as they come otherwise")


COMMAND: Final = Command(
    "publish",
    "publish events given as JSON lines",
    "Publish events given as JSON lines. A line is an event, a list of events or a batch:\n"
    '  {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [7, 8], "block_size": 2}\n'
    '  [{"type": "BlockRemoved", "block_hashes": [1]}, {"type": "AllBlocksCleared"}]\n'
    '  {"ts": 1760000000.0, "events": [...]}\n'
    "or what `kvevents tail -o json` wrote. A bad line is reported and left out.",
    """\
  echo '{"type": "AllBlocksCleared"}' | kvevents publish --wait-for-subscriber
  kvevents publish events.jsonl --dialect sglang-0.5.17 --rate 100 --linger 60
  kvevents publish events.jsonl --curve-key engine-0.key_secret --curve-allow clients --linger
  kvevents tail 10.0.0.7:5557 -o json | kvevents publish --endpoint tcp://127.0.0.1:6557 --topic kv@pod-7@model
""",
    add_arguments,
    run,
)
