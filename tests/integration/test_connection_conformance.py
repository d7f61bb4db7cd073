"""Conformance tests of connections, which run with real sockets and with the in-memory fake."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from connection_cases import DEADLINE, PAYLOAD, RIGS, TOPIC, Reader, RealRig, Recorder, Rig
from kvevents.errors import EndpointError
from kvevents.stream import FetchRequest, Source
from kvevents.testing import zmtp
from kvevents.wire import live_frames
from resource_cases import leave_nothing_open
from tools.ports import LOOPBACK
from zmtp_peer import command

BATCH = zmtp.encode_message(live_frames(TOPIC, 9, PAYLOAD))


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A transport, real or in memory, and engines that it can connect to."""
    new_rig = RIGS[request.param]()
    yield new_rig
    new_rig.close()


@pytest.fixture(params=[False, True], ids=["without reading ahead", "reading ahead"])
def open_connection(rig: Rig, request: pytest.FixtureRequest) -> Callable[..., Reader]:
    """Return a function that connects to an engine; the tests pass whether or not the stream lets it read ahead."""

    def start(engine: Any, limit: int = 32) -> Reader:
        connection = rig.transport.open(engine.source)
        return Reader(rig.transport, connection, Recorder(reads_ahead=request.param), rig.clock, limit)

    return start


def test_batches_are_fed_in_order_after_connected(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """`connected` is fed first, then each batch once, in the order in which they were sent."""
    engine = rig.engine()
    reader = open_connection(engine)
    rig.connect(engine, reader)
    engine.publish(*range(100))
    reader.read_until(lambda: len(reader.recorder.log) > 100)
    assert reader.recorder.log == ["up", *range(100)]


@pytest.mark.parametrize("limit", [1, 3, 1_000])
def test_messages_before_a_disconnect_are_fed_before_it(rig: Any, open_connection: Callable[..., Reader], limit: int) -> None:
    """This holds if both are pending at the same time, for any number of messages per read."""
    engine = rig.engine()
    reader = open_connection(engine, limit)
    rig.connect(engine, reader)
    engine.publish(0)
    reader.read_until(lambda: reader.recorder.log == ["up", 0])
    reader.read_until_quiet()
    engine.publish(*range(1, 10))
    engine.cut()
    rig.settle(reader.connection)
    reader.read_until(lambda: "down" in reader.recorder.log)
    assert reader.recorder.log == ["up", *range(10), "down"]


def test_each_connection_change_is_fed_once_and_in_its_place(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """`disconnected` follows all earlier batches, `connected` precedes all later ones, and neither is fed twice."""
    engine = rig.engine()
    reader = open_connection(engine)
    expected: list[object] = []
    for number in range(0, 20, 2):
        rig.connect(engine, reader)
        reader.read_until(lambda: reader.recorder.log[-1:] == ["up"])
        engine.publish(number, number + 1)
        engine.cut()
        rig.settle(reader.connection)
        reader.read_until(lambda: reader.recorder.log[-1:] == ["down"])
        reader.read_until_quiet()
        engine.come_back()
        expected += ["up", number, number + 1, "down"]
    assert reader.recorder.log[: len(expected)] == expected


@pytest.mark.parametrize("receive_hwm", [0, 8, 1_000])
@pytest.mark.parametrize("kind", RIGS)
def test_connected_is_fed_after_every_older_message(kind: str, receive_hwm: int) -> None:
    """This holds if the new connection is made before the older messages are read, for any receive limit of the socket."""
    rig: Any = RIGS[kind](receive_hwm=receive_hwm)
    try:
        engine = rig.engine()
        reader = Reader(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=False), rig.clock, limit=1)
        rig.connect(engine, reader)
        engine.publish(0)
        reader.read_until(lambda: reader.recorder.log == ["up", 0])
        reader.read_until_quiet()
        engine.publish(1, 2, 3)
        engine.cut()
        engine.come_back()
        rig.connect_unread(engine, 2)
        rig.connect(engine, reader)
        reader.read_until(lambda: reader.recorder.log.count("up") == 2)
        engine.publish(4)
        reader.read_until(lambda: 4 in reader.recorder.log)
        assert reader.recorder.numbers == [0, 1, 2, 3, 4]
        assert [each for each in reader.recorder.log if each not in {1, 2, 3}] == ["up", 0, "down", "up", 4]
        assert reader.recorder.log[-2:] == ["up", 4]
    finally:
        rig.close()


def test_a_new_replay_request_gets_no_old_answer(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """A request is sent on the same connection or on a new one. After `end_replay` no answer is fed."""
    engine = rig.engine()
    reader = open_connection(engine)
    rig.connect(engine, reader)
    reader.read_until(lambda: reader.recorder.log == ["up"])
    reader.connection.request_replay(FetchRequest(0, needs_new_connection=True))
    engine.answer(0, 1)
    reader.read_until(lambda: "end" in reader.recorder.log)
    reader.connection.request_replay(FetchRequest(2, needs_new_connection=False))
    engine.answer(2)
    reader.read_until(lambda: reader.recorder.log.count("end") == 2)
    reader.connection.request_replay(FetchRequest(3, needs_new_connection=False))
    engine.answer(3)
    reader.connection.request_replay(FetchRequest(4, needs_new_connection=True))
    engine.answer(4)
    reader.read_until(lambda: reader.recorder.log.count("end") == 3)
    assert reader.recorder.log == ["up", ("replay", 0), ("replay", 1), "end", ("replay", 2), "end", ("replay", 4), "end"]
    reader.connection.request_replay(FetchRequest(5, needs_new_connection=False))
    engine.answer(5)
    reader.connection.end_replay()
    reader.read_until_quiet()
    assert reader.recorder.log.count("end") == 3


def test_live_messages_are_fed_before_an_answer_while_none_is_missing(rig: Any) -> None:
    """They may belong to an older incarnation than the answer, and the stream would drop them after the answer."""
    engine = rig.engine()
    reader = Reader(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=True), rig.clock, 10)
    rig.connect(engine, reader)
    reader.read_until(lambda: reader.recorder.log == ["up"])
    reader.connection.request_replay(FetchRequest(0, needs_new_connection=True))
    engine.publish(*range(100))
    engine.answer(*range(100, 150))
    log: list[object] = reader.recorder.log
    while "end" not in log or len(log) < 152:
        before = len(log)
        reader()
        fed = log[before:]
        is_live_left = sum(isinstance(each, int) for each in fed) == 10 and reader.recorder.numbers != list(range(100))
        assert not is_live_left or all(isinstance(each, int) for each in fed)
    assert reader.recorder.numbers == list(range(100))


@pytest.mark.parametrize("limit", [1, 7])
def test_no_more_than_the_limit_is_fed_at_once(rig: Any, open_connection: Callable[..., Reader], limit: int) -> None:
    """The limit holds separately for live and for replayed messages, and all of them are fed in the end."""
    engine = rig.engine()
    reader = open_connection(engine, limit)
    rig.connect(engine, reader)
    reader.read_until(lambda: reader.recorder.log == ["up"])
    engine.publish(*range(50))
    reader.connection.request_replay(FetchRequest(0, needs_new_connection=True))
    engine.answer(*range(50))
    before = 1
    while len(reader.recorder.log) < 102:
        reader()
        fed = reader.recorder.log[before:]
        before += len(fed)
        assert sum(isinstance(each, int) for each in fed) <= limit
        assert sum(not isinstance(each, int) for each in fed) <= limit
    assert reader.recorder.numbers == list(range(50))


def test_malformed_messages_are_fed_unchanged_between_batches(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """They have a wrong number of frames or a sequence number of a wrong size; no batch between them is lost."""
    engine = rig.engine()
    reader = open_connection(engine)
    rig.connect(engine, reader)
    odd = [[b"kv"], [b"kv"] * 2, [b"kv"] * 4, [b"kv"] * 9, [b"kv", b"\0" * 4, b"x"], [b"kv", b"", b"x"]]
    expected: list[object] = ["up"]
    for number, frames in enumerate(odd):
        engine.publish(number)
        engine.send_raw(frames)
        expected += [number, ("odd", len(frames))]
    reader.read_until(lambda: len(reader.recorder.log) == len(expected))
    assert reader.recorder.log == expected


def test_closed_connections_leave_no_resources(rig: Any) -> None:
    """They leave no file descriptor and no entry that counts against the limit of connections."""
    engine = rig.engine()

    def open_and_close() -> None:
        connection = rig.transport.open(engine.source)
        rig.transport.wait(0)
        connection.close()
        connection.close()

    open_and_close()
    with leave_nothing_open():
        for _ in range(1_000):
            open_and_close()
        assert not rig.transport._connections


@pytest.mark.parametrize("kind", RIGS)
def test_closing_a_transport_closes_its_connections(kind: str) -> None:
    """Closing twice raises nothing, and neither does `wake` after it."""
    rig: Any = RIGS[kind]()
    connections = [rig.transport.open(rig.engine().source) for _ in range(3)]
    rig.close()
    rig.transport.close()
    rig.transport.wake()
    for connection in connections:
        connection.close()
    assert not rig.transport._connections


def test_wake_ends_a_wait(rig: Any, open_connection: Callable[..., Reader]) -> None:
    """Another thread may call it during a wait or before the wait begins."""
    engine = rig.engine()
    reader = open_connection(engine)
    rig.connect(engine, reader)
    reader.read_until(lambda: reader.recorder.log == ["up"])
    reader.read_until_quiet()
    began = time.monotonic()
    waker = threading.Timer(0.05, rig.transport.wake)
    waker.start()
    rig.transport.wait(DEADLINE)
    waker.join()
    rig.transport.wait(DEADLINE)
    assert time.monotonic() - began < DEADLINE


def test_an_invalid_endpoint_raises_an_error_that_names_it(rig: Any) -> None:
    """It leaves no file descriptor and no connection."""
    too_long = "ipc:///" + 200 * "x"

    def open_and_close() -> None:
        with pytest.raises(EndpointError, match=too_long) as caught:
            rig.transport.open(Source(too_long))
        assert caught.value.endpoint == too_long
        assert not rig.transport._connections

    open_and_close()
    with leave_nothing_open():
        for _ in range(20):
            open_and_close()


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the levels of what was logged of connections, except that they are attempted."""
    return [each.levelname for each in caplog.records if not each.getMessage().startswith("connecting to ")]


def test_an_endpoint_where_nothing_listens_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The fault is in the log and in `connection.fault`. The first successful connection is logged too."""
    rig = RealRig()
    try:
        engine = rig.engine()
        engine.cut()
        with caplog.at_level("INFO", "kvevents.subscriber"):
            reader = Reader(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=False), rig.clock, 32)
            reader.read_until(lambda: bool(reader.connection.fault))
            reader.read_until_quiet(100)
            assert levels(caplog) == ["WARNING"]
            assert engine.source.endpoint in caplog.text
            engine.come_back()
            rig.connect(engine, reader)
            reader.read_until(lambda: reader.recorder.log == ["up"])
        assert reader.connection.fault == ""
        assert levels(caplog) == ["WARNING", "INFO"]
    finally:
        rig.close()


# --- real connections --------------------------------------------------------------------------------------------------------


@contextmanager
def open_connected_reader(**options: Any) -> Iterator[tuple[Any, Any, Reader]]:
    """Yield a rig, an engine and a connected reader."""
    rig = RealRig(**options)
    try:
        engine = rig.engine()
        reader = Reader(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=True), rig.clock, 32)
        rig.connect(engine, reader)
        reader.read_until(lambda: reader.recorder.log == ["up"])
        yield rig, engine, reader
    finally:
        rig.close()


@pytest.mark.parametrize(
    "end",
    [
        BATCH[:-3],
        b"\xf8" * 20,
        b"\x02" + (1 << 40).to_bytes(8, "big"),
        zmtp.encode_message([TOPIC, bytes(8), bytes(5_000)]),
        command(b"ERROR", b"\x03bad"),
        b"",
    ],
    ids=["cut off", "garbage", "a terabyte", "too large", "an error", "nothing"],
)
def test_batches_before_the_end_of_a_connection_arrive(end: bytes) -> None:
    """The next connection continues after them. A message that cannot be a batch ends its connection and nothing else."""
    with open_connected_reader() as (rig, engine, reader):
        engine.publish(0, 1)
        engine.send_bytes(end)
        engine.end_connection()
        rig.connect(engine, reader)
        engine.publish(2, 3)
        reader.read_until(lambda: len(reader.recorder.log) >= 7)
        reader.read_until_quiet()
        assert reader.recorder.numbers == [0, 1, 2, 3]
        assert [each for each in reader.recorder.log if isinstance(each, str)] == ["up", "down", "up"]


def test_batches_may_arrive_byte_by_byte() -> None:
    """They are decoded as if they had arrived in one piece."""
    with open_connected_reader() as (_, engine, reader):
        for number in range(3):
            for byte in zmtp.encode_message(live_frames(TOPIC, number, PAYLOAD)):
                engine.send_bytes(bytes((byte,)))
                reader()
        reader.read_until(lambda: len(reader.recorder.log) == 4)
        assert reader.recorder.log == ["up", 0, 1, 2]


def test_a_message_of_many_megabytes_arrives() -> None:
    """The batch after it arrives too."""
    with open_connected_reader(max_message_bytes=32_000_000) as (_, engine, reader):
        large = zmtp.encode_message(live_frames(TOPIC, 0, bytes(20_000_000)))
        sender = threading.Thread(target=lambda: (engine.send_bytes(large), engine.publish(1)), daemon=True)
        sender.start()
        reader.read_until(lambda: len(reader.recorder.log) == 3)
        sender.join(DEADLINE)
        assert reader.recorder.log == ["up", 0, 1]


def test_a_ping_is_answered_with_its_context() -> None:
    """No batch before or after the ping is lost."""
    with open_connected_reader() as (_, engine, reader):
        engine.publish(0)
        engine.send_bytes(command(b"PING", b"\0\x64context"))
        engine.publish(1)
        reader.read_until(lambda: command(b"PONG", b"context") in engine.received)
        engine.publish(2)
        reader.read_until(lambda: len(reader.recorder.log) == 4)
        assert reader.recorder.log == ["up", 0, 1, 2]


def test_an_immediate_reconnect_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Only failed attempts to connect are logged; a reconnect is visible in the trust of the stream."""
    with caplog.at_level("INFO", "kvevents.subscriber"), open_connected_reader() as (rig, engine, reader):
        for count in range(2, 6):
            engine.end_connection()
            rig.connect(engine, reader)
            reader.read_until(lambda count=count: reader.recorder.log.count("up") == count)  # type: ignore[misc]
            assert reader.connection.fault == ""
        assert levels(caplog) == []


def test_a_peer_that_closes_during_the_handshake_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that is not a publisher, such as a replay port, behaves in this way."""
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
        reader.read_until(lambda: bool(connection.fault))
        assert reader.recorder.log == []
        assert levels(caplog) == ["WARNING"]
        rig.close()


FLOODS = {
    "pings": command(b"PING", b"\0\0" + b"x" * 16) * 1_000,
    "odd messages": zmtp.encode_message([TOPIC] * 9) * 1_000,
    "batches": BATCH * 1_000,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flooding_peer_does_not_delay_other_connections(flood: bytes) -> None:
    """Batches of other connections arrive while the peer sends without pause."""
    with open_connected_reader() as (rig, hostile, flooded):
        engine_without_flood = rig.engine()
        reader = Reader(
            rig.transport, rig.transport.open(engine_without_flood.source), Recorder(reads_ahead=True), rig.clock, 32
        )
        rig.connect(engine_without_flood, reader)
        done = threading.Event()

        def send() -> None:
            with suppress(OSError):
                while not done.is_set():
                    hostile.send_bytes(flood)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        for number in range(50):
            engine_without_flood.publish(number)
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
