"""The functions of `kvevents.wire.decode` that read only both ends of a payload agree with the decoded batch."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.wire import Dialect, decode_batch, dialects, encode_batch
from kvevents.wire.decode import begins_with_clear, ends_with_digest, rank_of

CLEAR = AllBlocksCleared()
STORE = BlockStored([1], None, [1], 1)
PART = BlockRemoved([], heartbeat=Heartbeat("0" * 32, 10.0, "DEGRADED", "more is to come", 1 << 60))
DIALECTS = pytest.mark.parametrize("dialect", [None, *dialects()], ids=str)


@DIALECTS
@pytest.mark.parametrize("count", [0, 1, 20])
def test_a_batch_that_begins_with_a_clear_is_recognised_in_every_dialect(dialect: Dialect | None, count: int) -> None:
    """Any events can follow. A batch with a later clear, or without a clear, does not begin with a clear."""
    stores: list[KVEvent] = [STORE] * count
    for events, expected in (([CLEAR, *stores], True), ([STORE, CLEAR, *stores], False), (stores, False)):
        assert begins_with_clear(encode_batch(KVEventBatch(1.5, events, 3), dialect)) is expected


@DIALECTS
def test_a_batch_that_ends_with_a_heartbeat_is_recognised_in_every_dialect(dialect: Dialect | None) -> None:
    """The parts of a snapshot end with a heartbeat."""
    cases: list[tuple[list[KVEvent], bool]] = [
        ([CLEAR, STORE, PART], True),
        ([CLEAR, STORE], False),
        ([PART, *[STORE] * 100], False),
    ]
    for events, expected in cases:
        assert ends_with_digest(encode_batch(KVEventBatch(1.5, events, 3), dialect)) is expected


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (["AllBlocksCleared"], True),
        (msgspec.msgpack.encode(["AllBlocksCleared"]), True),
        ({"type": "AllBlocksCleared"}, True),
        (["AllBlocksCleared", "gpu"], False),
        ({"type": "AllBlocksCleared", "medium": "gpu"}, False),
        (["AllBlocksCleared", "x" * 10_000], False),
        ("AllBlocksCleared", False),
        (["BlockRemoved", [1], "AllBlocksCleared"], False),
    ],
)
def test_only_a_clear_of_the_whole_cache_is_recognised(event: Any, expected: bool) -> None:
    """The clear can be wrapped in a bin. A clear of one tier or with unknown fields is not recognised."""
    assert begins_with_clear(msgspec.msgpack.encode([1.5, [event, ["BlockRemoved", [1]]]])) is expected


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_any_input_does_not_raise(before: bytes, after: bytes) -> None:
    """A batch is not recognised as a snapshot if its first decoded event is not a clear."""
    payload = before + b"\xb0AllBlocksCleared" + after
    decoded = decode_batch(payload)
    if begins_with_clear(payload) and not decoded.rejected:
        assert decoded.batch.events[0] == CLEAR
    for cut in range(len(payload)):
        begins_with_clear(payload[:cut])
        ends_with_digest(payload[:cut])


def test_the_beginning_of_a_large_payload_is_enough() -> None:
    """For a batch with more events than 16 bits can count, the first bytes give the same result as the whole payload."""
    whole = encode_batch(KVEventBatch(1.5, [CLEAR, *[STORE] * 70_000]))
    assert begins_with_clear(whole)
    assert begins_with_clear(whole[:512])


@DIALECTS
@pytest.mark.parametrize("rank", [None, 0, 3, 300])
def test_the_rank_of_a_batch_is_read_in_every_dialect(dialect: Dialect | None, rank: int | None) -> None:
    """It is the rank of the decoded batch."""
    payload = encode_batch(KVEventBatch(1.5, [CLEAR, STORE, PART], rank), dialect)
    assert rank_of(payload) == decode_batch(payload).batch.data_parallel_rank


@given(st.binary())
def test_a_payload_without_a_rank_states_none(payload: bytes) -> None:
    """Bytes that are no batch raise nothing."""
    assert rank_of(payload) is None or isinstance(rank_of(payload), int)
