"""`kvevents.sim.network`: the endpoints at which workers publish, through all of their incarnations."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvevents.endpoints import MAX_PORT
from kvevents.errors import ConfigError, EndpointError
from kvevents.events import BlockStored, KVEventBatch
from kvevents.sim import network
from kvevents.sim.network import Sockets
from kvevents.sim.settings import FleetSettings
from kvevents.stream import Source
from kvevents.testing import FaultProxy
from kvevents.wire import decode_batch, resolve_dialect
from kvevents.wire.encode import batch_encoder
from publisher_cases import wait_until
from resource_cases import leave_nothing_open
from sim_socket_cases import TWO_RANKS, open_sockets
from tools.ports import reserve_adjacent_ports

FIRST, SECOND = ("engine-0", 0), ("engine-0", 1)


def batch(number: int) -> KVEventBatch:
    return KVEventBatch(time.time(), [BlockStored([number], None, [1, 2, 3, 4], 4, medium="GPU")], 0)


@contextmanager
def subscribe_to(endpoint: str) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.subscribe(b"")
        sub.rcvtimeo = 60_000
        sub.connect(endpoint)
        yield sub


# --- endpoints


def test_workers_use_consecutive_ports_from_the_base_port_on() -> None:
    """Each worker has two ports: for live events, then for replay."""
    port = reserve_adjacent_ports(4)
    with open_sockets(base_port=port) as sockets:
        endpoints = [(one.worker, one.endpoint, one.replay_endpoint) for one in sockets.addresses.values()]
    assert endpoints == [
        (FIRST, f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"),
        (SECOND, f"tcp://127.0.0.1:{port + 2}", f"tcp://127.0.0.1:{port + 3}"),
    ]


def test_without_a_base_port_the_system_chooses_ports() -> None:
    with open_sockets() as sockets:
        endpoints = [end for one in sockets.addresses.values() for end in (one.endpoint, one.replay_endpoint)]
        assert len(set(endpoints)) == 4
        assert [one.source for one in sockets.addresses.values()] == [
            Source(endpoints[0], endpoints[1], name="engine-0", rank=0),
            Source(endpoints[2], endpoints[3], name="engine-0", rank=1),
        ]


def test_ports_out_of_range_are_reported_before_anything_is_opened() -> None:
    message = f"^invalid base port {MAX_PORT - 2}: 2 workers would need port {MAX_PORT + 1}; "
    with leave_nothing_open(), pytest.raises(ConfigError, match=message):
        Sockets(TWO_RANKS, base_port=MAX_PORT - 2)


def test_proxies_are_between_the_publisher_and_its_consumers() -> None:
    """The proxies listen at the requested ports, and stay through restarts."""
    port = reserve_adjacent_ports(4)
    with open_sockets(proxied=True, base_port=port) as sockets:
        address = sockets.addresses[FIRST]
        assert (address.endpoint, address.replay_endpoint) == (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
        live, replay = sockets.proxies[FIRST]
        assert (live.endpoint, replay.endpoint) == (address.endpoint, address.replay_endpoint)
        sockets.close(FIRST)
        sockets.open(FIRST)
        assert sockets.proxies[FIRST] == (live, replay)
        assert sockets.addresses[FIRST] == address
        with subscribe_to(address.endpoint) as sub:
            wait_until(lambda: sub.poll(1) == 0 and live.counts.open == 1, "the consumer to be connected")
            wait_until(lambda: publish_and_poll(sockets, sub), "an event to come through the proxy")
        assert live.counts.down.messages > 0


def publish_and_poll(sockets: Sockets, sub: Any) -> bool:
    """Publish a batch, and return whether any has arrived."""
    sockets.publish(FIRST, batch(1))
    return bool(sub.poll(10))


# --- batches


@pytest.mark.parametrize("dialect", ["vllm-0.9.1", "vllm-0.24", "sglang-0.5.22"])
def test_batches_have_the_dialects_encoding_and_are_numbered_from_0_in_every_incarnation(dialect: str) -> None:
    settings = FleetSettings(engines=1, blocks=10, block_size=4, dialect=dialect)
    encode = batch_encoder(resolve_dialect(dialect))
    with open_sockets(settings) as sockets:
        for _ in range(2):
            with subscribe_to(sockets.addresses[FIRST].endpoint) as sub:
                wait_until(lambda: sockets.subscribers() == 1, "the consumer to be subscribed")
                sent = [batch(number) for number in range(3)]
                for one in sent:
                    sockets.publish(FIRST, one)
                received = [sub.recv_multipart() for _ in sent]
            assert [int.from_bytes(frames[1]) for frames in received] == [0, 1, 2]
            assert [frames[2] for frames in received] == [bytes(encode(one)) for one in sent]
            assert decode_batch(received[0][2]).batch.ts == sent[0].ts
            sockets.close(FIRST)
            sockets.open(FIRST)


def test_subscribers_is_the_lowest_number_of_any_worker() -> None:
    with open_sockets() as sockets:
        assert sockets.subscribers() == 0
        with subscribe_to(sockets.addresses[FIRST].endpoint) as sub:
            sub.connect(sockets.addresses[SECOND].endpoint)
            wait_until(lambda: sockets.subscribers() == 1, "both workers to be subscribed to")
            sub.disconnect(sockets.addresses[SECOND].endpoint)
            # The socket disconnects at its next call.
            wait_until(lambda: not sub.poll(0) and sockets.subscribers() == 0, "one of them to lose its subscriber")


# --- incarnations


def test_incarnations_are_distinguished_by_timestamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches belong to an incarnation from the moment at which it was opened."""
    now = iter([100.0, 100.0, 200.0, 300.0])
    monkeypatch.setattr(network, "time", SimpleNamespace(time=lambda: next(now), monotonic=time.monotonic, sleep=time.sleep))
    with open_sockets() as sockets:
        for _ in range(2):
            sockets.close(FIRST)
            sockets.open(FIRST)
        assert [sockets.incarnation(FIRST, ts) for ts in (100.0, 199.9, 200.0, 299.9, 300.0, 1e12)] == [0, 0, 1, 1, 2, 2]
        assert sockets.incarnation(SECOND, 1e12) == 0


def test_an_incarnation_has_the_endpoints_of_the_previous_one() -> None:
    with open_sockets() as sockets:
        address = sockets.addresses[FIRST]
        for _ in range(5):
            sockets.publish(FIRST, batch(0))
            sockets.close(FIRST)
            sockets.open(FIRST)
        assert sockets.addresses[FIRST] == address
        with subscribe_to(address.endpoint) as sub:
            wait_until(lambda: publish_and_poll(sockets, sub), "an event of the last incarnation")


def test_open_waits_for_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_sockets() as sockets, socket.socket() as blocker:
        sockets.close(FIRST)
        take_port(blocker, sockets.addresses[FIRST].endpoint)
        # The first pause frees the port.
        monkeypatch.setattr(
            network, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=lambda _: blocker.close())
        )
        sockets.open(FIRST)


def test_a_port_that_stays_in_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "REBIND_SECONDS", 0.02)
    with open_sockets() as sockets, socket.socket() as blocker:
        endpoint = sockets.addresses[FIRST].endpoint
        sockets.close(FIRST)
        take_port(blocker, endpoint)
        with pytest.raises(EndpointError, match=endpoint):
            sockets.open(FIRST)


def take_port(blocker: socket.socket, endpoint: str) -> None:
    """Bind the port of a publisher that was closed just before."""
    port = int(endpoint.rpartition(":")[2])
    blocker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def is_bound() -> bool:
        try:
            blocker.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

    wait_until(is_bound, f"port {port} to be free")
    blocker.listen()


# --- closing


@pytest.mark.parametrize("proxied", [False, True])
def test_sockets_leave_nothing_open(proxied: bool) -> None:
    with leave_nothing_open(), open_sockets(proxied=proxied) as sockets:
        sockets.close(FIRST)


def test_nothing_is_left_open_if_a_proxy_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second proxy of a worker fails, as without free descriptors."""
    made: list[Any] = []

    def make_proxy(*given: Any, **keywords: Any) -> Any:
        if len(made) == 3:
            raise EndpointError(24, "cannot listen: Too many open files")
        made.append(FaultProxy(*given, **keywords))
        return made[-1]

    monkeypatch.setattr(network, "FaultProxy", make_proxy)
    with leave_nothing_open(), pytest.raises(EndpointError, match="Too many open files"), open_sockets(proxied=True):
        pass
