"""`kvevents play`: publish a recording from real sockets, as the recorded engine did."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Literal

from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console, Span, format_table
from kvevents.cli.options import add_publisher, linger, wait_for_subscriber
from kvevents.cli.output import DATA_FORMATS, add_output, write_record
from kvevents.cli.signals import StopSignal
from kvevents.cli.values import number, positive_int
from kvevents.diagnosis.text_format import plural
from kvevents.errors import RecordingError, UsageError
from kvevents.recording import LiveBatch, RecordedEndpoint, read_recording
from kvevents.testing import TapePlayer
from kvevents.wire import Live, parse_live

DESCRIPTION: Final = (
    "Publish a recording from real sockets, as its engine did: the same sequence numbers, the same bytes, the same pace."
)
EXAMPLES: Final = """\
  kvevents play run.jsonl.gz --wait-for-subscriber
  kvevents play run.jsonl.gz --speed max --repeat 10 --linger
  kvevents play run.jsonl.gz --endpoint 'tcp://127.0.0.1:*' --replay 'tcp://127.0.0.1:*'
  kvevents play run.jsonl.gz --list
"""


def read_streams(path: Path, console: Console) -> dict[RecordedEndpoint, list[LiveBatch]]:
    """Return the batches of a recording, grouped by run and endpoint, in the order of the file. Raises `RecordingError`."""
    streams: dict[RecordedEndpoint, list[LiveBatch]] = {}
    reader = read_recording(path)
    for frame in reader:
        live = parse_live(frame.frames) if frame.socket == "pub" else None
        if isinstance(live, Live):
            streams.setdefault(RecordedEndpoint(frame.run, frame.endpoint), []).append(LiveBatch(*live, frame.t))
    if reader.truncation:
        console.note(Span(reader.truncation, "warn"))
    if not streams:
        raise RecordingError(f"{path} has no batches")
    return streams


def choose_run(streams: dict[RecordedEndpoint, list[LiveBatch]], run: str | None, console: Console) -> list[LiveBatch]:
    """Return the batches of `run`; if it is None, the batches of all runs (incarnations) of the first endpoint.

    Raises `UsageError` if the recording does not have the run.
    """
    selected = [stream for stream in streams if run in {None, stream.run}]
    if not selected:
        known = ", ".join(dict.fromkeys(stream.run for stream in streams))
        raise UsageError(f"the recording has no run {run!r}; its runs are {known}")
    endpoint = selected[0].endpoint
    others = [stream for stream in selected if stream.endpoint != endpoint]
    if others:
        runs = ", ".join(each.run for each in others)
        console.note(Span(f"playing {endpoint}; runs of other endpoints are left out: {runs}", "warn"))
    return [batch for stream in selected if stream.endpoint == endpoint for batch in streams[stream]]


def run(args: Namespace) -> int:
    """Publish the recording, and then answer replay requests for the time of `--linger`."""
    console = Console()
    streams = read_streams(args.file, console)
    if args.list:
        return _print_runs(streams, args.output, console)
    batches = choose_run(streams, args.run_name, console)
    if args.speed != "max":
        batches = [batch if batch.t is None else batch._replace(t=batch.t / args.speed) for batch in batches]
    endpoints = {"endpoint": args.endpoint, "replay_endpoint": args.replay_endpoint}
    # Bound the player's log of requests, because a player can run for days. The command `play` does not read the log.
    with StopSignal() as stop, TapePlayer(batches, **endpoints, log=1_000) as player:
        console.note(f"publishing at {player.endpoint}, replay {player.replay_endpoint}")
        try:
            with stop.raising():
                wait_for_subscriber(args, player.endpoint, lambda: player.wait_for_subscriber(0.0))
            pace: Literal["recorded"] | None = None if args.speed == "max" else "recorded"
            _watch_player(player, player.start_playing(rate=pace, times=args.repeat), stop, console)
            with stop.raising():
                linger(args, console)
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED if player.counts.published < len(batches) * args.repeat else ExitCode.OK
        finally:
            played, requests = plural(player.counts.published, "batch"), plural(player.counts.requests, "request")
            console.note(f"played {played}, {player.counts.replayed} replayed for {requests}")
        return ExitCode.OK


def _watch_player(player: TapePlayer, future: Future[int], stop: StopSignal, console: Console) -> None:
    # Check for signals between waits: a signal handler that raises while `future` uses its lock would break the lock.
    while not future.done():
        console.progress(f"{plural(player.counts.published, 'batch')} played; Ctrl-C ends the command")
        stop.check()
        try:
            future.result(timeout=0.1)
        except TimeoutError:
            continue
    stop.check()


def _print_runs(streams: dict[RecordedEndpoint, list[LiveBatch]], output: str, console: Console) -> int:
    titles = ("run", "endpoint", "batches", "first", "last", "seconds")
    rows: list[list[Any]] = []
    for stream, batches in streams.items():
        times = [batch.t for batch in batches if batch.t is not None]
        seconds = max(times) - min(times) if times else None
        rows.append([stream.run, stream.endpoint, len(batches), batches[0].seq, batches[-1].seq, seconds])
        write_record(dict(zip(titles, rows[-1], strict=True)), output, console)
    if output not in DATA_FORMATS:
        cells = [[*map(str, row[:-1]), "-" if row[-1] is None else f"{row[-1]:.1f}"] for row in rows]
        console.lines(format_table(titles, cells, {"run", "endpoint"}))
    return ExitCode.OK


def _parse_speed(text: str) -> float | str:
    return text if text == "max" else number(text, expected="max, or a factor above 0, such as 1.0")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("file", metavar="FILE", type=Path, help="recording to publish")
    add_publisher(parser)
    parser.add_argument("--speed", type=_parse_speed, default=1.0, metavar="X", help="times faster than recorded, or max")
    parser.add_argument("--repeat", type=positive_int, default=1, help="publish the recording N times, with increasing numbers")
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="publish this run only (default: all, as restarts)")
    parser.add_argument("--list", action="store_true", help="list the runs of FILE and exit")
    add_output(parser, "one object for each run of --list")
