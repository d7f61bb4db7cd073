"""`kvevents bridge` as a process on a real NATS server: its sources, its name, its output, its end, and wrong usage."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli_cases import Ended, Program, run
from kvevents.cli.bridge import StateLogger, encode_registration
from kvevents.plane.settings import BridgeOptions
from kvevents.publisher import ZmqEventPublisher
from kvevents.security import Curve
from kvevents.service.registration import Registration
from nats_servers import NatsServer, nats_server, needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import Log, plane_at
from ports import quiet_port
from publisher_cases import ANY, batch, publishing
from service_cases import until, write

pytestmark = needs_nats

SECONDS = 20.0
MODEL = "m"
PARTITION = ("--partitions", 2, "--partition-size", "64MiB")


@pytest.fixture(scope="module", name="brisk")
def settings_of_brisk_bridges(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """For bridges that give signs of life four times as often as by default: others know sooner whether one is there."""
    return "--config", write(tmp_path_factory.mktemp("brisk") / "bridge.toml", "[bridge]\nheartbeat_seconds = 0.5\n")


def key_of(name: str) -> str:
    """The key under which the log stores an engine without a card."""
    return Registration(instance=name, endpoint="tcp://h:1", model=MODEL).key[0]


def worker(name: str, publisher: ZmqEventPublisher) -> list[object]:
    return ["--model", MODEL, "--worker", f"{name}={publisher.endpoint},{publisher.replay_endpoint}"]


def source(name: str, publisher: ZmqEventPublisher, **more: Any) -> str:
    fields = {"instance": name, "model": MODEL, "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    return "[[sources]]\n" + "".join(f"{field} = {json.dumps(value)}\n" for field, value in (fields | more).items())


@contextmanager
def bridge(server: NatsServer, plane: str, *more: object, name: str = "bridge") -> Iterator[Program]:
    """A bridge that writes; nothing that it has written to stderr may be a traceback or a warning of Python's."""
    with Program("bridge", "--nats", server.url, "--plane", plane, *PARTITION, "--bridge-name", name, *more) as program:
        program.err.wait(f"bridge '{name}' writes to the 2 partitions of plane '{plane}'")
        yield program
    assert not [line for line in program.err.all if re.search("Traceback|Warning:", line)], program.err.all


def confirmed(program: Program, name: str, publisher: ZmqEventPublisher, number: int = 0) -> None:
    """Wait until a bridge follows an idle engine; batch `number`, the first one to come live, makes its stream EXACT."""
    program.err.wait(rf"(?i)\binfo\b.*\b{name} rank 0: DEGRADED .*no live batch has confirmed")
    publisher.publish(batch(number))
    program.err.wait(f"{name} rank 0: EXACT")


def has(log: Log, name: str, count: int) -> Log:
    """Wait until the log has so many batches of an engine; they are each once and in order."""
    log.until(f"{count} batches of {name}", lambda log: len(log.numbers(key_of(name))) >= count)
    assert log.numbers(key_of(name)) == list(range(count))
    assert log.flaws == (0, 0)
    return log


def cards(log: Log) -> dict[str, Any]:
    """What the log says of the engines that are there, by name."""
    found = [card for state in log.states.values() for card in state.registrations().values()]
    return {card["instance"]: card for card in map(msgspec.json.decode, found)}


def scrape(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


# --- what it follows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_two_engines_are_in_the_log_when_it_has_ended(server: NatsServer, number: signal.Signals) -> None:
    """A signal ends it with 0, and what was published before is in the log."""
    plane = f"two-{number}"
    with publishing(replay_endpoint=ANY) as first, publishing(replay_endpoint=ANY) as second:
        arguments = (*worker("a", first), *worker("b", second))
        with bridge(server, plane, *arguments) as program:
            for name, publisher in (("a", first), ("b", second)):
                program.err.wait(f"{name} rank 0: following tcp://")
                confirmed(program, name, publisher)
            for each in range(1, 200):
                first.publish(batch(each))
                second.publish(batch(each))
            log = has(has(Log(plane_at(server.url, name=plane)), "a", 200), "b", 200)
            ended = program.interrupt(number)
    assert ended.code == 0, ended.err
    assert ended.out == ""
    assert "ended; 400 batches written" in ended.err
    assert cards(log).keys() == {"a", "b"}
    assert cards(log.read())["a"]["endpoint"] == first.endpoint


def test_the_sources_of_a_file_are_read_again(server: NatsServer, tmp_path: Path) -> None:
    """Settings of all kinds from the file; an engine that is added is followed, one that is taken out leaves the log."""
    with publishing(replay_endpoint=ANY) as first, publishing(replay_endpoint=ANY) as second:
        head = f"""
            [plane]
            servers = ["{server.url}"]
            name = "file"
            partitions = 2
            partition_bytes = {64 << 20}
            [bridge]
            name = "of the file"
            heartbeat_seconds = 0.2
            status_seconds = 0.2
        """
        config = write(tmp_path / "fleet.toml", head + source("a", first, block_size=16, group="g"))
        more = write(tmp_path / "more.toml", "sources = []")
        with Program("bridge", "--config", config, "--sources", more, "--bridge-name", "of the flags") as program:
            program.err.wait("bridge 'of the flags' writes to the 2 partitions of plane 'file'")
            confirmed(program, "a", first)
            log = Log(plane_at(server.url, name="file")).until("a", lambda log: len(log.pages) and cards(log).keys() == {"a"})
            assert (cards(log)["a"]["block_size"], cards(log)["a"]["group"]) == (16, "g")
            second.publish(batch(0))
            write(more, source("b", second))
            has(log, "b", 1)
            confirmed(program, "b", second, 1)
            program.err.wait("connected; streams: 2 EXACT; 3 batches written; 0 records of 0 bytes queued")
            write(config, head)
            log.until("only b", lambda log: cards(log).keys() == {"b"})
            program.err.wait("a rank 0: no longer followed")
            write(more, "sources = [")
            program.err.wait(r"WARNING .*more\.toml: .*the sources that it named before stay")
            second.publish(batch(2))
            has(log, "b", 3)
            write(more, source("b", second))
            program.err.wait("discovery has no faults any more")
            assert program.interrupt(signal.SIGTERM).code == 0


def test_ranks_that_cannot_be_of_one_engine_are_reported(server: NatsServer, tmp_path: Path) -> None:
    """When they are written later; a bridge does not start with them."""
    with publishing(replay_endpoint=ANY) as first, publishing(replay_endpoint=ANY) as second:
        file = write(tmp_path / "s.toml", source("a", first))
        with bridge(server, "ranks", "--sources", file) as program:
            confirmed(program, "a", first)
            write(file, source("a", first) + source("a", second, rank=1, model="other"))
            program.err.wait("WARNING .*a rank 1 has model 'other'.*give this instance another name")
            assert not [line for line in program.err.all if "a rank 1: following" in line]


def test_cards_have_no_keys() -> None:
    curve = Curve(public_key="p" * 40, secret_key="s" * 40, server_key="o" * 40)
    registration = Registration(instance="a", endpoint="tcp://h:1", model=MODEL, block_size=16, curve=curve)
    card = encode_registration(registration)
    assert b"pppp" not in card
    assert b"ssss" not in card
    assert b"oooo" not in card
    assert msgspec.json.decode(card, type=Registration) == msgspec.structs.replace(registration, curve=None)


# --- its name ----------------------------------------------------------------------------------------------------------------


def test_a_bridge_that_was_killed_comes_back_and_nothing_is_lost_or_doubled(server: NatsServer) -> None:
    """Under its name at once: what is in the log is guarded by the log, whatever bridges are named."""
    with publishing(replay_endpoint=ANY) as publisher:
        log, number = Log(plane_at(server.url, name="killed")), 0
        for _ in range(3):
            with bridge(server, "killed", *worker("a", publisher), name="node.example") as program:
                for _ in range(300):
                    publisher.publish(batch(number))
                    number += 1
                log.until("some", lambda log: len(log.numbers(key_of("a"))) >= number - 200)  # noqa: B023 - called at once
                program.process.kill()
                assert program.process.wait(SECONDS) == -signal.SIGKILL
            assert not [line for line in program.err.all if "has the same name" in line]
        with bridge(server, "killed", *worker("a", publisher), name="node.example"):
            has(log, "a", 900)


def test_two_bridges_of_one_name_report_each_other_and_write_one_log(server: NatsServer, brisk: tuple[object, ...]) -> None:
    """Both, and `plane status`. When one ends the other is normal again."""
    port = quiet_port()
    with publishing(replay_endpoint=ANY) as publisher:
        arguments = (*worker("a", publisher), *brisk, "--metrics-port")
        with bridge(server, "same", *arguments, port) as first:
            confirmed(first, "a", publisher)
            assert scrape(port)["kvevents_bridge_name_shared"] == [({}, 0.0)]
            with bridge(server, "same", *arguments, quiet_port()) as second:
                for one, other in ((first, second), (second, first)):
                    owner = f"process {other.process.pid} at {re.escape(socket.gethostname())}"
                    one.err.wait(f"WARNING .*name 'bridge': {owner} has the same name; give each bridge another --bridge-name")
                until("a metric", lambda: scrape(port)["kvevents_bridge_name_shared"] == [({}, 1.0)])
                until("a fault", lambda: "several processes use the bridge name bridge" in plane_status(server, "same").out)
                for number in range(1, 100):
                    publisher.publish(batch(number))
                has(Log(plane_at(server.url, name="same")), "a", 100)
                assert second.interrupt(signal.SIGTERM).code == 0
            first.err.wait("name 'bridge': normal again")
            publisher.publish(batch(100))
            has(Log(plane_at(server.url, name="same")), "a", 101)


def plane_status(server: NatsServer, plane: str) -> Ended:
    return run("plane", "status", "--nats", server.url, "--plane", plane)


def test_a_bridge_that_was_stopped_while_another_of_its_name_wrote_goes_on(
    server: NatsServer, brisk: tuple[object, ...]
) -> None:
    with publishing(replay_endpoint=ANY) as publisher, bridge(server, "stopped", *worker("a", publisher), *brisk) as first:
        confirmed(first, "a", publisher)
        has(Log(plane_at(server.url, name="stopped")), "a", 1)
        first.process.send_signal(signal.SIGSTOP)
        with bridge(server, "stopped", *worker("a", publisher), *brisk) as second:
            confirmed(second, "a", publisher, 1)
            has(Log(plane_at(server.url, name="stopped")), "a", 2)
            first.process.send_signal(signal.SIGCONT)
            second.err.wait(f"name 'bridge': process {first.process.pid} at .* has the same name")
        publisher.publish(batch(2))
        has(Log(plane_at(server.url, name="stopped")), "a", 3)
        assert first.interrupt(signal.SIGTERM).code == 0


def test_without_servers_a_signal_ends_it_within_a_bound_and_a_second_one_at_once(tmp_path: Path) -> None:
    """It reports what was not written."""
    with nats_server(tmp_path) as server, publishing(replay_endpoint=ANY) as publisher:
        both = [
            Program("bridge", "--nats", server.url, "--bridge-name", name, *PARTITION, *worker("a", publisher))
            for name in ("one", "two")
        ]
        with both[0] as patient, both[1] as hasty:
            for program in both:
                program.err.wait("a rank 0: DEGRADED .*no live batch has confirmed")
            publisher.publish(batch(0))
            for program in both:
                program.err.wait("a rank 0: EXACT")
            has(Log(plane_at(server.url)), "a", 1)
            server.kill()
            publisher.publish(batch(1))
            for program in both:
                program.err.wait("reconnecting")
                program.process.send_signal(signal.SIGTERM)
            # Their threads are the first to end.
            until("the end to begin", lambda: publisher.stats().subscribers == 0)
            assert hasty.interrupt(signal.SIGINT).code == 130
            ended = patient.end()
        assert ended.code == 0, ended.err
        assert re.search("ended with [12] unwritten records", ended.err)
        assert "Traceback" not in ended.err


def last(ended: Ended) -> str:
    return ended.err.splitlines()[-1]


# --- log and status ---------------------------------------------------------------------------------------------------------


def test_metrics_are_scraped(server: NatsServer) -> None:
    """Of few labels, and as the bridge is."""
    port = quiet_port()
    with publishing(replay_endpoint=ANY) as publisher:
        more = (*worker("a", publisher), "--worker", "gone=tcp://127.0.0.1:1", "--metrics-port", port, "--log-format=json")
        with bridge(server, "metrics", *more) as program:
            confirmed(program, "a", publisher)
            until("a batch", lambda: scrape(port)["kvevents_bridge_written_batches_total"] == [({}, 1.0)])
            found = {name: values for name, values in scrape(port).items() if name.startswith("kvevents")}
            assert {name.removeprefix("kvevents_bridge_") for name in found} == {
                *("connected", "name_shared", "network_failure_suspected", "unclaimed_engines"),
                *("queue_limit_bytes", "discovery_faults"),
                *("written_batches_total", "write_conflicts_total", "resyncs_total", "invalid_records_total"),
                *("partition_position", "partition_queued_records", "partition_queued_bytes", "partition_blocked", "streams"),
            }
            streams = {labels["state"]: value for labels, value in found["kvevents_bridge_streams"]}
            assert streams == {"CONNECTING": 1, "REPLAYING": 0, "EXACT": 1, "DEGRADED": 0, "STALE": 0}
            assert [labels for labels, _ in found["kvevents_bridge_partition_position"]] == [
                {"partition": "0"},
                {"partition": "1"},
            ]
            assert sum(value for _, value in found["kvevents_bridge_partition_position"]) > 0
            singles = {name: values[0][1] for name, values in found.items() if values[0][0] == {}}
            assert (singles["kvevents_bridge_connected"], singles["kvevents_bridge_name_shared"]) == (1, 0)
            assert singles["kvevents_bridge_queue_limit_bytes"] == BridgeOptions().max_queued_bytes
            assert singles["kvevents_bridge_invalid_records_total"] == 0
            second = run("bridge", "--nats", server.url, "--plane", "metrics", "--bridge-name", "other", *more)
            assert second.code == 1
            assert f"cannot serve metrics at 127.0.0.1:{port}" in last(second)
            assert "Traceback" not in second.err
            ended = program.interrupt(signal.SIGTERM)
        assert ended.code == 0, ended.err
        assert all(line.startswith("{") for line in ended.err.splitlines())


def test_one_line_for_each_change(caplog: pytest.LogCaptureFixture) -> None:
    logger = StateLogger()
    with caplog.at_level("INFO", "kvevents.bridge"):
        for states in (
            {"partitions": ""},
            {"partitions": "1"},
            {"partitions": "1"},
            {"partitions": "2", "a": "EXACT"},
            {"partitions": ""},
            {"partitions": ""},
        ):
            logger.log_states((what, words, 20) for what, words in states.items())
        for sentences in ([], ["x", "y"], ["y", "x"], ["z"], [], []):
            logger.log_faults(sentences)
    expected = [
        "partitions: 1",
        "partitions: 2",
        "a: EXACT",
        "partitions: normal again",
        "x",
        "y",
        "z",
        "discovery has no faults any more",
    ]
    assert caplog.messages == expected


# --- wrong usage -------------------------------------------------------------------------------------------------------------

HERE = ("--model", "m", "--worker", "a=tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--dns", "h:1"], 2, "no NATS server is given; use --nats"),
        (["--nats", "nats://127.0.0.1:1"], 2, "no engine is given"),
        (["--nats", "nats://127.0.0.1:1", "--worker", "a=tcp://127.0.0.1:1"], 2, "--worker needs --model"),
        (["--nats", "nats://127.0.0.1:1", "--worker", "a"], 2, "invalid worker"),
        (["--nats", "http://127.0.0.1:1", *HERE], 1, "invalid server"),
        (["--nats", "nats://secret@127.0.0.1:1x", *HERE], 1, "invalid server 'nats://127.0.0.1:1x'"),
        (["--nats", "nats://127.0.0.1:1", *HERE], 1, "cannot use the NATS server at nats://127.0.0.1:1: Connect"),
        (["--nats", "nats://127.0.0.1:1", "--copies", "2", *HERE], 1, "copies is 2"),
        (["--nats", "nats://127.0.0.1:1", "--partitions", "1000", *HERE], 1, "partitions is 1000"),
        (["--nats", "nats://127.0.0.1:1", "--partition-size", "big", *HERE], 2, "invalid size"),
        (["--nats", "nats://127.0.0.1:1", "--partition-size", "1", *HERE], 1, "partition_bytes is 1"),
        (["--nats", "nats://127.0.0.1:1", "--plane", "a b", *HERE], 1, "invalid plane name 'a b'"),
        (["--nats", "nats://127.0.0.1:1", "--bridge-name", "", *HERE], 1, "invalid bridge name ''"),
        (["--nats", "nats://127.0.0.1:1", "--standby-delay", "-1", *HERE], 2, "seconds"),
        (["--nats", "nats://127.0.0.1:1", "--standby-delay", "4000", *HERE], 1, "standby_seconds is 4000"),
        (["--nats", "nats://127.0.0.1:1", "--creds", "/no/such", *HERE], 1, "cannot read /no/such"),
        (["--nats", "nats://127.0.0.1:1", "--tls-cert", "/no/such", *HERE], 1, "tls_certificate is set without tls_key"),
        (["--nats", "nats://127.0.0.1:1", "--metrics-port", "x", *HERE], 2, "invalid port"),
        (["--nats", "nats://127.0.0.1:1", "--config", "/no/such"], 1, "cannot read /no/such"),
        (["--nats", "nats://127.0.0.1:1", "--topics", "3", *HERE], 2, "unknown option --topics"),
    ],
    ids=str,
)
def test_wrong_usage_is_reported_in_one_sentence(arguments: list[str], code: int, message: str) -> None:
    ended = run("bridge", *arguments)
    assert ended.code == code, ended.err
    assert message in last(ended)
    assert "secret" not in ended.err
    assert "Traceback" not in ended.err
    assert code == 2 or len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[plane]\nserver = ['x']", "plane: unknown field 'server'; did you mean 'servers'? known fields: servers, name"),
        ("[plane]\npartitions = 'many'", "plane.partitions: Expected `int`, got `str`"),
        ("[plane]\ncopies = 2", "plane.copies is 2"),
        ("[bridge]\nreserve = 3", "bridge: unknown field 'reserve'"),
        ("[bridge]\nmetrics_port = 'x'", "bridge.metrics_port: Expected `int | null`, got `str`"),
        ("[bridges]\n", "unknown field 'bridges'; did you mean 'bridge'? known fields: curve, sources, "),
        ("bridge = 3\n", "bridge: Expected `object`, got `int`"),
        ("port = 3\n", "unknown field 'port'"),
        ("[[sources]]\ninstance = 'a'", "either endpoint or base_url"),
        ("[plane\n", "cannot read"),
    ],
    ids=str,
)
def test_a_wrong_file_is_reported_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    config = write(tmp_path / "fleet.toml", text)
    ended = run("bridge", "--nats", "nats://127.0.0.1:1", "--config", config)
    assert ended.code == 1
    assert message in ended.err
    assert f"kvevents: {config}" in ended.err or f"cannot read {config}" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_settings_are_checked_without_a_server() -> None:
    ended = run("bridge", "--nats", "nats://user:secret@127.0.0.1:1", *HERE, "--check")
    assert (ended.code, ended.out) == (0, "")
    assert "these settings can be used" in ended.err


def test_a_server_without_jetstream_is_reported(tmp_path: Path) -> None:
    with nats_server(tmp_path, jetstream=None) as server:
        ended = run("bridge", "--nats", server.url, *HERE)
    assert ended.code == 1
    assert "JetStream is disabled for this account" in last(ended)
    assert "Traceback" not in ended.err


def test_partitions_without_room_on_the_servers_are_reported(tmp_path: Path) -> None:
    with nats_server(tmp_path, jetstream={"max_file": 100 << 20}) as server:
        ended = run("bridge", "--nats", server.url, *PARTITION, *HERE)
    assert ended.code == 1
    assert "is full: raise its limit or free space. 2 partitions reserve 128 MiB in all on 1 of the servers" in last(ended)


def test_its_name_is_the_hosts_by_default(server: NatsServer) -> None:
    with Program("bridge", "--nats", server.url, "--plane", "host", *PARTITION, *HERE) as program:
        program.err.wait(f"bridge '{re.escape(socket.gethostname())}' writes to")
        assert program.interrupt(signal.SIGTERM).code == 0


def test_a_login_on_the_command_line_is_reported(server: NatsServer) -> None:
    """The login itself is never printed; this server accepts any."""
    with Program("bridge", "--nats", server.url_of("user:secret"), "--plane", "login", *PARTITION, *HERE) as program:
        program.err.wait("WARNING all users of this machine can read a login in --nats; use --creds")
        program.err.wait("writes to the 2 partitions")
        ended = program.interrupt(signal.SIGTERM)
    assert ended.code == 0
    assert "secret" not in ended.err
