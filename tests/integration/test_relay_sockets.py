"""Tests of a relay on real sockets: replay and history, keys, metrics, ports."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest

from certificate_pairs import make_pair
from kvevents.errors import EndpointError, JournalError
from kvevents.events import AllBlocksCleared, BlockRemoved, EventBatch
from kvevents.relay import Relay, RelaySettings
from kvevents.relay.status import serve_metrics
from kvevents.stream import Source
from kvevents.testing import FaultProxy
from kvevents.zeromq.keys import Curve
from metrics_reference import exported, read_documented
from publisher_cases import ANY, DEADLINE, run_publisher
from relay_cases import block
from relay_socket_cases import Listener, Truth
from tools.ports import reserve_port


def source_of(ends: Any, **more: Any) -> Source:
    return Source(ends.endpoint, ends.replay_endpoint, **more)


@contextmanager
def listening(*ends: Any, **more: Any) -> Iterator[list[Listener]]:
    with ExitStack() as stack:
        found = [Listener(source_of(each, **more)) for each in ends]
        for each in found:
            stack.enter_context(closing(each.subscriber))
        yield found


def until(relay: Relay, condition: Callable[[], object], *listeners: Listener) -> None:
    end = monotonic() + DEADLINE
    while not condition():
        assert monotonic() < end, [str(each.subscriber.trust()) for each in listeners] + [str(relay)]
        relay.turn(0.005)
        for each in listeners:
            each.take()


def settings(publisher: Any, **more: Any) -> RelaySettings:
    given = {"upstreams": (source_of(publisher),), "endpoint": ANY, "replay_endpoint": ANY, "heartbeat": 0.05}
    return RelaySettings(**{**given, **more})


def test_a_late_consumer_has_the_engines_digest(tmp_path: Path) -> None:
    """An early consumer also keeps that digest, through a cut connection and a restart of the relay from its journal."""
    with (
        run_publisher(replay_endpoint=ANY, buffer_steps=50, heartbeat=0.05) as publisher,
        FaultProxy(publisher.endpoint) as live,
    ):
        truth = Truth(publisher)
        upstream = Source(live.endpoint, publisher.replay_endpoint)
        given = settings(publisher, upstreams=(upstream,), journal=str(tmp_path / "j"), buffer_steps=1_000)
        with Relay(given) as relay, listening(relay) as (early,):
            fixed = RelaySettings(
                **{**{name: getattr(given, name) for name in given.__struct_fields__}, "endpoint": relay.endpoint}
            )
            fixed = msgspec.structs.replace(fixed, replay_endpoint=relay.replay_endpoint)
            for number in range(100):
                truth.publish_events(block(number))
                if number % 2:
                    truth.publish_events(BlockRemoved([number - 1], "GPU"))
                if number == 50:
                    live.cut()
                    live.heal()
                relay.turn(0.001)
            with listening(relay) as (late,):
                until(relay, lambda: early.is_exact(truth.digest) and late.is_exact(truth.digest), early, late)
                until(relay, lambda: late.agreements, late)
                assert late.index.stats().blocks == 50
            status = relay.status()
            assert (status.trust.name, status.digest, status.divergences) == ("EXACT", truth.digest, 0)
            assert status.subscribers
            relay.close()
            truth.publish_events(block(200))
            with Relay(fixed) as again:
                assert again.status().was_resumed
                assert again.status().incarnation == status.incarnation
                until(again, lambda: early.is_exact(truth.digest), early)
                assert early.subscriber.status().counters.resets == 0
                assert all(early.agreements)


def test_a_relay_uses_its_keys_on_both_sides(tmp_path: Path) -> None:
    """The engine accepts the relay, the relay accepts the consumer, and the relay rejects an unknown key."""
    engine, own, consumer = make_pair(), make_pair(), make_pair()

    def server(pair: Any, allowed: Any) -> Curve:
        return Curve(public_key=pair.public, secret_key=pair.secret, allowed=(allowed.public,))

    def client(pair: Any, of: Any) -> Curve:
        return Curve(public_key=pair.public, secret_key=pair.secret, server_key=of.public)

    with run_publisher(replay_endpoint=ANY, curve=server(engine, own)) as publisher:
        truth = Truth(publisher)
        truth.publish_events(block(1))
        upstream = source_of(publisher, curve=client(own, engine))
        given = settings(publisher, upstreams=(upstream,), curve=server(own, consumer), journal=str(tmp_path / "j"))
        stranger = client(make_pair(), own)
        with (
            Relay(given) as relay,
            listening(relay, curve=client(consumer, own)) as (known,),
            listening(relay, curve=stranger) as (unknown,),
        ):
            until(relay, lambda: known.digest == truth.digest and publisher.stats().subscribers, known, unknown)
            truth.publish_events()
            until(relay, lambda: known.is_exact(truth.digest) and relay._event_server.connections_refused, known, unknown)
            assert unknown.subscriber.trust().name == "CONNECTING"
            assert not unknown.digest


def test_all_metrics_are_exported_and_documented(tmp_path: Path) -> None:
    with (
        run_publisher(replay_endpoint=ANY) as publisher,
        Relay(settings(publisher, journal=str(tmp_path / "j"))) as relay,
        socket.socket() as taken,
    ):
        until(relay, lambda: publisher.stats().subscribers)
        publisher.publish(EventBatch(1.0, [block(1), AllBlocksCleared(), block(2), block(3)]))
        until(relay, lambda: relay.trust().name == "EXACT" and relay.status().heartbeats)
        port = reserve_port()
        taken.bind(("127.0.0.1", port))
        with pytest.raises(EndpointError, match="choose another port"):
            serve_metrics(relay.status, port)
        taken.close()
        end = serve_metrics(relay.status, port)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE) as answer:
            page = answer.read().decode()
        end()
    assert exported(page) == read_documented("Relay")
    for line in (
        'kvevents_relay_upstream_state{state="EXACT"} 1.0',
        'kvevents_relay_journal_state{state="disk"} 1.0',
        "kvevents_relay_blocks 2.0",
        "kvevents_relay_forwarded_batches_total 1.0",
        "kvevents_relay_divergences_total 0.0",
        "kvevents_relay_history_lost 0.0",
    ):
        assert line in page, page


def test_a_relay_that_finds_its_port_in_use_leaves_nothing_open(tmp_path: Path) -> None:
    """The journal's folder is closed too: a relay can resume from it once a port is free. Two relays at once are rejected."""
    with run_publisher(replay_endpoint=ANY) as publisher:
        given = settings(publisher, journal=str(tmp_path / "j"))
        with Relay(given) as relay:
            with pytest.raises(JournalError, match="another process uses it"):
                Relay(given)
            relay.turn(0)
        with pytest.raises(EndpointError):
            Relay(settings(publisher, journal=str(tmp_path / "j"), endpoint=publisher.replay_endpoint))
        with Relay(given) as relay:
            assert relay.status().was_resumed
