"""Closing subscribers from any thread: a waiting call ends, and nothing stays open or registered."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from discovery_cases import await_in_time
from kvevents.errors import ClosedError, UsageError
from kvevents.events import BlockRemoved
from kvevents.stream import Source, Trust
from kvevents.subscriber import AsyncSubscriber, Subscriber, ZmqTransport
from kvevents.testing.fake_transport import FakeTransport
from resource_cases import leave_nothing_open

DEADLINE = 60.0
NO_ENGINE = Source("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", name="e")
"""A source at which nothing listens, so no delivery ever arrives."""


def wait_in_receive(subscriber: Subscriber) -> None:
    """Wait in `receive`, which must raise."""
    with pytest.raises(ClosedError, match="Subscriber is closed"):
        subscriber.receive()


def wait_in_receive_many(subscriber: Subscriber) -> None:
    """Wait in `receive_many`, which must raise."""
    with pytest.raises(ClosedError, match="Subscriber is closed"):
        subscriber.receive_many()


def wait_in_iteration(subscriber: Subscriber) -> None:
    """Iterate; the iteration must end."""
    assert list(subscriber) == []


WAITS = pytest.mark.parametrize("wait", [wait_in_receive, wait_in_receive_many, wait_in_iteration])


def is_waiting(subscriber: Any) -> bool:
    """Return whether a call waits for messages."""
    return bool(subscriber._calls)


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


async def wait_until_begun(task: asyncio.Task[Any]) -> None:
    """Let a task run until it waits for messages that never come."""
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done


@WAITS
def test_another_thread_ends_a_waiting_call(wait: Callable[[Subscriber], None]) -> None:
    """The waiting thread ends with the expected error or the end of the iteration, and everything is closed."""
    with leave_nothing_open():
        subscriber = Subscriber(NO_ENGINE)
        failures: list[BaseException] = []

        def run() -> None:
            try:
                wait(subscriber)
            except BaseException as error:  # noqa: BLE001 - the test's thread raises it
                failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        until(lambda: is_waiting(subscriber))
        subscriber.close()
        subscriber.close()
        thread.join(DEADLINE)
        assert not thread.is_alive()
        assert failures == []
    with pytest.raises(ClosedError):
        subscriber.receive(0)
    assert list(subscriber) == []


def test_close_and_receive_race() -> None:
    """Whether `close` comes before, during or after a call, the thread ends without another error, and nothing stays open."""
    with leave_nothing_open():
        for attempt in range(100):
            subscriber = Subscriber(NO_ENGINE)
            failures: list[BaseException] = []

            def run(subscriber: Subscriber = subscriber, failures: list[BaseException] = failures) -> None:
                try:
                    while True:
                        subscriber.receive(0)
                except ClosedError:
                    pass
                except BaseException as error:  # noqa: BLE001 - the test's thread raises it
                    failures.append(error)

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            for _ in range(attempt * 10):
                subscriber.trust("e")
            subscriber.close()
            thread.join(DEADLINE)
            assert not thread.is_alive()
            assert failures == []


SIGNALLED = """
import signal, sys
from kvevents import Source, Subscriber

subscriber = Subscriber(Source("tcp://127.0.0.1:9"))
signal.signal(signal.SIGTERM, lambda *_: subscriber.close())
print("ready", flush=True)
for delivery in subscriber:
    pass
print("ended", flush=True)
"""


def test_a_signal_handler_ends_a_waiting_call() -> None:
    """The handler runs in the waiting thread, in the middle of the call."""
    with subprocess.Popen([sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=DEADLINE)[0] == "ended\n"
    assert process.returncode == 0


def use_until_closed(subscriber: Subscriber) -> None:
    """Add, query, receive and remove without a pause until a call raises."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        subscriber.add(Source("tcp://127.0.0.1:9", name="other"))
        subscriber.trust("other")
        subscriber.receive(0)
        subscriber.remove("other")


def test_a_signal_handler_can_close_during_any_call() -> None:
    """The handler runs at a hundred moments of adding, removing, querying and receiving. Nothing stays open, and no other error
    occurs."""
    with leave_nothing_open():
        closing: list[Subscriber] = []
        former = signal.signal(signal.SIGALRM, lambda *_: closing[-1].close())
        try:
            for attempt in range(100):
                closing.append(Subscriber(NO_ENGINE))
                signal.setitimer(signal.ITIMER_REAL, 0.0001 * (attempt + 1))
                with pytest.raises(ClosedError):
                    use_until_closed(closing[-1])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("many", [False, True])
async def test_another_task_ends_a_waiting_call(many: bool) -> None:
    """`receive` raises, `async for` ends, and asyncio no longer watches the descriptor."""
    with leave_nothing_open():
        subscriber = AsyncSubscriber(NO_ENGINE)
        task: asyncio.Task[Any] = asyncio.create_task(subscriber.receive_many() if many else subscriber.receive())
        await wait_until_begun(task)
        await subscriber.close()
        await subscriber.close()
        with pytest.raises(ClosedError, match="AsyncSubscriber is closed"):
            await await_in_time(task)
    with pytest.raises(ClosedError):
        await subscriber.receive(0)


async def test_async_iteration_ends_when_it_is_closed() -> None:
    """The iteration ends without an error, during a wait and afterwards."""
    subscriber = AsyncSubscriber(NO_ENGINE)

    async def iterate() -> list[object]:
        return [delivery async for delivery in subscriber]

    task = asyncio.create_task(iterate())
    await wait_until_begun(task)
    await subscriber.close()
    assert await await_in_time(task) == []
    assert await await_in_time(iterate()) == []


async def test_another_thread_ends_an_async_iteration() -> None:
    """`close` works from a thread without an event loop."""
    subscriber = AsyncSubscriber(NO_ENGINE)
    task = asyncio.create_task(subscriber.receive())
    await wait_until_begun(task)
    await asyncio.to_thread(asyncio.run, subscriber.close())
    with pytest.raises(ClosedError):
        await await_in_time(task)


async def test_a_new_socket_with_the_number_of_a_closed_one_works() -> None:
    """asyncio no longer watches the closed descriptor, so a socket that is opened afterwards with its number receives data."""
    loop = asyncio.get_running_loop()
    subscriber = AsyncSubscriber(NO_ENGINE)
    descriptor = subscriber._multiplexer.transport.fileno()
    task = asyncio.create_task(subscriber.receive())
    await wait_until_begun(task)
    await subscriber.close()
    await asyncio.gather(task, return_exceptions=True)
    pairs: list[tuple[socket.socket, socket.socket]] = []
    try:
        while not any(descriptor == each.fileno() for pair in pairs for each in pair):
            assert len(pairs) < 100, "its number was not reused"
            pairs.append(socket.socketpair())
        for one, other in [*pairs, *((b, a) for a, b in pairs)]:
            one.setblocking(False)
            receiving = asyncio.create_task(loop.sock_recv(one, 1))
            await asyncio.sleep(0)
            other.send(b"x")
            assert await await_in_time(receiving) == b"x"
    finally:
        for pair in pairs:
            for each in pair:
                each.close()


async def test_two_tasks_cannot_wait_at_once() -> None:
    """The second task raises. Otherwise it would replace the first task's reader in asyncio, which then never wakes."""
    async with AsyncSubscriber(NO_ENGINE) as subscriber:
        first = asyncio.create_task(subscriber.receive())
        await wait_until_begun(first)
        with pytest.raises(UsageError, match="receive in one task"):
            await subscriber.receive()
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await subscriber.receive(0) is None


def test_ready_deliveries_are_not_returned_after_close() -> None:
    """The checkpoint does not include them either, so a later process receives them."""
    fake = FakeTransport()
    engine = fake.engine("tcp://engine:5557", "tcp://engine:5558")
    for number in range(3):
        engine.publish(BlockRemoved([number]))
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    subscriber = Subscriber(source, transport=fake, clock=fake.clock)
    assert subscriber.receive(1) is not None
    assert "ready" in repr(subscriber)
    subscriber.close()
    with pytest.raises(ClosedError):
        subscriber.receive(0)
    with pytest.raises(ClosedError):
        subscriber.receive_many()
    assert list(subscriber) == []
    assert subscriber.checkpoint().last_seq == 0
    assert subscriber.trust("e") == subscriber.status("e").trust


def test_other_threads_can_query_while_one_receives() -> None:
    """`trust`, `status` and `statuses` work whatever the receiving thread does to the streams at that moment."""
    fake = FakeTransport()
    engines = [fake.engine(f"tcp://engine:{5000 + number}", f"tcp://replay:{number}") for number in range(20)]
    subscriber = Subscriber(transport=fake, clock=fake.clock)
    failures: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        try:
            while not done.is_set():
                for status in subscriber.statuses():
                    assert status.last_seq >= -1
                assert subscriber.trust("first") != Trust.STALE
                assert subscriber.status("first").source == "first"
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            failures.append(error)

    subscriber.add(Source(engines[0].endpoint, engines[0].replay_endpoint, name="first"))
    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_ in range(40):
        for number, engine in enumerate(engines[1:]):
            subscriber.add(Source(engine.endpoint, engine.replay_endpoint, name=f"e{number}"))
            engine.publish(BlockRemoved([round_]))
        while subscriber.receive_many(timeout=0):
            pass
        for number in range(len(engines) - 1):
            subscriber.remove(f"e{number}")
    done.set()
    for thread in threads:
        thread.join(DEADLINE)
    subscriber.close()
    assert failures == []


def test_closing_during_an_iteration_ends_it() -> None:
    """The iterating code closes the subscriber while deliveries are ready, in both front ends."""
    fake = FakeTransport()
    engine = fake.engine("tcp://engine:5557", "tcp://engine:5558")
    for number in range(3):
        engine.publish(BlockRemoved([number]))
    source = Source(engine.endpoint, engine.replay_endpoint, name="e")
    seen = 0
    with Subscriber(source, transport=fake, clock=fake.clock) as subscriber:
        for _ in subscriber:
            seen += 1
            subscriber.close()

    async def iterate() -> int:
        count = 0
        another = FakeTransport()
        other = another.engine("tcp://engine:5557", "tcp://engine:5558")
        for number in range(3):
            other.publish(BlockRemoved([number]))
        async with AsyncSubscriber(source, transport=another, clock=another.clock) as subscriber:
            async for _ in subscriber:
                count += 1
                await subscriber.close()
        return count

    assert (seen, asyncio.run(iterate())) == (1, 1)


def test_close_does_not_wait_for_a_socket_that_pyzmq_does_not_know() -> None:
    """An interrupt of pyzmq can leave a socket that it does not know. libzmq would wait for it without a bound."""
    transport = ZmqTransport()
    subscriber = Subscriber(transport=transport)
    incomplete: zmq.Socket[bytes] = zmq.Socket(transport.context, zmq.SUB)
    transport.context._rm_socket(incomplete)
    closing = threading.Thread(target=subscriber.close, daemon=True)
    closing.start()
    closing.join(DEADLINE)
    assert not closing.is_alive()
    incomplete.close()
