"""`kvevents relay` as a process: repeated kills under traffic, wrong usage, shutdown."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

from cli_cases import Program, run
from kvevents.cli.options import engine
from kvevents.cli.relay import HINT_DELAY_SECONDS, RelayStatusLogger
from kvevents.stream import DegradedReason, Source, Trust
from prometheus_probe_cases import ask_probe
from publisher_cases import ANY, DEADLINE, run_publisher
from relay_cases import block
from relay_socket_cases import Listener, Truth
from tools.ports import reserve_port

KILLS = 5


class RelayEndpoints:
    """The endpoints of a relay, which stay the same in each of its incarnations."""

    def __init__(self, folder: Path) -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.journal = folder / "journal"

    def arguments(self, publisher: Any, *more: object) -> list[object]:
        endpoints = ("--endpoint", self.endpoint, "--replay", self.replay_endpoint, "--journal", self.journal)
        return ["relay", f"engine={publisher.endpoint},{publisher.replay_endpoint}", *endpoints, "--heartbeat", "0.1", *more]


@contextmanager
def listener(endpoints: RelayEndpoints) -> Iterator[Listener]:
    found = Listener(Source(endpoints.endpoint, endpoints.replay_endpoint))
    with closing(found.subscriber):
        yield found


def until_exact(truth: Truth, *listeners: Listener) -> None:
    """Wait until listeners are EXACT; publish an empty batch if no live batch has confirmed the replayed ones yet."""
    end = monotonic() + 3 * DEADLINE
    published_at = 0.0
    while not all(each.is_exact(truth.digest) for each in listeners):
        assert monotonic() < end, [str(each.subscriber.trust()) for each in listeners]
        for each in listeners:
            each.take()
            is_unconfirmed = (
                DegradedReason.REPLAY_UNPROVEN.value in each.subscriber.trust().reason
            )  # its own reason, or the relay's
            if is_unconfirmed and each.digest == truth.digest and monotonic() > published_at + 1.0:
                truth.publish_events()
                published_at = monotonic()


def read_incarnation(program: Program) -> int:
    """Return the incarnation that the relay continues by its log, or 0 if it began a new one."""
    line = program.err.wait("relaying to")
    found = re.search(r"of incarnation (\d+)", line)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("restarts", [False, True], ids=["same engine", "engine restarts"])
def test_consumers_do_not_notice_a_kill_9(tmp_path: Path, restarts: bool) -> None:
    """After kills at random times, the relay has the same incarnation, no reset, and in the end the blocks of the engine."""
    rng = random.Random(5)
    endpoints = RelayEndpoints(tmp_path)
    number = 0
    with run_publisher(replay_endpoint=ANY, buffer_steps=100_000) as publisher, listener(endpoints) as early:
        wildcard_endpoints = [str(end).replace("127.0.0.1", "*") for end in (publisher.endpoint, publisher.replay_endpoint)]
        truth = Truth(publisher)
        program = Program(*endpoints.arguments(publisher))
        program.err.wait("relaying to")
        truth.publish_events(block(0))
        until_exact(truth, early)
        incarnations = set()
        for kill in range(KILLS):
            for _ in range(rng.randint(20, 400)):
                number += 1
                truth.publish_events(block(number))
                early.take()
            program.process.kill()
            program.end()
            if restarts and kill == 1:
                publisher.shutdown()
                with run_publisher(endpoint=wildcard_endpoints[0], replay_endpoint=wildcard_endpoints[1]) as restarted:
                    truth = Truth(restarted)
                    for each in range(700):
                        truth.publish_events(block(10_000 + each))
                    program = Program(*endpoints.arguments(restarted))
                    until_exact(truth, early)
                    with listener(endpoints) as late:
                        until_exact(truth, late)
                    assert read_incarnation(program) > 0
                break
            program = Program(*endpoints.arguments(publisher))
            incarnations.add(read_incarnation(program))
        else:
            with listener(endpoints) as late:
                until_exact(truth, early, late)
            assert len(incarnations) == 1
            assert 0 not in incarnations
        assert early.subscriber.status().counters.resets == 0
        ended = program.interrupt(signal.SIGTERM)
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err


def test_a_damaged_journal_starts_a_new_incarnation(tmp_path: Path) -> None:
    endpoints = RelayEndpoints(tmp_path)
    with run_publisher(replay_endpoint=ANY) as publisher, listener(endpoints) as early:
        truth = Truth(publisher)
        with Program(*endpoints.arguments(publisher)) as program:
            for number in range(50):
                truth.publish_events(block(number))
            until_exact(truth, early)
            program.process.kill()
        for path in endpoints.journal.glob("*.log"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
        with Program(*endpoints.arguments(publisher)) as program:
            program.err.wait("new incarnation: ")
            with listener(endpoints) as late:
                until_exact(truth, late)
                while not early.subscriber.status().counters.resets:
                    early.take()
                until_exact(truth, early, late)
            assert early.subscriber.status().counters.resets == 1
            assert program.interrupt().code == 0


def test_metrics_are_served_and_a_journal_folder_in_use_is_rejected(tmp_path: Path) -> None:
    endpoints = RelayEndpoints(tmp_path)
    port = reserve_port()
    with run_publisher(replay_endpoint=ANY) as publisher:
        with Program(*endpoints.arguments(publisher, "--metrics-port", port, "--log-format=json")) as program:
            program.err.wait("engine rank 0: DEGRADED .*no live batch has confirmed")
            Truth(publisher).publish_events()
            program.err.wait("engine rank 0: EXACT")
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE) as answer:
                assert b'kvevents_relay_upstream_state{state="EXACT"} 1.0' in answer.read()
            assert ask_probe(port, "/livez") == ask_probe(port, "/readyz") == (200, "ok")
            second = run(*endpoints.arguments(publisher))
            assert (second.code, second.out) == (1, "")
            assert "another process uses it" in second.err
            ended = program.interrupt(signal.SIGTERM)
        assert ended.code == 0
        assert all(line.startswith("{") for line in ended.err.splitlines())


def test_a_relay_whose_engine_is_away_is_live_and_not_ready() -> None:
    """A restart of the relay would not help, so only `/readyz` fails; it names the engine."""
    port, missing = reserve_port(), reserve_port()
    endpoints = ("--endpoint", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0")
    with Program("relay", f"engine=tcp://127.0.0.1:{missing}", *endpoints, "--metrics-port", port) as program:
        program.err.wait("engine rank 0: CONNECTING")
        assert ask_probe(port, "/livez") == (200, "ok")
        assert ask_probe(port, "/readyz") == (503, f"no connection yet to engine rank 0 at tcp://127.0.0.1:{missing}")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["tcp://nowhere"], 2, "expected tcp://HOST:PORT"),
        (["gpu:x=tcp://127.0.0.1:1"], 2, "invalid engine"),
        (["nonsense"], 2, "invalid endpoint 'nonsense'"),
        (
            ["127.0.0.1:1", "127.0.0.1:1"],
            2,
            "tcp://127.0.0.1:1 and tcp://127.0.0.1:1 have the same name and rank",
        ),
        (["127.0.0.1:1", "--token-policy", "hash", "--dialect", "vllm-0.22"], 2, "has no field"),
        (["127.0.0.1:1", "--dialect", "vllm-0.1"], 2, "older than"),
        (["127.0.0.1:1", "--dialect", "trt-1"], 2, "unknown engine"),
        (["127.0.0.1:1", "--token-policy", "burn"], 2, "invalid value 'burn'"),
        (["127.0.0.1:1", "--heartbeat", "-1"], 2, "seconds"),
        (["127.0.0.1:1", "--heartbeat", "100000"], 2, "heartbeat is 100000"),
        (["127.0.0.1:1", "--journal", "/dev/null/folder"], 2, "cannot open the journal folder"),
    ],
    ids=str,
)
def test_wrong_usage_is_reported_in_one_sentence(arguments: list[str], code: int, message: str) -> None:
    ended = run("relay", "--endpoint", "tcp://127.0.0.1:*", "--replay", "tcp://127.0.0.1:*", *arguments)
    assert ended.code == code, ended.err
    assert message in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err


def test_a_port_in_use_is_reported_in_one_sentence() -> None:
    with run_publisher() as publisher:
        ended = run("relay", "127.0.0.1:1", "--endpoint", publisher.endpoint)
    assert ended.code == 1
    assert "in use" in ended.err
    assert "Traceback" not in ended.err


def test_the_name_of_an_upstream_is_given_or_its_endpoint() -> None:
    assert engine("127.0.0.1:1,127.0.0.1:2") == Source("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", name="127.0.0.1:1")
    assert engine("gpu:3=127.0.0.1:1") == Source("tcp://127.0.0.1:1", name="gpu", rank=3)
    assert engine("gpu=127.0.0.1:1").label == "gpu"


def test_an_upstream_that_never_connects_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that connects instead of binding looks like one that is down; a lost connection gets no such hint."""
    now = [0.0]
    never_connected, connected_before = (
        SimpleNamespace(source=name, rank=0, endpoint="tcp://e:1", trust=Trust.CONNECTING) for name in "ab"
    )
    status: Any = SimpleNamespace(upstreams=(never_connected, connected_before), journal=None, history=None)
    logger = RelayStatusLogger(lambda: status, lambda: now[0])
    with caplog.at_level("WARNING", "kvevents.relay"):
        logger.poll()
        connected_before.trust = Trust.EXACT
        for now_seconds in (1.0, HINT_DELAY_SECONDS, 2 * HINT_DELAY_SECONDS, 3 * HINT_DELAY_SECONDS):
            now[0] = now_seconds
            logger.poll()
            connected_before.trust = Trust.STALE
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("a rank 0: no connection to tcp://e:1 yet; an engine whose own endpoint has a concrete host")
    assert '"endpoint": "tcp://*:PORT"' in line
