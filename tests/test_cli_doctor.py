"""`kvevents doctor` as a process: each fault is found, named, and comes with what to do."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from kvevents.cli.checkup.traffic import check_topic
from kvevents.cli.handshake import shake_hands
from kvevents.events import BlockStored, KVEventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.testing import Faults, TapePlayer
from test_cli import RECORDING, RUN, SECONDS, Ended, Program, adjacent, refusing, run, tape_of

LOOK = ("--seconds", "0.6")


def doctor(tape: TapePlayer, *args: object) -> dict[str, dict[str, str]]:
    ended = run("doctor", tape.endpoint, "--replay", tape.replay_endpoint, "--json", *LOOK, *args)
    return findings(ended)


def findings(ended: Ended) -> dict[str, dict[str, str]]:
    """Findings by check, of several the worst; the exit code must agree with them."""
    report = json.loads(ended.out)
    order = ["ok", "warn", "fail"]
    found: dict[str, dict[str, str]] = {}
    for finding in report["findings"]:
        if finding["check"] not in found or order.index(finding["verdict"]) > order.index(found[finding["check"]]["verdict"]):
            found[finding["check"]] = finding
        assert finding["verdict"] == "ok" or finding["advice"], finding
    assert report["verdict"] == max((finding["verdict"] for finding in report["findings"]), key=order.index)
    assert ended.code == (1 if report["verdict"] == "fail" else 0)
    return found


@contextmanager
def playing(**faults: object) -> Iterator[TapePlayer]:
    """A recorded engine under load, for as long as anybody looks."""
    with TapePlayer(RECORDING, run=RUN, faults=Faults(**faults)) as tape:  # type: ignore[arg-type]
        tape.play(20)
        tape.start_playing(rate=200.0, times=1_000)
        yield tape


def test_a_healthy_engine() -> None:
    with adjacent() as (tape,):
        tape.play(20)
        tape.start_playing(rate=200.0, times=1_000)
        ended = run("doctor", tape.endpoint, *LOOK)
    assert ended.code == 0, ended.out
    assert not [line for line in ended.out.splitlines() if line.startswith(("warn", "fail"))], ended.out
    for said in (
        "is a publisher",
        "seen: 'kv-events'",
        "vllm-0.24.0",
        "rank 0",
        "holds #0 to #",
        "complete since",
        "EXACT, after",
    ):
        assert said in ended.out


def test_a_wrong_topic() -> None:
    with playing() as tape:
        found = doctor(tape, "--topic", "kv@pod")
    assert found["traffic"]["verdict"] == "ok"
    assert found["topic"]["verdict"] == "fail"
    assert "no topic begins with 'kv@pod'" in found["topic"]["text"]
    assert "'kv-events'" in found["topic"]["advice"]


def test_topics_of_several_engines_share_a_prefix() -> None:
    from collections import Counter  # noqa: PLC0415

    finding = check_topic(Counter({b"kv@a@m": 2, b"kv@b@m": 1}), "kv@a")
    assert finding is not None
    assert finding.verdict.value == "warn"
    assert "--topic 'kv@'" in finding.advice


def test_nothing_listens() -> None:
    with refusing() as nowhere:
        found = findings(run("doctor", nowhere, "--json", *LOOK))
    assert list(found) == ["address"]
    assert "nothing listens there" in found["address"]["text"]
    for said in ("both sides connect", "tcp://*:PORT", "--bind"):
        assert said in found["address"]["advice"]


def test_the_replay_port_given_as_the_endpoint() -> None:
    with adjacent() as (tape,):
        found = findings(run("doctor", tape.replay_endpoint, "--json", *LOOK))
        assert "ROUTER socket: a replay port" in found["address"]["text"]
        assert f"{tape.endpoint} is a publisher; use that as ENDPOINT" in found["address"]["advice"]


def test_the_event_port_given_as_the_replay_endpoint() -> None:
    with playing() as tape:
        found = findings(run("doctor", tape.endpoint, "--replay", tape.endpoint, "--json", *LOOK))
    assert found["replay"]["verdict"] == "fail"
    assert "XPUB socket, not a replay endpoint" in found["replay"]["text"]


def test_a_mute_replay_endpoint() -> None:
    with playing(replay_mute=True) as tape:
        found = doctor(tape)
    assert found["replay"]["verdict"] == "fail"
    assert "does not answer within" in found["replay"]["text"]
    assert found["traffic"]["verdict"] == found["decoding"]["verdict"] == "ok"


def test_a_lossy_replay_that_has_them_when_asked_again() -> None:
    left_out: set[int] = set()

    def once(seq: int) -> bool:
        return seq == 5 and seq not in left_out and not left_out.add(seq)  # type: ignore[func-returns-value]

    with TapePlayer(RECORDING, run=RUN, faults=Faults(replay_holes=once)) as tape:
        tape.play(20)
        found = doctor(tape)
    assert found["replay"]["verdict"] == "warn"
    assert "1 batch missing inside the answer (#5); asked again, the engine has them" in found["replay"]["text"]


def test_history_that_is_gone() -> None:
    batches = [(b"kv", seq, b"\x93\xcb\x40\x59\x00\x00\x00\x00\x00" + bytes([seq]) + b"\x90\x00") for seq in range(50)]
    with TapePlayer(batches, faults=Faults(buffer_steps=10)) as tape:
        tape.play()
        found = doctor(tape)
    assert "what came before #40 is gone" in found["replay"]["text"]
    assert found["trust"]["verdict"] == "warn"
    assert "DEGRADED" in found["trust"]["text"]
    assert "buffer_steps" in found["trust"]["advice"]


def test_a_garbage_publisher() -> None:
    batches = [(b"metrics", seq, b"\xc1 not msgpack") for seq in range(50)]
    with tape_of(*batches) as tape:
        tape.start_playing(rate=100.0, times=1_000)
        found = doctor(tape)
    assert found["decoding"]["verdict"] == "fail"
    assert "can be read" in found["decoding"]["text"]
    assert "malformed" in found["decoding"]["text"] or "not-a-batch" in found["decoding"]["text"]


def test_messages_that_are_no_batches_at_all() -> None:
    with tape_of((b"", 0, b"x")) as tape, Program("doctor", tape.endpoint, "--no-replay", *LOOK) as program:
        while program.process.poll() is None:
            tape.send_raw([b"only one frame"])
            threading.Event().wait(0.01)
        ended = program.end()
    assert ended.code == 1
    assert re.search(r"([\d,]+) of \1 messages are not \[topic, number, payload\]: not 3 frames \(\1\)", ended.out)


def test_an_idle_engine_is_no_fault_and_replay_tells_what_it_speaks() -> None:
    publisher = ZmqEventPublisher(
        endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv@pod@model", dialect="sglang-0.5.17"
    )
    try:
        for number in range(20):
            stored = BlockStored([2**63 * (number % 2) + number], None, [1, 2], 2, medium="GPU")
            publisher.publish(KVEventBatch(1760000000.0 + number, [stored], 0))
        ended = run("doctor", publisher.endpoint, "--replay", publisher.replay_endpoint, "--json", *LOOK)
    finally:
        publisher.shutdown()
    found = findings(ended)
    assert ended.code == 0
    assert found["traffic"]["verdict"] == "warn"
    assert "an idle engine announces nothing" in found["traffic"]["text"]
    assert "20 batches replayed" in found["decoding"]["text"]
    assert found["decoding"]["text"].endswith("sglang-0.5.9 (20)")
    assert "as [seq, payload]" in found["replay"]["text"]
    assert found["trust"]["verdict"] == "ok"


def test_further_ranks_are_noticed() -> None:
    with adjacent(ranks=2) as tapes:
        tapes[0].play(3)
        found = doctor(tapes[0])
    assert "the next 1 port publish too" in found["ranks"]["text"]
    assert "--ranks 2" in found["ranks"]["advice"]


def test_an_engine_that_connects_to_us() -> None:
    with refusing() as endpoint:
        pass
    publisher = ZmqEventPublisher(endpoint=endpoint, bind=False)
    try:
        with Program("doctor", endpoint, "--bind", "--json", "--seconds", "0.8") as program:
            while program.process.poll() is None:
                publisher.publish(KVEventBatch(1.0, [BlockStored([1], None, [1, 2], 2)], 0))
                threading.Event().wait(0.01)
            found = findings(program.end())
    finally:
        publisher.shutdown()
    assert found["traffic"]["verdict"] == "ok"
    assert found["replay"]["verdict"] == "warn"


@contextmanager
def server(reply: bytes | None) -> Iterator[str]:
    """Something that accepts one connection after another, answers with these bytes, and closes unless there are none."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                kept.append(connection)
                if reply is not None:
                    connection.recv(1 << 16)
                    connection.sendall(reply)
                    connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS)
        for connection in kept:
            connection.close()


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "foreign"), (b"", "closed"), (b"\x00" * 64, "foreign"), (None, "mute")],
)
def test_what_else_may_stand_at_an_address(reply: bytes | None, outcome: str) -> None:
    with server(reply) as endpoint:
        assert shake_hands(endpoint, timeout=0.5).outcome == outcome


def test_an_http_port_is_called_by_its_name() -> None:
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as endpoint:
        found = findings(run("doctor", endpoint, "--json", *LOOK))
    assert "does not speak ZeroMQ HTTP" in found["address"]["text"]


def test_curve_and_unknown_hosts() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        secured = context.socket(zmq.PUB)
        secured.curve_publickey, secured.curve_secretkey = zmq.curve_keypair()
        secured.curve_server = True
        port = secured.bind_to_random_port("tcp://127.0.0.1")
        assert shake_hands(f"tcp://127.0.0.1:{port}").outcome == "curve"
    finally:
        context.destroy(linger=0)
    assert shake_hands("tcp://no-such-host.invalid:5557").outcome == "unknown-host"
    assert shake_hands("ipc:///no/such/socket").outcome == "refused"


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "inproc://kv"])
def test_addresses_that_nobody_can_connect_to(endpoint: str) -> None:
    found = findings(run("doctor", endpoint, "--json", *LOOK))
    assert found["address"]["verdict"] == "fail"


def test_interrupted() -> None:
    with playing() as tape, Program("doctor", tape.endpoint, "--replay", tape.replay_endpoint, "--seconds", "60") as program:
        program.out.wait("is a publisher")
        ended = program.interrupt()
    assert ended.code == 130
    assert "Traceback" not in ended.err
