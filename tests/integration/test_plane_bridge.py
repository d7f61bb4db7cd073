"""Tests of bridges on a real NATS server: the log has all events of the engines, regardless of which bridge writes or is
killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from nats.js import JetStreamContext

from bridge_cases import BridgeProcess, PublishingEngine, reports_by_bridge, run_with_jetstream, wait_until_complete
from cli_cases import refuse_connections
from kvevents.errors import ConfigError, PlaneError
from kvevents.stream import Gap, RawBatch, Reset, Source
from kvevents_plane.bridge import Bridge, BridgeSettings, Watch
from kvevents_plane.bridge_rules import REACHED_STATES
from kvevents_plane.engine_reader import MAX_REGISTRATION_BYTES
from kvevents_plane.partition_state import StreamLeft
from kvevents_plane.records import FragmentRecord
from kvevents_plane.settings import PlaneSettings
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import SECONDS, Log, ThreadRunner, plane_at, run_bridge
from publisher_cases import batch, hold_publisher
from service_cases import wait_for
from tools.nats_servers import NatsServer, nats_server

pytestmark = needs_nats


@pytest.fixture(name="plane")
def plane_of_its_own(server: NatsServer, request: pytest.FixtureRequest) -> PlaneSettings:
    return plane_at(server.url, name=f"t{abs(hash(request.node.name))}")


def test_the_log_has_every_batch_once_and_in_order(plane: PlaneSettings) -> None:
    with PublishingEngine() as engine, run_bridge(plane, engine.watch) as bridge:
        engine.publish_next(500)
        log = wait_until_complete(Log(plane), engine)
        assert log.numbers() == list(range(500))
        wait_for("the last acknowledgement", lambda: bridge.written == 500, SECONDS)
        assert bridge.trusts().keys() == {("engine", 0)}
        assert len(log.pages) < 500
        engine.publish_next()  # the other batches may all have been replayed
        log.wait_for("trust", lambda log: {report.trust for report in reports_by_bridge(log).values()} == {"EXACT"})


# --- two bridges


def test_two_bridges_write_one_log(plane: PlaneSettings) -> None:
    """Both bridges follow the same engines and both write. The log has no batch twice, and each bridge writes a part."""
    with (
        PublishingEngine("e1") as one,
        PublishingEngine("e2") as two,
        run_bridge(plane, one.watch, two.watch, name="a") as a,
        run_bridge(plane, one.watch, two.watch, name="b") as b,
    ):
        with one.publish_continuously(), two.publish_continuously():
            wait_for("both to write", lambda: a.written > 50 and b.written > 50, SECONDS)
        log = wait_until_complete(Log(plane), one, two)
        assert log.numbers("e1") == list(range(one.truth.count))
        batches = one.truth.count + two.truth.count
        wait_for("the last acknowledgement", lambda: a.written + b.written == batches, SECONDS)
        assert a.invalid_records == b.invalid_records == 0
        log.wait_for(
            "both to be EXACT", lambda log: {n: each.trust for n, each in reports_by_bridge(log, "e1").items()} == EXACT_BOTH
        )


EXACT_BOTH = {"a": "EXACT", "b": "EXACT"}


@pytest.mark.parametrize("batches", [1, 50, 200])
def test_a_bridge_that_is_killed_loses_nothing(plane: PlaneSettings, batches: int) -> None:
    """A single bridge is killed at several moments. Its successor continues from the log and replays the rest from the
    engine."""
    with PublishingEngine() as engine, engine.publish_continuously():
        log = Log(plane)
        with BridgeProcess(plane, engine, name="first").wait_until_ready() as first:
            log.wait_for("some of it", lambda log: len(log.numbers()) >= batches)
            first.kill()
        seen = engine.truth.count
        wait_for("more batches", lambda: engine.truth.count > seen + 20, SECONDS)
        with run_bridge(plane, engine.watch, name="second"):
            log.wait_for("all of it", lambda log: len(log.numbers()) > seen + 20)
            assert log.numbers() == list(range(len(log.numbers())))
            assert log.flaws == (0, 0)
            assert not [each for each in log.events if isinstance(each, Reset)]


def test_one_of_two_bridges_can_be_killed_and_restarted(plane: PlaneSettings) -> None:
    with PublishingEngine() as engine:
        log = Log(plane)
        with engine.publish_continuously(), run_bridge(plane, engine.watch, name="stays"):
            for _ in range(2):
                with BridgeProcess(plane, engine, name="dies").wait_until_ready() as dies:
                    before = engine.truth.count
                    log.wait_for("the report of the other bridge", lambda log: "dies" in reports_by_bridge(log))
                    log.wait_for("some more", lambda log, before=before: len(log.numbers()) > before + 20)
                    dies.kill()
        with run_bridge(plane, engine.watch, name="dies"):
            wait_until_complete(log, engine)
        assert log.numbers() == list(range(engine.truth.count))
        assert not [each for each in log.events if isinstance(each, Reset)]


def test_a_paused_bridge_writes_no_stale_batches_when_it_resumes(plane: PlaneSettings) -> None:
    """While a bridge is paused, another one writes and the engine restarts. The paused bridge then resumes with batches of the
    old incarnation."""
    with PublishingEngine() as engine:
        log = Log(plane)
        with (
            BridgeProcess(plane, engine, name="paused").wait_until_ready() as paused,
            run_bridge(plane, engine.watch, name="other"),
        ):
            engine.publish_next(50)
            log.wait_for("the first of it", lambda log: len(log.numbers()) == 50)
            paused.pause()
            engine.publish_next(50)
            log.wait_for("the rest of it", lambda log: len(log.numbers()) == 100)
            engine.restart()
            engine.publish_next(70)
            wait_until_complete(log, engine)
            paused.resume()
            with engine.publish_continuously():
                log.wait_for(
                    "its report on this incarnation",
                    lambda log: reports_by_bridge(log).get("paused", NoReport).trust == "EXACT",
                )
                log.wait_for("some more", lambda log: log.events and last_number(log) > 100)
            wait_until_complete(log, engine)
        assert [each.incarnation for each in log.events if isinstance(each, Reset)] == [1]


class NoReport:
    trust = ""


def last_number(log: Log) -> int:
    last = [each for each in log.events if isinstance(each, RawBatch)][-1]
    return last.seq


# --- engines that restart


@pytest.mark.parametrize("bridges", [1, 2])
def test_an_engine_that_restarts_begins_a_new_incarnation(plane: PlaneSettings, bridges: int) -> None:
    """The log has one `Reset`, regardless of how many bridges see the restart. Late batches of the old incarnation are
    ignored."""
    names = [f"b{at}" for at in range(bridges)]
    with PublishingEngine() as engine:
        log = Log(plane)
        with BridgesOfEngine(plane, engine, names):
            for restarts in range(1, 4):
                engine.publish_next(40)
                wait_until_complete(log, engine)
                engine.restart()
                engine.publish_next(3)
                wait_until_complete(log, engine)
                resets = [each.incarnation for each in log.events if isinstance(each, Reset)]
                assert resets == list(range(1, restarts + 1))


class BridgesOfEngine:
    """Runs several bridges of one engine."""

    def __init__(self, plane: PlaneSettings, engine: PublishingEngine, names: list[str]) -> None:
        self._running = [
            ThreadRunner(Bridge(plane, BridgeSettings(name=name, heartbeat_seconds=0.2), [engine.watch])) for name in names
        ]

    def __enter__(self) -> None:
        wait_for("the bridges", lambda: all(each.what.ready.is_set() or each.error for each in self._running), SECONDS)

    def __exit__(self, *_: object) -> None:
        for running in self._running:
            running.end()


@pytest.mark.parametrize("count", [40, 41])
def test_a_bridge_notices_a_restart_that_happened_while_none_ran(plane: PlaneSettings, count: int) -> None:
    """The new incarnation may be as long as the old one: the bytes of its batches differ."""
    with PublishingEngine() as engine:
        log = Log(plane)
        with run_bridge(plane, engine.watch):
            engine.publish_next(40)
            wait_until_complete(log, engine)
        engine.restart()
        engine.publish_next(count)
        with run_bridge(plane, engine.watch):
            wait_until_complete(log, engine)
        assert [each.incarnation for each in log.events if isinstance(each, Reset)] == [1]


def test_a_bridge_counts_as_alive_when_it_is_ready(plane: PlaneSettings) -> None:
    """Its first heartbeat does not wait for the next interval; until then, replicas and other bridges ignore its reports."""
    log = Log(plane)
    with PublishingEngine() as engine, run_bridge(plane, engine.watch, heartbeat_seconds=60.0):
        wait_for("heartbeats", lambda: all(state.heartbeats for state in log.read().states.values()), 30.0)


# --- what engines and others send


def test_batches_larger_than_a_message_are_split_and_joined(tmp_path: Path) -> None:
    """The batch is also complete if a bridge is killed between two fragments and another bridge continues."""
    large = 1 << 20
    with nats_server(tmp_path, max_payload=64 << 10) as small, PublishingEngine() as engine:
        plane = plane_at(small.url)
        log = Log(plane)
        with BridgeProcess(plane, engine, name="first").wait_until_ready() as first:
            engine.publish(batch(1, large // 64))
            log.wait_for(
                "a piece", lambda log: any(isinstance(record, FragmentRecord) for page in log.pages for record in page.records)
            )
            first.kill()
        log.read()
        assert log.numbers() in ([], [0])
        with run_bridge(plane, engine.watch, name="second"):
            engine.publish_next(5)
            wait_until_complete(log, engine)
            engine.publish(batch(2, large // 64))
            engine.publish_next(5)
            wait_until_complete(log, engine)
        assert max(len(each.payload) for each in log.events if isinstance(each, RawBatch)) > large


@pytest.mark.parametrize("bridges", [1, 2])
def test_a_batch_that_no_bridge_received_is_logged_as_one_gap(plane: PlaneSettings, bridges: int) -> None:
    """The stream is DEGRADED afterwards."""
    names = [f"b{at}" for at in range(bridges)]
    with PublishingEngine() as engine, BridgesOfEngine(plane, engine, names):
        engine.publish_next(10)
        log = Log(plane).wait_for("the first of it", lambda log: len(log.numbers()) == 10)
        with hold_publisher(engine.publisher):
            pass  # uses up a number
        engine.publish_next(10)
        log.wait_for("the rest", lambda log: log.numbers()[-1] >= 20)
        assert log.numbers() == [each for each in range(log.numbers()[-1] + 1) if each != 10]
        assert [(each.first, each.last) for each in log.events if isinstance(each, Gap)] == [(10, 10)]
        assert log.flaws == (0, 0)
        log.wait_for("their trust", lambda log: {report.trust for report in reports_by_bridge(log).values()} == {"DEGRADED"})
        assert all("lost" in report.reason for report in reports_by_bridge(log).values())


# --- engines that are unreachable


def test_an_unreachable_engine_leaves_and_returns_with_a_new_incarnation(plane: PlaneSettings) -> None:
    with PublishingEngine() as engine, PublishingEngine("other") as other:
        log = Log(plane)
        with run_bridge(plane, engine.watch, other.watch, dead_seconds=0.3):
            for restarts in (1, 2):
                engine.publish_next(10)
                wait_until_complete(log, engine)
                engine.end()
                log.wait_for(
                    "it to leave",
                    lambda log, restarts=restarts: [type(event) for event in log.events].count(StreamLeft) == restarts,
                )
                engine.restart()
                engine.publish_next(5)
                wait_until_complete(log, engine)
                assert [each.incarnation for each in log.events if isinstance(each, Reset)] == list(range(1, restarts + 1))
        assert {each.key for each in log.events if isinstance(each, StreamLeft)} == {("engine", 0)}


def test_engines_that_become_unreachable_all_at_once_do_not_leave(plane: PlaneSettings) -> None:
    """The bridges suspect the network. An engine that is unreachable after the suspicion ends leaves."""
    engines = [PublishingEngine(f"e{at}") for at in range(4)]
    log = Log(plane)
    with run_bridge(plane, *(engine.watch for engine in engines), dead_seconds=0.3) as bridge:
        for engine in engines:
            engine.publish_next(10)
        wait_until_complete(log, *engines)
        for engine in engines[:3]:
            engine.end()
        wait_for("the suspicion", lambda: bridge.liveness.suspicion, SECONDS)
        assert bridge.liveness.suspicion.endswith("of 4 engines are unreachable")
        pages = len(log.read().pages)
        # Heartbeats continue for longer than an engine needs to leave.
        log.wait_for("some time", lambda log: len(log.pages) > pages + 10)
        assert not [each for each in log.events if isinstance(each, StreamLeft)]
        engines[0].restart()
        engines[0].publish_next(3)
        wait_for("the end of the suspicion", lambda: not bridge.liveness.suspicion, SECONDS)
        log.wait_for("two to leave", lambda log: find_departed_sources(log) >= {"e1", "e2"})
        wait_until_complete(log, engines[0], engines[3])
        assert find_departed_sources(log) == {"e1", "e2"}
    for engine in engines:
        engine.end()


def test_an_engine_that_another_bridge_reaches_does_not_leave(plane: PlaneSettings) -> None:
    """The engine leaves when that bridge is gone as well."""
    with refuse_connections() as nowhere, PublishingEngine() as engine, PublishingEngine("other") as other:
        log = Log(plane)
        unreachable = Watch(Source(nowhere, None, name="engine"), b"card")
        bridge = BridgeProcess(plane, engine, name="reaches", heartbeat_seconds=1.0)  # alive for 3 s, also if busy
        with bridge.wait_until_ready() as reaches:
            engine.publish_next(10)
            wait_until_complete(log, engine)
            log.wait_for("its report", lambda log: {each.trust for each in reports_by_bridge(log).values()} & REACHED_STATES)
            with run_bridge(plane, unreachable, other.watch, name="does not", dead_seconds=2.0):
                pages = len(log.pages)
                log.wait_for("some time", lambda log: len(log.pages) > pages + 40)
                assert not [each for each in log.events if isinstance(each, StreamLeft)]
                reaches.kill()
                log.wait_for("it to leave", lambda log: any(isinstance(each, StreamLeft) for each in log.events))


def find_departed_sources(log: Log) -> set[str]:
    return {each.key[0] for each in log.events if isinstance(each, StreamLeft)}


def test_an_engine_that_is_no_longer_configured_leaves(plane: PlaneSettings) -> None:
    """The engine is removed from the settings while no bridge runs. The log still has reports of both bridges that they reach
    it."""
    engines = [PublishingEngine(f"e{at}") for at in range(4)]
    watches = [engine.watch for engine in engines]
    log = Log(plane)
    with run_bridge(plane, *watches, name="a"), run_bridge(plane, *watches, name="b"):
        for engine in engines:
            engine.publish_next(10)
        wait_until_complete(log, *engines)
        log.wait_for("trust of both", lambda log: all(len(reports_by_bridge(log, engine.name)) == 2 for engine in engines))
    with (
        run_bridge(plane, *watches[1:], name="a", unclaimed_seconds=0.5) as one,
        run_bridge(plane, *watches[1:], name="b", unclaimed_seconds=0.5),
    ):
        log.wait_for("it to leave", lambda log: find_departed_sources(log) == {"e0"})
        for engine in engines[1:]:
            engine.publish_next(3)
        wait_until_complete(log, *engines[1:])
        wait_for("it to be seen", lambda: one.unclaimed.engines == 0, SECONDS)
    assert find_departed_sources(log) == {"e0"}
    assert not [each for each in log.events if isinstance(each, Reset)]
    for engine in engines:
        engine.end()


def test_engines_that_a_running_bridge_follows_do_not_leave(plane: PlaneSettings) -> None:
    """This includes engines that the bridge does not reach, and engines that are more than half of all: in that case bridges
    are missing or misconfigured."""
    engines = [PublishingEngine(f"e{at}") for at in range(4)]
    watches = [engine.watch for engine in engines]
    log = Log(plane)
    with run_bridge(plane, *watches[:1], name="a", unclaimed_seconds=0.3) as one:
        with run_bridge(plane, *watches[1:], name="b", dead_seconds=600.0):
            for engine in engines:
                engine.publish_next(10)
            wait_until_complete(log, *engines)
            engines[1].end()
            log.wait_for("less trust", lambda log: reports_by_bridge(log, "e1")["b"].trust == "STALE")
            pages = len(log.pages)
            log.wait_for("some time", lambda log: len(log.pages) > pages + 20)
            wait_for("all to be claimed", lambda: one.unclaimed.engines == 0, SECONDS)
        wait_for("it to be seen", lambda: one.unclaimed.engines == 3, SECONDS)
        pages = len(log.read().pages)
        log.wait_for("some time", lambda log: len(log.pages) > pages + 10)
        assert find_departed_sources(log) == set()
        with run_bridge(plane, *watches[2:], name="b"):
            log.wait_for("the unreachable engine to leave", lambda log: find_departed_sources(log) == {"e1"})
    for engine in engines:
        engine.end()


def test_an_engine_leaves_if_two_bridges_drop_it_at_once(plane: PlaneSettings) -> None:
    """Each bridge could assume that the other one still follows the engine."""
    with PublishingEngine("e1") as one, PublishingEngine("e2") as two:
        log = Log(plane)
        names = ("a", "b")
        settings = [BridgeSettings(name=name, heartbeat_seconds=0.2, unclaimed_seconds=0.5) for name in names]
        bridges = [Bridge(plane, each, [one.watch, two.watch]) for each in settings]
        running = [ThreadRunner(bridge) for bridge in bridges]
        wait_for("bridges", lambda: all(bridge.ready.is_set() for bridge in bridges), SECONDS)
        one.publish_next(10)
        two.publish_next(10)
        wait_until_complete(log, one, two)
        log.wait_for("trust of both", lambda log: set(reports_by_bridge(log, "e2")) == set(names))
        for bridge, thread in zip(bridges, running, strict=True):
            thread.call(lambda bridge=bridge: bridge.watch([one.watch]))
        log.wait_for("it to leave", lambda log: find_departed_sources(log) == {"e2"})
        for thread in running:
            thread.end()


def test_the_watched_engines_can_change(plane: PlaneSettings) -> None:
    """A new registration does not begin a new incarnation, and neither does another address of the same engine. An engine that
    is no longer listed leaves."""
    with PublishingEngine("e1") as one, PublishingEngine("e2") as two:
        log = Log(plane)
        bridge = Bridge(plane, BridgeSettings(name="bridge", heartbeat_seconds=0.2), [one.watch])
        running = ThreadRunner(bridge)
        wait_for("the bridge", bridge.ready.is_set, SECONDS)
        one.publish_next(10)
        wait_until_complete(log, one)
        moved = Watch(
            Source(one.publisher.endpoint.replace("127.0.0.1", "localhost"), one.source.replay_endpoint, name="e1"), b"new"
        )
        for watches in ([Watch(one.source, b"new")], [moved], [moved, two.watch]):
            running.call(lambda watches=watches: bridge.watch(watches))
            one.publish_next(10)
            wait_until_complete(log, one)
        two.publish_next(10)
        wait_until_complete(log, two)
        log.wait_for(
            "the registration", lambda log: log.states[log.layout.partition_of("e1")].streams["e1", 0].registration == b"new"
        )
        running.call(lambda: bridge.watch([moved]))
        log.wait_for("it to leave", lambda log: any(isinstance(each, StreamLeft) for each in log.events))
        assert [each.key for each in log.events if isinstance(each, StreamLeft)] == [("e2", 0)]
        assert not [each for each in log.events if isinstance(each, Reset)]
        running.end()


def test_a_message_that_is_not_a_page_is_skipped(plane: PlaneSettings, caplog: pytest.LogCaptureFixture) -> None:
    """Every such message is counted, and one is logged."""
    with PublishingEngine() as engine, run_bridge(plane, engine.watch) as bridge:
        log = Log(plane)
        partition = log.layout.partition_of("engine")

        async def publish_garbage(js: JetStreamContext) -> None:
            for _ in range(3):
                await js.publish(log.layout.subject(partition), b"hello")

        for _ in range(2):
            engine.publish_next(10)
            wait_until_complete(log, engine)
            run_with_jetstream(plane, publish_garbage)
        engine.publish_next(10)
        wait_until_complete(log, engine)
        wait_for("all of them", lambda: bridge.partitions[partition].builder.state.foreign_messages == 6, SECONDS)
    assert sum("is not a page" in record.message for record in caplog.records) == 1


def test_an_engine_that_cannot_be_followed_does_not_affect_other_engines(plane: PlaneSettings) -> None:
    wrong = Watch(Source(f"ipc:///{'long' * 50}", name="wrong"))
    with PublishingEngine() as engine, run_bridge(plane, wrong, engine.watch) as bridge:
        engine.publish_next(10)
        log = wait_until_complete(Log(plane), engine)
        log.wait_for("its trust", lambda log: reports_by_bridge(log, "wrong"))
        assert reports_by_bridge(log, "wrong")["bridge"].trust == "CONNECTING"
        assert "longlong" in reports_by_bridge(log, "wrong")["bridge"].reason
        assert not bridge._reader.failure


def test_names_and_registrations_that_are_too_large_for_the_log_are_refused(plane: PlaneSettings) -> None:
    settings = BridgeSettings(name="bridge")
    for source, registration_bytes in (("x" * 2000, b""), ("\udcff", b""), ("engine", bytes(MAX_REGISTRATION_BYTES + 1))):
        with pytest.raises(ConfigError, match=r"engine|card"):
            Bridge(plane, settings, [Watch(Source("tcp://127.0.0.1:1", name=source), registration_bytes)])


def test_registrations_of_the_largest_size_are_written(tmp_path: Path) -> None:
    """They fit into the smallest messages that a plane accepts."""
    registration_bytes = bytes(MAX_REGISTRATION_BYTES)
    with nats_server(tmp_path, max_payload=24 << 10) as small, PublishingEngine() as engine:
        watches = [Watch(Source(engine.publisher.endpoint, None, name=f"{at}" * 500), registration_bytes) for at in range(4)]
        with run_bridge(plane_at(small.url), engine.watch, *watches):
            engine.publish_next(5)
            log = wait_until_complete(Log(plane_at(small.url)), engine)
            log.wait_for("the registrations", lambda log: sum(len(state.registrations()) for state in log.states.values()) == 5)


# --- start and stop


def test_an_internal_fault_ends_a_bridge_with_one_clear_error(plane: PlaneSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is not a group of exceptions, and no thread prints a traceback."""

    def fail(self: object) -> None:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr("kvevents_plane.engine_reader.EngineReader._turn", fail)
    running = ThreadRunner(Bridge(plane, BridgeSettings(name="bridge"), []))
    wait_for("its end", lambda: running.error, SECONDS)
    with pytest.raises(PlaneError, match="ZeroDivisionError"):
        running.end()


def test_a_bridge_can_be_stopped_before_it_has_read_its_partitions(
    plane: PlaneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for_ever(self: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("kvevents_plane.partition_reader.PartitionReader.run", wait_for_ever)
    running = ThreadRunner(Bridge(plane, BridgeSettings(name="bridge"), []))
    wait_for("it to begin", lambda: running.what.partitions, SECONDS)
    running.end()


def test_a_bridge_waits_for_servers_that_start_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the missing server once. A replica waits too, so the order of starts does not matter."""
    server = NatsServer(tmp_path / "nats")
    running = ThreadRunner(Bridge(plane_at(server.url), BridgeSettings(name="bridge"), []))
    wait_for("the warning", lambda: running.error or server.url in caplog.text, SECONDS)
    with server:
        wait_for("the bridge", lambda: running.error or running.what.ready.is_set(), SECONDS)
        running.end()
    assert caplog.text.count("cannot use the NATS server") == 1


def test_missing_servers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvevents_plane.bridge.START_SECONDS", 0.0)
    running = ThreadRunner(Bridge(plane_at("nats://127.0.0.1:1"), BridgeSettings(name="bridge"), []))
    with pytest.raises(PlaneError, match=r"127\.0\.0\.1:1"):
        running.end()
