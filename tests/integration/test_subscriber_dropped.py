"""Subscribers that are dropped without `close`, and subscribers in forked processes: no hang, no leak, no deaf parent."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvevents.errors import ConfigError, EndpointError, UsageError
from kvevents.events import BlockRemoved, EventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Batch, Source
from kvevents.subscriber import Subscriber
from kvevents.zeromq.sockets import raise_descriptor_limit
from resource_cases import leave_nothing_open

DEADLINE = 60.0

PRELUDE = """
import asyncio, gc, os, sys, threading, time, warnings
import zmq
from kvevents import AsyncSubscriber, Curve, SocketOptions, Source, Subscriber
from kvevents.subscriber import ZmqTransport

warnings.simplefilter("always")
found = []
warnings.showwarning = lambda message, kind, *rest: found.append(kind.__name__)
source = Source("tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
shared = zmq.Context()

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def settle(wanted, seconds=40):
    end = time.monotonic() + seconds
    while descriptors() > wanted and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return descriptors()
"""
CHECK = """
for _ in range(3):
    drop()
gc.collect()
before = settle(0, 1)
for _ in range(10):
    drop()
after = settle(before)
print(max(after - before, 0), sorted(set(found)))
"""
DROPS = {
    "function": "def drop():\n    Subscriber(source).receive(timeout=0.02)",
    "rebind": "def drop():\n    global subscriber\n    subscriber = Subscriber(source)\n    subscriber.receive(timeout=0.02)",
    "exception": """
def drop():
    try:
        for _ in (subscriber := Subscriber(source)).receive_many(timeout=0.02), 1:
            raise ValueError(subscriber)
    except ValueError:
        pass
""",
    "automatic": "def drop():\n    Subscriber(source).receive(timeout=0.02)\n    [[each] for each in range(200_000)]",
    "asyncio": """
async def receive():
    await AsyncSubscriber(source).receive(timeout=0.02)

def drop():
    asyncio.run(receive())
""",
    "cancelled": """
async def receive():
    task = asyncio.ensure_future(AsyncSubscriber(source).receive())
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait([task])

def drop():
    asyncio.run(receive())
""",
    "shared context": "def drop():\n    Subscriber(source, transport=ZmqTransport(shared)).receive(timeout=0.02)",
    "shared context, busy monitors": """
def drop():
    options = SocketOptions(reconnect_ms=1, reconnect_max_ms=1)
    Subscriber(source, transport=ZmqTransport(shared, options)).receive(timeout=0.02)
""",
    "bound with keys": """
public, secret = (key.decode() for key in zmq.curve_keypair())
curve = Curve(public_key=public, secret_key=secret, allowed=(public,))

def drop():
    Subscriber(Source("tcp://127.0.0.1:*", bind=True, curve=curve)).receive(timeout=0.02)
""",
    "another thread": """
def drop():
    kept = [Subscriber(source)]
    kept[0].receive(timeout=0.02)
    kept[0].cycle = kept
    del kept
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
""",
}


def run_program(program: str) -> str:
    """Run a Python program, which must end, and return its output."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)
def test_a_dropped_subscriber_closes_everything_and_warns(drop: str) -> None:
    """Garbage collection does not wait for sockets, in whatever way the application loses the subscriber."""
    assert run_program(PRELUDE + drop + CHECK) == "0 ['ResourceWarning']"


def test_a_dropped_subscriber_leaves_the_other_sockets_of_its_context_alive() -> None:
    """libzmq's I/O thread serves all of them. It must not wait for a monitor whose reader is closed."""
    program = (
        PRELUDE
        + DROPS["shared context, busy monitors"]
        + """
for _ in range(20):
    drop()
gc.collect()
server, client = shared.socket(zmq.REP), shared.socket(zmq.REQ)
port = server.bind_to_random_port("tcp://127.0.0.1")
client.connect(f"tcp://127.0.0.1:{port}")
client.send(b"hello")
print(server.poll(60_000), flush=True)
os._exit(0)
"""
    )
    assert run_program(program).endswith("1")


def test_a_subscriber_that_lives_until_the_interpreter_ends_is_left_to_the_system() -> None:
    """The end of the interpreter neither hangs nor warns."""
    assert run_program(PRELUDE + "subscriber = Subscriber(source)\nsubscriber.receive(timeout=0.02)\nprint('end')") == "end"


def test_a_subscriber_can_be_closed_at_exit() -> None:
    """Python forbids new threads at exit, since 3.12."""
    program = """
import atexit
real = threading.Thread.start

def start(thread):
    if thread.name == "zmq-destroy":
        raise RuntimeError("can't create new thread at interpreter shutdown")
    real(thread)

subscriber = Subscriber(source)
subscriber.receive(timeout=0.02)
atexit.register(print, "closed", flush=True)
atexit.register(subscriber.close)
threading.Thread.start = start
"""
    assert run_program(PRELUDE + program) == "closed"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Subscriber(max_concurrent_replays=0),
        lambda: Subscriber([Source("tcp://127.0.0.1:9"), Source("tcp://127.0.0.1:9")]),
        lambda: Subscriber(["tcp://127.0.0.1:9", "no endpoint"]),
        lambda: Subscriber(Source("tcp://203.0.113.1:5557", bind=True)),
    ],
)
def test_a_constructor_that_raises_leaves_nothing_open(make: Callable[[], object]) -> None:
    """Neither descriptors nor threads stay."""
    with pytest.raises((ConfigError, EndpointError)):
        make()
    with leave_nothing_open():
        for _ in range(5):
            with pytest.raises((ConfigError, EndpointError)):
                make()


@pytest.mark.parametrize("has_replay", [False, True])
@pytest.mark.parametrize("leave", ["close", "drop"])
def test_a_forked_child_does_not_make_its_parent_deaf(leave: str, has_replay: bool) -> None:
    """The parent's epoll set and wake pipe are shared with the child, which must change neither."""
    publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*" if has_replay else None)
    with Subscriber(Source(publisher.endpoint, publisher.replay_endpoint)) as subscriber:
        while publisher.stats().subscribers == 0:
            subscriber.receive(0.01)
        child = os.fork()
        if child == 0:  # pragma: no cover - in the child
            code = 1
            try:
                try:
                    subscriber.receive(0)
                except UsageError:
                    code = 0
                if leave == "close":
                    subscriber.close()
                    subscriber.close()
                else:
                    subscriber.__dict__.clear()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        for number in range(5):
            publisher.publish(EventBatch(0.0, [BlockRemoved([number])]))
            # Without replay no probe would wake a parent that its selector no longer wakes.
            delivery = subscriber.receive(DEADLINE)
            assert isinstance(delivery, Batch)
            assert delivery.seq == number
    publisher.shutdown()


def test_the_limit_of_open_files_is_the_applications() -> None:
    """A subscriber does not raise it, and says what to do. The programs of kvevents raise it for themselves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        sources = [Source(f"tcp://127.0.0.1:{port}") for port in range(10_000, 10_100)]
        with pytest.raises(EndpointError, match=r"of the 256 files .*ulimit -n"):
            Subscriber(sources)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, hard)
        assert raise_descriptor_limit(512) == 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
