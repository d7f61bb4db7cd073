"""What is known of each set-up of an engine, as the table of docs/guides/stock-engines.md has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from kvevents import AllBlocksCleared, Source, Subscriber
from kvevents.events import EventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.relay import Relay
from kvevents.relay.settings import RelaySettings
from kvevents.stream import DegradedReason
from publisher_cases import ANY, run_publisher
from relay_cases import block
from service_cases import wait_for

BUFFER: Final = 4
"""Batches for replay, in place of 10,000."""
SETUPS: Final[dict[str, dict[str, Any]]] = {
    "no replay": {"compact": False},
    "ports in settings": {"replay_endpoint": ANY, "compact": False},
    "the engine names the ports": {"replay_endpoint": ANY, "compact": False},
    "plugin": {"replay_endpoint": ANY, "heartbeat": 0.2},
}
EXPECTED: Final = {
    "no replay": (DegradedReason.NO_REPLAY, DegradedReason.NO_REPLAY),
    "ports in settings": (DegradedReason.REPLAY_UNPROVEN, DegradedReason.LOST),
    "the engine names the ports": (None, DegradedReason.LOST),
    "plugin": (None, None),
}
"""Why an idle engine is not EXACT, and one that a consumer joins late; None if it is EXACT."""


@contextmanager
def run_setup(name: str, batches: int) -> Iterator[tuple[ZmqEventPublisher, Source]]:
    """Yield an engine that has published batches and is idle now, and how a consumer follows it."""
    with run_publisher(buffer_steps=BUFFER, **SETUPS[name]) as publisher:
        for number in range(batches):
            publisher.publish(EventBatch(float(number), [block(number + 1)]))
        wait_for("the batches to be sent", lambda: publisher.stats().published == batches)
        proven = name == "the engine names the ports"
        yield publisher, Source(publisher.endpoint, publisher.replay_endpoint, replay_is_proven=proven)


def wait_for_trust(subscriber: Subscriber, reason: DegradedReason | None) -> None:
    """Wait until trust is DEGRADED for a reason, or EXACT."""

    def is_so() -> bool:
        subscriber.receive_many(timeout=0.1)
        trust = subscriber.trust()
        return trust.name == "EXACT" if reason is None else trust.name == "DEGRADED" and reason.value in trust.reason

    wait_for(str(reason or "EXACT"), is_so)


@pytest.mark.parametrize("name", SETUPS)
def test_an_idle_engine_is_known_as_its_setup_allows(name: str) -> None:
    with run_setup(name, BUFFER - 1) as (publisher, source), Subscriber(source) as subscriber:
        wait_for_trust(subscriber, EXPECTED[name][0])
        if name == "ports in settings":
            publisher.publish(EventBatch(9.0, []))
            wait_for_trust(subscriber, None)


@pytest.mark.parametrize("name", SETUPS)
def test_a_late_consumer_knows_what_the_history_of_the_setup_has(name: str) -> None:
    """Without full history, the stream is exact again after the engine has cleared its cache."""
    with run_setup(name, 3 * BUFFER) as (publisher, source), Subscriber(source) as subscriber:
        wait_for_trust(subscriber, EXPECTED[name][1])
        if EXPECTED[name][1] is DegradedReason.LOST:
            publisher.publish(EventBatch(9.0, [AllBlocksCleared()]))
            wait_for_trust(subscriber, None)


def test_a_relay_gives_late_consumers_the_history_of_an_engine_without_the_plugin() -> None:
    with run_setup("ports in settings", 1) as (publisher, source):
        relayed = RelaySettings(upstreams=(source,), endpoint=ANY, replay_endpoint=ANY, heartbeat=0.2)
        with Relay(relayed) as relay:

            def turn_until(what: str, is_so: Callable[[], bool]) -> None:
                def turn() -> bool:
                    relay.turn(0.01)
                    return is_so()

                wait_for(what, turn)

            turn_until("the subscription", lambda: publisher.stats().subscribers == 1)
            for number in range(1, 3 * BUFFER):
                turn_until("the newest batch", lambda count=number: relay.status().forwarded_batches == count)  # type: ignore[misc]
                publisher.publish(EventBatch(float(number), [block(number + 1)]))
            with Subscriber(Source(relay.endpoint, relay.replay_endpoint)) as subscriber:

                def is_exact() -> bool:
                    subscriber.receive_many(timeout=0)
                    return subscriber.trust().name == "EXACT"

                turn_until("EXACT", is_exact)
