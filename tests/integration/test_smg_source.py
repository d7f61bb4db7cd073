"""Workers of SMG as sources: snapshots, losses and restarts of a gRPC stream, as what they mean for trust and index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from cli_cases import run
from kvevents import Batch, Source, Subscriber, Trust
from kvevents.errors import ConfigError
from kvevents.index import PrefixIndex
from service_cases import MODEL, serving, wait_for
from smg_cases import BLOCK, Worker, batch, cleared, heartbeat, part, removed, stored

STORES = (batch(0, stored(1, 2)), batch(1, stored(3, parent=2)))


class Consumer:
    """A subscriber with an index."""

    def __init__(self, worker: Worker) -> None:
        self.index = PrefixIndex()
        self.subscriber = Subscriber(Source(worker.endpoint, name="w"), decode=False, sink=self.index)

    @property
    def trust(self) -> Trust:
        return self.subscriber.trust("w")

    def matched(self, *blocks: int) -> int:
        """Return how many of these blocks the worker holds as a prefix."""
        best = self.index.match([block for block in blocks for _ in range(BLOCK)]).best
        return 0 if best is None else best.tokens // BLOCK

    def receive_until(self, condition: Callable[[], object]) -> None:
        def holds() -> bool:
            self.subscriber.receive_many(timeout=0.02)
            return bool(condition())

        wait_for(f"the condition; trust is {self.trust!r}", holds)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(*STORES)
    yield worker
    worker.stop()


@pytest.fixture
def consumer(worker: Worker) -> Iterator[Consumer]:
    consumer = Consumer(worker)
    with consumer.subscriber:
        yield consumer


def test_history_and_live_batches_are_exact(worker: Worker, consumer: Consumer) -> None:
    consumer.receive_until(lambda: consumer.matched(1, 2, 3) == 3)
    worker.send(batch(2, stored(4, parent=3), removed(3)), heartbeat(2), batch(3, stored(5)))
    consumer.receive_until(lambda: consumer.matched(5) == 1 and consumer.trust == Trust.EXACT)
    assert (consumer.matched(1, 2, 3, 4), consumer.matched(1, 2)) == (2, 2)


def test_a_snapshot_represents_what_came_before_it(worker: Worker, consumer: Consumer) -> None:
    worker.history[:] = [part(8, 0, cleared(), stored(1, 2), count=2), part(9, 1, stored(3, parent=2), count=2)]
    worker.hang_up()
    worker.send(batch(10, stored(4, parent=3)))
    consumer.receive_until(lambda: consumer.matched(1, 2, 3, 4) == 4 and consumer.trust == Trust.EXACT)


@pytest.mark.parametrize("is_first", [False, True], ids=["in a call", "at the beginning of a call"])
def test_a_snapshot_is_exact_with_its_last_part_only(worker: Worker, consumer: Consumer, is_first: bool) -> None:
    """Until then the consumer lacks blocks. A call that ends before the last part leaves no doubt in the next one."""
    consumer.receive_until(lambda: consumer.matched(1, 2, 3) == 3)
    if is_first:
        worker.history.clear()
        worker.hang_up()
    snapshot = [part(8 + index, index, *([] if index else [cleared()]), stored(11 + index), count=3) for index in range(3)]
    worker.send(snapshot[0])
    consumer.receive_until(lambda: consumer.matched(11) == 1)
    assert "its sender reports" in consumer.trust.reason
    worker.send(snapshot[1])
    consumer.receive_until(lambda: consumer.matched(12) == 1)
    assert "its sender reports" in consumer.trust.reason
    worker.history[:] = snapshot[:2]
    worker.hang_up()
    consumer.receive_until(lambda: consumer.trust == Trust.STALE)
    consumer.receive_until(lambda: consumer.matched(12) == 1 and "its sender reports" in consumer.trust.reason)
    worker.send(snapshot[2], batch(11, stored(14)))
    consumer.receive_until(lambda: consumer.matched(14) == 1 and consumer.trust == Trust.EXACT)


@pytest.mark.parametrize(
    "history",
    [
        [batch(7, stored(1))],
        [part(8, 0, cleared(), stored(1), unknown_before=3)],
        [part(8, 0, cleared(), stored(1), count=2), batch(9, stored(2))],
        [batch(0, stored(1)), batch(5, stored(2))],
    ],
    ids=["live only", "a snapshot without the beginning", "a snapshot without the end", "a gap"],
)
def test_what_is_missing_is_reported(history: list[object]) -> None:
    worker = Worker(*history)
    consumer = Consumer(worker)
    with consumer.subscriber:
        consumer.receive_until(lambda: consumer.matched(1) == 1 and consumer.subscriber.status("w").counters.gaps)
        worker.send(batch(100, stored(9)))
        consumer.receive_until(lambda: consumer.matched(9) == 1)
        assert consumer.trust == Trust.DEGRADED
    worker.stop()


def test_batches_that_come_twice_count_once(worker: Worker, consumer: Consumer) -> None:
    worker.send(batch(2, removed(3)), STORES[1], batch(3, stored(4)))
    consumer.receive_until(lambda: consumer.matched(4) == 1 and consumer.trust == Trust.EXACT)
    assert consumer.matched(1, 2, 3) == 2


def test_a_worker_that_restarts_begins_empty(worker: Worker, consumer: Consumer) -> None:
    consumer.receive_until(lambda: consumer.matched(1, 2, 3) == 3)
    worker.stop()
    consumer.receive_until(lambda: consumer.trust == Trust.STALE)
    assert "worker" in consumer.trust.reason
    another = Worker(batch(0, stored(1)), port=worker.port)
    consumer.receive_until(lambda: consumer.matched(1, 2, 3) == 1)
    another.send(batch(1, stored(2, parent=1)))
    consumer.receive_until(lambda: consumer.matched(1, 2, 3) == 2 and consumer.trust == Trust.EXACT)
    another.stop()


def test_a_longer_life_is_not_taken_for_the_earlier_one(worker: Worker, consumer: Consumer) -> None:
    """The new engine has already published more batches than the consumer knows of the one before it."""
    consumer.receive_until(lambda: consumer.matched(1, 2, 3) == 3)
    worker.history[:] = [batch(number, stored(100 + number)) for number in range(9)]
    worker.hang_up()
    worker.send(batch(9, stored(200)))
    consumer.receive_until(lambda: consumer.matched(200) == 1 and consumer.trust == Trust.EXACT)
    assert [consumer.matched(block) for block in (1, 100, 101, 108)] == [0, 1, 1, 1]


def test_a_call_that_ends_is_repeated(worker: Worker, consumer: Consumer) -> None:
    """It is another incarnation, since nothing says that the engine is the same; all batches come again."""
    consumer.receive_until(lambda: consumer.matched(1, 2, 3) == 3)
    worker.hang_up()
    worker.send(batch(2, stored(4, parent=3)))
    consumer.receive_until(lambda: consumer.matched(1, 2, 3, 4) == 4)
    worker.send(batch(3, stored(5, parent=4)))
    consumer.receive_until(lambda: consumer.matched(1, 2, 3, 4, 5) == 5 and consumer.trust == Trust.EXACT)


def test_numbers_that_are_used_again_in_a_call_are_another_incarnation(worker: Worker, consumer: Consumer) -> None:
    """The servicer outlives its engine and says nothing. Its later batches have the numbers of the engine before it."""
    consumer.receive_until(lambda: consumer.matched(1, 2, 3) == 3)
    worker.send(*(batch(number, stored(100 + number), time=50.0 + number) for number in range(2)))
    consumer.receive_until(lambda: consumer.matched(101) == 1 and consumer.trust == Trust.EXACT)
    assert (consumer.matched(1, 2, 3), consumer.matched(100)) == (0, 1)


@pytest.mark.parametrize("known", [1, 2])
def test_a_call_without_history_does_not_continue_the_one_before_it(worker: Worker, consumer: Consumer, known: int) -> None:
    """The engine restarts, and its servicer sends what comes next only. The numbers of the two calls fit by chance."""
    worker.history[:] = [batch(number, stored(1 + number)) for number in range(known)]
    worker.hang_up()
    worker.send(batch(known, stored(50)))
    consumer.receive_until(lambda: consumer.matched(50) == 1 and consumer.trust == Trust.EXACT)
    worker.history.clear()
    worker.hang_up()
    wait_for("the next call", lambda: worker.calls or consumer.subscriber.receive_many(timeout=0.02))
    for number in range(30, 40):
        worker.send(batch(number, stored(100 + number)))
        consumer.receive_until(lambda number=number: consumer.matched(100 + number) == 1)  # type: ignore[misc]
        assert consumer.trust != Trust.EXACT or consumer.matched(1) == 0
    assert consumer.trust == Trust.DEGRADED
    assert consumer.matched(1) == 0


def test_a_worker_without_events_says_how_to_turn_them_on() -> None:
    worker = Worker(has_events=False)
    consumer = Consumer(worker)
    with consumer.subscriber:
        consumer.receive_until(lambda: "--kv-events-config" in consumer.trust.reason)
    worker.stop()


def test_fields_arrive() -> None:
    worker = Worker(
        batch(0, stored(1, tier=2, lora_name="l"), dp_rank=3), batch(1, stored(2), stored(3, medium="GPU"), dp_rank=3)
    )
    with Subscriber(Source(worker.endpoint, name="w")) as subscriber:
        events: list[Any] = []
        while len(events) < 3:
            for delivery in subscriber.receive_many(timeout=5):
                assert isinstance(delivery, Batch)
                assert delivery.data_parallel_rank == 3
                events += delivery.events
        assert [(each.block_hashes, each.medium, each.lora_name) for each in events] == [
            ([1], "CPU", "l"),
            ([2], None, None),
            ([3], "GPU", None),
        ]
    worker.stop()


@pytest.mark.parametrize("more", [{"bind": True}, {"topic": "t"}])
def test_what_grpc_does_not_have_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="grpc://"):
        Subscriber(Source("grpc://127.0.0.1:1", **more))  # type: ignore[arg-type]


def test_the_service_follows_a_worker_that_is_registered_or_configured(worker: Worker) -> None:
    prompt = [block for block in (1, 2, 3) for _ in range(BLOCK)]
    with serving("--model", MODEL, "--worker", f"configured={worker.endpoint}") as service:
        assert service.register("registered", worker.endpoint, block_size=BLOCK).status == 201
        worker.send(batch(2, stored(9)))
        for name in ("configured", "registered"):
            service.wait_for_prefix(name, prompt, 3 * BLOCK)
        numbers = count(3)

        def both_are_exact() -> bool:
            worker.send(batch(number := next(numbers), stored(100 + number)))
            return {service.trust(name)[0] for name in ("configured", "registered")} == {"EXACT"}

        wait_for("both to be EXACT", both_are_exact)
        worker.stop()
        wait_for(
            "the end of both streams", lambda: {service.trust(name)[0] for name in ("configured", "registered")} == {"STALE"}
        )
        assert service.post("/register", instance_id="x", endpoint="grpc://192.0.2.1:99999", model_name=MODEL).status == 400


@pytest.mark.parametrize("endpoint", ["grpc://127.0.0.1", "grpc://127.0.0.1:65536", "grpc://:1", "grpc://*:50051"])
def test_an_invalid_endpoint_is_named_as_given(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="invalid endpoint '"):
        Source(endpoint)
    done = run("serve", "--check", "--model", MODEL, "--worker", f"w={endpoint}")
    assert done.code == 2
    assert endpoint.removeprefix("grpc://") in done.err
    assert "expected grpc://" in done.err or "connect" in done.err
