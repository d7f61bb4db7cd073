"""The ZeroMQ transport opens sockets in the right context and for the right protocol, and reports errors."""

from __future__ import annotations

import errno
import time

import pytest
import zmq

from kvevents.endpoints import needs_ipv6
from kvevents.errors import EndpointError
from kvevents.events import BlockRemoved, EventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import Batch, Source, Trust
from kvevents.subscriber import Subscriber, ZmqTransport
from kvevents.zeromq.sockets import DEFAULT_SOCKET_OPTIONS, open_source_socket

DEADLINE = 60.0


def receive_until_exact(subscriber: Subscriber, publisher: ZmqEventPublisher) -> list[int]:
    """Receive until the stream is EXACT and return the sequence numbers. A live batch has to confirm the replayed ones."""
    seqs: list[int] = []
    end = time.monotonic() + DEADLINE
    while subscriber.trust() != Trust.EXACT:
        assert time.monotonic() < end, subscriber.statuses()
        if seqs and subscriber.trust() == Trust.DEGRADED:
            publisher.publish(EventBatch(0.0, []))
        delivery = subscriber.receive(0.02)
        if isinstance(delivery, Batch):
            seqs.append(delivery.seq)
    return seqs


@pytest.mark.parametrize("has_context", [False, True])
@pytest.mark.parametrize("live", ["inproc://live", "tcp://127.0.0.1:*"])
def test_inproc_endpoints_are_in_the_context_of_the_caller(has_context: bool, live: str) -> None:
    """Live and replay endpoints are in the context that the caller passes, and else in the process-wide one."""
    with zmq.Context() as context:
        passed_context = context if has_context else None
        publisher_context = passed_context if live.startswith("tcp") or has_context else zmq.Context.instance()
        if publisher_context is None:
            publisher_context = zmq.Context.instance()
        publisher = ZmqEventPublisher(0, live, "inproc://replay", context=publisher_context)
        publisher.publish(EventBatch(0.0, [BlockRemoved([0])]))
        with Subscriber(
            Source(publisher.endpoint, "inproc://replay"), transport=ZmqTransport(context=passed_context)
        ) as subscriber:
            assert receive_until_exact(subscriber, publisher)[0] == 0
        publisher.shutdown()


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://[::1]:5557", "tcp://:::5557", "tcp://[::]:5557", "tcp://10.1.2.3:5557", "tcp://engine:5557", "ipc:///tmp/[x]"],
)
def test_ipv6_is_enabled_for_the_same_endpoints_as_in_publishers(endpoint: str) -> None:
    """Both ends use `endpoints.needs_ipv6`."""
    with zmq.Context() as context:
        for kind in (zmq.SUB, zmq.DEALER):
            with open_source_socket(context, kind, endpoint, DEFAULT_SOCKET_OPTIONS, None, is_private=True) as socket:
                assert bool(socket.get(zmq.IPV6)) == needs_ipv6(endpoint)


def test_a_subscriber_binds_at_the_ipv6_wildcard() -> None:
    """The wildcard has no brackets, as vLLM writes it."""
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        probe.ipv6 = True
        try:
            probe.bind("tcp://[::1]:*")
        except zmq.ZMQError:
            pytest.skip("this host has no IPv6")
    with Subscriber(Source("tcp://:::*", bind=True)) as subscriber:
        assert subscriber.receive(0) is None


def test_endpoint_errors_have_endpoint_and_errno() -> None:
    """Errors of publishers and subscribers carry both as attributes, so that code need not parse the message."""
    with zmq.Context() as context, context.socket(zmq.PUB) as holder:
        used_endpoint = f"tcp://127.0.0.1:{holder.bind_to_random_port('tcp://127.0.0.1')}"
        with pytest.raises(EndpointError, match="Address already in use") as published:
            ZmqEventPublisher(0, used_endpoint, bind=True)
        with pytest.raises(EndpointError, match="Address already in use") as subscribed:
            Subscriber(Source(used_endpoint, bind=True))
    for error in (published.value, subscribed.value):
        assert (error.endpoint, error.errno) == (used_endpoint, errno.EADDRINUSE)
    too_long = "ipc:///" + 200 * "x"
    with pytest.raises(EndpointError) as unusable:
        Subscriber(Source(too_long))
    assert (unusable.value.endpoint, unusable.value.errno) == (too_long, errno.ENAMETOOLONG)
