"""`kvevents bridge` as a process, on a real NATS server: what it follows, its name, its end, what it tells, wrong usage."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvevents.cli import bridge as cli
from kvevents.cli import bridging, nats
from kvevents.cli.bridging import Seen, Teller, card_of
from kvevents.config import Curve
from kvevents.errors import PlaneError
from kvevents.plane import metrics
from kvevents.plane.bridge import BridgeSettings
from kvevents.plane.connection import opened
from kvevents.plane.layout import Layout
from kvevents.plane.settings import PlaneSettings
from kvevents.publisher import ZmqEventPublisher
from kvevents.service.registration import Registration
from nats_servers import NatsServer, nats_server, needs_nats
from plane_cases import Log, plane_at
from ports import quiet_port
from publisher_cases import ANY, batch, publishing
from service_cases import until, write
from test_cli import Ended, Program, run

pytestmark = needs_nats

SECONDS = 20.0
MODEL = "m"
LANE = ("--lanes", 2, "--lane-size", "64MiB")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as found:
        yield found


def key_of(name: str) -> str:
    """An engine of nobody in particular, as the log knows it."""
    return Registration(instance=name, endpoint="tcp://h:1", model=MODEL).key[0]


def worker(name: str, publisher: ZmqEventPublisher) -> list[object]:
    return ["--model", MODEL, "--worker", f"{name}={publisher.endpoint},{publisher.replay_endpoint}"]


def source(name: str, publisher: ZmqEventPublisher, **more: Any) -> str:
    fields = {"instance": name, "model": MODEL, "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    return "[[sources]]\n" + "".join(f"{field} = {json.dumps(value)}\n" for field, value in (fields | more).items())


@contextmanager
def bridge(server: NatsServer, plane: str, *more: object, name: str = "bridge") -> Iterator[Program]:
    """A bridge that writes; nothing that it has written to stderr may be a traceback or a warning of Python's."""
    with Program("bridge", "--to", server.url, "--plane", plane, *LANE, "--name", name, *more) as program:
        program.err.wait(f"bridge '{name}' writes to the 2 lanes of plane '{plane}'")
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
    found = [card for ledger in log.ledgers.values() for card in ledger.joined().values()]
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
            lanes = 2
            lane_bytes = {64 << 20}
            [bridge]
            name = "of the file"
            beat = 0.2
            status_seconds = 0.2
        """
        config = write(tmp_path / "fleet.toml", head + source("a", first, block_size=16, group="g"))
        more = write(tmp_path / "more.toml", "sources = []")
        with Program("bridge", "--config", config, "--sources", more, "--name", "of the flags") as program:
            program.err.wait("bridge 'of the flags' writes to the 2 lanes of plane 'file'")
            confirmed(program, "a", first)
            log = Log(plane_at(server.url, name="file")).until("a", lambda log: len(log.pages) and cards(log).keys() == {"a"})
            assert (cards(log)["a"]["block_size"], cards(log)["a"]["group"]) == (16, "g")
            second.publish(batch(0))
            write(more, source("b", second))
            has(log, "b", 1)
            confirmed(program, "b", second, 1)
            program.err.wait("connected; streams: 2 EXACT; 3 batches written; 0 records of 0 bytes wait")
            write(config, head)
            log.until("only b", lambda log: cards(log).keys() == {"b"})
            program.err.wait("a rank 0: no longer followed")
            write(more, "sources = [")
            program.err.wait(r"WARNING .*more\.toml: .*the sources that it named before stay")
            second.publish(batch(2))
            has(log, "b", 3)
            write(more, source("b", second))
            program.err.wait("all that is named can be followed")
            assert program.interrupt(signal.SIGTERM).code == 0


def test_ranks_of_one_engine_that_cannot_be_of_one_are_told(server: NatsServer, tmp_path: Path) -> None:
    """When they are written later; a bridge does not start with them."""
    with publishing(replay_endpoint=ANY) as first, publishing(replay_endpoint=ANY) as second:
        file = write(tmp_path / "s.toml", source("a", first))
        with bridge(server, "ranks", "--sources", file) as program:
            confirmed(program, "a", first)
            write(file, source("a", first) + source("a", second, rank=1, model="other"))
            program.err.wait("WARNING .*a rank 1 has model 'other'.*call this instance something else")
            assert not [line for line in program.err.all if "a rank 1: following" in line]


def test_cards_have_no_keys() -> None:
    curve = Curve(public_key="p" * 40, secret_key="s" * 40, server_key="o" * 40)
    registration = Registration(instance="a", endpoint="tcp://h:1", model=MODEL, block_size=16, curve=curve)
    card = card_of(registration)
    assert b"pppp" not in card
    assert b"ssss" not in card
    assert b"oooo" not in card
    assert msgspec.json.decode(card, type=Registration) == msgspec.structs.replace(registration, curve=None)


# --- its name ----------------------------------------------------------------------------------------------------------------


def test_a_bridge_that_was_killed_comes_back_and_nothing_is_lost_or_doubled(server: NatsServer) -> None:
    """Under its name at once, since its process is known to have ended."""
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
            assert not [line for line in program.err.all if "waiting for" in line]
        with bridge(server, "killed", *worker("a", publisher), name="node.example"):
            has(log, "a", 900)


def test_a_second_bridge_of_the_same_name_is_refused(server: NatsServer, tmp_path: Path) -> None:
    """With one sentence, after the first has had time to end; the first goes on. Where it does end another takes its place."""
    with publishing(replay_endpoint=ANY) as publisher, bridge(server, "same", *worker("a", publisher)) as first:
        arguments = ["bridge", "--to", server.url, "--plane", "same", *LANE, "--name", "bridge", *worker("a", publisher)]
        who = f"process {first.process.pid} at {re.escape(socket.gethostname())} is bridge 'bridge'"
        with Program(*arguments, command=quick("0.5")) as second:
            second.err.wait(f"WARNING .*{who}; waiting for at most 0.5 s")
            ended = second.end()
        assert ended.code == 1
        assert re.fullmatch(f"kvevents: {who} of plane 'same'; .*give this one another with --name.*", last(ended))
        publisher.publish(batch(0))
        has(Log(plane_at(server.url, name="same")), "a", 1)
        with Program(*arguments) as third:
            third.err.wait("waiting for at most 18 s")
            assert first.interrupt(signal.SIGTERM).code == 0
            third.err.wait("bridge 'bridge' writes to")
            assert third.interrupt(signal.SIGTERM).code == 0


def test_a_signal_ends_a_bridge_that_waits_for_its_name(server: NatsServer) -> None:
    arguments = ["bridge", "--to", server.url, "--plane", "waits", *LANE, "--name", "bridge", *HERE]
    with bridge(server, "waits", *HERE), Program(*arguments) as second:
        second.err.wait("waiting for at most")
        ended = second.interrupt()
    assert ended.code == 0
    assert "Traceback" not in ended.err


def test_a_bridge_whose_name_was_taken_ends(server: NatsServer) -> None:
    """As when it was stopped for longer than its lease lasts."""
    with publishing(replay_endpoint=ANY) as publisher:
        arguments = ["bridge", "--to", server.url, "--plane", "taken", *LANE, "--name", "bridge", *worker("a", publisher)]
        with Program(*arguments, command=quick("3.0", lease="1.5")) as first:
            confirmed(first, "a", publisher)
            first.process.send_signal(signal.SIGSTOP)
            with Program(*arguments, command=quick("10.0", lease="1.5")) as second:
                confirmed(second, "a", publisher, 1)
                first.process.send_signal(signal.SIGCONT)
                ended = first.end()
                assert ended.code == 1, ended.err
                assert f"process {second.process.pid} at" in last(ended)
                publisher.publish(batch(2))
                has(Log(plane_at(server.url, name="taken")), "a", 3)


def test_a_name_outlives_servers_that_are_away_and_a_bucket_that_was_deleted(tmp_path: Path) -> None:
    with nats_server(tmp_path) as server, publishing(replay_endpoint=ANY) as publisher:
        arguments = ["bridge", "--to", server.url, "--plane", "away", *LANE, "--name", "bridge", *worker("a", publisher)]
        with Program(*arguments, command=quick("10.0", lease="1.0")) as program:
            confirmed(program, "a", publisher)
            has(Log(plane_at(server.url, name="away")), "a", 1)
            server.kill()
            publisher.publish(batch(1))
            program.err.wait("the name of this bridge is not sure: it could not be renewed for 1 s")
            server.start()
            program.err.wait("the name of this bridge is sure again")
            has(Log(plane_at(server.url, name="away")), "a", 2)
            lines = len(program.err.all)
            asyncio.run(delete_leases(server, "away"))
            program.err.wait(lambda told: any("is sure again" in line for line in told[lines:]))
            publisher.publish(batch(2))
            has(Log(plane_at(server.url, name="away")), "a", 3)
            assert program.interrupt(signal.SIGTERM).code == 0


async def delete_leases(server: NatsServer, plane: str) -> None:
    async with opened(plane_at(server.url), name="tests") as client:
        await client.jetstream().delete_key_value(Layout(plane, 2).leases)


def test_without_servers_a_signal_ends_it_within_a_bound_and_a_second_one_at_once(tmp_path: Path) -> None:
    """What was not written is told."""
    with nats_server(tmp_path) as server, publishing(replay_endpoint=ANY) as publisher:
        both = [
            Program("bridge", "--to", server.url, "--name", name, *LANE, *worker("a", publisher)) for name in ("one", "two")
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
                program.err.wait("coming back")
                program.process.send_signal(signal.SIGTERM)
            # Their threads are the first to end.
            until("the end to begin", lambda: publisher.stats().subscribers == 0)
            assert hasty.interrupt(signal.SIGINT).code == 130
            ended = patient.end()
        assert ended.code == 0, ended.err
        assert re.search("ended with [12] records that the servers did not take", ended.err)
        assert "Traceback" not in ended.err


def quick(name_seconds: str, lease: str = "15.0") -> tuple[str, ...]:
    """The program with short waits for names."""
    code = f"""
import sys
from kvevents.cli import bridging, main
from kvevents.plane.leases import Lease
bridging.NAME_SECONDS = {name_seconds}
bridging.Lease = lambda *args: Lease(*args, seconds={lease})
sys.exit(main())
"""
    return (sys.executable, "-c", code)


def last(ended: Ended) -> str:
    return ended.err.splitlines()[-1]


# --- what it tells -----------------------------------------------------------------------------------------------------------


def test_metrics_are_scraped(server: NatsServer) -> None:
    """Of few labels, and as the bridge is."""
    port = quiet_port()
    with publishing(replay_endpoint=ANY) as publisher:
        more = (*worker("a", publisher), "--worker", "gone=tcp://127.0.0.1:1", "--metrics-port", port, "--json")
        with bridge(server, "metrics", *more) as program:
            confirmed(program, "a", publisher)
            until("a batch", lambda: scrape(port)["kvevents_bridge_written_batches_total"] == [({}, 1.0)])
            found = {name: values for name, values in scrape(port).items() if name.startswith("kvevents")}
            assert {name.removeprefix("kvevents_bridge_") for name in found} == {
                *("connected", "name_held", "network_suspected", "unnamed_engines", "queue_limit_bytes", "discovery_faults"),
                *("written_batches_total", "conflicts_total", "followed_anew_total", "breaches_total"),
                *("lane_position", "lane_waiting", "lane_queued_bytes", "lane_held_up", "streams"),
            }
            streams = {labels["state"]: value for labels, value in found["kvevents_bridge_streams"]}
            assert streams == {"CONNECTING": 1, "REPLAYING": 0, "EXACT": 1, "DEGRADED": 0, "STALE": 0}
            assert [labels for labels, _ in found["kvevents_bridge_lane_position"]] == [{"lane": "0"}, {"lane": "1"}]
            assert sum(value for _, value in found["kvevents_bridge_lane_position"]) > 0
            singles = {name: values[0][1] for name, values in found.items() if values[0][0] == {}}
            assert singles["kvevents_bridge_connected"] == singles["kvevents_bridge_name_held"] == 1
            assert singles["kvevents_bridge_queue_limit_bytes"] == BridgeSettings.__struct_defaults__[-1]
            assert singles["kvevents_bridge_breaches_total"] == 0
            second = run("bridge", "--to", server.url, "--plane", "metrics", "--name", "other", *more)
            assert second.code == 1
            assert f"cannot serve metrics at 127.0.0.1:{port}" in last(second)
            assert "Traceback" not in second.err
            ended = program.interrupt(signal.SIGTERM)
        assert ended.code == 0, ended.err
        assert all(line.startswith("{") for line in ended.err.splitlines())


def test_one_line_for_each_change(caplog: pytest.LogCaptureFixture) -> None:
    teller = Teller()
    with caplog.at_level("INFO", "kvevents.bridge"):
        for states in (
            {"lanes": ""},
            {"lanes": "1"},
            {"lanes": "1"},
            {"lanes": "2", "a": "EXACT"},
            {"lanes": ""},
            {"lanes": ""},
        ):
            teller.tell((what, words, 20) for what, words in states.items())
        for sentences in ([], ["x", "y"], ["y", "x"], ["z"], [], []):
            teller.tell_faults(sentences)
    told = ["lanes: 1", "lanes: 2", "a: EXACT", "lanes: well again", "x", "y", "z", "all that is named can be followed"]
    assert caplog.messages == told


def test_the_document_lists_what_there_is() -> None:
    """Each metric, and each setting with its flag and its default."""
    text = (Path(__file__).parent.parent / "docs" / "plane.md").read_text()
    rows = " ".join(re.findall(r"^\|([^|]*)\|", text, re.MULTILINE))
    listed = set(re.findall(r"`(\w+)[{`]", rows))
    exported = {*metrics._GAUGES, *(f"{name}_total" for name in metrics._COUNTERS), *metrics._LANES, "streams"}
    assert exported - listed == set()
    fields = {*PlaneSettings.__struct_fields__, *BridgeSettings.__struct_fields__, *Seen.__struct_fields__} - {"plane"}
    assert fields - listed == set()
    own = {each.flag for each in (*cli._PLANE, *cli._SELF, *cli._SEEN)} - {"--metrics-port", "--metrics-host"}
    flags = own | {flag for flag, *_ in nats._LOGIN} | {nats._INBOX}
    assert not [flag for flag in flags if f"`{flag}`" not in text]


def test_the_help_tells_the_defaults_of_the_settings() -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(BridgeSettings)}
    said = {each.field: re.search(r"\(default: (\d+)\)", each.help) for each in cli._SELF}
    assert {name: float(found[1]) for name, found in said.items() if found} == {
        "hold_back": defaults["hold_back"],
        "dead_seconds": defaults["dead_seconds"],
    }


# --- wrong usage -------------------------------------------------------------------------------------------------------------

HERE = ("--model", "m", "--worker", "a=tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--dns", "h:1"], 2, "no server is named; write --to"),
        (["--to", "nats://127.0.0.1:1"], 2, "there is nothing to follow"),
        (["--to", "nats://127.0.0.1:1", "--worker", "a=tcp://127.0.0.1:1"], 2, "--worker needs --model"),
        (["--to", "nats://127.0.0.1:1", "--worker", "a"], 2, "is no worker"),
        (["--to", "http://127.0.0.1:1", *HERE], 1, "is no server of a plane"),
        (["--to", "nats://secret@127.0.0.1:1x", *HERE], 1, "'nats://127.0.0.1:1x' is no server of a plane"),
        (["--to", "nats://127.0.0.1:1", *HERE], 1, "cannot use the NATS server at nats://127.0.0.1:1: Connect"),
        (["--to", "nats://127.0.0.1:1", "--copies", "2", *HERE], 1, "copies is 2"),
        (["--to", "nats://127.0.0.1:1", "--lanes", "1000", *HERE], 1, "lanes is 1000"),
        (["--to", "nats://127.0.0.1:1", "--lane-size", "big", *HERE], 2, "is no size"),
        (["--to", "nats://127.0.0.1:1", "--lane-size", "1", *HERE], 1, "lane_bytes is 1"),
        (["--to", "nats://127.0.0.1:1", "--plane", "a b", *HERE], 1, "name is 'a b'; a plane's has"),
        (["--to", "nats://127.0.0.1:1", "--name", "", *HERE], 1, "a bridge's name is ''"),
        (["--to", "nats://127.0.0.1:1", "--reserve", "-1", *HERE], 2, "seconds"),
        (["--to", "nats://127.0.0.1:1", "--reserve", "4000", *HERE], 1, "hold_back is 4000"),
        (["--to", "nats://127.0.0.1:1", "--creds", "/no/such", *HERE], 1, "cannot read /no/such"),
        (["--to", "nats://127.0.0.1:1", "--tls-cert", "/no/such", *HERE], 1, "tls_certificate is there without tls_key"),
        (["--to", "nats://127.0.0.1:1", "--metrics-port", "x", *HERE], 2, "is no port"),
        (["--to", "nats://127.0.0.1:1", "--config", "/no/such"], 1, "cannot read /no/such"),
        (["--to", "nats://127.0.0.1:1", "--partitions", "3", *HERE], 2, "no option --partitions"),
    ],
    ids=str,
)
def test_wrong_usage_is_told_in_one_sentence(arguments: list[str], code: int, told: str) -> None:
    ended = run("bridge", *arguments)
    assert ended.code == code, ended.err
    assert told in last(ended)
    assert "secret" not in ended.err
    assert "Traceback" not in ended.err
    assert code == 2 or len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[plane]\nserver = ['x']", "[plane]: Object contains unknown field `server`; known fields: servers, name"),
        ("[plane]\nlanes = 'many'", "[plane]: Expected `int`, got `str` - at `$.lanes`"),
        ("[plane]\ncopies = 2", "[plane]: copies is 2"),
        ("[bridge]\nreserve = 3", "[bridge]: Object contains unknown field `reserve`; known fields: plane, name"),
        ("[bridge]\nmetrics_port = 'x'", "[bridge]: Expected `int | null`, got `str`"),
        ("[bridges]\n", "unknown key 'bridges'; the file of a bridge has bridge, curve, dns, plane, source_files, sources"),
        ("bridge = 3\n", "[bridge] is no table"),
        ("port = 3\n", "unknown key 'port'"),
        ("[[sources]]\ninstance = 'a'", "either endpoint or base_url"),
        ("[plane\n", "cannot read"),
    ],
    ids=str,
)
def test_a_wrong_file_is_told_in_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    config = write(tmp_path / "fleet.toml", text)
    ended = run("bridge", "--to", "nats://127.0.0.1:1", "--config", config)
    assert ended.code == 1
    assert told in ended.err
    assert f"kvevents: {config}" in ended.err or f"cannot read {config}" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_settings_are_checked_without_a_server() -> None:
    ended = run("bridge", "--to", "nats://user:secret@127.0.0.1:1", *HERE, "--check")
    assert (ended.code, ended.out) == (0, "")
    assert "these settings can be used" in ended.err


def test_a_server_without_jetstream_is_told(tmp_path: Path) -> None:
    with nats_server(tmp_path, jetstream=None) as server:
        ended = run("bridge", "--to", server.url, *HERE)
    assert ended.code == 1
    assert "there is no JetStream for this account" in last(ended)
    assert "Traceback" not in ended.err


def test_lanes_that_the_servers_have_no_room_for_are_told(tmp_path: Path) -> None:
    with nats_server(tmp_path, jetstream={"max_file": 100 << 20}) as server:
        ended = run("bridge", "--to", server.url, *LANE, *HERE)
    assert ended.code == 1
    assert "no room left; raise its limit or free some. 2 lanes reserve 128 MiB in all on 1 of the servers" in last(ended)


def test_its_name_is_the_hosts_unless_told(server: NatsServer) -> None:
    with Program("bridge", "--to", server.url, "--plane", "host", *LANE, *HERE) as program:
        program.err.wait(f"bridge '{re.escape(socket.gethostname())}' writes to")
        assert program.interrupt(signal.SIGTERM).code == 0


def test_a_login_on_the_command_line_is_told(server: NatsServer) -> None:
    """And shown nowhere; this server takes any."""
    with Program("bridge", "--to", server.url_of("user:secret"), "--plane", "login", *LANE, *HERE) as program:
        program.err.wait("WARNING everybody on this machine sees a login in --to; use --creds")
        program.err.wait("writes to the 2 lanes")
        ended = program.interrupt(signal.SIGTERM)
    assert ended.code == 0
    assert "secret" not in ended.err


async def test_a_bucket_without_a_leader_is_asked_again_for_the_name(caplog: pytest.LogCaptureFixture) -> None:
    """As one of several copies is for a moment after it was made; a bridge that begins a plane does not end for that."""

    class Electing:
        rival = None

        def __init__(self) -> None:
            self.asked: list[float] = []

        async def acquire(self, within: float = 0.0) -> bool:
            self.asked.append(within)
            if not within:
                raise PlaneError("writing lease bridge.b: no response from stream", fault="away")
            return True

    lease = Electing()
    plane = PlaneSettings(servers=("nats://127.0.0.1",))
    process = SimpleNamespace(_settings=SimpleNamespace(bridge=BridgeSettings(plane=plane, name="b")))
    await bridging.Process._take_name(process, lease)  # type: ignore[arg-type]
    assert lease.asked == [0.0, bridging.NAME_SECONDS]
    assert caplog.messages == ["writing lease bridge.b: no response from stream"]
