"""CURVE on real sockets: a client with an allowed key gets everything, one with an unknown key nothing, on all sockets."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

import publisher_cases
from certificate_pairs import make_pair, write_new_pair
from kvevents.config import KVEventsConfig
from kvevents.errors import ConfigError
from kvevents.publisher import EventPublisherFactory, ZmqEventPublisher
from kvevents.stream import Source, Trust
from kvevents.subscriber import Subscriber
from kvevents.zeromq import zap
from kvevents.zeromq.keys import Curve, write_pair
from kvevents.zeromq.zap import ZAP_ENDPOINT, SecuritySettings, secure_sockets
from publisher_cases import (  # noqa: F401 - the fixtures, used by being here
    ANY,
    DEADLINE,
    QUICK,
    Socket,
    batch,
    consumers_context,
    numbers,
    open_consumer,
    read_reply,
    receive,
    request_replay,
    wait_until,
)
from tools.ports import reserve_port

SERVER, FRIEND, STRANGER = make_pair(), make_pair(), make_pair()
HUNG_UP = zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
Context = zmq.Context[Socket]


def client(pair: Any, server: str = SERVER.public) -> Curve:
    """Return the settings of a CURVE client with these keys."""
    return Curve(public_key=pair.public, secret_key=pair.secret, server_key=server)


def server(allowed: tuple[str, ...] | str | None) -> Curve:
    """Return the settings of a CURVE server with this allow-list."""
    return Curve(public_key=SERVER.public, secret_key=SERVER.secret, allowed=allowed)


def run_publisher(**kwargs: Any) -> AbstractContextManager[ZmqEventPublisher]:
    """Return a publisher that closes refused connections soon, so that their clients retry soon. It closes slow ones, too: they
    connect again, and a SUB socket that connects again subscribes again when it is polled."""
    settings = replace(QUICK, security=SecuritySettings(handshake_timeout=0.1, reread_interval=0))
    return publisher_cases.run_publisher(settings=settings, **kwargs)


@pytest.fixture(autouse=True)
def check_that_no_handler_is_left() -> Iterator[None]:
    """Check after each test that no ZAP handler and no thread of one is left."""
    yield
    assert not zap._registry.handlers
    assert not [thread for thread in threading.enumerate() if thread.name == "zmq-zap"]


def connect(context: Context, kind: int, endpoint: str | None, curve: Curve | None) -> Socket:
    """Return a SUB or DEALER socket that connects with these keys."""
    socket = open_consumer(context, kind)
    if curve is not None:
        curve.apply(socket)
    if kind == zmq.SUB:
        socket.subscribe(b"")
    assert endpoint is not None
    socket.connect(endpoint)
    return socket


@contextmanager
def monitor(socket: Socket, events: int) -> Iterator[Socket]:
    """Provide a socket that receives these monitor events of `socket`."""
    monitor_socket = socket.get_monitor_socket(events)
    yield monitor_socket
    socket.disable_monitor()
    monitor_socket.close()


def check_gets_everything(context: Context, publisher: ZmqEventPublisher, curve: Curve) -> None:
    """Check that a consumer with these keys gets live batches and replay."""
    before = publisher.stats().subscribers
    live = connect(context, zmq.SUB, publisher.endpoint, curve)
    wait_until(lambda: live.poll(0) or publisher.stats().subscribers > before, "a subscription")
    number = publisher.stats().next_seq
    publisher.publish(batch(number))
    assert receive(live)[0] == number
    replay = connect(context, zmq.DEALER, publisher.replay_endpoint, curve)
    request_replay(replay, 0)
    assert numbers(read_reply(replay)) == list(range(number + 1))


def is_exact(subscriber: Subscriber) -> bool:
    return subscriber.trust("e") == Trust.EXACT and subscriber.status("e").last_seq == 1


def test_an_allowed_key_gets_everything_and_others_nothing(context: Context) -> None:
    """A client with an unknown key is refused on both sockets at each attempt, while an allowed one subscribes and requests."""
    with run_publisher(replay_endpoint=ANY, curve=server((FRIEND.public,))) as publisher:
        live = connect(context, zmq.SUB, publisher.endpoint, client(STRANGER))
        replay = connect(context, zmq.DEALER, publisher.replay_endpoint, client(STRANGER))
        request_replay(replay, 0)
        wait_until(lambda: publisher.connections_refused >= 4, "two attempts at each socket")
        check_gets_everything(context, publisher, client(FRIEND))
        refused = publisher.connections_refused
        wait_until(lambda: publisher.connections_refused >= refused + 2, "more attempts")
        assert publisher.stats().subscribers == 1
        assert publisher.stats().replay.requests == 1
        assert (live.poll(0), replay.poll(0)) == (0, 0)


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
@pytest.mark.parametrize(
    "keys",
    [None, client(STRANGER, make_pair().public), client(FRIEND, make_pair().public)],
    ids=["without-keys", "wrong-server-key", "friend-with-wrong-server-key"],
)
def test_a_client_without_the_server_key_is_disconnected(context: Context, keys: Curve | None, kind: int) -> None:
    """Without the server's key the handshake fails before the allow-list is used."""
    with run_publisher(replay_endpoint=ANY, curve=server((FRIEND.public,))) as publisher:
        stranger = open_consumer(context, kind)
        if keys is not None:
            keys.apply(stranger)
        with monitor(stranger, HUNG_UP) as monitor_socket:
            stranger.connect(publisher.endpoint if kind == zmq.SUB else publisher.replay_endpoint or "")
            if kind == zmq.SUB:
                stranger.subscribe(b"")
            else:
                request_replay(stranger, 0)
            assert monitor_socket.poll(int(1000 * DEADLINE)), "the stranger was not disconnected"
            check_gets_everything(context, publisher, client(FRIEND))
            assert publisher.connections_refused == 0
            assert publisher.stats().subscribers == publisher.stats().replay.requests == 1
            assert stranger.poll(0) == 0


def test_without_an_allow_list_the_server_key_is_enough(context: Context) -> None:
    with run_publisher(replay_endpoint=ANY, curve=server(None)) as publisher:
        check_gets_everything(context, publisher, client(STRANGER))
        assert not zap._registry.handlers


def test_a_key_that_is_added_to_an_empty_folder_is_accepted(context: Context, tmp_path: Path) -> None:
    """The refused client connects by itself when its key is added, without a restart."""
    with run_publisher(replay_endpoint=ANY, curve=server(str(tmp_path))) as publisher:
        pair = make_pair()
        live = connect(context, zmq.SUB, publisher.endpoint, client(pair))
        wait_until(lambda: publisher.connections_refused, "a refusal")
        write_pair(tmp_path / "new", pair, "", replace=False)
        wait_until(lambda: live.poll(0) or publisher.stats().subscribers == 1, "the subscription")
        publisher.publish(batch())
        assert receive(live)[0] == 0


def test_a_removed_key_is_refused_at_the_next_connection(context: Context, tmp_path: Path) -> None:
    """The existing connection stays; a new one is refused."""
    pair, other = write_new_pair(tmp_path, "leaving"), write_new_pair(tmp_path, "staying")
    with run_publisher(replay_endpoint=ANY, curve=server(str(tmp_path))) as publisher:
        live = connect(context, zmq.SUB, publisher.endpoint, client(pair))
        wait_until(lambda: live.poll(0) or publisher.stats().subscribers == 1, "the subscription")
        (tmp_path / "leaving.key").unlink()
        publisher.publish(batch())
        assert receive(live)[0] == 0
        assert publisher.connections_refused == 0
        again = connect(context, zmq.SUB, publisher.endpoint, client(pair))
        wait_until(lambda: publisher.connections_refused, "a refusal")
        live.close()
        wait_until(lambda: publisher.stats().subscribers == 0, "the end of the old connection")
        check_gets_everything(context, publisher, client(other))
        assert again.poll(0) == 0


@pytest.mark.parametrize("engine", [FRIEND, STRANGER], ids=["allowed", "stranger"])
def test_a_binding_consumer_can_have_an_allow_list(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A consumer that binds is the CURVE server of both connections, and accepts allowed engines only."""
    endpoint = f"tcp://127.0.0.1:{reserve_port()}"
    keys = client(engine)
    publisher = ZmqEventPublisher(0, endpoint, ANY, bind=False, curve=keys)
    publisher.publish(batch(0))
    source = Source(endpoint, publisher.replay_endpoint, name="e", bind=True, curve=server((FRIEND.public,)))
    with Subscriber(source) as subscriber, caplog.at_level(logging.WARNING, "kvevents.zeromq.zap"):
        if engine is FRIEND:
            wait_until(lambda: subscriber.receive(timeout=0.01) or publisher.stats().subscribers == 1, "the subscription")
            publisher.publish(batch(1))
            wait_until(lambda: subscriber.receive(timeout=0.01) is None and is_exact(subscriber), "replay and live")
            assert publisher.stats().replay.requests >= 1
        else:
            wait_until(lambda: "unknown keys" in caplog.text or subscriber.receive(timeout=0.01), "a refusal")
            assert subscriber.status("e").last_seq == -1
            assert publisher.stats().subscribers == 0
    publisher.shutdown(0)


def test_refusals_are_logged_once_and_counted(context: Context, caplog: pytest.LogCaptureFixture) -> None:
    """The first record has the refused key. A later one, at the latest at the end, has the number of further refusals."""
    with caplog.at_level(logging.WARNING, "kvevents.zeromq.zap"), run_publisher(curve=server((FRIEND.public,))) as publisher:
        connect(context, zmq.SUB, publisher.endpoint, client(STRANGER))
        wait_until(lambda: publisher.connections_refused >= 3, "three attempts")
        (line,) = [record.getMessage() for record in caplog.records]
        assert "refused 1 connection of unknown keys, the last one from 127.0.0.1" in line
        assert STRANGER.public in line
    assert len(caplog.records) == 2
    assert f"refused {publisher.connections_refused - 1} connections of unknown keys;" in caplog.records[1].getMessage()
    assert STRANGER.secret not in caplog.text
    assert SERVER.secret not in caplog.text


def test_an_invalid_key_file_is_logged(context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = write_new_pair(tmp_path, "friend")
    with (
        caplog.at_level(logging.WARNING, "kvevents.zeromq.zap"),
        run_publisher(replay_endpoint=ANY, curve=server(str(tmp_path))) as publisher,
    ):
        (tmp_path / "torn.key").write_text("public-")
        check_gets_everything(context, publisher, client(pair))
        check_gets_everything(context, publisher, client(pair))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "1 files of curve.allowed cannot be used" in line
    assert "torn.key" in line


def test_a_handler_that_fails_refuses_everything_and_its_context_can_end(
    context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its socket is closed, which would otherwise keep the context of the publisher alive."""
    monkeypatch.setattr(zap._ZapHandler, "_answer", lambda *_: 1 / 0)
    with run_publisher(curve=server((FRIEND.public,))) as publisher:
        connect(context, zmq.SUB, publisher.endpoint, client(FRIEND))
        wait_until(lambda: "the handler of allowed keys ended" in caplog.text, "the end of the handler")
        assert publisher.stats().subscribers == 0
        assert publisher.shutdown().complete


@pytest.mark.parametrize("allowed", ["none", "torn"])
def test_an_unusable_allow_list_is_an_error_at_the_start(tmp_path: Path, allowed: str) -> None:
    """Publishers and subscribers raise `ConfigError` for a missing or an invalid allow-list."""
    (tmp_path / "torn").write_text("public-")
    with pytest.raises(ConfigError, match=f"curve.allowed: .*{allowed}"):
        ZmqEventPublisher(0, ANY, ANY, curve=server(str(tmp_path / allowed)))
    with pytest.raises(ConfigError, match=f"curve.allowed: .*{allowed}"):
        Subscriber(Source(ANY, bind=True, curve=server(str(tmp_path / allowed))))


def test_allow_lists_in_one_context_are_separate(context: Context) -> None:
    """Publishers of one context share a handler. Each has a list of its own or none, and they may end in any order."""
    other = make_pair()
    with zmq.Context() as shared:
        with (
            run_publisher(replay_endpoint=ANY, context=shared, curve=server((FRIEND.public,))) as one,
            run_publisher(replay_endpoint=ANY, context=shared, curve=server(None)) as free,
        ):
            with run_publisher(replay_endpoint=ANY, context=shared, curve=server((other.public,))) as two:
                assert len(zap._registry.handlers) == 1
                check_gets_everything(context, two, client(other))
                connect(context, zmq.SUB, two.endpoint, client(FRIEND))
                wait_until(lambda: two.connections_refused, "a refusal")
            check_gets_everything(context, one, client(FRIEND))
            check_gets_everything(context, free, client(STRANGER))
            assert one.connections_refused == free.connections_refused == 0
        assert not zap._registry.handlers
        with run_publisher(replay_endpoint=ANY, context=shared, curve=server((FRIEND.public,))) as again:
            check_gets_everything(context, again, client(FRIEND))


def test_a_context_with_another_zap_handler_is_an_error() -> None:
    """An allow-list that another ZAP handler would ignore is rejected."""
    with zmq.Context() as shared, shared.socket(zmq.REP) as own:
        own.bind(ZAP_ENDPOINT)
        with pytest.raises(ConfigError, match=r"another ZAP handler.*pass another context"):
            ZmqEventPublisher(0, ANY, context=shared, curve=server((FRIEND.public,)))


def test_an_allow_list_without_a_handler_refuses_every_client(context: Context) -> None:
    """`Curve.apply` without `secure_sockets` fails closed."""
    with zmq.Context() as serving, serving.socket(zmq.PUB) as socket:
        server((FRIEND.public,)).apply(socket)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        friend = open_consumer(context, zmq.SUB)
        client(FRIEND).apply(friend)
        events = zmq.Event.HANDSHAKE_SUCCEEDED | HUNG_UP
        with monitor(friend, events) as monitor_socket:
            friend.connect(f"tcp://127.0.0.1:{port}")
            assert monitor_socket.poll(int(1000 * DEADLINE))
            assert int.from_bytes(monitor_socket.recv_multipart()[0][:2], "little") != zmq.Event.HANDSHAKE_SUCCEEDED


def test_terminating_a_context_ends_its_handler(context: Context) -> None:
    """The handler closes its socket, so that `term` does not hang, and leaves no entry that another context could find."""
    shared: Context = zmq.Context()
    allow_list = secure_sockets(shared, server((FRIEND.public,)), "e")
    assert allow_list is not None
    shared.term()
    assert not zap._registry.handlers
    allow_list.close()
    allow_list.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_stop_its_parents_handler(context: Context) -> None:
    """Closing the allow-list in the child does not stop the thread in the parent."""
    with run_publisher(replay_endpoint=ANY, curve=server((FRIEND.public,))) as publisher:
        allow_list = publisher._server.security
        assert allow_list is not None
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                allow_list.close()
                os._exit(len(zap._registry.handlers))
            os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        check_gets_everything(context, publisher, client(FRIEND))


def test_an_engine_configuration_names_key_files(context: Context, tmp_path: Path) -> None:
    """The JSON of an engine names key files, so that no secret is on a command line or in a deployment."""
    write_new_pair(tmp_path, "engine")
    (tmp_path / "clients").mkdir()
    pair = write_new_pair(tmp_path / "clients", "router")
    keys = f'{{"key_file": "{tmp_path}/engine.key_secret", "allowed": "{tmp_path}/clients"}}'
    config = KVEventsConfig.from_json(
        f'{{"publisher": "zmq", "endpoint": "{ANY}", "replay_endpoint": "{ANY}", "curve": {keys}}}'
    )
    assert config.curve is not None
    publisher = EventPublisherFactory.create(config)
    assert isinstance(publisher, ZmqEventPublisher)
    check_gets_everything(context, publisher, client(pair, config.curve.public_key))
    publisher.shutdown()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda _: Curve(), "curve needs key_file"),
        (lambda path: Curve(key_file=path, public_key="x" * 40), "differs from that in curve.key_file"),
        (lambda _: server(("short",)), "curve.allowed"),
        (lambda path: Curve(key_file=path, server_key=FRIEND.public, allowed=()), "is for a CURVE server"),
    ],
)
def test_settings_that_cannot_work_are_rejected(tmp_path: Path, wrong: Callable[[str], Curve], message: str) -> None:
    write_new_pair(tmp_path, "e")
    with pytest.raises(ConfigError, match=message):
        wrong(str(tmp_path / "e.key_secret"))
