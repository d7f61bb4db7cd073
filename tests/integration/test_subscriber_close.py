"""Stopping subscribers, from wherever that is done: a waiting call ends, and nothing stays open or registered."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvevents.errors import ClosedError, UsageError
from kvevents.events import BlockRemoved
from kvevents.stream import Source, Trust
from kvevents.subscriber import AsyncSubscriber, Subscriber
from kvevents.testing.fake_transport import FakeTransport

DEADLINE = 20.0
NOBODY = Source("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", name="e")
"""Nothing listens there, so nothing ever arrives."""


def receives(subscriber: Subscriber) -> None:
    """Wait in `receive`, which must raise."""
    with pytest.raises(ClosedError, match="Subscriber is closed"):
        subscriber.receive()


def receives_many(subscriber: Subscriber) -> None:
    """Wait in `receive_many`, which must raise."""
    with pytest.raises(ClosedError, match="Subscriber is closed"):
        subscriber.receive_many()


def iterates(subscriber: Subscriber) -> None:
    """Iterate, which must end."""
    assert list(subscriber) == []


WAITS = pytest.mark.parametrize("wait", [receives, receives_many, iterates])


def descriptors() -> list[str]:
    """What this process has open."""
    gc.collect()
    return [str(each.readlink()) for each in sorted(Path("/proc/self/fd").iterdir()) if each.exists()]


def waiting(subscriber: Any) -> bool:
    """Whether some call waits for messages."""
    return bool(subscriber._calls)


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


async def begun(task: asyncio.Task[Any]) -> None:
    """Let a task run until it waits for messages, of which there are none."""
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done


@WAITS
def test_another_thread_ends_what_waits(wait: Callable[[Subscriber], None]) -> None:
    """The thread ends, with the error or the end of the iteration that is due, and has closed everything."""
    before = descriptors()
    subscriber = Subscriber(NOBODY)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            wait(subscriber)
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: waiting(subscriber))
    subscriber.close()
    subscriber.close()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert failures == []
    assert descriptors() == before
    with pytest.raises(ClosedError):
        subscriber.receive(0)
    assert list(subscriber) == []


def test_close_and_receive_race() -> None:
    """Whenever `close` comes, before, within or after a call, the thread ends without another error, and nothing stays open."""
    before = descriptors()
    for attempt in range(100):
        subscriber = Subscriber(NOBODY)
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
    assert descriptors() == before


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


def test_a_signal_handler_ends_what_waits() -> None:
    """It runs in the very thread that waits, in the middle of it."""
    with subprocess.Popen([sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=DEADLINE)[0] == "ended\n"
    assert process.returncode == 0


def uses(subscriber: Subscriber) -> None:
    """Add, ask, receive and remove without a pause until one of them raises."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        subscriber.add(Source("tcp://127.0.0.1:9", name="other"))
        subscriber.trust("other")
        subscriber.receive(0)
        subscriber.remove("other")


def test_a_signal_handler_may_close_in_the_middle_of_anything() -> None:
    """At a hundred different moments of adding, removing, asking and receiving; nothing stays open and no other error comes."""
    before = descriptors()
    closing: list[Subscriber] = []
    former = signal.signal(signal.SIGALRM, lambda *_: closing[-1].close())
    try:
        for attempt in range(100):
            closing.append(Subscriber(NOBODY))
            signal.setitimer(signal.ITIMER_REAL, 0.0001 * (attempt + 1))
            with pytest.raises(ClosedError):
                uses(closing[-1])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert descriptors() == before


@pytest.mark.parametrize("many", [False, True])
async def test_another_task_ends_what_waits(many: bool) -> None:
    """`receive` raises, `async for` ends, and asyncio watches nothing of it any more."""
    before = descriptors()
    subscriber = AsyncSubscriber(NOBODY)
    task: asyncio.Task[Any] = asyncio.create_task(subscriber.receive_many() if many else subscriber.receive())
    await begun(task)
    await subscriber.close()
    await subscriber.close()
    with pytest.raises(ClosedError, match="AsyncSubscriber is closed"):
        await asyncio.wait_for(task, DEADLINE)
    assert descriptors() == before
    with pytest.raises(ClosedError):
        await subscriber.receive(0)


async def test_async_iteration_ends_when_it_is_closed() -> None:
    """Quietly, in the middle of a wait and afterwards."""
    subscriber = AsyncSubscriber(NOBODY)

    async def iterate() -> list[object]:
        return [delivery async for delivery in subscriber]

    task = asyncio.create_task(iterate())
    await begun(task)
    await subscriber.close()
    assert await asyncio.wait_for(task, DEADLINE) == []
    assert await asyncio.wait_for(iterate(), DEADLINE) == []


async def test_another_thread_ends_an_async_iteration() -> None:
    """`close` needs no event loop of its own to be understood by the one that waits."""
    subscriber = AsyncSubscriber(NOBODY)
    task = asyncio.create_task(subscriber.receive())
    await begun(task)
    await asyncio.to_thread(asyncio.run, subscriber.close())
    with pytest.raises(ClosedError):
        await asyncio.wait_for(task, DEADLINE)


async def test_the_next_socket_with_the_number_of_a_closed_one_works() -> None:
    """asyncio forgets the descriptor that was waited for: sockets opened afterwards, which get its number, are not deaf."""
    loop = asyncio.get_running_loop()
    subscriber = AsyncSubscriber(NOBODY)
    descriptor = subscriber._multiplexer.transport.fileno()
    task = asyncio.create_task(subscriber.receive())
    await begun(task)
    await subscriber.close()
    await asyncio.gather(task, return_exceptions=True)
    pairs: list[tuple[socket.socket, socket.socket]] = []
    try:
        while not any(descriptor == each.fileno() for pair in pairs for each in pair):
            assert len(pairs) < 100, "its number was not given back"
            pairs.append(socket.socketpair())
        for one, other in [*pairs, *((b, a) for a, b in pairs)]:
            one.setblocking(False)
            receiving = asyncio.create_task(loop.sock_recv(one, 1))
            await asyncio.sleep(0)
            other.send(b"x")
            assert await asyncio.wait_for(receiving, DEADLINE) == b"x"
    finally:
        for pair in pairs:
            for each in pair:
                each.close()


async def test_two_tasks_cannot_wait_at_once() -> None:
    """The second one is refused; it would take the first one's place in asyncio, which then never wakes."""
    async with AsyncSubscriber(NOBODY) as subscriber:
        first = asyncio.create_task(subscriber.receive())
        await begun(first)
        with pytest.raises(UsageError, match="receive in one task"):
            await subscriber.receive()
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await subscriber.receive(0) is None


def test_what_waits_is_not_handed_out_after_close() -> None:
    """A checkpoint does not hold it either, so a later process gets it."""
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


def test_other_threads_may_ask_while_one_receives() -> None:
    """`trust`, `status` and `statuses` answer, whatever the receiving thread does to the streams at that moment."""
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


def test_closing_in_the_middle_of_an_iteration_ends_it() -> None:
    """By the very code that iterates, with deliveries waiting, in both worlds."""
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
