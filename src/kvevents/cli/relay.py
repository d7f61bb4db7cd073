"""`kvevents relay`: an engine's stream with full history, for any number of consumers."""

from __future__ import annotations

import argparse
import logging
import math
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from kvevents import scraping
from kvevents.cli import logs, options
from kvevents.cli.allocator import giving_back
from kvevents.cli.checkup.address import BINDS, BOTH_CONNECT
from kvevents.cli.command import OK, Command
from kvevents.cli.serve import port
from kvevents.cli.stopping import Stop
from kvevents.errors import MissingDependencyError
from kvevents.stream import Source, Trust

if TYPE_CHECKING:
    from kvevents.relay import RelaySettings, RelayStatus
    from kvevents.subscriber import StreamStatus

log = logging.getLogger("kvevents.relay")

LOOK_SECONDS: Final = 0.5
"""Between two looks at whether something has changed."""
HINT_SECONDS: Final = 5.0
"""How long an upstream may be without its first connection before the usual reason is logged."""


def upstream(text: str) -> Source:
    """`[NAME[:RANK]=]ENDPOINT[,REPLAY_ENDPOINT]`."""
    head, separator, places = text.partition("=")
    if not separator:
        head, places = "", text
    name, colon, rank = head.rpartition(":")
    if not colon:
        name, rank = head, "0"
    first, _, replay = places.partition(",")
    if not rank.isdecimal():
        raise ArgumentTypeError(
            f"{text!r} is no upstream; write ENDPOINT[,REPLAY_ENDPOINT] or NAME:RANK=ENDPOINT[,REPLAY_ENDPOINT]"
        )
    return Source(
        options.endpoint(first),
        options.endpoint(replay) if replay else None,
        name=name or first.removeprefix("tcp://"),
        rank=int(rank),
    )


def run(args: Namespace) -> int:
    """Relay until SIGTERM or Ctrl-C."""
    try:
        from kvevents.relay import Relay  # noqa: PLC0415 - late, since it needs the compiled module
    except ImportError as error:
        raise MissingDependencyError(f"a relay needs {error.name or error}; install a wheel of kvevents") from error
    settings = _settings(args)
    logs.to_stderr(args)
    if args.metrics_port is not None:
        scraping.require()  # before anything is bound
    with Stop() as stop, giving_back(), ExitStack() as closing:
        relay = closing.enter_context(Relay(settings))
        if args.metrics_port is not None:
            from kvevents.relay import metrics  # noqa: PLC0415 - late, as the relay itself

            closing.callback(metrics.serve(relay.status, args.metrics_port, args.metrics_host))
        until = None if args.seconds is None else time.monotonic() + args.seconds
        teller = Teller(relay.status)
        relay.run(lambda: stop.requested or teller.look() or (until is not None and time.monotonic() > until))
    return OK


class Teller:
    """One line for each change of state."""

    def __init__(self, status: Callable[[], RelayStatus], clock: Callable[[], float] = time.monotonic) -> None:
        self._status: Final = status
        self._clock: Final = clock
        self._look_at = 0.0
        self._told: dict[str, str] = {}
        self._waiting: dict[tuple[str, int], float] = {}
        """Since when each upstream has had no connection; infinity once it had one, or was warned about."""

    def look(self) -> bool:
        """Log what has changed. Never a reason to stop."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            status = self._status()
            self._hint(status, now)
            for what, words in _words(status).items():
                before, self._told[what] = self._told.get(what), words
                if words != before:
                    log.log(logging.INFO if "memory" not in words else logging.WARNING, "%s: %s", what, words)
        return False

    def _hint(self, status: RelayStatus, now: float) -> None:
        """Log once per upstream why an engine that runs may still not be there."""
        for each in status.upstreams:
            since = self._waiting.setdefault((each.source, each.rank), now)
            if each.trust != Trust.CONNECTING:
                self._waiting[each.source, each.rank] = math.inf
            elif now - since >= HINT_SECONDS:
                self._waiting[each.source, each.rank] = math.inf
                log.warning(
                    "%s rank %d: no connection to %s yet; %s: %s", each.source, each.rank, each.endpoint, BOTH_CONNECT, BINDS
                )


def _name(upstream: StreamStatus) -> str:
    return f"{upstream.source} rank {upstream.rank}"


def _words(status: RelayStatus) -> dict[str, str]:
    words = {_name(each): str(each.trust) for each in status.upstreams}
    if status.journal is not None:
        words["journal"] = (
            f"{status.journal.state} ({status.journal.reason})" if status.journal.reason else status.journal.state
        )
    if status.history is not None and status.history.lost:
        words["history"] = f"lost: {status.history.lost}"
    return words


def _settings(args: Namespace) -> RelaySettings:
    from kvevents.relay import RelaySettings  # noqa: PLC0415 - late, as above

    given: dict[str, Any] = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    keys = options.curve_of(argparse.Namespace(key=args.upstream_key, server_key=args.upstream_server_key, allow=None))
    ranks = [source for each in args.upstreams for source in each.ranks(args.ranks)]
    sources = tuple(
        Source(each.endpoint, each.replay_endpoint, args.prefix, each.name, each.rank, curve=keys) for each in ranks
    )
    return RelaySettings(upstreams=sources, heartbeat=args.heartbeat, curve=options.curve_of(args), **given)


_SETTINGS: Final = (
    *("endpoint", "replay_endpoint", "snapshot_endpoint", "topic", "dialect", "tokens"),
    *("buffer_steps", "hwm", "journal", "fsync"),
)
"""Options that are settings of the same name."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument(
        "upstreams",
        metavar="[NAME[:RANK]=]ENDPOINT[,REPLAY]",
        type=upstream,
        nargs="+",
        help="where the engine publishes, and answers replay requests; several become one stream",
    )
    parser.add_argument(
        "--ranks", type=options.count, default=1, metavar="N", help="data-parallel ranks of each, on ports counted up"
    )
    parser.add_argument("--prefix", default="", metavar="TOPIC", help="receive topics that begin with this only")
    parser.add_argument("--upstream-key", metavar="FILE", help="own CURVE keys towards the engine: a NAME.key_secret")
    parser.add_argument("--upstream-server-key", metavar="FILE|KEY", help="the engine's public key")
    _add_what_consumers_get(parser.add_argument_group("what consumers get"))
    _add_what_lasts(parser.add_argument_group("what outlives the process"))
    _add_what_operators_see(parser.add_argument_group("what operators see"))
    logs.add_arguments(parser)


def _add_what_consumers_get(out: options.Group) -> None:
    out.add_argument("--endpoint", type=options.endpoint, help="where to publish (default: tcp://127.0.0.1:6557)")
    out.add_argument(
        "--replay-endpoint",
        type=options.endpoint,
        metavar="ENDPOINT",
        help="where to answer replay requests (default: port 6558)",
    )
    out.add_argument(
        "--snapshot-endpoint",
        type=options.endpoint,
        metavar="ENDPOINT",
        help="where to answer SGLang's snapshot-v1 (default: nowhere)",
    )
    out.add_argument("--topic", help="first frame of every batch (default: the engine's)")
    out.add_argument("--dialect", metavar="ENGINE-RELEASE", help="be understood as this release (default: as they came)")
    out.add_argument(
        "--tokens",
        choices=("keep", "hash", "drop"),
        help="send token ids on, put keys in their place that prompts still match, or numbers of no meaning (default: keep)",
    )
    out.add_argument(
        "--heartbeat", type=options.seconds, default=5.0, metavar="S", help="seconds between heartbeats (default: 5)"
    )
    out.add_argument("--buffer-steps", type=options.count, metavar="N", help="batches kept as they were (default: 10000)")
    out.add_argument(
        "--hwm", type=options.count, metavar="N", help="batches that a slow consumer may be behind (default: 100000)"
    )
    options.add_keys(out)


def _add_what_lasts(kept: options.Group) -> None:
    kept.add_argument("--journal", metavar="FOLDER", help="where; without it a restart begins anew")
    kept.add_argument(
        "--fsync",
        choices=("always", "interval", "never"),
        help="when the disk must have what was written, should the machine lose its power (default: interval, 1 s)",
    )


def _add_what_operators_see(seen: options.Group) -> None:
    seen.add_argument("--metrics-port", type=port, metavar="PORT", help="where Prometheus may scrape (default: nowhere)")
    seen.add_argument("--metrics-host", default="127.0.0.1", metavar="ADDRESS", help="at which address (default: 127.0.0.1)")
    seen.add_argument("--seconds", type=options.seconds, metavar="S", help="end after S seconds")


COMMAND: Final = Command(
    "relay",
    "give an engine's stream full history, across restarts",
    "Follow an engine, and publish its stream again with full history: a consumer that comes late, or comes back, is told "
    "first what is live, and is exact. With --journal the relay itself may be killed: it goes on with the same numbers when "
    "the engine is proven to be the same. Several upstreams become one stream: tiers of a worker, or ranks of an engine. "
    "Consumers need to know nothing of relays; those of kvevents compare digests and know that they are exact.",
    """\
  kvevents relay tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 --journal /var/lib/kvevents/relay
  kvevents relay 10.0.0.7:5557,10.0.0.7:5558 --endpoint tcp://*:6557 --replay-endpoint tcp://*:6558 --tokens hash
  kvevents relay gpu=127.0.0.1:5557,127.0.0.1:5558 cpu=127.0.0.1:5657,127.0.0.1:5658   two tiers of one worker
  kvevents relay engine=127.0.0.1:5557,127.0.0.1:5567 --ranks 4 --dialect vllm-0.22     four ranks, for an older router
""",
    add_arguments,
    run,
)
