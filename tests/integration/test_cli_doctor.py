"""`kvevents doctor` as a process reports each fault, with advice."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from cli_cases import RECORDING, RUN, SECONDS, Program, play_on_adjacent_ports, refuse_connections, run, tape_of
from cli_doctor_cases import DURATIONS, Findings, examine, findings, has_traffic, is_followed, one, serve_reply
from cli_service_cases import (
    READY,
    TOKEN,
    RunningService,
    blocks,
    engine,
    run_guarded_service,
    serving,
    source,
    stats,
    wait_until,
)
from kvevents.client.reasons import Reason, advise
from kvevents.client.schemas import HealthAnswer, LoadView, SourceView
from kvevents.diagnosis import service_checks as checks
from kvevents.diagnosis.handshake import perform_handshake
from kvevents.diagnosis.replay import check_replay
from kvevents.diagnosis.service_checks import MIN_LOOKUPS
from kvevents.diagnosis.traffic import check_topic
from kvevents.events import BlockStored, KVEventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.testing import Faults, TapePlayer
from kvevents.wire import MAX_SEQ, replay_batch_frames, replay_end_frames
from tools.ports import reserve_port

DURATION = ("--duration", "0.6")


def run_doctor(tape: TapePlayer, *args: object, is_enough: Callable[[Findings], object] = is_followed) -> Findings:
    return examine(tape.endpoint, "--replay", tape.replay_endpoint, *args, is_enough=is_enough)


@contextmanager
def play_under_load(**faults: object) -> Iterator[TapePlayer]:
    """Play a recorded engine under load until the end of the block."""
    with TapePlayer(RECORDING, run=RUN, faults=Faults(**faults)) as tape:  # type: ignore[arg-type]
        tape.play(20)
        tape.start_playing(rate=200.0, times=1_000)
        yield tape


def test_a_healthy_engine_has_no_warnings() -> None:
    with play_on_adjacent_ports() as (tape,):
        tape.play(20)
        tape.start_playing(rate=200.0, times=1_000)
        for seconds in DURATIONS:  # it says so if it sees too little
            ended = run("doctor", tape.endpoint, "--duration", seconds)
            if " 0 warn," in ended.out:
                break
    assert ended.code == 0, ended.out
    assert not [line for line in ended.out.splitlines() if line.startswith(("warn", "fail"))], ended.out
    for expected in (
        "is a publisher",
        "seen: 'kv-events'",
        "vllm-0.24.0",
        "rank 0",
        "has #0 to #",
        "complete since",
        "EXACT, after",
    ):
        assert expected in ended.out


def test_a_topic_prefix_without_messages_fails_and_the_topics_seen_are_listed() -> None:
    with play_under_load() as tape:
        found = run_doctor(tape, "--topic-prefix", "kv@pod", is_enough=has_traffic)
    assert found["traffic"]["verdict"] == "ok"
    assert found["topic"]["verdict"] == "fail"
    assert "no topic begins with 'kv@pod'" in found["topic"]["text"]
    assert "'kv-events'" in found["topic"]["advice"]


def test_a_prefix_that_excludes_some_topics_is_a_warning_with_the_common_prefix() -> None:
    from collections import Counter  # noqa: PLC0415

    finding = check_topic(Counter({b"kv@a@m": 2, b"kv@b@m": 1}), "kv@a")
    assert finding is not None
    assert finding.verdict.value == "warn"
    assert "--topic-prefix 'kv@'" in finding.advice


def test_an_address_without_a_listener_is_reported() -> None:
    with refuse_connections() as nowhere:
        found = findings(run("doctor", nowhere, "--output=json", *DURATION))
    assert list(found) == ["address"]
    assert "nothing listens there" in found["address"]["text"]
    for expected in ("both sides connect", "tcp://*:PORT", "--bind"):
        assert expected in found["address"]["advice"]


def test_a_replay_port_given_as_the_endpoint_is_recognised() -> None:
    with play_on_adjacent_ports() as (tape,):
        found = findings(run("doctor", tape.replay_endpoint, "--output=json", *DURATION))
        assert "ROUTER socket: a replay endpoint" in found["address"]["text"]
        assert f"{tape.endpoint} is a publisher; use that as ENDPOINT" in found["address"]["advice"]


def test_an_event_port_given_as_the_replay_endpoint_is_recognised() -> None:
    with play_under_load() as tape:
        found = findings(run("doctor", tape.endpoint, "--replay", tape.endpoint, "--output=json", *DURATION))
    assert found["replay"]["verdict"] == "fail"
    assert "XPUB socket, not a replay endpoint" in found["replay"]["text"]


def test_a_replay_endpoint_that_does_not_answer_fails() -> None:
    with play_under_load(replay_silent=True) as tape:
        found = run_doctor(tape, is_enough=has_traffic)
    assert found["replay"]["verdict"] == "fail"
    assert "does not answer within" in found["replay"]["text"]
    assert found["traffic"]["verdict"] == found["decoding"]["verdict"] == "ok"


def test_replayed_batches_that_only_a_second_request_returns_are_a_warning() -> None:
    omitted: set[int] = set()

    def omit_once(seq: int) -> bool:
        return seq == 5 and seq not in omitted and not omitted.add(seq)  # type: ignore[func-returns-value]

    with TapePlayer(RECORDING, run=RUN, faults=Faults(replay_holes=omit_once)) as tape:
        tape.play(20)
        found = run_doctor(tape)
    assert found["replay"]["verdict"] == "warn"
    assert "1 batch missing inside the response (#5); a second request returned them" in found["replay"]["text"]


def test_evicted_history_is_a_warning() -> None:
    batches = [(b"kv", seq, b"\x93\xcb\x40\x59\x00\x00\x00\x00\x00" + bytes([seq]) + b"\x90\x00") for seq in range(50)]
    with TapePlayer(batches, faults=Faults(buffer_steps=10)) as tape:
        tape.play()
        found = run_doctor(tape)
    assert "batches before #40 are gone" in found["replay"]["text"]
    assert found["trust"]["verdict"] == "warn"
    assert "DEGRADED" in found["trust"]["text"]
    assert "buffer_steps" in found["trust"]["advice"]


def test_payloads_that_cannot_be_decoded_fail() -> None:
    batches = [(b"metrics", seq, b"\xc1 not msgpack") for seq in range(50)]
    with tape_of(*batches) as tape:
        tape.start_playing(rate=100.0, times=1_000)
        found = run_doctor(tape, is_enough=has_traffic)
    assert found["decoding"]["verdict"] == "fail"
    assert "can be decoded" in found["decoding"]["text"]
    assert "malformed" in found["decoding"]["text"] or "not-a-batch" in found["decoding"]["text"]


def test_messages_that_are_not_batches_are_counted() -> None:
    with tape_of((b"", 0, b"x")) as tape, sending(lambda: tape.send_raw([b"only one frame"])):
        for seconds in DURATIONS:
            ended = run("doctor", tape.endpoint, "--no-replay", "--duration", seconds)
            assert "replay" not in ended.err, "the report mentions the missing replay endpoint; the subscriber does not log it"
            if ended.code:
                break
    assert ended.code == 1
    assert re.search(r"([\d,]+) of \1 messages are not \[topic, number, payload\]: not 3 frames \(\1\)", ended.out)


def test_an_idle_engine_is_not_a_fault_and_replay_shows_its_dialect() -> None:
    publisher = ZmqEventPublisher(
        endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv@pod@model", dialect="sglang-0.5.17"
    )
    try:
        for number in range(20):
            stored = BlockStored([2**63 * (number % 2) + number], None, [number, 2], 2, medium="GPU")
            publisher.publish(KVEventBatch(1760000000.0 + number, [stored], 0))
        found = examine(publisher.endpoint, "--replay", publisher.replay_endpoint, is_enough=is_followed)
    finally:
        publisher.shutdown()
    assert not [finding for finding in found.values() if finding["verdict"] == "fail"]
    assert found["traffic"]["verdict"] == "warn"
    assert "an idle engine publishes nothing" in found["traffic"]["text"]
    assert "20 batches replayed" in found["decoding"]["text"]
    assert found["decoding"]["text"].endswith("sglang-0.5.9 (20)")
    assert "as [seq, payload]" in found["replay"]["text"]
    assert found["trust"]["verdict"] == "ok"
    assert found["trust"]["text"].startswith("DEGRADED (no live batch has confirmed yet what the replay endpoint says), after")
    assert found["trust"]["advice"] == "send the engine a request; the next batch confirms the replay endpoint"


def test_further_ranks_on_the_next_ports_are_reported() -> None:
    with play_on_adjacent_ports(ranks=2) as tapes:
        tapes[0].play(3)
        found = run_doctor(tapes[0])
    assert "the next 1 port publish too" in found["ranks"]["text"]
    assert "--ranks 2" in found["ranks"]["advice"]


def test_an_engine_that_connects_is_examined_with_bind() -> None:
    endpoint = f"tcp://127.0.0.1:{reserve_port()}"
    publisher = ZmqEventPublisher(endpoint=endpoint, bind=False)
    try:
        with sending(lambda: publisher.publish(KVEventBatch(1.0, [BlockStored([1], None, [1, 2], 2)], 0))):
            found = examine(endpoint, "--bind", is_enough=has_traffic)
    finally:
        publisher.shutdown()
    assert found["traffic"]["verdict"] == "ok"
    assert found["replay"]["verdict"] == "warn"


def test_a_jump_of_numbers_in_a_replay_is_reported_without_a_list_of_all_that_is_missing() -> None:
    """The numbers are a peer's: a list of them would take all memory."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

    def answer() -> None:
        peer = router.recv_multipart()[0]
        for frames in (
            replay_batch_frames(None, 0, b"\x90"),
            replay_batch_frames(None, MAX_SEQ - 1, b"\x90"),
            replay_end_frames(has_topic=False),
        ):
            router.send_multipart([peer, *frames])

    serving_thread = threading.Thread(target=answer)
    serving_thread.start()
    try:
        found, _ = check_replay(endpoint)
        serving_thread.join(SECONDS)
    finally:
        context.destroy(linger=0)
    assert f"{MAX_SEQ - 2:,} batches missing inside the response" in found[-1].text


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "not-zeromq"), (b"", "closed"), (b"\x00" * 64, "not-zeromq"), (None, "silent")],
)
def test_the_handshake_recognises_other_protocols(reply: bytes | None, outcome: str) -> None:
    with serve_reply(reply) as endpoint:
        assert perform_handshake(endpoint, seconds=0.5 if reply is None else SECONDS).outcome == outcome


def test_an_http_port_is_reported_as_http() -> None:
    with serve_reply(b"HTTP/1.1 400 Bad Request\r\n\r\n") as endpoint:
        found = findings(run("doctor", endpoint, "--output=json", *DURATION))
    assert "it speaks HTTP, not ZeroMQ" in found["address"]["text"]
    assert "/kv_event_sources" in found["address"]["advice"]


def test_the_handshake_recognises_curve_and_unknown_hosts() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        secured = context.socket(zmq.PUB)
        secured.curve_publickey, secured.curve_secretkey = zmq.curve_keypair()
        secured.curve_server = True
        port = secured.bind_to_random_port("tcp://127.0.0.1")
        assert perform_handshake(f"tcp://127.0.0.1:{port}", SECONDS).outcome == "curve"
    finally:
        context.destroy(linger=0)
    assert perform_handshake("tcp://no-such-host.invalid:5557").outcome == "unknown-host"
    assert perform_handshake("tcp://a..b:5557").outcome == "unknown-host"
    assert perform_handshake("ipc:///no/such/socket").outcome == "refused"


def test_addresses_that_cannot_be_connected_to_fail() -> None:
    found = findings(run("doctor", "tcp://0.0.0.0:5557", "--output=json", *DURATION))
    assert found["address"]["verdict"] == "fail"


@pytest.mark.parametrize("arguments", [("doctor",), ("tail",), ("record", "a.jsonl"), ("relay",)])
def test_an_endpoint_within_one_process_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    ended = run(arguments[0], "inproc://kv", *arguments[1:])
    assert (ended.code, ended.out) == (2, "")
    assert "invalid endpoint 'inproc://kv': inproc:// cannot connect two processes; expected tcp://HOST:PORT" in ended.err


@pytest.mark.parametrize("command", ["doctor", "tail"])
def test_the_endpoint_of_an_engine_that_listens_is_no_address_to_connect_to(command: str) -> None:
    ended = run(command, "tcp://*:5557")
    assert (ended.code, ended.out) == (2, "")
    assert "nothing can connect to the host `*`; write the engine's host, such as tcp://127.0.0.1:5557" in ended.err


def test_an_interrupt_ends_doctor_without_a_traceback() -> None:
    with (
        play_under_load() as tape,
        Program("doctor", tape.endpoint, "--replay", tape.replay_endpoint, "--duration", "60") as program,
    ):
        program.out.wait("is a publisher")
        ended = program.interrupt()
    assert ended.code == 130
    assert "Traceback" not in ended.err


# --- doctor of a service


def examine_service(url: str, *args: object) -> dict[str, dict[str, str]]:
    return findings(run("doctor", "--service", url, "--output=json", *args))


def test_a_healthy_service_and_its_fleet_have_no_warnings() -> None:
    with serving() as served, engine(blocks(2)) as one, engine(blocks(3)) as other:
        served.register("engine-0", one)
        served.register("engine-1", other)
        served.wait_exact("engine-0/0", 2)
        served.wait_exact("engine-1/0", 3)
        one.publish(KVEventBatch(time.time(), [blocks(2)], 0))
        served.wait("engine-0/0", lambda source: source["lag_seconds"] is not None)
        for _ in range(2):
            served.ask("POST", "/v1/match", {"model": "m", "tokens": list(range(48))})
        wait_until(lambda: served.ask("GET", "/readyz")["exact"] == 2)
        ended = run("doctor", "--service", served.url)
        report = json.loads(run("doctor", "--service", served.url, "--output=json").out)
    assert ended.code == 0, ended.out
    assert not [line for line in ended.out.splitlines() if line.startswith(("warn", "fail"))], ended.out
    for expected in (
        f"answers at {served.url}",
        "2 of 2 sources are EXACT",
        "2 sources of 2 engines",
        "2 of 2 sources EXACT",
        "all sources send events; the newest batch arrived",
        "the newest batches came within",
        "2 lookups, 100% of them found something",
        "5 blocks in",
        "--state-dir",
    ):
        assert expected in ended.out
    assert list(report) == ["service", "version", "verdict", "findings"]
    assert report["service"] == served.url


def test_an_unreachable_service_is_reported() -> None:
    with refuse_connections() as endpoint:
        found = examine_service(endpoint.replace("tcp", "http"))
    assert list(found) == ["service"]
    assert "nothing listens at" in found["service"]["text"]
    assert "kvevents serve" in found["service"]["advice"]


def test_an_engine_port_given_as_the_service_is_recognised() -> None:
    with play_on_adjacent_ports() as (tape,):
        found = examine_service(tape.endpoint.replace("tcp", "http"), "--timeout", 0.3)
    assert "uses ZeroMQ instead of HTTP" in found["service"]["text"]
    assert f"kvevents doctor {tape.endpoint.removeprefix('tcp://')}" in found["service"]["advice"]


def test_a_service_that_requires_a_token_is_examined_with_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_ready() -> bool:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=SECONDS)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        finally:
            connection.close()

    with run_guarded_service(tmp_path) as (url, _):
        wait_until(is_ready)
        found = examine_service(url)
        assert found["access"]["verdict"] == "fail"
        assert "KVEVENTS_TOKEN" in found["access"]["advice"]
        assert found["ready"]["verdict"] == "ok"
        monkeypatch.setenv("KVEVENTS_TOKEN", TOKEN)
        found = examine_service(url)
        assert found["discovery"]["text"] == "no engine is registered"
        assert found["discovery"]["advice"].endswith("a replica needs a bridge")


def test_stopped_engines_and_engines_without_replay_are_reported() -> None:
    with serving() as served, engine(blocks(2)) as one, refuse_connections() as nowhere:
        with engine(blocks(2)) as other:
            served.register("engine-0", one, replay_endpoint=None)
            served.register("engine-1", other)
            served.wait("engine-0/0", lambda source: source["trust"]["state"] == "DEGRADED")
            served.wait_exact("engine-1/0", 2)
        served.ask("POST", "/register", {"instance_id": "engine-2", "endpoint": nowhere, "model_name": "m"})
        served.wait("engine-1/0", lambda source: source["trust"]["state"] == "STALE")
        # The fault is set first, its reason a moment later.
        served.wait("engine-2/0", lambda source: "refused" in source["trust"]["reason_codes"])
        ended = run("doctor", "--service", served.url)
    assert ended.code == 1
    assert re.search(r"fail +trust +engine-1/0 is STALE for \d", ended.out)
    assert re.search(r"fail +trust +engine-2/0 is CONNECTING for \S+ s: nothing listens at", ended.out)
    assert re.search(r"warn +trust +engine-0/0 is DEGRADED for \S+ s: no replay endpoint", ended.out)
    assert "-> check that the engine runs with KV events enabled" in ended.out
    assert "-> register the engine with its replay endpoint" in ended.out


def test_a_missing_rank_is_a_warning() -> None:
    with serving() as served, engine(blocks(1)) as one, engine(blocks(1)) as other:
        served.register("engine-0", one)
        served.register("engine-0", other, dp_rank=2)
        served.wait_exact("engine-0/0", 1)
        served.wait_exact("engine-0/2", 1)
        found = examine_service(served.url)
    assert found["ranks"]["verdict"] == "warn"
    assert found["ranks"]["text"] == "engine-0/1: not registered, though higher ranks are"


def test_a_discovery_fault_fails() -> None:
    with serving("--dns", "no-such-host.invalid:5557", "--model", "m") as served:
        wait_until(lambda: bool(served.ask("GET", "/v1/sources")["faults"]))
        found = examine_service(served.url)
    assert found["discovery"]["verdict"] == "fail"
    assert "no-such-host.invalid" in found["discovery"]["text"]


def test_lookups_that_never_match_fail_with_advice() -> None:
    with serving() as served, engine(blocks(2)) as one:
        served.register("engine-0", one)
        served.wait_exact("engine-0/0", 2)
        wrong = {"model": "m", "tokens": list(range(100, 164))}
        served.ask("POST", "/v1/match", wrong)
        few = examine_service(served.url)["lookups"]
        for _ in range(MIN_LOOKUPS):
            served.ask("POST", "/v1/match", wrong)
        many = examine_service(served.url)["lookups"]
    assert (few["verdict"], many["verdict"]) == ("warn", "fail")
    assert "1 lookup, and none found anything, though the index has 2 blocks" in few["text"]
    for expected in ("model name", "block size", "tokenizer"):
        assert expected in few["advice"]


def test_a_port_that_is_open_to_every_host_is_a_warning() -> None:
    with Program("serve", "--port", 0, "--host", "0.0.0.0", "--insecure") as program:  # noqa: S104 - the fault under test
        served = RunningService(program)
        found = examine_service(served.url)
    assert found["health"]["verdict"] == "warn"
    assert "set access.tokens" in found["health"]["text"]


def test_an_engine_with_another_block_size_than_registered_is_reported() -> None:
    with serving() as served, engine(blocks(2)) as one, publish_continuously(one):
        served.register("engine-0", one, block_size=32)
        served.wait("engine-0/0", lambda source: source["trust"]["reason_codes"] == ["block-size"])
        found = examine_service(served.url)
    assert found["blocks"]["text"] == "tokens per block: engine-0/0 is registered with 32 and sends 16"
    assert "its actual block size" in found["trust"]["advice"]


@contextmanager
def sending(send: Callable[[], None]) -> Iterator[None]:
    """Call `send` every few milliseconds in the background until the end of the block."""
    done = threading.Event()

    def send_repeatedly() -> None:
        while not done.wait(0.02):
            send()

    thread = threading.Thread(target=send_repeatedly)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(SECONDS)


def publish_continuously(publisher: ZmqEventPublisher) -> AbstractContextManager[None]:
    """Publish batches of one block in the background until the end of the block."""
    return sending(lambda: publisher.publish(KVEventBatch(time.time(), [blocks(1)], 0)))


@pytest.mark.parametrize(
    ("wrong", "codes", "expected", "advice"),
    [
        ("swapped", {"wrong-socket"}, "ROUTER", "endpoint is where it publishes, replay_endpoint where it replays"),
        ("replay of an engine ahead", {"replay-foreign", "replay-unconfirmed"}, "replay endpoint", "replay endpoint"),
        ("replay of an engine behind", {"replay-foreign", "replay-unconfirmed"}, "replay endpoint", "replay endpoint"),
        ("replay is an event port", {"replay-wrong-socket"}, "answers no replay requests", "replay_endpoint where it replays"),
    ],
)
def test_wrong_endpoints_of_an_engine_are_named(wrong: str, codes: set[str], expected: str, advice: str) -> None:
    """Each is a finding about trust that reports which endpoint is wrong and what to register.

    The state changes to REPLAYING for a moment whenever a live batch is compared with what replay says.
    """
    others = [blocks(3, 5), *([blocks(1, 20)] * 500 if wrong == "replay of an engine ahead" else [])]
    with serving() as served, engine(blocks(2)) as one, engine(*others) as other, publish_continuously(one):
        registrations: dict[str, dict[str, Any]] = {
            "swapped": {"endpoint": one.replay_endpoint, "replay_endpoint": one.endpoint},
            "replay of an engine ahead": {"replay_endpoint": other.replay_endpoint},
            "replay of an engine behind": {"replay_endpoint": other.replay_endpoint},
            "replay is an event port": {"replay_endpoint": other.endpoint},
        }
        served.register("engine-0", one, **registrations[wrong])
        served.wait("engine-0/0", lambda source: not codes.isdisjoint(source["trust"]["reason_codes"]))
        found: dict[str, str] = {}

        def has_expected() -> bool:
            found.update(examine_service(served.url)["trust"])
            return expected in found["text"]

        wait_until(has_expected, lambda: found)
    assert found["verdict"] in {"warn", "fail"}
    assert advice in found["advice"]


def make_view(**more: Any) -> SourceView:
    """Return a source without faults at the time 1010, with the given fields replaced."""
    return source(1, **more)


def test_block_sizes_that_differ_from_the_registered_ones_fail() -> None:
    assert checks.check_block_sizes([make_view(block_sizes=[])]) is None
    assert one(checks.check_block_sizes([make_view()])) == ("ok", "blocks of 16 tokens, as registered")
    assert one(checks.check_block_sizes([make_view(declared_block_size=None, block_sizes=[16, 32])]))[0] == "ok"
    verdict, text = one(checks.check_block_sizes([make_view(), make_view(block_sizes=[32])]))
    assert (verdict, text) == ("fail", "tokens per block: engine-001/0 is registered with 16 and sends 32")


def test_late_batches_and_clocks_that_are_ahead_are_warnings() -> None:
    assert checks.check_lag([make_view(lag_seconds=None)]) is None
    assert one(checks.check_lag([make_view()])) == ("ok", "the newest batches came within 3 ms")
    assert one(checks.check_lag([make_view(lag_seconds=30.0)])) == ("warn", "the newest batch was late: engine-001/0 by 30 s")
    ahead = one(checks.check_lag([make_view(lag_seconds=-300.0)]))
    assert ahead == ("warn", "clocks are ahead of the service's: engine-001/0 by 5 min")


def test_a_missing_load_reading_is_a_warning() -> None:
    """There is no finding if no engine reports its load; if the reading of one engine is missing, it is a warning."""
    assert checks.check_load([make_view()]) is None
    load = LoadView(running=3, waiting=1, waiting_uncached_tokens=None, used_tokens=0, max_tokens=0, age_seconds=0.1)
    assert one(checks.check_load([make_view(load=load), make_view(load=load), make_view()])) == (
        "ok",
        "6 requests running and 2 waiting; 2 of 3 sources report it",
    )
    verdict, text = one(checks.check_load([make_view(load=load), make_view(load_fault="/metrics does not answer")]))
    assert (verdict, text) == ("warn", "unknown of engine-001/0: /metrics does not answer")


def test_engines_that_selections_leave_out_although_their_streams_are_exact_are_a_warning() -> None:
    assert checks.check_requests([make_view(), source(1, "STALE", fault="nothing listens")]) is None
    silent = checks.check_requests([make_view(), make_view(fault="http://x/metrics does not answer")])
    assert one(silent) == ("warn", "none for engine-001/0: http://x/metrics does not answer")
    drained = checks.check_requests([make_view(fault="it is drained", draining=True)])
    assert drained is not None
    assert drained.advice == "`kvevents drain NAME --end` ends it for engine-001/0"


def test_sources_without_recent_events_are_warnings() -> None:
    (never,) = checks.check_traffic([make_view(last_event=None, blocks=0)], 1010.0)
    assert one(never) == ("warn", "nothing ever arrived from engine-001/0")
    (silent,) = checks.check_traffic([make_view(last_event=10.0)], 1010.0)
    assert one(silent) == ("warn", "silent: engine-001/0 for 17 min")
    assert list(checks.check_traffic([source(1, "STALE")], 1010.0)) == []


def test_losses_and_rejected_events_are_warnings() -> None:
    gap = {"first": 3, "last": 4, "incarnation": 0, "at": 1000.0}
    losing = [make_view(lost=2, gaps=[gap], rejected={"bad-token": 3})]
    assert checks.check_losses([make_view()], 1010.0) is None
    lossy = checks.check_losses(losing, 1010.0)
    assert one(lossy) == ("warn", "batches were lost, some within the last hour: 2 batches of engine-001/0")
    assert one(checks.check_losses(losing, 9010.0))[0] == "ok"
    assert one(checks.check_rejected(losing)) == ("warn", "events could not be used: engine-001/0: bad-token (3)")


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_advice(reason: Reason) -> None:
    """It is the advice of the service, of which an unconfirmed replay counts only if the stream is DEGRADED."""
    advice = advise("DEGRADED", {reason, Reason.OTHER}, "tcp://10.0.0.7:5557")
    assert reason.advice
    assert advice == reason.advice.replace("{endpoint}", "tcp://10.0.0.7:5557")
    if reason is not Reason.REPLAY_UNPROVEN:
        assert advise("STALE", {reason, Reason.REPLAY_UNPROVEN}, "tcp://10.0.0.7:5557") == advice
    assert advise("EXACT", {reason}, "") == ""
    (finding,) = checks.check_trust([make_view(trust={"state": "DEGRADED", "reason_codes": [reason]}, advice=advice)], 9010.0)
    assert finding.advice == advice


def test_many_degraded_sources_are_summarised() -> None:
    sources = [source(number, "DEGRADED") for number in range(30)] + [source(99, "STALE")]
    findings = [*checks.check_trust(sources, 1010.0)]
    assert len(findings) == checks.MAX_LISTED_WORKERS + 1
    assert "engine-099/0 is STALE" in findings[0].text
    assert findings[-1].text == "and 21 sources more"


def test_a_source_that_is_connecting_fails_only_after_some_time() -> None:
    (connecting,) = checks.check_trust([source(1, "REPLAYING")], 1001.0)
    assert (connecting.verdict.value, connecting.advice) == ("warn", "wait a moment, and run doctor again")
    unconfirmed = {"state": "REPLAYING", "reason": "", "reason_codes": [Reason.REPLAYING, Reason.REPLAY_UNPROVEN]}
    (connecting,) = checks.check_trust([make_view(trust=unconfirmed)], 1001.0)
    assert connecting.advice == "wait a moment, and run doctor again"
    (stuck,) = checks.check_trust([source(1, "CONNECTING", advice="check it")], 1100.0)
    assert (stuck.verdict.value, stuck.advice) == ("fail", "check it")


def test_history_of_an_idle_engine_is_a_note_until_a_live_batch_has_come() -> None:
    """Replayed history without a live batch is ok, with advice; unconfirmed history after a live batch is a warning."""
    reason = "no live batch has confirmed yet what the replay endpoint says"
    unconfirmed = {"state": "DEGRADED", "reason": reason, "reason_codes": [Reason.REPLAY_UNPROVEN]}
    (idle,) = checks.check_trust([make_view(trust=unconfirmed, batches=3, replayed=3)], 1010.0)
    assert idle.verdict.value == "ok"
    assert reason in idle.text
    (busy,) = checks.check_trust([make_view(trust=unconfirmed, batches=3, replayed=2)], 1010.0)
    assert busy.verdict.value == "warn"
    both = unconfirmed | {"reason_codes": [Reason.REPLAY_UNPROVEN, Reason.LOST]}
    (lost,) = checks.check_trust([make_view(trust=both, batches=3, replayed=3)], 1010.0)
    assert lost.verdict.value == "warn"
    findings = [
        *checks.check_trust([make_view(trust=unconfirmed, batches=3, replayed=3)] * 20 + [source(99, "DEGRADED")], 1010.0)
    ]
    assert findings[0].verdict.value == "warn", "the worst finding is first"
    assert findings[-1].verdict.value == "ok"


def test_full_memory_and_old_snapshots_are_warnings() -> None:
    assert one(checks.check_memory(stats(memory_limit=None))) == ("ok", "12,345 blocks in 3.0 MiB, without a limit")
    assert one(checks.check_memory(stats()))[0] == "ok"
    near = one(checks.check_memory(stats(memory_limit=3 << 20)))
    assert near == ("warn", "12,345 blocks in 3.0 MiB, 100% of the limit of 3.0 MiB")
    assert "7 blocks were refused" in one(checks.check_memory(stats(evicted=7)))[1]
    assert one(checks.check_snapshot(stats(snapshot_fault="the disk is full"), 10.0)) == ("fail", "the disk is full")
    assert one(checks.check_snapshot(stats(snapshot_at=10.0), 20.0)) == ("ok", "the newest snapshot is 10 s old")
    assert one(checks.check_snapshot(stats(snapshot_at=10.0), 4_000.0))[0] == "warn"


def test_an_unready_service_is_a_warning_and_a_failed_one_fails() -> None:
    def ready(**more: object) -> list[str]:
        answer = msgspec.structs.replace(READY, **more)
        return [finding.verdict.value for finding in checks.check_ready(answer)]

    assert (ready(), ready(ready=False), ready(sources=2)) == (["ok"], ["warn"], ["warn"])
    [empty] = checks.check_ready(msgspec.structs.replace(READY, ready=False, sources=0, exact=0))
    assert "when an engine is registered" in str(empty.advice), "the deadline does not apply without an engine"
    failed = HealthAnswer(status="failed", warnings=["the service no longer receives events: RuntimeError: x"])
    assert [finding.verdict.value for finding in checks.check_health(failed, stats())] == ["fail"]
    assert [finding.verdict.value for finding in checks.check_health(HealthAnswer(status="failed", warnings=[]), stats())] == [
        "fail"
    ]


def test_strict_fails_on_warnings() -> None:
    """A warning gives exit code 0 without `--strict` and 1 with it; an engine that could not be examined gives 4."""
    with tape_of((b"", 0, b"x")) as tape:
        arguments = ("doctor", tape.endpoint, "--no-replay", "--duration", "0.2")
        assert run(*arguments).code == 0
        assert run(*arguments, "--strict").code == 1
        assert run(*arguments, "--curve-key", "none.key_secret", "--curve-server-key", "none.key").code == 2
