"""`kvevents play`: a recording from real sockets, as if its engine were running."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Literal

from kvevents.cli import options
from kvevents.cli.command import INTERRUPTED, OK, Command
from kvevents.cli.console import Console, Span
from kvevents.cli.lines import plural
from kvevents.cli.serving import nobody_came, stay
from kvevents.cli.stopping import Stop
from kvevents.errors import RecordingError, UsageError
from kvevents.recording import LiveBatch, RecordedEndpoint, read_recording
from kvevents.testing import TapePlayer
from kvevents.wire import Live, parse_live

TURN: Final = 0.1
"""Seconds between two looks at how far it is."""
REMEMBERED: Final = 1_000
"""Batches that the player keeps books of; nobody asks for them here, and a tape may be played for days."""


def read_streams(path: Path, console: Console) -> dict[RecordedEndpoint, list[LiveBatch]]:
    """The batches of a recording by run and endpoint, in order of appearance. Raises `RecordingError`."""
    streams: dict[RecordedEndpoint, list[LiveBatch]] = {}
    reader = read_recording(path)
    for frame in reader:
        live = parse_live(frame.frames) if frame.socket == "pub" else None
        if isinstance(live, Live):
            streams.setdefault(RecordedEndpoint(frame.run, frame.endpoint), []).append(LiveBatch(*live, frame.t))
    if reader.truncation:
        console.note(Span(reader.truncation, "warn"))
    if not streams:
        raise RecordingError(f"{path} holds no batches")
    return streams


def choose(streams: dict[RecordedEndpoint, list[LiveBatch]], run: str | None, console: Console) -> list[LiveBatch]:
    """The batches to play: of one run, or of the first endpoint all runs, each of which is a life of its engine.

    Raises `UsageError` for a run that is not there.
    """
    wanted = [stream for stream in streams if run in {None, stream.run}]
    if not wanted:
        known = ", ".join(dict.fromkeys(stream.run for stream in streams))
        raise UsageError(f"no run {run!r} in this recording; it has {known}")
    endpoint = wanted[0].endpoint
    others = [stream for stream in wanted if stream.endpoint != endpoint]
    if others:
        console.note(
            Span(f"playing {endpoint}; of other endpoints there is also: {', '.join(each.run for each in others)}", "warn")
        )
    return [batch for stream in wanted if stream.endpoint == endpoint for batch in streams[stream]]


def at_speed(batches: Sequence[LiveBatch], speed: float) -> list[LiveBatch]:
    """The same batches, recorded so many times faster."""
    return [batch if batch.t is None else batch._replace(t=batch.t / speed) for batch in batches]


def run(args: Namespace) -> int:
    """Play the recording, and stay as long as wanted."""
    console = Console()
    streams = read_streams(args.file, console)
    if args.list:
        return _list(streams, console)
    batches = choose(streams, args.run_name, console)
    tape = batches if args.speed == "max" else at_speed(batches, args.speed)
    ends = {"endpoint": args.endpoint, "replay_endpoint": args.replay_endpoint}
    with Stop() as stop, TapePlayer(tape, **ends, log=REMEMBERED) as player:
        console.note(f"serving {player.endpoint}, replay {player.replay_endpoint}")
        try:
            _play(player, args, stop, console)
        except KeyboardInterrupt:
            return _say(player, console, INTERRUPTED if player.counts.published < len(batches) * args.repeat else OK)
        return _say(player, console, OK)


def _play(player: TapePlayer, args: Namespace, stop: Stop, console: Console) -> None:
    with stop.raising():
        _wait_for_subscriber(player, args.wait_for_subscriber)
    rate: Literal["recorded"] | None = None if args.speed == "max" else "recorded"
    _watch(player, player.start_playing(rate=rate, times=args.repeat), stop, console)
    if args.linger is not None:
        console.note("everything is played; answering replay requests, Ctrl-C ends it")
        with stop.raising():
            stay(args.linger)


def _watch(player: TapePlayer, future: Future[int], stop: Stop, console: Console) -> None:
    # Signals are asked for here: one that is raised in the middle of a future's lock leaves the lock broken.
    while not future.done():
        console.progress(f"{plural(player.counts.published, 'batch')} played; Ctrl-C ends it")
        stop.check()
        try:
            future.result(timeout=TURN)
        except TimeoutError:
            continue
    stop.check()


def _say(player: TapePlayer, console: Console, code: int) -> int:
    counts = player.counts
    played = plural(counts.published, "batch")
    console.note(f"played {played}, {counts.replayed} replayed for {plural(counts.requests, 'request')}")
    return code


def _wait_for_subscriber(player: TapePlayer, seconds: float | None) -> None:
    if seconds is not None and not player.wait_for_subscriber(seconds):
        raise nobody_came(player.endpoint, seconds)


def _list(streams: dict[RecordedEndpoint, list[LiveBatch]], console: Console) -> int:
    for stream, batches in streams.items():
        times = [batch.t for batch in batches if batch.t is not None]
        lasts = f"{max(times) - min(times):.1f} s" if times else "no times"
        numbers = f"#{batches[0].seq} to #{batches[-1].seq}"
        console.line(f"{stream.run}  {stream.endpoint}  {plural(len(batches), 'batch')}, {numbers}, {lasts}")
    return OK


def _speed(text: str) -> float | str:
    if text == "max":
        return text
    try:
        return options.rate(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{text!r} must be max, or how many times faster than recorded, such as 1.0") from error


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a recording")
    options.add_publisher(parser)
    parser.add_argument(
        "--speed", type=_speed, default=1.0, metavar="X", help="1.0 is real time (default), max as fast as possible"
    )
    parser.add_argument(
        "--repeat", type=options.count, default=1, metavar="N", help="play it N times over; numbers go on, timestamps move on"
    )
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="play one run only; all runs otherwise, as restarts")
    parser.add_argument("--list", action="store_true", help="say what is in FILE instead")


COMMAND: Final = Command(
    "play",
    "serve a recording, as if its engine were running",
    "Serve a recording from real sockets, as if its engine were running: same numbers, same bytes, same pace.",
    """\
  kvevents play run.jsonl.gz --wait-for-subscriber
  kvevents play run.jsonl.gz --speed max --repeat 10 --linger
  kvevents play run.jsonl.gz --endpoint 'tcp://127.0.0.1:*' --replay-endpoint 'tcp://127.0.0.1:*'
  kvevents play run.jsonl.gz --list
""",
    add_arguments,
    run,
)
