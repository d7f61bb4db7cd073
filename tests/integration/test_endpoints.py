"""Endpoints of publishers: ranks, binding and connecting, contexts, keys, and error messages."""

from __future__ import annotations

import re
import socket as std_socket
from pathlib import Path

import pytest
import zmq

from kvevents.endpoints import (
    connectable_endpoint,
    needs_ipv6,
    offset_endpoint_port,
    port_collision,
    should_bind,
    validate_endpoint,
)
from kvevents.errors import ConfigError, EndpointError
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Source
from kvevents.zeromq.keys import Curve
from publisher_cases import (  # noqa: F401 - fixtures, used by being here
    ANY,
    Socket,
    batch,
    connect_dealer,
    consumers_context,
    last_endpoint,
    numbers,
    open_consumer,
    read_reply,
    receive,
    request_replay,
    run_publisher,
    subscribe,
    wait_until,
)
from tools.ports import reserve_port

Context = zmq.Context[Socket]


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5557:5558",
        "tcp://h:1:2",
        "tcp://h",
        "tcp://:5557",
        "tcp://h:70000",
        "http://h:8000",
        "h:5557",
        "tcp://",
    ],
)
def test_an_invalid_endpoint_is_rejected(endpoint: str) -> None:
    """The message has the given text and the expected form."""
    with pytest.raises(ConfigError, match=r"invalid endpoint '.*': .*expected tcp://HOST:PORT"):
        validate_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://h:5557", "tcp://[::1]:5557", "tcp://::1:5557", "tcp://*:*", "ipc:///run/kv", "inproc://kv"]
)
def test_endpoints_of_every_kind_are_accepted(endpoint: str) -> None:
    """They include IPv6 with and without brackets, wildcards, and other transports than TCP."""
    validate_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        (None, 3, None),
        ("", 3, ""),
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://host:5557", 2, "tcp://host:5559"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("tcp://127.0.0.1:*", 3, "tcp://127.0.0.1:*"),
        ("tcp://*:65535", 0, "tcp://*:65535"),
        ("inproc://cache", 1, "inproc://cache_dp1"),
        ("ipc:///tmp/events", 2, "ipc:///tmp/events_dp2"),
        ("ipc://*", 2, "ipc://*"),
    ],
)
def test_the_endpoint_of_a_rank_has_its_port_or_name(endpoint: str | None, rank: int, expected: str | None) -> None:
    """The rank is added to ports and appended to names; ports that the OS chooses do not change."""
    assert offset_endpoint_port(endpoint, rank) == expected
    assert ZmqEventPublisher.offset_endpoint_port(endpoint, rank) == expected


def test_endpoints_that_a_rank_cannot_have_are_rejected() -> None:
    """The message for other transports is that of the engines; ports above 65535 do not exist."""
    with pytest.raises(ValueError, match="Invalid endpoint: must contain 'inproc' or 'tcp'"):
        offset_endpoint_port("udp://nowhere", 1)
    with pytest.raises(ConfigError, match=r"port 65536, which rank 2 of tcp://\*:65534 needs, does not exist"):
        offset_endpoint_port("tcp://*:65534", 2)


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://[::1]:5557", True),
        ("tcp://127.0.0.1:0", True),
        ("tcp://127.0.0.1:*", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://router:5557", False),
    ],
)
def test_wildcards_and_local_endpoints_are_bound(endpoint: str, binds: bool) -> None:
    """The rule is that of the engines; port 0, to which nothing can connect, binds too."""
    assert should_bind(endpoint) is binds


def test_wildcards_become_loopback_addresses_and_brackets_mean_ipv6() -> None:
    """`connectable_endpoint` leaves other endpoints unchanged, and `needs_ipv6` is true only for brackets in TCP endpoints."""
    assert connectable_endpoint("tcp://0.0.0.0:7") == "tcp://127.0.0.1:7"
    assert connectable_endpoint("tcp://[::]:7") == "tcp://[::1]:7"
    assert connectable_endpoint("tcp://10.0.0.1:7") == "tcp://10.0.0.1:7"
    assert connectable_endpoint("ipc:///tmp/x") == "ipc:///tmp/x"
    assert needs_ipv6("tcp://[::1]:7")
    assert not needs_ipv6("tcp://host:7")
    assert not needs_ipv6("ipc:///tmp/::")


@pytest.mark.parametrize(
    ("events", "replay", "rank", "sentence"),
    [
        (5557, 5558, 1, "the event port 5558 of rank 1 is the replay port of rank 0"),
        (5557, 5557, 0, "the event port 5557 of rank 0 is the replay port of rank 0"),
        (5557, 5559, 3, "the event port 5560 of rank 3 is the replay port of rank 1"),
        (5558, 5557, 1, "the replay port 5558 of rank 1 is the event port of rank 0"),
    ],
)
def test_colliding_ports_of_ranks_are_rejected(events: int, replay: int, rank: int, sentence: str) -> None:
    """The message names rank, role and port on both sides; the publisher raises it before it opens a socket."""
    found = port_collision(f"tcp://*:{events}", f"tcp://*:{replay}", rank)
    assert found is not None
    assert found.startswith(sentence)
    with pytest.raises(ConfigError, match="put the replay endpoint at least as many ports from port"):
        ZmqEventPublisher(rank, f"tcp://*:{events}", f"tcp://*:{replay}")


@pytest.mark.parametrize(
    ("endpoint", "replay", "rank"),
    [
        ("tcp://*:5557", "tcp://*:5558", 0),
        ("tcp://*:5557", "tcp://*:5561", 3),
        ("tcp://*:5557", None, 3),
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.2:5557", 3),
        ("tcp://*:0", "tcp://*:0", 3),
        ("ipc:///tmp/x", "tcp://*:5557", 3),
        ("inproc://x", "inproc://y", 3),
    ],
)
def test_other_ports_of_ranks_are_accepted(endpoint: str, replay: str | None, rank: int) -> None:
    """They are far enough apart, on other hosts, chosen by the OS, or absent."""
    assert port_collision(endpoint, replay, rank) is None


def test_ports_chosen_by_the_os_are_reported(context: Context) -> None:
    """A consumer can connect to `endpoint` and `replay_endpoint`, also for wildcards."""
    with run_publisher(2, endpoint="tcp://*:0", replay_endpoint="tcp://*:0") as publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:")
        subscriber, replay = subscribe(context, publisher), connect_dealer(context, publisher)
        publisher.publish(batch())
        assert receive(subscriber)[0] == 0
        request_replay(replay, 0)
        assert numbers(read_reply(replay)) == [0]


def test_ranks_have_their_own_ipc_paths(context: Context, tmp_path: Path) -> None:
    """The rank is appended to the path. The engines themselves do not accept ipc endpoints for ranks."""
    paths = {"endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}
    with run_publisher(0, **paths) as first, run_publisher(1, **paths) as second:
        assert second.endpoint == f"ipc://{tmp_path}/e_dp1"
        for publisher in (first, second):
            subscriber, replay = subscribe(context, publisher), connect_dealer(context, publisher)
            publisher.publish(batch())
            assert receive(subscriber)[0] == 0
            request_replay(replay, 0)
            assert numbers(read_reply(replay)) == [0]


def test_inproc_is_reachable_in_this_process() -> None:
    """As in the engines, it uses the process's own context; ranks have their own names."""
    shared: Context = zmq.Context.instance()
    with (
        run_publisher(1, endpoint="inproc://events", replay_endpoint="inproc://replay") as publisher,
        open_consumer(shared, zmq.SUB) as subscriber,
        open_consumer(shared, zmq.DEALER) as replay,
    ):
        subscriber.connect("inproc://events_dp1")
        subscriber.subscribe(b"")
        wait_until(lambda: publisher.stats().subscribers, "a subscription")
        publisher.publish(batch())
        assert receive(subscriber)[0] == 0
        replay.connect("inproc://replay_dp1")
        request_replay(replay, 0)
        assert numbers(read_reply(replay)) == [0]
    assert not shared.closed


def test_a_publisher_can_connect_to_a_subscriber_that_binds(context: Context) -> None:
    """It connects to a binding subscriber, by the heuristic or by `bind=False`."""
    subscriber = open_consumer(context, zmq.SUB)
    subscriber.bind(ANY)
    subscriber.subscribe(b"")
    endpoint = last_endpoint(subscriber)
    for bind in (None, False):
        with run_publisher(endpoint=endpoint, bind=bind) as publisher:
            # A bound socket accepts a peer only while it is being read.
            while not publisher.stats().subscribers:
                assert subscriber.poll(1) == 0
            publisher.publish(batch())
            assert receive(subscriber)[0] == 0


def test_a_concrete_address_can_be_bound() -> None:
    """`bind=True` overrides the heuristic, by which this address would connect."""
    endpoint = f"tcp://127.0.0.1:{reserve_port()}"
    with run_publisher(endpoint=endpoint, bind=True) as publisher:
        assert publisher.endpoint == endpoint
        with pytest.raises(EndpointError):
            ZmqEventPublisher(0, endpoint, bind=True)


@pytest.mark.skipif(not std_socket.has_ipv6, reason="needs IPv6")
def test_a_publisher_is_reachable_over_ipv6(context: Context) -> None:
    """The socket option is set if the endpoint needs it."""
    try:
        with std_socket.socket(std_socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    with run_publisher(endpoint="tcp://[::1]:0") as publisher:
        subscriber = open_consumer(context, zmq.SUB)
        subscriber.ipv6 = True
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe(b"")
        wait_until(lambda: publisher.stats().subscribers, "a subscription")
        publisher.publish(batch())
        assert receive(subscriber)[0] == 0


def test_the_error_for_a_port_in_use_names_endpoint_role_and_hint() -> None:
    """It has endpoint, role, the system's message and a hint. It is an OSError and a ZMQError, with their number."""
    with run_publisher() as first:
        for kind in (EndpointError, OSError, zmq.ZMQError):
            with pytest.raises(kind, match="another process or rank uses it") as caught:
                ZmqEventPublisher(0, ANY, first.endpoint)
            assert f"cannot bind the replay socket to {first.endpoint}: Address already in use;" in str(caught.value)
            assert getattr(caught.value, "errno", None) == zmq.EADDRINUSE


@pytest.mark.parametrize(
    ("endpoint", "hint"),
    [
        ("tcp://192.0.2.1:0", "no such address"),
        ("ipc:///nonexistent/directory/x", "directory does not exist"),
        ("inproc://", "not a valid endpoint"),
        ("carrier-pigeon://*", "does not know this transport"),
    ],
)
def test_endpoints_that_cannot_be_opened_are_explained(endpoint: str, hint: str) -> None:
    """Each common mistake has its hint."""
    with pytest.raises(EndpointError, match=hint):
        ZmqEventPublisher(0, endpoint)


def _make_keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def test_curve_accepts_only_clients_with_the_server_key(context: Context) -> None:
    """A client with the key of the publisher receives batches; one without keys fails the handshake and receives none."""
    public, secret = _make_keys()
    client = Curve(**dict(zip(("public_key", "secret_key"), _make_keys(), strict=True)), server_key=public)
    with run_publisher(replay_endpoint=ANY, curve=Curve(public_key=public, secret_key=secret)) as publisher:
        client_without_keys = open_consumer(context, zmq.SUB)
        monitor = client_without_keys.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        client_without_keys.connect(publisher.endpoint)
        client_without_keys.subscribe(b"")
        client_with_keys, replay = open_consumer(context, zmq.SUB), open_consumer(context, zmq.DEALER)
        for socket in (client_with_keys, replay):
            client.apply(socket)
        client_with_keys.connect(publisher.endpoint)
        client_with_keys.subscribe(b"")
        assert monitor.poll(60_000), "the client without keys was not rejected"
        wait_until(lambda: publisher.stats().subscribers == 1, "the client with keys")
        publisher.publish(batch())
        assert receive(client_with_keys)[0] == 0
        assert publisher.replay_endpoint is not None
        replay.connect(publisher.replay_endpoint)
        request_replay(replay, 0)
        assert numbers(read_reply(replay)) == [0]
        assert publisher.stats().subscribers == 1
        assert client_without_keys.poll(0) == 0
        client_without_keys.disable_monitor()
        monitor.close()


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        (
            ("tcp://*:5557", None),
            "nothing can connect to the host `*`; write the engine's host, such as tcp://127.0.0.1:5557, or set bind (`kve",
        ),
        (("tcp://h:1", "tcp://*:5558"), "invalid replay_endpoint 'tcp://*:5558': nothing can connect to the host `*`"),
    ],
)
def test_a_source_refuses_endpoints_that_cannot_be_right(endpoints: tuple[str, str | None], expected: str) -> None:
    """The first is the address in the engine's own configuration."""
    with pytest.raises(ConfigError, match=re.escape(expected)):
        Source(*endpoints)
    assert Source("tcp://*:5557", bind=True).endpoint == "tcp://*:5557"
