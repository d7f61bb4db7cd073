"""The conformance suite of connections: it runs with libzmq and with the fake in memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from connection_cases import DEADLINE, PAYLOAD, RIGS, TOPIC, Reader, RealRig, Recorder, Rig, descriptors
from kvevents import zmtp
from kvevents.errors import EndpointError
from kvevents.stream import FetchRequest, Source
from kvevents.wire import live_frames
from ports import LOOPBACK

BATCH = zmtp.message(live_frames(TOPIC, 9, PAYLOAD))


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One rig for each transport."""
    made = RIGS[request.param]()
    yield made
    made.close()


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def open_connection(rig: Rig, request: pytest.FixtureRequest) -> Callable[..., Reader]:
    """Open a connection to an engine. Whether its stream lets it read ahead must make no difference."""

    def start(engine: Any, limit: int = 32) -> Reader:
        connection = rig.transport.open(engine.source)
        return Reader(rig.transport, connection, Recorder(reads_ahead=request.param), rig.clock, limit)

    return start


def test_batches_are_fed_in_order_after_connected(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """`connected` is first, then every batch once, in the order in which they were sent."""
    engine = rig.engine()
    reader = open_connection(engine)
    rig.connect(engine, reader)
    engine.publish(*range(100))
    reader.until(lambda: len(reader.recorder.log) > 100)
    assert reader.recorder.log == ["up", *range(100)]


@pytest.mark.parametrize("limit", [1, 3, 1_000])
def test_messages_before_a_disconnect_are_fed_before_it(rig: Any, open_connection: Callable[..., Reader], limit: int) -> None:
    """Although a busy application finds both at once, and however few messages are read at a time."""
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


def test_each_connection_change_is_fed_once_and_in_its_place(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """`disconnected` after what was sent before, `connected` before what was sent after it, and neither twice."""
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
def test_connected_is_fed_after_every_older_message(kind: str, receive_hwm: int) -> None:
    """Although the new connection is up before the older messages are read, and whatever the limit of the socket is."""
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


def test_a_fresh_replay_request_gets_no_old_answer(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """A request is sent on the same connection or on a fresh one. After `end_replay` no answer is fed."""
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


def test_live_messages_are_fed_before_an_answer_while_none_is_missing(rig: Any) -> None:
    """They may be of an incarnation that ended before the one that answers. Fed after the answer, they would be dropped."""
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
    """Of live and of replayed messages. `read_into` returns True until the last one is fed."""
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


def test_malformed_messages_are_fed_unchanged(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """1, 2, 4 and 9 frames, and numbers of 0, 4 and 16 bytes, between batches, of which none is lost."""
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


def test_closed_connections_leave_nothing(rig: Any) -> None:
    """Neither a descriptor nor an entry that counts against the limit of connections."""
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
    """From another thread, during a wait and before it begins."""
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


def test_an_invalid_endpoint_is_an_error_that_names_it(rig: Any) -> None:
    """It leaves no descriptor and no connection."""

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


def test_an_endpoint_where_nothing_listens_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The fault is in the log and in the connection, and so in the reason of trust. The first connection is logged too."""
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
    """Yield a rig, an engine and a connected reader."""
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
def test_batches_before_the_end_of_a_connection_arrive(end: bytes) -> None:
    """The next connection continues after them. A message that cannot be a batch ends its connection and nothing else."""
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


def test_batches_may_arrive_byte_by_byte() -> None:
    """They are the same as in one piece."""
    with connected() as (_, engine, reader):
        for number in range(3):
            for byte in zmtp.message(live_frames(TOPIC, number, PAYLOAD)):
                engine.send_bytes(bytes((byte,)))
                reader()
        reader.until(lambda: len(reader.recorder.log) == 4)
        assert reader.recorder.log == ["up", 0, 1, 2]


def test_a_message_of_many_megabytes_arrives() -> None:
    """The batch behind it arrives too."""
    with connected(max_message_bytes=32_000_000) as (_, engine, reader):
        large = zmtp.message(live_frames(TOPIC, 0, bytes(20_000_000)))
        sender = threading.Thread(target=lambda: (engine.send_bytes(large), engine.publish(1)), daemon=True)
        sender.start()
        reader.until(lambda: len(reader.recorder.log) == 3)
        sender.join(DEADLINE)
        assert reader.recorder.log == ["up", 0, 1]


def test_a_ping_is_answered_with_its_context() -> None:
    """Between batches, of which none is lost."""
    with connected() as (_, engine, reader):
        engine.publish(0)
        engine.send_bytes(zmtp.command(b"PING", b"\0\x64context"))
        engine.publish(1)
        reader.until(lambda: zmtp.command(b"PONG", b"context") in engine.received)
        engine.publish(2)
        reader.until(lambda: len(reader.recorder.log) == 4)
        assert reader.recorder.log == ["up", 0, 1, 2]


def test_an_immediate_reconnect_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Trust shows it. Only failed attempts to connect are logged."""
    with caplog.at_level("INFO", "kvevents.subscriber"), connected(handshake_ms=20_000) as (rig, engine, reader):
        for count in range(2, 6):
            engine.end_connection()
            rig.connect(engine, reader)
            reader.until(lambda count=count: reader.recorder.log.count("up") == count)  # type: ignore[misc]
            assert reader.connection.fault == ""
        assert caplog.records == []


def test_a_peer_that_is_not_a_publisher_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Such as a replay port: the peer closes before the handshake is complete."""
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
def test_a_flooding_peer_does_not_delay_other_connections(flood: bytes) -> None:
    """Batches of the other connections arrive while the peer sends without end."""
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
