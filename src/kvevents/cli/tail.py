"""`kvevents tail`: every event of an engine, once and in order, as it happens."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Final, Protocol

import msgspec

from kvevents.cli import objects, options
from kvevents.cli.command import Command
from kvevents.cli.console import Console
from kvevents.cli.following import Following, TrustWatch
from kvevents.cli.lines import Detail, LineFormat
from kvevents.cli.sources import name_of, report_missing, sources_of
from kvevents.cli.stopping import Stop
from kvevents.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.stream import Batch, Gap, Reset, Trust
from kvevents.subscriber import Subscriber

KINDS: Final[dict[str, type[KVEvent]]] = {"stored": BlockStored, "removed": BlockRemoved, "cleared": AllBlocksCleared}


class View(Protocol):
    """Shows what a subscriber tells."""

    def batch(self, batch: Batch) -> None: ...

    def reset(self, reset: Reset) -> None: ...

    def gap(self, gap: Gap) -> None: ...

    def trust(self, source: str, rank: int, trust: Trust) -> None: ...


class HumanView:
    """Lines for people."""

    def __init__(self, console: Console, lines: LineFormat) -> None:
        self._console = console
        self._lines = lines

    def batch(self, batch: Batch) -> None:
        for line in self._lines.batch(batch):
            self._console.line(*line)

    def reset(self, reset: Reset) -> None:
        self._console.line(*self._lines.reset(reset))

    def gap(self, gap: Gap) -> None:
        self._console.line(*self._lines.gap(gap))

    def trust(self, source: str, rank: int, trust: Trust) -> None:
        self._console.line(*self._lines.trust(source, rank, trust))


class JsonView:
    """Objects for programs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def batch(self, batch: Batch) -> None:
        self._console.data(objects.encode(batch))

    def reset(self, reset: Reset) -> None:
        self._console.data(objects.encode(reset))

    def gap(self, gap: Gap) -> None:
        self._console.data(objects.encode(gap))

    def trust(self, source: str, rank: int, trust: Trust) -> None:
        self._console.data(objects.encode_trust(source, rank, trust))


class Filter:
    """Which events are shown. Without a wish all are, and batches without events too."""

    def __init__(self, kinds: tuple[type[KVEvent], ...] | None, medium: str | None) -> None:
        self._kinds = kinds
        self._medium = medium.upper() if medium else None

    def apply(self, batch: Batch) -> Batch | None:
        """The batch with the wanted events only; None when it has none."""
        if self._kinds is None and self._medium is None:
            return batch
        events = [event for event in batch.events if self._admits(event)]
        return msgspec.structs.replace(batch, events=events) if events else None

    def _admits(self, event: KVEvent) -> bool:
        if self._kinds is not None and not isinstance(event, self._kinds):
            return False
        if self._medium is None or isinstance(event, AllBlocksCleared):
            return True
        # Before vLLM 0.10.2 and SGLang 0.5.9 nobody named a medium, and there was only one.
        return (event.medium or MEDIUM_GPU).upper() == self._medium


class Tail:
    """Shows deliveries until as many batches were shown as wanted."""

    def __init__(self, view: View, chosen: Filter, *, quiet: bool, count: int | None) -> None:
        self._view = view
        self._filter = chosen
        self._quiet = quiet
        self._left = count

    def show(self, delivery: Batch | Reset | Gap) -> bool:
        """Show one delivery; False when that was the last one wanted."""
        if isinstance(delivery, Reset):
            self._view.reset(delivery)
        elif isinstance(delivery, Gap):
            self._view.gap(delivery)
        elif (batch := self._filter.apply(delivery)) is not None:
            if not self._quiet:
                self._view.batch(batch)
            self._left = None if self._left is None else self._left - 1
        return self._left != 0

    def show_trust(self, changes: list[tuple[str, int, Trust]]) -> None:
        """Show changes of trust."""
        for source, rank, trust in changes:
            self._view.trust(source, rank, trust)


def run(args: Namespace) -> int:
    """Follow the engine until told to stop."""
    console = Console()
    with Stop() as stop:
        sources = sources_of(args)
        report_missing(args, console)
        with Subscriber(sources) as subscriber:
            following = Following(subscriber, args, stop)
            _follow(following, _tail(args, console), TrustWatch(subscriber), console)
            return following.summarize(console)


def _follow(following: Following, tail: Tail, watch: TrustWatch, console: Console) -> None:
    for delivery in following:
        if delivery is None:
            tail.show_trust(watch.changes())
            console.check_reader()
        elif not tail.show(delivery):
            return


def _tail(args: Namespace, console: Console) -> Tail:
    width = len(f"{name_of(args)}/{args.ranks - 1}")
    view: View = JsonView(console) if args.output == "json" else HumanView(console, LineFormat(width, args.detail))
    kinds = tuple(KINDS[name] for name in args.type) if args.type else None
    return Tail(view, Filter(kinds, args.medium), quiet=args.detail == "quiet", count=args.count)


def _types(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(KINDS)}")
    return names


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    options.add_stream(parser)
    options.add_end(parser)
    parser.add_argument(
        "--type", type=_types, metavar="TYPE[,TYPE]", help="show events of these types only: stored, removed, cleared"
    )
    parser.add_argument("--medium", metavar="M", help="events on this medium, such as GPU; those that name none count as GPU")
    options.add_output(parser, "one JSON object per line, with token ids")
    detail = parser.add_mutually_exclusive_group()
    levels: tuple[tuple[Detail, tuple[str, ...], str], ...] = (
        ("quiet", ("-q", "--quiet"), "show resets, gaps and changes of trust only"),
        ("events", ("-v", "--verbose"), "show each event on a line of its own, without token ids"),
        ("tokens", ("--token-ids",), "show each event with its token ids, which are the users' prompts"),
    )
    for level, flags, text in levels:
        detail.add_argument(*flags, dest="detail", action="store_const", const=level, default="batches", help=text)


COMMAND: Final = Command(
    "tail",
    "show every event of an engine, once and in order, as it happens",
    "Show every event of an engine, once and in order, as it happens: what was missed is fetched by replay. Stop with Ctrl-C.",
    """\
  kvevents tail tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
  kvevents tail 10.0.0.7:5557 --replay 10.0.0.7:5558 --source-name pod-7
  kvevents tail 10.0.0.7:5557 --replay 10.0.0.7:5567 --ranks 4 --type removed,cleared
  kvevents tail 10.0.0.7:5557 --no-replay -o json --count 100 | jq .events
  kvevents tail 10.0.0.7:5557 --replay 10.0.0.7:5558 --curve-key router.key_secret --curve-server-key engine-0.key
  kvevents tail 10.0.0.7:5557 --replay 10.0.0.7:5558 --quiet --idle-timeout 60      does it send, and is anything lost?
""",
    add_arguments,
    run,
)
