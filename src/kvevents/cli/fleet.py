"""`kvevents register`, `drain`, `unregister`, `sources` and `reservations`: the fleet of a service."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console, Line, Span, format_table
from kvevents.cli.options import add_engine
from kvevents.cli.output import add_output, write_record
from kvevents.cli.service_options import add_scope, add_service, make_client, scope_of
from kvevents.cli.top_view import COLUMNS, WIDE_COLUMNS, fault_lines, source_table
from kvevents.cli.values import endpoint, positive_int, whole_number
from kvevents.client import Client, schemas
from kvevents.client.polling import PolledSource, sort_sources
from kvevents.diagnosis.text_format import duration
from kvevents.errors import ConfigError, ExternalError
from kvevents.settings import suggestion


class FleetCommand(NamedTuple):
    """A command about the fleet of a service."""

    DESCRIPTION: str
    EXAMPLES: str
    add: Callable[[ArgumentParser], None]
    """Declares the options of the command."""
    ask: Callable[[Client, Namespace], Any]
    """Sends the request, and returns the service's answer."""
    show: Callable[[Any, bool], list[Line]]
    """Returns the lines that show an answer; if the second argument is True, with the columns of `--output wide`."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options of this command."""
        self.add(parser)
        add_service(parser)
        add_output(parser, "the service's response")

    def run(self, args: Namespace) -> int:
        """Send the request to the service, and print the response."""
        with make_client(args) as client:
            answer = self.ask(client, args)
        console = Console()
        if not write_record(answer, args.output, console):
            console.lines(self.show(answer, args.output == "wide"))
        return ExitCode.OK


def _parse_label(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise ConfigError(f"invalid label {text!r}: expected KEY=VALUE")
    return key, value


# --- register and unregister


def _add_instance(parser: ArgumentParser, ranks: str, **model: Any) -> None:
    parser.add_argument("instance", metavar="NAME", help="name of the engine in answers")
    add_scope(parser, **model or {"required": True})
    parser.add_argument("--rank", type=whole_number, metavar="R", help=f"data-parallel rank (default: {ranks})")


def _add_register(parser: ArgumentParser) -> None:
    _add_instance(parser, "0; of a URL all ranks")
    add_engine(parser)
    parser.add_argument("--replay", type=endpoint, help="its replay endpoint (default: none)")
    parser.add_argument("--block-size", type=positive_int, help="tokens per block (default: as received)")
    parser.add_argument("--lease", type=positive_int, metavar="S", help="unregister it after S seconds unless it is renewed")
    parser.add_argument("--label", type=_parse_label, action="append", default=[], metavar="KEY=VALUE", help="can be repeated")


def _register(client: Client, args: Namespace) -> Any:
    is_url = args.endpoint.startswith("http")
    live, _, replay = args.endpoint.partition(",")
    return client.register(
        schemas.RegisterRequest(
            instance_id=args.instance,
            endpoint="" if is_url else live,
            url=args.endpoint if is_url else None,
            replay_endpoint=replay or args.replay,
            dp_rank=args.rank,
            block_size=args.block_size,
            lease_seconds=args.lease,
            labels=dict(args.label),
            **scope_of(args),
        )
    )


def _unregister(client: Client, args: Namespace) -> Any:
    return client.unregister(schemas.UnregisterRequest(instance_id=args.instance, dp_rank=args.rank, **scope_of(args)))


def _add_drain(parser: ArgumentParser) -> None:
    _add_instance(parser, "all", model="model (default: its own)")
    parser.add_argument("--end", action="store_true", help="let selections choose it again")


def _drain(client: Client, args: Namespace) -> Any:
    return client.drain(schemas.DrainRequest(instance=args.instance, rank=args.rank, draining=not args.end, **scope_of(args)))


def _show_drained(answer: schemas.DrainAnswer, _wide: bool) -> list[Line]:
    ranks = ", ".join(schemas.worker_name(answer.instance, rank) for rank in answer.ranks)
    return [[f"{ranks}: {'selections leave it out' if answer.draining else 'selections choose it again'}"]]


def _show_fields(answer: dict[str, Any], _wide: bool) -> list[Line]:
    width = max(map(len, answer), default=0)
    given = [(name, value if isinstance(value, list) else [value]) for name, value in answer.items() if value]
    return [[Span(f"{name:<{width}}  ", "dim"), ", ".join(map(str, values))] for name, values in given]


REGISTER: Final = FleetCommand(
    "Register an engine at a service, which follows its events from then on. Repeat it to renew a lease.",
    """\
  kvevents register engine-0 10.0.0.7:5557,5558 --model llama
  kvevents register engine-0 http://10.0.0.7:8000 --model llama --lease 60      the engine names its endpoints
  kvevents register engine-1 10.0.0.8:5557 --model llama --label zone=a --context prod
""",
    _add_register,
    _register,
    _show_fields,
)
UNREGISTER: Final = FleetCommand(
    "Unregister an engine, or one of its ranks: the service forgets its blocks.",
    """\
  kvevents unregister engine-0
  kvevents unregister engine-0 --model llama --rank 1
  kvevents unregister engine-0 --context prod
""",
    lambda parser: _add_instance(parser, "all", model="model (default: its own)"),
    _unregister,
    _show_fields,
)
DRAIN: Final = FleetCommand(
    "Exclude an engine, or one of its ranks, from selections, for example before maintenance. Its blocks stay in the index.",
    """\
  kvevents drain engine-0
  kvevents drain engine-0 --rank 1 --context prod
  kvevents drain engine-0 --end
""",
    _add_drain,
    _drain,
    _show_drained,
)

# --- sources and reservations


def _show_sources(answer: schemas.SourcesAnswer, wide: bool) -> list[Line]:
    sources = sort_sources(msgspec.convert(answer.sources, list[PolledSource], from_attributes=True), "name")
    columns = WIDE_COLUMNS if wide else COLUMNS
    shown = source_table(sources, time.time(), columns=columns) if sources else [["no engine is registered"]]
    return [*shown, *fault_lines(answer.faults)]


def _add_sources(parser: ArgumentParser) -> None:
    parser.add_argument("instance", nargs="?", metavar="NAME", help="name of one engine (default: all)")
    add_scope(parser, model="model (default: all)", default="all")


def _ask_sources(client: Client, args: Namespace) -> Any:
    scope = scope_of(args)
    answer = client.sources(**scope if args.instance is None else scope | {"instance": args.instance})
    if not answer.sources and not (ready := client.ready()).ready:
        why = "; ".join([ready.why, *(fault for faults in answer.faults.values() for fault in faults)])
        raise ExternalError(f"{client.url} knows no such engine, and is not ready: {why}")
    if not answer.sources and args.instance is not None:
        known = {source.instance for source in client.sources(**scope).sources}
        hint = suggestion(args.instance, known).removesuffix(";") or "; `kvevents sources` lists the engines"
        raise ExternalError(f"no engine {args.instance!r} is registered at {client.url}{hint}")
    return answer


def _show_reservations(answer: schemas.ReservationsAnswer | schemas.Reservation, wide: bool) -> list[Line]:
    titles = ("id", "worker", "model", "progress", "prompt", "uncached", "output", "expires in", "url")[: 9 if wide else 8]
    rows = [
        (
            Span(item.id, "name"),
            schemas.worker_name(item.instance, item.rank, item.tenant, item.group),
            item.model,
            item.progress,
            *(f"{count:,}" for count in (item.prompt_tokens, item.uncached_tokens, item.output_tokens)),
            duration(item.expires_in),
            item.url or "-",
        )[: len(titles)]
        for item in (answer.reservations if isinstance(answer, schemas.ReservationsAnswer) else [answer])
    ]
    return format_table(titles, rows, {"id", "worker", "model", "progress", "url"}) if rows else [["no reservation is open"]]


def _ask_reservations(client: Client, args: Namespace) -> Any:
    if args.id is not None:
        return client.reservation(args.id)
    return client.get("/v1/reservations", schemas.ReservationsAnswer, {"limit": str(args.limit)})


def _add_reservations(parser: ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", metavar="ID", help="one reservation (default: all that are open)")
    parser.add_argument("--limit", type=positive_int, default=100, help="show N of them")


SOURCES: Final = FleetCommand(
    "Print the engines that a service follows, how far each can be trusted, and why.",
    """\
  kvevents sources
  kvevents sources engine-0 --model llama -o yaml
  kvevents sources -o wide --context prod
""",
    _add_sources,
    _ask_sources,
    _show_sources,
)
RESERVATIONS: Final = FleetCommand(
    "Print the open reservations of a service, those that expire first at the top.",
    """\
  kvevents reservations
  kvevents reservations request-17 -o json
  kvevents reservations --limit 1000 -o wide
""",
    _add_reservations,
    _ask_reservations,
    _show_reservations,
)
