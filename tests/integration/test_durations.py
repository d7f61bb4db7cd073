"""Public functions that wait refuse nan and infinite numbers: with nan, a wait would have no end, or none at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import pytest

from kvevents import AsyncSubscriber, Source, Subscriber
from kvevents.client import AsyncClient, Client
from kvevents.errors import ConfigError
from kvevents.publisher import ZmqEventPublisher
from kvevents.testing import FaultProxy, TapePlayer, VirtualClock

CLOSED: Final = "http://127.0.0.1:1"
WAITS: Final[dict[str, Callable[[Any, float], Any]]] = {
    "receive": lambda receiver, seconds: receiver.receive(seconds),
    "receive_many": lambda receiver, seconds: receiver.receive_many(timeout=seconds),
    "wait_for": lambda receiver, seconds: receiver.wait_for(timeout=seconds),
}
pytestmark = pytest.mark.parametrize("seconds", [float("nan"), float("inf")], ids=str)


def refuses() -> Any:
    return pytest.raises(ConfigError, match=r"invalid duration (nan|inf): expected a finite number of seconds")


@pytest.mark.parametrize("wait", WAITS)
def test_subscribers(wait: str, seconds: float) -> None:
    async def wait_in_a_task() -> None:
        async with AsyncSubscriber(Source("tcp://127.0.0.1:1")) as subscriber:
            await WAITS[wait](subscriber, seconds)

    with Subscriber(Source("tcp://127.0.0.1:1")) as subscriber, refuses():
        WAITS[wait](subscriber, seconds)
    with refuses():
        asyncio.run(wait_in_a_task())


def test_a_publisher_that_refuses_to_end_goes_on(seconds: float) -> None:
    publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:*")
    with refuses():
        publisher.shutdown(seconds)
    assert publisher.shutdown(0.0).sent == 0


def test_clients(seconds: float) -> None:
    async def wait_in_a_task() -> None:
        async with AsyncClient(CLOSED) as client:
            await client.wait_ready(seconds)

    with refuses():
        asyncio.run(wait_in_a_task())
    with Client(CLOSED, deadline=seconds) as client, refuses():
        client.ready()
    with Client(CLOSED) as client:
        with refuses():
            client.ready(deadline=seconds)
        with refuses():
            client.wait_ready(seconds)


def test_test_tools(seconds: float) -> None:
    with TapePlayer([]) as tape, FaultProxy(tape.endpoint) as proxy:
        for wait in (
            lambda: tape.wait_for_subscriber(seconds),
            lambda: tape.wait_until(lambda _: False, seconds),
            lambda: proxy.wait_until(lambda _: False, seconds),
            lambda: proxy.delay(seconds),
            lambda: VirtualClock().advance(seconds),
        ):
            with refuses():
                wait()
        assert not tape.wait_until(lambda _: False, -1.0)  # the rest of a time that has passed
