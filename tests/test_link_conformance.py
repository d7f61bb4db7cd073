"""What every link does, whatever is under it: libzmq, or the fake in memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from kvevents.errors import EndpointError
from kvevents.stream import Ask, Source
from kvevents.testing import zmtp
from kvevents.wire import live_frames
from link_cases import DEADLINE, PAYLOAD, RIGS, TOPIC, Pumps, RealRig, Recorder, Rig, descriptors
from ports import LOOPBACK

BATCH = zmtp.message(live_frames(TOPIC, 9, PAYLOAD))


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each transport in turn."""
    made = RIGS[request.param]()
    yield made
    made.close()


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def open_link(rig: Rig, request: pytest.FixtureRequest) -> Callable[..., Pumps]:
    """Opens a link to an engine; how far its stream lets it read ahead makes no difference."""

    def start(engine: Any, limit: int = 32) -> Pumps:
        link = rig.transport.open(engine.source)
        return Pumps(rig.transport, link, Recorder(reads_ahead=request.param), rig.clock, limit)

    return start


def test_batches_come_in_order_after_the_connection(rig: Any, open_link: Callable[..., Pumps]) -> None:
    """`connected` is first, then every batch once, in the order in which they were sent."""
    engine = rig.engine()
    pump = open_link(engine)
    rig.connect(engine, pump)
    engine.publish(*range(100))
    pump.until(lambda: len(pump.recorder.log) > 100)
    assert pump.recorder.log == ["up", *range(100)]


@pytest.mark.parametrize("limit", [1, 3, 1_000])
def test_what_came_before_a_disconnect_is_fed_before_it(rig: Any, open_link: Callable[..., Pumps], limit: int) -> None:
    """Though both are found at once, by an application that was busy meanwhile, and however few are read at a time."""
    engine = rig.engine()
    pump = open_link(engine, limit)
    rig.connect(engine, pump)
    engine.publish(0)
    pump.until(lambda: pump.recorder.log == ["up", 0])
    pump.quiet()
    engine.publish(*range(1, 10))
    engine.cut()
    rig.settle(pump.link)
    pump.until(lambda: "down" in pump.recorder.log)
    assert pump.recorder.log == ["up", *range(10), "down"]


def test_each_change_of_the_connection_is_signalled_once_and_in_its_place(rig: Any, open_link: Callable[..., Pumps]) -> None:
    """Down behind what was sent before, up before what was sent after, and neither twice however long nothing answers."""
    engine = rig.engine()
    pump = open_link(engine)
    expected: list[object] = []
    for number in range(0, 20, 2):
        rig.connect(engine, pump)
        pump.until(lambda: pump.recorder.log[-1:] == ["up"])
        engine.publish(number, number + 1)
        engine.cut()
        rig.settle(pump.link)
        pump.until(lambda: pump.recorder.log[-1:] == ["down"])
        pump.quiet()
        engine.come_back()
        expected += ["up", number, number + 1, "down"]
    assert pump.recorder.log[: len(expected)] == expected


@pytest.mark.parametrize("receive_hwm", [0, 8, 1_000])
@pytest.mark.parametrize("kind", RIGS)
def test_a_new_connection_is_signalled_behind_everything_older(kind: str, receive_hwm: int) -> None:
    """Though it is up before any of that was read, and whether or not the socket's limit says how much that may be."""
    rig: Any = RIGS[kind](receive_hwm=receive_hwm)
    try:
        engine = rig.engine()
        pump = Pumps(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=False), rig.clock, limit=1)
        rig.connect(engine, pump)
        engine.publish(0)
        pump.until(lambda: pump.recorder.log == ["up", 0])
        pump.quiet()
        engine.publish(1, 2, 3)
        engine.cut()
        engine.come_back()
        rig.connect_unread(engine, 2)
        rig.connect(engine, pump)
        pump.until(lambda: pump.recorder.log.count("up") == 2)
        engine.publish(4)
        pump.until(lambda: 4 in pump.recorder.log)
        assert pump.recorder.numbers == [0, 1, 2, 3, 4]
        assert [each for each in pump.recorder.log if each not in {1, 2, 3}] == ["up", 0, "down", "up", 4]
        assert pump.recorder.log[-2:] == ["up", 4]
    finally:
        rig.close()


def test_replay_answers_come_and_a_fresh_request_gets_no_old_ones(rig: Any, open_link: Callable[..., Pumps]) -> None:
    """A request may be sent on the same connection or a fresh one; after `end_replay` nothing is fed any more."""
    engine = rig.engine()
    pump = open_link(engine)
    rig.connect(engine, pump)
    pump.until(lambda: pump.recorder.log == ["up"])
    pump.link.send(Ask(0, fresh=True))
    engine.answer(0, 1)
    pump.until(lambda: "end" in pump.recorder.log)
    pump.link.send(Ask(2, fresh=False))
    engine.answer(2)
    pump.until(lambda: pump.recorder.log.count("end") == 2)
    pump.link.send(Ask(3, fresh=False))
    engine.answer(3)
    pump.link.send(Ask(4, fresh=True))
    engine.answer(4)
    pump.until(lambda: pump.recorder.log.count("end") == 3)
    assert pump.recorder.log == ["up", ("replay", 0), ("replay", 1), "end", ("replay", 2), "end", ("replay", 4), "end"]
    pump.link.send(Ask(5, fresh=False))
    engine.answer(5)
    pump.link.end_replay()
    pump.quiet()
    assert pump.recorder.log.count("end") == 3


def test_while_nothing_is_missing_all_that_is_live_comes_before_an_answer(rig: Any) -> None:
    """It may be of a life that ended before the one that answers, and would be dropped behind the news of that."""
    engine = rig.engine()
    pump = Pumps(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=True), rig.clock, 10)
    rig.connect(engine, pump)
    pump.until(lambda: pump.recorder.log == ["up"])
    pump.link.send(Ask(0, fresh=True))
    engine.publish(*range(100))
    engine.answer(*range(100, 150))
    log: list[object] = pump.recorder.log
    while "end" not in log or len(log) < 152:
        before = len(log)
        pump()
        came = log[before:]
        is_live_left = sum(isinstance(each, int) for each in came) == 10 and pump.recorder.numbers != list(range(100))
        assert not is_live_left or all(isinstance(each, int) for each in came)
    assert pump.recorder.numbers == list(range(100))


@pytest.mark.parametrize("limit", [1, 7])
def test_no_more_than_the_limit_is_fed_at_once(rig: Any, open_link: Callable[..., Pumps], limit: int) -> None:
    """Of live messages and of replayed ones; `pump` says that there are more until the last one is fed."""
    engine = rig.engine()
    pump = open_link(engine, limit)
    rig.connect(engine, pump)
    pump.until(lambda: pump.recorder.log == ["up"])
    engine.publish(*range(50))
    pump.link.send(Ask(0, fresh=True))
    engine.answer(*range(50))
    before = 1
    while len(pump.recorder.log) < 102:
        pump()
        came = pump.recorder.log[before:]
        before += len(came)
        assert sum(isinstance(each, int) for each in came) <= limit
        assert sum(not isinstance(each, int) for each in came) <= limit
    assert pump.recorder.numbers == list(range(50))


def test_messages_that_are_no_batches_are_fed_as_they_are(rig: Any, open_link: Callable[..., Pumps]) -> None:
    """1, 2, 4 and 9 frames, numbers of 0, 4 and 16 bytes, between good ones, of which none is lost."""
    engine = rig.engine()
    pump = open_link(engine)
    rig.connect(engine, pump)
    odd = [[b"kv"], [b"kv"] * 2, [b"kv"] * 4, [b"kv"] * 9, [b"kv", b"\0" * 4, b"x"], [b"kv", b"", b"x"]]
    expected: list[object] = ["up"]
    for number, frames in enumerate(odd):
        engine.publish(number)
        engine.send_raw(frames)
        expected += [number, ("odd", len(frames))]
    pump.until(lambda: len(pump.recorder.log) == len(expected))
    assert pump.recorder.log == expected


def test_links_come_and_go_without_end(rig: Any) -> None:
    """Nothing is left of those that are closed: no descriptor, and nothing that counts against a limit of links."""
    engine = rig.engine()

    def once() -> None:
        link = rig.transport.open(engine.source)
        rig.transport.wait(0)
        link.close()
        link.close()

    once()
    before = descriptors()
    for _ in range(1_000):
        once()
    assert not rig.transport._links
    assert descriptors() <= before + 2


@pytest.mark.parametrize("kind", RIGS)
def test_a_closed_transport_has_closed_its_links(kind: str) -> None:
    """Closing twice is fine, and so is waking afterwards."""
    rig: Any = RIGS[kind]()
    links = [rig.transport.open(rig.engine().source) for _ in range(3)]
    rig.close()
    rig.transport.close()
    rig.transport.wake()
    for link in links:
        link.close()
    assert not rig.transport._links


def test_waking_ends_a_wait(rig: Any, open_link: Callable[..., Pumps]) -> None:
    """From another thread, in the middle of it, and before it has begun."""
    engine = rig.engine()
    pump = open_link(engine)
    rig.connect(engine, pump)
    pump.until(lambda: pump.recorder.log == ["up"])
    pump.quiet()
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
        assert not rig.transport._links

    once()
    before = descriptors()
    for _ in range(20):
        once()
    assert descriptors() <= before + 2


def test_an_endpoint_where_nothing_listens_is_logged_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """In the log, in the link and so in the reason of the trust; when something listens at last, that is logged too."""
    rig = RealRig()
    try:
        engine = rig.engine()
        engine.cut()
        with caplog.at_level("INFO", "kvevents.subscriber"):
            pump = Pumps(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=False), rig.clock, 32)
            pump.until(lambda: bool(pump.link.fault))
            pump.quiet(100)
            assert [each.levelname for each in caplog.records] == ["WARNING"]
            assert engine.source.endpoint in caplog.text
            engine.come_back()
            rig.connect(engine, pump)
            pump.until(lambda: pump.recorder.log == ["up"])
        assert pump.link.fault == ""
        assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]
    finally:
        rig.close()


# --- what is sent over real connections --------------------------------------------------------------------------------------


@contextmanager
def connected(**options: Any) -> Iterator[tuple[Any, Any, Pumps]]:
    """A rig, an engine and a link that is up."""
    rig = RealRig(**options)
    try:
        engine = rig.engine()
        pump = Pumps(rig.transport, rig.transport.open(engine.source), Recorder(reads_ahead=True), rig.clock, 32)
        rig.connect(engine, pump)
        pump.until(lambda: pump.recorder.log == ["up"])
        yield rig, engine, pump
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
    with connected() as (rig, engine, pump):
        engine.publish(0, 1)
        engine.send_bytes(end)
        engine.end_connection()
        rig.connect(engine, pump)
        engine.publish(2, 3)
        pump.until(lambda: len(pump.recorder.log) >= 7)
        pump.quiet()
        assert pump.recorder.numbers == [0, 1, 2, 3]
        assert [each for each in pump.recorder.log if isinstance(each, str)] == ["up", "down", "up"]


def test_bytes_may_come_one_by_one() -> None:
    """Batches in pieces of a byte are the same as in one."""
    with connected() as (_, engine, pump):
        for number in range(3):
            for byte in zmtp.message(live_frames(TOPIC, number, PAYLOAD)):
                engine.send_bytes(bytes((byte,)))
                pump()
        pump.until(lambda: len(pump.recorder.log) == 4)
        assert pump.recorder.log == ["up", 0, 1, 2]


def test_a_message_of_many_megabytes_arrives() -> None:
    """Room is made for it as it comes; the batch behind it arrives too."""
    with connected(max_message_bytes=32_000_000) as (_, engine, pump):
        large = zmtp.message(live_frames(TOPIC, 0, bytes(20_000_000)))
        sender = threading.Thread(target=lambda: (engine.send_bytes(large), engine.publish(1)), daemon=True)
        sender.start()
        pump.until(lambda: len(pump.recorder.log) == 3)
        sender.join(DEADLINE)
        assert pump.recorder.log == ["up", 0, 1]


def test_a_ping_is_answered_with_its_context() -> None:
    """In the midst of batches, of which none is lost by it."""
    with connected() as (_, engine, pump):
        engine.publish(0)
        engine.send_bytes(zmtp.command(b"PING", b"\0\x64context"))
        engine.publish(1)
        pump.until(lambda: zmtp.command(b"PONG", b"context") in engine.received)
        engine.publish(2)
        pump.until(lambda: len(pump.recorder.log) == 4)
        assert pump.recorder.log == ["up", 0, 1, 2]


def test_a_connection_that_is_made_again_at_once_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Trust shows it. A line is worth what has failed: an attempt to connect."""
    with caplog.at_level("INFO", "kvevents.subscriber"), connected(handshake_ms=20_000) as (rig, engine, pump):
        for count in range(2, 6):
            engine.end_connection()
            rig.connect(engine, pump)
            pump.until(lambda count=count: pump.recorder.log.count("up") == count)  # type: ignore[misc]
            assert pump.link.fault == ""
        assert caplog.records == []


def test_what_listens_and_is_no_publisher_is_logged_once_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """The port of something else, such as one for replay: a peer that closes before it has introduced itself."""
    rig = RealRig()
    with socket.create_server((LOOPBACK, 0)) as server, caplog.at_level("INFO", "kvevents.subscriber"):
        server.settimeout(DEADLINE)
        link = rig.transport.open(Source(f"tcp://{LOOPBACK}:{server.getsockname()[1]}"))
        pump = Pumps(rig.transport, link, Recorder(reads_ahead=False), rig.clock, 32)
        server.setblocking(False)
        count = 0
        end = time.monotonic() + DEADLINE
        while count < 5:
            assert time.monotonic() < end
            pump()
            with suppress(BlockingIOError):
                server.accept()[0].close()
                count += 1
        pump.until(lambda: bool(link.fault))
        assert pump.recorder.log == []
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        rig.close()


FLOODS = {
    "pings": zmtp.command(b"PING", b"\0\0" + b"x" * 16) * 1_000,
    "odd messages": zmtp.message([TOPIC] * 9) * 1_000,
    "batches": BATCH * 1_000,
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_peer_that_floods_costs_other_links_nothing(flood: bytes) -> None:
    """Their batches arrive, in their turn, while it sends without end."""
    with connected() as (rig, hostile, flooded):
        calm = rig.engine()
        pump = Pumps(rig.transport, rig.transport.open(calm.source), Recorder(reads_ahead=True), rig.clock, 32)
        rig.connect(calm, pump)
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
            pump.now()
        end = time.monotonic() + DEADLINE
        while pump.recorder.numbers != list(range(50)):
            assert time.monotonic() < end
            flooded.now()
            pump.now()
        done.set()
        while sender.is_alive():
            assert time.monotonic() < end
            flooded.now()
