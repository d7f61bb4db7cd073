"""`kvevents bridge` as a process on a real NATS server: sources, name, output, shutdown, and wrong usage."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from certificate_pairs import make_pair
from cli_cases import ProcessResult, Program, run
from kvevents.cli.signals import StateLogger
from kvevents.publisher import ZmqEventPublisher
from kvevents.service.fleet.registration import Registration
from kvevents.zeromq.keys import Curve
from kvevents_plane.cli.bridge import encode_registration
from kvevents_plane.settings import BridgeSettings
from nats_cases import needs_nats, server_of_module  # noqa: F401 - a fixture
from plane_cases import Log, plane_at
from prometheus_probe_cases import ask_probe
from publisher_cases import ANY, batch, run_publisher
from service_cases import wait_for, write
from tools.nats_servers import NatsServer, nats_server
from tools.ports import reserve_port

pytestmark = needs_nats

SECONDS = 60.0
MODEL = "m"
PARTITION = ("--partitions", 2, "--partition-size", "64MiB")


@pytest.fixture(scope="module", name="fast_heartbeat")
def fast_heartbeat_arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Arguments for heartbeats four times as often as by default, so that a bridge detects others of its name sooner."""
    return "--config", write(tmp_path_factory.mktemp("fast_heartbeat") / "bridge.toml", "[bridge]\nheartbeat_seconds = 0.5\n")


def log_key(name: str) -> str:
    """Return the key under which the log stores the batches of an engine."""
    return Registration(instance=name, endpoint="tcp://h:1", model=MODEL).key[0]


def worker_arguments(name: str, publisher: ZmqEventPublisher) -> list[object]:
    return ["--model", MODEL, "--worker", f"{name}={publisher.endpoint},{publisher.replay_endpoint}"]


def toml_source(name: str, publisher: ZmqEventPublisher, **more: Any) -> str:
    fields = {"instance": name, "model": MODEL, "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    return "[[sources]]\n" + "".join(f"{field} = {json.dumps(value)}\n" for field, value in (fields | more).items())


@contextmanager
def run_bridge(server: NatsServer, plane: str, *more: object, name: str = "bridge") -> Iterator[Program]:
    """Run a bridge until the end of the block; assert that its stderr has no traceback and no warning of Python."""
    with Program("bridge", "--nats", server.url, "--plane", plane, *PARTITION, "--bridge-name", name, *more) as program:
        program.err.wait(f"bridge '{name}' writes to the 2 partitions of plane '{plane}'")
        yield program
    assert not [line for line in program.err.all if re.search("Traceback|Warning:", line)], program.err.all


def confirm_stream(program: Program, name: str, publisher: ZmqEventPublisher, number: int = 0) -> None:
    """Wait until a bridge follows an idle engine, then publish batch `number` live, which makes the stream EXACT."""
    program.err.wait(rf"(?i)\binfo\b.*\b{name} rank 0: DEGRADED .*no live batch has confirmed")
    publisher.publish(batch(number))
    program.err.wait(f"{name} rank 0: EXACT")


def wait_for_batches(log: Log, name: str, count: int) -> Log:
    """Wait until the log has `count` batches of an engine; assert that each is there once and in order."""
    log.wait_for(f"{count} batches of {name}", lambda log: len(log.numbers(log_key(name))) >= count)
    assert log.numbers(log_key(name)) == list(range(count))
    assert log.flaws == (0, 0)
    return log


def registrations_by_name(log: Log) -> dict[str, Any]:
    """Return the registrations of the engines in the log, by name of the engine."""
    found = [registration_json for state in log.states.values() for registration_json in state.registrations().values()]
    return {registration_json["instance"]: registration_json for registration_json in map(msgspec.json.decode, found)}


def scrape(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def has_queued_records(port: int) -> bool:
    return sum(value for _, value in scrape(port)["kvevents_bridge_partition_queued_records"]) > 0


# --- sources -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_batches_of_two_engines_are_in_the_log_when_the_bridge_has_ended(server: NatsServer, number: signal.Signals) -> None:
    """A signal ends the bridge with code 0, and all batches that were published before it are in the log."""
    plane = f"two-{number}"
    with run_publisher(replay_endpoint=ANY) as first, run_publisher(replay_endpoint=ANY) as second:
        arguments = (*worker_arguments("a", first), *worker_arguments("b", second))
        with run_bridge(server, plane, *arguments) as program:
            for name, publisher in (("a", first), ("b", second)):
                program.err.wait(f"{name} rank 0: following tcp://")
                confirm_stream(program, name, publisher)
            for each in range(1, 200):
                first.publish(batch(each))
                second.publish(batch(each))
            log = wait_for_batches(wait_for_batches(Log(plane_at(server.url, name=plane)), "a", 200), "b", 200)
            ended = program.interrupt(number)
    assert ended.code == 0, ended.err
    assert ended.out == ""
    assert "ended; 400 batches written" in ended.err
    assert registrations_by_name(log).keys() == {"a", "b"}
    assert registrations_by_name(log.read())["a"]["endpoint"] == first.endpoint


def test_changed_files_of_sources_are_read_again(server: NatsServer, tmp_path: Path) -> None:
    """Settings of all kinds come from the file; an added engine is followed, and a removed one is removed from the log."""
    with run_publisher(replay_endpoint=ANY) as first, run_publisher(replay_endpoint=ANY) as second:
        head = f"""
            [plane]
            servers = ["{server.url}"]
            name = "file"
            partitions = 2
            partition_bytes = {64 << 20}
            [bridge]
            name = "of the file"
            heartbeat_seconds = 0.2
        """
        config = write(tmp_path / "fleet.toml", head + toml_source("a", first, block_size=16, group="g"))
        more = write(tmp_path / "more.toml", "sources = []")
        with Program("bridge", "--config", config, "--sources", more, "--bridge-name", "of the flags") as program:
            program.err.wait("bridge 'of the flags' writes to the 2 partitions of plane 'file'")
            confirm_stream(program, "a", first)
            log = Log(plane_at(server.url, name="file")).wait_for(
                "a", lambda log: len(log.pages) and registrations_by_name(log).keys() == {"a"}
            )
            assert (registrations_by_name(log)["a"]["block_size"], registrations_by_name(log)["a"]["group"]) == (16, "g")
            second.publish(batch(0))
            write(more, toml_source("b", second))
            wait_for_batches(log, "b", 1)
            confirm_stream(program, "b", second, 1)
            write(config, head)
            log.wait_for("only b", lambda log: registrations_by_name(log).keys() == {"b"})
            program.err.wait("a rank 0: no longer followed")
            write(more, "sources = [")
            program.err.wait(r"WARNING .*more\.toml: .*the sources that it named before stay")
            second.publish(batch(2))
            wait_for_batches(log, "b", 3)
            write(more, toml_source("b", second))
            program.err.wait(r"this fault has ended: .*more\.toml: ")
            assert program.interrupt(signal.SIGTERM).code == 0


def test_ranks_that_cannot_be_of_one_engine_are_reported(server: NatsServer, tmp_path: Path) -> None:
    """They are reported when the file is changed; a bridge does not start with such a file."""
    with run_publisher(replay_endpoint=ANY) as first, run_publisher(replay_endpoint=ANY) as second:
        file = write(tmp_path / "s.toml", toml_source("a", first))
        with run_bridge(server, "ranks", "--sources", file) as program:
            confirm_stream(program, "a", first)
            write(file, toml_source("a", first) + toml_source("a", second, rank=1, model="other"))
            program.err.wait("WARNING .*a rank 1 has model 'other'.*give this instance another name")
            assert not [line for line in program.err.all if "a rank 1: following" in line]


def test_registrations_in_the_log_have_no_keys() -> None:
    pair = make_pair()
    curve = Curve(public_key=pair.public, secret_key=pair.secret, server_key="o" * 40)
    registration = Registration(instance="a", endpoint="tcp://h:1", model=MODEL, block_size=16, curve=curve)
    registration_json = encode_registration(registration)
    for key in (pair.public, pair.secret, "oooo"):
        assert key.encode() not in registration_json
    assert msgspec.json.decode(registration_json, type=Registration) == msgspec.structs.replace(registration, curve=None)


# --- name --------------------------------------------------------------------------------------------------------------------


def test_a_killed_bridge_restarts_under_its_name_without_losses_or_duplicates(server: NatsServer) -> None:
    """It starts at once under the same name, because the log, not the name, protects against duplicate batches."""
    with run_publisher(replay_endpoint=ANY) as publisher:
        log, number = Log(plane_at(server.url, name="killed")), 0
        for _ in range(3):
            with run_bridge(server, "killed", *worker_arguments("a", publisher), name="node.example") as program:
                for _ in range(300):
                    publisher.publish(batch(number))
                    number += 1
                log.wait_for("most batches", lambda log: len(log.numbers(log_key("a"))) >= number - 200)  # noqa: B023 - called at once
                program.process.kill()
                assert program.process.wait(SECONDS) == -signal.SIGKILL
            assert not [line for line in program.err.all if "has the same name" in line]
        with run_bridge(server, "killed", *worker_arguments("a", publisher), name="node.example"):
            wait_for_batches(log, "a", 900)


def test_two_bridges_of_one_name_report_each_other_and_write_one_log(
    server: NatsServer, fast_heartbeat: tuple[object, ...]
) -> None:
    """Both bridges and `plane status` report it; when one bridge ends, the other reports that the name is normal again."""
    port = reserve_port()
    with run_publisher(replay_endpoint=ANY) as publisher:
        arguments = (*worker_arguments("a", publisher), *fast_heartbeat, "--metrics-port")
        with run_bridge(server, "same", *arguments, port) as first:
            confirm_stream(first, "a", publisher)
            assert scrape(port)["kvevents_bridge_name_shared"] == [({}, 0.0)]
            with run_bridge(server, "same", *arguments, reserve_port()) as second:
                for one, other in ((first, second), (second, first)):
                    owner = f"process {other.process.pid} at {re.escape(socket.gethostname())}"
                    one.err.wait(f"WARNING .*name 'bridge': {owner} has the same name; give each bridge another --bridge-name")
                wait_for("the metric of a shared name", lambda: scrape(port)["kvevents_bridge_name_shared"] == [({}, 1.0)])
                wait_for(
                    "the fault in plane status",
                    lambda: "several processes use the bridge name bridge" in plane_status(server, "same").out,
                )
                for number in range(1, 100):
                    publisher.publish(batch(number))
                wait_for_batches(Log(plane_at(server.url, name="same")), "a", 100)
                assert second.interrupt(signal.SIGTERM).code == 0
            first.err.wait("name 'bridge': normal again")
            publisher.publish(batch(100))
            wait_for_batches(Log(plane_at(server.url, name="same")), "a", 101)


def plane_status(server: NatsServer, plane: str) -> ProcessResult:
    return run("plane", "status", "--nats", server.url, "--plane", plane)


def test_a_suspended_bridge_continues_after_another_of_its_name_has_written(
    server: NatsServer, fast_heartbeat: tuple[object, ...]
) -> None:
    with (
        run_publisher(replay_endpoint=ANY) as publisher,
        run_bridge(server, "stopped", *worker_arguments("a", publisher), *fast_heartbeat) as first,
    ):
        confirm_stream(first, "a", publisher)
        wait_for_batches(Log(plane_at(server.url, name="stopped")), "a", 1)
        first.process.send_signal(signal.SIGSTOP)
        with run_bridge(server, "stopped", *worker_arguments("a", publisher), *fast_heartbeat) as second:
            confirm_stream(second, "a", publisher, 1)
            wait_for_batches(Log(plane_at(server.url, name="stopped")), "a", 2)
            first.process.send_signal(signal.SIGCONT)
            second.err.wait(f"name 'bridge': process {first.process.pid} at .* has the same name")
        publisher.publish(batch(2))
        wait_for_batches(Log(plane_at(server.url, name="stopped")), "a", 3)
        assert first.interrupt(signal.SIGTERM).code == 0


def test_without_servers_a_signal_ends_the_bridge_in_bounded_time_and_a_second_one_at_once(tmp_path: Path) -> None:
    """The bridge reports how many records were not written."""
    with nats_server(tmp_path) as server, run_publisher(replay_endpoint=ANY) as publisher:
        ports = reserve_port(), reserve_port()
        both = [
            Program(
                *("bridge", "--nats", server.url, "--bridge-name", name, "--metrics-port", port),
                *(*PARTITION, *worker_arguments("a", publisher)),
            )
            for name, port in zip(("one", "two"), ports, strict=True)
        ]
        with both[0] as patient, both[1] as hasty:
            for program in both:
                program.err.wait("a rank 0: DEGRADED .*no live batch has confirmed")
            publisher.publish(batch(0))
            for program in both:
                program.err.wait("a rank 0: EXACT")
            wait_for_batches(Log(plane_at(server.url)), "a", 1)
            server.kill()
            publisher.publish(batch(1))
            for program, port in zip(both, ports, strict=True):
                program.err.wait("reconnecting")
                wait_for("a queued batch", partial(has_queued_records, port))
                assert ask_probe(port, "/livez") == (200, "ok")
                assert ask_probe(port, "/readyz") == (503, "no NATS server is connected")
                program.process.send_signal(signal.SIGTERM)
            # The subscribers of both bridges end first.
            wait_for("the end to begin", lambda: publisher.stats().subscribers == 0)
            assert hasty.interrupt(signal.SIGINT).code == 130
            ended = patient.end()
        assert ended.code == 0, ended.err
        assert re.search("ended with [12] unwritten records", ended.err)
        assert "Traceback" not in ended.err


def last_line(ended: ProcessResult) -> str:
    return ended.err.splitlines()[-1]


# --- log and status ---------------------------------------------------------------------------------------------------------


def test_the_metrics_report_the_state_of_the_bridge(server: NatsServer) -> None:
    """Metrics have few labels, and their values equal the state of the bridge."""
    port = reserve_port()
    with run_publisher(replay_endpoint=ANY) as publisher:
        more = (
            *worker_arguments("a", publisher),
            "--worker",
            "gone=tcp://127.0.0.1:1",
            "--metrics-port",
            port,
            "--log-format=json",
        )
        with run_bridge(server, "metrics", *more) as program:
            confirm_stream(program, "a", publisher)
            wait_for("one written batch", lambda: scrape(port)["kvevents_bridge_written_batches_total"] == [({}, 1.0)])
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
            assert singles["kvevents_bridge_queue_limit_bytes"] == BridgeSettings().max_queued_bytes
            assert singles["kvevents_bridge_invalid_records_total"] == 0
            assert ask_probe(port, "/livez") == ask_probe(port, "/readyz") == (200, "ok")
            second = run("bridge", "--nats", server.url, "--plane", "metrics", "--bridge-name", "other", *more)
            assert second.code == 1
            assert f"cannot serve metrics at 127.0.0.1:{port}" in last_line(second)
            assert "Traceback" not in second.err
            ended = program.interrupt(signal.SIGTERM)
        assert ended.code == 0, ended.err
        assert all(line.startswith("{") for line in ended.err.splitlines())


def test_the_state_logger_logs_one_line_for_each_change(caplog: pytest.LogCaptureFixture) -> None:
    logger = StateLogger(logging.getLogger("kvevents.bridge"))
    with caplog.at_level("INFO", "kvevents.bridge"):
        for states in (
            {"partitions": ""},
            {"partitions": "1"},
            {"partitions": "1"},
            {"partitions": "2", "a": "EXACT"},
            {"partitions": ""},
            {"partitions": ""},
        ):
            logger.log_changes((what, words, 20) for what, words in states.items())
    expected = [
        "partitions: 1",
        "partitions: 2",
        "a: EXACT",
        "partitions: normal again",
    ]
    assert caplog.messages == expected


# --- wrong usage -------------------------------------------------------------------------------------------------------------

MODEL_AND_WORKER = ("--model", "m", "--worker", "a=tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--dns", "h:1"], 2, "no NATS server is given; use --nats"),
        (["--nats", "nats://127.0.0.1:1"], 2, "no engine is given"),
        (["--nats", "nats://127.0.0.1:1", "--worker", "a=tcp://127.0.0.1:1"], 2, "--worker needs --model"),
        (["--nats", "nats://127.0.0.1:1", "--worker", "a"], 2, "invalid worker"),
        (["--nats", "nats://127.0.0.1:1", "--metrics-host", "::", *MODEL_AND_WORKER], 2, "--metrics-host needs --metrics-port"),
        (["--nats", "http://127.0.0.1:1", *MODEL_AND_WORKER], 2, "invalid server"),
        (["--nats", "nats://secret@127.0.0.1:1x", *MODEL_AND_WORKER], 2, "invalid server 'nats://127.0.0.1:1x'"),
        (["--nats", "nats://127.0.0.1:1", "--copies", "2", *MODEL_AND_WORKER], 2, "copies is 2"),
        (["--nats", "nats://127.0.0.1:1", "--partitions", "1000", *MODEL_AND_WORKER], 2, "partitions is 1000"),
        (["--nats", "nats://127.0.0.1:1", "--partition-size", "big", *MODEL_AND_WORKER], 2, "invalid size"),
        (["--nats", "nats://127.0.0.1:1", "--partition-size", "1", *MODEL_AND_WORKER], 2, "--partition-size is 1"),
        (["--nats", "nats://127.0.0.1:1", "--plane", "a b", *MODEL_AND_WORKER], 2, "invalid plane name 'a b'"),
        (["--nats", "nats://127.0.0.1:1", "--bridge-name", "", *MODEL_AND_WORKER], 2, "invalid bridge name ''"),
        (["--nats", "nats://127.0.0.1:1", "--dead-seconds", "-1", *MODEL_AND_WORKER], 2, "seconds"),
        (["--nats", "nats://127.0.0.1:1", "--creds", "/no/such", *MODEL_AND_WORKER], 2, "cannot read /no/such"),
        (
            ["--nats", "nats://127.0.0.1:1", "--tls-cert", "/no/such", *MODEL_AND_WORKER],
            2,
            "--tls-cert is set but tls_key is not",
        ),
        (["--nats", "nats://127.0.0.1:1", "--metrics-port", "x", *MODEL_AND_WORKER], 2, "invalid port"),
        (["--nats", "nats://127.0.0.1:1", "--config", "/no/such"], 2, "cannot read /no/such"),
        (["--nats", "nats://127.0.0.1:1", "--topics", "3", *MODEL_AND_WORKER], 2, "unknown option --topics"),
    ],
    ids=str,
)
def test_wrong_usage_is_reported_in_one_sentence(arguments: list[str], code: int, message: str) -> None:
    ended = run("bridge", *arguments)
    assert ended.code == code, ended.err
    assert message in last_line(ended)
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
def test_an_invalid_file_is_reported_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    config = write(tmp_path / "fleet.toml", text)
    ended = run("bridge", "--nats", "nats://127.0.0.1:1", "--config", config)
    assert ended.code == 2
    assert message in ended.err
    assert f"kvevents: {config}" in ended.err or f"cannot read {config}" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_settings_are_checked_without_a_server() -> None:
    ended = run("bridge", "--nats", "nats://user:secret@127.0.0.1:1", *MODEL_AND_WORKER, "--check")
    assert (ended.code, ended.out) == (0, "")
    assert "these settings can be used" in ended.err


def test_a_server_without_jetstream_is_reported(tmp_path: Path) -> None:
    with nats_server(tmp_path, jetstream=None) as server:
        ended = run("bridge", "--nats", server.url, *MODEL_AND_WORKER)
    assert ended.code == 1
    assert "JetStream is disabled for this account" in last_line(ended)
    assert "Traceback" not in ended.err


def test_partitions_without_room_on_the_servers_are_reported(tmp_path: Path) -> None:
    with nats_server(tmp_path, jetstream={"max_file": 100 << 20}) as server:
        ended = run("bridge", "--nats", server.url, *PARTITION, *MODEL_AND_WORKER)
    assert ended.code == 1
    assert "is full: raise its limit or free space. 2 partitions reserve 128 MiB in all on 1 of the servers" in last_line(ended)


def test_the_default_name_of_a_bridge_is_the_host_name(server: NatsServer) -> None:
    with Program("bridge", "--nats", server.url, "--plane", "host", *PARTITION, *MODEL_AND_WORKER) as program:
        program.err.wait(f"bridge '{re.escape(socket.gethostname())}' writes to")
        assert program.interrupt(signal.SIGTERM).code == 0


def test_a_login_on_the_command_line_is_reported(server: NatsServer) -> None:
    """The login itself is never printed; this server accepts any."""
    with Program(
        "bridge", "--nats", server.url_of("user:secret"), "--plane", "login", *PARTITION, *MODEL_AND_WORKER
    ) as program:
        program.err.wait("WARNING all users of this machine can read a login in --nats; use --creds")
        program.err.wait("writes to the 2 partitions")
        ended = program.interrupt(signal.SIGTERM)
    assert ended.code == 0
    assert "secret" not in ended.err
