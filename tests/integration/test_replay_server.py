"""Tests of replay over real sockets: it is complete for every consumer, concurrent with live batches, and independent of other
consumers."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from kvevents.publisher import ZmqEventPublisher
from kvevents.publisher.settings import ReplayServerSettings
from kvevents.wire import END_SEQ, encode_batch
from publisher_cases import (  # noqa: F401 - fixtures must be imported
    ANY,
    DEADLINE,
    QUICK,
    Socket,
    batch,
    connect_dealer,
    consumers_context,
    numbers,
    open_consumer,
    read_reply,
    receive,
    request_replay,
    run_publisher,
    subscribe,
    wait_until,
)

Context = zmq.Context[Socket]


def replaying(**settings: Any) -> AbstractContextManager[ZmqEventPublisher]:
    """Run a publisher with replay and these settings of its replay server."""
    return run_publisher(replay_endpoint=ANY, settings=replace(QUICK, replay=ReplayServerSettings(**settings)))


def fill(publisher: ZmqEventPublisher, count: int, blocks: int = 1) -> None:
    for number in range(count):
        publisher.publish(batch(number, blocks))
    wait_until(lambda: publisher.stats().queued == 0, "all to be published")


def stalled_reader(context: Context, publisher: ZmqEventPublisher, start: int = 0) -> Socket:
    """Return a consumer with small buffers that sends a request and reads nothing; the reply is longer than all buffers on the
    way."""
    socket = open_consumer(context, zmq.DEALER)
    socket.rcvhwm, socket.rcvbuf = 1, 4096
    assert publisher.replay_endpoint is not None
    socket.connect(publisher.replay_endpoint)
    request_replay(socket, start)
    return socket


@pytest.mark.parametrize(
    ("start", "expected"),
    [(0, range(10, 30)), (9, range(10, 30)), (10, range(10, 30)), (25, range(25, 30)), (29, [29]), (30, []), (2**63, [])],
)
def test_a_reply_has_the_buffered_batches_from_the_start(context: Context, start: int, expected: range | list[int]) -> None:
    """Without compaction it begins with the oldest of the `buffer_steps` buffered batches if `start` is older, and has only the
    end marker if `start` is newer."""
    with run_publisher(replay_endpoint=ANY, buffer_steps=20, compact=False) as publisher:
        fill(publisher, 30)
        replay = connect_dealer(context, publisher)
        request_replay(replay, start)
        found = read_reply(replay)
        assert numbers(found) == list(expected)
        for seq, payload in found:
            expected_batch = batch(seq)
            expected_batch.data_parallel_rank = 0
            assert payload == encode_batch(expected_batch)


@pytest.mark.parametrize(
    ("settings", "has_topic"),
    [
        ({}, False),
        ({"dialect": "vllm-0.24.0"}, False),
        ({"dialect": "vllm-0.26.0"}, True),
        ({"dialect": "sglang-0.5.17"}, False),
        ({"dialect": "sglang-0.5.23"}, True),
        ({"dialect": "sglang-0.5.17", "replay_topic": True}, True),
        ({"replay_topic": False}, False),
    ],
    ids=str,
)
def test_replies_have_the_topic_if_the_dialect_or_the_setting_says_so(
    context: Context, settings: dict[str, object], has_topic: bool
) -> None:
    """The dialect or the setting decides whether batches and end marker have the topic."""
    with run_publisher(replay_endpoint=ANY, topic="t", **settings) as publisher:
        fill(publisher, 1)
        replay = connect_dealer(context, publisher)
        request_replay(replay, 0)
        first, end = replay.recv_multipart(), replay.recv_multipart()
        assert first[:-1] == ([b"", b"t", bytes(8)] if has_topic else [b"", bytes(8)])
        assert end == ([b"", b"", END_SEQ, b""] if has_topic else [b"", END_SEQ, b""])


def test_a_slow_consumer_gets_everything_while_live_batches_continue(context: Context) -> None:
    """Its reply of 10,000 batches with 32 blocks exceeds all buffers and stalls; other consumers are served meanwhile."""
    with run_publisher(replay_endpoint=ANY, compact=False) as publisher:
        fill(publisher, 10_000, blocks=32)
        slow = stalled_reader(context, publisher)
        wait_until(lambda: publisher.stats().replay.active, "the reply to begin")
        subscriber, quick = subscribe(context, publisher), connect_dealer(context, publisher)
        for number in range(10_000, 10_010):
            publisher.publish(batch(number))
            assert receive(subscriber)[0] == number
        request_replay(quick, 0)
        assert numbers(read_reply(quick)) == list(range(10, 10_010))
        wait_until(lambda: publisher.stats().replay.active == 1, "the quick reply to be counted")
        assert numbers(read_reply(slow)) == list(range(10_000))
        wait_until(lambda: publisher.stats().replay.finished == 2, "both to be counted")
        stats = publisher.stats().replay
        assert (stats.requests, stats.batches, stats.active, stats.abandoned, stats.disconnected) == (2, 20_000, 0, 0, 0)


def test_the_reply_of_a_disconnected_consumer_ends(context: Context) -> None:
    """The server retains nothing for it and serves the next consumer."""
    with run_publisher(replay_endpoint=ANY) as publisher:
        fill(publisher, 5_000, blocks=64)
        disconnecting_reader = stalled_reader(context, publisher)
        wait_until(lambda: publisher.stats().replay.active, "the reply to begin")
        disconnecting_reader.close()
        wait_until(lambda: publisher.stats().replay.disconnected == 1, "the disconnect to be noticed")
        wait_until(lambda: publisher.stats().replay.active == 0, "the reply to end")
        replay = connect_dealer(context, publisher)
        request_replay(replay, 4_990)
        assert numbers(read_reply(replay)) == list(range(4_990, 5_000))


def test_a_reply_without_progress_is_abandoned(context: Context, caplog: pytest.LogCaptureFixture) -> None:
    """After `progress_timeout` without progress the reply is counted, logged and released."""
    with replaying(progress_timeout=0.05) as publisher:
        fill(publisher, 5_000, blocks=64)
        stalled_reader(context, publisher)
        wait_until(lambda: publisher.stats().replay.abandoned == 1, "the reply to be abandoned")
        wait_until(lambda: "abandoned a replay reply" in caplog.text, "a line in the log")
        wait_until(lambda: publisher.stats().replay.active == 0, "the reply to end")


def test_slow_readers_do_not_keep_others_from_their_replies(context: Context, caplog: pytest.LogCaptureFixture) -> None:
    """Readers that take a message now and then hold all sessions only until `busy_timeout` and the time for what they got."""
    with replaying(max_sessions=2, busy_timeout=0.05, min_read_rate=2**30, send_limit=1) as publisher:
        fill(publisher, 5_000, blocks=64)
        readers = [stalled_reader(context, publisher) for _ in range(2)]
        wait_until(lambda: publisher.stats().replay.active == 2, "both replies to begin")
        stop = threading.Event()

        def read_slowly() -> None:
            while not stop.wait(0.01):
                for reader in readers:
                    if reader.poll(0):
                        reader.recv_multipart()

        slow = threading.Thread(target=read_slowly)
        slow.start()
        honest = connect_dealer(context, publisher)
        request_replay(honest, 0)
        assert numbers(read_reply(honest)) == list(range(5_000))
        stop.set()
        slow.join()
        wait_until(lambda: publisher.stats().replay.abandoned >= 1, "a slow reader to be counted")
        wait_until(lambda: "its consumer read too little" in caplog.text, "a line in the log")


GOOD = bytes(8)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"x"],
        [b"", b""],
        [b"x", GOOD],
        [b"", GOOD, GOOD],
        [b""] * 8,
        [b"", b"1234"],
        [b"", GOOD + GOOD],
        [b"", GOOD, b""],
    ],
    ids=repr,
)
def test_malformed_requests_are_counted_and_ignored(context: Context, frames: list[bytes]) -> None:
    """The ROUTER sees requests with 1 to 9 frames, and with numbers of 0, 4 and 16 bytes. The next request of the same consumer
    is answered."""
    with run_publisher(replay_endpoint=ANY) as publisher:
        fill(publisher, 1)
        replay = connect_dealer(context, publisher)
        replay.send_multipart(frames)
        request_replay(replay, 0)
        assert numbers(read_reply(replay)) == [0]
        assert (publisher.stats().replay.malformed, publisher.stats().replay.requests) == (1, 1)


def test_a_huge_request_closes_only_its_own_connection(context: Context) -> None:
    """The server never stores the request in memory, and serves other consumers."""
    with run_publisher(replay_endpoint=ANY) as publisher:
        fill(publisher, 1)
        huge, good = connect_dealer(context, publisher), connect_dealer(context, publisher)
        monitor = huge.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        huge.send_multipart([b"", bytes(1_000_000)])
        assert monitor.poll(int(1000 * DEADLINE)), "the connection was not closed"
        request_replay(good, 0)
        assert numbers(read_reply(good)) == [0]
        assert publisher.stats().replay.requests == 1
        huge.disable_monitor()
        monitor.close()


def test_requests_of_one_consumer_are_answered_in_order(context: Context) -> None:
    """A second request waits for the first reply."""
    with run_publisher(replay_endpoint=ANY) as publisher:
        fill(publisher, 100)
        replay = connect_dealer(context, publisher)
        for start in (0, 50, 100, 99):
            request_replay(replay, start)
        assert [numbers(read_reply(replay)) for _ in range(4)] == [list(range(100)), list(range(50, 100)), [], [99]]


def test_the_waiting_requests_of_one_consumer_are_limited(context: Context) -> None:
    """While its first reply is in progress, `max_waiting_requests` wait. Further ones share the last reply."""
    with run_publisher(replay_endpoint=ANY) as publisher:
        fill(publisher, 5_000, blocks=64)
        flooding = stalled_reader(context, publisher)
        for _ in range(50):
            request_replay(flooding, 5_000)
        request_replay(flooding, 4_999)
        wait_until(lambda: publisher.stats().replay.requests == 52, "all requests to be read")
        limit = ReplayServerSettings().max_waiting_requests
        assert publisher.stats().replay.merged == 51 - limit
        assert numbers(read_reply(flooding)) == list(range(5_000))
        assert [numbers(read_reply(flooding)) for _ in range(51)] == [*[[]] * (limit - 1), [4_999], *[[]] * (51 - limit)]
        request_replay(flooding, 4_998)
        assert numbers(read_reply(flooding)) == [4_998, 4_999]


def test_consumers_beyond_the_limit_wait_in_zeromq(context: Context) -> None:
    """Two replies are allowed and stalled. Two more requests wait in ZeroMQ and lose nothing."""
    with replaying(max_sessions=2, busy_timeout=60.0) as publisher:  # the readers take turns
        fill(publisher, 5_000, blocks=64)
        readers = [stalled_reader(context, publisher) for _ in range(4)]
        wait_until(lambda: publisher.stats().replay.active == 2, "two replies to begin")
        poller = zmq.Poller()
        found: dict[Socket, list[int]] = {}
        for reader in readers:
            poller.register(reader, zmq.POLLIN)
        while len(found) < 4:
            ready = [socket for socket, _ in poller.poll(int(1000 * DEADLINE)) if isinstance(socket, zmq.Socket)]
            assert ready, "a reader got no reply"
            for reader in ready:
                poller.unregister(reader)
                found[reader] = numbers(read_reply(reader))
        assert list(found.values()) == [list(range(5_000))] * 4
        assert publisher.stats().replay.requests == 4


def test_a_req_client_gets_one_message_and_can_request_again(context: Context) -> None:
    """The engines' example uses REQ, and ZeroMQ delivers only the first message of a reply to it."""
    with run_publisher(replay_endpoint=ANY, replay_topic=False) as publisher:
        fill(publisher, 3)
        req = open_consumer(context, zmq.REQ)
        assert publisher.replay_endpoint is not None
        req.connect(publisher.replay_endpoint)

        def request_replay(start: int) -> int:
            req.send(start.to_bytes(8, "big"))
            return int.from_bytes(req.recv_multipart()[0], "big")

        assert request_replay(0) == 0
        # The rest of a reply may arrive after the next request; REQ then takes it for that reply, with any publisher.
        assert any(request_replay(2) == 2 for _ in range(10))


@pytest.mark.parametrize("has_topic", [True, False])
def test_the_engines_example_subscriber_works(context: Context, has_topic: bool) -> None:
    """Its loop, with both shapes of reply, subscribes to a topic, finds a gap by the number, and requests the missing batch on
    REQ. A REQ client receives one message of a reply, which is a limit of the example but enough for a gap of one batch."""
    with run_publisher(replay_endpoint=ANY, topic="kv-events", replay_topic=has_topic) as publisher:
        subscriber, req = subscribe(context, publisher, b"kv-events"), open_consumer(context, zmq.REQ)
        assert publisher.replay_endpoint is not None
        req.connect(publisher.replay_endpoint)
        seen: list[int] = []
        for number in range(6):
            publisher.publish(batch(number))
            _, seq_bytes, _ = subscriber.recv_multipart()
            if number == 3:
                continue  # lost by the network
            seq = int.from_bytes(seq_bytes, "big")
            if seen and seq > seen[-1] + 1:
                req.send((seen[-1] + 1).to_bytes(8, "big"))
                *_, missed, payload = req.recv_multipart()
                assert payload
                seen.append(int.from_bytes(missed, "big"))
            seen.append(seq)
        assert seen == list(range(6))


def fill_with_large_batches(publisher: ZmqEventPublisher, count: int) -> int:
    """Publish batches of about 130 KB, and return the size of one."""
    fill(publisher, count, blocks=2_000)
    return publisher.stats().buffered_bytes // count


def test_the_bytes_in_flight_to_one_consumer_are_limited(context: Context) -> None:
    """250 large batches would fit into a pipe by their number, but only the allowed bytes are sent before the consumer
    reads."""
    with replaying(in_flight_bytes=1_000_000) as publisher:
        size = fill_with_large_batches(publisher, 250)
        reader = stalled_reader(context, publisher)
        wait_until(lambda: publisher.stats().replay.deferred > 10, "the pipe to be full")
        stats = publisher.stats().replay
        assert stats.active == 1
        assert 0 < stats.unsent_bytes <= 1_000_000 < 250 * size
        assert stats.batches < 250
        assert numbers(read_reply(reader)) == list(range(250))
        wait_until(lambda: publisher.stats().replay.finished == 1, "the reply to be counted")
        wait_until(lambda: publisher.stats().replay.unsent_bytes == 0, "all to have left")


def test_a_single_message_can_exceed_all_limits(context: Context) -> None:
    """Each message exceeds all limits; they are sent one at a time."""
    with replaying(in_flight_bytes=1, total_in_flight_bytes=1) as publisher:
        fill_with_large_batches(publisher, 20)
        readers = [connect_dealer(context, publisher) for _ in range(3)]
        for reader in readers:
            request_replay(reader, 0)
        assert [numbers(read_reply(reader)) for reader in readers] == [list(range(20))] * 3


def test_consumers_do_not_wait_for_others_that_do_not_read(context: Context) -> None:
    """When stalled consumers use all allowed bytes, another consumer still gets everything, and so do the stalled ones once
    they read."""
    with replaying(in_flight_bytes=1_000_000, total_in_flight_bytes=2_000_000) as publisher:
        size = fill_with_large_batches(publisher, 100)
        readers = [stalled_reader(context, publisher) for _ in range(6)]
        wait_until(lambda: publisher.stats().replay.active == 6 and publisher.stats().replay.deferred > 100, "all to stall")
        assert publisher.stats().replay.unsent_bytes <= 2_000_000 + len(readers) * size
        quick = connect_dealer(context, publisher)
        request_replay(quick, 0)
        assert numbers(read_reply(quick)) == list(range(100))
        assert [numbers(read_reply(reader)) for reader in readers] == [list(range(100))] * 6


def test_the_memory_of_a_stalled_consumer_is_freed(context: Context) -> None:
    """Its reply is abandoned. Its connection, which accepts no data, is closed, so ZeroMQ stores nothing for it."""
    limits: dict[str, Any] = {"in_flight_bytes": 1_000_000, "min_read_rate": 100_000_000}
    with replaying(progress_timeout=0.05, unread_timeout=0.5, **limits) as publisher:
        fill_with_large_batches(publisher, 100)
        reader = stalled_reader(context, publisher)
        wait_until(lambda: publisher.stats().replay.abandoned == 1, "the reply to be abandoned")
        wait_until(lambda: publisher.stats().replay.unsent_bytes == 0, "its memory to be freed")
        quick = connect_dealer(context, publisher)
        request_replay(quick, 99)
        assert numbers(read_reply(quick)) == [99]
        assert not reader.closed


def test_a_large_message_extends_the_timeout(context: Context) -> None:
    """A reply is not abandoned before its large message could have arrived over a slow connection."""
    with replaying(in_flight_bytes=1_000_000, progress_timeout=0.01, min_read_rate=10_000) as publisher:
        fill_with_large_batches(publisher, 100)
        reader = stalled_reader(context, publisher)
        wait_until(lambda: publisher.stats().replay.deferred > 50, "several turns without progress")
        assert publisher.stats().replay.abandoned == 0
        assert numbers(read_reply(reader)) == list(range(100))
