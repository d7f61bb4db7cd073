"""`BatchDeque` compared with a list: after any additions and removals both have the same batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvevents.publisher.compaction import SequencedPayload
from kvevents.publisher.replay_buffer import BatchDeque

STEPS = st.lists(st.tuples(st.sampled_from([0, 1, 2, 63, 64, 200]), st.integers(0, 3), st.floats(0.0, 1.0)), max_size=30)
"""The number of added batches, of missing numbers before each batch, and the part that is removed then."""


@given(STEPS)
def test_it_has_the_contents_of_a_list(steps: list[tuple[int, int, float]]) -> None:
    deque, model, number = BatchDeque(), list[SequencedPayload](), 0
    for count, missing, part in steps:
        burst = [(number := number + 1 + missing, b"x" * (number % 7)) for _ in range(count)]
        deque.add(burst)
        model += burst
        taken = int(part * len(model))
        if taken:
            assert deque.popleft_many(taken) == model[:taken]
            del model[:taken]
        assert list(deque) == model
        assert len(deque) == len(model)
        assert deque.bytes == sum(len(payload) for _, payload in model)
        assert not model or deque[-1] == model[-1]
        first = model[0][0] if model else number
        for size in {0, 1, 6, 20, 1_000} if model else ():
            within = deque.count_within(size)
            assert within == 1 or sum(len(payload) for _, payload in model[:within]) <= size
            assert within == len(model) or sum(len(payload) for _, payload in model[: within + 1]) > size
        for start in {0, first, first + 1, (first + number) // 2, number, number + 1}:
            assert deque.batches_from(start) == [batch for batch in model if batch[0] >= start]
