"""`kvevents relay`: an engine's stream with full history, for any number of consumers."""

from __future__ import annotations

import logging
import math
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from kvevents import prometheus
from kvevents.cli import logs, options
from kvevents.cli.allocator import giving_back
from kvevents.cli.checkup.address import BINDS, BOTH_CONNECT
from kvevents.cli.command import OK, Command, CommandLineError
from kvevents.cli.settings import Form, Given
from kvevents.cli.stopping import Stop
from kvevents.stream import Trust

if TYPE_CHECKING:
    from kvevents.cli.relay_config import RelayConfig
    from kvevents.relay import RelayStatus
    from kvevents.subscriber import StreamStatus

log = logging.getLogger("kvevents.relay")

LOOK_SECONDS: Final = 0.5
"""Between two looks at whether something has changed."""
HINT_SECONDS: Final = 5.0
"""How long an upstream may be without its first connection before the usual reason is logged."""


def run(args: Namespace) -> int:
    """Relay until SIGTERM or Ctrl-C."""
    from kvevents.relay import Relay, metrics  # noqa: PLC0415 - late, since it needs the compiled module

    given: Given[RelayConfig] = args.form.read(args)
    if "upstreams" not in given:
        raise CommandLineError("there is nothing to follow; name an engine as ENDPOINT[,REPLAY], or upstreams in --config")
    config = given.settings()
    settings = config.relay()
    logs.to_stderr(args)
    if config.metrics_port is not None:
        prometheus.require()  # before anything is bound
    with Stop() as stop, giving_back(), ExitStack() as closing:
        relay = closing.enter_context(Relay(settings))
        if config.metrics_port is not None:
            closing.callback(metrics.serve(relay.status, config.metrics_port, config.metrics_host))
        until = None if args.duration is None else time.monotonic() + args.duration
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
    if status.history is not None and status.history.unavailable_reason:
        words["history"] = f"lost: {status.history.unavailable_reason}"
    return words


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this command. Raises `MissingDependencyError`."""
    from kvevents.cli.relay_config import RelayConfig  # noqa: PLC0415 - late, since it needs the compiled module

    form = Form(
        RelayConfig,
        "relay",
        flags={
            "curve.key_file": "--curve-key",
            "curve.server_key": "--curve-server-key",
            "curve.allowed": "--curve-allow",
            "tokens": "--token-policy",
        },
    )
    form.add_positional(parser, "upstreams", "[NAME[:RANK]=]ENDPOINT[,REPLAY]", options.engine)
    form.add(parser, "ranks", "topic_prefix", "upstream_curve_key", "upstream_curve_server_key")
    out = parser.add_argument_group("what consumers get")
    form.add(out, "endpoint", "replay_endpoint", "snapshot_endpoint", "topic", "dialect", "tokens", "heartbeat")
    form.add(out, "buffer_steps", "hwm", "curve.key_file", "curve.server_key", "curve.allowed")
    form.add(parser.add_argument_group("what outlives the process"), "journal")
    seen = parser.add_argument_group("what operators see")
    form.add(seen, "metrics_port", "metrics_host")
    seen.add_argument("--duration", type=options.seconds, metavar="S", help="end after S seconds")
    logs.add_arguments(parser)
    form.add_rest(parser)


COMMAND: Final = Command(
    "relay",
    "give an engine's stream full history, across restarts",
    "Follow an engine, and publish its stream again with full history: a consumer that comes late, or comes back, is told "
    "first what is live, and is exact. With --journal the relay itself may be killed: it goes on with the same numbers when "
    "the engine is proven to be the same. Several upstreams become one stream: tiers of a worker, or ranks of an engine. "
    "Consumers need to know nothing of relays; those of kvevents compare digests and know that they are exact.",
    """\
  kvevents relay tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 --journal /var/lib/kvevents/relay
  kvevents relay 10.0.0.7:5557,10.0.0.7:5558 --endpoint tcp://*:6557 --replay-endpoint tcp://*:6558 --token-policy hash
  kvevents relay gpu=127.0.0.1:5557,127.0.0.1:5558 cpu=127.0.0.1:5657,127.0.0.1:5658   two tiers of one worker
  kvevents relay engine=127.0.0.1:5557,127.0.0.1:5567 --ranks 4 --dialect vllm-0.22     four ranks, for an older router
""",
    add_arguments,
    run,
)
