"""Tests of publishing on real sockets: which batches arrive, with which numbers, and how losses are reported."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from time import sleep
from typing import Any

import msgspec
import pytest
import zmq
from msgspec.structs import replace

from kvevents.errors import ClosedError, ConfigError, UnknownDialectError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvevents.publisher import EventPublisher, NullEventPublisher, PublisherSettings, PublisherStats, ZmqEventPublisher
from kvevents.publisher.stats import LossLogger
from kvevents.wire import Dialect, decode_batch, dialects, encode_batch
from publisher_cases import (  # noqa: F401 - fixtures must be imported
    ANY,
    DEADLINE,
    QUICK,
    Socket,
    batch,
    connect_dealer,
    consumers_context,
    hold_publisher,
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

Context = zmq.Context[Socket]


def test_live_frames_are_topic_number_payload(context: Context) -> None:
    """A message has three frames, numbers start at 0, and the payload is what `encode_batch` returns."""
    with run_publisher(topic="kv@pod@model") as publisher:
        subscriber = subscribe(context, publisher, b"kv@")
        for number in range(3):
            publisher.publish(batch(number))
        for number in range(3):
            expected = batch(number)
            expected.data_parallel_rank = 0
            assert subscriber.recv_multipart() == [b"kv@pod@model", number.to_bytes(8, "big"), encode_batch(expected)]


def test_a_batch_without_rank_gets_the_rank_of_the_publisher(context: Context) -> None:
    """The rank is set when `publish` returns, as in the engines. A rank that is already set does not change."""
    with run_publisher(3) as publisher:
        subscriber = subscribe(context, publisher)
        own, others = EventBatch(0.0, []), EventBatch(0.0, [], 7)
        publisher.publish(own)
        publisher.publish(others)
        assert (own.data_parallel_rank, others.data_parallel_rank) == (3, 7)
        assert [decode_batch(receive(subscriber)[1]).batch.data_parallel_rank for _ in range(2)] == [3, 7]


class SGLangLike(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class WithoutRank(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]


class Frozen(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def test_batch_types_of_users_can_be_published(context: Context) -> None:
    """The rank may have SGLang's name. A batch without a rank field, or an immutable one, is sent unchanged."""
    with run_publisher(2) as publisher:
        subscriber = subscribe(context, publisher)
        for event_batch in (SGLangLike(1.0, []), WithoutRank(1.0, []), Frozen(1.0, [])):
            publisher.publish(event_batch)
        assert [msgspec.msgpack.decode(receive(subscriber)[1]) for _ in range(3)] == [[1.0, [], 2], [1.0, []], [1.0, [], None]]


def test_event_types_of_users_can_be_published(context: Context) -> None:
    """Events of any type that msgspec can encode are sent in order, next to events of kvevents."""

    @dataclass
    class Note:
        text: str

    with run_publisher() as publisher:
        subscriber = subscribe(context, publisher)
        publisher.publish(EventBatch(1.0, [Note("mine"), AllBlocksCleared(), {"type": "Other"}]))
        found = msgspec.msgpack.decode(receive(subscriber)[1])
        assert found == [1.0, [{"text": "mine"}, ["AllBlocksCleared"], {"type": "Other"}], 0]


def test_a_publisher_is_closed_at_the_end_of_a_with_block() -> None:
    """`close` does what `shutdown` does, for every publisher."""
    with ZmqEventPublisher(0, ANY) as publisher, NullEventPublisher() as null:
        publisher.publish(batch())
        null.publish(batch())
    assert publisher.shutdown().sent == 1
    publisher.close()
    with pytest.raises(ClosedError):
        publisher.publish(batch())


def test_a_publisher_that_connects_says_so_and_that_no_consumer_is_there(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    """The address is that of a consumer, which may come later; a publisher that is bound waits without a word."""
    caplog.set_level("INFO")
    socket = open_consumer(context, zmq.SUB)
    socket.bind("tcp://127.0.0.1:*")
    endpoint = last_endpoint(socket)
    with run_publisher(endpoint="tcp://127.0.0.1:9", settings=replace(QUICK, peer_timeout=0.01)) as publisher:
        assert repr(publisher).startswith("<ZmqEventPublisher rank 0 connecting to tcp://127.0.0.1:9")
        wait_until(lambda: "no consumer has answered there for 0.01 s; pass bind=True" in caplog.text, "the warning")
    assert "publishing KV events of rank 0, connecting to tcp://127.0.0.1:9" in caplog.text
    caplog.clear()
    socket.subscribe(b"")
    with run_publisher(endpoint=endpoint), run_publisher(settings=replace(QUICK, peer_timeout=0.01)) as bound:
        assert "bound to" in repr(bound)
        bound.publish(batch())
        wait_until(lambda: bound.stats().published, "some work of the thread")
    assert "no consumer has answered" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_rank": "0"},
        {"buffer_steps": "100"},
        {"hwm": 1.5},
        {"max_queue_size": None},
        {"endpoint": 5557},
        {"topic": b"kv"},
        {"replay_endpoint": 5558},
        {"heartbeat": "5"},
    ],
    ids=str,
)
def test_a_setting_of_a_wrong_type_is_rejected(options: Any) -> None:
    """The error names the setting, as for a value out of range."""
    (name,) = options
    with pytest.raises(ConfigError, match=f"^{name} is "):
        ZmqEventPublisher(**{"data_parallel_rank": 0, "endpoint": ANY} | options)


@pytest.mark.parametrize("port", ["99999", "65536", "-1", "5 557", "1e3", "5557/tcp", "0x15b5", "http", ""])
def test_what_is_no_port_is_rejected(port: str) -> None:
    """libzmq would use the lower 16 bits of the leading digits, which is another port."""
    for bind in (True, False):
        with pytest.raises(ConfigError, match=f"port '{port}' is not a number up to 65535"):
            ZmqEventPublisher(0, f"tcp://127.0.0.1:{port}", bind=bind)
    with pytest.raises(ConfigError, match="is not a number up to 65535"):
        ZmqEventPublisher(0, ANY, f"tcp://*:{port}")


@pytest.mark.parametrize("dialect", dialects(), ids=str)
def test_a_publisher_can_encode_every_dialect(context: Context, dialect: Dialect) -> None:
    """A publisher with a dialect sends the bytes of that release, and the decoder returns the same events."""
    events = [
        BlockStored([5, 2**64 - 1], 4, list(range(32)), 16, medium="GPU"),
        BlockRemoved([5], medium="GPU"),
        AllBlocksCleared(),
    ]
    with run_publisher(1, dialect=dialect) as publisher:
        subscriber = subscribe(context, publisher)
        publisher.publish(EventBatch(1.0, events))
        payload = receive(subscriber)[1]
    assert payload == encode_batch(EventBatch(1.0, events, 1), dialect)
    found = decode_batch(payload)
    assert not found.rejected
    assert [event.__class__ for event in found.batch.events] == [event.__class__ for event in events]


def test_a_dialect_is_selected_by_name() -> None:
    """A name has engine and release; an unknown one is rejected before any socket is opened."""
    with run_publisher(dialect="sglang-0.5.17", replay_endpoint=ANY) as publisher:
        assert publisher._dialect is not None
        assert publisher._dialect.name == "sglang-0.5.9"
    with pytest.raises(UnknownDialectError, match="orca"):
        ZmqEventPublisher(0, ANY, dialect="orca-1.0")


def test_a_batch_that_was_received_live_can_be_replayed_at_once(context: Context) -> None:
    """A batch is in the replay buffer before it is sent: a consumer that receives it live can request it at once."""
    with run_publisher(replay_endpoint=ANY) as publisher:
        subscriber, replay = subscribe(context, publisher), connect_dealer(context, publisher)
        for number in range(100):
            publisher.publish(batch(number))
            seq, payload = receive(subscriber)
            request_replay(replay, seq)
            assert (seq, payload) in read_reply(replay)


def test_a_full_queue_drops_batches_visibly_and_never_blocks(context: Context) -> None:
    """Batches beyond the limit are dropped and counted, and their numbers are missing on the wire. An empty batch after them
    reveals the gap, even if no other batch follows."""
    with run_publisher(max_queue_size=10) as publisher:
        subscriber = subscribe(context, publisher)
        with hold_publisher(publisher):  # uses up number 0
            for number in range(1, 18):
                publisher.publish(batch(number))
            stats = publisher.stats()
            assert stats.dropped["queue_full"] == 7
            assert (stats.accepted, stats.next_seq) == (11, 18)
        wait_until(lambda: publisher.stats().queued == 0, "the queue to drain")
        seen = [(seq, decode_batch(payload).batch) for seq, payload in [receive(subscriber) for _ in range(11)]]
        assert [seq for seq, _ in seen] == [*range(1, 11), 18]
        assert [shown.ts for _, shown in seen[:10]] == [*map(float, range(1, 11))]
        assert seen[10][1].events == []
        publisher.publish(batch(19))
        assert receive(subscriber)[0] == 19


def test_a_run_of_drops_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One record is logged at the start, regardless of how many batches are dropped."""
    with run_publisher(max_queue_size=1) as publisher:
        with caplog.at_level(logging.WARNING), hold_publisher(publisher):
            for number in range(500):
                publisher.publish(batch(number))
        wait_until(lambda: "queue of 1 batches is full" in caplog.text, "a line in the log")
    assert len([record for record in caplog.records if "is full" in record.message]) == 1


def test_a_run_of_drops_ends_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    """A line is logged at the first drop, another one after `quiet_time` seconds without a drop, and the same for the next
    run."""
    quiet = 10.0
    losses = LossLogger(logging.getLogger("kvevents"), "losses", quiet)
    with caplog.at_level(logging.WARNING):
        for now, count in ((0.0, 0), (1.0, 3), (2.0, 3), (quiet, 8), (2 * quiet, 8), (2 * quiet + 1, 8), (3 * quiet + 2, 8)):
            losses.update(count, now)
        assert [record.message for record in caplog.records] == [
            "losses; consumers see a gap; further drops are counted",
            "losses: ended after 8 dropped batches",
        ]
        losses.update(9, 100 * quiet, "detail")
        assert caplog.records[-1].message == "losses: detail; consumers see a gap; further drops are counted"


def test_a_batch_that_cannot_be_encoded_is_a_gap(context: Context, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted and logged, the thread continues, and consumers see the gap."""
    with run_publisher(replay_endpoint=ANY) as publisher, caplog.at_level(logging.WARNING):
        subscriber, replay = subscribe(context, publisher), connect_dealer(context, publisher)
        publisher.publish(batch(0))
        publisher.publish(EventBatch(1.0, [object()]))
        publisher.publish(EventBatch(1.0, [2**70]))
        publisher.publish(batch(3))
        seen: list[int] = []
        while len(seen) < 2:  # the valid ones; an empty batch may arrive between the invalid ones, to reveal the first gap
            seq, payload = receive(subscriber)
            seen += [seq] if msgspec.msgpack.decode(payload)[1] else []
        request_replay(replay, 0)
        replayed = numbers(read_reply(replay))
        assert seen[0] == 0
        assert 1 not in replayed
        assert set(seen) <= set(replayed)
        assert publisher.stats().dropped == {"queue_full": 0, "encode_failed": 2, "send_failed": 0, "ended": 0}
        wait_until(lambda: "cannot be encoded" in caplog.text, "a line in the log")
        assert "number" in caplog.text


def test_many_threads_can_publish(context: Context) -> None:
    """Every batch is received once or counted as dropped, and the batches of each thread stay in order."""
    threads, each = 4, 2_000
    with run_publisher(max_queue_size=500) as publisher:
        subscriber = subscribe(context, publisher)

        def publish(thread: int) -> None:
            for number in range(each):
                publisher.publish(EventBatch(float(number), [thread]))

        workers = [threading.Thread(target=publish, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        wait_until(lambda: publisher.stats().queued == 0, "the queue to drain")
        stats = publisher.stats()
        assert stats.accepted + stats.dropped["queue_full"] == threads * each
        seen: list[tuple[int, bytes]] = []
        while len(seen) < stats.published:
            received = receive(subscriber)
            seen += [received] if msgspec.msgpack.decode(received[1])[1] else []  # an empty one reveals a gap
    assert [seq for seq, _ in seen] == sorted({seq for seq, _ in seen})
    order: dict[int, list[float]] = {}
    for _, payload in seen:
        ts, (thread,), _ = msgspec.msgpack.decode(payload)
        order.setdefault(thread, []).append(ts)
    assert all(times == sorted(set(times)) for times in order.values())


def test_publish_wakes_a_sleeping_thread(context: Context) -> None:
    """The thread sleeps longer than the test may take, so only `publish` can wake it."""
    with run_publisher(settings=PublisherSettings(max_sleep=10 * DEADLINE, poll_interval=1e-6)) as publisher:
        subscriber = open_consumer(context, zmq.SUB)
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe(b"")

        def is_subscribed() -> bool:
            publisher.publish(batch())  # the thread polls after each batch
            return publisher.stats().subscribers == 1

        wait_until(is_subscribed, "the subscription")
        for number in range(20):
            sleep(0.002 * (number % 3))  # at different moments: just before the thread sleeps, and long after
            seq = publisher.stats().next_seq
            publisher.publish(batch(number))
            while receive(subscriber)[0] < seq:
                pass
        assert publisher.shutdown().complete, "a shutdown wakes it too"


def test_stats_account_for_every_batch(context: Context) -> None:
    """Every accepted batch is published, queued or failed; `buffered_bytes` is the size of the payloads."""
    with run_publisher(replay_endpoint=ANY, buffer_steps=2) as publisher:
        none = dict.fromkeys(("queue_full", "encode_failed", "send_failed", "ended"), 0)
        nothing = PublisherStats(dropped=none, history=publisher.stats().history)
        assert publisher.stats() == nothing
        subscriber = subscribe(context, publisher)
        for number in range(5):
            publisher.publish(batch(number))
        payloads = [receive(subscriber)[1] for _ in range(5)]
        wait_until(lambda: publisher.stats().queued == 0, "the last batch to be counted")
        wait_until(lambda: publisher.stats().buffered_batches == 2, "the others to be compacted")
        stats = publisher.stats()
        assert (stats.accepted, stats.published, stats.next_seq, stats.subscribers) == (5, 5, 5, 1)
        assert (stats.buffered_batches, stats.buffered_bytes) == (2, sum(map(len, payloads[-2:])))


def test_ended_subscriptions_are_no_longer_counted(context: Context) -> None:
    """A consumer that leaves is no longer counted; one with two topics counts twice."""
    with run_publisher() as publisher:
        subscriber = subscribe(context, publisher, b"one")
        subscriber.subscribe(b"two")
        wait_until(lambda: publisher.stats().subscribers == 2, "the second topic")
        other = subscribe(context, publisher, b"one")
        assert publisher.stats().subscribers == 3
        other.close()
        subscriber.close()
        wait_until(lambda: publisher.stats().subscribers == 0, "both to leave")


def test_the_repr_has_the_main_facts() -> None:
    """They are the rank, the endpoints, and the main counters."""
    with run_publisher(1, replay_endpoint=ANY) as publisher:
        publisher.publish(batch())
        wait_until(lambda: publisher.stats().published == 1, "the batch to be sent")
        shown = (
            f"<ZmqEventPublisher rank 1 bound to {publisher.endpoint}, replay at {publisher.replay_endpoint}: "
            "{}1 published, 0 queued, 0 dropped, 0 subscribers>"
        )
        assert repr(publisher) == shown.format("")
    assert repr(publisher) == shown.format("closed, ")


@pytest.mark.parametrize("name", ["data_parallel_rank", "buffer_steps", "hwm", "max_queue_size"])
def test_counts_cannot_be_negative(name: str) -> None:
    """The error names the parameter."""
    with pytest.raises(ConfigError, match=f"{name} is -1"):
        ZmqEventPublisher(**{"endpoint": ANY, name: -1})  # type: ignore[arg-type]


def test_a_queue_size_of_zero_means_unlimited() -> None:
    """It means the same as `queue.Queue(maxsize=0)` in the engines."""
    with run_publisher(max_queue_size=0) as publisher:
        with hold_publisher(publisher):
            for number in range(1_000):
                publisher.publish(batch(number))
        wait_until(lambda: publisher.stats().published == 1_000, "all to be sent")
        assert publisher.stats().dropped["queue_full"] == 0


def test_the_null_publisher_does_nothing() -> None:
    """It works with and without a rank, and after shutdown."""
    for publisher in (NullEventPublisher(), NullEventPublisher(3)):
        publisher.publish(batch())
        publisher.shutdown()
        publisher.publish(batch())
        assert publisher.stats() == PublisherStats()
        assert repr(publisher) == "<NullEventPublisher>"


def test_a_subclass_needs_only_publish_and_shutdown() -> None:
    """A user's own publisher needs only `publish` and `shutdown`."""

    class OwnPublisher(EventPublisher):
        def publish(self, events: Any) -> None:
            assert events is not None

        def shutdown(self) -> None:
            pass

    assert OwnPublisher(4)._data_parallel_rank == 4
    assert OwnPublisher().stats() == PublisherStats()
    with pytest.raises(TypeError):
        EventPublisher()  # type: ignore[abstract]
