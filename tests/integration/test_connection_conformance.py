"""What every connection does, whatever is under it: libzmq, or the fake in memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from connection_cases import DEADLINE, PAYLOAD, RIGS, TOPIC, Reader, RealRig, Recorder, Rig, descriptors
from kvevents.errors import EndpointError
from kvevents.stream import FetchRequest, Source
from kvevents.testing import zmtp
from kvevents.wire import live_frames
from ports import LOOPBACK

BATCH = zmtp.message(live_frames(TOPIC, 9, PAYLOAD))


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each transport in turn."""
    made = RIGS[request.param]()
    yield made
    made.close()


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def open_connection(rig: Rig, request: pytest.FixtureRequest) -> Callable[..., Reader]:
    """Opens a connection to an engine; how far its stream lets it read ahead makes no difference."""

    def start(engine: Any, limit: int = 32) -> Reader:
        connection = rig.transport.open(engine.source)
        return Reader(rig.transport, connection, Recorder(reads_ahead=request.param), rig.clock, limit)

    return start


def test_batches_come_in_order_after_the_connection(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """`connected` is first, then every batch once, in the order in which they were sent."""
    engine = rig.engine()
    reader = open_connection(engine)
    rig.connect(engine, reader)
    engine.publish(*range(100))
    reader.until(lambda: len(reader.recorder.log) > 100)
    assert reader.recorder.log == ["up", *range(100)]


@pytest.mark.parametrize("limit", [1, 3, 1_000])
def test_what_came_before_a_disconnect_is_fed_before_it(rig: Any, open_connection: Callable[..., Reader], limit: int) -> None:
    """Though both are found at once, by an application that was busy meanwhile, and however few are read at a time."""
    engine = rig.engine()
    reader = open_connection(engine, limit)
    rig.connect(engine, reader)
    engine.publish(0)
    reader.until(lambda: reader.recorder.log == ["up", 0])
    reader.quiet()
    engine.publish(*range(1, 10))
    engine.cut()
    rig.settle(reader.connection)
    reader.until(lambda: "down" in reader.recorder.log)
    assert reader.recorder.log == ["up", *range(10), "down"]


def test_each_change_of_the_connection_is_signalled_once_and_in_its_place(
    rig: Any, open_connection: Callable[..., Reader]
) -> None:
    """Down behind what was sent before, up before what was sent after, and neither twice however long nothing answers."""
    engine = rig.engine()
    reader = open_connection(engine)
    expected: list[object] = []
    for number in range(0, 20, 2):
        rig.connect(engine, reader)
        reader.until(lambda: reader.recorder.log[-1:] == ["up"])
        engine.publish(number, number + 1)
        engine.cut()
        rig.settle(reader.connection)
        reader.until(lambda: reader.recorder.log[-1:] == ["down"])
        reader.quiet()
        engine.come_back()
        expected += ["up", number, number + 1, "down"]
    assert reader.recorder.log[: len(expected)] == expected


@pytest.mark.parametrize("receive_hwm", [0, 8, 1_000])
@pytest.mark.parametrize("kind", RIGS)
def test_a_new_connection_is_signalled_behind_everything_older(kind: str, receive_hwm: int) -> None:
    """Though it is up before any of that was read, and whether or not the socket's limit says how much that may be."""
    rig: Any = RIGS[kind](receive_hwm=receive_hwm)
    try:
        engine = rig.engine()
        reader = Reader(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=False), rig.clock, limit=1)
        rig.connect(engine, reader)
        engine.publish(0)
        reader.until(lambda: reader.recorder.log == ["up", 0])
        reader.quiet()
        engine.publish(1, 2, 3)
        engine.cut()
        engine.come_back()
        rig.connect_unread(engine, 2)
        rig.connect(engine, reader)
        reader.until(lambda: reader.recorder.log.count("up") == 2)
        engine.publish(4)
        reader.until(lambda: 4 in reader.recorder.log)
        assert reader.recorder.numbers == [0, 1, 2, 3, 4]
        assert [each for each in reader.recorder.log if each not in {1, 2, 3}] == ["up", 0, "down", "up", 4]
        assert reader.recorder.log[-2:] == ["up", 4]
    finally:
        rig.close()


def test_replay_answers_come_and_a_fresh_request_gets_no_old_ones(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """A request may be sent on the same connection or a fresh one; after `end_replay` nothing is fed any more."""
    engine = rig.engine()
    reader = open_connection(engine)
    rig.connect(engine, reader)
    reader.until(lambda: reader.recorder.log == ["up"])
    reader.connection.request_replay(FetchRequest(0, new_connection=True))
    engine.answer(0, 1)
    reader.until(lambda: "end" in reader.recorder.log)
    reader.connection.request_replay(FetchRequest(2, new_connection=False))
    engine.answer(2)
    reader.until(lambda: reader.recorder.log.count("end") == 2)
    reader.connection.request_replay(FetchRequest(3, new_connection=False))
    engine.answer(3)
    reader.connection.request_replay(FetchRequest(4, new_connection=True))
    engine.answer(4)
    reader.until(lambda: reader.recorder.log.count("end") == 3)
    assert reader.recorder.log == ["up", ("replay", 0), ("replay", 1), "end", ("replay", 2), "end", ("replay", 4), "end"]
    reader.connection.request_replay(FetchRequest(5, new_connection=False))
    engine.answer(5)
    reader.connection.end_replay()
    reader.quiet()
    assert reader.recorder.log.count("end") == 3


def test_while_nothing_is_missing_all_that_is_live_comes_before_an_answer(rig: Any) -> None:
    """It may be of a life that ended before the one that answers, and would be dropped behind the news of that."""
    engine = rig.engine()
    reader = Reader(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=True), rig.clock, 10)
    rig.connect(engine, reader)
    reader.until(lambda: reader.recorder.log == ["up"])
    reader.connection.request_replay(FetchRequest(0, new_connection=True))
    engine.publish(*range(100))
    engine.answer(*range(100, 150))
    log: list[object] = reader.recorder.log
    while "end" not in log or len(log) < 152:
        before = len(log)
        reader()
        came = log[before:]
        is_live_left = sum(isinstance(each, int) for each in came) == 10 and reader.recorder.numbers != list(range(100))
        assert not is_live_left or all(isinstance(each, int) for each in came)
    assert reader.recorder.numbers == list(range(100))


@pytest.mark.parametrize("limit", [1, 7])
def test_no_more_than_the_limit_is_fed_at_once(rig: Any, open_connection: Callable[..., Reader], limit: int) -> None:
    """Of live messages and of replayed ones; `reader` says that there are more until the last one is fed."""
    engine = rig.engine()
    reader = open_connection(engine, limit)
    rig.connect(engine, reader)
    reader.until(lambda: reader.recorder.log == ["up"])
    engine.publish(*range(50))
    reader.connection.request_replay(FetchRequest(0, new_connection=True))
    engine.answer(*range(50))
    before = 1
    while len(reader.recorder.log) < 102:
        reader()
        came = reader.recorder.log[before:]
        before += len(came)
        assert sum(isinstance(each, int) for each in came) <= limit
        assert sum(not isinstance(each, int) for each in came) <= limit
    assert reader.recorder.numbers == list(range(50))


def test_messages_that_are_no_batches_are_fed_as_they_are(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """1, 2, 4 and 9 frames, numbers of 0, 4 and 16 bytes, between good ones, of which none is lost."""
    engine = rig.engine()
    reader = open_connection(engine)
    rig.connect(engine, reader)
    odd = [[b"kv"], [b"kv"] * 2, [b"kv"] * 4, [b"kv"] * 9, [b"kv", b"\0" * 4, b"x"], [b"kv", b"", b"x"]]
    expected: list[object] = ["up"]
    for number, frames in enumerate(odd):
        engine.publish(number)
        engine.send_raw(frames)
        expected += [number, ("odd", len(frames))]
    reader.until(lambda: len(reader.recorder.log) == len(expected))
    assert reader.recorder.log == expected


def test_connections_come_and_go_without_end(rig: Any) -> None:
    """Nothing is left of those that are closed: no descriptor, and nothing that counts against a limit of connections."""
    engine = rig.engine()

    def once() -> None:
        connection = rig.transport.open(engine.source)
        rig.transport.wait(0)
        connection.close()
        connection.close()

    once()
    before = descriptors()
    for _ in range(1_000):
        once()
    assert not rig.transport._connections
    assert descriptors() <= before + 2


@pytest.mark.parametrize("kind", RIGS)
def test_a_closed_transport_has_closed_its_connections(kind: str) -> None:
    """Closing twice is fine, and so is waking afterwards."""
    rig: Any = RIGS[kind]()
    connections = [rig.transport.open(rig.engine().source) for _ in range(3)]
    rig.close()
    rig.transport.close()
    rig.transport.wake()
    for connection in connections:
        connection.close()
    assert not rig.transport._connections


def test_waking_ends_a_wait(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """From another thread, in the middle of it, and before it has begun."""
    engine = rig.engine()
    reader = open_connection(engine)
    rig.connect(engine, reader)
    reader.until(lambda: reader.recorder.log == ["up"])
    reader.quiet()
    began = time.monotonic()
    waker = threading.Timer(0.05, rig.transport.wake)
    waker.start()
    rig.transport.wait(DEADLINE)
    waker.join()
    rig.transport.wait(DEADLINE)
    assert time.monotonic() - began < DEADLINE


def test_an_endpoint_that_cannot_be_is_an_error_that_names_it(rig: Any) -> None:
    """And leaves nothing behind."""

    def once() -> None:
        with pytest.raises(EndpointError, match="gopher://host:1") as caught:
            rig.transport.open(Source("gopher://host:1"))
        assert caught.value.endpoint == "gopher://host:1"
        assert not rig.transport._connections

    once()
    before = descriptors()
    for _ in range(20):
        once()
    assert descriptors() <= before + 2


def test_an_endpoint_where_nothing_listens_is_logged_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """In the log, in the connection and so in the reason of the trust; when something listens at last, that is logged too."""
    rig = RealRig()
    try:
        engine = rig.engine()
        engine.cut()
        with caplog.at_level("INFO", "kvevents.subscriber"):
            reader = Reader(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=False), rig.clock, 32)
            reader.until(lambda: bool(reader.connection.fault))
            reader.quiet(100)
            assert [each.levelname for each in caplog.records] == ["WARNING"]
            assert engine.source.endpoint in caplog.text
            engine.come_back()
            rig.connect(engine, reader)
            reader.until(lambda: reader.recorder.log == ["up"])
        assert reader.connection.fault == ""
        assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]
    finally:
        rig.close()


# --- what is sent over real connections --------------------------------------------------------------------------------------


@contextmanager
def connected(**options: Any) -> Iterator[tuple[Any, Any, Reader]]:
    """A rig, an engine and a connection that is up."""
    rig = RealRig(**options)
    try:
        engine = rig.engine()
        reader = Reader(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=True), rig.clock, 32)
        rig.connect(engine, reader)
        reader.until(lambda: reader.recorder.log == ["up"])
        yield rig, engine, reader
    finally:
        rig.close()


@pytest.mark.parametrize(
    "end",
    [
        BATCH[:-3],
        b"\xf8" * 20,
        b"\x02" + (1 << 40).to_bytes(8, "big"),
        zmtp.message([TOPIC, bytes(8), bytes(5_000)]),
        zmtp.command(b"ERROR", b"\x03bad"),
        b"",
    ],
    ids=["cut off", "garbage", "a terabyte", "too large", "an error", "nothing"],
)
def test_what_came_before_the_end_of_a_connection_arrives(end: bytes) -> None:
    """Then the next connection goes on; what can be no batch ends a connection and nothing else."""
    with connected() as (rig, engine, reader):
        engine.publish(0, 1)
        engine.send_bytes(end)
        engine.end_connection()
        rig.connect(engine, reader)
        engine.publish(2, 3)
        reader.until(lambda: len(reader.recorder.log) >= 7)
        reader.quiet()
        assert reader.recorder.numbers == [0, 1, 2, 3]
        assert [each for each in reader.recorder.log if isinstance(each, str)] == ["up", "down", "up"]


def test_bytes_may_come_one_by_one() -> None:
    """Batches in pieces of a byte are the same as in one."""
    with connected() as (_, engine, reader):
        for number in range(3):
            for byte in zmtp.message(live_frames(TOPIC, number, PAYLOAD)):
                engine.send_bytes(bytes((byte,)))
                reader()
        reader.until(lambda: len(reader.recorder.log) == 4)
        assert reader.recorder.log == ["up", 0, 1, 2]


def test_a_message_of_many_megabytes_arrives() -> None:
    """Room is made for it as it comes; the batch behind it arrives too."""
    with connected(max_message_bytes=32_000_000) as (_, engine, reader):
        large = zmtp.message(live_frames(TOPIC, 0, bytes(20_000_000)))
        sender = threading.Thread(target=lambda: (engine.send_bytes(large), engine.publish(1)), daemon=True)
        sender.start()
        reader.until(lambda: len(reader.recorder.log) == 3)
        sender.join(DEADLINE)
        assert reader.recorder.log == ["up", 0, 1]


def test_a_ping_is_answered_with_its_context() -> None:
    """In the midst of batches, of which none is lost by it."""
    with connected() as (_, engine, reader):
        engine.publish(0)
        engine.send_bytes(zmtp.command(b"PING", b"\0\x64context"))
        engine.publish(1)
        reader.until(lambda: zmtp.command(b"PONG", b"context") in engine.received)
        engine.publish(2)
        reader.until(lambda: len(reader.recorder.log) == 4)
        assert reader.recorder.log == ["up", 0, 1, 2]


def test_a_connection_that_is_made_again_at_once_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Trust shows it. A line is worth what has failed: an attempt to connect."""
    with caplog.at_level("INFO", "kvevents.subscriber"), connected(handshake_ms=20_000) as (rig, engine, reader):
        for count in range(2, 6):
            engine.end_connection()
            rig.connect(engine, reader)
            reader.until(lambda count=count: reader.recorder.log.count("up") == count)  # type: ignore[misc]
            assert reader.connection.fault == ""
        assert caplog.records == []


def test_what_listens_and_is_no_publisher_is_logged_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """The port of something else, such as one for replay: a peer that closes before it has introduced itself."""
    rig = RealRig()
    with socket.create_server((LOOPBACK, 0)) as server, caplog.at_level("INFO", "kvevents.subscriber"):
        server.settimeout(DEADLINE)
        connection = rig.transport.open(Source(f"tcp://{LOOPBACK}:{server.getsockname()[1]}"))
        reader = Reader(rig.transport, connection, Recorder(reads_ahead=False), rig.clock, 32)
        server.setblocking(False)
        count = 0
        end = time.monotonic() + DEADLINE
        while count < 5:
            assert time.monotonic() < end
            reader()
            with suppress(BlockingIOError):
                server.accept()[0].close()
                count += 1
        reader.until(lambda: bool(connection.fault))
        assert reader.recorder.log == []
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        rig.close()


FLOODS = {
    "pings": zmtp.command(b"PING", b"\0\0" + b"x" * 16) * 1_000,
    "odd messages": zmtp.message([TOPIC] * 9) * 1_000,
    "batches": BATCH * 1_000,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_peer_that_floods_costs_other_connections_nothing(flood: bytes) -> None:
    """Their batches arrive, in their turn, while it sends without end."""
    with connected() as (rig, hostile, flooded):
        calm = rig.engine()
        reader = Reader(rig.transport, rig.transport.open(calm.source), Recorder(reads_ahead=True), rig.clock, 32)
        rig.connect(calm, reader)
        done = threading.Event()

        def send() -> None:
            with suppress(OSError):
                while not done.is_set():
                    hostile.send_bytes(flood)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        for number in range(50):
            calm.publish(number)
            flooded.now()
            reader.now()
        end = time.monotonic() + DEADLINE
        while reader.recorder.numbers != list(range(50)):
            assert time.monotonic() < end
            flooded.now()
            reader.now()
        done.set()
        while sender.is_alive():
            assert time.monotonic() < end
            flooded.now()
