"""Tests of `LoadSubscriber` with real sockets: it returns the newest load of an engine for a bounded time, and rejects invalid
readings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvevents.errors import ConfigError, EndpointError
from kvevents.index import PrefixIndex
from kvevents.routing import LoadSettings, LoadSource, LoadSubscriber
from kvevents.routing.load_readings import MAX_METRICS_BYTES
from kvevents.service.discovery.engines import parse_server_info
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.registration import Registration
from kvevents.wire.load import EngineLoad
from load_cases import RECORDED, LoadServer
from name_cases import (
    Names,
    replace_names,  # noqa: F401 - a fixture, used by being here
)
from tools.ports import reserve_port

WORKER = ("a", 0)
DEADLINE = 60.0


class Engine:
    """Publishes load on a socket like the one that SGLang opens."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.set_hwm(8)
        self._socket.bind(endpoint)
        self.endpoint = endpoint
        self.seq = 0

    def await_subscriber(self) -> None:
        assert self._socket.poll(int(DEADLINE * 1000)), "nothing subscribes"
        assert self._socket.recv() == b"\1load"

    def send(self, load: EngineLoad) -> None:
        self.send_frames(b"load", self.seq.to_bytes(8, "big"), msgspec.msgpack.encode(load))
        self.seq += 1

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    found = Engine(f"ipc://{tmp_path}/load")
    yield found
    found.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end, pause = time.monotonic() + DEADLINE, threading.Event()
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        pause.wait(0.005)


def test_the_newest_reading_is_returned_with_its_age(engine: Engine) -> None:
    with LoadSubscriber([LoadSource(engine.endpoint, "a")]) as loads:
        assert loads.load(WORKER) is None
        assert loads.readings()[WORKER].age is None
        engine.await_subscriber()
        for running in range(5):
            engine.send(EngineLoad(running, 0, 0, 0))
        wait_until(lambda: loads.load(WORKER) == EngineLoad(4, 0, 0, 0))
        reading = loads.readings()[WORKER]
        assert (reading.received, reading.rejected) == (5, 0)
        assert reading.age is not None
        assert 0 <= reading.age < DEADLINE
        assert loads.load(("b", 0)) is None


def test_the_load_of_an_engine_that_stops_sending_expires(engine: Engine) -> None:
    with LoadSubscriber(
        [LoadSource(engine.endpoint, "a")], settings=LoadSettings(max_age_seconds=0.2, poll_seconds=0.1)
    ) as loads:
        engine.await_subscriber()
        engine.send(EngineLoad(1, 0, 0, 0))
        wait_until(lambda: loads.readings()[WORKER].received == 1)
        wait_until(lambda: loads.load(WORKER) is None)
        reading = loads.readings()[WORKER]
        assert reading.load is None
        assert reading.age is not None
        assert reading.age > 0.2


def test_invalid_messages_are_counted_and_change_nothing(engine: Engine) -> None:
    with LoadSubscriber([LoadSource(engine.endpoint, "a")]) as loads:
        engine.await_subscriber()
        engine.send(EngineLoad(7, 0, 0, 0))
        wait_until(lambda: loads.readings()[WORKER].received == 1)
        for frames in ([b"load"], [b"load", b"1", b"x"], [b"load", bytes(8), b"\xc1"], [b"load", bytes(8), b"\x90" * 5_000]):
            engine.send_frames(*frames)
        wait_until(lambda: loads.readings()[WORKER].rejected == 4)
        assert loads.load(WORKER) == EngineLoad(7, 0, 0, 0)


@pytest.fixture
def tcp_engine() -> Iterator[Engine]:
    made = Engine(f"tcp://127.0.0.1:{reserve_port()}")
    yield made
    made.close()


def at_host(engine: Engine, host: str) -> LoadSource:
    """Return the source of an engine, by a name of its host."""
    return LoadSource(engine.endpoint.replace("127.0.0.1", host), host)


def test_a_slow_name_costs_only_its_own_source(names: Names, tcp_engine: Engine) -> None:
    """The loads of other names arrive meanwhile, and its own when the name is known."""
    names.addresses = {"slow.example": ["127.0.0.1"], "quick.example": ["127.0.0.1"]}
    with LoadSubscriber([at_host(tcp_engine, "slow.example")]) as loads:
        loads.add(at_host(tcp_engine, "quick.example"))
        tcp_engine.await_subscriber()
        tcp_engine.send(EngineLoad(1, 0, 0, 0))
        wait_until(lambda: loads.load(("quick.example", 0)) == EngineLoad(1, 0, 0, 0))
        assert loads.readings()["slow.example", 0].received == 0
        names.release.set()

        def is_received() -> bool:
            tcp_engine.send(EngineLoad(2, 0, 0, 0))
            return loads.load(("slow.example", 0)) == EngineLoad(2, 0, 0, 0)

        wait_until(is_received)


def test_a_silent_name_is_resolved_again(names: Names, tcp_engine: Engine) -> None:
    """The name can be unknown at first, have several addresses, and get new addresses."""
    settings = LoadSettings(resolve_seconds=0.05)
    with LoadSubscriber([at_host(tcp_engine, "engine.example")], settings=settings) as loads:
        worker = ("engine.example", 0)
        wait_until(lambda: "cannot be resolved" in loads.readings()[worker].fault)
        names.addresses = {"engine.example": ["127.0.0.2", "127.0.0.1"]}  # nothing listens at the first

        def is_received() -> bool:
            tcp_engine.send(EngineLoad(1, 0, 0, 0))
            return loads.load(worker) is not None

        wait_until(is_received)
        lookups = len(names.lookups)
        wait_until(lambda: len(names.lookups) > lookups)  # since nothing more is sent


def test_streams_can_be_added_and_removed_while_others_continue(engine: Engine, tmp_path: Path) -> None:
    other = Engine(f"ipc://{tmp_path}/other")
    try:
        with LoadSubscriber() as loads:
            loads.add(LoadSource(engine.endpoint, "a"))
            engine.await_subscriber()
            loads.add(LoadSource(f"ipc://{tmp_path}/nothing-listens-here", "b"))
            loads.add(LoadSource(other.endpoint, "c", rank=1))
            other.await_subscriber()
            engine.send(EngineLoad(1, 0, 0, 0))
            other.send(EngineLoad(2, 0, 0, 0))
            wait_until(lambda: loads.load(WORKER) is not None and loads.load(("c", 1)) == EngineLoad(2, 0, 0, 0))
            loads.remove(("c", 1))
            loads.remove(("c", 1))
            assert loads.load(("c", 1)) is None
            loads.add(LoadSource(other.endpoint, "a"))
            assert loads.load(WORKER) is None, "the load of the former endpoint is dropped"
            assert set(loads.readings()) == {("a", 0), ("b", 0)}

            def is_connected() -> bool:
                other.send(EngineLoad(3, 0, 0, 0))
                return loads.load(WORKER) is not None

            wait_until(is_connected)
            assert loads.load(WORKER) == EngineLoad(3, 0, 0, 0)
    finally:
        other.close()
    loads.close()


def test_invalid_settings_raise_errors_that_name_the_setting() -> None:
    with pytest.raises(ConfigError, match="max_age_seconds"):
        LoadSettings(max_age_seconds=0)
    with pytest.raises(ConfigError, match="poll_seconds 5: expected less than max_age_seconds"):
        LoadSettings(poll_seconds=5.0)
    with pytest.raises(ConfigError, match="rank"):
        LoadSource("tcp://a:1", "a", rank=-1)
    with pytest.raises((ConfigError, EndpointError)):
        LoadSource("nowhere", "a")
    with pytest.raises(ConfigError, match="load"):
        LoadSource("http://", "a")
    assert not [thread for thread in threading.enumerate() if thread.name == "kvevents-load"]


def test_a_service_shows_the_load_of_its_sources(engine: Engine, tmp_path: Path) -> None:
    """The registration names the load endpoint. A source whose load endpoint is invalid is followed without its load."""
    fleet = Fleet(PrefixIndex(), max_sources=4)
    fleet.follower.start()
    try:
        events = f"ipc://{tmp_path}/events"
        good = Registration(instance="a", endpoint=events, model="m", load=engine.endpoint)
        bad = Registration(instance="b", endpoint=events, model="m", load="nowhere")
        for registration in (good, bad):
            fleet.register(registration).result(DEADLINE)
        member = fleet.members[good.key]
        assert member.view().load is None
        engine.await_subscriber()
        engine.send(EngineLoad(3, 2, 50, 100, waiting_uncached_tokens=7))
        wait_until(lambda: member.view().load is not None)
        shown = member.view().load
        assert shown is not None
        assert (shown.running, shown.waiting, shown.waiting_uncached_tokens, shown.used_tokens) == (3, 2, 7, 50)
        assert 0 <= shown.age_seconds < DEADLINE
        assert fleet.members[bad.key].view().load is None
        assert "nowhere" in str(fleet.members[bad.key].view().load_fault)
        assert member.engine_load == EngineLoad(3, 2, 50, 100, waiting_uncached_tokens=7)
        fleet.unregister(good.key).result(DEADLINE)
        assert member.view().load is None
    finally:
        fleet.follower.stop()
        fleet.loads.close()


@pytest.mark.parametrize(("port", "expected"), [(5559, "tcp://10.0.0.1:5560"), (None, None), (65_535, None), (-3, None)])
def test_discovery_reads_the_load_endpoint_of_sglang(port: int | None, expected: str | None) -> None:
    """Rank 1 is one port higher. If the port does not exist, the source has no load but is still discovered."""
    answer = {"kv_events": {"endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2, "load_endpoint_port_base": port}}
    found = parse_server_info(answer, "10.0.0.1")
    assert found.endpoints[1].load == expected
    assert found.missing_ranks == {}


# --- polled servers


@pytest.fixture(name="server")
def running_server() -> Iterator[LoadServer]:
    found = LoadServer()
    yield found
    found.close()


QUICK = LoadSettings(max_age_seconds=0.5, poll_seconds=0.05, request_seconds=0.3)


def test_a_server_is_polled_once_for_all_its_ranks(server: LoadServer) -> None:
    """One request returns the load of both ranks. Changes are read by later requests; a removed rank has no load."""
    sources = [LoadSource(server.url, "a", rank) for rank in range(2)]
    with LoadSubscriber(sources, settings=LoadSettings(poll_seconds=0.05)) as loads:
        wait_until(lambda: None not in {loads.load(("a", 0)), loads.load(("a", 1))})
        assert loads.load(("a", 0)) == EngineLoad(3, 2, 2_048, 8_192, rank=0)
        assert loads.load(("a", 1)) == EngineLoad(1, 0, 4_096, 8_192, rank=1)
        readings = loads.readings()
        assert abs(readings["a", 0].received - readings["a", 1].received) <= 1
        assert set(server.requests) == {"/metrics"}
        server.body = RECORDED.replace(b"} 3.0", b"} 11.0")
        wait_until(lambda: (found := loads.load(("a", 0))) is not None and found.running == 11)
        loads.remove(("a", 0))
        assert loads.load(("a", 0)) is None
        loads.remove(("a", 1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvevents-load")]


def test_the_load_of_a_failing_server_is_unknown_until_it_recovers(
    server: LoadServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvevents.routing.load_polling")
    settings = LoadSettings(max_age_seconds=3.0, poll_seconds=0.05, request_seconds=2.0)
    with LoadSubscriber([LoadSource(server.url, "a")], settings=settings) as loads:
        wait_until(lambda: loads.load(WORKER) is not None)
        server.status = 503
        wait_until(lambda: loads.load(WORKER) is None)
        reading = loads.readings()[WORKER]
        assert reading.fault == f"{server.url}/metrics answers with status 503"
        assert reading.rejected > 0
        server.status, server.body = 200, b"# nothing\n"
        wait_until(lambda: "has no vllm:num_requests_running" in loads.readings()[WORKER].fault)
        server.release.clear()
        wait_until(lambda: loads.readings()[WORKER].fault.endswith("does not answer in time"))
        server.body = RECORDED
        server.release.set()
        wait_until(lambda: loads.load(WORKER) is not None)
        assert loads.readings()[WORKER].fault == ""
        wait_until(lambda: len(caplog.records) == 2)
    sentences = [record.getMessage() for record in caplog.records]
    assert sentences == [
        f"the load of an engine is unknown: {server.url}/metrics answers with status 503",
        f"the load of an engine is known again: {server.url}/metrics",
    ], "the fault is logged once when it begins and once when it ends"


def test_the_load_is_unknown_if_the_response_is_too_large_or_nothing_listens(server: LoadServer) -> None:
    server.body = b"#" * (MAX_METRICS_BYTES + 1)
    sources = [LoadSource(server.url, "a"), LoadSource(f"http://127.0.0.1:{reserve_port()}", "b")]
    with LoadSubscriber(sources, settings=QUICK) as loads:
        wait_until(lambda: "bytes" in loads.readings()[WORKER].fault)
        wait_until(lambda: "does not answer" in loads.readings()["b", 0].fault)
        assert loads.load(WORKER) is loads.load(("b", 0)) is None


def test_a_server_that_hangs_delays_neither_other_servers_nor_closing(server: LoadServer) -> None:
    other = LoadServer()
    try:
        server.release.clear()
        settings = LoadSettings(poll_seconds=0.05, request_seconds=DEADLINE)
        with LoadSubscriber([LoadSource(server.url, "a"), LoadSource(other.url, "b")], settings=settings) as loads:
            wait_until(lambda: loads.load(("b", 0)) is not None)
            assert loads.load(WORKER) is None
            assert loads.readings()[WORKER].fault == f"nothing has arrived from {server.url} yet"
            began = time.monotonic()
        assert time.monotonic() - began < DEADLINE / 2
    finally:
        other.close()


def test_a_callback_that_raises_costs_no_load(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The thread receives the load of all engines, and goes on. The same exception is logged once."""
    calls: list[EngineLoad] = []

    def on_load(_worker: object, load: EngineLoad) -> None:
        calls.append(load)
        raise KeyError("bug")

    with LoadSubscriber([LoadSource(engine.endpoint, "a")], on_load=on_load) as loads:
        engine.await_subscriber()
        for running in range(3):
            engine.send(EngineLoad(running, 0, 0, 0))
        wait_until(lambda: len(calls) == 3)
        wait_until(lambda: loads.load(WORKER) == EngineLoad(2, 0, 0, 0))
        loads.add(LoadSource("ipc:///nowhere", "b"))
    assert caplog.text.count("on_load has failed for a load of a rank 0") == 1


def test_a_callback_that_raises_does_not_end_the_polls(server: LoadServer) -> None:
    calls: list[object] = []

    def on_load(worker: object, _load: EngineLoad) -> None:
        calls.append(worker)
        raise KeyError("bug")

    with LoadSubscriber([LoadSource(server.url, "a")], settings=QUICK, on_load=on_load):
        wait_until(lambda: len(calls) >= 3)
