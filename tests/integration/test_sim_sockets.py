"""`kvevents.sim.network`: where workers publish, through all of their lives."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvevents.config import resolve_dialect
from kvevents.errors import ConfigError, EndpointError
from kvevents.events import AllBlocksCleared, BlockStored, KVEventBatch
from kvevents.sim import network
from kvevents.sim.network import HIGHEST_PORT, Sockets
from kvevents.sim.settings import FleetSettings
from kvevents.stream import Source
from kvevents.testing import FaultProxy
from kvevents.wire import decode_batch
from kvevents.wire.encode import batch_encoder
from publisher_cases import wait_until
from sim_live_cases import openings
from sim_socket_cases import TWO, four_free_ports, opened

FIRST, SECOND = ("engine-0", 0), ("engine-0", 1)


def batch(number: int) -> KVEventBatch:
    return KVEventBatch(time.time(), [BlockStored([number], None, [1, 2, 3, 4], 4, medium="GPU")], 0)


@contextmanager
def listening(endpoint: str) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.subscribe(b"")
        sub.rcvtimeo = 20_000
        sub.connect(endpoint)
        yield sub


# --- where


def test_with_a_first_port_workers_are_at_the_ones_after_it() -> None:
    """Two for each: live events, then replay."""
    port = four_free_ports()
    with opened(base_port=port) as sockets:
        ends = [(one.worker, one.endpoint, one.replay_endpoint) for one in sockets.addresses.values()]
    assert ends == [
        (FIRST, f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"),
        (SECOND, f"tcp://127.0.0.1:{port + 2}", f"tcp://127.0.0.1:{port + 3}"),
    ]


def test_without_one_the_system_chooses() -> None:
    with opened() as sockets:
        ends = [end for one in sockets.addresses.values() for end in (one.endpoint, one.replay_endpoint)]
        assert len(set(ends)) == 4
        assert [one.source for one in sockets.addresses.values()] == [
            Source(ends[0], ends[1], name="engine-0", rank=0),
            Source(ends[2], ends[3], name="engine-0", rank=1),
        ]


def test_ports_out_of_range_are_reported_before_anything_is_opened() -> None:
    before = openings()
    with pytest.raises(
        ConfigError, match=f"^invalid base port {HIGHEST_PORT - 2}: 2 workers would need port {HIGHEST_PORT + 1}; "
    ):
        Sockets(TWO, base_port=HIGHEST_PORT - 2)
    assert openings() == before


def test_faults_are_between_the_publisher_and_where_consumers_are_sent() -> None:
    """The proxies are at the ports that were asked for, and stay through restarts."""
    port = four_free_ports()
    with opened(proxied=True, base_port=port) as sockets:
        address = sockets.addresses[FIRST]
        assert (address.endpoint, address.replay_endpoint) == (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
        live, replay = sockets.proxies[FIRST]
        assert (live.endpoint, replay.endpoint) == (address.endpoint, address.replay_endpoint)
        sockets.close(FIRST)
        sockets.open(FIRST)
        assert sockets.proxies[FIRST] == (live, replay)
        assert sockets.addresses[FIRST] == address
        with listening(address.endpoint) as sub:
            wait_until(lambda: sub.poll(1) == 0 and live.counts.open == 1, "the consumer to be connected")
            wait_until(lambda: published(sockets, sub), "an event to come through the proxy")
        assert live.counts.down.messages > 0


def published(sockets: Sockets, sub: Any) -> bool:
    """Publish, and say whether anything has come."""
    sockets.publish(FIRST, batch(1))
    return bool(sub.poll(10))


# --- what


@pytest.mark.parametrize("dialect", ["vllm-0.9.1", "vllm-0.24", "sglang-0.5.22"])
def test_batches_are_the_dialects_bytes_numbered_from_0_in_every_life(dialect: str) -> None:
    settings = FleetSettings(engines=1, blocks=10, block_size=4, dialect=dialect)
    encode = batch_encoder(resolve_dialect(dialect))
    with opened(settings) as sockets:
        for _ in range(2):
            with listening(sockets.addresses[FIRST].endpoint) as sub:
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


def test_subscribers_are_those_of_the_worker_that_has_the_fewest() -> None:
    with opened() as sockets:
        assert sockets.subscribers() == 0
        with listening(sockets.addresses[FIRST].endpoint) as sub:
            sub.connect(sockets.addresses[SECOND].endpoint)
            wait_until(lambda: sockets.subscribers() == 1, "both workers to be subscribed to")
            sub.disconnect(sockets.addresses[SECOND].endpoint)
            # The socket leaves when it is next asked for something.
            wait_until(lambda: not sub.poll(0) and sockets.subscribers() == 0, "one of them to be left")
        sockets.publish(SECOND, KVEventBatch(time.time(), [AllBlocksCleared()], 1))
        assert sockets.dropped() == 0


# --- lives


def test_incarnations_are_distinguished_by_timestamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches belong to an incarnation from the moment at which it was opened."""
    now = iter([100.0, 100.0, 200.0, 300.0])
    monkeypatch.setattr(network, "time", SimpleNamespace(time=lambda: next(now), monotonic=time.monotonic, sleep=time.sleep))
    with opened() as sockets:
        for _ in range(2):
            sockets.close(FIRST)
            sockets.open(FIRST)
        assert [sockets.incarnation(FIRST, ts) for ts in (100.0, 199.9, 200.0, 299.9, 300.0, 1e12)] == [0, 0, 1, 1, 2, 2]
        assert sockets.incarnation(SECOND, 1e12) == 0


def test_a_life_begins_where_the_one_before_ended_and_remembers_nothing() -> None:
    with opened() as sockets:
        address = sockets.addresses[FIRST]
        for _ in range(5):
            sockets.publish(FIRST, batch(0))
            sockets.close(FIRST)
            sockets.open(FIRST)
        assert sockets.addresses[FIRST] == address
        with listening(address.endpoint) as sub:
            wait_until(lambda: published(sockets, sub), "an event of the last incarnation")


def test_a_port_that_was_taken_meanwhile_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as sockets, socket.socket() as thief:
        sockets.close(FIRST)
        take(thief, sockets.addresses[FIRST].endpoint)
        # The first pause ends it.
        monkeypatch.setattr(
            network, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=lambda _: thief.close())
        )
        sockets.open(FIRST)


def test_a_port_that_stays_in_use_raises() -> None:
    with opened(rebind_seconds=0.02) as sockets, socket.socket() as thief:
        endpoint = sockets.addresses[FIRST].endpoint
        sockets.close(FIRST)
        take(thief, endpoint)
        with pytest.raises(EndpointError, match=endpoint):
            sockets.open(FIRST)


def take(thief: socket.socket, endpoint: str) -> None:
    """The port of a publisher that has just been closed."""
    port = int(endpoint.rpartition(":")[2])
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def bound() -> bool:
        try:
            thief.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

    wait_until(bound, f"port {port} to be free")
    thief.listen()


# --- the end


@pytest.mark.parametrize("proxied", [False, True])
def test_nothing_is_left_open(proxied: bool) -> None:
    before = openings()
    with opened(proxied=proxied) as sockets:
        assert openings() > before
        sockets.close(FIRST)
    wait_until(lambda: openings() <= before, "all of it to be closed")


def test_nothing_is_left_open_when_a_proxy_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one of a worker, say for want of descriptors."""
    made: list[Any] = []

    def limited(*given: Any, **named: Any) -> Any:
        if len(made) == 3:
            raise EndpointError(24, "cannot listen: Too many open files")
        made.append(FaultProxy(*given, **named))
        return made[-1]

    before = openings()
    monkeypatch.setattr(network, "FaultProxy", limited)
    with pytest.raises(EndpointError, match="Too many open files"), opened(proxied=True):
        pass
    wait_until(lambda: openings() <= before, "all of it to be closed")
