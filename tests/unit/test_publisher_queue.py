"""The queue and the sequence numbers of `QueuedPublisher` agree with a model, without sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ClosedError
from kvevents.publisher.base import QueuedPublisher
from kvevents.publisher.replay_buffer import ReplayBuffer
from publisher_cases import DEADLINE, batch, wait_until

BURST = 64


class QueueOnly(QueuedPublisher):
    """A publisher from which the test takes batches."""

    def __init__(self, max_queue_size: int) -> None:
        super().__init__(0, max_queue_size, BURST)
        self.faults: list[int] = []

    def take(self) -> list[tuple[int, Any]]:
        return self._take_burst(self._encode)

    def _encode(self, new_batch: Any) -> bytes:
        if new_batch.ts % 5 == 3:
            raise ValueError("every fifth has no bytes")
        return str(int(new_batch.ts)).encode()

    def _on_encode_failure(self, seq: int, error: BaseException) -> None:
        assert "fifth" in str(error)
        self.faults.append(seq)

    def shutdown(self) -> None:
        self._close_queue()


@given(steps=st.lists(st.integers(0, 12) | st.none(), max_size=40), size=st.integers(1, 10))
def test_the_number_of_a_batch_is_the_number_of_its_call(steps: list[int | None], size: int) -> None:
    """The n-th call of `publish` has number n or leaves a gap, however publishing (a number) and taking (None) alternate."""
    publisher = QueueOnly(size)
    called = waiting = 0
    dropped: set[int] = set()
    taken: list[tuple[int, bytes]] = []
    for step in steps:
        for _ in range(step or 0):
            before = publisher._dropped_full
            publisher.publish(batch(called))
            if publisher._dropped_full > before:
                dropped.add(called)
            else:
                waiting += 1
            called += 1
        if step is None:
            taken += publisher.take()
            waiting = 0
        assert publisher._next_seq_and_accepted() == (called, called - len(dropped))
    while publisher._queue:
        taken += publisher.take()
    unencodable = {number for number in range(called) if number % 5 == 3} - dropped
    assert taken == [(number, str(number).encode()) for number in range(called) if number not in dropped | unencodable]
    assert set(publisher.faults) == unencodable
    assert publisher._next_seq_and_accepted() == (called, called - len(dropped))


def test_the_size_of_a_burst_is_limited() -> None:
    """A long queue is taken in bursts, so that the first batches do not wait for the last."""
    publisher = QueueOnly(0)
    for _ in range(BURST + 5):
        publisher.publish(batch(0))
    assert [len(publisher.take()) for _ in range(3)] == [BURST, 5, 0]


def test_a_sleep_ends_at_a_batch_a_close_or_the_timeout() -> None:
    publisher = QueueOnly(1)
    publisher._sleep(0.001)
    assert not publisher._is_asleep
    publisher.publish(batch(0))
    publisher._sleep(DEADLINE)  # returns at once: a batch is queued
    publisher.take()
    wakes: list[Callable[[], None]] = [lambda: publisher.publish(batch(1)), publisher.shutdown]
    for wake in wakes:
        sleeper = threading.Thread(target=publisher._sleep, args=(10 * DEADLINE,))
        sleeper.start()
        wait_until(lambda: publisher._is_asleep, "it to sleep")
        wake()
        sleeper.join(DEADLINE)
        assert not sleeper.is_alive()
        publisher.take()
    publisher._sleep(10 * DEADLINE)  # returns at once: closed


def test_publishing_to_a_closed_queue_raises() -> None:
    """`publish` raises a RuntimeError that says that the publisher is closed, as in the engines."""
    publisher = QueueOnly(3)
    publisher.shutdown()
    with pytest.raises(ClosedError, match=r"Publisher is closed: shutdown\(\) was called"):
        publisher.publish(batch())
    with pytest.raises(RuntimeError):
        publisher.publish(batch())


@given(
    numbers=st.sets(st.integers(0, 60), max_size=40),
    steps=st.integers(0, 20),
    start=st.integers(0, 2**64 - 1) | st.integers(0, 65),
)
def test_a_replay_buffer_agrees_with_a_list(numbers: set[int], steps: int, start: int) -> None:
    """The buffer holds the last `steps` batches and returns the ones from `start` on, with and without gaps."""
    batches = [(number, bytes([number])) for number in sorted(numbers)]
    buffer = ReplayBuffer(steps)
    for position in range(0, len(batches), 7):
        buffer.extend(batches[position : position + 7])
    buffered = batches[-steps:] if steps else []
    assert buffer.batches_from(start) == [item for item in buffered if item[0] >= start]
    assert buffer.size() == (len(buffered), len(buffered)) == (len(buffer), len(buffered))
