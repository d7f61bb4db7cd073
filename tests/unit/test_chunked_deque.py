"""`ChunkedDeque` against a list: after any additions and removals it has the same batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvevents.publisher.compaction import SequencedPayload
from kvevents.publisher.replay_buffer import CHUNK, ChunkedDeque

STEPS = st.lists(
    st.tuples(st.sampled_from([0, 1, 2, CHUNK - 1, CHUNK, 3 * CHUNK]), st.integers(0, 3), st.floats(0.0, 1.0)), max_size=30
)
"""How many are added, how many numbers are left out before each, and which part is taken out then."""


@given(STEPS)
def test_chunks_are_one_list(steps: list[tuple[int, int, float]]) -> None:
    kept, model, number = ChunkedDeque(), list[SequencedPayload](), 0
    for count, holes, part in steps:
        burst = [(number := number + 1 + holes, b"x" * (number % 7)) for _ in range(count)]
        kept.extend(burst)
        model += burst
        taken = int(part * len(model))
        if taken:
            assert kept.popleft_many(taken) == model[:taken]
            del model[:taken]
        assert list(kept) == model
        assert len(kept) == len(model)
        assert kept.bytes == sum(len(payload) for _, payload in model)
        assert not model or kept.newest == model[-1][0]
        first = model[0][0] if model else number
        for size in {0, 1, 6, 20, 1_000} if model else ():
            within = kept.count_within(size)
            assert within == 1 or sum(len(payload) for _, payload in model[:within]) <= size
            assert within == len(model) or sum(len(payload) for _, payload in model[: within + 1]) > size
        for start in {0, first, first + 1, (first + number) // 2, number, number + 1}:
            assert kept.batches_from(start) == [batch for batch in model if batch[0] >= start]


def test_the_callers_list_is_copied() -> None:
    kept, burst = ChunkedDeque(), [(number, b"") for number in range(CHUNK)]
    kept.extend(burst)
    burst.clear()
    assert [number for number, _ in kept] == list(range(CHUNK))
