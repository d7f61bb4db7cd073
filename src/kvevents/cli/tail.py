"""`kvevents tail`: print the events of an engine in order, as they happen."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Final

import msgspec

from kvevents.cli.console import Console
from kvevents.cli.delivery_output import DeliveryLoop, LineFormat, delivery_record, subscribe, trust_record
from kvevents.cli.options import add_limits, add_source, note_missing_endpoints, read_sources
from kvevents.cli.output import DATA_FORMATS, add_output, write_record
from kvevents.cli.signals import StopSignal
from kvevents.errors import ConfigError
from kvevents.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from kvevents.stream import Batch, Delivery

DESCRIPTION: Final = (
    "Print the events of an engine, each once and in order, as they happen. Batches that were lost are requested from its "
    "replay endpoint. Ctrl-C ends the command."
)
EXAMPLES: Final = """\
  kvevents tail 10.0.0.7:5557 --replay 10.0.0.7:5567 --ranks 4 --type removed,cleared
  kvevents tail 10.0.0.7:5557 --no-replay -o json -n 100 | jq -c '.events // empty'
  kvevents tail 10.0.0.7:5557 --replay 10.0.0.7:5558 --curve-key router.key_secret --curve-server-key engine-0.key
  kvevents tail 10.0.0.7:5557 --replay 10.0.0.7:5558 --quiet --idle-timeout 60      report losses only
"""

EVENT_TYPES: Final[dict[str, type[KVEvent]]] = {"stored": BlockStored, "removed": BlockRemoved, "cleared": AllBlocksCleared}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add_source(parser)
    add_limits(parser)
    text = "print only events of these types: stored, removed, cleared (default: all)"
    parser.add_argument("--type", type=_parse_event_types, metavar="TYPE[,TYPE]", help=text)
    parser.add_argument("--medium", help="print only events on this medium; events without one are on the GPU (default: all)")
    add_output(parser, "one object per batch, gap, reset or change of trust, with token ids; wide has a line for each event")
    detail = parser.add_mutually_exclusive_group()
    detail.add_argument("-q", "--quiet", action="store_true", help="print resets, gaps and changes of trust only")
    text = "print each event with its token ids, from which prompts can be read"
    detail.add_argument("--token-ids", action="store_true", help=text)


def _parse_event_types(text: str) -> tuple[type[KVEvent], ...]:
    try:
        return tuple(EVENT_TYPES[name] for name in text.split(","))
    except KeyError as error:
        raise ConfigError(f"invalid event type {error}: expected {', '.join(EVENT_TYPES)}") from error


def run(args: Namespace) -> int:
    """Print deliveries until a limit or a signal ends the command."""
    console = Console()
    sources = read_sources(args)
    width = max(len(f"{source.name}/{source.rank}") for source in sources)
    lines = LineFormat(width, "tokens" if args.token_ids else "events" if args.output == "wide" else "batches")

    def show(delivery: Delivery) -> None:
        if args.output in DATA_FORMATS:
            write_record(delivery_record(delivery), args.output, console)
        else:
            console.lines(lines.delivery(delivery))

    remaining: int | None = args.count
    with StopSignal() as stop:
        note_missing_endpoints(args, console)
        with subscribe(sources) as subscriber:
            deliveries = DeliveryLoop(subscriber, args, stop)
            for delivery in deliveries:
                if delivery is None:
                    # Trust already reflects deliveries that are not printed yet, so print changes of trust only after them.
                    for (source, rank), trust in subscriber.trust_changes():
                        if not write_record(trust_record(source, rank, trust), args.output, console):
                            console.line(*lines.trust(source, rank, trust))
                    console.check_reader()
                elif not isinstance(delivery, Batch):
                    show(delivery)
                elif (batch := select_events(delivery, args.type, args.medium)) is not None:
                    if not args.quiet:
                        show(batch)
                    if remaining is not None:
                        remaining -= 1
                        if not remaining:
                            break
            return deliveries.print_summary(console)


def select_events(batch: Batch, types: tuple[type[KVEvent], ...] | None, medium: str | None) -> Batch | None:
    """Return the batch with only the events that have one of `types` and `medium` (None: any), or None without an event."""
    if types is None and medium is None:
        return batch

    def is_selected(event: KVEvent) -> bool:
        # Before vLLM 0.10.2 and SGLang 0.5.9, events had no medium, because the GPU was the only medium.
        has_medium = isinstance(event, AllBlocksCleared) or (event.medium or MEDIUM_GPU).upper() == (medium or "").upper()
        return (types is None or isinstance(event, types)) and (medium is None or has_medium)

    events = list(filter(is_selected, batch.events))
    return msgspec.structs.replace(batch, events=events) if events else None
