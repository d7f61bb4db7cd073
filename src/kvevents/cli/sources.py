"""From the arguments of the command line to sources."""

from __future__ import annotations

import socket
from argparse import Namespace
from contextlib import closing
from typing import Final

from kvevents.cli.console import Console, Span
from kvevents.cli.options import curve_of
from kvevents.endpoints import split_tcp
from kvevents.stream import Source

CONNECT_SECONDS: Final = 1.0
"""How long the first attempt to connect may take. The subscriber's own attempts go on after it."""


def name_of(args: Namespace) -> str:
    """What the engine is called in deliveries: its name, else its address."""
    name: str | None = args.source_name
    return name or str(args.endpoint).removeprefix("tcp://")


def sources_of(args: Namespace) -> list[Source]:
    """One source per rank; ports of both endpoints count up from rank 0. Raises `ConfigError` when they run out.

    No replay endpoint is looked for: a port that answers may be another engine's, whose history would be taken for this one's.
    """
    source = Source(
        args.endpoint, args.replay, topic=args.topic_prefix, name=name_of(args), bind=args.bind, curve=curve_of(args)
    )
    return source.ranks(args.ranks)


def report_missing(args: Namespace, console: Console) -> None:
    """Note what is missing from the start: an engine that does not listen yet, and a replay endpoint."""
    fault = None if args.bind else _connection_fault(args.endpoint)
    if fault is not None:
        console.note(Span(f"waiting for {args.endpoint}: {fault}", "warn"))
    if args.replay is None and not args.no_replay:
        text = "no replay endpoint given: lost batches stay lost; add --replay tcp://HOST:PORT"
        search = "" if args.bind else f" (`kvevents doctor {args.endpoint}` looks for it)"
        console.note(Span(f"{text}{search}, or --no-replay", "warn"))


def _connection_fault(endpoint: str) -> str | None:
    """Why nothing can be connected to; None when something accepts, and for endpoints that are not TCP."""
    found = split_tcp(endpoint)
    if found is None:
        return None
    try:
        connection = socket.create_connection((found[0].strip("[]"), found[1]), CONNECT_SECONDS)
    except ConnectionRefusedError:
        return "nothing listens there yet"
    except OSError as error:
        return str(error.strerror or error)
    with closing(connection):
        return None
