"""`kvevents keys` and the options for CURVE keys, as processes: only allowed clients receive events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from certificate_pairs import write_new_pair
from cli_cases import SECONDS, Program, run
from cli_doctor_cases import examine, is_followed
from kvevents.diagnosis.address import probe_curve
from kvevents.diagnosis.replay_sample import Timeouts, sample_replay
from kvevents.events import BlockRemoved, EventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.zeromq.keys import Curve, read_pair, read_public_keys
from tools.ports import reserve_port

ANY = "tcp://127.0.0.1:*"
CLEARED = b'{"type": "AllBlocksCleared"}\n'


def engine_keys(folder: Path, allowed: Path | None) -> Curve:
    return Curve(key_file=str(folder / "engine.key_secret"), allowed=None if allowed is None else str(allowed))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys of an engine and of a stranger, and `clients`, which has the one key that the engine allows."""
    (tmp_path / "clients").mkdir()
    for name in ("engine", "stranger", "clients/router"):
        write_new_pair(tmp_path, name)
    return tmp_path


@contextmanager
def publishing(curve: Curve | None) -> Iterator[ZmqEventPublisher]:
    publisher = ZmqEventPublisher(0, ANY, ANY, curve=curve)
    publisher.publish(EventBatch(1.0, [BlockRemoved([1])]))
    try:
        yield publisher
    finally:
        publisher.shutdown(0)


def endpoint_arguments(publisher: ZmqEventPublisher, *more: object) -> list[object]:
    return [publisher.endpoint, "--replay", publisher.replay_endpoint, *more]


def key_arguments(keys: Path, name: str, server: str = "engine.key") -> tuple[object, ...]:
    return "--curve-key", keys / f"{name}.key_secret", "--curve-server-key", keys / server


def test_a_key_pair_is_created_shown_and_replaced_only_with_force(tmp_path: Path) -> None:
    """The public key is printed; the secret key is only in its file."""
    made = run("keys", tmp_path / "engine-0")
    pair = read_pair(tmp_path / "engine-0.key_secret")
    assert (made.code, made.out.strip()) == (0, pair.public)
    assert read_public_keys(tmp_path / "engine-0.key") == [pair.public]
    for name in ("engine-0.key", "engine-0.key_secret"):
        shown = run("keys", "--show", tmp_path / name)
        assert (shown.code, shown.out.strip()) == (0, pair.public)
        assert pair.secret not in made.out + made.err + shown.out + shown.err
    again = run("keys", tmp_path / "engine-0")
    assert again.code == 2
    assert "exists" in again.err
    assert read_pair(tmp_path / "engine-0.key_secret") == pair
    forced = run("keys", tmp_path / "engine-0", "--force", "--output=json")
    expected = json.loads(forced.out)
    assert expected["public_key"] == read_pair(tmp_path / "engine-0.key_secret").public != pair.public
    assert expected.keys() == {"public_key", "public_file", "secret_file"}
    shown = run("keys", "--show", expected["public_file"], "--output=json")
    assert json.loads(shown.out) == {"file": expected["public_file"], "public_keys": [expected["public_key"]], "secret": False}


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        ((), 2, "required"),
        (("engine.key",), 2, "invalid name"),
        (("--show", "none.key"), 2, "cannot read keys"),
        (("no/such/folder/engine",), 2, "cannot write"),
    ],
)
def test_invalid_names_and_files_are_rejected(args: tuple[str, ...], code: int, expected: str) -> None:
    ended = run("keys", *args)
    assert ended.code == code
    assert expected in ended.err
    assert "Traceback" not in ended.err


def test_tail_receives_events_only_with_an_allowed_key(keys: Path, tmp_path: Path) -> None:
    """An allowed client receives the batch; a stranger receives neither live nor replayed batches."""
    with Program(
        *("publish", "--endpoint", ANY, "--replay", ANY, "--linger"),
        *("--curve-key", keys / "engine.key_secret", "--curve-allow", keys / "clients"),
    ) as engine:
        line = engine.err.wait("publishing at")
        endpoint, replay = line.split()[2].rstrip(","), line.split()[-1]
        engine.write(CLEARED.strip())
        allowed_client = run(
            "tail", endpoint, "--replay", replay, "--count", "1", "--output=json", *key_arguments(keys, "clients/router")
        )
        assert allowed_client.code == 0
        assert json.loads(allowed_client.out.splitlines()[-1])["events"] == [{"type": "AllBlocksCleared"}]
        stranger = run(
            "tail", endpoint, "--replay", replay, "--idle-timeout", "0.5", "--output=json", *key_arguments(keys, "stranger")
        )
        assert stranger.code == 3
        assert "AllBlocksCleared" not in stranger.out
        ended = engine.interrupt()
    assert "refused" in ended.err
    assert read_pair(keys / "engine.key_secret").secret not in ended.err + allowed_client.err + stranger.err


def test_record_receives_replayed_batches_with_an_allowed_key(keys: Path, tmp_path: Path) -> None:
    """The batch that was published before is received by replay."""
    with publishing(engine_keys(keys, keys / "clients")) as publisher:
        args = endpoint_arguments(publisher, "--count", "1", *key_arguments(keys, "clients/router"))
        assert run("record", args[0], tmp_path / "run.jsonl", *args[1:]).code == 0
    assert '"pub"' in (tmp_path / "run.jsonl").read_text()


def test_a_replay_endpoint_answers_only_allowed_keys(keys: Path) -> None:
    """It does not answer a stranger or a client without a key."""
    server = read_public_keys(keys / "engine.key")[0]
    allowed_client, stranger = (
        Curve(key_file=str(keys / f"{name}.key_secret"), server_key=server) for name in ("clients/router", "stranger")
    )
    with publishing(engine_keys(keys, keys / "clients")) as publisher:
        replay = publisher.replay_endpoint
        assert replay is not None
        assert sample_replay(replay, (0,), Timeouts(SECONDS, SECONDS), allowed_client).is_answered
        assert not sample_replay(replay, (0,), Timeouts(0.2, 0.2), stranger).is_answered
        assert not sample_replay(replay, (0,), Timeouts(0.2, 0.2), None).is_answered


def test_a_consumer_that_binds_is_the_curve_server(keys: Path) -> None:
    """With `--bind` the consumer is the CURVE server, and `--curve-allow` names the engines that it accepts."""
    endpoint = f"tcp://127.0.0.1:{reserve_port()}"
    server = read_public_keys(keys / "engine.key")[0]
    router = Curve(key_file=str(keys / "clients" / "router.key_secret"), server_key=server)
    publisher = ZmqEventPublisher(0, endpoint, ANY, bind=False, curve=router)
    publisher.publish(EventBatch(1.0, [BlockRemoved([1])]))
    listen = (
        "--bind",
        "--replay",
        publisher.replay_endpoint,
        "--curve-key",
        keys / "engine.key_secret",
        "--curve-allow",
        keys / "clients",
    )
    with Program("tail", endpoint, "--count", "2", *listen) as tail:
        tail.out.wait("trust")
        while publisher.stats().subscribers < 1:
            assert tail.process.poll() is None
        publisher.publish(EventBatch(2.0, [BlockRemoved([2])]))
        assert tail.end().code == 0
    publisher.shutdown(0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--curve-server-key", "engine.key"), "need --curve-key"),
        (("--curve-key", "engine.key_secret"), "--curve-key needs --curve-server-key"),
        (("--curve-key", "engine.key_secret", "--curve-server-key", "none.key"), "makes, or a file that exists"),
        (("--curve-key", "engine.key", "--curve-server-key", "engine.key"), "no pair of CURVE keys"),
        (("--curve-key", "open.key_secret", "--curve-server-key", "engine.key"), "chmod 600"),
        (("--curve-key", "engine.key_secret", "--curve-server-key", "two.key"), "holds 2 keys"),
        (
            ("--curve-key", "engine.key_secret", "--curve-server-key", "engine.key", "--curve-allow", "clients"),
            "is for a CURVE server",
        ),
    ],
)
def test_unusable_keys_are_reported_at_once(
    keys: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], expected: str
) -> None:
    """The command reports them before it waits for an engine."""
    monkeypatch.chdir(keys)
    Path("open.key_secret").write_bytes(Path("engine.key_secret").read_bytes())
    Path("open.key_secret").chmod(0o644)
    Path("two.key").write_text(Path("engine.key").read_text() + Path("stranger.key").read_text())
    ended = run("tail", "tcp://127.0.0.1:1", "--idle-timeout", "10", *options)
    assert ended.code == 2
    assert expected in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("client", "server", "allowed", "verdict", "expected"),
    [
        ("clients/router", "engine.key", True, "ok", "accepts the key"),
        ("stranger", "engine.key", False, "ok", "accepts the key"),
        ("stranger", "engine.key", True, "fail", "that it allows"),
        ("clients/router", "stranger.key", True, "fail", "check that --curve-server-key is its public key"),
        (None, None, True, "fail", "--curve-key"),
    ],
)
def test_doctor_reports_what_is_wrong_with_keys(
    keys: Path, client: str | None, server: str | None, allowed: bool, verdict: str, expected: str
) -> None:
    options = () if client is None else key_arguments(keys, client, server or "")
    with publishing(engine_keys(keys, keys / "clients" if allowed else None)) as publisher:
        findings = examine(
            *endpoint_arguments(publisher, *options),
            is_enough=lambda found: found["address"]["verdict"] != "ok" or is_followed(found),
        )
    assert findings["address"]["verdict"] == verdict
    assert expected in findings["address"]["text"] + findings["address"]["advice"]
    if verdict == "ok":
        assert findings["replay"]["verdict"] == findings["trust"]["verdict"] == "ok"


def test_doctor_reports_an_engine_without_curve(keys: Path) -> None:
    with publishing(None) as publisher:
        ended = run(
            "doctor", *endpoint_arguments(publisher, "--output=json", "--duration", "0.5", *key_arguments(keys, "stranger"))
        )
    (finding,) = json.loads(ended.out)["findings"]
    assert "does not use CURVE" in finding["text"]


def test_a_permanent_refusal_is_reported(keys: Path) -> None:
    """ZAP handlers of others answer a refusal with status 400, after which a client does not retry."""
    pair = read_pair(keys / "engine.key_secret")
    stranger = Curve(key_file=str(keys / "stranger.key_secret"), server_key=pair.public)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        handler, socket = context.socket(zmq.REP), context.socket(zmq.XPUB)
        handler.bind("inproc://zeromq.zap.01")
        handler.rcvtimeo = int(1000 * SECONDS)
        Curve(public_key=pair.public, secret_key=pair.secret).apply(socket)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(probe_curve, f"tcp://127.0.0.1:{port}", stranger, zmq.SUB, SECONDS)
            version, request, *_ = handler.recv_multipart()
            handler.send_multipart([version, request, b"400", b"no", b"", b""])
            assert outcome.result(SECONDS) == "refused"
    finally:
        context.destroy(linger=0)


def test_a_probe_of_an_address_without_a_listener_is_silent(keys: Path) -> None:
    curve = Curve(key_file=str(keys / "stranger.key_secret"), server_key=read_public_keys(keys / "engine.key")[0])
    assert probe_curve("tcp://127.0.0.1:1", curve, zmq.SUB, 0.05) == "silent"
