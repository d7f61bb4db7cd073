"""From the command line's words to sources; where no replay endpoint is named, one is looked for."""

from __future__ import annotations

import math
import socket
import time
from argparse import Namespace
from contextlib import closing
from typing import Final

from kvevents.cli.asking import first_to_answer
from kvevents.cli.console import Console, Span
from kvevents.cli.options import curve_of
from kvevents.cli.stopping import Stop
from kvevents.endpoints import MAX_PORT, split_tcp
from kvevents.stream import Source

DEFAULT_REPLAY_PORT: Final = 5558
"""What both engines' documentation suggests (`replay_endpoint="tcp://*:5558"`)."""
KNOCK_SECONDS: Final = 1.0
"""How long one attempt to connect may take while waiting for an engine to start."""
KNOCK_PAUSE: Final = 0.25


def name_of(args: Namespace) -> str:
    """What the engine is called in deliveries: its name, else its address."""
    name: str | None = args.name
    return name or str(args.endpoint).removeprefix("tcp://")


def sources_of(args: Namespace, replay: str | None) -> list[Source]:
    """One source per rank; ports of both endpoints count up from rank 0. Raises `ConfigError` when they run out."""
    source = Source(args.endpoint, replay, topic=args.topic, name=name_of(args), bind=args.bind, curve=curve_of(args))
    return source.ranks(args.ranks)


def replay_candidates(endpoint: str, ranks: int = 1) -> list[str]:
    """Where the replay endpoint of a `tcp://` endpoint might be: behind the ports of its ranks, or at the default port."""
    found = split_tcp(endpoint)
    if found is None:
        return []
    host, port = found
    taken = range(port, port + ranks)
    ports = dict.fromkeys(each for each in (port + ranks, DEFAULT_REPLAY_PORT) if each not in taken and each <= MAX_PORT)
    return [f"tcp://{host}:{each}" for each in ports]


def find_replay(args: Namespace, console: Console, stop: Stop) -> tuple[str | None, bool]:
    """The replay endpoint to use, and whether to go on: waiting for an engine to start may have been stopped.

    An engine that is not there yet cannot be asked, so this waits for it: replay brings all that it says meanwhile.
    """
    curve = curve_of(args)  # read here too, since the wait for an engine may be long
    if args.replay or args.no_replay:
        return args.replay, True
    candidates = [] if args.bind else replay_candidates(args.endpoint, args.ranks)
    if candidates and not _wait_until_listening(args, console, stop):
        return None, False
    found = first_to_answer(candidates, curve=curve)
    if found is None:
        _say_none(console, candidates)
    else:
        guess = (
            "" if found == candidates[0] else ", the engines' default; name another with --replay if it is not this engine's"
        )
        console.note(Span(f"replay endpoint: {found} answers{guess}", "dim"))
    return found, True


def _say_none(console: Console, candidates: list[str]) -> None:
    tried = f" ({' and '.join(candidates)}: no answer)" if candidates else ""
    text = f"no replay endpoint{tried}: losses are told but cannot be mended; name one with --replay"
    console.note(Span(text, "warn"))


def _wait_until_listening(args: Namespace, console: Console, stop: Stop) -> bool:
    endpoint, limits = args.endpoint, (args.idle, args.seconds)
    until = min((stop.began + limit for limit in limits if limit is not None), default=math.inf)
    told = False
    while not stop.requested and time.monotonic() < until:
        fault = _knock(endpoint)
        if fault is None:
            return True
        if not told:
            console.note(Span(f"waiting for {endpoint}: {fault}", "warn"))
            told = True
        console.check_reader()
        time.sleep(KNOCK_PAUSE)
    return False


def _knock(endpoint: str) -> str | None:
    """Why nothing can be connected to; None when something accepts."""
    found = split_tcp(endpoint)
    if found is None:
        return None
    try:
        connection = socket.create_connection((found[0].strip("[]"), found[1]), KNOCK_SECONDS)
    except ConnectionRefusedError:
        return "nothing listens there yet"
    except OSError as error:
        return str(error.strerror or error)
    with closing(connection):
        return None
