"""The queue and the sequence numbers of a publisher agree with a model, whatever waits while its thread is busy."""

from __future__ import annotations

from contextlib import ExitStack

import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvevents.events import EventBatch
from kvevents.wire import decode_batch
from publisher_cases import (  # noqa: F401 - fixtures must be imported
    DEADLINE,
    QUICK,
    Gate,
    Socket,
    batch,
    consumers_context,
    hold_publisher,
    receive,
    run_publisher,
    subscribe,
    wait_until,
)

Context = zmq.Context[Socket]


def is_encodable(number: int) -> bool:
    return number % 5 != 3


@settings(max_examples=60)
@given(bursts=st.lists(st.integers(0, 12), min_size=1, max_size=6), size=st.integers(1, 10), taken=st.integers(1, 6))
def test_the_number_of_a_batch_is_the_number_of_its_call(bursts: list[int], size: int, taken: int) -> None:
    """The n-th batch has number n or leaves a gap, also if the queue is full or the batch cannot be encoded. A gap at the end
    is revealed by an empty batch, which has the next number."""
    expected: list[tuple[int, float | None]] = []
    number = dropped = own = 0
    with ExitStack() as undo:
        context: Context = zmq.Context()
        undo.callback(context.destroy, linger=0)
        publisher = undo.enter_context(run_publisher(max_queue_size=size, settings=replace(QUICK, burst=taken)))
        subscriber = subscribe(context, publisher)
        for burst in bursts:
            with hold_publisher(publisher):
                number += 1
                has_tail_gap = True
                for position in range(burst):
                    publisher.publish(batch(number) if is_encodable(number) else EventBatch(0.0, [object()]))
                    has_tail_gap = position >= size or not is_encodable(number)
                    dropped += position >= size
                    expected += [] if has_tail_gap else [(number, float(number))]
                    number += 1
                stats = publisher.stats()
                assert (stats.next_seq, stats.accepted) == (number, number - dropped - own)
                assert stats.dropped["queue_full"] == dropped
            if has_tail_gap:
                expected.append((number, None))
                number += 1
                own += 1
            wait_until(lambda: publisher.stats().next_seq == number, "the gap to be revealed")  # noqa: B023
            wait_until(lambda: publisher.stats().queued == 0, "the queue to drain")
        found = [(seq, decode_batch(payload).batch) for seq, payload in [receive(subscriber) for _ in expected]]
        assert [(seq, shown.ts if shown.events else None) for seq, shown in found] == expected


def test_the_size_of_a_burst_is_limited(context: Context) -> None:
    """A long queue is taken in bursts, so that the first batches do not wait for the last."""
    last = Gate()
    with run_publisher(settings=replace(QUICK, burst=2)) as publisher:
        subscriber = subscribe(context, publisher)
        with hold_publisher(publisher):
            for each in (batch(1), batch(2), last):
                publisher.publish(each)
        assert [receive(subscriber)[0] for _ in range(2)] == [1, 2]
        assert publisher.stats().dropped["encode_failed"] == 1, "the last one is still being encoded"
        last.open()


def test_batches_after_dropped_ones_have_the_numbers_of_their_calls(context: Context) -> None:
    """The queue has room again while the numbers of dropped batches are still in it."""
    with run_publisher(max_queue_size=3, settings=replace(QUICK, burst=3)) as publisher:
        subscriber = subscribe(context, publisher)
        gate = Gate()
        with hold_publisher(publisher):
            for each in (gate, *map(batch, range(2, 6))):
                publisher.publish(each)
            assert publisher.stats().dropped["queue_full"] == 2
        assert gate.reached.wait(DEADLINE)
        for number in (6, 7):
            publisher.publish(batch(number))
        gate.open()
        assert [receive(subscriber)[0] for _ in range(4)] == [2, 3, 6, 7]
        assert publisher.stats().next_seq == 8
